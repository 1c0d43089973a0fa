//! Rollback when one claim of a pod cannot be recorded after another one has been. The test acts as the scheduler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::call::Request;
use crate::fixture::{finalizers, is_allocated, rules_without, with_fixture};
use crate::harness::rule;
use crate::objects::ClaimSource;

/// Permissions of a controller that may change the status of the claim `one` only.
fn only_one() -> Vec<PolicyRule> {
    let mut rules = rules_without("resourceclaims/status", "patch");
    let mut only_one = rule(&["resource.k8s.io"], &["resourceclaims/status"], &["patch"]);
    only_one.resource_names = Some(vec!["one".to_owned()]);
    rules.push(only_one);
    rules
}

#[test]
fn a_rollback_clears_allocation_and_reservation_in_one_write() -> anyhow::Result<()> {
    with_fixture("rolled-back", async |fixture| {
        let controller = fixture.start_with(&only_one()).await?;
        fixture.waiting_pod("pod", &["one", "two"], "node", &[]).await?;
        fixture
            .wait_for_event("pod", "AllocationNotRecorded", "forbidden")
            .await?;
        // The transaction is retried with a growing delay, and the refused claim is written first.
        fixture.wait_for_calls("allocate", 4..).await?;
        let seen: Vec<_> = fixture
            .versions("one")
            .await?
            .iter()
            .map(|claim| {
                let status = &claim.status;
                assert_eq!(status.driver_name.is_some(), is_allocated(claim));
                (
                    finalizers(claim).len(),
                    is_allocated(claim),
                    status.reserved_for.len(),
                )
            })
            .collect();
        assert_eq!(seen, [(0, false, 0), (1, false, 0), (1, true, 1), (1, false, 0)]);
        let rolled_back = fixture
            .driver
            .calls()
            .into_iter()
            .find_map(|call| match call.request {
                Request::Deallocate { claim, allocation }
                    if claim.metadata.name.as_deref() == Some("one") =>
                {
                    Some((is_allocated(&claim), allocation.is_some()))
                }
                _ => None,
            });
        assert_eq!(
            rolled_back,
            Some((false, true)),
            "the driver is called after the recorded allocation is cleared"
        );
        assert_eq!(fixture.events("pod").await?.len(), 1);
        fixture.allow(&controller).await?;
        for name in ["one", "two"] {
            fixture.wait_until_allocated(name).await?;
        }
        let (allocated, released) = fixture.driver.counts();
        assert_eq!(allocated, released + 2);
        controller.stop().await
    })
}

#[test]
fn a_claim_used_by_another_pod_is_not_rolled_back() -> anyhow::Result<()> {
    with_fixture("roll-back-too-late", async |fixture| {
        fixture.driver.shareable();
        let other = fixture
            .pod("other", &[("device", ClaimSource::Claim("one"))])
            .await?;
        let claims = fixture.claims();
        // The first patch allocates, the second one rolls back.
        let status_patches = Arc::new(AtomicUsize::new(0));
        let uid = other.metadata.uid.clone();
        let sent = status_patches.clone();
        let controller = fixture
            .start_intercepted(&only_one(), move |request| {
                let (claims, uid) = (claims.clone(), uid.clone());
                let is_patch =
                    request.contains("/resourceclaims/one/status") && request.contains("json-patch");
                let now = is_patch && sent.fetch_add(1, Ordering::Relaxed) == 1;
                async move {
                    if now {
                        let user = json!({ "resource": "pods", "name": "other", "uid": uid });
                        let add = json!([{ "op": "add", "path": "/status/reservedFor/-", "value": user }]);
                        let add = serde_json::from_value(add).expect("a patch");
                        let added = claims
                            .patch_status("one", &PatchParams::default(), &Patch::Json::<()>(add))
                            .await;
                        added.expect("a shared claim");
                    }
                }
            })
            .await?;
        fixture.waiting_pod("pod", &["one", "two"], "node", &[]).await?;
        fixture
            .wait_for_event("pod", "AllocationNotRecorded", "forbidden")
            .await?;
        assert!(status_patches.load(Ordering::Relaxed) >= 2);
        let claim = fixture.claims().get("one").await?;
        assert!(is_allocated(&claim));
        assert_eq!(claim.status.reserved_for.len(), 2);
        let requests = fixture.requests(&controller).await?;
        assert!(
            requests.contains(&"patch resourceclaims/status 422".to_owned()),
            "{requests:?}"
        );
        assert!(
            fixture
                .versions("one")
                .await?
                .iter()
                .filter(|claim| is_allocated(claim))
                .count()
                >= 2,
            "the claim was never cleared"
        );
        controller.stop().await
    })
}
