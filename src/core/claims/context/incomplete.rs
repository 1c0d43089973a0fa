//! A pod that has some of its claims and can have the rest nowhere.
//!
//! All of a pod's claims are allocated together, but not always do they stay together: a controller is killed between two records, a
//! claim is deleted and made again, the scheduler asks one back while another is being recorded. What the pod has is then taken back, or
//! it would be kept for nothing, and two such pods could wait for each other for ever. The scheduler does not see to that: it asks back
//! only what is in its way on a node, and looks no further on a node for which another claim is unsuitable (`Filter` in its
//! `dynamicresources.go`).

use crate::api::resource::Pod;
use crate::core::claims::claim::ClaimStage;
use crate::core::claims::event::ObjectKey;
use crate::core::claims::resolve::Resolved;
use crate::core::claims::world::{Work, World};

impl World {
    /// Begins to take back what a pod has of its claims, since it can have the rest nowhere. The answer is whether there is anything.
    pub(super) fn give_up_the_rest(&mut self, key: &ObjectKey, pod: &Pod) -> bool {
        let uid = self.contexts.get(key).map(|context| context.uid().to_owned());
        let (Some(uid), Some(pod_uid)) = (uid, pod.metadata.uid.as_deref()) else {
            return false;
        };
        if !self.pod_lacks_a_claim(key, &uid) {
            return false;
        }
        let mut any = false;
        for (_, resolved) in self.resolve_claims(&key.namespace, pod) {
            if let Resolved::Claim(name) = resolved
                && let Some(claim) = self.claims.get_mut(&name)
                && claim.stage == ClaimStage::Resting
                && claim.give_up_for(key, &uid, pod_uid)
            {
                any = true;
                self.dirty.insert(Work::Claim(name));
            }
        }
        if any {
            // All its claims rest from now on, until they can be judged together.
            self.dirty.insert(Work::Context(key.clone()));
        }
        any
    }

    /// Whether a context's pod has no node and lacks a claim of ours that nobody is about to allocate.
    pub(in crate::core::claims) fn pod_lacks_a_claim(&self, key: &ObjectKey, uid: &str) -> bool {
        let Some(context) = self
            .contexts
            .get(key)
            .filter(|context| context.uid() == uid && !context.is_deleting() && !context.pod_has_a_node())
        else {
            return false;
        };
        context.named.iter().any(|name| {
            let claim = self.claims.get(name);
            claim.is_some_and(|claim| claim.stage == ClaimStage::Resting && self.is_candidate(claim))
        })
    }
}
