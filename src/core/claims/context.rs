//! One PodSchedulingContext: checks whether its pod needs this driver, which nodes are unsuitable, and when to allocate.
//!
//! ```text
//! read pod ─▶ evaluate nodes (driver) ─▶ publish unsuitable nodes
//!                  └─ the selected node is suitable ─▶ transaction
//! ```
//!
//! Its reports become Events on the pod, among them `NoSuitableDevice` if its claims fit on no node (`report_no_node`, called by `act`), the
//! driver's reason if a call failed or was refused (`report_call`), a missing class or a claim of another owner (`pending_claims`), and
//! `AllocationNotRecorded`. An `allocate` that the driver wants repeated is not reported: the node is published as unsuitable.
//!
//! [`Context::step`] and the functions for answers return [`ContextAction`]s, which [`ControllerState`](super::ControllerState) executes in
//! order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{
    NODE_LIST_MAX, Pod, PodSchedulingContext, ResourceClaimSchedulingStatus, controller_of,
};
use crate::core::names::{is_dns_subdomain, truncated};
use crate::driver::UnsuitableNodes;

use super::claim::{CLAIMS_MAX, Cache, ClaimPhase, Resolved};
use super::event::{
    CallError, CallErrorKind, CallErrorSubject, ClaimToAllocate, EventReport, MESSAGE_MAX, Moment, ObjectKey,
    Outcome, TransactionId, is_newer,
};
use super::queue::{Backoff, SHORTAGE_REPORT_INTERVAL, WRITES_BEFORE_REPORT, WaitingPod, spread};
use super::statistics::Statistics;
use super::transaction::{Consumer, ConsumerState, TransactionFailure};

/// Interval of the slow recheck of a waiting pod, a fallback for wake-ups. A recheck that helps counts as a lost wake-up.
const RECHECK: Duration = Duration::from_secs(300);
/// Rechecks are spread over this time.
const RECHECK_SPREAD: Duration = Duration::from_secs(120);

/// Maximum length of a reason for an unsuitable node, in bytes. The driver decides on the texts, and a waiting pod keeps one for each of up
/// to 128 claims on a few hundred nodes; a message shows three. The built-in driver's are shorter.
const REASON_MAX: usize = 640;

const SILENT_DRIVER_REASON: &str = "OtherDriverSilent";

/// The pod of a context. It is read once, and again before its claims are allocated a second time.
#[derive(Clone, Debug, Default, PartialEq)]
enum PodKnown {
    #[default]
    Unread,
    Read(Arc<Pod>),
    /// Its claims were allocated since it was read. Before they are allocated again, it is read again: it may have ended.
    Served(Arc<Pod>),
    /// It has this number of claims, more than [`CLAIMS_MAX`].
    TooManyClaims(usize),
    /// It does not exist, has ended, is being deleted, or is not the owner of the context. Also if it has too many claims, and none of ours
    /// among the first.
    Gone,
}

impl PodKnown {
    fn pod(&self) -> Option<&Arc<Pod>> {
        match self {
            Self::Read(pod) | Self::Served(pod) => Some(pod),
            Self::Unread | Self::TooManyClaims(_) | Self::Gone => None,
        }
    }
}

/// The operation in progress for a context; at most one at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum ContextPhase {
    #[default]
    Idle,
    ReadingPod {
        /// The read was sent before the context existed.
        early: bool,
    },
    /// The driver evaluates nodes.
    Evaluating(EvaluationInput),
    /// Writing these entries, which are all of ours.
    Publishing(Vec<ResourceClaimSchedulingStatus>),
    Allocating(TransactionId),
}

/// The inputs of an evaluation. Its result is valid while they are unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EvaluationInput {
    nodes: Vec<String>,
    /// Uid of each claim, with the resource version of its class.
    claims: Vec<(String, Option<String>)>,
    capacity_generation: u64,
    rechecks: u64,
}

/// The last report about a pod, which is not repeated.
#[derive(Clone, Debug)]
struct LastReport {
    message: String,
    /// When it was written, if it says that the pod fits on no node.
    no_node_at: Option<Moment>,
}

/// Another driver that owes the scheduler an answer for the pod.
#[derive(Clone, Copy, Debug)]
enum Silence {
    Since(Moment),
    /// It was reported, and may have answered since.
    Reported,
}

/// A pod that waits for a suitable node.
#[derive(Clone, Debug)]
struct Waiting {
    pod: WaitingPod,
    /// When the next slow recheck is due.
    recheck_at: Moment,
}

#[derive(Clone, Debug)]
pub(super) struct Context {
    /// The latest object, from the watch or from the answer to our own write.
    pub(super) object: Arc<PodSchedulingContext>,
    pod: PodKnown,
    phase: ContextPhase,
    /// The claims that its pod names, whether or not they exist.
    named: BTreeSet<ObjectKey>,
    /// The last result of an evaluation, in the order of `EvaluationInput::claims`.
    evaluation: Option<(EvaluationInput, Vec<UnsuitableNodes>)>,
    /// Inputs that the driver cannot evaluate or allocate. It is not called again while they are unchanged.
    invalid: Option<EvaluationInput>,
    /// Nodes on which the driver refused to allocate although it had reported them as suitable, each with the reason. Cleared by a change,
    /// or when `refusals` allows another attempt.
    refused_nodes: BTreeMap<String, String>,
    refusals: Backoff,
    /// Set while the pod waits for a suitable node.
    waiting: Option<Waiting>,
    /// The capacity generation at its last wake-up.
    capacity_generation: u64,
    /// The capacity generation when the driver was last called: its answer may predate later changes.
    called_at: u64,
    /// Number of evaluations requested by the slow recheck.
    rechecks: u64,
    backoff: Backoff,
    /// The delay after allocations that the server has refused to record. Freed devices do not end it: each refusal frees one.
    recording: Backoff,
    last_report: Option<LastReport>,
    /// Other drivers that owe the scheduler an answer for this pod, or did when they were reported.
    silent: BTreeMap<String, Silence>,
    /// The next evaluation is requested by the slow recheck alone.
    by_recheck: bool,
    /// The reason that keeps the pod from its devices, for the statistics.
    waiting_reason: Option<&'static str>,
    /// Start of the current wake-up: when capacity was freed, or when the pod began to wait if that was later.
    woken_at: Option<Moment>,
}

/// What happens next for a context.
#[derive(Debug)]
pub(super) enum ContextAction {
    /// Step again.
    Step,
    StepAt(Moment),
    RecheckAt(Moment),
    /// Use the pod if it was read before the context existed, or else read it.
    FindPod,
    ReadPod,
    /// The pod names this claim.
    UseClaim(ObjectKey),
    /// The pod no longer names this claim.
    LeaveClaim(ObjectKey),
    /// Let the driver evaluate nodes.
    Evaluate {
        pod: Arc<Pod>,
        claims: Vec<(ObjectKey, ClaimToAllocate)>,
        nodes: Vec<String>,
    },
    /// Write our entries.
    Publish(Vec<ResourceClaimSchedulingStatus>),
    /// Start a transaction for these claims.
    Allocate {
        consumer: Consumer,
        node: String,
        claims: Vec<(ObjectKey, ClaimToAllocate)>,
    },
    /// Mark the allocations of these claims for rollback, because the pod lacks others.
    GiveUp(Vec<ObjectKey>),
    /// Report a problem on the pod with this uid.
    Report {
        pod_uid: String,
        reason: &'static str,
        message: String,
    },
    ReportOnClaim(ObjectKey, &'static str, String),
    ReportOnClass(String, &'static str, String),
    /// Queue for a wake-up: the pod began to wait too late for the last change.
    JoinWakeUps,
    /// Leave the queue of wake-ups, and end a wake-up.
    LeaveWakeUps,
    /// The wake-up did not help.
    EndWakeUp,
    /// The wake-up that started at this time led to an allocation or to new entries.
    CountWakeUp(Moment),
    /// The reason that keeps the pod from its devices has changed.
    CountWaiting {
        before: Option<&'static str>,
        after: Option<&'static str>,
    },
    /// The slow recheck found a node.
    CountRecheck,
}

type Actions = Vec<ContextAction>;

/// A claim of the pod that this driver has yet to allocate.
struct PendingClaim {
    pod_claim_name: String,
    key: ObjectKey,
    /// Index of its result. Entries of the pod that name the same claim share it, because the driver evaluates each claim once.
    position: usize,
    to_allocate: ClaimToAllocate,
}

/// The pod's claims that can be allocated now.
struct PendingClaims {
    own: Vec<PendingClaim>,
    /// Number of unallocated claims, including those of other drivers.
    all: usize,
}

/// A claim of the pod that another driver allocates.
struct OtherClaim {
    /// The name in `pod.spec.resourceClaims`.
    entry: String,
    class: String,
    driver: String,
}

impl Context {
    pub(super) fn new(object: Arc<PodSchedulingContext>, capacity_generation: u64) -> Self {
        Self {
            object,
            pod: PodKnown::Unread,
            phase: ContextPhase::Idle,
            named: BTreeSet::new(),
            evaluation: None,
            invalid: None,
            refused_nodes: BTreeMap::new(),
            refusals: Backoff::default(),
            waiting: None,
            capacity_generation,
            called_at: 0,
            rechecks: 0,
            backoff: Backoff::default(),
            recording: Backoff::default(),
            last_report: None,
            silent: BTreeMap::new(),
            by_recheck: false,
            waiting_reason: None,
            woken_at: None,
        }
    }

    // === the object ===

    pub(super) fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }

    pub(super) fn owner_uid(&self) -> Option<&str> {
        controller_of(&self.object.metadata).map(|owner| owner.uid.as_str())
    }

    fn namespace(&self) -> &str {
        self.object.metadata.namespace.as_deref().unwrap_or_default()
    }

    pub(super) fn see(&mut self, object: Arc<PodSchedulingContext>) {
        // A new spec does not wait for the delay of an earlier failure.
        if self.object.spec != object.spec {
            self.reset_backoff();
        }
        self.object = object;
    }

    fn is_deleting(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    pub(super) fn is_pod_unread(&self) -> bool {
        self.pod == PodKnown::Unread
    }

    /// The claims that its pod names, whether or not they exist.
    pub(super) fn named_claims(&self) -> &BTreeSet<ObjectKey> {
        &self.named
    }

    pub(super) fn waiting(&self) -> Option<&WaitingPod> {
        self.waiting.as_ref().map(|waiting| &waiting.pod)
    }

    pub(super) fn waiting_reason(&self) -> Option<&'static str> {
        self.waiting_reason
    }

    /// The transaction that allocates for this context.
    pub(super) fn transaction(&self) -> Option<TransactionId> {
        match self.phase {
            ContextPhase::Allocating(id) => Some(id),
            _ => None,
        }
    }

    /// Its state as a transaction on `node` sees it.
    pub(super) fn consumer_state(&self, node: Option<&String>) -> ConsumerState {
        if self.is_deleting() {
            return ConsumerState::default();
        }
        ConsumerState {
            selects_node: Some(&self.object.spec.selected_node) == node,
            awaits_node: !self.pod_has_a_node(),
        }
    }

    /// Whether the pod had a node when it was read.
    fn pod_has_a_node(&self) -> bool {
        self.pod.pod().is_some_and(|pod| pod.spec.node_name.is_some())
    }

    /// Whether the pod has no node and lacks a claim of ours that no transaction is allocating.
    pub(super) fn lacks_a_claim(&self, cache: &Cache) -> bool {
        let is_missing = |key: &ObjectKey| {
            let claim = cache.claims.get(key);
            claim.is_some_and(|claim| claim.is_free() && cache.is_candidate(claim))
        };
        !self.is_deleting() && !self.pod_has_a_node() && self.named.iter().any(is_missing)
    }

    /// The nodes to evaluate, without duplicates: those of the scheduler, and those found unsuitable before, because the scheduler lists
    /// only nodes that passed its filters.
    fn nodes(&self, own: &[PendingClaim]) -> Vec<String> {
        let spec = &self.object.spec;
        let entries = &self.object.status.resource_claims;
        let before = entries
            .iter()
            .filter(|entry| own.iter().any(|claim| claim.pod_claim_name == entry.name))
            .flat_map(|entry| &entry.unsuitable_nodes);
        let selected = Some(&spec.selected_node).filter(|node| !node.is_empty());
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        selected
            .into_iter()
            .chain(&spec.potential_nodes)
            .chain(before)
            .filter(|node| seen.insert(node))
            .cloned()
            .collect()
    }

    // === wake-ups ===

    /// Resets refusals and delays for a wake-up.
    fn retry_now(&mut self, capacity_generation: u64) {
        self.capacity_generation = capacity_generation;
        self.refused_nodes.clear();
        self.refusals.succeeded();
        self.backoff.succeeded();
    }

    /// Lets the context be evaluated again because capacity was freed.
    pub(super) fn wake_up(&mut self, capacity_generation: u64, freed_at: Moment) {
        self.retry_now(capacity_generation);
        let waits_since = self.waiting().map(|waiting| waiting.since);
        self.woken_at = Some(waits_since.map_or(freed_at, |since| since.max(freed_at)));
    }

    /// Resets the delay: something has changed since the driver failed, so it is called again at once.
    pub(super) fn reset_backoff(&mut self) {
        self.backoff.succeeded();
        self.recording.succeeded();
    }

    /// Evaluates a waiting pod again although no change is known.
    pub(super) fn recheck(&mut self, capacity_generation: u64, now: Moment) -> Actions {
        let next = now.after(spread(self.uid(), RECHECK, RECHECK_SPREAD));
        // The pod may have stopped and resumed waiting since this recheck was scheduled.
        match &mut self.waiting {
            Some(waiting) if waiting.recheck_at <= now => waiting.recheck_at = next,
            _ => return Vec::new(),
        }
        self.by_recheck = self.phase == ContextPhase::Idle;
        self.rechecks += 1;
        self.retry_now(capacity_generation);
        vec![ContextAction::RecheckAt(next), ContextAction::Step]
    }

    fn begin_to_wait(&mut self, cache: &Cache, now: Moment, actions: &mut Actions) {
        if self.waiting.is_some() {
            return;
        }
        let pod = self.pod.pod();
        let priority = pod.and_then(|pod| pod.spec.priority).unwrap_or_default();
        let since = now;
        let recheck_at = now.after(spread(self.uid(), RECHECK, RECHECK_SPREAD));
        self.waiting = Some(Waiting {
            pod: WaitingPod { priority, since },
            recheck_at,
        });
        // A change since the driver was called has woken only the pods that waited then. A context that has taken over the current
        // generation is evaluated again in any case.
        let generation = cache.capacity_generations.of(self.namespace());
        if self.called_at < generation && self.capacity_generation < generation {
            actions.push(ContextAction::JoinWakeUps);
        }
        actions.push(ContextAction::RecheckAt(recheck_at));
    }

    // === reports ===

    fn set_waiting_reason(&mut self, waiting_reason: Option<&'static str>, actions: &mut Actions) {
        let before = std::mem::replace(&mut self.waiting_reason, waiting_reason);
        actions.push(ContextAction::CountWaiting {
            before,
            after: waiting_reason,
        });
    }

    /// Reports a problem of the pod unless it repeats the last report. Returns whether it was reported.
    pub(super) fn report(&mut self, reason: &'static str, message: String, actions: &mut Actions) -> bool {
        let message = truncated(message, MESSAGE_MAX);
        self.set_waiting_reason(Some(reason), actions);
        if self
            .last_report
            .as_ref()
            .is_some_and(|last| last.message == message)
        {
            return false;
        }
        let Some(pod_uid) = self.owner_uid().map(str::to_owned) else {
            return false;
        };
        self.last_report = Some(LastReport {
            message: message.clone(),
            no_node_at: None,
        });
        actions.push(ContextAction::Report {
            pod_uid,
            reason,
            message,
        });
        true
    }

    /// Reports a driver's error on the pod and on the class or claim at fault.
    fn report_call(&mut self, error: CallError, actions: &mut Actions) {
        let (reason, message) = (error.reason, error.message);
        match error.subject {
            CallErrorSubject::Class(name) => {
                let text = format!("resource class \"{name}\": {message}");
                if self.report(reason, text, actions) {
                    actions.push(ContextAction::ReportOnClass(name, reason, message));
                }
            }
            CallErrorSubject::Claim(claim) => {
                self.report(reason, format!("claim {claim}: {message}"), actions);
                actions.push(ContextAction::ReportOnClaim(claim, reason, message));
            }
            CallErrorSubject::Call => {
                self.report(reason, message, actions);
            }
        }
    }

    /// Reports that the pod fits on no node and why, but not with every change of the counts.
    fn report_no_node(
        &mut self,
        own: &[PendingClaim],
        reasons: &[BTreeMap<String, String>],
        now: Moment,
        actions: &mut Actions,
    ) {
        let reported_at = self.last_report.as_ref().and_then(|last| last.no_node_at);
        if reported_at.is_some_and(|at| at.after(SHORTAGE_REPORT_INTERVAL) > now) {
            return;
        }
        let sentences: Vec<String> = own
            .iter()
            .zip(reasons)
            .filter(|(_, reasons)| !reasons.is_empty())
            .map(|(claim, reasons)| {
                format!(
                    "claim \"{}\" fits on no node: {}",
                    claim.pod_claim_name,
                    summary(reasons)
                )
            })
            .collect();
        if self.report("NoSuitableDevice", sentences.join("; "), actions)
            && let Some(last) = &mut self.last_report
        {
            last.no_node_at = Some(now);
        }
    }

    /// Forgets a report that was not delivered, so that it can be repeated. Returns whether it was the last one.
    pub(super) fn forget_report(&mut self, pod_uid: &str, report: &EventReport) -> bool {
        if self.owner_uid() != Some(pod_uid) {
            return false;
        }
        if report.reason == SILENT_DRIVER_REASON {
            self.silent.clear();
            return true;
        }
        self.last_report
            .take_if(|last| last.message == report.message)
            .is_some()
    }

    // === the pod ===

    pub(super) fn read_pod(&mut self) -> Actions {
        self.phase = ContextPhase::ReadingPod { early: false };
        vec![ContextAction::ReadPod]
    }

    /// Waits for a read of the pod that was sent before the context existed.
    pub(super) fn await_early_pod(&mut self) {
        self.phase = ContextPhase::ReadingPod { early: true };
    }

    /// Whether this is the pod of the context.
    fn is_owner(&self, pod: &Pod) -> bool {
        let uid = pod.metadata.uid.as_deref();
        uid.is_some() && uid == self.owner_uid()
    }

    /// Whether the answer to an early read suffices. Users name the owners of claims, so it may be about another pod. And the claim names
    /// in the pod's status may have been missing; the scheduler has seen them.
    fn suffices(&self, pod: Option<&Pod>, cache: &Cache) -> bool {
        let Some(pod) = pod.filter(|pod| self.is_owner(pod)) else {
            return false;
        };
        let mut resolved = cache.resolve_claims(self.namespace(), pod).into_iter();
        pod.spec.resource_claims.len() > CLAIMS_MAX
            || resolved.all(|(_, resolved)| matches!(resolved, Resolved::Claim(_) | Resolved::NotNeeded))
    }

    /// Handles the answer to a read of the pod.
    pub(super) fn pod_read(
        &mut self,
        answer: Result<Option<Arc<Pod>>, String>,
        cache: &Cache,
        now: Moment,
    ) -> Actions {
        let early = self.phase == ContextPhase::ReadingPod { early: true };
        if early
            && let Ok(pod) = &answer
            && !self.suffices(pod.as_deref(), cache)
        {
            return self.read_pod();
        }
        let mut actions = Vec::new();
        self.end_phase(&mut actions);
        match answer {
            Ok(Some(pod)) => {
                let is_owner = self.is_owner(&pod);
                let is_over = matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed"));
                let needs_claims = is_owner && !is_over && pod.metadata.deletion_timestamp.is_none();
                let count = pod.spec.resource_claims.len();
                self.pod = if needs_claims && count > CLAIMS_MAX {
                    if has_own_claim(cache, self.namespace(), &pod) {
                        PodKnown::TooManyClaims(count)
                    } else {
                        PodKnown::Gone
                    }
                } else if needs_claims {
                    PodKnown::Read(pod)
                } else {
                    PodKnown::Gone
                };
                let pod = self.pod.pod();
                if pod.is_some_and(|pod| cache.has_ambiguous_claim(self.namespace(), pod)) {
                    // The status is not written yet: the next read comes after a delay.
                    self.backoff.failed(now);
                } else {
                    self.backoff.succeeded();
                }
            }
            Ok(None) => self.pod = PodKnown::Gone,
            Err(_) => self.backoff.failed(now),
        }
        actions
    }

    // === steps ===

    fn end_phase(&mut self, actions: &mut Actions) -> ContextPhase {
        actions.push(ContextAction::Step);
        std::mem::take(&mut self.phase)
    }

    pub(super) fn step(&mut self, key: &ObjectKey, cache: &Cache, now: Moment) -> Actions {
        let mut actions = Vec::new();
        let spec = &self.object.spec;
        if self.phase != ContextPhase::Idle
            || self.is_deleting()
            || (spec.selected_node.is_empty() && spec.potential_nodes.is_empty())
        {
            return actions;
        }
        let recording = self.recording.wait_until(now);
        if recording.is_some() {
            // Another pod can use the freed device meanwhile.
            actions.push(ContextAction::EndWakeUp);
        }
        if let Some(moment) = self.backoff.wait_until(now).max(recording) {
            actions.push(ContextAction::StepAt(moment));
            return actions;
        }
        if !self.refused_nodes.is_empty() && self.refusals.wait_until(now).is_none() {
            self.refused_nodes.clear();
            self.evaluation = None;
        }
        let pod = match &self.pod {
            PodKnown::Gone => return actions,
            PodKnown::TooManyClaims(count) => {
                let message = format!(
                    "the pod has {count} claims, and at most {CLAIMS_MAX} are supported: split it into several pods"
                );
                self.report("TooManyClaims", message, &mut actions);
                return actions;
            }
            PodKnown::Read(pod) | PodKnown::Served(pod) => pod.clone(),
            PodKnown::Unread => {
                // Contexts of other drivers cost no request.
                let owner = self.owner_uid();
                if owner.is_some_and(|owner| cache.index.may_need_candidate(self.namespace(), owner)) {
                    actions.push(ContextAction::FindPod);
                }
                return actions;
            }
        };
        match self.pending_claims(key, &pod, cache, now, &mut actions) {
            None => {
                self.waiting = None;
                actions.push(ContextAction::LeaveWakeUps);
                // The status may have the claim's name by now.
                if cache.has_ambiguous_claim(self.namespace(), &pod) {
                    actions.extend(self.read_pod());
                }
            }
            Some(_) if matches!(self.pod, PodKnown::Served(_)) => actions.extend(self.read_pod()),
            Some(pending) => self.evaluate_or_act(key, &pod, &pending, cache, now, &mut actions),
        }
        actions
    }

    /// Returns the pod's claims to allocate, and reports problems. `None` if there is no action now: all is done, or a later event triggers
    /// the next step.
    fn pending_claims(
        &mut self,
        key: &ObjectKey,
        pod: &Pod,
        cache: &Cache,
        now: Moment,
        actions: &mut Actions,
    ) -> Option<PendingClaims> {
        let resolved = cache.resolve_claims(&key.namespace, pod);
        self.note_claims(key, pod, &resolved, actions);
        let mut own: Vec<PendingClaim> = Vec::new();
        let mut others: Vec<OtherClaim> = Vec::new();
        let mut any_own = false;
        let mut distinct = 0;
        let mut all = 0;
        let mut rest = false;
        let mut problems: Vec<(&'static str, String)> = Vec::new();
        for (pod_claim_name, resolved) in resolved {
            let claim_key = match resolved {
                Resolved::NotNeeded => continue,
                Resolved::Awaited => {
                    rest = true;
                    continue;
                }
                Resolved::NotOwned(claim) => {
                    let message = format!(
                        "ResourceClaim {claim} was not made for this pod although it has the name of its claim \"{pod_claim_name}\": delete it, or rename the pod"
                    );
                    problems.push(("ClaimNotOwned", message));
                    rest = true;
                    continue;
                }
                Resolved::Claim(claim) => claim,
            };
            let Some(claim) = cache.claims.get(&claim_key) else {
                continue;
            };
            any_own |= cache.is_own_class(claim.class_name());
            // A pod's claims are allocated together, and this one may have to be allocated again.
            if claim.may_be_rolled_back() {
                rest = true;
                continue;
            }
            if !claim.is_delayed() || (claim.is_allocated() && !claim.is_release_requested()) {
                continue;
            }
            all += 1;
            let class_name = claim.class_name().to_owned();
            let Some(class) = cache.classes.get(&class_name).cloned() else {
                let message = format!(
                    "resource class \"{class_name}\" of claim {claim_key} does not exist: create the class, or recreate the claim with another class"
                );
                problems.push(("ResourceClassMissing", message));
                rest = true;
                continue;
            };
            if !cache.is_own_class(&class_name) {
                if class.structured_parameters != Some(true) && !claim.is_release_requested() {
                    others.push(OtherClaim {
                        entry: pod_claim_name,
                        class: class_name,
                        driver: class.driver_name.clone(),
                    });
                }
                continue;
            }
            // A pod's claims are allocated together: one that is busy or being released holds up the others.
            let late_write = claim.late_write_until(now);
            let is_going = claim.is_release_requested() || claim.must_be_deallocated();
            if is_going || !claim.is_free() || late_write.is_some() {
                rest = true;
                actions.extend(late_write.map(ContextAction::StepAt));
                continue;
            }
            let to_allocate = ClaimToAllocate {
                pod_claim_name: pod_claim_name.clone(),
                claim: claim.object.clone(),
                class,
            };
            let before = own.iter().find(|pending| pending.key == claim_key);
            let position = before.map_or(distinct, |pending| pending.position);
            distinct = distinct.max(position + 1);
            own.push(PendingClaim {
                pod_claim_name,
                key: claim_key,
                position,
                to_allocate,
            });
        }
        let wait = cache.settings.other_driver_wait;
        let silent = any_own && self.await_others(&others, wait, now, actions);
        let rest = rest || own.is_empty();
        if let Some((reason, _)) = problems.first() {
            // One report for all problems, because only the last report is remembered.
            let messages: Vec<&str> = problems.iter().map(|(_, message)| message.as_str()).collect();
            self.report(reason, messages.join("; "), actions);
        } else if rest {
            self.set_waiting_reason(silent.then_some(SILENT_DRIVER_REASON), actions);
        }
        (!rest).then_some(PendingClaims { own, all })
    }

    /// Records the claims that the pod names now, whether or not they exist, and forgets earlier ones: from 1.28 on, a claim that is created
    /// again from its template has another name. Its owner wakes the context.
    fn note_claims(
        &mut self,
        key: &ObjectKey,
        pod: &Pod,
        resolved: &[(String, Resolved)],
        actions: &mut Actions,
    ) {
        let found = resolved.iter().filter_map(|(_, resolved)| match resolved {
            Resolved::Claim(claim) | Resolved::NotOwned(claim) => Some(claim.clone()),
            Resolved::NotNeeded | Resolved::Awaited => None,
        });
        let entries = pod.spec.resource_claims.iter();
        let named = entries
            .filter_map(|entry| entry.source.resource_claim_name.as_deref())
            .map(|name| ObjectKey::new(key.namespace.clone(), name));
        let named: BTreeSet<ObjectKey> = found.chain(named).collect();
        let (new, old) = (named.difference(&self.named), self.named.difference(&named));
        actions.extend(new.cloned().map(ContextAction::UseClaim));
        actions.extend(old.cloned().map(ContextAction::LeaveClaim));
        self.named = named;
    }

    /// Tracks the answers that other drivers owe the scheduler, and reports each silent driver once: the pod waits for them, and no other
    /// component reports that. Returns whether one of the drivers still silent has been reported.
    fn await_others(
        &mut self,
        others: &[OtherClaim],
        wait: Duration,
        now: Moment,
        actions: &mut Actions,
    ) -> bool {
        let silent: Vec<&OtherClaim> = others
            .iter()
            .filter(|other| !has_answered(&self.object, &other.entry))
            .collect();
        self.silent.retain(|driver, silence| {
            matches!(silence, Silence::Reported) || silent.iter().any(|other| other.driver == *driver)
        });
        let mut due: Vec<&OtherClaim> = Vec::new();
        let mut next: Option<Moment> = None;
        let mut any_reported = false;
        for other in silent {
            let silence = self
                .silent
                .entry(other.driver.clone())
                .or_insert(Silence::Since(now));
            let Silence::Since(since) = *silence else {
                any_reported = true;
                continue;
            };
            let end = since.after(wait);
            if end <= now {
                *silence = Silence::Reported;
                any_reported = true;
                due.push(other);
            } else {
                next = Some(next.map_or(end, |next| next.min(end)));
            }
        }
        actions.extend(next.map(ContextAction::StepAt));
        for other in due {
            let OtherClaim { entry, class, driver } = other;
            let message = format!(
                "the pod waits for driver \"{driver}\" of resource class \"{class}\" (claim \"{entry}\"): no answer for {} s; is its controller running?",
                wait.as_secs_f64()
            );
            actions.push(ContextAction::Report {
                pod_uid: self.owner_uid().map(str::to_owned).unwrap_or_default(),
                reason: SILENT_DRIVER_REASON,
                message,
            });
        }
        any_reported
    }

    fn evaluate_or_act(
        &mut self,
        key: &ObjectKey,
        pod: &Arc<Pod>,
        pending: &PendingClaims,
        cache: &Cache,
        now: Moment,
        actions: &mut Actions,
    ) {
        let mut known = BTreeSet::new();
        let distinct: Vec<&PendingClaim> = pending
            .own
            .iter()
            .filter(|claim| known.insert(claim.position))
            .collect();
        let input = EvaluationInput {
            nodes: self.nodes(&pending.own),
            claims: distinct
                .iter()
                .map(|claim| {
                    let uid = claim.to_allocate.claim.metadata.uid.clone().unwrap_or_default();
                    (uid, claim.to_allocate.class.metadata.resource_version.clone())
                })
                .collect(),
            capacity_generation: self.capacity_generation,
            rechecks: self.rechecks,
        };
        if self.invalid.as_ref() == Some(&input) {
            actions.push(ContextAction::EndWakeUp);
            self.begin_to_wait(cache, now, actions);
            // Another pod may have used a claim when the driver answered.
            self.give_up(cache, actions);
            return;
        }
        let known = self.evaluation.as_ref().filter(|(known, _)| *known == input);
        if let Some((_, evaluation)) = known {
            let reasons = self.reasons(&pending.own, &input.nodes, evaluation);
            self.act(key, pod, pending, &input.nodes, &reasons, cache, now, actions);
            return;
        }
        // The driver is evaluating a shared claim for another pod.
        if is_any_evaluated(&pending.own, cache) {
            return;
        }
        actions.push(ContextAction::Evaluate {
            pod: pod.clone(),
            claims: distinct
                .iter()
                .map(|claim| (claim.key.clone(), claim.to_allocate.clone()))
                .collect(),
            nodes: input.nodes.clone(),
        });
        self.called_at = cache.capacity_generations.of(self.namespace());
        self.phase = ContextPhase::Evaluating(input);
    }

    /// Handles the results of an evaluation.
    pub(super) fn evaluated(
        &mut self,
        answer: Result<Vec<UnsuitableNodes>, CallError>,
        cache: &Cache,
        now: Moment,
    ) -> Actions {
        let mut actions = Vec::new();
        let ContextPhase::Evaluating(input) = self.end_phase(&mut actions) else {
            return actions;
        };
        let by_recheck = std::mem::take(&mut self.by_recheck);
        match answer {
            Ok(evaluation) if evaluation.len() == input.claims.len() => {
                let evaluation = bounded(evaluation, &input.nodes);
                self.backoff.succeeded();
                self.invalid = None;
                let before = self.evaluation.as_ref();
                // Other claims or classes: the refused nodes may be tried again.
                if before.is_some_and(|(before, _)| before.claims != input.claims) {
                    self.refused_nodes.clear();
                }
                let count = |evaluation: &[UnsuitableNodes]| -> usize {
                    evaluation.iter().map(UnsuitableNodes::len).sum()
                };
                let helped = before.is_some_and(|(before, old)| {
                    before.nodes == input.nodes && count(old) > count(&evaluation)
                });
                self.evaluation = Some((input, evaluation));
                actions.extend((by_recheck && helped).then_some(ContextAction::CountRecheck));
            }
            Ok(evaluation) => {
                self.backoff.failed(now);
                let message = format!(
                    "the driver answered for {} of {} claims",
                    evaluation.len(),
                    input.claims.len()
                );
                self.report("DriverMisbehaved", message, &mut actions);
            }
            Err(error) => {
                if error.kind == CallErrorKind::Invalid {
                    self.invalid = Some(input);
                    self.begin_to_wait(cache, now, &mut actions);
                    self.give_up(cache, &mut actions);
                } else {
                    self.backoff.failed(now);
                }
                self.report_call(error, &mut actions);
            }
        }
        actions
    }

    /// Marks the pod's allocations for rollback because its other claims fit nowhere. Returns whether any was marked.
    ///
    /// A pod's claims are allocated together, but may not stay together: a controller is killed between two status writes, a claim is
    /// deleted and recreated, or the scheduler requests the deallocation of one claim while another is being recorded. The allocations would
    /// be held in vain, and two such pods could wait for each other forever. The scheduler requests the deallocation only of claims that are
    /// in its way on a node, and skips a node for which another claim is unsuitable (`Filter` in its `dynamicresources.go`).
    fn give_up(&self, cache: &Cache, actions: &mut Actions) -> bool {
        let Some(pod_uid) = self.owner_uid().filter(|_| self.lacks_a_claim(cache)) else {
            return false;
        };
        let is_due = |key: &&ObjectKey| {
            let claim = cache.claims.get(*key);
            claim.is_some_and(|claim| claim.can_be_given_up_for(pod_uid))
        };
        let claims: Vec<ObjectKey> = self.named.iter().filter(is_due).cloned().collect();
        let any = !claims.is_empty();
        if any {
            actions.push(ContextAction::GiveUp(claims));
        }
        any
    }

    /// The unsuitable nodes among `nodes` for each claim, by the driver's evaluation or because the driver refused to allocate there.
    fn reasons(
        &self,
        own: &[PendingClaim],
        nodes: &[String],
        evaluation: &[UnsuitableNodes],
    ) -> Vec<UnsuitableNodes> {
        let reasons_of = |unsuitable: &UnsuitableNodes| -> UnsuitableNodes {
            let reason = |node: &String| {
                let reason = unsuitable.get(node).or_else(|| self.refused_nodes.get(node))?;
                Some((node.clone(), reason.clone()))
            };
            nodes.iter().filter_map(reason).collect()
        };
        own.iter()
            .filter_map(|claim| evaluation.get(claim.position))
            .map(reasons_of)
            .collect()
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one step of one decision, called from one place"
    )]
    fn act(
        &mut self,
        key: &ObjectKey,
        pod: &Arc<Pod>,
        pending: &PendingClaims,
        nodes: &[String],
        reasons: &[UnsuitableNodes],
        cache: &Cache,
        now: Moment,
        actions: &mut Actions,
    ) {
        let own = &pending.own;
        let object = self.object.clone();
        let selected = &object.spec.selected_node;
        let mine: BTreeSet<&str> = own.iter().map(|claim| claim.pod_claim_name.as_str()).collect();
        let selected_fits = !selected.is_empty()
            && reasons.iter().all(|reasons| !reasons.contains_key(selected))
            && !cache.is_refused_by_others(&object, pod, &mine);
        if selected_fits {
            if is_any_evaluated(own, cache) {
                return;
            }
            self.called_at = cache.capacity_generations.of(self.namespace());
            self.count_wake_up(actions);
            actions.push(ContextAction::Allocate {
                consumer: Consumer {
                    context: key.clone(),
                    context_uid: self.uid().to_owned(),
                    pod_uid: pod.metadata.uid.clone().unwrap_or_default(),
                },
                node: selected.clone(),
                claims: own
                    .iter()
                    .map(|claim| (claim.key.clone(), claim.to_allocate.clone()))
                    .collect(),
            });
            return;
        }
        let any_unsuitable = reasons.iter().any(|reasons| !reasons.is_empty());
        let is_unsuitable = |node: &String| reasons.iter().any(|reasons| reasons.contains_key(node));
        let fits_nowhere = !nodes.is_empty() && nodes.iter().all(is_unsuitable);
        self.set_waiting_reason(any_unsuitable.then_some(Statistics::SOME_NODES), actions);
        if any_unsuitable {
            self.begin_to_wait(cache, now, actions);
        }
        // First roll back the pod's own allocations: that may free the devices it needs.
        if fits_nowhere && self.give_up(cache, actions) {
            return;
        }
        if fits_nowhere {
            self.set_waiting_reason(Some("NoSuitableDevice"), actions);
            self.woken_at = None;
            actions.push(ContextAction::EndWakeUp);
            self.report_no_node(own, reasons, now, actions);
        }
        let must_write = any_unsuitable || selected.is_empty() || pending.all > 1;
        let entries: Vec<ResourceClaimSchedulingStatus> = own
            .iter()
            .zip(reasons)
            .map(|(claim, reasons)| ResourceClaimSchedulingStatus {
                name: claim.pod_claim_name.clone(),
                unsuitable_nodes: listed(&object, reasons),
            })
            .collect();
        if must_write && entries.iter().any(|entry| !has_entry(&object, entry)) {
            self.phase = ContextPhase::Publishing(entries.clone());
            actions.push(ContextAction::Publish(entries));
        } else {
            // The wake-up changed nothing for this pod.
            self.woken_at = None;
        }
    }

    fn count_wake_up(&mut self, actions: &mut Actions) {
        actions.extend(self.woken_at.take().map(ContextAction::CountWakeUp));
    }

    /// Handles the outcome of writing our entries.
    pub(super) fn published(&mut self, outcome: Outcome<Arc<PodSchedulingContext>>, now: Moment) -> Actions {
        let mut actions = Vec::new();
        let ContextPhase::Publishing(entries) = self.end_phase(&mut actions) else {
            return actions;
        };
        let problem = match outcome {
            Outcome::Done(object) => {
                let is_stored = entries.iter().all(|entry| has_entry(&object, entry));
                if is_newer(
                    self.object.metadata.resource_version.as_deref(),
                    object.metadata.resource_version.as_deref(),
                ) && object.metadata.uid == self.object.metadata.uid
                {
                    self.object = object;
                }
                if is_stored {
                    if self.backoff.failures() > WRITES_BEFORE_REPORT {
                        // The last report says that this write fails.
                        self.last_report = None;
                    }
                    self.backoff.succeeded();
                    self.count_wake_up(&mut actions);
                    return actions;
                }
                let problem = "the API server stores entries other than those written: exclude \
                    podschedulingcontexts/status or this controller from mutating webhooks";
                Some(problem.to_owned())
            }
            // Most often the context is gone because the pod was bound or deleted. If writes keep failing, it exists: report that.
            Outcome::Refused(message) | Outcome::Unknown(message) | Outcome::Busy(message) => Some(message),
            Outcome::Conflict(_) => None,
        };
        self.backoff.failed(now);
        if let Some(problem) = problem.filter(|_| self.backoff.failures() > WRITES_BEFORE_REPORT) {
            let no_node_at = self.last_report.as_ref().and_then(|last| last.no_node_at);
            let message = format!("the scheduler cannot be answered: {problem}");
            if self.report("AnswerRefused", message, &mut actions)
                && let Some(last) = &mut self.last_report
            {
                // Otherwise each attempt would report that the pod fits on no node, and then this again.
                last.no_node_at = no_node_at;
            }
        }
        actions
    }

    pub(super) fn transaction_started(&mut self, id: TransactionId) {
        self.phase = ContextPhase::Allocating(id);
    }

    /// Handles the end of its transaction on `node`.
    pub(super) fn transaction_ended(
        &mut self,
        node: Option<&str>,
        failure: Option<TransactionFailure>,
        cache: &Cache,
        now: Moment,
    ) -> Actions {
        let mut actions = Vec::new();
        self.end_phase(&mut actions);
        match failure {
            None => {
                self.backoff.succeeded();
                self.recording.succeeded();
                self.refusals.succeeded();
                if let PodKnown::Read(pod) = &self.pod {
                    self.pod = PodKnown::Served(pod.clone());
                }
                self.waiting = None;
                self.evaluation = None;
                self.last_report = None;
                self.set_waiting_reason(None, &mut actions);
            }
            Some(TransactionFailure::Withdrawn) => self.evaluation = None,
            Some(TransactionFailure::Refused(message)) => {
                self.recording.failed(now);
                let message = format!("the allocation could not be recorded: {message}");
                self.report("AllocationNotRecorded", message, &mut actions);
            }
            Some(TransactionFailure::Driver(error)) => {
                // A change since the driver was called may have removed the cause.
                let generation = cache.capacity_generations.of(self.namespace());
                let changed = self.called_at < generation && error.kind != CallErrorKind::TimedOut;
                if changed {
                    self.capacity_generation = generation;
                }
                match error.kind {
                    CallErrorKind::Invalid if changed => self.backoff.failed(now),
                    CallErrorKind::Invalid => {
                        self.invalid = self.evaluation.as_ref().map(|(input, _)| input.clone());
                    }
                    // The node is published as unsuitable, so that the scheduler can select another.
                    CallErrorKind::Retry => {
                        if let Some(node) = node {
                            let reason = truncated(error.message.clone(), REASON_MAX);
                            self.refused_nodes.insert(node.to_owned(), reason);
                        }
                        self.refusals.failed(now);
                        actions.extend(self.refusals.wait_until(now).map(ContextAction::StepAt));
                    }
                    CallErrorKind::TimedOut => self.backoff.failed(now),
                }
                self.begin_to_wait(cache, now, &mut actions);
                self.set_waiting_reason(Some(error.reason), &mut actions);
                if error.kind != CallErrorKind::Retry {
                    self.report_call(error, &mut actions);
                }
            }
        }
        actions
    }
}

/// The answer of a driver as it is kept: for these nodes only, and with short reasons.
fn bounded(evaluation: Vec<UnsuitableNodes>, nodes: &[String]) -> Vec<UnsuitableNodes> {
    let nodes: BTreeSet<&String> = nodes.iter().collect();
    let of_claim = |unsuitable: UnsuitableNodes| -> UnsuitableNodes {
        let evaluated = unsuitable.into_iter().filter(|(node, _)| nodes.contains(node));
        evaluated
            .map(|(node, reason)| (node, truncated(reason, REASON_MAX)))
            .collect()
    };
    evaluation.into_iter().map(of_claim).collect()
}

/// Whether the driver is evaluating one of these claims for another pod.
fn is_any_evaluated(own: &[PendingClaim], cache: &Cache) -> bool {
    own.iter().any(|claim| {
        let claim = cache.claims.get(&claim.key);
        claim.is_some_and(|claim| claim.phase == ClaimPhase::Evaluating)
    })
}

/// Whether no further answer is due for an unallocated claim of another driver: it has an entry, and the selected node, if any, is listed in
/// some entry. While a driver refuses that node, the others may wait for another one.
fn has_answered(context: &PodSchedulingContext, pod_claim_name: &str) -> bool {
    let selected = &context.spec.selected_node;
    let entries = &context.status.resource_claims;
    let has_entry = entries.iter().any(|entry| entry.name == pod_claim_name);
    has_entry
        && (selected.is_empty()
            || entries
                .iter()
                .any(|entry| entry.unsuitable_nodes.contains(selected)))
}

/// The unsuitable nodes for an entry, at most as many as the API accepts: the selected node first, then potential nodes, then earlier ones.
fn listed(object: &PodSchedulingContext, reasons: &BTreeMap<String, String>) -> Vec<String> {
    // The server rejects invalid node names in an entry, but accepts any `selectedNode`.
    let names = reasons.keys().filter(|node| is_dns_subdomain(node, 253));
    if reasons.len() <= NODE_LIST_MAX {
        return names.cloned().collect();
    }
    let potential: BTreeSet<&String> = object.spec.potential_nodes.iter().collect();
    let rank = |node: &String| {
        if *node == object.spec.selected_node {
            0
        } else if potential.contains(node) {
            1
        } else {
            2
        }
    };
    let mut nodes: Vec<&String> = names.collect();
    nodes.sort_by_cached_key(|node| (rank(node), *node));
    let mut nodes: Vec<String> = nodes.into_iter().take(NODE_LIST_MAX).cloned().collect();
    nodes.sort();
    nodes
}

/// Whether one of the first claims of a pod with too many is ours.
fn has_own_claim(cache: &Cache, namespace: &str, pod: &Pod) -> bool {
    let resolved = cache.resolve_claims(namespace, pod).into_iter();
    resolved
        .filter_map(|(_, resolved)| match resolved {
            Resolved::Claim(key) => cache.claims.get(&key),
            _ => None,
        })
        .any(|claim| cache.is_own_class(claim.class_name()))
}

/// Whether the context already has this entry, in any order of nodes.
fn has_entry(object: &PodSchedulingContext, entry: &ResourceClaimSchedulingStatus) -> bool {
    object.status.resource_claims.iter().any(|known| {
        let (known_nodes, nodes) = (&known.unsuitable_nodes, &entry.unsuitable_nodes);
        let same = || known_nodes.iter().collect::<BTreeSet<_>>() == nodes.iter().collect::<BTreeSet<_>>();
        known.name == entry.name && (known_nodes == nodes || same())
    })
}

/// Joins the reasons of all nodes into one sentence. A reason shared by several nodes appears once.
fn summary(reasons: &BTreeMap<String, String>) -> String {
    /// At most this many names are listed; the others are counted.
    const NAMED: usize = 3;

    let mut nodes_by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (node, reason) in reasons {
        nodes_by_reason.entry(reason).or_default().push(node);
    }
    let mut parts: Vec<(usize, String)> = nodes_by_reason
        .into_iter()
        .map(|(reason, nodes)| {
            let more = nodes.len().saturating_sub(NAMED);
            let mut named = nodes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
            if more > 0 {
                named = format!("{named} and {more} more");
            }
            (nodes.len(), format!("{named}: {reason}"))
        })
        .collect();
    parts.sort_by(|left, right| right.0.cmp(&left.0).then_with(|| left.1.cmp(&right.1)));
    let more = parts.len().saturating_sub(NAMED);
    let mut sentence = parts
        .into_iter()
        .take(NAMED)
        .map(|(_, text)| text)
        .collect::<Vec<_>>()
        .join("; ");
    if more > 0 {
        sentence = format!("{sentence}; and {more} other reasons");
    }
    sentence
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::claims::Settings;

    #[test]
    fn the_reasons_of_a_driver_are_kept_up_to_a_limit() {
        let mut context = Context::new(Arc::default(), 0);
        context.phase = ContextPhase::Evaluating(EvaluationInput {
            nodes: vec!["a".to_owned()],
            claims: vec![("uid".to_owned(), None)],
            capacity_generation: 0,
            rechecks: 0,
        });
        let answer = ["a", "another"].map(|node| (node.to_owned(), "ü".repeat(5_000)));
        let answer = Ok(vec![UnsuitableNodes::from(answer)]);
        let cache = Cache::new(Settings::new("d.example"));
        context.evaluated(answer, &cache, Moment::default());
        let (_, kept) = context.evaluation.unwrap();
        let [kept] = kept.as_slice() else {
            panic!("{kept:?}")
        };
        assert!(kept.keys().eq(["a"]), "{kept:?}");
        assert!(kept["a"].len() <= REASON_MAX, "{} bytes", kept["a"].len());
    }

    #[test]
    fn a_reason_appears_once_and_the_commonest_comes_first() {
        let mut reasons: BTreeMap<String, String> = (0..5)
            .map(|n| (format!("node-{n}"), "3 of 3 held".to_owned()))
            .collect();
        reasons.insert("other".to_owned(), "no device of kind test".to_owned());
        assert_eq!(
            summary(&reasons),
            "node-0, node-1, node-2 and 2 more: 3 of 3 held; other: no device of kind test"
        );
    }
}
