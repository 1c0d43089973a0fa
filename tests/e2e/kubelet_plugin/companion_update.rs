//! The companion is replaced while pods hold or request an extended resource.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, PostParams};

use crate::kubelet_plugin::helper::{
    capacity, devices_inside, pod_resources, pod_with_limit, restarts, until_granted, wait_for_allocatable,
};
use crate::stage::{Stage, is_running};

const RESOURCE: &str = "drayman.dev/plugged";
const PREFIX: &str = "drayman-plugged-";
/// One device with many shares, for any number of pods.
const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: plugged
  mode: extended-resource
  resourceName: drayman.dev/plugged
  shares: 8
  paths: [\"/dev/drayman-plugged-*\"]
";

async fn create(stage: &Stage, name: &str) -> anyhow::Result<()> {
    let pod = pod_with_limit(name, RESOURCE)?;
    stage.pods().create(&PostParams::default(), &pod).await?;
    Ok(())
}

/// A node with a device, its companion, and a pod that holds the device.
async fn begin() -> anyhow::Result<(Stage, crate::stage::Program)> {
    let stage = Stage::without_class(crate::harness::Cluster::builder().nodes(1).start().await?).await?;
    stage
        .cluster
        .node(0)
        .make_device(format!("/dev/{PREFIX}0"), 1, 5)?;
    let companion = stage.companion(0, CONFIGURATION)?;
    wait_for_allocatable(&stage, RESOURCE, "8").await?;
    create(&stage, "before").await?;
    stage
        .wait(stage.pods(), "before", "running", is_running())
        .await?;
    Ok((stage, companion))
}

/// Asserts that the earlier pod was not restarted.
async fn assert_undisturbed(stage: &Stage) -> anyhow::Result<()> {
    assert_eq!(devices_inside(stage, "before", PREFIX).await?.len(), 1);
    assert_eq!(restarts(stage, "before").await?, 0);
    Ok(())
}

#[tokio::test]
async fn pods_created_without_a_companion_wait_for_the_next() -> anyhow::Result<()> {
    let (stage, companion) = begin().await?;
    companion.end().await?;
    wait_for_allocatable(&stage, RESOURCE, "0").await?;
    assert_eq!(capacity(&stage, RESOURCE).await?.as_deref(), Some("8"));
    create(&stage, "meanwhile").await?;
    stage
        .wait_for_event(
            "meanwhile",
            "FailedScheduling",
            "Insufficient drayman.dev/plugged",
        )
        .await?;
    assert_undisturbed(&stage).await?;
    let companion = stage.companion(0, CONFIGURATION)?;
    stage
        .wait(stage.pods(), "meanwhile", "running", is_running())
        .await?;
    assert_eq!(devices_inside(&stage, "meanwhile", PREFIX).await?.len(), 1);
    assert_undisturbed(&stage).await?;
    companion.end().await?;
    stage.cluster.stop().await
}

/// Waits for the outcome of a pod.
async fn outcome(stage: &Stage, name: &str) -> anyhow::Result<String> {
    let settled = |pod: Option<&Pod>| {
        let phase = pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref());
        matches!(phase, Some("Running" | "Failed"))
    };
    let pods = Api::<Pod>::namespaced(stage.cluster.client(), "default");
    let pod = stage.wait(pods, name, "running or failed", settled).await?;
    let status = pod.and_then(|pod| pod.status).unwrap_or_default();
    Ok(status.reason.or(status.phase).unwrap_or_default())
}

/// As a DaemonSet update: the next one starts as soon as the last one has ended, while the scheduler still counts the devices. Kubelet
/// itself rejects pods that are bound in between.
#[tokio::test]
async fn pods_bound_during_an_update_fail_only_as_kubelet_does() -> anyhow::Result<()> {
    let (stage, mut companion) = begin().await?;
    let kubelet = pod_resources(stage.cluster.node(0));
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    for round in 0..5 {
        let name = format!("within-{round}");
        let end = companion.end();
        let (ended, created) = tokio::join!(end, async {
            tokio::time::sleep(Duration::from_millis(40 * round)).await;
            create(&stage, &name).await
        });
        ended?;
        created?;
        companion = stage.companion(0, CONFIGURATION)?;
        let outcome = outcome(&stage, &name).await?;
        assert!(
            ["Running", "UnexpectedAdmissionError"].contains(&outcome.as_str()),
            "{name}: {outcome}"
        );
        *outcomes.entry(outcome).or_default() += 1;
        until_granted(&kubelet, RESOURCE, 8).await?;
        // The owner of a failed pod would create another one, which finds the next companion.
        stage
            .pods()
            .delete(&name, &DeleteParams::default().grace_period(0))
            .await?;
        let name = format!("after-{round}");
        wait_for_allocatable(&stage, RESOURCE, "8").await?;
        create(&stage, &name).await?;
        stage.wait(stage.pods(), &name, "running", is_running()).await?;
    }
    println!("pods that were created within an update: {outcomes:?}");
    assert_undisturbed(&stage).await?;
    companion.end().await?;
    stage.cluster.stop().await
}
