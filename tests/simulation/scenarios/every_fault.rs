//! Every fault at every command of the base scenarios, and every pair of faults in the lifecycle of one claim.

use drayman::api::resource::AllocationMode;

use super::{end_pod, healthy_cluster, key};
use crate::cluster::{Cluster, SECOND};
use crate::faults::{ALL, Fault, Target};
use crate::users::Use;

type Scenario = fn(&mut Cluster);

/// Faults that leave work unfinished or its result unknown.
pub(super) const INTERRUPTING_FAULTS: [Fault; 8] = [
    Fault::CrashBefore,
    Fault::CrashAfter,
    Fault::ReplyLost,
    Fault::Late,
    Fault::Refused,
    Fault::PausedLeader,
    Fault::DriverHungAfter,
    Fault::DriverRetry,
];

fn one_claim(cluster: &mut Cluster) {
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    cluster.run_for(20 * SECOND);
    end_pod(cluster, "p");
    cluster.run_for(20 * SECOND);
}

fn two_claims(cluster: &mut Cluster) {
    let uses = [Use::Template("gpu"), Use::Template("gpu"), Use::Template("other")];
    cluster.create_pod(&key("p"), &uses, None);
    cluster.run_for(20 * SECOND);
    cluster.store.delete_pod(&key("p"));
    cluster.run_for(20 * SECOND);
}

fn four_pods_for_three_devices(cluster: &mut Cluster) {
    for name in ["p", "q", "r", "s"] {
        cluster.create_pod(&key(name), &[Use::Template("gpu")], None);
    }
    cluster.run_for(20 * SECOND);
    cluster.store.delete_pod(&key("q"));
    cluster.run_for(20 * SECOND);
}

fn a_shared_claim(cluster: &mut Cluster) {
    cluster.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    for name in ["p", "q"] {
        cluster.create_pod(&key(name), &[Use::Named("named")], None);
    }
    cluster.run_for(20 * SECOND);
    cluster.store.delete_pod(&key("p"));
    cluster.store.delete_pod(&key("q"));
    cluster.run_for(20 * SECOND);
    cluster.create_pod(&key("r"), &[Use::Named("named")], None);
    cluster.run_for(20 * SECOND);
}

fn an_immediate_claim(cluster: &mut Cluster) {
    cluster.create_claim(&key("named"), "gpu", AllocationMode::Immediate);
    cluster.run_for(20 * SECOND);
    cluster.store.delete_claim(&key("named"));
    cluster.run_for(20 * SECOND);
}

const SCENARIOS: [(&str, Scenario); 5] = [
    ("one claim", one_claim),
    ("two claims", two_claims),
    ("four pods for three devices", four_pods_for_three_devices),
    ("a shared claim", a_shared_claim),
    ("an immediate claim", an_immediate_claim),
];

/// Runs a scenario with faults at these commands, counted from its start. Returns the numbers of commands and hits.
fn run(name: &str, scenario: Scenario, lasting: bool, faults: &[(u64, Fault)]) -> (u64, u64) {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 2)]);
    cluster.durable_driver = lasting;
    let before = cluster.commands;
    for (index, fault) in faults {
        cluster.faults.plan.insert(before + index, *fault);
    }
    scenario(&mut cluster);
    let commands = cluster.commands - before;
    let hits = cluster.faults.hits.values().sum();
    cluster.conclude();
    assert_eq!(
        cluster.violation, None,
        "{name}, lasting driver: {lasting}, faults: {faults:?}"
    );
    (commands, hits)
}

#[test]
fn every_fault_at_every_command_of_every_scenario() {
    for (name, scenario) in SCENARIOS {
        let (commands, _) = run(name, scenario, false, &[]);
        assert!(commands >= 5, "{name}: {commands}");
        let mut hits = 0;
        for lasting in [false, true] {
            for index in 1..=commands {
                for fault in ALL {
                    hits += run(name, scenario, lasting, &[(index, fault)]).1;
                }
            }
        }
        assert!(
            hits >= 2 * 7 * commands,
            "{name}: {hits} hits in {commands} commands"
        );
    }
}

/// Runs a scenario with every pair of these faults at every pair of commands. The second command may be an effect of the first fault.
/// Returns the numbers of runs and of runs with both faults.
fn pairs(name: &str, scenario: Scenario, kinds: &[Fault]) -> (usize, usize) {
    let (commands, _) = run(name, scenario, false, &[]);
    let (mut runs, mut both) = (0, 0);
    for first in 1..=commands {
        for second in first + 1..=commands + 4 {
            for &one in kinds {
                for &other in kinds {
                    let (_, hits) = run(name, scenario, true, &[(first, one), (second, other)]);
                    runs += 1;
                    both += usize::from(hits >= 2);
                }
            }
        }
    }
    println!("{name}: {runs} pairs, both hit in {both}");
    (runs, both)
}

#[test]
fn every_pair_of_faults_for_a_pod_with_one_claim() {
    let targets = [Target::Read, Target::Write, Target::Record, Target::Call];
    let applies = |fault: &Fault| targets.iter().any(|target| fault.applies_to(*target));
    let kinds: Vec<Fault> = ALL.into_iter().filter(applies).collect();
    let (runs, both) = pairs("one claim", one_claim, &kinds);
    assert!(both > runs / 8, "{both} of {runs}");
}

#[test]
fn every_pair_of_lasting_faults_for_a_pod_with_two_claims() {
    let (runs, both) = pairs("two claims", two_claims, &INTERRUPTING_FAULTS);
    assert!(both > runs / 8, "{both} of {runs}");
}
