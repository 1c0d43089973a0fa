//! A companion built in code: any [`NodeDriver`] with all of kubelet's APIs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Streaming;
use tracing::{info, warn};

use super::kubelet_apis::{ClaimsEndpoint, KubeletApis, ServedClaims};
use super::mounted::mounted;
use super::{NodeError, NodeOptions};
use crate::api::crd::Devices;
use crate::api::proto::node_records::HandOverResponse;
use crate::core::discovery::device_events::DeviceEvent;
use crate::core::names::DriverName;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::containers::WithdrawnDevices;
use crate::core::prepare::device_plugin::ExtendedResource;
use crate::core::prepare::recovery::running_claims;
use crate::node::admin::{self, Companion};
use crate::node::claim_watch::ClaimWatch;
use crate::node::container_runtime::{ContainerRuntime, CriClient};
use crate::node::context::{EventLimit, NodeContext};
use crate::node::driver::NodeDriver;
use crate::node::hand_over::{self, HandOver};
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::dra::device_health::DeviceHealth;
use crate::node::kubelet::dra::structured::ClaimReader;
use crate::node::kubelet::dra::{self, DraApi};
use crate::node::kubelet::pod_resources::{KubeletGrants, PodResourcesClient, withdrawn_devices};
use crate::node::kubelet::{KubeletApiError, KubeletPaths};
use crate::node::metrics::Metrics;
use crate::node::orphans::OrphanCheck;
use crate::node::publish;
use crate::node::publish::inventory::{InventoryPublisher, RegistrationStatus};
use crate::node::reload::ConfiguredResources;
use crate::node::service::{Backend, NodeService};
use crate::node::state::storage::disk::Disk;
use crate::node::state::storage::{Opened, Paths, Store, StoreError, boot_id};
use crate::node::state::{Grants, NodeState, NodeStateOptions};

/// How long to wait for another companion on the node to end, as during an update, and for a checkpoint that cannot be read.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of the attempts.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// The companion of one node.
///
/// ```no_run
/// use drayman::node::driver::{Device, ContainerEdits, NodeDriver, NodeDriverError};
/// use drayman::node::ExtendedResource;
/// use drayman::node::{Node, NodeError};
/// use futures::{Stream, stream};
/// use tokio_util::sync::CancellationToken;
///
/// struct Sensors;
///
/// impl NodeDriver for Sensors {
///     fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
///         let device = Device { name: "roof".into(), kind: "sensor".into(), ..Device::default() };
///         stream::iter([vec![device]])
///     }
///
///     async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
///         let environment = [("SENSOR".to_owned(), device.to_owned())].into();
///         Ok(ContainerEdits { environment, ..ContainerEdits::default() })
///     }
/// }
///
/// # async fn example(client: kube::Client, shutdown: CancellationToken) -> Result<(), NodeError> {
/// Node::builder(Sensors, "node-a", client)
///     .driver_name("sensors.example.com")
///     .extended_resource("example.com/sensor", ExtendedResource::of_kind("sensor"))
///     .run(shutdown)
///     .await
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Node;

/// A companion that has not started.
pub struct NodeBuilder<D> {
    pub(super) driver: D,
    /// The configuration file, and the host's paths except `/dev`, are for the built-in discovery only.
    pub(super) options: NodeOptions,
    pub(super) resources: BTreeMap<String, ExtendedResource>,
    /// Overrides `resources` with ones that change.
    pub(super) changing: Option<watch::Receiver<Arc<ConfiguredResources>>>,
    /// Events about the node besides those about its devices.
    pub(super) notices: Option<mpsc::Receiver<DeviceEvent>>,
}

impl Node {
    /// A companion for the devices of `driver` on this node (`spec.nodeName` of its pod).
    pub fn builder<D: NodeDriver>(
        driver: D,
        node_name: impl Into<String>,
        client: kube::Client,
    ) -> NodeBuilder<D> {
        NodeBuilder {
            driver,
            options: NodeOptions::new(node_name, PathBuf::new(), client),
            resources: BTreeMap::new(),
            changing: None,
            notices: None,
        }
    }
}

impl<D: NodeDriver> NodeBuilder<D> {
    /// The driver name, which is `driverName` of its ResourceClasses. A DNS subdomain of at most 63 characters that begins with a
    /// letter; `drayman.dev` by default. Two companions on one node need different names.
    #[must_use]
    pub fn driver_name(mut self, name: impl Into<String>) -> Self {
        self.options.driver_name = name.into();
        self
    }

    /// Kubelet's directories. The defaults are kubelet's own.
    #[must_use]
    pub fn kubelet(mut self, paths: KubeletPaths) -> Self {
        self.options.kubelet_root = paths.root_dir;
        self.options.device_plugin_dir = paths.device_plugin_dir;
        self
    }

    /// How extended resources register with kubelet; [`PluginRegistration::KubeletSocket`] by default.
    #[must_use]
    pub fn plugin_registration(mut self, registration: PluginRegistration) -> Self {
        self.options.plugin_registration = registration;
        self
    }

    /// A CDI directory of the container runtime; `/var/run/cdi` by default.
    #[must_use]
    pub fn cdi_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.options.cdi_dir = directory.into();
        self
    }

    /// How long a claim may be missing from kubelet's list before it is checked.
    #[must_use]
    pub fn orphan_grace(mut self, grace: Duration) -> Self {
        self.options.orphan_grace = grace;
        self
    }

    /// The container runtime's CRI socket, which shows the containers that still have a device; by default the usual paths of
    /// containerd, CRI-O and k3s.
    #[must_use]
    pub fn container_runtime_socket(mut self, socket: Option<PathBuf>) -> Self {
        self.options.runtime_socket = socket;
        self
    }

    /// Where the host's `/dev` is visible to this process; `/dev` by default.
    #[must_use]
    pub fn dev_root(mut self, directory: impl Into<PathBuf>) -> Self {
        self.options.host.dev = directory.into();
        self
    }

    /// Offers the devices of a kind as an extended resource (`example.com/sensor`), except devices whose
    /// [mode](crate::node::driver::Device::mode) is `Claims`.
    #[must_use]
    pub fn extended_resource(mut self, name: impl Into<String>, resource: ExtendedResource) -> Self {
        self.resources.insert(name.into(), resource);
        self
    }

    /// The metrics. Keep a clone to read them.
    #[must_use]
    pub fn metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.options.metrics = metrics;
        self
    }

    /// Runs the companion until the token is cancelled.
    ///
    /// The prepared claims are recovered before any endpoint is served. An unreachable API server does not prevent the start:
    /// claims are served if it was once known to serve them, or if claims are prepared. Errors are returned at the start or when a task
    /// panics. After a clean stop, calls in flight have had 5 s to be answered, the sockets are removed and the inventory says "not ready".
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), NodeError> {
        let options = &self.options;
        let driver_name = DriverName::parse(&options.driver_name)?;
        let context = NodeContext {
            client: options.client.clone(),
            driver_name: driver_name.clone(),
            node_name: options.node_name.clone(),
            metrics: options.metrics.clone(),
            events: EventLimit::default(),
        };
        let runtime = container_runtime(
            options.runtime_socket.as_deref(),
            &options.kubelet_root,
            &options.host.dev,
        );
        let (node, backend) = NodeService::new(runtime.clone(), options.metrics.clone());
        let (inventory, devices) = watch::channel(Arc::default());
        let (cluster, _) = watch::channel(ClusterFacts::default());
        let endpoint = ClaimsEndpoint {
            node: node.clone(),
            paths: options.kubelet(),
            structured: DraApi::Structured {
                claims: ClaimReader::new(context.client.clone(), context.driver_name.clone()),
                health: DeviceHealth {
                    node_name: options.node_name.clone(),
                    devices: devices.clone(),
                },
            },
            driver_name,
            cluster: cluster.subscribe(),
        };
        let mut claims = endpoint.spawn();
        let channels = Channels {
            node,
            backend,
            inventory,
            devices,
            cluster,
        };
        let ended = self.run_with(context, runtime, channels, &mut claims, shutdown);
        let ended = ended.await;
        claims.close().await;
        ended
    }

    /// Opens the checkpoint, or takes over from the companion that has it. Publishes the stored facts about the cluster. `None` if the shutdown
    /// comes first.
    async fn opened(
        &self,
        paths: &Paths,
        cluster: &watch::Sender<ClusterFacts>,
        claims: &ServedClaims,
        shutdown: &CancellationToken,
    ) -> Result<Option<Opened>, NodeError> {
        let boot_id = boot_id().map_err(NodeError::BootId)?;
        let options = &self.options;
        let socket = admin::socket(&paths.state, &options.kubelet_root).path;
        let asked = CancellationToken::new();
        let open = || {
            open(
                &options.disk,
                paths,
                &boot_id,
                &options.registration_status,
                &asked,
                shutdown,
            )
        };
        let opened = tokio::select! {
            opened = open() => opened?,
            offer = hand_over::wait_for_offer(|| Companion::ask_for_hand_over(socket.clone()), &asked) => {
                // The time limit begins again: the other companion ends after kubelet has registered this one.
                tokio::select! {
                    opened = open() => opened?,
                    () = take_over(offer, cluster, claims) => open().await?,
                }
            }
        };
        let Some(mut opened) = opened else {
            return Ok(None);
        };
        let kubelet = options.kubelet();
        dra::remove_stale_sockets(&kubelet, paths.driver.as_str()).await;
        ask_kubelet(&mut opened, &paths.driver, &kubelet).await;
        cluster.send_modify(|facts| {
            let handed_over = facts.claims;
            facts.clone_from(&opened.cluster);
            facts.claims = facts.claims.or(handed_over);
        });
        Ok(Some(opened))
    }

    async fn run_with(
        self,
        context: NodeContext,
        runtime: Option<Arc<dyn ContainerRuntime>>,
        Channels {
            node,
            backend,
            inventory,
            devices,
            cluster,
        }: Channels,
        claims: &mut ServedClaims,
        shutdown: CancellationToken,
    ) -> Result<(), NodeError> {
        let (kubelet, cdi_dir) = (self.options.kubelet(), self.options.cdi_dir.clone());
        let driver_name = context.driver_name.clone();
        let paths = Paths::new(driver_name.clone(), &kubelet.root_dir, &cdi_dir);
        let Some(opened) = self.opened(&paths, &cluster, claims, &shutdown).await? else {
            return Ok(());
        };
        let options = self.options;
        let prepared_by = ClaimsApi::of_prepared(&opened.prepared_claims);
        claims.recovered(prepared_by);
        let node_in_doubt = Arc::new(Notify::new());
        let resources = self
            .changing
            .unwrap_or_else(|| watch::channel(Arc::new(self.resources)).1);
        let (sender, allocated) = watch::channel(Arc::default());
        let (grants, withdrawn) = kubelet_shows(&kubelet, &driver_name).await?;
        let starting = NodeState::start(NodeStateOptions {
            runtime,
            paths: paths.clone(),
            orphan_grace: options.orphan_grace,
            node_name: options.node_name,
            resources: resources.clone(),
            driver: Arc::new(self.driver),
            opened,
            cluster: cluster.subscribe(),
            node_in_doubt: node_in_doubt.clone(),
            grants: Some(grants),
            allocated,
            withdrawn,
            metrics: options.metrics,
            backend,
            inventory,
        });
        // The driver's first list may take a while.
        let owner = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            started = starting => started,
        };
        let owner = tokio::spawn(owner.run());
        // These tasks have clones of the `NodeService` and end before it.
        let stop_care = CancellationToken::new();
        let _end_of_care = stop_care.clone().drop_guard();
        let claim_watch = ClaimWatch {
            context: context.clone(),
            cluster: cluster.subscribe(),
            resources: resources.clone(),
            sender,
        };
        tokio::spawn(claim_watch.run(stop_care.clone()));

        let (quarantine, in_quarantine) = watch::channel(BTreeMap::new());
        let orphan_check = OrphanCheck {
            context: context.clone(),
            node: node.clone(),
            cluster: cluster.subscribe(),
            quarantine,
        };
        let orphan_check = tokio::spawn(orphan_check.run(stop_care.clone()));
        let hand_over = HandOver::new(shutdown.clone(), cluster.subscribe());
        let socket = admin::socket(&paths.state, &kubelet.root_dir);
        let records = admin::serve(socket, node.clone(), hand_over.clone(), stop_care.clone());
        let records = records.await.map_err(KubeletApiError::from)?;
        let ending = AbortOnDropHandle::new(tokio::spawn(end_after(shutdown, hand_over, claims.end())));

        let publisher = InventoryPublisher {
            context,
            devices,
            cluster: cluster.clone(),
            prepared_by,
            registration_status: options.registration_status.subscribe(),
            quarantine: in_quarantine,
            node_in_doubt,
            notices: self.notices,
        };
        let stop_publishing = CancellationToken::new();
        let publisher = tokio::spawn(publish::run(publisher, stop_publishing.clone()));

        let apis = KubeletApis {
            mounted: mounted(&paths, &kubelet),
            paths: kubelet,
            plugin_registration: options.plugin_registration,
            driver_name,
            resources,
            cluster: cluster.subscribe(),
        };
        // Drops the last `NodeService` when the endpoints end.
        let served = apis.serve(node, options.registration_status, claims).await;
        drop(ending);
        // After an error, too: the state task ends with the last `NodeService`.
        claims.close().await;
        stop_care.cancel();
        records.closed().await;
        let orphan_check = orphan_check.await.map_err(NodeError::Broken);
        let owner = owner.await.map_err(NodeError::Broken);
        stop_publishing.cancel();
        let publisher = publisher.await.map_err(NodeError::Broken);
        served.and(orphan_check).and(owner).and(publisher)
    }
}

/// Channels that the endpoints and the state task share.
struct Channels {
    node: NodeService,
    backend: Backend,
    inventory: watch::Sender<Arc<Devices>>,
    devices: watch::Receiver<Arc<Devices>>,
    cluster: watch::Sender<ClusterFacts>,
}

/// Has kubelet call this companion instead of the one that offers the hand-over. The calls wait until this one has the node's state.
async fn take_over(
    mut offer: Streaming<HandOverResponse>,
    cluster: &watch::Sender<ClusterFacts>,
    claims: &ServedClaims,
) {
    info!("the other companion of this node ends; this one registers with kubelet");
    // Only a companion of this mode hands over.
    cluster.send_modify(|facts| facts.claims = Some(ClaimsApi::Structured));
    claims.begin();
    tokio::select! {
        () = claims.registered() => {}
        _ = offer.message() => {}
    }
}

/// Ends the endpoints at the shutdown, after the hand-over to the next companion.
async fn end_after(shutdown: CancellationToken, hand_over: HandOver, end: CancellationToken) {
    shutdown.cancelled().await;
    hand_over.complete().await;
    end.cancel();
}

/// The devices that containers hold: a source for the current ones, and those of withdrawn extended resources.
async fn kubelet_shows(
    kubelet: &KubeletPaths,
    driver: &DriverName,
) -> Result<(Arc<dyn Grants>, Option<WithdrawnDevices>), NodeError> {
    let grants = Arc::new(KubeletGrants::new(kubelet, driver));
    let (kubelet, driver) = (kubelet.clone(), driver.clone());
    let withdrawn = spawn_blocking(move || withdrawn_devices(&kubelet, &driver));
    Ok((grants, withdrawn.await.map_err(NodeError::Broken)?))
}

/// The container runtime, if it has a socket.
fn container_runtime(
    socket: Option<&Path>,
    kubelet_root: &Path,
    dev: &Path,
) -> Option<Arc<dyn ContainerRuntime>> {
    let Some(runtime) = CriClient::find(socket, kubelet_root, dev) else {
        info!(
            reason = "ContainerRuntimeUnavailable",
            "no socket of a container runtime was found, so devices of force-deleted pods are freed only by kubelet or manually"
        );
        return None;
    };
    Some(Arc::new(runtime))
}

/// Opens the checkpoint. Waits for a limited time if another companion has the lock or a read fails. `None` if the shutdown comes
/// first.
///
/// A companion that waits for another one is ready once it has asked for the hand-over, so that a rolling update with `maxSurge` ends the other
/// one.
async fn open(
    disk: &Disk,
    paths: &Paths,
    boot_id: &str,
    registration_status: &watch::Sender<RegistrationStatus>,
    asked: &CancellationToken,
    shutdown: &CancellationToken,
) -> Result<Option<Opened>, NodeError> {
    let until = Instant::now() + LOCK_TIMEOUT;
    let mut is_logged = false;
    loop {
        let (disk, paths, boot_id) = (disk.clone(), paths.clone(), boot_id.to_owned());
        let opened = spawn_blocking(move || Store::open_on(&disk, &paths, &boot_id)).await;
        match opened.map_err(NodeError::Broken)? {
            Err(StoreError::Locked(lock)) if Instant::now() < until => {
                if !is_logged && asked.is_cancelled() {
                    is_logged = true;
                    info!(lock = %lock.display(), "another companion runs on this node; waiting for its end");
                    registration_status.send_replace(RegistrationStatus::standby());
                }
            }
            Err(error) if error.is_of_a_read() && Instant::now() < until => {
                if !is_logged {
                    is_logged = true;
                    warn!(
                        reason = error.reason(),
                        "cannot read the prepared claims of this node; retrying: {error}"
                    );
                }
            }
            opened => {
                registration_status.send_replace(RegistrationStatus::starting());
                return Ok(Some(opened?));
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(None),
            () = sleep(LOCK_PAUSE) => {}
        }
    }
}

/// Asks kubelet for the claims of its containers if the checkpoint is incomplete. Does not wait for a kubelet that does not answer:
/// it may be waiting for us.
async fn ask_kubelet(opened: &mut Opened, driver: &DriverName, kubelet: &KubeletPaths) {
    if opened.complete {
        return;
    }
    match PodResourcesClient::new(kubelet).list().await {
        Ok(pods) => opened.add_running(&running_claims(driver, &pods)),
        Err(error) if opened.rebuilt.is_some() => {
            warn!(
                reason = error.reason(),
                "kubelet does not show which claims its containers have: {error}"
            );
        }
        // A new node.
        Err(_) => {}
    }
}

impl<D> std::fmt::Debug for NodeBuilder<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeBuilder")
            .field("options", &self.options)
            .field("resources", &self.resources)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_companion_is_ready_while_it_waits_for_another() {
        let root = tempfile::tempdir().unwrap();
        let driver = DriverName::parse("drayman.dev").unwrap();
        let paths = Paths::new(driver, root.path(), &root.path().join("cdi"));
        let (registration_status, mut seen) = watch::channel(RegistrationStatus::starting());
        let shutdown = CancellationToken::new();
        let disk = Disk::default();
        let asked = CancellationToken::new();
        let first = open(&disk, &paths, "boot", &registration_status, &asked, &shutdown);
        let first = first.await.unwrap().unwrap();
        let waiting = tokio::spawn(async move {
            asked.cancel();
            let opened = open(&disk, &paths, "boot", &registration_status, &asked, &shutdown).await;
            (opened, registration_status)
        });
        seen.wait_for(|registration_status| *registration_status == RegistrationStatus::standby())
            .await
            .unwrap();
        drop(first);
        seen.wait_for(|registration_status| *registration_status == RegistrationStatus::starting())
            .await
            .unwrap();
        let (opened, _standing) = waiting.await.unwrap();
        assert!(opened.unwrap().is_some());
    }
}
