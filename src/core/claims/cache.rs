//! Claims and classes as last seen, and how a pod's claims are found among them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::api::resource::{
    POD_CLAIM_NAME_ANNOTATION, Pod, PodResourceClaim, PodSchedulingContext, ResourceClaim,
    ResourceClaimSchedulingStatus, ResourceClass, controller_of, pod_owner_of,
};

use super::claim::{Claim, Claims, ClassOwner};
use super::event::{ObjectKey, Settings};

/// Indexes of claims, by key.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Claims by the uid of their owner pod, sorted. Nearly always one per pod, so a set, with room for eleven, would waste memory.
    by_owner: BTreeMap<String, Vec<ObjectKey>>,
    /// Claims that a context may need: ours, delayed, not allocated.
    candidates: BTreeSet<ObjectKey>,
    /// Candidates that any pod of their namespace may name: not generated for one pod, or not used by that pod in time.
    open_candidates: BTreeSet<ObjectKey>,
    /// Immediate claims that are not allocated.
    immediate: BTreeSet<ObjectKey>,
    /// The contexts whose pods name a claim.
    users: BTreeMap<ObjectKey, BTreeSet<ObjectKey>>,
}

impl Index {
    pub(super) fn add_owner(&mut self, uid: String, key: &ObjectKey) {
        let keys = self.by_owner.entry(uid).or_default();
        if let Err(position) = keys.binary_search(key) {
            if keys.is_empty() {
                keys.reserve_exact(1);
            }
            keys.insert(position, key.clone());
        }
    }

    /// Returns whether the pod owned the claim and owns no other.
    pub(super) fn remove_owner(&mut self, uid: &str, key: &ObjectKey) -> bool {
        let Some(keys) = self.by_owner.get_mut(uid) else {
            return false;
        };
        keys.retain(|owned| owned != key);
        let is_last = keys.is_empty();
        if is_last {
            self.by_owner.remove(uid);
        }
        is_last
    }

    #[cfg(test)]
    pub(super) fn owners(&self) -> impl Iterator<Item = &String> {
        self.by_owner.keys()
    }

    fn owned_by(&self, uid: &str) -> &[ObjectKey] {
        self.by_owner.get(uid).map_or(&[], Vec::as_slice)
    }

    /// Returns whether the candidate is new.
    pub(super) fn add_candidate(&mut self, key: &ObjectKey) -> bool {
        self.candidates.insert(key.clone())
    }

    pub(super) fn is_candidate(&self, key: &ObjectKey) -> bool {
        self.candidates.contains(key)
    }

    /// Lets all pods of the namespace use the claim if it is a candidate. Returns whether it was not open before.
    pub(super) fn open_candidate(&mut self, key: &ObjectKey) -> bool {
        self.candidates.contains(key) && self.open_candidates.insert(key.clone())
    }

    pub(super) fn add_immediate(&mut self, key: &ObjectKey) {
        self.immediate.insert(key.clone());
    }

    pub(super) fn immediate(&self) -> Vec<ObjectKey> {
        self.immediate.iter().cloned().collect()
    }

    /// Removes a claim from the indexes of unallocated claims.
    pub(super) fn remove_candidate(&mut self, key: &ObjectKey) {
        self.candidates.remove(key);
        self.open_candidates.remove(key);
        self.immediate.remove(key);
    }

    /// Whether a pod may need a candidate: one that it owns, or an open one of its namespace.
    pub(super) fn may_need_candidate(&self, namespace: &str, pod_uid: &str) -> bool {
        let first = ObjectKey::new(namespace, "");
        let open = self.open_candidates.range(first..).next();
        self.owned_by(pod_uid)
            .iter()
            .any(|claim| self.candidates.contains(claim))
            || open.is_some_and(|claim| claim.namespace == namespace)
    }

    /// Records that a context's pod names a claim.
    pub(super) fn add_user(&mut self, claim: ObjectKey, context: &ObjectKey) {
        self.users.entry(claim).or_default().insert(context.clone());
    }

    pub(super) fn remove_user(&mut self, claim: &ObjectKey, context: &ObjectKey) {
        if let Some(contexts) = self.users.get_mut(claim) {
            contexts.remove(context);
            if contexts.is_empty() {
                self.users.remove(claim);
            }
        }
    }

    /// The contexts whose pods name a claim.
    pub(super) fn users(&self, claim: &ObjectKey) -> impl Iterator<Item = &ObjectKey> {
        self.users.get(claim).into_iter().flatten()
    }
}

/// The claims and classes as last seen, with the settings that tell which of them are ours.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    pub(super) settings: Settings,
    pub(super) classes: BTreeMap<String, Arc<ResourceClass>>,
    pub(super) claims: Claims,
    pub(super) index: Index,
    /// Incremented when capacity may have been freed.
    pub(super) capacity_generation: u64,
}

impl Cache {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            classes: BTreeMap::new(),
            claims: BTreeMap::new(),
            index: Index::default(),
            capacity_generation: 0,
        }
    }

    /// Whether this controller allocates claims of the class: it names our driver and does not use structured parameters.
    pub(super) fn is_own_class(&self, class_name: &str) -> bool {
        self.classes.get(class_name).is_some_and(|class| {
            class.driver_name == self.settings.driver_name && class.structured_parameters != Some(true)
        })
    }

    pub(super) fn class_owner(&self, class_name: &str) -> ClassOwner {
        if !self.classes.contains_key(class_name) {
            ClassOwner::Missing
        } else if self.is_own_class(class_name) {
            ClassOwner::Ours
        } else {
            ClassOwner::Other
        }
    }

    /// Whether a context may need this claim allocated.
    pub(super) fn is_candidate(&self, claim: &Claim) -> bool {
        claim.is_delayed()
            && !claim.is_allocated()
            && !claim.is_deleting()
            && self.is_own_class(claim.class_name())
    }

    /// The claim, if it still has this uid.
    pub(super) fn claim_mut(&mut self, key: &ObjectKey, uid: &str) -> Option<&mut Claim> {
        let claim = self.claims.get_mut(key).filter(|claim| claim.uid() == uid);
        claim.map(|claim| &mut **claim)
    }

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
        let made_for = self.index.owned_by(uid).iter();
        let candidates = made_for.filter_map(|key| {
            let claim = self.claims.get(key)?;
            is_made_for(&claim.object, entry).then_some((claim.is_deleting(), key))
        });
        candidates.min().map(|(_, key)| key.clone())
    }
}

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
