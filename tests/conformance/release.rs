//! Claims that are to hold nothing any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use drayman::driver::DriverError;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::call::{What, count};
use crate::objects::From;
use crate::script::{Act, Script};
use crate::stage::{Stage, finalizers, is_allocated, on_stage, rules};

/// A claim, allocated and in no use.
async fn allocated(stage: &Stage, name: &str) -> anyhow::Result<()> {
    stage.immediate(name).await?;
    stage.until_claim(name, "allocated", is_allocated).await.map(drop)
}

#[test]
fn a_claim_in_use_is_never_taken_back() -> anyhow::Result<()> {
    on_stage("in-use", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        stage.delete_claim("one").await?;
        stage.fence().await?;
        let claim = stage.claims().get("one").await?;
        assert!(claim.metadata.deletion_timestamp.is_some() && is_allocated(&claim));
        assert_eq!(stage.driver.story(), ["judge one", "allocate one"]);
        // The claim controller takes the pod out of reservedFor.
        stage.remove_pod("pod").await?;
        stage.until_gone("one").await?;
        assert_eq!(
            stage.driver.story(),
            ["judge one", "allocate one", "deallocate one"]
        );
        stage.driver.until_counts((1, 1)).await?;
        controller.end().await
    })
}

#[test]
fn without_our_finalizer_only_claims_naming_us_are_released() -> anyhow::Result<()> {
    on_stage("no-finalizer", async |stage| {
        let controller = stage.start().await?;
        let other = "somebody.example.com/deletion-protection";
        stage
            .create_claim(json!({ "metadata": { "name": "one", "finalizers": [other] } }))
            .await?;
        stage
            .patch_claim_status(
                "one",
                json!({ "driverName": stage.driver_name(), "allocation": {} }),
            )
            .await?;
        stage
            .patch_claim_status("one", json!({ "deallocationRequested": true }))
            .await?;
        stage.delete_claim("one").await?;
        stage
            .create_claim(json!({ "metadata": { "name": "two", "finalizers": [other] } }))
            .await?;
        stage.delete_claim("two").await?;
        // The first one is recorded as ours, as an earlier leader's last write may have left it.
        let claim = stage
            .until_claim("one", "given back", |claim| !is_allocated(claim))
            .await?;
        assert_eq!(finalizers(&claim), [other]);
        stage.fence().await?;
        assert_eq!(stage.driver.story(), ["deallocate one"]);
        assert_eq!(
            stage.requests(&controller).await?,
            ["patch resourceclaims/status 200"]
        );
        // Without any finalizer a claim goes at once, even an allocated one; the driver is told.
        stage.claim("three").await?;
        stage
            .patch_claim_status(
                "three",
                json!({ "driverName": stage.driver_name(), "allocation": {} }),
            )
            .await?;
        stage.delete_claim("three").await?;
        stage.until_gone("three").await?;
        stage.fence().await?;
        assert_eq!(stage.driver.story(), ["deallocate one"]);
        controller.end().await
    })
}

#[test]
fn deallocation_clears_all_in_one_write_then_our_finalizer() -> anyhow::Result<()> {
    on_stage("requested", async |stage| {
        let controller = stage.start().await?;
        let other = "somebody.example.com/protection";
        let spec = json!({ "resourceClassName": stage.name, "allocationMode": "Immediate" });
        stage
            .create_claim(json!({ "metadata": { "name": "one", "finalizers": [other] }, "spec": spec }))
            .await?;
        let before = stage.until_claim("one", "allocated", is_allocated).await?;
        stage
            .patch_claim_status("one", json!({ "deallocationRequested": true }))
            .await?;
        // An immediate claim is allocated anew afterwards.
        stage
            .until_claim("one", "allocated anew", |claim| {
                is_allocated(claim) && !claim.status.deallocation_requested
            })
            .await?;
        stage.fence().await?;
        assert_eq!(
            stage.driver.story(),
            ["allocate one", "deallocate one", "allocate one"]
        );
        let deallocate = stage.driver.calls().into_iter().find_map(|call| match call.what {
            What::Deallocate { allocation, .. } => Some(allocation),
            _ => None,
        });
        assert_eq!(
            deallocate,
            Some(before.status.allocation),
            "the driver gets what was allocated"
        );
        assert_eq!(
            stage.requests(&controller).await?,
            [
                "patch resourceclaims 200",
                "patch resourceclaims/status 200",
                "patch resourceclaims/status 200",
                "patch resourceclaims 200",
                "patch resourceclaims 200",
                "patch resourceclaims/status 200",
            ]
        );
        let ours = stage.finalizer();
        let seen: Vec<_> = stage
            .versions("one")
            .await?
            .iter()
            .map(|claim| {
                let status = &claim.status;
                let finalizer = finalizers(claim).contains(&ours.as_str());
                assert!(finalizers(claim).contains(&other), "another's finalizer stays");
                (
                    finalizer,
                    is_allocated(claim),
                    status.driver_name.is_some(),
                    status.deallocation_requested,
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                (false, false, false, false),
                (true, false, false, false),
                (true, true, true, false),
                (true, true, true, true),
                (true, false, false, false),
                (false, false, false, false),
                (true, false, false, false),
                (true, true, true, false),
            ]
        );
        controller.end().await
    })
}

#[test]
fn a_deleted_claim_is_given_back_and_then_our_finalizer_goes() -> anyhow::Result<()> {
    on_stage("deleted", async |stage| {
        let controller = stage.start().await?;
        // With our finalizer as its last one the claim goes in one write, allocation and all.
        allocated(stage, "alone").await?;
        stage.delete_claim("alone").await?;
        stage.until_gone("alone").await?;
        // A watch may tell of a write before the audit log does.
        stage.fence().await?;
        let requests = stage.requests(&controller).await?;
        assert_eq!(
            requests.last().map(String::as_str),
            Some("patch resourceclaims 200")
        );
        assert_eq!(requests.len(), 3, "{requests:?}");
        // With another's, the allocation is cleared first.
        let other = "somebody.example.com/protection";
        let spec = json!({ "resourceClassName": stage.name, "allocationMode": "Immediate" });
        stage
            .create_claim(json!({ "metadata": { "name": "kept", "finalizers": [other] }, "spec": spec }))
            .await?;
        stage.until_claim("kept", "allocated", is_allocated).await?;
        stage.delete_claim("kept").await?;
        let claim = stage
            .until_claim("kept", "released", |claim| finalizers(claim) == [other])
            .await?;
        assert!(!is_allocated(&claim) && claim.status.driver_name.is_none());
        stage.fence().await?;
        let end = [
            "allocate alone",
            "deallocate alone",
            "allocate kept",
            "deallocate kept",
        ];
        assert_eq!(stage.driver.story(), end, "and no more, though it is still there");
        controller.end().await
    })
}

#[test]
fn a_claim_that_was_never_allocated_is_given_back_too() -> anyhow::Result<()> {
    on_stage("never-allocated", async |stage| {
        stage.driver.rule(|what| match what {
            What::Allocate { .. } => Act::Fail(DriverError::invalid("Broken", "no")),
            _ => Act::Go,
        });
        let controller = stage.start().await?;
        stage.immediate("one").await?;
        stage.event("one", "Broken", "no").await?;
        let before = count(&stage.driver.calls(), What::is_deallocate);
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        let calls = stage.driver.calls();
        assert_eq!(count(&calls, What::is_deallocate), before + 1);
        assert!(matches!(
            &calls[calls.len() - 1].what,
            What::Deallocate { allocation: None, .. }
        ));
        controller.end().await
    })
}

#[test]
fn a_failed_deallocation_is_reported_and_retried() -> anyhow::Result<()> {
    on_stage("stuck", async |stage| {
        let controller = stage.start().await?;
        allocated(stage, "one").await?;
        stage.driver.rule(|what| match what {
            What::Deallocate { .. } => Act::Fail(DriverError::retry("Stuck", "the device is busy")),
            _ => Act::Go,
        });
        stage.delete_claim("one").await?;
        stage.event("one", "Stuck", "the device is busy").await?;
        stage
            .driver
            .until("deallocate thrice", |calls| {
                count(calls, What::is_deallocate) >= 3
            })
            .await?;
        let claim = stage.claims().get("one").await?;
        assert!(is_allocated(&claim) && finalizers(&claim) == [stage.finalizer()]);
        assert_eq!(
            stage.requests(&controller).await?.len(),
            2,
            "the allocation's writes only"
        );
        stage.driver.behave();
        stage.until_gone("one").await?;
        assert_eq!(stage.events("one").await?.len(), 1);
        controller.end().await
    })
}

#[test]
fn a_refused_release_is_retried_until_the_finalizer_is_gone() -> anyhow::Result<()> {
    on_stage("refused-release", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;

        // First the status cannot be cleared.
        stage
            .forbid(&controller, "resourceclaims/status", "patch")
            .await?;
        stage.contexts().delete("pod", &DeleteParams::default()).await?;
        stage.remove_pod("pod").await?;
        stage.give_up("one").await?;
        stage.event("one", "ReleaseRefused", "forbidden").await?;
        assert!(is_allocated(&stage.claims().get("one").await?));
        stage
            .driver
            .until("deallocate again", |calls| count(calls, What::is_deallocate) >= 2)
            .await?;
        // Then it can, but the finalizer cannot be removed from a claim that asks for nothing any more.
        stage.forbid(&controller, "resourceclaims", "patch").await?;
        let claim = stage
            .until_claim("one", "cleared", |claim| !is_allocated(claim))
            .await?;
        assert_eq!(finalizers(&claim), [stage.finalizer()]);
        assert!(!claim.status.deallocation_requested && claim.metadata.deletion_timestamp.is_none());
        stage.allow(&controller).await?;
        stage
            .until_claim("one", "released", |claim| finalizers(claim).is_empty())
            .await?;
        stage.driver.until_counts((1, 1)).await?;
        controller.end().await
    })
}

#[test]
fn a_claim_cleared_by_others_meanwhile_is_released_silently() -> anyhow::Result<()> {
    on_stage("cleared-meanwhile", async |stage| {
        let claims = stage.claims();
        // The first allocates, the second clears.
        let status_patches = Arc::new(AtomicUsize::new(0));
        let sent = status_patches.clone();
        let controller = stage
            .start_behind(&rules(), move |request| {
                let claims = claims.clone();
                let is_patch = request.contains("/status") && request.contains("json-patch");
                let now = is_patch && sent.fetch_add(1, Ordering::Relaxed) == 1;
                async move {
                    if now {
                        let nothing =
                            json!({ "allocation": null, "driverName": null, "deallocationRequested": null });
                        let nothing = Patch::Merge(json!({ "status": nothing }));
                        let cleared = claims
                            .patch_status("one", &PatchParams::default(), &nothing)
                            .await;
                        cleared.expect("it may be cleared");
                    }
                }
            })
            .await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        stage.contexts().delete("pod", &DeleteParams::default()).await?;
        // The claim controller takes the pod out of reservedFor and asks for the claim back.
        stage.remove_pod("pod").await?;
        stage.give_up("one").await?;
        stage
            .until_claim("one", "released", |claim| {
                finalizers(claim).is_empty() && !is_allocated(claim)
            })
            .await?;
        assert!(status_patches.load(Ordering::Relaxed) >= 2);
        let requests = stage.requests(&controller).await?;
        assert!(
            requests.contains(&"patch resourceclaims/status 422".to_owned()),
            "{requests:?}"
        );
        assert_eq!(stage.events("one").await?, [], "a conflict is nobody's fault");
        stage.driver.until_counts((1, 1)).await?;
        controller.end().await
    })
}

#[test]
fn a_claim_is_given_back_when_its_class_is_gone_or_another_s() -> anyhow::Result<()> {
    on_stage("class-gone", async |stage| {
        let controller = stage.start().await?;
        stage.make_class("goes", json!({})).await?;
        stage.make_class("turns", json!({})).await?;
        for class in ["goes", "turns"] {
            stage
                .claim_of(
                    class,
                    json!({ "resourceClassName": class, "allocationMode": "Immediate" }),
                )
                .await?;
            stage.until_claim(class, "allocated", is_allocated).await?;
        }
        stage.classes().delete("goes", &DeleteParams::default()).await?;
        stage
            .patch_class("turns", json!({ "driverName": "somebody.example.com" }))
            .await?;
        for class in ["goes", "turns"] {
            stage.delete_claim(class).await?;
            stage.until_gone(class).await?;
        }
        stage.driver.until_counts((2, 2)).await?;
        controller.end().await
    })
}

#[test]
fn the_former_driver_of_a_class_leaves_new_allocations_alone() -> anyhow::Result<()> {
    on_stage("two-finalizers", async |stage| {
        stage.driver.rule(|what| match what {
            What::Allocate { .. } => Act::Fail(DriverError::invalid("Broken", "no")),
            _ => Act::Go,
        });
        let first = stage.start().await?;
        let new = format!("new.{}", stage.driver_name());
        let driver = Script::new(&new);
        let second = stage
            .start_as("-new", &driver, &crate::stage::rules(), |builder| builder)
            .await?;
        stage.immediate("one").await?;
        stage.event("one", "Broken", "no").await?;
        let given_back = count(&stage.driver.calls(), What::is_deallocate);
        stage
            .patch_class(&stage.name, json!({ "driverName": new }))
            .await?;
        let claim = stage.until_claim("one", "allocated", is_allocated).await?;
        assert_eq!(claim.status.driver_name.as_deref(), Some(new.as_str()));
        assert!(finalizers(&claim).contains(&format!("{new}/deletion-protection").as_str()));

        // The new driver cannot give it back yet: so what the old one does is seen alone.
        let stuck = Arc::new(AtomicBool::new(true));
        let is_stuck = stuck.clone();
        driver.rule(move |what| match what {
            What::Deallocate { .. } if is_stuck.load(Ordering::SeqCst) => {
                Act::Fail(DriverError::retry("Stuck", "wait"))
            }
            _ => Act::Go,
        });
        stage.delete_claim("one").await?;
        let ours = stage.finalizer();
        let claim = stage
            .until_claim("one", "left by the old driver", |claim| {
                !finalizers(claim).contains(&ours.as_str())
            })
            .await?;
        assert!(
            is_allocated(&claim),
            "the old driver has cleared what is not its own"
        );
        assert!(
            stage.driver.calls()[given_back..].iter().all(|call| !matches!(
                &call.what,
                What::Deallocate {
                    allocation: Some(_),
                    ..
                }
            )),
            "the old driver is not given the new one's allocation"
        );
        stuck.store(false, Ordering::SeqCst);
        stage.until_gone("one").await?;
        driver.until_counts((1, 1)).await?;
        first.end().await?;
        second.end().await
    })
}
