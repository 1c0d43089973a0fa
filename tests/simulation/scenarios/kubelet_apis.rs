//! Devices that leave through both APIs: whichever comes first, nobody else has what it has.

use super::nodes::{
    Planned, Told, expect_all_free, troubled, until_it_is_gone, until_it_runs, with_every_pair,
    with_every_trouble,
};
use super::{key, until_bound};
use crate::faults::Fault;
use crate::node::Trouble;
use crate::stage::{SECOND, Stage};
use crate::users::Use;

fn phase(stage: &Stage, name: &str) -> Option<String> {
    stage.store.pods.get(&key(name))?.status.phase.clone()
}

/// One node with one device that has both APIs, and everything known to everybody.
fn both_apis(planned: &[Planned]) -> Stage {
    let mut stage = troubled(planned);
    stage.open_both_apis();
    stage.run_for(30 * SECOND);
    stage
}

/// Makes a pod that wants the device as an extended resource, again and again as a Deployment does, until it has containers.
fn plugged(stage: &mut Stage, name: &str, hidden: bool) {
    for _ in 0..100 {
        if stage.has_containers(&key(name)) || stage.violation.is_some() {
            return;
        }
        if phase(stage, name).is_some() {
            stage.store.delete_pod(&key(name));
        }
        if !stage.store.pods.contains_key(&key(name)) {
            stage.plug_pod(&key(name), "node-a", 1, hidden);
        }
        stage.run_for(3 * SECOND);
    }
    stage.violate(|| format!("never: {name} has containers"));
}

#[test]
fn of_container_and_claim_with_one_device_the_second_waits() {
    for hidden in [false, true] {
        let mut stage = both_apis(&[]);
        stage.plug_pod(&key("first"), "node-a", 1, hidden);
        until_it_runs(&mut stage, "first");
        // The companion begins anew, and knows only what kubelet shows.
        let next = stage.nodes.operations + 1;
        stage.nodes.plan.insert(next, (Trouble::Kill(0), false));
        stage.create_pod(&key("claiming"), &[Use::Template("gpu")], None);
        until_bound(&mut stage, "claiming");
        stage.run_for(60 * SECOND);
        assert!(stage.nodes.operations > next, "it was killed");
        assert!(!stage.has_containers(&key("claiming")), "hidden: {hidden}");
        assert!(stage.faults.hits[&Fault::ClaimOfContainer] > 0, "it was asked");
        until_it_is_gone(&mut stage, "first");
        until_it_runs(&mut stage, "claiming");

        stage.plug_pod(&key("second"), "node-a", 1, hidden);
        stage.run_until("it is turned away", |stage| {
            phase(stage, "second").as_deref() == Some("Failed")
        });
        until_it_is_gone(&mut stage, "claiming");
        stage.run_for(30 * SECOND);
        stage.plug_pod(&key("third"), "node-a", 1, hidden);
        until_it_runs(&mut stage, "third");
        expect_all_free(stage, "two APIs");
    }
}

#[test]
fn an_unrecorded_allocate_keeps_its_device_from_claims() {
    let mut stage = both_apis(&[]);
    stage.faults.rates.insert(Fault::GrantLate, 1000);
    stage.plug_pod(&key("first"), "node-a", 1, false);
    stage.run_until("it is answered", |stage| stage.nodes.granted > 0);
    stage.create_pod(&key("claiming"), &[Use::Template("gpu")], None);
    until_bound(&mut stage, "claiming");
    until_it_runs(&mut stage, "first");
    assert!(stage.faults.hits[&Fault::ClaimOfContainer] > 0, "it was asked");
    stage.run_for(60 * SECOND);
    assert!(!stage.has_containers(&key("claiming")));
    until_it_is_gone(&mut stage, "first");
    until_it_runs(&mut stage, "claiming");
    expect_all_free(stage, "noted late");
}

/// A pod through one API, one through the other, and one by the first again.
fn three_lives(planned: &[Planned]) -> Told {
    let mut stage = both_apis(planned);
    plugged(&mut stage, "p", false);
    stage.create_pod(&key("q"), &[Use::Template("gpu")], None);
    until_bound(&mut stage, "q");
    stage.run_for(5 * SECOND);
    stage.store.delete_pod(&key("p"));
    until_it_runs(&mut stage, "q");
    until_it_is_gone(&mut stage, "q");
    plugged(&mut stage, "r", true);
    let told = Told::by(&stage);
    expect_all_free(stage, &format!("{planned:?}"));
    told
}

#[test]
fn every_fault_at_every_step_of_a_companion_with_both_apis() {
    // A start and calls by both APIs.
    with_every_trouble(6, three_lives);
}

#[test]
fn every_pair_of_a_companion_fault_and_kill_with_both_apis() {
    with_every_pair(three_lives);
}
