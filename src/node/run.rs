//! The companion as a whole: what is started, in which order, and how it ends.

mod doors;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::info;

use self::doors::Doors;
use super::config::{ConfigError, KindDoor, NodeConfiguration};
use super::discover::{HostDevices, HostPaths};
use super::door::{DoorError, KubeletPaths};
use super::inventory::{Publisher, PublisherClient, Standing};
use super::orphans::Caretaker;
use super::owner::{Owner, OwnerOptions};
use super::records;
use super::store::{Opened, Places, Store, StoreError};
use crate::core::node::driver_name::{DriverName, DriverNameError};
use crate::core::node::orphans;

/// How long a companion waits for another one on the same node to end, as at an update.
const LOCK_PATIENCE: Duration = Duration::from_secs(30);
/// How often it looks whether that has happened.
const LOCK_PAUSE: Duration = Duration::from_millis(500);

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
    /// A directory in which the container runtime looks for CDI files.
    pub cdi_dir: PathBuf,
    /// How long a claim may be missing from kubelet's own list before it is looked into.
    pub orphan_grace: Duration,
    /// Where this process sees the host's `/dev`, `/sys` and mounts.
    pub host: HostPaths,
    /// A client of the API server.
    pub client: kube::Client,
    /// Where the companion says how it stands with kubelet; whoever wants to know subscribes.
    pub standing: watch::Sender<Standing>,
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
            cdi_dir: "/var/run/cdi".into(),
            orphan_grace: orphans::GRACE,
            host: HostPaths::default(),
            client,
            standing: watch::Sender::new(Standing {
                reason: "Starting".to_owned(),
                ..Standing::default()
            }),
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
            Self::Broken(_) => "Broken",
        }
    }
}

/// Where the kernel tells the id of the boot (`random(4)`).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot.
pub(super) fn boot_id() -> std::io::Result<String> {
    std::fs::read_to_string(BOOT_ID).map(|id| id.trim().to_owned())
}

/// Runs the companion until the token is cancelled.
///
/// The records of the node are put right before a door opens. An API server that is away stops nothing here: claims are
/// served if it said once that there are such. An error comes at the start, or if a part breaks down; after a clean stop
/// calls in flight have been answered, the sockets are gone and the inventory says "not ready".
pub async fn run(options: NodeOptions, shutdown: CancellationToken) -> Result<(), NodeError> {
    let driver_name = DriverName::parse(&options.driver_name)?;
    let configuration = NodeConfiguration::read(&options.config)?;
    let boot_id = boot_id().map_err(NodeError::BootId)?;
    let places = Places::new(driver_name.clone(), &options.kubelet_root, &options.cdi_dir);
    let Some(opened) = open(&places, &boot_id, &shutdown).await? else {
        return Ok(());
    };

    let resources: BTreeMap<String, String> = configuration
        .kinds
        .iter()
        .filter_map(|kind| match &kind.door {
            KindDoor::Claims => None,
            KindDoor::ExtendedResource { resource_name } => Some((resource_name.clone(), kind.name.clone())),
        })
        .collect();
    // The search for devices outlives the doors: what is under way at the end still needs its devices.
    let search = CancellationToken::new();
    let _end_of_search = search.clone().drop_guard();
    let driver = Arc::new(
        HostDevices::start(
            watch::channel(Arc::new(configuration)).1,
            options.host.clone(),
            search,
        )
        .await,
    );
    let (cluster, _) = watch::channel(opened.cluster.clone());
    let node_in_doubt = Arc::new(Notify::new());
    let (owner, companion, devices) = Owner::start(OwnerOptions {
        places: places.clone(),
        orphan_grace: options.orphan_grace,
        node_name: options.node_name.clone(),
        resources: resources.clone(),
        driver,
        opened,
        cluster: cluster.subscribe(),
        node_in_doubt: node_in_doubt.clone(),
    })
    .await;
    let owner = tokio::spawn(owner.run());

    // Both have handles of the owner, and end before it.
    let stop_care = CancellationToken::new();
    let _end_of_care = stop_care.clone().drop_guard();
    let (quarantine, in_quarantine) = watch::channel(BTreeMap::new());
    let caretaker = Caretaker {
        client: options.client.clone(),
        driver_name: driver_name.clone(),
        node_name: options.node_name.clone(),
        records: companion.records(),
        cluster: cluster.subscribe(),
        quarantine,
    };
    let caretaker = tokio::spawn(caretaker.run(stop_care.clone()));
    let records = records::serve(
        records::socket(&places.state, &options.kubelet_root),
        companion.records(),
        stop_care.clone(),
    );
    let records = records.await.map_err(DoorError::from)?;

    let publisher = Publisher {
        client: PublisherClient(options.client.clone()),
        driver_name: driver_name.clone(),
        node_name: options.node_name.clone(),
        devices,
        cluster: cluster.clone(),
        standing: options.standing.subscribe(),
        quarantine: in_quarantine,
        node_in_doubt,
    };
    let stop_publishing = CancellationToken::new();
    let publisher = tokio::spawn(publisher.run(stop_publishing.clone()));

    let doors = Doors {
        paths: options.kubelet(),
        driver_name,
        resources,
        cluster: cluster.subscribe(),
    };
    // The last handle of the owner goes with the doors.
    let served = doors
        .serve(Arc::new(companion), options.standing.clone(), shutdown)
        .await;
    stop_care.cancel();
    records.closed().await;
    let caretaker = caretaker.await.map_err(NodeError::Broken);
    let owner = owner.await.map_err(NodeError::Broken);
    stop_publishing.cancel();
    let publisher = publisher.await.map_err(NodeError::Broken);
    served.and(caretaker).and(owner).and(publisher)
}

impl NodeOptions {
    fn kubelet(&self) -> KubeletPaths {
        KubeletPaths {
            root_dir: self.kubelet_root.clone(),
            device_plugin_dir: self.device_plugin_dir.clone(),
        }
    }
}

/// Opens the records, and waits a while for another companion to let go of them. `None` if the shutdown comes first.
async fn open(
    places: &Places,
    boot_id: &str,
    shutdown: &CancellationToken,
) -> Result<Option<Opened>, NodeError> {
    let until = Instant::now() + LOCK_PATIENCE;
    let mut told = false;
    loop {
        let (places, boot_id) = (places.clone(), boot_id.to_owned());
        let opened = spawn_blocking(move || Store::open(&places, &boot_id)).await;
        match opened.map_err(NodeError::Broken)? {
            Err(StoreError::Locked(lock)) if Instant::now() < until => {
                if !told {
                    told = true;
                    info!(lock = %lock.display(), "another companion runs on this node; waiting for its end");
                }
            }
            opened => return Ok(Some(opened?)),
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(None),
            () = sleep(LOCK_PAUSE) => {}
        }
    }
}
