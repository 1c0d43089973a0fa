//! Waiting pods are woken by relevant changes, each once and in order.

use drayman::api::resource::AllocationMode;
use drayman::core::claims::ObjectKey;
use drayman::driver::CapacityCause;

use super::{
    bound_pod, expect_no_violation, healthy_cluster, is_bound, key, messages, until_bound, until_last,
    without_suffixes,
};
use crate::cluster::{Cluster, SECOND};
use crate::faults::Fault;
use crate::rng::Rng;
use crate::store::Endpoint;
use crate::users::Use;

fn running(cluster: &Cluster) -> usize {
    cluster
        .store
        .pods
        .values()
        .filter(|pod| pod.spec.node_name.is_some())
        .count()
}

#[test]
fn each_freed_device_lets_exactly_one_in() {
    let mut cluster = healthy_cluster(&[("node-a", 3)]);
    for index in 0..6 {
        cluster.create_pod(&key(&format!("p{index}")), &[Use::Template("gpu")], None);
    }
    cluster.run_for(60 * SECOND);
    assert_eq!(running(&cluster), 3);
    for left in [5, 4, 3] {
        let first = cluster
            .store
            .pods
            .iter()
            .find(|(_, pod)| pod.spec.node_name.is_some());
        let first = first.map(|(key, _)| key.clone()).unwrap();
        let evaluated = cluster.evaluations;
        cluster.store.delete_pod(&first);
        cluster.run_for(60 * SECOND);
        assert_eq!((running(&cluster), cluster.store.pods.len()), (3, left));
        // The woken pod, and once more when the scheduler has selected its node.
        assert!(
            cluster.evaluations - evaluated <= 3,
            "{} evaluations",
            cluster.evaluations - evaluated
        );
    }
    expect_no_violation(cluster);
}

#[test]
fn a_crowd_in_one_namespace_does_not_starve_another() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    bound_pod(&mut cluster, "holder");
    for index in 0..8 {
        cluster.create_pod(&key(&format!("crowd{index}")), &[Use::Template("gpu")], None);
        cluster.run_for(SECOND);
    }
    let small = ObjectKey::new("small", "p");
    cluster.create_pod(&small, &[Use::Template("gpu")], None);
    cluster.run_for(60 * SECOND);
    let mut turns = 0;
    while cluster.store.pods[&small].spec.node_name.is_none() {
        let running = cluster
            .store
            .pods
            .iter()
            .find(|(_, pod)| pod.spec.node_name.is_some());
        let running = running.map(|(key, _)| key.clone()).unwrap();
        cluster.store.delete_pod(&running);
        cluster.run_for(60 * SECOND);
        turns += 1;
        assert!(turns <= 2, "it waits for pods of the other namespace");
    }
    expect_no_violation(cluster);
}

#[test]
fn a_woken_pod_that_cannot_run_blocks_no_other_pod() {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 1)]);
    bound_pod(&mut cluster, "one");
    bound_pod(&mut cluster, "two");
    // The oldest pod can never run: it needs two devices of one node.
    cluster.create_pod(&key("greedy"), &[Use::Template("gpu.pair")], None);
    cluster.run_for(10 * SECOND);
    cluster.create_pod(&key("modest"), &[Use::Template("gpu")], None);
    cluster.run_for(10 * SECOND);
    cluster.store.delete_pod(&key("one"));
    let freed = cluster.now;
    until_bound(&mut cluster, "modest");
    assert!(cluster.now - freed < 12 * SECOND);
    expect_no_violation(cluster);
}

/// The number of held devices changes for a minute.
fn other_pods_come_and_go(cluster: &mut Cluster) {
    for _ in 0..5 {
        bound_pod(cluster, "other");
        cluster.run_for(SECOND);
        cluster.store.delete_pod(&key("other"));
        cluster.run_for(10 * SECOND);
    }
}

#[test]
fn a_pod_that_cannot_run_is_reported_again_after_minutes() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    bound_pod(&mut cluster, "keeper");
    cluster.create_pod(&key("greedy"), &[Use::Template("gpu.pair")], None);
    cluster.run_for(10 * SECOND);
    other_pods_come_and_go(&mut cluster);
    assert_eq!(cluster.reports.len(), 1, "{:?}", cluster.reports);
    bound_pod(&mut cluster, "last");
    cluster.run_for(500 * SECOND);
    let text = |held| format!("claim \"c0\" fits on no node: node-a: {held} of 2 held");
    assert_eq!(messages(&cluster), [text(1), text(2)]);
    expect_no_violation(cluster);
}

#[test]
fn an_immediate_claim_that_fits_nowhere_is_reported_rarely() {
    let mut cluster = healthy_cluster(&[("node-a", 3)]);
    cluster.set_parameters("four", 4, true, false);
    cluster.create_claim(&key("greedy"), "gpu.four", AllocationMode::Immediate);
    cluster.run_for(10 * SECOND);
    other_pods_come_and_go(&mut cluster);
    let text = |held| format!("{held} of 3 devices held");
    assert_eq!(messages(&cluster), [text(0)]);
    bound_pod(&mut cluster, "last");
    cluster.run_for(500 * SECOND);
    assert_eq!(messages(&cluster), [text(0), text(1)]);
    expect_no_violation(cluster);
}

#[test]
fn a_device_freed_during_a_driver_call_is_not_missed() {
    for (slow, variant) in (1..=12).flat_map(|slow| (0..6).map(move |variant| (slow, variant))) {
        let mut cluster = healthy_cluster(&[("node-a", 1)]);
        bound_pod(&mut cluster, "holder");
        cluster.rng = Rng::new(variant);
        // The n-th command from here takes seconds, and the device is freed meanwhile.
        cluster.fault_at(slow, Fault::Slow);
        cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
        cluster.run_for(SECOND);
        cluster.store.delete_pod(&key("holder"));
        until_bound(&mut cluster, "p");
        assert!(cluster.now < 120 * SECOND, "served only by the slow recheck");
        expect_no_violation(cluster);
    }
}

#[test]
fn a_new_inventory_or_a_repaired_node_wakes_waiting_pods() {
    let mut cluster = healthy_cluster(&[("node-a", 0)]);
    for index in 0..3 {
        cluster.create_pod(&key(&format!("p{index}")), &[Use::Template("gpu")], None);
    }
    cluster.run_for(60 * SECOND);
    assert_eq!(running(&cluster), 0);
    let added = cluster.now;
    cluster.set_devices("node-a", 3);
    for index in 0..3 {
        until_bound(&mut cluster, &format!("p{index}"));
    }
    assert!(cluster.now - added < 30 * SECOND);
    expect_no_violation(cluster);
}

#[test]
fn a_list_that_is_full_keeps_the_selected_node() {
    let names: Vec<String> = (0..200).map(|n| format!("node-{n:03}")).collect();
    let nodes: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 0)).collect();
    let mut cluster = healthy_cluster(&nodes);
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    // The scheduler lists 128 nodes at a time and learns of all of them over time.
    cluster.run_for(300 * SECOND);
    assert_eq!(cluster.violation, None);
    // 72 of 200 nodes cannot be listed: the scheduler finds a suitable one among them by trial.
    for name in names.iter().skip(150) {
        cluster.set_devices(name, 1);
    }
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_node_on_which_the_driver_failed_once_is_tried_again() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    // Read, evaluate, finalizer, allocate.
    cluster.fault_at(4, Fault::DriverRetry);
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    let created = cluster.now;
    until_bound(&mut cluster, "p");
    assert_eq!(cluster.faults.hits.get(&Fault::DriverRetry), Some(&1));
    assert!(cluster.now - created < 60 * SECOND);
    assert!(is_bound(&cluster, "p"));
    expect_no_violation(cluster);
}

#[test]
fn woken_pods_are_served_in_turn_and_not_by_name() {
    let mut cluster = healthy_cluster(&[("node-a", 0)]);
    for (name, priority) in [("a", 0), ("b", 5), ("c", 0), ("d", 10)] {
        cluster.create_pod(&key(name), &[Use::Template("gpu")], None);
        cluster
            .store
            .update_pod(&key(name), |pod| pod.spec.priority = Some(priority));
        cluster.run_for(10 * SECOND);
    }
    cluster.command_log.clear();
    cluster.set_devices("node-a", 4);
    cluster.run_for(SECOND);
    let log = without_suffixes(&cluster.command_log);
    let order: Vec<&str> = log.iter().map(String::as_str).take(4).collect();
    let evaluated = ["d", "b", "a", "c"].map(|name| format!("evaluate {name}-c0 on node-a"));
    assert_eq!(order, evaluated);
    expect_no_violation(cluster);
}

#[test]
fn a_slow_recheck_concerns_its_own_pod_alone() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    bound_pod(&mut cluster, "holder");
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    // Only a change of the parameters can help this claim.
    cluster.set_parameters("wrong", 1, false, false);
    cluster.create_claim(&key("hopeless"), "gpu.wrong", AllocationMode::Immediate);
    cluster.run_for(60 * SECOND);
    cluster.command_log.clear();
    // The slow recheck comes after five to seven minutes.
    cluster.run_for(400 * SECOND);
    let _ = cluster
        .store
        .update_claim(&key("hopeless"), None, Endpoint::Main, |claim| {
            let annotations = claim.metadata.annotations.get_or_insert_default();
            annotations.insert("example.com/note".to_owned(), "changed".to_owned());
            Ok(())
        });
    cluster.run_for(20 * SECOND);
    assert_eq!(
        without_suffixes(&cluster.command_log),
        ["evaluate p-c0 on node-a"]
    );
    expect_no_violation(cluster);
}

#[test]
fn a_refusal_is_reported_although_something_has_changed() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    // Read, evaluate, finalizer, allocate.
    cluster.fault_at(4, Fault::DriverRetry);
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    until_last(&mut cluster, "the driver is asked", "allocate");
    cluster.report_capacity(CapacityCause::Freed, Some(1), 0);
    cluster.run_for(SECOND / 10);
    let text = "claim \"c0\" fits on no node: node-a: the driver failed: injected fault";
    assert_eq!(messages(&cluster), [text]);
    let listed = &cluster.store.contexts[&key("p")].status.resource_claims;
    assert!(
        listed.iter().any(|entry| entry.unsuitable_nodes == ["node-a"]),
        "{listed:?}"
    );
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

/// Attempts to record an allocation within ten minutes, all of which the server refuses.
fn refused_attempts(cluster: &mut Cluster) -> usize {
    cluster.command_log.clear();
    cluster.run_for(600 * SECOND);
    let log = cluster.command_log.iter();
    log.filter(|line| line.starts_with("record")).count()
}

#[test]
fn a_refused_allocation_does_not_wake_its_immediate_claim() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.refuse_allocations = Some("");
    cluster.create_claim(&key("named"), "gpu", AllocationMode::Immediate);
    let attempts = refused_attempts(&mut cluster);
    assert!((5..40).contains(&attempts), "{attempts} attempts in ten minutes");
    cluster.refuse_allocations = None;
    cluster.run_until("it is allocated", |cluster| {
        cluster
            .claim("named")
            .is_some_and(|claim| claim.status.allocation.is_some())
    });
    expect_no_violation(cluster);
}

#[test]
fn a_refused_allocation_does_not_wake_its_own_pod() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    cluster.create_pod(&key("holder"), &[Use::Template("gpu")], None);
    until_bound(&mut cluster, "holder");
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    cluster.run_for(30 * SECOND);
    cluster.refuse_allocations = Some("p-");
    cluster.store.delete_pod(&key("holder"));
    let attempts = refused_attempts(&mut cluster);
    assert!((5..40).contains(&attempts), "{attempts} attempts in ten minutes");
    cluster.refuse_allocations = None;
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_pod_with_a_refused_allocation_blocks_no_other_pod() {
    let mut cluster = healthy_cluster(&[("node-a", 1)]);
    bound_pod(&mut cluster, "holder");
    cluster.create_pod(&key("p"), &[Use::Template("gpu")], None);
    cluster.run_for(30 * SECOND);
    cluster.refuse_allocations = Some("p-");
    cluster.store.delete_pod(&key("holder"));
    cluster.run_for(300 * SECOND);
    bound_pod(&mut cluster, "second");
    for name in ["q", "r"] {
        cluster.create_pod(&key(name), &[Use::Template("gpu")], None);
    }
    cluster.run_for(30 * SECOND);
    // The refused pod has waited longest. It tries once more, and then waits for its delay of half a minute.
    cluster.store.delete_pod(&key("second"));
    let allocated = |cluster: &Cluster, name: &str| {
        let mut claims = cluster.store.claims.iter();
        claims.any(|(key, claim)| key.name.starts_with(name) && claim.status.allocation.is_some())
    };
    cluster.run_until("one of the others is served", |cluster| {
        allocated(cluster, "q-") || allocated(cluster, "r-")
    });
    let (first, last) = if allocated(&cluster, "q-") {
        ("q", "r")
    } else {
        ("r", "q")
    };
    cluster.store.delete_pod(&key(first));
    let freed = cluster.now;
    cluster.run_until("the other is served", |cluster| {
        allocated(cluster, &format!("{last}-"))
    });
    assert!(cluster.now - freed < SECOND, "{} us", cluster.now - freed);
    cluster.refuse_allocations = None;
    cluster.store.delete_pod(&key(last));
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}
