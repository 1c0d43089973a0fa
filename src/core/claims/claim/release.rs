//! Releases a claim: deallocates it, clears its allocation and removes the finalizer.

use crate::api::resource::pod_owner_of;
use crate::core::claims::event::{
    Answer, CallError, ClaimWrite, Command, DriverRequest, Moment, ObjectKey, Outcome,
};
use crate::core::claims::retry::WRITES_BEFORE_REPORT;
use crate::core::claims::state::{ControllerState, PendingCall, Work};
use crate::driver::Observation;

use super::{ClaimPhase, DELETION_GRACE};

impl ControllerState {
    pub(super) fn release(&mut self, key: &ObjectKey, now: Moment) {
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        // A claim with neither our finalizer nor our allocation is not ours. An allocation of ours without the finalizer is released too:
        // an earlier leader may have recorded it after the finalizer was removed, and no other component would deallocate it.
        if !claim.has_finalizer && !claim.is_ours {
            return;
        }
        if !claim.is_deleting() && pod_owner_of(&claim.object.metadata).is_some() {
            let end = claim.release_seen.unwrap_or(now).after(DELETION_GRACE);
            if end > now {
                self.wake_at(end, Work::Claim(key.clone()));
                return;
            }
        }
        self.deallocate(key);
    }

    pub(super) fn deallocate(&mut self, key: &ObjectKey) {
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        claim.stage = ClaimPhase::Deallocating;
        let (object, allocation, uid) = (
            claim.object.clone(),
            claim
                .own_allocation()
                .or_else(|| claim.given_up.as_deref().cloned()),
            claim.uid().to_owned(),
        );
        self.send(
            PendingCall::Release {
                claim: key.clone(),
                uid,
            },
            |id| Command::CallDriver {
                id,
                request: DriverRequest::Deallocate {
                    claim: object,
                    allocation,
                },
            },
        );
    }

    pub(super) fn remove_finalizer(&mut self, key: &ObjectKey) {
        let Some(claim) = self.claims.get(key) else {
            return;
        };
        let seen = || claim.object.metadata.resource_version.clone();
        let version = if claim.is_deleting() { None } else { seen() };
        let write = ClaimWrite::RemoveFinalizer { version };
        self.write_release(key, ClaimPhase::RemovingFinalizer, write);
    }

    pub(super) fn write_release(&mut self, key: &ObjectKey, stage: ClaimPhase, write: ClaimWrite) {
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        claim.stage = stage;
        let uid = claim.uid().to_owned();
        self.send(
            PendingCall::Release {
                claim: key.clone(),
                uid: uid.clone(),
            },
            |id| Command::WriteClaim {
                id,
                key: key.clone(),
                uid,
                write,
            },
        );
    }

    /// Handles an answer for a claim that is being released.
    pub(in crate::core::claims) fn release_answered(
        &mut self,
        key: &ObjectKey,
        uid: &str,
        answer: Answer,
        now: Moment,
    ) {
        let Some(claim) = self.claims.get_mut(key).filter(|claim| claim.uid() == uid) else {
            return;
        };
        if claim.stage == ClaimPhase::Repairing {
            self.repair_answered(key, answer, now);
            return;
        }
        match answer {
            Answer::Deallocated(Ok(())) => {
                claim.uncertain = false;
                claim.given_up = None;
                if !claim.is_asked_back() {
                    claim.stage = ClaimPhase::Resting;
                    claim.retry.succeeded();
                    self.work_queue.insert(Work::Claim(key.clone()));
                    self.touch_users(key);
                    return;
                }
                // Each failed write is followed by another driver call, which succeeds: only the last write resets the delays, and only the
                // first call is counted.
                self.statistics.deallocations += u64::from(claim.is_ours && !claim.finalizer_to_go);
                let foreign = claim.is_allocated() && !claim.is_ours;
                claim.finalizer_to_go = true;
                // Removing the last finalizer deletes the claim and its allocation in one write.
                if foreign || !claim.is_allocated() || (claim.is_deleting() && !claim.has_other_finalizers())
                {
                    self.remove_finalizer(key);
                } else {
                    let write = ClaimWrite::ClearAllocation {
                        deallocation_requested: claim.object.status.deallocation_requested,
                        driver_name: claim.object.status.driver_name.clone(),
                    };
                    self.write_release(key, ClaimPhase::Clearing, write);
                }
            }
            Answer::Deallocated(Err(error)) => self.deallocation_failed(key, &error, now),
            Answer::ClaimWritten(Outcome::Done(_))
                if claim.stage == ClaimPhase::Clearing && claim.has_finalizer =>
            {
                self.remove_finalizer(key);
            }
            // Removing the last finalizer deletes the claim, although the answer carries the previous resource version.
            Answer::ClaimWritten(Outcome::Done(object))
                if object.metadata.deletion_timestamp.is_some()
                    && object.metadata.finalizers.as_ref().is_none_or(Vec::is_empty) =>
            {
                self.claim_vanished(key, uid);
            }
            Answer::ClaimWritten(Outcome::Done(_)) => self.end_release(key),
            Answer::ClaimWritten(Outcome::Refused(message)) => {
                claim.stage = ClaimPhase::ToRead;
                claim.refusal = Some(message);
                self.work_queue.insert(Work::Claim(key.clone()));
            }
            Answer::ClaimWritten(Outcome::Conflict(_)) => {
                claim.stage = ClaimPhase::ToRead;
                self.work_queue.insert(Work::Claim(key.clone()));
            }
            Answer::ClaimWritten(Outcome::Unknown(message)) => {
                claim.stage = ClaimPhase::ToRead;
                claim.mark_write_uncertain(now);
                if claim.retry.failures() >= WRITES_BEFORE_REPORT {
                    claim.refusal = Some(message);
                }
                self.work_queue.insert(Work::Claim(key.clone()));
            }
            Answer::ClaimRead(Ok(object)) => {
                claim.stage = ClaimPhase::Resting;
                claim.retry.failed(now);
                let refusal = claim.refusal.take();
                self.work_queue.insert(Work::Claim(key.clone()));
                match object.filter(|object| object.metadata.uid.as_deref() == Some(uid)) {
                    Some(object) => {
                        self.see_written_claim(object, now);
                        if let Some(claim) = self.claims.get_mut(key)
                            && !claim.has_finalizer
                        {
                            claim.settle();
                        }
                        if let Some(message) = refusal {
                            let message = format!("the server does not store the release: {message}");
                            self.report_claim(key, "ReleaseRefused", message);
                        }
                        // Its pod may have waited for this answer alone, which was no news.
                        self.touch_users(key);
                    }
                    None => self.claim_vanished(key, uid),
                }
            }
            Answer::ClaimRead(Err(_)) => {
                claim.stage = ClaimPhase::ToRead;
                claim.retry.failed(now);
                self.work_queue.insert(Work::Claim(key.clone()));
            }
            Answer::PodRead(_) | Answer::ContextWritten(_) | Answer::Judged(_) | Answer::Allocated(_) => {}
        }
    }

    fn deallocation_failed(&mut self, key: &ObjectKey, error: &CallError, now: Moment) {
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        claim.stage = ClaimPhase::Resting;
        claim.retry.failed(now);
        let is_allocated = claim.is_allocated();
        self.report_claim(
            key,
            error.reason,
            format!("cannot be deallocated yet: {}", error.message),
        );
        self.work_queue.insert(Work::Claim(key.clone()));
        // A former leader has recorded an allocation meanwhile: its pod may be unable to get its other claims.
        if is_allocated {
            self.touch_users(key);
        }
    }

    /// Reads a claim whose last write was not confirmed, before any other step.
    pub(super) fn read_released(&mut self, key: &ObjectKey) {
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        claim.stage = ClaimPhase::Reading;
        let uid = claim.uid().to_owned();
        self.send(
            PendingCall::Release {
                claim: key.clone(),
                uid,
            },
            |id| Command::ReadClaim { id, key: key.clone() },
        );
    }

    /// Marks a claim that the server no longer has. Its state is kept, so that an older watch event is not mistaken for a new claim.
    pub(in crate::core::claims) fn claim_vanished(&mut self, key: &ObjectKey, uid: &str) {
        let Some(claim) = self.claims.get_mut(key).filter(|claim| claim.uid() == uid) else {
            return;
        };
        claim.gone = true;
        if std::mem::take(&mut claim.observed) {
            self.commands
                .push(Command::Observe(Observation::Gone { uid: uid.to_owned() }));
        }
        self.forget_candidate(key);
        self.touch_users(key);
    }

    fn end_release(&mut self, key: &ObjectKey) {
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        claim.stage = ClaimPhase::Resting;
        claim.finalizer_to_go = false;
        claim.release_seen = None;
        claim.reported = None;
        claim.retry.succeeded();
        self.work_queue.insert(Work::Claim(key.clone()));
        self.touch_users(key);
    }
}
