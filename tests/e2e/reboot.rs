//! A node that reboots, and a kubelet that is down for minutes.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::harness::{Node, PATIENCE};
use crate::pods::{CONFIGURATION, Inside, MINORS, look_inside, make_devices, traces, wait_for_inventory};
use crate::stage::{Program, Stage, is_allocated};

/// The boot id after the reboot.
const BOOT_ID: &str = "0f8c1f5e-52a7-4a3c-9c3e-000000000002";
/// Log message of the companion after its registration.
pub(crate) const REGISTERED: &str = "kubelet has registered the driver";

/// A node with this many devices for claims, a controller, and a registered companion.
pub(crate) async fn stage(devices: usize) -> anyhow::Result<(Stage, Program, Program)> {
    let stage = Stage::start(1).await?;
    make_devices(stage.cluster.node(0), "drayman-test", &MINORS[..devices])?;
    stage.make_template(None).await?;
    let controller = stage.controller()?;
    let companion = stage.companion(0, CONFIGURATION)?;
    wait_for_inventory(&stage, 0, u32::try_from(devices)?).await?;
    companion.logged(REGISTERED).await?;
    Ok((stage, controller, companion))
}

/// Simulates a power loss: ends all processes, clears in-memory file systems and changes the boot id. The directories of kubelet and
/// containerd are on disk.
pub(crate) async fn lose_power(stage: &Stage, node: Node<'_>) -> anyhow::Result<()> {
    for process in ["kubelet", "containerd"] {
        node.stop(process, 9).await?;
    }
    // Containers and their shims: everything in the node's PID namespace except its first process.
    let (init, _) = node.init();
    let killed = stage
        .cluster
        .command("nsenter")
        .arg(format!("--pid=/proc/{init}/ns/pid"))
        .args(["--", "sh", "-c", "kill -9 -1"])
        .status()
        .await?;
    ensure!(killed.success(), "kill: {killed}");
    let boot_id = stage.cluster.directory().join("boot_id");
    std::fs::write(&boot_id, format!("{BOOT_ID}\n"))?;
    let mounts = std::fs::read_to_string(format!("/proc/{init}/mountinfo"))?;
    let in_memory =
        |path: &&str| path.starts_with("/run/containerd/") || path.starts_with("/var/lib/kubelet/pods/");
    let mounts = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    // Nested mounts come last in the list, so this goes backwards.
    let mounts: Vec<&str> = mounts.filter(in_memory).collect();
    let script = r#"
        mount --bind "$0" /proc/sys/kernel/random/boot_id
        for path; do umount -l "$path"; done
        rm -rf /run/containerd/* /run/cdi/* /run/runc/*"#;
    // umount reads /proc of its own process, so it must run in the node's namespaces.
    let output = stage
        .cluster
        .command("nsenter")
        .arg(format!("--mount=/proc/{init}/ns/mnt"))
        .arg(format!("--pid=/proc/{init}/ns/pid"))
        .args(["--", "sh", "-ec", script])
        .arg(&boot_id)
        .args(mounts.iter().rev())
        .output()
        .await?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// The devices in a pod's container after its restart.
pub(crate) async fn look_again(stage: &Stage, pod: &str) -> anyhow::Result<Inside> {
    let until = Instant::now() + 2 * PATIENCE;
    loop {
        // For a while the status dates from before the reboot, and exec fails.
        match look_inside(stage, pod).await {
            Ok(inside) => return Ok(inside),
            Err(error) if Instant::now() > until => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    }
}

pub(crate) fn was_restarted(pod: Option<&Pod>) -> bool {
    let statuses = pod.and_then(|pod| pod.status.as_ref()?.container_statuses.as_ref());
    statuses
        .into_iter()
        .flatten()
        .any(|status| status.restart_count > 0)
}

#[tokio::test]
async fn after_a_boot_each_pod_has_the_device_that_it_had() -> anyhow::Result<()> {
    let (stage, controller, mut companion) = stage(3).await?;
    let node = stage.cluster.node(0);
    let pods = || Api::<Pod>::namespaced(stage.cluster.client(), "default");
    let mut before = Vec::new();
    for name in ["first", "second"] {
        stage.make_pod(name).await?;
        before.push(look_inside(&stage, name).await?);
    }
    companion.kill().await?;
    lose_power(&stage, node).await?;
    assert!(node.list("/run/cdi")?.is_empty());

    node.start("containerd").await?;
    node.start("kubelet").await?;
    let companion = stage.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    for (name, before) in ["first", "second"].into_iter().zip(&before) {
        assert_eq!(&look_again(&stage, name).await?, before, "{name}");
        // The status follows the container with some delay.
        stage.wait(pods(), name, "started again", was_restarted).await?;
    }
    let checkpoint = node.read("/var/lib/kubelet/plugins/drayman.dev/checkpoint.json")?;
    // Kubelet 1.27 restarts containers without another Prepare.
    let asked_again = stage.cluster.minor() >= 28;
    assert_eq!(checkpoint.contains(BOOT_ID), asked_again, "{checkpoint}");
    // The next pod gets the remaining device; then everything is free again.
    stage.make_pod("third").await?;
    let third = look_inside(&stage, "third").await?;
    for earlier in &before {
        assert_ne!(third.only_device(), earlier.only_device());
    }
    for name in ["first", "second", "third"] {
        let claim = stage.claim_of(name, "allocated", is_allocated).await?;
        stage.cluster.kubectl(&["delete", "pod", name]).await?;
        let uid = claim.metadata.uid.context("a uid")?;
        assert_eq!(traces(node, &uid)?, Vec::<String>::new());
    }
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}

#[tokio::test]
async fn a_kubelet_that_was_away_finds_everything_as_it_was() -> anyhow::Result<()> {
    let (stage, controller, companion) = stage(2).await?;
    let node = stage.cluster.node(0);
    stage.make_pod("first").await?;
    let first = look_inside(&stage, "first").await?;
    let claim = stage.claim_of("first", "allocated", is_allocated).await?;
    node.stop("kubelet", 15).await?;
    // Long enough for the node to become NotReady (40 s), too short for the eviction of its pods (300 s).
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(
        traces(node, claim.metadata.uid.as_deref().context("a uid")?)?.len(),
        2
    );
    node.start("kubelet").await?;
    assert_eq!(look_again(&stage, "first").await?, first);
    stage.make_pod("second").await?;
    let second = look_inside(&stage, "second").await?;
    assert_ne!(first.only_device(), second.only_device());
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}
