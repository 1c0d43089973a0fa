//! The companion as a whole: what is started, in which order, and how it ends.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::companion::Companion;
use super::config::{ConfigError, KindDoor, NodeConfiguration};
use super::discover::{HostDevices, HostPaths};
use super::door::{self, DoorError, DoorState, KubeletPaths};
use super::inventory::{Publisher, PublisherClient, Standing};
use super::owner::{Owner, OwnerOptions};
use super::store::{Opened, Store, StoreError};
use crate::core::node::checkpoint::ClusterFacts;
use crate::core::node::driver_name::{DriverName, DriverNameError};

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
    /// Where this process sees the host's `/dev`, `/sys` and mounts.
    pub host: HostPaths,
    /// A client of the API server.
    pub client: kube::Client,
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
            host: HostPaths::default(),
            client,
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

/// Runs the companion until the token is cancelled.
///
/// The records of the node are put right before a door opens. An API server that is away stops nothing here: claims are
/// served if it said once that there are such. An error comes at the start, or if a part breaks down; after a clean stop
/// calls in flight have been answered, the sockets are gone and the inventory says "not ready".
pub async fn run(options: NodeOptions, shutdown: CancellationToken) -> Result<(), NodeError> {
    let driver_name = DriverName::parse(&options.driver_name)?;
    let configuration = NodeConfiguration::read(&options.config)?;
    let boot_id = std::fs::read_to_string(BOOT_ID)
        .map_err(NodeError::BootId)?
        .trim()
        .to_owned();
    let Some(opened) = open(&options, &driver_name, &boot_id, &shutdown).await? else {
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
    let driver = Arc::new(HostDevices::start(configuration, options.host.clone(), search).await);
    let (cluster, _) = watch::channel(opened.cluster.clone());
    let node_in_doubt = Arc::new(Notify::new());
    let (owner, companion, devices) = Owner::start(OwnerOptions {
        driver_name: driver_name.clone(),
        node_name: options.node_name.clone(),
        resources: resources.clone(),
        driver,
        opened,
        cluster: cluster.subscribe(),
        node_in_doubt: node_in_doubt.clone(),
    })
    .await;
    let owner = tokio::spawn(owner.run());

    let (standing_sender, standing) = watch::channel(Standing {
        reason: "Starting".to_owned(),
        ..Standing::default()
    });
    let publisher = Publisher {
        client: PublisherClient(options.client.clone()),
        driver_name: driver_name.clone(),
        node_name: options.node_name.clone(),
        devices,
        cluster: cluster.clone(),
        standing,
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
    let served = doors.serve(Arc::new(companion), standing_sender, shutdown).await;
    let owner = owner.await.map_err(NodeError::Broken);
    stop_publishing.cancel();
    let publisher = publisher.await.map_err(NodeError::Broken);
    served.and(owner).and(publisher)
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
    options: &NodeOptions,
    driver_name: &DriverName,
    boot_id: &str,
    shutdown: &CancellationToken,
) -> Result<Option<Opened>, NodeError> {
    let until = Instant::now() + LOCK_PATIENCE;
    let mut told = false;
    loop {
        let state = options.kubelet_root.join("plugins").join(driver_name.as_str());
        let (driver_name, cdi, boot_id) = (driver_name.clone(), options.cdi_dir.clone(), boot_id.to_owned());
        let opened = spawn_blocking(move || Store::open(&driver_name, &state, &cdi, &boot_id)).await;
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

/// The doors of kubelet that this companion opens.
struct Doors {
    paths: KubeletPaths,
    driver_name: DriverName,
    resources: BTreeMap<String, String>,
    cluster: watch::Receiver<ClusterFacts>,
}

impl Doors {
    /// Keeps the doors open until the shutdown, or until one cannot be opened.
    async fn serve<C: Companion>(
        self,
        companion: Arc<C>,
        standing: watch::Sender<Standing>,
        shutdown: CancellationToken,
    ) -> Result<(), NodeError> {
        let ours = shutdown.child_token();
        let _end_with_this = ours.clone().drop_guard();
        let mut doors = JoinSet::new();
        let (state, claims) = watch::channel(DoorState::Starting);
        let mut states = Vec::new();
        for resource_name in self.resources.into_keys() {
            let (state, resource) = watch::channel(DoorState::Starting);
            states.push((resource_name.clone(), resource));
            let (companion, paths) = (companion.clone(), self.paths.clone());
            doors.spawn(door::device_plugin::serve(
                companion,
                paths,
                resource_name,
                state,
                ours.clone(),
            ));
        }
        let follow = follow(self.cluster.clone(), claims, states, standing);
        doors.spawn(serve_claims(
            companion,
            self.paths,
            self.driver_name,
            self.cluster,
            state,
            ours.clone(),
        ));
        tokio::pin!(follow);
        let mut result = Ok(());
        let mut followed = false;
        loop {
            tokio::select! {
                () = &mut follow, if !followed => followed = true,
                ended = doors.join_next() => match ended {
                    None => return result,
                    Some(ended) => {
                        let ended = ended.map_err(NodeError::Broken).and_then(|ended| ended.map_err(NodeError::from));
                        if ended.is_err() && result.is_ok() {
                            // The others are closed with the calls that they have, and then all of it ends.
                            ours.cancel();
                            result = ended;
                        }
                    }
                },
            }
        }
    }
}

/// The door for claims: open while the cluster has claims of the version that we serve, or was not there to ask since.
async fn serve_claims<C: Companion>(
    companion: Arc<C>,
    paths: KubeletPaths,
    driver_name: DriverName,
    mut cluster: watch::Receiver<ClusterFacts>,
    state: watch::Sender<DoorState>,
    shutdown: CancellationToken,
) -> Result<(), DoorError> {
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            wanted = cluster.wait_for(|facts| facts.serves_claims == Some(true)) => if wanted.is_err() { return Ok(()) },
        }
        let open = shutdown.child_token();
        let door = door::dra::serve(
            companion.clone(),
            paths.clone(),
            driver_name.to_string(),
            state.clone(),
            open.clone(),
        );
        tokio::pin!(door);
        let given_up = async {
            cluster
                .wait_for(|facts| facts.serves_claims == Some(false))
                .await
                .is_ok()
        };
        let given_up = tokio::select! {
            ended = &mut door => return ended,
            given_up = given_up => given_up,
        };
        if given_up {
            open.cancel();
        }
        door.await?;
    }
}

/// Says how the companion stands, whenever a door or the cluster changes it, until a door has ended.
async fn follow(
    mut cluster: watch::Receiver<ClusterFacts>,
    mut claims: watch::Receiver<DoorState>,
    mut resources: Vec<(String, watch::Receiver<DoorState>)>,
    standing: watch::Sender<Standing>,
) {
    let mut warned = false;
    loop {
        let serves_claims = cluster.borrow_and_update().serves_claims;
        if serves_claims == Some(false) && !warned {
            warned = true;
            warn!(
                "this cluster does not serve resource.k8s.io/v1alpha2: claims are not offered, extended resources are"
            );
        }
        let mut doors: Vec<(String, DoorState)> = resources
            .iter_mut()
            .map(|(name, state)| (name.clone(), state.borrow_and_update().clone()))
            .collect();
        let claims_now = claims.borrow_and_update().clone();
        if serves_claims != Some(false) {
            doors.push(("claims".to_owned(), claims_now));
        }
        let now = judge(&doors, serves_claims);
        standing.send_if_modified(|published| {
            let changed = *published != now;
            *published = now;
            changed
        });
        let changes = resources.iter_mut().map(|(_, state)| Box::pin(state.changed()));
        let any_resource = futures::future::select_all(changes.chain([Box::pin(claims.changed())]));
        tokio::select! {
            (changed, ..) = any_resource => if changed.is_err() { return },
            Ok(()) = cluster.changed() => {}
        }
    }
}

fn judge(doors: &[(String, DoorState)], serves_claims: Option<bool>) -> Standing {
    let standing = |ready, reason: &str, message: String| Standing {
        ready,
        reason: reason.to_owned(),
        message,
    };
    for (name, state) in doors {
        match state {
            DoorState::Rejected { message } => {
                return standing(
                    false,
                    "Rejected",
                    format!("kubelet refuses the door for {name}: {message}"),
                );
            }
            DoorState::Starting | DoorState::Closed => {
                return standing(false, "Starting", format!("the door for {name} is not open"));
            }
            DoorState::Waiting | DoorState::Registered => {}
        }
    }
    let message = match serves_claims {
        Some(false) => {
            "kubelet is served; this cluster does not serve resource.k8s.io/v1alpha2, so claims are not offered"
        }
        _ => "kubelet is served",
    };
    standing(true, "Serving", message.to_owned())
}
