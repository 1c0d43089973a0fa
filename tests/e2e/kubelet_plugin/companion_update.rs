//! The companion is replaced while pods hold or request an extended resource.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams};

use crate::kubelet_plugin::helper::{capacity, devices_inside, pod_resources, restarts, until_granted};
use crate::setup::Setup;

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

async fn create(setup: &Setup, name: &str) -> anyhow::Result<()> {
    setup.make_limit_pod(name, RESOURCE).await?;
    Ok(())
}

/// A node with a device, its companion, and a pod that holds the device.
async fn begin() -> anyhow::Result<(Setup, crate::setup::Program)> {
    let setup = Setup::without_class(crate::harness::Cluster::builder().nodes(1).start().await?).await?;
    setup
        .cluster
        .node(0)
        .make_device(format!("/dev/{PREFIX}0"), 1, 5)?;
    let companion = setup.companion(0, CONFIGURATION)?;
    setup.until_allocatable(RESOURCE, "8").await?;
    create(&setup, "before").await?;
    setup.until_running("before").await?;
    Ok((setup, companion))
}

/// Asserts that the earlier pod was not restarted.
async fn assert_undisturbed(setup: &Setup) -> anyhow::Result<()> {
    assert_eq!(devices_inside(setup, "before", PREFIX).await?.len(), 1);
    assert_eq!(restarts(setup, "before").await?, 0);
    Ok(())
}

#[tokio::test]
async fn pods_created_without_a_companion_wait_for_the_next() -> anyhow::Result<()> {
    let (setup, companion) = begin().await?;
    companion.end().await?;
    setup.until_allocatable(RESOURCE, "0").await?;
    assert_eq!(capacity(&setup, RESOURCE).await?.as_deref(), Some("8"));
    create(&setup, "meanwhile").await?;
    setup
        .wait_for_event(
            "meanwhile",
            "FailedScheduling",
            "Insufficient drayman.dev/plugged",
        )
        .await?;
    assert_undisturbed(&setup).await?;
    let companion = setup.companion(0, CONFIGURATION)?;
    setup.until_running("meanwhile").await?;
    assert_eq!(devices_inside(&setup, "meanwhile", PREFIX).await?.len(), 1);
    assert_undisturbed(&setup).await?;
    setup.end([companion]).await
}

/// Waits for the outcome of a pod.
async fn outcome(setup: &Setup, name: &str) -> anyhow::Result<String> {
    let settled = |pod: Option<&Pod>| {
        let phase = pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref());
        matches!(phase, Some("Running" | "Failed"))
    };
    let pods = Api::<Pod>::namespaced(setup.cluster.client(), "default");
    let pod = setup.wait(pods, name, "running or failed", settled).await?;
    let status = pod.and_then(|pod| pod.status).unwrap_or_default();
    Ok(status.reason.or(status.phase).unwrap_or_default())
}

/// As a DaemonSet update: the next one starts as soon as the last one has ended, while the scheduler still counts the devices. Kubelet
/// itself rejects pods that are bound in between.
#[tokio::test]
async fn pods_bound_during_an_update_fail_only_as_kubelet_does() -> anyhow::Result<()> {
    let (setup, mut companion) = begin().await?;
    let kubelet = pod_resources(setup.cluster.node(0)).await?;
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    for round in 0..5 {
        let name = format!("within-{round}");
        let end = companion.end();
        let (ended, created) = tokio::join!(end, async {
            tokio::time::sleep(Duration::from_millis(40 * round)).await;
            create(&setup, &name).await
        });
        ended?;
        created?;
        companion = setup.companion(0, CONFIGURATION)?;
        let outcome = outcome(&setup, &name).await?;
        assert!(
            ["Running", "UnexpectedAdmissionError"].contains(&outcome.as_str()),
            "{name}: {outcome}"
        );
        *outcomes.entry(outcome).or_default() += 1;
        until_granted(&kubelet, RESOURCE, 8).await?;
        // The owner of a failed pod would create another one, which finds the next companion.
        setup
            .pods()
            .delete(&name, &DeleteParams::default().grace_period(0))
            .await?;
        let name = format!("after-{round}");
        setup.until_allocatable(RESOURCE, "8").await?;
        create(&setup, &name).await?;
        setup.until_running(&name).await?;
    }
    println!("pods that were created within an update: {outcomes:?}");
    assert_undisturbed(&setup).await?;
    setup.end([companion]).await
}
