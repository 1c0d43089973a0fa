//! Structured mode: the scheduler allocates, and companions read claims at prepare.

use super::key;
use super::nodes::{Counts, Planned, until_it_is_gone, until_it_runs, with_every_fault, with_every_pair};
use crate::cluster::{Cluster, SECOND};
use crate::faults::Fault;
use crate::node::OperationFault;
use crate::users::Use;

/// One node in structured mode. The second of two devices has two shares.
fn structured(devices: usize, planned: &[Planned]) -> Cluster {
    let mut cluster = Cluster::new(7);
    cluster.verbose = std::env::var("VERBOSE").is_ok();
    cluster.slow_scheduler = true;
    cluster.structured = true;
    cluster.set_devices("node-a", devices);
    for (operation, fault, power) in planned {
        cluster.nodes.plan.insert(*operation, (*fault, *power));
    }
    cluster.set_up_nodes(7);
    cluster
}

/// Deletes everything and checks that everything is free.
fn expect_all_free(mut cluster: Cluster, what: &str) {
    if cluster.violation.is_none() {
        cluster.conclude_structured();
        cluster.conclude_nodes();
    }
    assert_eq!(cluster.violation, None, "{what}");
    assert!(
        cluster.nodes.plan.is_empty(),
        "{what}: a planned fault does not occur"
    );
}

/// Two pods use the only device one after the other.
fn two_pods(planned: &[Planned]) -> Counts {
    let mut cluster = structured(1, planned);
    for name in ["p", "q"] {
        cluster.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_it_runs(&mut cluster, name);
        until_it_is_gone(&mut cluster, name);
    }
    let counts = Counts::by(&cluster);
    expect_all_free(cluster, &format!("{planned:?}"));
    counts
}

#[test]
fn every_fault_at_every_step_is_survived_in_structured_mode() {
    with_every_fault(5, two_pods);
}

#[test]
fn every_pair_of_a_companion_fault_and_kill_in_structured_mode() {
    with_every_pair(two_pods);
}

#[test]
fn of_two_claims_that_the_scheduler_gave_one_device_one_waits() {
    let mut cluster = structured(1, &[]);
    cluster.create_pod(&key("first"), &[Use::Template("gpu")], None);
    until_it_runs(&mut cluster, "first");
    cluster.faults.rates.insert(Fault::ScheduledTwice, 1000);
    cluster.create_pod(&key("second"), &[Use::Template("gpu")], None);
    cluster.run_for(60 * SECOND);
    assert!(cluster.nodes.refused > 0, "the companion was called");
    assert!(!cluster.has_containers(&key("second")));
    until_it_is_gone(&mut cluster, "first");
    until_it_runs(&mut cluster, "second");
    expect_all_free(cluster, "a device allocated twice");
}

#[test]
fn claims_are_prepared_once_the_api_server_is_back() {
    let mut cluster = structured(1, &[]);
    cluster.create_pod(&key("first"), &[Use::Template("gpu")], None);
    until_it_runs(&mut cluster, "first");
    cluster.faults.rates.insert(Fault::ClaimUnreadable, 1000);
    until_it_is_gone(&mut cluster, "first");
    cluster.create_pod(&key("second"), &[Use::Template("gpu")], None);
    cluster.run_for(60 * SECOND);
    assert!(
        !cluster.has_containers(&key("second")),
        "its claim cannot be read"
    );
    cluster.faults.stop();
    until_it_runs(&mut cluster, "second");
    expect_all_free(cluster, "an unavailable API server");
}

#[test]
fn claims_share_a_device_and_another_has_admin_access() {
    let mut cluster = structured(2, &[]);
    // The exclusive device is allocated first or last; three claims fill both devices.
    for name in ["one", "two", "three"] {
        cluster.create_pod(&key(name), &[Use::Template("gpu")], None);
        until_it_runs(&mut cluster, name);
    }
    for name in ["watching", "watching-too"] {
        cluster.create_pod(&key(name), &[Use::Template("gpu.admin")], None);
        until_it_runs(&mut cluster, name);
    }
    cluster.create_pod(&key("waiting"), &[Use::Template("gpu")], None);
    cluster.run_for(60 * SECOND);
    assert!(!cluster.has_containers(&key("waiting")));
    until_it_is_gone(&mut cluster, "two");
    until_it_runs(&mut cluster, "waiting");
    assert_eq!(cluster.nodes.refused, 0);
    expect_all_free(cluster, "shares and admin access");
}

#[test]
fn a_reboot_without_cdi_files_is_survived_in_structured_mode() {
    let mut cluster = structured(2, &[]);
    for name in ["one", "two"] {
        cluster.create_pod(&key(name), &[Use::Template("gpu.pair")], None);
        cluster.create_pod(&key("watching"), &[Use::Template("gpu.admin")], None);
        until_it_runs(&mut cluster, name);
        until_it_runs(&mut cluster, "watching");
        let next = cluster.nodes.operations + 1;
        cluster.nodes.plan.insert(next, (OperationFault::Kill(0), true));
        cluster.remove_cdi_files("node-a");
        cluster.run_until("the node is up again", |cluster| cluster.nodes.operations > next);
        until_it_runs(&mut cluster, name);
        until_it_runs(&mut cluster, "watching");
        until_it_is_gone(&mut cluster, name);
        until_it_is_gone(&mut cluster, "watching");
    }
    expect_all_free(cluster, "a reboot");
}
