//! Both halves together: what the controller allocates, a companion prepares, on a disk that forgets.

use super::leaders::contested;
use super::{calm, key, until_bound};
use crate::node::Trouble;
use crate::stage::{SECOND, Stage};
use crate::store::Kind;
use crate::users::Use;

/// More steps than any plan has: a kill at the last is one before the answer.
const STEPS: u32 = 16;

/// What befalls one operation of a companion: its number, the trouble, and whether the power goes with it.
pub(super) type Plan = Option<(u64, Trouble, bool)>;

pub(super) fn until_it_runs(stage: &mut Stage, name: &str) {
    let text = format!("{name} has containers");
    stage.run_until(&text, |stage| stage.has_containers(&key(name)));
}

pub(super) fn until_it_is_gone(stage: &mut Stage, name: &str) {
    stage.store.delete_pod(&key(name));
    stage.run_until("it has ended", |stage| !stage.store.pods.contains_key(&key(name)));
}

/// Everything is deleted, and everything is free.
pub(super) fn expect_all_free(mut stage: Stage, what: &str) {
    if stage.violation.is_none() {
        stage.conclude();
        stage.conclude_nodes();
    }
    assert_eq!(stage.violation, None, "{what}");
}

/// A cluster of one node with one device, whose companion has this trouble.
pub(super) fn troubled(plan: Plan) -> Stage {
    let mut stage = calm(&[("node-a", 1)]);
    if let Some((operation, trouble, power)) = plan {
        stage.nodes.plan.insert(operation, (trouble, power));
    }
    stage.set_up_nodes(7);
    stage
}

/// Tells a story, which returns how many operations a companion had, once without trouble and once with every trouble at every step of
/// each.
pub(super) fn with_every_trouble(at_least: u64, story: impl Fn(Plan) -> u64) {
    let operations = story(None);
    assert!(operations >= at_least, "{operations} operations");
    for operation in 1..=operations {
        for step in 0..=STEPS {
            let fail = Trouble::Fail { from: step, steps: 3 };
            for (trouble, power) in [
                (Trouble::Kill(step), false),
                (Trouble::Kill(step), true),
                (fail, false),
            ] {
                story(Some((operation, trouble, power)));
            }
        }
    }
}

/// One pod after the other has the only device.
fn two_lives(plan: Plan) -> u64 {
    let mut stage = troubled(plan);
    for name in ["p", "q"] {
        stage.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_bound(&mut stage, name);
        until_it_runs(&mut stage, name);
        until_it_is_gone(&mut stage, name);
    }
    let operations = stage.nodes.operations;
    assert!(stage.nodes.prepared >= 2 || stage.violation.is_some());
    expect_all_free(stage, &format!("{plan:?}"));
    operations
}

#[test]
fn every_trouble_at_every_step_of_a_companion_is_outlived() {
    // A start and two of each call.
    with_every_trouble(5, two_lives);
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
    expect_all_free(stage, "two claims");
}
