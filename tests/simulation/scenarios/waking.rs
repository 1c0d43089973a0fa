//! Pods that wait are woken by what they wait for, each once and in turn.

use drayman::api::resource::AllocationMode;
use drayman::core::claims::ObjectKey;
use drayman::driver::CapacityCause;

use super::{bound_pod, calm, expect_well, is_bound, key, plain, until_bound};
use crate::faults::Fault;
use crate::rng::Rng;
use crate::stage::{SECOND, Stage};
use crate::store::Endpoint;
use crate::users::Use;

fn running(stage: &Stage) -> usize {
    stage
        .store
        .pods
        .values()
        .filter(|pod| pod.spec.node_name.is_some())
        .count()
}

#[test]
fn each_freed_device_lets_exactly_one_in() {
    let mut stage = calm(&[("node-a", 3)]);
    for index in 0..6 {
        stage.create_pod(&key(&format!("p{index}")), &[Use::Template("gpu")], None);
    }
    stage.run_for(60 * SECOND);
    assert_eq!(running(&stage), 3);
    for left in [5, 4, 3] {
        let first = stage
            .store
            .pods
            .iter()
            .find(|(_, pod)| pod.spec.node_name.is_some());
        let first = first.map(|(key, _)| key.clone()).unwrap();
        let judged = stage.judgements;
        stage.store.delete_pod(&first);
        stage.run_for(60 * SECOND);
        assert_eq!((running(&stage), stage.store.pods.len()), (3, left));
        // The one that was woken, and once more when the scheduler has selected its node.
        assert!(
            stage.judgements - judged <= 3,
            "{} judgements",
            stage.judgements - judged
        );
    }
    expect_well(stage);
}

#[test]
fn a_crowd_in_one_namespace_does_not_starve_another() {
    let mut stage = calm(&[("node-a", 1)]);
    bound_pod(&mut stage, "holder");
    for index in 0..8 {
        stage.create_pod(&key(&format!("crowd{index}")), &[Use::Template("gpu")], None);
        stage.run_for(SECOND);
    }
    let small = ObjectKey::new("small", "p");
    stage.create_pod(&small, &[Use::Template("gpu")], None);
    stage.run_for(60 * SECOND);
    let mut turns = 0;
    while stage.store.pods[&small].spec.node_name.is_none() {
        let running = stage
            .store
            .pods
            .iter()
            .find(|(_, pod)| pod.spec.node_name.is_some());
        let running = running.map(|(key, _)| key.clone()).unwrap();
        stage.store.delete_pod(&running);
        stage.run_for(60 * SECOND);
        turns += 1;
        assert!(turns <= 2, "it waits behind the crowd");
    }
    expect_well(stage);
}

#[test]
fn a_woken_pod_that_cannot_run_blocks_nobody() {
    let mut stage = calm(&[("node-a", 1), ("node-b", 1)]);
    bound_pod(&mut stage, "one");
    bound_pod(&mut stage, "two");
    // The oldest can never run: it wants two devices of one node.
    stage.create_pod(&key("greedy"), &[Use::Template("gpu.pair")], None);
    stage.run_for(10 * SECOND);
    stage.create_pod(&key("modest"), &[Use::Template("gpu")], None);
    stage.run_for(10 * SECOND);
    stage.store.delete_pod(&key("one"));
    let freed = stage.now;
    until_bound(&mut stage, "modest");
    assert!(stage.now - freed < 12 * SECOND);
    expect_well(stage);
}

#[test]
fn a_pod_that_cannot_run_is_reported_again_after_minutes() {
    let mut stage = calm(&[("node-a", 2)]);
    bound_pod(&mut stage, "keeper");
    stage.create_pod(&key("greedy"), &[Use::Template("gpu.pair")], None);
    stage.run_for(10 * SECOND);
    for _ in 0..5 {
        bound_pod(&mut stage, "other");
        stage.run_for(SECOND);
        stage.store.delete_pod(&key("other"));
        stage.run_for(10 * SECOND);
    }
    assert_eq!(stage.reports.len(), 1, "{:?}", stage.reports);
    bound_pod(&mut stage, "last");
    stage.run_for(500 * SECOND);
    let said: Vec<&str> = stage
        .reports
        .iter()
        .map(|report| report.message.as_str())
        .collect();
    let text = |held| format!("claim \"c0\" fits on no node: node-a: {held} of 2 held");
    assert_eq!(said, [text(1), text(2)]);
    expect_well(stage);
}

#[test]
fn what_becomes_free_while_the_driver_is_asked_is_not_missed() {
    for (slow, variant) in (1..=12).flat_map(|slow| (0..6).map(move |variant| (slow, variant))) {
        let mut stage = calm(&[("node-a", 1)]);
        bound_pod(&mut stage, "holder");
        stage.rng = Rng::new(variant);
        // The n-th command from here takes seconds, and the device is freed in the middle of it.
        stage.faults.plan.insert(stage.commands + slow, Fault::Slow);
        stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
        stage.run_for(SECOND);
        stage.store.delete_pod(&key("holder"));
        until_bound(&mut stage, "p");
        assert!(
            stage.now < 120 * SECOND,
            "found by the slow recheck at the earliest"
        );
        expect_well(stage);
    }
}

#[test]
fn new_inventory_and_a_repaired_node_wake_those_who_wait() {
    let mut stage = calm(&[("node-a", 0)]);
    for index in 0..3 {
        stage.create_pod(&key(&format!("p{index}")), &[Use::Template("gpu")], None);
    }
    stage.run_for(60 * SECOND);
    assert_eq!(running(&stage), 0);
    let plugged = stage.now;
    stage.set_devices("node-a", 3);
    for index in 0..3 {
        until_bound(&mut stage, &format!("p{index}"));
    }
    assert!(stage.now - plugged < 30 * SECOND);
    expect_well(stage);
}

#[test]
fn a_list_that_is_full_keeps_the_selected_node() {
    let names: Vec<String> = (0..200).map(|n| format!("node-{n:03}")).collect();
    let nodes: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 0)).collect();
    let mut stage = calm(&nodes);
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    // The scheduler lists 128 nodes at a time, and learns of them all in turn.
    stage.run_for(300 * SECOND);
    assert_eq!(stage.violation, None);
    // 72 of 200 cannot be listed: the scheduler finds a good one among them by trying.
    for name in names.iter().skip(150) {
        stage.set_devices(name, 1);
    }
    until_bound(&mut stage, "p");
    expect_well(stage);
}

#[test]
fn a_node_on_which_the_driver_failed_once_is_tried_again() {
    let mut stage = calm(&[("node-a", 1)]);
    // Read, judge, finalizer, allocate.
    stage.faults.plan.insert(stage.commands + 4, Fault::DriverRetry);
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    let created = stage.now;
    until_bound(&mut stage, "p");
    assert_eq!(stage.faults.hits.get(&Fault::DriverRetry), Some(&1));
    assert!(stage.now - created < 60 * SECOND);
    assert!(is_bound(&stage, "p"));
    expect_well(stage);
}

#[test]
fn woken_pods_are_served_in_turn_and_not_by_name() {
    let mut stage = calm(&[("node-a", 0)]);
    for (name, priority) in [("a", 0), ("b", 5), ("c", 0), ("d", 10)] {
        stage.create_pod(&key(name), &[Use::Template("gpu")], None);
        stage
            .store
            .update_pod(&key(name), |pod| pod.spec.priority = Some(priority));
        stage.run_for(10 * SECOND);
    }
    stage.command_log.clear();
    stage.set_devices("node-a", 4);
    stage.run_for(SECOND);
    let log = plain(&stage.command_log);
    let order: Vec<&str> = log.iter().map(String::as_str).take(4).collect();
    let judged = ["d", "b", "a", "c"].map(|name| format!("judge {name}-c0 on node-a"));
    assert_eq!(order, judged);
    expect_well(stage);
}

#[test]
fn a_slow_recheck_concerns_its_own_pod_alone() {
    let mut stage = calm(&[("node-a", 1)]);
    bound_pod(&mut stage, "holder");
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    // Nothing but a change can help this one.
    stage.set_parameters("wrong", 1, false, false);
    stage.create_claim(&key("hopeless"), "gpu.wrong", AllocationMode::Immediate);
    stage.run_for(60 * SECOND);
    stage.command_log.clear();
    // The slow recheck comes after five to seven minutes.
    stage.run_for(400 * SECOND);
    let _ = stage
        .store
        .update_claim(&key("hopeless"), None, Endpoint::Main, |claim| {
            let annotations = claim.metadata.annotations.get_or_insert_default();
            annotations.insert("example.com/note".to_owned(), "changed".to_owned());
            Ok(())
        });
    stage.run_for(20 * SECOND);
    assert_eq!(plain(&stage.command_log), ["judge p-c0 on node-a"]);
    expect_well(stage);
}

#[test]
fn a_refusal_is_told_although_something_has_changed() {
    let mut stage = calm(&[("node-a", 1)]);
    // Read, judge, finalizer, allocate.
    stage.faults.plan.insert(stage.commands + 4, Fault::DriverRetry);
    stage.create_pod(&key("p"), &[Use::Template("gpu")], None);
    stage.run_until("the driver is asked", |stage| {
        let last = stage.command_log.last();
        last.is_some_and(|line| line.starts_with("allocate"))
    });
    stage.announce_change(CapacityCause::Freed, Some(1), 0);
    stage.run_for(SECOND / 10);
    let told: Vec<&str> = stage
        .reports
        .iter()
        .map(|report| report.message.as_str())
        .collect();
    let text = "claim \"c0\" fits on no node: node-a: the driver failed, since a fault was asked for";
    assert_eq!(told, [text]);
    let listed = &stage.store.contexts[&key("p")].status.resource_claims;
    assert!(
        listed.iter().any(|entry| entry.unsuitable_nodes == ["node-a"]),
        "{listed:?}"
    );
    until_bound(&mut stage, "p");
    expect_well(stage);
}
