//! The gRPC APIs that kubelet calls on the node.
//!
//! An endpoint validates the shape of a call, calls the [`NodeService`](crate::node::service::NodeService) and encodes the answer for
//! its API version. Endpoints know no devices and keep no state except their sockets. Kubelet shows the text of a refusal (`with_reason`) in the
//! pod's event `FailedPrepareDynamicResources`, for extended resources `UnexpectedAdmissionError`.
//!
//! * [`dra`]: claims, through plugin registration and the DRA services of kubelet; Prepare is in `dra::structured` and `dra::classic`.
//! * [`device_plugin`]: extended resources.
//! * [`pod_resources`]: a client, not an endpoint: it reads from kubelet which devices containers have.

pub mod device_plugin;
pub mod dra;
mod health;
pub mod pod_resources;
mod registration;
pub mod transport;

use std::fmt;
use std::path::{Path, PathBuf};

use prost::Message;
use thiserror::Error;
use tokio::sync::watch;
use tonic::Status;

use crate::core::names::NameError;
pub use crate::core::prepare::kubelet_apis::KubeletApiState;
use crate::node::kubelet::transport::{SocketError, SocketPath};
use crate::node::service::ServiceError;

/// The command-line option that sets [`KubeletPaths::root_dir`], for error messages.
pub const ROOT_DIR_OPTION: &str = "--kubelet-root-dir";
/// The command-line option that sets [`KubeletPaths::device_plugin_dir`], for error messages.
pub const DEVICE_PLUGIN_DIR_OPTION: &str = "--device-plugin-dir";

/// Kubelet's directories on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletPaths {
    /// Kubelet's `--root-dir`. It must exist; `plugins` and `plugins_registry` below it are created if missing.
    pub root_dir: PathBuf,
    /// The directory of `kubelet.sock`, which does not follow kubelet's `--root-dir`. Its parent must exist.
    pub device_plugin_dir: PathBuf,
}

impl Default for KubeletPaths {
    fn default() -> Self {
        Self {
            root_dir: "/var/lib/kubelet".into(),
            device_plugin_dir: "/var/lib/kubelet/device-plugins".into(),
        }
    }
}

impl KubeletPaths {
    fn below_root(&self, path: impl AsRef<Path>) -> SocketPath {
        SocketPath {
            path: self.root_dir.join(path),
            root: self.root_dir.clone(),
            option: ROOT_DIR_OPTION,
        }
    }

    /// The driver's registration socket. Kubelet's plugin watcher also watches subdirectories (1.27 to 1.37,
    /// `pkg/kubelet/pluginmanager/pluginwatcher`), so a companion in a pod mounts only its own folder.
    pub fn registration_socket(&self, driver_name: &str) -> SocketPath {
        self.below_root(format!("plugins_registry/{driver_name}/reg.sock"))
    }

    /// The socket of the driver's DRA service.
    pub fn service_socket(&self, driver_name: &str) -> SocketPath {
        self.below_root(format!("plugins/{driver_name}/dra.sock"))
    }

    /// The registration socket of a companion that takes over while the other one still serves. No longer than that of the other one, and
    /// with the suffix by which the watch of the directory recognizes sockets.
    pub(crate) fn second_registration_socket(&self, driver_name: &str) -> SocketPath {
        self.below_root(format!("plugins_registry/{driver_name}/r2.sock"))
    }

    /// The socket of its DRA service.
    pub(crate) fn second_service_socket(&self, driver_name: &str) -> SocketPath {
        self.below_root(format!("plugins/{driver_name}/dra-2.sock"))
    }

    /// The socket of a resource's device plugin: the last part of the resource name for readability, and a checksum of the whole
    /// name to keep it unique and short. Stable across restarts, so a stale socket is replaced.
    pub fn device_plugin_socket(&self, resource_name: &str) -> SocketPath {
        let name = resource_name.rsplit('/').next().unwrap_or_default();
        let short = name.chars().take(40).collect::<String>();
        let checksum = crc32fast::hash(resource_name.as_bytes());
        SocketPath {
            path: self
                .device_plugin_dir
                .join(format!("drayman-{short}-{checksum:08x}.sock")),
            root: self
                .device_plugin_dir
                .parent()
                .map_or_else(|| "/".into(), Path::to_path_buf),
            option: DEVICE_PLUGIN_DIR_OPTION,
        }
    }

    /// The socket of a device plugin that registers through the plugin watcher, in a directory that kubelet does not empty.
    pub fn watched_device_plugin_socket(&self, driver_name: &str, resource_name: &str) -> SocketPath {
        let checksum = crc32fast::hash(resource_name.as_bytes());
        self.below_root(format!("plugins/{driver_name}/dp-{checksum:08x}.sock"))
    }

    /// The registration socket of a device plugin for kubelet's plugin watcher. The name is only the checksum, because the longest
    /// driver name leaves eight bytes for it; kubelet requires no suffix.
    pub fn device_plugin_registration_socket(&self, driver_name: &str, resource_name: &str) -> SocketPath {
        let checksum = crc32fast::hash(resource_name.as_bytes());
        self.below_root(format!("plugins_registry/{driver_name}/{checksum:08x}"))
    }

    /// The socket on which kubelet serves the PodResources API.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.root_dir.join("pod-resources/kubelet.sock")
    }

    /// The socket on which kubelet accepts device plugin registrations.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugin_dir.join("kubelet.sock")
    }
}

/// Marks an endpoint as served, unless kubelet has already reported a registration status.
fn is_served(state: &watch::Sender<KubeletApiState>) {
    state.send_if_modified(|state| {
        let is_first = *state == KubeletApiState::Starting;
        if is_first {
            *state = KubeletApiState::Waiting;
        }
        is_first
    });
}

/// Why an endpoint cannot be served.
#[derive(Debug, Error)]
pub enum KubeletApiError {
    /// A socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The driver or resource name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// No kind has this extended resource.
    #[error("no kind of device has the extended resource {resource_name}")]
    NoSuchResource {
        /// The resource.
        resource_name: String,
    },
}

impl KubeletApiError {
    /// CamelCase name of the reason, for logs and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Socket(error) => error.reason(),
            Self::Name(error) => error.reason(),
            Self::NoSuchResource { .. } => "NoSuchResource",
        }
    }
}

/// Converts an error to a gRPC status: `InvalidArgument` for an invalid request, else `FailedPrecondition`.
fn status(error: &ServiceError) -> Status {
    let message = with_reason(error.reason(), error);
    if error.is_invalid_request() {
        Status::invalid_argument(message)
    } else {
        Status::failed_precondition(message)
    }
}

/// The text of an error in an answer to kubelet, which shows it in an event of the pod.
fn with_reason(reason: &str, error: &dyn fmt::Display) -> String {
    format!("{reason}: {error}")
}

/// The same message of another version of its API, without the fields that this version does not have.
fn recoded<T: Message + Default>(message: &impl Message) -> Result<T, Status> {
    T::decode(message.encode_to_vec().as_slice()).map_err(|error| Status::internal(error.to_string()))
}

/// The state task violated its contract: one answer per request.
fn wrong_number_of_answers(asked: usize, answers: usize) -> Status {
    tracing::error!(asked, answers, "the companion has not answered once per request");
    Status::internal(format!(
        "{answers} answers to {asked} requests; this is a bug of drayman"
    ))
}

/// Rejects a whole call.
fn refused(message: String) -> Status {
    tracing::warn!(reason = "InvalidRequest", "a call is refused: {message}");
    Status::invalid_argument(message)
}

/// Caller input for errors and logs: escaped, and at most `MOST` characters.
fn shown(text: &str) -> String {
    const MOST: usize = 64;
    let start = text.chars().take(MOST).collect::<String>();
    if start.len() < text.len() {
        format!("{start:?}...")
    } else {
        format!("{start:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_where_kubelet_looks() {
        let paths = KubeletPaths::default();
        let path = |location: SocketPath| location.path.display().to_string();
        assert_eq!(
            path(paths.registration_socket("drayman.dev")),
            "/var/lib/kubelet/plugins_registry/drayman.dev/reg.sock"
        );
        assert_eq!(
            path(paths.service_socket("drayman.dev")),
            "/var/lib/kubelet/plugins/drayman.dev/dra.sock"
        );
        assert_eq!(
            path(paths.device_plugin_socket("drayman.dev/serial")),
            format!(
                "/var/lib/kubelet/device-plugins/drayman-serial-{:08x}.sock",
                crc32fast::hash(b"drayman.dev/serial")
            )
        );
        assert_eq!(
            paths.kubelet_socket().display().to_string(),
            "/var/lib/kubelet/device-plugins/kubelet.sock"
        );
    }

    #[test]
    fn the_longest_names_fit_into_the_default_paths() {
        let paths = KubeletPaths::default();
        let driver = "d".repeat(63);
        let resource = format!("{}/{}", "a".repeat(244), "x".repeat(63));
        for location in [
            paths.registration_socket(&driver),
            paths.service_socket(&driver),
            paths.second_registration_socket(&driver),
            paths.second_service_socket(&driver),
            paths.device_plugin_socket(&resource),
            paths.watched_device_plugin_socket(&driver, &resource),
            paths.device_plugin_registration_socket(&driver, &resource),
        ] {
            // One more byte for the dot of the hidden name.
            assert!(
                location.path.as_os_str().len() < crate::node::kubelet::transport::MAX_PATH,
                "{}",
                location.path.display()
            );
        }
    }

    #[test]
    fn resources_that_end_alike_have_sockets_of_their_own() {
        let paths = KubeletPaths::default();
        assert_ne!(
            paths.device_plugin_socket("a.dev/x"),
            paths.device_plugin_socket("b.dev/x")
        );
    }

    #[test]
    fn text_from_callers_is_shown_escaped_and_shortened() {
        assert_eq!(shown("a\nb"), r#""a\nb""#);
        assert_eq!(shown(&"é".repeat(64)), format!("{:?}", "é".repeat(64)));
        assert_eq!(shown(&"é".repeat(65)), format!("{:?}...", "é".repeat(64)));
    }
}
