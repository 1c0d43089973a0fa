//! The kubelet of the stage: it speaks the real gRPC doors over Unix sockets, with the headers of a real kubelet, and runs no
//! containers: the [`runtime`](super::runtime) says what they would get.

mod claims;
mod containers;
mod listing;
mod plugins;
mod wire;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::containers::Running;
use self::plugins::Registry;
use self::wire::Calls;
use super::faults::Faults;
use super::hand::Hand;
use super::runtime::Outfit;
use crate::node::run::NodeOptions;
use crate::testcluster::api::{ApiServer, object};

/// A node: its name and its directories.
#[derive(Clone, Debug)]
pub struct NodePlace {
    /// The name of the Node object.
    pub name: String,
    /// kubelet's root directory.
    pub root: PathBuf,
    /// The directory of kubelet's device plugin socket.
    pub device_plugins: PathBuf,
    /// The directory of CDI files.
    pub cdi: PathBuf,
    /// Where this process sees the node's `/dev`.
    pub dev: PathBuf,
}

impl NodePlace {
    /// A node with everything in one directory, but for the devices, which are the machine's.
    pub fn within(name: &str, directory: &Path) -> Self {
        Self {
            name: name.to_owned(),
            root: directory.join("kubelet"),
            device_plugins: directory.join("kubelet/device-plugins"),
            cdi: directory.join("cdi"),
            dev: "/dev".into(),
        }
    }

    /// Makes the directories.
    pub fn make(&self) -> std::io::Result<()> {
        for needed in [
            &self.root.join("plugins_registry"),
            &self.root.join("pods"),
            &self.device_plugins,
            &self.cdi,
        ] {
            std::fs::create_dir_all(needed)?;
        }
        Ok(())
    }

    /// What a companion of this node is told.
    pub fn options(&self, configuration: &Path, client: kube::Client) -> NodeOptions {
        let mut options = NodeOptions::new(&self.name, configuration, client);
        options.kubelet_root.clone_from(&self.root);
        options.device_plugin_dir.clone_from(&self.device_plugins);
        options.cdi_dir.clone_from(&self.cdi);
        options.host.dev.clone_from(&self.dev);
        options
    }
}

/// What the containers of the node's pods have got, by namespace and name of the pod and by container.
pub type Outfits = BTreeMap<(String, String), BTreeMap<String, Outfit>>;

/// A kubelet that can be asked what it has done.
#[derive(Clone, Debug)]
pub struct Kubelet {
    place: NodePlace,
    hand: Hand,
    registry: Registry,
    calls: Calls,
    running: Arc<Mutex<BTreeMap<String, Running>>>,
    outfits: Arc<Mutex<Outfits>>,
}

impl Kubelet {
    /// The kubelet of a node. Nothing happens before it runs.
    pub fn new(server: &ApiServer, place: NodePlace) -> Self {
        Self::calling(server, place, Calls::default())
    }

    /// The same, where something can go wrong with its calls of a program.
    pub fn with_faults(server: &ApiServer, place: NodePlace, faults: &Faults, program: &'static str) -> Self {
        Self::calling(server, place, Calls::new(faults.clone(), program))
    }

    fn calling(server: &ApiServer, place: NodePlace, calls: Calls) -> Self {
        Self {
            hand: Hand::new(server, "kubelet"),
            registry: Registry::new(place.device_plugins.clone(), calls.clone()),
            calls,
            place,
            running: Arc::default(),
            outfits: Arc::default(),
        }
    }

    /// What the containers have got.
    pub fn outfits(&self) -> Outfits {
        self.outfits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Runs until the shutdown. The directories must exist.
    pub async fn run(self, shutdown: CancellationToken) -> std::io::Result<()> {
        self.announce();
        let mut parts = JoinSet::new();
        parts.spawn(self.registry.clone().serve(shutdown.clone()));
        parts.spawn(listing::serve(
            self.clone(),
            self.place.root.clone(),
            shutdown.clone(),
        ));
        let watched = self.place.root.join("plugins_registry");
        let watching = self.registry.clone().watch(watched, shutdown.clone());
        parts.spawn(async move {
            watching.await;
            Ok(())
        });
        let mut changes = self.hand.server.changes();
        let mut plugins = self.registry.changed.subscribe();
        loop {
            changes.borrow_and_update();
            plugins.borrow_and_update();
            self.report();
            self.pass().await;
            tokio::select! {
                () = shutdown.cancelled() => break,
                Ok(()) = changes.changed() => {}
                Ok(()) = plugins.changed() => {}
                Some(Ok(Err(error))) = parts.join_next() => return Err(error),
                // A prepare that failed is tried again; the real kubelet takes up to a minute and a half.
                () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            }
        }
        while parts.join_next().await.is_some() {}
        Ok(())
    }

    /// Makes the Node object.
    fn announce(&self) {
        let name = &self.place.name;
        let node = json!({ "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } } });
        // It may be there already, from an earlier run.
        let _ = self.hand.create("nodes", "", node);
    }

    /// Writes what the node has, if that has changed.
    fn report(&self) {
        let Some(node) = self.hand.get("nodes", "", &self.place.name) else {
            return;
        };
        let mut capacity = json!({ "cpu": "2", "memory": "4Gi", "pods": "110" });
        let mut allocatable = capacity.clone();
        self.registry.with(|plugins| {
            for (resource, (_, devices)) in &plugins.resources {
                let healthy = devices.values().filter(|healthy| **healthy).count();
                capacity[resource] = devices.len().to_string().into();
                allocatable[resource] = healthy.to_string().into();
            }
        });
        let ready = json!([{ "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status" }]);
        let status = json!({
            "capacity": capacity, "allocatable": allocatable, "conditions": ready,
            "nodeInfo": { "kubeletVersion": "v1.30.14", "containerRuntimeVersion": "stage://0" },
        });
        if node.get("status") != Some(&status) {
            // Another change of the node brings another pass.
            let _ = self
                .hand
                .merge("nodes", &node, "status", json!({ "status": status }));
        }
    }

    /// Starts and stops what is to be.
    async fn pass(&self) {
        let pods: Vec<Value> = self
            .hand
            .list("pods")
            .into_iter()
            .filter(|pod| object::text(pod, "/spec/nodeName") == self.place.name)
            .collect();
        self.stop_missing(&pods).await;
        for pod in &pods {
            if object::is_deleting(pod) {
                self.stop(pod).await;
            } else if object::text(pod, "/status/phase") == "Pending" {
                self.start(pod).await;
            }
        }
    }
}
