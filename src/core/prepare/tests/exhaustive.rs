//! Every short sequence of operations with every fault at every step, and every way of losing the checkpoint.

use super::*;
use crate::core::names::DriverName;
use crate::core::prepare::container_edits::cdi_spec;
use crate::core::prepare::kubelet_state::{KubeletClaim, KubeletClaims, KubeletView};
use crate::core::prepare::prepared_claims::HeldDevice;
use crate::core::prepare::recovery::{plan_explained, rebuild};

/// More steps than any plan has: a kill before a step beyond the plan happens after the answer.
const STEPS: usize = 8;

/// Operations on two claims that need the same device.
const OPERATIONS: [Operation; 4] = [
    Operation::Prepare { claim: 0 },
    Operation::Prepare { claim: 1 },
    Operation::Unprepare { claim: 0 },
    Operation::Unprepare { claim: 1 },
];

fn faults() -> Vec<Fault> {
    let at = |step| {
        [
            Fault::Killed { step, boot: false },
            Fault::Killed { step, boot: true },
            Fault::Failed { step },
        ]
    };
    std::iter::once(Fault::None)
        .chain((0..STEPS).flat_map(at))
        .collect()
}

#[test]
fn a_fault_at_each_step_of_any_two_operations_is_survived() {
    let mut scenarios = 0;
    for first in OPERATIONS {
        for second in OPERATIONS {
            for first_fault in faults() {
                for second_fault in faults() {
                    Node::new(MemoryDisk::default()).live(&[(first, first_fault), (second, second_fault)]);
                    scenarios += 1;
                }
            }
        }
    }
    assert_eq!(scenarios, 4 * 4 * 25 * 25);
}

#[test]
fn a_fault_at_each_step_of_a_third_operation_is_survived() {
    for first in OPERATIONS {
        for second in OPERATIONS {
            for third in OPERATIONS {
                for fault in faults() {
                    Node::new(MemoryDisk::default()).live(&[
                        (first, Fault::None),
                        (second, Fault::None),
                        (third, fault),
                    ]);
                }
            }
        }
    }
}

/// The sources that remain when the checkpoint is lost.
#[derive(Clone, Copy, Debug)]
struct Traces {
    /// Whether the CDI files are readable; otherwise only their names are known.
    files: bool,
    /// Whether CDI files exist at all.
    directory: bool,
    /// Whether kubelet's list is readable, with resource handles (1.28 and later) or without (1.27).
    list: Option<bool>,
}

impl Traces {
    /// Whether these sources reveal every claim in use.
    fn tell_of_all(self) -> bool {
        self.directory || self.list.is_some()
    }

    fn all() -> impl Iterator<Item = Self> {
        let lists = [None, Some(true), Some(false)];
        [(true, true), (false, true), (false, false)]
            .into_iter()
            .flat_map(move |(files, directory)| {
                lists.map(|list| Self {
                    files,
                    directory,
                    list,
                })
            })
    }
}

impl Node<MemoryDisk> {
    /// The process is killed at a step, and its checkpoint is lost.
    fn lose_the_checkpoint(&mut self, traces: Traces) {
        let driver = DriverName::parse("drayman.dev").unwrap();
        if !traces.directory {
            self.disk.files.borrow_mut().clear();
        }
        let spec = |(uid, container_edits): (&ClaimUid, &ContainerEdits)| {
            (
                uid.clone(),
                traces.files.then(|| cdi_spec(&driver, uid, container_edits)),
            )
        };
        let files = self.disk.files.borrow().iter().map(spec).collect();
        let listed = |handles: bool| {
            let claim = |claim: &usize| {
                let devices = CLAIMS[*claim]
                    .iter()
                    .map(|name| HeldDevice::named(*name))
                    .collect();
                let listed = KubeletClaim {
                    namespace: "default".into(),
                    name: format!("claim-{claim}"),
                    ours: true,
                    prepared: true,
                    devices: handles.then_some(devices),
                };
                (uid(*claim), listed)
            };
            KubeletView::Lists(self.running.iter().map(claim).collect::<KubeletClaims>())
        };
        let kubelet = traces
            .list
            .map_or_else(|| KubeletView::Unknown("it is damaged".into()), listed);
        let entries = rebuild(&driver, self.prepared_claims.boot_id(), &files, &kubelet);
        self.start_from_traces(entries);
    }

    /// Checks that no device of a container that may run is free.
    fn check_that_nothing_in_use_is_free(&mut self) {
        for claim in &self.running {
            let entry = self
                .prepared_claims
                .entry(&uid(*claim))
                .expect("a claim in use is recorded");
            let known: BTreeSet<&str> = entry.devices.iter().map(|held| held.device.as_str()).collect();
            assert!(
                known.is_empty() || known == CLAIMS[*claim].iter().copied().collect(),
                "{entry:?}"
            );
        }
        let running = self.running.clone();
        for other in (0..CLAIMS.len()).filter(|claim| !running.contains(claim)) {
            let overlaps = running
                .iter()
                .any(|claim| CLAIMS[*claim].iter().any(|device| CLAIMS[other].contains(device)));
            let before = self.running.len();
            self.operate(Operation::Prepare { claim: other }, Fault::None);
            assert!(
                !overlaps || self.running.len() == before,
                "claim {other} was given a device that is in use"
            );
            self.operate(Operation::Unprepare { claim: other }, Fault::None);
        }
    }
}

#[test]
fn a_lost_checkpoint_frees_no_device_in_use() {
    let mut tried = 0;
    for traces in Traces::all().filter(|traces| traces.tell_of_all()) {
        for (running, next) in [(&[][..], 0), (&[1], 2), (&[0, 2], 1), (&[1, 3], 4)] {
            for step in 0..STEPS {
                let mut node = Node::new(MemoryDisk::default());
                for claim in running {
                    node.operate(Operation::Prepare { claim: *claim }, Fault::None);
                    assert!(node.running.contains(claim));
                }
                node.operate(
                    Operation::Prepare { claim: next },
                    Fault::Killed { step, boot: false },
                );
                node.lose_the_checkpoint(traces);
                node.check_that_nothing_in_use_is_free();
                // Kubelet unprepares the claims it prepared. The rest are orphans, resolved elsewhere.
                for claim in 0..CLAIMS.len() {
                    node.operate(Operation::Unprepare { claim }, Fault::None);
                }
                assert_eq!(node.prepared_claims.entries().len(), 0);
                assert_eq!(node.disk.found(), (BTreeMap::new(), BTreeSet::new()));
                tried += 1;
            }
        }
    }
    assert_eq!(tried, 8 * 4 * STEPS);
}

#[test]
fn a_claim_explained_by_the_api_server_unblocks_the_others() {
    let traces = Traces {
        files: false,
        directory: true,
        list: None,
    };
    let mut node = Node::new(MemoryDisk::default());
    node.operate(Operation::Prepare { claim: 1 }, Fault::None);
    node.lose_the_checkpoint(traces);
    node.operate(Operation::Prepare { claim: 3 }, Fault::None);
    assert!(!node.running.contains(&3), "the devices of claim 1 are unknown");
    for step in plan_explained(
        &node.prepared_claims,
        &inventory(),
        &uid(1),
        &[HeldDevice::named("a"), HeldDevice::named("b")],
    ) {
        node.perform(&step);
    }
    node.check();
    node.operate(Operation::Prepare { claim: 3 }, Fault::None);
    assert!(node.running.contains(&3));
    node.operate(Operation::Prepare { claim: 2 }, Fault::None);
    assert!(!node.running.contains(&2), "b is claim 1's");
}
