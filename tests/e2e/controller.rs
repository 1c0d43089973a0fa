//! The controller on a real control plane. The nodes are fake: the scheduler binds pods to them, but nothing runs there.

use std::collections::BTreeSet;

use drayman::api::crd::DeviceClaimParameters;
use drayman::api::resource::ResourceClaim;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;

use crate::setup::{DRIVER, Setup, controller_rules, has_finalizer, is_allocated};
use crate::stored_claims::handle;

#[tokio::test]
async fn a_pod_with_one_claim_costs_three_writes_and_one_read() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;

    setup.serve("first").await?;
    let claim = setup.claim_of("first", "allocated", is_allocated).await?;
    assert!(has_finalizer(&claim), "the finalizer precedes the allocation");
    assert_eq!(claim.status.driver_name.as_deref(), Some(DRIVER));
    let reserved: Vec<&str> = claim
        .status
        .reserved_for
        .iter()
        .map(|consumer| consumer.name.as_str())
        .collect();
    assert_eq!(reserved, ["first"]);
    let handle = handle(&claim)?;
    assert_eq!(handle.node_name, "node-a");
    assert_eq!(Some(&handle.claim_uid), claim.metadata.uid.as_ref());
    assert_eq!(handle.devices.len(), 1);

    // Deleted before its pod, which protects it: otherwise the garbage collector's deletion would have to arrive shortly after the claim
    // controller's request for deallocation, and a late one costs another write.
    let name = claim.metadata.name.clone().unwrap_or_default();
    let _ = setup.claims().delete(&name, &DeleteParams::default()).await?;
    setup.remove_pod("first").await?;
    setup.until_claim_gone(&name).await?;

    let requests: Vec<_> = setup
        .cluster
        .audit()
        .of_user("drayman-controller")
        .await?
        .into_iter()
        .filter(|entry| !matches!(entry.verb.as_str(), "list" | "watch") && !entry.resource.is_empty())
        .map(|entry| {
            format!(
                "{} {}/{} {}",
                entry.verb, entry.resource, entry.subresource, entry.code
            )
        })
        .collect();
    println!("requests for one pod: {requests:?}");
    assert_eq!(
        requests,
        [
            "get pods/ 200",
            "patch resourceclaims/ 200",
            "patch resourceclaims/status 200",
            "patch resourceclaims/ 200",
        ]
    );
    let events = setup
        .cluster
        .kubectl(&["get", "events", "--output=jsonpath={.items[*].reason}"])
        .await?;
    let unwanted: Vec<&str> = events
        .split_whitespace()
        .filter(|reason| !["Scheduled", "FailedScheduling", "RegisteredNode"].contains(reason))
        .collect();
    assert!(
        unwanted.is_empty(),
        "a normal pod has no event of ours: {unwanted:?}"
    );
    setup.end([controller]).await
}

/// Asserts that no device is in the allocations of two claims.
pub(crate) async fn assert_distinct(setup: &Setup) -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    for claim in setup
        .claims()
        .list(&ListParams::default())
        .await?
        .iter()
        .filter(|claim| is_allocated(claim))
    {
        let handle = handle(claim)?;
        for device in handle.devices {
            assert!(
                seen.insert((handle.node_name.clone(), device.device.clone())),
                "{} twice",
                device.device
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_claim_that_is_deleted_at_any_moment_leaves_nothing_behind() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    let controller = setup.controller()?;
    // Before any pod exists.
    setup.make_claim("unused", "WaitForFirstConsumer", false).await?;
    setup.delete_claim("unused").await?;
    // During the allocation, repeatedly: the only device must be free afterwards.
    for round in 0..10 {
        let name = format!("round-{round}");
        setup.make_claim(&name, "WaitForFirstConsumer", false).await?;
        setup.make_pod_with(&name, &name).await?;
        if round % 2 == 0 {
            setup
                .wait(
                    setup.claims(),
                    &name,
                    "secured",
                    |claim: Option<&ResourceClaim>| claim.is_some_and(has_finalizer),
                )
                .await?;
        } else {
            setup
                .wait(setup.contexts(), &name, "there", |context: Option<&_>| {
                    context.is_some()
                })
                .await?;
        }
        let _ = setup.claims().delete(&name, &DeleteParams::default()).await?;
        setup.remove_pod(&name).await?;
        setup.until_claim_gone(&name).await?;
    }
    // The device is free.
    setup.make_template(None).await?;
    setup.serve("last").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn wrong_parameters_are_named_and_a_fix_helps_at_once() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 4).await?;
    setup.make_template(Some("two")).await?;
    let controller = setup.controller()?;
    setup.make_pod("missing").await?;
    let event = setup
        .wait_for_event("missing", "ParametersNotFound", "does not exist; create it")
        .await?;
    let message = event.message.unwrap_or_default();
    assert!(
        message.contains("DeviceClaimParameters") && message.contains("two"),
        "{message}"
    );
    // The schema rejects invalid counts before the controller sees them.
    for (count, hint) in [
        (json!(0), "greater than or equal to 1"),
        (json!(1_000_000_000), "less than or equal to 64"),
        (json!("x"), "integer"),
    ] {
        let wrong = parameters(&count);
        let Err(error) = setup.apply(&wrong).await else {
            anyhow::bail!("{wrong} was accepted")
        };
        assert!(error.to_string().contains(hint), "{error}");
    }
    setup.apply(&parameters(&json!(2))).await?;
    setup.until_bound("missing").await?;
    let claim = setup.claim_of("missing", "allocated", is_allocated).await?;
    assert_eq!(handle(&claim)?.devices.len(), 2);

    // More devices than any node has: reported with counts, and does not block other claims.
    Api::<DeviceClaimParameters>::namespaced(setup.cluster.client(), "default")
        .patch(
            "two",
            &PatchParams::default(),
            &Patch::Merge(json!({ "spec": { "requests": [{ "name": "device", "count": 64 }] } })),
        )
        .await?;
    setup.make_pod("greedy").await?;
    setup.wait_for_event("greedy", "NoSuitableDevice", "64").await?;
    setup.end([controller]).await
}

fn parameters(count: &serde_json::Value) -> serde_json::Value {
    json!({
        "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters", "metadata": { "name": "two" },
        "spec": { "requests": [{ "name": "device", "count": count }] },
    })
}

#[tokio::test]
async fn a_controller_killed_at_any_step_leaves_the_same_end_state() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;

    // After the finalizer: without the right to write the status, the allocation fails.
    let mut rules = controller_rules()?;
    for resources in rules.iter_mut().filter_map(|rule| rule.resources.as_mut()) {
        resources.retain(|resource| resource != "resourceclaims/status");
    }
    setup.cluster.user("drayman-controller", &rules).await?;
    let mut controller = setup.controller()?;
    setup.make_pod("pod").await?;
    setup.claim_of("pod", "secured", has_finalizer).await?;
    setup
        .wait_for_event("pod", "AllocationNotRecorded", "forbidden")
        .await?;
    controller.kill().await?;
    setup
        .cluster
        .user("drayman-controller", &controller_rules()?)
        .await?;
    let mut controller = setup.controller()?;
    // After the allocation.
    setup.claim_of("pod", "allocated", is_allocated).await?;
    controller.kill().await?;
    let mut controller = setup.controller()?;
    setup.until_bound("pod").await?;
    // Before the release: the pod is deleted while no controller runs.
    controller.kill().await?;
    let claim = setup.claim_of("pod", "allocated", is_allocated).await?;
    setup.remove_pod("pod").await?;
    let name = claim.metadata.name.clone().unwrap_or_default();
    let released = |claim: Option<&ResourceClaim>| {
        claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_some())
    };
    setup
        .wait(setup.claims(), &name, "deallocation requested", released)
        .await?;
    let controller = setup.controller()?;
    setup.until_claim_gone(&name).await?;
    // The only device is free again, and all other state is unaffected.
    setup.serve("next").await?;
    assert_distinct(&setup).await?;
    setup.end([controller]).await
}
