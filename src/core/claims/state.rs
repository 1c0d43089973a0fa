//! The state of the control flow: passes events to claims, contexts and transactions, and executes their actions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::api::resource::{Pod, PodSchedulingContext, ResourceClaim, ResourceClass, pod_owner_of};
use crate::core::names::truncated;
use crate::driver::{CapacityChange, Finding, Observation};

use super::claim::{CLAIMS_MAX, Cache, Claim, ClaimAction, ClaimInput, ClaimPhase, is_generated};
use super::context::{Context, ContextAction};
use super::event::{
    Answer, CallId, ClaimToAllocate, Command, DriverRequest, Event, EventReport, MESSAGE_MAX, Moment,
    ObjectKey, Outcome, Regarding, Settings, TransactionId, is_newer,
};
use super::queue::{WAKE_UP_TIMEOUT, WakeUps, Work, WorkQueue};
use super::statistics::{Statistics, is_failure};
use super::transaction::{
    Consumer, ItemResult, Transaction, TransactionAction, TransactionFailure, TransactionInput,
};

/// When an object is revisited whose report was not written. The queue of reports was full at that time; at some ten milliseconds each,
/// thousands of them are written meanwhile. If the server refuses the reports of a thousand objects, this makes 17 requests per second.
const REPORT_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// How long a generated claim is expected to be used by its owner pod. After that, the other pods of the namespace are read, each once,
/// because one of them may name it. The owner pod is read again if it was read before its context existed: it may have changed. The
/// scheduler usually writes the context some milliseconds after the claim.
const OWNER_POD_TIMEOUT: Duration = Duration::from_secs(10);

/// The start barrier: decisions begin when everything is listed and the driver is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Barrier {
    /// These lists are not complete yet.
    Listing(BTreeSet<Listed>),
    /// The driver has observed all claims.
    AwaitingDriver,
    Passed,
}

/// A list that the start barrier waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Listed {
    Classes,
    Claims,
    Contexts,
}

/// A pod that is read before its context exists. Users can name any uid as the owner of a claim, but the pod is read in the claim's
/// namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EarlyPodKey {
    namespace: String,
    uid: String,
}

impl EarlyPodKey {
    fn new(namespace: &str, uid: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            uid: uid.to_owned(),
        }
    }
}

/// The read of such a pod.
#[derive(Clone, Debug, PartialEq)]
enum EarlyPod {
    Reading(CallId),
    Read(Arc<Pod>),
}

/// A pending call: the object that its answer belongs to.
#[derive(Clone, Debug, PartialEq)]
enum PendingCall {
    /// Reading the pod of a context, or writing its entries.
    Context { key: ObjectKey, uid: String },
    /// Reading a pod that has no context yet.
    EarlyPod { pod: EarlyPodKey },
    /// Evaluating nodes for a context.
    Evaluate {
        context: ObjectKey,
        uid: String,
        /// The claims, by key and uid.
        claims: Vec<(ObjectKey, String)>,
    },
    /// A step for one claim alone.
    Claim { key: ObjectKey, uid: String },
    /// A step for one claim of a transaction.
    Item { transaction: TransactionId, uid: String },
    /// The driver's allocation for a transaction.
    Allocate { transaction: TransactionId },
}

impl PendingCall {
    /// The queue that counts it: one of [`Statistics::QUEUES`].
    fn queue(&self) -> &'static str {
        match self {
            Self::Item { .. } | Self::Allocate { .. } => "batch",
            Self::Claim { .. } => "claim",
            Self::Context { .. } | Self::EarlyPod { .. } | Self::Evaluate { .. } => "context",
        }
    }
}

/// The state of the classic DRA control flow. Owned by one task; only [`ControllerState::apply`] and [`ControllerState::decide`] change it.
#[derive(Clone, Debug)]
pub struct ControllerState {
    barrier: Barrier,
    cache: Cache,
    contexts: BTreeMap<ObjectKey, Context>,
    /// Pods without a context, for [`OWNER_POD_TIMEOUT`] after a claim was generated for them.
    early_pods: BTreeMap<EarlyPodKey, EarlyPod>,
    transactions: BTreeMap<TransactionId, Transaction>,
    pending_calls: BTreeMap<CallId, PendingCall>,
    queue: WorkQueue,
    wake_ups: WakeUps,
    commands: Vec<Command>,
    /// The last id of a call or a transaction.
    last_id: u64,
    statistics: Statistics,
}

impl ControllerState {
    /// Creates an empty state. It makes no decision until everything is listed and the driver is ready.
    pub fn new(settings: Settings) -> Self {
        Self {
            barrier: Barrier::Listing(BTreeSet::from([
                Listed::Classes,
                Listed::Claims,
                Listed::Contexts,
            ])),
            cache: Cache::new(settings),
            contexts: BTreeMap::new(),
            early_pods: BTreeMap::new(),
            transactions: BTreeMap::new(),
            pending_calls: BTreeMap::new(),
            queue: WorkQueue::default(),
            wake_ups: WakeUps::default(),
            commands: Vec::new(),
            last_id: 0,
            statistics: Statistics::default(),
        }
    }

    /// Whether decisions are made: everything is listed and the driver is ready.
    pub fn is_ready(&self) -> bool {
        self.barrier == Barrier::Passed
    }

    /// Whether a call, a write or a transaction is in progress.
    pub fn is_busy(&self) -> bool {
        !self.pending_calls.is_empty() || !self.transactions.is_empty()
    }

    /// When [`ControllerState::decide`] must be called again even without an event. Until decisions are made, only events matter.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.queue.next_deadline().filter(|_| self.is_ready())
    }

    /// Returns the counters since the start.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            queues: self.queue.statistics(),
            ..self.statistics.clone()
        }
    }

    /// Updates the state with an event.
    pub fn apply(&mut self, event: Event, now: Moment) {
        self.queue.now = now;
        match event {
            Event::Classes(classes) => self.see_all_classes(classes),
            Event::Class(class) => self.see_class(class),
            Event::ClassGone(name) => self.class_gone(&name),
            Event::Claims(claims) => self.see_all_claims(claims, now),
            Event::Claim(claim) => self.see_claim(claim, now),
            Event::ClaimGone { key, uid } => self.claim_gone(&key, &uid),
            Event::Contexts(contexts) => self.see_all_contexts(contexts),
            Event::Context(context) => self.see_context(context),
            Event::ContextGone { key, uid } => self.context_gone(&key, &uid),
            Event::DriverReady => self.driver_ready(),
            Event::Capacity(change) => self.capacity_changed(&change, now),
            Event::Found(findings) => findings.into_iter().for_each(|finding| self.found(finding)),
            Event::ReportFailed(report) => self.report_failed(&report, now),
            Event::Answer { id, answer } => self.answered(id, answer, now),
        }
    }

    /// Returns the commands to execute now. Pure: the same state and time give the same commands.
    pub fn decide(&mut self, now: Moment) -> Vec<Command> {
        self.queue.now = now;
        if self.is_ready() {
            self.queue.fire_timers();
            loop {
                while let Some(work) = self.queue.pop_first() {
                    match work {
                        Work::Transaction(id) => self.step_transaction(id, now),
                        Work::Claim(key) => self.step_claim(&key, now),
                        Work::OpenClaim(key) => self.open_claim(&key),
                        Work::WokenContext(_, key) | Work::Context(key) => self.step_context(&key, now),
                        Work::Recheck(key) => self.recheck_context(&key, now),
                        Work::WakeUpTimeout(key) => self.wake_ups.expire(&key, now),
                    }
                }
                if !self.start_wake_ups(now) {
                    break;
                }
            }
        }
        std::mem::take(&mut self.commands)
    }

    // === calls and reports ===

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Sends a command whose answer belongs to `pending_call`.
    fn send(&mut self, pending_call: PendingCall, command: impl FnOnce(CallId) -> Command) -> CallId {
        let id = CallId(self.next_id());
        self.queue.sent(pending_call.queue(), id);
        self.pending_calls.insert(id, pending_call);
        self.commands.push(command(id));
        id
    }

    fn call_driver(&mut self, pending_call: PendingCall, request: DriverRequest) {
        self.send(pending_call, |id| Command::CallDriver { id, request });
    }

    fn answered(&mut self, id: CallId, answer: Answer, now: Moment) {
        let Some(pending_call) = self.pending_calls.remove(&id) else {
            return;
        };
        self.statistics.called(&answer);
        self.queue.answered(pending_call.queue(), id, is_failure(&answer));
        // Apply the result of a write at once; the watch shows it later.
        if let Answer::ClaimWritten(Outcome::Done(claim)) = &answer {
            self.see_written_claim(claim.clone(), now);
        }
        match pending_call {
            PendingCall::EarlyPod { pod } => self.early_pod_read(&pod, answer),
            PendingCall::Evaluate { context, uid, claims } => {
                self.end_evaluation(&claims);
                self.context_answered(&context, &uid, answer, now);
            }
            PendingCall::Context { key, uid } => self.context_answered(&key, &uid, answer, now),
            PendingCall::Claim { key, uid } => self.claim_answered(&key, &uid, answer, now),
            PendingCall::Item { transaction, uid } => self.item_answered(transaction, &uid, answer, now),
            PendingCall::Allocate { transaction } => self.allocated(transaction, answer),
        }
    }

    fn observe(&mut self, observation: Observation) {
        self.commands.push(Command::Observe(observation));
    }

    fn report(&mut self, regarding: Regarding, reason: &'static str, message: String) {
        *self.statistics.reports.entry(reason).or_default() += 1;
        self.commands.push(Command::Report(EventReport {
            regarding,
            reason,
            message: truncated(message, MESSAGE_MAX),
        }));
    }

    /// Reports a problem of a claim unless it repeats the last report. Returns whether it was reported.
    fn report_claim(&mut self, key: &ObjectKey, reason: &'static str, message: String) -> bool {
        let Some(claim) = self.cache.claims.get_mut(key) else {
            return false;
        };
        let message = truncated(message, MESSAGE_MAX);
        if claim.reported.as_deref() == Some(&message) {
            return false;
        }
        claim.reported = Some(message.clone());
        let regarding = Regarding::Claim {
            key: key.clone(),
            uid: claim.uid().to_owned(),
        };
        self.report(regarding, reason, message);
        true
    }

    fn report_class(&mut self, name: String, reason: &'static str, message: String) {
        let class = self.cache.classes.get(&name);
        let uid = class.and_then(|class| class.metadata.uid.clone());
        let uid = uid.unwrap_or_default();
        self.report(Regarding::Class { name, uid }, reason, message);
    }

    /// Handles a report that was not written: it may be repeated, and its object is revisited after [`REPORT_RETRY_INTERVAL`].
    fn report_failed(&mut self, report: &EventReport, now: Moment) {
        let next = now.after(REPORT_RETRY_INTERVAL);
        match &report.regarding {
            Regarding::Pod { key, uid } => {
                if let Some(context) = self.contexts.get_mut(key)
                    && context.forget_report(uid, report)
                {
                    self.queue.insert_at(next, Work::Context(key.clone()));
                }
            }
            Regarding::Claim { key, uid } => {
                if let Some(claim) = self.cache.claim_mut(key, uid)
                    && claim.reported.as_ref() == Some(&report.message)
                {
                    claim.forget_reports();
                    self.queue.insert_at(next, Work::Claim(key.clone()));
                }
            }
            // A class is reported with each pod and claim that it concerns.
            Regarding::Class { .. } => {}
        }
    }

    // === the start barrier ===

    fn listed(&mut self, list: Listed) {
        let Barrier::Listing(incomplete) = &mut self.barrier else {
            return;
        };
        incomplete.remove(&list);
        if !incomplete.is_empty() {
            return;
        }
        self.barrier = Barrier::AwaitingDriver;
        let claims = self.cache.claims.values_mut();
        let holdings = claims.filter_map(|claim| claim.observe_first()).collect();
        self.observe(Observation::All(holdings));
        self.commands.push(Command::AwaitDriver);
    }

    /// Whether the driver has observed all claims, so that each change is observed on its own.
    fn is_listed(&self) -> bool {
        !matches!(self.barrier, Barrier::Listing(_))
    }

    fn driver_ready(&mut self) {
        self.barrier = Barrier::Passed;
        self.queue
            .extend(self.cache.claims.keys().cloned().map(Work::Claim));
        self.queue
            .extend(self.contexts.keys().cloned().map(Work::Context));
    }

    // === classes ===

    fn see_all_classes(&mut self, classes: Vec<Arc<ResourceClass>>) {
        let names: BTreeSet<&str> = classes
            .iter()
            .filter_map(|class| class.metadata.name.as_deref())
            .collect();
        let known = self.cache.classes.keys();
        let gone: Vec<String> = known
            .filter(|name| !names.contains(name.as_str()))
            .cloned()
            .collect();
        for name in gone {
            self.class_gone(&name);
        }
        for class in classes {
            self.see_class(class);
        }
        self.listed(Listed::Classes);
    }

    fn see_class(&mut self, class: Arc<ResourceClass>) {
        let Some(name) = class.metadata.name.clone() else {
            return;
        };
        let known = self.cache.classes.get(&name);
        if known == Some(&class) {
            return;
        }
        let same_driver = known.is_some_and(|known| known.driver_name == class.driver_name);
        let driver = class.driver_name.clone();
        self.cache.classes.insert(name.clone(), class);
        let ours = &self.cache.settings.driver_name;
        if !same_driver && driver != *ours && driver.eq_ignore_ascii_case(ours) {
            let message = format!(
                "driverName \"{driver}\" contains upper case letters, which the API server rejects in a finalizer: use \"{ours}\""
            );
            self.report_class(name.clone(), "DriverNameNotLowerCase", message);
        }
        self.class_changed(&name);
    }

    fn class_gone(&mut self, name: &str) {
        if self.cache.classes.remove(name).is_some() {
            self.class_changed(name);
        }
    }

    fn class_changed(&mut self, name: &str) {
        let mut keys: Vec<ObjectKey> = Vec::new();
        for (key, claim) in &mut self.cache.claims {
            if claim.class_name() == name {
                claim.invalid_at = None;
                claim.backoff.succeeded();
                keys.push(key.clone());
            }
        }
        for key in keys {
            for context in self.cache.index.users(&key) {
                if let Some(context) = self.contexts.get_mut(context) {
                    context.reset_backoff();
                }
            }
            self.claim_changed(&key);
        }
    }

    // === claims ===

    fn see_all_claims(&mut self, claims: Vec<Arc<ResourceClaim>>, now: Moment) {
        let listed = claims.iter().map(|claim| &claim.metadata);
        let known = self.cache.claims.iter();
        for (key, uid) in missing(known.map(|(key, claim)| (key, claim.uid())), listed) {
            self.claim_gone(&key, &uid);
        }
        for claim in claims {
            self.see_claim(claim, now);
        }
        self.listed(Listed::Claims);
    }

    /// Applies the object returned by our own write, unless the watch has meanwhile reported the claim as deleted.
    fn see_written_claim(&mut self, claim: Arc<ResourceClaim>, now: Moment) {
        let known = self.cache.claims.get(&ObjectKey::of(&claim.metadata));
        if known.is_some_and(|known| Some(known.uid()) == claim.metadata.uid.as_deref()) {
            self.see_claim(claim, now);
        }
    }

    fn see_claim(&mut self, object: Arc<ResourceClaim>, now: Moment) {
        let key = ObjectKey::of(&object.metadata);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if let Some(known) = self.cache.claims.get(&key) {
            let known_uid = known.uid().to_owned();
            if known_uid != uid {
                self.claim_gone(&key, &known_uid);
            } else if known.is_gone()
                || !is_newer(
                    known.object.metadata.resource_version.as_deref(),
                    object.metadata.resource_version.as_deref(),
                )
            {
                return;
            }
        }
        self.see_owner(&key, &object);
        let driver = self.cache.settings.driver_name.as_str();
        let is_new = !self.cache.claims.contains_key(&key);
        let claim = self
            .cache
            .claims
            .entry(key.clone())
            .or_insert_with(|| Box::new(Claim::new(object.clone())));
        if let Some(holding) = claim.see(object, driver, now)
            && self.is_listed()
        {
            self.observe(Observation::Changed(holding));
        }
        self.claim_changed(&key);
        if is_new && self.cache.index.is_candidate(&key) {
            self.read_pod_early(&key);
        }
    }

    fn claim_gone(&mut self, key: &ObjectKey, uid: &str) {
        if self.cache.claim_mut(key, uid).is_none() {
            return;
        }
        let Some(claim) = self.cache.claims.remove(key) else {
            return;
        };
        if let Some(owner) = pod_owner_of(&claim.object.metadata) {
            self.leave_owner(&owner.uid, key);
        }
        self.cache.index.remove_candidate(key);
        if claim.is_observed() && self.is_listed() {
            self.observe(Observation::Gone { uid: uid.to_owned() });
        }
        self.queue_users(key);
        self.queue.extend(claim.transaction().map(Work::Transaction));
    }

    /// Updates the index of claims by owner pod. If the owner changes, another pod may use the claim from now on.
    fn see_owner(&mut self, key: &ObjectKey, object: &ResourceClaim) {
        let uid = |object: &ResourceClaim| pod_owner_of(&object.metadata).map(|owner| owner.uid.clone());
        let now = uid(object);
        if let Some(known) = self.cache.claims.get(key) {
            let before = uid(&known.object);
            if before != now {
                if let Some(before) = before {
                    self.leave_owner(&before, key);
                }
                self.cache.index.remove_candidate(key);
            }
        }
        if let Some(now) = now {
            self.cache.index.add_owner(now, key);
        }
    }

    /// Removes a claim from the index of its previous owner pod, and forgets a pod that was read early.
    fn leave_owner(&mut self, uid: &str, key: &ObjectKey) {
        self.cache.index.remove_owner(uid, key);
        self.early_pods.remove(&EarlyPodKey::new(&key.namespace, uid));
    }

    /// Lets all pods of the namespace be read for a claim that is still unallocated.
    fn open_claim(&mut self, key: &ObjectKey) {
        let claim = self.cache.claims.get(key);
        if let Some(owner) = claim.and_then(|claim| pod_owner_of(&claim.object.metadata)) {
            let pod = EarlyPodKey::new(&key.namespace, &owner.uid);
            self.early_pods.remove(&pod);
        }
        if self.cache.index.open_candidate(key) {
            let first = ObjectKey::new(key.namespace.clone(), "");
            let contexts = self.contexts.range(first..);
            let unread = contexts
                .take_while(|(context, _)| context.namespace == key.namespace)
                .filter(|(_, context)| context.is_pod_unread());
            self.queue
                .extend(unread.map(|(key, _)| Work::Context(key.clone())));
        }
    }

    /// Updates the indexes after a change of a claim or its class, and queues all affected work.
    fn claim_changed(&mut self, key: &ObjectKey) {
        let Some(claim) = self.cache.claims.get(key) else {
            return;
        };
        // Claims of other drivers count too: a pod is evaluated only when all its claims exist.
        if let Some(owner) = pod_owner_of(&claim.object.metadata) {
            let context = ObjectKey::new(key.namespace.clone(), owner.name.clone());
            self.queue.insert(Work::Context(context));
        }
        if self.cache.is_candidate(claim) {
            let is_generated = is_generated(&claim.object);
            if self.cache.index.add_candidate(key) {
                if is_generated {
                    let end = self.queue.now.after(OWNER_POD_TIMEOUT);
                    self.queue.insert_at(end, Work::OpenClaim(key.clone()));
                } else {
                    self.open_claim(key);
                }
            }
        } else if claim.is_delayed() || claim.is_allocated() {
            self.cache.index.remove_candidate(key);
        } else {
            self.cache.index.add_immediate(key);
        }
        self.queue.insert(Work::Claim(key.clone()));
        self.queue_users(key);
    }

    /// Queues the contexts whose pods name a claim.
    fn queue_users(&mut self, claim: &ObjectKey) {
        let contexts = self.cache.index.users(claim);
        self.queue.extend(contexts.cloned().map(Work::Context));
    }

    /// Reports a wrong allocation to the claim's users, and marks it for rollback if it must not stay.
    fn found(&mut self, finding: Finding) {
        let key = ObjectKey::new(finding.namespace, finding.name);
        let Some(claim) = self.cache.claim_mut(&key, &finding.uid) else {
            return;
        };
        if finding.roll_back {
            claim.mark_wrong();
        }
        let pods = claim.user_pods();
        if self.report_claim(&key, finding.reason, finding.message.clone()) {
            for (name, uid) in pods {
                let key = ObjectKey::new(key.namespace.clone(), name);
                self.report(
                    Regarding::Pod { key, uid },
                    finding.reason,
                    finding.message.clone(),
                );
            }
        }
        self.queue.insert(Work::Claim(key));
    }

    /// The input of a claim's step.
    fn claim_input(&self, key: &ObjectKey) -> Option<ClaimInput> {
        let claim = self.cache.claims.get(key)?;
        let pod_lacks_a_claim = claim.incomplete_pod().is_none_or(|(context, uid)| {
            let context = self.contexts.get(context);
            let context = context.filter(|context| claim.has_no_other_user(context.owner_uid()));
            context.is_some_and(|context| context.uid() == uid && context.lacks_a_claim(&self.cache))
        });
        Some(ClaimInput {
            class: self.cache.class_owner(claim.class_name()),
            capacity_generation: self.cache.capacity_generations.of(&key.namespace),
            pod_lacks_a_claim,
        })
    }

    fn step_claim(&mut self, key: &ObjectKey, now: Moment) {
        if let Some(input) = self.claim_input(key)
            && let Some(claim) = self.cache.claims.get_mut(key)
        {
            let actions = claim.step(&input, now);
            self.act_on_claim(key, actions);
        }
    }

    fn claim_answered(&mut self, key: &ObjectKey, uid: &str, answer: Answer, now: Moment) {
        let input = self.claim_input(key);
        let Some((claim, input)) = self.cache.claim_mut(key, uid).zip(input) else {
            return;
        };
        let Answer::ClaimRead(Ok(object)) = answer else {
            let actions = claim.answered(answer, &input, now);
            self.act_on_claim(key, actions);
            return;
        };
        let refusal = claim.read(now);
        self.queue.insert(Work::Claim(key.clone()));
        if self.see_read_claim(key, uid, object, now)
            && let Some(claim) = self.cache.claims.get_mut(key)
        {
            let actions = claim.found(refusal);
            self.act_on_claim(key, actions);
        }
    }

    /// Applies a claim that was read. Returns whether it still exists.
    fn see_read_claim(
        &mut self,
        key: &ObjectKey,
        uid: &str,
        object: Option<Arc<ResourceClaim>>,
        now: Moment,
    ) -> bool {
        let object = object.filter(|object| object.metadata.uid.as_deref() == Some(uid));
        let exists = object.is_some();
        if let Some(object) = object {
            self.see_written_claim(object, now);
        } else {
            self.claim_vanished(key, uid);
        }
        exists
    }

    /// Marks a claim that the server no longer has.
    fn claim_vanished(&mut self, key: &ObjectKey, uid: &str) {
        let Some(claim) = self.cache.claim_mut(key, uid) else {
            return;
        };
        if claim.vanish() {
            self.observe(Observation::Gone { uid: uid.to_owned() });
        }
        self.cache.index.remove_candidate(key);
        self.queue_users(key);
    }

    fn act_on_claim(&mut self, key: &ObjectKey, actions: Vec<ClaimAction>) {
        let Some(claim) = self.cache.claims.get(key) else {
            return;
        };
        let uid = claim.uid().to_owned();
        let pending_call = || PendingCall::Claim {
            key: key.clone(),
            uid: uid.clone(),
        };
        for action in actions {
            match action {
                ClaimAction::Step => self.queue.insert(Work::Claim(key.clone())),
                ClaimAction::StepAt(moment) => self.queue.insert_at(moment, Work::Claim(key.clone())),
                ClaimAction::StepUsers => self.queue_users(key),
                ClaimAction::Read => {
                    let key = key.clone();
                    self.send(pending_call(), |id| Command::ReadClaim { id, key });
                }
                ClaimAction::ReadPod(pod) => {
                    self.send(pending_call(), |id| Command::ReadPod { id, key: pod });
                }
                ClaimAction::Write(write) => {
                    let (key, uid) = (key.clone(), uid.clone());
                    self.send(pending_call(), |id| Command::WriteClaim { id, key, uid, write });
                }
                ClaimAction::Deallocate { claim, allocation } => {
                    let request = DriverRequest::Deallocate { claim, allocation };
                    self.call_driver(pending_call(), request);
                }
                ClaimAction::Allocate => {
                    let claim = self.cache.claims.get(key);
                    let to_allocate = claim.and_then(|claim| {
                        Some(ClaimToAllocate {
                            pod_claim_name: String::new(),
                            claim: claim.object.clone(),
                            class: self.cache.classes.get(claim.class_name())?.clone(),
                        })
                    });
                    if let Some(to_allocate) = to_allocate {
                        self.start_transaction(None, None, vec![(key.clone(), to_allocate)]);
                    }
                }
                ClaimAction::Report(reason, message) => {
                    self.report_claim(key, reason, message);
                }
                ClaimAction::ReportWithClass {
                    class,
                    reason,
                    message,
                } => {
                    if self.report_claim(key, reason, message.clone()) {
                        self.report_class(class, reason, message);
                    }
                }
                ClaimAction::Vanished => self.claim_vanished(key, &uid),
                ClaimAction::CountDeallocation => self.statistics.deallocations += 1,
            }
        }
    }

    // === contexts ===

    fn see_all_contexts(&mut self, contexts: Vec<Arc<PodSchedulingContext>>) {
        let listed = contexts.iter().map(|context| &context.metadata);
        let known = self.contexts.iter();
        for (key, uid) in missing(known.map(|(key, context)| (key, context.uid())), listed) {
            self.context_gone(&key, &uid);
        }
        for context in contexts {
            self.see_context(context);
        }
        self.listed(Listed::Contexts);
    }

    fn see_context(&mut self, object: Arc<PodSchedulingContext>) {
        let key = ObjectKey::of(&object.metadata);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if let Some(known) = self.contexts.get(&key) {
            let known_uid = known.uid().to_owned();
            if known_uid != uid {
                self.context_gone(&key, &known_uid);
            } else if !is_newer(
                known.object.metadata.resource_version.as_deref(),
                object.metadata.resource_version.as_deref(),
            ) {
                return;
            }
        }
        if let Some(context) = self.contexts.get_mut(&key) {
            context.see(object);
            // A transaction ends early if its node is no longer selected.
            self.queue.extend(context.transaction().map(Work::Transaction));
        } else {
            let context = Context::new(object, self.cache.capacity_generations.of(&key.namespace));
            self.contexts.insert(key.clone(), context);
        }
        self.queue.insert(Work::Context(key));
    }

    fn context_gone(&mut self, key: &ObjectKey, uid: &str) {
        if self.contexts.get(key).is_none_or(|context| context.uid() != uid) {
            return;
        }
        let Some(context) = self.contexts.remove(key) else {
            return;
        };
        self.wake_ups.remove(key);
        self.statistics
            .waiting_reason_changed(context.waiting_reason(), None);
        for claim in context.named_claims() {
            self.cache.index.remove_user(claim, key);
        }
        self.queue.extend(context.transaction().map(Work::Transaction));
    }

    fn step_context(&mut self, key: &ObjectKey, now: Moment) {
        if let Some(context) = self.contexts.get_mut(key) {
            let actions = context.step(key, &self.cache, now);
            self.act_on_context(key, actions, now);
        }
    }

    fn recheck_context(&mut self, key: &ObjectKey, now: Moment) {
        if let Some(context) = self.contexts.get_mut(key) {
            let generation = self.cache.capacity_generations.of(&key.namespace);
            let actions = context.recheck(generation, now);
            self.act_on_context(key, actions, now);
        }
    }

    fn context_answered(&mut self, key: &ObjectKey, uid: &str, answer: Answer, now: Moment) {
        let context = self.contexts.get_mut(key);
        let Some(context) = context.filter(|context| context.uid() == uid) else {
            return;
        };
        let actions = match answer {
            Answer::PodRead(answer) => context.pod_read(answer, &self.cache, now),
            Answer::Evaluated(answer) => context.evaluated(answer, &self.cache, now),
            Answer::ContextWritten(outcome) => context.published(outcome, now),
            Answer::ClaimRead(_)
            | Answer::ClaimWritten(_)
            | Answer::Allocated(_)
            | Answer::Deallocated(_) => {
                return;
            }
        };
        self.act_on_context(key, actions, now);
    }

    fn act_on_context(&mut self, key: &ObjectKey, actions: Vec<ContextAction>, now: Moment) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let uid = context.uid().to_owned();
        let pending_call = || PendingCall::Context {
            key: key.clone(),
            uid: uid.clone(),
        };
        for action in actions {
            match action {
                ContextAction::Step => self.queue.insert(self.wake_ups.work(key)),
                ContextAction::StepAt(moment) => self.queue.insert_at(moment, Work::Context(key.clone())),
                ContextAction::RecheckAt(moment) => self.queue.insert_at(moment, Work::Recheck(key.clone())),
                ContextAction::FindPod => self.find_pod(key, now),
                ContextAction::ReadPod => {
                    let key = key.clone();
                    self.send(pending_call(), |id| Command::ReadPod { id, key });
                }
                ContextAction::UseClaim(claim) => self.cache.index.add_user(claim, key),
                ContextAction::LeaveClaim(claim) => self.cache.index.remove_user(&claim, key),
                ContextAction::Evaluate { pod, claims, nodes } => {
                    self.evaluate(key.clone(), uid.clone(), pod, claims, nodes);
                }
                ContextAction::Publish(entries) => {
                    let (key, uid) = (key.clone(), uid.clone());
                    self.send(pending_call(), |id| Command::WriteContext {
                        id,
                        key,
                        uid,
                        entries,
                    });
                }
                ContextAction::Allocate {
                    consumer,
                    node,
                    claims,
                } => {
                    let id = self.start_transaction(Some(consumer), Some(node), claims);
                    if let Some(context) = self.contexts.get_mut(key) {
                        context.transaction_started(id);
                    }
                }
                ContextAction::GiveUp(claims) => {
                    for claim_key in claims {
                        if let Some(claim) = self.cache.claims.get_mut(&claim_key) {
                            claim.mark_incomplete(key.clone(), uid.clone());
                        }
                        self.queue.insert(Work::Claim(claim_key));
                    }
                    // The pod takes no step until its claims can be evaluated together.
                    self.queue.insert(Work::Context(key.clone()));
                }
                ContextAction::Report {
                    pod_uid,
                    reason,
                    message,
                } => {
                    let (key, uid) = (key.clone(), pod_uid);
                    self.report(Regarding::Pod { key, uid }, reason, message);
                }
                ContextAction::ReportOnClaim(claim, reason, message) => {
                    self.report_claim(&claim, reason, message);
                }
                ContextAction::ReportOnClass(class, reason, message) => {
                    self.report_class(class, reason, message);
                }
                ContextAction::JoinWakeUps => self.wake_ups.join(key.clone()),
                ContextAction::LeaveWakeUps => self.wake_ups.remove(key),
                ContextAction::EndWakeUp => self.wake_ups.end(key),
                ContextAction::CountWakeUp(start) => self.statistics.wake_ups.observe(now.since(start)),
                ContextAction::CountWaiting { before, after } => {
                    self.statistics.waiting_reason_changed(before, after);
                }
                ContextAction::CountRecheck => self.statistics.caught_by_recheck += 1,
            }
        }
    }

    fn evaluate(
        &mut self,
        context: ObjectKey,
        uid: String,
        pod: Arc<Pod>,
        claims: Vec<(ObjectKey, ClaimToAllocate)>,
        nodes: Vec<String>,
    ) {
        let mut keys = Vec::new();
        for (key, _) in &claims {
            if let Some(claim) = self.cache.claims.get_mut(key) {
                claim.phase = ClaimPhase::Evaluating;
                keys.push((key.clone(), claim.uid().to_owned()));
            }
        }
        let pending_call = PendingCall::Evaluate {
            context,
            uid,
            claims: keys,
        };
        let claims = claims.into_iter().map(|(_, claim)| claim).collect();
        self.call_driver(
            pending_call,
            DriverRequest::UnsuitableNodes { pod, claims, nodes },
        );
    }

    /// Ends the evaluation of these claims. Contexts that waited for it proceed.
    fn end_evaluation(&mut self, claims: &[(ObjectKey, String)]) {
        for (key, uid) in claims {
            let Some(claim) = self.cache.claim_mut(key, uid) else {
                continue;
            };
            if claim.phase == ClaimPhase::Evaluating {
                claim.phase = ClaimPhase::Idle;
            }
            self.queue.insert(Work::Claim(key.clone()));
            self.queue_users(key);
        }
    }

    // === pods that are read before their contexts exist ===

    /// Reads the owner pod of a generated claim before the context needs it.
    fn read_pod_early(&mut self, claim: &ObjectKey) {
        let object = self.cache.claims.get(claim).map(|claim| &claim.object);
        let object = object.filter(|object| is_generated(object));
        let Some(owner) = object.and_then(|object| pod_owner_of(&object.metadata)) else {
            return;
        };
        let key = ObjectKey::new(claim.namespace.clone(), owner.name.clone());
        let pod = EarlyPodKey::new(&claim.namespace, &owner.uid);
        if !self.is_ready() || self.contexts.contains_key(&key) || self.early_pods.contains_key(&pod) {
            return;
        }
        let pending_call = PendingCall::EarlyPod { pod: pod.clone() };
        let id = self.send(pending_call, |id| Command::ReadPod { id, key });
        self.early_pods.insert(pod, EarlyPod::Reading(id));
    }

    fn early_pod_read(&mut self, early_pod: &EarlyPodKey, answer: Answer) {
        let Some(early) = self.early_pods.get_mut(early_pod) else {
            return;
        };
        match answer {
            Answer::PodRead(Ok(Some(pod)))
                if pod.metadata.uid.as_ref() == Some(&early_pod.uid)
                    && pod.spec.resource_claims.len() <= CLAIMS_MAX =>
            {
                *early = EarlyPod::Read(pod);
            }
            // After any error, and for a pod that is too large to be kept, the context reads the pod itself.
            _ => {
                self.early_pods.remove(early_pod);
            }
        }
    }

    /// Takes over a pod that was read early, or reads the pod.
    fn find_pod(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let pod = context
            .owner_uid()
            .map(|uid| EarlyPodKey::new(&key.namespace, uid));
        let early = pod.and_then(|pod| self.early_pods.remove(&pod));
        let actions = match early {
            Some(EarlyPod::Reading(id)) => {
                context.await_early_pod();
                let (key, uid) = (key.clone(), context.uid().to_owned());
                self.pending_calls.insert(id, PendingCall::Context { key, uid });
                return;
            }
            Some(EarlyPod::Read(pod)) => {
                context.await_early_pod();
                context.pod_read(Ok(Some(pod)), &self.cache, now)
            }
            None => context.read_pod(),
        };
        self.act_on_context(key, actions, now);
    }

    // === wake-ups ===

    fn capacity_changed(&mut self, change: &CapacityChange, now: Moment) {
        let namespace = change.namespace.as_deref();
        self.cache.capacity_generations.advance(namespace);
        let waiting = self
            .contexts
            .iter()
            .filter_map(|(key, context)| Some((key.clone(), context.waiting()?.clone())));
        for key in self.wake_ups.capacity_freed(waiting, change, now) {
            self.wake_up(&key);
        }
        let mut immediate = self.cache.index.immediate();
        immediate.retain(|key| change.concerns(&key.namespace));
        for key in immediate {
            let claim = self.cache.claims.get_mut(&key);
            // Each refusal to record an allocation frees a device, which must not end the delay after it.
            if let Some(claim) = claim.filter(|claim| !claim.allocation_refused) {
                claim.backoff.succeeded();
            }
            self.queue.insert(Work::Claim(key));
        }
    }

    /// Wakes as many contexts as allowed. Returns whether any was woken.
    fn start_wake_ups(&mut self, now: Moment) -> bool {
        let mut any = false;
        let deadline = now.after(WAKE_UP_TIMEOUT);
        while let Some(key) = self.wake_ups.next(deadline) {
            if self.wake_up(&key) {
                self.queue.insert_at(deadline, Work::WakeUpTimeout(key));
                any = true;
            } else {
                self.wake_ups.remove(&key);
            }
        }
        any
    }

    /// Lets a context be evaluated again. Returns whether it still exists.
    fn wake_up(&mut self, key: &ObjectKey) -> bool {
        let Some(context) = self.contexts.get_mut(key) else {
            return false;
        };
        let generation = self.cache.capacity_generations.of(&key.namespace);
        context.wake_up(generation, self.wake_ups.freed_at());
        self.queue.insert(self.wake_ups.work(key));
        true
    }

    // === transactions ===

    /// Starts to allocate `claims` on `node`, or on any node if `None`. No other operation may be in progress for them.
    fn start_transaction(
        &mut self,
        consumer: Option<Consumer>,
        node: Option<String>,
        claims: Vec<(ObjectKey, ClaimToAllocate)>,
    ) -> TransactionId {
        let id = TransactionId(self.next_id());
        let namespace = claims.first().map_or("", |(key, _)| key.namespace.as_str());
        let generation = self.cache.capacity_generations.of(namespace);
        let mut transaction = Transaction::new(consumer, node, generation);
        for (key, to_allocate) in claims {
            if let Some(claim) = self.cache.claims.get_mut(&key)
                && transaction.add(key, to_allocate, claim)
            {
                claim.join_transaction(id);
            }
        }
        self.transactions.insert(id, transaction);
        self.queue.insert(Work::Transaction(id));
        id
    }

    /// The input of a transaction's step.
    fn transaction_input(&self, transaction: &Transaction) -> TransactionInput<'_> {
        let node = transaction.node.as_ref();
        TransactionInput {
            settings: &self.cache.settings,
            claims: &self.cache.claims,
            consumer: transaction.consumer.as_ref().map(|consumer| {
                let context = self.contexts.get(&consumer.context);
                let context = context.filter(|context| context.uid() == consumer.context_uid);
                context
                    .map(|context| context.consumer_state(node))
                    .unwrap_or_default()
            }),
        }
    }

    fn step_transaction(&mut self, id: TransactionId, now: Moment) {
        let Some(mut transaction) = self.transactions.remove(&id) else {
            return;
        };
        let actions = transaction.step(&self.transaction_input(&transaction), now);
        let item = |uid| PendingCall::Item { transaction: id, uid };
        let mut has_ended = false;
        for action in actions {
            match action {
                TransactionAction::Step => self.queue.insert(Work::Transaction(id)),
                TransactionAction::StepAt(moment) => self.queue.insert_at(moment, Work::Transaction(id)),
                TransactionAction::Read { key, uid } => {
                    self.send(item(uid), |id| Command::ReadClaim { id, key });
                }
                TransactionAction::Write { key, uid, write } => {
                    let pending_call = item(uid.clone());
                    self.send(pending_call, |id| Command::WriteClaim { id, key, uid, write });
                }
                TransactionAction::Allocate { claims, node } => {
                    let pending_call = PendingCall::Allocate { transaction: id };
                    self.call_driver(pending_call, DriverRequest::Allocate { claims, node });
                }
                TransactionAction::Deallocate {
                    uid,
                    claim,
                    allocation,
                } => {
                    let request = DriverRequest::Deallocate { claim, allocation };
                    self.call_driver(item(uid), request);
                }
                TransactionAction::End => has_ended = true,
            }
        }
        if has_ended {
            self.end_transaction(&transaction, now);
        } else {
            self.transactions.insert(id, transaction);
        }
    }

    fn allocated(&mut self, id: TransactionId, answer: Answer) {
        let Some(mut transaction) = self.transactions.remove(&id) else {
            return;
        };
        if let Answer::Allocated(result) = answer {
            transaction.allocated(result, &self.transaction_input(&transaction));
        }
        self.transactions.insert(id, transaction);
        self.queue.insert(Work::Transaction(id));
    }

    fn item_answered(&mut self, id: TransactionId, uid: &str, answer: Answer, now: Moment) {
        let item = |transaction: &Transaction| {
            let (key, _) = transaction.claims().find(|(_, item)| *item == uid)?;
            Some(key.clone())
        };
        let Some(key) = self.transactions.get(&id).and_then(item) else {
            return;
        };
        let Some(mut transaction) = self.transactions.remove(&id) else {
            return;
        };
        if let Answer::ClaimRead(Ok(object)) = &answer {
            self.see_read_claim(&key, uid, object.clone(), now);
        }
        let driver_name = self.cache.settings.driver_name.clone();
        let claim = self.cache.claim_mut(&key, uid);
        match transaction.item_answered(uid, answer, claim, &driver_name, now) {
            ItemResult::Recorded => self.statistics.allocations += 1,
            ItemResult::RolledBack => self.statistics.deallocations += 1,
            ItemResult::Unclear(message) => self.report_unclear(&transaction, &key, &message, now),
            ItemResult::NotDeallocated(error)
                if self
                    .cache
                    .claim_mut(&key, uid)
                    .is_some_and(|claim| !claim.is_gone()) =>
            {
                self.report_claim(&key, error.reason, error.not_deallocated());
            }
            // A claim that is gone gets no Event.
            ItemResult::NotDeallocated(_) | ItemResult::Continues => {}
        }
        self.transactions.insert(id, transaction);
        self.queue.insert(Work::Transaction(id));
    }

    /// Reports a write that keeps failing without being refused.
    fn report_unclear(&mut self, transaction: &Transaction, key: &ObjectKey, message: &str, now: Moment) {
        if !transaction.is_active(&self.transaction_input(transaction)) {
            return;
        }
        let message = format!("the allocation could not be recorded yet: {message}");
        let Some(consumer) = &transaction.consumer else {
            self.report_claim(key, "AllocationNotRecorded", message);
            return;
        };
        if let Some(context) = self.contexts.get_mut(&consumer.context) {
            let mut actions = Vec::new();
            context.report("AllocationNotRecorded", message, &mut actions);
            self.act_on_context(&consumer.context, actions, now);
        }
    }

    fn end_transaction(&mut self, transaction: &Transaction, now: Moment) {
        let failure = transaction.failure(&self.transaction_input(transaction));
        let result = failure.as_ref().map_or("Allocated", TransactionFailure::as_str);
        self.statistics.attempted(result);
        for (key, uid) in transaction.claims() {
            if let Some(claim) = self.cache.claim_mut(key, uid) {
                claim.leave_transaction();
                self.queue.insert(Work::Claim(key.clone()));
                self.queue_users(key);
            }
        }
        let Some(consumer) = &transaction.consumer else {
            for (key, uid) in transaction.claims() {
                let generation = self.cache.capacity_generations.of(&key.namespace);
                let claim = self.cache.claims.get_mut(key);
                if let Some(claim) = claim.filter(|claim| claim.uid() == uid) {
                    let class = self.cache.classes.get(claim.class_name());
                    let action = transaction.end_immediate(claim, class, failure.clone(), generation, now);
                    self.act_on_claim(key, action.into_iter().collect());
                }
            }
            return;
        };
        let key = &consumer.context;
        match failure {
            None => self.wake_ups.succeeded(key),
            Some(_) => self.wake_ups.end(key),
        }
        let context = self.contexts.get_mut(key);
        if let Some(context) = context.filter(|context| context.uid() == consumer.context_uid) {
            let node = transaction.node.as_deref();
            let actions = context.transaction_ended(node, failure, &self.cache, now);
            self.act_on_context(key, actions, now);
        }
    }
}

/// The known objects that a complete list lacks, with their uids.
fn missing<'a>(
    known: impl Iterator<Item = (&'a ObjectKey, &'a str)>,
    listed: impl Iterator<Item = &'a ObjectMeta>,
) -> Vec<(ObjectKey, String)> {
    let listed: BTreeSet<ObjectKey> = listed.map(ObjectKey::of).collect();
    known
        .filter(|(key, _)| !listed.contains(*key))
        .map(|(key, uid)| (key.clone(), uid.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::api::resource::AllocationResult;
    use crate::core::claims::{CallError, CallErrorKind, CallErrorSubject};
    use crate::driver::CapacityCause;

    fn claim(version: &str, owner: Option<(&str, &str, &str)>) -> Arc<ResourceClaim> {
        let owner = owner.map(|(api_version, kind, uid)| {
            json!({ "apiVersion": api_version, "kind": kind, "name": "p", "uid": uid, "controller": true })
        });
        let owners: Vec<_> = owner.into_iter().collect();
        let claim = json!({
            "metadata": { "namespace": "n", "name": "p-c", "uid": "c", "resourceVersion": version, "ownerReferences": owners },
            "spec": { "resourceClassName": "class" },
        });
        Arc::new(serde_json::from_value(claim).unwrap())
    }

    #[test]
    fn nothing_is_due_before_decisions_are_made() {
        let mut state = ControllerState::new(Settings::new("d.example"));
        state
            .queue
            .insert_at(Moment::default(), Work::OpenClaim(ObjectKey::new("n", "c")));
        assert_eq!(
            state.next_deadline(),
            None,
            "the runtime would be called again at once"
        );
        state.barrier = Barrier::Passed;
        assert_eq!(state.next_deadline(), Some(Moment::default()));
    }

    #[test]
    fn a_change_in_a_namespace_concerns_its_immediate_claims_only() {
        let mut state = ControllerState::new(Settings::new("d.example"));
        let key = ObjectKey::new("n", "c");
        state.cache.index.add_immediate(&key);
        for (namespace, work) in [("other", None), ("n", Some(Work::Claim(key)))] {
            let change = CapacityChange::new(CapacityCause::Parameters).in_namespace(namespace);
            state.apply(Event::Capacity(change), Moment::default());
            assert_eq!(state.queue.pop_first(), work, "{namespace}");
        }
    }

    #[test]
    fn a_claim_is_indexed_once_by_its_present_owner_pod() {
        let mut state = ControllerState::new(Settings::new("d.example"));
        let mut owners = |version: &str, owner| {
            state.apply(Event::Claim(claim(version, owner)), Moment::default());
            state.cache.index.owners().cloned().collect::<Vec<_>>()
        };
        assert_eq!(owners("1", Some(("v1", "Pod", "first"))), ["first"]);
        assert_eq!(owners("2", Some(("v1", "Pod", "second"))), ["second"]);
        assert_eq!(
            owners("3", Some(("batch/v1", "Job", "job"))),
            Vec::<String>::new()
        );
        assert_eq!(owners("4", Some(("v1", "Pod", "first"))), ["first"]);
        assert_eq!(owners("5", None), Vec::<String>::new());
    }

    /// A started [`ControllerState`] without claims and contexts.
    fn started() -> ControllerState {
        let start = Moment::default();
        let class = json!({ "metadata": { "name": "class" }, "driverName": "d.example" });
        let class = Arc::new(serde_json::from_value(class).unwrap());
        let mut state = ControllerState::new(Settings::new("d.example"));
        for event in [
            Event::Classes(vec![class]),
            Event::Claims(Vec::new()),
            Event::Contexts(Vec::new()),
            Event::DriverReady,
        ] {
            state.apply(event, start);
        }
        state.decide(start);
        state
    }

    /// The id of the only command, which reads the pod `n/p`.
    #[track_caller]
    fn only_read(commands: &[Command]) -> CallId {
        match commands {
            [Command::ReadPod { id, key }] if *key == ObjectKey::new("n", "p") => *id,
            _ => panic!("{commands:?}"),
        }
    }

    /// The answer that the pod `n/p` has these claims, and that its status names these.
    fn pod(claims: &Value, statuses: &Value) -> Answer {
        let pod = json!({
            "metadata": { "namespace": "n", "name": "p", "uid": "pod" },
            "spec": { "resourceClaims": claims },
            "status": { "resourceClaimStatuses": statuses },
        });
        Answer::PodRead(Ok(Some(Arc::new(serde_json::from_value(pod).unwrap()))))
    }

    /// An owner with the uid of the pod `n/p`.
    fn owner(name: &str) -> Value {
        json!({ "apiVersion": "v1", "kind": "Pod", "name": name, "uid": "pod", "controller": true })
    }

    /// A claim that is generated for an entry of this owner.
    fn generated(namespace: &str, pod: &str, name: &str, entry: &str) -> Event {
        let claim = json!({
            "metadata": { "namespace": namespace, "name": name, "uid": name, "resourceVersion": "1",
                "annotations": { "resource.kubernetes.io/pod-claim-name": entry }, "ownerReferences": [owner(pod)] },
            "spec": { "resourceClassName": "class" },
        });
        Event::Claim(Arc::new(serde_json::from_value(claim).unwrap()))
    }

    /// The context of the pod `n/p`.
    fn context() -> Arc<PodSchedulingContext> {
        let context = json!({
            "metadata": { "namespace": "n", "name": "p", "uid": "context", "resourceVersion": "1",
                "ownerReferences": [owner("p")] },
            "spec": { "potentialNodes": ["a"] },
        });
        Arc::new(serde_json::from_value(context).unwrap())
    }

    /// A started [`ControllerState`] that has read the owner pod of a new claim.
    fn with_early_pod(claims: &Value) -> ControllerState {
        let start = Moment::default();
        let mut state = started();
        state.apply(Event::Claim(claim("1", Some(("v1", "Pod", "pod")))), start);
        let (id, answer) = (only_read(&state.decide(start)), pod(claims, &json!([])));
        state.apply(Event::Answer { id, answer }, start);
        state
    }

    #[test]
    fn a_claim_that_names_the_uid_of_another_pod_hides_no_pod() {
        let now = Moment::default();
        for namespace in ["evil", "n"] {
            let mut state = started();
            state.apply(generated(namespace, "x", "x-c", "c"), now);
            state.apply(generated("n", "p", "p-c", "c"), now);
            state.apply(Event::Context(context()), now);
            for command in state.decide(now) {
                let Command::ReadPod { id, .. } = command else {
                    panic!("{command:?}")
                };
                let answer = Answer::PodRead(Ok(None));
                state.apply(Event::Answer { id, answer }, now);
            }
            only_read(&state.decide(now));
        }
    }

    #[test]
    fn a_pod_whose_claim_seems_to_be_anothers_is_read_again() {
        let now = Moment::default();
        let mut state = started();
        // Until the pod's status has the name of its claim, the claim `p-c` seems to be meant.
        state.apply(Event::Claim(claim("1", None)), now);
        state.apply(generated("n", "p", "p-d-1", "d"), now);
        let entry = |name| json!({ "name": name, "source": { "resourceClaimTemplateName": "t" } });
        let claims = json!([entry("c"), entry("d")]);
        let (id, answer) = (only_read(&state.decide(now)), pod(&claims, &json!([])));
        state.apply(Event::Answer { id, answer }, now);
        state.apply(Event::Context(context()), now);
        let id = only_read(&state.decide(now));
        let statuses = json!([{ "name": "c" }, { "name": "d", "resourceClaimName": "p-d-1" }]);
        let answer = pod(&claims, &statuses);
        state.apply(Event::Answer { id, answer }, now);
        let commands = state.decide(now);
        assert!(
            matches!(commands.as_slice(), [Command::CallDriver { .. }]),
            "{commands:?}"
        );
    }

    #[test]
    fn of_two_claims_of_an_entry_the_status_of_the_pod_decides() {
        for is_late in [false, true] {
            let start = Moment::default();
            let claims = json!([{ "name": "c", "source": { "resourceClaimTemplateName": "t" } }]);
            let unnamed = || pod(&claims, &json!([]));
            let mut state = started();
            let answered = |state: &mut ControllerState, id, answer, now| {
                state.apply(Event::Answer { id, answer }, now);
                state.decide(now)
            };
            state.apply(generated("n", "p", "p-c-1", "c"), start);
            let id = only_read(&state.decide(start));
            answered(&mut state, id, unnamed(), start);
            let second = generated("n", "p", "p-c-2", "c");
            if is_late {
                state.apply(Event::Context(context()), start);
                let commands = state.decide(start);
                let [Command::CallDriver { id, .. }] = commands.as_slice() else {
                    panic!("{commands:?}")
                };
                let answer = Answer::Evaluated(Ok(vec![BTreeMap::new()]));
                state.apply(Event::Answer { id: *id, answer }, start);
                state.apply(second, start);
            } else {
                state.apply(second, start);
                state.apply(Event::Context(context()), start);
            }
            let id = only_read(&state.decide(start));
            // The status is not written yet: the next read comes after a delay.
            assert_eq!(answered(&mut state, id, unnamed(), start), []);
            let later = state.next_deadline().unwrap();
            assert!(later > start);
            let id = only_read(&state.decide(later));
            let statuses = json!([{ "name": "c", "resourceClaimName": "p-c-2" }]);
            let commands = answered(&mut state, id, pod(&claims, &statuses), later);
            let [
                Command::CallDriver {
                    request: DriverRequest::UnsuitableNodes { claims, .. },
                    ..
                },
            ] = commands.as_slice()
            else {
                panic!("{commands:?}")
            };
            assert_eq!(claims[0].claim.metadata.name.as_deref(), Some("p-c-2"));
        }
    }

    #[test]
    fn a_pod_read_early_is_kept_for_ten_seconds() {
        for is_allocated in [false, true] {
            let start = Moment::default();
            let mut state = with_early_pod(&json!([]));
            if is_allocated {
                let mut allocated = (*claim("2", Some(("v1", "Pod", "pod")))).clone();
                allocated.status.allocation = Some(AllocationResult::new("other.example", "{}"));
                state.apply(Event::Claim(Arc::new(allocated)), start);
            }
            state.decide(start.after(Duration::from_secs(9)));
            assert_eq!(state.early_pods.len(), 1);
            state.decide(start.after(OWNER_POD_TIMEOUT));
            assert!(state.early_pods.is_empty(), "although the claim stays");
        }
    }

    #[test]
    fn a_pod_with_too_many_claims_is_not_kept_early() {
        for (number, kept) in [(CLAIMS_MAX, 1), (CLAIMS_MAX + 1, 0)] {
            let state = with_early_pod(&json!(vec![json!({ "name": "c" }); number]));
            assert_eq!(state.early_pods.len(), kept, "{number} claims");
        }
    }

    /// A [`ControllerState`] whose driver evaluates the only claim of a pod, and the id of the call.
    fn evaluating() -> (ControllerState, CallId) {
        let now = Moment::default();
        let entry = json!({ "name": "c", "source": { "resourceClaimTemplateName": "t" } });
        let mut state = with_early_pod(&json!([entry]));
        state.apply(Event::Context(context()), now);
        let commands = state.decide(now);
        let [Command::CallDriver { id, .. }] = commands.as_slice() else {
            panic!("{commands:?}")
        };
        (state, *id)
    }

    #[test]
    fn a_long_text_of_a_driver_is_cut_before_it_is_stored_or_sent() {
        let now = Moment::default();
        let (mut state, id) = evaluating();
        let key = ObjectKey::new("n", "p-c");
        let error = CallError {
            kind: CallErrorKind::Invalid,
            subject: CallErrorSubject::Claim(key.clone()),
            reason: "Test",
            message: "ü".repeat(5_000),
        };
        let answer = Answer::Evaluated(Err(error));
        state.apply(Event::Answer { id, answer }, now);
        let commands = state.decide(now);
        let messages = commands.iter().filter_map(|command| match command {
            Command::Report(report) => Some(&report.message),
            _ => None,
        });
        let stored = state.cache.claims[&key].reported.as_ref();
        let lengths: Vec<usize> = messages.chain(stored).map(String::len).collect();
        // The reports on the pod and on the claim, and the last of the claim.
        assert_eq!(lengths.len(), 3, "{commands:?}");
        assert!(lengths.iter().all(|bytes| *bytes <= MESSAGE_MAX), "{lengths:?}");
    }

    #[test]
    fn entries_that_a_webhook_drops_are_written_rarely() {
        let ten_minutes = Moment::new(Duration::from_secs(600));
        let full = || Answer::Evaluated(Ok(vec![[("a".to_owned(), "full".to_owned())].into()]));
        let (mut state, id) = evaluating();
        let mut now = Moment::default();
        state.apply(Event::Answer { id, answer: full() }, now);
        let (mut writes, mut reports) = (0, Vec::new());
        while now < ten_minutes && writes < 100 {
            let commands = state.decide(now);
            if commands.is_empty() {
                now = state.next_deadline().unwrap();
            }
            for command in commands {
                let (id, answer) = match command {
                    Command::CallDriver { id, .. } => (id, full()),
                    Command::WriteContext { id, .. } => {
                        writes += 1;
                        (id, Answer::ContextWritten(Outcome::Done(context())))
                    }
                    Command::Report(report) => {
                        reports.push(report.reason);
                        continue;
                    }
                    other => panic!("{other:?}"),
                };
                state.apply(Event::Answer { id, answer }, now);
            }
        }
        assert!((5..=40).contains(&writes), "{writes} writes in ten minutes");
        // Once, and again after five minutes.
        assert_eq!(reports, ["NoSuitableDevice", "AnswerRefused"].repeat(2));
    }

    #[test]
    fn only_the_incomplete_pod_gives_up_its_allocation() {
        let now = Moment::default();
        let reserved = |version: &str, name: &str, uid: &str| {
            let claim = json!({
                "metadata": { "namespace": "n", "name": "other", "uid": "o", "resourceVersion": version,
                    "finalizers": ["d.example/deletion-protection"] },
                "spec": { "resourceClassName": "class" },
                "status": { "driverName": "d.example", "allocation": {},
                    "reservedFor": [{ "resource": "pods", "name": name, "uid": uid }] },
            });
            Event::Claim(Arc::new(serde_json::from_value(claim).unwrap()))
        };
        for (name, uid, is_given_up) in [("p", "pod", true), ("q", "another", false)] {
            let (mut state, _) = evaluating();
            state.apply(reserved("2", "p", "pod"), now);
            let key = ObjectKey::new("n", "other");
            let claim = state.cache.claims.get_mut(&key).unwrap();
            claim.mark_incomplete(ObjectKey::new("n", "p"), "context".to_owned());
            state.apply(reserved("3", name, uid), now);
            let commands = state.decide(now);
            let reads_pod = commands
                .iter()
                .any(|command| matches!(command, Command::ReadPod { .. }));
            assert_eq!(reads_pod, is_given_up, "reserved for {name}: {commands:?}");
        }
    }

    #[test]
    fn a_context_leaves_a_claim_that_its_pod_no_longer_names() {
        let now = Moment::default();
        let (mut state, id) = evaluating();
        let key = ObjectKey::new("n", "p-c");
        assert_eq!(state.cache.index.users(&key).count(), 1);
        let answer = Answer::Evaluated(Ok(vec![BTreeMap::new()]));
        state.apply(Event::Answer { id, answer }, now);
        let gone = Event::ClaimGone {
            key: key.clone(),
            uid: "c".to_owned(),
        };
        state.apply(gone, now);
        state.decide(now);
        assert_eq!(state.cache.index.users(&key).count(), 0);
    }
}
