//! The lifecycle of a pod with a claim, with faults.

use std::collections::BTreeMap;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;

use super::fixture::{
    CONFIGURATION, Slices, allocated, delete, devices_of, make, make_claim, make_pod, make_pod_with_claim,
    names, one_device, start, waits,
};
use crate::apiserver_failover::{Balancer, port};
use crate::harness::IMAGE;
use crate::interrupted_calls::until_claim_files;
use crate::pods::{assert_unprepared, claim_files};
use crate::reboot::{lose_power, was_restarted};
use crate::setup::REGISTERED;

/// The user name of the companion.
const NODE: &str = "drayman-node";
/// Memory devices that are always readable: zero and full.
const DEVICES: [(u32, u32); 2] = [(1, 5), (1, 7)];

#[tokio::test]
async fn a_pod_reads_from_its_device_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    let node = setup.cluster.node(0);
    let before = setup.cluster.audit().counts(NODE).await?;
    make_pod_with_claim(&setup, "first", &one_device()).await?;
    let first = devices_of(&setup, "first").await?;
    let (uid, results) = allocated(&setup, "first").await?;
    assert_eq!(first, results, "the device of the allocation, and no other");
    let device = first.first().context("a device")?;
    let read = format!("head -c 4 /dev/{device} | wc -c");
    let bytes = setup
        .cluster
        .kubectl(&["exec", "first", "--", "sh", "-c", &read])
        .await?;
    assert_eq!(bytes.trim(), "4");
    let found = claim_files(node, &uid)?;
    assert_eq!(found.len(), 2, "a CDI file and a checkpoint entry: {found:?}");
    assert!(found[0].ends_with(&format!("-claim_{uid}.json")), "{found:?}");

    make_pod_with_claim(&setup, "second", &one_device()).await?;
    assert!(devices_of(&setup, "second").await?.is_disjoint(&first));
    make_pod_with_claim(&setup, "third", &one_device()).await?;
    waits(&setup, "third", "cannot allocate all claims").await?;
    delete(&setup, "first").await?;
    assert_unprepared(node, &uid)?;
    assert_eq!(devices_of(&setup, "third").await?, first);
    for pod in ["second", "third"] {
        delete(&setup, pod).await?;
    }
    // Three pods.
    let mut after = setup.cluster.audit().counts(NODE).await?;
    for (what, count) in before {
        after.entry(what).and_modify(|now| *now -= count);
    }
    after.retain(|_, count| *count > 0);
    println!("requests of the companion for three pods: {after:?}");
    assert_eq!(
        after.into_iter().collect::<Vec<_>>(),
        [("get resourceclaims".to_owned(), 3)]
    );
    setup.end([companion]).await
}

#[tokio::test]
async fn a_pod_deleted_by_force_gives_its_device_to_the_next_one() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES[..1]).await?;
    make_pod_with_claim(&setup, "first", &one_device()).await?;
    let first = devices_of(&setup, "first").await?;
    let (uid, _) = allocated(&setup, "first").await?;
    make_pod_with_claim(&setup, "second", &one_device()).await?;
    waits(&setup, "second", "cannot allocate all claims").await?;
    setup.remove_pod("first").await?;
    assert_eq!(devices_of(&setup, "second").await?, first);
    assert_unprepared(setup.cluster.node(0), &uid)?;
    setup.end([companion]).await
}

#[tokio::test]
async fn a_device_gone_before_prepare_is_refused_and_not_replaced() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    let node = setup.cluster.node(0);
    // Allocated while no kubelet can prepare it.
    node.stop("kubelet", 15).await?;
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    let (uid, results) = allocated(&setup, "pod").await?;
    let gone = results.first().context("a device")?.clone();
    let path = format!("/dev/{gone}");
    node.remove(&path)?;
    node.start("kubelet").await?;
    setup
        .wait_for_event("pod", "FailedPrepareDynamicResources", &gone)
        .await?;
    assert_unprepared(node, &uid)?;
    let minor = if gone.ends_with('0') {
        DEVICES[0].1
    } else {
        DEVICES[1].1
    };
    node.make_device(&path, 1, minor)?;
    assert_eq!(devices_of(&setup, "pod").await?, results);
    delete(&setup, "pod").await?;
    setup.end([companion]).await
}

#[tokio::test]
async fn a_prepare_without_an_api_server_fails_and_is_retried() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    companion.end().await?;
    // Only the companion is cut off: kubelet reads the claim itself before the call.
    let server = [port(&setup)?];
    let balancer = Balancer::start(&server).await?;
    balancer.rewrite(&setup, setup.node_kubeconfig(), setup.node_kubeconfig())?;
    let companion = setup.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    make_pod_with_claim(&setup, "before", &one_device()).await?;
    let before = devices_of(&setup, "before").await?;
    let (uid, _) = allocated(&setup, "before").await?;

    let address = balancer.address;
    drop(balancer);
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    let event = setup
        .wait_for_event("pod", "FailedPrepareDynamicResources", "kubelet asks again")
        .await?;
    println!(
        "Prepare without an API server: {}",
        event.message.unwrap_or_default()
    );
    // Unprepare does not need the API server.
    delete(&setup, "before").await?;
    assert_unprepared(setup.cluster.node(0), &uid)?;

    let _balancer = Balancer::start_at(address, &server).await?;
    assert!(devices_of(&setup, "pod").await?.is_disjoint(&before));
    setup.end([companion]).await
}

#[tokio::test]
async fn a_pod_ending_without_an_api_server_frees_its_device() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES[..1]).await?;
    let node = setup.cluster.node(0);
    make_claim(&setup, "first", &one_device()).await?;
    let pod = json!({
        "metadata": { "name": "first" },
        "spec": {
            "resourceClaims": [{ "name": "claim", "resourceClaimName": "first" }],
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "command": ["sh", "-c", "until test -e /tmp/end; do sleep 0.2; done"],
                "resources": { "claims": [{ "name": "claim" }] } }],
            "restartPolicy": "Never",
            "dnsPolicy": "Default",
        },
    });
    make(&setup, pod).await?;
    let first = devices_of(&setup, "first").await?;
    let (uid, _) = allocated(&setup, "first").await?;
    // The container exits five seconds later, after the API server has stopped.
    let end = "(sleep 5; touch /tmp/end) >/dev/null 2>&1 &";
    setup
        .cluster
        .kubectl(&["exec", "first", "--", "sh", "-c", end])
        .await?;
    setup.cluster.stop_component("apiserver", 9).await?;
    until_claim_files(node, &uid, 0).await?;
    setup.cluster.start_component("apiserver").await?;
    make_pod_with_claim(&setup, "second", &one_device()).await?;
    assert_eq!(devices_of(&setup, "second").await?, first);
    setup.end([companion]).await
}

#[tokio::test]
async fn a_clean_stop_of_the_companion_costs_no_running_pod() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES[..1]).await?;
    make_claim(&setup, "pod", &one_device()).await?;
    make_pod(&setup, "pod").await?;
    let devices = devices_of(&setup, "pod").await?;
    let (uid, _) = allocated(&setup, "pod").await?;
    companion.end().await?;
    // Kubelet deletes the slices of a driver that was gone for 30 s.
    Slices::watch(&setup).until("gone", BTreeMap::is_empty).await?;
    setup.until_running("pod").await?;
    assert_eq!(devices_of(&setup, "pod").await?, devices);
    let companion = setup.companion(0, CONFIGURATION)?;
    Slices::watch(&setup).until_offered(&names(&[0])).await?;
    let slices = Api::<ResourceSlice>::all(setup.cluster.client());
    assert_eq!(slices.list(&ListParams::default()).await?.items.len(), 1);
    delete(&setup, "pod").await?;
    assert_unprepared(setup.cluster.node(0), &uid)?;
    setup.end([companion]).await
}

#[tokio::test]
async fn a_reboot_without_cdi_files_costs_no_pod_its_device() -> anyhow::Result<()> {
    let (setup, mut companion) = start(CONFIGURATION, &DEVICES).await?;
    let node = setup.cluster.node(0);
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    let before = devices_of(&setup, "pod").await?;
    companion.kill().await?;
    lose_power(&setup, node).await?;
    assert!(node.list("/run/cdi")?.is_empty());

    node.start("containerd").await?;
    node.start("kubelet").await?;
    let companion = setup.companion_with(0, CONFIGURATION, &[])?;
    companion.logged(REGISTERED).await?;
    let pods = Api::<Pod>::namespaced(setup.cluster.client(), "default");
    setup.wait(pods, "pod", "started again", was_restarted).await?;
    assert_eq!(devices_of(&setup, "pod").await?, before);
    make_pod_with_claim(&setup, "next", &one_device()).await?;
    assert!(devices_of(&setup, "next").await?.is_disjoint(&before));
    for pod in ["pod", "next"] {
        delete(&setup, pod).await?;
    }
    setup.end([companion]).await
}

/// The container runtime cannot send the status of a container with such arguments: containerd sends messages of at most 16 MiB, and a status
/// has each argument twice, with six bytes for each `<`.
#[tokio::test]
async fn a_huge_container_blocks_only_the_devices_it_may_have() -> anyhow::Result<()> {
    const NAMESPACE: &str = "kube-public";
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    let claim = json!({ "metadata": { "name": "huge" }, "spec": one_device() });
    let claims = Api::<ResourceClaim>::namespaced(setup.cluster.client(), NAMESPACE);
    claims
        .create(&PostParams::default(), &serde_json::from_value(claim)?)
        .await?;
    let arguments = vec!["<".repeat(120_000); 12];
    let command = [vec!["sh".into(), "-c".into(), "sleep 1000000".into()], arguments].concat();
    let pod = json!({
        "metadata": { "name": "huge" },
        "spec": {
            "resourceClaims": [{ "name": "claim", "resourceClaimName": "huge" }],
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": command,
                "resources": { "claims": [{ "name": "claim" }] } }],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    });
    let pods = Api::<Pod>::namespaced(setup.cluster.client(), NAMESPACE);
    pods.create(&PostParams::default(), &serde_json::from_value(pod)?)
        .await?;
    let is_running = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        status.is_some_and(|status| status.phase.as_deref() == Some("Running"))
    };
    setup.wait(pods.clone(), "huge", "running", is_running).await?;

    make_pod_with_claim(&setup, "other", &one_device()).await?;
    let of_other = devices_of(&setup, "other").await?;
    companion
        .logged("grpc: trying to send message larger than max")
        .await?;
    pods.delete("huge", &DeleteParams::default().grace_period(0))
        .await?;
    make_pod_with_claim(&setup, "next", &one_device()).await?;
    assert!(devices_of(&setup, "next").await?.is_disjoint(&of_other));
    for pod in ["other", "next"] {
        delete(&setup, pod).await?;
    }
    setup.end([companion]).await
}
