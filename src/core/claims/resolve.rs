//! Which claims a pod is about.

use std::collections::BTreeSet;

use crate::api::resource::{
    POD_CLAIM_NAME_ANNOTATION, Pod, PodResourceClaim, PodSchedulingContext, ResourceClaim,
    ResourceClaimSchedulingStatus, controller_of, pod_owner_of,
};

use super::event::ObjectKey;
use super::world::World;

/// One entry of a pod, resolved to the claim that it stands for, which is known by a `C`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Resolved<C = ObjectKey> {
    /// The pod needs no claim for it.
    NotNeeded,
    /// The claim is not there yet: the claim controller will make it, or a user must.
    Awaited,
    /// The claim.
    Claim(C),
    /// The claim of that name belongs to somebody else.
    NotOwned(C),
}

/// Finds the claim of an entry: the one that it names; or, if it is made from a template, by the name in the pod's status (1.28
/// and later), by what its maker wrote on it if that status was not there yet when the pod was read or names a claim that has
/// been replaced since, or by the name that 1.27 gives it.
///
/// `by_name` finds a claim of the pod's namespace, `is_own` says whether it was made for this pod, and `annotated` finds the claim
/// of this pod that says of itself that it was made for the entry.
pub(crate) fn resolve<C>(
    pod: &Pod,
    entry: &PodResourceClaim,
    by_name: impl Fn(&str) -> Option<C>,
    is_own: impl Fn(&C) -> bool,
    annotated: impl FnOnce() -> Option<C>,
) -> Resolved<C> {
    if let Some(name) = &entry.source.resource_claim_name {
        return by_name(name).map_or(Resolved::Awaited, Resolved::Claim);
    }
    if entry.source.resource_claim_template_name.is_none() {
        return Resolved::Awaited;
    }
    let generated = |name: &str| match by_name(name) {
        None => Resolved::Awaited,
        Some(claim) if is_own(&claim) => Resolved::Claim(claim),
        Some(claim) => Resolved::NotOwned(claim),
    };
    let mut statuses = pod.status.resource_claim_statuses.iter();
    let named = match statuses.find(|status| status.name == entry.name) {
        Some(status) => match &status.resource_claim_name {
            Some(name) => Some(generated(name)),
            None => return Resolved::NotNeeded,
        },
        None => None,
    };
    match named {
        Some(Resolved::Claim(claim)) => Resolved::Claim(claim),
        named => annotated().map(Resolved::Claim).or(named).unwrap_or_else(|| {
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            generated(&format!("{pod}-{}", entry.name))
        }),
    }
}

/// Whether a claim says of itself that it was made for an entry of its pod.
pub(crate) fn is_made_for(claim: &ResourceClaim, entry: &str) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    let annotated = annotations.and_then(|all| all.get(POD_CLAIM_NAME_ANNOTATION));
    annotated.map(String::as_str).or(claim.pod_claim_name.as_deref()) == Some(entry)
}

/// Whether a claim was made from a template, for the pod that owns it: since 1.28 it says so itself, and before that it had the name of
/// the pod and of an entry. A claim of another sort that a pod owns is there for whoever names it.
pub(super) fn is_generated(claim: &ResourceClaim) -> bool {
    let metadata = &claim.metadata;
    let Some(pod) = pod_owner_of(metadata) else {
        return false;
    };
    let annotations = metadata.annotations.as_ref();
    let name = metadata.name.as_deref().unwrap_or_default();
    annotations.is_some_and(|all| all.contains_key(POD_CLAIM_NAME_ANNOTATION))
        || name
            .strip_prefix(&pod.name)
            .is_some_and(|rest| rest.starts_with('-'))
}

impl World {
    /// Finds the claims that a pod names, by entry.
    pub(super) fn resolve_claims(&self, namespace: &str, pod: &Pod) -> Vec<(String, Resolved)> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let by_name = |name: &str| {
            let key = ObjectKey::new(namespace, name);
            self.claims.contains_key(&key).then_some(key)
        };
        let is_own = |key: &ObjectKey| {
            let owner = self
                .claims
                .get(key)
                .and_then(|claim| controller_of(&claim.object.metadata));
            owner.is_some_and(|owner| owner.uid == uid)
        };
        let resolved = |entry: &PodResourceClaim| {
            let annotated = || self.annotated(uid, &entry.name);
            let resolved = resolve(pod, entry, by_name, is_own, annotated);
            (entry.name.clone(), resolved)
        };
        pod.spec.resource_claims.iter().map(resolved).collect()
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
            is_made_for(&claim.object, entry).then_some((claim.is_deleting(), key))
        });
        candidates.min().map(|(_, key)| key.clone())
    }
}
