//! Objects that somebody has edited to nonsense.

use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::call::{What, count};
use crate::objects::From;

use crate::stage::{finalizers, is_allocated, names, on_stage, verdicts};

#[test]
fn nonsensical_claims_harm_nobody_else_and_can_be_deleted() -> anyhow::Result<()> {
    on_stage("nonsense", async |stage| {
        let controller = stage.start().await?;
        let ours = stage.driver_name();
        // Allocated by hand in our name, with a handle that is none, without and with our finalizer.
        for (name, finalizers) in [("bare", json!([])), ("kept", json!([stage.finalizer()]))] {
            stage
                .create_claim(json!({ "metadata": { "name": name, "finalizers": finalizers } }))
                .await?;
            let handles =
                json!([{ "driverName": "", "data": "\u{0}{{{" }, { "driverName": ours, "data": "" }]);
            let refused = stage
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
            stage
                .patch_claim_status(
                    name,
                    json!({ "driverName": ours, "allocation": { "resourceHandles": handles } }),
                )
                .await?;
        }
        // The name of the driver taken away from an allocated claim, and another's put in.
        stage.immediate("renamed").await?;
        stage.until_claim("renamed", "allocated", is_allocated).await?;
        stage
            .patch_claim_status("renamed", json!({ "driverName": "somebody.example.com" }))
            .await?;
        // The allocation itself taken away, with our finalizer left.
        stage.claim("cleared").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("cleared"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        stage.until_claim("cleared", "allocated", is_allocated).await?;
        stage
            .patch_claim_status(
                "cleared",
                json!({ "driverName": null, "allocation": null, "reservedFor": null }),
            )
            .await?;
        // The finalizer taken away from an allocated claim.
        stage.immediate("unprotected").await?;
        stage
            .until_claim("unprotected", "allocated", is_allocated)
            .await?;
        stage
            .patch_claim("unprotected", json!({ "metadata": { "finalizers": null } }))
            .await?;

        // The pod still wants its claim: it is given back, so to speak, and allocated anew.
        stage
            .until_claim("cleared", "allocated anew", is_allocated)
            .await?;
        stage.fence().await?;
        stage.remove_pod("pod").await?;
        for name in ["bare", "kept", "renamed", "cleared", "unprotected"] {
            stage.delete_claim(name).await?;
            stage.until_gone(name).await?;
        }
        stage.fence().await?;
        let calls = stage.driver.calls();
        assert!(count(&calls, |what| what.is_deallocate() && what.is_about("bare")) == 0);
        assert!(count(&calls, |what| what.is_deallocate() && what.is_about("kept")) >= 1);
        let with_allocation = |what: &What| {
            let allocation = matches!(
                what,
                What::Deallocate {
                    allocation: Some(_),
                    ..
                }
            );
            allocation && what.is_about("renamed")
        };
        assert_eq!(
            count(&calls, with_allocation),
            1,
            "what has our finalizer and our handle is ours to give back, under whatever name"
        );
        assert_eq!(
            stage.driver.held(),
            Vec::<String>::new(),
            "nothing is held for ever"
        );
        // Besides what it has allocated it gives back what was recorded in its name by hand, in two claims.
        let (allocated, given_back) = stage.driver.counts();
        assert_eq!(given_back, allocated + 2);
        controller.end().await
    })
}

#[test]
fn contexts_edited_to_nonsense_are_answered_or_left_alone() -> anyhow::Result<()> {
    on_stage("nonsense-context", async |stage| {
        stage.driver.nodes([("good", 8)]);
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        // A node name that is none, and entries without a name and for claims that the pod has not.
        stage.context(&pod, "Not A Node /../", &[]).await?;
        let entries = json!([{ "unsuitableNodes": ["a"] }, { "name": "stranger", "unsuitableNodes": ["good"] },
            { "name": "device", "unsuitableNodes": ["good"] }]);
        let nonsense = Patch::Merge(json!({ "status": { "resourceClaims": entries } }));
        stage
            .contexts()
            .patch_status("pod", &PatchParams::default(), &nonsense)
            .await?;
        // "good" fits, but while the first entry is there the server lets nobody apply another.
        stage.event("pod", "AnswerRefused", "key field").await?;
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 0);
        let mended = Patch::Merge(json!({ "status": { "resourceClaims": [
            { "name": "stranger", "unsuitableNodes": ["good"] }, { "name": "device", "unsuitableNodes": ["good"] }] } }));
        stage
            .contexts()
            .patch_status("pod", &PatchParams::default(), &mended)
            .await?;
        // A name that is no node's is never written.
        let context = stage
            .until_context("pod", "judged", |context| {
                verdicts(context).get("device").is_some_and(Vec::is_empty)
            })
            .await?;
        assert_eq!(verdicts(&context)["stranger"], ["good"], "what is not ours stays");
        let events = stage.events("pod").await?;
        let refused = events.iter().filter(|(reason, _)| reason == "AnswerRefused");
        assert_eq!(refused.count(), 1, "told once: {events:?}");
        stage
            .reschedule(
                "pod",
                json!({ "selectedNode": "good", "potentialNodes": names(["good"]) }),
            )
            .await?;
        let claim = stage.until_claim("one", "allocated", is_allocated).await?;
        assert_eq!(finalizers(&claim), [stage.finalizer()]);
        controller.end().await
    })
}
