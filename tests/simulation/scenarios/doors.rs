//! Devices that leave through both doors: whichever comes first, nobody else has what it has.

use super::{calm, key, until_bound};
use crate::faults::Fault;
use crate::node::Trouble;
use crate::stage::{SECOND, Stage};
use crate::users::Use;

/// More steps than any plan has: a kill at the last is one before the answer.
const STEPS: u32 = 16;

fn phase(stage: &Stage, name: &str) -> Option<String> {
    stage.store.pods.get(&key(name))?.status.phase.clone()
}

/// One node with one device that has both doors, and everything known to everybody.
fn both_doors(plan: Option<(u64, Trouble, bool)>) -> Stage {
    let mut stage = calm(&[("node-a", 1)]);
    if let Some((operation, trouble, power)) = plan {
        stage.nodes.plan.insert(operation, (trouble, power));
    }
    stage.set_up_nodes(7);
    stage.open_both_doors();
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

fn until_it_runs(stage: &mut Stage, name: &str) {
    let text = format!("{name} has containers");
    stage.run_until(&text, |stage| stage.has_containers(&key(name)));
}

fn until_it_is_gone(stage: &mut Stage, name: &str) {
    stage.store.delete_pod(&key(name));
    stage.run_until("it has ended", |stage| !stage.store.pods.contains_key(&key(name)));
}

fn conclude(mut stage: Stage, what: &str) {
    if stage.violation.is_none() {
        stage.conclude();
        stage.conclude_nodes();
    }
    assert_eq!(stage.violation, None, "{what}");
}

#[test]
fn of_a_container_and_a_claim_with_one_device_the_second_waits_or_is_turned_away() {
    for hidden in [false, true] {
        let mut stage = both_doors(None);
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
        conclude(stage, "two doors");
    }
}

/// A pod by one door, one by the other, and one by the first again.
fn three_lives(plan: Option<(u64, Trouble, bool)>) -> u64 {
    let mut stage = both_doors(plan);
    plugged(&mut stage, "p", false);
    stage.create_pod(&key("q"), &[Use::Template("gpu")], None);
    until_bound(&mut stage, "q");
    stage.run_for(5 * SECOND);
    stage.store.delete_pod(&key("p"));
    until_it_runs(&mut stage, "q");
    until_it_is_gone(&mut stage, "q");
    plugged(&mut stage, "r", true);
    let operations = stage.nodes.operations;
    conclude(stage, &format!("{plan:?}"));
    operations
}

#[test]
fn every_trouble_at_every_step_of_a_companion_with_both_doors_is_outlived() {
    let operations = three_lives(None);
    assert!(operations >= 6, "a start and calls by both doors: {operations}");
    for operation in 1..=operations {
        for step in 0..=STEPS {
            let fail = Trouble::Fail { from: step, steps: 3 };
            for (trouble, power) in [
                (Trouble::Kill(step), false),
                (Trouble::Kill(step), true),
                (fail, false),
            ] {
                three_lives(Some((operation, trouble, power)));
            }
        }
    }
}
