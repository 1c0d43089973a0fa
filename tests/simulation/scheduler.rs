//! The dynamicresources plugin of the scheduler 1.30, which decides as the one of the test cluster. The decision of a cycle is written with
//! a delay, as in PreBind.

use drayman::api::resource::{
    Pod, PodSchedulingContext, PodSchedulingContextSpec, ResourceClaim, ResourceClaimConsumerReference,
    controller_of,
};
use drayman::core::claims::ObjectKey;
use drayman::testcluster::negotiation::{FilterResult, Negotiation, NextStep};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::cluster::{Action, Cluster, MILLISECOND, SECOND};
use crate::driver::{Hold, uid_of};
use crate::pods::{owned_by, reaches, uid_of_pod};
use crate::store::{Endpoint, conflict};

/// The decision of a cycle for a pod.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) pod: ObjectKey,
    pub(crate) uid: String,
    pub(crate) decision: Decision,
}

#[derive(Clone, Debug)]
pub(crate) enum Decision {
    /// Publish, then remove the pod from `reservedFor`.
    Publish {
        potential: Option<Vec<String>>,
        selected: Option<String>,
    },
    /// Request the deallocation of a claim that excludes all nodes.
    Deallocate { claim: ObjectKey, uid: String },
    /// Reserve and bind.
    Bind { node: String },
    /// Structured mode: allocate, reserve and bind.
    Allocate {
        node: String,
        allocations: Vec<(ObjectKey, Hold)>,
    },
}

impl Cluster {
    /// Schedules cycles for pending pods with exponential backoff.
    pub(crate) fn wake_scheduler(&mut self) {
        let pending: Vec<(ObjectKey, String)> = self
            .store
            .pods
            .iter()
            .filter(|(_, pod)| pod.spec.node_name.is_none() && pod.status.phase.is_none())
            .map(|(key, pod)| (key.clone(), uid_of_pod(pod)))
            .filter(|(_, uid)| !self.cycles.contains(uid))
            .collect();
        for (key, uid) in pending {
            let attempts = self.attempts.entry(uid.clone()).or_default();
            let first = if self.slow_scheduler { SECOND } else { MILLISECOND };
            let longest = (first << (*attempts).min(14)).min(10 * SECOND);
            let longest = if *attempts == 0 { MILLISECOND } else { longest };
            *attempts += 1;
            self.cycles.insert(uid);
            let delay = self.rng.between(longest / 4, longest);
            self.after(delay, Action::Cycle(key));
        }
    }

    pub(crate) fn cycle(&mut self, key: &ObjectKey) {
        let Some(pod) = self.store.pods.get(key).cloned() else {
            return;
        };
        let uid = uid_of_pod(&pod);
        self.cycles.remove(&uid);
        if pod.spec.node_name.is_some() || pod.status.phase.is_some() {
            return;
        }
        let decided = if self.structured {
            self.schedule(key, &pod)
        } else {
            self.decide_for(key, &pod)
        };
        if let Some(decision) = decided {
            self.trace(|| format!("scheduler: {} {decision:?}", key.name));
            // The pod gets no other cycle until the decision is written.
            self.cycles.insert(uid.clone());
            let delay = self.delay();
            let plan = Plan {
                pod: key.clone(),
                uid,
                decision,
            };
            self.after(delay, Action::ApplyPlan(plan));
        }
    }

    fn decide_for(&mut self, key: &ObjectKey, pod: &Pod) -> Option<Decision> {
        let uid = uid_of_pod(pod);
        let claims = self.claims_of(key)?;
        let context = self.store.contexts.get(key).cloned();
        let negotiation = Negotiation {
            pod_uid: &uid,
            claims: &claims,
            context: context.as_deref(),
        };
        if negotiation
            .obstacle(|class| self.store.classes.contains_key(class))
            .is_some()
        {
            return None;
        }
        let mut fitting = Vec::new();
        let mut unavailable: Vec<(ObjectKey, String)> = Vec::new();
        for node in self.nodes_of(&uid) {
            match negotiation.filter(&node, |allocation| reaches(allocation, &node), |_| true) {
                FilterResult::Fits => fitting.push(node),
                FilterResult::Unsuitable(_) => {}
                FilterResult::Unavailable(indices) => {
                    let claims = indices.into_iter().map(|index| &claims[index].1);
                    let claims = claims.filter(|claim| negotiation.may_deallocate(claim));
                    unavailable.extend(claims.map(|claim| (ObjectKey::of(&claim.metadata), uid_of(claim))));
                }
            }
        }
        if fitting.is_empty() {
            let (claim, uid) = self.rng.pick(&unavailable)?;
            return Some(Decision::Deallocate { claim, uid });
        }
        let mut node = self.rng.pick(&fitting)?;
        let selected = negotiation.context.map(|context| &context.spec.selected_node);
        if let Some(selected) = selected.filter(|node| fitting.contains(node))
            && self.rng.chance(700)
        {
            node.clone_from(selected);
        }
        match negotiation.next_step(&fitting, &node) {
            NextStep::Bind => Some(Decision::Bind { node }),
            NextStep::Publish {
                potential_nodes,
                selected_node,
            } => Some(Decision::Publish {
                potential: potential_nodes,
                selected: selected_node,
            }),
            NextStep::Wait => None,
        }
    }

    pub(crate) fn apply_plan(&mut self, plan: Plan) {
        self.cycles.remove(&plan.uid);
        let Some(pod) = self
            .store
            .pods
            .get(&plan.pod)
            .filter(|pod| uid_of_pod(pod) == plan.uid)
            .cloned()
        else {
            return;
        };
        match plan.decision {
            Decision::Publish { potential, selected } => {
                self.publish(&plan.pod, &pod, potential, selected);
                self.unreserve(&plan.pod, &plan.uid);
            }
            Decision::Deallocate { claim, uid } => {
                let selects = self
                    .store
                    .contexts
                    .get(&plan.pod)
                    .is_some_and(|context| !context.spec.selected_node.is_empty());
                if selects {
                    self.publish(&plan.pod, &pod, None, Some(String::new()));
                }
                let _ = self
                    .store
                    .update_claim(&claim, Some(&uid), Endpoint::Status, |claim| {
                        if claim
                            .status
                            .reserved_for
                            .iter()
                            .any(|consumer| consumer.uid != plan.uid)
                        {
                            return Err(conflict("changed"));
                        }
                        claim.status.reserved_for.clear();
                        claim.status.deallocation_requested = true;
                        Ok(())
                    });
            }
            Decision::Bind { node } => self.bind(&plan.pod, &pod, &node),
            Decision::Allocate { node, allocations } => {
                self.bind_with_allocations(&plan.pod, &pod, &node, &allocations);
            }
        }
        // The store may have changed during this cycle.
        self.wake_scheduler();
    }

    fn publish(
        &mut self,
        key: &ObjectKey,
        pod: &Pod,
        potential: Option<Vec<String>>,
        selected: Option<String>,
    ) {
        if self.store.contexts.contains_key(key) {
            let uid = uid_of_pod(pod);
            let _ = self.store.update_context(key, |context| {
                if controller_of(&context.metadata).is_none_or(|owner| owner.uid != uid) {
                    return;
                }
                if let Some(nodes) = potential {
                    context.spec.potential_nodes = nodes;
                }
                if let Some(node) = selected {
                    context.spec.selected_node = node;
                }
            });
        } else {
            let _ = self.store.create_context(PodSchedulingContext {
                metadata: ObjectMeta {
                    namespace: Some(key.namespace.clone()),
                    name: Some(key.name.clone()),
                    owner_references: Some(vec![owned_by(pod)]),
                    ..ObjectMeta::default()
                },
                spec: PodSchedulingContextSpec {
                    selected_node: selected.unwrap_or_default(),
                    potential_nodes: potential.unwrap_or_default(),
                },
                ..PodSchedulingContext::default()
            });
        }
    }

    fn unreserve(&mut self, key: &ObjectKey, uid: &str) {
        for (_, claim) in self.claims_of(key).unwrap_or_default() {
            let _ = self.store.update_claim(
                &ObjectKey::of(&claim.metadata),
                claim.metadata.uid.as_deref(),
                Endpoint::Status,
                |claim| {
                    claim.status.reserved_for.retain(|consumer| consumer.uid != uid);
                    Ok(())
                },
            );
        }
    }

    pub(crate) fn bind(&mut self, key: &ObjectKey, pod: &Pod, node: &str) {
        let uid = uid_of_pod(pod);
        let Some(claims) = self.claims_of(key) else { return };
        let fits = |claim: &ResourceClaim| {
            claim
                .status
                .allocation
                .as_ref()
                .is_some_and(|own| reaches(own, node))
        };
        if !claims.iter().all(|(_, claim)| fits(claim)) {
            self.unreserve(key, &uid);
            return;
        }
        for (_, claim) in &claims {
            let consumer = ResourceClaimConsumerReference::pod(&key.name, &uid);
            let reserved = self.store.update_claim(
                &ObjectKey::of(&claim.metadata),
                claim.metadata.uid.as_deref(),
                Endpoint::Status,
                |claim| {
                    if !claim
                        .status
                        .reserved_for
                        .iter()
                        .any(|known| known.uid == consumer.uid)
                    {
                        claim.status.reserved_for.push(consumer.clone());
                    }
                    Ok(())
                },
            );
            if reserved.is_err() {
                self.unreserve(key, &uid);
                return;
            }
        }
        self.trace(|| format!("scheduler: {} is bound to {node}", key.name));
        self.store
            .update_pod(key, |pod| pod.spec.node_name = Some(node.to_owned()));
        self.store.delete_context(key);
    }
}
