//! Both halves together: what the controller allocates, a companion prepares, on a disk that forgets.

use drayman::api::resource::AllocationMode;

use super::every_fault::LEFT_OPEN;
use super::leaders::conflicting;
use super::{calm, key, until_bound};
use crate::faults::Fault;
use crate::node::Trouble;
use crate::stage::{SECOND, Stage};
use crate::store::Kind;
use crate::users::Use;

/// At least as many as a start has that finds one claim.
const STEPS_OF_A_START: u32 = 8;

/// What befalls an operation of a companion: its number, the trouble, and whether the power goes with it.
pub(super) type Planned = (u64, Trouble, bool);

/// What a story without trouble had: operations of the companion, the steps of the longest of them, and commands of the controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    operations: u64,
    steps: u32,
    commands: u64,
}

impl Told {
    pub(super) fn by(stage: &Stage) -> Self {
        Self {
            operations: stage.nodes.operations,
            steps: stage.nodes.longest_operation(),
            commands: stage.commands,
        }
    }
}

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

/// A cluster of one node with one device, whose companion has these troubles.
pub(super) fn troubled(planned: &[Planned]) -> Stage {
    let mut stage = calm(&[("node-a", 1)]);
    for (operation, trouble, power) in planned {
        stage.nodes.plan.insert(*operation, (*trouble, *power));
    }
    stage.set_up_nodes(7);
    stage
}

/// Every trouble at every step of an operation. A kill at the last is one before the answer.
fn troubles(operation: u64, steps: u32) -> impl Iterator<Item = Planned> {
    (0..=steps).flat_map(move |step| {
        let fail = Trouble::Fail { from: step, steps: 3 };
        [
            (operation, Trouble::Kill(step), false),
            (operation, Trouble::Kill(step), true),
            (operation, fail, false),
        ]
    })
}

/// Tells a story once without trouble, then with every trouble at every step of each operation.
pub(super) fn with_every_trouble(at_least: u64, story: impl Fn(&[Planned]) -> Told) {
    let calm = story(&[]);
    assert!(calm.operations >= at_least, "{calm:?}");
    for operation in 1..=calm.operations {
        for planned in troubles(operation, calm.steps) {
            story(&[planned]);
        }
    }
}

/// Tells a story with each of these, and with a kill at every step of the operation that follows, which makes the first good.
pub(super) fn with_every_pair(story: impl Fn(&[Planned]) -> Told) {
    let calm = story(&[]);
    let mut pairs = 0;
    for operation in 1..=calm.operations {
        for first in troubles(operation, calm.steps) {
            for step in 0..=calm.steps {
                story(&[first, (operation + 1, Trouble::Kill(step), false)]);
                pairs += 1;
            }
        }
    }
    println!("{calm:?}, {pairs} pairs");
}

/// One pod after the other has the only device.
fn two_lives(planned: &[Planned]) -> Told {
    two_lives_with(planned, None)
}

/// The fault is at a command of the controller.
fn two_lives_with(planned: &[Planned], fault: Option<(u64, Fault)>) -> Told {
    let mut stage = troubled(planned);
    stage.faults.plan.extend(fault);
    for name in ["p", "q"] {
        stage.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_bound(&mut stage, name);
        until_it_runs(&mut stage, name);
        until_it_is_gone(&mut stage, name);
    }
    let told = Told::by(&stage);
    assert!(stage.nodes.prepared >= 2 || stage.violation.is_some());
    expect_all_free(stage, &format!("{planned:?} {fault:?}"));
    told
}

#[test]
fn every_fault_at_every_step_of_a_companion_is_survived() {
    // A start and two of each call.
    with_every_trouble(5, two_lives);
}

#[test]
fn a_kill_at_every_step_of_a_repair_is_survived() {
    let calm = two_lives(&[]);
    for operation in 1..=calm.operations {
        for fail in 0..calm.steps {
            // What is undone has fewer steps than what was to be done.
            for kill in fail + 1..=fail + calm.steps {
                for power in [false, true] {
                    two_lives(&[(operation, Trouble::FailAndKill { fail, kill }, power)]);
                }
            }
        }
    }
}

#[test]
fn every_pair_of_a_companion_fault_and_a_companion_kill() {
    with_every_pair(two_lives);
}

#[test]
fn every_pair_of_a_controller_fault_and_a_companion_kill() {
    let (start, calm) = (troubled(&[]).commands, two_lives(&[]));
    assert!(calm.commands >= start + 10, "{calm:?}");
    let mut pairs = 0;
    for command in start + 1..=calm.commands {
        for fault in LEFT_OPEN {
            for operation in 1..=calm.operations {
                for step in [0, calm.steps / 2, calm.steps] {
                    let kill = (operation, Trouble::Kill(step), false);
                    two_lives_with(&[kill], Some((command, fault)));
                    pairs += 1;
                }
            }
        }
    }
    println!("{calm:?}, {pairs} pairs");
}

#[test]
fn removed_files_are_back_as_soon_as_they_can_be_written() {
    let mut failures = 0;
    for from in 0..STEPS_OF_A_START {
        let mut stage = troubled(&[]);
        stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
        until_it_runs(&mut stage, "p");
        let fail = Trouble::Fail { from, steps: 3 };
        stage.nodes.plan.insert(stage.nodes.operations + 1, (fail, false));
        stage.lose_files("node-a");
        stage.run_for(10 * SECOND);
        failures += stage.nodes.tried_again;
        expect_all_free(stage, "files that are gone");
    }
    assert!(failures > 0, "no start has failed to write the file");
}

#[test]
fn a_claim_with_devices_of_another_node_is_not_prepared() {
    let mut stage = calm(&[("node-a", 1), ("node-b", 1)]);
    stage.set_up_nodes(7);
    stage.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    stage.create_pod(&key("p"), &[Use::Named("named")], None);
    until_it_runs(&mut stage, "p");
    let node = stage.store.pods[&key("p")].spec.node_name.clone();
    let other = if node.as_deref() == Some("node-a") {
        "node-b"
    } else {
        "node-a"
    };
    // Its user has not asked the scheduler.
    stage.create_pod(&key("q"), &[Use::Named("named")], Some(other));
    stage.run_for(120 * SECOND);
    assert!(stage.nodes.misdirected > 0, "the companion was asked");
    assert!(stage.has_containers(&key("p")) && !stage.has_containers(&key("q")));
    expect_all_free(stage, "a claim of another node");
}

#[test]
fn an_unkillable_container_keeps_its_device() {
    let mut stage = troubled(&[]);
    let stuck = stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_it_runs(&mut stage, "p");
    stage.nodes.stuck.insert(stuck);
    // By force; the claim goes with it, and its device is free for the controller.
    stage.store.remove_pod(&key("p"));
    stage.create_pod(&key("q"), &[Use::Template("gpu")], None);
    until_bound(&mut stage, "q");
    stage.run_for(900 * SECOND);
    assert!(stage.nodes.refused > 0, "the companion was asked");
    assert!(!stage.has_containers(&key("q")));
    stage.nodes.stuck.clear();
    stage.wake_kubelets();
    until_it_runs(&mut stage, "q");
    expect_all_free(stage, "a container that could not be killed");
}

#[test]
fn a_claim_that_kubelet_lists_late_is_not_forgotten() {
    let mut stage = troubled(&[]);
    stage.let_kubelet_write_late("node-a", true);
    let stuck = stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_it_runs(&mut stage, "p");
    // By force, with its claim; kubelet has not got as far as its containers.
    stage.nodes.stuck.insert(stuck);
    stage.store.remove_pod(&key("p"));
    // A companion that starts looks at once.
    stage.lose_files("node-a");
    stage.run_for(90 * SECOND);
    stage.let_kubelet_write_late("node-a", false);
    stage.run_for(300 * SECOND);
    stage.nodes.stuck.clear();
    stage.wake_kubelets();
    expect_all_free(stage, "a list that comes late");
}

#[test]
fn of_two_claims_with_one_device_the_second_is_prepared_later() {
    let mut stage = conflicting();
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
