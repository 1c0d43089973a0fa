//! The doors: gRPC APIs through which a device leaves the node.
//!
//! A door checks the shape of a call, calls the [`Companion`](crate::node::companion::Companion) and writes its answer in the words of
//! its version. It knows no device and holds nothing but sockets.
//!
//! * [`dra`]: claims, through plugin registration and the DRA services of kubelet 1.27 to 1.30.
//! * [`device_plugin`]: extended resources.
//! * [`pod_resources`]: no door, but the window beside them, through which kubelet shows what its containers have.

pub mod device_plugin;
pub mod dra;
mod health;
pub mod pod_resources;
mod registration;
pub mod transport;

use std::path::{Path, PathBuf};

use thiserror::Error;
use tokio::sync::watch;
use tonic::Status;

use crate::core::prepare::name::NameError;
use crate::node::companion::CompanionError;
use crate::node::kubelet::transport::{SocketError, SocketPlace};

/// The option that [`KubeletPaths::root_dir`] comes from, as errors name it.
pub const ROOT_DIR_OPTION: &str = "--kubelet-root-dir";
/// The option that [`KubeletPaths::device_plugin_dir`] comes from, as errors name it.
pub const DEVICE_PLUGIN_DIR_OPTION: &str = "--device-plugin-dir";

/// Where kubelet is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletPaths {
    /// kubelet's `--root-dir`. It must exist; `plugins` and `plugins_registry` in it are made if need be.
    pub root_dir: PathBuf,
    /// The directory of `kubelet.sock`. It does not follow kubelet's `--root-dir`. The directory above it must exist.
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
    fn below_root(&self, path: impl AsRef<Path>) -> SocketPlace {
        SocketPlace {
            path: self.root_dir.join(path),
            root: self.root_dir.clone(),
            option: ROOT_DIR_OPTION,
        }
    }

    /// Where kubelet's plugin watcher looks for the driver's registration. Kubelet watches folders below its directory too (1.27 to 1.37,
    /// `pkg/kubelet/pluginmanager/pluginwatcher`), so that a companion in a pod needs access to its own folder only.
    pub fn registration_socket(&self, driver_name: &str) -> SocketPlace {
        self.below_root(format!("plugins_registry/{driver_name}/reg.sock"))
    }

    /// Where the driver's DRA service is.
    pub fn service_socket(&self, driver_name: &str) -> SocketPlace {
        self.below_root(format!("plugins/{driver_name}/dra.sock"))
    }

    /// Where the device plugin of a resource is: the end of the resource's name, to be recognised, and a checksum of the whole
    /// name, to be its own and short enough. The same after a restart, so that a stale socket is replaced.
    pub fn device_plugin_socket(&self, resource_name: &str) -> SocketPlace {
        let name = resource_name.rsplit('/').next().unwrap_or_default();
        let short = name.chars().take(40).collect::<String>();
        let checksum = crc32fast::hash(resource_name.as_bytes());
        SocketPlace {
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

    /// Where a device plugin is that registers through the plugin watcher: a directory that kubelet does not empty.
    pub fn watched_device_plugin_socket(&self, driver_name: &str, resource_name: &str) -> SocketPlace {
        let checksum = crc32fast::hash(resource_name.as_bytes());
        self.below_root(format!("plugins/{driver_name}/dp-{checksum:08x}.sock"))
    }

    /// Where kubelet's plugin watcher looks for the registration of a device plugin. The checksum alone, since the longest driver name leaves
    /// eight bytes for it; kubelet asks for no suffix.
    pub fn device_plugin_registration_socket(&self, driver_name: &str, resource_name: &str) -> SocketPlace {
        let checksum = crc32fast::hash(resource_name.as_bytes());
        self.below_root(format!("plugins_registry/{driver_name}/{checksum:08x}"))
    }

    /// Where kubelet serves the PodResources API.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.root_dir.join("pod-resources/kubelet.sock")
    }

    /// Where kubelet takes the registration of device plugins.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugin_dir.join("kubelet.sock")
    }
}

/// How a door stands with kubelet, as far as the door has been told. Kubelet does not say when it goes away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DoorState {
    /// Not serving yet.
    #[default]
    Starting,
    /// Serving; kubelet has not registered this socket yet.
    Waiting,
    /// Kubelet has registered it.
    Registered,
    /// Kubelet has refused it. The door tries again, ever more slowly.
    Rejected {
        /// What kubelet said.
        message: String,
    },
    /// It cannot be served. It is tried again, ever more slowly.
    Failed {
        /// Why not.
        message: String,
    },
    /// The door has ended.
    Closed,
}

/// All sockets of a door are served. What kubelet has said of it by now stands.
fn is_served(state: &watch::Sender<DoorState>) {
    state.send_if_modified(|state| {
        let is_first = *state == DoorState::Starting;
        if is_first {
            *state = DoorState::Waiting;
        }
        is_first
    });
}

/// Why a door cannot open.
#[derive(Debug, Error)]
pub enum DoorError {
    /// A socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The name of the driver or resource is none.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The companion has no such resource.
    #[error("no kind of device has the extended resource {resource_name}")]
    NoSuchResource {
        /// The resource.
        resource_name: String,
    },
}

impl DoorError {
    /// CamelCase name of the reason, for logs and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Socket(error) => error.reason(),
            Self::Name(error) => error.reason(),
            Self::NoSuchResource { .. } => "NoSuchResource",
        }
    }
}

/// A refusal as gRPC says it: the request's fault or the node's state.
fn status(error: CompanionError) -> Status {
    if error.invalid_request {
        Status::invalid_argument(error.message)
    } else {
        Status::failed_precondition(error.message)
    }
}

/// The companion broke its contract.
fn wrong_number_of_answers(asked: usize, answers: usize) -> Status {
    tracing::error!(asked, answers, "the companion has not answered once per request");
    Status::internal(format!(
        "{answers} answers to {asked} requests; this is a bug of drayman"
    ))
}

/// What a whole call is refused with.
fn refused(message: String) -> Status {
    tracing::warn!(reason = "InvalidRequest", "a call is refused: {message}");
    Status::invalid_argument(message)
}

/// What a caller sent, as errors and logs may show it: escaped and not too long.
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
        let path = |place: SocketPlace| place.path.display().to_string();
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
        for place in [
            paths.registration_socket(&driver),
            paths.service_socket(&driver),
            paths.device_plugin_socket(&resource),
            paths.watched_device_plugin_socket(&driver, &resource),
            paths.device_plugin_registration_socket(&driver, &resource),
        ] {
            // One more for the dot of the hidden name.
            assert!(
                place.path.as_os_str().len() < crate::node::kubelet::transport::MAX_PATH,
                "{}",
                place.path.display()
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
    fn what_a_caller_sent_is_shown_escaped_and_cut() {
        assert_eq!(shown("a\nb"), r#""a\nb""#);
        assert_eq!(shown(&"é".repeat(64)), format!("{:?}", "é".repeat(64)));
        assert_eq!(shown(&"é".repeat(65)), format!("{:?}...", "é".repeat(64)));
    }
}
