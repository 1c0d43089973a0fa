//! What the protocol counts, for those who watch from outside. Nothing is decided by it.
//!
//! What is counted by a reason or a result is counted by words of small fixed sets; no name of an object is among them.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::core::distribution::Distribution;

use super::batch::Failure;
use super::event::{Answer, CallError, CallErrorKind, CallId, Moment, ObjectKey, Outcome};
use super::world::{Flight, Work, World};

/// What has been counted since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Claims allocated: the status write is known to be stored.
    pub allocations: u64,
    /// Claims whose devices were given back.
    pub deallocations: u64,
    /// Waiting pods for which the slow recheck found a place that nothing had announced. Each one is a lost wake-up.
    pub caught_by_recheck: u64,
    /// How attempts to allocate all claims of a pod, or one immediate claim, have ended: by [`Statistics::ATTEMPTS`].
    pub attempts: BTreeMap<&'static str, u64>,
    /// Calls of the driver by [`Statistics::CALLS`] and [`Statistics::CALL_RESULTS`].
    pub calls: BTreeMap<(&'static str, &'static str), u64>,
    /// Events for users, by reason.
    pub reports: BTreeMap<&'static str, u64>,
    /// Pods that wait now, by what keeps them from their devices.
    pub waiting: BTreeMap<&'static str, u64>,
    /// From the moment that something became free, or that a pod began to wait if that was later, until the pod's devices were
    /// asked for or the scheduler was told of the place.
    pub wake_ups: Distribution,
    /// The queues of what is to be looked at, by [`Statistics::QUEUES`].
    pub queues: BTreeMap<&'static str, QueueStatistics>,
}

/// One queue: objects of one kind that are to be looked at, and the requests and calls that follow from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStatistics {
    /// How many objects are in the queue now.
    pub depth: u64,
    /// How often an object came into the queue; one that is in it already does not come again.
    pub adds: u64,
    /// How often a request or call came to nothing, so that it is tried again or given up.
    pub retries: u64,
    /// How long objects were in the queue.
    pub waited: Distribution,
    /// How long requests and calls took, until they were answered.
    pub worked: Distribution,
    /// Requests and calls without an answer so far.
    pub under_way: u64,
    /// When each of those began, as times since the start, added up.
    pub begun: Duration,
    /// When the oldest of those began.
    pub oldest: Option<Moment>,
}

impl Statistics {
    /// What is queued: claims by themselves, pods' contexts, and claims that are allocated together.
    pub const QUEUES: [&'static str; 3] = ["batch", "claim", "context"];
    /// How an attempt to allocate ends: recorded; refused by the driver for good, for now, or by its silence; refused by the API
    /// server; no longer wanted.
    pub const ATTEMPTS: [&'static str; 6] = [
        "Allocated",
        "Invalid",
        "NotRecorded",
        "Retry",
        "TimedOut",
        "Withdrawn",
    ];
    /// The calls of a driver.
    pub const CALLS: [&'static str; 3] = ["Allocate", "Deallocate", "UnsuitableNodes"];
    /// How they end.
    pub const CALL_RESULTS: [&'static str; 4] = ["Done", "Invalid", "Retry", "TimedOut"];
    /// What keeps a pod from its devices although it is nobody's error: some of the nodes in question will not do.
    pub const SOME_NODES: &'static str = "SomeNodesUnsuitable";

    /// A pod that waited for one thing now waits for another, or for nothing.
    fn trouble_changed(&mut self, before: Option<&'static str>, after: Option<&'static str>) {
        if before == after {
            return;
        }
        if let Some(count) = before.and_then(|before| self.waiting.get_mut(before)) {
            *count = count.saturating_sub(1);
        }
        if let Some(after) = after {
            *self.waiting.entry(after).or_default() += 1;
        }
    }

    /// A batch is over.
    pub(super) fn attempted(&mut self, failure: Option<&Failure>) {
        let result = match failure {
            None => "Allocated",
            Some(Failure::Driver(error)) => word(error.kind),
            Some(Failure::Refused(_)) => "NotRecorded",
            Some(Failure::Withdrawn) => "Withdrawn",
        };
        *self.attempts.entry(result).or_default() += 1;
    }

    fn called(&mut self, answer: &Answer) {
        let (call, failure) = match answer {
            Answer::Judged(answer) => ("UnsuitableNodes", answer.as_ref().err()),
            Answer::Allocated(Err(error)) => ("Allocate", Some(error)),
            Answer::Allocated(Ok(answers)) => (
                "Allocate",
                answers.iter().find_map(|answer| answer.as_ref().err()),
            ),
            Answer::Deallocated(answer) => ("Deallocate", answer.as_ref().err()),
            Answer::PodRead(_)
            | Answer::ClaimRead(_)
            | Answer::ClaimWritten(_)
            | Answer::ContextWritten(_) => return,
        };
        let result = failure.map_or("Done", |error: &CallError| word(error.kind));
        *self.calls.entry((call, result)).or_default() += 1;
    }
}

fn word(kind: CallErrorKind) -> &'static str {
    match kind {
        CallErrorKind::Invalid => "Invalid",
        CallErrorKind::Retry => "Retry",
        CallErrorKind::TimedOut => "TimedOut",
    }
}

/// Whether what was asked for has not been done.
fn came_to_nothing(answer: &Answer) -> bool {
    match answer {
        Answer::PodRead(answer) => answer.is_err(),
        Answer::ClaimRead(answer) => answer.is_err(),
        Answer::ClaimWritten(outcome) => !matches!(outcome, Outcome::Done(_)),
        Answer::ContextWritten(outcome) => !matches!(outcome, Outcome::Done(_)),
        Answer::Judged(answer) => answer.is_err(),
        Answer::Allocated(Err(_)) => true,
        Answer::Allocated(Ok(answers)) => answers.iter().any(Result::is_err),
        Answer::Deallocated(answer) => answer.is_err(),
    }
}

/// The queue in which a piece of work stands.
fn queue_of_work(work: &Work) -> &'static str {
    match work {
        Work::Batch(_) => "batch",
        Work::Claim(_) | Work::Open(_) => "claim",
        Work::Woken(..) | Work::Context(_) | Work::Recheck(_) | Work::Offer(_) => "context",
    }
}

/// The queue from which a request or call came.
fn queue_of_flight(flight: &Flight) -> &'static str {
    match flight {
        Flight::Item { .. } | Flight::Batch { .. } => "batch",
        Flight::Release { .. } => "claim",
        Flight::Pod { .. } | Flight::EarlyPod { .. } | Flight::Judge { .. } | Flight::Publish { .. } => {
            "context"
        }
    }
}

/// What is to be looked at: each piece of work once, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    /// The work, and since when it is here.
    work: BTreeMap<Work, Moment>,
    /// The time.
    pub(super) now: Moment,
    figures: BTreeMap<&'static str, QueueStatistics>,
    /// Since when requests and calls are under way, the oldest first.
    under_way: BTreeMap<&'static str, BTreeMap<CallId, Moment>>,
}

impl Queue {
    /// Puts a piece of work in, unless it is there.
    pub(super) fn insert(&mut self, work: Work) {
        let figures = self.figures.entry(queue_of_work(&work)).or_default();
        self.work.entry(work).or_insert_with(|| {
            figures.adds += 1;
            figures.depth += 1;
            self.now
        });
    }

    /// Puts several in.
    pub(super) fn extend(&mut self, work: impl IntoIterator<Item = Work>) {
        for work in work {
            self.insert(work);
        }
    }

    /// Takes the first one out.
    pub(super) fn pop_first(&mut self) -> Option<Work> {
        let (work, since) = self.work.pop_first()?;
        let figures = self.figures.entry(queue_of_work(&work)).or_default();
        figures.depth = figures.depth.saturating_sub(1);
        figures.waited.observe(self.now.since(since));
        Some(work)
    }

    /// A request or call has been sent.
    pub(super) fn sent(&mut self, id: CallId, flight: &Flight) {
        let queue = queue_of_flight(flight);
        let figures = self.figures.entry(queue).or_default();
        figures.under_way += 1;
        figures.begun = figures.begun.saturating_add(self.now.since_start());
        self.under_way.entry(queue).or_default().insert(id, self.now);
    }

    /// A request or call has been answered.
    fn answered(&mut self, id: CallId, flight: &Flight, answer: &Answer) {
        let queue = queue_of_flight(flight);
        let begun = self.under_way.get_mut(queue).and_then(|all| all.remove(&id));
        let Some(begun) = begun else { return };
        let figures = self.figures.entry(queue).or_default();
        figures.under_way = figures.under_way.saturating_sub(1);
        figures.begun = figures.begun.saturating_sub(begun.since_start());
        figures.worked.observe(self.now.since(begun));
        figures.retries += u64::from(came_to_nothing(answer));
    }

    fn figures(&self) -> BTreeMap<&'static str, QueueStatistics> {
        let mut all = self.figures.clone();
        for (queue, figures) in &mut all {
            let oldest = self.under_way.get(queue).and_then(BTreeMap::first_key_value);
            figures.oldest = oldest.map(|(_, begun)| *begun);
        }
        all
    }
}

impl World {
    /// What has been counted since the start.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            queues: self.dirty.figures(),
            ..self.statistics.clone()
        }
    }

    /// Counts the answer of a command.
    pub(super) fn count_answer(&mut self, id: CallId, flight: &Flight, answer: &Answer) {
        self.statistics.called(answer);
        self.dirty.answered(id, flight, answer);
    }

    /// Notes what keeps a pod from its devices; `None` for nothing.
    pub(super) fn set_trouble(&mut self, key: &ObjectKey, trouble: Option<&'static str>) {
        if let Some(context) = self.contexts.get_mut(key) {
            let before = std::mem::replace(&mut context.trouble, trouble);
            self.statistics.trouble_changed(before, trouble);
        }
    }

    /// A pod no longer waits, because nobody schedules it any more.
    pub(super) fn forget_trouble(&mut self, trouble: Option<&'static str>) {
        self.statistics.trouble_changed(trouble, None);
    }

    /// What was offered to a pod does not help it.
    pub(super) fn stays_asleep(&mut self, key: &ObjectKey) {
        if let Some(context) = self.contexts.get_mut(key) {
            context.woken = None;
        }
    }

    /// What was free is asked for, or the scheduler has been told of it: a pod is awake, if it was asleep.
    pub(super) fn note_awake(&mut self, key: &ObjectKey, now: Moment) {
        let woken = self
            .contexts
            .get_mut(key)
            .and_then(|context| context.woken.take());
        if let Some(woken) = woken {
            self.statistics.wake_ups.observe(now.since(woken));
        }
    }
}
