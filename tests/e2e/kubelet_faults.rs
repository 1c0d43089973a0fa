//! Faults of a real kubelet and their effect on devices.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::harness::{Node, TIMEOUT};
use crate::interrupted_calls::{stop_at_first_change, until_claim_files};
use crate::pods::{
    CONFIGURATION, ContainerDevices, MINORS, PLUGGED, assert_prepared, assert_unprepared, look_inside,
    make_devices, start_node_with,
};
use crate::setup::{Program, REGISTERED, Setup};

const SOON: &[&str] = &["--orphan-grace-period=2s"];

/// Runs `drayman node …` on the node. Returns success and output.
async fn node_command(node: Node<'_>, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
    let output = node
        .command(env!("CARGO_BIN_EXE_drayman"))
        .arg("node")
        .args(arguments)
        .output()
        .await?;
    let message = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8(message)?))
}

/// Waits until a pod runs that gets the device of a deleted claim. Kubelet either unprepares that claim after all, or lists it forever. In
/// the latter case, the device is quarantined and released by hand.
async fn runs_after(
    setup: &Setup,
    companion: &Program,
    pod: &str,
    uid: &str,
) -> anyhow::Result<ContainerDevices> {
    let node = setup.cluster.node(0);
    let quarantined = async {
        companion.logged("ClaimQuarantined").await?;
        // The companion logs it before it writes the event.
        let event = setup.wait_for_event(node.name(), "ClaimQuarantined", uid).await?;
        let kind = event.involved_object.kind.as_deref();
        anyhow::ensure!(kind == Some("Node"), "{kind:?}: the event is about the node");
        let (done, message) = node_command(node, &["holdings"]).await?;
        anyhow::ensure!(done && message.contains(uid), "{message}");
        let (done, message) = node_command(node, &["release", uid, "--force"]).await?;
        anyhow::ensure!(done, "{message}");
        anyhow::Ok(message)
    };
    let running = look_inside(setup, pod);
    tokio::pin!(running, quarantined);
    let inside = tokio::select! {
        inside = &mut running => inside?,
        message = &mut quarantined => {
            println!("in quarantine, and released by hand: {}", message?.trim());
            running.await?
        }
    };
    assert_unprepared(node, uid)?;
    Ok(inside)
}

#[tokio::test]
async fn a_pod_deleted_by_force_gives_its_device_to_the_next_one() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node_with(1, SOON).await?;
    setup.make_pod("first").await?;
    let first = look_inside(&setup, "first").await?;
    let (uid, _) = setup.claim_ids("first").await?;
    setup.make_pod("second").await?;
    setup.remove_pod("first").await?;
    // Kubelet 1.27 reads the claim from the API server before Unprepare. The claim is deleted, so it never calls.
    let second = if setup.cluster.minor() < 28 {
        runs_after(&setup, &companion, "second", &uid).await?
    } else {
        look_inside(&setup, "second").await?
    };
    assert_eq!(second.only_device(), first.only_device());
    assert_unprepared(setup.cluster.node(0), &uid)?;
    setup.end([companion, controller]).await
}

#[tokio::test]
async fn a_force_deleted_pods_device_is_free_or_quarantined() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node_with(1, SOON).await?;
    let node = setup.cluster.node(0);
    setup.make_pod("first").await?;
    look_inside(&setup, "first").await?;
    let (uid, name) = setup.claim_ids("first").await?;
    node.stop("kubelet", 9).await?;
    setup.remove_pod("first").await?;
    setup.until_claim_gone(&name).await?;
    setup.make_pod("second").await?;
    node.start("kubelet").await?;
    // Kubelet either unprepares the claim after all, or lists it forever.
    let list = node.read("/var/lib/kubelet/dra_manager_state")?;
    println!(
        "kubelet lists the claim of the deleted pod: {}",
        list.contains(&uid)
    );
    runs_after(&setup, &companion, "second", &uid)
        .await?
        .only_device();
    setup.end([companion, controller]).await
}

/// Kills kubelet between Prepare and the answer, and force-deletes the pod before the next kubelet starts. Returns true if that kubelet
/// does not list the claim; it does if the answer was faster.
async fn kubelet_forgets(setup: &Setup, companion: &Program, pod: &str) -> anyhow::Result<bool> {
    let node = setup.cluster.node(0);
    // Stopped at the first of three writes, the companion cannot answer.
    let stopped = stop_at_first_change(companion, node.path("/var/lib/kubelet/plugins/drayman.dev"))?;
    setup.make_pod(pod).await?;
    timeout(TIMEOUT, stopped).await??;
    node.stop("kubelet", 9).await?;
    companion.signal(rustix::process::Signal::CONT)?;
    let (uid, name) = setup.claim_ids(pod).await?;
    let listed = node.read("/var/lib/kubelet/dra_manager_state")?.contains(&uid);
    if !listed {
        setup.remove_pod(pod).await?;
        setup.until_claim_gone(&name).await?;
    }
    node.start("kubelet").await?;
    if listed {
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
        return Ok(false);
    }
    companion.logged("OrphanFreed").await?;
    anyhow::ensure!(
        companion
            .log()?
            .contains(&format!("claim_uid={uid} reason=\"OrphanFreed\"")),
        "{uid}"
    );
    // The companion logs the decision before it acts.
    until_claim_files(node, &uid, 0).await?;
    Ok(true)
}

#[tokio::test]
async fn a_prepare_that_a_killed_kubelet_forgot_is_freed() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node_with(1, SOON).await?;
    let mut forgotten = false;
    for attempt in 0..30 {
        forgotten = kubelet_forgets(&setup, &companion, &format!("first-{attempt}")).await?;
        println!("attempt {attempt}: forgotten {forgotten}");
        if forgotten {
            break;
        }
    }
    assert!(forgotten, "kubelet was always faster");
    setup.make_pod("second").await?;
    look_inside(&setup, "second").await?.only_device();
    setup.end([companion, controller]).await
}

/// Removes a directory while the companion may recreate its files.
fn wipe(directory: &Path) -> std::io::Result<()> {
    for _ in 0..100 {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            done => return done,
        }
    }
    Err(ErrorKind::DirectoryNotEmpty.into())
}

#[tokio::test]
async fn wiped_directories_cost_no_pod_its_device() -> anyhow::Result<()> {
    let (setup, controller, mut companion) = start_node_with(2, SOON).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-plugged-", &MINORS[2..])?;
    setup.until_allocatable(PLUGGED, "2").await?;
    setup.make_pod("first").await?;
    let first = look_inside(&setup, "first").await?;
    let (uid, _) = setup.claim_ids("first").await?;
    node.stop("kubelet", 15).await?;
    for directory in ["plugins", "plugins_registry", "device-plugins"] {
        wipe(&node.path(format!("/var/lib/kubelet/{directory}")))?;
    }
    // One companion keeps running; the next one finds neither checkpoint nor lock of the first.
    node.start("kubelet").await?;
    setup.until_allocatable(PLUGGED, "2").await?;
    companion.kill().await?;
    let companion = setup.companion_with(0, CONFIGURATION, SOON)?;
    companion.logged(REGISTERED).await?;
    // Kubelet rejects a pod without a device plugin, and the Node still shows the devices of the killed one.
    companion.logged("kubelet watches the devices").await?;
    setup.make_pod("second").await?;
    let second = look_inside(&setup, "second").await?;
    assert_ne!(first.only_device(), second.only_device());
    assert_eq!(
        look_inside(&setup, "first").await?,
        first,
        "the running pod keeps its device"
    );
    assert_prepared(node, &uid)?;
    setup.make_limit_pod("plugged", PLUGGED).await?;
    look_inside(&setup, "plugged").await?.only_device();
    for name in ["first", "second", "plugged"] {
        setup.cluster.kubectl(&["delete", "pod", name]).await?;
    }
    assert_unprepared(node, &uid)?;
    setup.end([companion, controller]).await
}

/// Checkpoint, CDI file and kubelet's checkpoint are lost while the container runs. PodResources and the API server together identify its
/// device.
#[tokio::test]
async fn a_claim_known_only_by_its_container_keeps_its_device() -> anyhow::Result<()> {
    let (setup, controller, mut companion) = start_node_with(1, SOON).await?;
    let node = setup.cluster.node(0);
    setup.make_pod("first").await?;
    let first = look_inside(&setup, "first").await?;
    let (uid, _) = setup.claim_ids("first").await?;
    companion.kill().await?;
    std::fs::remove_dir_all(node.path("/var/lib/kubelet/plugins/drayman.dev"))?;
    for name in node.list("/run/cdi")? {
        node.remove(format!("/run/cdi/{name}"))?;
    }
    node.remove("/var/lib/kubelet/dra_manager_state")?;
    assert!(node.list("/run/cdi")?.is_empty());

    let companion = setup.companion_with(0, CONFIGURATION, SOON)?;
    companion.logged("CheckpointLost").await?;
    companion.logged("HoldingExplained").await?;
    companion.logged(REGISTERED).await?;
    // The companion logs the recovered claim before it acts.
    until_claim_files(node, &uid, 2).await?;
    let (done, message) = node_command(node, &["holdings"]).await?;
    let line = message
        .lines()
        .find(|line| line.contains(&uid))
        .unwrap_or_default();
    assert!(done && line.contains("drayman-test-0"), "{message}");
    assert_eq!(look_inside(&setup, "first").await?, first);
    setup.cluster.kubectl(&["delete", "pod", "first"]).await?;
    assert_unprepared(node, &uid)?;
    setup.make_pod("second").await?;
    assert_eq!(
        look_inside(&setup, "second").await?.only_device(),
        first.only_device()
    );
    setup.end([companion, controller]).await
}

/// A valid checkpoint with a future version.
fn checkpoint_of_a_newer_release() -> Vec<u8> {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&9_u32.to_le_bytes());
    checksum.update(b"{}");
    let checksum = checksum.finalize();
    format!(r#"{{"version":9,"checksum":{checksum},"data":{{}}}}"#).into_bytes()
}

#[tokio::test]
async fn a_damaged_checkpoint_is_rebuilt_from_kubelet_and_api() -> anyhow::Result<()> {
    let (setup, controller, mut companion) = start_node_with(2, SOON).await?;
    let node = setup.cluster.node(0);
    let path = node.path("/var/lib/kubelet/plugins/drayman.dev/checkpoint.json");
    setup.make_pod("first").await?;
    let first = look_inside(&setup, "first").await?;
    let (uid, _) = setup.claim_ids("first").await?;
    let device = first.only_device().trim_start_matches("/dev/").to_owned();
    let good = std::fs::read(&path)?;
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 4;
    for (damage, content) in [
        ("truncated", good[..good.len() / 2].to_vec()),
        ("flipped", flipped),
        ("empty", Vec::new()),
        ("zeros", vec![0; 4096]),
        ("newer", checkpoint_of_a_newer_release()),
    ] {
        companion.kill().await?;
        std::fs::write(&path, content)?;
        // The claim's CDI file does not identify the device either.
        std::fs::write(node.path(format!("/run/cdi/drayman.dev-claim_{uid}.json")), "{")?;
        companion = setup.companion_with(0, CONFIGURATION, SOON)?;
        companion.logged("CheckpointLost").await?;
        companion.logged(REGISTERED).await?;
        // Kubelet 1.27 stores no resource handles, so the companion asks the API server, and serves kubelet before the answer.
        let until = Instant::now() + TIMEOUT;
        loop {
            let (done, message) = node_command(node, &["holdings"]).await?;
            let line = message
                .lines()
                .find(|line| line.contains(&uid))
                .unwrap_or_default();
            if done && line.contains(&device) {
                break;
            }
            anyhow::ensure!(Instant::now() < until, "{damage}: {message}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let cdi = node.read(format!("/run/cdi/drayman.dev-claim_{uid}.json"))?;
        assert!(cdi.contains(first.only_device()), "{damage}: {cdi}");
        let next = format!("next-{damage}");
        setup.make_pod(&next).await?;
        assert_ne!(
            look_inside(&setup, &next).await?.only_device(),
            first.only_device(),
            "{damage}"
        );
        setup.cluster.kubectl(&["delete", "pod", &next]).await?;
        assert_eq!(look_inside(&setup, "first").await?, first, "{damage}");
    }
    setup.cluster.kubectl(&["delete", "pod", "first"]).await?;
    assert_eq!(
        std::fs::read_to_string(&path)?.matches(&uid).count(),
        0,
        "freed; only the kept damaged checkpoints contain it"
    );
    setup.end([companion, controller]).await
}
