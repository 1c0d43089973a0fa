//! Controller and nodes together: companions prepare the allocations of the controller.

use drayman::api::resource::AllocationMode;

use super::every_fault::INTERRUPTING_FAULTS;
use super::leaders::conflicting;
use super::{healthy_cluster, key, until_bound, until_late_write};
use crate::cluster::{Cluster, SECOND};
use crate::faults::Fault;
use crate::node::OperationFault;
use crate::store::Kind;
use crate::users::Use;

/// At least the number of steps of a start with one claim.
const STEPS_OF_A_START: u32 = 8;

/// A fault of a companion operation: operation number, fault, and whether the node loses power.
pub(super) type Planned = (u64, OperationFault, bool);

/// Counts of a scenario without faults: companion operations, steps of the longest one, and controller commands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    operations: u64,
    steps: u32,
    commands: u64,
}

impl Counts {
    pub(super) fn by(cluster: &Cluster) -> Self {
        Self {
            operations: cluster.nodes.operations,
            steps: cluster.nodes.longest_operation(),
            commands: cluster.commands,
        }
    }
}

pub(super) fn until_it_runs(cluster: &mut Cluster, name: &str) {
    let text = format!("{name} has containers");
    cluster.run_until(&text, |cluster| cluster.has_containers(&key(name)));
}

pub(super) fn until_it_is_gone(cluster: &mut Cluster, name: &str) {
    cluster.store.delete_pod(&key(name));
    cluster.run_until("it has ended", |cluster| {
        !cluster.store.pods.contains_key(&key(name))
    });
}

/// Deletes everything and checks that everything is free.
pub(super) fn expect_all_free(mut cluster: Cluster, what: &str) {
    if cluster.violation.is_none() {
        cluster.conclude();
        cluster.conclude_nodes();
    }
    assert_eq!(cluster.violation, None, "{what}");
    assert!(
        cluster.nodes.plan.is_empty(),
        "{what}: a planned fault does not occur"
    );
}

/// A cluster of one node with one device and these companion faults.
pub(super) fn cluster_with_faults(planned: &[Planned]) -> Cluster {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    for (operation, fault, power) in planned {
        cluster.nodes.plan.insert(*operation, (*fault, *power));
    }
    cluster.set_up_nodes(7);
    cluster
}

/// Every fault at every step of an operation. A kill at the last step happens before the answer.
fn operation_faults(operation: u64, steps: u32) -> impl Iterator<Item = Planned> {
    (0..=steps).flat_map(move |step| {
        let fail = OperationFault::Fail { from: step, steps: 3 };
        [
            (operation, OperationFault::Kill(step), false),
            (operation, OperationFault::Kill(step), true),
            (operation, fail, false),
        ]
    })
}

/// Runs a scenario without faults, then with every fault at every step of each operation.
pub(super) fn with_every_fault(at_least: u64, scenario: impl Fn(&[Planned]) -> Counts) {
    let baseline = scenario(&[]);
    assert!(baseline.operations >= at_least, "{baseline:?}");
    for operation in 1..=baseline.operations {
        for planned in operation_faults(operation, baseline.steps) {
            scenario(&[planned]);
        }
    }
}

/// Runs a scenario with each of these faults and a kill at every step of the next operation, which repairs the first fault.
pub(super) fn with_every_pair(scenario: impl Fn(&[Planned]) -> Counts) {
    let baseline = scenario(&[]);
    let mut pairs = 0;
    for operation in 1..=baseline.operations {
        for first in operation_faults(operation, baseline.steps) {
            for step in 0..=baseline.steps {
                scenario(&[first, (operation + 1, OperationFault::Kill(step), false)]);
                pairs += 1;
            }
        }
    }
    println!("{baseline:?}, {pairs} pairs");
}

/// Two pods use the only device one after the other.
fn two_pods(planned: &[Planned]) -> Counts {
    two_pods_with(planned, None)
}

/// Like [`two_pods`], with a fault at a controller command.
fn two_pods_with(planned: &[Planned], fault: Option<(u64, Fault)>) -> Counts {
    let mut cluster = cluster_with_faults(planned);
    cluster.faults.plan.extend(fault);
    for name in ["p", "q"] {
        cluster.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_bound(&mut cluster, name);
        until_it_runs(&mut cluster, name);
        until_it_is_gone(&mut cluster, name);
    }
    let counts = Counts::by(&cluster);
    assert!(cluster.nodes.prepared >= 2 || cluster.violation.is_some());
    expect_all_free(cluster, &format!("{planned:?} {fault:?}"));
    counts
}

#[test]
fn every_fault_at_every_step_of_a_companion_is_survived() {
    // A start and two calls of each kind.
    with_every_fault(5, two_pods);
}

#[test]
fn a_kill_at_every_step_of_a_repair_is_survived() {
    let baseline = two_pods(&[]);
    for operation in 1..=baseline.operations {
        for fail in 0..baseline.steps {
            // The repair has fewer steps than the operation.
            for kill in fail + 1..=fail + baseline.steps {
                for power in [false, true] {
                    two_pods(&[(operation, OperationFault::FailAndKill { fail, kill }, power)]);
                }
            }
        }
    }
}

#[test]
fn every_pair_of_a_companion_fault_and_a_companion_kill() {
    with_every_pair(two_pods);
}

#[test]
fn every_pair_of_a_controller_fault_and_a_companion_kill() {
    let (start, baseline) = (cluster_with_faults(&[]).commands, two_pods(&[]));
    assert!(baseline.commands >= start + 10, "{baseline:?}");
    let mut pairs = 0;
    for command in start + 1..=baseline.commands {
        for fault in INTERRUPTING_FAULTS {
            for operation in 1..=baseline.operations {
                for step in [0, baseline.steps / 2, baseline.steps] {
                    let kill = (operation, OperationFault::Kill(step), false);
                    two_pods_with(&[kill], Some((command, fault)));
                    pairs += 1;
                }
            }
        }
    }
    println!("{baseline:?}, {pairs} pairs");
}

#[test]
fn removed_files_are_back_as_soon_as_they_can_be_written() {
    let mut failures = 0;
    for from in 0..STEPS_OF_A_START {
        let mut cluster = cluster_with_faults(&[]);
        cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
        until_it_runs(&mut cluster, "p");
        let fail = OperationFault::Fail { from, steps: 3 };
        cluster
            .nodes
            .plan
            .insert(cluster.nodes.operations + 1, (fail, false));
        cluster.remove_cdi_files("node-a");
        cluster.run_for(10 * SECOND);
        failures += cluster.nodes.retried;
        expect_all_free(cluster, "files that are gone");
    }
    assert!(failures > 0, "no start has failed to write the file");
}

#[test]
fn a_claim_with_devices_of_another_node_is_not_prepared() {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 1)]);
    cluster.set_up_nodes(7);
    cluster.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    cluster.create_pod(&key("p"), &[Use::Named("named")], None);
    until_it_runs(&mut cluster, "p");
    let node = cluster.store.pods[&key("p")].spec.node_name.clone();
    let other = if node.as_deref() == Some("node-a") {
        "node-b"
    } else {
        "node-a"
    };
    // The user set the node without the scheduler.
    cluster.create_pod(&key("q"), &[Use::Named("named")], Some(other));
    cluster.run_for(120 * SECOND);
    assert!(cluster.nodes.misdirected > 0, "the companion was called");
    assert!(cluster.has_containers(&key("p")) && !cluster.has_containers(&key("q")));
    expect_all_free(cluster, "a claim of another node");
}

#[test]
fn an_unkillable_container_keeps_its_device() {
    let mut cluster = cluster_with_faults(&[]);
    let stuck = cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_it_runs(&mut cluster, "p");
    cluster.nodes.stuck.insert(stuck);
    // Force deletion; the claim is deleted too, so the controller considers its device free.
    cluster.store.remove_pod(&key("p"));
    cluster.create_pod(&key("q"), &[Use::Template("gpu")], None);
    until_bound(&mut cluster, "q");
    cluster.run_for(900 * SECOND);
    assert!(cluster.nodes.refused > 0, "the companion was called");
    assert!(!cluster.has_containers(&key("q")));
    cluster.nodes.stuck.clear();
    cluster.wake_kubelets();
    until_it_runs(&mut cluster, "q");
    expect_all_free(cluster, "a container that could not be killed");
}

#[test]
fn a_claim_that_kubelet_lists_late_is_not_forgotten() {
    let mut cluster = cluster_with_faults(&[]);
    cluster.delay_kubelet_file("node-a", true);
    let stuck = cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_it_runs(&mut cluster, "p");
    // Force deletion with its claim; kubelet has not stopped the containers yet.
    cluster.nodes.stuck.insert(stuck);
    cluster.store.remove_pod(&key("p"));
    // A starting companion checks orphans immediately.
    cluster.remove_cdi_files("node-a");
    cluster.run_for(90 * SECOND);
    cluster.delay_kubelet_file("node-a", false);
    cluster.run_for(300 * SECOND);
    cluster.nodes.stuck.clear();
    cluster.wake_kubelets();
    expect_all_free(cluster, "a list that comes late");
}

#[test]
fn of_two_claims_with_one_device_the_second_is_prepared_later() {
    let mut cluster = conflicting();
    cluster.set_up_nodes(7);
    until_it_runs(&mut cluster, "quick");
    cluster.pause_watch(Kind::Claim);
    until_late_write(&mut cluster);
    until_bound(&mut cluster, "late");
    cluster.resume_watch(Kind::Claim);
    cluster.run_for(60 * SECOND);
    assert!(cluster.has_containers(&key("quick")) && !cluster.has_containers(&key("late")));
    assert!(cluster.nodes.refused > 0, "the companion was called");
    cluster.store.delete_pod(&key("quick"));
    until_it_runs(&mut cluster, "late");
    expect_all_free(cluster, "two claims");
}
