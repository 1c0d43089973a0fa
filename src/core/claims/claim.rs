//! One claim ([`Claim`]): releases it, rolls back a wrong allocation, and starts the allocation of an immediate claim. And all claims and
//! classes as last seen ([`Cache`]), among which a pod's claims are found.
//!
//! [`Claim::step`] and [`Claim::answered`] return [`ClaimAction`]s, which [`ControllerState`](super::ControllerState) executes in order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{
    AllocationMode, AllocationResult, FINALIZER_SUFFIX, POD_CLAIM_NAME_ANNOTATION, Pod, PodResourceClaim,
    PodSchedulingContext, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimSchedulingStatus,
    ResourceClass, controller_of, pod_owner_of,
};
use crate::driver::Holding;

use super::event::{
    Answer, CallError, CallErrorKind, ClaimWrite, Moment, ObjectKey, Outcome, Settings, TransactionId,
};
use super::queue::{Backoff, CapacityGenerations, SHORTAGE_REPORT_INTERVAL, WRITES_BEFORE_REPORT};

/// How long a pod's own claim with `deallocationRequested` waits for its deletion, which the claim controller sends right after the pod has
/// ended. Removing the finalizer is then the only write.
const DELETION_GRACE: Duration = Duration::from_millis(250);

/// How long a write usually may still be stored after its sender has given it up. A write that reverts it waits as long. A write that is
/// stored even later does no harm unless it is an allocation: it adds our finalizer or a label, is refused because the claim has changed,
/// or clears an allocation whose deallocation is requested again.
const LATE_WRITE: Duration = Duration::from_secs(3);

/// How long an allocation may still be stored after its sender has given it up. The server is asked to give up after 4.5 s (`timeout=`),
/// counted from receipt; a request can be delayed before that. One minute, the server's own limit, is on the safe side.
pub(crate) const LATE_ALLOCATION: Duration = Duration::from_secs(60);

/// Maximum number of claims of a pod. Pods have a few. The work for a pod grows with the square of their number, and the answer to the
/// scheduler has up to 128 nodes for each.
pub(super) const CLAIMS_MAX: usize = 128;

/// Maximum number of claims of one owner among which a pod's claims are found. A pod owns at most one for each of its entries, and earlier
/// ones that are being deleted; but a user can name any owner in a claim.
const OWNED_MAX: usize = 512;

/// The operation in progress for a claim; at most one at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ClaimPhase {
    #[default]
    Idle,
    /// The driver is evaluating nodes for it. Another pod that shares the claim waits.
    Evaluating,
    /// Being allocated by this transaction.
    InTransaction(TransactionId),
    /// Waiting for the driver to deallocate.
    Deallocating,
    /// Clearing the allocation in the claim's status.
    ClearingAllocation,
    RemovingFinalizer,
    /// Reading the pod of a wrong allocation, or rolling the allocation back.
    RollingBack,
    /// The last write was not stored, or its outcome is unknown: read the claim before anything else.
    Unconfirmed {
        /// The server's message, for a report if the claim still exists.
        refusal: Option<String>,
    },
    /// Reading the claim after such a write.
    Reading {
        refusal: Option<String>,
    },
    /// The server has confirmed that the claim no longer exists, before the watch reports it. No further step is taken.
    Gone,
}

/// Devices that the driver may hold for a claim beyond the recorded allocation.
#[derive(Clone, Debug, Default, PartialEq)]
enum Unrecorded {
    #[default]
    Nothing,
    /// Possibly an allocation, for example after a crash between allocating and recording. The driver deallocates it before anything else.
    Possibly(Option<Box<AllocationResult>>),
}

/// A wrong allocation, which should be rolled back. Either another claim has precedence for the device, for example after a leader was
/// paused past its lease; or the pod cannot use the allocation because its other claims fit nowhere.
///
/// The allocation is rolled back if no pod can be using it: the claim is reserved for no pod, or for one pod that has no node yet.
/// Otherwise it stays until its pod ends; the node does not prepare it.
#[derive(Clone, Debug, Default)]
struct WrongAllocation {
    /// Uid of a pod that has a node or is gone. Nothing is rolled back while the claim is reserved for this pod.
    kept_for: Option<String>,
    /// The context and its uid, if the only problem is that its pod lacks another claim. The problem ends when the pod has that
    /// claim, or another pod has reserved this one.
    incomplete_pod: Option<(ObjectKey, String)>,
}

/// Writes that may still be stored although their senders have given them up.
#[derive(Clone, Debug, Default)]
struct LateWrites {
    /// Until when a write other than an allocation may be stored.
    other: Moment,
    allocations: Option<Box<LateAllocations>>,
}

#[derive(Clone, Debug, Default)]
struct LateAllocations {
    /// Until when a write without a resource version may be stored.
    unversioned: Moment,
    /// The resource version that the latest versioned write requires, and until when it may be stored. Earlier writes require an earlier
    /// version.
    versioned: Option<(String, Moment)>,
}

impl LateWrites {
    /// Until when one of them may be stored in `claim` as it is now. The server stores no allocation in a claim that is being deleted or
    /// has another version.
    fn until(&self, claim: &ResourceClaim) -> Moment {
        let Some(late) = &self.allocations else {
            return self.other;
        };
        if claim.metadata.deletion_timestamp.is_some() {
            return self.other;
        }
        let current = claim.metadata.resource_version.as_ref();
        let versioned = late.versioned.as_ref();
        let possible = versioned.filter(|(version, _)| current == Some(version));
        let until = possible.map_or(late.unversioned, |(_, until)| late.unversioned.max(*until));
        self.other.max(until)
    }
}

/// Our marks in the claim as last seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Marks {
    /// Our finalizer.
    finalizer: bool,
    /// An allocation that we must deallocate: one with our driver name, or one with our finalizer and a resource handle of ours under any
    /// driver name.
    allocation: bool,
}

/// All known claims. Boxed, because a tree that is filled in ascending order, as by a list, is half empty: its entries should be small.
pub(super) type ClaimMap = BTreeMap<ObjectKey, Box<Claim>>;

#[derive(Clone, Debug)]
pub(super) struct Claim {
    /// The latest object, from the watch or from the answer to our own write.
    pub(super) object: Arc<ResourceClaim>,
    pub(super) phase: ClaimPhase,
    pub(super) backoff: Backoff,
    /// The last reported message, which is not repeated.
    pub(super) reported: Option<String>,
    /// When a retryable error ([`CallErrorKind::Retry`]) was last reported, by reason.
    retries_reported: BTreeMap<&'static str, Moment>,
    /// The capacity generation in which the driver refused an immediate claim as invalid. It is retried when the generation or its class
    /// changes.
    pub(super) invalid_at: Option<u64>,
    /// The server refused to record its allocation: the next transaction records this claim first.
    pub(super) allocation_refused: bool,
    /// Whether the driver knows the claim.
    observed: bool,
    /// When a request to release it was first seen.
    release_seen: Option<Moment>,
    /// The driver has deallocated the claim; the finalizer is removed once the allocation is cleared. Kept over failures, because a claim
    /// whose status is cleared no longer requests a release.
    deallocated: bool,
    /// Only while the claim records an allocation of ours.
    wrong: Option<WrongAllocation>,
    unrecorded: Unrecorded,
    late_writes: LateWrites,
    marks: Marks,
}

/// The input of a step, apart from the claim itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClaimInput {
    pub(super) class: ClassOwner,
    pub(super) capacity_generation: u64,
    /// Whether the pod of [`Claim::incomplete_pod`] still lacks a claim, and no other pod has reserved this one.
    pub(super) pod_lacks_a_claim: bool,
}

/// The component that allocates the claims of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClassOwner {
    Missing,
    Other,
    Ours,
}

/// What happens next for a claim.
#[derive(Debug)]
pub(super) enum ClaimAction {
    /// Step again.
    Step,
    StepAt(Moment),
    /// Step the contexts whose pods name the claim.
    StepUsers,
    Read,
    ReadPod(ObjectKey),
    Write(ClaimWrite),
    Deallocate {
        claim: Arc<ResourceClaim>,
        allocation: Option<AllocationResult>,
    },
    /// Start a transaction for this immediate claim.
    Allocate,
    Report(&'static str, String),
    /// Report on the claim and, unless that repeats the last report, on its class.
    ReportWithClass {
        class: String,
        reason: &'static str,
        message: String,
    },
    /// The claim no longer exists.
    Vanished,
    CountDeallocation,
}

impl Claim {
    pub(super) fn new(object: Arc<ResourceClaim>) -> Self {
        Self {
            object,
            phase: ClaimPhase::Idle,
            backoff: Backoff::default(),
            reported: None,
            retries_reported: BTreeMap::new(),
            invalid_at: None,
            allocation_refused: false,
            observed: false,
            release_seen: None,
            deallocated: false,
            wrong: None,
            unrecorded: Unrecorded::Nothing,
            late_writes: LateWrites::default(),
            marks: Marks::default(),
        }
    }

    // === the object ===

    pub(super) fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }

    pub(super) fn class_name(&self) -> &str {
        &self.object.spec.resource_class_name
    }

    /// Replaces the object. Returns the observation for the driver if the change concerns the driver.
    pub(super) fn see(&mut self, object: Arc<ResourceClaim>, driver: &str, now: Moment) -> Option<Holding> {
        let had = self.marks;
        let release_requested = (self.is_release_requested(), self.is_deleting());
        let before = std::mem::replace(&mut self.object, object);
        let (metadata, status) = (&self.object.metadata, &self.object.status);
        let mut finalizers = metadata.finalizers.iter().flatten();
        let has_finalizer = finalizers.any(|name| name.strip_suffix(FINALIZER_SUFFIX) == Some(driver));
        // A changed `driverName` does not take the allocation from us while our finalizer is set.
        let is_held = status.allocation_of(driver).is_some();
        self.marks = Marks {
            finalizer: has_finalizer,
            allocation: is_held && (has_finalizer || status.driver_name.as_deref() == Some(driver)),
        };
        if had.allocation && !self.marks.allocation {
            self.wrong = None;
        }
        // The claim now needs another operation, so earlier failures do not delay it.
        if release_requested != (self.is_release_requested(), self.is_deleting()) {
            self.backoff.succeeded();
        }
        if self.is_release_requested() {
            self.release_seen.get_or_insert(now);
        } else {
            self.release_seen = None;
        }
        let concerns = has_finalizer || is_held;
        if !concerns && !self.observed {
            return None;
        }
        let changed =
            !self.observed || had != self.marks || before.status.allocation != self.object.status.allocation;
        self.observed = concerns;
        changed.then(|| self.holding())
    }

    /// Returns the driver's first observation of the claim at startup. A claim with our finalizer but without our allocation may hold
    /// devices that an earlier process did not record.
    pub(super) fn observe_first(&mut self) -> Option<Holding> {
        if self.has_finalizer() && !self.is_ours() {
            self.mark_uncertain();
        }
        self.observed.then(|| self.holding())
    }

    fn holding(&self) -> Holding {
        Holding::new(self.object.clone())
    }

    pub(super) fn is_observed(&self) -> bool {
        self.observed
    }

    pub(super) fn is_gone(&self) -> bool {
        self.phase == ClaimPhase::Gone
    }

    pub(super) fn is_deleting(&self) -> bool {
        self.is_gone() || self.object.metadata.deletion_timestamp.is_some()
    }

    /// Whether its deletion or deallocation is requested.
    pub(super) fn is_release_requested(&self) -> bool {
        self.is_deleting() || self.object.status.deallocation_requested
    }

    pub(super) fn is_allocated(&self) -> bool {
        self.object.status.allocation.is_some()
    }

    pub(super) fn is_delayed(&self) -> bool {
        self.object.spec.allocation_mode.unwrap_or_default() == AllocationMode::WaitForFirstConsumer
    }

    pub(super) fn has_finalizer(&self) -> bool {
        self.marks.finalizer
    }

    /// Whether it records an allocation that we must deallocate.
    pub(super) fn is_ours(&self) -> bool {
        self.marks.allocation
    }

    /// Whether it has no operation in progress, apart from an evaluation.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.phase, ClaimPhase::Idle | ClaimPhase::Evaluating)
    }

    fn own_allocation(&self) -> Option<AllocationResult> {
        self.object.status.allocation.clone().filter(|_| self.is_ours())
    }

    fn has_other_finalizers(&self) -> bool {
        let count = self.object.metadata.finalizers.as_ref().map_or(0, Vec::len);
        count > usize::from(self.has_finalizer())
    }

    // === transactions ===

    /// The transaction that allocates it.
    pub(super) fn transaction(&self) -> Option<TransactionId> {
        match self.phase {
            ClaimPhase::InTransaction(id) => Some(id),
            _ => None,
        }
    }

    pub(super) fn join_transaction(&mut self, id: TransactionId) {
        self.phase = ClaimPhase::InTransaction(id);
        self.deallocated = false;
        self.wrong = None;
    }

    pub(super) fn leave_transaction(&mut self) {
        if !self.is_gone() {
            self.phase = ClaimPhase::Idle;
        }
    }

    /// Records a write with an unknown outcome.
    pub(super) fn mark_write_uncertain(&mut self, now: Moment) {
        self.late_writes.other = now.after(LATE_WRITE);
    }

    /// Records an allocation write with an unknown outcome. `version` is the resource version that the write requires.
    pub(super) fn mark_allocation_uncertain(&mut self, version: Option<String>, now: Moment) {
        let until = now.after(LATE_ALLOCATION);
        let late = self.late_writes.allocations.get_or_insert_default();
        match version {
            Some(version) => late.versioned = Some((version, until)),
            None => late.unversioned = until,
        }
    }

    /// Forgets the writes with an unknown outcome, because their intended result has been read.
    pub(super) fn clear_late_writes(&mut self) {
        self.late_writes = LateWrites::default();
    }

    /// Until when a write may still be stored, if later than `now`.
    pub(super) fn late_write_until(&self, now: Moment) -> Option<Moment> {
        let until = self.late_writes.until(&self.object);
        (until > now).then_some(until)
    }

    /// Marks that the driver may hold an allocation that the claim does not record.
    pub(super) fn mark_uncertain(&mut self) {
        if self.unrecorded == Unrecorded::Nothing {
            self.unrecorded = Unrecorded::Possibly(None);
        }
    }

    /// Marks that the driver holds nothing for the claim except the recorded allocation.
    pub(super) fn clear_uncertain(&mut self) {
        self.unrecorded = Unrecorded::Nothing;
    }

    /// Whether the driver may hold an unrecorded allocation, which it deallocates before the claim is allocated again.
    pub(super) fn must_be_deallocated(&self) -> bool {
        self.unrecorded != Unrecorded::Nothing && !self.is_ours()
    }

    // === reports ===

    /// Whether to report a failed allocation now; notes the time if so. A retryable error is reported at most once per reason and
    /// [`SHORTAGE_REPORT_INTERVAL`].
    pub(super) fn should_report(&mut self, error: &CallError, now: Moment) -> bool {
        if error.kind != CallErrorKind::Retry {
            // After another problem, the same reason is news.
            self.retries_reported.clear();
            return true;
        }
        let reported_at = self.retries_reported.get(error.reason);
        let is_recent = reported_at.is_some_and(|at| at.after(SHORTAGE_REPORT_INTERVAL) > now);
        if is_recent || self.reported.as_ref() == Some(&error.message) {
            return false;
        }
        self.retries_reported.insert(error.reason, now);
        true
    }

    /// Forgets the reports, so that they can be repeated.
    pub(super) fn forget_reports(&mut self) {
        self.reported = None;
        self.retries_reported.clear();
    }

    // === wrong allocations ===

    /// Marks the allocation as wrong: another claim has precedence for its device.
    pub(super) fn mark_wrong(&mut self) {
        self.wrong = self.is_ours().then(WrongAllocation::default);
    }

    /// Whether the allocation serves this pod alone and can be marked with [`Claim::mark_incomplete`].
    pub(super) fn can_be_given_up_for(&self, pod_uid: &str) -> bool {
        let is_for_it = match self.object.status.reserved_for.as_slice() {
            [] => controller_of(&self.object.metadata).is_some_and(|owner| owner.uid == pod_uid),
            [user] => is_pod(user) && user.uid == pod_uid,
            _ => false,
        };
        self.is_ours()
            && self.is_delayed()
            && !self.is_release_requested()
            && is_for_it
            && self.wrong.is_none()
            && self.is_free()
    }

    /// Marks the allocation for rollback because the pod of a context lacks other claims.
    pub(super) fn mark_incomplete(&mut self, context: ObjectKey, context_uid: String) {
        self.wrong = Some(WrongAllocation {
            kept_for: None,
            incomplete_pod: Some((context, context_uid)),
        });
    }

    /// The context of the pod because of which the allocation is marked for rollback, and the context's uid.
    pub(super) fn incomplete_pod(&self) -> Option<&(ObjectKey, String)> {
        self.wrong.as_ref()?.incomplete_pod.as_ref()
    }

    /// Whether the allocation is wrong and no known fact forbids its rollback.
    pub(super) fn may_be_rolled_back(&self) -> bool {
        let Some(wrong) = &self.wrong else {
            return false;
        };
        match self.object.status.reserved_for.as_slice() {
            [] => true,
            [user] => is_pod(user) && wrong.kept_for.as_ref() != Some(&user.uid),
            _ => false,
        }
    }

    /// Whether no user except this pod has reserved it.
    pub(super) fn has_no_other_user(&self, pod_uid: Option<&str>) -> bool {
        let mut users = self.object.status.reserved_for.iter();
        users.all(|user| Some(user.uid.as_str()) == pod_uid)
    }

    /// The pods that it is reserved for, with their uids.
    pub(super) fn user_pods(&self) -> Vec<(String, String)> {
        let users = self.object.status.reserved_for.iter().filter(|user| is_pod(user));
        users.map(|user| (user.name.clone(), user.uid.clone())).collect()
    }

    // === steps ===

    /// Takes the next step that concerns this claim alone: repair, release, or immediate allocation.
    pub(super) fn step(&mut self, input: &ClaimInput, now: Moment) -> Vec<ClaimAction> {
        if !matches!(self.phase, ClaimPhase::Idle | ClaimPhase::Unconfirmed { .. }) {
            return Vec::new();
        }
        if let Some(moment) = self.backoff.wait_until(now) {
            return vec![ClaimAction::StepAt(moment)];
        }
        if let ClaimPhase::Unconfirmed { refusal } = &mut self.phase {
            let refusal = refusal.take();
            self.phase = ClaimPhase::Reading { refusal };
            return vec![ClaimAction::Read];
        }
        if let Some(moment) = self.late_write_until(now) {
            vec![ClaimAction::StepAt(moment)]
        } else if self.must_be_deallocated() {
            self.deallocate()
        } else if self.wrong.is_some() && !self.is_release_requested() {
            self.roll_back(input)
        } else if !self.object.status.reserved_for.is_empty() {
            // In use: a reserved claim is never deallocated.
            Vec::new()
        } else if self.deallocated && self.has_finalizer() && !self.is_ours() {
            self.remove_finalizer()
        } else if self.is_release_requested() {
            self.release(now)
        } else if !self.is_delayed() && !self.is_allocated() {
            self.allocate(input)
        } else {
            Vec::new()
        }
    }

    fn allocate(&mut self, input: &ClaimInput) -> Vec<ClaimAction> {
        match input.class {
            ClassOwner::Missing => {
                self.retries_reported.clear();
                let message = format!(
                    "resource class \"{}\" does not exist, so this claim cannot be allocated: create the class, or recreate the claim with another class",
                    self.class_name()
                );
                vec![ClaimAction::Report("ResourceClassMissing", message)]
            }
            ClassOwner::Ours if self.invalid_at != Some(input.capacity_generation) => {
                vec![ClaimAction::Allocate]
            }
            ClassOwner::Ours | ClassOwner::Other => Vec::new(),
        }
    }

    fn release(&mut self, now: Moment) -> Vec<ClaimAction> {
        // A claim with neither our finalizer nor our allocation is not ours. An allocation of ours without the finalizer is released too:
        // an earlier leader may have recorded it after the finalizer was removed, and no other component would deallocate it.
        if !self.has_finalizer() && !self.is_ours() {
            return Vec::new();
        }
        if !self.is_deleting() && pod_owner_of(&self.object.metadata).is_some() {
            let end = self.release_seen.unwrap_or(now).after(DELETION_GRACE);
            if end > now {
                return vec![ClaimAction::StepAt(end)];
            }
        }
        self.deallocate()
    }

    fn deallocate(&mut self) -> Vec<ClaimAction> {
        self.phase = ClaimPhase::Deallocating;
        let rolled_back = match &self.unrecorded {
            Unrecorded::Possibly(Some(allocation)) => Some((**allocation).clone()),
            Unrecorded::Possibly(None) | Unrecorded::Nothing => None,
        };
        vec![ClaimAction::Deallocate {
            claim: self.object.clone(),
            allocation: self.own_allocation().or(rolled_back),
        }]
    }

    fn write(&mut self, phase: ClaimPhase, write: ClaimWrite) -> Vec<ClaimAction> {
        self.phase = phase;
        vec![ClaimAction::Write(write)]
    }

    fn remove_finalizer(&mut self) -> Vec<ClaimAction> {
        let seen = || self.object.metadata.resource_version.clone();
        let version = if self.is_deleting() { None } else { seen() };
        self.write(
            ClaimPhase::RemovingFinalizer,
            ClaimWrite::RemoveFinalizer { version },
        )
    }

    /// Handles an answer other than the read of this claim.
    pub(super) fn answered(&mut self, answer: Answer, input: &ClaimInput, now: Moment) -> Vec<ClaimAction> {
        match answer {
            Answer::PodRead(pod) => self.pod_read(pod, input, now),
            Answer::Deallocated(Ok(())) => self.driver_deallocated(),
            Answer::Deallocated(Err(error)) => self.deallocation_failed(&error, now),
            // Not if a previous leader has recorded an allocation meanwhile, which a pod may use.
            Answer::ClaimWritten(Outcome::Done(_))
                if self.phase == ClaimPhase::ClearingAllocation
                    && self.has_finalizer()
                    && !self.is_ours() =>
            {
                self.remove_finalizer()
            }
            Answer::ClaimWritten(Outcome::Done(_)) if self.phase == ClaimPhase::RollingBack => {
                self.phase = ClaimPhase::Idle;
                self.backoff.succeeded();
                vec![ClaimAction::Step, ClaimAction::CountDeallocation]
            }
            // Removing the last finalizer deletes the claim, although the answer carries the previous resource version.
            Answer::ClaimWritten(Outcome::Done(object))
                if object.metadata.deletion_timestamp.is_some()
                    && object.metadata.finalizers.as_ref().is_none_or(Vec::is_empty) =>
            {
                vec![ClaimAction::Vanished]
            }
            Answer::ClaimWritten(Outcome::Done(_)) => {
                self.phase = ClaimPhase::Idle;
                self.deallocated = false;
                self.release_seen = None;
                self.forget_reports();
                self.backoff.succeeded();
                vec![ClaimAction::Step, ClaimAction::StepUsers]
            }
            Answer::ClaimWritten(Outcome::Refused(message)) => self.unconfirmed(Some(message)),
            Answer::ClaimWritten(Outcome::Conflict(_)) => self.unconfirmed(None),
            Answer::ClaimWritten(Outcome::Unknown(message)) => {
                self.mark_write_uncertain(now);
                self.not_stored_yet(message)
            }
            Answer::ClaimWritten(Outcome::Busy(message)) => self.not_stored_yet(message),
            Answer::ClaimRead(Err(_)) => {
                self.backoff.failed(now);
                let refusal = self.take_refusal();
                self.unconfirmed(refusal)
            }
            Answer::ClaimRead(Ok(_))
            | Answer::ContextWritten(_)
            | Answer::Evaluated(_)
            | Answer::Allocated(_) => Vec::new(),
        }
    }

    /// Handles a write that may have to be repeated, and reports it if that lasts.
    fn not_stored_yet(&mut self, message: String) -> Vec<ClaimAction> {
        let is_lasting = self.backoff.failures() >= WRITES_BEFORE_REPORT;
        self.unconfirmed(is_lasting.then_some(message))
    }

    fn unconfirmed(&mut self, refusal: Option<String>) -> Vec<ClaimAction> {
        self.phase = ClaimPhase::Unconfirmed { refusal };
        vec![ClaimAction::Step]
    }

    fn take_refusal(&mut self) -> Option<String> {
        match &mut self.phase {
            ClaimPhase::Unconfirmed { refusal } | ClaimPhase::Reading { refusal } => refusal.take(),
            _ => None,
        }
    }

    fn driver_deallocated(&mut self) -> Vec<ClaimAction> {
        self.clear_uncertain();
        // A previous leader may have recorded an allocation meanwhile: a claim in use keeps it.
        if !self.is_release_requested() || !self.object.status.reserved_for.is_empty() {
            self.phase = ClaimPhase::Idle;
            self.backoff.succeeded();
            return vec![ClaimAction::Step, ClaimAction::StepUsers];
        }
        // Each failed write is followed by another driver call, which succeeds: only the last write resets the delays, and only the
        // first call is counted.
        let is_first = self.is_ours() && !self.deallocated;
        self.deallocated = true;
        let foreign = self.is_allocated() && !self.is_ours();
        // Removing the last finalizer deletes the claim and its allocation in one write.
        let mut actions =
            if foreign || !self.is_allocated() || (self.is_deleting() && !self.has_other_finalizers()) {
                self.remove_finalizer()
            } else {
                let write = ClaimWrite::ClearAllocation {
                    deallocation_requested: self.object.status.deallocation_requested,
                    driver_name: self.object.status.driver_name.clone(),
                };
                self.write(ClaimPhase::ClearingAllocation, write)
            };
        actions.extend(is_first.then_some(ClaimAction::CountDeallocation));
        actions
    }

    fn deallocation_failed(&mut self, error: &CallError, now: Moment) -> Vec<ClaimAction> {
        self.phase = ClaimPhase::Idle;
        self.backoff.failed(now);
        let report = ClaimAction::Report(error.reason, error.not_deallocated());
        let mut actions = vec![report, ClaimAction::Step];
        // A previous leader has recorded an allocation meanwhile: its pod may be unable to get its other claims.
        if self.is_allocated() {
            actions.push(ClaimAction::StepUsers);
        }
        actions
    }

    /// Begins to handle a read of this claim. Returns the refusal of the write before it.
    pub(super) fn read(&mut self, now: Moment) -> Option<String> {
        let refusal = self.take_refusal();
        self.phase = ClaimPhase::Idle;
        self.backoff.failed(now);
        refusal
    }

    /// Ends the handling of a read that found the claim, after the object was applied.
    pub(super) fn found(&mut self, refusal: Option<String>) -> Vec<ClaimAction> {
        if !self.has_finalizer() {
            self.clear_late_writes();
        }
        let report = refusal.map(|message| {
            let message = format!("the API server does not store the release: {message}");
            ClaimAction::Report("ReleaseRefused", message)
        });
        let mut actions: Vec<ClaimAction> = report.into_iter().collect();
        // The pod may have waited for this answer alone, even if it changes nothing.
        actions.push(ClaimAction::StepUsers);
        actions
    }

    /// Marks a claim that the server no longer has. It is kept, so that an older watch event is not mistaken for a new claim. Returns whether
    /// the driver knew it.
    pub(super) fn vanish(&mut self) -> bool {
        self.phase = ClaimPhase::Gone;
        std::mem::take(&mut self.observed)
    }

    // === rollback of a wrong allocation ===

    /// Rolls back the allocation, or first reads its pod to check whether that is safe.
    fn roll_back(&mut self, input: &ClaimInput) -> Vec<ClaimAction> {
        if !input.pod_lacks_a_claim {
            return self.allocation_is_right();
        }
        if !self.may_be_rolled_back() {
            return Vec::new();
        }
        match self.object.status.reserved_for.first() {
            None => self.write_rollback(false),
            Some(user) => {
                let namespace = self.object.metadata.namespace.clone().unwrap_or_default();
                let pod = ObjectKey::new(namespace, user.name.clone());
                self.phase = ClaimPhase::RollingBack;
                vec![ClaimAction::ReadPod(pod)]
            }
        }
    }

    /// The pod no longer lacks a claim, or has moved on, or another pod uses the allocation.
    fn allocation_is_right(&mut self) -> Vec<ClaimAction> {
        self.wrong = None;
        vec![ClaimAction::Step, ClaimAction::StepUsers]
    }

    fn write_rollback(&mut self, reserved: bool) -> Vec<ClaimAction> {
        let Some(version) = self.object.metadata.resource_version.clone() else {
            return Vec::new();
        };
        // After any outcome of the write: once the claim records no allocation, the driver deallocates.
        self.unrecorded = Unrecorded::Possibly(self.own_allocation().map(Box::new));
        self.write(
            ClaimPhase::RollingBack,
            ClaimWrite::RollBackAllocation { version, reserved },
        )
    }

    /// Handles the read of the pod that the claim is reserved for.
    fn pod_read(
        &mut self,
        pod: Result<Option<Arc<Pod>>, String>,
        input: &ClaimInput,
        now: Moment,
    ) -> Vec<ClaimAction> {
        self.phase = ClaimPhase::Idle;
        if !input.pod_lacks_a_claim {
            return self.allocation_is_right();
        }
        let mut actions = vec![ClaimAction::Step];
        let Ok(pod) = pod else {
            self.backoff.failed(now);
            return actions;
        };
        let [user] = self.object.status.reserved_for.as_slice() else {
            return actions;
        };
        if pod.is_some_and(|pod| may_lose(&pod, user)) {
            if self.wrong.is_some() && !self.is_release_requested() {
                actions.extend(self.write_rollback(true));
            }
        } else {
            let kept_for = Some(user.uid.clone());
            if let Some(wrong) = &mut self.wrong {
                wrong.kept_for = kept_for;
            }
            // The pod's other claims no longer wait for this one.
            actions.push(ClaimAction::StepUsers);
        }
        actions
    }
}

fn is_pod(user: &ResourceClaimConsumerReference) -> bool {
    user.resource == "pods" && user.api_group.as_deref().is_none_or(str::is_empty)
}

/// Whether `pod` is the user of the claim and cannot have started to use it.
fn may_lose(pod: &Pod, user: &ResourceClaimConsumerReference) -> bool {
    let is_user = pod.metadata.uid.as_deref() == Some(&user.uid);
    let has_begun = !matches!(pod.status.phase.as_deref(), None | Some("Pending"));
    is_user && pod.spec.node_name.is_none() && !has_begun
}

/// Indexes of claims, by key.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Claims by the uid of their owner pod, sorted. Nearly always one per pod, so a set, with room for eleven, would waste memory.
    by_owner: BTreeMap<String, Vec<ObjectKey>>,
    /// Claims that a context may need: ours, delayed, not allocated.
    candidates: BTreeSet<ObjectKey>,
    /// Candidates that any pod of their namespace may name: not generated for one pod, or not used by that pod in time.
    open_candidates: BTreeSet<ObjectKey>,
    /// Immediate claims that are not allocated.
    immediate: BTreeSet<ObjectKey>,
    /// The contexts whose pods name a claim.
    users: BTreeMap<ObjectKey, BTreeSet<ObjectKey>>,
}

impl Index {
    pub(super) fn add_owner(&mut self, uid: String, key: &ObjectKey) {
        let keys = self.by_owner.entry(uid).or_default();
        if let Err(position) = keys.binary_search(key) {
            if keys.is_empty() {
                keys.reserve_exact(1);
            }
            keys.insert(position, key.clone());
        }
    }

    pub(super) fn remove_owner(&mut self, uid: &str, key: &ObjectKey) {
        if let Some(keys) = self.by_owner.get_mut(uid) {
            keys.retain(|owned| owned != key);
            if keys.is_empty() {
                self.by_owner.remove(uid);
            }
        }
    }

    /// The first claims of a pod, at most [`OWNED_MAX`]. Claims of other namespaces that name its uid are not its own.
    fn owned_by(&self, namespace: &str, uid: &str) -> impl Iterator<Item = &ObjectKey> {
        let owned = self.by_owner.get(uid).map(Vec::as_slice).unwrap_or_default();
        let first = owned.partition_point(|key| key.namespace.as_str() < namespace);
        let of_namespace = owned.iter().skip(first);
        of_namespace
            .take_while(move |key| key.namespace == namespace)
            .take(OWNED_MAX)
    }

    /// Returns whether the candidate is new.
    pub(super) fn add_candidate(&mut self, key: &ObjectKey) -> bool {
        self.candidates.insert(key.clone())
    }

    pub(super) fn is_candidate(&self, key: &ObjectKey) -> bool {
        self.candidates.contains(key)
    }

    /// Lets all pods of the namespace use the claim if it is a candidate. Returns whether it was not open before.
    pub(super) fn open_candidate(&mut self, key: &ObjectKey) -> bool {
        self.candidates.contains(key) && self.open_candidates.insert(key.clone())
    }

    pub(super) fn add_immediate(&mut self, key: &ObjectKey) {
        self.immediate.insert(key.clone());
    }

    pub(super) fn immediate(&self) -> Vec<ObjectKey> {
        self.immediate.iter().cloned().collect()
    }

    /// Removes a claim from the indexes of unallocated claims.
    pub(super) fn remove_candidate(&mut self, key: &ObjectKey) {
        self.candidates.remove(key);
        self.open_candidates.remove(key);
        self.immediate.remove(key);
    }

    /// Whether a pod may need a candidate: one that it owns, or an open one of its namespace.
    pub(super) fn may_need_candidate(&self, namespace: &str, pod_uid: &str) -> bool {
        let first = ObjectKey::new(namespace, "");
        let open = self.open_candidates.range(first..).next();
        self.owned_by(namespace, pod_uid)
            .any(|claim| self.candidates.contains(claim))
            || open.is_some_and(|claim| claim.namespace == namespace)
    }

    /// Records that a context's pod names a claim.
    pub(super) fn add_user(&mut self, claim: ObjectKey, context: &ObjectKey) {
        self.users.entry(claim).or_default().insert(context.clone());
    }

    pub(super) fn remove_user(&mut self, claim: &ObjectKey, context: &ObjectKey) {
        if let Some(contexts) = self.users.get_mut(claim) {
            contexts.remove(context);
            if contexts.is_empty() {
                self.users.remove(claim);
            }
        }
    }

    /// The contexts whose pods name a claim.
    pub(super) fn users(&self, claim: &ObjectKey) -> impl Iterator<Item = &ObjectKey> {
        self.users.get(claim).into_iter().flatten()
    }
}

/// The claims and classes as last seen, with the settings that tell which of them are ours.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    pub(super) settings: Settings,
    pub(super) classes: BTreeMap<String, Arc<ResourceClass>>,
    pub(super) claims: ClaimMap,
    pub(super) index: Index,
    pub(super) capacity_generations: CapacityGenerations,
}

impl Cache {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            classes: BTreeMap::new(),
            claims: BTreeMap::new(),
            index: Index::default(),
            capacity_generations: CapacityGenerations::default(),
        }
    }

    /// Whether this controller allocates claims of the class: it names our driver and does not use structured parameters.
    pub(super) fn is_own_class(&self, class_name: &str) -> bool {
        self.classes.get(class_name).is_some_and(|class| {
            class.driver_name == self.settings.driver_name && class.structured_parameters != Some(true)
        })
    }

    pub(super) fn class_owner(&self, class_name: &str) -> ClassOwner {
        if !self.classes.contains_key(class_name) {
            ClassOwner::Missing
        } else if self.is_own_class(class_name) {
            ClassOwner::Ours
        } else {
            ClassOwner::Other
        }
    }

    /// Whether a context may need this claim allocated.
    pub(super) fn is_candidate(&self, claim: &Claim) -> bool {
        claim.is_delayed()
            && !claim.is_allocated()
            && !claim.is_deleting()
            && self.is_own_class(claim.class_name())
    }

    /// The claim, if it still has this uid.
    pub(super) fn claim_mut(&mut self, key: &ObjectKey, uid: &str) -> Option<&mut Claim> {
        let claim = self.claims.get_mut(key).filter(|claim| claim.uid() == uid);
        claim.map(|claim| &mut **claim)
    }

    /// Resolves the first [`CLAIMS_MAX`] claims of a pod, by entry.
    pub(super) fn resolve_claims(&self, namespace: &str, pod: &Pod) -> Vec<(String, Resolved)> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let by_name = |name: &str| {
            let key = ObjectKey::new(namespace, name);
            self.claims.contains_key(&key).then_some(key)
        };
        let is_own = |key: &ObjectKey| {
            let owner = self
                .claims
                .get(key)
                .and_then(|claim| controller_of(&claim.object.metadata));
            owner.is_some_and(|owner| owner.uid == uid)
        };
        let resolved = |entry: &PodResourceClaim| {
            let annotated = || self.annotated(namespace, uid, &entry.name);
            let resolved = resolve(pod, entry, by_name, is_own, annotated);
            (entry.name.clone(), resolved)
        };
        let entries = pod.spec.resource_claims.iter().take(CLAIMS_MAX);
        entries.map(resolved).collect()
    }

    /// Whether another driver lists the selected node as unsuitable for a claim that it has yet to allocate. An allocation on this node
    /// would be in vain; and up to 1.27 the scheduler selects the same node again after deallocating it.
    pub(super) fn is_refused_by_others(
        &self,
        context: &PodSchedulingContext,
        pod: &Pod,
        own: &BTreeSet<&str>,
    ) -> bool {
        let selected = &context.spec.selected_node;
        let refuses = |entry: &&ResourceClaimSchedulingStatus| {
            entry.unsuitable_nodes.contains(selected) && !own.contains(entry.name.as_str())
        };
        let mut refusals = context.status.resource_claims.iter().filter(refuses).peekable();
        if refusals.peek().is_none() {
            return false;
        }
        let namespace = context.metadata.namespace.as_deref().unwrap_or_default();
        let claims = self.resolve_claims(namespace, pod);
        let is_pending = |entry: &str| {
            let is_it = |(name, resolved): &(String, Resolved)| {
                let Resolved::Claim(key) = resolved else {
                    return false;
                };
                name == entry && self.claims.get(key).is_some_and(|claim| !claim.is_allocated())
            };
            claims.iter().any(is_it)
        };
        refusals.any(|entry| is_pending(&entry.name))
    }

    /// The pod's claims whose annotation names the entry, each with whether it is being deleted.
    fn made_for(&self, namespace: &str, uid: &str, entry: &str) -> impl Iterator<Item = (bool, &ObjectKey)> {
        let owned = self.index.owned_by(namespace, uid);
        owned.filter_map(move |key| {
            let claim = self.claims.get(key)?;
            is_made_for(&claim.object, entry).then_some((claim.is_deleting(), key))
        })
    }

    /// Whether an entry has several claims that are not being deleted. kube-controller-manager makes another one if the answer to its first
    /// request is lost, and a user can make any number.
    fn has_several_claims(&self, namespace: &str, uid: &str, entry: &str) -> bool {
        let candidates = self.made_for(namespace, uid, entry);
        let mut live = candidates.filter(|(is_deleting, _)| !is_deleting);
        live.nth(1).is_some()
    }

    /// The pod's claim whose annotation names the entry.
    fn annotated(&self, namespace: &str, uid: &str, entry: &str) -> Option<ObjectKey> {
        unambiguous(self.made_for(namespace, uid, entry)).cloned()
    }

    /// Whether an entry has several claims, and the pod's status does not tell which of them it uses.
    pub(super) fn has_ambiguous_claim(&self, namespace: &str, pod: &Pod) -> bool {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let resolved = self.resolve_claims(namespace, pod);
        let mut entries = pod.spec.resource_claims.iter().zip(resolved);
        entries.any(|(entry, (_, resolved))| {
            let is_open = matches!(resolved, Resolved::Awaited | Resolved::NotOwned(_));
            let has_template = entry.source.resource_claim_name.is_none();
            is_open && has_template && self.has_several_claims(namespace, uid, &entry.name)
        })
    }
}

/// The claim of an entry among those that were made for it, each with whether it is being deleted. One that is not being deleted takes
/// precedence. `None` if several are not being deleted, since only the pod's status tells which of them it uses.
pub(crate) fn unambiguous<C: Ord>(made_for: impl Iterator<Item = (bool, C)>) -> Option<C> {
    let mut made_for: Vec<_> = made_for.collect();
    made_for.sort();
    let is_ambiguous = matches!(made_for.as_slice(), [(false, _), (false, _), ..]);
    let first = made_for.into_iter().next().filter(|_| !is_ambiguous);
    first.map(|(_, claim)| claim)
}

/// One entry of a pod, resolved to its claim. `C` identifies a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolved<C = ObjectKey> {
    /// The pod needs no claim for this entry.
    NotNeeded,
    /// The claim does not exist yet: the claim controller or a user must create it.
    Awaited,
    Claim(C),
    /// A claim with the expected name exists, but another owner has it.
    NotOwned(C),
}

/// Finds the claim of an entry. An entry may name its claim. For an entry with a template, the pod's status (1.28 and later) has the
/// claim's name. If the status was not yet written when the pod was read, or names a claim that has been replaced since, the annotation on
/// the claim decides, or else the name that 1.27 generates.
///
/// `by_name` finds a claim in the pod's namespace, `is_own` tells whether it was made for this pod, and `annotated` finds the pod's claim
/// whose annotation names the entry.
pub(crate) fn resolve<C>(
    pod: &Pod,
    entry: &PodResourceClaim,
    by_name: impl Fn(&str) -> Option<C>,
    is_own: impl Fn(&C) -> bool,
    annotated: impl FnOnce() -> Option<C>,
) -> Resolved<C> {
    if let Some(name) = &entry.source.resource_claim_name {
        return by_name(name).map_or(Resolved::Awaited, Resolved::Claim);
    }
    if entry.source.resource_claim_template_name.is_none() {
        return Resolved::Awaited;
    }
    let generated = |name: &str| match by_name(name) {
        None => Resolved::Awaited,
        Some(claim) if is_own(&claim) => Resolved::Claim(claim),
        Some(claim) => Resolved::NotOwned(claim),
    };
    let mut statuses = pod.status.resource_claim_statuses.iter();
    let named = match statuses.find(|status| status.name == entry.name) {
        Some(status) => match &status.resource_claim_name {
            Some(name) => Some(generated(name)),
            None => return Resolved::NotNeeded,
        },
        None => None,
    };
    match named {
        Some(Resolved::Claim(claim)) => Resolved::Claim(claim),
        named => annotated().map(Resolved::Claim).or(named).unwrap_or_else(|| {
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            generated(&format!("{pod}-{}", entry.name))
        }),
    }
}

/// Whether a claim's annotation (or recorded name) says that it was made for this entry of its pod.
pub(crate) fn is_made_for(claim: &ResourceClaim, entry: &str) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    let annotated = annotations.and_then(|all| all.get(POD_CLAIM_NAME_ANNOTATION));
    annotated.map(String::as_str).or(claim.pod_claim_name.as_deref()) == Some(entry)
}

/// Whether a claim was generated from a template for the pod that owns it: since 1.28 it has an annotation, and before that its name starts
/// with the pod's. Other claims owned by a pod may be used by any pod.
pub(super) fn is_generated(claim: &ResourceClaim) -> bool {
    let metadata = &claim.metadata;
    let Some(pod) = pod_owner_of(metadata) else {
        return false;
    };
    let annotations = metadata.annotations.as_ref();
    let name = metadata.name.as_deref().unwrap_or_default();
    annotations.is_some_and(|all| all.contains_key(POD_CLAIM_NAME_ANNOTATION))
        || name
            .strip_prefix(&pod.name)
            .is_some_and(|rest| rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Index {
        pub(in crate::core::claims) fn owners(&self) -> impl Iterator<Item = &String> {
            self.by_owner.keys()
        }
    }

    #[test]
    fn any_number_of_owned_claims_costs_a_pod_little() {
        let mut index = Index::default();
        for number in 0..2 * OWNED_MAX {
            for namespace in ["m", "n", "o"] {
                let key = ObjectKey::new(namespace, format!("{number:04}"));
                index.add_owner("pod".to_owned(), &key);
            }
            let owned: Vec<_> = index.owned_by("n", "pod").collect();
            assert_eq!(owned.len(), (number + 1).min(OWNED_MAX));
            assert!(owned.iter().all(|key| key.namespace == "n"));
        }
        assert_eq!(index.owned_by("p", "pod").count(), 0);
    }
}
