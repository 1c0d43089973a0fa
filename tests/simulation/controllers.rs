//! The other controllers of the cluster: claim controller, garbage collector, kubelets and another driver. The possible tasks are listed;
//! one at a time is picked and performed.

use drayman::api::resource::{
    AllocationMode, AllocationResult, POD_CLAIM_NAME_ANNOTATION, Pod, PodResourceClaimStatus,
    PodSchedulingContext, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimSchedulingStatus,
    ResourceClaimStatus, ResourceHandle, controller_of,
};
use drayman::core::claims::ObjectKey;
use drayman::testcluster::negotiation::{BoundStep, Negotiation, without_ended_consumers};

use crate::cluster::{Action, Cluster};
use crate::driver::{OTHER_DRIVER, OTHER_FINALIZER};
use crate::pods::uid_of_pod;
use crate::store::Endpoint;

/// An action that one of the controllers could perform now.
#[derive(Clone, Debug)]
enum Task {
    CreateClaim {
        pod: ObjectKey,
        entry: String,
    },
    NameClaim {
        pod: ObjectKey,
        entry: String,
        claim: String,
    },
    SelectNode {
        pod: ObjectKey,
    },
    ReserveFor {
        pod: ObjectKey,
        claim: ObjectKey,
    },
    RemoveStaleConsumers {
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

impl Cluster {
    pub(crate) fn start_housekeeping(&mut self) {
        if self.housekeeping || self.idle_version == Some(self.store.version()) {
            return;
        }
        if self.tasks().is_empty() {
            self.idle_version = Some(self.store.version());
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
        let tasks = self.tasks();
        if let Some(task) = self.rng.pick(&tasks) {
            self.trace(|| format!("cluster: {task:?}"));
            self.perform(task);
        }
    }

    fn tasks(&self) -> Vec<Task> {
        let mut tasks = Vec::new();
        for (key, pod) in &self.store.pods {
            self.tasks_of_pod(key, pod, &mut tasks);
        }
        for (key, claim) in &self.store.claims {
            self.tasks_of_claim(key, claim, &mut tasks);
        }
        for (key, context) in &self.store.contexts {
            self.tasks_of_context(key, context, &mut tasks);
        }
        tasks
    }

    fn tasks_of_pod(&self, key: &ObjectKey, pod: &Pod, tasks: &mut Vec<Task>) {
        if pod.metadata.deletion_timestamp.is_some() {
            if self.nodes.is_empty() {
                tasks.push(Task::StopPod(key.clone()));
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
                tasks.push(match self.orphan(&pod, &entry) {
                    Some(claim) => Task::NameClaim { pod, entry, claim },
                    None => Task::CreateClaim { pod, entry },
                });
            }
        }
        let Some(node) = pod.spec.node_name.as_ref().filter(|_| !self.structured) else {
            return;
        };
        // The user set the node name: the claim controller replaces the scheduler.
        let Some(claims) = self.claims_of(key) else { return };
        let negotiation = Negotiation {
            pod_uid: &uid_of_pod(pod),
            claims: &claims,
            context: self.store.contexts.get(key).map(AsRef::as_ref),
        };
        let pod = key.clone();
        tasks.extend(negotiation.bound_step(node).map(|step| match step {
            BoundStep::SelectNode => Task::SelectNode { pod },
            BoundStep::Reserve(index) => Task::ReserveFor {
                pod,
                claim: ObjectKey::of(&claims[index].1.metadata),
            },
        }));
    }

    /// A claim created for an entry that the pod status does not name yet.
    fn orphan(&self, pod: &ObjectKey, entry: &str) -> Option<String> {
        let uid = self.store.pods.get(pod)?.metadata.uid.clone();
        self.store.claims.values().find_map(|claim| {
            let annotations = claim.metadata.annotations.as_ref()?;
            let of_entry = annotations.get(POD_CLAIM_NAME_ANNOTATION)? == entry;
            let of_pod = Self::owner_of(claim) == uid.as_deref();
            (of_entry && of_pod).then(|| claim.metadata.name.clone())?
        })
    }

    fn tasks_of_claim(&self, key: &ObjectKey, claim: &ResourceClaim, tasks: &mut Vec<Task>) {
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
            tasks.push(Task::RemoveStaleConsumers {
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
                tasks.push(Task::CollectClaim(key.clone()));
            } else if claim.status.reserved_for.is_empty() && pod.is_some_and(|pod| is_done(pod)) {
                tasks.push(Task::DeleteUnused { claim: key.clone() });
            }
        }
        let others = claim
            .metadata
            .finalizers
            .iter()
            .flatten()
            .any(|name| name == OTHER_FINALIZER);
        if others && claim.status.reserved_for.is_empty() && (going || claim.status.deallocation_requested) {
            tasks.push(if claim.status.driver_name.as_deref() == Some(OTHER_DRIVER) {
                Task::OtherClear(key.clone())
            } else {
                Task::OtherLeave(key.clone())
            });
        }
    }

    fn tasks_of_context(&self, key: &ObjectKey, context: &PodSchedulingContext, tasks: &mut Vec<Task>) {
        let owner = controller_of(&context.metadata)
            .map(|owner| owner.uid.clone())
            .unwrap_or_default();
        let Some(pod) = self.store.pods.get(key).filter(|pod| uid_of_pod(pod) == owner) else {
            tasks.push(Task::CollectContext(key.clone()));
            return;
        };
        // The other driver ignores such pods too; the claim controller would revoke the allocation immediately.
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
                tasks.push(
                    if finalizers.is_some_and(|all| all.iter().any(|name| name == OTHER_FINALIZER)) {
                        Task::OtherAllocate {
                            claim: claim_key,
                            pod: key.clone(),
                            uid: uid_of_pod(pod),
                        }
                    } else {
                        Task::OtherFinalizer(claim_key)
                    },
                );
            } else if !accepts_all_nodes(context, &entry) {
                tasks.push(Task::OtherEntry {
                    context: key.clone(),
                    entry,
                });
            }
        }
    }

    fn perform(&mut self, task: Task) {
        let store = &mut self.store;
        match task {
            Task::CreateClaim { pod, entry } => {
                let suffix = self.rng.below(100_000);
                self.create_claim_for(&pod, &entry, suffix);
            }
            Task::NameClaim { pod, entry, claim } => store.update_pod(&pod, |pod| {
                let statuses = &mut pod.status.resource_claim_statuses;
                statuses.retain(|status| status.name != entry);
                statuses.push(PodResourceClaimStatus {
                    name: entry,
                    resource_claim_name: Some(claim),
                });
            }),
            Task::SelectNode { pod } => self.select_node(&pod),
            Task::ReserveFor { pod, claim } => {
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
            Task::RemoveStaleConsumers { claim, uids } => {
                let structured = self.structured;
                let _ = store.update_claim(&claim, None, Endpoint::Status, |claim| {
                    let lives = |consumer: &ResourceClaimConsumerReference| !uids.contains(&consumer.uid);
                    if let Some(status) = without_ended_consumers(claim, lives) {
                        claim.status = status;
                    }
                    if structured && claim.status.reserved_for.is_empty() {
                        claim.status = ResourceClaimStatus::default();
                    }
                    Ok(())
                });
            }
            Task::DeleteUnused { claim } | Task::CollectClaim(claim) => store.delete_claim(&claim),
            Task::CollectContext(context) => store.delete_context(&context),
            Task::StopPod(pod) => store.remove_pod(&pod),
            Task::OtherEntry { context, entry } => {
                let _ = store.update_context(&context, |context| {
                    let entry = ResourceClaimSchedulingStatus {
                        name: entry,
                        unsuitable_nodes: Vec::new(),
                    };
                    let entries = &mut context.status.resource_claims;
                    entries.retain(|known| known.name != entry.name);
                    entries.push(entry);
                });
            }
            Task::OtherFinalizer(claim) => {
                let _ = store.update_claim(&claim, None, Endpoint::Main, |claim| {
                    let finalizers = claim.metadata.finalizers.get_or_insert_default();
                    finalizers.push(OTHER_FINALIZER.to_owned());
                    Ok(())
                });
            }
            Task::OtherAllocate { claim, pod, uid } => {
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
            Task::OtherClear(claim) => {
                let _ = store.update_claim(&claim, None, Endpoint::Status, |claim| {
                    claim.status = ResourceClaimStatus::default();
                    Ok(())
                });
                self.perform(Task::OtherLeave(claim));
            }
            Task::OtherLeave(claim) => {
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

/// Whether an entry exists and excludes no node. The other driver replaces entries of an earlier driver of the class.
fn accepts_all_nodes(context: &PodSchedulingContext, entry: &str) -> bool {
    let entries = &context.status.resource_claims;
    entries
        .iter()
        .any(|known| known.name == entry && known.unsuitable_nodes.is_empty())
}
