//! Releases the claims of a pod that has some of its claims and can get the others on no node.
//!
//! A pod's claims are allocated together, but may not stay together: a controller is killed between two status writes, a claim is deleted
//! and recreated, or the scheduler requests the deallocation of one claim while another is being recorded. The pod's allocations are then
//! rolled back. Otherwise they would be held in vain, and two such pods could wait for each other forever. The scheduler does not do this:
//! it requests the deallocation only of claims that are in its way on a node, and skips a node for which another claim is unsuitable
//! (`Filter` in its `dynamicresources.go`).

use crate::api::resource::Pod;
use crate::core::claims::claim::ClaimPhase;
use crate::core::claims::event::ObjectKey;
use crate::core::claims::resolve::Resolved;
use crate::core::claims::state::{ControllerState, Work};

impl ControllerState {
    /// Marks a pod's allocations for rollback because its other claims fit nowhere. Returns whether any was marked.
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
                && claim.stage == ClaimPhase::Resting
                && claim.give_up_for(key, &uid, pod_uid)
            {
                any = true;
                self.work_queue.insert(Work::Claim(name));
            }
        }
        if any {
            // The pod takes no step until its claims can be evaluated together.
            self.work_queue.insert(Work::Context(key.clone()));
        }
        any
    }

    /// Whether a context's pod has no node and lacks a claim of ours that no transaction is allocating.
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
            claim.is_some_and(|claim| claim.stage == ClaimPhase::Resting && self.is_candidate(claim))
        })
    }
}
