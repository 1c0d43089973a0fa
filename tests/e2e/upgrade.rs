//! Objects of other releases: readable ones count, unreadable ones are reported and never guessed.

use std::time::Duration;

use anyhow::Context as _;
use drayman::api::crd::NodeInventory;
use drayman::api::resource::{ResourceClaim, ResourceClaimStatus};
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::controller::assert_distinct;
use crate::pods::{assert_unprepared, look_inside, start_node};
use crate::setup::{DRIVER, Setup, is_allocated};
use crate::stored_claims::{devices, first_handle, kind, open_schemas, write};

#[tokio::test]
async fn a_handle_of_another_release_counts_until_its_claim_is_gone() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 3).await?;
    setup.make_template(None).await?;
    let node_uid = setup.node_uid("node-a").await?;
    setup
        .record("first", "node-a", |uid| {
            first_handle(uid, "node-a", &node_uid, "drayman-test-0")
        })
        .await?;
    // Additional fields do not change the meaning of the others; for that, the version changes.
    setup
        .record("later", "node-a", |uid| {
            let handle = first_handle(uid, "node-a", &node_uid, "drayman-test-1");
            handle.replacen('{', r#"{"priority":{"class":"high"},"#, 1)
        })
        .await?;
    let controller = setup.controller()?;
    assert_eq!(
        setup.serve("one").await?,
        ["node-a/drayman-test-2"],
        "the only free device"
    );
    setup.make_pod("two").await?;
    setup
        .wait_for_event("two", "NoSuitableDevice", "3 of 3 held")
        .await?;
    for name in ["first", "later"] {
        assert_eq!(setup.event_count(name, "HoldingUnreadable").await?, 0);
    }
    setup.delete_claim("first").await?;
    assert_eq!(setup.served("two").await?, ["node-a/drayman-test-0"]);
    // A claim that an earlier release allocated serves its pod.
    setup.make_pod_with("three", "later").await?;
    setup.until_bound("three").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn unreadable_allocations_are_reported_and_block_their_node() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let node_uid = setup.node_uid("node-a").await?;
    let newer = |uid: &str| {
        first_handle(uid, "node-a", &node_uid, "drayman-test-0").replace("\"version\":1", "\"version\":2")
    };
    let ours = |data: &str| json!({ "driverName": DRIVER, "data": data });
    // Each of them alone blocks the node.
    setup.record("newer", "node-a", newer).await?;
    setup.record("nonsense", "node-a", |_| "{{{".to_owned()).await?;
    for (name, handles) in [
        (
            "nobodys",
            json!([{ "driverName": "somebody.example.com", "data": "theirs" }]),
        ),
        ("double", json!([ours("{}"), ours("{}")])),
    ] {
        setup.make_claim(name, "WaitForFirstConsumer", true).await?;
        setup.write_allocation(name, Some("node-a"), &handles).await?;
    }
    let unreadable = [
        ("newer", "has version 2, this release reads up to 1"),
        ("nonsense", "cannot be read"),
        (
            "nobodys",
            "has 0 resource handles of driver drayman.dev instead of one",
        ),
        (
            "double",
            "has 2 resource handles of driver drayman.dev instead of one",
        ),
    ];
    let mut controller = setup.controller()?;
    for (name, message) in unreadable {
        setup.wait_for_event(name, "HoldingUnreadable", message).await?;
    }
    setup.make_pod("waits").await?;
    setup
        .wait_for_event("waits", "NoSuitableDevice", "cannot read")
        .await?;
    // Other pods get devices of other nodes.
    setup.make_fake_devices("node-b", 3).await?;
    assert_eq!(setup.served("waits").await?, ["node-b/drayman-test-0"]);
    for (name, _) in unreadable {
        assert_eq!(setup.event_count(name, "HoldingUnreadable").await?, 1, "{name}");
    }
    let touched = |name: &str| name != "waits";
    let written: Vec<_> = setup.controller_writes().await?;
    assert!(
        written.iter().all(|write| !unreadable
            .iter()
            .any(|(name, _)| write.name == *name && touched(name))),
        "unreadable allocations stay unchanged: {written:?}"
    );
    // A restart makes no difference.
    controller.kill().await?;
    let controller = setup.controller()?;
    assert_eq!(setup.serve("second").await?, ["node-b/drayman-test-1"]);
    // As long as one of them exists, nothing is allocated there.
    for (name, _) in &unreadable[..3] {
        setup.delete_claim(name).await?;
    }
    assert_eq!(setup.serve("third").await?, ["node-b/drayman-test-2"]);
    setup.make_pod("fourth").await?;
    setup
        .wait_for_event("fourth", "NoSuitableDevice", "cannot read")
        .await?;
    setup.delete_claim("double").await?;
    assert_eq!(setup.served("fourth").await?, ["node-a/drayman-test-0"]);
    setup.end([controller]).await
}

#[tokio::test]
async fn a_copied_allocation_is_reported_and_frees_nothing() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    // The claim with the copy may be the older one; the age does not decide.
    setup
        .make_claim("older-copy", "WaitForFirstConsumer", true)
        .await?;
    let made = setup.claims().get("older-copy").await?;
    let next_second = made.metadata.creation_timestamp.context("a time")?.0 + Duration::from_secs(1);
    while jiff::Timestamp::now() < next_second {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut controller = setup.controller()?;
    assert_eq!(setup.serve("owner").await?, ["node-a/drayman-test-0"]);
    let original = setup.claim_of("owner", "allocated", is_allocated).await?;
    let handles = original
        .status
        .allocation
        .iter()
        .flat_map(|one| &one.resource_handles);
    let handles = serde_json::to_value(handles.collect::<Vec<_>>())?;
    setup
        .make_claim("younger-copy", "WaitForFirstConsumer", true)
        .await?;
    let uid = original.metadata.uid.clone().unwrap_or_default();
    let name = original.metadata.name.clone().unwrap_or_default();
    for copy in ["older-copy", "younger-copy"] {
        setup.write_allocation(copy, Some("node-a"), &handles).await?;
        // Both events are sent together, the one about the device last.
        setup
            .wait_for_event(copy, "AllocationMadeForAnother", &uid)
            .await?;
        setup
            .wait_for_event(copy, "DeviceHeldTwice", &format!("default/{copy} is rolled back"))
            .await?;
        let rolled_back = |claim: Option<&ResourceClaim>| claim.is_some_and(|claim| !is_allocated(claim));
        setup
            .wait(setup.claims(), copy, "rolled back", rolled_back)
            .await?;
        assert_eq!(setup.event_count(&name, "DeviceHeldTwice").await?, 0);
    }
    // The order of a new controller's initial list does not matter either.
    controller.kill().await?;
    setup
        .write_allocation("older-copy", Some("node-a"), &handles)
        .await?;
    let controller = setup.controller()?;
    let rolled_back = |claim: Option<&ResourceClaim>| claim.is_some_and(|claim| !is_allocated(claim));
    setup
        .wait(setup.claims(), "older-copy", "rolled back again", rolled_back)
        .await?;
    for copy in ["older-copy", "younger-copy"] {
        setup.delete_claim(copy).await?;
    }
    assert_eq!(
        setup.serve("next").await?,
        ["node-a/drayman-test-1"],
        "the other one is still held"
    );
    assert_eq!(setup.claims().get(&name).await?.status, original.status);
    setup.end([controller]).await
}

#[tokio::test]
async fn an_allocation_with_a_renamed_driver_keeps_its_device() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let mut controller = setup.controller()?;
    assert_eq!(setup.serve("made").await?, ["node-a/drayman-test-0"]);
    setup.make_claim("named", "WaitForFirstConsumer", false).await?;
    setup.make_pod_with("names", "named").await?;
    setup.until_bound("names").await?;
    let made = setup.claim_of("made", "allocated", is_allocated).await?;
    let made = made.metadata.name.unwrap_or_default();
    let renamed = Patch::Merge(json!({ "status": { "driverName": "somebody.example.com" } }));
    for claim in [made.as_str(), "named"] {
        setup
            .claims()
            .patch_status(claim, &PatchParams::default(), &renamed)
            .await?;
    }
    // Nor after a restart.
    for waiting in ["first", "second"] {
        setup.make_pod(waiting).await?;
        setup
            .wait_for_event(waiting, "NoSuitableDevice", "2 of 2 held")
            .await?;
        controller.kill().await?;
        controller = setup.controller()?;
    }
    for claim in [made.as_str(), "named"] {
        let claim = setup.claims().get(claim).await?;
        assert!(is_allocated(&claim), "{claim:?}");
    }
    // Each pod ends, and its device is free. A requested deallocation works under either driver name.
    setup.remove_pod("made").await?;
    setup.until_claim_gone(&made).await?;
    setup.remove_pod("names").await?;
    if setup.cluster.minor() >= 28 {
        let deallocated = |claim: Option<&ResourceClaim>| {
            claim.is_some_and(|claim| claim.status == ResourceClaimStatus::default())
        };
        setup
            .wait(setup.claims(), "named", "deallocated", deallocated)
            .await?;
    } else {
        setup.delete_claim("named").await?;
    }
    for waiting in ["first", "second"] {
        setup.until_bound(waiting).await?;
    }
    assert_distinct(&setup).await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn kinds_of_other_releases_are_read_as_far_as_understood() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    for node in ["old", "new"] {
        setup.make_fake_devices(node, 0).await?;
    }
    setup.make_template(None).await?;
    open_schemas(&setup).await?;
    let inventories = kind(&setup, "NodeInventory", false);
    let inventory = |node: &str, uid: &str, devices: Value| {
        json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory", "metadata": { "name": format!("{node}.{DRIVER}") },
            "spec": { "driverName": DRIVER, "nodeName": node, "nodeUid": uid, "devices": devices, "zone": { "future": 1 } } })
    };
    // Older: only the original fields.
    let old = json!([{ "name": "plain", "kind": "test" }]);
    let old = inventory("old", &setup.node_uid("old").await?, old);
    write(&inventories, "old.drayman.dev", &old, "/spec/zone").await?;
    // Newer: an unknown field, an unknown attribute type, and a device in an unknown mode.
    let new = json!([
        { "name": "more", "kind": "test", "capacity": { "memory": "1Gi" }, "attributes": {
            "drayman.dev/known": { "string": "x" }, "drayman.dev/quantity": { "quantity": "1Gi" } } },
        { "name": "other-way", "kind": "test", "mode": "loan" },
    ]);
    let new = inventory("new", &setup.node_uid("new").await?, new);
    write(&inventories, "new.drayman.dev", &new, "/spec/devices/0/capacity").await?;
    let controller = setup.controller()?;
    let mut got = setup.serve("first").await?;
    got.extend(setup.serve("second").await?);
    got.sort();
    assert_eq!(got, ["new/more", "old/plain"]);
    setup.make_pod("third").await?;
    setup.wait_for_event("third", "NoSuitableDevice", "held").await?;

    // A request with an unknown field could be too permissive, so it is rejected with the field's name.
    let wish = json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters", "metadata": { "name": "wish" },
        "spec": { "requests": [{ "name": "device", "bandwidth": "1G" }] } });
    let wishes = kind(&setup, "DeviceClaimParameters", true);
    write(&wishes, "wish", &wish, "/spec/requests/0/bandwidth").await?;
    let claim = json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim", "metadata": { "name": "wish" },
        "spec": { "resourceClassName": "test",
            "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": "wish" } } });
    setup.apply(&claim).await?;
    setup.make_pod_with("wish", "wish").await?;
    let event = setup
        .wait_for_event("wish", "ParametersInvalid", "bandwidth")
        .await?;
    let message = event.message.unwrap_or_default();
    assert!(
        message.contains("DeviceClaimParameters default/wish"),
        "{message}"
    );
    // Without the field, the claim is served once a device is free.
    let plain = json!([{ "op": "remove", "path": "/spec/requests/0/bandwidth" }]);
    let plain = Patch::Json::<()>(serde_json::from_value(plain)?);
    wishes.patch("wish", &PatchParams::default(), &plain).await?;
    setup.remove_pod("third").await?;
    setup.remove_pod("first").await?;
    setup.until_bound("wish").await?;
    // The other release's fields were not overwritten.
    let kept = Api::<NodeInventory>::all(setup.cluster.client())
        .get("new.drayman.dev")
        .await?;
    assert_eq!(kept.spec.devices.len(), 2);
    setup.end([controller]).await
}

#[tokio::test]
async fn changes_after_an_allocation_do_not_change_it() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    setup.make_claim("early", "Immediate", false).await?;
    let before = setup.until_allocated("early").await?;
    let before = before.status.allocation;
    // Another kind, then no parameters, then a class of another driver, then no class.
    let parameters = kind(&setup, "DeviceClassParameters", false);
    let other = Patch::Merge(json!({ "spec": { "kind": "other" } }));
    parameters.patch("test", &PatchParams::default(), &other).await?;
    setup.make_pod("other").await?;
    setup.wait_for_event("other", "NoSuitableDevice", "other").await?;
    parameters.delete("test", &DeleteParams::default()).await?;
    setup.make_pod("later").await?;
    setup
        .wait_for_event("later", "ParametersNotFound", "test")
        .await?;
    // Reported on the class too.
    setup.wait_for_event("test", "ParametersNotFound", "test").await?;
    let another = Patch::Merge(json!({ "driverName": "somebody.example.com" }));
    setup
        .classes()
        .patch("test", &PatchParams::default(), &another)
        .await?;
    setup.classes().delete("test", &DeleteParams::default()).await?;
    let after = setup.claims().get("early").await?.status.allocation;
    assert_eq!(after, before);
    // The claim is released anyway, and its device is free.
    setup.delete_claim("early").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn a_node_prepares_allocations_made_before_a_class_changed() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(2).await?;
    let node = setup.cluster.node(0);
    setup.make_claim("early", "Immediate", false).await?;
    let early = setup.until_allocated("early").await?;
    let device = devices(&early)?.concat();
    // Another kind, and then no class at all; the pod is created after that.
    let other = Patch::Merge(json!({ "spec": { "kind": "plugged" } }));
    kind(&setup, "DeviceClassParameters", false)
        .patch("test", &PatchParams::default(), &other)
        .await?;
    setup.classes().delete("test", &DeleteParams::default()).await?;
    setup.make_pod_with("user", "early").await?;
    let inside = look_inside(&setup, "user").await?;
    let path = inside.only_device();
    assert_eq!(path.rsplit('/').next(), device.rsplit('/').next(), "{device}");

    // A handle of a later release for the free device: it is never guessed.
    let free = if device.ends_with("-0") {
        "drayman-test-1"
    } else {
        "drayman-test-0"
    };
    let uid = setup.node_uid(node.name()).await?;
    setup
        .record("newer", node.name(), |claim| {
            first_handle(claim, node.name(), &uid, free).replace("\"version\":1", "\"version\":2")
        })
        .await?;
    setup.make_pod_with("later", "newer").await?;
    companion.logged("has version 2").await?;
    if setup.cluster.minor() >= 28 {
        // Since 1.28, kubelet reports it as an event of the pod.
        setup
            .wait_for_event(
                "later",
                "FailedPrepareDynamicResources",
                "upgrade drayman on this node",
            )
            .await?;
    }
    let claim = setup.claims().get("newer").await?;
    let uid = claim.metadata.uid.unwrap_or_default();
    assert_unprepared(node, &uid)?;
    assert_eq!(
        look_inside(&setup, "user").await?,
        inside,
        "the other pod keeps its device"
    );
    setup.end([companion, controller]).await
}
