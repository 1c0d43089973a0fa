//! Extended resources: the device plugin API, v1beta1.

mod register;

use std::collections::BTreeSet;
use std::pin::Pin;

use futures::{Stream, stream};
use prost::Message;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::{
    KubeletApiError, KubeletApiState, KubeletPaths, health, refused, shown, status, wrong_number_of_answers,
};
use crate::api::proto::device_plugin_v1beta1::device_plugin_server::{
    DevicePlugin, DevicePluginServer, SERVICE_NAME,
};
use crate::api::proto::device_plugin_v1beta1::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, DeviceSpec, Empty,
    ListAndWatchResponse, Mount, NumaNode, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, TopologyInfo,
};
use crate::api::proto::{MAX_CONTAINERS, MAX_DEVICES_PER_CONTAINER, MAX_REQUEST};
use crate::core::names::check_extended_resource;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::node::kubelet::transport::listen;
use crate::node::service::{NodeService, PluginDevice, Preference};
use register::{Registrar, Streams, WatchedPlugin};

/// Largest list of devices in bytes: gRPC's default, which kubelet's client keeps.
const MAX_LIST: usize = 4 * 1024 * 1024;

/// How a device plugin registers with kubelet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PluginRegistration {
    /// The plugin calls `kubelet.sock` in the device plugin directory. Every kubelet supports it.
    #[default]
    KubeletSocket,
    /// Kubelet's plugin watcher finds the plugin in `plugins_registry` below its root directory: for nodes whose device plugin
    /// directory is not accessible. Kubelet finds it again after a restart. If it loses the plugin otherwise, it does not retry;
    /// the companion then recreates the registration socket.
    PluginWatcher,
}

/// Serves the device plugin API for one extended resource until the shutdown.
///
/// The plugin registers once its socket is served, and again after a restart of kubelet or if kubelet closes ListAndWatch without
/// reopening it. While kubelet is down, this waits for it.
///
/// `state` follows the registration. Dropping the future stops the endpoint like the shutdown does, without waiting for calls in
/// flight. Errors are returned only before the endpoint is served.
pub async fn serve(
    node: NodeService,
    paths: KubeletPaths,
    registration: PluginRegistration,
    driver_name: String,
    resource_name: String,
    state: watch::Sender<KubeletApiState>,
    shutdown: CancellationToken,
) -> Result<(), KubeletApiError> {
    check_extended_resource(&resource_name)?;
    let Some(devices) = node.plugin_devices(&resource_name) else {
        return Err(KubeletApiError::NoSuchResource { resource_name });
    };
    let ours = shutdown.child_token();
    let _end_with_this = ours.clone().drop_guard();

    let location = match registration {
        PluginRegistration::KubeletSocket => paths.device_plugin_socket(&resource_name),
        PluginRegistration::PluginWatcher => paths.watched_device_plugin_socket(&driver_name, &resource_name),
    };
    let path = location.path.clone();
    let streams = watch::Sender::new(Streams::default());
    let calls = node.grpc_calls();
    let health = health::service(&[SERVICE_NAME], state.subscribe()).await;
    let options = options(node.checks_start(&resource_name));
    let service = DevicePluginService {
        node,
        resource_name: resource_name.clone(),
        options,
        devices,
        streams: streams.clone(),
        pending: TaskTracker::new(),
        shutdown: ours.clone(),
    };
    let service = DevicePluginServer::new(service)
        .max_decoding_message_size(MAX_REQUEST)
        .max_encoding_message_size(MAX_LIST);
    let listening = listen(
        location,
        Routes::new(service).add_service(health),
        calls.clone(),
        ours.clone(),
    )
    .await?;
    tracing::info!(resource = resource_name, "the device plugin is ready");

    let registered = match registration {
        PluginRegistration::KubeletSocket => {
            let registrar = Registrar {
                kubelet: paths.kubelet_socket(),
                endpoint: path
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
                resource_name,
                options,
                state: state.clone(),
                published: listening.published.clone(),
                directory: listening.directory.clone(),
                streams: streams.subscribe(),
            };
            tokio::select! {
                () = ours.cancelled() => {}
                () = registrar.run() => {}
            }
            listening.closed().await;
            Ok(())
        }
        PluginRegistration::PluginWatcher => {
            WatchedPlugin {
                location: paths.device_plugin_registration_socket(&driver_name, &resource_name),
                endpoint: path.display().to_string(),
                resource_name,
                state: state.clone(),
                streams: streams.subscribe(),
                calls,
                service: listening,
                shutdown: ours.clone(),
            }
            .run()
            .await
        }
    };
    state.send_replace(KubeletApiState::Closed);
    registered
}

/// The optional calls that the plugin supports.
fn options(checks_start: bool) -> DevicePluginOptions {
    DevicePluginOptions {
        pre_start_required: checks_start,
        get_preferred_allocation_available: true,
    }
}

struct DevicePluginService {
    node: NodeService,
    resource_name: String,
    options: DevicePluginOptions,
    devices: watch::Receiver<Vec<PluginDevice>>,
    streams: watch::Sender<Streams>,
    /// The calls that wait for the state task.
    pending: TaskTracker,
    shutdown: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for DevicePluginService {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(self.options))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut number = 0;
        self.streams.send_modify(|streams| {
            streams.opened += 1;
            number = streams.opened;
            streams.open.insert(number);
        });
        tracing::info!(resource = self.resource_name, "kubelet watches the devices");
        let lists = Lists {
            resource_name: self.resource_name.clone(),
            devices: self.devices.clone(),
            sent: None,
            pending: self.pending.clone(),
            shutdown: self.shutdown.clone(),
            _open: OpenStream {
                number,
                streams: self.streams.clone(),
            },
        };
        Ok(Response::new(Box::pin(stream::unfold(lists, Lists::next))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.into_inner().container_requests;
        check_containers(requests.len())?;
        let mut preferences = Vec::with_capacity(requests.len());
        for request in requests {
            check_devices(&request.available_device_i_ds)?;
            check_devices(&request.must_include_device_i_ds)?;
            let size = usize::try_from(request.allocation_size)
                .map_err(|_| refused(format!("{} devices are requested", request.allocation_size)))?;
            preferences.push(Preference {
                available: request.available_device_i_ds,
                must_include: request.must_include_device_i_ds,
                size,
            });
        }
        let choices = self.node.choose(&self.resource_name, &preferences);
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: choices.into_iter().map(choice).collect(),
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let _pending = self.pending.token();
        let devices = request.into_inner().devices_ids;
        check_devices(&devices)?;
        self.node
            .check_start(&self.resource_name, devices)
            .await
            .map_err(|error| status(&error))?;
        Ok(Response::new(PreStartContainerResponse {}))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let _pending = self.pending.token();
        let containers = request.into_inner().container_requests;
        check_containers(containers.len())?;
        let containers: Vec<_> = containers
            .into_iter()
            .map(|container| container.devices_ids)
            .collect();
        let mut ids = BTreeSet::new();
        for devices in &containers {
            check_devices(devices)?;
        }
        for id in containers.iter().flatten() {
            if id.is_empty() {
                return Err(refused("a device id is empty".into()));
            }
            if !ids.insert(id.as_str()) {
                return Err(refused(format!(
                    "the device {} is listed twice in one call",
                    shown(id)
                )));
            }
        }
        if containers.is_empty() || containers.iter().any(Vec::is_empty) {
            return Err(refused("the request names no device".into()));
        }
        let asked = containers.len();
        let container_edits_of = self
            .node
            .allocate(&self.resource_name, containers)
            .await
            .map_err(|error| status(&error))?;
        if container_edits_of.len() != asked {
            return Err(wrong_number_of_answers(asked, container_edits_of.len()));
        }
        let container_responses = container_edits_of.into_iter().map(container_response).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }
}

fn check_containers(count: usize) -> Result<(), Status> {
    if count <= MAX_CONTAINERS {
        return Ok(());
    }
    Err(refused(format!(
        "{count} containers in one call, at most {MAX_CONTAINERS} are allowed"
    )))
}

fn check_devices(ids: &[String]) -> Result<(), Status> {
    let count = ids.len();
    if count <= MAX_DEVICES_PER_CONTAINER {
        return Ok(());
    }
    Err(refused(format!(
        "{count} devices for one container, at most {MAX_DEVICES_PER_CONTAINER} are allowed"
    )))
}

/// Counts a stream as open until it is dropped.
struct OpenStream {
    number: u64,
    streams: watch::Sender<Streams>,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.streams.send_modify(|streams| {
            streams.open.remove(&self.number);
        });
    }
}

/// State of one ListAndWatch stream.
struct Lists {
    resource_name: String,
    devices: watch::Receiver<Vec<PluginDevice>>,
    sent: Option<Vec<PluginDevice>>,
    pending: TaskTracker,
    shutdown: CancellationToken,
    _open: OpenStream,
}

impl Lists {
    /// The next message: the current device list, once it differs from the last one sent. The stream ends only on shutdown, because
    /// kubelet marks all devices unhealthy when it ends, and only after the calls in progress, because kubelet then closes its connection.
    async fn next(mut self) -> Option<(Result<ListAndWatchResponse, Status>, Self)> {
        loop {
            let now = self.devices.borrow_and_update().clone();
            if self.sent.as_ref() != Some(&now) {
                let message = list_message(&now);
                self.sent = Some(now);
                if message.encoded_len() <= MAX_LIST {
                    return Some((Ok(message), self));
                }
                tracing::error!(
                    resource = self.resource_name,
                    reason = "TooManyDevices",
                    "the list of devices is larger than the {MAX_LIST} bytes that kubelet accepts, and is not sent"
                );
            }
            let (shutdown, pending) = (&self.shutdown, &self.pending);
            let end = async {
                shutdown.cancelled().await;
                pending.close();
                pending.wait().await;
            };
            tokio::select! {
                () = end => return None,
                // Without a sender, the process is stopping; the shutdown follows.
                Ok(()) = self.devices.changed() => {}
            }
        }
    }
}

fn list_message(devices: &[PluginDevice]) -> ListAndWatchResponse {
    let devices = devices.iter().map(|device| {
        let nodes = device
            .numa_nodes
            .iter()
            .map(|id| NumaNode { id: *id })
            .collect::<Vec<_>>();
        Device {
            id: device.id.clone(),
            health: if device.healthy { "Healthy" } else { "Unhealthy" }.into(),
            topology: (!nodes.is_empty()).then_some(TopologyInfo { nodes }),
        }
    });
    ListAndWatchResponse {
        devices: devices.collect(),
    }
}

fn choice(device_i_ds: Vec<String>) -> ContainerPreferredAllocationResponse {
    ContainerPreferredAllocationResponse { device_i_ds }
}

fn container_response(container_edits: ContainerEdits) -> ContainerAllocateResponse {
    let devices = container_edits.device_nodes.into_iter().map(|node| DeviceSpec {
        container_path: node.container_path,
        host_path: node.host_path,
        permissions: node.permissions,
    });
    let mounts = container_edits.mounts.into_iter().map(|mount| Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        read_only: mount.read_only,
    });
    let cdi_devices = container_edits
        .cdi_devices
        .into_iter()
        .map(|name| CdiDevice { name });
    ContainerAllocateResponse {
        envs: container_edits.environment,
        mounts: mounts.collect(),
        devices: devices.collect(),
        annotations: container_edits.annotations,
        cdi_devices: cdi_devices.collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::timeout;
    use tonic::transport::Endpoint;

    use super::*;
    use crate::api::proto::device_plugin_v1beta1::ContainerAllocateRequest;
    use crate::api::proto::device_plugin_v1beta1::device_plugin_client::DevicePluginClient;
    use crate::core::prepare::container_edits::{DeviceNode, Mount as HostMount};
    use crate::core::prepare::device_plugin::ExtendedResource;
    use crate::node::service::{NodeRequest, ServedResource};

    #[tokio::test]
    async fn an_allocate_in_progress_is_answered_before_the_end() {
        let (driver, resource) = ("drayman.dev", "example.com/port");
        let root = tempfile::tempdir().unwrap();
        let paths = KubeletPaths {
            root_dir: root.path().to_owned(),
            ..KubeletPaths::default()
        };
        let (node, mut backend) = NodeService::new(None, Arc::default());
        let (_devices, devices) = watch::channel(Vec::new());
        let served = ServedResource {
            resource: ExtendedResource::of_kind("port"),
            devices,
        };
        backend
            .resources
            .send_replace(Arc::new([(resource.to_owned(), served)].into()));
        let (state, mut seen) = watch::channel(KubeletApiState::Starting);
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(serve(
            node,
            paths.clone(),
            PluginRegistration::PluginWatcher,
            driver.into(),
            resource.into(),
            state,
            shutdown.clone(),
        ));
        seen.wait_for(|state| *state == KubeletApiState::Waiting)
            .await
            .unwrap();

        let socket = paths.watched_device_plugin_socket(driver, resource).path;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        let mut client = DevicePluginClient::new(endpoint.connect().await.unwrap());
        let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        lists.message().await.unwrap().expect("a list");
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: vec!["a".into()],
            }],
        };
        let allocate = tokio::spawn(async move { client.allocate(request).await });
        let Some(NodeRequest::Allocate(_, _, answer)) = backend.requests.recv().await else {
            panic!("an Allocate");
        };
        shutdown.cancel();
        let still = Duration::from_millis(200);
        assert!(timeout(still, lists.message()).await.is_err(), "no end yet");
        let registration = paths.device_plugin_registration_socket(driver, resource).path;
        assert!(registration.exists());

        answer.send(Ok(vec![ContainerEdits::default()])).unwrap();
        allocate.await.unwrap().unwrap();
        assert_eq!(lists.message().await.unwrap(), None);
        task.await.unwrap().unwrap();
        assert!(!registration.exists());
    }

    #[test]
    fn the_list_has_the_bytes_that_kubelet_reads() {
        let devices = [
            PluginDevice {
                id: "a".into(),
                healthy: true,
                numa_nodes: vec![],
            },
            PluginDevice {
                id: "b".into(),
                healthy: false,
                numa_nodes: vec![0, 1],
            },
        ];
        assert_eq!(
            list_message(&devices).encode_to_vec(),
            b"\x0a\x0c\x0a\x01a\x12\x07Healthy\x0a\x16\x0a\x01b\x12\x09Unhealthy\x1a\x06\x0a\x00\x0a\x02\x08\x01"
        );
        assert!(list_message(&[]).encode_to_vec().is_empty());
    }

    #[test]
    fn an_injection_has_the_bytes_that_kubelet_reads() {
        let container_edits = ContainerEdits {
            device_nodes: vec![DeviceNode {
                host_path: "/dev/h".into(),
                container_path: "/dev/c".into(),
                permissions: "rw".into(),
            }],
            environment: [("B".into(), "2".into()), ("A".into(), String::new())].into(),
            ..ContainerEdits::default()
        };
        let response = AllocateResponse {
            container_responses: vec![container_response(container_edits)],
        };
        assert_eq!(
            response.encode_to_vec(),
            b"\x0a\x23\x0a\x03\x0a\x01A\x0a\x06\x0a\x01B\x12\x012\x1a\x14\x0a\x06/dev/c\x12\x06/dev/h\x1a\x02rw"
                .as_slice()
        );
    }

    #[test]
    fn container_edits_are_encoded_as_kubelet_reads_them() {
        let container_edits = ContainerEdits {
            mounts: vec![HostMount {
                host_path: "/h".into(),
                container_path: "/c".into(),
                read_only: true,
            }],
            annotations: [("a/b".into(), "c".into())].into(),
            cdi_devices: vec!["v/c=n".into()],
            ..ContainerEdits::default()
        };
        assert_eq!(
            container_response(container_edits).encode_to_vec(),
            b"\x12\x0a\x0a\x02/c\x12\x02/h\x18\x01\x22\x08\x0a\x03a/b\x12\x01c\x2a\x07\x0a\x05v/c=n"
        );
    }

    #[test]
    fn a_choice_has_the_bytes_that_kubelet_reads() {
        let response = PreferredAllocationResponse {
            container_responses: vec![choice(vec!["b".into(), "a".into()])],
        };
        assert_eq!(response.encode_to_vec(), b"\x0a\x06\x0a\x01b\x0a\x01a");
        assert!(PreStartContainerResponse {}.encode_to_vec().is_empty());
    }

    #[test]
    fn the_options_have_the_bytes_that_kubelet_reads() {
        assert_eq!(options(false).encode_to_vec(), b"\x10\x01");
        assert_eq!(options(true).encode_to_vec(), b"\x08\x01\x10\x01");
    }
}
