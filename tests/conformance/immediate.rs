//! Claims that are allocated as soon as they exist.

use std::time::{Duration, Instant};

use drayman::api::resource::ResourceClaimConsumerReference;
use drayman::driver::{CapacityCause, DriverError};
use serde_json::json;

use crate::call::{What, count};
use crate::script::Act;
use crate::stage::{finalizers, is_allocated, on_stage};

#[test]
fn an_immediate_claim_is_allocated_without_node_and_pod() -> anyhow::Result<()> {
    on_stage("immediate-life", async |stage| {
        stage
            .patch_class(
                &stage.name,
                json!({ "suitableNodes": { "nodeSelectorTerms": [
                { "matchExpressions": [{ "key": "special", "operator": "Exists" }] }] } }),
            )
            .await?;
        let controller = stage.start().await?;
        stage.immediate("one").await?;
        let claim = stage.until_claim("one", "allocated", is_allocated).await?;
        stage.fence().await?;

        let calls = stage.driver.calls();
        let [class, parameters, allocate] = calls.as_slice() else {
            anyhow::bail!("three calls are expected, not {calls:#?}")
        };
        assert!(
            matches!(&class.what, What::Class(class) if class.metadata.name.as_ref() == Some(&stage.name))
        );
        assert!(
            matches!(&parameters.what, What::Claim(claim) if claim.metadata.name.as_deref() == Some("one"))
        );
        let What::Allocate { claims, node: None } = &allocate.what else {
            anyhow::bail!("{allocate:?}")
        };
        assert_eq!(claims[0].entry, "");
        assert!(
            claims[0].class.suitable_nodes.is_some(),
            "the driver can see which nodes the class allows: nobody else looks at them for an immediate claim"
        );
        assert_eq!(
            finalizers(&claims[0].claim),
            [stage.finalizer()],
            "secured before the driver is asked"
        );

        assert_eq!(claim.status.driver_name, Some(stage.driver_name()));
        assert_eq!(
            claim.status.reserved_for,
            Vec::<ResourceClaimConsumerReference>::new()
        );
        assert_eq!(
            stage.requests(&controller).await?,
            ["patch resourceclaims 200", "patch resourceclaims/status 200"]
        );
        assert_eq!(stage.events("one").await?, []);
        controller.end().await
    })
}

#[test]
fn a_class_that_comes_late_serves_its_claims_at_once() -> anyhow::Result<()> {
    on_stage("late-class", async |stage| {
        let controller = stage.start().await?;
        stage
            .claim_of(
                "early",
                json!({ "resourceClassName": "later", "allocationMode": "Immediate" }),
            )
            .await?;
        stage
            .event("early", "ResourceClassMissing", "create the class")
            .await?;
        let made = Instant::now();
        stage.make_class("later", json!({})).await?;
        stage.until_claim("early", "allocated", is_allocated).await?;
        assert!(made.elapsed() < Duration::from_secs(60), "{:?}", made.elapsed());
        assert_eq!(stage.events("early").await?.len(), 1, "told once");
        controller.end().await
    })
}

#[test]
fn a_foreign_claim_costs_nothing_until_its_class_is_ours() -> anyhow::Result<()> {
    on_stage("repointed-class", async |stage| {
        let controller = stage.start().await?;
        let class = "repointed";
        stage
            .make_class(class, json!({ "driverName": "somebody.example.com" }))
            .await?;
        let spec = json!({ "resourceClassName": class, "allocationMode": "Immediate" });
        stage.claim_of("theirs", spec).await?;
        stage.fence().await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        assert_eq!(stage.requests(&controller).await?, Vec::<String>::new());
        assert_eq!(stage.events("theirs").await?, []);

        stage
            .patch_class(class, json!({ "driverName": stage.driver_name() }))
            .await?;
        stage.until_claim("theirs", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn wrong_parameters_of_a_class_are_reported_on_class_and_claim() -> anyhow::Result<()> {
    on_stage("immediate-parameters", async |stage| {
        stage.driver.rule(|what| match what {
            What::Class(class) if class.parameters_ref.is_none() => Act::Fail(DriverError::invalid(
                "ParametersInvalid",
                "parametersRef is missing",
            )),
            What::Claim(claim) if claim.metadata.name.as_deref() == Some("bad") => Act::Fail(
                DriverError::invalid("ParametersInvalid", "the claim asks for nonsense"),
            ),
            _ => Act::Go,
        });
        let controller = stage.start().await?;
        stage.immediate("good").await?;
        stage
            .event("good", "ParametersInvalid", "parametersRef is missing")
            .await?;
        stage
            .event(&stage.name, "ParametersInvalid", "parametersRef is missing")
            .await?;
        let reference = json!({ "kind": "ConfigMap", "name": "parameters", "namespace": stage.name });
        stage
            .patch_class(&stage.name, json!({ "parametersRef": reference }))
            .await?;
        stage.until_claim("good", "allocated", is_allocated).await?;

        stage.immediate("bad").await?;
        stage.event("bad", "ParametersInvalid", "nonsense").await?;
        assert_eq!(
            stage.events(&stage.name).await?.len(),
            1,
            "the class is not at fault for the claim"
        );
        // What only a person can mend is not tried again by itself, but when something may have been mended.
        stage.fence().await?;
        let before = stage.driver.calls().len();
        stage.fence().await?;
        assert_eq!(stage.driver.calls().len(), before);
        stage.driver.behave();
        stage.driver.announce(CapacityCause::Parameters);
        stage.until_claim("bad", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn a_failed_allocation_is_an_event_and_keeps_the_finalizer() -> anyhow::Result<()> {
    on_stage("immediate-failure", async |stage| {
        stage.driver.rule(|what| match what {
            What::Allocate { .. } => {
                Act::Fail(DriverError::retry("Broken", "the device box does not answer"))
            }
            _ => Act::Go,
        });
        let controller = stage.start().await?;
        stage.immediate("one").await?;
        stage
            .event("one", "Broken", "the device box does not answer")
            .await?;
        stage
            .driver
            .until("allocate thrice", |calls| count(calls, What::is_allocate) >= 3)
            .await?;
        let claim = stage.claims().get("one").await?;
        assert_eq!(finalizers(&claim), [stage.finalizer()]);
        assert!(!is_allocated(&claim));
        stage.driver.behave();
        stage.until_claim("one", "allocated", is_allocated).await?;
        assert_eq!(
            stage.events("one").await?.len(),
            1,
            "told once, not for each attempt"
        );
        controller.end().await
    })
}

#[test]
fn what_changes_while_the_driver_is_asked_is_not_lost() -> anyhow::Result<()> {
    on_stage("immediate-change", async |stage| {
        let refuse = |what: &What| match what {
            What::Claim(_) => Act::Fail(DriverError::invalid("ParametersInvalid", "nothing is there")),
            _ => Act::Wait,
        };
        // By the driver's announcement, and by the class: both while the very first call, about the class, waits.
        stage.driver.rule(refuse);
        let controller = stage.start().await?;
        stage.immediate("announced").await?;
        stage
            .driver
            .until("read the class", |calls| !calls.is_empty())
            .await?;
        stage.driver.announce(CapacityCause::Parameters);
        stage.fence().await?;
        stage.driver.open();
        stage
            .driver
            .until("read the claim again", |calls| {
                count(calls, |what| matches!(what, What::Claim(_))) >= 2
            })
            .await?;
        stage.driver.behave();
        stage.driver.announce(CapacityCause::Parameters);
        stage.until_claim("announced", "allocated", is_allocated).await?;

        stage.driver.close();
        stage.driver.rule(refuse);
        let before = stage.driver.calls().len();
        stage.immediate("changed").await?;
        stage
            .driver
            .until("read the class", move |calls| calls.len() > before)
            .await?;
        stage
            .patch_class(
                &stage.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "new" } }),
            )
            .await?;
        stage.fence().await?;
        stage.driver.open();
        stage
            .driver
            .until("read the changed class", |calls| {
                count(
                    calls,
                    |what| matches!(what, What::Class(class) if class.parameters_ref.is_some()),
                ) >= 1
            })
            .await?;
        controller.end().await
    })
}
