//! Which claims a pod is about.

use std::collections::BTreeSet;

use crate::api::resource::{
    POD_CLAIM_NAME_ANNOTATION, Pod, PodSchedulingContext, ResourceClaimSchedulingStatus, controller_of,
};

use super::event::ObjectKey;
use super::world::World;

/// One entry of a pod, resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Resolved {
    /// The pod needs no claim for it.
    NotNeeded,
    /// The claim is not there yet: the claim controller will make it, or a user must.
    Awaited,
    /// The claim.
    Claim(ObjectKey),
    /// The claim of that name belongs to somebody else.
    NotOwned(ObjectKey),
}

impl World {
    /// Finds the claims that a pod names, by entry.
    pub(super) fn resolve_claims(&self, namespace: &str, pod: &Pod) -> Vec<(String, Resolved)> {
        pod.spec
            .resource_claims
            .iter()
            .map(|entry| {
                let resolved = match (
                    &entry.source.resource_claim_name,
                    &entry.source.resource_claim_template_name,
                ) {
                    (Some(name), _) => {
                        let key = ObjectKey::new(namespace, name.clone());
                        if self.claims.contains_key(&key) {
                            Resolved::Claim(key)
                        } else {
                            Resolved::Awaited
                        }
                    }
                    (None, Some(_)) => self.resolve_generated(namespace, pod, &entry.name),
                    (None, None) => Resolved::Awaited,
                };
                (entry.name.clone(), resolved)
            })
            .collect()
    }

    /// The claim made from a template: by the name in the pod's status (1.28 and later), by what its maker wrote on it if that
    /// status was not there yet when the pod was read or names a claim that has been replaced since, or by the name that 1.27
    /// gives it.
    fn resolve_generated(&self, namespace: &str, pod: &Pod, entry: &str) -> Resolved {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let mut statuses = pod.status.resource_claim_statuses.iter();
        let named = match statuses.find(|status| status.name == entry) {
            Some(status) => match &status.resource_claim_name {
                Some(name) => Some(self.owned(ObjectKey::new(namespace, name.clone()), uid)),
                None => return Resolved::NotNeeded,
            },
            None => None,
        };
        if let Some(Resolved::Claim(key)) = named {
            return Resolved::Claim(key);
        }
        if let Some(key) = self.annotated(uid, entry) {
            return Resolved::Claim(key);
        }
        named.unwrap_or_else(|| {
            let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
            self.owned(ObjectKey::new(namespace, format!("{pod_name}-{entry}")), uid)
        })
    }

    /// Whether another driver says that the selected node does not suit a claim which it has still to allocate. An allocation there
    /// would be in vain; and up to 1.27 the scheduler selects the same node again after it has taken that allocation back.
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

    /// The claim that says of itself that it was made for an entry of a pod; rather one that stays than one that goes.
    fn annotated(&self, uid: &str, entry: &str) -> Option<ObjectKey> {
        let made_for = self.claims_by_owner.get(uid).into_iter().flatten();
        let candidates = made_for.filter_map(|key| {
            let claim = self.claims.get(key)?;
            let annotations = claim.object.metadata.annotations.as_ref()?;
            let is_for = annotations.get(POD_CLAIM_NAME_ANNOTATION)? == entry;
            is_for.then_some((claim.is_deleting(), key))
        });
        candidates.min().map(|(_, key)| key.clone())
    }

    fn owned(&self, key: ObjectKey, uid: &str) -> Resolved {
        match self.claims.get(&key) {
            None => Resolved::Awaited,
            Some(claim) if controller_of(&claim.object.metadata).is_some_and(|owner| owner.uid == uid) => {
                Resolved::Claim(key)
            }
            Some(_) => Resolved::NotOwned(key),
        }
    }
}
