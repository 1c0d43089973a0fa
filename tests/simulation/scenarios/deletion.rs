//! Somebody does something at every step of a life.

use drayman::api::resource::AllocationMode;
use drayman::core::claims::ObjectKey;

use super::{calm, end_pod, expect_well, key};
use crate::driver::{DRIVER, OTHER_DRIVER};
use crate::stage::{SECOND, Stage};
use crate::store::{Endpoint, KINDS, Kind};
use crate::users::Use;

fn begin() -> Stage {
    let mut stage = calm(&[("node-a", 1), ("node-b", 2)]);
    stage.patient_scheduler = false;
    stage.set_class("flip", DRIVER);
    stage.create_pod(&key("p"), &[Use::Template("flip"), Use::Template("gpu")], None);
    stage.create_pod(&key("q"), &[Use::Template("gpu")], None);
    stage
}

/// Runs the same life once for every step of it, with `act` at that step.
fn at_every_step(act: impl Fn(&mut Stage)) {
    let mut whole = begin();
    whole.run_for(30 * SECOND);
    end_pod(&mut whole, "p");
    whole.run_for(30 * SECOND);
    let steps = whole.steps;
    assert!(steps > 100, "{steps}");
    let first = begin().steps;
    for step in first..=steps {
        let mut stage = begin();
        let half = stage.now + 30 * SECOND;
        let end = half + 30 * SECOND;
        while stage.steps < step && stage.step(half) {}
        if stage.steps < step {
            stage.now = half;
            end_pod(&mut stage, "p");
            stage.wake_scheduler();
            while stage.steps < step && stage.step(end) {}
        }
        act(&mut stage);
        stage.feed_watches();
        let stage = expect_well(stage);
        let refused = stage
            .reports
            .iter()
            .find(|report| report.reason == "ReleaseRefused");
        assert_eq!(refused, None, "step {step}");
    }
}

fn claims_of(stage: &Stage, pod: &str) -> Vec<ObjectKey> {
    let claims = stage.store.claims.keys();
    claims
        .filter(|claim| claim.name.starts_with(pod))
        .cloned()
        .collect()
}

#[test]
fn a_claim_may_be_deleted_at_any_moment() {
    at_every_step(|stage| {
        for claim in claims_of(stage, "p") {
            stage.store.delete_claim(&claim);
        }
    });
}

#[test]
fn a_pod_may_be_deleted_at_any_moment() {
    at_every_step(|stage| stage.store.delete_pod(&key("p")));
}

#[test]
fn a_pod_may_be_made_again_under_the_same_name_at_any_moment() {
    at_every_step(|stage| {
        stage.store.remove_pod(&key("p"));
        stage.create_pod(&key("p"), &[Use::Template("gpu"), Use::Template("gpu")], None);
    });
}

#[test]
fn a_claim_may_be_replaced_while_the_watch_is_away() {
    at_every_step(|stage| {
        stage.hold_watch(Kind::Claim);
        for key in claims_of(stage, "p") {
            let claim = stage.store.claims[&key].clone();
            let _ = stage.store.update_claim(&key, None, Endpoint::Main, |claim| {
                claim.metadata.finalizers = None;
                Ok(())
            });
            stage.store.delete_claim(&key);
            let mut again = (*claim).clone();
            again.metadata.finalizers = None;
            again.metadata.deletion_timestamp = None;
            stage.store.create_claim(again).unwrap();
        }
        stage.relist(Kind::Claim);
    });
}

#[test]
fn a_claim_may_be_replaced_by_a_foreign_one_at_any_time() {
    at_every_step(|stage| {
        for key in claims_of(stage, "p") {
            let _ = stage.store.update_claim(&key, None, Endpoint::Main, |claim| {
                claim.metadata.finalizers = None;
                Ok(())
            });
            stage.store.delete_claim(&key);
            stage.create_claim(&key, "gpu", AllocationMode::WaitForFirstConsumer);
        }
    });
}

#[test]
fn a_context_may_be_deleted_at_any_moment() {
    at_every_step(|stage| stage.store.delete_context(&key("p")));
}

#[test]
fn the_selected_node_may_change_at_any_moment() {
    at_every_step(|stage| {
        let _ = stage.store.update_context(&key("p"), None, |context| {
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
    at_every_step(|stage| {
        for kind in KINDS {
            stage.relist(kind);
        }
    });
}

#[test]
fn a_class_may_be_repointed_at_any_moment() {
    at_every_step(|stage| stage.set_class("flip", OTHER_DRIVER));
}

#[test]
fn a_class_may_be_deleted_at_any_moment_and_made_again() {
    at_every_step(|stage| {
        stage.store.delete_class("flip");
        stage.run_for(20 * SECOND);
        stage.set_class("flip", DRIVER);
    });
}

#[test]
fn the_controller_may_be_killed_at_any_moment() {
    at_every_step(Stage::crash);
}

#[test]
fn the_controller_of_a_durable_driver_may_be_killed_anytime() {
    at_every_step(|stage| {
        stage.lasting_driver = true;
        stage.crash();
    });
}

#[test]
fn all_may_be_deleted_while_the_controller_is_down() {
    at_every_step(|stage| {
        stage.crash();
        for name in ["p", "q"] {
            stage.store.remove_pod(&key(name));
            for claim in claims_of(stage, name) {
                stage.store.delete_claim(&claim);
            }
        }
        stage.store.delete_class("flip");
    });
}

#[test]
fn somebody_may_put_a_finalizer_on_a_claim_at_any_moment() {
    at_every_step(|stage| {
        for claim in claims_of(stage, "p") {
            let _ = stage.store.update_claim(&claim, None, Endpoint::Main, |claim| {
                let finalizers = claim.metadata.finalizers.get_or_insert_default();
                finalizers.push(crate::users::STRANGE_FINALIZER.to_owned());
                Ok(())
            });
        }
        stage.store.delete_pod(&key("p"));
        stage.run_for(20 * SECOND);
    });
}
