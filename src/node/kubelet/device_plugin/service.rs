//! The device plugin service of one resource.

use std::collections::BTreeSet;
use std::pin::Pin;

use futures::{Stream, stream};
use prost::Message;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::api::proto::device_plugin_v1beta1::device_plugin_server::DevicePlugin;
use crate::api::proto::device_plugin_v1beta1::{
    AllocateResponse, CdiDevice, ContainerAllocateResponse, ContainerPreferredAllocationResponse, Device,
    DevicePluginOptions, DeviceSpec, Empty, ListAndWatchResponse, Mount, NumaNode, PreStartContainerResponse,
    PreferredAllocationResponse, TopologyInfo,
};
use crate::api::proto::{
    ContainerList, DeviceIdList, MAX_CONTAINERS, MAX_DEVICES_PER_CONTAINER, PreferenceList,
};
use crate::core::prepare::container_edits::ContainerEdits;
use crate::node::kubelet::transport::MAX_MESSAGE;
use crate::node::kubelet::{refused, shown, status, wrong_number_of_answers};
use crate::node::service::{NodeService, PluginDevice, Preference};

/// ListAndWatch streams, numbered from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Streams {
    /// Number of the newest stream.
    pub(super) opened: u64,
    /// Numbers of the open streams.
    pub(super) open: BTreeSet<u64>,
}

pub(super) struct DevicePluginService {
    pub(super) node: NodeService,
    pub(super) resource_name: String,
    pub(super) options: DevicePluginOptions,
    pub(super) devices: watch::Receiver<Vec<PluginDevice>>,
    pub(super) streams: watch::Sender<Streams>,
    pub(super) shutdown: CancellationToken,
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
        request: Request<PreferenceList>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.into_inner().within_limit().map_err(too_many_containers)?;
        let mut preferences = Vec::with_capacity(requests.len());
        for request in requests {
            if request.beyond > 0 {
                return Err(too_many_devices(request.beyond + MAX_DEVICES_PER_CONTAINER));
            }
            let size = usize::try_from(request.size)
                .map_err(|_| refused(format!("{} devices are asked for", request.size)))?;
            preferences.push(Preference {
                available: request.available,
                must_include: request.must_include,
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
        request: Request<DeviceIdList>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let devices = request.into_inner().within_limit().map_err(too_many_devices)?;
        self.node
            .check_start(&self.resource_name, devices)
            .await
            .map_err(|error| status(&error))?;
        Ok(Response::new(PreStartContainerResponse {}))
    }

    async fn allocate(&self, request: Request<ContainerList>) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().within_limit().map_err(too_many_containers)?;
        let containers = containers
            .into_iter()
            .map(DeviceIdList::within_limit)
            .collect::<Result<Vec<_>, _>>()
            .map_err(too_many_devices)?;
        let mut ids = BTreeSet::new();
        for id in containers.iter().flatten() {
            if id.is_empty() {
                return Err(refused("a device id is empty".into()));
            }
            if !ids.insert(id.as_str()) {
                return Err(refused(format!(
                    "the device {} comes twice in one call",
                    shown(id)
                )));
            }
        }
        if containers.is_empty() || containers.iter().any(Vec::is_empty) {
            return Err(refused("devices are asked for without naming any".into()));
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

fn too_many_containers(count: usize) -> Status {
    refused(format!(
        "{count} containers in one call, {MAX_CONTAINERS} are possible"
    ))
}

fn too_many_devices(count: usize) -> Status {
    refused(format!(
        "{count} devices for one container, {MAX_DEVICES_PER_CONTAINER} are possible"
    ))
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
    shutdown: CancellationToken,
    _open: OpenStream,
}

impl Lists {
    /// The next message: the current device list, once it differs from the last one sent. The stream ends only on shutdown, because
    /// kubelet marks all devices unhealthy when it ends.
    async fn next(mut self) -> Option<(Result<ListAndWatchResponse, Status>, Self)> {
        loop {
            let now = self.devices.borrow_and_update().clone();
            if self.sent.as_ref() != Some(&now) {
                let message = list_message(&now);
                self.sent = Some(now);
                if message.encoded_len() <= MAX_MESSAGE {
                    return Some((Ok(message), self));
                }
                tracing::error!(
                    resource = self.resource_name,
                    reason = "TooManyDevices",
                    "the list of devices is larger than the {MAX_MESSAGE} bytes that kubelet takes, and is not sent"
                );
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return None,
                changed = self.devices.changed() => if changed.is_err() {
                    // The sender is gone, so the process is stopping; the shutdown follows.
                    self.shutdown.cancelled().await;
                    return None;
                }
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
    use super::super::options;
    use super::*;
    use crate::core::prepare::container_edits::{DeviceNode, Mount as HostMount};

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
    fn an_injection_with_everything_has_the_bytes_that_kubelet_reads() {
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
