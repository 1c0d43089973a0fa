//! Resolves the claims of a pod.

use std::collections::BTreeSet;

use crate::api::resource::{
    POD_CLAIM_NAME_ANNOTATION, Pod, PodResourceClaim, PodSchedulingContext, ResourceClaim,
    ResourceClaimSchedulingStatus, controller_of, pod_owner_of,
};

use super::event::ObjectKey;
use super::state::ControllerState;

/// One entry of a pod, resolved to its claim. `C` identifies a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Resolved<C = ObjectKey> {
    /// The pod needs no claim for this entry.
    NotNeeded,
    /// The claim does not exist yet: the claim controller or a user must create it.
    Awaited,
    Claim(C),
    /// A claim with the expected name exists, but another owner has it.
    NotOwned(C),
}

/// Finds the claim of an entry. An entry may name its claim. For an entry with a template, the pod's status (1.28 and later) has the
/// claim's name. If the status was not yet written when the pod was read, or names a claim that has been replaced since, the annotation on
/// the claim decides, or else the name that 1.27 generates.
///
/// `by_name` finds a claim in the pod's namespace, `is_own` tells whether it was made for this pod, and `annotated` finds the pod's claim
/// whose annotation names the entry.
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

/// Whether a claim's annotation (or recorded name) says that it was made for this entry of its pod.
pub(crate) fn is_made_for(claim: &ResourceClaim, entry: &str) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    let annotated = annotations.and_then(|all| all.get(POD_CLAIM_NAME_ANNOTATION));
    annotated.map(String::as_str).or(claim.pod_claim_name.as_deref()) == Some(entry)
}

/// Whether a claim was generated from a template for the pod that owns it: since 1.28 it has an annotation, and before that its name starts
/// with the pod's. Other claims owned by a pod may be used by any pod.
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

impl ControllerState {
    /// Resolves the claims of a pod, by entry.
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

    /// Whether another driver lists the selected node as unsuitable for a claim that it has yet to allocate. An allocation on this node
    /// would be in vain; and up to 1.27 the scheduler selects the same node again after deallocating it.
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

    /// The pod's claim whose annotation names the entry. A claim that is not being deleted takes precedence.
    fn annotated(&self, uid: &str, entry: &str) -> Option<ObjectKey> {
        let made_for = self.claims_by_owner.get(uid).into_iter().flatten();
        let candidates = made_for.filter_map(|key| {
            let claim = self.claims.get(key)?;
            is_made_for(&claim.object, entry).then_some((claim.is_deleting(), key))
        });
        candidates.min().map(|(_, key)| key.clone())
    }
}
