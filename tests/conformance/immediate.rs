//! Claims with allocation mode `Immediate`.

use std::time::Instant;

use drayman::api::resource::ResourceClaimConsumerReference;
use drayman::driver::{CapacityCause, DriverError};
use serde_json::json;

use crate::call::{Request, count};
use crate::fake_driver::Action;
use crate::fixture::{assert_within, finalizers, is_allocated, with_fixture};

#[test]
fn an_immediate_claim_is_allocated_without_node_and_pod() -> anyhow::Result<()> {
    with_fixture("immediate-life", async |fixture| {
        fixture
            .patch_class(
                &fixture.name,
                json!({ "suitableNodes": { "nodeSelectorTerms": [
                { "matchExpressions": [{ "key": "special", "operator": "Exists" }] }] } }),
            )
            .await?;
        let controller = fixture.start().await?;
        fixture.immediate("one").await?;
        let claim = fixture.wait_until_allocated("one").await?;
        fixture.fence().await?;

        let calls = fixture.driver.calls();
        let [class, parameters, allocate] = calls.as_slice() else {
            anyhow::bail!("expected three calls, found {calls:#?}")
        };
        assert!(
            matches!(&class.request, Request::Class(class) if class.metadata.name.as_ref() == Some(&fixture.name))
        );
        assert!(
            matches!(&parameters.request, Request::Claim(claim) if claim.metadata.name.as_deref() == Some("one"))
        );
        let Request::Allocate { claims, node: None } = &allocate.request else {
            anyhow::bail!("{allocate:?}")
        };
        assert_eq!(claims[0].entry, "");
        assert!(
            claims[0].class.suitable_nodes.is_some(),
            "the driver receives the suitable nodes of the class: for an immediate claim only the driver evaluates them"
        );
        assert_eq!(
            finalizers(&claims[0].claim),
            [fixture.finalizer()],
            "the finalizer is stored before the driver call"
        );

        assert_eq!(claim.status.driver_name, Some(fixture.driver_name()));
        assert_eq!(
            claim.status.reserved_for,
            Vec::<ResourceClaimConsumerReference>::new()
        );
        assert_eq!(
            fixture.requests(&controller).await?,
            ["patch resourceclaims 200", "patch resourceclaims/status 200"]
        );
        assert_eq!(fixture.events("one").await?, []);
        controller.stop().await
    })
}

#[test]
fn a_class_that_comes_late_serves_its_claims_at_once() -> anyhow::Result<()> {
    with_fixture("late-class", async |fixture| {
        let controller = fixture.start().await?;
        fixture
            .claim_of(
                "early",
                json!({ "resourceClassName": "later", "allocationMode": "Immediate" }),
            )
            .await?;
        fixture
            .wait_for_event("early", "ResourceClassMissing", "create the class")
            .await?;
        let created = Instant::now();
        fixture.make_class("later", json!({})).await?;
        fixture.wait_until_allocated("early").await?;
        assert_within(created, 60);
        assert_eq!(fixture.events("early").await?.len(), 1, "reported once");
        controller.stop().await
    })
}

#[test]
fn a_foreign_claim_costs_nothing_until_its_class_is_ours() -> anyhow::Result<()> {
    with_fixture("repointed-class", async |fixture| {
        let controller = fixture.start().await?;
        let class = "repointed";
        fixture
            .make_class(class, json!({ "driverName": "other.example.com" }))
            .await?;
        let spec = json!({ "resourceClassName": class, "allocationMode": "Immediate" });
        fixture.claim_of("theirs", spec).await?;
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        assert_eq!(fixture.requests(&controller).await?, Vec::<String>::new());
        assert_eq!(fixture.events("theirs").await?, []);

        fixture
            .patch_class(class, json!({ "driverName": fixture.driver_name() }))
            .await?;
        fixture.wait_until_allocated("theirs").await?;
        controller.stop().await
    })
}

#[test]
fn wrong_parameters_of_a_class_are_reported_on_class_and_claim() -> anyhow::Result<()> {
    with_fixture("immediate-parameters", async |fixture| {
        fixture.driver.rule(|request| match request {
            Request::Class(class) if class.parameters_ref.is_none() => Action::Fail(DriverError::invalid(
                "ParametersInvalid",
                "parametersRef is missing",
            )),
            Request::Claim(claim) if claim.metadata.name.as_deref() == Some("bad") => Action::Fail(
                DriverError::invalid("ParametersInvalid", "the claim asks for nonsense"),
            ),
            _ => Action::Proceed,
        });
        let controller = fixture.start().await?;
        fixture.immediate("good").await?;
        fixture
            .wait_for_event("good", "ParametersInvalid", "parametersRef is missing")
            .await?;
        fixture
            .wait_for_event(&fixture.name, "ParametersInvalid", "parametersRef is missing")
            .await?;
        let reference = json!({ "kind": "ConfigMap", "name": "parameters", "namespace": fixture.name });
        fixture
            .patch_class(&fixture.name, json!({ "parametersRef": reference }))
            .await?;
        fixture.wait_until_allocated("good").await?;

        fixture.immediate("bad").await?;
        fixture
            .wait_for_event("bad", "ParametersInvalid", "nonsense")
            .await?;
        assert_eq!(
            fixture.events(&fixture.name).await?.len(),
            1,
            "the class is not at fault for the claim"
        );
        // Errors that only users can fix are not retried periodically, only after a change that may fix them.
        fixture.fence().await?;
        let before = fixture.driver.calls().len();
        fixture.fence().await?;
        assert_eq!(fixture.driver.calls().len(), before);
        fixture.driver.clear_rule();
        fixture.driver.report_capacity(CapacityCause::Parameters);
        fixture.wait_until_allocated("bad").await?;
        controller.stop().await
    })
}

#[test]
fn a_failed_allocation_is_an_event_and_keeps_the_finalizer() -> anyhow::Result<()> {
    with_fixture("immediate-failure", async |fixture| {
        fixture.driver.on(
            Request::is_allocate,
            Action::Fail(DriverError::retry("Broken", "the device does not respond")),
        );
        let controller = fixture.start().await?;
        fixture.immediate("one").await?;
        fixture
            .wait_for_event("one", "Broken", "the device does not respond")
            .await?;
        fixture.wait_for_calls("allocate", 3..).await?;
        let claim = fixture.claims().get("one").await?;
        assert_eq!(finalizers(&claim), [fixture.finalizer()]);
        assert!(!is_allocated(&claim));
        fixture.driver.clear_rule();
        fixture.wait_until_allocated("one").await?;
        assert_eq!(
            fixture.events("one").await?.len(),
            1,
            "reported once, not for each attempt"
        );
        controller.stop().await
    })
}

#[test]
fn a_change_during_a_driver_call_is_not_lost() -> anyhow::Result<()> {
    with_fixture("immediate-change", async |fixture| {
        let refuse = |request: &Request| match request {
            Request::Claim(_) => Action::Fail(DriverError::invalid("ParametersInvalid", "nothing is there")),
            _ => Action::Wait,
        };
        // A capacity change of the driver, then a change of the class: both during the first call, which is about the class.
        fixture.driver.rule(refuse);
        let controller = fixture.start().await?;
        fixture.immediate("announced").await?;
        fixture
            .driver
            .wait_for("read the class", |calls| !calls.is_empty())
            .await?;
        fixture.driver.report_capacity(CapacityCause::Parameters);
        fixture.fence().await?;
        fixture.driver.resume_calls();
        fixture
            .driver
            .wait_for("read the claim again", |calls| {
                count(calls, |request| matches!(request, Request::Claim(_))) >= 2
            })
            .await?;
        fixture.driver.clear_rule();
        fixture.driver.report_capacity(CapacityCause::Parameters);
        fixture.wait_until_allocated("announced").await?;

        fixture.driver.hold_calls();
        fixture.driver.rule(refuse);
        let before = fixture.driver.calls().len();
        fixture.immediate("changed").await?;
        fixture
            .driver
            .wait_for("read the class", move |calls| calls.len() > before)
            .await?;
        fixture
            .patch_class(
                &fixture.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "new" } }),
            )
            .await?;
        fixture.fence().await?;
        fixture.driver.resume_calls();
        fixture
            .driver
            .wait_for("read the changed class", |calls| {
                count(
                    calls,
                    |request| matches!(request, Request::Class(class) if class.parameters_ref.is_some()),
                ) >= 1
            })
            .await?;
        controller.stop().await
    })
}
