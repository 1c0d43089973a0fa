//! Counters for metrics. No decision depends on them.
//!
//! Labels come from small fixed sets and never contain object names.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::core::distribution::Distribution;

use super::event::{Answer, CallError, Moment, Outcome};

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Allocated claims, counted when the status write is known to be stored.
    pub allocations: u64,
    /// Deallocated claims.
    pub deallocations: u64,
    /// Waiting pods for which only the slow recheck found a node. Each one is a lost wake-up.
    pub caught_by_recheck: u64,
    /// Ended attempts to allocate all claims of a pod, or one immediate claim, by [`Statistics::ATTEMPTS`].
    pub attempts: BTreeMap<&'static str, u64>,
    /// Driver calls by [`Statistics::CALLS`] and [`Statistics::CALL_RESULTS`].
    pub calls: BTreeMap<(&'static str, &'static str), u64>,
    /// Events for users, by reason.
    pub reports: BTreeMap<&'static str, u64>,
    /// Waiting pods at present, by the reason that keeps them from their devices.
    pub waiting: BTreeMap<&'static str, u64>,
    /// Duration of wake-ups: from the time that capacity was freed, or that the pod began to wait if that was later, until the allocation
    /// starts or the context's new entries are stored.
    pub wake_ups: Distribution,
    /// Work queues, by [`Statistics::QUEUES`].
    pub queues: BTreeMap<&'static str, QueueStatistics>,
}

/// One work queue: objects of one kind to process, with the resulting requests and calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStatistics {
    /// Number of objects in the queue at present.
    pub depth: u64,
    /// Number of additions. Adding an object that is already queued does not count.
    pub adds: u64,
    /// Number of failed requests and calls, whether or not they are retried.
    pub retries: u64,
    /// Time that objects spent in the queue.
    pub waited: Distribution,
    /// Time from sending a request or call until its answer.
    pub worked: Distribution,
    /// Number of pending requests and calls.
    pub under_way: u64,
    /// Sum of the start times of the pending ones, as durations since the controller's start.
    pub begun: Duration,
    /// Start time of the oldest pending one.
    pub oldest: Option<Moment>,
}

impl Statistics {
    /// The queues: transactions of claims, single claims, and contexts of pods.
    pub const QUEUES: [&'static str; 3] = ["batch", "claim", "context"];
    /// Results of an attempt to allocate: recorded; driver error of kind `Invalid`; refused by the API server; driver error of kind `Retry`
    /// or `TimedOut`; withdrawn because the node, the pod or a claim has changed.
    pub const ATTEMPTS: [&'static str; 6] = [
        "Allocated",
        "Invalid",
        "NotRecorded",
        "Retry",
        "TimedOut",
        "Withdrawn",
    ];
    /// The driver methods.
    pub const CALLS: [&'static str; 3] = ["Allocate", "Deallocate", "UnsuitableNodes"];
    /// Results of a driver call.
    pub const CALL_RESULTS: [&'static str; 4] = ["Done", "Invalid", "Retry", "TimedOut"];
    /// Waiting reason that is not an error: some nodes of the pod are unsuitable.
    pub const SOME_NODES: &'static str = "SomeNodesUnsuitable";

    /// Moves a waiting pod from one reason to another; `None` means that it does not wait.
    pub(super) fn waiting_reason_changed(
        &mut self,
        before: Option<&'static str>,
        after: Option<&'static str>,
    ) {
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

    /// Counts an ended transaction, by one of [`Statistics::ATTEMPTS`].
    pub(super) fn attempted(&mut self, result: &'static str) {
        *self.attempts.entry(result).or_default() += 1;
    }

    pub(super) fn called(&mut self, answer: &Answer) {
        let (call, failure) = match answer {
            Answer::Evaluated(answer) => ("UnsuitableNodes", answer.as_ref().err()),
            Answer::Allocated(answer) => ("Allocate", answer.as_ref().err()),
            Answer::Deallocated(answer) => ("Deallocate", answer.as_ref().err()),
            Answer::PodRead(_)
            | Answer::ClaimRead(_)
            | Answer::ClaimWritten(_)
            | Answer::ContextWritten(_) => return,
        };
        let result = failure.map_or("Done", |error: &CallError| error.kind.as_str());
        *self.calls.entry((call, result)).or_default() += 1;
    }
}

/// Whether a request or call failed.
pub(super) fn is_failure(answer: &Answer) -> bool {
    match answer {
        Answer::PodRead(answer) => answer.is_err(),
        Answer::ClaimRead(answer) => answer.is_err(),
        Answer::ClaimWritten(outcome) => !matches!(outcome, Outcome::Done(_)),
        Answer::ContextWritten(outcome) => !matches!(outcome, Outcome::Done(_)),
        Answer::Evaluated(answer) => answer.is_err(),
        Answer::Allocated(answer) => answer.is_err(),
        Answer::Deallocated(answer) => answer.is_err(),
    }
}
