//! Classes and parameters of the claims of a pod.

use drayman::driver::{CapacityCause, DriverError};
use serde_json::json;

use crate::call::{Request, count};
use crate::fake_driver::Action;
use crate::fixture::{finalizers, names, unsuitable_nodes, with_fixture};
use crate::objects::{ClaimSource, touched};

#[test]
fn a_missing_class_is_named_and_blocks_its_whole_pod() -> anyhow::Result<()> {
    with_fixture("missing-class", async |fixture| {
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        fixture
            .claim_of("two", json!({ "resourceClassName": "missing-class-later" }))
            .await?;
        fixture
            .claim_of("three", json!({ "resourceClassName": "missing-class-too" }))
            .await?;
        let entries = ["one", "two", "three"].map(|name| (name, ClaimSource::Claim(name)));
        let pod = fixture.pod("pod", &entries).await?;
        fixture.context(&pod, "node", &names(["node"])).await?;
        // The context may arrive before the last claim; then a first event names one class only.
        let event = fixture
            .wait_for_event("pod", "ResourceClassMissing", "missing-class-too")
            .await?;
        let text = event.message.unwrap_or_default();
        assert!(
            text.contains("missing-class-later"),
            "every problem is named: {text}"
        );
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        fixture.make_class("missing-class-later", json!({})).await?;
        fixture.fence().await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            Vec::<String>::new(),
            "one is missing"
        );
        fixture.make_class("missing-class-too", json!({})).await?;
        for name in ["one", "two", "three"] {
            fixture.wait_until_allocated(name).await?;
        }
        controller.stop().await
    })
}

#[test]
fn a_class_with_structured_parameters_is_left_to_the_scheduler() -> anyhow::Result<()> {
    with_fixture("structured", async |fixture| {
        if fixture
            .cluster
            .is_before(30, "a class has no structuredParameters")
        {
            return Ok(());
        }
        let controller = fixture.start().await?;
        fixture
            .make_class("structured-class", json!({ "structuredParameters": true }))
            .await?;
        fixture
            .claim_of("theirs", json!({ "resourceClassName": "structured-class" }))
            .await?;
        fixture
            .claim_of(
                "at-once",
                json!({ "resourceClassName": "structured-class", "allocationMode": "Immediate" }),
            )
            .await?;
        fixture.claim("ours").await?;
        let entries = ["theirs", "at-once", "ours"].map(|name| (name, ClaimSource::Claim(name)));
        let pod = fixture.pod("pod", &entries).await?;
        fixture.context(&pod, "", &names(["node"])).await?;
        let context = fixture.wait_until_evaluated("pod").await?;
        assert_eq!(
            unsuitable_nodes(&context).into_keys().collect::<Vec<_>>(),
            ["ours"]
        );
        fixture.select_node("pod", "node").await?;
        fixture.wait_until_allocated("ours").await?;
        fixture.fence().await?;
        for name in ["theirs", "at-once"] {
            assert_eq!(
                count(&fixture.driver.calls(), |request| request.is_about(name)),
                0
            );
            assert_eq!(fixture.versions(name).await?.len(), 1, "{name} was written to");
            assert_eq!(fixture.events(name).await?, []);
        }
        controller.stop().await
    })
}

#[test]
fn wrong_parameters_are_reported_and_a_fix_helps_at_once() -> anyhow::Result<()> {
    with_fixture("parameters", async |fixture| {
        fixture.driver.rule(|request| match request {
            Request::Class(class) if class.parameters_ref.is_none() => Action::Fail(DriverError::invalid(
                "ParametersInvalid",
                "parametersRef is missing",
            )),
            Request::Claim(claim) if claim.metadata.labels.is_none() => Action::Fail(DriverError::invalid(
                "ParametersInvalid",
                "the claim asks for nonsense",
            )),
            _ => Action::Proceed,
        });
        let controller = fixture.start().await?;
        fixture
            .waiting_pod("pod", &["one"], "node", &names(["node"]))
            .await?;
        let kind = |event: k8s_openapi::api::core::v1::Event| event.involved_object.kind.unwrap_or_default();
        let event = fixture
            .wait_for_event(&fixture.name, "ParametersInvalid", "parametersRef is missing")
            .await?;
        assert_eq!(kind(event), "ResourceClass");
        let message = format!("resource class \"{}\": parametersRef is missing", fixture.name);
        let event = fixture
            .wait_for_event("pod", "ParametersInvalid", &message)
            .await?;
        assert_eq!(kind(event), "Pod");
        assert_eq!(
            fixture.events("one").await?,
            [],
            "the class is invalid, not the claim"
        );
        let reference = json!({ "kind": "ConfigMap", "name": "parameters", "namespace": fixture.name });
        fixture
            .patch_class(&fixture.name, json!({ "parametersRef": reference }))
            .await?;
        let event = fixture
            .wait_for_event("one", "ParametersInvalid", "nonsense")
            .await?;
        assert_eq!(kind(event), "ResourceClaim");
        let event = fixture
            .wait_for_event("pod", "ParametersInvalid", "/one: the claim asks for nonsense")
            .await?;
        assert_eq!(kind(event), "Pod");
        // Only a change that may fix the problem triggers another call.
        let before = fixture.driver.calls().len();
        fixture.fence().await?;
        assert_eq!(fixture.driver.calls().len(), before);
        fixture.driver.clear_rule();
        fixture.driver.report_capacity(CapacityCause::Parameters);
        fixture.wait_until_allocated("one").await?;
        // The context has the name of the pod, so this covers Events about the context too.
        assert_eq!(fixture.events("pod").await?.len(), 2);
        assert_eq!(fixture.events("one").await?.len(), 1);
        assert_eq!(fixture.events(&fixture.name).await?.len(), 1);
        controller.stop().await
    })
}

#[test]
fn a_changed_class_is_evaluated_again_before_allocation_only() -> anyhow::Result<()> {
    with_fixture("changed-class", async |fixture| {
        let controller = fixture.start().await?;
        fixture.waiting_pod("pod", &["one"], "", &names(["node"])).await?;
        fixture.wait_until_evaluated("pod").await?;
        fixture.driver.rule(|request| match request {
            Request::Evaluate { claims, .. } if claims[0].class.parameters_ref.is_some() => {
                Action::Unsuitable(vec![("one", names(["node"]).to_vec())])
            }
            _ => Action::Proceed,
        });
        fixture
            .patch_class(
                &fixture.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "new" } }),
            )
            .await?;
        fixture
            .wait_for_context("pod", "evaluated again", |context| {
                unsuitable_nodes(context)
                    .get("one")
                    .is_some_and(|nodes| nodes == &["node"])
            })
            .await?;
        fixture
            .patch_class(&fixture.name, json!({ "parametersRef": null }))
            .await?;
        fixture
            .wait_for_context("pod", "suitable again", |context| {
                unsuitable_nodes(context).get("one").is_some_and(Vec::is_empty)
            })
            .await?;
        fixture.select_node("pod", "node").await?;
        let claim = fixture.wait_until_allocated("one").await?;
        fixture
            .patch_class(
                &fixture.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "newer" } }),
            )
            .await?;
        fixture.fence().await?;
        assert_eq!(fixture.claims().get("one").await?.status, claim.status);
        controller.stop().await
    })
}

#[test]
fn a_driver_name_in_upper_case_is_reported_and_not_served() -> anyhow::Result<()> {
    with_fixture("upper-case", async |fixture| {
        let controller = fixture.start().await?;
        let name = fixture.driver_name().replace("example", "Example");
        fixture
            .make_class("shouting", json!({ "driverName": name }))
            .await?;
        fixture
            .wait_for_event("shouting", "DriverNameNotLowerCase", &fixture.driver_name())
            .await?;
        fixture
            .claim_of(
                "at-once",
                json!({ "resourceClassName": "shouting", "allocationMode": "Immediate" }),
            )
            .await?;
        fixture
            .claim_of("one", json!({ "resourceClassName": "shouting" }))
            .await?;
        let pod = fixture
            .pod("pod", &[("device", ClaimSource::Claim("one"))])
            .await?;
        fixture.context(&pod, "node", &names(["node"])).await?;
        fixture.patch_class("shouting", touched()).await?;
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        for name in ["one", "at-once"] {
            assert_eq!(finalizers(&fixture.claims().get(name).await?), Vec::<&str>::new());
        }
        assert_eq!(fixture.events("shouting").await?.len(), 1, "reported once");
        fixture
            .patch_class("shouting", json!({ "driverName": fixture.driver_name() }))
            .await?;
        for name in ["one", "at-once"] {
            fixture.wait_until_allocated(name).await?;
        }
        controller.stop().await
    })
}
