//! Registers a device plugin with kubelet, and again whenever kubelet has lost it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Endpoint;
use tonic::{Code, Status};

use crate::api::proto::MAX_REQUEST;
use crate::api::proto::device_plugin_v1beta1::registration_client::RegistrationClient;
use crate::api::proto::device_plugin_v1beta1::{DevicePluginOptions, RegisterRequest};
use crate::api::proto::plugin_registration::PluginInfo;
use crate::api::proto::plugin_registration::registration_server::RegistrationServer;
use crate::node::kubelet::registration::RegistrationService;
use crate::node::kubelet::transport::{GrpcCalls, Listening, SocketPath, listen};
use crate::node::kubelet::{KubeletApiError, KubeletApiState, is_served};
use crate::node::state::storage::disk::Identity;

/// The only version of the API.
const VERSION: &str = "v1beta1";
/// Deadline of a registration, within which kubelet dials the plugin for up to 10 s.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// How long a registered plugin may be without ListAndWatch before it registers again: 10 s after the registration, 2 s after a stream has
/// ended. Kubelet 1.37 refuses to register a socket that it is connected to, and then refuses it until it restarts, so a slow kubelet gets
/// time.
const GRACE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(2));
/// First and longest delay before a failed or lost registration is retried.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// First and longest time without ListAndWatch before the registration socket is recreated. The plugin watcher needs a second or
/// two; a stopped kubelet finds the socket when it starts.
const WATCHER_GRACE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));

/// ListAndWatch streams, numbered from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Streams {
    /// Number of the newest stream.
    pub(super) opened: u64,
    /// Numbers of the open streams.
    pub(super) open: BTreeSet<u64>,
}

/// Keeps one resource registered through `kubelet.sock`.
///
/// Streams of earlier registrations are left open: up to 1.36, when one ends, kubelet disconnects the current plugin of the same
/// resource name (kubernetes#121994), which would end the new registration.
pub(super) struct Registrar {
    pub(super) kubelet: PathBuf,
    pub(super) endpoint: String,
    pub(super) resource_name: String,
    pub(super) options: DevicePluginOptions,
    pub(super) state: watch::Sender<KubeletApiState>,
    pub(super) published: watch::Receiver<u64>,
    pub(super) directory: watch::Receiver<u64>,
    pub(super) streams: watch::Receiver<Streams>,
}

/// Why a registration failed.
enum RegistrationFailure {
    /// Kubelet does not answer.
    Absent(String),
    /// Kubelet rejected the registration.
    Refused(Status),
}

impl Registrar {
    /// Never returns.
    pub(super) async fn run(mut self) {
        let mut pause = RETRY.0;
        let mut streams_before = self.streams.borrow().opened;
        loop {
            self.published.mark_unchanged();
            let kubelet = Identity::of(&self.kubelet);
            if !matches!(*self.state.borrow(), KubeletApiState::Rejected { .. }) {
                self.state.send_replace(KubeletApiState::Waiting);
            }
            let resource = &self.resource_name;
            // Kubelet can have connected although the last answer was lost.
            let answer = if self.is_watched(streams_before) {
                Ok(())
            } else {
                self.register().await
            };
            match answer {
                Ok(()) => {
                    tracing::info!(resource, "kubelet has registered the extended resource");
                    self.state.send_replace(KubeletApiState::Registered);
                    let held = self.until_lost(kubelet, streams_before).await;
                    streams_before = self.streams.borrow().opened;
                    // Back off if streams keep ending immediately, to avoid a busy loop.
                    pause = if held { RETRY.0 } else { RETRY.1.min(pause * 2) };
                }
                Err(RegistrationFailure::Absent(error)) => {
                    tracing::debug!(resource, error, "kubelet is not available yet");
                    self.state.send_replace(KubeletApiState::Waiting);
                    pause = RETRY.1.min(pause * 2);
                }
                Err(RegistrationFailure::Refused(status)) => {
                    let message = status.message().to_owned();
                    tracing::error!(
                        resource,
                        reason = "RegistrationRejected",
                        "kubelet rejects the extended resource: {message:?}"
                    );
                    self.state.send_replace(KubeletApiState::Rejected { message });
                    pause = RETRY.1.min(pause * 2);
                }
            }
            if self.wait(pause, kubelet, streams_before).await {
                pause = RETRY.0;
            }
        }
    }

    /// Waits for the pause. Returns true at once if kubelet was replaced or has connected, or our socket was recreated.
    async fn wait(&mut self, pause: Duration, kubelet: Option<Identity>, streams_before: u64) -> bool {
        let pause = sleep(pause);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => return false,
                Ok(()) = self.published.changed() => return true,
                Ok(()) = self.directory.changed() => if is_another(kubelet, Identity::of(&self.kubelet)) {
                    return true;
                },
                Ok(()) = self.streams.changed() => if self.is_watched(streams_before) {
                    return true;
                },
            }
        }
    }

    /// Waits until the registration is lost. Returns whether kubelet had opened a ListAndWatch for it.
    async fn until_lost(&mut self, kubelet: Option<Identity>, streams_before: u64) -> bool {
        let mut held = false;
        let mut watched_last = Instant::now();
        loop {
            self.streams.mark_unchanged();
            let watched = self.is_watched(streams_before);
            held |= watched;
            if watched {
                watched_last = Instant::now();
            }
            tokio::select! {
                // A recreated socket is not registered again while kubelet is connected, or about to be: see `GRACE`.
                Ok(()) = self.published.changed(), if held && !watched => return true,
                Ok(()) = self.directory.changed() => if is_another(kubelet, Identity::of(&self.kubelet)) {
                    return true;
                },
                Ok(()) = self.streams.changed() => {
                    if watched {
                        watched_last = Instant::now();
                    }
                }
                () = sleep_until(watched_last + if held { GRACE.1 } else { GRACE.0 }), if !watched => {
                    tracing::warn!(
                        resource = self.resource_name,
                        "kubelet does not watch the devices; registering again"
                    );
                    return held;
                }
            }
        }
    }

    /// Whether a stream is open that kubelet opened after the first `streams_before`.
    fn is_watched(&self, streams_before: u64) -> bool {
        let streams = self.streams.borrow();
        streams.open.range(streams_before + 1..).next().is_some()
    }

    async fn register(&self) -> Result<(), RegistrationFailure> {
        let absent = |error: &dyn std::error::Error| {
            let mut text = error.to_string();
            if let Some(source) = error.source() {
                text = format!("{text}: {source}");
            }
            RegistrationFailure::Absent(text)
        };
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: self.endpoint.clone(),
            resource_name: self.resource_name.clone(),
            options: Some(self.options),
        };
        let call = async {
            let endpoint = Endpoint::from_shared(format!("unix://{}", self.kubelet.display()))
                .map_err(|error| absent(&error))?;
            let channel = endpoint.connect().await.map_err(|error| absent(&error))?;
            RegistrationClient::new(channel)
                .register(request)
                .await
                .map(drop)
                .map_err(|status| match status.code() {
                    Code::Unavailable | Code::Cancelled => absent(&status),
                    _ => RegistrationFailure::Refused(status),
                })
        };
        timeout(CALL_LIMIT, call).await.unwrap_or_else(|_| {
            Err(RegistrationFailure::Absent(format!(
                "no answer within {CALL_LIMIT:?}"
            )))
        })
    }
}

/// Keeps a device plugin registered through kubelet's plugin watcher.
///
/// Kubelet finds the socket by itself, also after a restart. It does not retry after a failed registration or when its ListAndWatch
/// ends for another reason; the socket is then recreated.
pub(super) struct WatchedPlugin {
    /// Its registration socket.
    pub(super) location: SocketPath,
    /// The path of its service socket.
    pub(super) endpoint: String,
    pub(super) resource_name: String,
    pub(super) state: watch::Sender<KubeletApiState>,
    pub(super) streams: watch::Receiver<Streams>,
    pub(super) calls: Arc<GrpcCalls>,
    /// The plugin's own server.
    pub(super) service: Listening,
    pub(super) shutdown: CancellationToken,
}

impl WatchedPlugin {
    /// Runs until the shutdown, and then until the plugin's own server has ended.
    pub(super) async fn run(mut self) -> Result<(), KubeletApiError> {
        let service = RegistrationService {
            info: PluginInfo {
                r#type: "DevicePlugin".into(),
                name: self.resource_name.clone(),
                endpoint: self.endpoint,
                supported_versions: vec![VERSION.into()],
            },
            state: self.state.clone(),
        };
        let routes = Routes::new(RegistrationServer::new(service).max_decoding_message_size(MAX_REQUEST));
        let drained = CancellationToken::new();
        let _end_of_registration = drained.clone().drop_guard();
        let registration = match listen(self.location, routes, self.calls, drained.clone()).await {
            Ok(registration) => registration,
            Err(error) => {
                self.shutdown.cancel();
                self.service.closed().await;
                return Err(error.into());
            }
        };
        is_served(&self.state);
        let mut grace = WATCHER_GRACE.0;
        let mut alone_since = Instant::now();
        loop {
            let watched = !self.streams.borrow_and_update().open.is_empty();
            if watched {
                grace = WATCHER_GRACE.0;
            }
            tokio::select! {
                () = self.shutdown.cancelled() => break,
                Ok(()) = self.streams.changed() => {
                    if watched {
                        alone_since = Instant::now();
                    }
                }
                () = sleep_until(alone_since + grace), if !watched => {
                    tracing::debug!(
                        resource = self.resource_name,
                        "kubelet does not watch the devices; registering again"
                    );
                    if !matches!(*self.state.borrow(), KubeletApiState::Rejected { .. }) {
                        self.state.send_replace(KubeletApiState::Waiting);
                    }
                    registration.renew();
                    alone_since = Instant::now();
                    grace = WATCHER_GRACE.1.min(grace * 2);
                }
            }
        }
        self.service.closed().await;
        // When the registration socket is removed, kubelet closes its connection to the plugin, which cancels the calls in flight.
        drained.cancel();
        registration.closed().await;
        Ok(())
    }
}

/// Whether kubelet's socket exists and has been replaced.
fn is_another(before: Option<Identity>, now: Option<Identity>) -> bool {
    now.is_some() && now != before
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn the_registration_has_the_bytes_that_kubelet_reads() {
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: "x.sock".into(),
            resource_name: "a.dev/b".into(),
            options: Some(super::super::options(false)),
        };
        assert_eq!(
            request.encode_to_vec(),
            b"\x0a\x07v1beta1\x12\x06x.sock\x1a\x07a.dev/b\x22\x02\x10\x01"
        );
    }
}
