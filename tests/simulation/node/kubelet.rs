//! A kubelet: prepares the claims of its pods, starts and stops their containers, and keeps a checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::resource::{Pod, ResourceClaim};
use drayman::core::claims::ObjectKey;
use drayman::core::names::{ClaimDevice, ClaimUid};
use drayman::core::prepare::kubelet_state::{self, KubeletClaim, KubeletView};
use drayman::core::prepare::plan::{DeviceResult, Refusal};
use drayman::core::prepare::prepared_claims::HeldDevice;
use drayman::testcluster::claim_records::{ClaimRecord, ClaimRecords};
use serde_json::{Value, json};

use super::companion::Failure;
use super::{NodeAction, claim_uid, driver_name, request};
use crate::cluster::{Cluster, MILLISECOND, SECOND};
use crate::driver::{DRIVER, Hold, recorded_hold, uid_of};
use crate::faults::Fault;
use crate::pods::uid_of_pod;
use crate::structured::{devices_of, results_of};

/// A claim in `dra_manager_state`.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    claim: KubeletClaim,
    /// The devices of the claim when it was prepared. In structured mode, kubelet lists a claim before it asks the driver.
    pub(super) hold: Option<Hold>,
}

/// Devices of containers, by claim.
type Devices = BTreeMap<ClaimUid, BTreeSet<String>>;

#[derive(Clone, Debug, Default)]
pub(super) struct Kubelet {
    pub(super) up: bool,
    /// Structured mode.
    pub(super) structured: bool,
    pub(super) listed: ClaimRecords<ClaimUid, Listed>,
    /// The file is not written yet because the disk is busy or full.
    pub(super) file_delayed: bool,
    /// Accepted pods.
    pods: BTreeMap<String, ObjectKey>,
    /// Containers by pod UID. They survive a kubelet restart but not a reboot.
    pub(super) running: BTreeMap<String, Devices>,
    failures: u32,
}

/// A pending task of kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Stops the pod: it terminates or no longer exists.
    End { pod: String },
    /// Starts the containers.
    Start { key: ObjectKey, pod: String },
    /// Stops containers of an unknown pod.
    Kill { pod: String },
    /// Removes the directory of a deleted pod.
    Clean { pod: String },
}

impl Kubelet {
    pub(super) fn new(structured: bool) -> Self {
        Self {
            structured,
            ..Self::default()
        }
    }

    /// The checkpoint as the companion reads it.
    pub(super) fn view(&self) -> KubeletView {
        if self.structured {
            return self.file();
        }
        let claims = self.listed.iter().filter(|_| !self.file_delayed);
        KubeletView::Lists(
            claims
                .map(|(uid, listed)| (uid.clone(), listed.claim.claim.clone()))
                .collect(),
        )
    }

    /// `dra_manager_state` in the format since 1.31.
    fn file(&self) -> KubeletView {
        let device = |uid: &ClaimUid, result: DeviceResult| {
            let name = ClaimDevice {
                uid: uid.clone(),
                device: result.device.clone(),
                admin_access: result.admin_access,
            };
            json!({
                "PoolName": result.pool, "DeviceName": result.device, "ShareID": result.share_id,
                "RequestNames": [result.request], "CDIDeviceIDs": [driver_name().cdi_id_of_claim_device(&name)],
            })
        };
        let claim = |(uid, listed): (&ClaimUid, &ClaimRecord<Listed>)| {
            let devices = listed.claim.hold.as_ref().map(|hold| {
                let results = results_of(hold).into_iter();
                results.map(|result| device(uid, result)).collect::<Vec<_>>()
            });
            let pods: BTreeMap<&String, Value> = listed.pods.iter().map(|pod| (pod, json!({}))).collect();
            json!({
                "ClaimUID": uid.as_str(), "ClaimName": listed.claim.claim.name, "Namespace": listed.claim.claim.namespace,
                "PodUIDs": pods, "DriverState": { DRIVER: { "Devices": devices } },
            })
        };
        let claims = self.listed.iter().filter(|_| !self.file_delayed);
        let data = json!({
            "kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
            "ClaimInfoStateList": claims.map(claim).collect::<Vec<_>>(),
        });
        let file = json!({ "Data": data.to_string(), "Checksum": 0 });
        let claims = kubelet_state::parse(file.to_string().as_bytes(), &driver_name());
        claims.map_or_else(
            |error| KubeletView::Unknown(error.to_string()),
            KubeletView::Lists,
        )
    }

    /// Claims in use by containers.
    pub(super) fn in_use(&self) -> BTreeSet<ClaimUid> {
        self.running.values().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Stops the process; containers keep running.
    fn stop(&mut self) {
        self.up = false;
        self.pods.clear();
        self.listed.restart();
    }

    /// Rejects a pod.
    pub(super) fn forget(&mut self, pod: &str) {
        self.pods.remove(pod);
    }

    pub(super) fn lose_power(&mut self) {
        self.stop();
        self.running.clear();
    }
}

impl Cluster {
    pub(super) fn start_kubelet(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.up = true;
            node.kubelet.failures = 0;
            node.manager.start(self.now);
        }
        self.sync_later(name, SECOND);
    }

    pub(super) fn kill_kubelet(&mut self, name: &str) {
        self.trace(|| format!("{name}: kubelet is killed"));
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.stop();
            node.manager.stop();
        }
        self.on_node(name, 100 * MILLISECOND, 10 * SECOND, NodeAction::StartKubelet);
    }

    /// The pods of a node in the API server.
    pub(super) fn pods_on(&self, name: &str) -> Vec<(ObjectKey, std::sync::Arc<Pod>)> {
        let pods = self.store.pods.iter();
        pods.filter(|(_, pod)| pod.spec.node_name.as_deref() == Some(name) && pod.status.phase.is_none())
            .map(|(key, pod)| (key.clone(), pod.clone()))
            .collect()
    }

    pub(super) fn is_to_end(&self, pod: &Pod) -> bool {
        pod.metadata.deletion_timestamp.is_some() || self.nodes.ending.contains(&uid_of_pod(pod))
    }

    /// All tasks that the kubelet of a node could perform now.
    fn all_work_of(&self, name: &str) -> Vec<Work> {
        let Some(node) = self.nodes.all.get(name).filter(|node| node.kubelet.up) else {
            return Vec::new();
        };
        let (kubelet, manager) = (&node.kubelet, &node.manager);
        let runs = |uid: &String| kubelet.running.contains_key(uid) || manager.running.contains_key(uid);
        let (mut work, mut known) = (Vec::new(), BTreeSet::new());
        for (key, pod) in self.pods_on(name) {
            let uid = uid_of_pod(&pod);
            if self.is_to_end(&pod) {
                work.push(Work::End { pod: uid.clone() });
            } else if !runs(&uid) && !manager.is_admitting(&uid) {
                let pod = uid.clone();
                work.push(Work::Start { key, pod });
            }
            known.insert(uid);
        }
        // Since 1.31, kubelet also unprepares the listed claims of pods that ended before it started.
        let listed = kubelet.listed.iter().filter(|_| self.structured);
        let of_claims = listed.flat_map(|(_, record)| &record.pods);
        let all: BTreeSet<&String> = kubelet.pods.keys().chain(of_claims).collect();
        let gone = all.into_iter().filter(|pod| !known.contains(*pod));
        work.extend(gone.map(|pod| Work::End { pod: pod.clone() }));
        let unknown = kubelet.running.keys().chain(manager.running.keys());
        let unknown = unknown.filter(|pod| !known.contains(*pod) && !kubelet.pods.contains_key(*pod));
        work.extend(unknown.map(|pod| Work::Kill { pod: pod.clone() }));
        let empty = manager.directories.iter().filter(|pod| !runs(pod));
        let empty = empty.filter(|pod| !known.contains(*pod) && !kubelet.pods.contains_key(*pod));
        work.extend(empty.map(|pod| Work::Clean { pod: pod.clone() }));
        work.retain(|work| match work {
            Work::End { pod } | Work::Kill { pod } => {
                !manager.is_ending(pod, self.now) && !self.nodes.stuck.contains(pod)
            }
            Work::Start { .. } | Work::Clean { .. } => true,
        });
        work
    }

    pub(super) fn work_of(&self, name: &str) -> Option<Work> {
        self.all_work_of(name).into_iter().next()
    }

    /// Kubelet performs one task.
    pub(super) fn sync(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.due = false;
        }
        if self.occurs_on_node(Fault::KubeletKilled) {
            self.kill_kubelet(name);
            return;
        }
        let work = self.all_work_of(name);
        // Each pod has its own worker: stopping a container does not wait for other pods.
        let over = work.iter().find(|work| match work {
            Work::End { pod } | Work::Kill { pod } => self.nodes.extended_resource_pods.contains_key(pod),
            Work::Start { .. } | Work::Clean { .. } => false,
        });
        let Some(work) = over.cloned().or_else(|| self.nodes.rng().pick(&work)) else {
            return;
        };
        let done = match &work {
            Work::End { pod } | Work::Kill { pod } if !self.terminate(name, pod) => true,
            Work::Kill { pod } => {
                self.stop_containers(name, pod);
                true
            }
            Work::Clean { pod } => {
                if let Some(node) = self.nodes.all.get_mut(name) {
                    node.manager.remove_pod(pod);
                }
                true
            }
            Work::End { pod } => self.end(name, pod),
            Work::Start { key, pod } => self.start_pod(name, key, pod),
        };
        self.trace(|| format!("{name}: kubelet: {work:?}: {done}"));
        let Some(node) = self.nodes.all.get_mut(name).filter(|node| node.kubelet.up) else {
            return;
        };
        node.kubelet.failures = if done { 0 } else { node.kubelet.failures + 1 };
        let longest = ((100 * MILLISECOND) << node.kubelet.failures.min(7)).min(10 * SECOND);
        if self.work_of(name).is_some() {
            self.sync_later(name, longest);
        }
    }

    fn stop_containers(&mut self, name: &str, pod: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.running.remove(pod);
            node.manager.has_ended(pod);
        }
    }

    /// Stops the containers, unprepares claims without other pods, and updates the API server.
    fn end(&mut self, name: &str, pod: &str) -> bool {
        self.stop_containers(name, pod);
        let Some(node) = self.nodes.all.get_mut(name) else {
            return false;
        };
        let own = node.kubelet.listed.of_pod(pod);
        let own: Vec<(ClaimUid, bool)> = own.map(|(uid, _, last)| (uid.clone(), last)).collect();
        for (uid, last) in own {
            if last {
                let answer = self.ask_companion(name, |companion, access| companion.unprepare(access, &uid));
                if !matches!(answer, Some(Ok(()))) || self.occurs_on_node(Fault::KubeletRetries) {
                    return false;
                }
                if self.occurs_on_node(Fault::KubeletForgets) {
                    self.kill_kubelet(name);
                    return false;
                }
            }
            let Some(node) = self.nodes.all.get_mut(name) else {
                return false;
            };
            node.kubelet.listed.release(&uid, pod);
        }
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.pods.remove(pod);
            node.manager.remove_pod(pod);
        }
        let key = self
            .pods_on(name)
            .into_iter()
            .find(|(_, known)| uid_of_pod(known) == pod);
        if let Some((key, known)) = key {
            if known.metadata.deletion_timestamp.is_some() {
                self.store.remove_pod(&key);
            } else {
                self.store
                    .update_pod(&key, |pod| pod.status.phase = Some("Succeeded".to_owned()));
            }
        }
        self.nodes.ending.remove(pod);
        true
    }

    /// Our claims that the containers of a pod need, if all claims of the pod are allocated and reserved.
    pub(super) fn needs(
        &self,
        key: &ObjectKey,
        pod: &str,
    ) -> Option<Vec<(std::sync::Arc<ResourceClaim>, Hold)>> {
        let mut needs = Vec::new();
        for (_, claim) in self.claims_of(key)? {
            let status = &claim.status;
            status.allocation.as_ref()?;
            if !status.reserved_for.iter().any(|user| user.uid == pod) {
                return None;
            }
            if let Some(hold) = recorded_hold(&claim) {
                needs.push((claim, hold));
            }
        }
        Some(needs)
    }

    fn start_pod(&mut self, name: &str, key: &ObjectKey, pod: &str) -> bool {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.pods.insert(pod.to_owned(), key.clone());
        }
        if let Some(wanted) = self.nodes.extended_resource_pods.get(pod).copied() {
            return self.start_extended_resource_pod(name, key, pod, wanted);
        }
        let Some(needs) = self.needs(key, pod) else {
            return false;
        };
        for (claim, hold) in &needs {
            if !self.have_prepared(name, pod, claim, hold) {
                return false;
            }
        }
        self.start_containers(name, pod, &needs)
    }

    fn have_prepared(&mut self, name: &str, pod: &str, claim: &ResourceClaim, hold: &Hold) -> bool {
        let uid = claim_uid(&uid_of(claim));
        let Some(node) = self.nodes.all.get_mut(name) else {
            return false;
        };
        if node.kubelet.listed.share(&uid, pod) {
            return true;
        }
        let key = ObjectKey::of(&claim.metadata);
        let mut listed = Listed {
            claim: KubeletClaim {
                namespace: key.namespace.clone(),
                name: key.name.clone(),
                ours: true,
                prepared: true,
                devices: None,
            },
            hold: None,
        };
        let request = if self.structured {
            node.kubelet.listed.add(uid.clone(), listed.clone(), pod);
            match self.read_claim(&key, uid.as_str()) {
                Ok(request) => request,
                Err(problem) => {
                    self.trace(|| format!("{name}: prepare {uid}: {problem}"));
                    return false;
                }
            }
        } else {
            request(claim, hold)
        };
        let (pod_resources, now) = (self.pod_resources(name), self.time());
        let answer = self.ask_companion(name, |companion, access| {
            companion.prepare(access, &request, pod_resources.as_ref(), now)
        });
        if let Some(Err(failure)) = &answer {
            self.trace(|| format!("{name}: prepare {uid}: {failure:?}"));
        }
        if let Some(Err(Failure::Refused(Refusal::InContainer { .. }))) = &answer {
            self.faults.hit(Fault::ClaimOfContainer);
        }
        if let Some(Err(Failure::Refused(Refusal::Held { .. }))) = &answer {
            self.nodes.refused += 1;
        }
        if let Some(Err(Failure::Refused(Refusal::OtherNode { .. }))) = &answer {
            self.nodes.misdirected += 1;
        }
        // The answer may be lost; kubelet then retries.
        if !matches!(answer, Some(Ok(_))) || self.occurs_on_node(Fault::KubeletRetries) {
            return false;
        }
        self.nodes.prepared += 1;
        if self.occurs_on_node(Fault::KubeletForgets) {
            // Kubelet is killed before it records the answer.
            self.kill_kubelet(name);
            return false;
        }
        listed.claim.devices = Some(hold.devices.iter().map(HeldDevice::named).collect());
        listed.hold = Some(hold.clone());
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.listed.add(uid.clone(), listed.clone(), pod);
            let known = node.kubelet.listed.set_prepared(&uid);
            // A kubelet that has started keeps what its file lists.
            if let Some(known) = known.filter(|known| known.hold.is_none()) {
                *known = listed;
            }
        }
        true
    }

    /// Starts the containers with the devices of their CDI files.
    fn start_containers(
        &mut self,
        name: &str,
        pod: &str,
        needs: &[(std::sync::Arc<ResourceClaim>, Hold)],
    ) -> bool {
        let Some(node) = self.nodes.all.get(name) else {
            return false;
        };
        let (mut devices, mut other) = (Devices::new(), None);
        for (claim, hold) in needs {
            let uid = claim_uid(&uid_of(claim));
            let Some(spec) = node.disk.cdi(&uid) else {
                return false;
            };
            let nodes = spec
                .devices
                .iter()
                .flat_map(|device| &device.container_edits.device_nodes);
            let had: BTreeSet<String> = nodes
                .map(|node| node.path.trim_start_matches("/dev/").to_owned())
                .collect();
            // A claim that changed since keeps its prepared devices.
            let listed = node.kubelet.listed.get(&uid).filter(|_| self.structured);
            let hold = listed
                .and_then(|listed| listed.claim.hold.as_ref())
                .unwrap_or(hold);
            let expected = if self.structured {
                devices_of(hold)
            } else {
                hold.devices.clone()
            };
            if had != expected || hold.node != name {
                other = Some((uid.clone(), had.clone(), hold.clone()));
            }
            devices.insert(uid, hold.devices.clone());
        }
        if let Some((uid, had, hold)) = other {
            let name = name.to_owned();
            self.violate(|| {
                format!("N1: containers of {uid} on {name} would get {had:?} instead of {hold:?}")
            });
        }
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.running.insert(pod.to_owned(), devices);
        }
        true
    }
}
