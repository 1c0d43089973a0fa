//! Classes and parameters of the claims of a pod.

use drayman::driver::{CapacityCause, DriverError};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::call::{What, count};
use crate::objects::From;
use crate::script::Act;
use crate::stage::{finalizers, is_allocated, names, on_stage, verdicts};

#[test]
fn a_missing_class_is_named_and_blocks_its_whole_pod() -> anyhow::Result<()> {
    on_stage("missing-class", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        stage
            .claim_of("two", json!({ "resourceClassName": "missing-class-later" }))
            .await?;
        stage
            .claim_of("three", json!({ "resourceClassName": "missing-class-too" }))
            .await?;
        let entries = ["one", "two", "three"].map(|name| (name, From::Claim(name)));
        let pod = stage.pod("pod", &entries).await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        // The context may be seen before the last claim; then a first event names one class only.
        let event = stage
            .event("pod", "ResourceClassMissing", "missing-class-too")
            .await?;
        let text = event.message.unwrap_or_default();
        assert!(
            text.contains("missing-class-later"),
            "every problem is named: {text}"
        );
        stage.fence().await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        stage.make_class("missing-class-later", json!({})).await?;
        stage.fence().await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new(), "one is missing");
        stage.make_class("missing-class-too", json!({})).await?;
        for name in ["one", "two", "three"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        controller.end().await
    })
}

#[test]
fn a_class_with_structured_parameters_is_left_to_the_scheduler() -> anyhow::Result<()> {
    on_stage("structured", async |stage| {
        if stage.cluster.is_before(30, "a class has no structuredParameters") {
            return Ok(());
        }
        let controller = stage.start().await?;
        stage
            .make_class("structured-class", json!({ "structuredParameters": true }))
            .await?;
        stage
            .claim_of("theirs", json!({ "resourceClassName": "structured-class" }))
            .await?;
        stage
            .claim_of(
                "at-once",
                json!({ "resourceClassName": "structured-class", "allocationMode": "Immediate" }),
            )
            .await?;
        stage.claim("ours").await?;
        let entries = ["theirs", "at-once", "ours"].map(|name| (name, From::Claim(name)));
        let pod = stage.pod("pod", &entries).await?;
        stage.context(&pod, "", &names(["node"])).await?;
        let context = stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        assert_eq!(verdicts(&context).into_keys().collect::<Vec<_>>(), ["ours"]);
        stage.reschedule("pod", json!({ "selectedNode": "node" })).await?;
        stage.until_claim("ours", "allocated", is_allocated).await?;
        stage.fence().await?;
        for name in ["theirs", "at-once"] {
            assert_eq!(count(&stage.driver.calls(), |what| what.is_about(name)), 0);
            assert_eq!(stage.versions(name).await?.len(), 1, "{name} was written to");
            assert_eq!(stage.events(name).await?, []);
        }
        controller.end().await
    })
}

#[test]
fn wrong_parameters_are_reported_and_a_fix_helps_at_once() -> anyhow::Result<()> {
    on_stage("parameters", async |stage| {
        stage.driver.rule(|what| match what {
            What::Class(class) if class.parameters_ref.is_none() => Act::Fail(DriverError::invalid(
                "ParametersInvalid",
                "parametersRef is missing",
            )),
            What::Claim(claim) if claim.metadata.labels.is_none() => Act::Fail(DriverError::invalid(
                "ParametersInvalid",
                "the claim asks for nonsense",
            )),
            _ => Act::Go,
        });
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        let kind = |event: k8s_openapi::api::core::v1::Event| event.involved_object.kind.unwrap_or_default();
        let event = stage
            .event(&stage.name, "ParametersInvalid", "parametersRef is missing")
            .await?;
        assert_eq!(kind(event), "ResourceClass");
        let told = format!("resource class \"{}\": parametersRef is missing", stage.name);
        let event = stage.event("pod", "ParametersInvalid", &told).await?;
        assert_eq!(kind(event), "Pod");
        assert_eq!(
            stage.events("one").await?,
            [],
            "the class is wrong, not the claim"
        );
        let reference = json!({ "kind": "ConfigMap", "name": "parameters", "namespace": stage.name });
        stage
            .patch_class(&stage.name, json!({ "parametersRef": reference }))
            .await?;
        let event = stage.event("one", "ParametersInvalid", "nonsense").await?;
        assert_eq!(kind(event), "ResourceClaim");
        let event = stage
            .event("pod", "ParametersInvalid", "/one: the claim asks for nonsense")
            .await?;
        assert_eq!(kind(event), "Pod");
        // Nothing but what may have mended it leads to another question.
        let before = stage.driver.calls().len();
        stage.fence().await?;
        assert_eq!(stage.driver.calls().len(), before);
        stage.driver.behave();
        stage.driver.announce(CapacityCause::Parameters);
        stage.until_claim("one", "allocated", is_allocated).await?;
        // The context has the pod's name: these are all that name either.
        assert_eq!(stage.events("pod").await?.len(), 2);
        assert_eq!(stage.events("one").await?.len(), 1);
        assert_eq!(stage.events(&stage.name).await?.len(), 1);
        controller.end().await
    })
}

#[test]
fn a_changed_class_is_evaluated_again_before_allocation_only() -> anyhow::Result<()> {
    on_stage("changed-class", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "", &names(["node"])).await?;
        stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        stage.driver.rule(|what| match what {
            What::Judge { claims, .. } if claims[0].class.parameters_ref.is_some() => {
                Act::Unsuitable(vec![("one", names(["node"]).to_vec())])
            }
            _ => Act::Go,
        });
        stage
            .patch_class(
                &stage.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "new" } }),
            )
            .await?;
        stage
            .until_context("pod", "judged anew", |context| {
                verdicts(context)
                    .get("device")
                    .is_some_and(|nodes| nodes == &["node"])
            })
            .await?;
        stage
            .patch_class(&stage.name, json!({ "parametersRef": null }))
            .await?;
        stage
            .until_context("pod", "free again", |context| {
                verdicts(context).get("device").is_some_and(Vec::is_empty)
            })
            .await?;
        stage.reschedule("pod", json!({ "selectedNode": "node" })).await?;
        let claim = stage.until_claim("one", "allocated", is_allocated).await?;
        stage
            .patch_class(
                &stage.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "newer" } }),
            )
            .await?;
        stage.fence().await?;
        assert_eq!(stage.claims().get("one").await?.status, claim.status);
        controller.end().await
    })
}

#[test]
fn a_driver_name_in_upper_case_is_reported_and_not_served() -> anyhow::Result<()> {
    on_stage("upper-case", async |stage| {
        let controller = stage.start().await?;
        let name = stage.driver_name().replace("example", "Example");
        stage
            .make_class("shouting", json!({ "driverName": name }))
            .await?;
        stage
            .event("shouting", "DriverNameNotLowerCase", &stage.driver_name())
            .await?;
        stage
            .claim_of(
                "at-once",
                json!({ "resourceClassName": "shouting", "allocationMode": "Immediate" }),
            )
            .await?;
        stage
            .claim_of("one", json!({ "resourceClassName": "shouting" }))
            .await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        let labels = Patch::Merge(json!({ "metadata": { "labels": { "touched": "yes" } } }));
        stage
            .classes()
            .patch("shouting", &PatchParams::default(), &labels)
            .await?;
        stage.fence().await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        for name in ["one", "at-once"] {
            assert_eq!(finalizers(&stage.claims().get(name).await?), Vec::<&str>::new());
        }
        assert_eq!(stage.events("shouting").await?.len(), 1, "told once");
        stage
            .patch_class("shouting", json!({ "driverName": stage.driver_name() }))
            .await?;
        for name in ["one", "at-once"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        controller.end().await
    })
}
