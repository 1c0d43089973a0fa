//! Objects that users edited to invalid states.

use serde_json::json;

use crate::call::{Request, count};
use crate::objects::{ClaimSource, patch_status};

use crate::fixture::{finalizers, is_allocated, names, unsuitable_nodes, with_fixture};

#[test]
fn invalid_claims_affect_no_other_claim_and_can_be_deleted() -> anyhow::Result<()> {
    with_fixture("nonsense", async |fixture| {
        let controller = fixture.start().await?;
        let ours = fixture.driver_name();
        // Allocated by hand under our driver name with an invalid handle, with and without our finalizer.
        for (name, finalizers) in [("bare", json!([])), ("kept", json!([fixture.finalizer()]))] {
            fixture
                .create_claim(json!({ "metadata": { "name": name, "finalizers": finalizers } }))
                .await?;
            let handles =
                json!([{ "driverName": "", "data": "\u{0}{{{" }, { "driverName": ours, "data": "" }]);
            let refused = fixture
                .patch_claim_status(
                    name,
                    json!({ "driverName": ours, "allocation": { "resourceHandles": handles } }),
                )
                .await;
            assert!(
                refused.is_err(),
                "a handle without a driver is refused by the server"
            );
            let handles = json!([{ "driverName": ours, "data": "{{{" }]);
            fixture
                .patch_claim_status(
                    name,
                    json!({ "driverName": ours, "allocation": { "resourceHandles": handles } }),
                )
                .await?;
        }
        // The driver name of an allocated claim is replaced.
        fixture.immediate("renamed").await?;
        fixture.wait_until_allocated("renamed").await?;
        fixture
            .patch_claim_status("renamed", json!({ "driverName": "other.example.com" }))
            .await?;
        // The allocation is removed, our finalizer stays.
        fixture.waiting_pod("pod", &["cleared"], "node", &[]).await?;
        fixture.wait_until_allocated("cleared").await?;
        fixture
            .patch_claim_status(
                "cleared",
                json!({ "driverName": null, "allocation": null, "reservedFor": null }),
            )
            .await?;
        // The finalizer of an allocated claim is removed.
        fixture.immediate("unprotected").await?;
        fixture.wait_until_allocated("unprotected").await?;
        fixture
            .patch_claim("unprotected", json!({ "metadata": { "finalizers": null } }))
            .await?;

        // The pod still needs its claim, so the claim is allocated again.
        fixture
            .wait_for_claim("cleared", "allocated again", is_allocated)
            .await?;
        fixture.fence().await?;
        fixture.remove_pod("pod").await?;
        for name in ["bare", "kept", "renamed", "cleared", "unprotected"] {
            fixture.delete_claim(name).await?;
            fixture.wait_until_gone(name).await?;
        }
        fixture.fence().await?;
        let calls = fixture.driver.calls();
        assert!(
            count(&calls, |request| request.is_deallocate()
                && request.is_about("bare"))
                == 0
        );
        assert!(
            count(&calls, |request| request.is_deallocate()
                && request.is_about("kept"))
                >= 1
        );
        let with_allocation = |request: &Request| {
            let allocation = matches!(
                request,
                Request::Deallocate {
                    allocation: Some(_),
                    ..
                }
            );
            allocation && request.is_about("renamed")
        };
        assert_eq!(
            count(&calls, with_allocation),
            1,
            "a claim with our finalizer and our handle is released whatever its driver name"
        );
        assert_eq!(
            fixture.driver.held(),
            Vec::<String>::new(),
            "the driver holds no allocation"
        );
        // The driver also releases the two allocations recorded by hand under its name.
        let (allocated, released) = fixture.driver.counts();
        assert_eq!(released, allocated + 2);
        controller.stop().await
    })
}

#[test]
fn invalid_contexts_are_answered_or_left_alone() -> anyhow::Result<()> {
    with_fixture("nonsense-context", async |fixture| {
        fixture.driver.nodes([("good", 8)]);
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        let pod = fixture
            .pod("pod", &[("device", ClaimSource::Claim("one"))])
            .await?;
        // An invalid node name, an entry without a name, and an entry for a claim that the pod does not have.
        fixture.context(&pod, "Not A Node /../", &[]).await?;
        let entries = json!([{ "unsuitableNodes": ["a"] }, { "name": "stranger", "unsuitableNodes": ["good"] },
            { "name": "device", "unsuitableNodes": ["good"] }]);
        let nonsense = json!({ "resourceClaims": entries });
        patch_status(&fixture.contexts(), "pod", nonsense).await?;
        // "good" fits, but while the first entry exists the server rejects every apply.
        fixture
            .wait_for_event("pod", "AnswerRefused", "key field")
            .await?;
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 0);
        let fixed = json!({ "resourceClaims": [
            { "name": "stranger", "unsuitableNodes": ["good"] }, { "name": "device", "unsuitableNodes": ["good"] }] });
        patch_status(&fixture.contexts(), "pod", fixed).await?;
        // An invalid node name is never written.
        let context = fixture
            .wait_for_context("pod", "evaluated", |context| {
                unsuitable_nodes(context).get("device").is_some_and(Vec::is_empty)
            })
            .await?;
        assert_eq!(
            unsuitable_nodes(&context)["stranger"],
            ["good"],
            "foreign entries stay"
        );
        let events = fixture.events("pod").await?;
        let refused = events.iter().filter(|(reason, _)| reason == "AnswerRefused");
        assert_eq!(refused.count(), 1, "reported once: {events:?}");
        fixture
            .reschedule(
                "pod",
                json!({ "selectedNode": "good", "potentialNodes": names(["good"]) }),
            )
            .await?;
        let claim = fixture.wait_until_allocated("one").await?;
        assert_eq!(finalizers(&claim), [fixture.finalizer()]);
        controller.stop().await
    })
}
