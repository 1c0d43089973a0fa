//! The state of the control flow, and how events change it.

mod seen;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::label::NODE_LABEL;
use crate::api::resource::{ResourceClaim, ResourceClass, finalizer_of};
use crate::driver::{Holding, Observation};

use super::claim::ClaimState;
use super::context::{ContextState, EarlyPod, EvaluationInput};
use super::event::{Answer, CallId, Command, Event, Moment, ObjectKey, Outcome, Regarding, Report};
use super::statistics::{Queue, Statistics};
use super::transaction::{Transaction, TransactionId};
use super::wakeup::WakeUpQueue;

/// When an object is revisited whose report was not written. The queue of reports was full at that time; at some ten milliseconds each,
/// thousands of them are written meanwhile. If the server refuses the reports of a thousand objects, this makes 17 requests per second.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// Settings chosen by an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The driver's name, as in `ResourceClass.driverName`.
    pub driver_name: String,
    /// Whether the allocation write also adds the pod to `reservedFor`. If not, the scheduler adds it.
    pub reserve_for_pod: bool,
    /// How long another driver of a pod may be silent before an Event on the pod names it.
    pub other_driver_wait: Duration,
}

impl Settings {
    /// Default of [`Settings::other_driver_wait`]. A healthy driver answers within milliseconds.
    pub const OTHER_DRIVER_WAIT: Duration = Duration::from_secs(60);

    /// The default settings for this driver name.
    pub fn new(driver_name: impl Into<String>) -> Self {
        Self {
            driver_name: driver_name.into(),
            reserve_for_pod: true,
            other_driver_wait: Self::OTHER_DRIVER_WAIT,
        }
    }

    /// The finalizer that keeps a claim until it is deallocated.
    pub fn finalizer(&self) -> String {
        finalizer_of(&self.driver_name)
    }

    /// The label of a claim with the node of its allocation.
    pub fn node_label(&self) -> String {
        format!("{}/{NODE_LABEL}", self.driver_name)
    }
}

/// The conditions for the first decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "four things that have or have not happened"
)]
struct Barrier {
    classes: bool,
    claims: bool,
    contexts: bool,
    driver: bool,
}

impl Barrier {
    fn listed(self) -> bool {
        self.classes && self.claims && self.contexts
    }
}

/// An object or timer to process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Work {
    /// A transaction in progress.
    Transaction(TransactionId),
    Claim(ObjectKey),
    /// A template claim its owner pod has not used in time; other pods may use it.
    Open(ObjectKey),
    /// A woken context, by its turn.
    Woken(u64, ObjectKey),
    Context(ObjectKey),
    /// The slow recheck of a waiting context.
    Recheck(ObjectKey),
    /// The deadline of a wake-up.
    Offer(ObjectKey),
}

/// A pending call: the object that its answer belongs to.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PendingCall {
    /// Reading the pod of a context.
    Pod {
        context: ObjectKey,
        uid: String,
        /// The read was sent before the context existed.
        early: bool,
    },
    /// Reading a pod that has no context yet.
    EarlyPod { uid: String },
    /// Evaluating nodes for a context.
    Judge {
        context: ObjectKey,
        uid: String,
        /// The claims, in the order of the input.
        claims: Vec<ObjectKey>,
        input: EvaluationInput,
    },
    /// Writing the entries of a context.
    Publish { context: ObjectKey, uid: String },
    /// Releasing or repairing a claim.
    Release { claim: ObjectKey, uid: String },
    /// A step for one claim of a transaction.
    Item { transaction: TransactionId, uid: String },
    /// The driver's allocation for a transaction.
    Transaction { transaction: TransactionId },
}

/// The state of the classic DRA control flow. Owned by one task; only [`ControllerState::apply`] and [`ControllerState::decide`] change it.
#[derive(Clone, Debug)]
pub struct ControllerState {
    pub(super) settings: Settings,
    pub(super) finalizer: String,
    barrier: Barrier,
    pub(super) classes: BTreeMap<String, Arc<ResourceClass>>,
    /// Boxed, because a tree that is filled in ascending order, as by a list, is half empty: its entries should be small.
    pub(super) claims: BTreeMap<ObjectKey, Box<ClaimState>>,
    /// Claims by the uid of their owner pod, sorted. Nearly always one per pod, so a set, with room for eleven, would waste memory.
    pub(super) claims_by_owner: BTreeMap<String, Vec<ObjectKey>>,
    /// Claims that a context may need: ours, delayed, not allocated.
    pub(super) candidates: BTreeSet<ObjectKey>,
    /// Candidates that any pod of their namespace may name: not generated for one pod, or not used by that pod in time.
    pub(super) open_candidates: BTreeSet<ObjectKey>,
    pub(super) unallocated_immediate: BTreeSet<ObjectKey>,
    pub(super) contexts: BTreeMap<ObjectKey, ContextState>,
    /// Pods without a context, by uid, while a claim generated for them exists.
    pub(super) early_pods: BTreeMap<String, EarlyPod>,
    /// The contexts whose pods name a claim.
    pub(super) users: BTreeMap<ObjectKey, BTreeSet<ObjectKey>>,
    pub(super) transactions: BTreeMap<TransactionId, Transaction>,
    pub(super) pending_calls: BTreeMap<CallId, PendingCall>,
    pub(super) work_queue: Queue,
    timers: BTreeSet<(Moment, Work)>,
    pub(super) wake: WakeUpQueue,
    /// Incremented when capacity may have been freed.
    pub(super) capacity_generation: u64,
    pub(super) commands: Vec<Command>,
    next_id: u64,
    pub(super) statistics: Statistics,
}

impl ControllerState {
    /// Creates an empty state. It makes no decision until everything is listed and the driver is ready.
    pub fn new(settings: Settings) -> Self {
        Self {
            finalizer: settings.finalizer(),
            settings,
            barrier: Barrier::default(),
            classes: BTreeMap::new(),
            claims: BTreeMap::new(),
            claims_by_owner: BTreeMap::new(),
            candidates: BTreeSet::new(),
            open_candidates: BTreeSet::new(),
            unallocated_immediate: BTreeSet::new(),
            contexts: BTreeMap::new(),
            early_pods: BTreeMap::new(),
            users: BTreeMap::new(),
            transactions: BTreeMap::new(),
            pending_calls: BTreeMap::new(),
            work_queue: Queue::default(),
            timers: BTreeSet::new(),
            wake: WakeUpQueue::default(),
            capacity_generation: 0,
            commands: Vec::new(),
            next_id: 0,
            statistics: Statistics::default(),
        }
    }

    /// Whether decisions are made: everything is listed and the driver is ready.
    pub fn is_ready(&self) -> bool {
        self.barrier.driver
    }

    /// Whether a call, a write or a transaction is in progress.
    pub fn is_busy(&self) -> bool {
        !self.pending_calls.is_empty() || !self.transactions.is_empty()
    }

    /// When [`ControllerState::decide`] must be called again even without an event.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.first().map(|(moment, _)| *moment)
    }

    /// Updates the state with an event.
    pub fn apply(&mut self, event: Event, now: Moment) {
        self.work_queue.now = now;
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
            Event::Found(findings) => self.found(findings),
            Event::Untold(report) => self.untold(&report, now),
            Event::Answer { id, answer } => self.answered(id, answer, now),
        }
    }

    /// Returns the commands to execute now. Pure: the same state and time give the same commands.
    pub fn decide(&mut self, now: Moment) -> Vec<Command> {
        self.work_queue.now = now;
        if self.barrier.driver {
            self.fire_timers(now);
            loop {
                while let Some(work) = self.work_queue.pop_first() {
                    match work {
                        Work::Transaction(id) => self.step_transaction(id, now),
                        Work::Claim(key) => self.step_claim(&key, now),
                        Work::Open(key) => self.open_claim(&key),
                        Work::Woken(_, key) | Work::Context(key) => self.step_context(&key, now),
                        Work::Recheck(key) => self.recheck_context(&key, now),
                        Work::Offer(key) => self.end_offer(&key, now),
                    }
                }
                if !self.make_offers(now) {
                    break;
                }
            }
        }
        std::mem::take(&mut self.commands)
    }

    // === time and calls ===

    pub(super) fn wake_at(&mut self, moment: Moment, work: Work) {
        self.timers.insert((moment, work));
    }

    fn fire_timers(&mut self, now: Moment) {
        while let Some((moment, _)) = self.timers.first() {
            if *moment > now {
                break;
            }
            if let Some((_, work)) = self.timers.pop_first() {
                self.work_queue.insert(work);
            }
        }
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Sends a command whose answer belongs to `pending_call`.
    pub(super) fn send(
        &mut self,
        pending_call: PendingCall,
        command: impl FnOnce(CallId) -> Command,
    ) -> CallId {
        let id = CallId(self.next_number());
        self.work_queue.sent(id, &pending_call);
        self.pending_calls.insert(id, pending_call);
        self.commands.push(command(id));
        id
    }

    pub(super) fn report(&mut self, regarding: Regarding, reason: &'static str, message: String) {
        *self.statistics.reports.entry(reason).or_default() += 1;
        self.commands.push(Command::Report(Report {
            regarding,
            reason: reason.to_owned(),
            message,
        }));
    }

    /// Handles a report that was not written: it may be repeated, and its object is revisited after [`TELL_AGAIN`].
    fn untold(&mut self, report: &Report, now: Moment) {
        let next = now.after(TELL_AGAIN);
        match &report.regarding {
            Regarding::Pod { key, uid } => {
                if let Some(context) = self.contexts.get_mut(key)
                    && context.forget_report(uid, report)
                {
                    self.wake_at(next, Work::Context(key.clone()));
                }
            }
            Regarding::Claim { key, uid } => {
                if let Some(claim) = self.claims.get_mut(key).filter(|claim| claim.uid() == uid)
                    && claim.reported.as_ref() == Some(&report.message)
                {
                    claim.reported = None;
                    self.wake_at(next, Work::Claim(key.clone()));
                }
            }
            // A class is reported with each pod and claim that it concerns.
            Regarding::Class { .. } => {}
        }
    }

    fn answered(&mut self, id: CallId, answer: Answer, now: Moment) {
        let Some(pending_call) = self.pending_calls.remove(&id) else {
            return;
        };
        self.count_answer(id, &pending_call, &answer);
        // Apply the result of a write at once; the watch shows it later.
        if let Answer::ClaimWritten(Outcome::Done(claim)) = &answer {
            self.see_written_claim(claim.clone(), now);
        }
        match pending_call {
            PendingCall::Pod { context, uid, early } => self.pod_read(&context, &uid, early, answer, now),
            PendingCall::EarlyPod { uid } => self.early_pod_read(&uid, answer, now),
            PendingCall::Judge {
                context,
                uid,
                claims,
                input,
            } => {
                self.end_judging(&claims, &input);
                self.judged(&context, &uid, input, answer, now);
            }
            PendingCall::Publish { context, uid } => self.published(&context, &uid, answer, now),
            PendingCall::Release { claim, uid } => self.release_answered(&claim, &uid, answer, now),
            PendingCall::Item { transaction, uid } => self.item_answered(transaction, &uid, answer, now),
            PendingCall::Transaction { transaction } => self.transaction_answered(transaction, answer),
        }
    }

    // === start ===

    fn pass_barrier(&mut self) {
        if !self.barrier.listed() || self.barrier.driver {
            return;
        }
        let holdings = self
            .claims
            .values_mut()
            .filter_map(|claim| claim.observe_first())
            .collect();
        self.commands.push(Command::Observe(Observation::All(holdings)));
        self.commands.push(Command::AwaitDriver);
    }

    fn driver_ready(&mut self) {
        self.barrier.driver = true;
        self.work_queue
            .extend(self.claims.keys().cloned().map(Work::Claim));
        self.work_queue
            .extend(self.contexts.keys().cloned().map(Work::Context));
    }
}

/// Whether `new` is a later version of an object than `known`. Resource versions are compared as numbers, as in client-go's caches.
pub(super) fn newer(known: Option<&str>, new: Option<&str>) -> bool {
    let number = |version: Option<&str>| version.and_then(|text| text.parse::<u64>().ok());
    match (number(known), number(new)) {
        (Some(known), Some(new)) => new > known,
        _ => known != new,
    }
}

/// A delay between `base` and `base + spread` derived from the name, so that rechecks are spread over time.
pub(super) fn spread(name: &str, base: Duration, spread: Duration) -> Duration {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let share = u32::try_from(hash % 1024).unwrap_or_default();
    base.saturating_add(spread.saturating_mul(share) / 1024)
}

impl Holding {
    /// The observation of a claim for the driver.
    pub(super) fn of(claim: &Arc<ResourceClaim>) -> Self {
        Self { claim: claim.clone() }
    }
}
