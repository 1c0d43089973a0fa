//! ResourceSlices follow the devices, and are restored after a deletion or an edit.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::runtime::conditions::is_deleted;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::fixture::{
    CONFIGURATION, Slices, devices_of, make_pod_with_claim, names, offered, one_device, print_times, start,
    waits,
};

use crate::harness::TIMEOUT;
use crate::setup::DRIVER;

/// Two writes each, for plugging in and unplugging: fewer than the companion's burst limit.
const ROUNDS: usize = 8;
/// A restart of kubelet takes seconds.
const RESTARTS: usize = 4;
const DEVICES: [(u32, u32); 2] = [(1, 5), (1, 7)];

/// A kind whose devices are probed by opening them.
pub(super) const PROBED: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
  health: {open: read, recoverAfter: 1}
";

#[tokio::test]
async fn slices_describe_the_devices_of_the_node() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    let node = setup.cluster.node(0).name();
    let nodes = Api::<Node>::all(setup.cluster.client());
    let uid = nodes.get(node).await?.metadata.uid.context("a uid")?;
    let mut slices = Slices::watch(&setup);
    let slices = slices.until("listed", |slices| !slices.is_empty()).await?;
    let (name, slice) = slices.first_key_value().context("a slice")?;
    assert!(name.starts_with(&format!("{node}.{DRIVER}-")), "{name}");
    let owners = slice.metadata.owner_references.as_deref().unwrap_or_default();
    let owner = owners.first().context("an owner")?;
    assert_eq!(
        (
            owner.kind.as_str(),
            owner.name.as_str(),
            &owner.uid,
            owner.controller
        ),
        ("Node", node, &uid, Some(true))
    );
    assert_eq!(slice.spec.node_name.as_deref(), Some(node));
    assert_eq!(slice.spec.pool.name, node);
    let devices = offered(slices).context("a complete pool")?;
    for device in devices.values() {
        let attributes = device.attributes.as_ref().context("attributes")?;
        let kind = attributes
            .get("kind")
            .or_else(|| attributes.get("drayman.dev/kind"));
        assert_eq!(kind.and_then(|kind| kind.string.as_deref()), Some("test"));
    }
    setup.end([companion]).await
}

#[tokio::test]
async fn slices_are_back_after_a_deletion_and_a_kubelet_restart() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    let node = setup.cluster.node(0);
    let api = Api::<ResourceSlice>::all(setup.cluster.client());
    let mut slices = Slices::watch(&setup);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let now = slices.until("there", |slices| offered(slices).is_some()).await?;
        let name = now.keys().next().context("a slice")?.clone();
        let began = Instant::now();
        api.delete(&name, &DeleteParams::default()).await?;
        slices
            .until("deleted", |slices| !slices.contains_key(&name))
            .await?;
        slices.until_offered(&names(&[0, 1])).await?;
        times.push(began.elapsed());
    }
    print_times("slices back after a deletion by hand", times);

    let mut times = Vec::new();
    for _ in 0..RESTARTS {
        let followed = async {
            slices.until("deleted", BTreeMap::is_empty).await?;
            let began = Instant::now();
            slices.until_offered(&names(&[0, 1])).await?;
            anyhow::Ok(began.elapsed())
        };
        let (restarted, took) = tokio::join!(node.restart_kubelet(), followed);
        restarted?;
        times.push(took?);
    }
    print_times("slices back after a kubelet restart has deleted them", times);

    // A foreign edit is reverted.
    let now = slices.until("there", |slices| offered(slices).is_some()).await?;
    let name = now.keys().next().context("a slice")?.clone();
    let edit = json!({ "spec": { "devices": [{ "name": "nonsense" }] } });
    let began = Instant::now();
    api.patch(&name, &PatchParams::default(), &Patch::Merge(edit))
        .await?;
    let is_nonsense = |slices: &BTreeMap<String, ResourceSlice>| {
        offered(slices).is_some_and(|devices| devices.contains_key("nonsense"))
    };
    slices.until("edited", is_nonsense).await?;
    slices.until_offered(&names(&[0, 1])).await?;
    println!("slices back after an edit by hand: {:?}", began.elapsed());

    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    assert_eq!(devices_of(&setup, "pod").await?.len(), 1);
    setup.end([companion]).await
}

#[tokio::test]
async fn plugged_and_unplugged_devices_reach_the_slices() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    let node = setup.cluster.node(0);
    let path = "/dev/drayman-test-2";
    let mut slices = Slices::watch(&setup);
    let (mut plugged, mut unplugged) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        plugged.push(timed(&mut slices, &[0, 1, 2], || node.make_device(path, 1, 9)).await?);
        unplugged.push(timed(&mut slices, &[0, 1], || node.remove(path)).await?);
    }
    print_times("from plugging in to the slice", plugged);
    print_times("from unplugging to the slice", unplugged);
    setup.end([companion]).await
}

/// Time from a change of the devices until the slices list exactly these.
async fn timed(
    slices: &mut Slices,
    devices: &[usize],
    change: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Duration> {
    let began = Instant::now();
    change()?;
    slices.until_offered(&names(devices)).await?;
    Ok(began.elapsed())
}

#[tokio::test]
async fn a_pod_waits_for_an_unhealthy_device() -> anyhow::Result<()> {
    let (setup, companion) = start(PROBED, &DEVICES[..1]).await?;
    let node = setup.cluster.node(0);
    let has_taints = setup.cluster.minor() >= 36;
    let replace = |major, minor| {
        node.remove("/dev/drayman-test-0")?;
        node.make_device("/dev/drayman-test-0", major, minor)
    };
    // Numbers without a driver: the device cannot be opened.
    replace(240, 250)?;
    let mut slices = Slices::watch(&setup);
    let is_withdrawn = |slices: &BTreeMap<String, ResourceSlice>| {
        let Some(devices) = offered(slices) else {
            return false;
        };
        let Some(device) = devices.get("drayman-test-0") else {
            return !has_taints;
        };
        let mut taints = device.taints.iter().flatten();
        taints.any(|taint| taint.key == "drayman.dev/unhealthy" && taint.effect == "NoSchedule")
    };
    slices.until("without a healthy device", is_withdrawn).await?;
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    waits(&setup, "pod", "cannot allocate all claims").await?;
    let began = Instant::now();
    replace(1, 5)?;
    assert_eq!(devices_of(&setup, "pod").await?, names(&[0]));
    println!(
        "from the repair of the device to the running pod: {:?}",
        began.elapsed()
    );
    setup.end([companion]).await
}

#[tokio::test]
async fn an_unhealthy_device_evicts_its_pod_if_configured() -> anyhow::Result<()> {
    let configuration = CONFIGURATION.to_owned() + "  health: {taintEffect: NoExecute}\n";
    let (setup, companion) = start(&configuration, &DEVICES).await?;
    if setup.cluster.is_before(36, "device taints are off by default") {
        companion.end().await?;
        return setup.cluster.stop().await;
    }
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    assert_eq!(devices_of(&setup, "pod").await?, names(&[0]));
    let uid = setup.pods().get("pod").await?.metadata.uid.context("a uid")?;
    setup.cluster.node(0).remove("/dev/drayman-test-0")?;
    setup
        .wait(setup.pods(), "pod", "evicted", is_deleted(&uid))
        .await?;
    make_pod_with_claim(&setup, "next", &one_device()).await?;
    assert_eq!(devices_of(&setup, "next").await?, names(&[1]));
    setup.end([companion]).await
}

#[tokio::test]
async fn a_webhook_that_prevents_slices_is_reported_on_the_node() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES[..1]).await?;
    let node = setup.cluster.node(0);
    let rules = json!([{
        "apiGroups": ["resource.k8s.io"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": ["resourceslices"],
    }]);
    // Nothing listens at this port.
    setup
        .apply(&json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": { "name": "down" },
            "webhooks": [{
                "name": "down.example.com", "rules": rules, "failurePolicy": "Fail", "sideEffects": "None",
                "admissionReviewVersions": ["v1"], "clientConfig": { "url": "https://127.0.0.1:1/" },
            }],
        }))
        .await?;
    let mut slices = Slices::watch(&setup);
    let now = slices.until("there", |slices| offered(slices).is_some()).await?;
    let name = now.keys().next().context("a slice")?.clone();
    // The API server learns of the webhook through a watch, which only a write shows.
    let api = Api::<ResourceSlice>::all(setup.cluster.client());
    let dry_run = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let edit = Patch::Merge(json!({ "metadata": { "annotations": { "probe": "x" } } }));
    let refused = async {
        while api.patch(&name, &dry_run, &edit).await.is_ok() {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(TIMEOUT, refused)
        .await
        .context("the webhook has no effect")?;
    node.make_device("/dev/drayman-test-1", 1, 7)?;
    let event = setup
        .wait_for_event(node.name(), "ResourceSliceRejected", "down.example.com")
        .await?;
    let message = event.message.unwrap_or_default();
    assert!(message.contains("repair the webhook"), "{message}");
    setup
        .cluster
        .kubectl(&["delete", "validatingwebhookconfiguration", "down"])
        .await?;
    slices.until_offered(&names(&[0, 1])).await?;
    setup.end([companion]).await
}

#[tokio::test]
async fn the_slices_of_a_recreated_node_have_its_uid() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    let node = setup.cluster.node(0);
    let nodes = Api::<Node>::all(setup.cluster.client());
    let uid = |node: Option<&Node>| node.and_then(|node| node.metadata.uid.clone());
    let before = uid(Some(&nodes.get(node.name()).await?));
    nodes.delete(node.name(), &DeleteParams::default()).await?;
    // Kubelet creates the Node when it starts.
    node.restart_kubelet().await?;
    let is_new = |node: Option<&Node>| node.is_some() && uid(node) != before;
    let recreated = setup.wait(nodes, node.name(), "recreated", is_new).await?;
    let now = uid(recreated.as_ref());
    let mut slices = Slices::watch(&setup);
    let is_restored = |slices: &BTreeMap<String, ResourceSlice>| {
        let owners = slices
            .values()
            .flat_map(|slice| slice.metadata.owner_references.iter().flatten());
        let mut uids = owners.map(|owner| owner.uid.clone());
        offered(slices).is_some_and(|devices| devices.len() == 2) && uids.all(|uid| Some(uid) == now)
    };
    slices.until("of the new Node", is_restored).await?;
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    assert_eq!(devices_of(&setup, "pod").await?.len(), 1);
    setup.end([companion]).await
}
