//! Several claims in a pod, several pods for a claim, several drivers.

use drayman::api::resource::{AllocationMode, ResourceClaimConsumerReference, ResourceClaimStatus};

use super::{calm, expect_well, is_bound, key, plain, until_bound};
use crate::driver::{DRIVER, FINALIZER};
use crate::faults::Fault;
use crate::stage::{MILLISECOND, SECOND};
use crate::store::{Endpoint, Kind};
use crate::users::Use;

#[test]
fn two_claims_of_a_pod_are_evaluated_and_allocated_together() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    until_bound(&mut stage, "p");
    let log = plain(&stage.command_log);
    assert_eq!(
        log[..3],
        [
            "read pod p",
            "judge p-c0,p-c1 on node-a",
            "tell p c0 not []; c1 not []",
        ]
    );
    assert!(
        log.contains(&"allocate p-c0,p-c1 on node-a".to_owned()),
        "{log:?}"
    );
    assert_eq!(stage.reports, []);
    expect_well(stage);
}

#[test]
fn nothing_is_touched_until_all_claims_of_a_pod_fit_together() {
    let mut stage = calm(&[("node-a", 1), ("node-b", 1)]);
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    stage.run_for(60 * SECOND);
    assert!(
        stage
            .store
            .claims
            .values()
            .all(|claim| claim.metadata.finalizers.is_none())
    );
    stage.set_devices("node-b", 2);
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn one_claim_named_twice_counts_once() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    stage.create_pod(&key("p"), &[Use::Named("named"), Use::Named("named")], None);
    until_bound(&mut stage, "p");
    assert_eq!(stage.counted().allocations, 1);
    expect_well(stage);
}

#[test]
fn a_shared_claim_serves_two_pods_and_goes_back_after_the_last() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    for pod in ["one", "two"] {
        stage.create_pod(&key(pod), &[Use::Named("named")], None);
    }
    until_bound(&mut stage, "one");
    until_bound(&mut stage, "two");
    assert_eq!(stage.counted().allocations, 1);
    stage.store.delete_pod(&key("one"));
    stage.run_for(10 * SECOND);
    assert!(stage.claim("named").unwrap().status.allocation.is_some());
    stage.store.delete_pod(&key("two"));
    stage.run_for(10 * SECOND);
    let claim = stage.claim("named").unwrap();
    assert_eq!(
        (claim.status.allocation.clone(), claim.metadata.finalizers.clone()),
        (None, None)
    );
    expect_well(stage);
}

#[test]
fn a_claim_that_cannot_be_shared_goes_from_one_pod_to_the_next() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
    for pod in ["one", "two"] {
        stage.create_pod(&key(pod), &[Use::Named("named")], None);
    }
    stage.run_until("one of them runs", |stage| {
        is_bound(stage, "one") || is_bound(stage, "two")
    });
    stage.run_for(30 * SECOND);
    let (first, second) = if is_bound(&stage, "one") {
        ("one", "two")
    } else {
        ("two", "one")
    };
    assert!(!is_bound(&stage, second));
    stage.store.delete_pod(&key(first));
    until_bound(&mut stage, second);
    expect_well(stage);
}

#[test]
fn two_drivers_in_a_pod_leave_each_other_alone() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("other")], None);
    until_bound(&mut stage, "p");
    for claim in stage.store.claims.values() {
        let ours = claim.spec.resource_class_name == "gpu";
        let finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
        assert_eq!(finalizers.contains(&FINALIZER.to_owned()), ours, "{claim:?}");
    }
    stage.store.delete_pod(&key("p"));
    let stage = expect_well(stage);
    assert!(stage.store.claims.is_empty());
}

#[test]
fn a_pod_waits_for_the_claims_that_are_not_seen_yet() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.hold_watch(Kind::Claim);
    stage.create_pod(&key("p"), &[Use::Template("other"), Use::Template("gpu")], None);
    stage.run_for(30 * SECOND);
    assert_eq!(stage.command_log, Vec::<String>::new());
    stage.let_watch_go(Kind::Claim);
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_pod_with_unseen_claims_is_not_answered() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.lag = 10 * SECOND;
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    stage.run_until("one of two claims is there", |stage| {
        !stage.store.claims.is_empty()
    });
    stage.run_for(100 * MILLISECOND);
    assert_eq!(
        stage.store.claims.len(),
        1,
        "this one is seen and the other is not"
    );
    stage.hold_watch(Kind::Claim);
    stage.run_for(120 * SECOND);
    assert_eq!(stage.store.claims.len(), 2);
    // When the first claim was seen, and when the context was: of the other one the pod's status may say more by then.
    assert_eq!(plain(&stage.command_log), ["read pod p", "read pod p"]);
    stage.let_watch_go(Kind::Claim);
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn claims_may_be_seen_before_classes_and_contexts_before_claims() {
    for held in [
        vec![Kind::Class],
        vec![Kind::Claim],
        vec![Kind::Class, Kind::Claim],
        vec![Kind::Context],
    ] {
        let mut stage = calm(&[("node-a", 2)]);
        for kind in &held {
            stage.hold_watch(*kind);
        }
        stage.set_class("late", DRIVER);
        stage.create_pod(&key("p"), &[Use::Template("late"), Use::Template("gpu")], None);
        stage.run_for(30 * SECOND);
        assert!(!is_bound(&stage, "p"), "{held:?}");
        for kind in held {
            stage.let_watch_go(kind);
            stage.run_for(SECOND);
        }
        until_bound(&mut stage, "p");
        expect_well(stage);
    }
}

#[test]
fn two_problems_of_one_pod_are_reported_once_together() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.set_class("late", DRIVER);
    stage.set_class("later", DRIVER);
    // The scheduler talks about the pod while the classes are there; then they go.
    let uses = [
        Use::Template("gpu"),
        Use::Template("late"),
        Use::Template("later"),
    ];
    stage.create_pod(&key("p"), &uses, None);
    stage.run_for(30 * SECOND);
    stage.reports.clear();
    stage.store.delete_class("late");
    stage.store.delete_class("later");
    stage.run_for(30 * SECOND);
    for name in ["a", "b", "c"] {
        stage.create_claim(&key(name), "gpu", AllocationMode::WaitForFirstConsumer);
        stage.run_for(SECOND);
    }
    let said = stage.reports.len();
    // One when the first class goes, one when both are gone.
    assert!(said <= 2, "{:?}", stage.reports);
    expect_well(stage);
}

#[test]
fn a_recorded_claim_is_rolled_back_once_if_another_is_refused() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.refuse_allocations = Some("p-c1");
    stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    stage.run_for(600 * SECOND);
    let log = plain(&stage.command_log);
    let end = log.iter().position(|line| line == "take back p-c0").unwrap();
    assert!(
        log[..end]
            .iter()
            .any(|line| line.starts_with("record") && line.ends_with("in p-c0 for p"))
    );
    // From then on the refused one goes first, and nothing is recorded in vain.
    assert!(
        !log[end + 1..].iter().any(|line| line.ends_with("in p-c0 for p")),
        "{log:?}"
    );
    assert!(
        stage
            .store
            .claims
            .values()
            .all(|claim| claim.status == ResourceClaimStatus::default())
    );
    let reasons: Vec<&str> = stage
        .reports
        .iter()
        .map(|report| report.reason.as_str())
        .collect();
    assert_eq!(reasons, ["AllocationNotRecorded"]);
    // Others can have the devices.
    stage.create_pod(&key("q"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    until_bound(&mut stage, "q");
    stage.store.delete_pod(&key("q"));
    stage.refuse_allocations = None;
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_claim_that_another_pod_shares_by_now_is_not_taken_back() {
    let mut stage = calm(&[("node-a", 2)]);
    stage.refuse_allocations = Some("p-c1");
    stage.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    stage.create_pod(&key("p"), &[Use::Named("named"), Use::Template("gpu")], None);
    let is_allocated = |stage: &crate::stage::Stage| {
        stage
            .claim("named")
            .is_some_and(|claim| claim.status.allocation.is_some())
    };
    stage.run_until("the shared claim is recorded", is_allocated);
    // Somebody else comes in before the refusal is known, and the controller has not seen it.
    stage.hold_watch(Kind::Claim);
    let uid = stage.create_pod(&key("q"), &[Use::Named("named")], Some("node-a"));
    let reserved = stage
        .store
        .update_claim(&key("named"), None, Endpoint::Status, |claim| {
            claim
                .status
                .reserved_for
                .push(ResourceClaimConsumerReference::pod("q", &uid));
            Ok(())
        });
    assert!(reserved.is_ok());
    stage.run_for(60 * SECOND);
    assert!(is_allocated(&stage));
    assert_eq!(stage.claim("named").unwrap().status.reserved_for.len(), 2);
    assert!(
        plain(&stage.command_log).contains(&"take back named".to_owned()),
        "it was tried"
    );
    stage.let_watch_go(Kind::Claim);
    stage.refuse_allocations = None;
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_shared_claim_is_evaluated_for_one_pod_after_the_other() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    // It takes seconds to answer, and both pods' contexts are there meanwhile.
    stage.faults.rates.insert(Fault::Slow, 1000);
    for pod in ["one", "two"] {
        stage.create_pod(&key(pod), &[Use::Named("named")], None);
    }
    stage.run_until("both contexts are there", |stage| stage.store.contexts.len() == 2);
    stage.run_for(60 * SECOND);
    stage.faults.rates.clear();
    assert!(stage.judgements >= 2, "{:?}", stage.command_log);
    until_bound(&mut stage, "one");
    until_bound(&mut stage, "two");
    expect_well(stage);
}
