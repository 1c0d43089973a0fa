//! Simulated nodes: a kubelet and a companion on each node, with a disk that can lose unflushed data, and kills of each.
//!
//! The companion executes the real plans of `core::prepare`; the kubelet behaves like `pkg/kubelet/cm/dra/manager.go` of 1.30. Nodes have
//! their own random stream.

mod companion;
mod device_manager;
mod device_plugin;
mod disk;
mod invariants;
mod kubelet;
mod kubelet_apis;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drayman::api::handle::{DeviceHandle, HandleDevice, VERSION};
use drayman::api::resource::ResourceClaim;
use drayman::core::claims::ObjectKey;
use drayman::core::names::ClaimUid;
use drayman::core::prepare::plan::{Allocation, ClaimToPrepare};

use crate::cluster::{Action, Cluster, SECOND};
use crate::driver::{Hold, uid_of};
use crate::pods::uid_of_pod;
use crate::rng::Rng;
use companion::Companion;
use device_manager::DeviceManager;
use device_plugin::ExtendedResourcePod;
use disk::Disk;
pub(crate) use disk::{OperationFault, driver_name};
use kubelet::Kubelet;

/// A node of the cluster.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    name: String,
    boots: u32,
    disk: Disk,
    companion: Option<Companion>,
    kubelet: Kubelet,
    /// Claims for which the driver has done work that is not reverted.
    driver_claims: BTreeSet<ClaimUid>,
    /// The time of the next orphan check.
    orphan_check_at: u64,
    /// A kubelet sync is scheduled.
    due: bool,
    /// Devices are in mode `both`.
    both: bool,
    manager: DeviceManager,
    /// A read of PodResources and an update of claims are scheduled.
    pod_resources_due: bool,
    claims_due: bool,
}

/// All nodes, if any.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes {
    pub(crate) all: BTreeMap<String, Node>,
    rng: Option<Rng>,
    /// Planned faults by companion operation, and whether the node loses power.
    pub(crate) plan: BTreeMap<u64, (OperationFault, bool)>,
    /// Number of companion operations.
    pub(crate) operations: u64,
    /// UIDs of pods whose containers have ended or terminate, and whose status is not updated yet.
    pub(crate) ending: BTreeSet<String>,
    /// UIDs of pods with containers in uninterruptible sleep.
    pub(crate) stuck: BTreeSet<String>,
    /// Number of successful prepare calls.
    pub(crate) prepared: u64,
    /// Number of prepare calls for a device of another claim.
    pub(crate) refused: u64,
    /// Number of prepare calls for devices of another node.
    pub(crate) misdirected: u64,
    /// Pods with extended resources, by UID.
    extended_resource_pods: BTreeMap<String, ExtendedResourcePod>,
    /// Number of successful Allocate calls.
    pub(crate) granted: u64,
    /// Number of retried writes.
    pub(crate) retried: usize,
}

/// A scheduled action of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeAction {
    StartCompanion,
    StartKubelet,
    /// Kubelet performs one task and reschedules itself.
    Sync,
    /// The companion finds claims that kubelet no longer lists.
    CheckOrphans,
    /// Users create, complete or delete a pod with extended resources.
    ExtendedResourcePod,
    /// The companion retries failed writes.
    Retry,
    /// A device list reaches kubelet.
    ReceiveDevices,
    /// Kubelet records grants.
    Record,
    /// The companion reads PodResources.
    ReadPodResources,
    /// The companion observes claims.
    ObserveClaims,
}

impl Nodes {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The number of steps of the longest companion operation.
    pub(crate) fn longest_operation(&self) -> u32 {
        let disks = self.all.values().map(|node| node.disk.longest());
        disks.max().unwrap_or_default()
    }

    fn rng(&mut self) -> &mut Rng {
        self.rng.get_or_insert_with(|| Rng::new(0))
    }
}

/// A claim UID in the format of the API server.
pub(crate) fn claim_uid(uid: &str) -> ClaimUid {
    let number: u64 = uid.trim_start_matches("uid-").parse().unwrap();
    ClaimUid::parse(&format!("00000000-0000-4000-8000-{number:012}")).unwrap()
}

/// The prepare request of kubelet for a claim.
fn request(claim: &ResourceClaim, hold: &Hold) -> ClaimToPrepare {
    let uid = claim_uid(&uid_of(claim)).to_string();
    let device = |name: &String| HandleDevice {
        request: "device".to_owned(),
        device: name.clone(),
    };
    let handle = DeviceHandle {
        version: VERSION,
        claim_uid: uid.clone(),
        node_name: hold.node.clone(),
        node_uid: format!("uid of {}", hold.node),
        devices: hold.devices.iter().map(device).collect(),
    };
    ClaimToPrepare {
        namespace: claim.metadata.namespace.clone().unwrap_or_default(),
        name: claim.metadata.name.clone().unwrap_or_default(),
        uid,
        allocation: Allocation::Handle(handle.to_data().unwrap()),
    }
}

impl Cluster {
    /// Adds a kubelet and a companion to each node.
    pub(crate) fn set_up_nodes(&mut self, seed: u64) {
        self.nodes.rng = Some(Rng::new(seed ^ 0x6e6f_6465));
        for name in self.environment.nodes.keys().cloned().collect::<Vec<_>>() {
            let node = Node {
                name: name.clone(),
                boots: 0,
                disk: Disk::default(),
                companion: None,
                kubelet: Kubelet::new(self.structured),
                driver_claims: BTreeSet::new(),
                orphan_check_at: 0,
                due: false,
                both: false,
                manager: DeviceManager::default(),
                pod_resources_due: false,
                claims_due: false,
            };
            self.nodes.all.insert(name.clone(), node);
            self.on_node(&name, 0, 3 * SECOND, NodeAction::StartKubelet);
            self.on_node(&name, 0, 3 * SECOND, NodeAction::StartCompanion);
        }
    }

    /// Schedules an action on a node after a random delay.
    fn on_node(&mut self, node: &str, from: u64, to: u64, action: NodeAction) {
        let delay = self.nodes.rng().between(from, to);
        let node = node.to_owned();
        self.after(delay, Action::Node { node, action });
    }

    /// Notifies kubelets of store changes.
    pub(crate) fn wake_kubelets(&mut self) {
        let listening = self.nodes.all.values().filter(|node| node.both);
        for name in listening.map(|node| node.name.clone()).collect::<Vec<_>>() {
            self.observe_claims_later(&name);
        }
        let idle: Vec<String> = self
            .nodes
            .all
            .values()
            .filter(|node| !node.due && node.kubelet.up)
            .map(|node| node.name.clone())
            .collect();
        for name in idle {
            if self.work_of(&name).is_some() {
                self.sync_later(&name, 50_000);
            }
        }
    }

    fn sync_later(&mut self, name: &str, within: u64) {
        if let Some(node) = self.nodes.all.get_mut(name)
            && !node.due
        {
            node.due = true;
            self.on_node(name, 0, within, NodeAction::Sync);
        }
    }

    pub(crate) fn act_on_node(&mut self, name: &str, action: NodeAction) {
        match action {
            NodeAction::StartCompanion => self.start_companion(name),
            NodeAction::StartKubelet => self.start_kubelet(name),
            NodeAction::Sync => self.sync(name),
            NodeAction::CheckOrphans => self.check_orphans(name),
            NodeAction::Retry => self.retry(name),
            NodeAction::ExtendedResourcePod => self.user_changes_extended_resource_pods(name),
            NodeAction::ReceiveDevices => self.receive_devices(name),
            NodeAction::Record => self.record_grants(name),
            NodeAction::ReadPodResources => self.read_pod_resources(name),
            NodeAction::ObserveClaims => self.observe_claims(name),
        }
        self.send_devices(name);
        self.recheck_pod_resources(name);
        // These actions change neither containers nor the disk.
        if !matches!(
            action,
            NodeAction::ExtendedResourcePod
                | NodeAction::ReceiveDevices
                | NodeAction::Record
                | NodeAction::ReadPodResources
                | NodeAction::ObserveClaims
        ) {
            self.check_node(name);
        }
    }

    pub(crate) fn has_containers(&self, pod: &ObjectKey) -> bool {
        let uid = self
            .store
            .pods
            .get(pod)
            .map(|pod| uid_of_pod(pod))
            .unwrap_or_default();
        let mut nodes = self.nodes.all.values();
        nodes.any(|node| node.kubelet.running.contains_key(&uid) || node.manager.running.contains_key(&uid))
    }

    /// Delays writes of the claim checkpoint of kubelet.
    pub(crate) fn delay_kubelet_file(&mut self, name: &str, late: bool) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.file_delayed = late;
        }
    }

    /// Removes all CDI files of a node and kills its companion.
    pub(crate) fn remove_cdi_files(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get(name) {
            node.disk.remove_all_cdi();
        }
        self.kill_companion(name);
    }

    fn time(&self) -> Duration {
        Duration::from_micros(self.now)
    }
}
