//! Registers a device plugin through kubelet's plugin watcher.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::VERSION;
use super::service::Streams;
use crate::api::proto::plugin_registration::PluginInfo;
use crate::api::proto::plugin_registration::registration_server::RegistrationServer;
use crate::node::kubelet::registration::RegistrationService;
use crate::node::kubelet::transport::{GrpcCalls, MAX_MESSAGE, SocketPath, listen};
use crate::node::kubelet::{KubeletApiError, KubeletApiState, is_served};

/// First and longest time without ListAndWatch before the registration socket is recreated. The plugin watcher needs a second or
/// two; a stopped kubelet finds the socket when it starts.
const GRACE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));

/// A served device plugin.
pub(super) struct Plugin {
    /// Its registration socket.
    pub(super) place: SocketPath,
    /// The path of its service socket.
    pub(super) endpoint: String,
    pub(super) resource_name: String,
    pub(super) state: watch::Sender<KubeletApiState>,
    pub(super) streams: watch::Receiver<Streams>,
    pub(super) calls: Arc<GrpcCalls>,
    pub(super) shutdown: CancellationToken,
}

/// Keeps the plugin registered until the shutdown.
///
/// Kubelet finds the socket by itself, also after a restart. It does not retry after a failed registration or when its ListAndWatch
/// ends for another reason; the socket is then recreated.
pub(super) async fn register(mut plugin: Plugin) -> Result<(), KubeletApiError> {
    let service = RegistrationService {
        info: PluginInfo {
            r#type: "DevicePlugin".into(),
            name: plugin.resource_name.clone(),
            endpoint: plugin.endpoint,
            supported_versions: vec![VERSION.into()],
        },
        state: plugin.state.clone(),
    };
    let routes = Routes::new(RegistrationServer::new(service).max_decoding_message_size(MAX_MESSAGE));
    let registration = listen(plugin.place, routes, plugin.calls, plugin.shutdown.clone()).await?;
    is_served(&plugin.state);
    let mut grace = GRACE.0;
    let mut alone_since = Instant::now();
    loop {
        let watched = !plugin.streams.borrow_and_update().open.is_empty();
        if watched {
            grace = GRACE.0;
        }
        tokio::select! {
            () = plugin.shutdown.cancelled() => break,
            Ok(()) = plugin.streams.changed() => {
                if watched {
                    alone_since = Instant::now();
                }
            }
            () = sleep_until(alone_since + grace), if !watched => {
                tracing::debug!(
                    resource = plugin.resource_name,
                    "kubelet does not watch the devices; the registration is made anew"
                );
                if !matches!(*plugin.state.borrow(), KubeletApiState::Rejected { .. }) {
                    plugin.state.send_replace(KubeletApiState::Waiting);
                }
                registration.renew();
                alone_since = Instant::now();
                grace = GRACE.1.min(grace * 2);
            }
        }
    }
    registration.closed().await;
    Ok(())
}
