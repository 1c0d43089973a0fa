//! The controller on a real control plane. The nodes are fake: the scheduler binds pods to them, but nothing runs there.

use std::collections::BTreeSet;

use drayman::api::crd::DeviceClaimParameters;
use drayman::api::handle::DeviceHandle;
use drayman::api::resource::{Pod, ResourceClaim, controller_of};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::conditions::is_deleted;
use serde_json::json;

use crate::setup::{DRIVER, Setup, has_finalizer, is_allocated, is_bound, is_gone, pod_with_claim};

fn handle(claim: &ResourceClaim) -> anyhow::Result<DeviceHandle> {
    let handles = claim
        .status
        .allocation
        .as_ref()
        .map(|allocation| allocation.resource_handles.as_slice());
    let data = handles
        .and_then(|handles| handles.first())
        .and_then(|handle| handle.data.as_deref());
    Ok(DeviceHandle::parse(data.unwrap_or_default())?)
}

#[tokio::test]
async fn a_pod_with_one_claim_costs_three_writes_and_one_read() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;

    setup.make_pod("first").await?;
    setup.wait(setup.pods(), "first", "bound", is_bound()).await?;
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

    setup.remove_pod("first").await?;
    let name = claim.metadata.name.clone().unwrap_or_default();
    setup.wait(setup.claims(), &name, "gone", is_gone()).await?;

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
    controller.end().await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn each_freed_device_lets_exactly_one_waiting_pod_in() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 3).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let names = ["pod-0", "pod-1", "pod-2", "pod-3", "pod-4"];
    for name in names {
        setup.make_pod(name).await?;
    }
    let mut waiting: BTreeSet<&str> = names.into();
    let mut bound: Vec<&str> = Vec::new();
    for expected in [3, 4, 5] {
        while bound.len() < expected {
            let name = first_bound(&setup, &waiting).await?;
            waiting.remove(name);
            bound.push(name);
        }
        assert_distinct(&setup).await?;
        for name in &waiting {
            setup
                .wait_for_event(name, "NoSuitableDevice", "3 of 3 held")
                .await?;
        }
        let allocated = setup.claims().list(&ListParams::default()).await?;
        assert_eq!(
            allocated.iter().filter(|claim| is_allocated(claim)).count(),
            3,
            "no more pods than devices"
        );
        setup.remove_pod(bound[expected - 3]).await?;
    }
    controller.end().await?;
    setup.cluster.stop().await
}

/// Waits until one of these pods is bound.
async fn first_bound<'a>(setup: &Setup, names: &BTreeSet<&'a str>) -> anyhow::Result<&'a str> {
    let waits = names.iter().map(|name| {
        Box::pin(async move {
            setup
                .wait(setup.pods(), name, "bound", is_bound())
                .await
                .map(|_| *name)
        })
    });
    let (name, _, _) = futures::future::select_all(waits).await;
    name
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
    let claim = |name: &str| -> anyhow::Result<ResourceClaim> {
        Ok(serde_json::from_value(
            json!({ "metadata": { "name": name }, "spec": { "resourceClassName": "test" } }),
        )?)
    };
    // Before any pod exists.
    setup
        .claims()
        .create(&PostParams::default(), &claim("unused")?)
        .await?;
    setup.claims().delete("unused", &DeleteParams::default()).await?;
    setup.wait(setup.claims(), "unused", "gone", is_gone()).await?;
    // During the allocation, repeatedly: the only device must be free afterwards.
    for round in 0..10 {
        let name = format!("round-{round}");
        setup
            .claims()
            .create(&PostParams::default(), &claim(&name)?)
            .await?;
        let pod = pod_naming_claim(&name, &name)?;
        setup.pods().create(&PostParams::default(), &pod).await?;
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
        setup.wait(setup.claims(), &name, "gone", is_gone()).await?;
    }
    // The device is free.
    setup.make_template(None).await?;
    setup.make_pod("last").await?;
    setup.wait(setup.pods(), "last", "bound", is_bound()).await?;
    controller.end().await?;
    setup.cluster.stop().await
}

/// A pod that references an existing claim.
fn pod_naming_claim(name: &str, claim: &str) -> anyhow::Result<Pod> {
    let mut pod = pod_with_claim(name)?;
    pod.spec.resource_claims[0].source.resource_claim_template_name = None;
    pod.spec.resource_claims[0].source.resource_claim_name = Some(claim.to_owned());
    Ok(pod)
}

#[tokio::test]
async fn a_pod_recreated_under_the_same_name_gets_a_claim_of_its_own() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let mut uids = BTreeSet::new();
    for _ in 0..3 {
        let pod = setup.make_pod("again").await?;
        setup.wait(setup.pods(), "again", "bound", is_bound()).await?;
        let claim = setup.claim_of("again", "allocated", is_allocated).await?;
        assert_eq!(
            controller_of(&claim.metadata).map(|owner| &owner.uid),
            pod.metadata.uid.as_ref()
        );
        assert!(uids.insert(claim.metadata.uid.clone()));
        setup.remove_pod("again").await?;
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        setup
            .wait(setup.pods(), "again", "gone", is_deleted(&uid))
            .await?;
    }
    controller.end().await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_missing_class_is_named_and_its_creation_helps_at_once() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    let controller = setup.controller()?;
    let immediate: ResourceClaim = serde_json::from_value(json!({
        "metadata": { "name": "early" }, "spec": { "resourceClassName": "late", "allocationMode": "Immediate" },
    }))?;
    setup.claims().create(&PostParams::default(), &immediate).await?;
    setup
        .wait_for_event("early", "ResourceClassMissing", "create the class")
        .await?;
    setup.make_class("late").await?;
    let met = |claim: Option<&ResourceClaim>| claim.is_some_and(is_allocated);
    setup.wait(setup.claims(), "early", "allocated", met).await?;

    // For a pod, the scheduler reports the missing class itself and does not ask the driver.
    let delayed: ResourceClaim = serde_json::from_value(json!({
        "metadata": { "name": "delayed" }, "spec": { "resourceClassName": "later" },
    }))?;
    setup.claims().create(&PostParams::default(), &delayed).await?;
    setup
        .pods()
        .create(&PostParams::default(), &pod_naming_claim("delayed", "delayed")?)
        .await?;
    setup
        .wait_for_event("delayed", "FailedScheduling", "later")
        .await?;
    setup.claims().delete("early", &DeleteParams::default()).await?;
    setup.make_class("later").await?;
    // Up to 1.28, the scheduler tries such a pod again only after minutes.
    if setup.cluster.minor() >= 29 {
        setup.wait(setup.pods(), "delayed", "bound", is_bound()).await?;
    }
    controller.end().await?;
    setup.cluster.stop().await
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
    setup.wait(setup.pods(), "missing", "bound", is_bound()).await?;
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
    controller.end().await?;
    setup.cluster.stop().await
}

fn parameters(count: &serde_json::Value) -> serde_json::Value {
    json!({
        "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters", "metadata": { "name": "two" },
        "spec": { "requests": [{ "name": "device", "count": count }] },
    })
}

#[tokio::test]
async fn an_unusable_class_is_reported_on_class_and_pod() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;
    setup
        .classes()
        .patch(
            "test",
            &PatchParams::default(),
            &Patch::Merge(json!({ "parametersRef": { "name": "nowhere" } })),
        )
        .await?;
    let controller = setup.controller()?;
    setup.make_pod("pod").await?;
    setup
        .wait_for_event("pod", "ParametersNotFound", "nowhere")
        .await?;
    setup
        .wait_for_event("test", "ParametersNotFound", "nowhere")
        .await?;
    setup
        .classes()
        .patch(
            "test",
            &PatchParams::default(),
            &Patch::Merge(json!({ "parametersRef": { "name": "test" } })),
        )
        .await?;
    setup.wait(setup.pods(), "pod", "bound", is_bound()).await?;
    controller.end().await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_controller_killed_at_any_step_leaves_the_same_end_state() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;

    // After the finalizer: without the right to write the status, the allocation fails.
    let mut rules = crate::setup::controller_rules()?;
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
        .user("drayman-controller", &crate::setup::controller_rules()?)
        .await?;
    let mut controller = setup.controller()?;
    // After the allocation.
    setup.claim_of("pod", "allocated", is_allocated).await?;
    controller.kill().await?;
    let mut controller = setup.controller()?;
    setup.wait(setup.pods(), "pod", "bound", is_bound()).await?;
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
    setup.wait(setup.claims(), &name, "gone", is_gone()).await?;
    // The only device is free again, and all other state is unaffected.
    setup.make_pod("next").await?;
    setup.wait(setup.pods(), "next", "bound", is_bound()).await?;
    assert_distinct(&setup).await?;
    controller.end().await?;
    setup.cluster.stop().await
}
