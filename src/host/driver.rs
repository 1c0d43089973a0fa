//! [`HostDriver`]: a device allocator behind one lock, updated by three watches and by the controller's observations.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures::{Stream, StreamExt as _};
use kube::{Api, Client};
use tokio::sync::{Mutex as AsyncMutex, mpsc, watch as cell};
use tokio::task::{JoinError, spawn_blocking, yield_now};
use tokio_util::sync::CancellationToken;

use crate::api::crd::{DeviceClaimParameters, DeviceClassParameters, NodeInventory};
use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
use crate::core::allocation::allocator::{
    AllocateError, AllocateOutcome, DeviceAllocator, Observed, add_unsuitable, count_devices, first_fit,
    granted, node_fit,
};
use crate::core::allocation::evaluate::{NodeSnapshot, RequestedClaim};
use crate::core::allocation::inventory::{AttributeSet, NodeInfo, SelectorResults};
use crate::core::allocation::parameters::{
    CLAIM_PARAMETERS_KIND, CLASS_PARAMETERS_KIND, CheckedSelector, ClaimParameters, ClassParameters,
    DeviceRequests, ParametersError, claim_reference, class_reference,
};
use crate::core::allocation::search::{CALL_WORK_MAX, INSTANT_WORK_MAX, QUICK_WORK_MAX, WorkBudget};
use crate::driver::keyed_locks::KeyedLocks;
use crate::driver::{
    CapacityCause, CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, Finding, Observation,
    UnsuitableNodes,
};
use crate::host::capacity_changes::CapacityChanges;
use crate::host::selectors::{CHUNK, Evaluator, Expressions, FairQueue, Results, SelectorError};
use crate::host::watch::{self, Guarded, WatchUpdate, events, follow};

/// NodeInventory objects per page of a list: a page stays below some 10 MiB even if each node has hundreds of devices.
const INVENTORY_PAGE: u32 = 100;
/// Nodes copied at once for a search: the lock is held for some milliseconds even if each has a thousand devices.
const MAX_SNAPSHOTS: usize = 64;
/// Number of inventory changes after which results for deleted devices are dropped.
const INVENTORY_CHANGES_MAX: usize = 1024;
/// Maximum number of searches whose devices were then taken by another claim.
const MAX_TRIES: usize = 3;
/// Parameter objects per page of a list. Users can store a megabyte in each.
const PARAMETERS_PAGE: u32 = 50;
/// Number of selectors that calls look up before other tasks run: some milliseconds of work if their texts are long and begin alike.
const LOOKUPS_MAX: usize = 256;

/// The built-in driver: allocates the devices listed in NodeInventory objects, as requested by DeviceClassParameters and
/// DeviceClaimParameters. Its calls send no requests to the API server.
///
/// Its service account needs only `list` and `watch` on `nodeinventories`, `deviceclassparameters` and `deviceclaimparameters`
/// of group `drayman.dev`, in addition to the permissions of the [controller](crate::controller).
#[derive(Clone, Debug)]
pub struct HostDriver {
    shared: Arc<HostDriverInner>,
}

#[derive(Debug)]
struct HostDriverInner {
    name: String,
    /// Checking and holding devices is one step under this lock. It is never held across an await.
    state: Mutex<HostState>,
    changes: CapacityChanges,
    /// Problems with existing allocations, kept until the controller reads them.
    findings: FindingChannel,
    synced: cell::Sender<Synced>,
    evaluator: Evaluator,
    turns: FairQueue,
    /// Number of selectors looked up so far.
    lookups: AtomicUsize,
    /// Held for one [piece](HostDriver::piece) of work on the controller's thread.
    pieces: AsyncMutex<()>,
    /// Held by the one search that runs on another thread. Waiters get it in the order of their requests.
    searches: Arc<AsyncMutex<()>>,
    /// Per namespace, the lock for which its searches queue before that, so that their number does not matter to other namespaces.
    search_order: KeyedLocks<Arc<str>>,
}

/// Both ends of the channel of findings.
#[derive(Debug)]
struct FindingChannel(
    mpsc::UnboundedSender<Finding>,
    Mutex<Option<mpsc::UnboundedReceiver<Finding>>>,
);

/// Which of the three caches are complete.
#[derive(Clone, Copy, Debug, Default)]
struct Synced {
    inventories: bool,
    classes: bool,
    claims: bool,
}

impl Synced {
    fn all(self) -> bool {
        self.inventories && self.classes && self.claims
    }
}

impl HostDriver {
    /// Starts the watches of driver `driver_name`; they end at `shutdown`. Must be called within a tokio runtime.
    pub fn start(client: Client, driver_name: impl Into<String>, shutdown: CancellationToken) -> Self {
        let claim_parameters = Api::all(client.clone());
        Self::start_with(client, driver_name, claim_parameters, shutdown)
    }

    /// Like [`start`](Self::start), but for claims of one namespace: claim parameters are read only there, which needs no permission
    /// elsewhere.
    pub fn start_for_namespace(
        client: Client,
        driver_name: impl Into<String>,
        namespace: &str,
        shutdown: CancellationToken,
    ) -> Self {
        let claim_parameters = Api::namespaced(client.clone(), namespace);
        Self::start_with(client, driver_name, claim_parameters, shutdown)
    }

    fn start_with(
        client: Client,
        driver_name: impl Into<String>,
        claim_parameters: Api<Guarded<DeviceClaimParameters>>,
        shutdown: CancellationToken,
    ) -> Self {
        let driver = Self::unwatched(driver_name);
        let name = driver.shared.name.clone();
        let shared = Arc::clone(&driver.shared);
        tokio::spawn(follow(
            events(Api::<Guarded<NodeInventory>>::all(client.clone()), INVENTORY_PAGE),
            shutdown.clone(),
            move |object| read_inventory(&name, object),
            move |change| {
                shared.inventories(change);
                shared.evaluate_due();
            },
        ));
        let shared = Arc::clone(&driver.shared);
        tokio::spawn(follow(
            events(
                Api::<Guarded<DeviceClassParameters>>::all(client),
                PARAMETERS_PAGE,
            ),
            shutdown.clone(),
            |object| {
                let name = watch::name(&object);
                let spec = object.0.map(|object| object.spec).map_err(|error| error.error);
                let parameters = ClassParameters::check(&name, spec);
                (name, Some(parameters))
            },
            move |change| shared.classes(change),
        ));
        let shared = Arc::clone(&driver.shared);
        tokio::spawn(follow(
            events(claim_parameters, PARAMETERS_PAGE),
            shutdown,
            |object| {
                let (namespace, name) = watch::namespaced_name(&object);
                let spec = object.0.map(|object| object.spec).map_err(|error| error.error);
                let parameters = ClaimParameters::check(&namespace, &name, spec);
                ((namespace, name), Some(parameters))
            },
            move |change| shared.claims(change),
        ));
        driver
    }

    fn unwatched(driver_name: impl Into<String>) -> Self {
        let name = driver_name.into();
        let state = Mutex::new(HostState::new(&name));
        let synced = cell::Sender::new(Synced::default());
        let evaluator = Evaluator::new(&name);
        Self {
            shared: Arc::new(HostDriverInner {
                name,
                state,
                changes: CapacityChanges::default(),
                findings: {
                    let (sender, receiver) = mpsc::unbounded_channel();
                    FindingChannel(sender, Mutex::new(Some(receiver)))
                },
                synced,
                evaluator,
                turns: FairQueue::default(),
                lookups: AtomicUsize::default(),
                pieces: AsyncMutex::default(),
                searches: Arc::default(),
                search_order: KeyedLocks::default(),
            }),
        }
    }
}

/// Returns the name of an inventory object, and its node if it belongs to driver `driver` and is readable.
fn read_inventory(driver: &str, object: Guarded<NodeInventory>) -> (String, Option<NodeInfo>) {
    let key = watch::name(&object);
    match object.0 {
        Ok(inventory) => (
            key,
            (inventory.spec.driver_name == driver).then(|| NodeInfo::read(&inventory)),
        ),
        Err(error) => {
            tracing::warn!(name = key, %error, "a NodeInventory cannot be read; nothing is allocated from it");
            (key, None)
        }
    }
}

impl HostDriverInner {
    fn state(&self) -> MutexGuard<'_, HostState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inventories(&self, change: WatchUpdate<String, NodeInfo>) {
        let all = matches!(change, WatchUpdate::All(_));
        let (number, findings) = {
            let mut state = self.state();
            (
                state.apply_inventories(change),
                state.allocator.recheck_conflicts(),
            )
        };
        self.send_findings(findings);
        self.synced.send_modify(|synced| synced.inventories |= all);
        self.changes.report(CapacityCause::Inventory, number);
    }

    fn classes(&self, change: WatchUpdate<String, Result<ClassParameters, ParametersError>>) {
        let all = matches!(change, WatchUpdate::All(_));
        let number = self.state().apply_classes(change);
        self.synced.send_modify(|synced| synced.classes |= all);
        self.changes.report(CapacityCause::Parameters, number);
    }

    fn claims(&self, change: WatchUpdate<(String, String), Result<ClaimParameters, ParametersError>>) {
        let all = matches!(change, WatchUpdate::All(_));
        let namespace = match &change {
            WatchUpdate::Set((namespace, _), _) => Some(namespace.clone()),
            WatchUpdate::All(_) | WatchUpdate::Gone(_) => None,
        };
        let number = self.state().apply_claims(change);
        self.synced.send_modify(|synced| synced.claims |= all);
        match namespace {
            // Users write these objects, so a change must not cost the pods of other namespaces an evaluation.
            Some(namespace) if number > 0 => self.changes.report_in(namespace),
            _ => self.changes.report(CapacityCause::Parameters, number),
        }
    }

    /// Evaluates the selectors in use against new devices of the inventories, in one task at a time.
    fn evaluate_due(self: &Arc<Self>) {
        {
            let mut state = self.state();
            if state.is_evaluating || state.next_evaluation().is_none() {
                return;
            }
        }
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            let mut number = 0;
            loop {
                let due = shared.state().next_evaluation();
                let Some((namespace, kind, expression)) = due else {
                    break;
                };
                // A rejected expression is no longer due.
                let evaluated = shared.evaluate_kind(&namespace, &kind, &expression).await;
                number += evaluated.unwrap_or(0);
            }
            shared.changes.report(CapacityCause::Inventory, number);
        });
    }

    /// Ensures that these selectors are evaluated against all devices of a kind.
    async fn evaluate_all(
        self: &Arc<Self>,
        kind: &str,
        selectors: &[CheckedSelector],
    ) -> Result<(), DriverError> {
        for selector in selectors {
            let before = self.lookups.fetch_add(1, Ordering::Relaxed);
            if (before + 1).is_multiple_of(LOOKUPS_MAX) {
                // Nothing else waits if all selectors have their results.
                yield_now().await;
            }
            self.state().expressions.request(selector)?;
            let (namespace, expression) = (selector.namespace(), selector.expression());
            let evaluated = self.evaluate_kind(namespace, kind, expression).await;
            evaluated.map_err(|refusal| match refusal {
                SelectorError::Wrong(error) => selector.refusal(error).into(),
                SelectorError::Unfinished(error) => {
                    DriverError::retry("SelectorUnfinished", selector.refusal(error).to_string())
                }
            })?;
        }
        Ok(())
    }

    /// Ensures that an expression is evaluated against all devices of a kind, in turn with other expressions and namespaces. Returns the
    /// number of new results.
    async fn evaluate_kind(
        self: &Arc<Self>,
        namespace: &Arc<str>,
        kind: &str,
        expression: &Arc<str>,
    ) -> Result<usize, SelectorError> {
        let pending = || self.state().pending(kind, expression, Instant::now());
        let mut number = 0;
        if pending()?.is_some() {
            let _line = self.turns.line(namespace, expression).await;
            loop {
                let _turn = self.turns.turn(namespace).await;
                let Some(pending) = pending()? else { break };
                number += self.evaluate(pending).await;
            }
        }
        Ok(number)
    }

    /// Returns the number of results.
    async fn evaluate(self: &Arc<Self>, pending: PendingEvaluation) -> usize {
        let PendingEvaluation { expression, devices } = pending;
        let evaluated = self.evaluator.evaluate(&expression, devices).await;
        if let Err(error) = &evaluated {
            tracing::warn!(%expression, ?error, "a selector is refused");
        }
        let unfinished = matches!(evaluated, Err(SelectorError::Unfinished(_)));
        let number = self.state().evaluated(&expression, evaluated, Instant::now());
        if unfinished {
            self.retry_later(expression);
        }
        number
    }

    /// Schedules a retry of an expression that was not evaluated in time, and reports a success to waiting pods.
    fn retry_later(self: &Arc<Self>, expression: Arc<str>) {
        let Some(retry_at) = self.state().expressions.retry_at(&expression) else {
            return;
        };
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep_until(retry_at.into()).await;
            let (namespace, kinds) = {
                let state = shared.state();
                (state.expressions.namespace(&expression), state.kinds(&expression))
            };
            let mut number = 0;
            for kind in kinds {
                let evaluated = shared.evaluate_kind(&namespace, &kind, &expression).await;
                number += evaluated.unwrap_or(0);
            }
            shared.changes.report(CapacityCause::Inventory, number);
        });
    }

    /// Reports problems that are certain only since the inventories are known.
    fn send_findings(&self, findings: Vec<Finding>) {
        for finding in findings {
            // Without a controller the channel has no receiver.
            let _ = self.findings.0.send(finding);
        }
    }
}

/// The state under the driver's lock: the device allocator, and caches of the parameter objects with their selectors.
#[derive(Debug)]
struct HostState {
    /// Inventory and allocations.
    allocator: DeviceAllocator,
    /// DeviceClassParameters by name.
    classes: ObjectCache<String, ClassParameters>,
    /// DeviceClaimParameters by namespace and name.
    claims: ObjectCache<(String, String), ClaimParameters>,
    /// The expressions of these objects.
    expressions: Expressions,
    /// Inventory changes since results for deleted devices were last dropped.
    inventory_changes: usize,
    /// Whether a task evaluates the due expressions.
    is_evaluating: bool,
}

/// Devices for which an expression is pending.
#[derive(Debug)]
struct PendingEvaluation {
    /// The expression.
    expression: Arc<str>,
    /// Some of the devices.
    devices: Vec<AttributeSet>,
}

impl HostState {
    fn new(driver: &str) -> Self {
        Self {
            allocator: DeviceAllocator::new(driver),
            classes: ObjectCache::default(),
            claims: ObjectCache::default(),
            expressions: Expressions::default(),
            inventory_changes: 0,
            is_evaluating: false,
        }
    }

    /// Applies a change of DeviceClassParameters. Returns how many objects are new or different.
    fn apply_classes(
        &mut self,
        change: WatchUpdate<String, Result<ClassParameters, ParametersError>>,
    ) -> usize {
        let (expressions, allocator) = (&mut self.expressions, &mut self.allocator);
        self.classes.apply_with(change, |old, new| {
            // Add the new expressions first, so that unchanged ones keep their results.
            expressions.add(new.into_iter().flat_map(ClassParameters::selectors));
            for expression in expressions.remove(old.into_iter().flat_map(ClassParameters::selectors)) {
                allocator.forget_selector(&expression);
            }
        })
    }

    /// Applies a change of DeviceClaimParameters. Returns how many objects are new or different.
    fn apply_claims(
        &mut self,
        change: WatchUpdate<(String, String), Result<ClaimParameters, ParametersError>>,
    ) -> usize {
        let (expressions, allocator) = (&mut self.expressions, &mut self.allocator);
        self.claims.apply_with(change, |old, new| {
            expressions.add(new.into_iter().flat_map(ClaimParameters::selectors));
            for expression in expressions.remove(old.into_iter().flat_map(ClaimParameters::selectors)) {
                allocator.forget_selector(&expression);
            }
        })
    }

    /// Devices to evaluate before devices of `kind` can be selected by an expression; `None` if all are.
    fn pending(
        &mut self,
        kind: &str,
        expression: &Arc<str>,
        now: Instant,
    ) -> Result<Option<PendingEvaluation>, SelectorError> {
        let is_valid = self.expressions.check(expression, now)?;
        self.allocator.activate(kind, expression);
        let pending = self.allocator.pending(kind, expression);
        let devices: Vec<AttributeSet> = pending.take(CHUNK).cloned().collect();
        Ok((!is_valid || !devices.is_empty()).then(|| PendingEvaluation {
            expression: Arc::clone(expression),
            devices,
        }))
    }

    /// The kinds whose devices an expression selects from.
    fn kinds(&self, expression: &str) -> Vec<String> {
        let kinds = self.allocator.active_selectors().kinds(expression);
        kinds.map(str::to_owned).collect()
    }

    /// A kind and an expression pending for it with its namespace, after inventories have changed.
    fn due(&self) -> Option<(Arc<str>, String, Arc<str>)> {
        let mut due = self.allocator.active_selectors().due();
        let (kind, expression) = due.find(|(_, expression)| self.expressions.is_valid(expression))?;
        let namespace = self.expressions.namespace(expression);
        Some((namespace, kind.to_owned(), Arc::clone(expression)))
    }

    /// Returns the next expression of the evaluation task, and records whether the task goes on: it ends at `None`, and a later change
    /// starts another.
    fn next_evaluation(&mut self) -> Option<(Arc<str>, String, Arc<str>)> {
        let due = self.due();
        self.is_evaluating = due.is_some();
        due
    }

    /// Records the results or the error of an evaluation. Returns the number of results: each may help a pod, because a request for all
    /// matching devices waits until every device has one.
    fn evaluated(
        &mut self,
        expression: &Arc<str>,
        evaluated: Result<Results, SelectorError>,
        now: Instant,
    ) -> usize {
        let Some(results) = self.expressions.evaluated(expression, evaluated, now) else {
            return 0;
        };
        let number = results.len();
        self.allocator.evaluated(expression, results);
        number
    }

    /// Applies a change of NodeInventory objects of this driver. Returns the number of devices whose change may help waiting
    /// pods.
    fn apply_inventories(&mut self, change: WatchUpdate<String, NodeInfo>) -> usize {
        self.inventory_changes += 1;
        if self.inventory_changes >= INVENTORY_CHANGES_MAX {
            self.inventory_changes = 0;
            self.allocator.forget_devices();
        }
        match change {
            WatchUpdate::All(nodes) => self.allocator.replace_inventories(nodes.into_iter().collect()),
            WatchUpdate::Set(object, node) => self.allocator.set_inventory(&object, Some(node)),
            WatchUpdate::Gone(object) => self.allocator.set_inventory(&object, None),
        }
    }

    fn class_parameters(&self, class: &ResourceClass) -> Result<ClassParameters, DriverError> {
        let name = class_reference(class)?;
        let parameters = self
            .classes
            .get(&name.to_owned(), || format!("{CLASS_PARAMETERS_KIND} {name}"))?;
        Ok(parameters.clone())
    }

    fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        class: &ClassParameters,
    ) -> Result<DeviceRequests, DriverError> {
        let Some(name) = claim_reference(claim)? else {
            return Ok(DeviceRequests::new(class, ClaimParameters::default()));
        };
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let key = (namespace.to_owned(), name.to_owned());
        let parameters = self
            .claims
            .get(&key, || format!("{CLAIM_PARAMETERS_KIND} {namespace}/{name}"))?;
        Ok(DeviceRequests::new(class, parameters.clone()))
    }
}

/// A cache of all objects of one kind. For an object that is refused it keeps the error.
#[derive(Debug)]
struct ObjectCache<K, V> {
    objects: BTreeMap<K, Result<V, ParametersError>>,
    synced: bool,
}

impl<K, V> Default for ObjectCache<K, V> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            synced: false,
        }
    }
}

impl<K: Ord, V: PartialEq> ObjectCache<K, V> {
    /// Applies a change, and calls `changed` for each changed object with its old value and its new value. Returns how many objects are new
    /// or different; deleted objects do not count.
    fn apply_with(
        &mut self,
        change: WatchUpdate<K, Result<V, ParametersError>>,
        mut changed: impl FnMut(Option<&V>, Option<&V>),
    ) -> usize {
        match change {
            WatchUpdate::All(objects) => {
                let before = std::mem::take(&mut self.objects);
                self.objects = objects.into_iter().collect();
                self.synced = true;
                let mut number = 0;
                for (key, value) in &self.objects {
                    let old = before.get(key);
                    if old != Some(value) {
                        number += 1;
                        changed(old.and_then(|old| old.as_ref().ok()), value.as_ref().ok());
                    }
                }
                for (_, old) in before.iter().filter(|(key, _)| !self.objects.contains_key(*key)) {
                    changed(old.as_ref().ok(), None);
                }
                number
            }
            WatchUpdate::Set(key, value) => {
                let old = self.objects.get(&key);
                let same = old == Some(&value);
                if !same {
                    changed(old.and_then(|old| old.as_ref().ok()), value.as_ref().ok());
                }
                self.objects.insert(key, value);
                usize::from(!same)
            }
            WatchUpdate::Gone(key) => {
                if let Some(Ok(old)) = self.objects.remove(&key) {
                    changed(Some(&old), None);
                }
                0
            }
        }
    }

    /// The object, or why it is unavailable. `name` is its kind, namespace and name.
    fn get(&self, key: &K, name: impl FnOnce() -> String) -> Result<&V, DriverError> {
        match self.objects.get(key) {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => Err(error.clone().into()),
            None if self.synced => Err(ParametersError::NotFound { object: name() }.into()),
            None => Err(DriverError::retry(
                "NotSynced",
                format!("{} is not known yet", name()),
            )),
        }
    }
}

/// A copy of the claims for a search that outlives the call.
fn owned(claims: &[ClaimRequest<HostDriver>]) -> Arc<[ClaimRequest<HostDriver>]> {
    let copy = |request: &ClaimRequest<HostDriver>| {
        let (claim, class) = (Arc::clone(&request.claim), Arc::clone(&request.class));
        let class_parameters = Arc::clone(&request.class_parameters);
        let claim_parameters = request.claim_parameters.clone();
        ClaimRequest::<HostDriver>::new(claim, class, class_parameters, claim_parameters)
    };
    claims.iter().map(copy).collect()
}

fn requested(claims: &[ClaimRequest<HostDriver>]) -> Vec<RequestedClaim<'_>> {
    let claims = claims.iter();
    let requested = claims.map(|request| RequestedClaim {
        claim: &request.claim,
        device_requests: &request.claim_parameters,
        suitable_nodes: request.class.suitable_nodes.as_ref(),
    });
    requested.collect()
}

/// Work that would block the controller's thread too long. Up to [`QUICK_WORK_MAX`] steps run as one piece on that thread; more work
/// runs on another thread, on copies, one call after the other; namespaces take turns.
impl HostDriver {
    /// Does some milliseconds of work under the lock. Many calls may have such work at the same time: between two pieces the
    /// runtime polls I/O and timers, so that probes and the lease wait for one piece only.
    async fn piece<T>(&self, work: impl FnOnce(&mut HostState) -> T) -> T {
        let _turn = self.shared.pieces.lock().await;
        // Not after the work: a call that is dropped there would lose its allocation.
        yield_now().await;
        work(&mut self.shared.state())
    }

    /// Runs a search for claims of one namespace on the other thread.
    async fn search<T: Send + 'static>(
        &self,
        claims: &[ClaimRequest<Self>],
        search: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let first = claims.first();
        let namespace = first.and_then(|request| request.claim.metadata.namespace.as_deref());
        let namespace: Arc<str> = namespace.unwrap_or_default().into();
        let next = self.shared.search_order.lock(namespace).await;
        let turn = Arc::clone(&self.shared.searches).lock_owned().await;
        drop(next);
        let searched = spawn_blocking(move || {
            // Held by the search, which continues if the call is dropped.
            let _turn = turn;
            search()
        });
        match searched.await.map_err(JoinError::try_into_panic) {
            Ok(found) => found,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The runtime is shutting down.
            Err(Err(_)) => std::future::pending().await,
        }
    }

    /// Copies the state that concerns the claims on some nodes.
    async fn snapshots(
        &self,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> (Vec<NodeSnapshot>, SelectorResults) {
        let requested = requested(claims);
        let copy = |state: &mut HostState| {
            let allocator = &state.allocator;
            let snapshots = nodes
                .iter()
                .map(|name| allocator.snapshot(&requested, name))
                .collect();
            (snapshots, allocator.matches_of(&requested))
        };
        self.piece(copy).await
    }

    async fn search_unsuitable_nodes(
        &self,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
        unsuitable: &mut [UnsuitableNodes],
    ) {
        let owned = owned(claims);
        let mut work = WorkBudget::new(CALL_WORK_MAX);
        for some in nodes.chunks(MAX_SNAPSHOTS) {
            let (snapshots, matches) = self.snapshots(claims, some).await;
            let owned = Arc::clone(&owned);
            let (evaluated, done) = self
                .search(claims, move || {
                    let requested = requested(&owned);
                    let evaluate = |snapshot| node_fit(snapshot, &matches, &requested, &mut work);
                    let evaluated: Vec<_> = snapshots.iter().map(evaluate).collect();
                    (evaluated, work)
                })
                .await;
            work = done;
            for (name, evaluated) in some.iter().zip(&evaluated) {
                add_unsuitable(unsuitable, name, evaluated);
            }
        }
    }

    /// Allocates the result of a search on copies if it is still available; checking and holding it is one step.
    async fn search_allocation(&self, claims: &[ClaimRequest<Self>], node: Option<&str>) -> AllocateOutcome {
        let owned = owned(claims);
        let requests = requested(claims);
        let refuse = |error| self.shared.state().allocator.refuse(&requests, error);
        let route = self.piece(|state| state.allocator.route(&requests, node)).await;
        let route = match route {
            Ok(route) => route,
            Err(error) => return refuse(error),
        };
        let mut work = WorkBudget::new(CALL_WORK_MAX);
        let nodes: Vec<String> = route.nodes().map(str::to_owned).collect();
        for some in nodes.chunks(MAX_SNAPSHOTS) {
            let mut tries = 0;
            loop {
                let (snapshots, matches) = self.snapshots(claims, some).await;
                let owned = Arc::clone(&owned);
                let (found, done) = self
                    .search(claims, move || {
                        let found = first_fit(snapshots, &matches, &requested(&owned), &mut work);
                        (found, work)
                    })
                    .await;
                work = done;
                let Some((snapshot, evaluated)) = found else { break };
                if evaluated.iter().any(Result::is_err) {
                    match granted(&route, snapshot.name(), evaluated) {
                        Some(Err(error)) => return refuse(error),
                        _ => break,
                    }
                }
                let held = self
                    .shared
                    .state()
                    .allocator
                    .hold_in(&requests, &snapshot, evaluated);
                tries += 1;
                match held {
                    Some(allocated) => return allocated,
                    None if tries < MAX_TRIES => {}
                    None => {
                        let node = snapshot.name().to_owned();
                        return refuse((0, AllocateError::Changed { node }));
                    }
                }
            }
            if work.is_spent() {
                break;
            }
        }
        let mut shortage = route.shortage(&requests);
        let candidates: Vec<String> = route.candidates().map(str::to_owned).collect();
        for some in candidates.chunks(MAX_SNAPSHOTS) {
            if work.is_spent() {
                break;
            }
            let (snapshots, matches) = self.snapshots(claims, some).await;
            let owned = Arc::clone(&owned);
            (shortage, work) = self
                .search(claims, move || {
                    count_devices(snapshots, &matches, &requested(&owned), &mut shortage, &mut work);
                    (shortage, work)
                })
                .await;
        }
        refuse(route.exhausted(shortage, &work))
    }
}

impl Driver for HostDriver {
    type ClassParameters = ClassParameters;
    type ClaimParameters = DeviceRequests;

    fn name(&self) -> &str {
        &self.shared.name
    }

    async fn ready(&self) -> Result<(), DriverError> {
        let mut synced = self.shared.synced.subscribe();
        // The sender lives as long as self.
        let _ = synced.wait_for(|synced| synced.all()).await;
        Ok(())
    }

    async fn class_parameters(&self, class: &ResourceClass) -> Result<ClassParameters, DriverError> {
        let parameters = self.shared.state().class_parameters(class)?;
        self.shared
            .evaluate_all(parameters.kind(), parameters.selectors())
            .await?;
        Ok(parameters)
    }

    async fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        _class: &ResourceClass,
        class_parameters: &ClassParameters,
    ) -> Result<DeviceRequests, DriverError> {
        let device_requests = self.shared.state().claim_parameters(claim, class_parameters)?;
        for request in device_requests.requests() {
            self.shared
                .evaluate_all(device_requests.kind(), request.selectors())
                .await?;
        }
        Ok(device_requests)
    }

    async fn unsuitable_nodes(
        &self,
        _pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> Result<Vec<UnsuitableNodes>, DriverError> {
        let requested = requested(claims);
        let mut unsuitable: Vec<UnsuitableNodes> = vec![BTreeMap::new(); claims.len()];
        let mut instant = WorkBudget::new(INSTANT_WORK_MAX);
        let mut left =
            self.shared
                .state()
                .allocator
                .unsuitable(&requested, nodes, &mut unsuitable, &mut instant);
        if !left.is_empty() {
            let mut quick = WorkBudget::new(QUICK_WORK_MAX);
            left = self
                .piece(|state| {
                    state
                        .allocator
                        .unsuitable(&requested, left, &mut unsuitable, &mut quick)
                })
                .await;
        }
        if !left.is_empty() {
            self.search_unsuitable_nodes(claims, left, &mut unsuitable).await;
        }
        Ok(unsuitable)
    }

    async fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> Result<Vec<AllocationResult>, DriverError> {
        let requested = requested(claims);
        let mut allocated = None;
        // Sorting all nodes takes longer than the limit of this attempt.
        if node.is_some() {
            let mut instant = WorkBudget::new(INSTANT_WORK_MAX);
            let allocator = &mut self.shared.state().allocator;
            allocated = allocator.allocate_within(&requested, node, &mut instant);
        }
        if allocated.is_none() {
            let mut quick = WorkBudget::new(QUICK_WORK_MAX);
            allocated = self
                .piece(|state| state.allocator.allocate_within(&requested, node, &mut quick))
                .await;
        }
        let allocated = match allocated {
            Some(allocated) => allocated,
            None => self.search_allocation(claims, node).await,
        };
        self.shared.changes.report(CapacityCause::Freed, allocated.freed);
        allocated.answer.map_err(|(claim, error)| {
            let error = DriverError::from(error);
            match claims.get(claim) {
                Some(request) => error.for_claim(request.uid()),
                None => error,
            }
        })
    }

    async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<(), DriverError> {
        let freed = self.shared.state().allocator.deallocate(deallocation.claim);
        self.shared.changes.report(CapacityCause::Freed, freed);
        Ok(())
    }

    async fn observe(&self, observation: &Observation) -> Vec<Finding> {
        let driver = self.name();
        let Observed { freed, findings } = {
            let allocator = &mut self.shared.state().allocator;
            match observation {
                Observation::All(holdings) => allocator.observe_all(
                    holdings
                        .iter()
                        .map(|holding| (&*holding.claim, holding.allocation(driver))),
                ),
                Observation::Changed(holding) => {
                    allocator.observe(&holding.claim, holding.allocation(driver))
                }
                Observation::Gone { uid } => Observed {
                    freed: allocator.gone(uid),
                    findings: Vec::new(),
                },
            }
        };
        self.shared.changes.report(CapacityCause::Freed, freed);
        findings
    }

    /// Each change is reported to one caller.
    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        self.shared.changes.subscribe()
    }

    /// The first caller gets all findings.
    fn findings(&self) -> impl Stream<Item = Finding> + Send + 'static {
        let receiver = &self.shared.findings.1;
        let receiver = receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        futures::stream::unfold(receiver, |mut receiver| async move {
            let finding = receiver.as_mut()?.recv().await?;
            Some((finding, receiver))
        })
        .chain(futures::stream::pending())
    }
}

impl From<ParametersError> for DriverError {
    fn from(error: ParametersError) -> Self {
        Self::invalid(error.reason(), error.to_string())
    }
}

impl From<AllocateError> for DriverError {
    fn from(error: AllocateError) -> Self {
        let make = if error.is_final() {
            Self::invalid
        } else {
            Self::retry
        };
        make(error.reason(), error.to_string())
    }
}

#[cfg(test)]
mod tests;
