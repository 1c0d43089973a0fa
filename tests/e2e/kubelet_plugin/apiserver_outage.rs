//! An API server outage of several minutes, while pods come and go on the node.

use std::time::{Duration, Instant};

use anyhow::ensure;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use tokio::time::sleep;

use crate::harness::{Cluster, IMAGE, TIMEOUT};
use crate::kubelet_plugin::both_apis::{
    CONFIGURATION, ObservedDevices, PREFIX, RESOURCE, assert_all_free, environment,
};
use crate::kubelet_plugin::helper::wait_for_inventory;
use crate::pods::{MINORS, make_devices};
use crate::setup::{DRIVER, Setup, pod_from, pod_with_limit};

// Devices by minor number: for a claim that stays, a claim whose pod ends, a container that stays, and pods that come and go.
/// From this duration on, the run also restarts kubelet.
const LONG: u64 = 60;
/// Kubelet's directory for static pods.
const MANIFESTS: &str = "/var/lib/kubelet/manifests";

/// Polls the container runtime until a pod has a device, or has none.
async fn until_device(
    setup: &Setup,
    watched: &mut ObservedDevices,
    pod: &str,
    has: bool,
) -> anyhow::Result<()> {
    let until = Instant::now() + TIMEOUT;
    loop {
        watched.look(setup.cluster.node(0));
        let mut running = watched.last.values().flatten();
        if running.any(|container| container.pod.starts_with(pod)) == has {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{pod}: {has} in {:?}", watched.last);
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn pods_that_come_and_go_without_an_api_server_share_no_device() -> anyhow::Result<()> {
    let seconds = environment("DRAYMAN_TEST_AWAY_SECONDS", 20);
    let cluster = Cluster::builder()
        .nodes(1)
        .flag("kubelet", &format!("--pod-manifest-path={MANIFESTS}"))
        // Otherwise pods of an unreachable node would be deleted.
        .flag("controller-manager", "--node-monitor-grace-period=1h");
    let setup = Setup::prepare(cluster.start().await?).await?;
    let node = setup.cluster.node(0);
    make_devices(node, PREFIX, &MINORS)?;
    std::fs::create_dir_all(node.path(MANIFESTS))?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let mut companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, DRIVER, 4, 0).await?;
    setup.until_allocatable(RESOURCE, "4").await?;

    setup.make_pod("claims-stays").await?;
    setup.make_limit_pod("plugged-stays", RESOURCE).await?;
    let ends = json!({
        "metadata": { "name": "claims-ends" },
        "spec": {
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimTemplateName": "test" } }],
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "command": ["sh", "-c", "until test -e /tmp/end; do sleep 0.2; done"],
                "resources": { "claims": [{ "name": "device" }] } }],
            "restartPolicy": "Never", "dnsPolicy": "Default",
        },
    });
    setup
        .pods()
        .create(&PostParams::default(), &pod_from(ends)?)
        .await?;
    for pod in ["claims-stays", "plugged-stays", "claims-ends"] {
        setup.until_running(pod).await?;
    }
    let end = [
        "exec",
        "claims-ends",
        "--",
        "sh",
        "-c",
        "(sleep 3; touch /tmp/end) >/dev/null 2>&1 &",
    ];
    setup.cluster.kubectl(&end).await?;

    setup.cluster.stop_component("apiserver", 9).await?;
    let (begun, mut watched, mut rounds) = (Instant::now(), ObservedDevices::default(), 0);
    until_device(&setup, &mut watched, "claims-ends", false).await?;
    // On a slow machine, two rounds may take longer.
    while rounds < 2 || begun.elapsed() < Duration::from_secs(seconds) {
        let name = format!("plugged-{rounds}");
        let mut pod = serde_json::to_value(pod_with_limit(&name, RESOURCE)?)?;
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        let manifest = format!("{MANIFESTS}/{name}.json");
        // Kubelet ignores files whose names begin with a dot.
        std::fs::write(node.path(format!("{MANIFESTS}/.new")), pod.to_string())?;
        std::fs::rename(node.path(format!("{MANIFESTS}/.new")), node.path(&manifest))?;
        until_device(&setup, &mut watched, &name, true).await?;
        if rounds == 0 {
            companion.kill().await?;
            companion = setup.companion(0, CONFIGURATION)?;
            // Kubelet rejects a pod without a plugin, and does not create a static pod again.
            companion.logged("kubelet watches the devices").await?;
        }
        ensure!(watched.last.len() == 3, "{:?}", watched.last);
        node.remove(&manifest)?;
        until_device(&setup, &mut watched, &name, false).await?;
        rounds += 1;
        println!("{name} came and went until {:?}", begun.elapsed());
    }
    // A restarted kubelet without the API server gives static pods no device that another pod had, so the restart comes last.
    if seconds >= LONG {
        node.stop("kubelet", 9).await?;
        ensure!(
            node.start("kubelet").await.is_err(),
            "it runs, although the API server cannot report it"
        );
    }
    setup.cluster.start_component("apiserver").await?;
    println!(
        "{rounds} pods came and went in {:?} without an API server",
        begun.elapsed()
    );
    ensure!(rounds > 1, "{rounds}");
    for pod in ["claims-stays", "plugged-stays"] {
        until_device(&setup, &mut watched, pod, true).await?;
    }
    for pod in ["claims-stays", "plugged-stays", "claims-ends"] {
        setup.pods().delete(pod, &DeleteParams::default()).await?;
    }
    assert_all_free(&setup, &mut watched, MINORS.len()).await?;
    setup.end([companion, controller]).await
}
