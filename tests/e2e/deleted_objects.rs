//! Deleted nodes, inventories, CRDs and claims, with the controller running and not running.

use drayman::api::crd::{NodeInventory, definitions};
use drayman::api::resource::{Pod, ResourceClaim};
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::conditions::is_crd_established;
use serde_json::{Value, json};

use crate::controller::assert_distinct;
use crate::pods::{MINORS, look_inside, start_node};
use crate::setup::{DRIVER, Setup, has_finalizer, is_allocated, is_gone, is_running, pod_with_claim};
use crate::stored_claims::{CONTROLLER, devices};

fn inventories(setup: &Setup) -> Api<NodeInventory> {
    Api::all(setup.cluster.client())
}

/// Deletes a node and its inventory. In production, the garbage collector deletes the inventory.
async fn remove_node(setup: &Setup, name: &str) -> anyhow::Result<()> {
    let nodes = Api::<Node>::all(setup.cluster.client());
    nodes.delete(name, &DeleteParams::default()).await?;
    let inventory = format!("{name}.{DRIVER}");
    inventories(setup)
        .delete(&inventory, &DeleteParams::default())
        .await?;
    setup.wait(nodes, name, "gone", is_gone()).await?;
    setup
        .wait(inventories(setup), &inventory, "gone", is_gone())
        .await
        .map(drop)
}

/// Waits until deallocation of a claim is requested.
async fn until_deallocation_requested(setup: &Setup, name: &str) -> anyhow::Result<()> {
    let met =
        |claim: Option<&ResourceClaim>| claim.is_none_or(|claim| claim.metadata.deletion_timestamp.is_some());
    setup
        .wait(setup.claims(), name, "deallocation requested", met)
        .await
        .map(drop)
}

#[tokio::test]
async fn a_node_that_is_made_again_under_its_name_is_another_node() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    setup.make_claim("kept", "Immediate", false).await?;
    let kept = setup.until_allocated("kept").await?;
    let first = setup.node_uid("node-a").await?;
    setup.make_pod("waits").await?;
    setup
        .wait_for_event("waits", "NoSuitableDevice", "1 of 1 held")
        .await?;

    remove_node(&setup, "node-a").await?;
    setup.make_fake_devices("node-a", 1).await?;
    let second = setup.node_uid("node-a").await?;
    assert_ne!(first, second);
    // The new node's device of the same name is a different one, and free.
    setup.until_bound("waits").await?;
    let claim = setup.claim_of("waits", "allocated", is_allocated).await?;
    let text = serde_json::to_string(&claim.status)?;
    assert!(text.contains(&second) && !text.contains(&first), "{text}");
    assert_eq!(
        setup.claims().get("kept").await?.status,
        kept.status,
        "the allocation stays as it is"
    );
    // The claim on the deleted node can be deleted, which does not affect the new node.
    setup.delete_claim("kept").await?;
    setup.make_pod("next").await?;
    setup
        .wait_for_event("next", "NoSuitableDevice", "1 of 1 held")
        .await?;
    setup.remove_pod("waits").await?;
    setup.until_bound("next").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn an_inventory_of_a_replaced_node_does_not_count() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let first = setup.node_uid("node-a").await?;
    assert_eq!(setup.serve("before").await?, ["node-a/drayman-test-0"]);
    // The companion of the new node replaces the inventory, with the new node's uid.
    let nodes = Api::<Node>::all(setup.cluster.client());
    nodes.delete("node-a", &DeleteParams::default()).await?;
    setup.wait(nodes, "node-a", "gone", is_gone()).await?;
    setup.make_fake_node("node-a").await?;
    let second = setup.node_uid("node-a").await?;
    setup.write_inventory("node-a", &second, 2).await?;
    for (name, device) in [("one", "node-a/drayman-test-0"), ("two", "node-a/drayman-test-1")] {
        assert_eq!(
            setup.serve(name).await?,
            [device],
            "held on the deleted node only"
        );
        let claim = setup.claim_of(name, "allocated", is_allocated).await?;
        let text = serde_json::to_string(&claim.status)?;
        assert!(text.contains(&second) && !text.contains(&first), "{text}");
    }
    setup.end([controller]).await
}

#[tokio::test]
async fn a_controller_catches_up_after_an_absence_and_is_idle() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    for (node, count) in [("node-a", 2), ("node-b", 2), ("node-c", 1)] {
        setup.make_fake_devices(node, count).await?;
    }
    setup.make_template(None).await?;
    let mut controller = setup.controller()?;
    let mut place = std::collections::BTreeMap::new();
    for number in 0..5 {
        let name = format!("pod-{number}");
        let got = setup.serve(&name).await?;
        place.insert(got.first().cloned().unwrap_or_default(), name);
    }
    setup.make_pod("waits").await?;
    setup.wait_for_event("waits", "NoSuitableDevice", "held").await?;
    let on = |device: &str| place.get(device).cloned().unwrap_or_default();
    let (gone, deleted, shrunk, stays) = (
        on("node-c/drayman-test-0"),
        on("node-b/drayman-test-0"),
        on("node-a/drayman-test-1"),
        on("node-a/drayman-test-0"),
    );
    let claim_of = async |pod: &str| setup.claim_of(pod, "allocated", is_allocated).await;
    let name_of = |claim: &ResourceClaim| claim.metadata.name.clone().unwrap_or_default();
    let (lost, freed) = (claim_of(&gone).await?, claim_of(&deleted).await?);
    let (shrunk_before, stays_before) = (claim_of(&shrunk).await?, claim_of(&stays).await?);

    controller.kill().await?;
    // A node and its pod are deleted, another pod ends, and an inventory loses a device that a claim holds.
    remove_node(&setup, "node-c").await?;
    for pod in [&gone, &deleted] {
        setup.remove_pod(pod).await?;
    }
    for claim in [&lost, &freed] {
        until_deallocation_requested(&setup, &name_of(claim)).await?;
    }
    setup
        .write_inventory("node-a", &setup.node_uid("node-a").await?, 1)
        .await?;

    let controller = setup.controller()?;
    for claim in [&lost, &freed] {
        setup.until_claim_gone(&name_of(claim)).await?;
    }
    setup.until_bound("waits").await?;
    assert_eq!(devices(&claim_of("waits").await?)?, ["node-b/drayman-test-0"]);
    for (pod, before) in [(&shrunk, &shrunk_before), (&stays, &stays_before)] {
        assert_eq!(
            claim_of(pod).await?.status,
            before.status,
            "{pod} keeps its device"
        );
    }
    assert_distinct(&setup).await?;
    // The lost device is not allocated again, neither while it is held nor after its release.
    setup.make_pod("more").await?;
    setup
        .wait_for_event("more", "NoSuitableDevice", "1 of 1 held")
        .await?;
    setup.remove_pod(&shrunk).await?;
    setup.until_claim_gone(&name_of(&shrunk_before)).await?;
    let rested = setup.controller_writes().await?.len();
    // The device returns.
    setup
        .write_inventory("node-a", &setup.node_uid("node-a").await?, 2)
        .await?;
    setup.until_bound("more").await?;
    assert_eq!(devices(&claim_of("more").await?)?, ["node-a/drayman-test-1"]);
    // Two writes for the claim, and any number of context updates before or between them.
    let writes = setup.controller_writes().await?.split_off(rested);
    let more = name_of(&claim_of("more").await?);
    let of_claim = writes
        .iter()
        .filter(|entry| entry.resource == "resourceclaims" && entry.name == more);
    assert_eq!(of_claim.count(), 2, "{writes:?}");
    assert!(writes.len() <= 4, "{writes:?}");
    setup.end([controller]).await
}

#[tokio::test]
async fn without_our_crds_claims_are_released_and_later_served() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let mut controller = setup.controller()?;
    setup.serve("stays").await?;
    setup.serve("goes").await?;
    let goes = setup.claim_of("goes", "allocated", is_allocated).await?;
    let stays = setup.claim_of("stays", "allocated", is_allocated).await?;
    let api = Api::<CustomResourceDefinition>::all(setup.cluster.client());
    for definition in definitions() {
        let name = definition.metadata.name.unwrap_or_default();
        api.delete(&name, &DeleteParams::default()).await?;
        setup.wait(api.clone(), &name, "gone", is_gone()).await?;
    }
    // The described objects are deleted with the CRDs; allocated claims stay and can be released.
    setup.remove_pod("goes").await?;
    let name = goes.metadata.name.clone().unwrap_or_default();
    setup.until_claim_gone(&name).await?;
    setup.make_pod("waits").await?;

    // A controller that starts without the CRDs logs the fix, does nothing else, and retries with backoff.
    controller.kill().await?;
    let controller = setup.controller()?;
    controller.logged("install the definitions").await?;
    let asked = |entries: Vec<crate::harness::Entry>| {
        entries
            .iter()
            .filter(|entry| entry.group == DRIVER && entry.code == 404)
            .count()
    };
    let refused = asked(setup.cluster.audit().of_user(CONTROLLER).await?);
    assert!(refused < 100, "{refused} requests for missing APIs");
    let claim = stays.metadata.name.clone().unwrap_or_default();
    assert_eq!(setup.claims().get(&claim).await?.status, stays.status);

    for definition in definitions() {
        let name = definition.metadata.name.clone().unwrap_or_default();
        api.create(&PostParams::default(), &definition).await?;
        setup
            .wait(api.clone(), &name, "established", is_crd_established())
            .await?;
    }
    let parameters = json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClassParameters",
        "metadata": { "name": "test" }, "spec": { "kind": "test" } });
    setup.apply(&parameters).await?;
    setup
        .write_inventory("node-a", &setup.node_uid("node-a").await?, 2)
        .await?;
    setup.until_bound("waits").await?;
    assert_distinct(&setup).await?;
    assert_eq!(setup.claims().get(&claim).await?.status, stays.status);
    setup.end([controller]).await
}

#[tokio::test]
async fn a_claim_with_our_finalizer_only_can_be_deleted_and_used() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    // Left by a crashed process: the finalizer is set and nothing else.
    for name in ["used", "deleted"] {
        setup.make_claim(name, "WaitForFirstConsumer", true).await?;
    }
    let _ = setup.claims().delete("deleted", &DeleteParams::default()).await?;
    let controller = setup.controller()?;
    setup.until_claim_gone("deleted").await?;
    setup.make_pod_with("pod", "used").await?;
    setup.until_bound("pod").await?;
    let claim = setup.claims().get("used").await?;
    assert!(has_finalizer(&claim) && is_allocated(&claim));
    // Removing the finalizer from an allocated claim in use does not free its device.
    let off = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    setup
        .claims()
        .patch("used", &PatchParams::default(), &off)
        .await?;
    setup.make_template(None).await?;
    setup.make_pod("next").await?;
    setup
        .wait_for_event("next", "NoSuitableDevice", "1 of 1 held")
        .await?;
    setup.remove_pod("pod").await?;
    let _ = setup.claims().delete("used", &DeleteParams::default()).await?;
    setup.until_bound("next").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn a_namespace_deleted_with_claims_in_use_goes_and_frees_all() -> anyhow::Result<()> {
    const TENANT: &str = "tenant";
    let (setup, controller, companion) = start_node(MINORS.len()).await?;
    let client = setup.cluster.client();
    let namespaces = Api::<Namespace>::all(client.clone());
    setup.cluster.kubectl(&["create", "namespace", TENANT]).await?;
    let object = |kind: &str, name: &str, spec: Value| {
        let group = if kind == "DeviceClaimParameters" {
            "drayman.dev/v1alpha1"
        } else {
            "resource.k8s.io/v1alpha2"
        };
        json!({ "apiVersion": group, "kind": kind, "metadata": { "name": name, "namespace": TENANT }, "spec": spec })
    };
    let parameters = json!({ "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": "one" });
    let delayed = json!({ "resourceClassName": "test", "parametersRef": parameters });
    let mut immediate = delayed.clone();
    immediate["allocationMode"] = json!("Immediate");
    for object in [
        object(
            "DeviceClaimParameters",
            "one",
            json!({ "requests": [{ "name": "device" }] }),
        ),
        object(
            "ResourceClaimTemplate",
            "test",
            json!({ "spec": delayed.clone() }),
        ),
        object("ResourceClaim", "shared", delayed),
        object("ResourceClaim", "unused", immediate),
    ] {
        setup.apply(&object).await?;
    }
    // A standalone claim, a claim shared by two pods, and a waiting pod.
    let pods = Api::<Pod>::namespaced(client.clone(), TENANT);
    for (name, claims) in [("own", 1), ("shares", 0), ("shares-too", 0), ("waits", 3)] {
        let mut pod = pod_with_claim(name)?;
        if claims == 0 {
            pod.spec.resource_claims[0].source =
                serde_json::from_value(json!({ "resourceClaimName": "shared" }))?;
        }
        for number in 1..claims {
            let mut entry = pod.spec.resource_claims[0].clone();
            entry.name = format!("device-{number}");
            pod.spec.resource_claims.push(entry);
        }
        pods.create(&PostParams::default(), &pod).await?;
        if name != "waits" {
            setup.wait(pods.clone(), name, "running", is_running()).await?;
        }
    }
    let claims = Api::<ResourceClaim>::namespaced(client, TENANT);
    let met = |claim: Option<&ResourceClaim>| claim.is_some_and(is_allocated);
    setup.wait(claims.clone(), "unused", "allocated", met).await?;

    let _ = namespaces.delete(TENANT, &DeleteParams::default()).await?;
    let begun = std::time::Instant::now();
    setup.wait(namespaces, TENANT, "gone", is_gone()).await?;
    println!("the namespace is gone after {:?}", begun.elapsed());
    let traces = setup.cluster.node(0).list("/run/cdi")?;
    assert!(traces.iter().all(|name| !name.contains("claim_")), "{traces:?}");
    for number in 0..MINORS.len() {
        setup.make_pod(&format!("next-{number}")).await?;
    }
    for number in 0..MINORS.len() {
        look_inside(&setup, &format!("next-{number}"))
            .await?
            .only_device();
    }
    assert_distinct(&setup).await?;
    setup.end([companion, controller]).await
}
