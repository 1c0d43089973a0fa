//! Every fault at every command of the base stories, and every pair of faults in the life of one claim.

use drayman::api::resource::AllocationMode;

use super::{calm, end_pod, key};
use crate::faults::{ALL, Fault, Target};
use crate::stage::{SECOND, Stage};
use crate::users::Use;

type Story = fn(&mut Stage);

/// Faults after which something is left to be done, or to be found out.
pub(super) const LEFT_OPEN: [Fault; 8] = [
    Fault::CrashBefore,
    Fault::CrashAfter,
    Fault::ReplyLost,
    Fault::Late,
    Fault::Refused,
    Fault::PausedLeader,
    Fault::DriverHungAfter,
    Fault::DriverRetry,
];

fn one_claim(stage: &mut Stage) {
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    stage.run_for(20 * SECOND);
    end_pod(stage, "p");
    stage.run_for(20 * SECOND);
}

fn two_claims(stage: &mut Stage) {
    let uses = [Use::Template("gpu"), Use::Template("gpu"), Use::Template("other")];
    stage.create_pod(&key("p"), &uses, None);
    stage.run_for(20 * SECOND);
    stage.store.delete_pod(&key("p"));
    stage.run_for(20 * SECOND);
}

fn four_pods_for_three_devices(stage: &mut Stage) {
    for name in ["p", "q", "r", "s"] {
        stage.create_pod(&key(name), &[Use::Template("gpu")], None);
    }
    stage.run_for(20 * SECOND);
    stage.store.delete_pod(&key("q"));
    stage.run_for(20 * SECOND);
}

fn a_shared_claim(stage: &mut Stage) {
    stage.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    for name in ["p", "q"] {
        stage.create_pod(&key(name), &[Use::Named("named")], None);
    }
    stage.run_for(20 * SECOND);
    stage.store.delete_pod(&key("p"));
    stage.store.delete_pod(&key("q"));
    stage.run_for(20 * SECOND);
    stage.create_pod(&key("r"), &[Use::Named("named")], None);
    stage.run_for(20 * SECOND);
}

fn an_immediate_claim(stage: &mut Stage) {
    stage.create_claim(&key("named"), "gpu", AllocationMode::Immediate);
    stage.run_for(20 * SECOND);
    stage.store.delete_claim(&key("named"));
    stage.run_for(20 * SECOND);
}

const STORIES: [(&str, Story); 5] = [
    ("one claim", one_claim),
    ("two claims", two_claims),
    ("four pods for three devices", four_pods_for_three_devices),
    ("a shared claim", a_shared_claim),
    ("an immediate claim", an_immediate_claim),
];

/// Tells a story with faults at commands, counted from its beginning. The answer is how many commands there were.
fn tell(name: &str, story: Story, lasting: bool, faults: &[(u64, Fault)]) -> (u64, u64) {
    let mut stage = calm(&[("node-a", 1), ("node-b", 2)]);
    stage.lasting_driver = lasting;
    let before = stage.commands;
    for (index, fault) in faults {
        stage.faults.plan.insert(before + index, *fault);
    }
    story(&mut stage);
    let told = stage.commands - before;
    let hits = stage.faults.hits.values().sum();
    stage.conclude();
    assert_eq!(
        stage.violation, None,
        "{name}, lasting driver: {lasting}, faults: {faults:?}"
    );
    (told, hits)
}

#[test]
fn every_fault_at_every_command_of_every_story() {
    for (name, story) in STORIES {
        let (commands, _) = tell(name, story, false, &[]);
        assert!(commands >= 5, "{name}: {commands}");
        let mut hits = 0;
        for lasting in [false, true] {
            for index in 1..=commands {
                for fault in ALL {
                    hits += tell(name, story, lasting, &[(index, fault)]).1;
                }
            }
        }
        assert!(
            hits >= 2 * 7 * commands,
            "{name}: {hits} hits in {commands} commands"
        );
    }
}

/// Tells a story with every pair of these faults at every pair of commands. The second may be at a command that only the first
/// has led to. The answer is how often both were met.
fn pairs(name: &str, story: Story, kinds: &[Fault]) -> (usize, usize) {
    let (commands, _) = tell(name, story, false, &[]);
    let (mut told, mut both) = (0, 0);
    for first in 1..=commands {
        for second in first + 1..=commands + 4 {
            for &one in kinds {
                for &other in kinds {
                    let (_, hits) = tell(name, story, true, &[(first, one), (second, other)]);
                    told += 1;
                    both += usize::from(hits >= 2);
                }
            }
        }
    }
    println!("{name}: {told} pairs told, both met in {both}");
    (told, both)
}

#[test]
fn every_pair_of_faults_for_a_pod_with_one_claim() {
    let targets = [Target::Read, Target::Write, Target::Record, Target::Call];
    let applies = |fault: &Fault| targets.iter().any(|target| fault.applies_to(*target));
    let kinds: Vec<Fault> = ALL.into_iter().filter(applies).collect();
    let (told, both) = pairs("one claim", one_claim, &kinds);
    assert!(both > told / 8, "{both} of {told}");
}

#[test]
fn every_pair_of_lasting_faults_for_a_pod_with_two_claims() {
    let (told, both) = pairs("two claims", two_claims, &LEFT_OPEN);
    assert!(both > told / 8, "{both} of {told}");
}
