//! State of one claim, and the steps that concern this claim alone.

mod release;
mod repair;

use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{AllocationMode, AllocationResult, ResourceClaim};
use crate::driver::Holding;

use super::event::{Moment, ObjectKey, Regarding};
use super::retry::Retry;
use super::state::{ControllerState, Work};
use super::transaction::TransactionId;

/// How long a pod's own claim with `deallocationRequested` waits for its deletion, which the claim controller sends right after the pod has
/// ended. Removing the finalizer is then the only write.
const DELETION_GRACE: Duration = Duration::from_millis(250);

/// How long a write usually may still be stored after its sender has given it up. A write that undoes it waits as long. A write that is
/// stored even later does no harm unless it is an allocation: it adds our finalizer or a label, or it is refused because the claim has
/// changed.
const SETTLING: Duration = Duration::from_secs(3);

/// How long an allocation may still be stored after its sender has given it up. The API server ends a request after a minute
/// (`--request-timeout`), whether or not its sender still waits. The sender gives up one request timeout (5 s) after sending, which leaves
/// 5 s for the request to arrive.
const ALLOCATION_SETTLING: Duration = Duration::from_secs(60);

/// The operation in progress for a claim; at most one at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ClaimPhase {
    #[default]
    Resting,
    /// Being allocated by this transaction.
    InBatch(TransactionId),
    /// Waiting for the driver to deallocate.
    Deallocating,
    /// Clearing the allocation in the claim's status.
    Clearing,
    RemovingFinalizer,
    /// Rolling back a wrong allocation, or checking whether that is possible.
    Repairing,
    /// The last write was refused or had an unknown outcome: read the claim before anything else.
    ToRead,
    Reading,
}

/// Allocation writes that may still be stored although their senders have given them up.
#[derive(Clone, Debug, Default)]
struct LateAllocations {
    /// Until when a write without a resource version may be stored.
    unversioned: Moment,
    /// The resource version that the latest versioned write requires, and until when it may be stored. Earlier writes require an earlier
    /// version.
    versioned: Option<(String, Moment)>,
}

impl LateAllocations {
    /// Until when one of them may be stored in `claim` as it is now. The server stores no allocation in a claim that is being deleted or
    /// has another version.
    fn until(&self, claim: &ResourceClaim) -> Moment {
        if claim.metadata.deletion_timestamp.is_some() {
            return Moment::default();
        }
        let current = claim.metadata.resource_version.as_ref();
        let versioned = self.versioned.as_ref();
        let possible = versioned.filter(|(version, _)| current == Some(version));
        possible.map_or(self.unversioned, |(_, until)| self.unversioned.max(*until))
    }
}

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one object")]
pub(super) struct ClaimState {
    /// The latest object, from the watch or from the answer to our own write.
    pub(super) object: Arc<ResourceClaim>,
    pub(super) stage: ClaimPhase,
    /// The driver is evaluating nodes for this claim. Another pod that shares the claim waits.
    pub(super) judged_now: bool,
    /// Whether the driver knows the claim.
    pub(super) observed: bool,
    pub(super) retry: Retry,
    /// When a request to release it was first seen.
    release_seen: Option<Moment>,
    /// The driver has deallocated the claim; the finalizer is removed once the allocation is cleared. Kept over failures, because a claim
    /// whose status is cleared no longer requests a release.
    pub(super) finalizer_to_go: bool,
    /// The last reported message, which is not repeated.
    pub(super) reported: Option<String>,
    /// `ControllerState::capacity_generation` when the driver refused an immediate claim as invalid. It is retried when the capacity generation or its class changes.
    pub(super) refused_at: Option<u64>,
    /// The server refused to record its allocation: the next transaction records this claim first.
    pub(super) allocation_refused: bool,
    /// Set if its allocation is wrong and should be rolled back.
    misallocated: Option<repair::Misallocated>,
    /// The allocation that was rolled back, until the driver has deallocated it.
    given_up: Option<Box<AllocationResult>>,
    /// The driver may hold an allocation that the claim does not record, for example after a crash between allocating and recording. The
    /// driver deallocates it before anything else.
    uncertain: bool,
    /// The server has confirmed that the claim no longer exists, before the watch reports it. No further step is taken.
    gone: bool,
    /// Until when a write with an unknown outcome may still be stored.
    settled_at: Moment,
    /// Allocation writes with an unknown outcome, if any.
    late: Option<Box<LateAllocations>>,
    /// Why the server refused the release, until a read shows whether the claim still exists.
    refusal: Option<String>,
    has_finalizer: bool,
    is_ours: bool,
}

impl ClaimState {
    pub(super) fn new(object: Arc<ResourceClaim>) -> Self {
        Self {
            object,
            stage: ClaimPhase::Resting,
            judged_now: false,
            observed: false,
            retry: Retry::default(),
            release_seen: None,
            finalizer_to_go: false,
            reported: None,
            refused_at: None,
            allocation_refused: false,
            misallocated: None,
            given_up: None,
            uncertain: false,
            gone: false,
            settled_at: Moment::default(),
            late: None,
            refusal: None,
            has_finalizer: false,
            is_ours: false,
        }
    }

    pub(super) fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Replaces the object. Returns the observation for the driver if the change concerns the driver.
    pub(super) fn see(
        &mut self,
        object: Arc<ResourceClaim>,
        driver: &str,
        finalizer: &str,
        now: Moment,
    ) -> Option<Holding> {
        let had = (self.has_finalizer, self.is_ours);
        let was_ours = self.is_ours;
        let asked_back = (self.is_asked_back(), self.is_deleting());
        let before = std::mem::replace(&mut self.object, object);
        let status = &self.object.status;
        self.has_finalizer = self
            .object
            .metadata
            .finalizers
            .as_ref()
            .is_some_and(|all| all.iter().any(|name| name == finalizer));
        // A changed `driverName` does not take the allocation from us while our finalizer is set.
        let is_held = status.allocation_of(driver).is_some();
        self.is_ours = is_held && (self.has_finalizer || status.driver_name.as_deref() == Some(driver));
        if was_ours && !self.is_ours {
            self.misallocated = None;
        }
        // The claim now needs another operation, so earlier failures do not delay it.
        if asked_back != (self.is_asked_back(), self.is_deleting()) {
            self.retry.succeeded();
        }
        if self.is_asked_back() {
            self.release_seen.get_or_insert(now);
        } else {
            self.release_seen = None;
        }
        let concerns = self.has_finalizer || is_held;
        if !concerns && !self.observed {
            return None;
        }
        let changed = !self.observed
            || had != (self.has_finalizer, self.is_ours)
            || before.status.allocation != self.object.status.allocation;
        self.observed = concerns;
        changed.then(|| Holding::of(&self.object))
    }

    /// Returns the driver's first observation of the claim at startup, and marks a claim with our finalizer but without our allocation as
    /// uncertain.
    pub(super) fn observe_first(&mut self) -> Option<Holding> {
        self.uncertain = self.has_finalizer && !self.is_ours;
        self.observed.then(|| Holding::of(&self.object))
    }

    pub(super) fn is_deleting(&self) -> bool {
        self.gone || self.object.metadata.deletion_timestamp.is_some()
    }

    /// Records a write with an unknown outcome.
    pub(super) fn mark_write_uncertain(&mut self, now: Moment) {
        self.settled_at = now.after(SETTLING);
    }

    /// Records an allocation write with an unknown outcome. `version` is the resource version that the write requires.
    pub(super) fn unsettle_allocation(&mut self, version: Option<String>, now: Moment) {
        let until = now.after(ALLOCATION_SETTLING);
        let late = self.late.get_or_insert_default();
        match version {
            Some(version) => late.versioned = Some((version, until)),
            None => late.unversioned = until,
        }
    }

    /// Clears the problems of an earlier allocation before a new one.
    pub(super) fn forget_problems(&mut self) {
        self.misallocated = None;
    }

    /// Marks that a late write of ours may clear the allocation. The driver then deallocates.
    pub(super) fn mark_uncertain(&mut self) {
        self.uncertain = true;
    }

    /// Marks that the driver holds nothing for the claim except the recorded allocation.
    pub(super) fn clear_uncertain(&mut self) {
        self.uncertain = false;
    }

    /// Whether the driver may hold an unrecorded allocation, which it deallocates before the claim is allocated again.
    pub(super) fn must_be_given_back(&self) -> bool {
        self.uncertain && !self.is_ours
    }

    /// Forgets the writes with an unknown outcome, because their intended result has been read.
    pub(super) fn settle(&mut self) {
        self.settled_at = Moment::default();
        self.late = None;
    }

    /// Until when a write may still be stored, if later than `now`.
    pub(super) fn unsettled_until(&self, now: Moment) -> Option<Moment> {
        let late = self.late.as_ref().map(|late| late.until(&self.object));
        let until = late.map_or(self.settled_at, |late| self.settled_at.max(late));
        (until > now).then_some(until)
    }

    /// Whether the server has confirmed that the claim no longer exists.
    pub(super) fn is_gone(&self) -> bool {
        self.gone
    }

    pub(super) fn is_asked_back(&self) -> bool {
        self.is_deleting() || self.object.status.deallocation_requested
    }

    pub(super) fn is_allocated(&self) -> bool {
        self.object.status.allocation.is_some()
    }

    pub(super) fn is_delayed(&self) -> bool {
        self.object.spec.allocation_mode.unwrap_or_default() == AllocationMode::WaitForFirstConsumer
    }

    pub(super) fn has_finalizer(&self) -> bool {
        self.has_finalizer
    }

    /// Whether it records an allocation that we must deallocate: one with our driver name, or one with our finalizer and a resource handle
    /// of ours under any driver name.
    pub(super) fn is_ours(&self) -> bool {
        self.is_ours
    }

    fn own_allocation(&self) -> Option<AllocationResult> {
        self.object.status.allocation.clone().filter(|_| self.is_ours)
    }

    fn has_other_finalizers(&self) -> bool {
        let count = self.object.metadata.finalizers.as_ref().map_or(0, Vec::len);
        count > usize::from(self.has_finalizer)
    }
}

impl ControllerState {
    /// Whether this controller allocates claims of the class: it names our driver and does not use structured parameters.
    pub(super) fn is_own_class(&self, class_name: &str) -> bool {
        self.classes.get(class_name).is_some_and(|class| {
            class.driver_name == self.settings.driver_name && class.structured_parameters != Some(true)
        })
    }

    /// Whether a context may need this claim allocated.
    pub(super) fn is_candidate(&self, claim: &ClaimState) -> bool {
        claim.is_delayed()
            && !claim.is_allocated()
            && !claim.is_deleting()
            && self.is_own_class(&claim.object.spec.resource_class_name)
    }

    pub(super) fn claim_regarding(key: &ObjectKey, uid: &str) -> Regarding {
        Regarding::Claim {
            key: key.clone(),
            uid: uid.to_owned(),
        }
    }

    /// Reports a problem of a claim unless it repeats the last report. Returns whether it was reported.
    pub(super) fn report_claim(&mut self, key: &ObjectKey, reason: &'static str, message: String) -> bool {
        let Some(claim) = self.claims.get_mut(key) else {
            return false;
        };
        if claim.reported.as_deref() == Some(&message) {
            return false;
        }
        claim.reported = Some(message.clone());
        let regarding = Self::claim_regarding(key, claim.uid());
        self.report(regarding, reason, message);
        true
    }

    pub(super) fn report_class(&mut self, name: &str, reason: &'static str, message: String) {
        let uid = self
            .classes
            .get(name)
            .and_then(|class| class.metadata.uid.clone());
        let regarding = Regarding::Class {
            name: name.to_owned(),
            uid: uid.unwrap_or_default(),
        };
        self.report(regarding, reason, message);
    }

    /// Takes the next step that concerns one claim alone: repair, release, or immediate allocation.
    pub(super) fn step_claim(&mut self, key: &ObjectKey, now: Moment) {
        let Some(claim) = self.claims.get(key) else { return };
        if claim.gone || claim.judged_now || !matches!(claim.stage, ClaimPhase::Resting | ClaimPhase::ToRead)
        {
            return;
        }
        if let Some(moment) = claim.retry.wait_until(now) {
            self.wake_at(moment, Work::Claim(key.clone()));
        } else if claim.stage == ClaimPhase::ToRead {
            self.read_released(key);
        } else if let Some(moment) = claim.unsettled_until(now) {
            self.wake_at(moment, Work::Claim(key.clone()));
        } else if claim.must_be_given_back() {
            self.deallocate(key);
        } else if claim.misallocated.is_some() && claim.is_ours && !claim.is_asked_back() {
            self.repair(key);
        } else if !claim.object.status.reserved_for.is_empty() {
            // In use: a reserved claim is never deallocated.
        } else if claim.finalizer_to_go && claim.has_finalizer && !claim.is_ours {
            self.remove_finalizer(key);
        } else if claim.is_asked_back() {
            self.release(key, now);
        } else if !claim.is_delayed() && !claim.is_allocated() {
            self.allocate_immediately(key);
        }
    }

    fn allocate_immediately(&mut self, key: &ObjectKey) {
        let Some(claim) = self.claims.get(key) else { return };
        let class_name = claim.object.spec.resource_class_name.clone();
        if !self.classes.contains_key(&class_name) {
            let message = format!(
                "resource class \"{class_name}\" does not exist, so nobody can allocate this claim: create the class, or delete the claim and name another"
            );
            self.report_claim(key, "ResourceClassMissing", message);
            return;
        }
        if self.is_own_class(&class_name) && claim.refused_at != Some(self.capacity_generation) {
            self.start_transaction(None, None, &[(String::new(), key.clone())]);
        }
    }
}
