//! What an old leader, paused past its lease, does to what the new one has decided.

use drayman::api::resource::AllocationMode;

use super::{calm, expect_well, is_bound, key, plain, until_bound};
use crate::faults::Fault;
use crate::stage::{SECOND, Stage};
use crate::store::Kind;
use crate::users::Use;

/// The one device is about to be recorded for `younger` when the leader is paused; the new one gives it to `older`.
pub(super) fn conflicting() -> Stage {
    let mut stage = calm(&[("node-a", 1)]);
    for name in ["older", "younger"] {
        stage.create_claim(&key(name), "gpu", AllocationMode::WaitForFirstConsumer);
    }
    // Read, judge, finalizer, allocate, record.
    stage.faults.plan.insert(stage.commands + 5, Fault::PausedLeader);
    stage.create_pod(&key("late"), &[Use::Named("younger")], None);
    stage.run_until("the leader is paused", |stage| stage.process.is_none());
    stage.store.delete_context(&key("late"));
    stage.create_pod(&key("quick"), &[Use::Named("older")], Some("node-a"));
    stage.run_until("the new leader has allocated", |stage| {
        is_allocated(stage, "older")
    });
    assert!(!is_allocated(&stage, "younger"), "the old one sleeps still");
    stage.command_log.clear();
    stage
}

fn is_allocated(stage: &Stage, name: &str) -> bool {
    stage
        .claim(name)
        .is_some_and(|claim| claim.status.allocation.is_some())
}

#[test]
fn the_older_of_two_allocations_stands() {
    let mut stage = conflicting();
    stage.run_until("the old leader has written", |stage| !stage.ghosts.is_empty());
    assert!(is_allocated(&stage, "younger") && is_allocated(&stage, "older"));
    stage.run_for(SECOND / 2);
    assert!(!is_allocated(&stage, "younger") && is_allocated(&stage, "older"));
    let log = plain(&stage.command_log);
    let repair = ["read pod late", "take back younger", "deallocate younger"];
    assert!(log.windows(3).any(|steps| steps == repair), "{log:?}");
    let told: Vec<String> = stage
        .reports
        .iter()
        .filter(|report| report.reason == "DeviceHeldTwice")
        .map(|report| format!("{:?}", report.regarding))
        .collect();
    assert_eq!(told.len(), 2, "on the claim and on its pod: {told:?}");
    assert!(
        told.iter()
            .all(|about| about.contains("younger") || about.contains("late")),
        "{told:?}"
    );
    // It is served when its turn comes.
    stage.store.delete_pod(&key("quick"));
    until_bound(&mut stage, "late");
    expect_well(stage);
}

#[test]
fn a_younger_allocation_of_a_bound_pod_is_not_rolled_back() {
    let mut stage = conflicting();
    stage.hold_watch(Kind::Claim);
    stage.run_until("the old leader has written", |stage| !stage.ghosts.is_empty());
    until_bound(&mut stage, "late");
    stage.let_watch_go(Kind::Claim);
    stage.run_for(60 * SECOND);
    assert!(is_bound(&stage, "late") && is_allocated(&stage, "younger") && is_allocated(&stage, "older"));
    assert!(
        stage
            .reports
            .iter()
            .any(|report| report.reason == "DeviceHeldTwice")
    );
    let log = plain(&stage.command_log);
    // Once for its context, and once to learn that it has a node.
    let reads = log.iter().filter(|line| *line == "read pod late").count();
    assert_eq!(
        (reads, log.contains(&"take back younger".to_owned())),
        (2, false),
        "{log:?}"
    );
    // It ends as every pod does.
    stage.store.delete_pod(&key("late"));
    stage.run_until("its claim is given back", |stage| !is_allocated(stage, "younger"));
    assert!(is_allocated(&stage, "older"));
    expect_well(stage);
}

#[test]
fn an_old_leaders_allocation_after_the_release_is_returned() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    stage.faults.plan.insert(stage.commands + 5, Fault::PausedLeader);
    stage.create_pod(&key("p"), &[Use::Named("named")], None);
    stage.run_until("the leader is paused", |stage| stage.process.is_none());
    // Meanwhile the claim is allocated, used and released, and has no finalizer any more.
    until_bound(&mut stage, "p");
    stage.store.delete_pod(&key("p"));
    stage.run_until("it is released", |stage| {
        stage
            .claim("named")
            .is_some_and(|claim| claim.metadata.finalizers.is_none())
    });
    assert!(stage.ghosts.is_empty(), "the old leader sleeps still");
    stage.run_until("the old leader has written", |stage| !stage.ghosts.is_empty());
    assert!(is_allocated(&stage, "named"));
    stage.run_until("it is given back", |stage| !is_allocated(stage, "named"));
    expect_well(stage);
}

#[test]
fn an_old_leaders_late_finalizer_removal_does_not_count() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    stage.create_pod(&key("p"), &[Use::Named("named")], None);
    until_bound(&mut stage, "p");
    // Deallocate, clear, and then the finalizer.
    stage.faults.plan.insert(stage.commands + 3, Fault::PausedLeader);
    stage.store.delete_pod(&key("p"));
    stage.run_until("the leader is paused", |stage| stage.process.is_none());
    let log = plain(&stage.command_log);
    assert_eq!(log.last().unwrap(), "remove finalizer of named");
    stage.create_pod(&key("next"), &[Use::Named("named")], None);
    until_bound(&mut stage, "next");
    stage.run_for(120 * SECOND);
    let claim = stage.claim("named").unwrap();
    assert!(claim.status.allocation.is_some() && claim.metadata.finalizers.is_some());
    expect_well(stage);
}
