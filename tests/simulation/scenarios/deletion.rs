//! Actions of users and crashes at every step of a claim lifecycle.

use drayman::api::resource::AllocationMode;
use drayman::core::claims::ObjectKey;

use super::{end_pod, expect_no_violation, healthy_cluster, key, until_allocated, until_bound};
use crate::cluster::{Cluster, SECOND};
use crate::driver::{DRIVER, OTHER_DRIVER};
use crate::faults::Fault;
use crate::store::{Endpoint, KINDS, Kind};
use crate::users::Use;

fn begin() -> Cluster {
    let mut cluster = healthy_cluster(&[("node-a", 1), ("node-b", 2)]);
    cluster.slow_scheduler = false;
    cluster.set_class("flip", DRIVER);
    cluster.create_pod(&key("p"), &[Use::Template("flip"), Use::Template("gpu")], None);
    cluster.create_pod(&key("q"), &[Use::Template("gpu")], None);
    cluster
}

/// Runs the same lifecycle once per step, with `act` at that step.
fn at_every_step(act: impl Fn(&mut Cluster)) {
    let mut baseline = begin();
    baseline.run_for(30 * SECOND);
    end_pod(&mut baseline, "p");
    baseline.run_for(30 * SECOND);
    let steps = baseline.steps;
    assert!(steps > 100, "{steps}");
    let first = begin().steps;
    for step in first..=steps {
        let mut cluster = begin();
        let half = cluster.now + 30 * SECOND;
        let end = half + 30 * SECOND;
        while cluster.steps < step && cluster.step(half) {}
        if cluster.steps < step {
            cluster.now = half;
            end_pod(&mut cluster, "p");
            cluster.wake_scheduler();
            while cluster.steps < step && cluster.step(end) {}
        }
        act(&mut cluster);
        cluster.feed_watches();
        let cluster = expect_no_violation(cluster);
        let refused = cluster
            .reports
            .iter()
            .find(|report| report.reason == "ReleaseRefused");
        assert_eq!(refused, None, "step {step}");
    }
}

fn claims_of(cluster: &Cluster, pod: &str) -> Vec<ObjectKey> {
    let claims = cluster.store.claims.keys();
    claims
        .filter(|claim| claim.name.starts_with(pod))
        .cloned()
        .collect()
}

/// Removes a claim with its finalizers, as an administrator may.
fn remove_claim(cluster: &mut Cluster, key: &ObjectKey) {
    let _ = cluster.store.update_claim(key, None, Endpoint::Main, |claim| {
        claim.metadata.finalizers = None;
        Ok(())
    });
    cluster.store.delete_claim(key);
}

#[test]
fn a_claim_may_be_deleted_at_any_moment() {
    at_every_step(|cluster| {
        for claim in claims_of(cluster, "p") {
            cluster.store.delete_claim(&claim);
        }
    });
}

#[test]
fn a_pod_may_be_deleted_at_any_moment() {
    at_every_step(|cluster| cluster.store.delete_pod(&key("p")));
}

#[test]
fn a_pod_may_be_recreated_at_any_moment() {
    at_every_step(|cluster| {
        cluster.store.remove_pod(&key("p"));
        cluster.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    });
}

#[test]
fn a_claim_may_be_replaced_while_the_watch_is_interrupted() {
    at_every_step(|cluster| {
        cluster.pause_watch(Kind::Claim);
        for key in claims_of(cluster, "p") {
            let claim = cluster.store.claims[&key].clone();
            remove_claim(cluster, &key);
            let mut again = (*claim).clone();
            again.metadata.finalizers = None;
            again.metadata.deletion_timestamp = None;
            cluster.store.create_claim(again).unwrap();
        }
        cluster.relist(Kind::Claim);
    });
}

#[test]
fn a_claim_may_be_replaced_by_a_foreign_one_at_any_time() {
    at_every_step(|cluster| {
        for key in claims_of(cluster, "p") {
            remove_claim(cluster, &key);
            cluster.create_claim(&key, "gpu", AllocationMode::WaitForFirstConsumer);
        }
    });
}

#[test]
fn a_device_of_a_removed_claim_serves_the_next_pod() {
    for variant in 0..20 {
        let mut cluster = healthy_cluster(&[("node-a", 1)]);
        cluster.rng = crate::rng::Rng::new(variant);
        cluster.create_claim(&key("named"), "gpu", AllocationMode::WaitForFirstConsumer);
        // Read, evaluate, finalizer, allocate, record: the allocation is stored seconds before its answer arrives, and not watched.
        let write = cluster.commands + 5;
        cluster.faults.plan.insert(write, Fault::Slow);
        cluster.create_pod(&key("p"), &[Use::Named("named")], None);
        cluster.run_until("the allocation is sent", |cluster| cluster.commands >= write);
        cluster.pause_watch(Kind::Claim);
        until_allocated(&mut cluster, "named");
        // Meanwhile a user removes the pod and the claim.
        cluster.store.remove_pod(&key("p"));
        remove_claim(&mut cluster, &key("named"));
        cluster.relist(Kind::Claim);
        cluster.create_pod(&key("q"), &[Use::Template("gpu")], None);
        until_bound(&mut cluster, "q");
        expect_no_violation(cluster);
    }
}

#[test]
fn a_context_may_be_deleted_at_any_moment() {
    at_every_step(|cluster| cluster.store.delete_context(&key("p")));
}

#[test]
fn the_selected_node_may_change_at_any_moment() {
    at_every_step(|cluster| {
        let _ = cluster.store.update_context(&key("p"), |context| {
            let other = if context.spec.selected_node == "node-b" {
                "node-a"
            } else {
                "node-b"
            };
            context.spec.selected_node = other.to_owned();
        });
    });
}

#[test]
fn every_watch_may_start_over_at_any_moment() {
    at_every_step(|cluster| {
        for kind in KINDS {
            cluster.relist(kind);
        }
    });
}

#[test]
fn a_class_may_be_repointed_at_any_moment() {
    at_every_step(|cluster| cluster.set_class("flip", OTHER_DRIVER));
}

#[test]
fn a_class_may_be_recreated_at_any_moment() {
    at_every_step(|cluster| {
        cluster.store.delete_class("flip");
        cluster.run_for(20 * SECOND);
        cluster.set_class("flip", DRIVER);
    });
}

#[test]
fn the_controller_may_be_killed_at_any_moment() {
    at_every_step(Cluster::crash);
}

#[test]
fn the_controller_of_a_durable_driver_may_be_killed_anytime() {
    at_every_step(|cluster| {
        cluster.durable_driver = true;
        cluster.crash();
    });
}

#[test]
fn all_may_be_deleted_while_the_controller_is_down() {
    at_every_step(|cluster| {
        cluster.crash();
        for name in ["p", "q"] {
            cluster.store.remove_pod(&key(name));
            for claim in claims_of(cluster, name) {
                cluster.store.delete_claim(&claim);
            }
        }
        cluster.store.delete_class("flip");
    });
}

#[test]
fn a_claim_may_get_a_foreign_finalizer_at_any_moment() {
    at_every_step(|cluster| {
        for claim in claims_of(cluster, "p") {
            let _ = cluster.store.update_claim(&claim, None, Endpoint::Main, |claim| {
                let finalizers = claim.metadata.finalizers.get_or_insert_default();
                finalizers.push(crate::users::STRANGE_FINALIZER.to_owned());
                Ok(())
            });
        }
        cluster.store.delete_pod(&key("p"));
        cluster.run_for(20 * SECOND);
    });
}
