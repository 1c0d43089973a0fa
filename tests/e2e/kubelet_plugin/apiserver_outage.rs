//! An API server outage of several minutes, while pods come and go on the node.

use std::time::{Duration, Instant};

use anyhow::ensure;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use tokio::time::sleep;

use crate::harness::{Cluster, IMAGE, PATIENCE};
use crate::kubelet_plugin::both_apis::{CONFIGURATION, PREFIX, RESOURCE, Watched, all_is_free, environment};
use crate::kubelet_plugin::helper::{pod_with_limit, wait_for_allocatable, wait_for_inventory};
use crate::stage::{DRIVER, Stage, is_running, pod_from};

/// Devices by minor number: for a claim that stays, a claim whose pod ends, a container that stays, and pods that come and go.
const MINORS: [u32; 4] = [5, 7, 8, 9];
/// From this duration on, the run also restarts kubelet.
const LONG: u64 = 60;
/// Kubelet's directory for static pods.
const MANIFESTS: &str = "/var/lib/kubelet/manifests";

/// Polls the container runtime until a pod has a device, or has none.
async fn until_device(stage: &Stage, watched: &mut Watched, pod: &str, has: bool) -> anyhow::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        watched.look(stage.cluster.node(0));
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
    let stage = Stage::on(cluster.start().await?).await?;
    let node = stage.cluster.node(0);
    for (number, minor) in MINORS.into_iter().enumerate() {
        node.make_device(format!("/dev/{PREFIX}{number}"), 1, minor)?;
    }
    std::fs::create_dir_all(node.path(MANIFESTS))?;
    stage.make_template(None).await?;
    let controller = stage.controller()?;
    let mut companion = stage.companion(0, CONFIGURATION)?;
    wait_for_inventory(&stage, DRIVER, 4, 0).await?;
    wait_for_allocatable(&stage, RESOURCE, "4").await?;

    stage.make_pod("claims-stays").await?;
    stage
        .pods()
        .create(
            &PostParams::default(),
            &pod_with_limit("plugged-stays", RESOURCE)?,
        )
        .await?;
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
    stage
        .pods()
        .create(&PostParams::default(), &pod_from(ends)?)
        .await?;
    for pod in ["claims-stays", "plugged-stays", "claims-ends"] {
        stage.wait(stage.pods(), pod, "running", is_running()).await?;
    }
    let end = [
        "exec",
        "claims-ends",
        "--",
        "sh",
        "-c",
        "(sleep 3; touch /tmp/end) >/dev/null 2>&1 &",
    ];
    stage.cluster.kubectl(&end).await?;

    stage.cluster.stop_component("apiserver", 9).await?;
    let (begun, mut watched, mut rounds) = (Instant::now(), Watched::default(), 0);
    until_device(&stage, &mut watched, "claims-ends", false).await?;
    while begun.elapsed() < Duration::from_secs(seconds) {
        let name = format!("plugged-{rounds}");
        let mut pod = serde_json::to_value(pod_with_limit(&name, RESOURCE)?)?;
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        let manifest = format!("{MANIFESTS}/{name}.json");
        // Kubelet ignores files whose names begin with a dot.
        std::fs::write(node.path(format!("{MANIFESTS}/.new")), pod.to_string())?;
        std::fs::rename(node.path(format!("{MANIFESTS}/.new")), node.path(&manifest))?;
        until_device(&stage, &mut watched, &name, true).await?;
        if rounds == 0 {
            companion.kill().await?;
            companion = stage.companion(0, CONFIGURATION)?;
        }
        ensure!(watched.last.len() == 3, "{:?}", watched.last);
        node.remove(&manifest)?;
        until_device(&stage, &mut watched, &name, false).await?;
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
    stage.cluster.start_component("apiserver").await?;
    println!(
        "{rounds} pods came and went in {:?} without an API server",
        begun.elapsed()
    );
    ensure!(rounds > 1, "{rounds}");
    for pod in ["claims-stays", "plugged-stays"] {
        until_device(&stage, &mut watched, pod, true).await?;
    }
    for pod in ["claims-stays", "plugged-stays", "claims-ends"] {
        stage.pods().delete(pod, &DeleteParams::default()).await?;
    }
    all_is_free(&stage, &mut watched, MINORS.len()).await?;
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}
