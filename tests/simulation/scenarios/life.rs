//! Lives without trouble, and what they cost.

use drayman::api::resource::AllocationMode;

use super::{bound_pod, calm, end_pod, expect_well, is_bound, key, plain, until_bound};
use crate::driver::{DRIVER, OTHER_DRIVER};
use crate::stage::{MILLISECOND, SECOND};
use crate::store::Kind;
use crate::users::Use;

#[test]
fn a_pod_with_one_claim_costs_three_writes_and_one_read() {
    let mut stage = calm(&[("node-a", 1), ("node-b", 1)]);
    bound_pod(&mut stage, "p");
    end_pod(&mut stage, "p");
    stage.run_for(10 * SECOND);
    let node = stage.store.pods[&key("p")].spec.node_name.clone().unwrap();
    let (first, second) = if node == "node-a" {
        ("node-a", "node-b")
    } else {
        ("node-b", "node-a")
    };
    assert_eq!(
        plain(&stage.command_log),
        [
            "read pod p".to_owned(),
            format!("judge p-c0 on {first},{second}"),
            format!("add finalizer to p-c0 for {first}"),
            format!("allocate p-c0 on {first}"),
            format!("record {first}:d0 in p-c0 for p"),
            "deallocate p-c0".to_owned(),
            "remove finalizer of p-c0".to_owned(),
        ]
    );
    assert_eq!((stage.writes, stage.reads), (3, 1));
    assert_eq!(stage.reports, []);
    assert!(stage.store.claims.is_empty());
    expect_well(stage);
}

#[test]
fn the_cost_does_not_depend_on_how_many_nodes_there_are() {
    let names: Vec<String> = (0..128).map(|n| format!("node-{n:03}")).collect();
    let nodes: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let mut stage = calm(&nodes);
    bound_pod(&mut stage, "p");
    end_pod(&mut stage, "p");
    stage.run_for(10 * SECOND);
    assert_eq!((stage.writes, stage.reads), (3, 1));
    expect_well(stage);
}

#[test]
fn a_claim_is_released_once_however_late_the_watch() {
    let mut stage = calm(&[("node-a", 1)]);
    bound_pod(&mut stage, "p");
    stage.store.delete_pod(&key("p"));
    stage.run_until("the claim is being deleted", |stage| {
        let mut claims = stage.store.claims.values();
        claims.any(|claim| claim.metadata.deletion_timestamp.is_some())
    });
    stage.run_for(10 * MILLISECOND);
    stage.hold_watch(Kind::Claim);
    stage.run_for(60 * SECOND);
    stage.let_watch_go(Kind::Claim);
    let released = stage
        .command_log
        .iter()
        .filter(|line| line.starts_with("deallocate"));
    assert_eq!(released.count(), 1);
    assert_eq!(stage.writes, 3);
    assert_eq!(stage.reports, []);
    expect_well(stage);
}

#[test]
fn contexts_of_other_drivers_cost_nothing() {
    let mut stage = calm(&[("node-a", 1)]);
    for index in 0..5 {
        stage.create_pod(&key(&format!("p{index}")), &[Use::Template("other")], None);
    }
    stage.run_for(60 * SECOND);
    assert!((0..5).all(|index| is_bound(&stage, &format!("p{index}"))));
    assert_eq!(stage.command_log, Vec::<String>::new());
    expect_well(stage);
}

#[test]
fn a_waiting_pod_costs_one_write_until_capacity_comes() {
    let mut stage = calm(&[("node-a", 1)]);
    bound_pod(&mut stage, "first");
    stage.command_log.clear();
    stage.create_pod(&key("second"), &[Use::Template("gpu")], None);
    stage.run_for(200 * SECOND);
    assert_eq!(
        plain(&stage.command_log),
        [
            "read pod second",
            "judge second-c0 on node-a",
            "tell second c0 not [\"node-a\"]",
        ]
    );
    let said: Vec<&str> = stage
        .reports
        .iter()
        .map(|report| report.message.as_str())
        .collect();
    assert_eq!(said, ["claim \"c0\" fits on no node: node-a: 1 of 1 held"]);
    stage.store.delete_pod(&key("first"));
    until_bound(&mut stage, "second");
    expect_well(stage);
}

#[test]
fn an_immediate_claim_stays_allocated_between_pods() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("named"), "gpu", AllocationMode::Immediate);
    stage.run_until("the claim is allocated", |stage| {
        stage
            .claim("named")
            .is_some_and(|claim| claim.status.allocation.is_some())
    });
    for pod in ["one", "two"] {
        stage.create_pod(&key(pod), &[Use::Named("named")], None);
        until_bound(&mut stage, pod);
        stage.store.delete_pod(&key(pod));
        stage.run_for(10 * SECOND);
    }
    assert_eq!(stage.counted().allocations, 1);
    stage.store.delete_claim(&key("named"));
    let stage = expect_well(stage);
    assert!(stage.store.claims.is_empty());
}

#[test]
fn a_class_that_comes_late_is_served_at_once() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.create_claim(&key("immediate"), "late", AllocationMode::Immediate);
    stage.create_pod(&key("p"), &[Use::Template("late")], None);
    stage.run_for(60 * SECOND);
    assert_eq!(stage.writes, 0);
    assert_eq!(stage.reports.len(), 1, "{:?}", stage.reports);
    assert_eq!(stage.reports[0].reason, "ResourceClassMissing");
    let created = stage.now;
    stage.set_class("late", DRIVER);
    stage.run_until("the claim is allocated", |stage| {
        stage
            .claim("immediate")
            .is_some_and(|claim| claim.status.allocation.is_some())
    });
    assert!(stage.now - created < SECOND);
    expect_well(stage);
}

#[test]
fn a_class_that_is_repointed_is_served_by_whom_it_names() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.set_class("flip", OTHER_DRIVER);
    bound_pod(&mut stage, "holder");
    stage.set_class("flip", DRIVER);
    // It waits for us, since all is held, until the class names somebody else.
    stage.create_pod(&key("p"), &[Use::Template("flip")], None);
    stage.run_for(30 * SECOND);
    assert!(!is_bound(&stage, "p"));
    stage.set_class("flip", OTHER_DRIVER);
    until_bound(&mut stage, "p");
    // And the other way round, when it is free again.
    stage.store.delete_pod(&key("p"));
    stage.store.delete_pod(&key("holder"));
    stage.set_class("flip", DRIVER);
    stage.create_pod(&key("q"), &[Use::Template("flip")], None);
    until_bound(&mut stage, "q");
    expect_well(stage);
}

#[test]
fn an_immediate_claim_is_retried_when_its_class_is_fixed() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.set_parameters("wrong", 1, false, false);
    stage.create_claim(&key("named"), "gpu.wrong", AllocationMode::Immediate);
    stage.run_for(30 * SECOND);
    assert_eq!(stage.reports.len(), 1);
    // Nobody announces it: the driver reads parameters when it is asked.
    stage.facts.parameters.get_mut("wrong").unwrap().valid = true;
    stage.set_class("gpu", DRIVER);
    stage.run_until("the claim is allocated", |stage| {
        stage
            .claim("named")
            .is_some_and(|claim| claim.status.allocation.is_some())
    });
    expect_well(stage);
}

#[test]
fn wrong_parameters_are_reported_once_and_fixed_ones_served() {
    let mut stage = calm(&[("node-a", 1)]);
    stage.set_parameters("odd", 1, false, false);
    stage.create_pod(&key("p"), &[Use::Template("gpu.odd")], None);
    stage.run_for(200 * SECOND);
    let reasons: Vec<&str> = stage
        .reports
        .iter()
        .map(|report| report.reason.as_str())
        .collect();
    assert_eq!(
        reasons,
        ["ParametersInvalid", "ParametersInvalid"],
        "one on the pod, one on the claim"
    );
    assert_eq!(stage.writes, 0);
    stage.set_parameters("odd", 1, true, false);
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_selected_node_outside_the_potential_nodes_is_served() {
    let mut stage = calm(&[("node-a", 1), ("node-b", 1)]);
    // A pod that a user has bound: its context has a selected node and no potential ones.
    stage.create_pod(&key("p"), &[Use::Template("gpu")], Some("node-b"));
    stage.run_until("the claim is reserved", |stage| {
        stage
            .store
            .claims
            .values()
            .any(|claim| !claim.status.reserved_for.is_empty())
    });
    assert!(
        stage
            .command_log
            .iter()
            .any(|line| line.starts_with("judge") && line.ends_with("on node-b"))
    );
    expect_well(stage);
}
