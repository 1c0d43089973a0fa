//! Which claims a pod is about.

use crate::api::resource::{POD_CLAIM_NAME_ANNOTATION, Pod, controller_of};

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
    /// status was not there yet when the pod was read, or by the name that 1.27 gives it.
    fn resolve_generated(&self, namespace: &str, pod: &Pod, entry: &str) -> Resolved {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        if let Some(status) = pod
            .status
            .resource_claim_statuses
            .iter()
            .find(|status| status.name == entry)
        {
            let Some(name) = &status.resource_claim_name else {
                return Resolved::NotNeeded;
            };
            return self.owned(ObjectKey::new(namespace, name.clone()), uid);
        }
        let annotated = self.claims_by_owner.get(uid).into_iter().flatten().find(|key| {
            self.claims.get(*key).is_some_and(|claim| {
                let annotations = claim.object.metadata.annotations.as_ref();
                annotations
                    .and_then(|all| all.get(POD_CLAIM_NAME_ANNOTATION))
                    .is_some_and(|name| name == entry)
            })
        });
        if let Some(key) = annotated {
            return Resolved::Claim(key.clone());
        }
        let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
        self.owned(ObjectKey::new(namespace, format!("{pod_name}-{entry}")), uid)
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
