//! Events (inputs, not those of Kubernetes), commands and settings: plain data, so that a run can be logged and replayed. Writes as
//! patches, and the outcomes of rejected writes.
//!
//! Each patch changes only our own fields, and only the object that was observed. There are no full updates: fields that a newer server
//! adds, other drivers' finalizers and entries, and concurrent writers are left alone.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::Status;
use kube::core::response::StatusDetails;
use serde_json::{Value, json};

use crate::api::resource::{
    AllocationResult, GROUP, NODE_LABEL, Pod, PodSchedulingContext, ResourceClaim,
    ResourceClaimConsumerReference, ResourceClaimSchedulingStatus, ResourceClass, VERSION, finalizer_of,
};
use crate::driver::{CapacityChange, DriverErrorKind, Finding, Observation, UnsuitableNodes};

/// A point in time, as the duration since the controller's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// The point `since_start` after the controller's start.
    pub const fn new(since_start: Duration) -> Self {
        Self(since_start)
    }

    /// The duration since the controller's start.
    pub const fn since_start(self) -> Duration {
        self.0
    }

    /// The duration since `earlier`; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// This point plus `delay`, saturating.
    #[must_use]
    pub const fn after(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(delay))
    }
}

/// Namespace and name of a claim, pod or context.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// The key of the object with this metadata. A missing part is empty.
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

/// Matches an answer to its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Identifies a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TransactionId(pub(super) u64);

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

    /// The label of a claim with the node of its allocation.
    pub fn node_label(&self) -> String {
        format!("{}/{NODE_LABEL}", self.driver_name)
    }
}

/// An input of the control flow, passed to [`ControllerState::apply`](super::ControllerState::apply).
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A complete list of classes: known classes that it lacks are gone.
    Classes(Vec<Arc<ResourceClass>>),
    /// A class was created or changed.
    Class(Arc<ResourceClass>),
    /// The class with this name was deleted.
    ClassGone(String),
    /// A complete list of claims from a quorum read: known claims that it lacks are gone.
    Claims(Vec<Arc<ResourceClaim>>),
    /// A claim was created or changed.
    Claim(Arc<ResourceClaim>),
    /// A claim was deleted.
    ClaimGone {
        key: ObjectKey,
        /// Uid of the deleted claim; a new claim may already have its name.
        uid: String,
    },
    /// A complete list of contexts: known contexts that it lacks are gone.
    Contexts(Vec<Arc<PodSchedulingContext>>),
    /// A context was created or changed.
    Context(Arc<PodSchedulingContext>),
    /// A context was deleted.
    ContextGone {
        key: ObjectKey,
        /// Uid of the deleted context; a new context may already have its name.
        uid: String,
    },
    /// The driver is ready, so decisions can start.
    DriverReady,
    /// A pod without a suitable node may find one now.
    Capacity(CapacityChange),
    /// The driver found wrong allocations.
    Found(Vec<Finding>),
    /// A report was not written and is no longer queued.
    ReportFailed(EventReport),
    /// A command was executed, successfully or not.
    Answer { id: CallId, answer: Answer },
}

/// The result of a command.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Answer to [`Command::ReadPod`]; `None` if the pod does not exist.
    PodRead(Result<Option<Arc<Pod>>, String>),
    /// Answer to [`Command::ReadClaim`]; `None` if the claim does not exist.
    ClaimRead(Result<Option<Arc<ResourceClaim>>, String>),
    /// Answer to [`Command::WriteClaim`].
    ClaimWritten(Outcome<Arc<ResourceClaim>>),
    /// Answer to [`Command::WriteContext`].
    ContextWritten(Outcome<Arc<PodSchedulingContext>>),
    /// Answer to [`DriverRequest::UnsuitableNodes`]: one entry per claim, in order.
    Evaluated(Result<Vec<UnsuitableNodes>, CallError>),
    /// Answer to [`DriverRequest::Allocate`]: one allocation per claim, in order, or none.
    Allocated(Result<Vec<AllocationResult>, CallError>),
    /// Answer to [`DriverRequest::Deallocate`].
    Deallocated(Result<(), CallError>),
}

/// The result of a write.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome<T> {
    /// Stored. Contains the object as returned by the server.
    Done(T),
    /// The server refuses the write, and would refuse it again: not found, invalid, forbidden.
    Refused(String),
    /// The object has changed since it was read.
    Conflict(String),
    /// Not stored: the server is too busy.
    Busy(String),
    /// Unknown whether the write was stored: timeout, dropped connection, server error. A read of the object resolves it.
    Unknown(String),
}

impl<T> Outcome<T> {
    /// The outcome if the server has answered with an error.
    pub fn rejected(status: &Status) -> Self {
        let message = status.message.clone();
        match status.code {
            409 => Self::Conflict(message),
            // A filter (`maxinflight.go`, `priority-and-fairness.go`, `with_retry_after.go`) or a webhook has rejected it.
            429 => Self::Busy(message),
            400 | 401 | 403 | 404 | 405 | 413 | 422 => Self::Refused(message),
            _ => Self::Unknown(message),
        }
    }

    /// The outcome of a JSON patch with a `test` operation if the server has answered with an error.
    pub fn rejected_patch(status: &Status) -> Self {
        if is_failed_test(status) {
            return Self::Conflict("the object has changed".to_owned());
        }
        Self::rejected(status)
    }
}

/// Why a driver call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    pub kind: CallErrorKind,
    pub subject: CallErrorSubject,
    /// CamelCase reason from a small fixed set.
    pub reason: &'static str,
    /// The problem and its fix, for the user.
    pub message: String,
}

impl CallError {
    /// Message of a report that the claim cannot be deallocated yet.
    pub(super) fn not_deallocated(&self) -> String {
        format!("cannot be deallocated yet: {}", self.message)
    }
}

/// Whether and when a failed call can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallErrorKind {
    /// Only a change by a user or administrator helps.
    Invalid,
    /// A later retry may succeed.
    Retry,
    /// The driver did not answer in time. The effect of the call is unknown.
    TimedOut,
}

impl CallErrorKind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "Invalid",
            Self::Retry => "Retry",
            Self::TimedOut => "TimedOut",
        }
    }
}

impl From<DriverErrorKind> for CallErrorKind {
    fn from(kind: DriverErrorKind) -> Self {
        match kind {
            DriverErrorKind::Invalid => Self::Invalid,
            DriverErrorKind::Retry => Self::Retry,
        }
    }
}

/// The object that caused an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallErrorSubject {
    /// The resource class with this name.
    Class(String),
    Claim(ObjectKey),
    /// No particular object.
    Call,
}

/// An action for the runtime.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Reads a pod from the API server.
    ReadPod {
        /// Returned with the answer.
        id: CallId,
        key: ObjectKey,
    },
    /// Reads a claim from the API server.
    ReadClaim {
        /// Returned with the answer.
        id: CallId,
        key: ObjectKey,
    },
    /// Changes a claim if it still has this uid.
    WriteClaim {
        /// Returned with the answer.
        id: CallId,
        key: ObjectKey,
        /// The uid that the claim must have.
        uid: String,
        write: ClaimWrite,
    },
    /// Replaces our entries in a context's status. Entries of other drivers stay.
    WriteContext {
        /// Returned with the answer.
        id: CallId,
        key: ObjectKey,
        /// The uid that the context must have.
        uid: String,
        /// All entries of this driver.
        entries: Vec<ResourceClaimSchedulingStatus>,
    },
    CallDriver {
        /// Returned with the answer.
        id: CallId,
        /// The call and its arguments.
        request: DriverRequest,
    },
    /// Notifies the driver, in order with all other commands.
    Observe(Observation),
    /// Waits until the driver is ready, then sends [`Event::DriverReady`].
    AwaitDriver,
    /// Reports a problem to users.
    Report(EventReport),
}

/// A change to a claim.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimWrite {
    /// Add our finalizer, and label the claim with the node of its allocation: a companion watches only the claims with the label of
    /// its node or of any node.
    AddFinalizer {
        /// Value of the label `<driver>/node`.
        node: String,
    },
    /// Set the allocation and the driver name, and reserve the claim for its pod, if the claim is neither allocated nor being deleted: a
    /// late duplicate must not replace reservations that were added since.
    Allocate {
        /// The driver's allocation for the claim.
        allocation: AllocationResult,
        /// The pod to reserve the claim for.
        reserved_for: Option<ResourceClaimConsumerReference>,
        /// The resource version that the claim must still have, if an earlier attempt had an unknown outcome. `None` for the first attempt,
        /// which does not fail on concurrent writes of others.
        version: Option<String>,
    },
    /// Clear the allocation, the driver name and `deallocationRequested`, if they are unchanged.
    ClearAllocation {
        /// The last seen value of `deallocationRequested`.
        deallocation_requested: bool,
        /// The last seen driver name.
        driver_name: Option<String>,
    },
    /// Clear the allocation, the driver name and the only reservation, if the claim still has this version: another claim of the pod could
    /// not be recorded, or another claim holds the same device.
    RollBackAllocation {
        /// The resource version that the claim must still have.
        version: String,
        /// Whether the claim is reserved, for our pod alone.
        reserved: bool,
    },
    /// Remove our finalizer.
    RemoveFinalizer {
        /// The resource version that the claim must still have: otherwise a paused leader could remove the finalizer from a claim that is
        /// in use again. `None` for a claim that is being deleted, which cannot be allocated again.
        version: Option<String>,
    },
}

/// The wire format of a claim write.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimPatch {
    /// A strategic merge patch of the object itself.
    Main(Value),
    /// A JSON patch of its status.
    StatusJson(Value),
}

impl ClaimWrite {
    pub fn patch(&self, uid: &str, driver_name: &str) -> ClaimPatch {
        let finalizer = finalizer_of(driver_name);
        match self {
            // A strategic merge patch adds to and removes from the set of finalizers by value: other finalizers stay, and no index can
            // have moved.
            Self::AddFinalizer { node } => ClaimPatch::Main(json!({ "metadata": {
                "uid": uid,
                "finalizers": [finalizer],
                "labels": { format!("{driver_name}/{NODE_LABEL}"): node },
            } })),
            Self::RemoveFinalizer { version } => {
                let mut metadata = json!({ "uid": uid, "$deleteFromPrimitiveList/finalizers": [finalizer] });
                if let Some(version) = version {
                    metadata["resourceVersion"] = json!(version);
                }
                ClaimPatch::Main(json!({ "metadata": metadata }))
            }
            // An unallocated claim has no reservations, so the replaced list is empty. Concurrent writes of other fields cause no
            // conflict. The API server compares a missing field as null.
            Self::Allocate {
                allocation,
                reserved_for,
                version,
            } => {
                let mut operations = vec![
                    json!({ "op": "test", "path": "/metadata/uid", "value": uid }),
                    json!({ "op": "test", "path": "/metadata/deletionTimestamp", "value": null }),
                    json!({ "op": "test", "path": "/status/allocation", "value": null }),
                ];
                if let Some(version) = version {
                    operations
                        .push(json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }));
                }
                operations.push(json!({ "op": "add", "path": "/status/allocation", "value": allocation }));
                operations.push(json!({ "op": "add", "path": "/status/driverName", "value": driver_name }));
                if let Some(consumer) = reserved_for {
                    operations
                        .push(json!({ "op": "add", "path": "/status/reservedFor", "value": [consumer] }));
                }
                ClaimPatch::StatusJson(Value::Array(operations))
            }
            Self::ClearAllocation {
                deallocation_requested,
                driver_name,
            } => {
                let mut operations = vec![json!({ "op": "test", "path": "/metadata/uid", "value": uid })];
                if *deallocation_requested {
                    operations.push(
                        json!({ "op": "test", "path": "/status/deallocationRequested", "value": true }),
                    );
                    operations.push(json!({ "op": "remove", "path": "/status/deallocationRequested" }));
                }
                if let Some(name) = driver_name {
                    operations.push(json!({ "op": "test", "path": "/status/driverName", "value": name }));
                    operations.push(json!({ "op": "remove", "path": "/status/driverName" }));
                }
                operations.push(json!({ "op": "remove", "path": "/status/allocation" }));
                ClaimPatch::StatusJson(Value::Array(operations))
            }
            Self::RollBackAllocation { version, reserved } => {
                let mut operations = vec![
                    json!({ "op": "test", "path": "/metadata/uid", "value": uid }),
                    json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }),
                ];
                if *reserved {
                    operations.push(json!({ "op": "remove", "path": "/status/reservedFor" }));
                }
                operations.push(json!({ "op": "remove", "path": "/status/driverName" }));
                operations.push(json!({ "op": "remove", "path": "/status/allocation" }));
                ClaimPatch::StatusJson(Value::Array(operations))
            }
        }
    }

    /// The outcome if the server has answered with an error.
    pub fn rejected<T>(&self, status: &Status) -> Outcome<T> {
        let is_conditional = matches!(
            self,
            Self::Allocate { .. } | Self::ClearAllocation { .. } | Self::RollBackAllocation { .. }
        );
        if is_conditional {
            Outcome::rejected_patch(status)
        } else {
            Outcome::rejected(status)
        }
    }
}

/// Whether a JSON patch was rejected because one of its `test` operations failed, or because a removed field does not exist. The server
/// answers 422, as for an invalid object, but without a kind and without causes (`applyJSPatch` in apiserver's `patch.go`). A webhook
/// that denies a request chooses the code and sets neither; the server prefixes its message (`ToStatusErr` in apiserver's
/// `statuserror.go`).
fn is_failed_test(status: &Status) -> bool {
    let names_nothing = |details: &StatusDetails| details.kind.is_empty() && details.causes.is_empty();
    status.code == 422
        && !status.message.starts_with("admission webhook ")
        && status.details.as_ref().is_none_or(names_nothing)
}

/// The configuration to apply to the status of a context: our entries.
pub fn context_patch(key: &ObjectKey, uid: &str, entries: &[ResourceClaimSchedulingStatus]) -> Value {
    // An empty list is written too: the scheduler waits for the entry, not for its contents.
    let entries: Vec<Value> = entries
        .iter()
        .map(|entry| json!({ "name": entry.name, "unsuitableNodes": entry.unsuitable_nodes }))
        .collect();
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "PodSchedulingContext",
        "metadata": { "name": key.name, "namespace": key.namespace, "uid": uid },
        "status": { "resourceClaims": entries },
    })
}

/// A call of the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum DriverRequest {
    /// Calls [`crate::driver::Driver::unsuitable_nodes`].
    UnsuitableNodes {
        pod: Arc<Pod>,
        /// The pod's claims that this driver has yet to allocate.
        claims: Vec<ClaimToAllocate>,
        nodes: Vec<String>,
    },
    /// Calls [`crate::driver::Driver::allocate`].
    Allocate {
        /// The claims to allocate together.
        claims: Vec<ClaimToAllocate>,
        /// The selected node; `None` for any node.
        node: Option<String>,
    },
    /// Calls [`crate::driver::Driver::deallocate`].
    Deallocate {
        claim: Arc<ResourceClaim>,
        /// The allocation, whether or not the claim records it.
        allocation: Option<AllocationResult>,
    },
}

impl DriverRequest {
    /// The namespace of the pod, or of the first claim.
    pub(crate) fn namespace(&self) -> &str {
        let metadata = match self {
            Self::UnsuitableNodes { pod, .. } => Some(&pod.metadata),
            Self::Allocate { claims, .. } => claims.first().map(|first| &first.claim.metadata),
            Self::Deallocate { claim, .. } => Some(&claim.metadata),
        };
        let namespace = metadata.and_then(|metadata| metadata.namespace.as_deref());
        namespace.unwrap_or_default()
    }
}

/// A claim to evaluate or allocate, with its class.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimToAllocate {
    /// The name in `pod.spec.resourceClaims`; empty for an immediate claim.
    pub pod_claim_name: String,
    /// The claim as last seen.
    pub claim: Arc<ResourceClaim>,
    pub class: Arc<ResourceClass>,
}

/// Maximum length of a message in bytes: that of a note (`events.k8s.io/v1`). Drivers and webhooks decide on the texts, which are stored,
/// queued and logged.
pub(crate) const MESSAGE_MAX: usize = 1024;

/// A message for users, written as an Event on the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventReport {
    /// The object that the Event is attached to.
    pub regarding: Regarding,
    /// CamelCase reason from a small fixed set.
    pub reason: &'static str,
    /// The problem and its fix, in at most [`MESSAGE_MAX`] bytes.
    pub message: String,
}

/// The object that a report is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Regarding {
    /// A pod that uses claims of this driver.
    Pod {
        key: ObjectKey,
        uid: String,
    },
    /// A claim of this driver.
    Claim {
        key: ObjectKey,
        uid: String,
    },
    Class {
        name: String,
        uid: String,
    },
}

/// Whether `new` is a later version of an object than `known`. Resource versions are compared as numbers, as in client-go's caches.
pub(super) fn is_newer(known: Option<&str>, new: Option<&str>) -> bool {
    let number = |version: Option<&str>| version.and_then(|text| text.parse::<u64>().ok());
    match (number(known), number(new)) {
        (Some(known), Some(new)) => new > known,
        _ => known != new,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "7d0a";

    fn patch(write: &ClaimWrite) -> ClaimPatch {
        write.patch(UID, "drayman.dev")
    }

    #[test]
    fn finalizers_are_patched_by_value_on_the_object_with_this_uid() {
        assert_eq!(
            patch(&ClaimWrite::AddFinalizer {
                node: "node-a".to_owned()
            }),
            ClaimPatch::Main(json!({ "metadata": {
                "uid": UID,
                "finalizers": ["drayman.dev/deletion-protection"],
                "labels": { "drayman.dev/node": "node-a" },
            } }))
        );
        assert_eq!(
            patch(&ClaimWrite::RemoveFinalizer { version: None }),
            ClaimPatch::Main(json!({
                "metadata": { "uid": UID, "$deleteFromPrimitiveList/finalizers": ["drayman.dev/deletion-protection"] }
            }))
        );
        let seen = Some("12".to_owned());
        assert_eq!(
            patch(&ClaimWrite::RemoveFinalizer { version: seen }),
            ClaimPatch::Main(json!({ "metadata": {
                "uid": UID,
                "$deleteFromPrimitiveList/finalizers": ["drayman.dev/deletion-protection"],
                "resourceVersion": "12",
            } }))
        );
    }

    #[test]
    fn an_allocation_goes_only_into_an_unallocated_claim() {
        for version in [None, Some("7")] {
            let write = ClaimWrite::Allocate {
                allocation: AllocationResult::default(),
                reserved_for: Some(ResourceClaimConsumerReference::pod("pod", "11")),
                version: version.map(str::to_owned),
            };
            let consumer = json!({ "resource": "pods", "name": "pod", "uid": "11" });
            let mut operations = vec![
                json!({ "op": "test", "path": "/metadata/uid", "value": UID }),
                json!({ "op": "test", "path": "/metadata/deletionTimestamp", "value": null }),
                json!({ "op": "test", "path": "/status/allocation", "value": null }),
                json!({ "op": "add", "path": "/status/allocation", "value": {} }),
                json!({ "op": "add", "path": "/status/driverName", "value": "drayman.dev" }),
                json!({ "op": "add", "path": "/status/reservedFor", "value": [consumer] }),
            ];
            if let Some(version) = version {
                let test = json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version });
                operations.insert(3, test);
            }
            assert_eq!(patch(&write), ClaimPatch::StatusJson(Value::Array(operations)));
        }
    }

    #[test]
    fn clearing_tests_each_field_before_it_removes_it() {
        let write = ClaimWrite::ClearAllocation {
            deallocation_requested: true,
            driver_name: Some("drayman.dev".to_owned()),
        };
        let ClaimPatch::StatusJson(Value::Array(operations)) = patch(&write) else {
            panic!("not a JSON patch")
        };
        let paths: Vec<(&str, &str)> = operations
            .iter()
            .map(|operation| {
                (
                    operation["op"].as_str().unwrap(),
                    operation["path"].as_str().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            paths,
            [
                ("test", "/metadata/uid"),
                ("test", "/status/deallocationRequested"),
                ("remove", "/status/deallocationRequested"),
                ("test", "/status/driverName"),
                ("remove", "/status/driverName"),
                ("remove", "/status/allocation"),
            ]
        );
    }

    #[test]
    fn a_rollback_removes_the_reservation_at_the_seen_version() {
        let write = ClaimWrite::RollBackAllocation {
            version: "7".to_owned(),
            reserved: true,
        };
        assert_eq!(
            patch(&write),
            ClaimPatch::StatusJson(json!([
                { "op": "test", "path": "/metadata/uid", "value": UID },
                { "op": "test", "path": "/metadata/resourceVersion", "value": "7" },
                { "op": "remove", "path": "/status/reservedFor" },
                { "op": "remove", "path": "/status/driverName" },
                { "op": "remove", "path": "/status/allocation" },
            ]))
        );
    }

    #[test]
    fn only_a_failed_patch_test_is_a_conflict() {
        let status = |details: Value| -> Status {
            serde_json::from_value(
                json!({ "status": "Failure", "code": 422, "reason": "Invalid", "details": details }),
            )
            .unwrap()
        };
        let rollback = ClaimWrite::RollBackAllocation {
            version: "7".to_owned(),
            reserved: true,
        };
        let is_conflict = |write: &ClaimWrite, status| match write.rejected::<()>(&status) {
            Outcome::Conflict(_) => true,
            Outcome::Refused(_) => false,
            other => panic!("{other:?}"),
        };
        assert!(is_conflict(&rollback, status(json!({}))));
        // A merge patch tests nothing.
        let unconditional = ClaimWrite::RemoveFinalizer { version: None };
        assert!(!is_conflict(&unconditional, status(json!({}))));
        let causes = json!([{ "reason": "FieldValueInvalid", "field": "status.allocation" }]);
        let details = json!({ "name": "c", "group": GROUP, "kind": "ResourceClaim", "causes": causes });
        assert!(!is_conflict(&rollback, status(details)));
        // A webhook may deny with any code.
        let denied = Status {
            message: "admission webhook \"policy.example.com\" denied the request: not today".to_owned(),
            ..status(Value::Null)
        };
        assert!(!is_conflict(&rollback, denied));
    }

    #[test]
    fn a_write_that_a_busy_server_rejects_is_not_stored() {
        let status = |code| Status {
            code,
            ..Status::default()
        };
        let (busy, failed) = (status(429), status(503));
        for write in [
            ClaimWrite::AddFinalizer {
                node: "node-a".to_owned(),
            },
            ClaimWrite::Allocate {
                allocation: AllocationResult::default(),
                reserved_for: None,
                version: None,
            },
            ClaimWrite::ClearAllocation {
                deallocation_requested: true,
                driver_name: None,
            },
            ClaimWrite::RollBackAllocation {
                version: "7".to_owned(),
                reserved: true,
            },
            ClaimWrite::RemoveFinalizer { version: None },
        ] {
            let rejected = write.rejected::<()>(&busy);
            assert!(matches!(rejected, Outcome::Busy(_)), "{write:?}");
            let unclear = write.rejected::<()>(&failed);
            assert!(matches!(unclear, Outcome::Unknown(_)), "{write:?}");
        }
        assert!(matches!(Outcome::<()>::rejected(&busy), Outcome::Busy(_)));
    }

    #[test]
    fn an_entry_without_unsuitable_nodes_is_still_written() {
        let entry = ResourceClaimSchedulingStatus {
            name: "device".to_owned(),
            unsuitable_nodes: vec![],
        };
        let patch = context_patch(&ObjectKey::new("default", "pod"), UID, &[entry]);
        assert_eq!(
            (&patch["metadata"]["uid"], &patch["status"]),
            (
                &json!(UID),
                &json!({ "resourceClaims": [{ "name": "device", "unsuitableNodes": [] }] })
            )
        );
    }
}
