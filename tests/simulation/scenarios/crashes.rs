//! Kills of the controller at one point of an allocation or release, combined with adverse events.

use drayman::api::resource::AllocationMode;

use super::{
    expect_no_violation, healthy_cluster, key, until_bound, until_last, until_stopped, without_suffixes,
};
use crate::cluster::{Cluster, SECOND};
use crate::faults::Fault;
use crate::users::Use;

/// Creates a pod with one claim and kills the controller after its n-th command: read, evaluate, finalizer, allocate, record. The driver
/// state is durable. Returns the pod UID too.
fn killed_after(command: u64) -> (Cluster, String) {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 1)]);
    cluster.durable_driver = true;
    let at = cluster.commands + command;
    cluster.faults.plan.insert(at, Fault::CrashAfter);
    let uid = cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_stopped(&mut cluster);
    (cluster, uid)
}

/// The node of an allocation in the driver that no claim records.
fn unrecorded_node(cluster: &Cluster) -> Option<String> {
    let mut pending = cluster.driver.pending.values();
    pending.next().map(|hold| hold.node.clone())
}

fn node_of(cluster: &Cluster) -> Option<String> {
    cluster.store.pods[&key("p")].spec.node_name.clone()
}

#[test]
fn a_kill_between_finalizer_and_allocation_costs_only_time() {
    let (mut cluster, _) = killed_after(3);
    assert_eq!(unrecorded_node(&cluster), None);
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_kill_before_the_record_is_repaired_on_the_same_node() {
    let (mut cluster, uid) = killed_after(4);
    let held = unrecorded_node(&cluster).unwrap();
    cluster.pod_nodes.insert(uid, [held.clone()].into());
    until_bound(&mut cluster, "p");
    assert_eq!(node_of(&cluster), Some(held));
    expect_no_violation(cluster);
}

#[test]
fn a_held_claim_is_deallocated_before_a_new_allocation() {
    let (mut cluster, _) = killed_after(4);
    // The pod is read while the driver refuses to deallocate.
    cluster.fault_at(1, Fault::DriverRetry);
    cluster.command_log.clear();
    until_bound(&mut cluster, "p");
    let log = without_suffixes(&cluster.command_log);
    let first = |word: &str| log.iter().position(|line| line.starts_with(word));
    let deallocated = log.iter().rposition(|line| line.starts_with("deallocate"));
    assert_eq!(cluster.faults.hits.get(&Fault::DriverRetry), Some(&1));
    assert!(
        first("deallocate") < deallocated,
        "deallocate is retried: {log:?}"
    );
    assert!(deallocated < first("allocate"), "{log:?}");
    expect_no_violation(cluster);
}

#[test]
fn a_killed_controllers_devices_are_free_on_another_node() {
    let (mut cluster, uid) = killed_after(4);
    let held = unrecorded_node(&cluster).unwrap();
    let other = if held == "node-a" { "node-b" } else { "node-a" };
    cluster.pod_nodes.insert(uid, [other.to_owned()].into());
    let _ = cluster.store.update_context(&key("p"), |context| {
        context.spec.selected_node = other.to_owned();
    });
    until_bound(&mut cluster, "p");
    assert_eq!(node_of(&cluster).as_deref(), Some(other));
    assert_eq!(unrecorded_node(&cluster), None, "{held} is free");
    expect_no_violation(cluster);
}

#[test]
fn a_killed_controllers_devices_are_free_with_their_claim() {
    let (mut cluster, _) = killed_after(4);
    assert!(unrecorded_node(&cluster).is_some());
    cluster.store.delete_pod(&key("p"));
    cluster.run_until("the claim is gone", |cluster| cluster.store.claims.is_empty());
    assert_eq!(unrecorded_node(&cluster), None);
    expect_no_violation(cluster);
}

#[test]
fn a_slow_allocation_for_a_deselected_node_is_never_recorded() {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 1)]);
    // Read, evaluate, finalizer, allocate.
    cluster.fault_at(4, Fault::Slow);
    let uid = cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_last(&mut cluster, "the driver is asked", "allocate");
    let context = cluster.store.contexts[&key("p")].clone();
    let held = context.spec.selected_node.clone();
    let other = if held == "node-a" { "node-b" } else { "node-a" };
    cluster.pod_nodes.insert(uid, [other.to_owned()].into());
    let _ = cluster.store.update_context(&key("p"), |context| {
        context.spec.selected_node = other.to_owned();
    });
    cluster.command_log.clear();
    until_bound(&mut cluster, "p");
    let log = without_suffixes(&cluster.command_log);
    let of_held = |word: &str| {
        let mut lines = log.iter();
        lines.any(|line| line.starts_with(word) && line.contains(held.as_str()))
    };
    assert!(!of_held("record"), "{log:?}");
    assert!(log.iter().any(|line| line.starts_with("deallocate")), "{log:?}");
    assert_eq!(node_of(&cluster).as_deref(), Some(other));
    expect_no_violation(cluster);
}

#[test]
fn a_kill_after_the_record_allocates_nothing_again() {
    let (mut cluster, _) = killed_after(5);
    cluster.command_log.clear();
    until_bound(&mut cluster, "p");
    let log = without_suffixes(&cluster.command_log);
    assert!(!log.iter().any(|line| line.starts_with("allocate")), "{log:?}");
    expect_no_violation(cluster);
}

#[test]
fn a_kill_between_deallocation_and_finalizer_is_repaired() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    cluster.create_pod(&key("p"), &[Use::Named("named")], None);
    until_bound(&mut cluster, "p");
    // Deallocate, clear.
    cluster.fault_at(2, Fault::CrashAfter);
    cluster.store.delete_pod(&key("p"));
    until_stopped(&mut cluster);
    let claim = cluster.claim("named").unwrap();
    assert!(claim.status.allocation.is_none() && claim.metadata.finalizers.is_some());
    cluster.store.delete_claim(&key("named"));
    cluster.run_until("the claim is gone", |cluster| cluster.claim("named").is_none());
    expect_no_violation(cluster);
}

#[test]
fn a_kill_at_any_command_leaves_all_of_four_claims_or_none() {
    let uses = [Use::Template("gpu"); 4];
    let mut baseline = healthy_cluster(&[("node-a", 4), ("node-b", 3)]);
    baseline.create_pod(&key("p"), &uses, None);
    until_bound(&mut baseline, "p");
    let commands = baseline.command_log.len() as u64;
    assert!(
        commands >= 11,
        "read, evaluate, four finalizers, allocate, four records: {commands}"
    );
    for command in 1..=commands {
        for fault in [Fault::CrashBefore, Fault::CrashAfter] {
            let mut cluster = healthy_cluster(&[("node-a", 4), ("node-b", 3)]);
            cluster.durable_driver = true;
            cluster.fault_at(command, fault);
            cluster.create_pod(&key("p"), &uses, None);
            until_bound(&mut cluster, "p");
            cluster.run_for(10 * SECOND);
            expect_no_violation(cluster);
        }
    }
}
