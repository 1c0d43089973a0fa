//! Pod lifecycle on a node: prepares claims, allocates devices, computes container edits, and releases everything at
//! the end. The PodResources API lists the devices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::Kubelet;
use super::claims::Held;
use super::wire::CallError;
use crate::api::proto::device_plugin_v1beta1::{AllocateRequest, ContainerAllocateRequest};
use crate::api::proto::pod_resources_v1 as v1;
use crate::api::proto::pod_resources_v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::runtime::Outfit;

/// Deadline of Allocate; kubelet has none.
const ALLOCATE: Duration = Duration::from_secs(45);

/// Resources of a started pod.
#[derive(Clone, Debug, Default)]
pub(crate) struct Running {
    /// Claims whose drivers prepare them, or have prepared them.
    pub(super) claims: Vec<Held>,
    /// Device plugin devices by resource.
    pub(super) devices: BTreeMap<String, BTreeSet<String>>,
}

/// Why a pod does not start.
pub(super) enum Trouble {
    /// Temporary.
    Later(&'static str, String),
    /// Permanent: admission has failed.
    Never(String),
}

impl Kubelet {
    /// Starts a pod, or reports why it cannot start.
    pub(super) async fn start(&self, pod: &Value) {
        match self.fit_out(pod).await {
            Ok(outfits) => {
                let key = (object::namespace(pod).to_owned(), object::name(pod).to_owned());
                self.outfits
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(key, outfits);
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
                let mut conditions: Vec<Value> = list(pod, "/status/conditions")
                    .iter()
                    .filter(|each| each["type"] != "Ready")
                    .cloned()
                    .collect();
                conditions.push(ready);
                let status = json!({ "phase": "Running", "startTime": now, "containerStatuses": statuses, "conditions": conditions });
                self.write(pod, status);
                self.client
                    .event(pod, "Normal", "Started", "Started all containers");
            }
            Err(Trouble::Later(reason, message)) => {
                if !self.is_told(pod, &message) {
                    self.client.event(pod, "Warning", reason, &message);
                }
            }
            Err(Trouble::Never(message)) => {
                let status =
                    json!({ "phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message });
                self.write(pod, status);
                self.client
                    .event(pod, "Warning", "UnexpectedAdmissionError", &message);
            }
        }
    }

    /// Returns whether the event exists: repeated attempts report the same message only once.
    fn is_told(&self, pod: &Value, message: &str) -> bool {
        self.client.list("events").iter().any(|event| {
            event["involvedObject"]["uid"] == pod["metadata"]["uid"] && event["message"] == message
        })
    }

    fn write(&self, pod: &Value, status: Value) {
        // The next pass handles a pod deleted meanwhile.
        let _ = self
            .client
            .merge("pods", pod, "status", json!({ "status": status }));
    }

    async fn fit_out(&self, pod: &Value) -> Result<BTreeMap<String, Outfit>, Trouble> {
        let devices = self.allocate_devices(pod).await?;
        let prepared = self.prepare_claims(pod).await?;
        let mut outfits = BTreeMap::new();
        for container in list(pod, "/spec/containers") {
            let mut outfit = Outfit::default();
            let failed = |error: crate::testcluster::runtime::RuntimeError| {
                Trouble::Later("Failed", error.to_string())
            };
            for claim in list(container, "/resources/claims") {
                for id in prepared.ids(text(claim, "/name"), text(claim, "/request")) {
                    outfit.add_cdi(&self.place, id).map_err(failed)?;
                }
            }
            for (path, host, permissions) in devices
                .get(text(container, "/name"))
                .into_iter()
                .flat_map(|got| &got.devices)
            {
                outfit
                    .add_device(&self.place.dev, path, host, permissions)
                    .map_err(failed)?;
            }
            if let Some(got) = devices.get(text(container, "/name")) {
                outfit.environment.extend(got.environment.clone());
                outfit.mounts.extend(got.mounts.clone());
            }
            outfits.insert(text(container, "/name").to_owned(), outfit);
        }
        Ok(outfits)
    }

    /// Allocates extended resources. Returns the container edits by container.
    async fn allocate_devices(&self, pod: &Value) -> Result<BTreeMap<String, Outfit>, Trouble> {
        let mut outfits: BTreeMap<String, Outfit> = BTreeMap::new();
        for container in list(pod, "/spec/containers") {
            let limits = container.pointer("/resources/limits").and_then(Value::as_object);
            for (resource, amount) in limits
                .into_iter()
                .flatten()
                .filter(|(name, _)| name.contains('/'))
            {
                let amount = amount
                    .as_str()
                    .map_or_else(|| amount.as_u64(), |text| text.parse().ok())
                    .unwrap_or(0);
                let ids = self.choose(pod, resource, usize::try_from(amount).unwrap_or(usize::MAX))?;
                let client = self
                    .registry
                    .with(|plugins| plugins.resources.get(resource).map(|(client, _)| client.clone()));
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
                            .map_err(|status| CallError::Status {
                                code: format!("{:?}", status.code()),
                                message: status.message().to_owned(),
                            })?;
                        Ok(answer.into_inner())
                    }
                };
                let answer = self.calls.pass("Allocate", ALLOCATE, allocate).await;
                let answer = answer.map_err(|error| {
                    Trouble::Never(format!("Allocate failed due to {error}, which is unexpected"))
                })?;
                let outfit = outfits.entry(text(container, "/name").to_owned()).or_default();
                for response in answer.container_responses {
                    outfit.environment.extend(response.envs);
                    outfit.mounts.extend(response.mounts.into_iter().map(|mount| {
                        let options = if mount.read_only {
                            vec!["ro".to_owned()]
                        } else {
                            Vec::new()
                        };
                        (mount.container_path, mount.host_path, options)
                    }));
                    outfit.devices.extend(
                        response
                            .devices
                            .into_iter()
                            .map(|device| (device.container_path, device.host_path, device.permissions)),
                    );
                }
            }
        }
        Ok(outfits)
    }

    /// Selects free, healthy devices of a resource for a pod. A repeated attempt keeps the pod's devices.
    fn choose(&self, pod: &Value, resource: &str, amount: usize) -> Result<BTreeSet<String>, Trouble> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let uid = object::uid(pod);
        if let Some(held) = running.get(uid).and_then(|running| running.devices.get(resource)) {
            return Ok(held.clone());
        }
        let held: BTreeSet<String> = running
            .values()
            .filter_map(|running| running.devices.get(resource))
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
            return Err(Trouble::Never(format!(
                "Allocate failed due to requested number of devices unavailable for {resource}. Requested: {amount}, Available: {}, which is unexpected",
                free.len()
            )));
        }
        running
            .entry(uid.to_owned())
            .or_default()
            .devices
            .insert(resource.to_owned(), free.clone());
        Ok(free)
    }

    /// Stops a terminating pod, and deletes it once its claims are unprepared.
    pub(super) async fn stop(&self, pod: &Value) {
        if self.release(object::uid(pod)).await {
            let key = (object::namespace(pod).to_owned(), object::name(pod).to_owned());
            self.outfits
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&key);
            // Another client may have deleted the pod already.
            let _ = self.client.delete("pods", pod, Some(0));
        }
    }

    /// Releases the resources of deleted pods.
    pub(super) async fn stop_missing(&self, pods: &[Value]) {
        let missing: Vec<String> = {
            let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            running
                .keys()
                .filter(|uid| !pods.iter().any(|pod| object::uid(pod) == *uid))
                .cloned()
                .collect()
        };
        for uid in missing {
            self.release(&uid).await;
        }
    }
}

/// Serves the API below kubelet's root directory until shutdown.
pub(super) async fn serve(
    kubelet: Kubelet,
    root: PathBuf,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let socket = root.join("pod-resources/kubelet.sock");
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory)?;
    }
    remove(&socket)?;
    let listener = UnixListener::bind(socket)?;
    Server::builder()
        .add_service(PodResourcesListerServer::new(kubelet))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown.cancelled_owned())
        .await
        .map_err(std::io::Error::other)
}

/// Removes a leftover socket of an earlier process.
pub(super) fn remove(socket: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Kubelet {
    /// Returns the node's pods in the PodResources format, with the devices of each container.
    fn pod_resources(&self) -> Vec<v1::PodResources> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let pods = self.client.list("pods");
        let mine = pods
            .iter()
            .filter(|pod| text(pod, "/spec/nodeName") == self.place.name);
        mine.map(|pod| {
            let devices = running.get(object::uid(pod)).map(|running| &running.devices);
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
                |(resource, (_, devices)): (&String, &(_, super::plugins::Devices))| v1::ContainerDevices {
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
