//! Device plugin API between companion and kubelet (`pkg/kubelet/cm/devicemanager` of 1.30) for kinds in mode `both`: delayed device lists,
//! grants recorded after the answer and dropped with their pod, a checkpoint, and the PodResources API.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::resource::{AllocationResult, ResourceClaim, ResourceHandle};
use drayman::core::claims::ObjectKey;
use drayman::core::prepare::containers::{PodContainer, ResourceSnapshot};
use drayman::core::prepare::device_plugin::{Order, Preference, preferred};
use drayman::core::prepare::plan::{Allocation, Refusal};

use super::companion::{Companion, Failure};
use super::kubelet_apis::PodResources;
use super::{NodeAction, request};
use crate::cluster::{Cluster, MILLISECOND, SECOND};
use crate::driver::{DRIVER, recorded_hold};
use crate::faults::Fault;
use crate::pods::uid_of_pod;

/// How long after its start kubelet may not know its pods.
const EARLY: u64 = 5 * SECOND;
/// Interval of PodResources reads by the companion (`src/node/state/resources.rs`).
const RECHECK_INTERVAL: u64 = 2 * SECOND;

/// Termination grace period of containers. The default of kubelet is 30 s.
const GRACE: u64 = 20 * SECOND;

/// How long admission may take after our answer.
const ADMISSION: u64 = 20 * SECOND;

/// A pod with devices as an extended resource.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtendedResourcePod {
    count: usize,
    /// The devices belong to an init container, which PodResources does not list.
    hidden: bool,
}

impl Cluster {
    pub(super) fn is_both(&self, name: &str) -> bool {
        self.nodes.all.get(name).is_some_and(|node| node.both)
    }

    /// Sets all devices to mode `both`.
    pub(crate) fn open_both_apis(&mut self) {
        for node in self.nodes.all.values_mut() {
            node.both = true;
        }
        for name in self.nodes.all.keys().cloned().collect::<Vec<_>>() {
            self.on_node(&name, 0, 10 * SECOND, NodeAction::ExtendedResourcePod);
        }
    }

    /// Creates a pod with extended resources on a node.
    pub(crate) fn create_extended_resource_pod(
        &mut self,
        key: &ObjectKey,
        node: &str,
        count: usize,
        hidden: bool,
    ) {
        let uid = self.create_pod(key, &[], Some(node));
        self.nodes
            .extended_resource_pods
            .insert(uid, ExtendedResourcePod { count, hidden });
        self.wake_kubelets();
    }

    /// Users create, complete and delete such pods.
    pub(super) fn user_changes_extended_resource_pods(&mut self, name: &str) {
        if self.user_actions == 0 {
            return;
        }
        let pods: Vec<(ObjectKey, String)> = self
            .pods_on(name)
            .into_iter()
            .map(|(key, pod)| (key, uid_of_pod(&pod)))
            .filter(|(_, uid)| self.nodes.extended_resource_pods.contains_key(uid))
            .collect();
        let (what, of) = (self.nodes.rng().below(10), self.nodes.rng().pick(&pods));
        match (what, of) {
            (7 | 8, Some((key, uid))) => {
                self.trace(|| format!("{name}: user: extended resource pod {key} completes"));
                self.nodes.ending.insert(uid);
                self.wake_kubelets();
            }
            (9, Some((key, _))) => {
                self.trace(|| format!("{name}: user: deletes extended resource pod {key}"));
                if self.occurs_on_node(Fault::ForcedDeletion) {
                    self.store.remove_pod(&key);
                }
                self.store.delete_pod(&key);
            }
            _ => {
                let rng = self.nodes.rng();
                let key = ObjectKey::new("default", format!("p{}", rng.below(8)));
                let (count, hidden) = (1 + usize::from(rng.chance(200)), rng.chance(200));
                // The scheduler rarely selects a node without free devices.
                let manager = self.nodes.all.get(name).map(|node| node.manager.free().len());
                let fits = manager >= Some(count) || self.nodes.rng().chance(100);
                if fits && !self.store.pods.contains_key(&key) {
                    self.trace(|| format!("{name}: user: extended resource pod {key}"));
                    self.create_extended_resource_pod(&key, name, count, hidden);
                }
            }
        }
        self.on_node(name, 0, 4 * SECOND, NodeAction::ExtendedResourcePod);
    }

    fn active(&self, name: &str) -> BTreeSet<String> {
        let pods = self.pods_on(name).into_iter();
        pods.map(|(_, pod)| uid_of_pod(&pod)).collect()
    }

    // === device lists ===

    /// Sends the device list to kubelet if it changed.
    pub(super) fn send_devices(&mut self, name: &str) {
        let Some(node) = self
            .nodes
            .all
            .get_mut(name)
            .filter(|node| node.both && node.kubelet.up)
        else {
            return;
        };
        let Some(companion) = &node.companion else { return };
        let devices = companion.plugin_devices();
        let manager = &mut node.manager;
        if manager.in_flight || manager.sent.as_ref() == Some(&devices) {
            return;
        }
        manager.sent = Some(devices);
        manager.in_flight = true;
        let late = self.occurs_on_node(Fault::DeviceListLate);
        let (from, to) = if late {
            (SECOND, 30 * SECOND)
        } else {
            (0, 50 * MILLISECOND)
        };
        self.on_node(name, from, to, NodeAction::ReceiveDevices);
    }

    /// Receives the device list unless the stream has ended.
    pub(super) fn receive_devices(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.manager.in_flight = false;
            if let Some(devices) = &node.manager.sent {
                let advertised = devices.iter().map(|device| (device.id.clone(), device.healthy));
                node.manager.advertised = advertised.collect();
            }
        }
    }

    // === PodResources ===

    /// The current PodResources response and checkpoint, if devices are in mode `both`.
    pub(super) fn pod_resources(&mut self, name: &str) -> Option<PodResources> {
        if !self.is_both(name) {
            return None;
        }
        let silent = self.occurs_on_node(Fault::PodResourcesSilent);
        let node = self.nodes.all.get(name)?;
        if silent || !node.kubelet.up {
            return Some(Err("kubelet does not answer".to_owned()));
        }
        let early = self.now < node.manager.since + EARLY && self.occurs_on_node(Fault::PodResourcesEarly);
        let pods = if early { Vec::new() } else { self.pods_on(name) };
        let active = self.active(name);
        let mut shown = ResourceSnapshot::default();
        let extended_resource_pods = &self.nodes.extended_resource_pods;
        let manager = &mut self.nodes.all.get_mut(name)?.manager;
        if !early {
            manager.forget_others(&active);
        }
        for (key, pod) in pods {
            let uid = uid_of_pod(&pod);
            shown.pods.insert((key.namespace.clone(), key.name.clone()));
            if extended_resource_pods
                .get(&uid)
                .is_some_and(|wanted| wanted.hidden)
            {
                continue;
            }
            for device in manager.granted.get(&uid).into_iter().flatten() {
                let container = PodContainer {
                    namespace: key.namespace.clone(),
                    pod: key.name.clone(),
                    container: "main".to_owned(),
                };
                shown.listed.insert(device.clone(), container);
            }
        }
        let file = manager.file.iter();
        let there = file.filter(|(pod, _)| manager.directories.contains(*pod));
        shown.recorded = there.flat_map(|(_, devices)| devices).cloned().collect();
        Some(Ok(shown))
    }

    /// The companion reads PodResources.
    pub(super) fn read_pod_resources(&mut self, name: &str) {
        let (now, pod_resources) = (self.time(), self.pod_resources(name));
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.pod_resources_due = false;
            if let (Some(companion), Some(pod_resources)) = (&mut node.companion, &pod_resources) {
                // A failed read is repeated.
                let _ = companion.read_pod_resources(pod_resources, now);
            }
        }
    }

    pub(super) fn recheck_pod_resources(&mut self, name: &str) {
        let Some(node) = self.nodes.all.get_mut(name).filter(|node| node.both) else {
            return;
        };
        let wanted = node.companion.as_ref().is_some_and(Companion::needs_recheck);
        if wanted && !node.pod_resources_due {
            node.pod_resources_due = true;
            self.on_node(
                name,
                RECHECK_INTERVAL / 2,
                RECHECK_INTERVAL,
                NodeAction::ReadPodResources,
            );
        }
    }

    // === claims ===

    pub(super) fn observe_claims_later(&mut self, name: &str) {
        let Some(node) = self
            .nodes
            .all
            .get_mut(name)
            .filter(|node| node.both && !node.claims_due)
        else {
            return;
        };
        node.claims_due = true;
        let late = self.occurs_on_node(Fault::ClaimWatchLate);
        let (from, to) = if late {
            (SECOND, 60 * SECOND)
        } else {
            (0, 100 * MILLISECOND)
        };
        self.on_node(name, from, to, NodeAction::ObserveClaims);
    }

    /// The companion observes the current claims.
    pub(super) fn observe_claims(&mut self, name: &str) {
        let claims: Vec<ResourceClaim> = self
            .store
            .claims
            .values()
            .filter_map(|claim| claim_for_companion(claim, name))
            .collect();
        let Some(node) = self.nodes.all.get_mut(name) else {
            return;
        };
        node.claims_due = false;
        let Some(companion) = node.companion.as_mut() else {
            return;
        };
        if companion.observe_claims(&claims, name) {
            self.read_pod_resources(name);
            if let Some(node) = self.nodes.all.get_mut(name)
                && let Some(companion) = node.companion.as_mut()
            {
                companion.record_conflicts();
            }
        }
    }

    /// Terminates a container. Returns whether it has ended.
    pub(super) fn terminate(&mut self, name: &str, pod: &str) -> bool {
        let now = self.now;
        let known = self.nodes.all.get(name).map(|node| &node.manager);
        if known.is_none_or(|manager| !manager.running.contains_key(pod) || manager.ends.contains_key(pod)) {
            return true;
        }
        let takes = if self.nodes.rng().chance(400) {
            self.nodes.rng().between(0, GRACE)
        } else {
            0
        };
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.manager.ends.insert(pod.to_owned(), now + takes);
        }
        if takes > 0 {
            self.on_node(name, takes, takes, NodeAction::Sync);
        }
        takes == 0
    }

    // === grants ===

    /// Admits a pod with extended resources, or starts its container.
    pub(super) fn start_extended_resource_pod(
        &mut self,
        name: &str,
        key: &ObjectKey,
        pod: &str,
        wanted: ExtendedResourcePod,
    ) -> bool {
        let active = self.active(name);
        let Some(node) = self.nodes.all.get_mut(name) else {
            return false;
        };
        let manager = &mut node.manager;
        if let Some(grant) = manager.granted.get(pod).cloned() {
            // After a kubelet restart the pod is admitted again with its grant.
            let healthy = |device: &String| manager.advertised.get(device) == Some(&true);
            if !manager.admitted.contains(pod) && !grant.iter().all(healthy) {
                self.fail_pod(name, key, pod);
                return true;
            }
            manager.admitted.insert(pod.to_owned());
            manager.directories.insert(pod.to_owned());
            manager.running.insert(pod.to_owned(), grant);
            return true;
        }
        manager.forget_others(&active);
        let available = manager.free();
        let preference = Preference {
            available,
            must_include: Vec::new(),
            size: wanted.count,
        };
        let ids = preferred(&preference, &BTreeMap::new(), Order::Descending);
        if ids.len() < wanted.count {
            self.fail_pod(name, key, pod);
            return true;
        }
        let now = self.time();
        let answer = self.ask_companion(name, |companion, _| companion.allocate(&ids, now));
        if let Some(Err(Failure::Refused(Refusal::Held { .. } | Refusal::Allocated { .. }))) = &answer {
            self.faults.hit(Fault::GrantOfClaim);
        }
        if !matches!(answer, Some(Ok(()))) {
            self.fail_pod(name, key, pod);
            return true;
        }
        self.nodes.granted += 1;
        if self.occurs_on_node(Fault::GrantForgotten) {
            self.kill_kubelet(name);
            return false;
        }
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.manager
                .unrecorded
                .insert(pod.to_owned(), ids.into_iter().collect());
        }
        let (from, to) = if self.occurs_on_node(Fault::GrantLate) {
            (SECOND, ADMISSION)
        } else {
            (0, 5 * MILLISECOND)
        };
        self.on_node(name, from, to, NodeAction::Record);
        true
    }

    /// Kubelet records answers in memory and in its checkpoint, and creates pod directories.
    pub(super) fn record_grants(&mut self, name: &str) {
        let Some(node) = self.nodes.all.get_mut(name).filter(|node| node.kubelet.up) else {
            return;
        };
        let manager = &mut node.manager;
        for (pod, devices) in std::mem::take(&mut manager.unrecorded) {
            manager.directories.insert(pod.clone());
            manager.admitted.insert(pod.clone());
            manager.granted.insert(pod, devices);
        }
        manager.file = manager.granted.clone();
        self.sync_later(name, 50 * MILLISECOND);
    }

    /// Fails a pod permanently, as after an `UnexpectedAdmissionError`.
    fn fail_pod(&mut self, name: &str, key: &ObjectKey, pod: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.forget(pod);
            node.manager.remove_pod(pod);
        }
        self.store
            .update_pod(key, |pod| pod.status.phase = Some("Failed".to_owned()));
    }

    // === invariants ===

    /// The known race by which container devices may be considered free: `docs/operator/devices.md`.
    pub(super) fn known_race(&self, name: &str, pod: &str) -> Option<Fault> {
        let manager = self.nodes.all.get(name).map(|node| &node.manager);
        let is_noted = manager.is_some_and(|manager| manager.file.contains_key(pod));
        if !self.active(name).contains(pod) && !is_noted {
            // Kubelet has no record of the pod: it was force-deleted, and a later grant replaced the file.
            return Some(Fault::LeftOver);
        }
        let is_missed = manager.is_some_and(|manager| manager.missed.contains(pod));
        is_missed.then_some(Fault::GrantMissed)
    }
}

/// A claim with devices of this node, as the API server returns it.
fn claim_for_companion(claim: &ResourceClaim, node: &str) -> Option<ResourceClaim> {
    let hold = recorded_hold(claim).filter(|hold| hold.node == node)?;
    let mut sent = claim.clone();
    let Allocation::Handle(data) = request(claim, &hold).allocation else {
        return None;
    };
    let handle = ResourceHandle {
        driver_name: Some(DRIVER.to_owned()),
        data: Some(data),
        ..ResourceHandle::default()
    };
    sent.status.allocation = Some(AllocationResult {
        resource_handles: vec![handle],
        ..AllocationResult::default()
    });
    Some(sent)
}
