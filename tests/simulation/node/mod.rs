//! The node's half: a kubelet and a companion on each node, on a disk that forgets, with everything that can be killed killed.
//!
//! The companion is the real one's plans (`core::prepare`), carried out by a few lines as the shell does it; the kubelet does what
//! `pkg/kubelet/cm/dra/manager.go` of 1.30 does. Chance on nodes has a stream of its own.

mod companion;
mod disk;
mod kubelet;
mod kubelet_apis;
mod manager;
mod plugin;
mod promises;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drayman::api::handle::{DeviceHandle, HandleDevice, VERSION};
use drayman::api::resource::ResourceClaim;
use drayman::core::claims::ObjectKey;
use drayman::core::prepare::names::ClaimUid;
use drayman::core::prepare::plan::{Allocation, ClaimToPrepare};

use crate::driver::{Hold, uid_of};
use crate::pods::uid_of_pod;
use crate::rng::Rng;
use crate::stage::{Action, SECOND, Stage};
use companion::Companion;
use disk::Disk;
pub(crate) use disk::{Trouble, driver_name};
use kubelet::Kubelet;
use manager::Manager;
use plugin::Plug;

/// A node of the cluster.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    name: String,
    boots: u32,
    disk: Disk,
    companion: Option<Companion>,
    kubelet: Kubelet,
    /// Claims for which the companion's driver has done something that it has not undone.
    driven: BTreeSet<ClaimUid>,
    /// When the claims are looked into again.
    look_at: u64,
    /// Something of this node's is on its way to happen.
    due: bool,
    /// Its devices leave through both APIs.
    both: bool,
    manager: Manager,
    /// The companion is to ask kubelet again, and is to hear of claims.
    see_due: bool,
    hear_due: bool,
}

/// All nodes, if the run has any.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes {
    pub(crate) all: BTreeMap<String, Node>,
    rng: Option<Rng>,
    /// By the number of an operation of a companion: what goes wrong with it, and whether the node loses its power with that.
    pub(crate) plan: BTreeMap<u64, (Trouble, bool)>,
    /// Operations of companions.
    pub(crate) operations: u64,
    /// Pods whose containers have ended, or are to end, and whose kubelet has not said so yet.
    pub(crate) ending: BTreeSet<String>,
    /// Pods whose containers cannot be killed: one waits for a device, and for no signal.
    pub(crate) stuck: BTreeSet<String>,
    /// Calls that led to a prepared claim.
    pub(crate) prepared: u64,
    /// Claims of a device that another claim had.
    pub(crate) refused: u64,
    /// Claims of another node's devices.
    pub(crate) misdirected: u64,
    /// Pods that want devices as an extended resource, by uid.
    plugging: BTreeMap<String, Plug>,
    /// Calls of Allocate that were granted.
    pub(crate) granted: u64,
    /// Files that could not be written at first, and were tried again.
    pub(crate) tried_again: usize,
}

/// Something that happens on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// The companion's process starts.
    StartCompanion,
    /// Kubelet's process starts.
    StartKubelet,
    /// Kubelet does one thing, and comes again.
    Sync,
    /// The companion looks for claims that kubelet has forgotten.
    Look,
    /// People make, end or delete a pod that wants an extended resource.
    Plug,
    /// The companion writes what it could not write before.
    TryAgain,
    /// A list of devices reaches kubelet.
    Offer,
    /// Kubelet notes what was granted.
    Record,
    /// The companion asks kubelet what containers have.
    See,
    /// The companion hears which claims there are.
    Hear,
}

impl Nodes {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// How many steps the longest operation of a companion had.
    pub(crate) fn longest_operation(&self) -> u32 {
        let disks = self.all.values().map(|node| node.disk.longest());
        disks.max().unwrap_or_default()
    }

    fn rng(&mut self) -> &mut Rng {
        self.rng.get_or_insert_with(|| Rng::new(0))
    }
}

/// A claim's uid as the API server would have written it.
pub(crate) fn claim_uid(uid: &str) -> ClaimUid {
    let number: u64 = uid.trim_start_matches("uid-").parse().unwrap();
    ClaimUid::parse(&format!("00000000-0000-4000-8000-{number:012}")).unwrap()
}

/// What kubelet passes on of a claim.
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

impl Stage {
    /// Gives every node of the cluster a kubelet and a companion.
    pub(crate) fn set_up_nodes(&mut self, seed: u64) {
        self.nodes.rng = Some(Rng::new(seed ^ 0x6e6f_6465));
        for name in self.facts.nodes.keys().cloned().collect::<Vec<_>>() {
            let node = Node {
                name: name.clone(),
                boots: 0,
                disk: Disk::default(),
                companion: None,
                kubelet: Kubelet::new(self.structured),
                driven: BTreeSet::new(),
                look_at: 0,
                due: false,
                both: false,
                manager: Manager::default(),
                see_due: false,
                hear_due: false,
            };
            self.nodes.all.insert(name.clone(), node);
            self.on_node(&name, 0, 3 * SECOND, Doing::StartKubelet);
            self.on_node(&name, 0, 3 * SECOND, Doing::StartCompanion);
        }
    }

    /// Something is to happen on a node, after a while.
    fn on_node(&mut self, node: &str, from: u64, to: u64, doing: Doing) {
        let delay = self.nodes.rng().between(from, to);
        let node = node.to_owned();
        self.after(delay, Action::Node { node, doing });
    }

    /// Something has been stored: kubelets look at their pods.
    pub(crate) fn wake_kubelets(&mut self) {
        let listening = self.nodes.all.values().filter(|node| node.both);
        for name in listening.map(|node| node.name.clone()).collect::<Vec<_>>() {
            self.hear_later(&name);
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
            self.on_node(name, 0, within, Doing::Sync);
        }
    }

    pub(crate) fn act_on_node(&mut self, name: &str, doing: Doing) {
        match doing {
            Doing::StartCompanion => self.start_companion(name),
            Doing::StartKubelet => self.start_kubelet(name),
            Doing::Sync => self.sync(name),
            Doing::Look => self.look_for_orphans(name),
            Doing::TryAgain => self.try_again(name),
            Doing::Plug => self.plug(name),
            Doing::Offer => self.take_offer(name),
            Doing::Record => self.record_grants(name),
            Doing::See => self.see(name),
            Doing::Hear => self.hear(name),
        }
        self.offer(name);
        self.look_again(name);
        // Words alone change neither containers nor the disk.
        if !matches!(
            doing,
            Doing::Plug | Doing::Offer | Doing::Record | Doing::See | Doing::Hear
        ) {
            self.check_node(name);
        }
    }

    /// Whether containers of a pod run.
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

    /// Whether a kubelet's list of claims has still to be written.
    pub(crate) fn let_kubelet_write_late(&mut self, name: &str, late: bool) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.writes_late = late;
        }
    }

    /// Somebody empties the directory of CDI files, and the companion is killed.
    pub(crate) fn lose_files(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get(name) {
            node.disk.lose_cdi();
        }
        self.kill_companion(name);
    }

    fn time(&self) -> Duration {
        Duration::from_micros(self.now)
    }
}
