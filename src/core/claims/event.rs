//! What comes in and what goes out: plain data, so that a run can be logged and replayed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::api::resource::{
    AllocationResult, Pod, PodSchedulingContext, ResourceClaim, ResourceClaimConsumerReference,
    ResourceClaimSchedulingStatus, ResourceClass,
};
use crate::driver::{CapacityChange, DriverErrorKind, Finding, Observation, Verdict};

/// A point in time: how long after the controller's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// The point `since_start` after the controller's start.
    pub const fn new(since_start: Duration) -> Self {
        Self(since_start)
    }

    /// How long after the controller's start.
    pub const fn since_start(self) -> Duration {
        self.0
    }

    /// How long after an earlier point.
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// This point, moved on.
    #[must_use]
    pub const fn after(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(delay))
    }
}

/// Namespace and name of a claim, a pod or a context.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl ObjectKey {
    /// A key from its parts.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// The key of an object.
    pub fn of(metadata: &ObjectMeta) -> Self {
        Self::new(
            metadata.namespace.clone().unwrap_or_default(),
            metadata.name.clone().unwrap_or_default(),
        )
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Ties an answer to the command that asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Something that has happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// All classes: what is not among them is gone.
    Classes(Vec<Arc<ResourceClass>>),
    /// A class was made or changed.
    Class(Arc<ResourceClass>),
    /// A class is gone.
    ClassGone(String),
    /// All claims, read by quorum: what is not among them is gone.
    Claims(Vec<Arc<ResourceClaim>>),
    /// A claim was made or changed.
    Claim(Arc<ResourceClaim>),
    /// A claim is gone.
    ClaimGone {
        /// Which.
        key: ObjectKey,
        /// Its uid.
        uid: String,
    },
    /// All contexts: what is not among them is gone.
    Contexts(Vec<Arc<PodSchedulingContext>>),
    /// A context was made or changed.
    Context(Arc<PodSchedulingContext>),
    /// A context is gone.
    ContextGone {
        /// Which.
        key: ObjectKey,
        /// Its uid.
        uid: String,
    },
    /// The driver knows enough to decide.
    DriverReady,
    /// A pod that found no place might find one now.
    Capacity(CapacityChange),
    /// The driver finds something wrong with what claims hold.
    Found(Vec<Finding>),
    /// A report was not written, and nobody keeps it.
    Untold(Report),
    /// A command has been carried out, or not.
    Answer {
        /// The command's id.
        id: CallId,
        /// What came of it.
        answer: Answer,
    },
}

/// What came of a command.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Of [`Command::ReadPod`]; `None` if there is no such pod.
    PodRead(Result<Option<Arc<Pod>>, String>),
    /// Of [`Command::ReadClaim`]; `None` if there is no such claim.
    ClaimRead(Result<Option<Arc<ResourceClaim>>, String>),
    /// Of [`Command::WriteClaim`].
    ClaimWritten(Outcome<Arc<ResourceClaim>>),
    /// Of [`Command::WriteContext`].
    ContextWritten(Outcome<Arc<PodSchedulingContext>>),
    /// Of [`DriverRequest::UnsuitableNodes`]: a verdict per claim, in order.
    Judged(Result<Vec<Verdict>, CallError>),
    /// Of [`DriverRequest::Allocate`]: a result per claim, in order.
    Allocated(Result<Vec<Result<AllocationResult, CallError>>, CallError>),
    /// Of [`DriverRequest::Deallocate`].
    Deallocated(Result<(), CallError>),
}

/// What came of a write.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome<T> {
    /// Stored; the object as it is now.
    Done(T),
    /// The server will not have it, and will not have it again: not found, invalid, forbidden.
    Refused(String),
    /// The object is not the one that was seen.
    Conflict(String),
    /// Nobody knows: no answer in time, a dropped connection, a server in trouble. Cleared by reading the object.
    Unknown(String),
}

/// Why a call of the driver came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    /// What can be done about it.
    pub kind: CallErrorKind,
    /// The object at fault.
    pub subject: Subject,
    /// CamelCase, from a small fixed set.
    pub reason: &'static str,
    /// What is wrong and what to do.
    pub message: String,
}

/// What can be done about a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallErrorKind {
    /// Only a change by a person helps.
    Invalid,
    /// It may go away by itself.
    Retry,
    /// The driver has not answered in time; what it did is not known.
    TimedOut,
}

impl From<DriverErrorKind> for CallErrorKind {
    fn from(kind: DriverErrorKind) -> Self {
        match kind {
            DriverErrorKind::Invalid => Self::Invalid,
            DriverErrorKind::Retry => Self::Retry,
        }
    }
}

/// The object at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The class of this name.
    Class(String),
    /// The claim of this name.
    Claim(ObjectKey),
    /// None in particular.
    Call,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// GET the pod.
    ReadPod {
        /// For the answer.
        id: CallId,
        /// Which.
        key: ObjectKey,
    },
    /// GET the claim.
    ReadClaim {
        /// For the answer.
        id: CallId,
        /// Which.
        key: ObjectKey,
    },
    /// Change a claim, if it still has this uid.
    WriteClaim {
        /// For the answer.
        id: CallId,
        /// Which.
        key: ObjectKey,
        /// Its uid.
        uid: String,
        /// The change.
        write: ClaimWrite,
    },
    /// Make these our entries in a context's status, and leave the others' alone.
    WriteContext {
        /// For the answer.
        id: CallId,
        /// Which.
        key: ObjectKey,
        /// Its uid.
        uid: String,
        /// All our entries.
        entries: Vec<ResourceClaimSchedulingStatus>,
    },
    /// Ask the driver.
    CallDriver {
        /// For the answer.
        id: CallId,
        /// What.
        request: DriverRequest,
    },
    /// Tell the driver, in order with everything else.
    Observe(Observation),
    /// Wait until the driver is ready, then [`Event::DriverReady`].
    AwaitDriver,
    /// Tell a user.
    Report(Report),
}

/// A change to a claim.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimWrite {
    /// Add our finalizer, and say on which node the claim is to be allocated: what runs there may follow its own claims only.
    AddFinalizer {
        /// The value of the label `<driver>/node`.
        node: String,
    },
    /// Set allocation and driver name, and reserve the claim for the pod that it was allocated for, if the claim is not allocated and
    /// not being deleted: a late duplicate must not replace the reservations that were added since.
    Allocate {
        /// What was allocated.
        allocation: AllocationResult,
        /// The pod.
        reserved_for: Option<ResourceClaimConsumerReference>,
        /// The resource version that was seen, and that the claim must still have, if an earlier try had no clear answer. None for the
        /// first try, which no second writer can fail.
        version: Option<String>,
    },
    /// Clear allocation, driver name and the request to deallocate, if they are what was seen.
    ClearAllocation {
        /// Whether the claim was seen to ask for it.
        deallocation_requested: bool,
        /// The driver name that was seen.
        driver_name: Option<String>,
    },
    /// Clear allocation, driver name and the one reservation, if the claim is still at this version: another claim of the pod
    /// could not be recorded, or another claim holds the same.
    UndoAllocation {
        /// The resource version that was seen.
        version: String,
        /// Whether the claim was seen to be reserved, for our pod alone.
        reserved: bool,
    },
    /// Remove our finalizer.
    RemoveFinalizer {
        /// The resource version that was seen, and that the claim must still have: without that, a leader that was paused could
        /// take the finalizer from a claim that is in use again. None for a claim that is being deleted, which nobody can use anew.
        version: Option<String>,
    },
}

/// A question to the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum DriverRequest {
    /// [`crate::driver::Driver::unsuitable_nodes`].
    UnsuitableNodes {
        /// The pod.
        pod: Arc<Pod>,
        /// Its claims that are still to be allocated by this driver.
        claims: Vec<ClaimToAllocate>,
        /// The nodes in question.
        nodes: Vec<String>,
    },
    /// [`crate::driver::Driver::allocate`].
    Allocate {
        /// The claims.
        claims: Vec<ClaimToAllocate>,
        /// Where; `None` for anywhere.
        node: Option<String>,
    },
    /// [`crate::driver::Driver::deallocate`].
    Deallocate {
        /// The claim.
        claim: Arc<ResourceClaim>,
        /// What was allocated, recorded or not.
        allocation: Option<AllocationResult>,
    },
}

/// A claim that the driver is asked about.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimToAllocate {
    /// The entry of `pod.spec.resourceClaims`; empty for an immediate claim.
    pub pod_claim_name: String,
    /// The claim.
    pub claim: Arc<ResourceClaim>,
    /// Its class.
    pub class: Arc<ResourceClass>,
}

/// A sentence for a user: becomes an Event on the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The object.
    pub regarding: Regarding,
    /// CamelCase, from a small fixed set.
    pub reason: String,
    /// What is wrong and what to do.
    pub message: String,
}

/// The object that a report is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Regarding {
    /// A pod.
    Pod {
        /// Which.
        key: ObjectKey,
        /// Its uid.
        uid: String,
    },
    /// A claim.
    Claim {
        /// Which.
        key: ObjectKey,
        /// Its uid.
        uid: String,
    },
    /// A class.
    Class {
        /// Which.
        name: String,
        /// Its uid.
        uid: String,
    },
}

/// Puts reasons into one sentence: the same reason on many nodes is named once.
pub(super) fn summary(reasons: &BTreeMap<String, String>) -> String {
    /// Names beyond this many are counted, so that the sentence stays readable.
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

    #[test]
    fn the_same_reason_on_many_nodes_is_named_once_and_the_commonest_comes_first() {
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
