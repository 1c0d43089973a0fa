//! Devices in mode `both`: no device is given out through both APIs.

use super::nodes::{
    Counts, Planned, cluster_with_faults, expect_all_free, until_it_is_gone, until_it_runs, with_every_fault,
    with_every_pair,
};
use super::{key, until_bound};
use crate::cluster::{Cluster, SECOND};
use crate::faults::Fault;
use crate::node::OperationFault;
use crate::users::Use;

fn phase(cluster: &Cluster, name: &str) -> Option<String> {
    cluster.store.pods.get(&key(name))?.status.phase.clone()
}

/// One node with one device in mode `both`, after everything is registered.
fn both_apis(planned: &[Planned]) -> Cluster {
    let mut cluster = cluster_with_faults(planned);
    cluster.open_both_apis();
    cluster.run_for(30 * SECOND);
    cluster
}

/// Creates a pod with the device as an extended resource, repeatedly like a Deployment, until it has containers.
fn run_extended_resource_pod(cluster: &mut Cluster, name: &str, hidden: bool) {
    for _ in 0..100 {
        if cluster.has_containers(&key(name)) || cluster.violation.is_some() {
            return;
        }
        if phase(cluster, name).is_some() {
            cluster.store.delete_pod(&key(name));
        }
        if !cluster.store.pods.contains_key(&key(name)) {
            cluster.create_extended_resource_pod(&key(name), "node-a", 1, hidden);
        }
        cluster.run_for(3 * SECOND);
    }
    cluster.violate(|| format!("timeout: {name} has containers"));
}

#[test]
fn of_container_and_claim_with_one_device_the_second_waits() {
    for hidden in [false, true] {
        let mut cluster = both_apis(&[]);
        cluster.create_extended_resource_pod(&key("first"), "node-a", 1, hidden);
        until_it_runs(&mut cluster, "first");
        // The companion restarts and knows only the response of kubelet.
        let next = cluster.nodes.operations + 1;
        cluster.nodes.plan.insert(next, (OperationFault::Kill(0), false));
        cluster.create_pod(&key("claiming"), &[Use::Template("gpu")], None);
        until_bound(&mut cluster, "claiming");
        cluster.run_for(60 * SECOND);
        assert!(!cluster.nodes.plan.contains_key(&next), "it was killed");
        assert!(!cluster.has_containers(&key("claiming")), "hidden: {hidden}");
        assert!(
            cluster.faults.hits[&Fault::ClaimOfContainer] > 0,
            "the companion was called"
        );
        until_it_is_gone(&mut cluster, "first");
        until_it_runs(&mut cluster, "claiming");

        cluster.create_extended_resource_pod(&key("second"), "node-a", 1, hidden);
        cluster.run_until("it is rejected", |cluster| {
            phase(cluster, "second").as_deref() == Some("Failed")
        });
        until_it_is_gone(&mut cluster, "claiming");
        cluster.run_for(30 * SECOND);
        cluster.create_extended_resource_pod(&key("third"), "node-a", 1, hidden);
        until_it_runs(&mut cluster, "third");
        expect_all_free(cluster, "two APIs");
    }
}

#[test]
fn an_unrecorded_allocate_keeps_its_device_from_claims() {
    let mut cluster = both_apis(&[]);
    cluster.faults.rates.insert(Fault::GrantLate, 1000);
    cluster.create_extended_resource_pod(&key("first"), "node-a", 1, false);
    cluster.run_until("it is answered", |cluster| cluster.nodes.granted > 0);
    cluster.create_pod(&key("claiming"), &[Use::Template("gpu")], None);
    until_bound(&mut cluster, "claiming");
    until_it_runs(&mut cluster, "first");
    assert!(
        cluster.faults.hits[&Fault::ClaimOfContainer] > 0,
        "the companion was called"
    );
    cluster.run_for(60 * SECOND);
    assert!(!cluster.has_containers(&key("claiming")));
    until_it_is_gone(&mut cluster, "first");
    until_it_runs(&mut cluster, "claiming");
    expect_all_free(cluster, "recorded late");
}

/// An extended resource pod, a pod with a claim, and another extended resource pod.
fn three_pods(planned: &[Planned]) -> Counts {
    let mut cluster = both_apis(planned);
    run_extended_resource_pod(&mut cluster, "p", false);
    cluster.create_pod(&key("q"), &[Use::Template("gpu")], None);
    until_bound(&mut cluster, "q");
    cluster.run_for(5 * SECOND);
    cluster.store.delete_pod(&key("p"));
    until_it_runs(&mut cluster, "q");
    until_it_is_gone(&mut cluster, "q");
    run_extended_resource_pod(&mut cluster, "r", true);
    let counts = Counts::by(&cluster);
    expect_all_free(cluster, &format!("{planned:?}"));
    counts
}

#[test]
fn every_fault_at_every_step_of_a_companion_with_both_apis() {
    // A start and calls of both APIs.
    with_every_fault(6, three_pods);
}

#[test]
fn every_pair_of_a_companion_fault_and_kill_with_both_apis() {
    with_every_pair(three_pods);
}
