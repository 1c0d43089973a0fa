//! A claim that holds what it should not: what another one has the better right to, as after a leader that was paused past its lease,
//! or what its pod cannot use because it can have the rest of its claims nowhere.
//!
//! It is taken back if no pod can be using it: it is reserved for nobody, or for one pod that has no node yet. Otherwise it stays
//! until its pod ends; the node does not prepare it.

use crate::api::resource::{Pod, ResourceClaimConsumerReference, controller_of};
use crate::core::claims::event::{Answer, ClaimWrite, Command, Moment, ObjectKey, Outcome, Regarding};
use crate::core::claims::world::{Flight, Work, World};
use crate::driver::Finding;

use super::{ClaimStage, ClaimState};

/// What is known of the pod of a claim that should not hold what it holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Misallocated {
    /// The uid of the pod that was found to have a node, or to be gone: nothing can be done as long as it is reserved for that.
    kept_for: Option<String>,
    /// The context, with its uid, whose pod lacks another claim, if that is all that is wrong: it is over when the pod has that.
    incomplete: Option<(ObjectKey, String)>,
}

impl ClaimState {
    /// Whether it holds what it should not, and nothing yet says that it must keep it.
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

    /// Notes that it is to be taken back, if it is allocated for this pod alone. The answer is whether that is news.
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

impl World {
    /// The driver has found something wrong with what claims hold.
    pub(in crate::core::claims) fn found(&mut self, findings: Vec<Finding>) {
        for finding in findings {
            self.found_one(finding);
        }
    }

    /// A claim's users are told, and what must not stay is taken back.
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
        self.dirty.insert(Work::Claim(key));
    }

    /// Takes a claim back, or finds out whether that is right.
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
                self.set_claim_stage(key, ClaimStage::Repairing);
                self.send(
                    Flight::Release {
                        claim: key.clone(),
                        uid,
                    },
                    |id| Command::ReadPod { id, key: pod },
                );
            }
        }
    }

    /// Whether a claim was to be taken back for a pod that no longer lacks another one, or has gone on: then it stays.
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
        self.dirty.insert(Work::Claim(key.clone()));
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
        // Whatever comes of the write: when the claim records nothing any more, the driver gives back.
        claim.mistrust();
        self.write_release(
            key,
            ClaimStage::Repairing,
            ClaimWrite::UndoAllocation { version, reserved },
        );
    }

    fn set_claim_stage(&mut self, key: &ObjectKey, stage: ClaimStage) {
        if let Some(claim) = self.claims.get_mut(key) {
            claim.stage = stage;
        }
    }

    /// An answer for a claim that is being repaired.
    pub(super) fn repair_answered(&mut self, key: &ObjectKey, answer: Answer, now: Moment) {
        self.set_claim_stage(key, ClaimStage::Resting);
        self.dirty.insert(Work::Claim(key.clone()));
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
                    // Its pod's other claims need not wait for it any more.
                    self.touch_users(key);
                }
            }
            Answer::ClaimWritten(Outcome::Done(_)) => {
                claim.retry.succeeded();
                self.statistics.deallocations += 1;
            }
            Answer::ClaimWritten(outcome) => {
                claim.stage = ClaimStage::ToRead;
                match outcome {
                    Outcome::Refused(message) => claim.refusal = Some(message),
                    Outcome::Unknown(_) => claim.unsettle(now),
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

/// Whether this is the pod that the claim is reserved for, and it cannot have begun to use it.
fn may_lose(pod: &Pod, user: &ResourceClaimConsumerReference) -> bool {
    let is_user = pod.metadata.uid.as_deref() == Some(&user.uid);
    let has_begun = !matches!(pod.status.phase.as_deref(), None | Some("Pending"));
    is_user && pod.spec.node_name.is_none() && !has_begun
}
