//! Pods with only some of their claims allocated: no pod keeps a partial allocation.

use drayman::api::resource::{AllocationMode, ResourceClaimStatus};

use super::{
    expect_no_violation, healthy_cluster, is_bound, key, until_bound, until_last, until_late_write,
    until_stopped, without_suffixes,
};
use crate::cluster::{Cluster, SECOND};
use crate::driver::{DRIVER, OTHER_DRIVER, recorded_hold};
use crate::faults::Fault;
use crate::store::Kind;
use crate::users::Use;

fn recorded(cluster: &Cluster) -> usize {
    let claims = cluster.store.claims.values();
    claims.filter(|claim| recorded_hold(claim).is_some()).count()
}

/// The number of rollbacks that the controller requested.
fn rolled_back(cluster: &Cluster) -> usize {
    let log = without_suffixes(&cluster.command_log);
    log.iter().filter(|line| line.starts_with("roll back")).count()
}

/// The controller is killed after it recorded the first of two claims of a pod, and the device of the other one disappears.
fn partially_allocated_pod(second: &str) -> Cluster {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.set_class("flip", DRIVER);
    cluster.run_for(SECOND);
    cluster.command_log.clear();
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template(second)], None);
    until_last(&mut cluster, "the driver is asked", "allocate");
    cluster.fault_at(2, Fault::RequestLost);
    cluster.run_until("one of two is recorded", |cluster| recorded(cluster) == 1);
    cluster.crash();
    let held = cluster
        .store
        .claims
        .values()
        .find_map(|claim| recorded_hold(claim));
    let devices = held.unwrap().devices;
    cluster.environment.nodes.insert("node-a".to_owned(), devices);
    cluster
}

#[test]
fn a_partial_allocation_is_rolled_back_if_no_device_is_free() {
    let mut cluster = partially_allocated_pod("gpu");
    cluster.run_for(30 * SECOND);
    assert_eq!((recorded(&cluster), rolled_back(&cluster)), (0, 1));
    let statuses = cluster.store.claims.values().map(|claim| &claim.status);
    assert!(
        statuses
            .clone()
            .all(|status| *status == ResourceClaimStatus::default())
    );
    // The remaining device is available to another pod.
    cluster.create_pod(&key("q"), &[Use::Template("gpu")], None);
    until_bound(&mut cluster, "q");
    cluster.set_devices("node-a", 3);
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_partial_allocation_is_kept_after_a_kill_if_possible() {
    let mut cluster = partially_allocated_pod("gpu");
    cluster.set_devices("node-a", 2);
    until_bound(&mut cluster, "p");
    assert_eq!(rolled_back(&cluster), 0);
    expect_no_violation(cluster);
}

#[test]
fn a_shared_claim_is_rolled_back_when_its_other_pod_ends() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.set_parameters("shared", 1, true, true);
    cluster.set_parameters("odd", 1, true, false);
    cluster.create_claim(&key("s"), "gpu.shared", AllocationMode::WaitForFirstConsumer);
    cluster.run_for(SECOND);
    cluster.command_log.clear();
    cluster.create_pod(&key("p"), &[Use::Named("s"), Use::Template("gpu.odd")], None);
    until_last(&mut cluster, "the driver is asked", "allocate");
    cluster.fault_at(2, Fault::RequestLost);
    cluster.run_until("one of two is recorded", |cluster| recorded(cluster) == 1);
    cluster.crash();
    // Pod p cannot get its other claim, but pod q uses the shared one.
    cluster.set_parameters("odd", 1, false, false);
    cluster.create_pod(&key("q"), &[Use::Named("s")], None);
    until_bound(&mut cluster, "q");
    cluster.run_for(30 * SECOND);
    assert_eq!((recorded(&cluster), rolled_back(&cluster)), (1, 0));
    cluster.store.delete_pod(&key("q"));
    cluster.run_for(30 * SECOND);
    assert_eq!((recorded(&cluster), rolled_back(&cluster)), (0, 1));
    assert!(!is_bound(&cluster, "p"));
    expect_no_violation(cluster);
}

#[test]
fn a_claim_is_not_rolled_back_while_its_pod_gets_the_rest() {
    let mut cluster = partially_allocated_pod("flip");
    until_last(&mut cluster, "the rest is evaluated as unsuitable", "evaluate");
    // The pod is read again before the rollback, and the reply takes seconds.
    cluster.fault_at(1, Fault::Slow);
    until_last(&mut cluster, "the pod is read", "read pod");
    cluster.pause_watch(Kind::Context);
    cluster.set_class("flip", OTHER_DRIVER);
    cluster.run_for(60 * SECOND);
    assert_eq!(
        (recorded(&cluster), rolled_back(&cluster)),
        (1, 0),
        "{:?}",
        cluster.command_log
    );
    cluster.resume_watch(Kind::Context);
    until_bound(&mut cluster, "p");
    expect_no_violation(cluster);
}

#[test]
fn a_claim_is_not_rolled_back_from_a_pod_that_can_run_now() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.set_class("flip", DRIVER);
    cluster.run_for(SECOND);
    cluster.refuse_allocations = Some("p-c1");
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("flip")], None);
    until_last(&mut cluster, "the refused claim is read", "read claim p-c1");
    // The rollback request is lost, and its sender waits for the reply.
    cluster.fault_at(1, Fault::RequestLost);
    cluster.run_until("the other claim is rolled back", |cluster| {
        rolled_back(cluster) == 1
    });
    // Meanwhile another driver serves the refused claim. The controller observes that, but not that the pod is bound.
    cluster.pause_watch(Kind::Context);
    cluster.refuse_allocations = None;
    cluster.set_class("flip", OTHER_DRIVER);
    until_bound(&mut cluster, "p");
    assert_eq!(recorded(&cluster), 1);
    cluster.run_for(60 * SECOND);
    assert_eq!(
        (recorded(&cluster), rolled_back(&cluster)),
        (1, 1),
        "{:?}",
        cluster.command_log
    );
    cluster.resume_watch(Kind::Context);
    assert!(is_bound(&cluster, "p"));
    expect_no_violation(cluster);
}

#[test]
fn a_pod_is_evaluated_again_when_a_late_write_succeeds() {
    let mut cluster = healthy_cluster(&[("node-a", 2)]);
    cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    until_last(&mut cluster, "the driver is asked", "allocate");
    cluster.fault_at(1, Fault::PausedLeader);
    until_stopped(&mut cluster);
    // The other claim of the pod no longer fits on any node.
    cluster.set_devices("node-a", 1);
    // The previous leader records the claim that the next leader tries to release while the driver hangs.
    cluster.fault_at(1, Fault::DriverHungBefore);
    until_late_write(&mut cluster);
    cluster.run_for(120 * SECOND);
    assert_eq!(
        (recorded(&cluster), rolled_back(&cluster)),
        (0, 1),
        "{:?}",
        cluster.command_log
    );
    expect_no_violation(cluster);
}
