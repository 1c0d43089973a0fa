//! Deallocation of claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use drayman::driver::DriverError;
use kube::api::DeleteParams;
use serde_json::json;

use crate::call::{Request, count};
use crate::fake_driver::{Action, FakeDriver};
use crate::fixture::{Fixture, finalizers, is_allocated, rules, with_fixture};
use crate::objects::patch_status;

/// Creates an allocated claim without users.
async fn allocated(fixture: &Fixture, name: &str) -> anyhow::Result<()> {
    fixture.immediate(name).await?;
    fixture.wait_until_allocated(name).await.map(drop)
}

#[test]
fn a_claim_in_use_is_never_deallocated() -> anyhow::Result<()> {
    with_fixture("in-use", async |fixture| {
        let controller = fixture.start().await?;
        fixture.waiting_pod("pod", &["one"], "node", &[]).await?;
        fixture.wait_until_allocated("one").await?;
        fixture.delete_claim("one").await?;
        fixture.fence().await?;
        let claim = fixture.claims().get("one").await?;
        assert!(claim.metadata.deletion_timestamp.is_some() && is_allocated(&claim));
        assert_eq!(fixture.driver.call_summaries(), ["evaluate one", "allocate one"]);
        // The claim controller removes the pod from `reservedFor`.
        fixture.remove_pod("pod").await?;
        fixture.wait_until_gone("one").await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            ["evaluate one", "allocate one", "deallocate one"]
        );
        fixture.driver.wait_for_counts((1, 1)).await?;
        controller.stop().await
    })
}

#[test]
fn without_our_finalizer_only_claims_naming_us_are_released() -> anyhow::Result<()> {
    with_fixture("no-finalizer", async |fixture| {
        let controller = fixture.start().await?;
        let other = "other.example.com/deletion-protection";
        fixture
            .create_claim(json!({ "metadata": { "name": "one", "finalizers": [other] } }))
            .await?;
        fixture
            .patch_claim_status(
                "one",
                json!({ "driverName": fixture.driver_name(), "allocation": {} }),
            )
            .await?;
        fixture
            .patch_claim_status("one", json!({ "deallocationRequested": true }))
            .await?;
        fixture.delete_claim("one").await?;
        fixture
            .create_claim(json!({ "metadata": { "name": "two", "finalizers": [other] } }))
            .await?;
        fixture.delete_claim("two").await?;
        // The first claim has our driver name, as the last write of an earlier leader may leave it.
        let claim = fixture
            .wait_for_claim("one", "deallocated", |claim| !is_allocated(claim))
            .await?;
        assert_eq!(finalizers(&claim), [other]);
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), ["deallocate one"]);
        assert_eq!(
            fixture.requests(&controller).await?,
            ["patch resourceclaims/status 200"]
        );
        // Without a finalizer even an allocated claim is deleted immediately; the driver observes that.
        fixture.claim("three").await?;
        fixture
            .patch_claim_status(
                "three",
                json!({ "driverName": fixture.driver_name(), "allocation": {} }),
            )
            .await?;
        fixture.delete_claim("three").await?;
        fixture.wait_until_gone("three").await?;
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), ["deallocate one"]);
        controller.stop().await
    })
}

#[test]
fn deallocation_clears_all_in_one_write_then_our_finalizer() -> anyhow::Result<()> {
    with_fixture("requested", async |fixture| {
        let controller = fixture.start().await?;
        let other = "other.example.com/protection";
        let spec = json!({ "resourceClassName": fixture.name, "allocationMode": "Immediate" });
        fixture
            .create_claim(json!({ "metadata": { "name": "one", "finalizers": [other] }, "spec": spec }))
            .await?;
        let before = fixture.wait_until_allocated("one").await?;
        fixture
            .patch_claim_status("one", json!({ "deallocationRequested": true }))
            .await?;
        // Afterwards the immediate claim is allocated again.
        fixture
            .wait_for_claim("one", "allocated again", |claim| {
                is_allocated(claim) && !claim.status.deallocation_requested
            })
            .await?;
        fixture.fence().await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            ["allocate one", "deallocate one", "allocate one"]
        );
        let deallocate = fixture
            .driver
            .calls()
            .into_iter()
            .find_map(|call| match call.request {
                Request::Deallocate { allocation, .. } => Some(allocation),
                _ => None,
            });
        assert_eq!(
            deallocate,
            Some(before.status.allocation),
            "the driver receives the allocation"
        );
        assert_eq!(
            fixture.requests(&controller).await?,
            [
                "patch resourceclaims 200",
                "patch resourceclaims/status 200",
                "patch resourceclaims/status 200",
                "patch resourceclaims 200",
                "patch resourceclaims 200",
                "patch resourceclaims/status 200",
            ]
        );
        let ours = fixture.finalizer();
        let seen: Vec<_> = fixture
            .versions("one")
            .await?
            .iter()
            .map(|claim| {
                let status = &claim.status;
                let finalizer = finalizers(claim).contains(&ours.as_str());
                assert!(finalizers(claim).contains(&other), "foreign finalizers stay");
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
        controller.stop().await
    })
}

#[test]
fn a_deleted_claim_is_deallocated_before_our_finalizer_goes() -> anyhow::Result<()> {
    with_fixture("deleted", async |fixture| {
        let controller = fixture.start().await?;
        // If our finalizer is the last one, a single write removes the claim with its allocation.
        allocated(fixture, "alone").await?;
        fixture.delete_claim("alone").await?;
        fixture.wait_until_gone("alone").await?;
        // A watch event may precede the audit log entry.
        fixture.fence().await?;
        let requests = fixture.requests(&controller).await?;
        assert_eq!(
            requests.last().map(String::as_str),
            Some("patch resourceclaims 200")
        );
        assert_eq!(requests.len(), 3, "{requests:?}");
        // With a foreign finalizer, the allocation is cleared first.
        let other = "other.example.com/protection";
        let spec = json!({ "resourceClassName": fixture.name, "allocationMode": "Immediate" });
        fixture
            .create_claim(json!({ "metadata": { "name": "kept", "finalizers": [other] }, "spec": spec }))
            .await?;
        fixture.wait_until_allocated("kept").await?;
        fixture.delete_claim("kept").await?;
        let claim = fixture
            .wait_for_claim("kept", "released", |claim| finalizers(claim) == [other])
            .await?;
        assert!(!is_allocated(&claim) && claim.status.driver_name.is_none());
        fixture.fence().await?;
        let end = [
            "allocate alone",
            "deallocate alone",
            "allocate kept",
            "deallocate kept",
        ];
        assert_eq!(
            fixture.driver.call_summaries(),
            end,
            "no further calls although the claim still exists"
        );
        controller.stop().await
    })
}

#[test]
fn a_claim_that_was_never_allocated_is_deallocated_too() -> anyhow::Result<()> {
    with_fixture("never-allocated", async |fixture| {
        fixture.driver.on(
            Request::is_allocate,
            Action::Fail(DriverError::invalid("Broken", "no")),
        );
        let controller = fixture.start().await?;
        fixture.immediate("one").await?;
        fixture.wait_for_event("one", "Broken", "no").await?;
        let before = count(&fixture.driver.calls(), Request::is_deallocate);
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        let calls = fixture.driver.calls();
        assert_eq!(count(&calls, Request::is_deallocate), before + 1);
        assert!(matches!(
            &calls[calls.len() - 1].request,
            Request::Deallocate { allocation: None, .. }
        ));
        controller.stop().await
    })
}

#[test]
fn a_failed_deallocation_is_reported_and_retried() -> anyhow::Result<()> {
    with_fixture("stuck", async |fixture| {
        let controller = fixture.start().await?;
        allocated(fixture, "one").await?;
        fixture.driver.on(
            Request::is_deallocate,
            Action::Fail(DriverError::retry("Stuck", "the device is busy")),
        );
        fixture.delete_claim("one").await?;
        fixture
            .wait_for_event("one", "Stuck", "the device is busy")
            .await?;
        fixture.wait_for_calls("deallocate", 3..).await?;
        let claim = fixture.claims().get("one").await?;
        assert!(is_allocated(&claim) && finalizers(&claim) == [fixture.finalizer()]);
        assert_eq!(
            fixture.requests(&controller).await?.len(),
            2,
            "the allocation's writes only"
        );
        fixture.driver.clear_rule();
        fixture.wait_until_gone("one").await?;
        assert_eq!(fixture.events("one").await?.len(), 1);
        controller.stop().await
    })
}

#[test]
fn a_refused_release_is_retried_until_the_finalizer_is_gone() -> anyhow::Result<()> {
    with_fixture("refused-release", async |fixture| {
        let controller = fixture.start().await?;
        fixture.waiting_pod("pod", &["one"], "node", &[]).await?;
        fixture.wait_until_allocated("one").await?;

        // At first the status cannot be cleared.
        fixture
            .forbid(&controller, "resourceclaims/status", "patch")
            .await?;
        fixture.contexts().delete("pod", &DeleteParams::default()).await?;
        fixture.remove_pod("pod").await?;
        fixture.request_deallocation("one").await?;
        fixture
            .wait_for_event("one", "ReleaseRefused", "forbidden")
            .await?;
        assert!(is_allocated(&fixture.claims().get("one").await?));
        fixture.wait_for_calls("deallocate", 2..).await?;
        // Then the status can be cleared, but the finalizer of the deallocated claim cannot be removed.
        fixture.forbid(&controller, "resourceclaims", "patch").await?;
        let claim = fixture
            .wait_for_claim("one", "cleared", |claim| !is_allocated(claim))
            .await?;
        assert_eq!(finalizers(&claim), [fixture.finalizer()]);
        assert!(!claim.status.deallocation_requested && claim.metadata.deletion_timestamp.is_none());
        fixture.allow(&controller).await?;
        fixture
            .wait_for_claim("one", "released", |claim| finalizers(claim).is_empty())
            .await?;
        fixture.driver.wait_for_counts((1, 1)).await?;
        controller.stop().await
    })
}

#[test]
fn a_claim_cleared_by_others_meanwhile_is_released_silently() -> anyhow::Result<()> {
    with_fixture("cleared-meanwhile", async |fixture| {
        let claims = fixture.claims();
        // The first patch allocates, the second one clears.
        let status_patches = Arc::new(AtomicUsize::new(0));
        let sent = status_patches.clone();
        let controller = fixture
            .start_intercepted(&rules(), move |request| {
                let claims = claims.clone();
                let is_patch = request.contains("/status") && request.contains("json-patch");
                let now = is_patch && sent.fetch_add(1, Ordering::Relaxed) == 1;
                async move {
                    if now {
                        let nothing =
                            json!({ "allocation": null, "driverName": null, "deallocationRequested": null });
                        let cleared = patch_status(&claims, "one", nothing).await;
                        cleared.expect("the claim is cleared");
                    }
                }
            })
            .await?;
        fixture.waiting_pod("pod", &["one"], "node", &[]).await?;
        fixture.wait_until_allocated("one").await?;
        fixture.contexts().delete("pod", &DeleteParams::default()).await?;
        // The claim controller removes the pod from `reservedFor` and requests deallocation.
        fixture.remove_pod("pod").await?;
        fixture.request_deallocation("one").await?;
        fixture
            .wait_for_claim("one", "released", |claim| {
                finalizers(claim).is_empty() && !is_allocated(claim)
            })
            .await?;
        assert!(status_patches.load(Ordering::Relaxed) >= 2);
        let requests = fixture.requests(&controller).await?;
        assert!(
            requests.contains(&"patch resourceclaims/status 422".to_owned()),
            "{requests:?}"
        );
        assert_eq!(fixture.events("one").await?, [], "a conflict is not reported");
        fixture.driver.wait_for_counts((1, 1)).await?;
        controller.stop().await
    })
}

#[test]
fn a_claim_is_deallocated_without_a_class_of_ours() -> anyhow::Result<()> {
    with_fixture("class-gone", async |fixture| {
        let controller = fixture.start().await?;
        fixture.make_class("goes", json!({})).await?;
        fixture.make_class("turns", json!({})).await?;
        for class in ["goes", "turns"] {
            fixture
                .claim_of(
                    class,
                    json!({ "resourceClassName": class, "allocationMode": "Immediate" }),
                )
                .await?;
            fixture.wait_until_allocated(class).await?;
        }
        fixture.classes().delete("goes", &DeleteParams::default()).await?;
        fixture
            .patch_class("turns", json!({ "driverName": "other.example.com" }))
            .await?;
        for class in ["goes", "turns"] {
            fixture.delete_claim(class).await?;
            fixture.wait_until_gone(class).await?;
        }
        fixture.driver.wait_for_counts((2, 2)).await?;
        controller.stop().await
    })
}

#[test]
fn the_previous_driver_of_a_class_ignores_new_allocations() -> anyhow::Result<()> {
    with_fixture("two-finalizers", async |fixture| {
        fixture.driver.on(
            Request::is_allocate,
            Action::Fail(DriverError::invalid("Broken", "no")),
        );
        let first = fixture.start().await?;
        let new = format!("new.{}", fixture.driver_name());
        let driver = FakeDriver::new(&new);
        let second = fixture
            .start_as("-new", &driver, &crate::fixture::rules(), |builder| builder)
            .await?;
        fixture.immediate("one").await?;
        fixture.wait_for_event("one", "Broken", "no").await?;
        let deallocations = count(&fixture.driver.calls(), Request::is_deallocate);
        fixture
            .patch_class(&fixture.name, json!({ "driverName": new }))
            .await?;
        let claim = fixture.wait_until_allocated("one").await?;
        assert_eq!(claim.status.driver_name.as_deref(), Some(new.as_str()));
        assert!(finalizers(&claim).contains(&format!("{new}/deletion-protection").as_str()));

        // The new driver cannot release it yet, so that the actions of the old driver are visible alone.
        let stuck = Arc::new(AtomicBool::new(true));
        let is_stuck = stuck.clone();
        driver.rule(move |request| match request {
            Request::Deallocate { .. } if is_stuck.load(Ordering::SeqCst) => {
                Action::Fail(DriverError::retry("Stuck", "wait"))
            }
            _ => Action::Proceed,
        });
        fixture.delete_claim("one").await?;
        let ours = fixture.finalizer();
        let claim = fixture
            .wait_for_claim("one", "left by the old driver", |claim| {
                !finalizers(claim).contains(&ours.as_str())
            })
            .await?;
        assert!(
            is_allocated(&claim),
            "the old driver cleared a foreign allocation"
        );
        assert!(
            fixture.driver.calls()[deallocations..]
                .iter()
                .all(|call| !matches!(
                    &call.request,
                    Request::Deallocate {
                        allocation: Some(_),
                        ..
                    }
                )),
            "the old driver does not receive the allocation of the new one"
        );
        stuck.store(false, Ordering::SeqCst);
        fixture.wait_until_gone("one").await?;
        driver.wait_for_counts((1, 1)).await?;
        first.stop().await?;
        second.stop().await
    })
}
