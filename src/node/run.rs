//! Starts the companion's parts in order and stops them.

mod builder;
mod kubelet_apis;
mod mounted;
mod resource_apis;
mod retried;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;

pub use self::builder::{Node, NodeBuilder};
use super::reload;
use crate::core::names::{DriverName, DriverNameError};
use crate::core::prepare::orphans;
use crate::node::config::{ConfigError, NodeConfiguration};
use crate::node::discovery::{HostDevices, HostPaths};
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::{KubeletApiError, KubeletPaths};
use crate::node::metrics::Metrics;
use crate::node::publish::inventory::RegistrationStatus;
use crate::node::state::storage::disk::Disk;
use crate::node::state::storage::{BOOT_ID, StoreError};

/// Options of a companion with the built-in discovery.
#[derive(Clone)]
pub struct NodeOptions {
    /// The driver name, which its ResourceClasses refer to.
    pub driver_name: String,
    /// The name of this machine's Node object.
    pub node_name: String,
    /// The configuration file with the kinds of devices.
    pub config: PathBuf,
    /// Kubelet's `--root-dir`, which contains the sockets and the checkpoint.
    pub kubelet_root: PathBuf,
    /// The directory of kubelet's device plugin socket, which does not follow kubelet's root directory.
    pub device_plugin_dir: PathBuf,
    /// How extended resources register with kubelet.
    pub plugin_registration: PluginRegistration,
    /// A CDI directory of the container runtime.
    pub cdi_dir: PathBuf,
    /// How long a claim may be missing from kubelet's list before it is checked.
    pub orphan_grace: Duration,
    /// The container runtime's CRI socket; `None` tries the usual paths.
    pub runtime_socket: Option<PathBuf>,
    /// Where the host's `/dev`, `/sys` and mounts are visible to this process.
    pub host: HostPaths,
    /// API server client.
    pub client: kube::Client,
    /// Publishes the registration status with kubelet.
    pub registration_status: watch::Sender<RegistrationStatus>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// File system access, observed in tests.
    pub disk: Disk,
}

impl NodeOptions {
    /// The default options.
    pub fn new(node_name: impl Into<String>, config: impl Into<PathBuf>, client: kube::Client) -> Self {
        let kubelet = KubeletPaths::default();
        Self {
            driver_name: "drayman.dev".to_owned(),
            node_name: node_name.into(),
            config: config.into(),
            kubelet_root: kubelet.root_dir,
            device_plugin_dir: kubelet.device_plugin_dir,
            plugin_registration: PluginRegistration::default(),
            cdi_dir: "/var/run/cdi".into(),
            orphan_grace: orphans::GRACE,
            runtime_socket: None,
            host: HostPaths::default(),
            client,
            registration_status: watch::Sender::new(RegistrationStatus::starting()),
            metrics: Arc::default(),
            disk: Disk::default(),
        }
    }

    /// Kubelet's directories.
    fn kubelet(&self) -> KubeletPaths {
        KubeletPaths {
            root_dir: self.kubelet_root.clone(),
            device_plugin_dir: self.device_plugin_dir.clone(),
        }
    }
}

impl std::fmt::Debug for NodeOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeOptions")
            .field("driver_name", &self.driver_name)
            .field("node_name", &self.node_name)
            .field("config", &self.config)
            .field("kubelet_root", &self.kubelet_root)
            .field("device_plugin_dir", &self.device_plugin_dir)
            .field("plugin_registration", &self.plugin_registration)
            .field("cdi_dir", &self.cdi_dir)
            .field("orphan_grace", &self.orphan_grace)
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

/// Why a companion cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The driver name is invalid.
    #[error(transparent)]
    DriverName(#[from] DriverNameError),
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The prepared claims of this node cannot be read or locked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A kubelet endpoint cannot be served.
    #[error(transparent)]
    KubeletApi(#[from] KubeletApiError),
    /// The boot id cannot be read.
    #[error("cannot read the boot id from {BOOT_ID}: {0}")]
    BootId(std::io::Error),
    /// A directory mounted into the pod is no longer the host's.
    #[error(
        "the host removed or replaced directory {0:?}, which is mounted into this container: the companion exits, and gets the current \
         directory when its container is restarted"
    )]
    CutOff(PathBuf),
    /// A task of the companion has panicked.
    #[error("a task of the companion panicked: {0}")]
    Broken(JoinError),
}

impl NodeError {
    /// CamelCase, from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::DriverName(_) => "InvalidDriverName",
            Self::Config(error) => error.reason(),
            Self::Store(error) => error.reason(),
            Self::KubeletApi(error) => error.reason(),
            Self::BootId(_) => "BootIdUnknown",
            Self::CutOff(_) => "DirectoryRemoved",
            Self::Broken(_) => "Broken",
        }
    }
}

/// Maximum number of events waiting for the API server.
const NOTICES: usize = 16;
/// Runs a companion with the built-in discovery until the token is cancelled: a [`Node`] whose driver is [`HostDevices`], with the
/// kinds of its configuration file.
pub async fn run(options: NodeOptions, shutdown: CancellationToken) -> Result<(), NodeError> {
    DriverName::parse(&options.driver_name)?;
    let configuration = NodeConfiguration::read(&options.config)?;
    let (resources, changing) = watch::channel(Arc::new(reload::resources(&configuration)));
    let (configuration, followed) = watch::channel(Arc::new(configuration));
    let (notices, received) = mpsc::channel(NOTICES);
    // Discovery outlives the endpoints: calls in progress at shutdown still need their devices.
    let search = CancellationToken::new();
    let _end_of_search = search.clone().drop_guard();
    // The first search may take a while.
    let driver = tokio::select! {
        () = shutdown.cancelled() => return Ok(()),
        driver = HostDevices::start(followed, options.host.clone(), search.clone()) => driver,
    };
    let reload = reload::Follower {
        file: options.config.clone(),
        configuration,
        resources,
        notices,
    };
    tokio::spawn(reload.run(search));
    let node = NodeBuilder {
        driver,
        options,
        resources: BTreeMap::new(),
        changing: Some(changing),
        notices: Some(received),
    };
    node.run(shutdown).await
}
