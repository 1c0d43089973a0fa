//! A model of kubelet and of a crashing node for the tests of the plans: the guarantees hold with any storage, wherever the process is
//! killed.

mod exhaustive;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::container_edits::{ContainerEdits, DeviceNode};
use super::containers::Containers;
use super::plan::{
    Allocation, ClaimToPrepare, ClaimToUnprepare, NodeIdentity, PlanStep, Storage, plan_prepare,
    plan_unprepare,
};
use super::prepared_claims::{Entry, PreparedClaims};
use super::recovery::{plan_clearing, plan_restoring, plan_roll_back};
use crate::api::crd::{Device, Devices};
use crate::api::handle::{DeviceHandle, HandleDevice, VERSION};
use crate::core::names::ClaimUid;

/// Storage that the next process can read.
pub(crate) trait Disk: Storage {
    /// The state that the next process finds: the prepared claims, and the claims with a CDI file.
    fn found(&self) -> (BTreeMap<ClaimUid, Entry>, BTreeSet<ClaimUid>);
    /// Simulates a reboot: `/var/run` is empty.
    fn booted(&self);
}

/// A fault injected into an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    None,
    /// The process is killed before the n-th step; a new one starts, with or without a reboot.
    Killed {
        step: usize,
        boot: bool,
    },
    /// The n-th step fails: the disk is full, or the device does not answer.
    Failed {
        step: usize,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Prepare { claim: usize },
    Unprepare { claim: usize },
}

pub(crate) fn operations() -> impl Strategy<Value = Vec<(Operation, Fault)>> {
    let operation = prop_oneof![
        3 => (0..CLAIMS.len()).prop_map(|claim| Operation::Prepare { claim }),
        2 => (0..CLAIMS.len()).prop_map(|claim| Operation::Unprepare { claim }),
    ];
    let fault = prop_oneof![
        3 => Just(Fault::None),
        2 => (0..8_usize, any::<bool>()).prop_map(|(step, boot)| Fault::Killed { step, boot }),
        1 => (0..8_usize).prop_map(|step| Fault::Failed { step }),
    ];
    proptest::collection::vec((operation, fault), 1..24)
}

/// The devices of each claim: every claim overlaps with others.
const CLAIMS: [&[&str]; 7] = [
    &["a"],
    &["a", "b"],
    &["b", "c"],
    &["c"],
    &["d", "a"],
    &["d"],
    &["d", "c"],
];

/// How many claims may hold a device at once.
fn shares(device: &str) -> usize {
    if device == "d" { 2 } else { 1 }
}

fn uid(claim: usize) -> ClaimUid {
    ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0{claim}")).unwrap()
}

fn inventory() -> Devices {
    let device = |name: &str| {
        (
            name.to_owned(),
            Device {
                name: name.into(),
                kind: "test".into(),
                shares: u32::try_from(shares(name)).ok(),
                ..Device::default()
            },
        )
    };
    ["a", "b", "c", "d"].into_iter().map(device).collect()
}

fn request(claim: usize) -> ClaimToPrepare {
    let device = |name: &&str| HandleDevice {
        request: "device".into(),
        device: (*name).into(),
    };
    let handle = DeviceHandle {
        version: VERSION,
        claim_uid: uid(claim).to_string(),
        node_name: "node-a".into(),
        node_uid: "n-1".into(),
        devices: CLAIMS[claim].iter().map(device).collect(),
    };
    ClaimToPrepare {
        namespace: "default".into(),
        name: format!("claim-{claim}"),
        uid: uid(claim).to_string(),
        allocation: Allocation::Handle(handle.to_data().unwrap()),
    }
}

fn inject(entry: &Entry) -> ContainerEdits {
    let mut container_edits = ContainerEdits::default();
    for held in &entry.devices {
        let path = format!("/dev/{}", held.device);
        let node = DeviceNode {
            host_path: path.clone(),
            container_path: path,
            permissions: "rw".into(),
        };
        container_edits.extend(ContainerEdits::of_device_node(&held.device, node));
    }
    container_edits
}

enum Outcome {
    Done,
    Failed,
    Killed,
}

/// A node with its kubelet.
pub(crate) struct Node<D: Disk> {
    disk: D,
    prepared_claims: PreparedClaims,
    boots: usize,
    /// Claims that kubelet considers prepared; their containers may be running.
    running: BTreeSet<usize>,
    /// Claims for which the driver has work left to revert.
    driven: BTreeSet<ClaimUid>,
    /// Claims in use whose CDI file a failed step removed; the next request or start restores it.
    without_file: BTreeSet<ClaimUid>,
}

impl<D: Disk> Node<D>
where
    D::Error: std::fmt::Debug,
{
    pub(crate) fn new(disk: D) -> Self {
        let mut node = Self {
            disk,
            prepared_claims: PreparedClaims::default(),
            boots: 0,
            running: BTreeSet::new(),
            driven: BTreeSet::new(),
            without_file: BTreeSet::new(),
        };
        node.start(false);
        node
    }

    /// Runs the operations, then unprepares every claim, checking the guarantees throughout.
    pub(crate) fn live(&mut self, operations: &[(Operation, Fault)]) {
        for (operation, fault) in operations {
            self.operate(*operation, *fault);
            self.check();
        }
        for claim in 0..CLAIMS.len() {
            self.operate(Operation::Unprepare { claim }, Fault::None);
            self.check();
        }
        assert_eq!(
            self.prepared_claims.entries().len(),
            0,
            "nothing is held in the end"
        );
        assert_eq!(
            self.disk.found(),
            (BTreeMap::new(), BTreeSet::new()),
            "nothing is left in the end"
        );
        for claim in [0, 2] {
            self.operate(Operation::Prepare { claim }, Fault::None);
            assert!(self.running.contains(&claim), "every claim can be prepared again");
        }
    }

    fn operate(&mut self, operation: Operation, fault: Fault) {
        match operation {
            Operation::Prepare { claim } => {
                let identity = NodeIdentity {
                    name: "node-a".into(),
                    uid: Some("n-1".into()),
                };
                let containers = Containers::default();
                let planned = plan_prepare(
                    &self.prepared_claims,
                    &containers,
                    &inventory(),
                    &identity,
                    &request(claim),
                );
                if let Ok((uid, steps)) = planned {
                    match self.run(&steps, fault) {
                        Outcome::Done => {
                            self.running.insert(claim);
                            self.without_file.remove(&uid);
                        }
                        Outcome::Failed => {
                            // Claims of an earlier boot that were being evicted have lost their file already.
                            let evicted = steps.iter().filter_map(|step| match step {
                                PlanStep::RemoveCdi(evicted) => Some(evicted.clone()),
                                _ => None,
                            });
                            let removed = if let Fault::Failed { step } = fault {
                                step
                            } else {
                                0
                            };
                            self.without_file.extend(evicted.take(removed));
                            self.roll_back(&uid);
                        }
                        Outcome::Killed => {}
                    }
                }
            }
            Operation::Unprepare { claim } => {
                // Kubelet calls Unprepare after the containers have ended, and repeats it until it succeeds.
                self.running.remove(&claim);
                let request = ClaimToUnprepare {
                    uid: uid(claim).to_string(),
                    ..ClaimToUnprepare::default()
                };
                let steps = plan_unprepare(&self.prepared_claims, &request).unwrap();
                match (self.run(&steps, fault), fault) {
                    (Outcome::Failed, Fault::Failed { step: 1.. }) => {
                        self.without_file.insert(uid(claim));
                    }
                    (Outcome::Done, _) => {
                        self.without_file.remove(&uid(claim));
                    }
                    _ => {}
                }
            }
        }
        if let Fault::Killed { boot, .. } = fault {
            self.start(boot);
        }
    }

    fn run(&mut self, steps: &[PlanStep], fault: Fault) -> Outcome {
        for (number, step) in steps.iter().enumerate() {
            match fault {
                Fault::Killed { step, .. } if step == number => return Outcome::Killed,
                Fault::Failed { step } if step == number => return Outcome::Failed,
                _ => self.perform(step),
            }
        }
        Outcome::Done
    }

    fn perform(&mut self, step: &PlanStep) {
        if let PlanStep::Prepare(uid) = step
            && let Some(container_edits) = self.prepared_claims.entry(uid).map(inject)
        {
            self.prepared_claims
                .set_container_edits(uid, container_edits, &inventory());
            self.driven.insert(uid.clone());
        }
        if let PlanStep::Unprepare(uid) = step {
            self.driven.remove(uid);
        }
        if let Some(changed) = step.perform(&self.prepared_claims, &self.disk).unwrap() {
            self.prepared_claims = changed;
        }
    }

    fn roll_back(&mut self, uid: &ClaimUid) {
        for step in plan_roll_back(&self.prepared_claims, uid) {
            self.perform(&step);
        }
        if self.prepared_claims.entry(uid).is_some() {
            self.without_file.insert(uid.clone());
        }
    }

    /// The process is killed and its checkpoint is lost; the next process has only the other sources.
    fn start_from_traces(&mut self, entries: BTreeMap<ClaimUid, Entry>) {
        self.prepared_claims = PreparedClaims::new(self.prepared_claims.boot_id(), entries);
        let files = self.disk.found().1;
        for step in plan_clearing(&self.prepared_claims, &files).concat() {
            self.perform(&step);
        }
        for (_, steps) in plan_restoring(&self.prepared_claims) {
            for step in steps {
                self.perform(&step);
            }
        }
        self.perform(&PlanStep::Save(Vec::new()));
        self.without_file.clear();
    }

    fn start(&mut self, boot: bool) {
        if boot {
            self.boots += 1;
            self.disk.booted();
            self.running.clear();
            self.driven.clear();
        }
        let (entries, files) = self.disk.found();
        self.prepared_claims = PreparedClaims::new(format!("boot-{}", self.boots), entries);
        for step in plan_clearing(&self.prepared_claims, &files).concat() {
            self.perform(&step);
        }
        for (_, steps) in plan_restoring(&self.prepared_claims) {
            for step in steps {
                self.perform(&step);
            }
        }
        self.perform(&PlanStep::Save(Vec::new()));
        self.without_file.clear();
    }

    fn check(&self) {
        let mut used: BTreeMap<&str, usize> = BTreeMap::new();
        for claim in &self.running {
            for device in CLAIMS[*claim] {
                let users = used.entry(device).or_default();
                *users += 1;
                assert!(
                    *users <= shares(device),
                    "device {device} is in {users} running containers"
                );
            }
            assert!(
                self.prepared_claims
                    .entry(&uid(*claim))
                    .is_some_and(Entry::is_done),
                "a running claim is not recorded"
            );
        }
        let (entries, files) = self.disk.found();
        assert!(
            self.driven.iter().all(|uid| entries.contains_key(uid)),
            "the driver has not reverted its work for a forgotten claim"
        );
        assert_eq!(
            &entries,
            self.prepared_claims.entries(),
            "the checkpoint differs from the state of the process"
        );
        let done: BTreeSet<ClaimUid> = entries
            .iter()
            .filter(|(_, entry)| entry.is_done())
            .map(|(uid, _)| uid.clone())
            .collect();
        assert_eq!(done.len(), entries.len(), "a failed attempt still holds devices");
        let expected: BTreeSet<ClaimUid> = done.difference(&self.without_file).cloned().collect();
        assert_eq!(files, expected, "a CDI file exists for each prepared claim only");
    }
}

/// An in-memory disk.
#[derive(Default)]
struct MemoryDisk {
    entries: RefCell<BTreeMap<ClaimUid, Entry>>,
    files: RefCell<BTreeMap<ClaimUid, ContainerEdits>>,
    writes: Cell<usize>,
}

impl Storage for MemoryDisk {
    type Error = std::convert::Infallible;

    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), Self::Error> {
        self.writes
            .set(self.writes.get() + usize::from(*self.entries.borrow() != *prepared_claims.entries()));
        *self.entries.borrow_mut() = prepared_claims.entries().clone();
        Ok(())
    }

    fn write_cdi(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), Self::Error> {
        let container_edits = entry.container_edits().cloned().unwrap_or_default();
        self.files.borrow_mut().insert(uid.clone(), container_edits);
        Ok(())
    }

    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), Self::Error> {
        self.files.borrow_mut().remove(uid);
        Ok(())
    }
}

impl Disk for MemoryDisk {
    fn found(&self) -> (BTreeMap<ClaimUid, Entry>, BTreeSet<ClaimUid>) {
        let files = self.files.borrow().keys().cloned().collect();
        (self.entries.borrow().clone(), files)
    }

    fn booted(&self) {
        self.files.borrow_mut().clear();
    }
}

#[test]
fn prepare_writes_two_checkpoints_and_unprepare_one() {
    let mut node = Node::new(MemoryDisk::default());
    node.operate(Operation::Prepare { claim: 0 }, Fault::None);
    assert_eq!(node.disk.writes.get(), 2);
    node.operate(Operation::Prepare { claim: 0 }, Fault::None);
    assert_eq!(node.disk.writes.get(), 2);
    node.operate(Operation::Unprepare { claim: 0 }, Fault::None);
    assert_eq!(node.disk.writes.get(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn a_node_killed_at_any_step_keeps_the_invariants(operations in operations()) {
        Node::new(MemoryDisk::default()).live(&operations);
    }
}
