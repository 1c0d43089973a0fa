//! Repairs a claim with a wrong allocation. Either another claim has the better right to the device, for example after a leader was paused
//! past its lease; or its pod cannot use the allocation because its other claims fit nowhere.
//!
//! The allocation is rolled back if no pod can be using it: the claim is reserved for no pod, or for one pod that has no node yet.
//! Otherwise it stays until its pod ends; the node does not prepare it.

use crate::api::resource::{Pod, ResourceClaimConsumerReference, controller_of};
use crate::core::claims::event::{Answer, ClaimWrite, Command, Moment, ObjectKey, Outcome, Regarding};
use crate::core::claims::state::{ControllerState, PendingCall, Work};
use crate::driver::Finding;

use super::{ClaimPhase, ClaimState};

/// A wrong allocation, with the facts about the claim's pod.
#[derive(Clone, Debug, Default)]
pub(super) struct Misallocated {
    /// Uid of a pod that has a node or is gone. Nothing is rolled back while the claim is reserved for this pod.
    kept_for: Option<String>,
    /// The context and its uid, if the only problem is that its pod lacks another claim. The problem ends when the pod has that claim.
    incomplete: Option<(ObjectKey, String)>,
}

impl ClaimState {
    /// Whether the allocation is wrong and no known fact forbids its rollback.
    pub(in crate::core::claims) fn may_be_taken_back(&self) -> bool {
        let Some(known) = self.misallocated.as_ref().filter(|_| self.is_ours) else {
            return false;
        };
        match self.object.status.reserved_for.as_slice() {
            [] => true,
            [user] => is_pod(user) && known.kept_for.as_ref() != Some(&user.uid),
            _ => false,
        }
    }

    /// Marks the allocation for rollback if it serves this pod alone. Returns whether the mark is new.
    pub(in crate::core::claims) fn give_up_for(
        &mut self,
        context: &ObjectKey,
        context_uid: &str,
        pod_uid: &str,
    ) -> bool {
        let is_for_it = match self.object.status.reserved_for.as_slice() {
            [] => controller_of(&self.object.metadata).is_some_and(|owner| owner.uid == pod_uid),
            [user] => is_pod(user) && user.uid == pod_uid,
            _ => false,
        };
        let is_news = self.is_ours
            && self.is_delayed()
            && !self.is_asked_back()
            && is_for_it
            && self.misallocated.is_none();
        if is_news {
            self.misallocated = Some(Misallocated {
                kept_for: None,
                incomplete: Some((context.clone(), context_uid.to_owned())),
            });
        }
        is_news
    }
}

impl ControllerState {
    /// Handles wrong allocations that the driver has found.
    pub(in crate::core::claims) fn found(&mut self, findings: Vec<Finding>) {
        for finding in findings {
            self.found_one(finding);
        }
    }

    /// Reports a finding to the claim's users, and marks the allocation for rollback if it must not stay.
    fn found_one(&mut self, finding: Finding) {
        let key = ObjectKey::new(finding.namespace, finding.name);
        let Some(claim) = self
            .claims
            .get_mut(&key)
            .filter(|claim| claim.uid() == finding.uid)
        else {
            return;
        };
        if finding.take_back {
            claim.misallocated = Some(Misallocated::default());
        }
        let users = claim.object.status.reserved_for.clone();
        if self.report_claim(&key, finding.reason, finding.message.clone()) {
            for user in users.iter().filter(|user| is_pod(user)) {
                let regarding = Regarding::Pod {
                    key: ObjectKey::new(key.namespace.clone(), user.name.clone()),
                    uid: user.uid.clone(),
                };
                self.report(regarding, finding.reason, finding.message.clone());
            }
        }
        self.work_queue.insert(Work::Claim(key));
    }

    /// Rolls back a claim's allocation, or first reads its pod to check whether that is safe.
    pub(super) fn repair(&mut self, key: &ObjectKey) {
        if self.is_complete_after_all(key) {
            return;
        }
        let Some(claim) = self.claims.get(key) else { return };
        if !claim.may_be_taken_back() {
            return;
        }
        match claim.object.status.reserved_for.first() {
            None => self.take_back(key, false),
            Some(user) => {
                let pod = ObjectKey::new(key.namespace.clone(), user.name.clone());
                let uid = claim.uid().to_owned();
                self.set_claim_stage(key, ClaimPhase::Repairing);
                self.send(
                    PendingCall::Release {
                        claim: key.clone(),
                        uid,
                    },
                    |id| Command::ReadPod { id, key: pod },
                );
            }
        }
    }

    /// Whether the mark was set for a pod that no longer lacks a claim, or has moved on. Then the mark is cleared.
    fn is_complete_after_all(&mut self, key: &ObjectKey) -> bool {
        let known = self.claims.get(key).and_then(|claim| claim.misallocated.as_ref());
        let Some((context, uid)) = known.and_then(|known| known.incomplete.as_ref()) else {
            return false;
        };
        if self.pod_lacks_a_claim(context, uid) {
            return false;
        }
        if let Some(claim) = self.claims.get_mut(key) {
            claim.misallocated = None;
        }
        self.work_queue.insert(Work::Claim(key.clone()));
        self.touch_users(key);
        true
    }

    fn take_back(&mut self, key: &ObjectKey, reserved: bool) {
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        let Some(version) = claim.object.metadata.resource_version.clone() else {
            return;
        };
        claim.given_up = claim.own_allocation().map(Box::new);
        // After any outcome of the write: once the claim records no allocation, the driver deallocates.
        claim.mark_uncertain();
        self.write_release(
            key,
            ClaimPhase::Repairing,
            ClaimWrite::UndoAllocation { version, reserved },
        );
    }

    fn set_claim_stage(&mut self, key: &ObjectKey, stage: ClaimPhase) {
        if let Some(claim) = self.claims.get_mut(key) {
            claim.stage = stage;
        }
    }

    /// Handles an answer for a claim that is being repaired.
    pub(super) fn repair_answered(&mut self, key: &ObjectKey, answer: Answer, now: Moment) {
        self.set_claim_stage(key, ClaimPhase::Resting);
        self.work_queue.insert(Work::Claim(key.clone()));
        if matches!(answer, Answer::PodRead(_)) && self.is_complete_after_all(key) {
            return;
        }
        let Some(claim) = self.claims.get_mut(key) else {
            return;
        };
        match answer {
            Answer::PodRead(Ok(pod)) => {
                let [user] = claim.object.status.reserved_for.as_slice() else {
                    return;
                };
                if pod.is_some_and(|pod| may_lose(&pod, user)) {
                    if claim.is_ours && claim.misallocated.is_some() && !claim.is_asked_back() {
                        self.take_back(key, true);
                    }
                } else {
                    let kept_for = Some(user.uid.clone());
                    if let Some(known) = &mut claim.misallocated {
                        known.kept_for = kept_for;
                    }
                    // The pod's other claims no longer wait for this one.
                    self.touch_users(key);
                }
            }
            Answer::ClaimWritten(Outcome::Done(_)) => {
                claim.retry.succeeded();
                self.statistics.deallocations += 1;
            }
            Answer::ClaimWritten(outcome) => {
                claim.stage = ClaimPhase::ToRead;
                match outcome {
                    Outcome::Refused(message) => claim.refusal = Some(message),
                    Outcome::Unknown(_) => claim.mark_write_uncertain(now),
                    Outcome::Done(_) | Outcome::Conflict(_) => {}
                }
            }
            _ => claim.retry.failed(now),
        }
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
