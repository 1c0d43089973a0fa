//! Persistent and late faults.

use drayman::api::resource::AllocationMode;
use drayman::core::claims::Regarding;

use super::{
    bound_pod, end_pod, expect_no_violation, healthy_cluster, key, reasons, until_allocated, until_bound,
    until_stopped, without_suffixes,
};
use crate::cluster::{Cluster, SECOND};
use crate::faults::{ALL, Fault, Target};
use crate::users::Use;

#[test]
fn a_lost_reply_is_cleared_by_one_read() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    // Read, evaluate, finalizer, allocate, record.
    cluster.fault_at(5, Fault::ReplyLost);
    // The watch must not resolve the result.
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    cluster.run_for(60 * SECOND);
    let log = without_suffixes(&cluster.command_log);
    assert_eq!(
        log[4..],
        [
            "record node-a:d0 in p-c0 for p".to_owned(),
            "read claim p-c0".to_owned()
        ],
        "{log:?}"
    );
    expect_no_violation(cluster);
}

#[test]
fn devices_that_a_late_write_may_record_are_not_returned() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    // Read, evaluate, finalizer, allocate, record, read, record again.
    cluster.fault_at(5, Fault::Late);
    cluster.fault_at(7, Fault::Refused);
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_bound(&mut cluster, "p");
    let log = without_suffixes(&cluster.command_log);
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
    expect_no_violation(cluster);
}

#[test]
fn an_allocation_that_timed_out_is_returned_first() {
    for fault in [Fault::DriverHungAfter, Fault::DriverHungBefore] {
        let mut cluster = healthy_cluster(&[("node-a", 1)]);
        cluster.fault_at(4, fault);
        cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
        until_bound(&mut cluster, "p");
        let log = without_suffixes(&cluster.command_log);
        assert_eq!(
            log[3..5],
            ["allocate p-c0 on node-a", "deallocate p-c0"],
            "{log:?}"
        );
        expect_no_violation(cluster);
    }
}

#[test]
fn a_second_writer_costs_no_allocation_and_no_conflict() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.faults.rates.insert(Fault::SecondWriter, 1000);
    for name in ["p", "q"] {
        bound_pod(&mut cluster, name);
        end_pod(&mut cluster, name);
    }
    cluster.run_for(30 * SECOND);
    assert_eq!((cluster.writes, cluster.reads), (6, 2));
    assert_eq!(cluster.reports, []);
    expect_no_violation(cluster);
}

fn run_with_fault_rate(fault: Fault, rate: u64) -> Cluster {
    let mut cluster = healthy_cluster(&[("node-a", 2), ("node-b", 1)]);
    cluster.faults.rates.insert(fault, rate);
    for index in 0..4 {
        cluster.create_pod(&key(&format!("p{index}")), &[Use::Template("gpu")], None);
    }
    cluster.run_for(300 * SECOND);
    cluster.store.delete_pod(&key("p0"));
    cluster.run_for(300 * SECOND);
    assert!(cluster.faults.hits.contains_key(&fault));
    expect_no_violation(cluster)
}

#[test]
fn a_server_that_fails_every_third_request_is_outlived() {
    run_with_fault_rate(Fault::ServerError, 333);
}

#[test]
fn a_server_that_is_slow_is_outlived() {
    run_with_fault_rate(Fault::Slow, 1000);
}

#[test]
fn a_server_that_is_down_for_ten_minutes_is_outlived() {
    run_with_fault_rate(Fault::RequestLost, 1000);
}

#[test]
fn watches_that_stand_still_for_a_minute_are_outlived() {
    run_with_fault_rate(Fault::WatchStall, 1000);
}

#[test]
fn watches_that_lose_every_other_event_are_outlived() {
    run_with_fault_rate(Fault::WatchRelist, 500);
}

#[test]
fn a_never_accepted_allocation_is_reported_and_retried_rarely() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.refuse_allocations = Some("");
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    cluster.run_for(600 * SECOND);
    assert_eq!(reasons(&cluster), ["AllocationNotRecorded"]);
    let tries = cluster
        .command_log
        .iter()
        .filter(|line| line.starts_with("record"))
        .count();
    assert!((5..40).contains(&tries), "{tries} tries in ten minutes");
    assert!(cluster.driver.pending.is_empty() || cluster.process.as_ref().unwrap().state.is_busy());
    cluster.refuse_allocations = None;
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_failed_deallocation_after_a_refused_write_is_reported() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.refuse_allocations = Some("");
    // Read, evaluate, finalizer, allocate, record, read, deallocate.
    cluster.fault_at(7, Fault::DriverRetry);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    cluster.create_pod(&key("p"), &[Use::Named("named")], None);
    cluster.run_for(10 * SECOND);
    let report = cluster
        .reports
        .iter()
        .find(|report| report.reason == "DriverBusy")
        .expect("a report");
    assert!(matches!(&report.regarding, Regarding::Claim { key: claim, .. } if *claim == key("named")));
    assert_eq!(
        report.message,
        "cannot be deallocated yet: the driver failed: injected fault"
    );
    cluster.refuse_allocations = None;
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_pod_that_has_ended_is_not_served_again() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    // Bound by the user: the context exists as long as the pod.
    cluster.create_pod(&key("p"), &[Use::Named("named")], Some("node-a"));
    cluster.run_until("the claim is reserved", |cluster| {
        cluster
            .claim("named")
            .is_some_and(|claim| !claim.status.reserved_for.is_empty())
    });
    end_pod(&mut cluster, "p");
    cluster.run_for(300 * SECOND);
    assert_eq!(cluster.counted().allocations, 1);
    expect_no_violation(cluster);
}

#[test]
fn a_killed_process_leaves_no_allocation_at_a_durable_driver() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.durable_driver = true;
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    // Read, evaluate, finalizer, allocate.
    cluster.fault_at(4, Fault::CrashAfter);
    cluster.create_pod(&key("p"), &[Use::Named("named")], None);
    until_stopped(&mut cluster);
    assert_eq!(cluster.driver.pending.len(), 1);
    // The claim stays with our finalizer, without an allocation and a user.
    cluster.store.remove_pod(&key("p"));
    expect_no_violation(cluster);
}

#[test]
fn a_late_allocation_finds_the_finalizer_in_place() {
    for variant in 0..20 {
        let mut cluster = healthy_cluster(&[("node-a", 1)]);
        cluster.rng = crate::rng::Rng::new(variant);
        cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
        // Read, evaluate, finalizer, allocate, record.
        cluster.fault_at(5, Fault::Late);
        cluster.create_pod(&key("p"), &[Use::Named("named")], None);
        until_allocated(&mut cluster, "named");
        cluster.store.remove_pod(&key("p"));
        assert_eq!(
            cluster.faults.hits.get(&Fault::Late),
            Some(&1),
            "variant {variant}"
        );
        expect_no_violation(cluster);
    }
}

#[test]
fn devices_of_a_finally_refused_transaction_are_returned() {
    let mut cluster = healthy_cluster(&[("node-a", 3)]);
    // Read, evaluate, three finalizers, allocate, three records: then two of the claims are written first.
    for command in [8, 9] {
        cluster.fault_at(command, Fault::Refused);
    }
    let three = [Use::Template("gpu"), Use::Template("gpu"), Use::Template("gpu")];
    cluster.create_pod(&key("p"), &three, None);
    cluster.run_until("they are allocated again", |cluster| {
        let calls = cluster
            .command_log
            .iter()
            .filter(|line| line.starts_with("allocate"));
        calls.count() == 2
    });
    // One is refused while the result of the other is unknown.
    cluster.fault_at(1, Fault::Refused);
    cluster.fault_at(2, Fault::RequestLost);
    until_bound(&mut cluster, "p");
    assert_eq!(cluster.faults.hits.get(&Fault::Refused), Some(&3));
    assert_eq!(cluster.faults.hits.get(&Fault::RequestLost), Some(&1));
    expect_no_violation(cluster);
}

/// A named claim without users during its release.
fn being_released(fault: Fault) -> Cluster {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    cluster.create_pod(&key("p"), &[Use::Named("named")], None);
    until_bound(&mut cluster, "p");
    cluster.run_for(10 * SECOND);
    // Deallocate, clear, remove the finalizer.
    cluster.fault_at(3, fault);
    cluster.store.remove_pod(&key("p"));
    cluster
}

#[test]
fn a_finalizer_that_was_not_removed_is_removed_at_a_later_try() {
    // After a kill the next controller leaves the finalizer to the next user of the claim.
    let fatal = [Fault::CrashBefore, Fault::CrashAfter, Fault::PausedLeader];
    let survivable = ALL.into_iter().filter(|fault| !fatal.contains(fault));
    for fault in survivable.filter(|fault| fault.applies_to(Target::Write)) {
        let mut cluster = being_released(fault);
        cluster.run_for(120 * SECOND);
        assert_eq!(cluster.faults.hits.get(&fault), Some(&1), "{fault:?}");
        let claim = cluster.claim("named").unwrap();
        assert_eq!(
            claim.metadata.finalizers.clone().unwrap_or_default(),
            Vec::<String>::new(),
            "{fault:?}"
        );
        expect_no_violation(cluster);
    }
}

#[test]
fn a_waiting_pod_is_served_when_a_read_confirms_the_watch() {
    let mut cluster = being_released(Fault::ReplyLost);
    cluster.create_pod(&key("q"), &[Use::Named("named")], None);
    let start = cluster.now;
    until_bound(&mut cluster, "q");
    // The client times out after seconds; the slow recheck runs after minutes.
    let waited = (cluster.now - start) / SECOND;
    assert!(waited < 120, "{waited} s");
    assert_eq!(cluster.faults.hits.get(&Fault::ReplyLost), Some(&1));
    expect_no_violation(cluster);
}

#[test]
fn a_late_allocation_takes_no_reservation_from_another_pod() {
    for variant in 0..20 {
        let mut cluster = healthy_cluster(&[("node-a", 1)]);
        cluster.rng = crate::rng::Rng::new(variant);
        cluster.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
        // Read, evaluate, finalizer, allocate, record.
        cluster.fault_at(5, Fault::Late);
        cluster.create_pod(&key("p"), &[Use::Named("named")], None);
        until_bound(&mut cluster, "p");
        bound_pod_of(&mut cluster, "q");
        cluster.run_until("no request is in flight", |cluster| cluster.network.is_empty());
        let users = cluster.claim("named").unwrap().status.reserved_for.clone();
        let names: Vec<&str> = users.iter().map(|user| user.name.as_str()).collect();
        assert_eq!(names, ["p", "q"], "variant {variant}");
        assert_eq!(
            cluster.faults.hits.get(&Fault::Late),
            Some(&1),
            "variant {variant}"
        );
        expect_no_violation(cluster);
    }
}

/// Creates a pod that shares the claim and waits until it is bound.
fn bound_pod_of(cluster: &mut Cluster, name: &str) {
    cluster.create_pod(&key(name), &[Use::Named("named")], None);
    until_bound(cluster, name);
}

#[test]
fn a_claim_is_deallocated_when_no_late_write_is_possible() {
    for variant in 0..20 {
        let mut cluster = healthy_cluster(&[("node-a", 1)]);
        cluster.rng = crate::rng::Rng::new(variant);
        cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
        cluster.fault_at(5, Fault::Late);
        cluster.create_pod(&key("p"), &[Use::Named("named")], None);
        until_bound(&mut cluster, "p");
        // Another claim needs the device as soon as it is released.
        cluster.create_pod(&key("q"), &[Use::Template("gpu")], None);
        cluster.store.remove_pod(&key("p"));
        until_bound(&mut cluster, "q");
        cluster.run_for(90 * SECOND);
        assert_eq!(
            cluster.faults.hits.get(&Fault::Late),
            Some(&1),
            "variant {variant}"
        );
        expect_no_violation(cluster);
    }
}
