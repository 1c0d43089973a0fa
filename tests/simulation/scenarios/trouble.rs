//! Kinds of trouble that last.

use super::{bound_pod, calm, end_pod, expect_well, key, plain, until_bound};
use crate::faults::{ALL, Fault, Target};
use crate::stage::{SECOND, Stage};
use crate::users::Use;

#[test]
fn a_lost_reply_is_cleared_by_one_read() {
    let mut stage = calm(&[("node-a", 1)]);
    // Read, judge, finalizer, allocate, record.
    stage.faults.plan.insert(stage.commands + 5, Fault::ReplyLost);
    // The watch must not give the answer.
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    stage.run_for(60 * SECOND);
    let log = plain(&stage.command_log);
    assert_eq!(
        log[4..],
        [
            "record node-a:d0 in p-c0 for p".to_owned(),
            "read claim p-c0".to_owned()
        ],
        "{log:?}"
    );
    expect_well(stage);
}

#[test]
fn devices_that_a_late_write_may_record_are_not_returned() {
    let mut stage = calm(&[("node-a", 1)]);
    // Read, judge, finalizer, allocate, record, read, record again.
    stage.faults.plan.insert(stage.commands + 5, Fault::Late);
    stage.faults.plan.insert(stage.commands + 7, Fault::Refused);
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_bound(&mut stage, "p");
    let log = plain(&stage.command_log);
    assert_eq!(
        log[4..],
        [
            "record node-a:d0 in p-c0 for p",
            "read claim p-c0",
            "record node-a:d0 in p-c0 for p",
            "read claim p-c0",
        ],
        "{log:?}"
    );
    expect_well(stage);
}

#[test]
fn an_allocation_that_timed_out_is_returned_first() {
    for fault in [Fault::DriverHungAfter, Fault::DriverHungBefore] {
        let mut stage = calm(&[("node-a", 1)]);
        stage.faults.plan.insert(stage.commands + 4, fault);
        stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
        until_bound(&mut stage, "p");
        let log = plain(&stage.command_log);
        assert_eq!(
            log[3..5],
            ["allocate p-c0 on node-a", "deallocate p-c0"],
            "{log:?}"
        );
        expect_well(stage);
    }
}

#[test]
fn a_second_writer_costs_no_allocation_and_no_conflict() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.faults.rates.insert(Fault::SecondWriter, 1000);
    for name in ["p", "q"] {
        bound_pod(&mut stage, name);
        end_pod(&mut stage, name);
    }
    stage.run_for(30 * SECOND);
    assert_eq!((stage.writes, stage.reads), (6, 2));
    assert_eq!(stage.reports, []);
    expect_well(stage);
}

fn storm(fault: Fault, rate: u64) -> Stage {
    let mut stage = calm(&[("node-a", 2), ("node-b", 1)]);
    stage.faults.rates.insert(fault, rate);
    for index in 0..4 {
        stage.create_pod(&key(&format!("p{index}")), &[Use::Template("gpu")], None);
    }
    stage.run_for(300 * SECOND);
    stage.store.delete_pod(&key("p0"));
    stage.run_for(300 * SECOND);
    assert!(stage.faults.hits.contains_key(&fault));
    expect_well(stage)
}

#[test]
fn a_server_that_fails_every_third_request_is_outlived() {
    storm(Fault::ServerError, 333);
}

#[test]
fn a_server_that_is_slow_is_outlived() {
    storm(Fault::Slow, 1000);
}

#[test]
fn a_server_that_is_down_for_ten_minutes_is_outlived() {
    storm(Fault::RequestLost, 1000);
}

#[test]
fn watches_that_stand_still_for_a_minute_are_outlived() {
    storm(Fault::WatchStall, 1000);
}

#[test]
fn watches_that_lose_every_other_event_are_outlived() {
    storm(Fault::WatchRelist, 500);
}

#[test]
fn a_never_accepted_allocation_is_reported_and_retried_rarely() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.refuse_allocations = Some("");
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    stage.run_for(600 * SECOND);
    let reasons: Vec<&str> = stage
        .reports
        .iter()
        .map(|report| report.reason.as_str())
        .collect();
    assert_eq!(reasons, ["AllocationNotRecorded"]);
    let tries = stage
        .command_log
        .iter()
        .filter(|line| line.starts_with("record"))
        .count();
    assert!((5..40).contains(&tries), "{tries} tries in ten minutes");
    assert!(stage.driver.pending.is_empty() || stage.process.as_ref().unwrap().world.is_busy());
    stage.refuse_allocations = None;
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_pod_that_has_ended_is_not_served_again() {
    use drayman::api::resource::AllocationMode;
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    // Bound by its user: the context stays as long as the pod.
    stage.create_pod(&key("p"), &[Use::Named("named")], Some("node-a"));
    stage.run_until("the claim is reserved", |stage| {
        stage
            .claim("named")
            .is_some_and(|claim| !claim.status.reserved_for.is_empty())
    });
    end_pod(&mut stage, "p");
    stage.run_for(300 * SECOND);
    assert_eq!(stage.counted().allocations, 1);
    expect_well(stage);
}

#[test]
fn a_killed_process_leaves_no_allocation_at_a_durable_driver() {
    use drayman::api::resource::AllocationMode;
    let mut stage = calm(&[("node-a", 1)]);
    stage.lasting_driver = true;
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    // Read, judge, finalizer, allocate.
    stage.faults.plan.insert(stage.commands + 4, Fault::CrashAfter);
    stage.create_pod(&key("p"), &[Use::Named("named")], None);
    stage.run_until("the controller is killed", |stage| stage.process.is_none());
    assert_eq!(stage.driver.pending.len(), 1);
    // The claim stays, with our finalizer and without an allocation, and no pod uses it.
    stage.store.remove_pod(&key("p"));
    expect_well(stage);
}

#[test]
fn a_late_allocation_finds_the_finalizer_in_place() {
    use drayman::api::resource::AllocationMode;
    for variant in 0..20 {
        let mut stage = calm(&[("node-a", 1)]);
        stage.rng = crate::rng::Rng::new(variant);
        stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
        // Read, judge, finalizer, allocate, record.
        stage.faults.plan.insert(stage.commands + 5, Fault::Late);
        stage.create_pod(&key("p"), &[Use::Named("named")], None);
        stage.run_until("the claim is allocated", |stage| {
            stage
                .claim("named")
                .is_some_and(|claim| claim.status.allocation.is_some())
        });
        stage.store.remove_pod(&key("p"));
        expect_well(stage);
    }
}

#[test]
fn devices_of_a_finally_refused_transaction_are_returned() {
    let mut stage = calm(&[("node-a", 3)]);
    // Read, judge, three finalizers, allocate, three records: after that two of the claims go first.
    for command in [8, 9] {
        stage.faults.plan.insert(stage.commands + command, Fault::Refused);
    }
    let three = [Use::Template("gpu"), Use::Template("gpu"), Use::Template("gpu")];
    stage.create_pod(&key("p"), &three, None);
    stage.run_until("they are allocated again", |stage| {
        let calls = stage
            .command_log
            .iter()
            .filter(|line| line.starts_with("allocate"));
        calls.count() == 2
    });
    // One is refused while it is not known what became of the other.
    stage.faults.plan.insert(stage.commands + 1, Fault::Refused);
    stage.faults.plan.insert(stage.commands + 2, Fault::RequestLost);
    until_bound(&mut stage, "p");
    assert_eq!(stage.faults.hits.get(&Fault::Refused), Some(&3));
    assert_eq!(stage.faults.hits.get(&Fault::RequestLost), Some(&1));
    expect_well(stage);
}

/// A claim of a name whose only user is gone, when it is being given back.
fn given_back(fault: Fault) -> Stage {
    use drayman::api::resource::AllocationMode;
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    stage.create_pod(&key("p"), &[Use::Named("named")], None);
    until_bound(&mut stage, "p");
    stage.run_for(10 * SECOND);
    // Deallocate, clear, remove the finalizer.
    stage.faults.plan.insert(stage.commands + 3, fault);
    stage.store.remove_pod(&key("p"));
    stage
}

#[test]
fn a_finalizer_that_was_not_removed_is_removed_at_a_later_try() {
    // After a kill the next controller leaves the finalizer to the claim's next user.
    let deadly = [Fault::CrashBefore, Fault::CrashAfter, Fault::PausedLeader];
    let outlived = ALL.into_iter().filter(|fault| !deadly.contains(fault));
    for fault in outlived.filter(|fault| fault.applies_to(Target::Write)) {
        let mut stage = given_back(fault);
        stage.run_for(120 * SECOND);
        assert_eq!(stage.faults.hits.get(&fault), Some(&1), "{fault:?}");
        let claim = stage.claim("named").unwrap();
        assert_eq!(
            claim.metadata.finalizers.clone().unwrap_or_default(),
            Vec::<String>::new(),
            "{fault:?}"
        );
        expect_well(stage);
    }
}

#[test]
fn a_waiting_pod_is_served_when_a_read_confirms_the_watch() {
    let mut stage = given_back(Fault::ReplyLost);
    stage.create_pod(&key("q"), &[Use::Named("named")], None);
    let begun = stage.now;
    until_bound(&mut stage, "q");
    // The client gives up after seconds; the slow recheck comes after minutes.
    let waited = (stage.now - begun) / SECOND;
    assert!(waited < 120, "{waited} s");
    assert_eq!(stage.faults.hits.get(&Fault::ReplyLost), Some(&1));
    expect_well(stage);
}

#[test]
fn a_late_allocation_takes_no_reservation_from_another_pod() {
    use drayman::api::resource::AllocationMode;
    for variant in 0..20 {
        let mut stage = calm(&[("node-a", 1)]);
        stage.rng = crate::rng::Rng::new(variant);
        stage.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
        // Read, judge, finalizer, allocate, record.
        stage.faults.plan.insert(stage.commands + 5, Fault::Late);
        stage.create_pod(&key("p"), &[Use::Named("named")], None);
        until_bound(&mut stage, "p");
        bound_pod_of(&mut stage, "q");
        stage.run_until("nothing is on its way", |stage| stage.network.is_empty());
        let users = stage.claim("named").unwrap().status.reserved_for.clone();
        let names: Vec<&str> = users.iter().map(|user| user.name.as_str()).collect();
        assert_eq!(names, ["p", "q"], "variant {variant}");
        expect_well(stage);
    }
}

/// Makes a pod that shares the claim and waits until it is bound.
fn bound_pod_of(stage: &mut Stage, name: &str) {
    stage.create_pod(&key(name), &[Use::Named("named")], None);
    until_bound(stage, name);
}

#[test]
fn a_claim_is_given_back_when_no_allocation_can_come_late() {
    use drayman::api::resource::AllocationMode;
    for variant in 0..20 {
        let mut stage = calm(&[("node-a", 1)]);
        stage.rng = crate::rng::Rng::new(variant);
        stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
        stage.faults.plan.insert(stage.commands + 5, Fault::Late);
        stage.create_pod(&key("p"), &[Use::Named("named")], None);
        until_bound(&mut stage, "p");
        // The device is wanted by another claim as soon as this one is given back.
        stage.create_pod(&key("q"), &[Use::Template("gpu")], None);
        stage.store.remove_pod(&key("p"));
        until_bound(&mut stage, "q");
        stage.run_for(90 * SECOND);
        expect_well(stage);
    }
}
