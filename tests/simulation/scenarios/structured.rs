//! Structured mode: the scheduler allocates, and a companion reads the claim when kubelet wants it prepared.

use super::key;
use super::nodes::{Planned, Told, until_it_is_gone, until_it_runs, with_every_pair, with_every_trouble};
use crate::faults::Fault;
use crate::node::Trouble;
use crate::stage::{SECOND, Stage};
use crate::users::Use;

/// One node in a cluster of structured mode. The second of two devices has two shares.
fn structured(devices: usize, planned: &[Planned]) -> Stage {
    let mut stage = Stage::new(7);
    stage.verbose = std::env::var("VERBOSE").is_ok();
    stage.patient_scheduler = true;
    stage.structured = true;
    stage.set_devices("node-a", devices);
    for (operation, trouble, power) in planned {
        stage.nodes.plan.insert(*operation, (*trouble, *power));
    }
    stage.set_up_nodes(7);
    stage
}

/// Everything is deleted, and everything is free.
fn expect_all_free(mut stage: Stage, what: &str) {
    if stage.violation.is_none() {
        stage.conclude_structured();
        stage.conclude_nodes();
    }
    assert_eq!(stage.violation, None, "{what}");
}

/// One pod after the other has the only device.
fn two_lives(planned: &[Planned]) -> Told {
    let mut stage = structured(1, planned);
    for name in ["p", "q"] {
        stage.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_it_runs(&mut stage, name);
        until_it_is_gone(&mut stage, name);
    }
    let told = Told::by(&stage);
    expect_all_free(stage, &format!("{planned:?}"));
    told
}

#[test]
fn every_fault_at_every_step_is_survived_in_structured_mode() {
    with_every_trouble(5, two_lives);
}

#[test]
fn every_pair_of_a_companion_fault_and_kill_in_structured_mode() {
    with_every_pair(two_lives);
}

#[test]
fn of_two_claims_that_the_scheduler_gave_one_device_one_waits() {
    let mut stage = structured(1, &[]);
    stage.create_pod(&key("first"), &[Use::Template("gpu")], None);
    until_it_runs(&mut stage, "first");
    stage.faults.rates.insert(Fault::ScheduledTwice, 1000);
    stage.create_pod(&key("second"), &[Use::Template("gpu")], None);
    stage.run_for(60 * SECOND);
    assert!(stage.nodes.refused > 0, "the companion was asked");
    assert!(!stage.has_containers(&key("second")));
    until_it_is_gone(&mut stage, "first");
    until_it_runs(&mut stage, "second");
    expect_all_free(stage, "a device allocated twice");
}

#[test]
fn claims_are_prepared_once_the_api_server_is_back() {
    let mut stage = structured(1, &[]);
    stage.create_pod(&key("first"), &[Use::Template("gpu")], None);
    until_it_runs(&mut stage, "first");
    stage.faults.rates.insert(Fault::ClaimUnreadable, 1000);
    until_it_is_gone(&mut stage, "first");
    stage.create_pod(&key("second"), &[Use::Template("gpu")], None);
    stage.run_for(60 * SECOND);
    assert!(!stage.has_containers(&key("second")), "its claim cannot be read");
    stage.faults.stop();
    until_it_runs(&mut stage, "second");
    expect_all_free(stage, "an API server that was away");
}

#[test]
fn claims_share_a_device_and_another_has_admin_access() {
    let mut stage = structured(2, &[]);
    // The exclusive device goes first or last; three claims fill both devices.
    for name in ["one", "two", "three"] {
        stage.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_it_runs(&mut stage, name);
    }
    for name in ["watching", "watching-too"] {
        stage.create_pod(&key(name), &[Use::Template("gpu.admin")], None);
        until_it_runs(&mut stage, name);
    }
    stage.create_pod(&key("waiting"), &[Use::Template("gpu")], None);
    stage.run_for(60 * SECOND);
    assert!(!stage.has_containers(&key("waiting")));
    until_it_is_gone(&mut stage, "two");
    until_it_runs(&mut stage, "waiting");
    assert_eq!(stage.nodes.refused, 0);
    expect_all_free(stage, "shares and admin access");
}

#[test]
fn a_reboot_without_cdi_files_is_survived_in_structured_mode() {
    let mut stage = structured(2, &[]);
    for name in ["one", "two"] {
        stage.create_pod(&key(name), &[Use::Template("gpu.pair")], None);
        stage.create_pod(&key("watching"), &[Use::Template("gpu.admin")], None);
        until_it_runs(&mut stage, name);
        until_it_runs(&mut stage, "watching");
        let next = stage.nodes.operations + 1;
        stage.nodes.plan.insert(next, (Trouble::Kill(0), true));
        stage.lose_files("node-a");
        stage.run_until("the node is up again", |stage| stage.nodes.operations > next);
        until_it_runs(&mut stage, name);
        until_it_runs(&mut stage, "watching");
        until_it_is_gone(&mut stage, name);
        until_it_is_gone(&mut stage, "watching");
    }
    expect_all_free(stage, "a reboot");
}
