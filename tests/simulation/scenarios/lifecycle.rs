//! Lifecycles without faults, and their cost.

use drayman::api::resource::AllocationMode;

use super::{
    bound_pod, end_pod, expect_no_violation, healthy_cluster, is_bound, key, messages, reasons,
    until_allocated, until_bound, without_suffixes,
};
use crate::cluster::{MILLISECOND, SECOND};
use crate::driver::{DRIVER, OTHER_DRIVER};
use crate::store::Kind;
use crate::users::Use;

#[test]
fn a_pod_with_one_claim_costs_three_writes_and_one_read() {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 1)]);
    bound_pod(&mut cluster, "p");
    end_pod(&mut cluster, "p");
    cluster.run_for(10 * SECOND);
    let node = cluster.store.pods[&key("p")].spec.node_name.clone().unwrap();
    let (first, second) = if node == "node-a" {
        ("node-a", "node-b")
    } else {
        ("node-b", "node-a")
    };
    assert_eq!(
        without_suffixes(&cluster.command_log),
        [
            "read pod p".to_owned(),
            format!("evaluate p-c0 on {first},{second}"),
            format!("add finalizer to p-c0 for {first}"),
            format!("allocate p-c0 on {first}"),
            format!("record {first}:d0 in p-c0 for p"),
            "deallocate p-c0".to_owned(),
            "remove finalizer of p-c0".to_owned(),
        ]
    );
    assert_eq!((cluster.writes, cluster.reads), (3, 1));
    assert_eq!(cluster.reports, []);
    assert!(cluster.store.claims.is_empty());
    expect_no_violation(cluster);
}

#[test]
fn the_cost_does_not_depend_on_the_number_of_nodes() {
    let names: Vec<String> = (0..128).map(|n| format!("node-{n:03}")).collect();
    let nodes: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let mut cluster = healthy_cluster(&nodes);
    bound_pod(&mut cluster, "p");
    end_pod(&mut cluster, "p");
    cluster.run_for(10 * SECOND);
    assert_eq!((cluster.writes, cluster.reads), (3, 1));
    expect_no_violation(cluster);
}

#[test]
fn a_claim_is_released_once_however_late_the_watch() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    bound_pod(&mut cluster, "p");
    cluster.store.delete_pod(&key("p"));
    cluster.run_until("the claim is being deleted", |cluster| {
        let mut claims = cluster.store.claims.values();
        claims.any(|claim| claim.metadata.deletion_timestamp.is_some())
    });
    cluster.run_for(10 * MILLISECOND);
    cluster.pause_watch(Kind::Claim);
    cluster.run_for(60 * SECOND);
    cluster.resume_watch(Kind::Claim);
    let released = cluster
        .command_log
        .iter()
        .filter(|line| line.starts_with("deallocate"));
    assert_eq!(released.count(), 1);
    assert_eq!(cluster.writes, 3);
    assert_eq!(cluster.reports, []);
    expect_no_violation(cluster);
}

#[test]
fn contexts_of_other_drivers_cost_nothing() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    for index in 0..5 {
        cluster.create_pod(&key(&format!("p{index}")), &[Use::Template("other")], None);
    }
    cluster.run_for(60 * SECOND);
    assert!((0..5).all(|index| is_bound(&cluster, &format!("p{index}"))));
    assert_eq!(cluster.command_log, Vec::<String>::new());
    expect_no_violation(cluster);
}

#[test]
fn a_waiting_pod_costs_one_write_until_capacity_comes() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    bound_pod(&mut cluster, "first");
    cluster.command_log.clear();
    cluster.create_pod(&key("second"), &[Use::Template("gpu")], None);
    cluster.run_for(200 * SECOND);
    assert_eq!(
        without_suffixes(&cluster.command_log),
        [
            "read pod second",
            "evaluate second-c0 on node-a",
            "answer second c0 unsuitable [\"node-a\"]",
        ]
    );
    assert_eq!(
        messages(&cluster),
        ["claim \"c0\" fits on no node: node-a: 1 of 1 held"]
    );
    cluster.store.delete_pod(&key("first"));
    until_bound(&mut cluster, "second");
    expect_no_violation(cluster);
}

#[test]
fn an_immediate_claim_stays_allocated_between_pods() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("named"), "gpu", AllocationMode::Immediate);
    until_allocated(&mut cluster, "named");
    for pod in ["one", "two"] {
        cluster.create_pod(&key(pod), &[Use::Named("named")], None);
        until_bound(&mut cluster, pod);
        cluster.store.delete_pod(&key(pod));
        cluster.run_for(10 * SECOND);
    }
    assert_eq!(cluster.counted().allocations, 1);
    cluster.store.delete_claim(&key("named"));
    let cluster = expect_no_violation(cluster);
    assert!(cluster.store.claims.is_empty());
}

#[test]
fn a_class_that_comes_late_is_served_at_once() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_claim(&key("immediate"), "late", AllocationMode::Immediate);
    cluster.create_pod(&key("p"), &[Use::Template("late")], None);
    cluster.run_for(60 * SECOND);
    assert_eq!(cluster.writes, 0);
    assert_eq!(cluster.reports.len(), 1, "{:?}", cluster.reports);
    assert_eq!(cluster.reports[0].reason, "ResourceClassMissing");
    let created = cluster.now;
    cluster.set_class("late", DRIVER);
    until_allocated(&mut cluster, "immediate");
    assert!(cluster.now - created < SECOND);
    expect_no_violation(cluster);
}

#[test]
fn a_repointed_class_is_served_by_its_new_driver() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.set_class("flip", OTHER_DRIVER);
    bound_pod(&mut cluster, "holder");
    cluster.set_class("flip", DRIVER);
    // It waits for our driver because no device is free, until the class names another driver.
    cluster.create_pod(&key("p"), &[Use::Template("flip")], None);
    cluster.run_for(30 * SECOND);
    assert!(!is_bound(&cluster, "p"));
    cluster.set_class("flip", OTHER_DRIVER);
    until_bound(&mut cluster, "p");
    // The other way round, when a device is free again.
    cluster.store.delete_pod(&key("p"));
    cluster.store.delete_pod(&key("holder"));
    cluster.set_class("flip", DRIVER);
    cluster.create_pod(&key("q"), &[Use::Template("flip")], None);
    until_bound(&mut cluster, "q");
    expect_no_violation(cluster);
}

#[test]
fn an_immediate_claim_is_retried_when_its_class_is_fixed() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.set_parameters("wrong", 1, false, false);
    cluster.create_claim(&key("named"), "gpu.wrong", AllocationMode::Immediate);
    cluster.run_for(30 * SECOND);
    assert_eq!(cluster.reports.len(), 1);
    // No capacity change is sent: the driver reads parameters in each call.
    cluster.environment.parameters.get_mut("wrong").unwrap().valid = true;
    cluster.set_class("gpu", DRIVER);
    until_allocated(&mut cluster, "named");
    expect_no_violation(cluster);
}

#[test]
fn wrong_parameters_are_reported_once_and_fixed_ones_served() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.set_parameters("odd", 1, false, false);
    cluster.create_pod(&key("p"), &[Use::Template("gpu.odd")], None);
    cluster.run_for(200 * SECOND);
    assert_eq!(
        reasons(&cluster),
        ["ParametersInvalid", "ParametersInvalid"],
        "one on the pod, one on the claim"
    );
    assert_eq!(cluster.writes, 0);
    cluster.set_parameters("odd", 1, true, false);
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_selected_node_outside_the_potential_nodes_is_served() {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 1)]);
    // A pod that a user bound: its context has a selected node and no potential nodes.
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], Some("node-b"));
    cluster.run_until("the claim is reserved", |cluster| {
        cluster
            .store
            .claims
            .values()
            .any(|claim| !claim.status.reserved_for.is_empty())
    });
    assert!(
        cluster
            .command_log
            .iter()
            .any(|line| line.starts_with("evaluate") && line.ends_with("on node-b"))
    );
    expect_no_violation(cluster);
}
