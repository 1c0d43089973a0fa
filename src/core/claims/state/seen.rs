//! Applies objects from watches and our own writes, and queues the affected work.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{PodSchedulingContext, ResourceClaim, ResourceClass, pod_owner_of};
use crate::core::claims::claim::{ClaimPhase, ClaimState};
use crate::core::claims::event::{Command, Moment, ObjectKey, Regarding};
use crate::core::claims::resolve::is_generated;
use crate::driver::Observation;

use super::{ControllerState, Work, newer};

/// How long a generated claim is expected to be used by its owner pod. After that, the other pods of the namespace are read, each once,
/// because one of them may name it.
const LEFT_TO_ITS_POD: Duration = Duration::from_secs(10);

impl ControllerState {
    pub(super) fn see_all_classes(&mut self, classes: Vec<Arc<ResourceClass>>) {
        let names: BTreeSet<String> = classes
            .iter()
            .filter_map(|class| class.metadata.name.clone())
            .collect();
        let gone: Vec<String> = self
            .classes
            .keys()
            .filter(|name| !names.contains(*name))
            .cloned()
            .collect();
        for name in gone {
            self.class_gone(&name);
        }
        for class in classes {
            self.see_class(class);
        }
        if !self.barrier.classes {
            self.barrier.classes = true;
            self.pass_barrier();
        }
    }

    pub(super) fn see_class(&mut self, class: Arc<ResourceClass>) {
        let Some(name) = class.metadata.name.clone() else {
            return;
        };
        let known = self.classes.get(&name);
        if known == Some(&class) {
            return;
        }
        let same_driver = known.is_some_and(|known| known.driver_name == class.driver_name);
        let ours = &self.settings.driver_name;
        if !same_driver && class.driver_name != *ours && class.driver_name.eq_ignore_ascii_case(ours) {
            let message = format!(
                "driverName \"{}\" is in upper case, with which the API server refuses the finalizer of a claim: write \"{ours}\"",
                class.driver_name
            );
            let regarding = Regarding::Class {
                name: name.clone(),
                uid: class.metadata.uid.clone().unwrap_or_default(),
            };
            self.report(regarding, "DriverNameNotLowerCase", message);
        }
        self.classes.insert(name.clone(), class);
        self.class_changed(&name);
    }

    pub(super) fn class_gone(&mut self, name: &str) {
        if self.classes.remove(name).is_some() {
            self.class_changed(name);
        }
    }

    pub(super) fn class_changed(&mut self, name: &str) {
        let keys: Vec<ObjectKey> = self
            .claims
            .iter()
            .filter(|(_, claim)| claim.object.spec.resource_class_name == name)
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            if let Some(claim) = self.claims.get_mut(&key) {
                claim.refused_at = None;
                claim.retry.succeeded();
            }
            for context in self.users.get(&key).into_iter().flatten() {
                if let Some(context) = self.contexts.get_mut(context) {
                    context.reset_backoff();
                }
            }
            self.reconsider_claim(&key);
        }
    }

    pub(super) fn see_all_claims(&mut self, claims: Vec<Arc<ResourceClaim>>, now: Moment) {
        let keys: BTreeSet<ObjectKey> = claims
            .iter()
            .map(|claim| ObjectKey::of(&claim.metadata))
            .collect();
        let gone: Vec<(ObjectKey, String)> = self
            .claims
            .iter()
            .filter(|(key, _)| !keys.contains(*key))
            .map(|(key, claim)| (key.clone(), claim.uid().to_owned()))
            .collect();
        for (key, uid) in gone {
            self.claim_gone(&key, &uid);
        }
        for claim in claims {
            self.see_claim(claim, now);
        }
        if !self.barrier.claims {
            self.barrier.claims = true;
            self.pass_barrier();
        }
    }

    /// Applies the object returned by our own write, unless the watch has meanwhile reported the claim as deleted.
    pub(in crate::core::claims) fn see_written_claim(&mut self, claim: Arc<ResourceClaim>, now: Moment) {
        let key = ObjectKey::of(&claim.metadata);
        if self
            .claims
            .get(&key)
            .is_some_and(|known| Some(known.uid()) == claim.metadata.uid.as_deref())
        {
            self.see_claim(claim, now);
        }
    }

    pub(super) fn see_claim(&mut self, object: Arc<ResourceClaim>, now: Moment) {
        let key = ObjectKey::of(&object.metadata);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if let Some(known) = self.claims.get(&key) {
            let known_uid = known.uid().to_owned();
            if known_uid != uid {
                self.claim_gone(&key, &known_uid);
            } else if known.is_gone()
                || !newer(
                    known.object.metadata.resource_version.as_deref(),
                    object.metadata.resource_version.as_deref(),
                )
            {
                return;
            }
        }
        self.see_owner(&key, &object);
        let (driver, finalizer) = (self.settings.driver_name.clone(), self.finalizer.clone());
        let listed = self.barrier.listed();
        let is_new = !self.claims.contains_key(&key);
        let state = self
            .claims
            .entry(key.clone())
            .or_insert_with(|| Box::new(ClaimState::new(object.clone())));
        if let Some(holding) = state.see(object, &driver, &finalizer, now)
            && listed
        {
            self.commands
                .push(Command::Observe(Observation::Changed(holding)));
        }
        self.reconsider_claim(&key);
        if is_new && self.candidates.contains(&key) {
            self.read_pod_early(&key);
        }
    }

    pub(super) fn claim_gone(&mut self, key: &ObjectKey, uid: &str) {
        if self.claims.get(key).is_none_or(|claim| claim.uid() != uid) {
            return;
        }
        let Some(claim) = self.claims.remove(key) else {
            return;
        };
        if let Some(owner) = pod_owner_of(&claim.object.metadata) {
            self.leave_owner(&owner.uid, key);
        }
        self.forget_candidate(key);
        if claim.observed && self.barrier.listed() {
            self.commands
                .push(Command::Observe(Observation::Gone { uid: uid.to_owned() }));
        }
        self.touch_users(key);
        if let ClaimPhase::InBatch(id) = claim.stage {
            self.work_queue.insert(Work::Transaction(id));
        }
    }

    /// Updates the index of claims by owner pod. If the owner changes, another pod may use the claim from now on.
    fn see_owner(&mut self, key: &ObjectKey, object: &ResourceClaim) {
        let uid = |object: &ResourceClaim| pod_owner_of(&object.metadata).map(|owner| owner.uid.clone());
        let before = self.claims.get(key).and_then(|known| uid(&known.object));
        let now = uid(object);
        if before != now && self.claims.contains_key(key) {
            if let Some(before) = before {
                self.leave_owner(&before, key);
            }
            self.forget_candidate(key);
        }
        let Some(now) = now else { return };
        let keys = self.claims_by_owner.entry(now).or_default();
        if let Err(place) = keys.binary_search(key) {
            if keys.is_empty() {
                keys.reserve_exact(1);
            }
            keys.insert(place, key.clone());
        }
    }

    /// Removes a claim from the index of its former owner pod.
    fn leave_owner(&mut self, uid: &str, key: &ObjectKey) {
        let Some(keys) = self.claims_by_owner.get_mut(uid) else {
            return;
        };
        keys.retain(|owned| owned != key);
        if keys.is_empty() {
            self.claims_by_owner.remove(uid);
            self.early_pods.remove(uid);
        }
    }

    /// Lets all pods of the namespace be read for a claim that is still unallocated.
    pub(super) fn open_claim(&mut self, key: &ObjectKey) {
        if self.candidates.contains(key) && self.open_candidates.insert(key.clone()) {
            self.touch_unread_contexts(&key.namespace);
        }
    }

    /// Removes a claim from the indexes of unallocated claims.
    pub(in crate::core::claims) fn forget_candidate(&mut self, key: &ObjectKey) {
        self.candidates.remove(key);
        self.open_candidates.remove(key);
        self.unallocated_immediate.remove(key);
    }

    /// Updates the indexes after a change of a claim or its class, and queues all affected work.
    pub(super) fn reconsider_claim(&mut self, key: &ObjectKey) {
        let Some(claim) = self.claims.get(key) else { return };
        // Claims of other drivers count too: a pod is evaluated only when all its claims exist.
        if let Some(owner) = pod_owner_of(&claim.object.metadata) {
            let context = ObjectKey::new(key.namespace.clone(), owner.name.clone());
            self.work_queue.insert(Work::Context(context));
        }
        let is_generated = is_generated(&claim.object);
        if self.is_candidate(claim) {
            if self.candidates.insert(key.clone()) {
                if is_generated {
                    let end = self.work_queue.now.after(LEFT_TO_ITS_POD);
                    self.wake_at(end, Work::Open(key.clone()));
                } else {
                    self.open_claim(key);
                }
            }
        } else if claim.is_delayed() || claim.is_allocated() {
            self.forget_candidate(key);
        } else {
            self.unallocated_immediate.insert(key.clone());
        }
        self.work_queue.insert(Work::Claim(key.clone()));
        self.touch_users(key);
    }

    /// Queues the contexts whose pods name a claim.
    pub(in crate::core::claims) fn touch_users(&mut self, claim: &ObjectKey) {
        if let Some(contexts) = self.users.get(claim) {
            self.work_queue
                .extend(contexts.iter().cloned().map(Work::Context));
        }
    }

    pub(super) fn see_all_contexts(&mut self, contexts: Vec<Arc<PodSchedulingContext>>) {
        let keys: BTreeSet<ObjectKey> = contexts
            .iter()
            .map(|context| ObjectKey::of(&context.metadata))
            .collect();
        let gone: Vec<(ObjectKey, String)> = self
            .contexts
            .iter()
            .filter(|(key, _)| !keys.contains(*key))
            .map(|(key, context)| (key.clone(), context.uid().to_owned()))
            .collect();
        for (key, uid) in gone {
            self.context_gone(&key, &uid);
        }
        for context in contexts {
            self.see_context(context);
        }
        if !self.barrier.contexts {
            self.barrier.contexts = true;
            self.pass_barrier();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::core::claims::event::Event;
    use crate::core::claims::state::Settings;

    fn claim(version: &str, owner: Option<(&str, &str, &str)>) -> Arc<ResourceClaim> {
        let owner = owner.map(|(api_version, kind, uid)| {
            json!({ "apiVersion": api_version, "kind": kind, "name": "p", "uid": uid, "controller": true })
        });
        let owners: Vec<_> = owner.into_iter().collect();
        let claim = json!({
            "metadata": { "namespace": "n", "name": "p-c", "uid": "c", "resourceVersion": version, "ownerReferences": owners },
            "spec": { "resourceClassName": "class" },
        });
        Arc::new(serde_json::from_value(claim).unwrap())
    }

    #[test]
    fn the_index_of_owners_has_each_claim_once_and_under_the_pod_that_owns_it_now() {
        let mut world = ControllerState::new(Settings::new("d.example"));
        let mut owners = |version: &str, owner| {
            world.apply(Event::Claim(claim(version, owner)), Moment::default());
            world.claims_by_owner.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(owners("1", Some(("v1", "Pod", "first"))), ["first"]);
        assert_eq!(owners("2", Some(("v1", "Pod", "second"))), ["second"]);
        assert_eq!(
            owners("3", Some(("batch/v1", "Job", "job"))),
            Vec::<String>::new()
        );
        assert_eq!(owners("4", Some(("v1", "Pod", "first"))), ["first"]);
        assert_eq!(owners("5", None), Vec::<String>::new());
    }
}
