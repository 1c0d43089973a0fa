//! Checks of the idle cluster after faults have stopped: the reference model of a run.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::resource::{
    AllocationMode, LABEL_OF_ANY_NODE, Pod, ResourceClaim, ResourceClaimConsumerReference,
};
use drayman::core::claims::ObjectKey;

use crate::cluster::{Cluster, SECOND};
use crate::driver::{DRIVER, FINALIZER, Hold, OTHER_FINALIZER, recorded_hold, uid_of};
use crate::pods::uid_of_pod;

impl Cluster {
    /// Stops faults, runs until idle and checks the result.
    pub(crate) fn conclude(&mut self) {
        self.faults.stop();
        self.stop_users();
        self.last_change = self.now;
        self.run_until_quiet(60_000);
        // The driver is called for an unsatisfiable immediate claim twice a minute, possibly right now.
        for _ in 0..100 {
            if !self.is_busy() {
                break;
            }
            self.run_for(SECOND / 10);
        }
        if self.violation.is_some() {
            return;
        }
        self.check_rest();
        self.check_liveness();
        // The slow recheck may find that a node with free devices is now full.
        self.run_for(450 * SECOND);
        let (writes, version, evaluations) = (self.writes, self.store.version(), self.evaluations);
        self.run_for(900 * SECOND);
        let waiting = self.store.contexts.len() as u64;
        if self.evaluations > evaluations + 3 * waiting {
            let more = self.evaluations - evaluations;
            self.violate(|| format!("I12: {more} evaluations of {waiting} contexts in 15 idle minutes"));
        }
        if self.writes != writes || self.store.version() != version {
            self.violate(|| "I12: the store changes although the cluster is idle".to_owned());
        }
        if self.counted().caught_by_recheck > 0 {
            self.violate(|| {
                "a wake-up was lost: the slow recheck found capacity without a capacity change".to_owned()
            });
        }
    }

    fn is_busy(&self) -> bool {
        let process = self.process.as_ref();
        process.is_some_and(|process| process.state.is_busy() || !process.in_flight.is_empty())
    }

    fn recorded(&self) -> BTreeMap<String, Hold> {
        self.store
            .claims
            .values()
            .filter_map(|claim| recorded_hold(claim).map(|hold| (uid_of(claim), hold)))
            .collect()
    }

    /// I8, I9, I11: the driver state matches the claims, and no work is left.
    pub(crate) fn check_rest(&mut self) {
        let recorded = self.recorded();
        if self.driver.recorded != recorded {
            let (driver, claims) = (self.driver.recorded.clone(), recorded);
            self.violate(|| format!("I9: the driver holds {driver:?}, the claims record {claims:?}"));
        }
        if !self.driver.pending.is_empty() {
            let pending = self.driver.pending.clone();
            self.violate(|| format!("I8: the driver still holds unrecorded devices {pending:?}"));
        }
        if self.process.is_none() {
            self.violate(|| "the controller does not run".to_owned());
            return;
        }
        if self.is_busy() {
            self.violate(|| "the controller is still busy".to_owned());
        }
        let mut left = Vec::new();
        for (key, claim) in &self.store.claims {
            let status = &claim.status;
            let finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
            if !status.reserved_for.is_empty() || finalizers.iter().any(|name| name == OTHER_FINALIZER) {
                continue;
            }
            if claim.metadata.deletion_timestamp.is_some() {
                left.push(format!("I11: claim {key} is not gone"));
            } else if status.deallocation_requested && finalizers.iter().any(|name| name == FINALIZER) {
                left.push(format!("I10: claim {key} is not deallocated"));
            }
        }
        for (key, claim) in &self.store.claims {
            let label = format!("{DRIVER}/node");
            let named = claim
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(&label));
            if let (Some(hold), Some(named)) = (recorded_hold(claim), named)
                && hold.node != *named
                && named != LABEL_OF_ANY_NODE
                // Known race: docs/dev/architecture.md.
                && !self.late_labels.contains(&uid_of(claim))
                && !self.late_allocations.contains(&uid_of(claim))
            {
                left.push(format!(
                    "claim {key} holds devices of {}, and its label says {named}",
                    hold.node
                ));
            }
        }
        if let Some(text) = left.pop() {
            self.violate(|| text);
        }
        self.check_all_or_nothing();
        self.check_double_allocations();
    }

    /// No pod keeps some of its claims without the others. Immediate claims are allocated independently of pods, so they do not count: the
    /// pod waits for them as for missing claims.
    fn check_all_or_nothing(&mut self) {
        let mut half = None;
        for (key, pod) in &self.store.pods {
            let uid = uid_of_pod(pod);
            let claims = self.claims_of(key).unwrap_or_default();
            let ours = claims
                .iter()
                .map(|(_, claim)| claim)
                .filter(|claim| self.is_ours_now(claim));
            let (held, missing): (Vec<_>, Vec<_>) = ours.partition(|claim| recorded_hold(claim).is_some());
            // Until a user recreates the class, the pod is not evaluated.
            let classes = &self.store.classes;
            let waits_for_class = |claim: &ResourceClaim| {
                claim.status.allocation.is_none() && !classes.contains_key(&claim.spec.resource_class_name)
            };
            if claims.iter().any(|(_, claim)| waits_for_class(claim)) {
                continue;
            }
            let missing = missing
                .iter()
                .filter(|claim| {
                    claim.status.allocation.is_none()
                        && claim.spec.allocation_mode == Some(AllocationMode::WaitForFirstConsumer)
                })
                .count();
            let held_for_it = held.iter().find(|claim| {
                let for_it =
                    |users: &[ResourceClaimConsumerReference]| users.len() == 1 && users[0].uid == uid;
                for_it(&claim.status.reserved_for)
            });
            if let (Some(held), false, None) = (held_for_it, missing == 0, &pod.spec.node_name) {
                half = Some((key.clone(), held.metadata.name.clone()));
            }
        }
        if let Some((pod, claim)) = half {
            self.violate(|| {
                format!("pod {pod} keeps claim {claim:?}, and another of its claims is not allocated")
            });
        }
    }

    fn free(&self, node: &str, except: &BTreeSet<String>) -> usize {
        let held: BTreeSet<String> = self
            .recorded()
            .into_iter()
            .filter(|(uid, hold)| hold.node == node && !except.contains(uid))
            .flat_map(|(_, hold)| hold.devices)
            .collect();
        let all = self.environment.nodes.get(node).into_iter().flatten();
        all.filter(|device| !held.contains(*device)).count()
    }

    /// I10: every satisfiable pod and claim is served.
    pub(crate) fn check_liveness(&mut self) {
        let pods: Vec<(ObjectKey, std::sync::Arc<Pod>)> = self
            .store
            .pods
            .iter()
            .map(|(key, pod)| (key.clone(), pod.clone()))
            .collect();
        for (key, pod) in pods {
            if pod.status.phase.is_none()
                && pod.metadata.deletion_timestamp.is_none()
                && let Some(node) = self.could_run(&key, &pod)
            {
                self.violate(|| format!("I10: pod {key} could run on {node} but waits"));
            }
        }
        let claims: Vec<_> = self.store.claims.values().cloned().collect();
        for claim in claims {
            if claim.spec.allocation_mode == Some(AllocationMode::Immediate)
                && claim.status.allocation.is_none()
                && claim.metadata.deletion_timestamp.is_none()
                && self.is_ours_now(&claim)
                && let Ok(parameters) = self.environment.parameters_of(&claim)
                && let Some(node) = self
                    .environment
                    .nodes
                    .keys()
                    .find(|node| self.free(node, &BTreeSet::new()) >= parameters.count)
            {
                let (name, node) = (claim.metadata.name.clone(), node.clone());
                self.violate(|| format!("I10: immediate claim {name:?} could be allocated on {node}"));
            }
        }
    }

    fn is_ours_now(&self, claim: &ResourceClaim) -> bool {
        let class = self.store.classes.get(&claim.spec.resource_class_name);
        class.is_some_and(|class| class.driver_name == DRIVER)
    }

    /// A node on which a waiting pod could run.
    fn could_run(&self, key: &ObjectKey, pod: &Pod) -> Option<String> {
        let uid = uid_of_pod(pod);
        let claims = self.claims_of(key)?;
        if pod.spec.node_name.is_some()
            && claims.iter().all(|(_, claim)| {
                claim
                    .status
                    .reserved_for
                    .iter()
                    .any(|consumer| consumer.uid == uid)
            })
        {
            return None;
        }
        let mut needs = Vec::new();
        let mut bound_to: Vec<String> = Vec::new();
        let mut own = BTreeSet::new();
        for (_, claim) in &claims {
            let others = claim
                .status
                .reserved_for
                .iter()
                .any(|consumer| consumer.uid != uid);
            let immediate = claim.spec.allocation_mode == Some(AllocationMode::Immediate);
            match (&claim.status.allocation, recorded_hold(claim)) {
                (Some(allocation), _) if others && !allocation.shareable => return None,
                (Some(_), None) => {}
                // The allocation stays: others use it, or it is immediate.
                (Some(_), Some(hold)) if others || immediate => bound_to.push(hold.node),
                (None, _) if immediate => return None,
                (None, _) if !self.is_ours_now(claim) => {
                    self.store.classes.get(&claim.spec.resource_class_name)?;
                }
                (allocation, _) => {
                    let count = match allocation {
                        Some(_) => recorded_hold(claim)?.devices.len(),
                        None => self.environment.parameters_of(claim).ok()?.count,
                    };
                    if own.insert(uid_of(claim)) {
                        needs.push(count);
                    }
                }
            }
        }
        let nodes = match &pod.spec.node_name {
            Some(node) => [node.clone()].into(),
            None => self.nodes_of(&uid),
        };
        let wanted: usize = needs.iter().sum();
        nodes
            .into_iter()
            .find(|node| bound_to.iter().all(|other| other == node) && self.free(node, &own) >= wanted)
    }
}
