//! The state task: it owns the node's state, keeps it on disk (`storage`), and serves the requests of
//! [`NodeService`](crate::node::service::NodeService).
//!
//! Requests are served one at a time. If a caller disconnects, its request stays in the queue; when kubelet retries, the second request
//! finds the work done.

mod device_plugin;
mod resources;
pub mod storage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use tokio::sync::{Notify, watch};
use tokio::task::{spawn_blocking, yield_now};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, error, info, warn};

use crate::api::crd::{Device, DeviceNumber, Devices, Mode};
use crate::api::proto::node_records::Holding;
use crate::core::names::{ClaimDevice, ClaimUid};
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::containers::{AllocatedClaims, WithdrawnDevices};
use crate::core::prepare::device_plugin::ExtendedResource;
use crate::core::prepare::inventory::{
    device_counts, inventory, is_as_found, plugin_devices, published, withhold,
};
use crate::core::prepare::kubelet_state::KubeletView;
use crate::core::prepare::orphans::{ApiView, Decision, Orphans, Question, RuntimeView};
use crate::core::prepare::plan::{
    Allocation, ClaimToPrepare, ClaimToUnprepare, DeviceResult, Missing, NodeIdentity, PlanStep, Refusal,
    Retries, plan_prepare, plan_unprepare, taken, takes_from_both,
};
use crate::core::prepare::prepared_claims::{
    ClaimChange, ClaimEdits, Entry, HeldDevice, PreparedClaims, share_a_node,
};
use crate::core::prepare::recovery::{
    holdings, plan_clearing, plan_explained, plan_free, plan_refresh, plan_release, plan_restoring,
    plan_restoring_one, plan_roll_back,
};
use crate::core::prepare::runtime_containers::{NewUser, RuntimeContainers, UnknownContainers};
use crate::node::container_runtime::{ContainerRuntime, RuntimeCheck};
use crate::node::driver::{self, NodeDriver, NodeDriverError, PreparedClaim};
use crate::node::metrics::Metrics;
use crate::node::service::{
    Backend, DRIVER_TIMEOUT, ListedContainers, NodeRequest, OrphanReport, Quarantine, Quarantined,
    ReleaseError, ServiceError,
};
use crate::node::state::storage::{Opened, Paths, Store};

pub use resources::Grants;
use resources::{ExtendedResources, KubeletQuery, PrepareAnswer, Versioned, WaitingRequest};

/// Interval between queries of kubelet's containers until the first answer, and while a claim waits for a container's device. Otherwise,
/// kubelet is queried only when a claim needs a device.
const QUERY_INTERVAL: Duration = Duration::from_secs(2);

/// How long a change of configuration or devices waits for kubelet, which normally answers within milliseconds. Without the wait, free
/// devices would be unhealthy until the answer. A slower answer is processed when it arrives.
const QUERY_TIMEOUT: Duration = Duration::from_millis(250);

/// Maximum length of a logged name, in characters: valid Kubernetes names are no longer.
const SHOWN_MAX: usize = 253;

/// Options to start the state task.
#[derive(Debug)]
pub struct NodeStateOptions<D> {
    /// The driver name, from which CDI ids derive, and the paths of the driver's and kubelet's files.
    pub paths: Paths,
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
    pub runtime: Option<Arc<dyn ContainerRuntime>>,
    /// Facts from the API server.
    pub cluster: watch::Receiver<ClusterFacts>,
    /// Notified when the known Node object may be outdated.
    pub node_in_doubt: Arc<Notify>,
    /// Kubelet's view of its containers, for kinds with mode `both`.
    pub grants: Option<Arc<dyn Grants>>,
    /// The devices of this node that are allocated to claims, from the API server, for kinds with mode `both`.
    pub allocated: watch::Receiver<Arc<AllocatedClaims>>,
    /// Extended resources of earlier processes whose devices containers hold, from kubelet's checkpoint. `None` if kubelet cannot be
    /// queried for its containers; then no device is withheld for containers of withdrawn resources.
    pub withdrawn: Option<WithdrawnDevices>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The requests.
    pub backend: Backend,
    /// Publishes the inventory.
    pub inventory: watch::Sender<Arc<Devices>>,
}

/// The state task, before it runs: the prepared claims and their storage, the extended resources, and the lists published about both.
pub struct NodeState<D> {
    /// The requests, and the values that a service reads without one.
    backend: Backend,
    cluster: watch::Receiver<ClusterFacts>,
    /// The devices that the driver finds.
    found: watch::Receiver<Arc<Devices>>,
    /// The configured extended resources.
    configured: watch::Receiver<Arc<BTreeMap<String, ExtendedResource>>>,
    /// The devices allocated to claims.
    allocated: watch::Receiver<Arc<AllocatedClaims>>,
    /// Notified when the known Node object may be outdated.
    node_in_doubt: Arc<Notify>,
    driver: DriverClient<D>,
    node: NodeIdentity,
    paths: Paths,
    store: Arc<Store>,
    prepared_claims: Versioned<PreparedClaims>,
    /// The CDI files that could not be written.
    retries: Retries,
    /// The devices that containers may have by name. Such a device has no CDI file while it is gone or its update fails, and must get it
    /// back afterwards.
    named_devices: BTreeSet<String>,
    orphans: Versioned<Orphans>,
    runtime: RuntimeCheck,
    /// The containers of the last own query.
    containers: Option<ListedContainers>,
    /// The found devices that have been fully processed.
    devices: Arc<Devices>,
    /// The found devices, and held devices that are gone.
    inventory: Arc<Devices>,
    /// The found devices and the versions of the other inputs that the inventory was built from. A node may have a thousand devices, and an
    /// Allocate takes about a millisecond, so lists are rebuilt only when one of their inputs may have changed.
    inventory_from: Option<(Arc<Devices>, [u64; 4])>,
    /// The inventory as published to the API server.
    published: watch::Sender<Arc<Devices>>,
    /// The inventory and the versions of the other inputs that the published lists were built from.
    lists_from: Option<(Arc<Devices>, [u64; 6])>,
    resources: ExtendedResources,
    query: KubeletQuery,
    started: Instant,
    metrics: Arc<Metrics>,
}

impl<D> std::fmt::Debug for NodeState<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeState")
            .field("prepared_claims", &self.prepared_claims)
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl<D: NodeDriver> NodeState<D> {
    /// Recovers from the state of the last process. Requests wait until the task runs.
    pub async fn start(options: NodeStateOptions<D>) -> Self {
        let Opened {
            store,
            prepared_claims,
            cluster,
            unknown_containers,
            files,
            ..
        } = options.opened;
        let orphans = Orphans::new(options.orphan_grace, options.runtime.is_some());
        let driver = DriverClient(options.driver);
        let found = driver.devices().await;
        let allocated = options.allocated.borrow().as_ref().clone();
        let withdrawn = options.withdrawn.filter(|_| options.grants.is_some());
        let mut state = Self {
            backend: options.backend,
            cluster: options.cluster,
            found,
            configured: options.resources,
            allocated: options.allocated,
            node_in_doubt: options.node_in_doubt,
            driver,
            node: NodeIdentity {
                name: options.node_name,
                uid: cluster.node_uid,
            },
            runtime: RuntimeCheck::new(
                options.runtime,
                options.paths.driver.clone(),
                UnknownContainers::resume(unknown_containers, prepared_claims.boot_id()),
            ),
            containers: None,
            paths: options.paths,
            store: Arc::new(store),
            prepared_claims: Versioned::new(prepared_claims),
            retries: Retries::default(),
            named_devices: BTreeSet::new(),
            orphans: Versioned::new(orphans),
            devices: Arc::default(),
            inventory: Arc::default(),
            inventory_from: None,
            published: options.inventory,
            lists_from: None,
            resources: ExtendedResources::new(allocated, withdrawn),
            query: KubeletQuery::new(options.grants),
            started: Instant::now(),
            metrics: options.metrics,
        };
        state.configure();
        state.recover(&files).await;
        state.devices = state.found.borrow_and_update().clone();
        state.runtime.offered(&state.devices);
        // No request is served yet, so no caller waits for this.
        state.query_and_wait(Duration::MAX).await;
        state.rebuild_inventory();
        state.refresh_named_devices().await;
        state.publish();
        state
    }

    /// Serves requests until the last service is dropped.
    pub async fn run(mut self) {
        loop {
            let retry = self.retries.next().map(|due| self.started + due);
            let withdrawn_due = self.query.withdrawn_due;
            // Absolute, so that frequent requests do not put off the query.
            let again_due = self.query.ended + QUERY_INTERVAL;
            tokio::select! {
                // Updates are processed before any request that depends on them. Both kinds are rare.
                biased;
                Ok(()) = self.cluster.changed() => self.update_cluster().await,
                Ok(()) = self.configured.changed() => {
                    self.configure();
                    self.query_and_wait(QUERY_TIMEOUT).await;
                    self.rebuild_inventory();
                    self.refresh_named_devices().await;
                }
                Ok(()) = self.found.changed() => self.refresh().await,
                Ok(()) = self.allocated.changed(), if self.has_both() => self.update_allocated(),
                finished = self.query.finished(), if self.query.is_running() => self.finish_query(finished).await,
                request = self.backend.requests.recv() => match request {
                    Some(request) => {
                        self.serve(request).await;
                        // Callers get most answers before the inventory is rebuilt.
                        yield_now().await;
                    }
                    None => return,
                },
                () = sleep_until(retry.unwrap_or(self.started)), if retry.is_some() => self.retry().await,
                () = sleep_until(withdrawn_due), if self.resources.has_withdrawn() && !self.query.is_running() => self.query_kubelet(),
                () = sleep_until(again_due), if self.must_query_again() => self.query_kubelet(),
            }
            self.rebuild_inventory();
            self.publish();
        }
    }

    async fn serve(&mut self, request: NodeRequest) {
        // If the caller is gone, the work is still done; only the response is dropped.
        match request {
            NodeRequest::Prepare(claims, containers, answer) => {
                self.process_list(containers.as_ref());
                let withdrawn = BTreeSet::new();
                if claims.iter().any(|claim| self.needs_query(claim)) {
                    self.wait_for_query(WaitingRequest::Prepare {
                        claims,
                        withdrawn,
                        containers,
                        answer,
                    });
                } else {
                    self.prepare_all(&claims, &withdrawn, None, containers.as_ref(), answer)
                        .await;
                }
            }
            NodeRequest::Unprepare(claims, answer) => {
                let _ = answer.send(self.unprepare_all(claims).await);
            }
            NodeRequest::Allocate(resource, containers, answer) => {
                let result = self.allocate(&resource, &containers).await;
                self.count("allocate", result.as_ref().err());
                match &result {
                    Ok(_) => info!(resource, devices = ?containers, "allocate done"),
                    Err(failure) => {
                        warn!(resource, devices = ?containers, reason = failure.reason(), "allocate refused: {failure}");
                    }
                }
                let _ = answer.send(result);
            }
            NodeRequest::CheckStart(resource, devices, containers, answer) => {
                self.process_list(containers.as_ref());
                let result = self.check_start(&resource, &devices, containers.as_ref()).await;
                self.count("start", result.as_ref().err());
                if let Err(failure) = &result {
                    warn!(
                        resource,
                        ?devices,
                        reason = failure.reason(),
                        "start refused: {failure}"
                    );
                }
                let _ = answer.send(result);
            }
            NodeRequest::Holdings(answer) => {
                let _ = answer.send(self.holdings());
            }
            NodeRequest::InContainers(answer) => {
                if self.has_both() {
                    self.wait_for_query(WaitingRequest::InContainers(answer));
                } else {
                    let _ = answer.send(BTreeMap::new());
                }
            }
            NodeRequest::Release(uid, force, answer) => {
                let _ = answer.send(self.release(&uid, force).await);
            }
            NodeRequest::FindOrphans(now, answer) => {
                let _ = answer.send(self.find_orphans(now).await);
            }
            NodeRequest::DecideOrphans(now, answers, containers, answer) => {
                let report = self.decide_orphans(now, &answers, containers.as_ref()).await;
                // The caller publishes the quarantine, and its devices are withheld first.
                self.rebuild_inventory();
                self.publish();
                let _ = answer.send(report);
            }
        }
    }

    async fn update_cluster(&mut self) {
        let facts = self.cluster.borrow_and_update().clone();
        self.node.uid.clone_from(&facts.node_uid);
        self.store.set_cluster(facts);
        if let Err(failure) = self.perform(&[PlanStep::Save(Vec::new())]).await {
            warn!(
                reason = failure.reason(),
                "the facts of the API server are not stored yet: {failure}"
            );
        }
    }

    /// A device as found, or as last known if a claim holds it.
    fn device(&self, name: &str) -> Option<&Device> {
        self.devices.get(name).or_else(|| self.inventory.get(name))
    }

    /// Rebuilds the inventory, if an input may have changed. Returns whether it was rebuilt. It shares the found devices for as long as it
    /// equals them.
    fn rebuild_inventory(&mut self) -> bool {
        let (found, prepared_claims) = (&self.devices, &self.prepared_claims);
        let versions = [
            prepared_claims.version(),
            self.orphans.version(),
            self.resources.withdrawn.version(),
            self.resources.version(),
        ];
        if is_built_from(self.inventory_from.as_ref(), found, versions) {
            return false;
        }
        let quarantine = self.orphans.quarantine();
        let as_found =
            quarantine.is_empty() && !self.resources.has_withdrawn() && is_as_found(found, prepared_claims);
        let all = if as_found {
            found.clone()
        } else {
            let mut all = inventory(found, &self.inventory, prepared_claims);
            withhold(&mut all, prepared_claims, &quarantine);
            self.resources.withhold_withdrawn(&mut all);
            Arc::new(all)
        };
        if !is_the_same(&self.inventory, &all) {
            self.inventory = all;
        }
        self.inventory_from = Some((self.devices.clone(), versions));
        true
    }

    /// Publishes changes of the inventory and of the device lists of extended resources. Returns whether an input may have changed.
    fn publish(&mut self) -> bool {
        let (inventory, prepared_claims, resources) =
            (&self.inventory, &self.prepared_claims, &self.resources);
        let versions = [
            prepared_claims.version(),
            resources.allocated.version(),
            resources.containers.version(),
            resources.conflicting.version(),
            resources.version(),
            // The metrics count quarantined claims.
            self.orphans.version(),
        ];
        if is_built_from(self.lists_from.as_ref(), inventory, versions) {
            return false;
        }
        let count = prepared_claims.entries().len();
        let prepared = &self.backend.prepared;
        prepared.send_if_modified(|before| std::mem::replace(before, count) != count);
        let handed_out = resources.handed_out(prepared_claims);
        let devices = device_counts(inventory, handed_out);
        self.metrics
            .set_devices(devices, count, self.orphans.quarantine().len());
        for resource in resources.all() {
            let devices = plugin_devices(inventory, handed_out, &resource.config.kind);
            resource.devices.send_if_modified(|before| {
                let is_news = *before != devices;
                *before = devices;
                is_news
            });
        }
        let all = if resources.conflicting.devices().is_empty() {
            inventory.clone()
        } else {
            Arc::new(published(inventory, &resources.conflicting))
        };
        self.published.send_if_modified(|before| {
            let is_news = !is_the_same(before, &all);
            if is_news {
                *before = all;
            }
            is_news
        });
        self.lists_from = Some((inventory.clone(), versions));
        true
    }

    /// Prepares claims and answers for each. `updated` is the result of the query that they waited for, `containers` those listed before.
    async fn prepare_all(
        &mut self,
        claims: &[ClaimToPrepare],
        withdrawn: &BTreeSet<String>,
        updated: Option<&Result<(), String>>,
        containers: Option<&ListedContainers>,
        answer: PrepareAnswer,
    ) {
        let mut answers = Vec::with_capacity(claims.len());
        for claim in claims {
            let result = if withdrawn.contains(&claim.uid) {
                Err(ServiceError::Refused(Refusal::ContainersUnknown {
                    device: claim.name.clone(),
                    problem: "kubelet called Unprepare for the claim before it had listed its containers"
                        .to_owned(),
                }))
            } else {
                self.prepare(claim, updated, containers).await
            };
            self.count("prepare", result.as_ref().err());
            log(
                "prepare",
                [&claim.namespace, &claim.name, &claim.uid],
                result.as_ref().err(),
            );
            answers.push(result);
        }
        let _ = answer.send(answers);
    }

    async fn prepare(
        &mut self,
        claim: &ClaimToPrepare,
        updated: Option<&Result<(), String>>,
        containers: Option<&ListedContainers>,
    ) -> Result<Vec<String>, ServiceError> {
        let planned = self.plan(claim, updated);
        match &planned {
            // Either the request or the known Node object is outdated.
            Err(Refusal::EarlierNode { .. }) => self.node_in_doubt.notify_one(),
            // Either the holder is about to end, or kubelet has lost it.
            Err(Refusal::Held { device, .. } | Refusal::AllShares { device, .. }) => {
                let device = device.clone();
                self.check_holders(&device);
            }
            // Kubelet may have lost the claim before it was allocated again.
            Err(Refusal::Changed { .. }) => {
                if let Ok(uid) = ClaimUid::parse(&claim.uid) {
                    self.orphans.change().mark_conflicting(&uid);
                    self.backend.check_due.notify_one();
                }
            }
            _ => {}
        }
        let (uid, steps) = match planned {
            Ok(planned) => planned,
            Err(refusal @ (Refusal::Held { .. } | Refusal::InContainer { .. })) => {
                let listed = self.list_containers(containers).await;
                let named = self.runtime.name_container(refusal, &self.inventory, listed);
                return Err(named.into());
            }
            Err(refusal) => return Err(refusal.into()),
        };
        self.orphans.change().forget(&uid);
        self.check_containers_lack(taken(&steps), NewUser::Claim(&uid), containers)
            .await?;
        for device in taken(&steps) {
            self.driver.check_unused(device).await?;
        }
        if let Err(failure) = self.perform(&steps).await {
            self.roll_back(&uid).await;
            return Err(failure);
        }
        self.retries.done(&Missing::OfClaim(uid.clone()));
        Ok(self.cdi_ids(&uid, &claim.allocation))
    }

    /// The CDI ids of a prepared claim: one in classic mode, one for each result in structured mode.
    fn cdi_ids(&self, uid: &ClaimUid, allocation: &Allocation) -> Vec<String> {
        let driver = &self.paths.driver;
        let Allocation::Results(results) = allocation else {
            return vec![driver.cdi_id(uid)];
        };
        let entry = self.prepared_claims.entry(uid);
        let id = |result: &DeviceResult| {
            let mut devices = entry.into_iter().flat_map(|entry| &entry.devices);
            let held = devices.find(|held| held.device == result.device);
            driver.cdi_id_of_claim_device(&ClaimDevice {
                uid: uid.clone(),
                device: result.device.clone(),
                admin_access: held.is_some_and(HeldDevice::has_admin_access),
            })
        };
        results.iter().map(id).collect()
    }

    /// Plans a Prepare. `updated` is the result of the query that the claim waited for.
    fn plan(
        &mut self,
        claim: &ClaimToPrepare,
        updated: Option<&Result<(), String>>,
    ) -> Result<(ClaimUid, Vec<PlanStep>), Refusal> {
        let planned = self.plan_now(claim);
        if !self.query.is_possible() {
            return planned;
        }
        let Some(device) = self.device_of_both(&planned) else {
            return planned;
        };
        let problem = match updated {
            Some(Ok(())) => None,
            Some(Err(problem)) => Some(problem.clone()),
            // Another claim of the same call has changed which devices this claim takes.
            None => Some("it is asked again when the claim is prepared again".to_owned()),
        };
        if let Some(problem) = problem {
            return Err(Refusal::ContainersUnknown { device, problem });
        }
        if let Err(Refusal::InContainer { device, .. }) = &planned {
            self.resources.record_conflict(device);
        }
        if let Ok((_, steps)) = &planned
            && let Some(device) = taken(steps).find(|name| self.is_in_unshared_resource(name))
        {
            let problem = "it is asked only about resources that are also offered to claims; the device's resource is not (any more)";
            return Err(Refusal::ContainersUnknown {
                device: device.to_owned(),
                problem: problem.to_owned(),
            });
        }
        planned
    }

    /// Whether a device of mode `both` is in a resource that is not offered to claims: a reload changes the resources before the devices.
    fn is_in_unshared_resource(&self, device: &str) -> bool {
        let device = self.inventory.get(device);
        let both = device.filter(|device| device.mode == Mode::Both);
        both.is_some_and(|device| self.resources.is_in_unshared_resource(device))
    }

    fn plan_now(&self, claim: &ClaimToPrepare) -> Result<(ClaimUid, Vec<PlanStep>), Refusal> {
        plan_prepare(
            &self.prepared_claims,
            &self.resources.containers,
            &self.inventory,
            &self.node,
            claim,
        )
    }

    fn device_of_both(&self, planned: &Result<(ClaimUid, Vec<PlanStep>), Refusal>) -> Option<String> {
        match planned {
            Ok((_, steps)) => takes_from_both(steps, &self.inventory),
            Err(Refusal::InContainer { device, .. } | Refusal::ContainersUnknown { device, .. }) => {
                Some(device.clone())
            }
            Err(_) => None,
        }
    }

    /// Whether kubelet must be queried before this claim is prepared. True if the claim takes a device that containers could hold, so that
    /// the decision uses current data.
    fn needs_query(&self, claim: &ClaimToPrepare) -> bool {
        self.query.is_possible() && self.device_of_both(&self.plan_now(claim)).is_some()
    }

    async fn unprepare_all(&mut self, claims: Vec<ClaimToUnprepare>) -> Vec<Result<(), ServiceError>> {
        for claim in &claims {
            self.query.withdraw(&claim.uid);
        }
        let mut answers = Vec::with_capacity(claims.len());
        for claim in claims {
            let result = match plan_unprepare(&self.prepared_claims, &claim) {
                Ok(steps) => self.perform(&steps).await,
                Err(refusal) => Err(refusal.into()),
            };
            // Its CDI file may be gone, and kubelet does not repeat an Unprepare if another pod uses the claim by then.
            if let (Err(_), Ok(uid)) = (&result, ClaimUid::parse(&claim.uid)) {
                self.retry_later(&uid);
            }
            self.count("unprepare", result.as_ref().err());
            log(
                "unprepare",
                [&claim.namespace, &claim.name, &claim.uid],
                result.as_ref().err(),
            );
            answers.push(result);
        }
        answers
    }

    /// Performs the steps of a plan, and stops at the first that fails.
    async fn perform(&mut self, steps: &[PlanStep]) -> Result<(), ServiceError> {
        // A call or a check can have many claims, and the steps for the disk never wait: other tasks run between the claims.
        yield_now().await;
        for step in steps {
            match step {
                PlanStep::Prepare(uid) => {
                    let entry = self.prepared_claims.entry(uid);
                    let structured = entry.is_some_and(Entry::is_structured);
                    self.check_nodes_of(uid, &self.devices)?;
                    let (container_edits, found) = loop {
                        let container_edits =
                            self.driver.prepare(&self.prepared_claim(uid), structured).await?;
                        let found = self.found.borrow().clone();
                        if !Arc::ptr_eq(&found, &self.devices) {
                            self.check_nodes_of(uid, &found)?;
                        }
                        self.check_new_numbers(uid, &found).await?;
                        // The devices may have changed while the container runtime was asked, at most once a second.
                        if Arc::ptr_eq(&found, &self.found.borrow()) {
                            break (container_edits, found);
                        }
                    };
                    self.prepared_claims
                        .change()
                        .set_container_edits(uid, container_edits, &found);
                }
                PlanStep::Unprepare(uid) => self.driver.unprepare(&self.prepared_claim(uid)).await?,
                step => self.store(step)?,
            }
        }
        Ok(())
    }

    /// Performs a step for the disk. It blocks the companion's thread: where the files are in memory, the two changes of threads of a
    /// blocking task take longer than the step. While the disk is slow, all of the companion waits.
    fn store(&mut self, step: &PlanStep) -> Result<(), ServiceError> {
        match step {
            PlanStep::WriteCdi(uid) => self.runtime.cdi_written(uid),
            PlanStep::Save(changes) => {
                for change in changes {
                    if let ClaimChange::Remove(uid) = change
                        && let Some(entry) = self.prepared_claims.entry(uid)
                    {
                        self.runtime.released(entry);
                    }
                }
                self.store
                    .set_unknown_containers(self.runtime.unknown_containers());
            }
            _ => {}
        }
        let Some(changed) = step.perform(&self.prepared_claims, &*self.store)? else {
            return Ok(());
        };
        let before = self.prepared_claims.entries().keys();
        let removed: Vec<&ClaimUid> = before.filter(|uid| changed.entry(uid).is_none()).collect();
        if !removed.is_empty() {
            let quarantine = self.orphans.quarantine();
            if removed.iter().any(|uid| quarantine.contains_key(*uid)) {
                // The published quarantine is updated by a check.
                self.backend.check_due.notify_one();
            }
            let orphans = self.orphans.change();
            for uid in removed {
                orphans.forget(uid);
            }
            let released = &self.backend.released;
            released.send_modify(|count| *count = count.wrapping_add(1));
            // Another claim may wait for the device.
            self.retries.expedite(self.started.elapsed());
        }
        *self.prepared_claims.change() = changed;
        Ok(())
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

    async fn roll_back(&mut self, uid: &ClaimUid) {
        self.retry_later(uid);
        let steps = plan_roll_back(&self.prepared_claims, uid);
        if let Err(failure) = self.perform(&steps).await {
            warn!(claim_uid = %uid, reason = failure.reason(), "the claim cannot be rolled back now; retrying: {failure}");
        }
    }

    /// Restores the state after a start. `files` are the claims with a CDI file.
    async fn recover(&mut self, files: &BTreeSet<ClaimUid>) {
        self.clear(files).await;
        let plans = plan_restoring(&self.prepared_claims);
        self.perform_each(plans).await;
        if let Err(failure) = self.perform(&[PlanStep::Save(Vec::new())]).await {
            error!(
                reason = failure.reason(),
                "the restored claims cannot be stored now: {failure}"
            );
        }
        info!(
            claims = self.prepared_claims.entries().len(),
            "the prepared claims are restored"
        );
    }

    /// Cleans up after failed attempts of this or an earlier process.
    async fn clear(&mut self, files: &BTreeSet<ClaimUid>) {
        for steps in plan_clearing(&self.prepared_claims, files) {
            if let Err(failure) = self.perform(&steps).await {
                error!(
                    reason = failure.reason(),
                    "an earlier attempt cannot be cleaned up now: {failure}"
                );
            }
        }
    }

    /// Processes a list of found devices. No CDI file may refer to a node that now belongs to another device.
    async fn refresh(&mut self) {
        let before = self.inventory.clone();
        let found = self.found.borrow_and_update().clone();
        // The driver may send an equal list because it has forgotten a device that a claim still holds; nothing else can differ.
        let is_equal = found == self.devices;
        if !is_equal {
            self.resources.lose_devices(&self.devices, &found);
            self.devices = found;
            self.runtime.offered(&self.devices);
            self.query_and_wait(QUERY_TIMEOUT).await;
            self.rebuild_inventory();
        }
        let mut plans = plan_refresh(&self.prepared_claims, &before, &self.inventory, &self.devices);
        // A claim without a file for now is retried in any case.
        plans.retain(|(uid, _)| {
            let is_as_before =
                |held: &HeldDevice| before.get(&held.device) == self.inventory.get(&held.device);
            let mut entry = self.prepared_claims.entry(uid).into_iter();
            !(self.retries.has(&Missing::OfClaim(uid.clone()))
                && entry.all(|entry| entry.devices.iter().all(is_as_before)))
        });
        self.perform_each(plans).await;
        if !is_equal {
            self.refresh_named_devices().await;
        }
    }

    async fn perform_each(&mut self, plans: Vec<(ClaimUid, Vec<PlanStep>)>) {
        for (uid, steps) in plans {
            if let Err(failure) = self.perform(&steps).await {
                let reason = failure.reason();
                warn!(claim_uid = %uid, reason, "containers of this claim cannot be started now; retrying: {failure}");
                self.roll_back(&uid).await;
            } else {
                self.retries.done(&Missing::OfClaim(uid));
            }
        }
    }

    /// Schedules the CDI file of a prepared claim for a retry: kubelet may not call Prepare again.
    fn retry_later(&mut self, uid: &ClaimUid) {
        if plan_restoring_one(&self.prepared_claims, uid).is_some() {
            self.retries
                .failed(Missing::OfClaim(uid.clone()), self.started.elapsed());
        }
    }

    /// Retries a CDI file whose writing failed. Requests are served before the next one, because a driver may take long.
    async fn retry(&mut self) {
        let due = self.retries.due(self.started.elapsed());
        let Some(missing) = due.into_iter().next() else {
            return;
        };
        let uid = match &missing {
            Missing::OfDevices => return self.refresh_named_devices().await,
            Missing::OfClaim(uid) => uid.clone(),
        };
        let Some(steps) = plan_restoring_one(&self.prepared_claims, &uid) else {
            self.retries.done(&missing);
            return;
        };
        match self.perform(&steps).await {
            Ok(()) => {
                self.retries.done(&missing);
                info!(claim_uid = %uid, "containers of this claim can be started again");
            }
            Err(failure) => {
                let reason = failure.reason();
                debug!(claim_uid = %uid, reason, "containers of this claim still cannot be started: {failure}");
                self.roll_back(&uid).await;
            }
        }
    }

    /// Checks the nodes of a claim's devices.
    fn check_nodes_of(&self, uid: &ClaimUid, found: &Devices) -> Result<(), Refusal> {
        let held = self
            .prepared_claims
            .entry(uid)
            .into_iter()
            .flat_map(Entry::held_devices);
        let mut devices = held.filter_map(|held| found.get(&held.device));
        devices.try_for_each(|device| self.check_nodes(device, Some(uid)))
    }

    /// Refuses a device while another holder may still have one of its device nodes under another name: devices that are plugged in again can
    /// exchange their numbers. A device with shares is not checked: its holders have the same node.
    fn check_nodes(&self, device: &Device, own: Option<&ClaimUid>) -> Result<(), Refusal> {
        if device.is_shared() {
            return Ok(());
        }
        let name = || device.name.clone();
        if let Some((uid, entry)) = self.prepared_claims.holder_by_another_name(own, device) {
            let (device, holder) = (name(), entry.describe(uid));
            return Err(Refusal::Held { device, holder });
        }
        let holder = self.resources.holder_by_another_name(device).or_else(|| {
            let other = self.device_with_taken_node(device)?;
            Some(format!("a container that may have it as {}", other.name))
        });
        match holder {
            Some(holder) => Err(Refusal::InContainer {
                device: name(),
                holder,
            }),
            None => Ok(()),
        }
    }

    /// The device of an extended resource that, in the processed list, has a node which a newer list gives to `device`. Whether a container
    /// still has the node is known once the newer list is processed.
    fn device_with_taken_node(&self, device: &Device) -> Option<&Device> {
        let listed = self.devices.get(&device.name);
        let numbers = device.device_numbers.iter().copied();
        let new: Vec<DeviceNumber> = numbers
            .filter(|number| listed.is_none_or(|listed| !listed.device_numbers.contains(number)))
            .collect();
        if new.is_empty() {
            return None;
        }
        self.devices.values().find(|other| {
            other.name != device.name
                && other.mode.serves_extended_resource()
                && share_a_node(&other.device_numbers, &new)
        })
    }

    /// The containers: those that the caller has listed or the last ones listed here, if that list still counts, else those of a query. Many
    /// requests may have waited in the queue until their lists no longer count. `None` without a container runtime.
    async fn list_containers(
        &mut self,
        listed: Option<&ListedContainers>,
    ) -> Option<Result<Arc<RuntimeContainers>, String>> {
        let released = *self.backend.released.borrow();
        let own = self.containers.as_ref().filter(|own| own.is_recent());
        let mut listed = listed.into_iter().chain(own);
        if let Some(current) = listed.find(|listed| listed.is_current(released)) {
            return Some(current.containers.clone());
        }
        let mut listed = ListedContainers::list(&*self.runtime.runtime()?, released).await;
        self.process_list(Some(&listed));
        // Meanwhile no container has got a device from here, and a slow runtime must not be asked for each claim.
        listed.at = Instant::now();
        let containers = listed.containers.clone();
        self.containers = Some(listed);
        Some(containers)
    }

    fn process_list(&mut self, listed: Option<&ListedContainers>) {
        if let Some(ListedContainers { containers, at, .. }) = listed {
            self.runtime.listed(containers, *at, &self.prepared_claims);
        }
    }

    /// Refuses a claim if a container without it has a number that is new for one of its exclusive devices.
    async fn check_new_numbers(&mut self, uid: &ClaimUid, found: &Devices) -> Result<(), ServiceError> {
        let entry = self.prepared_claims.entry(uid);
        let entry = entry.filter(|entry| entry.boot_id == self.prepared_claims.boot_id());
        let renumbered = |held: &HeldDevice| {
            let device = found.get(&held.device)?;
            if device.is_shared() || held.numbers.is_empty() {
                return None;
            }
            let numbers = device.device_numbers.iter().copied();
            let new: Vec<_> = numbers.filter(|number| !held.numbers.contains(number)).collect();
            (!new.is_empty()).then(|| Device {
                device_numbers: new.into(),
                ..device.clone()
            })
        };
        let held = entry.into_iter().flat_map(Entry::held_devices);
        let renumbered: Vec<Device> = held.filter_map(renumbered).collect();
        if renumbered.is_empty() {
            return Ok(());
        }
        let driver = &self.paths.driver.clone();
        let listed = self.list_containers(None).await;
        let others = listed.map(|listed| listed.map(|all| Arc::new(all.without_claim(driver, uid))));
        let devices: Vec<&Device> = renumbered.iter().collect();
        let new_user = NewUser::RenumberedClaim(uid);
        Ok(self.runtime.check_unused(&devices, new_user, others)?)
    }

    /// Refuses the exclusive devices that another container still has. `containers` are those that the caller has listed.
    async fn check_containers_lack<'a>(
        &mut self,
        names: impl Iterator<Item = &'a str> + Clone,
        new_user: NewUser<'_>,
        containers: Option<&ListedContainers>,
    ) -> Result<(), ServiceError> {
        let is_exclusive = |name| self.device(name).is_some_and(|device| !device.is_shared());
        if !names.clone().any(is_exclusive) {
            return Ok(());
        }
        let listed = self.list_containers(containers).await;
        let devices: Vec<_> = names.filter_map(|name| self.device(name)).collect();
        Ok(self.runtime.check_unused(&devices, new_user, listed)?)
    }

    /// Schedules a check of a device's holders, because another claim needs it: they are about to end, or kubelet has lost them.
    fn check_holders(&mut self, device: &str) {
        let Some(device) = self.inventory.get(device) else {
            return;
        };
        let holders = self.prepared_claims.holders_of(device);
        let holders: Vec<ClaimUid> = holders.map(|(uid, _)| uid.clone()).collect();
        let mut is_due = false;
        for uid in holders {
            let is_news = self.orphans.change().mark_conflicting(&uid);
            is_due |= is_news || self.runtime.is_possible();
        }
        if is_due {
            self.backend.check_due.notify_one();
        }
    }

    /// Processes a change of the claims' allocations.
    fn update_allocated(&mut self) {
        let allocated = self.allocated.borrow_and_update().clone();
        let is_conflict = self.resources.set_allocated(&allocated);
        self.check_deallocated();
        if is_conflict {
            // The known holders may be outdated: kubelet does not report the end of a container.
            self.query_kubelet();
        }
    }

    /// Checks holders of `both` devices that the API server no longer shows, as if another claim needed their device: while a claim holds
    /// such a device, kubelet requests it for no container, so nothing else triggers the check.
    fn check_deallocated(&mut self) {
        let allocated = &self.resources.allocated;
        if !self.runtime.is_possible() || !allocated.known() {
            return;
        }
        let is_both = |device: &str| {
            let device = self.inventory.get(device);
            device.is_some_and(|device| device.mode == Mode::Both)
        };
        let lost = self.prepared_claims.entries().iter().filter(|(uid, entry)| {
            !entry.is_structured()
                && !allocated.has(uid.as_str())
                && entry.devices.iter().any(|held| is_both(&held.device))
        });
        let lost: Vec<ClaimUid> = lost.map(|(uid, _)| uid.clone()).collect();
        for uid in lost {
            if self.orphans.change().mark_conflicting(&uid) {
                self.backend.check_due.notify_one();
            }
        }
    }

    /// Compares the prepared claims with kubelet's list.
    async fn find_orphans(&mut self, now: Duration) -> Vec<Question> {
        // No Prepare is running, so every unfinished attempt has failed, and its rollback as well.
        self.clear(&BTreeSet::new()).await;
        let kubelet = self.kubelet_claims().await;
        self.orphans.change().find(&self.prepared_claims, &kubelet, now)
    }

    /// Frees claims, or puts them into quarantine, from the API server's answers. `containers` are those listed after these answers.
    async fn decide_orphans(
        &mut self,
        now: Duration,
        answers: &BTreeMap<ClaimUid, ApiView>,
        containers: Option<&ListedContainers>,
    ) -> OrphanReport {
        // The list is read again after the API server's answers: a freed claim must still be missing at the end of the wait.
        let kubelet = self.kubelet_claims().await;
        let (runtime, again) = self.check_claim_use(now, &kubelet, answers, containers).await;
        let decisions = self
            .orphans
            .change()
            .decide(&self.prepared_claims, &kubelet, answers, &runtime, now);
        for decision in decisions {
            let (uid, steps) = match decision {
                Decision::Free(uid) => {
                    info!(claim_uid = %uid, reason = "OrphanFreed", "the API server no longer knows the claim as a holder, and kubelet or the container runtime shows that no container has its devices: they are free");
                    let steps = plan_free(&uid);
                    (uid, steps)
                }
                Decision::Explain(uid, devices) => {
                    info!(claim_uid = %uid, ?devices, reason = "HoldingExplained", "the API server shows the devices of the claim");
                    let inventory = &self.inventory;
                    let steps = plan_explained(&self.prepared_claims, inventory, &uid, &devices);
                    (uid, steps)
                }
            };
            if let Err(failure) = self.perform(&steps).await {
                warn!(claim_uid = %uid, reason = failure.reason(), "the decision about the claim cannot be carried out now; retrying: {failure}");
                self.retry_later(&uid);
            }
        }
        OrphanReport {
            quarantine: self.quarantine(),
            next: self.orphans.next_check(now),
            again,
        }
    }

    /// Checks whether containers use the devices of claims that could be freed. Returns also the time until a retry if it is too early to
    /// decide, or if the container runtime does not answer.
    async fn check_claim_use(
        &mut self,
        now: Duration,
        kubelet: &KubeletView,
        answers: &BTreeMap<ClaimUid, ApiView>,
        containers: Option<&ListedContainers>,
    ) -> (RuntimeView, Option<Duration>) {
        let uids = self
            .orphans
            .claims_to_check(&self.prepared_claims, kubelet, answers, now);
        // A claim that is in order again gets its file back. Without an answer of the API server, nothing changes.
        let stays =
            |uid: &ClaimUid| uids.contains(uid) || matches!(answers.get(uid), Some(ApiView::Unknown(_)));
        for uid in self.runtime.end_checks(stays) {
            self.retry_later(&uid);
        }
        for uid in self.runtime.with_cdi_file(&uids) {
            match self.perform(&[PlanStep::RemoveCdi(uid.clone())]).await {
                Ok(()) => self.runtime.cdi_removed(uid),
                Err(failure) => {
                    warn!(claim_uid = %uid, reason = failure.reason(), "its CDI file cannot be removed, so it keeps its devices: {failure}");
                }
            }
        }
        let listed = containers.map(|listed| (listed.at, listed.containers.clone()));
        self.runtime
            .claim_use(uids, &self.prepared_claims, &self.inventory, listed)
            .await
    }

    async fn release(&mut self, uid: &str, force: bool) -> Result<Holding, ReleaseError> {
        let kubelet = self.kubelet_claims().await;
        let before = self.holdings();
        let (uid, steps) = plan_release(&self.prepared_claims, &kubelet, uid, force)?;
        if let Err(failure) = self.perform(&steps).await {
            warn!(claim_uid = %uid, reason = failure.reason(), force, "the manual release failed: {failure}");
            // The claim is still held, so containers can still use it.
            self.retry_later(&uid);
            return Err(failure.into());
        }
        let held = before
            .into_iter()
            .find(|holding| holding.claim_uid == uid.as_str());
        let held = held.unwrap_or_default();
        warn!(claim_uid = %uid, devices = ?held.devices, force, reason = "Released", "the claim was released manually");
        Ok(held)
    }

    fn holdings(&self) -> Vec<Holding> {
        holdings(&self.prepared_claims, &self.orphans.quarantine())
    }

    fn quarantine(&self) -> Quarantine {
        let describe = |(uid, why): (ClaimUid, String)| {
            let claim = self.prepared_claims.entry(&uid)?.describe(&uid);
            Some((uid, Quarantined { claim, why }))
        };
        self.orphans
            .quarantine()
            .into_iter()
            .filter_map(describe)
            .collect()
    }

    async fn kubelet_claims(&self) -> KubeletView {
        let paths = self.paths.clone();
        spawn_blocking(move || paths.kubelet())
            .await
            .unwrap_or_else(|error| KubeletView::Unknown(error.to_string()))
    }

    fn count(&self, operation: &'static str, failure: Option<&ServiceError>) {
        self.metrics.handled(operation, failure.map(ServiceError::reason));
    }
}

/// Whether something was built from these devices and these versions of the other inputs.
fn is_built_from<const N: usize>(
    built: Option<&(Arc<Devices>, [u64; N])>,
    devices: &Arc<Devices>,
    versions: [u64; N],
) -> bool {
    built.is_some_and(|(before, counted)| Arc::ptr_eq(before, devices) && *counted == versions)
}

/// Compares the devices only if the pointers differ.
fn is_the_same(one: &Arc<Devices>, other: &Arc<Devices>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}

/// Logs a request for a claim, given by namespace, name and uid.
fn log(what: &str, claim: [&str; 3], failure: Option<&ServiceError>) {
    // A refused request may be unvalidated, with names of any length.
    let [namespace, name, uid] = claim.map(|text| text.chars().take(SHOWN_MAX).collect::<String>());
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

/// The node driver, each call with a timeout.
#[derive(Debug)]
struct DriverClient<D>(Arc<D>);

impl<D: NodeDriver> DriverClient<D> {
    /// Waits for the driver's first list and keeps receiving updates.
    async fn devices(&self) -> watch::Receiver<Arc<Devices>> {
        let mut lists = Box::pin(self.0.devices());
        let mut reported = BTreeSet::new();
        let mut take = move |list| {
            let (devices, problems) = driver::served(list);
            driver::report(problems, &mut reported);
            Arc::new(devices)
        };
        let (sender, found) = watch::channel(lists.next().await.map(&mut take).unwrap_or_default());
        tokio::spawn(async move {
            while let Some(list) = lists.next().await {
                let devices = take(list);
                if sender.is_closed() {
                    return;
                }
                // An equal list counts as a change, too: the driver may have forgotten a device that a claim still holds.
                sender.send_replace(devices);
            }
            // The last list stays valid: if the sender were dropped, the receiver would report a change forever.
            sender.closed().await;
        });
        found
    }

    /// The container edits for a claim, with a variable for each device; in structured mode also those for each device alone.
    async fn prepare(&self, claim: &PreparedClaim, structured: bool) -> Result<ClaimEdits, ServiceError> {
        let made = in_time(format!("claim {}", claim.uid), self.0.prepare(claim)).await?;
        // A driver that implements `prepare` itself may return one node twice.
        let mut container_edits = ContainerEdits::default();
        container_edits.extend(made);
        container_edits.name_devices(claim.devices.iter().map(String::as_str));
        container_edits.check_paths().map_err(Refusal::from)?;
        let devices = if structured {
            self.of_each_device(claim, &container_edits).await?
        } else {
            BTreeMap::new()
        };
        Ok(ClaimEdits {
            all: container_edits,
            devices,
        })
    }

    /// Splits the edits for a claim, so that a container gets only the devices of the requests that it names.
    async fn of_each_device(
        &self,
        claim: &PreparedClaim,
        all: &ContainerEdits,
    ) -> Result<BTreeMap<String, ContainerEdits>, ServiceError> {
        if let [device] = claim.devices.as_slice() {
            return Ok(BTreeMap::from([(device.clone(), all.clone())]));
        }
        let mut own = BTreeMap::new();
        for device in &claim.devices {
            own.insert(device.clone(), self.container_edits(device).await?);
        }
        Ok(all.of_each(&own))
    }

    async fn unprepare(&self, claim: &PreparedClaim) -> Result<(), ServiceError> {
        in_time(format!("claim {}", claim.uid), self.0.unprepare(claim)).await
    }

    async fn check_unused(&self, device: &str) -> Result<(), ServiceError> {
        in_time(format!("device {device:?}"), self.0.check_unused(device)).await
    }

    /// The container edits for a device, with its variable.
    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, ServiceError> {
        let what = format!("device {device:?}");
        let mut container_edits = in_time(what, self.0.container_edits(device)).await?;
        container_edits.name_devices([device]);
        Ok(container_edits)
    }
}

/// Calls the driver with a timeout.
async fn in_time<T>(
    what: String,
    call: impl Future<Output = Result<T, NodeDriverError>>,
) -> Result<T, ServiceError> {
    match timeout(DRIVER_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(ServiceError::Slow { what }),
    }
}

#[cfg(test)]
mod tests;
