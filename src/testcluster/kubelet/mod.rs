//! The test cluster's kubelet. It speaks the real gRPC APIs over Unix sockets with a real kubelet's headers. It runs no
//! containers; the [`runtime`](super::runtime) computes their devices, environment and mounts.

mod claims;
mod grpc_client;
mod plugins;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use self::claims::ClaimManager;
use self::grpc_client::{GrpcClient, GrpcError};
use self::plugins::Registry;
use super::client::ApiClient;
use super::faults::Faults;
use super::runtime::ContainerConfig;
use crate::api::proto::device_plugin_v1beta1::{AllocateRequest, ContainerAllocateRequest};
use crate::api::proto::pod_resources_v1 as v1;
use crate::api::proto::pod_resources_v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use crate::node::run::NodeOptions;
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::api::{ApiServer, ClusterMode};
use crate::testcluster::scheduler::extended_resources;

/// Deadline of Allocate; kubelet has none.
const ALLOCATE: Duration = Duration::from_secs(45);

/// Reason of the event of a failed Prepare.
const PREPARE_FAILED: &str = "FailedPrepareDynamicResources";

/// Why a pod does not start.
enum StartError {
    /// Temporary.
    Later(&'static str, String),
    /// Permanent: admission has failed.
    Never(String),
}

/// A node's name and directories.
#[derive(Clone, Debug)]
pub struct TestNode {
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

impl TestNode {
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
pub type ContainerConfigs = BTreeMap<(String, String), BTreeMap<String, ContainerConfig>>;

/// Device plugin devices of pods, by pod uid and resource.
type PodDevices = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// A kubelet whose actions can be inspected.
#[derive(Clone, Debug)]
pub struct Kubelet {
    node: TestNode,
    client: ApiClient,
    registry: Registry,
    grpc: GrpcClient,
    claims: ClaimManager,
    devices: Arc<Mutex<PodDevices>>,
    container_configs: Arc<Mutex<ContainerConfigs>>,
}

impl Kubelet {
    /// Creates a kubelet for a node. It has no effect before it runs.
    pub fn new(server: &ApiServer, node: TestNode) -> Self {
        Self::calling(server, node, GrpcClient::default())
    }

    /// Like [`Kubelet::new`], with fault injection for its calls to a program.
    pub fn with_faults(server: &ApiServer, node: TestNode, faults: &Faults, program: &'static str) -> Self {
        Self::calling(server, node, GrpcClient::new(faults.clone(), program))
    }

    fn calling(server: &ApiServer, node: TestNode, grpc: GrpcClient) -> Self {
        let client = ApiClient::new(server, "kubelet");
        let registry = Registry::new(server.mode(), node.device_plugins.clone(), grpc.clone());
        Self {
            claims: ClaimManager::new(client.clone(), registry.clone(), grpc.clone()),
            client,
            registry,
            grpc,
            node,
            devices: Arc::default(),
            container_configs: Arc::default(),
        }
    }

    /// Returns the devices, environment and mounts of all containers.
    pub fn container_configs(&self) -> ContainerConfigs {
        self.container_configs
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
        if self.client.server.mode() == ClusterMode::Structured {
            // Pods could otherwise be scheduled to drivers that never come back.
            self.wipe_slices(None);
            parts.spawn(self.clone().wipe(shutdown.clone()));
        }
        parts.spawn(self.registry.clone().serve(shutdown.clone()));
        parts.spawn(serve_pod_resources(
            self.clone(),
            self.node.root.clone(),
            shutdown.clone(),
        ));
        let watched = self.node.root.join("plugins_registry");
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
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
        }
        while parts.join_next().await.is_some() {}
        Ok(())
    }

    /// Creates the Node object.
    fn announce(&self) {
        let name = &self.node.name;
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
                () = tokio::time::sleep(plugins::POLL_INTERVAL) => {}
            }
        }
    }

    /// Deletes the node's ResourceSlices of a driver, or of all drivers.
    fn wipe_slices(&self, driver: Option<&str>) {
        for slice in self.client.list("resourceslices") {
            let is_of_driver = driver.is_none_or(|driver| text(&slice, "/spec/driver") == driver);
            if is_of_driver && text(&slice, "/spec/nodeName") == self.node.name {
                // A slice that is deleted meanwhile needs no deletion.
                let _ = self.client.delete("resourceslices", &slice, None);
            }
        }
    }

    /// Updates the node's status if it has changed.
    fn report(&self) {
        let Some(node) = self.client.get("nodes", "", &self.node.name) else {
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
        let patch = json!({ "status": status });
        let mut reported = node.clone();
        json_patch::merge(&mut reported, &patch);
        // The API server adds empty fields to the status, so the two statuses are never equal.
        if reported != node {
            // A conflict means another change of the node, which triggers another pass.
            let _ = self.client.merge("nodes", &node, "status", patch);
        }
    }

    /// Starts and stops pods.
    async fn pass(&self) {
        let pods: Vec<Arc<Value>> = self
            .client
            .list("pods")
            .into_iter()
            .filter(|pod| text(pod, "/spec/nodeName") == self.node.name)
            .collect();
        self.stop_missing(&pods).await;
        for pod in &pods {
            if object::is_deleting(pod) {
                self.stop(pod).await;
            } else if text(pod, "/status/phase") == "Pending" {
                self.start(pod).await;
            }
        }
    }
}

impl Kubelet {
    /// Starts a pod, or reports why it cannot start.
    async fn start(&self, pod: &Value) {
        match self.configure_containers(pod).await {
            Ok(container_configs) => {
                let key = (object::namespace(pod).to_owned(), object::name(pod).to_owned());
                self.container_configs
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(key, container_configs);
                let now = self.client.server.now();
                let statuses: Vec<Value> = list(pod, "/spec/containers")
                    .iter()
                    .map(|container| {
                        json!({
                            "name": container["name"], "image": container["image"], "imageID": "", "ready": true,
                            "restartCount": 0, "state": { "running": { "startedAt": now } },
                        })
                    })
                    .collect();
                let ready = json!({ "type": "Ready", "status": "True", "lastTransitionTime": now });
                let conditions = object::with_condition(pod, ready);
                let status = json!({ "phase": "Running", "startTime": now, "containerStatuses": statuses, "conditions": conditions });
                self.write(pod, status);
                self.client
                    .event(pod, "Normal", "Started", "Started all containers");
            }
            Err(StartError::Later(reason, message)) => {
                if !self.client.has_event(pod, &message) {
                    self.client.event(pod, "Warning", reason, &message);
                }
            }
            Err(StartError::Never(message)) => {
                let status =
                    json!({ "phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message });
                self.write(pod, status);
                self.client
                    .event(pod, "Warning", "UnexpectedAdmissionError", &message);
            }
        }
    }

    fn write(&self, pod: &Value, status: Value) {
        // The next pass handles a pod deleted meanwhile.
        let _ = self
            .client
            .merge("pods", pod, "status", json!({ "status": status }));
    }

    async fn configure_containers(
        &self,
        pod: &Value,
    ) -> Result<BTreeMap<String, ContainerConfig>, StartError> {
        let devices = self.allocate_devices(pod).await?;
        let prepared = self.claims.prepare_claims(pod).await;
        let prepared = prepared.map_err(|error| StartError::Later(PREPARE_FAILED, error))?;
        let mut container_configs = BTreeMap::new();
        for container in list(pod, "/spec/containers") {
            let mut config = ContainerConfig::default();
            let failed = |error: crate::testcluster::runtime::RuntimeError| {
                StartError::Later("Failed", error.to_string())
            };
            for claim in list(container, "/resources/claims") {
                for id in prepared.ids(text(claim, "/name"), text(claim, "/request")) {
                    config
                        .add_cdi(&self.node.cdi, &self.node.dev, id)
                        .map_err(failed)?;
                }
            }
            for (path, host, permissions) in devices
                .get(text(container, "/name"))
                .into_iter()
                .flat_map(|got| &got.devices)
            {
                config
                    .add_device(&self.node.dev, path, host, permissions)
                    .map_err(failed)?;
            }
            if let Some(got) = devices.get(text(container, "/name")) {
                config.environment.extend(got.environment.clone());
                config.mounts.extend(got.mounts.clone());
            }
            container_configs.insert(text(container, "/name").to_owned(), config);
        }
        Ok(container_configs)
    }

    /// Allocates extended resources. Returns the container edits by container.
    async fn allocate_devices(&self, pod: &Value) -> Result<BTreeMap<String, ContainerConfig>, StartError> {
        let mut container_configs: BTreeMap<String, ContainerConfig> = BTreeMap::new();
        for container in list(pod, "/spec/containers") {
            for (resource, amount) in extended_resources(container) {
                let ids = self.choose(pod, &resource, usize::try_from(amount).unwrap_or(0))?;
                let client = self
                    .registry
                    .with(|plugins| plugins.resources.get(&resource).map(|(client, _)| client.clone()));
                let Some(client) = client else { continue };
                let request = AllocateRequest {
                    container_requests: vec![ContainerAllocateRequest {
                        devices_ids: ids.into_iter().collect(),
                    }],
                };
                let allocate = || {
                    let (mut client, request) = (client.clone(), Request::new(request.clone()));
                    async move {
                        let answer = client
                            .allocate(request)
                            .await
                            .map_err(|status| GrpcError::Status {
                                code: format!("{:?}", status.code()),
                                message: status.message().to_owned(),
                            })?;
                        Ok(answer.into_inner())
                    }
                };
                let answer = self.grpc.with_fault("Allocate", ALLOCATE, allocate).await;
                let answer = answer.map_err(|error| {
                    StartError::Never(format!("Allocate failed due to {error}, which is unexpected"))
                })?;
                let config = container_configs
                    .entry(text(container, "/name").to_owned())
                    .or_default();
                for response in answer.container_responses {
                    config.environment.extend(response.envs);
                    config.mounts.extend(response.mounts.into_iter().map(|mount| {
                        let options = if mount.read_only {
                            vec!["ro".to_owned()]
                        } else {
                            Vec::new()
                        };
                        (mount.container_path, mount.host_path, options)
                    }));
                    config.devices.extend(
                        response
                            .devices
                            .into_iter()
                            .map(|device| (device.container_path, device.host_path, device.permissions)),
                    );
                }
            }
        }
        Ok(container_configs)
    }

    /// Selects free, healthy devices of a resource for a pod. A repeated attempt keeps the pod's devices.
    fn choose(&self, pod: &Value, resource: &str, amount: usize) -> Result<BTreeSet<String>, StartError> {
        let mut allocated = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let uid = object::uid(pod);
        if let Some(known) = allocated.get(uid).and_then(|devices| devices.get(resource)) {
            return Ok(known.clone());
        }
        let held: BTreeSet<String> = allocated
            .values()
            .filter_map(|devices| devices.get(resource))
            .flatten()
            .cloned()
            .collect();
        let free: BTreeSet<String> = self.registry.with(|plugins| {
            let devices = plugins
                .resources
                .get(resource)
                .map(|(_, devices)| devices.clone())
                .unwrap_or_default();
            devices
                .into_iter()
                .filter(|(id, healthy)| *healthy && !held.contains(id))
                .map(|(id, _)| id)
                .take(amount)
                .collect()
        });
        if free.len() < amount {
            return Err(StartError::Never(format!(
                "Allocate failed due to requested number of devices unavailable for {resource}. Requested: {amount}, Available: {}, which is unexpected",
                free.len()
            )));
        }
        allocated
            .entry(uid.to_owned())
            .or_default()
            .insert(resource.to_owned(), free.clone());
        Ok(free)
    }

    /// Stops a terminating pod, and deletes it once its claims are unprepared.
    async fn stop(&self, pod: &Value) {
        if self.release(object::uid(pod)).await {
            let key = (object::namespace(pod).to_owned(), object::name(pod).to_owned());
            self.container_configs
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&key);
            // Another client may have deleted the pod already.
            let _ = self.client.delete("pods", pod, Some(0));
        }
    }

    /// Releases the resources of deleted pods.
    async fn stop_missing(&self, pods: &[Arc<Value>]) {
        let mut known: BTreeSet<String> = self.claims.pods().into_iter().collect();
        {
            let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
            known.extend(devices.keys().cloned());
        }
        for uid in known {
            if !pods.iter().any(|pod| object::uid(pod) == uid) {
                self.release(&uid).await;
            }
        }
    }

    /// Unprepares the claims of a pod and frees its devices. Returns whether that is complete.
    async fn release(&self, uid: &str) -> bool {
        let released = self.claims.release(uid).await;
        if released {
            self.devices
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(uid);
        }
        released
    }
}

/// Serves the API below kubelet's root directory until shutdown.
async fn serve_pod_resources(
    kubelet: Kubelet,
    root: PathBuf,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let directory = root.join("pod-resources");
    std::fs::create_dir_all(&directory)?;
    let connections = plugins::listen(&directory)?;
    Server::builder()
        .add_service(PodResourcesListerServer::new(kubelet))
        .serve_with_incoming_shutdown(connections, shutdown.cancelled_owned())
        .await
        .map_err(std::io::Error::other)
}

impl Kubelet {
    /// Returns the node's pods in the PodResources format, with the devices of each container.
    fn pod_resources(&self) -> Vec<v1::PodResources> {
        let allocated = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let pods = self.client.list("pods");
        let mine = pods
            .iter()
            .filter(|pod| text(pod, "/spec/nodeName") == self.node.name);
        mine.map(|pod| {
            let devices = allocated.get(object::uid(pod));
            let of = |container: &Value| {
                let limits = container.pointer("/resources/limits").and_then(Value::as_object);
                let has = |resource: &String| limits.is_some_and(|limits| limits.contains_key(resource));
                let devices = devices
                    .into_iter()
                    .flatten()
                    .filter(|(resource, _)| has(resource));
                v1::ContainerResources {
                    name: text(container, "/name").to_owned(),
                    devices: devices
                        .map(|(resource, ids)| v1::ContainerDevices {
                            resource_name: resource.clone(),
                            device_ids: ids.iter().cloned().collect(),
                            topology: None,
                        })
                        .collect(),
                    ..v1::ContainerResources::default()
                }
            };
            v1::PodResources {
                name: object::name(pod).to_owned(),
                namespace: object::namespace(pod).to_owned(),
                containers: list(pod, "/spec/containers").iter().map(of).collect(),
            }
        })
        .collect()
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: Request<v1::ListPodResourcesRequest>,
    ) -> Result<Response<v1::ListPodResourcesResponse>, Status> {
        let pod_resources = self.pod_resources();
        Ok(Response::new(v1::ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<v1::AllocatableResourcesRequest>,
    ) -> Result<Response<v1::AllocatableResourcesResponse>, Status> {
        let devices = self.registry.with(|plugins| {
            let one =
                |(resource, (_, devices)): (&String, &(_, BTreeMap<String, bool>))| v1::ContainerDevices {
                    resource_name: resource.clone(),
                    device_ids: devices.keys().cloned().collect(),
                    topology: None,
                };
            plugins.resources.iter().map(one).collect()
        });
        Ok(Response::new(v1::AllocatableResourcesResponse { devices }))
    }

    async fn get(
        &self,
        _: Request<v1::GetPodResourcesRequest>,
    ) -> Result<Response<v1::GetPodResourcesResponse>, Status> {
        // Same as kubelet 1.30 with default feature gates.
        Err(Status::unknown("PodResources API Get method disabled"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testcluster::clock_and_rng::ClockAndRng;

    #[test]
    fn only_slices_of_the_node_and_driver_are_deleted() {
        let server = ApiServer::with_mode(Arc::new(ClockAndRng::system()), ClusterMode::Structured);
        let kubelet = Kubelet::new(&server, TestNode::within("node-a", Path::new("/nowhere")));
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
            slices
                .iter()
                .map(|slice| object::name(slice))
                .collect::<Vec<_>>()
                .join(" ")
        };
        kubelet.wipe_slices(Some("x.dev"));
        assert_eq!(names(), "b c");
        kubelet.wipe_slices(None);
        assert_eq!(names(), "c");
    }
}
