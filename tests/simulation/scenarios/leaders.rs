//! Late writes of a previous leader that was paused beyond its lease.

use drayman::api::resource::AllocationMode;

use super::{
    expect_no_violation, healthy_cluster, is_allocated, is_bound, key, until_bound, until_late_write,
    until_stopped, without_suffixes,
};
use crate::cluster::{Cluster, SECOND};
use crate::faults::Fault;
use crate::store::Kind;
use crate::users::Use;

/// The leader is paused before it records the only device for `younger`; the new leader allocates it to `older`.
pub(super) fn conflicting() -> Cluster {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    for name in ["older", "younger"] {
        cluster.create_claim(&key(name), "gpu", AllocationMode::WaitForFirstConsumer);
    }
    // Read, evaluate, finalizer, allocate, record.
    cluster.fault_at(5, Fault::PausedLeader);
    cluster.create_pod(&key("late"), &[Use::Named("younger")], None);
    until_stopped(&mut cluster);
    cluster.store.delete_context(&key("late"));
    cluster.create_pod(&key("quick"), &[Use::Named("older")], Some("node-a"));
    cluster.run_until("the new leader has allocated", |cluster| {
        is_allocated(cluster, "older")
    });
    assert!(
        !is_allocated(&cluster, "younger"),
        "the previous leader is still paused"
    );
    cluster.command_log.clear();
    cluster
}

#[test]
fn the_older_of_two_allocations_stands() {
    let mut cluster = conflicting();
    until_late_write(&mut cluster);
    assert!(is_allocated(&cluster, "younger") && is_allocated(&cluster, "older"));
    cluster.run_for(SECOND / 2);
    assert!(!is_allocated(&cluster, "younger") && is_allocated(&cluster, "older"));
    let log = without_suffixes(&cluster.command_log);
    let repair = ["read pod late", "roll back younger", "deallocate younger"];
    assert!(log.windows(3).any(|steps| steps == repair), "{log:?}");
    let reports: Vec<String> = cluster
        .reports
        .iter()
        .filter(|report| report.reason == "DeviceHeldTwice")
        .map(|report| format!("{:?}", report.regarding))
        .collect();
    assert_eq!(reports.len(), 2, "on the claim and on its pod: {reports:?}");
    assert!(
        reports
            .iter()
            .all(|about| about.contains("younger") || about.contains("late")),
        "{reports:?}"
    );
    // The pod is served when the device is free.
    cluster.store.delete_pod(&key("quick"));
    until_bound(&mut cluster, "late");
    expect_no_violation(cluster);
}

#[test]
fn a_younger_allocation_of_a_bound_pod_is_not_rolled_back() {
    let mut cluster = conflicting();
    cluster.pause_watch(Kind::Claim);
    until_late_write(&mut cluster);
    until_bound(&mut cluster, "late");
    cluster.resume_watch(Kind::Claim);
    cluster.run_for(60 * SECOND);
    assert!(
        is_bound(&cluster, "late") && is_allocated(&cluster, "younger") && is_allocated(&cluster, "older")
    );
    assert!(
        cluster
            .reports
            .iter()
            .any(|report| report.reason == "DeviceHeldTwice")
    );
    let log = without_suffixes(&cluster.command_log);
    // Once for its context, and once to find that it has a node.
    let reads = log.iter().filter(|line| *line == "read pod late").count();
    assert_eq!(
        (reads, log.contains(&"roll back younger".to_owned())),
        (2, false),
        "{log:?}"
    );
    // The pod ends normally.
    cluster.store.delete_pod(&key("late"));
    cluster.run_until("its claim is released", |cluster| {
        !is_allocated(cluster, "younger")
    });
    assert!(is_allocated(&cluster, "older"));
    expect_no_violation(cluster);
}

#[test]
fn an_old_leaders_allocation_after_the_release_is_returned() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    cluster.fault_at(5, Fault::PausedLeader);
    cluster.create_pod(&key("p"), &[Use::Named("named")], None);
    until_stopped(&mut cluster);
    // Meanwhile the claim is allocated, used and released, and has no finalizer.
    until_bound(&mut cluster, "p");
    cluster.store.delete_pod(&key("p"));
    cluster.run_until("it is released", |cluster| {
        cluster
            .claim("named")
            .is_some_and(|claim| claim.metadata.finalizers.is_none())
    });
    assert!(
        cluster.late_allocations.is_empty(),
        "the previous leader is still paused"
    );
    until_late_write(&mut cluster);
    assert!(is_allocated(&cluster, "named"));
    cluster.run_until("the claim is released", |cluster| !is_allocated(cluster, "named"));
    expect_no_violation(cluster);
}

#[test]
fn an_old_leaders_late_finalizer_removal_does_not_count() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    cluster.create_pod(&key("p"), &[Use::Named("named")], None);
    until_bound(&mut cluster, "p");
    // Deallocate, clear, remove the finalizer.
    cluster.fault_at(3, Fault::PausedLeader);
    cluster.store.delete_pod(&key("p"));
    until_stopped(&mut cluster);
    let log = without_suffixes(&cluster.command_log);
    assert_eq!(log.last().unwrap(), "remove finalizer of named");
    cluster.create_pod(&key("next"), &[Use::Named("named")], None);
    until_bound(&mut cluster, "next");
    cluster.run_for(120 * SECOND);
    let claim = cluster.claim("named").unwrap();
    assert!(claim.status.allocation.is_some() && claim.metadata.finalizers.is_some());
    expect_no_violation(cluster);
}
