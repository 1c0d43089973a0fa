//! The cluster's other controllers: the claim controller, the garbage collector, kubelets and another driver. Whatever one of
//! them could do now is listed; one thing at a time is picked and done.

use drayman::api::resource::{
    AllocationMode, AllocationResult, POD_CLAIM_NAME_ANNOTATION, Pod, PodResourceClaimStatus,
    PodSchedulingContext, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimSchedulingStatus,
    ResourceClaimStatus, ResourceHandle, controller_of,
};
use drayman::core::claims::ObjectKey;

use crate::driver::{OTHER_DRIVER, OTHER_FINALIZER};
use crate::pods::uid_of_pod;
use crate::stage::{Action, Stage};
use crate::store::Endpoint;

/// Something that one of them could do now.
#[derive(Clone, Debug)]
enum Chore {
    CreateClaim {
        pod: ObjectKey,
        entry: String,
    },
    NameClaim {
        pod: ObjectKey,
        entry: String,
        claim: String,
    },
    TellNode {
        pod: ObjectKey,
    },
    ReserveFor {
        pod: ObjectKey,
        claim: ObjectKey,
    },
    Trim {
        claim: ObjectKey,
        uids: Vec<String>,
    },
    DeleteUnused {
        claim: ObjectKey,
    },
    CollectClaim(ObjectKey),
    CollectContext(ObjectKey),
    StopPod(ObjectKey),
    OtherEntry {
        context: ObjectKey,
        entry: String,
    },
    OtherFinalizer(ObjectKey),
    OtherAllocate {
        claim: ObjectKey,
        pod: ObjectKey,
        uid: String,
    },
    OtherClear(ObjectKey),
    OtherLeave(ObjectKey),
}

fn is_done(pod: &Pod) -> bool {
    pod.status.phase.is_some() || (pod.metadata.deletion_timestamp.is_some() && pod.spec.node_name.is_none())
}

impl Stage {
    pub(crate) fn start_housekeeping(&mut self) {
        if self.housekeeping || self.tidy_at == Some(self.store.version()) {
            return;
        }
        if self.chores().is_empty() {
            self.tidy_at = Some(self.store.version());
        } else {
            self.housekeeping = true;
            let longest = if self.rng.chance(50) {
                30 * self.lag
            } else {
                self.lag
            };
            let delay = self.rng.between(0, longest);
            self.after(delay, Action::Housekeep);
        }
    }

    pub(crate) fn housekeep(&mut self) {
        self.housekeeping = false;
        let chores = self.chores();
        if let Some(chore) = self.rng.pick(&chores) {
            self.note(|| format!("cluster: {chore:?}"));
            self.do_chore(chore);
        }
    }

    fn chores(&self) -> Vec<Chore> {
        let mut chores = Vec::new();
        for (key, pod) in &self.store.pods {
            self.chores_of_pod(key, pod, &mut chores);
        }
        for (key, claim) in &self.store.claims {
            self.chores_of_claim(key, claim, &mut chores);
        }
        for (key, context) in &self.store.contexts {
            self.chores_of_context(key, context, &mut chores);
        }
        chores
    }

    fn chores_of_pod(&self, key: &ObjectKey, pod: &Pod, chores: &mut Vec<Chore>) {
        if pod.metadata.deletion_timestamp.is_some() {
            if self.nodes.is_empty() {
                chores.push(Chore::StopPod(key.clone()));
            }
            return;
        }
        if pod.status.phase.is_some() {
            return;
        }
        for entry in &pod.spec.resource_claims {
            if entry.source.resource_claim_template_name.is_some()
                && self.claim_of_entry(key, &entry.name).is_none()
            {
                let (pod, entry) = (key.clone(), entry.name.clone());
                chores.push(match self.orphan(&pod, &entry) {
                    Some(claim) => Chore::NameClaim { pod, entry, claim },
                    None => Chore::CreateClaim { pod, entry },
                });
            }
        }
        let Some(node) = pod.spec.node_name.as_ref().filter(|_| !self.structured) else {
            return;
        };
        // A user has chosen the node: the claim controller stands in for the scheduler.
        let Some(claims) = self.claims_of(key) else { return };
        let uid = uid_of_pod(pod);
        for (_, claim) in claims {
            let status = &claim.status;
            let reserved = status.reserved_for.iter().any(|consumer| consumer.uid == uid);
            match &status.allocation {
                None if self
                    .store
                    .contexts
                    .get(key)
                    .is_none_or(|context| context.spec.selected_node != *node) =>
                {
                    chores.push(Chore::TellNode { pod: key.clone() });
                }
                Some(allocation)
                    if !reserved
                        && !status.deallocation_requested
                        && (status.reserved_for.is_empty() || allocation.shareable) =>
                {
                    chores.push(Chore::ReserveFor {
                        pod: key.clone(),
                        claim: ObjectKey::of(&claim.metadata),
                    });
                }
                _ => {}
            }
        }
    }

    /// A claim that was made for an entry but is not named in the pod's status yet.
    fn orphan(&self, pod: &ObjectKey, entry: &str) -> Option<String> {
        let uid = self.store.pods.get(pod)?.metadata.uid.clone();
        self.store.claims.values().find_map(|claim| {
            let annotations = claim.metadata.annotations.as_ref()?;
            let of_entry = annotations.get(POD_CLAIM_NAME_ANNOTATION)? == entry;
            let of_pod = Self::owner_of(claim) == uid.as_deref();
            (of_entry && of_pod).then(|| claim.metadata.name.clone())?
        })
    }

    fn chores_of_claim(&self, key: &ObjectKey, claim: &ResourceClaim, chores: &mut Vec<Chore>) {
        let stale: Vec<String> = claim
            .status
            .reserved_for
            .iter()
            .filter(|consumer| {
                let pod = ObjectKey::new(key.namespace.clone(), consumer.name.clone());
                let pod = self.store.pods.get(&pod);
                pod.is_none_or(|pod| uid_of_pod(pod) != consumer.uid || is_done(pod))
            })
            .map(|consumer| consumer.uid.clone())
            .collect();
        if !stale.is_empty() {
            chores.push(Chore::Trim {
                claim: key.clone(),
                uids: stale,
            });
        }
        let going = claim.metadata.deletion_timestamp.is_some();
        if let Some(owner) = controller_of(&claim.metadata)
            && !going
        {
            let pod = self
                .store
                .pods
                .get(&ObjectKey::new(key.namespace.clone(), owner.name.clone()));
            if !self.store.pods.values().any(|pod| uid_of_pod(pod) == owner.uid) {
                chores.push(Chore::CollectClaim(key.clone()));
            } else if claim.status.reserved_for.is_empty() && pod.is_some_and(|pod| is_done(pod)) {
                chores.push(Chore::DeleteUnused { claim: key.clone() });
            }
        }
        let others = claim
            .metadata
            .finalizers
            .iter()
            .flatten()
            .any(|name| name == OTHER_FINALIZER);
        if others && claim.status.reserved_for.is_empty() && (going || claim.status.deallocation_requested) {
            chores.push(if claim.status.driver_name.as_deref() == Some(OTHER_DRIVER) {
                Chore::OtherClear(key.clone())
            } else {
                Chore::OtherLeave(key.clone())
            });
        }
    }

    fn chores_of_context(&self, key: &ObjectKey, context: &PodSchedulingContext, chores: &mut Vec<Chore>) {
        let owner = controller_of(&context.metadata)
            .map(|owner| owner.uid.clone())
            .unwrap_or_default();
        let Some(pod) = self.store.pods.get(key).filter(|pod| uid_of_pod(pod) == owner) else {
            chores.push(Chore::CollectContext(key.clone()));
            return;
        };
        // The other driver is no fool either: the claim controller would take back at once what it gave to such a pod.
        if is_done(pod) {
            return;
        }
        for (entry, claim) in self.claims_of(key).unwrap_or_default() {
            let class = self.store.classes.get(&claim.spec.resource_class_name);
            let delayed = claim.spec.allocation_mode == Some(AllocationMode::WaitForFirstConsumer);
            if class.is_none_or(|class| class.driver_name != OTHER_DRIVER)
                || claim.status.allocation.is_some()
                || !delayed
            {
                continue;
            }
            let finalizers = claim.metadata.finalizers.as_ref();
            if !context.spec.selected_node.is_empty() {
                let claim_key = ObjectKey::of(&claim.metadata);
                chores.push(
                    if finalizers.is_some_and(|all| all.iter().any(|name| name == OTHER_FINALIZER)) {
                        Chore::OtherAllocate {
                            claim: claim_key,
                            pod: key.clone(),
                            uid: uid_of_pod(pod),
                        }
                    } else {
                        Chore::OtherFinalizer(claim_key)
                    },
                );
            } else if !says_nothing_against(context, &entry) {
                chores.push(Chore::OtherEntry {
                    context: key.clone(),
                    entry,
                });
            }
        }
    }

    fn do_chore(&mut self, chore: Chore) {
        let store = &mut self.store;
        match chore {
            Chore::CreateClaim { pod, entry } => {
                let suffix = self.rng.below(100_000);
                self.create_claim_for(&pod, &entry, suffix);
            }
            Chore::NameClaim { pod, entry, claim } => store.update_pod(&pod, |pod| {
                let statuses = &mut pod.status.resource_claim_statuses;
                statuses.retain(|status| status.name != entry);
                statuses.push(PodResourceClaimStatus {
                    name: entry,
                    resource_claim_name: Some(claim),
                });
            }),
            Chore::TellNode { pod } => self.tell_node(&pod),
            Chore::ReserveFor { pod, claim } => {
                let uid = store
                    .pods
                    .get(&pod)
                    .map(|pod| uid_of_pod(pod))
                    .unwrap_or_default();
                let _ = store.update_claim(&claim, None, Endpoint::Status, |claim| {
                    let consumer = ResourceClaimConsumerReference::pod(&pod.name, &uid);
                    claim.status.reserved_for.push(consumer);
                    Ok(())
                });
            }
            Chore::Trim { claim, uids } => {
                let structured = self.structured;
                let _ = store.update_claim(&claim, None, Endpoint::Status, |claim| {
                    let status = &mut claim.status;
                    status
                        .reserved_for
                        .retain(|consumer| !uids.contains(&consumer.uid));
                    let delayed = claim.spec.allocation_mode == Some(AllocationMode::WaitForFirstConsumer);
                    if status.reserved_for.is_empty() && structured {
                        *status = ResourceClaimStatus::default();
                    } else if status.reserved_for.is_empty() && delayed {
                        status.deallocation_requested = true;
                    }
                    Ok(())
                });
            }
            Chore::DeleteUnused { claim } | Chore::CollectClaim(claim) => store.delete_claim(&claim),
            Chore::CollectContext(context) => store.delete_context(&context),
            Chore::StopPod(pod) => store.remove_pod(&pod),
            Chore::OtherEntry { context, entry } => {
                let _ = store.update_context(&context, None, |context| {
                    let entry = ResourceClaimSchedulingStatus {
                        name: entry,
                        unsuitable_nodes: Vec::new(),
                    };
                    let entries = &mut context.status.resource_claims;
                    entries.retain(|known| known.name != entry.name);
                    entries.push(entry);
                });
            }
            Chore::OtherFinalizer(claim) => {
                let _ = store.update_claim(&claim, None, Endpoint::Main, |claim| {
                    let finalizers = claim.metadata.finalizers.get_or_insert_default();
                    finalizers.push(OTHER_FINALIZER.to_owned());
                    Ok(())
                });
            }
            Chore::OtherAllocate { claim, pod, uid } => {
                let _ = store.update_claim(&claim, None, Endpoint::Status, |claim| {
                    claim.status.allocation = Some(AllocationResult {
                        resource_handles: vec![ResourceHandle {
                            driver_name: Some(OTHER_DRIVER.to_owned()),
                            ..ResourceHandle::default()
                        }],
                        ..AllocationResult::default()
                    });
                    claim.status.driver_name = Some(OTHER_DRIVER.to_owned());
                    claim.status.reserved_for = vec![ResourceClaimConsumerReference::pod(&pod.name, &uid)];
                    Ok(())
                });
            }
            Chore::OtherClear(claim) => {
                let _ = store.update_claim(&claim, None, Endpoint::Status, |claim| {
                    claim.status = ResourceClaimStatus::default();
                    Ok(())
                });
                self.do_chore(Chore::OtherLeave(claim));
            }
            Chore::OtherLeave(claim) => {
                let _ = store.update_claim(&claim, None, Endpoint::Main, |claim| {
                    if let Some(finalizers) = &mut claim.metadata.finalizers {
                        finalizers.retain(|name| name != OTHER_FINALIZER);
                    }
                    Ok(())
                });
            }
        }
    }
}

/// Whether an entry is there, with no node against it. The other driver replaces what an earlier driver of the class has left.
fn says_nothing_against(context: &PodSchedulingContext, entry: &str) -> bool {
    let entries = &context.status.resource_claims;
    entries
        .iter()
        .any(|known| known.name == entry && known.unsuitable_nodes.is_empty())
}
