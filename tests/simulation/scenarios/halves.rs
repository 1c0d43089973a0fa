//! Pods that have some of their claims and cannot have the others: nobody keeps half of what a pod needs.

use drayman::api::resource::ResourceClaimStatus;

use super::{calm, expect_well, is_bound, key, plain, until_bound};
use crate::driver::{DRIVER, OTHER_DRIVER, recorded_hold};
use crate::faults::Fault;
use crate::stage::{SECOND, Stage};
use crate::store::Kind;
use crate::users::Use;

fn recorded(stage: &Stage) -> usize {
    let claims = stage.store.claims.values();
    claims.filter(|claim| recorded_hold(claim).is_some()).count()
}

/// How often a claim was taken back, as the controller asked for it.
fn taken_back(stage: &Stage) -> usize {
    let log = plain(&stage.command_log);
    log.iter().filter(|line| line.starts_with("take back")).count()
}

/// The controller was killed after it had recorded the first of a pod's two claims, and the node has lost the device of the other.
fn half_of_a_pod(second: &str) -> Stage {
    let mut stage = calm(&[("node-a", 2)]);
    stage.set_class("flip", DRIVER);
    stage.run_for(SECOND);
    stage.command_log.clear();
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template(second)], None);
    stage.run_until("the driver is asked", |stage| {
        let last = stage.command_log.last();
        last.is_some_and(|line| line.starts_with("allocate"))
    });
    stage.faults.plan.insert(stage.commands + 2, Fault::RequestLost);
    stage.run_until("one of two is recorded", |stage| recorded(stage) == 1);
    stage.crash();
    let held = stage.store.claims.values().find_map(|claim| recorded_hold(claim));
    let devices = held.unwrap().devices;
    stage.facts.nodes.insert("node-a".to_owned(), devices);
    stage
}

#[test]
fn a_partial_allocation_is_rolled_back_after_a_kill_if_not() {
    let mut stage = half_of_a_pod("gpu");
    stage.run_for(30 * SECOND);
    assert_eq!((recorded(&stage), taken_back(&stage)), (0, 1));
    let statuses = stage.store.claims.values().map(|claim| &claim.status);
    assert!(
        statuses
            .clone()
            .all(|status| *status == ResourceClaimStatus::default())
    );
    // Somebody else can have the device that is left.
    stage.create_pod(&key("q"), &[Use::Template("gpu")], None);
    until_bound(&mut stage, "q");
    stage.set_devices("node-a", 3);
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_partial_allocation_is_kept_after_a_kill_if_possible() {
    let mut stage = half_of_a_pod("gpu");
    stage.set_devices("node-a", 2);
    until_bound(&mut stage, "p");
    assert_eq!(taken_back(&stage), 0);
    expect_well(stage);
}

#[test]
fn a_claim_is_not_rolled_back_while_its_pod_gets_the_rest() {
    let mut stage = half_of_a_pod("flip");
    stage.run_until("it is known that the rest can be had nowhere", |stage| {
        let last = stage.command_log.last();
        last.is_some_and(|line| line.starts_with("judge"))
    });
    // The pod is read once more before anything is taken back, and the answer takes seconds.
    stage.faults.plan.insert(stage.commands + 1, Fault::Slow);
    stage.run_until("the pod is read", |stage| {
        let last = stage.command_log.last();
        last.is_some_and(|line| line.starts_with("read pod"))
    });
    stage.hold_watch(Kind::Context);
    stage.set_class("flip", OTHER_DRIVER);
    stage.run_for(60 * SECOND);
    assert_eq!(
        (recorded(&stage), taken_back(&stage)),
        (1, 0),
        "{:?}",
        stage.command_log
    );
    stage.let_watch_go(Kind::Context);
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_claim_is_not_rolled_back_from_a_pod_that_can_run_now() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.set_class("flip", DRIVER);
    stage.run_for(SECOND);
    stage.refuse_allocations = Some("p-c1");
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("flip")], None);
    stage.run_until("it is learnt that one is refused", |stage| {
        let last = stage.command_log.last();
        last.is_some_and(|line| line.starts_with("read claim p-c1"))
    });
    // The write that takes the other one back is lost, and its sender waits for the answer.
    stage.faults.plan.insert(stage.commands + 1, Fault::RequestLost);
    stage.run_until("the other one is to be taken back", |stage| {
        taken_back(stage) == 1
    });
    // Meanwhile another driver has what was refused, and the controller sees that, but not that the pod has gone on.
    stage.hold_watch(Kind::Context);
    stage.refuse_allocations = None;
    stage.set_class("flip", OTHER_DRIVER);
    until_bound(&mut stage, "p");
    assert_eq!(recorded(&stage), 1);
    stage.run_for(60 * SECOND);
    assert_eq!(
        (recorded(&stage), taken_back(&stage)),
        (1, 1),
        "{:?}",
        stage.command_log
    );
    stage.let_watch_go(Kind::Context);
    assert!(is_bound(&stage, "p"));
    expect_well(stage);
}

#[test]
fn a_pod_is_evaluated_again_when_a_late_write_succeeds() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    stage.run_until("the driver is asked", |stage| {
        let last = stage.command_log.last();
        last.is_some_and(|line| line.starts_with("allocate"))
    });
    stage.faults.plan.insert(stage.commands + 1, Fault::PausedLeader);
    stage.run_until("the leader is paused", |stage| stage.process.is_none());
    // The rest of the pod can be had nowhere any more.
    stage.set_devices("node-a", 1);
    // What the next leader gives back first is recorded by the old one while the driver hangs.
    stage
        .faults
        .plan
        .insert(stage.commands + 1, Fault::DriverHungBefore);
    stage.run_until("the old leader has written", |stage| !stage.ghosts.is_empty());
    stage.run_for(120 * SECOND);
    assert_eq!(
        (recorded(&stage), taken_back(&stage)),
        (0, 1),
        "{:?}",
        stage.command_log
    );
    expect_well(stage);
}
