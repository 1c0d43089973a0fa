//! The device plugin API, v1beta1, for extended resources.

mod register;
mod service;
mod watched;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::{KubeletApiError, KubeletApiState, KubeletPaths, health};
use crate::api::proto::device_plugin_v1beta1::DevicePluginOptions;
use crate::api::proto::device_plugin_v1beta1::device_plugin_server::{DevicePluginServer, SERVICE_NAME};
use crate::core::prepare::name::check_extended_resource;
use crate::node::kubelet::transport::{MAX_MESSAGE, listen};
use crate::node::service::NodeService;
use register::Registrar;
use service::{DevicePluginService, Streams};

/// The only version of the API.
const VERSION: &str = "v1beta1";

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

    let place = match registration {
        PluginRegistration::KubeletSocket => paths.device_plugin_socket(&resource_name),
        PluginRegistration::PluginWatcher => paths.watched_device_plugin_socket(&driver_name, &resource_name),
    };
    let path = place.path.clone();
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
        shutdown: ours.clone(),
    };
    let service = DevicePluginServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let listening = listen(
        place,
        Routes::new(service).add_service(health),
        calls.clone(),
        ours.clone(),
    )
    .await?;
    tracing::info!(
        resource = resource_name,
        "the door for an extended resource is open"
    );

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
            Ok(())
        }
        PluginRegistration::PluginWatcher => {
            watched::register(watched::Plugin {
                place: paths.device_plugin_registration_socket(&driver_name, &resource_name),
                endpoint: path.display().to_string(),
                resource_name,
                state: state.clone(),
                streams: streams.subscribe(),
                calls,
                shutdown: ours.clone(),
            })
            .await
        }
    };
    ours.cancel();
    listening.closed().await;
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
