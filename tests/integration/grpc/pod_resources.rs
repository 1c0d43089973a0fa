//! The PodResources client with a fake kubelet.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use drayman::api::proto::pod_resources_v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use drayman::api::proto::pod_resources_v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
};
use drayman::node::kubelet::pod_resources::{PodResourcesClient, PodResourcesError};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use crate::grpc::fixture::{paths, soon};

/// A kubelet whose first `busy` calls are rate-limited.
#[derive(Clone, Default)]
struct Kubelet {
    busy: Arc<AtomicUsize>,
    devices: usize,
}

impl Kubelet {
    fn pod(&self) -> PodResources {
        PodResources {
            name: "p".into(),
            namespace: "default".into(),
            containers: vec![ContainerResources {
                name: "main".into(),
                devices: vec![ContainerDevices {
                    resource_name: "x.dev/a".into(),
                    device_ids: (0..self.devices).map(|number| format!("{number:0250}")).collect(),
                    topology: None,
                }],
                dynamic_resources: vec![],
            }],
        }
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let less = |busy: usize| busy.checked_sub(1);
        if self
            .busy
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
            .is_ok()
        {
            return Err(Status::resource_exhausted("rejected by rate limit"));
        }
        Ok(Response::new(ListPodResourcesResponse {
            pod_resources: vec![self.pod()],
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not used"))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("not used"))
    }
}

/// Runs a kubelet with its connections until it is dropped.
struct RunningKubelet(Option<Runtime>);

impl RunningKubelet {
    fn start(kubelet: Kubelet, socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let within = runtime.enter();
        let listener = UnixListener::bind(socket).unwrap();
        let service = PodResourcesListerServer::new(kubelet).max_encoding_message_size(1 << 30);
        let server = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener));
        runtime.spawn(async move { server.await.unwrap() });
        drop(within);
        Self(Some(runtime))
    }
}

impl Drop for RunningKubelet {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

#[tokio::test]
async fn the_list_of_a_restarted_kubelet_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let paths = paths(&directory);
    let client = PodResourcesClient::new(&paths);
    let absent = soon(client.list()).await.unwrap_err();
    assert!(matches!(absent, PodResourcesError::Absent { .. }), "{absent}");
    for devices in [1, 2] {
        let kubelet = Kubelet {
            devices,
            ..Kubelet::default()
        };
        let server = RunningKubelet::start(kubelet.clone(), &paths.pod_resources_socket());
        assert_eq!(soon(client.list()).await.unwrap(), [kubelet.pod()]);
        drop(server);
        // A connection may briefly outlive its server.
        soon(async { while client.list().await.is_ok() {} }).await;
    }
}

#[tokio::test]
async fn a_rate_limited_call_is_repeated() {
    let directory = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::default();
    let _server = RunningKubelet::start(kubelet.clone(), &paths(&directory).pod_resources_socket());
    let client = PodResourcesClient::new(&paths(&directory));
    kubelet.busy.store(2, Ordering::SeqCst);
    soon(client.list()).await.unwrap();
    kubelet.busy.store(100, Ordering::SeqCst);
    assert_eq!(soon(client.list()).await, Err(PodResourcesError::TooMany));
}

#[tokio::test]
async fn the_list_of_a_large_node_is_read() {
    let directory = tempfile::tempdir().unwrap();
    // More than 4 MiB, gRPC's default limit.
    let kubelet = Kubelet {
        devices: 20_000,
        ..Kubelet::default()
    };
    let _server = RunningKubelet::start(kubelet, &paths(&directory).pod_resources_socket());
    let list = soon(PodResourcesClient::new(&paths(&directory)).list())
        .await
        .unwrap();
    assert_eq!(list[0].containers[0].devices[0].device_ids.len(), 20_000);
}
