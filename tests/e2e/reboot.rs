//! A node that reboots, and a kubelet that is down for minutes.

use std::time::{Duration, Instant};

use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::harness::{Node, TIMEOUT};
use crate::pods::{
    CONFIGURATION, ContainerDevices, assert_prepared, assert_unprepared, look_inside, start_node,
};
use crate::setup::{REGISTERED, Setup};

/// The boot id after the reboot.
const BOOT_ID: &str = "0f8c1f5e-52a7-4a3c-9c3e-000000000002";
/// Simulates a power loss: ends all processes, clears in-memory file systems and changes the boot id. The directories of kubelet and
/// containerd are on disk.
pub(crate) async fn lose_power(setup: &Setup, node: Node<'_>) -> anyhow::Result<()> {
    for process in ["kubelet", "containerd"] {
        node.stop(process, 9).await?;
    }
    // Containers and their shims: everything in the node's PID namespace except its first process.
    let (init, _) = node.init();
    let killed = setup
        .cluster
        .command("nsenter")
        .arg(format!("--pid=/proc/{init}/ns/pid"))
        .args(["--", "sh", "-c", "kill -9 -1"])
        .status()
        .await?;
    ensure!(killed.success(), "kill: {killed}");
    let boot_id = setup.cluster.directory().join("boot_id");
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
    let output = setup
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
pub(crate) async fn look_again(setup: &Setup, pod: &str) -> anyhow::Result<ContainerDevices> {
    let until = Instant::now() + 2 * TIMEOUT;
    loop {
        // For a while the status dates from before the reboot, and exec fails.
        match look_inside(setup, pod).await {
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
    let (setup, controller, mut companion) = start_node(3).await?;
    let node = setup.cluster.node(0);
    let pods = || Api::<Pod>::namespaced(setup.cluster.client(), "default");
    let mut before = Vec::new();
    for name in ["first", "second"] {
        setup.make_pod(name).await?;
        before.push(look_inside(&setup, name).await?);
    }
    companion.kill().await?;
    lose_power(&setup, node).await?;
    assert!(node.list("/run/cdi")?.is_empty());

    node.start("containerd").await?;
    node.start("kubelet").await?;
    let companion = setup.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    for (name, before) in ["first", "second"].into_iter().zip(&before) {
        assert_eq!(&look_again(&setup, name).await?, before, "{name}");
        // The status follows the container with some delay.
        setup.wait(pods(), name, "started again", was_restarted).await?;
    }
    let checkpoint = node.read("/var/lib/kubelet/plugins/drayman.dev/checkpoint.json")?;
    // Kubelet 1.27 restarts containers without another Prepare.
    let asked_again = setup.cluster.minor() >= 28;
    assert_eq!(checkpoint.contains(BOOT_ID), asked_again, "{checkpoint}");
    // The next pod gets the remaining device; then everything is free again.
    setup.make_pod("third").await?;
    let third = look_inside(&setup, "third").await?;
    for earlier in &before {
        assert_ne!(third.only_device(), earlier.only_device());
    }
    for name in ["first", "second", "third"] {
        let (uid, _) = setup.claim_ids(name).await?;
        setup.cluster.kubectl(&["delete", "pod", name]).await?;
        assert_unprepared(node, &uid)?;
    }
    setup.end([companion, controller]).await
}

#[tokio::test]
async fn a_kubelet_that_was_away_finds_everything_as_it_was() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(2).await?;
    let node = setup.cluster.node(0);
    setup.make_pod("first").await?;
    let first = look_inside(&setup, "first").await?;
    let (uid, _) = setup.claim_ids("first").await?;
    node.stop("kubelet", 15).await?;
    // Long enough for the node to become NotReady (40 s), too short for the eviction of its pods (300 s).
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_prepared(node, &uid)?;
    node.start("kubelet").await?;
    assert_eq!(look_again(&setup, "first").await?, first);
    setup.make_pod("second").await?;
    let second = look_inside(&setup, "second").await?;
    assert_ne!(first.only_device(), second.only_device());
    setup.end([companion, controller]).await
}
