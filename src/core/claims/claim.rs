//! One claim: what is known of it, and what is to be done with it by itself.

mod release;
mod repair;

use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{AllocationMode, AllocationResult, ResourceClaim};
use crate::driver::Holding;

use super::batch::BatchId;
use super::event::{Moment, ObjectKey, Regarding};
use super::retry::Retry;
use super::world::{Work, World};

/// How long a pod's own claim that is to be deallocated waits for its deletion, which the claim controller sends right after when
/// the pod has ended. The removal of the finalizer is then the only write.
const DELETION_GRACE: Duration = Duration::from_millis(250);

/// For how long after its sender has given it up a write usually may still be stored. Whatever undoes it waits as long. A write that is
/// stored still later does no harm, unless it is an allocation: it adds our finalizer or a label to a claim, or it is refused because
/// the claim is not the one that was seen.
const SETTLING: Duration = Duration::from_secs(3);

/// For how long after its sender has given it up an allocation may still be stored. The API server gives up a request after a minute
/// (`--request-timeout`) whether its sender waits or not. The sender gives it up a request timeout (5 s) after it was sent, and that
/// much remains for its way.
const ALLOCATION_SETTLING: Duration = Duration::from_secs(60);

/// What is under way for a claim. At most one thing at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ClaimStage {
    /// Nothing.
    #[default]
    Resting,
    /// It is being allocated.
    InBatch(BatchId),
    /// The driver gives back what it holds.
    Deallocating,
    /// Its status is being cleared.
    Clearing,
    /// Our finalizer is being removed.
    RemovingFinalizer,
    /// It is found out whether what it should not hold can be taken back, or it is being taken back.
    Repairing,
    /// A write had no clear answer: the claim is to be read before anything else.
    ToRead,
    /// It is being read.
    Reading,
}

/// Allocations that may still be stored although nobody waits for them any more.
#[derive(Clone, Debug, Default)]
struct LateAllocations {
    /// Until when one may be that was sent without a version.
    unversioned: Moment,
    /// The version that the last one needs, and until when it may be stored. Earlier ones need an earlier version.
    versioned: Option<(String, Moment)>,
}

impl LateAllocations {
    /// Until when one of them may be stored in the claim as it is now. The server stores none in a claim that is being deleted or
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

/// A claim.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one object")]
pub(super) struct ClaimState {
    /// As last seen: by the watch or as the answer of our own write, whichever is later.
    pub(super) object: Arc<ResourceClaim>,
    /// What is under way.
    pub(super) stage: ClaimStage,
    /// The driver is being asked for which nodes it is unsuitable. Of two pods that share it one waits for the other.
    pub(super) judged_now: bool,
    /// Whether the driver has been told of it.
    pub(super) observed: bool,
    /// Failures in a row.
    pub(super) retry: Retry,
    /// When it was first seen to be asked back.
    release_seen: Option<Moment>,
    /// The driver has given back what the claim held, and the finalizer is to go as soon as the allocation is cleared. Kept
    /// over failures, since a claim that is merely deallocated no longer asks for anything.
    pub(super) finalizer_to_go: bool,
    /// The last report, so that it is not repeated.
    pub(super) reported: Option<String>,
    /// For an immediate claim that only a change can help: the world's epoch when it was refused.
    pub(super) refused_at: Option<u64>,
    /// The server has refused to record its allocation: of a pod's claims it is the first to be recorded next time.
    pub(super) allocation_refused: bool,
    /// It holds what another claim has the better right to.
    misallocated: Option<repair::Misallocated>,
    /// What was taken from it, until the driver knows.
    given_up: Option<Box<AllocationResult>>,
    /// An earlier process may have been killed between allocating and writing it down: whatever the driver holds is given back
    /// before anything else.
    uncertain: bool,
    /// The server has told us that it no longer exists; the watch will. Nothing is done with it any more.
    gone: bool,
    /// Until when a write without a clear answer may still be stored.
    settled_at: Moment,
    /// The allocations without a clear answer, if there are any.
    late: Option<Box<LateAllocations>>,
    /// Why the server refused the release, until it is known that the claim still exists.
    refusal: Option<String>,
    has_finalizer: bool,
    is_ours: bool,
}

impl ClaimState {
    pub(super) fn new(object: Arc<ResourceClaim>) -> Self {
        Self {
            object,
            stage: ClaimStage::Resting,
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

    /// Takes the newer object; the answer is what the driver is to be told, if it concerns the driver.
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
        // Whoever renames the driver of an allocation does not take it from us.
        let is_held = status.allocation_of(driver).is_some();
        self.is_ours = is_held && (self.has_finalizer || status.driver_name.as_deref() == Some(driver));
        if was_ours && !self.is_ours {
            self.misallocated = None;
        }
        // What is to be done now is not what has failed.
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

    /// What the driver is told of it at the start.
    pub(super) fn observe_first(&mut self) -> Option<Holding> {
        self.uncertain = self.has_finalizer && !self.is_ours;
        self.observed.then(|| Holding::of(&self.object))
    }

    pub(super) fn is_deleting(&self) -> bool {
        self.gone || self.object.metadata.deletion_timestamp.is_some()
    }

    /// A write had no clear answer.
    pub(super) fn unsettle(&mut self, now: Moment) {
        self.settled_at = now.after(SETTLING);
    }

    /// The write of an allocation, which needs this version, had no clear answer.
    pub(super) fn unsettle_allocation(&mut self, version: Option<String>, now: Moment) {
        let until = now.after(ALLOCATION_SETTLING);
        let late = self.late.get_or_insert_default();
        match version {
            Some(version) => late.versioned = Some((version, until)),
            None => late.unversioned = until,
        }
    }

    /// It is about to be allocated: whatever was wrong with what it held is over.
    pub(super) fn forget_problems(&mut self) {
        self.misallocated = None;
    }

    /// Its allocation may vanish by a write of ours that nobody waits for any more: then the driver gives back what it holds.
    pub(super) fn mistrust(&mut self) {
        self.uncertain = true;
    }

    /// The driver holds nothing for it but what it records.
    pub(super) fn trust(&mut self) {
        self.uncertain = false;
    }

    /// Whether the driver may hold something for it that it does not record: that is given back before it is allocated again.
    pub(super) fn must_be_given_back(&self) -> bool {
        self.uncertain && !self.is_ours
    }

    /// What a write without a clear answer was to do is done.
    pub(super) fn settle(&mut self) {
        self.settled_at = Moment::default();
        self.late = None;
    }

    /// When no write can come late any more, if that is not now.
    pub(super) fn unsettled_until(&self, now: Moment) -> Option<Moment> {
        let late = self.late.as_ref().map(|late| late.until(&self.object));
        let until = late.map_or(self.settled_at, |late| self.settled_at.max(late));
        (until > now).then_some(until)
    }

    /// Whether the server has told us that it no longer exists.
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

    /// Whether it records an allocation that is ours to give back: in our name; or with our finalizer and a resource handle of ours,
    /// under whatever name.
    pub(super) fn is_ours(&self) -> bool {
        self.is_ours
    }

    /// The allocation, if it is ours.
    fn own_allocation(&self) -> Option<AllocationResult> {
        self.object.status.allocation.clone().filter(|_| self.is_ours)
    }

    fn has_other_finalizers(&self) -> bool {
        let count = self.object.metadata.finalizers.as_ref().map_or(0, Vec::len);
        count > usize::from(self.has_finalizer)
    }
}

impl World {
    /// Whether a claim is of a class of ours that this controller allocates.
    pub(super) fn is_own_class(&self, class_name: &str) -> bool {
        self.classes.get(class_name).is_some_and(|class| {
            class.driver_name == self.settings.driver_name && class.structured_parameters != Some(true)
        })
    }

    /// Whether a context might be about this claim.
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

    /// Reports something about a claim, unless it was the last thing reported. The answer is whether it was new.
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

    /// Reports something about a class.
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

    /// Looks at one claim by itself: release it, or allocate it if it is immediate.
    pub(super) fn step_claim(&mut self, key: &ObjectKey, now: Moment) {
        let Some(claim) = self.claims.get(key) else { return };
        if claim.gone || claim.judged_now || !matches!(claim.stage, ClaimStage::Resting | ClaimStage::ToRead)
        {
            return;
        }
        if let Some(moment) = claim.retry.wait_until(now) {
            self.wake_at(moment, Work::Claim(key.clone()));
        } else if claim.stage == ClaimStage::ToRead {
            self.read_released(key);
        } else if let Some(moment) = claim.unsettled_until(now) {
            self.wake_at(moment, Work::Claim(key.clone()));
        } else if claim.must_be_given_back() {
            self.deallocate(key);
        } else if claim.misallocated.is_some() && claim.is_ours && !claim.is_asked_back() {
            self.repair(key);
        } else if !claim.object.status.reserved_for.is_empty() {
            // In use: nothing is taken from under a pod.
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
        if self.is_own_class(&class_name) && claim.refused_at != Some(self.epoch) {
            self.start_batch(None, None, &[(String::new(), key.clone())]);
        }
    }
}
