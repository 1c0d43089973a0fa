//! A claim of a pod can finally not be recorded after another one has been. The test is the scheduler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::call::{What, count};
use crate::harness::rule;
use crate::objects::From;
use crate::stage::{Stage, finalizers, is_allocated, on_stage, rules_without};

/// The rights of a controller that may change the status of the claim `one` only.
fn only_one() -> Vec<PolicyRule> {
    let mut rules = rules_without("resourceclaims/status", "patch");
    let mut only_one = rule(&["resource.k8s.io"], &["resourceclaims/status"], &["patch"]);
    only_one.resource_names = Some(vec!["one".to_owned()]);
    rules.push(only_one);
    rules
}

/// A pod `pod` with the claims `one` and `two`, which are made, that is to go to `node`.
async fn pod_with_two(stage: &Stage) -> anyhow::Result<()> {
    for name in ["one", "two"] {
        stage.claim(name).await?;
    }
    let entries = [("one", From::Claim("one")), ("two", From::Claim("two"))];
    let pod = stage.pod("pod", &entries).await?;
    stage.context(&pod, "node", &[]).await.map(drop)
}

#[test]
fn a_rollback_clears_allocation_and_reservation_in_one_write() -> anyhow::Result<()> {
    on_stage("undone", async |stage| {
        let controller = stage
            .start_as("", &stage.driver, &only_one(), |builder| builder)
            .await?;
        pod_with_two(stage).await?;
        stage.event("pod", "AllocationNotRecorded", "forbidden").await?;
        // It is tried again with a growing delay, and the one that was refused goes first.
        stage
            .driver
            .until("allocate four times", |calls| {
                count(calls, What::is_allocate) >= 4
            })
            .await?;
        let seen: Vec<_> = stage
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
        let taken_back = stage.driver.calls().into_iter().find_map(|call| match call.what {
            What::Deallocate { claim, allocation } if claim.metadata.name.as_deref() == Some("one") => {
                Some((is_allocated(&claim), allocation.is_some()))
            }
            _ => None,
        });
        assert_eq!(
            taken_back,
            Some((false, true)),
            "the driver is told when nothing is recorded any more"
        );
        assert_eq!(stage.events("pod").await?.len(), 1);
        stage.allow(&controller).await?;
        for name in ["one", "two"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        let (allocated, given_back) = stage.driver.counts();
        assert_eq!(allocated, given_back + 2);
        controller.end().await
    })
}

#[test]
fn a_claim_that_another_pod_uses_by_then_is_left_to_it() -> anyhow::Result<()> {
    on_stage("undo-too-late", async |stage| {
        stage.driver.shareable();
        let other = stage.pod("other", &[("device", From::Claim("one"))]).await?;
        let claims = stage.claims();
        // The first allocates, the second takes that back.
        let status_patches = Arc::new(AtomicUsize::new(0));
        let uid = other.metadata.uid.clone();
        let sent = status_patches.clone();
        let controller = stage
            .start_behind(&only_one(), move |request| {
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
                        added.expect("a claim that is shared");
                    }
                }
            })
            .await?;
        pod_with_two(stage).await?;
        stage.event("pod", "AllocationNotRecorded", "forbidden").await?;
        assert!(status_patches.load(Ordering::Relaxed) >= 2);
        let claim = stage.claims().get("one").await?;
        assert!(is_allocated(&claim));
        assert_eq!(claim.status.reserved_for.len(), 2);
        let requests = stage.requests(&controller).await?;
        assert!(
            requests.contains(&"patch resourceclaims/status 422".to_owned()),
            "{requests:?}"
        );
        assert!(
            stage
                .versions("one")
                .await?
                .iter()
                .filter(|claim| is_allocated(claim))
                .count()
                >= 2,
            "it was never cleared"
        );
        controller.end().await
    })
}
