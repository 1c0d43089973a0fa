//! Extended resources: the device plugin API, v1beta1.

mod register;
mod service;

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::{DoorError, DoorState, KubeletPaths};
use crate::api::proto::device_plugin_v1beta1::DevicePluginOptions;
use crate::api::proto::device_plugin_v1beta1::device_plugin_server::DevicePluginServer;
use crate::core::node::name::check_extended_resource;
use crate::node::companion::Companion;
use crate::node::transport::{MAX_MESSAGE, listen};
use register::Registrar;
use service::{DevicePluginService, Streams};

/// What we offer beyond ListAndWatch and Allocate: nothing.
const OPTIONS: DevicePluginOptions = DevicePluginOptions {
    pre_start_required: false,
    get_preferred_allocation_available: false,
};

/// Opens the door for one extended resource and keeps it open until the shutdown.
///
/// The socket in kubelet's device plugin directory is served first, then registered at `kubelet.sock`: at once, again when
/// kubelet has restarted (it wipes the directory), and again when it drops ListAndWatch and does not come back. While there is no
/// kubelet this waits for it.
///
/// `state` follows the registration. Dropping the future closes the door as the shutdown does, without waiting for calls in
/// flight. An error comes only before the door is open.
pub async fn serve<C: Companion>(
    companion: Arc<C>,
    paths: KubeletPaths,
    resource_name: String,
    state: watch::Sender<DoorState>,
    shutdown: CancellationToken,
) -> Result<(), DoorError> {
    check_extended_resource(&resource_name)?;
    let Some(devices) = companion.plugin_devices(&resource_name) else {
        return Err(DoorError::NoSuchResource { resource_name });
    };
    let ours = shutdown.child_token();
    let _end_with_this = ours.clone().drop_guard();

    let place = paths.device_plugin_socket(&resource_name);
    let endpoint = place
        .path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let streams = watch::Sender::new(Streams::default());
    let service = DevicePluginService {
        companion,
        resource_name: resource_name.clone(),
        devices,
        streams: streams.clone(),
        shutdown: ours.clone(),
    };
    let service = DevicePluginServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let listening = listen(place, Routes::new(service), ours.clone()).await?;
    tracing::info!(
        resource = resource_name,
        "the door for an extended resource is open"
    );

    let registrar = Registrar {
        kubelet: paths.kubelet_socket(),
        endpoint,
        resource_name,
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
    state.send_replace(DoorState::Closed);
    Ok(())
}
