//! The companion as a whole: what is started, in which order, and how it ends.

mod builder;
mod doors;
mod mounted;
mod resource_doors;
mod retried;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;

pub use self::builder::{Node, NodeBuilder};
use super::reload;
use crate::core::prepare::driver_name::{DriverName, DriverNameError};
use crate::core::prepare::orphans;
use crate::node::config::{ConfigError, NodeConfiguration};
use crate::node::discovery::{HostDevices, HostPaths};
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::{DoorError, KubeletPaths};
use crate::node::metrics::Figures;
use crate::node::publish::inventory::Standing;
use crate::node::state::storage::StoreError;
use crate::node::state::storage::disk::Disk;

/// What a companion is told.
#[derive(Clone)]
pub struct NodeOptions {
    /// The driver's name: that of the ResourceClasses it serves.
    pub driver_name: String,
    /// The name of the Node object of this machine.
    pub node_name: String,
    /// The file that describes the kinds of devices.
    pub config: PathBuf,
    /// kubelet's `--root-dir`; sockets and the checkpoint are below it.
    pub kubelet_root: PathBuf,
    /// The directory of kubelet's device plugin socket. It does not follow kubelet's root directory.
    pub device_plugin_dir: PathBuf,
    /// How kubelet learns of extended resources.
    pub plugin_registration: PluginRegistration,
    /// A directory in which the container runtime looks for CDI files.
    pub cdi_dir: PathBuf,
    /// How long a claim may be missing from kubelet's own list before it is looked into.
    pub orphan_grace: Duration,
    /// The CRI socket of the container runtime, if it is not at a usual place.
    pub runtime_socket: Option<PathBuf>,
    /// Where this process sees the host's `/dev`, `/sys` and mounts.
    pub host: HostPaths,
    /// A client of the API server.
    pub client: kube::Client,
    /// Where the companion says how it stands with kubelet; whoever wants to know subscribes.
    pub standing: watch::Sender<Standing>,
    /// Where it counts what it does.
    pub figures: Arc<Figures>,
    /// The disk; somebody looks on in tests only.
    pub disk: Disk,
}

impl NodeOptions {
    /// The options of an ordinary node.
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
            standing: watch::Sender::new(Standing::starting()),
            figures: Arc::default(),
            disk: Disk::default(),
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
pub enum NodeError {
    /// The driver's name is none.
    #[error(transparent)]
    DriverName(#[from] DriverNameError),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The records of this node cannot be had.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A door cannot be opened.
    #[error(transparent)]
    Door(#[from] DoorError),
    /// The kernel does not say which boot this is.
    #[error("cannot read {BOOT_ID}, which tells whether the node was booted: {0}")]
    BootId(std::io::Error),
    /// A directory that is mounted into the pod is not the host's any more.
    #[error(
        "the host has removed {0:?}, and perhaps made it again: what is mounted here is no longer what kubelet and the container runtime \
         see, so the companion ends, and its container gets the host's directory when it is started again"
    )]
    CutOff(PathBuf),
    /// A part of the companion has ended by itself.
    #[error("a part of the companion has broken down: {0}")]
    Broken(JoinError),
}

impl NodeError {
    /// CamelCase, from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::DriverName(_) => "InvalidDriverName",
            Self::Config(error) => error.reason(),
            Self::Store(error) => error.reason(),
            Self::Door(error) => error.reason(),
            Self::BootId(_) => "BootIdUnknown",
            Self::CutOff(_) => "DirectoryRemoved",
            Self::Broken(_) => "Broken",
        }
    }
}

/// Notices that wait until the API server takes them, at most.
const NOTICES: usize = 16;
/// Where the kernel tells the id of the boot (`random(4)`).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot.
pub(super) fn boot_id() -> std::io::Result<String> {
    std::fs::read_to_string(BOOT_ID).map(|id| id.trim().to_owned())
}

/// Runs the companion of the built-in discovery, as its configuration describes it, until the token is cancelled: a [`Node`] whose
/// driver are the node's [`HostDevices`].
pub async fn run(options: NodeOptions, shutdown: CancellationToken) -> Result<(), NodeError> {
    DriverName::parse(&options.driver_name)?;
    let configuration = NodeConfiguration::read(&options.config)?;
    let (resources, changing) = watch::channel(Arc::new(reload::resources(&configuration)));
    let (configuration, followed) = watch::channel(Arc::new(configuration));
    let (notices, told) = mpsc::channel(NOTICES);
    // The search for devices outlives the doors: what is under way at the end still needs its devices.
    let search = CancellationToken::new();
    let _end_of_search = search.clone().drop_guard();
    let driver = HostDevices::start(followed, options.host.clone(), search.clone()).await;
    let reload = reload::Follower {
        file: options.config,
        configuration,
        resources,
        notices,
    };
    tokio::spawn(reload.run(search));
    let node = Node::builder(driver, options.node_name, options.client)
        .driver_name(options.driver_name)
        .kubelet(KubeletPaths {
            root_dir: options.kubelet_root,
            device_plugin_dir: options.device_plugin_dir,
        })
        .plugin_registration(options.plugin_registration)
        .cdi_dir(options.cdi_dir)
        .orphan_grace(options.orphan_grace)
        .container_runtime_socket(options.runtime_socket)
        .dev_root(options.host.dev)
        .changing(changing)
        .notices(told)
        .standing(options.standing)
        .figures(options.figures)
        .disk(options.disk);
    node.run(shutdown).await
}
