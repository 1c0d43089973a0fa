//! Several claims in a pod, several pods with a claim, several drivers.

use drayman::api::resource::{AllocationMode, ResourceClaimConsumerReference, ResourceClaimStatus};

use super::{
    expect_no_violation, healthy_cluster, is_allocated, is_bound, key, messages, reasons, until_allocated,
    until_bound, without_suffixes,
};
use crate::cluster::{MILLISECOND, SECOND};
use crate::driver::{DRIVER, FINALIZER};
use crate::faults::Fault;
use crate::store::{Endpoint, Kind};
use crate::users::Use;

#[test]
fn two_claims_of_a_pod_are_evaluated_and_allocated_together() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    until_bound(&mut cluster, "p");
    let log = without_suffixes(&cluster.command_log);
    assert_eq!(
        log[..3],
        [
            "read pod p",
            "evaluate p-c0,p-c1 on node-a",
            "answer p c0 unsuitable []; c1 unsuitable []",
        ]
    );
    assert!(
        log.contains(&"allocate p-c0,p-c1 on node-a".to_owned()),
        "{log:?}"
    );
    assert_eq!(cluster.reports, []);
    expect_no_violation(cluster);
}

#[test]
fn nothing_is_touched_until_all_claims_of_a_pod_fit_together() {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 1)]);
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    cluster.run_for(60 * SECOND);
    assert!(
        cluster
            .store
            .claims
            .values()
            .all(|claim| claim.metadata.finalizers.is_none())
    );
    cluster.set_devices("node-b", 2);
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn one_claim_named_twice_counts_once() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    cluster.create_pod(&key("p"), &[Use::Named("named"), Use::Named("named")], None);
    until_bound(&mut cluster, "p");
    assert_eq!(cluster.counted().allocations, 1);
    expect_no_violation(cluster);
}

#[test]
fn a_shared_claim_is_deallocated_after_its_last_pod() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    for pod in ["one", "two"] {
        cluster.create_pod(&key(pod), &[Use::Named("named")], None);
    }
    until_bound(&mut cluster, "one");
    until_bound(&mut cluster, "two");
    assert_eq!(cluster.counted().allocations, 1);
    cluster.store.delete_pod(&key("one"));
    cluster.run_for(10 * SECOND);
    assert!(cluster.claim("named").unwrap().status.allocation.is_some());
    cluster.store.delete_pod(&key("two"));
    cluster.run_for(10 * SECOND);
    let claim = cluster.claim("named").unwrap();
    assert_eq!(
        (claim.status.allocation.clone(), claim.metadata.finalizers.clone()),
        (None, None)
    );
    expect_no_violation(cluster);
}

#[test]
fn an_unshareable_claim_serves_one_pod_after_the_other() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    for pod in ["one", "two"] {
        cluster.create_pod(&key(pod), &[Use::Named("named")], None);
    }
    cluster.run_until("one of them runs", |cluster| {
        is_bound(cluster, "one") || is_bound(cluster, "two")
    });
    cluster.run_for(30 * SECOND);
    let (first, second) = if is_bound(&cluster, "one") {
        ("one", "two")
    } else {
        ("two", "one")
    };
    assert!(!is_bound(&cluster, second));
    cluster.store.delete_pod(&key(first));
    until_bound(&mut cluster, second);
    expect_no_violation(cluster);
}

#[test]
fn two_drivers_in_a_pod_leave_each_other_alone() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("other")], None);
    until_bound(&mut cluster, "p");
    for claim in cluster.store.claims.values() {
        let ours = claim.spec.resource_class_name == "gpu";
        let finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
        assert_eq!(finalizers.contains(&FINALIZER.to_owned()), ours, "{claim:?}");
    }
    cluster.store.delete_pod(&key("p"));
    let cluster = expect_no_violation(cluster);
    assert!(cluster.store.claims.is_empty());
}

#[test]
fn a_pod_waits_for_the_claims_that_are_not_seen_yet() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.pause_watch(Kind::Claim);
    cluster.create_pod(&key("p"), &[Use::Template("other"), Use::Template("gpu")], None);
    cluster.run_for(30 * SECOND);
    assert_eq!(cluster.command_log, Vec::<String>::new());
    cluster.resume_watch(Kind::Claim);
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_pod_with_unseen_claims_is_not_answered() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.lag = 10 * SECOND;
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    cluster.run_until("one of two claims exists", |cluster| {
        !cluster.store.claims.is_empty()
    });
    cluster.run_for(100 * MILLISECOND);
    assert_eq!(
        cluster.store.claims.len(),
        1,
        "the controller observes only the first claim"
    );
    cluster.pause_watch(Kind::Claim);
    cluster.run_for(120 * SECOND);
    assert_eq!(cluster.store.claims.len(), 2);
    // Read when the first claim and when the context is observed: the pod status may name the other claim by then.
    assert_eq!(
        without_suffixes(&cluster.command_log),
        ["read pod p", "read pod p"]
    );
    cluster.resume_watch(Kind::Claim);
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn claims_may_be_seen_before_classes_and_contexts_before_claims() {
    for held in [
        vec![Kind::Class],
        vec![Kind::Claim],
        vec![Kind::Class, Kind::Claim],
        vec![Kind::Context],
    ] {
        let mut cluster = healthy_cluster(&[("node-a", 2)]);
        for kind in &held {
            cluster.pause_watch(*kind);
        }
        cluster.set_class("late", DRIVER);
        cluster.create_pod(&key("p"), &[Use::Template("late"), Use::Template("gpu")], None);
        cluster.run_for(30 * SECOND);
        assert!(!is_bound(&cluster, "p"), "{held:?}");
        for kind in held {
            cluster.resume_watch(kind);
            cluster.run_for(SECOND);
        }
        until_bound(&mut cluster, "p");
        expect_no_violation(cluster);
    }
}

#[test]
fn two_problems_of_one_pod_are_reported_once_together() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.set_class("late", DRIVER);
    cluster.set_class("later", DRIVER);
    // The scheduler creates the context while the classes exist; then they are deleted.
    let uses = [
        Use::Template("gpu"),
        Use::Template("late"),
        Use::Template("later"),
    ];
    cluster.create_pod(&key("p"), &uses, None);
    cluster.run_for(30 * SECOND);
    cluster.reports.clear();
    cluster.store.delete_class("late");
    cluster.store.delete_class("later");
    cluster.run_for(30 * SECOND);
    for name in ["a", "b", "c"] {
        cluster.create_claim(&key(name), "gpu", AllocationMode::WaitForFirstConsumer);
        cluster.run_for(SECOND);
    }
    let messages = messages(&cluster);
    // One report after the first class is deleted, one after both are.
    assert!((1..=2).contains(&messages.len()), "{messages:?}");
    let names_both = |message: &&str| message.contains("\"late\"") && message.contains("\"later\"");
    assert!(messages.last().is_some_and(names_both), "{messages:?}");
    expect_no_violation(cluster);
}

#[test]
fn a_recorded_claim_is_rolled_back_once_if_another_is_refused() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.refuse_allocations = Some("p-c1");
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    cluster.run_for(600 * SECOND);
    let log = without_suffixes(&cluster.command_log);
    let end = log.iter().position(|line| line == "roll back p-c0").unwrap();
    assert!(
        log[..end]
            .iter()
            .any(|line| line.starts_with("record") && line.ends_with("in p-c0 for p"))
    );
    // Afterwards the refused claim is written first, and no allocation is rolled back.
    assert!(
        !log[end + 1..].iter().any(|line| line.ends_with("in p-c0 for p")),
        "{log:?}"
    );
    assert!(
        cluster
            .store
            .claims
            .values()
            .all(|claim| claim.status == ResourceClaimStatus::default())
    );
    assert_eq!(reasons(&cluster), ["AllocationNotRecorded"]);
    // The devices are available to others.
    cluster.create_pod(&key("q"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    until_bound(&mut cluster, "q");
    cluster.store.delete_pod(&key("q"));
    cluster.refuse_allocations = None;
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_claim_shared_by_another_pod_is_not_rolled_back() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.refuse_allocations = Some("p-c1");
    cluster.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    cluster.create_pod(&key("p"), &[Use::Named("named"), Use::Template("gpu")], None);
    until_allocated(&mut cluster, "named");
    // Another pod reserves the claim before the refusal, and the controller has not observed that.
    cluster.pause_watch(Kind::Claim);
    let uid = cluster.create_pod(&key("q"), &[Use::Named("named")], Some("node-a"));
    let reserved = cluster
        .store
        .update_claim(&key("named"), None, Endpoint::Status, |claim| {
            claim
                .status
                .reserved_for
                .push(ResourceClaimConsumerReference::pod("q", &uid));
            Ok(())
        });
    assert!(reserved.is_ok());
    cluster.run_for(60 * SECOND);
    assert!(is_allocated(&cluster, "named"));
    assert_eq!(cluster.claim("named").unwrap().status.reserved_for.len(), 2);
    assert!(
        without_suffixes(&cluster.command_log).contains(&"roll back named".to_owned()),
        "the rollback was attempted"
    );
    cluster.resume_watch(Kind::Claim);
    cluster.refuse_allocations = None;
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_shared_claim_is_evaluated_for_one_pod_after_the_other() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    // The driver takes seconds to answer; both contexts exist meanwhile.
    cluster.faults.rates.insert(Fault::Slow, 1000);
    for pod in ["one", "two"] {
        cluster.create_pod(&key(pod), &[Use::Named("named")], None);
    }
    cluster.run_until("both contexts exist", |cluster| cluster.store.contexts.len() == 2);
    cluster.run_for(60 * SECOND);
    cluster.faults.rates.clear();
    assert!(cluster.evaluations >= 2, "{:?}", cluster.command_log);
    until_bound(&mut cluster, "one");
    until_bound(&mut cluster, "two");
    expect_no_violation(cluster);
}
