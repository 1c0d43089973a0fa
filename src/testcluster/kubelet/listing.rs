//! PodResources API of the test cluster's kubelet: the devices of containers.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use serde_json::Value;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::Kubelet;
use crate::api::proto::pod_resources_v1 as v1;
use crate::api::proto::pod_resources_v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use crate::testcluster::api::object::{self, list, text};

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
        let pods = self.hand.list("pods");
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
