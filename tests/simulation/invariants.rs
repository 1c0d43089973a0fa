//! Invariants that hold after every step.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::resource::{AllocationMode, NODE_LIST_MAX, Pod, controller_of};
use drayman::core::claims::{ClaimToAllocate, ClaimWrite, Command, DriverRequest, ObjectKey};

use crate::cluster::Cluster;
use crate::driver::{DRIVER, FINALIZER, hold_of, recorded_hold, uid_of};
use crate::pods::uid_of_pod;

impl Cluster {
    /// I1: no device in two claims, including writes in flight.
    pub(crate) fn check_store(&mut self) {
        // In structured mode the scheduler allocates, which is not under test.
        if self.structured {
            return;
        }
        let mut holders: BTreeMap<(String, String), String> = BTreeMap::new();
        let mut twice = Vec::new();
        let recorded = self
            .store
            .claims
            .values()
            .filter_map(|claim| recorded_hold(claim).map(|hold| (uid_of(claim), hold)));
        let on_the_way = self
            .network
            .values()
            .filter_map(|request| match &request.command {
                Command::WriteClaim {
                    key,
                    uid,
                    write:
                        ClaimWrite::Allocate {
                            allocation, version, ..
                        },
                    ..
                } => {
                    let claim = self.store.claims.get(key)?;
                    // Deleted and allocated claims accept no allocation.
                    let open = uid_of(claim) == *uid
                        && claim.status.allocation.is_none()
                        && claim.metadata.deletion_timestamp.is_none()
                        && (version.is_none() || *version == claim.metadata.resource_version);
                    open.then(|| (uid.clone(), hold_of(allocation)))
                }
                _ => None,
            });
        for (uid, hold) in recorded.chain(on_the_way) {
            for device in hold.devices {
                let device = (hold.node.clone(), device);
                if let Some(other) = holders.insert(device.clone(), uid.clone())
                    && other != uid
                {
                    twice.push((device, other, uid.clone()));
                }
            }
        }
        for (device, one, other) in twice {
            if self.is_expected_double(&one, &other) {
                continue;
            }
            self.violate(|| format!("I1: device {device:?} is in claims {one} and {other}"));
        }
    }

    /// Checks a command before it is executed.
    pub(crate) fn check_command(&mut self, command: &Command) {
        match command {
            Command::WriteClaim { key, uid, write, .. } => self.check_write(key, uid, write),
            Command::WriteContext {
                key, entries, uid, ..
            } => {
                let names: Vec<(String, BTreeSet<String>)> = entries
                    .iter()
                    .map(|entry| {
                        (
                            entry.name.clone(),
                            entry.unsuitable_nodes.iter().cloned().collect(),
                        )
                    })
                    .collect();
                self.check_entries(key, uid, &names);
                if entries
                    .iter()
                    .any(|entry| entry.unsuitable_nodes.len() > NODE_LIST_MAX)
                {
                    self.violate(|| "I13: an entry of more than 128 nodes".to_owned());
                }
            }
            Command::CallDriver { request, .. } => self.check_call(request),
            _ => {}
        }
    }

    fn is_ours(&self, class_name: &str) -> bool {
        self.store
            .drivers_ever
            .get(class_name)
            .is_some_and(|drivers| drivers.contains(DRIVER))
    }

    /// I6 and I16.
    fn check_write(&mut self, key: &ObjectKey, uid: &str, write: &ClaimWrite) {
        let Some(claim) = self
            .store
            .claims
            .get(key)
            .filter(|claim| uid_of(claim) == uid)
            .cloned()
        else {
            return;
        };
        let adds = matches!(
            write,
            ClaimWrite::AddFinalizer { .. } | ClaimWrite::Allocate { .. }
        );
        if adds && !self.is_ours(&claim.spec.resource_class_name) {
            self.violate(|| format!("I6: {key} is not of a class of ours"));
        }
        if let ClaimWrite::ClearAllocation { .. } = write
            && claim.status.allocation.is_some()
            && recorded_hold(&claim).is_none()
        {
            self.violate(|| format!("I6: the allocation of {key} is not ours to clear"));
        }
        let ClaimWrite::Allocate {
            reserved_for: Some(consumer),
            ..
        } = write
        else {
            return;
        };
        let pod = ObjectKey::new(key.namespace.clone(), consumer.name.clone());
        let existed = self
            .store
            .pods_ever
            .get(&pod)
            .is_some_and(|uids| uids.contains(&consumer.uid));
        if !existed {
            self.violate(|| format!("I16: {key} is reserved for a pod {pod} that never existed"));
        }
        if !self.store.context_owners_ever.contains(&consumer.uid) {
            self.violate(|| format!("I16: {key} is reserved for {pod} by the context of another pod"));
        }
        if Self::owner_of(&claim).is_none()
            && let Some(pod) = self.store.pods.get(&pod)
            && uid_of_pod(pod) == consumer.uid
            && !names(pod, &key.name)
        {
            self.violate(|| {
                format!("I16: {key} has no owner and is reserved for a pod that does not name it")
            });
        }
        if let Some(owner) = Self::owner_of(&claim)
            && owner != consumer.uid
        {
            let owner = owner.to_owned();
            self.violate(|| {
                format!(
                    "I16: {key} belongs to pod {owner} and is reserved for {}",
                    consumer.uid
                )
            });
        }
    }

    /// I6 and I13.
    fn check_entries(&mut self, key: &ObjectKey, uid: &str, entries: &[(String, BTreeSet<String>)]) {
        let Some(seen) = self
            .process
            .as_ref()
            .and_then(|process| process.seen.get(key))
            .cloned()
        else {
            self.violate(|| format!("entries for context {key}, which was never seen"));
            return;
        };
        if seen.metadata.uid.as_deref() != Some(uid) {
            self.violate(|| format!("entries for another context {key} than the one that was seen"));
        }
        for (name, nodes) in entries {
            let mut known: BTreeSet<&String> = seen.spec.potential_nodes.iter().collect();
            known.insert(&seen.spec.selected_node);
            known.extend(
                seen.status
                    .resource_claims
                    .iter()
                    .flat_map(|entry| &entry.unsuitable_nodes),
            );
            if let Some(node) = nodes.iter().find(|node| !known.contains(node)) {
                self.violate(|| format!("I13: {key} does not list node {node} for {name}"));
            }
            let chosen = &seen.spec.selected_node;
            if nodes.len() == NODE_LIST_MAX && !chosen.is_empty() && !nodes.contains(chosen) {
                self.violate(|| format!("I13: the full list of {key} does not have the selected node"));
            }
            if let Some(pod) = self.store.pods.get(key)
                && Some(pod.metadata.uid.clone().unwrap_or_default())
                    == drayman::api::resource::controller_of(&seen.metadata).map(|owner| owner.uid.clone())
                && let Some(claim) = self.claim_of_entry(key, name)
                && !self.is_ours(&claim.spec.resource_class_name)
            {
                self.violate(|| format!("I6: entry {name} of {key} is another driver's"));
            }
        }
    }

    fn check_call(&mut self, request: &DriverRequest) {
        if !self.driver.observed_all {
            self.violate(|| "the driver is called before its initial observation".to_owned());
        }
        match request {
            DriverRequest::Allocate { claims, node } => self.check_allocate(claims, node.as_deref()),
            DriverRequest::UnsuitableNodes { claims, pod, .. } => {
                let seen = self.process.as_ref().map(|process| &process.seen);
                let context = seen.and_then(|seen| seen.get(&ObjectKey::of(&pod.metadata)));
                let owner = context.and_then(|context| controller_of(&context.metadata));
                if owner.map(|owner| &owner.uid) != pod.metadata.uid.as_ref() {
                    self.violate(|| "I16: a pod is evaluated with the context of another one".to_owned());
                }
                if claims.is_empty() {
                    self.violate(|| "the driver is called without claims".to_owned());
                }
            }
            DriverRequest::Deallocate { claim, .. } => {
                // A claim that a user removed by force is not in use.
                let stored = self.store.claims.get(&ObjectKey::of(&claim.metadata));
                let is_there = stored.is_some_and(|stored| uid_of(stored) == uid_of(claim));
                if is_there && !claim.status.reserved_for.is_empty() && recorded_hold(claim).is_some() {
                    self.violate(|| "I5: a claim in use is deallocated".to_owned());
                }
            }
        }
    }

    /// All unallocated claims of a pod are allocated together.
    fn check_together(&mut self, claims: &[ClaimToAllocate]) {
        let names: BTreeSet<String> = claims.iter().map(|claim| uid_of(&claim.claim)).collect();
        let mut left_out = None;
        for key in self.store.pods.keys() {
            let all = self.claims_of(key).unwrap_or_default();
            let of_pod = |uid: &String| {
                all.iter()
                    .any(|(_, claim)| uid_of(claim) == *uid && Self::owner_of(claim).is_some())
            };
            if !names.iter().any(of_pod) {
                continue;
            }
            left_out = all.into_iter().map(|(_, claim)| claim).find(|claim| {
                // Claims whose class named another driver at any time do not count.
                let class = &claim.spec.resource_class_name;
                let always_ours = self
                    .store
                    .drivers_ever
                    .get(class)
                    .is_some_and(|all| all.len() == 1);
                self.is_ours(class)
                    && always_ours
                    && claim.spec.allocation_mode == Some(AllocationMode::WaitForFirstConsumer)
                    && claim.status.allocation.is_none()
                    // Rolled back since, because a previous leader had recorded it.
                    && !self.late_allocations.contains(&uid_of(claim))
                    && !names.contains(&uid_of(claim))
            });
        }
        if let Some(claim) = left_out {
            let name = claim.metadata.name.clone();
            self.violate(|| format!("claim {name:?} is left out when its pod's claims are allocated"));
        }
    }

    /// I3, I6, I7.
    fn check_allocate(&mut self, claims: &[ClaimToAllocate], node: Option<&str>) {
        let mut uids = BTreeSet::new();
        for claim in claims {
            let uid = uid_of(&claim.claim);
            let key = ObjectKey::of(&claim.claim.metadata);
            if !uids.insert(uid.clone()) {
                self.violate(|| format!("claim {key} twice in one call"));
            }
            if !self.is_ours(&claim.claim.spec.resource_class_name) || claim.class.driver_name != DRIVER {
                self.violate(|| format!("I6: {key} is not of a class of ours"));
            }
            let process = self.process.as_ref();
            if process.is_some_and(|process| process.inherited.contains(&uid)) {
                self.violate(|| {
                    format!("I4: {key} is allocated before the allocation of an earlier process is released")
                });
            }
            if let Some(stored) = self.store.claims.get(&key)
                && uid_of(stored) == uid
                && !stored
                    .metadata
                    .finalizers
                    .as_ref()
                    .is_some_and(|all| all.iter().any(|name| name == FINALIZER))
            {
                self.violate(|| format!("I3: allocate for {key} before our finalizer is stored"));
            }
        }
        if node.is_some() {
            self.check_together(claims);
        }
        if let Some(node) = node {
            let pods = self.process.as_ref().map(|process| &process.seen);
            let selected = pods.is_some_and(|seen| {
                seen.values()
                    .any(|context| context.spec.selected_node == node && concerns(context, claims))
            });
            if !selected {
                self.violate(|| format!("I7: node {node} is not selected for these claims"));
            }
        }
    }
}

/// Whether the spec of a pod names this claim.
fn names(pod: &Pod, claim: &str) -> bool {
    let entries = &pod.spec.resource_claims;
    entries
        .iter()
        .any(|entry| entry.source.resource_claim_name.as_deref() == Some(claim))
}

/// Whether all claims can belong to the pod of a context.
fn concerns(context: &drayman::api::resource::PodSchedulingContext, claims: &[ClaimToAllocate]) -> bool {
    let owner = drayman::api::resource::controller_of(&context.metadata).map(|owner| owner.uid.clone());
    claims.iter().all(|claim| {
        let of = Cluster::owner_of(&claim.claim);
        of.is_none() || of == owner.as_deref()
    })
}
