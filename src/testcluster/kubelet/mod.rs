//! The test cluster's kubelet. It speaks the real gRPC APIs over Unix sockets with a real kubelet's headers. It runs no
//! containers; the [`runtime`](super::runtime) computes their devices, environment and mounts.

mod claims;
mod containers;
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
use super::client::ApiClient;
use super::faults::Faults;
use super::runtime::Outfit;
use crate::node::run::NodeOptions;
use crate::testcluster::api::{ApiServer, Mode, object};

/// A node's name and directories.
#[derive(Clone, Debug)]
pub struct NodePlace {
    /// Name of the Node object.
    pub name: String,
    /// Kubelet's root directory.
    pub root: PathBuf,
    /// Directory of kubelet's device plugin socket.
    pub device_plugins: PathBuf,
    /// Directory of CDI files.
    pub cdi: PathBuf,
    /// The node's `/dev` as this process sees it.
    pub dev: PathBuf,
}

impl NodePlace {
    /// Returns a node with all directories below `directory`; its devices are the machine's.
    pub fn within(name: &str, directory: &Path) -> Self {
        Self {
            name: name.to_owned(),
            root: directory.join("kubelet"),
            device_plugins: directory.join("kubelet/device-plugins"),
            cdi: directory.join("cdi"),
            dev: "/dev".into(),
        }
    }

    /// Creates the directories.
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

    /// Returns the options of a companion for this node.
    pub fn options(&self, configuration: &Path, client: kube::Client) -> NodeOptions {
        let mut options = NodeOptions::new(&self.name, configuration, client);
        options.kubelet_root.clone_from(&self.root);
        options.device_plugin_dir.clone_from(&self.device_plugins);
        options.cdi_dir.clone_from(&self.cdi);
        options.host.dev.clone_from(&self.dev);
        options
    }
}

/// Devices, environment and mounts of the node's containers, by pod namespace and name, then by container.
pub type Outfits = BTreeMap<(String, String), BTreeMap<String, Outfit>>;

/// A kubelet whose actions can be inspected.
#[derive(Clone, Debug)]
pub struct Kubelet {
    place: NodePlace,
    client: ApiClient,
    registry: Registry,
    calls: Calls,
    running: Arc<Mutex<BTreeMap<String, Running>>>,
    outfits: Arc<Mutex<Outfits>>,
}

impl Kubelet {
    /// Creates a kubelet for a node. It has no effect before it runs.
    pub fn new(server: &ApiServer, place: NodePlace) -> Self {
        Self::calling(server, place, Calls::default())
    }

    /// Like [`Kubelet::new`], with fault injection for its calls to a program.
    pub fn with_faults(server: &ApiServer, place: NodePlace, faults: &Faults, program: &'static str) -> Self {
        Self::calling(server, place, Calls::new(faults.clone(), program))
    }

    fn calling(server: &ApiServer, place: NodePlace, calls: Calls) -> Self {
        Self {
            client: ApiClient::new(server, "kubelet"),
            registry: Registry::new(server.mode(), place.device_plugins.clone(), calls.clone()),
            calls,
            place,
            running: Arc::default(),
            outfits: Arc::default(),
        }
    }

    /// Returns the devices, environment and mounts of all containers.
    pub fn outfits(&self) -> Outfits {
        self.outfits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Returns whether kubelet can call a plugin of the driver.
    pub(crate) fn has_plugin(&self, driver: &str) -> bool {
        self.registry.with(|plugins| plugins.driver(driver).is_some())
    }

    /// Runs until shutdown. The directories must exist.
    pub async fn run(self, shutdown: CancellationToken) -> std::io::Result<()> {
        self.announce();
        let mut parts = JoinSet::new();
        if self.client.server.mode() == Mode::Structured {
            // Pods could otherwise be scheduled to drivers that never come back.
            self.wipe_slices(None);
            parts.spawn(self.clone().wipe(shutdown.clone()));
        }
        parts.spawn(self.registry.clone().serve(shutdown.clone()));
        parts.spawn(containers::serve(
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
        let mut changes = self.client.server.changes();
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
                // Retries failed prepares; the real kubelet takes up to a minute and a half.
                () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            }
        }
        while parts.join_next().await.is_some() {}
        Ok(())
    }

    /// Creates the Node object.
    fn announce(&self) {
        let name = &self.place.name;
        let node = json!({ "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } } });
        // It may exist from an earlier run.
        let _ = self.client.create("nodes", "", node);
    }

    /// Deletes the ResourceSlices of drivers without a connected plugin until shutdown.
    async fn wipe(self, shutdown: CancellationToken) -> std::io::Result<()> {
        loop {
            for driver in self.registry.with(plugins::Plugins::take_wipes) {
                self.wipe_slices(Some(&driver));
            }
            tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                () = tokio::time::sleep(plugins::LOOK) => {}
            }
        }
    }

    /// Deletes the node's ResourceSlices of a driver, or of all drivers.
    fn wipe_slices(&self, driver: Option<&str>) {
        for slice in self.client.list("resourceslices") {
            let is_of_driver = driver.is_none_or(|driver| object::text(&slice, "/spec/driver") == driver);
            if is_of_driver && object::text(&slice, "/spec/nodeName") == self.place.name {
                // A slice that is deleted meanwhile needs no deletion.
                let _ = self.client.delete("resourceslices", &slice, None);
            }
        }
    }

    /// Updates the node's status if it has changed.
    fn report(&self) {
        let Some(node) = self.client.get("nodes", "", &self.place.name) else {
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
            "nodeInfo": {
                "kubeletVersion": self.client.server.mode().kubernetes(), "containerRuntimeVersion": "stage://0",
            },
        });
        if node.get("status") != Some(&status) {
            // A conflict means another change of the node, which triggers another pass.
            let _ = self
                .client
                .merge("nodes", &node, "status", json!({ "status": status }));
        }
    }

    /// Starts and stops pods.
    async fn pass(&self) {
        let pods: Vec<Value> = self
            .client
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testcluster::source::Source;

    #[test]
    fn only_slices_of_the_node_and_driver_are_deleted() {
        let server = ApiServer::with_mode(Arc::new(Source::system()), Mode::Structured);
        let kubelet = Kubelet::new(&server, NodePlace::within("node-a", Path::new("/nowhere")));
        for (name, driver, node) in [
            ("a", "x.dev", "node-a"),
            ("b", "y.dev", "node-a"),
            ("c", "x.dev", "node-b"),
        ] {
            let pool = json!({ "name": node, "generation": 1, "resourceSliceCount": 1 });
            let spec = json!({ "driver": driver, "nodeName": node, "pool": pool });
            let slice = json!({ "metadata": { "name": name }, "spec": spec });
            kubelet.client.create("resourceslices", "", slice).unwrap();
        }
        let names = || {
            let slices = kubelet.client.list("resourceslices");
            slices.iter().map(object::name).collect::<Vec<_>>().join(" ")
        };
        kubelet.wipe_slices(Some("x.dev"));
        assert_eq!(names(), "b c");
        kubelet.wipe_slices(None);
        assert_eq!(names(), "c");
    }
}
