//! Finds the claims of a context's pod that this driver must allocate.

use std::collections::BTreeSet;

use crate::api::resource::Pod;
use crate::core::claims::claim::ClaimPhase;
use crate::core::claims::event::{ClaimToAllocate, Moment, ObjectKey};
use crate::core::claims::resolve::Resolved;
use crate::core::claims::state::{ControllerState, Work};

use super::others::{Other, SILENT_DRIVER_REASON};
use super::{Pending, Standing};

impl ControllerState {
    /// Sorts the pod's claims into pending ones and others, and reports problems.
    pub(super) fn standing(&mut self, key: &ObjectKey, pod: &Pod, now: Moment) -> Standing {
        let resolved = self.resolve_claims(&key.namespace, pod);
        self.note_users(key, pod, &resolved);
        let mut own: Vec<Pending> = Vec::new();
        let mut others: Vec<Other> = Vec::new();
        let mut any_own = false;
        let mut distinct = 0;
        let mut all = 0;
        let mut rest = false;
        let mut problems: Vec<(&'static str, String)> = Vec::new();
        for (pod_claim_name, resolved) in resolved {
            let claim_key = match resolved {
                Resolved::NotNeeded => continue,
                Resolved::Awaited => {
                    rest = true;
                    continue;
                }
                Resolved::NotOwned(claim) => {
                    let message = format!(
                        "ResourceClaim {claim} was not made for this pod although it has the name of its claim \"{pod_claim_name}\": delete it, or rename the pod"
                    );
                    problems.push(("ClaimNotOwned", message));
                    rest = true;
                    continue;
                }
                Resolved::Claim(claim) => claim,
            };
            let Some(claim) = self.claims.get(&claim_key) else {
                continue;
            };
            any_own |= self.is_own_class(&claim.object.spec.resource_class_name);
            // A pod's claims are allocated together, and this one may have to be allocated again.
            if claim.may_be_taken_back() {
                rest = true;
                continue;
            }
            if !claim.is_delayed() || (claim.is_allocated() && !claim.is_asked_back()) {
                continue;
            }
            all += 1;
            let class_name = claim.object.spec.resource_class_name.clone();
            let Some(class) = self.classes.get(&class_name).cloned() else {
                let message = format!(
                    "resource class \"{class_name}\" of claim {claim_key} does not exist: create the class, or let the claim name another"
                );
                problems.push(("ResourceClassMissing", message));
                rest = true;
                continue;
            };
            if !self.is_own_class(&class_name) {
                if class.structured_parameters != Some(true) && !claim.is_asked_back() {
                    others.push(Other {
                        entry: pod_claim_name,
                        class: class_name,
                        driver: class.driver_name.clone(),
                    });
                }
                continue;
            }
            // A pod's claims are allocated together: one that is busy or being released holds up the others.
            let write_uncertain = claim.unsettled_until(now);
            let is_going = claim.is_asked_back() || claim.must_be_given_back();
            if is_going || claim.stage != ClaimPhase::Resting || write_uncertain.is_some() {
                rest = true;
                if let Some(moment) = write_uncertain {
                    self.wake_at(moment, Work::Context(key.clone()));
                }
                continue;
            }
            let to_allocate = ClaimToAllocate {
                pod_claim_name: pod_claim_name.clone(),
                claim: claim.object.clone(),
                class,
            };
            let before = own.iter().find(|pending| pending.key == claim_key);
            let position = before.map_or(distinct, |pending| pending.position);
            distinct = distinct.max(position + 1);
            own.push(Pending {
                pod_claim_name,
                key: claim_key,
                position,
                to_allocate,
            });
        }
        let silent = any_own && self.await_others(key, &others, now);
        let rest = rest || own.is_empty();
        if !problems.is_empty() {
            self.report_problems(key, &problems);
        } else if rest {
            self.set_trouble(key, silent.then_some(SILENT_DRIVER_REASON));
        }
        if rest {
            Standing::Rest
        } else {
            Standing::Pending { own, all }
        }
    }
}

impl ControllerState {
    /// Records the claims that the pod names, whether or not they exist.
    fn note_users(&mut self, key: &ObjectKey, pod: &Pod, resolved: &[(String, Resolved)]) {
        for (_, resolved) in resolved {
            if let Resolved::Claim(claim) | Resolved::NotOwned(claim) = resolved {
                self.note_user(key, claim.clone());
            }
        }
        for entry in &pod.spec.resource_claims {
            if let Some(name) = &entry.source.resource_claim_name {
                let claim = ObjectKey::new(key.namespace.clone(), name.clone());
                self.note_user(key, claim);
            }
        }
    }

    /// Sends one report for all problems, because only the last report is remembered.
    fn report_problems(&mut self, key: &ObjectKey, problems: &[(&'static str, String)]) {
        let Some((reason, _)) = problems.first() else {
            return;
        };
        let messages: Vec<&str> = problems.iter().map(|(_, message)| message.as_str()).collect();
        self.report_pod(key, reason, messages.join("; "));
    }
}

/// Each claim once, by position.
pub(super) fn distinct(own: &[Pending]) -> Vec<&Pending> {
    let mut known = BTreeSet::new();
    own.iter().filter(|claim| known.insert(claim.position)).collect()
}
