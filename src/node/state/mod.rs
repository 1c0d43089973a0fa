//! The state task: it owns the node's state, and serves requests through a handle.
//!
//! Requests are served one at a time. If a caller disconnects, its request stays in the queue; when kubelet retries, the second request
//! finds the work done. File access runs on a separate thread.

mod devices;
mod handle;
mod pod_resources;
mod publisher;
mod records;
mod recovery;
mod resources;
mod runtime;
pub mod storage;
mod withdrawn;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use crate::core::prepare::allocated_claims::AllocatedClaims;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claim_uid::ClaimUid;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::containers::{Conflicting, Containers};
use crate::core::prepare::driver_name::DriverName;
use crate::core::prepare::inventory::Devices;
use crate::core::prepare::orphans::Orphans;
use crate::core::prepare::plan::{plan_unprepare, taken};
use crate::core::prepare::prepared_claims::PreparedClaims;
use crate::core::prepare::refusal::Refusal;
use crate::core::prepare::request::{
    ClaimToPrepare, ClaimToUnprepare, ExtendedResource, NodeIdentity, PluginDevice,
};
use crate::core::prepare::retries::{Missing, Retries};
use crate::core::prepare::step::Step;
use crate::core::prepare::withdrawn::WithdrawnDevices;
use crate::node::companion::CompanionError;
use crate::node::container_runtime::ContainerRuntime;
use crate::node::driver::{NodeDriver, PreparedClaim};
use crate::node::kubelet::pod_resources::Grants;
use crate::node::metrics::Figures;
use crate::node::state::storage::{Opened, Places, Store};

use devices::{in_time, listen_to};
pub use handle::NodeStateHandle;
use handle::{Failure, Offered, Request};
use pod_resources::{Looking, Waiting};
use publisher::{Noted, Told};
pub(in crate::node) use records::Quarantine;
pub use records::{RecordsHandle, ReleaseError};

/// Maximum number of queued requests; further callers wait for a slot.
const QUEUE: usize = 64;
/// Maximum length of a logged name, in characters: valid Kubernetes names are no longer.
const SHOWN_MAX: usize = 253;
/// Timeout for one driver call. Kubelet gives up after 45 s and retries.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(10);

/// An extended resource, and the published list of its devices.
struct Resource {
    offered: ExtendedResource,
    devices: watch::Sender<Vec<PluginDevice>>,
}

/// Options to start the state task.
#[derive(Debug)]
pub struct NodeStateOptions<D> {
    /// The driver name, from which CDI ids derive, and the paths of the driver's and kubelet's files.
    pub places: Places,
    /// How long a claim may be missing from kubelet's list before it is checked.
    pub orphan_grace: Duration,
    /// Name of the Node object.
    pub node_name: String,
    /// The extended resources, by name, updated on each change.
    pub resources: watch::Receiver<Arc<BTreeMap<String, ExtendedResource>>>,
    /// The node driver, which finds and prepares the devices.
    pub driver: Arc<D>,
    /// The state found on the node.
    pub opened: Opened,
    /// The container runtime, if it can report the devices of its containers.
    pub witness: Option<Arc<dyn ContainerRuntime>>,
    /// Facts from the API server.
    pub cluster: watch::Receiver<ClusterFacts>,
    /// Notified when the known Node object may be outdated.
    pub node_in_doubt: Arc<Notify>,
    /// Kubelet's view of its containers, for kinds with mode `both`.
    pub grants: Option<Arc<dyn Grants>>,
    /// The devices of this node that are allocated to claims, from the API server, for kinds with mode `both`.
    pub announcements: watch::Receiver<Arc<AllocatedClaims>>,
    /// Extended resources of earlier processes whose devices containers hold, from kubelet's checkpoint. `None` if kubelet cannot be
    /// queried for its containers; then no device is withheld for containers of withdrawn resources.
    pub former: Option<WithdrawnDevices>,
    /// The metrics.
    pub figures: Arc<Figures>,
}

/// The state task, before it runs.
pub struct NodeState<D> {
    driver_name: DriverName,
    places: Places,
    orphans: Noted<Orphans>,
    /// The number of prepared claims.
    held: watch::Sender<usize>,
    /// Notified when a claim must be checked.
    look_due: Arc<Notify>,
    witness: Option<Arc<dyn ContainerRuntime>>,
    /// Counts the completed checks of claims whose devices another claim needs.
    decided: watch::Sender<u64>,
    /// When the CDI files of claims that the API server no longer shows as holders were removed.
    withdrawn: BTreeMap<ClaimUid, Instant>,
    driver: Arc<D>,
    store: Arc<Store>,
    /// Shared with the thread that accesses files, and never changed during such an access.
    prepared_claims: Noted<Arc<PreparedClaims>>,
    node: NodeIdentity,
    cluster: watch::Receiver<ClusterFacts>,
    node_in_doubt: Arc<Notify>,
    found: watch::Receiver<Arc<Devices>>,
    /// The found devices that have been fully processed.
    devices: Arc<Devices>,
    /// The found devices, and held devices that are gone.
    inventory: Arc<Devices>,
    /// The inventory as published to the API server.
    published: watch::Sender<Arc<Devices>>,
    /// The configured extended resources.
    wanted: watch::Receiver<Arc<BTreeMap<String, ExtendedResource>>>,
    resources: Noted<BTreeMap<String, Resource>>,
    /// The extended resources as served by the device plugin API.
    offered: watch::Sender<Arc<BTreeMap<String, Offered>>>,
    requests: mpsc::Receiver<Request>,
    grants: Option<Arc<dyn Grants>>,
    announcements: watch::Receiver<Arc<AllocatedClaims>>,
    allocated_claims: Noted<AllocatedClaims>,
    containers: Noted<Containers>,
    conflicting: Noted<Conflicting>,
    /// Withdrawn resources, and lost devices, that containers still hold.
    former: Noted<WithdrawnDevices>,
    /// Whether kubelet can be queried for these.
    withholds_former: bool,
    /// The time of the next such query.
    former_due: Instant,
    /// The query in progress.
    looking: Looking,
    /// Recent grants of this process that kubelet may not show yet, by resource.
    granted: BTreeMap<String, Containers>,
    /// The CDI files that could not be written.
    retries: Retries,
    /// The inputs of the current inventory and lists.
    told: Told,
    /// Whether a failed query has been logged.
    complained: bool,
    /// When this process started.
    since: Instant,
    figures: Arc<Figures>,
}

impl<D> std::fmt::Debug for NodeState<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owner")
            .field("prepared_claims", &self.prepared_claims)
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl<D: NodeDriver> NodeState<D> {
    /// Recovers from the state of the last process. Returns the task, its handle and the published inventory.
    pub async fn start(
        options: NodeStateOptions<D>,
    ) -> (Self, NodeStateHandle, watch::Receiver<Arc<Devices>>) {
        let Opened {
            store,
            prepared_claims,
            cluster,
            files,
            rebuilt: _,
            complete: _,
        } = options.opened;
        let (sender, requests) = mpsc::channel(QUEUE);
        let (publish, published) = watch::channel(Arc::default());
        let (offered, seen) = watch::channel(Arc::default());
        let allocated_claims = Noted::new(options.announcements.borrow().as_ref().clone());
        let (held, holds) = watch::channel(0);
        let look_due = Arc::new(Notify::new());
        let (decided, decisions) = watch::channel(0);
        let mut orphans = Orphans::new(options.orphan_grace);
        if options.witness.is_some() {
            orphans = orphans.with_witness();
        }
        let has_witness = options.witness.is_some();
        let mut owner = Self {
            driver_name: options.places.driver.clone(),
            places: options.places,
            orphans: Noted::new(orphans),
            witness: options.witness,
            decided,
            withdrawn: BTreeMap::new(),
            held,
            look_due: look_due.clone(),
            found: listen_to(&*options.driver).await,
            driver: options.driver,
            store: Arc::new(store),
            prepared_claims: Noted::new(Arc::new(prepared_claims)),
            node: NodeIdentity {
                name: options.node_name,
                uid: cluster.node_uid,
            },
            cluster: options.cluster,
            node_in_doubt: options.node_in_doubt,
            devices: Arc::default(),
            inventory: Arc::default(),
            published: publish,
            wanted: options.resources,
            resources: Noted::default(),
            offered,
            requests,
            grants: options.grants,
            announcements: options.announcements,
            allocated_claims,
            containers: Noted::default(),
            conflicting: Noted::default(),
            withholds_former: options.former.is_some(),
            former: Noted::new(options.former.unwrap_or_default()),
            former_due: Instant::now(),
            looking: Looking::default(),
            granted: BTreeMap::new(),
            retries: Retries::default(),
            told: Told::default(),
            complained: false,
            since: Instant::now(),
            figures: options.figures.clone(),
        };
        owner.change_resources();
        owner.recover(&files).await;
        owner.devices = owner.found.borrow_and_update().clone();
        // No request is served yet, so no caller waits for this.
        owner.ask_kubelet_and_wait(None).await;
        owner.take_stock();
        owner.refresh_named_devices().await;
        owner.publish();
        (
            owner,
            NodeStateHandle {
                requests: sender,
                resources: seen,
                held: holds,
                look_due,
                decisions,
                has_witness,
                figures: options.figures,
            },
            published,
        )
    }

    /// Serves requests until the last handle is dropped.
    pub async fn run(mut self) {
        loop {
            let retry = self.retries.next().map(|due| self.since + due);
            tokio::select! {
                // Updates are processed before any request that depends on them. Both kinds are rare.
                biased;
                Ok(()) = self.cluster.changed() => self.learn().await,
                Ok(()) = self.wanted.changed() => {
                    self.change_resources();
                    self.ask_kubelet_for_a_change().await;
                    self.take_stock();
                    self.refresh_named_devices().await;
                }
                Ok(()) = self.found.changed() => self.refresh().await,
                Ok(()) = self.announcements.changed(), if self.has_both() => self.hear_of_claims(),
                looked = self.looking.done(), if self.looking.is_under_way() => self.take_up(looked).await,
                request = self.requests.recv() => match request {
                    Some(request) => self.serve(request).await,
                    None => return,
                },
                () = sleep_until(retry.unwrap_or(self.since)), if retry.is_some() => self.try_again().await,
                () = sleep_until(self.former_due), if !self.former.is_empty() && !self.looking.is_under_way() => self.ask_kubelet(),
                () = sleep(resources::LOOK_AGAIN), if self.looks_again() => self.ask_kubelet(),
            }
            self.take_stock();
            self.publish();
        }
    }

    async fn serve(&mut self, request: Request) {
        // If the caller is gone, the work is still done; only the response is dropped.
        match request {
            Request::Prepare(claims, answer) => {
                let withdrawn = BTreeSet::new();
                if claims.iter().any(|claim| self.waits_for_look(claim)) {
                    self.wait_for_look(Waiting::Prepare {
                        claims,
                        withdrawn,
                        answer,
                    });
                } else {
                    self.prepare_all(&claims, &withdrawn, None, answer).await;
                }
            }
            Request::Unprepare(claims, answer) => {
                for claim in &claims {
                    self.looking.withdraw(&claim.uid);
                }
                let mut answers = Vec::with_capacity(claims.len());
                for claim in claims {
                    let result = self.unprepare(&claim).await;
                    self.count("unprepare", result.as_ref().err());
                    report(
                        "unprepare",
                        &claim.namespace,
                        &claim.name,
                        &claim.uid,
                        result.as_ref().err(),
                    );
                    answers.push(result.map_err(CompanionError::from));
                }
                let _ = answer.send(answers);
            }
            Request::Allocate(resource, containers, answer) => {
                let result = self.allocate(&resource, &containers).await;
                self.count("allocate", result.as_ref().err());
                match &result {
                    Ok(_) => info!(resource, devices = ?containers, "allocate done"),
                    Err(failure) => {
                        warn!(resource, devices = ?containers, reason = failure.reason(), "allocate refused: {failure}");
                    }
                }
                let _ = answer.send(result.map_err(CompanionError::from));
            }
            Request::CheckStart(resource, devices, answer) => {
                let result = self.check_start(&resource, &devices).await;
                self.count("start", result.as_ref().err());
                if let Err(failure) = &result {
                    warn!(
                        resource,
                        ?devices,
                        reason = failure.reason(),
                        "start refused: {failure}"
                    );
                }
                let _ = answer.send(result.map_err(CompanionError::from));
            }
            Request::Records(request) => self.records(request).await,
        }
    }

    fn count(&self, operation: &'static str, failure: Option<&Failure>) {
        self.figures.handled(operation, failure.map(Failure::reason));
    }

    async fn prepare(
        &mut self,
        claim: &ClaimToPrepare,
        looked: Option<&Result<(), String>>,
    ) -> Result<Vec<String>, Failure> {
        let planned = self.plan(claim, looked);
        match &planned {
            // Either the request or the known Node object is outdated.
            Err(Refusal::EarlierNode { .. }) => self.node_in_doubt.notify_one(),
            // Either the holder is about to end, or kubelet has lost it.
            Err(Refusal::Held { device, .. } | Refusal::AllShares { device, .. }) => {
                let device = device.clone();
                self.contest_holders(&device);
            }
            _ => {}
        }
        let (uid, steps) = match planned {
            Ok(planned) => planned,
            Err(refusal) => return Err(self.with_container(refusal).await.into()),
        };
        self.orphans.change().forget(&uid);
        self.check_unwitnessed(&taken(&steps).collect()).await?;
        for device in taken(&steps) {
            self.check_unused(device).await?;
        }
        if let Err(failure) = self.carry_out(&steps).await {
            self.undo(&uid).await;
            return Err(failure);
        }
        self.retries.done(&Missing::OfClaim(uid.clone()));
        Ok(vec![self.driver_name.cdi_id(&uid)])
    }

    async fn unprepare(&mut self, claim: &ClaimToUnprepare) -> Result<(), Failure> {
        let steps = plan_unprepare(&self.prepared_claims, claim)?;
        self.carry_out(&steps).await
    }

    async fn carry_out(&mut self, steps: &[Step]) -> Result<(), Failure> {
        for step in steps {
            match step {
                Step::Inject(uid) => {
                    let container_edits = self.inject(uid).await?;
                    let found = self.found.borrow().clone();
                    Arc::make_mut(self.prepared_claims.change()).set_container_edits(
                        uid,
                        container_edits,
                        &found,
                    );
                    continue;
                }
                Step::Release(uid) => {
                    let what = format!("claim {uid}");
                    let claim = self.prepared_claim(uid);
                    in_time(what, self.driver.unprepare(&claim)).await?;
                    continue;
                }
                Step::Save(_) | Step::WriteCdi(_) | Step::RemoveCdi(_) => {}
            }
            let (step, prepared_claims, store) =
                (step.clone(), self.prepared_claims.clone(), self.store.clone());
            let performed = spawn_blocking(move || step.perform(&prepared_claims, &*store)).await;
            if let Some(changed) = performed.map_err(|_| Failure::Stopping)?? {
                *self.prepared_claims.change() = Arc::new(changed);
            }
        }
        Ok(())
    }

    /// The container edits that the driver makes for a claim, with a variable for each device.
    async fn inject(&self, uid: &ClaimUid) -> Result<ContainerEdits, Failure> {
        let claim = self.prepared_claim(uid);
        let made = in_time(format!("claim {uid}"), self.driver.prepare(&claim)).await?;
        // A driver that implements `prepare` itself may return one node twice.
        let mut container_edits = ContainerEdits::default();
        container_edits.extend(made);
        container_edits.name_devices(claim.devices.iter().map(String::as_str));
        container_edits.check_paths()?;
        Ok(container_edits)
    }

    async fn check_unused(&self, device: &str) -> Result<(), Failure> {
        in_time(format!("device {device:?}"), self.driver.check_unused(device)).await
    }

    /// The container edits that the driver makes for a device.
    async fn container_edits_of_device(&self, device: &str) -> Result<ContainerEdits, Failure> {
        let what = format!("device {device:?}");
        let mut container_edits = in_time(what, self.driver.container_edits(device)).await?;
        container_edits.name_devices([device]);
        Ok(container_edits)
    }

    fn prepared_claim(&self, uid: &ClaimUid) -> PreparedClaim {
        let entry = self.prepared_claims.entry(uid);
        PreparedClaim {
            uid: uid.to_string(),
            namespace: entry.map(|entry| entry.namespace.clone()).unwrap_or_default(),
            name: entry.map(|entry| entry.name.clone()).unwrap_or_default(),
            devices: entry
                .iter()
                .flat_map(|entry| &entry.devices)
                .map(|held| held.device.clone())
                .collect(),
        }
    }

    async fn learn(&mut self) {
        let facts = self.cluster.borrow_and_update().clone();
        self.node.uid.clone_from(&facts.node_uid);
        self.store.set_cluster(facts);
        if let Err(failure) = self.carry_out(&[Step::Save(Vec::new())]).await {
            warn!(
                reason = failure.reason(),
                "what the API server told is not stored yet: {failure}"
            );
        }
    }
}

fn report(what: &str, namespace: &str, name: &str, uid: &str, failure: Option<&Failure>) {
    // A refused request may be unvalidated, with names of any length.
    let [namespace, name, uid] =
        [namespace, name, uid].map(|text| text.chars().take(SHOWN_MAX).collect::<String>());
    match failure {
        None => info!(namespace, name, claim_uid = uid, "{what} done"),
        Some(failure) => warn!(
            namespace,
            name,
            claim_uid = uid,
            reason = failure.reason(),
            "{what} refused: {failure}"
        ),
    }
}

#[cfg(test)]
mod tests;
