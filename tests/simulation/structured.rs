//! Structured mode: the scheduler allocates devices in claims, which companions read at prepare.
//!
//! The store keeps claims in classic form. The allocation lists results: `d0`, `d1#7` (share 7 of a device with shares) and `d0!` (admin
//! access).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drayman::api::resource::{Pod, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimStatus};
use drayman::core::claims::ObjectKey;
use drayman::core::prepare::plan::results_of_claim;
use drayman::core::prepare::plan::{Allocation, ClaimToPrepare, DeviceResult};
use k8s_openapi::api::resource::v1;

use crate::cluster::Cluster;
use crate::driver::{DRIVER, Hold, OTHER_DRIVER, allocation_of, recorded_hold, uid_of};
use crate::faults::Fault;
use crate::node::{claim_uid, driver_name};
use crate::pods::{reaches, uid_of_pod};
use crate::scheduler::Decision;
use crate::store::Endpoint;
use crate::users::Use;

/// The device request of a claim, encoded in its parameters.
#[derive(Clone, Copy)]
struct DeviceRequest {
    count: usize,
    admin_access: bool,
}

fn device_request(claim: &ResourceClaim) -> DeviceRequest {
    let parameters = claim.spec.parameters_ref.as_ref();
    let name = parameters.map_or("", |reference| reference.name.as_str());
    DeviceRequest {
        count: if name == "pair" { 2 } else { 1 },
        admin_access: name == "admin",
    }
}

/// The device of a result.
pub(crate) fn device_of(result: &str) -> &str {
    result.split(['#', '!']).next().unwrap_or_default()
}

fn has_admin_access(result: &str) -> bool {
    result.ends_with('!')
}

/// Devices with odd numbers have two shares.
pub(crate) fn shares_of(device: &str) -> u32 {
    let number: u32 = device.trim_start_matches('d').parse().unwrap_or_default();
    1 + number % 2
}

/// The shares that these results use, by device.
pub(crate) fn shares_taken<'a>(results: impl Iterator<Item = &'a String>) -> BTreeMap<String, u32> {
    let mut taken = BTreeMap::new();
    for result in results.filter(|result| !has_admin_access(result)) {
        *taken.entry(device_of(result).to_owned()).or_default() += 1;
    }
    taken
}

/// Whether no device is over-allocated.
pub(crate) fn have_room(taken: &BTreeMap<String, u32>) -> bool {
    taken.iter().all(|(device, count)| *count <= shares_of(device))
}

/// The names of the devices of an allocation.
pub(crate) fn devices_of(hold: &Hold) -> BTreeSet<String> {
    let names = hold.devices.iter().map(|result| device_of(result).to_owned());
    names.collect()
}

pub(crate) fn results_of(hold: &Hold) -> Vec<DeviceResult> {
    let result = |result: &String| DeviceResult {
        request: "device".to_owned(),
        pool: hold.node.clone(),
        device: device_of(result).to_owned(),
        share_id: result.split_once('#').map(|(_, id)| id.to_owned()),
        admin_access: has_admin_access(result),
        pod_claim_name: None,
    };
    hold.devices.iter().map(result).collect()
}

/// The claim in `resource.k8s.io/v1`, with an additional result of another driver.
fn v1_claim(claim: &ResourceClaim) -> v1::ResourceClaim {
    let result = |result: DeviceResult| v1::DeviceRequestAllocationResult {
        request: result.request,
        driver: DRIVER.to_owned(),
        pool: result.pool,
        device: result.device,
        share_id: result.share_id,
        admin_access: result.admin_access.then_some(true),
        ..Default::default()
    };
    let allocation = recorded_hold(claim).map(|hold| v1::AllocationResult {
        devices: Some(v1::DeviceAllocationResult {
            results: Some(
                results_of(&hold)
                    .into_iter()
                    .map(result)
                    .chain([v1::DeviceRequestAllocationResult {
                        driver: OTHER_DRIVER.to_owned(),
                        pool: "elsewhere".to_owned(),
                        device: "d0".to_owned(),
                        request: "other".to_owned(),
                        ..Default::default()
                    }])
                    .collect(),
            ),
            ..Default::default()
        }),
        ..Default::default()
    });
    let consumer = |consumer: &ResourceClaimConsumerReference| v1::ResourceClaimConsumerReference {
        name: consumer.name.clone(),
        resource: "pods".to_owned(),
        uid: consumer.uid.clone(),
        ..Default::default()
    };
    let mut metadata = claim.metadata.clone();
    metadata.uid = Some(claim_uid(&uid_of(claim)).to_string());
    v1::ResourceClaim {
        metadata,
        status: Some(v1::ResourceClaimStatus {
            allocation,
            reserved_for: Some(claim.status.reserved_for.iter().map(consumer).collect()),
            ..Default::default()
        }),
        ..Default::default()
    }
}

impl Cluster {
    /// Schedules a pod: picks a random node with devices for all its claims.
    pub(crate) fn schedule(&mut self, key: &ObjectKey, pod: &Pod) -> Option<Decision> {
        let claims = self.claims_of(key)?;
        let mut nodes: Vec<String> = self.nodes_of(&uid_of_pod(pod)).into_iter().collect();
        while !nodes.is_empty() {
            let index = self.rng.below(nodes.len() as u64) as usize;
            let node = nodes.swap_remove(index);
            if let Some(allocations) = self.devices_on(&node, &claims) {
                return Some(Decision::Allocate { node, allocations });
            }
        }
        None
    }

    /// Picks random free devices for the claims, unlike the first fit of `core::scheduler`, so that seeds cover more states.
    fn devices_on(
        &mut self,
        node: &str,
        claims: &[(String, Arc<ResourceClaim>)],
    ) -> Option<Vec<(ObjectKey, Hold)>> {
        let recorded = self
            .store
            .claims
            .values()
            .filter_map(|claim| recorded_hold(claim));
        let mut held: BTreeSet<String> = recorded
            .filter(|hold| hold.node == node)
            .flat_map(|hold| hold.devices)
            .collect();
        if self.occurs_on_node(Fault::ScheduledTwice) {
            held.clear();
        }
        let all: Vec<String> = self
            .environment
            .nodes
            .get(node)
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        let mut allocations = Vec::new();
        for (_, claim) in claims {
            match &claim.status.allocation {
                Some(allocation) if !reaches(allocation, node) => return None,
                Some(_) => continue,
                None => {}
            }
            let request = device_request(claim);
            let taken = shares_taken(held.iter());
            let mut free: Vec<String> = all.clone();
            if !request.admin_access {
                free.retain(|device| taken.get(device).copied().unwrap_or_default() < shares_of(device));
            }
            let mut devices = BTreeSet::new();
            for _ in 0..request.count {
                let device = self.rng.pick(&free)?;
                free.retain(|other| *other != device);
                self.shares_given += 1;
                devices.insert(match (request.admin_access, shares_of(&device)) {
                    (true, _) => format!("{device}!"),
                    (false, 1) => device,
                    (false, _) => format!("{device}#{}", self.shares_given),
                });
            }
            held.extend(devices.clone());
            let node = node.to_owned();
            allocations.push((ObjectKey::of(&claim.metadata), Hold { node, devices }));
        }
        Some(allocations)
    }

    /// Writes each claim with its reservation in one request and binds the pod.
    pub(crate) fn bind_with_allocations(
        &mut self,
        key: &ObjectKey,
        pod: &Pod,
        node: &str,
        allocations: &[(ObjectKey, Hold)],
    ) {
        let uid = uid_of_pod(pod);
        for (claim, hold) in allocations {
            let _ = self.store.update_claim(claim, None, Endpoint::Status, |claim| {
                if claim.status.allocation.is_none() {
                    claim.status.driver_name = Some(DRIVER.to_owned());
                    claim.status.allocation = Some(allocation_of(hold, true));
                    let consumer = ResourceClaimConsumerReference::pod(&key.name, &uid);
                    claim.status.reserved_for = vec![consumer];
                }
                Ok(())
            });
        }
        self.bind(key, pod, node);
    }

    /// Reads a claim for a companion; may fail.
    pub(crate) fn read_claim(&mut self, key: &ObjectKey, uid: &str) -> Result<ClaimToPrepare, String> {
        if self.occurs_on_node(Fault::ClaimUnreadable) {
            return Err("the API server is unavailable".to_owned());
        }
        let changes = self.occurs_on_node(Fault::ClaimChanges);
        // The change happens before or after the read.
        let before = changes && self.rng.chance(500);
        if before {
            self.change_claim(key);
        }
        let claim = self.store.claims.get(key).cloned();
        if changes && !before {
            self.change_claim(key);
        }
        let claim = claim.ok_or("the claim is gone")?;
        let results = results_of_claim(v1_claim(&claim), uid, &driver_name());
        Ok(ClaimToPrepare {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            uid: uid.to_owned(),
            allocation: Allocation::Results(results.map_err(|error| error.to_string())?),
        })
    }

    /// A user deallocates, deletes or replaces a claim.
    pub(crate) fn change_claim(&mut self, key: &ObjectKey) {
        let what = self.rng.below(3);
        self.trace(|| format!("user: changes claim {key}: {what}"));
        if what == 0 {
            let _ = self.store.update_claim(key, None, Endpoint::Status, |claim| {
                claim.status = ResourceClaimStatus::default();
                Ok(())
            });
            return;
        }
        self.store.delete_claim(key);
        if what == 2 && !self.store.claims.contains_key(key) {
            self.create_claim(
                key,
                "gpu",
                drayman::api::resource::AllocationMode::WaitForFirstConsumer,
            );
            let nodes: Vec<String> = self.environment.nodes.keys().cloned().collect();
            let node = self.rng.pick(&nodes);
            let claim = self.store.claims.get(key).cloned();
            if let (Some(node), Some(claim)) = (node, claim) {
                let devices = self.devices_on(&node, &[(String::new(), claim)]);
                for (claim, hold) in devices.into_iter().flatten() {
                    let _ = self.store.update_claim(&claim, None, Endpoint::Status, |claim| {
                        claim.status.driver_name = Some(DRIVER.to_owned());
                        claim.status.allocation = Some(allocation_of(&hold, true));
                        let consumer = ResourceClaimConsumerReference::pod("another", "uid-another");
                        claim.status.reserved_for = vec![consumer];
                        Ok(())
                    });
                }
            }
        }
    }

    /// Creates a pod with one to three claims.
    pub(crate) fn user_creates_structured_pod(&mut self, key: &ObjectKey) {
        let kinds = [
            Use::Template("gpu"),
            Use::Template("gpu"),
            Use::Template("gpu.pair"),
            Use::Template("gpu.admin"),
            Use::Named("named-0"),
            Use::Named("named-1"),
        ];
        let count = *self.rng.pick(&[1, 1, 1, 2, 2, 3]).as_ref().unwrap();
        let uses: Vec<Use<'_>> = (0..count).filter_map(|_| self.rng.pick(&kinds)).collect();
        self.create_pod(key, &uses, None);
    }

    /// A user changes a claim or removes the CDI files of a node.
    pub(crate) fn user_interferes(&mut self) {
        if self.rng.chance(300) {
            let nodes: Vec<String> = self.environment.nodes.keys().cloned().collect();
            if let Some(node) = self.rng.pick(&nodes) {
                self.remove_cdi_files(&node);
            }
        } else if let Some(claim) = self.any_claim() {
            self.change_claim(&claim);
        }
    }

    /// Stops faults and runs until idle.
    pub(crate) fn conclude_structured(&mut self) {
        self.faults.stop();
        self.stop_users();
        self.last_change = self.now;
        self.run_until_quiet(60_000);
    }
}
