//! Scenarios of devices allocated through the device plugin API, beside claims and in competition with them.

use super::narrator::devices_of;
use super::scenarios::{camera_pod, limit_pod, pod};
use super::{CAMERA, Demo, Halt, SHARED};
use crate::testcluster::api::object::text;
use crate::testcluster::runtime::Outfit;

/// Class of the device in mode `both`.
const SHARED_OBJECTS: &str = "apiVersion: drayman.dev/v1alpha1
kind: DeviceClassParameters
metadata: { name: either }
spec: { kind: either }
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: { name: either }
driverName: drayman.dev
parametersRef: { apiGroup: drayman.dev, kind: DeviceClassParameters, name: either }
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: { name: either }
spec: { spec: { resourceClassName: either } }
";

/// Returns the host paths of a container's device nodes.
fn hosts(outfit: Option<Outfit>) -> Vec<String> {
    outfit
        .map(|outfit| outfit.devices.into_iter().map(|(_, host, _)| host).collect())
        .unwrap_or_default()
}

fn is_told(demo: &Demo, pod: &str, words: &str) -> bool {
    demo.client
        .list("events")
        .iter()
        .any(|event| text(event, "/involvedObject/name") == pod && text(event, "/message").contains(words))
}

pub(super) async fn both_apis(demo: &mut Demo) -> Result<(), Halt> {
    demo.expect("node-a has one allocatable camera", |demo| {
        let node = demo.client.get("nodes", "", "node-a").unwrap_or_default();
        node["status"]["allocatable"][CAMERA] == "1"
    })
    .await?;
    demo.stage.apply(&camera_pod("camera-1"))?;
    demo.expect(
        "pod camera-1 has the camera, through the device plugin API",
        |demo| demo.opens("camera-1") == 1,
    )
    .await?;
    demo.tell_outfit("camera-1");
    demo.stage.apply(&camera_pod("camera-2"))?;
    demo.stage.apply(&pod("claiming"))?;
    demo.expect(
        "pod claiming gets a device through its claim at the same time",
        |demo| demo.opens("claiming") == 1,
    )
    .await?;
    demo.tell_outfit("claiming");
    demo.expect("pod camera-2 waits, and an event names the resource", |demo| {
        is_told(demo, "camera-2", CAMERA)
    })
    .await?;
    let camera = demo.outfit("camera-1").map(|outfit| outfit.devices);
    demo.delete("camera-1");
    demo.expect("camera-2 runs when camera-1 is gone", |demo| {
        demo.runs("camera-2")
    })
    .await?;
    let same = demo.outfit("camera-2").map(|outfit| outfit.devices) == camera;
    demo.check("and has the same camera", same)?;
    let (claimed, cameras) = (hosts(demo.outfit("claiming")), hosts(demo.outfit("camera-2")));
    let apart = !claimed.is_empty() && claimed.iter().all(|device| !cameras.contains(device));
    demo.check("no device was allocated through both APIs", apart)?;
    demo.clear(&["camera-2".to_owned(), "claiming".to_owned()])
        .await?;
    Ok(())
}

/// A claim and an extended resource compete for one device.
pub(super) async fn competing(demo: &mut Demo) -> Result<(), Halt> {
    demo.apply("a class for the device of mode `both`", SHARED_OBJECTS)?;
    let claiming = pod("claiming").replace(
        "resourceClaimTemplateName: test",
        "resourceClaimTemplateName: either",
    );
    demo.expect("node-b has one device of mode `both`", |demo| {
        let node = demo.client.get("nodes", "", "node-b").unwrap_or_default();
        node["status"]["allocatable"][SHARED] == "1"
    })
    .await?;
    demo.stage.apply(&limit_pod("first", SHARED))?;
    demo.expect("pod first has it, through the device plugin API", |demo| {
        demo.opens("first") == 1
    })
    .await?;
    demo.tell_outfit("first");
    demo.stage.apply(&claiming)?;
    // Only the node knows the devices of containers, so its Prepare is the last check.
    demo.expect(
        "pod claiming gets it by its claim, and the node refuses to prepare it and names the holder",
        |demo| is_told(demo, "claiming", "first"),
    )
    .await?;
    demo.check(
        "pod claiming has no container yet",
        demo.outfit("claiming").is_none(),
    )?;
    let device = hosts(demo.outfit("first"));
    demo.delete("first");
    demo.expect("it runs when pod first is gone", |demo| {
        demo.opens("claiming") == 1
    })
    .await?;
    demo.tell_outfit("claiming");
    demo.check("with the same device", hosts(demo.outfit("claiming")) == device)?;
    demo.expect("the device plugin API no longer offers the device", |demo| {
        let node = demo.client.get("nodes", "", "node-b").unwrap_or_default();
        node["status"]["allocatable"][SHARED] == "0"
    })
    .await?;
    demo.stage.apply(&limit_pod("second", SHARED))?;
    demo.expect("pod second waits for it through the device plugin API", |demo| {
        is_told(demo, "second", SHARED)
    })
    .await?;
    let held = demo.claim_of("claiming").map(|claim| devices_of(&claim).0);
    demo.delete("claiming");
    demo.expect("and runs when the claim is deleted", |demo| {
        demo.opens("second") == 1
    })
    .await?;
    let named = held.unwrap_or_default().join(", ");
    demo.check(
        &format!("one device, {named}, has served all three, one after the other"),
        hosts(demo.outfit("second")) == device && !named.is_empty(),
    )?;
    demo.clear(&["second".to_owned()]).await?;
    Ok(())
}
