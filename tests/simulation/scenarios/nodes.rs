//! Both halves together: what the controller allocates, a companion prepares, on a disk that forgets.

use super::leaders::contested;
use super::{calm, key, until_bound};
use crate::node::Trouble;
use crate::stage::{SECOND, Stage};
use crate::store::Kind;
use crate::users::Use;

/// More steps than any plan has: a kill at the last is one before the answer.
const STEPS: u32 = 16;

fn until_it_runs(stage: &mut Stage, name: &str) {
    let text = format!("{name} has containers");
    stage.run_until(&text, |stage| stage.has_containers(&key(name)));
}

/// Everything is deleted, and everything is free.
fn expect_all_free(mut stage: Stage) {
    if stage.violation.is_none() {
        stage.conclude();
        stage.conclude_nodes();
    }
    assert_eq!(stage.violation, None);
}

/// One pod after the other has the only device.
fn two_lives(plan: Option<(u64, Trouble, bool)>) -> u64 {
    let mut stage = calm(&[("node-a", 1)]);
    if let Some((operation, trouble, power)) = plan {
        stage.nodes.plan.insert(operation, (trouble, power));
    }
    stage.set_up_nodes(7);
    for name in ["p", "q"] {
        stage.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_bound(&mut stage, name);
        until_it_runs(&mut stage, name);
        stage.store.delete_pod(&key(name));
        stage.run_until("it has ended", |stage| !stage.store.pods.contains_key(&key(name)));
    }
    let operations = stage.nodes.operations;
    assert!(stage.nodes.prepared >= 2 || stage.violation.is_some());
    if stage.violation.is_none() {
        stage.conclude();
        stage.conclude_nodes();
    }
    assert_eq!(stage.violation, None, "{plan:?}");
    operations
}

#[test]
fn every_trouble_at_every_step_of_a_companion_is_outlived() {
    let operations = two_lives(None);
    assert!(operations >= 5, "a start and two of each call: {operations}");
    for operation in 1..=operations {
        for step in 0..=STEPS {
            let fail = Trouble::Fail { from: step, steps: 3 };
            for (trouble, power) in [
                (Trouble::Kill(step), false),
                (Trouble::Kill(step), true),
                (fail, false),
            ] {
                two_lives(Some((operation, trouble, power)));
            }
        }
    }
}

#[test]
fn of_two_claims_with_one_device_the_second_is_prepared_when_the_first_has_ended() {
    let mut stage = contested();
    stage.set_up_nodes(7);
    until_it_runs(&mut stage, "quick");
    stage.hold_watch(Kind::Claim);
    stage.run_until("the old leader has written", |stage| !stage.ghosts.is_empty());
    until_bound(&mut stage, "late");
    stage.let_watch_go(Kind::Claim);
    stage.run_for(60 * SECOND);
    assert!(stage.has_containers(&key("quick")) && !stage.has_containers(&key("late")));
    assert!(stage.nodes.refused > 0, "the companion was asked");
    stage.store.delete_pod(&key("quick"));
    until_it_runs(&mut stage, "late");
    expect_all_free(stage);
}
