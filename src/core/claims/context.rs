//! One PodSchedulingContext: checks whether its pod needs this driver, which nodes are unsuitable, and when to allocate.

mod evaluation;
mod incomplete;
mod others;
mod pod;
mod standing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{Pod, PodSchedulingContext, controller_of};
use crate::driver::Verdict;

use super::event::{ClaimToAllocate, Moment, ObjectKey, Regarding, Report, Subject};
use super::retry::Retry;
use super::state::{ControllerState, Work, newer, spread};
use super::transaction::TransactionId;
use super::wakeup::Waiting;

pub(super) use pod::EarlyPod;

use others::SILENT_DRIVER_REASON;

/// Interval of the slow recheck of a waiting pod, a fallback for wake-ups. A recheck that helps counts as a lost wake-up.
const RECHECK: Duration = Duration::from_secs(300);
/// Rechecks are spread over this time.
const RECHECK_SPREAD: Duration = Duration::from_secs(120);

/// The pod of a context. It is read once, and again before its claims are allocated a second time.
#[derive(Clone, Debug, Default, PartialEq)]
enum PodKnown {
    #[default]
    Unread,
    Read(Arc<Pod>),
    /// It does not exist, has ended, is being deleted, or is not the owner of the context.
    Gone,
}

/// The operation in progress for a context; at most one at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ContextPhase {
    #[default]
    Resting,
    Reading,
    Judging,
    Publishing,
    Allocating,
}

/// The inputs of an evaluation. Its verdict is valid while they are unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EvaluationInput {
    nodes: Vec<String>,
    /// Uid of each claim, with the resource version of its class.
    claims: Vec<(String, Option<String>)>,
    capacity_generation: u64,
    rechecks: u64,
}

#[derive(Clone, Debug)]
pub(super) struct ContextState {
    /// The latest object, from the watch or from the answer to our own write.
    pub(super) object: Arc<PodSchedulingContext>,
    pod: PodKnown,
    /// The pod's claims were allocated since it was read. Before they are allocated again, the pod is read again: it may have ended.
    served: bool,
    stage: ContextPhase,
    /// The transaction that allocates for this context.
    transaction: Option<TransactionId>,
    /// The known claims that its pod names: the reverse of `ControllerState::users`.
    named: BTreeSet<ObjectKey>,
    /// The last verdict, in the order of `EvaluationInput::claims`.
    verdict: Option<(EvaluationInput, Vec<Verdict>)>,
    /// Set if the driver cannot evaluate or allocate these inputs. It is not called again while they are unchanged.
    stuck: Option<EvaluationInput>,
    /// Nodes on which the driver refused to allocate although it had reported them as suitable, each with the reason. Cleared by a change,
    /// or when `refusals` allows another attempt.
    refused: BTreeMap<String, String>,
    refusals: Retry,
    /// Set while the pod waits for a suitable node.
    pub(super) waiting: Option<Waiting>,
    /// `ControllerState::capacity_generation` at its last wake-up.
    capacity_generation: u64,
    /// `ControllerState::capacity_generation` when the driver was last called: its answer may predate later changes.
    asked: u64,
    /// Number of evaluations requested by the slow recheck.
    rechecks: u64,
    retry: Retry,
    reported: Option<String>,
    /// Other drivers that owe the scheduler an answer for this pod, or did when they were reported.
    silent: BTreeMap<String, others::Silence>,
    /// When `NoSuitableDevice` was last reported, unless another report followed.
    told_no_place: Option<Moment>,
    /// The evaluation in progress was requested by the slow recheck alone.
    by_recheck: bool,
    /// The reason that keeps the pod from its devices, for the statistics.
    pub(super) trouble: Option<&'static str>,
    /// Start of the current wake-up: when capacity was freed, or when the pod began to wait if that was later.
    pub(super) woken: Option<Moment>,
}

/// A claim of the pod that this driver has yet to allocate.
struct Pending {
    pod_claim_name: String,
    key: ObjectKey,
    /// Index of its verdict. Entries of the pod that name the same claim share it, because the driver evaluates each claim once.
    position: usize,
    to_allocate: ClaimToAllocate,
}

/// The state of a pod's claims from this driver's view.
enum Standing {
    /// No action now: all is done, or a later event triggers the next step.
    Rest,
    /// Claims to allocate; `all` also counts those of other drivers.
    Pending { own: Vec<Pending>, all: usize },
}

impl ContextState {
    fn new(object: Arc<PodSchedulingContext>) -> Self {
        Self {
            object,
            pod: PodKnown::Unread,
            served: false,
            stage: ContextPhase::Resting,
            transaction: None,
            named: BTreeSet::new(),
            verdict: None,
            stuck: None,
            refused: BTreeMap::new(),
            refusals: Retry::default(),
            waiting: None,
            capacity_generation: 0,
            asked: 0,
            rechecks: 0,
            retry: Retry::default(),
            reported: None,
            silent: BTreeMap::new(),
            told_no_place: None,
            by_recheck: false,
            trouble: None,
            woken: None,
        }
    }

    pub(super) fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }

    pub(super) fn is_deleting(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    /// Whether the pod had a node when it was read.
    pub(super) fn pod_has_a_node(&self) -> bool {
        match &self.pod {
            PodKnown::Read(pod) => pod.spec.node_name.is_some(),
            PodKnown::Unread | PodKnown::Gone => false,
        }
    }

    /// The pod, if it was read and exists.
    fn known_pod(&self) -> Option<Arc<Pod>> {
        match &self.pod {
            PodKnown::Read(pod) => Some(pod.clone()),
            PodKnown::Unread | PodKnown::Gone => None,
        }
    }

    /// Resets refusals and delays for a wake-up.
    pub(super) fn offered(&mut self, capacity_generation: u64) {
        self.capacity_generation = capacity_generation;
        self.refused.clear();
        self.refusals.succeeded();
        self.retry.succeeded();
    }

    /// Resets the delay: something has changed since the driver failed, so it is called again at once.
    pub(super) fn reset_backoff(&mut self) {
        self.retry.succeeded();
    }

    /// Clears the refused nodes once their delay is over.
    fn clear_refused(&mut self, now: Moment) {
        if !self.refused.is_empty() && self.refusals.wait_until(now).is_none() {
            self.refused.clear();
            self.verdict = None;
        }
    }

    /// Forgets a report, so that it can be repeated. Returns whether it was the last one.
    pub(super) fn forget_report(&mut self, pod_uid: &str, report: &Report) -> bool {
        if self.owner_uid() != Some(pod_uid) {
            return false;
        }
        if report.reason == SILENT_DRIVER_REASON {
            self.silent.clear();
            return true;
        }
        let was_last = self.reported.as_ref() == Some(&report.message);
        if was_last {
            self.reported = None;
            self.told_no_place = None;
        }
        was_last
    }

    fn owner_uid(&self) -> Option<&str> {
        controller_of(&self.object.metadata).map(|owner| owner.uid.as_str())
    }

    /// The nodes to evaluate, without duplicates: those of the scheduler, and those found unsuitable before, because the scheduler lists
    /// only nodes that passed its filters.
    fn nodes(&self, own: &[Pending]) -> Vec<String> {
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
}

impl ControllerState {
    pub(super) fn see_context(&mut self, object: Arc<PodSchedulingContext>) {
        let key = ObjectKey::of(&object.metadata);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if let Some(known) = self.contexts.get(&key) {
            let known_uid = known.uid().to_owned();
            if known_uid != uid {
                self.context_gone(&key, &known_uid);
            } else if !newer(
                known.object.metadata.resource_version.as_deref(),
                object.metadata.resource_version.as_deref(),
            ) {
                return;
            }
        }
        if let Some(context) = self.contexts.get_mut(&key) {
            // A new spec does not wait for the delay of an earlier failure.
            if context.object.spec != object.spec {
                context.reset_backoff();
            }
            context.object = object;
            // A transaction ends early if its node is no longer selected.
            self.work_queue.extend(context.transaction.map(Work::Transaction));
        } else {
            let mut context = ContextState::new(object);
            context.capacity_generation = self.capacity_generation;
            self.contexts.insert(key.clone(), context);
        }
        self.work_queue.insert(Work::Context(key));
    }

    pub(super) fn context_gone(&mut self, key: &ObjectKey, uid: &str) {
        if self.contexts.get(key).is_none_or(|context| context.uid() != uid) {
            return;
        }
        let Some(context) = self.contexts.remove(key) else {
            return;
        };
        self.wake.remove(key);
        self.forget_trouble(context.trouble);
        for claim in &context.named {
            if let Some(contexts) = self.users.get_mut(claim) {
                contexts.remove(key);
                if contexts.is_empty() {
                    self.users.remove(claim);
                }
            }
        }
        self.work_queue.extend(context.transaction.map(Work::Transaction));
    }

    /// Records that a context's pod names a claim.
    fn note_user(&mut self, context: &ObjectKey, claim: ObjectKey) {
        if let Some(state) = self.contexts.get_mut(context)
            && state.named.insert(claim.clone())
        {
            self.users.entry(claim).or_default().insert(context.clone());
        }
    }

    /// Revisits the contexts of a namespace whose pods have not been read: one of them may now need this driver.
    pub(super) fn touch_unread_contexts(&mut self, namespace: &str) {
        let first = ObjectKey::new(namespace, "");
        let keys = self
            .contexts
            .range(first..)
            .take_while(|(key, _)| key.namespace == namespace)
            .filter(|(_, context)| context.pod == PodKnown::Unread)
            .map(|(key, _)| Work::Context(key.clone()));
        self.work_queue.extend(keys);
    }

    pub(super) fn step_context(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let spec = &context.object.spec;
        if context.stage != ContextPhase::Resting
            || context.is_deleting()
            || (spec.selected_node.is_empty() && spec.potential_nodes.is_empty())
        {
            return;
        }
        if let Some(moment) = context.retry.wait_until(now) {
            self.wake_at(moment, Work::Context(key.clone()));
            return;
        }
        context.clear_refused(now);
        let pod = match &context.pod {
            PodKnown::Gone => return,
            PodKnown::Read(pod) => pod.clone(),
            PodKnown::Unread => {
                self.read_pod(key, now);
                return;
            }
        };
        match self.standing(key, &pod, now) {
            Standing::Rest => {
                if let Some(context) = self.contexts.get_mut(key) {
                    context.waiting = None;
                }
                self.wake.remove(key);
            }
            Standing::Pending { .. } if self.contexts.get(key).is_some_and(|context| context.served) => {
                self.send_read_pod(key);
            }
            Standing::Pending { own, all } => self.evaluate_or_act(key, &pod, &own, all, now),
        }
    }

    fn set_stage(&mut self, key: &ObjectKey, stage: ContextPhase) {
        if let Some(context) = self.contexts.get_mut(key) {
            context.stage = stage;
        }
    }

    /// Sets the stage of a context for a call to the driver.
    fn ask(&mut self, key: &ObjectKey, stage: ContextPhase) {
        let capacity_generation = self.capacity_generation;
        if let Some(context) = self.contexts.get_mut(key) {
            context.asked = capacity_generation;
        }
        self.set_stage(key, stage);
    }

    /// Sets the context of an answer back to `Resting`. `None` if the context is gone.
    fn take_pending(&mut self, key: &ObjectKey, uid: &str) -> Option<&mut ContextState> {
        let contexts = &mut self.contexts;
        let context = contexts.get_mut(key).filter(|context| context.uid() == uid)?;
        context.stage = ContextPhase::Resting;
        self.touch_context(key);
        self.contexts.get_mut(key)
    }

    fn begin_to_wait(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        if context.waiting.is_none() {
            let priority = match &context.pod {
                PodKnown::Read(pod) => pod.spec.priority.unwrap_or_default(),
                PodKnown::Unread | PodKnown::Gone => 0,
            };
            let recheck = now.after(spread(context.uid(), RECHECK, RECHECK_SPREAD));
            context.waiting = Some(Waiting {
                priority,
                since: now,
                recheck,
            });
            // A change since the driver was called has woken only the pods that waited then. A context that has taken over the current
            // `capacity_generation` is evaluated again in any case.
            if context.asked < self.capacity_generation
                && context.capacity_generation < self.capacity_generation
            {
                self.wake.join(key.clone());
            }
            self.wake_at(recheck, Work::Recheck(key.clone()));
        }
    }

    /// Evaluates a waiting pod again although no change is known.
    pub(super) fn recheck_context(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let next = now.after(spread(context.uid(), RECHECK, RECHECK_SPREAD));
        // The pod may have stopped and resumed waiting since this recheck was scheduled.
        let Some(waiting) = context.waiting.as_mut().filter(|waiting| waiting.recheck <= now) else {
            return;
        };
        waiting.recheck = next;
        context.by_recheck = context.stage == ContextPhase::Resting;
        context.rechecks += 1;
        context.offered(self.capacity_generation);
        self.wake_at(next, Work::Recheck(key.clone()));
        self.touch_context(key);
    }

    /// Reports a driver's error on the pod and on the class or claim at fault.
    fn report_call(&mut self, key: &ObjectKey, subject: &Subject, reason: &'static str, message: String) {
        match subject {
            Subject::Class(name) => {
                let text = format!("resource class \"{name}\": {message}");
                if self.report_pod(key, reason, text) {
                    self.report_class(name, reason, message);
                }
            }
            Subject::Claim(claim) => {
                self.report_pod(key, reason, format!("claim {claim}: {message}"));
                self.report_claim(claim, reason, message);
            }
            Subject::Call => {
                self.report_pod(key, reason, message);
            }
        }
    }

    /// Reports a problem of a context's pod unless it repeats the last report. Returns whether it was reported.
    pub(super) fn report_pod(&mut self, key: &ObjectKey, reason: &'static str, message: String) -> bool {
        self.set_trouble(key, Some(reason));
        let Some(context) = self.contexts.get_mut(key) else {
            return false;
        };
        if context.reported.as_deref() == Some(&message) {
            return false;
        }
        let Some(uid) = context.owner_uid().map(str::to_owned) else {
            return false;
        };
        context.reported = Some(message.clone());
        context.told_no_place = None;
        self.report(
            Regarding::Pod {
                key: key.clone(),
                uid,
            },
            reason,
            message,
        );
        true
    }
}
