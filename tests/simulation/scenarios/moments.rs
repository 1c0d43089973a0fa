//! The controller is killed at one moment of an allocation or of a release, and what happens meanwhile is chosen to hurt.

use drayman::api::resource::AllocationMode;

use super::{calm, expect_well, key, plain, until_bound};
use crate::faults::Fault;
use crate::stage::{SECOND, Stage};
use crate::users::Use;

/// A pod with one claim, whose controller is killed after its n-th command: read, judge, finalizer, allocate, record. The driver's
/// books outlive it, as those of devices on a network do. The second answer is the pod's uid.
fn killed_after(command: u64) -> (Stage, String) {
    let mut stage = calm(&[("node-a", 1), ("node-b", 1)]);
    stage.lasting_driver = true;
    let at = stage.commands + command;
    stage.faults.plan.insert(at, Fault::CrashAfter);
    let uid = stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    stage.run_until("the controller is killed", |stage| stage.process.is_none());
    (stage, uid)
}

/// The node on which the driver holds something that no claim records.
fn held_by_nobody(stage: &Stage) -> Option<String> {
    let mut pending = stage.driver.pending.values();
    pending.next().map(|hold| hold.node.clone())
}

fn node_of(stage: &Stage) -> Option<String> {
    stage.store.pods[&key("p")].spec.node_name.clone()
}

#[test]
fn a_kill_between_finalizer_and_allocation_costs_only_time() {
    let (mut stage, _) = killed_after(3);
    assert_eq!(held_by_nobody(&stage), None);
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_kill_before_the_record_is_made_good_on_the_same_node() {
    let (mut stage, uid) = killed_after(4);
    let held = held_by_nobody(&stage).unwrap();
    stage.pod_nodes.insert(uid, [held.clone()].into());
    until_bound(&mut stage, "p");
    assert_eq!(node_of(&stage), Some(held));
    expect_well(stage);
}

#[test]
fn a_held_claim_is_given_back_before_it_is_allocated_again() {
    let (mut stage, _) = killed_after(4);
    // The pod's answer comes while the driver refuses to give back.
    stage.faults.plan.insert(stage.commands + 1, Fault::DriverRetry);
    stage.command_log.clear();
    until_bound(&mut stage, "p");
    let log = plain(&stage.command_log);
    let first = |word: &str| log.iter().position(|line| line.starts_with(word));
    let given_back = log.iter().rposition(|line| line.starts_with("deallocate"));
    assert_eq!(stage.faults.hits.get(&Fault::DriverRetry), Some(&1));
    assert!(first("deallocate") < given_back, "it is tried twice: {log:?}");
    assert!(given_back < first("allocate"), "{log:?}");
    expect_well(stage);
}

#[test]
fn a_killed_controllers_devices_are_free_on_another_node() {
    let (mut stage, uid) = killed_after(4);
    let held = held_by_nobody(&stage).unwrap();
    let other = if held == "node-a" { "node-b" } else { "node-a" };
    stage.pod_nodes.insert(uid, [other.to_owned()].into());
    let _ = stage.store.update_context(&key("p"), None, |context| {
        context.spec.selected_node = other.to_owned();
    });
    until_bound(&mut stage, "p");
    assert_eq!(node_of(&stage).as_deref(), Some(other));
    assert_eq!(held_by_nobody(&stage), None, "{held} is free");
    expect_well(stage);
}

#[test]
fn a_killed_controllers_devices_are_free_with_their_claim() {
    let (mut stage, _) = killed_after(4);
    assert!(held_by_nobody(&stage).is_some());
    stage.store.delete_pod(&key("p"));
    stage.run_until("the claim is gone", |stage| stage.store.claims.is_empty());
    assert_eq!(held_by_nobody(&stage), None);
    expect_well(stage);
}

#[test]
fn a_slow_allocation_for_a_former_node_is_never_recorded() {
    let mut stage = calm(&[("node-a", 1), ("node-b", 1)]);
    // Read, judge, finalizer, allocate.
    stage.faults.plan.insert(stage.commands + 4, Fault::Slow);
    let uid = stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    stage.run_until("the driver is asked", |stage| {
        let last = stage.command_log.last();
        last.is_some_and(|line| line.starts_with("allocate"))
    });
    let context = stage.store.contexts[&key("p")].clone();
    let held = context.spec.selected_node.clone();
    let other = if held == "node-a" { "node-b" } else { "node-a" };
    stage.pod_nodes.insert(uid, [other.to_owned()].into());
    let _ = stage.store.update_context(&key("p"), None, |context| {
        context.spec.selected_node = other.to_owned();
    });
    stage.command_log.clear();
    until_bound(&mut stage, "p");
    let log = plain(&stage.command_log);
    let of_held = |word: &str| {
        let mut lines = log.iter();
        lines.any(|line| line.starts_with(word) && line.contains(held.as_str()))
    };
    assert!(!of_held("record"), "{log:?}");
    assert!(log.iter().any(|line| line.starts_with("deallocate")), "{log:?}");
    assert_eq!(node_of(&stage).as_deref(), Some(other));
    expect_well(stage);
}

#[test]
fn a_kill_after_the_record_allocates_nothing_again() {
    let (mut stage, _) = killed_after(5);
    stage.command_log.clear();
    until_bound(&mut stage, "p");
    let log = plain(&stage.command_log);
    assert!(!log.iter().any(|line| line.starts_with("allocate")), "{log:?}");
    expect_well(stage);
}

#[test]
fn a_kill_between_deallocation_and_finalizer_is_repaired() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    stage.create_pod(&key("p"), &[Use::Named("named")], None);
    until_bound(&mut stage, "p");
    // Deallocate, clear.
    stage.faults.plan.insert(stage.commands + 2, Fault::CrashAfter);
    stage.store.delete_pod(&key("p"));
    stage.run_until("the controller is killed", |stage| stage.process.is_none());
    let claim = stage.claim("named").unwrap();
    assert!(claim.status.allocation.is_none() && claim.metadata.finalizers.is_some());
    stage.store.delete_claim(&key("named"));
    stage.run_until("it is gone", |stage| stage.claim("named").is_none());
    expect_well(stage);
}

#[test]
fn a_kill_at_any_command_leaves_all_of_four_claims_or_none() {
    let uses = [Use::Template("gpu"); 4];
    let mut whole = calm(&[("node-a", 4), ("node-b", 3)]);
    whole.create_pod(&key("p"), &uses, None);
    until_bound(&mut whole, "p");
    let commands = whole.command_log.len() as u64;
    assert!(
        commands >= 11,
        "read, judge, four finalizers, allocate, four records: {commands}"
    );
    for command in 1..=commands {
        for fault in [Fault::CrashBefore, Fault::CrashAfter] {
            let mut stage = calm(&[("node-a", 4), ("node-b", 3)]);
            stage.lasting_driver = true;
            stage.faults.plan.insert(stage.commands + command, fault);
            stage.create_pod(&key("p"), &uses, None);
            until_bound(&mut stage, "p");
            stage.run_for(10 * SECOND);
            expect_well(stage);
        }
    }
}
