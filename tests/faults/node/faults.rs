//! Faults of a node: reboots, damaged checkpoints, signals, a second companion.

use std::time::Duration;

use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};
use rustix::process::Signal;

use super::fixture::{Kubelet, Node, handle};
use super::process::{Process, Start, node_command};

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";
const C: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0c";
const STATE: &str = "kubelet/plugins/drayman.dev";

fn file(uid: &str) -> String {
    format!("drayman.dev-claim_{uid}.json")
}

/// A stored claim.
fn stored(uid: &str, devices: &[&str]) -> serde_json::Value {
    serde_json::json!({
        "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim",
        "metadata": {"name": "claim", "namespace": "default", "uid": uid},
        "spec": {"resourceClassName": "test"},
        "status": {"driverName": "drayman.dev", "allocation": {"resourceHandles": [
            {"driverName": "drayman.dev", "data": handle(uid, "n-1", devices)}
        ]}},
    })
}

#[tokio::test]
async fn a_boot_restores_files_and_unused_claims_can_be_replaced() {
    let Some(node) = Node::new() else { return };
    let process = Start::new().boot(&node, "boot-1").run(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    kubelet.prepare(B, &["test-1"]).await.unwrap();
    process.kill();
    std::fs::remove_dir_all(node.path("cdi")).unwrap();

    let process = Start::new().boot(&node, "boot-2").run(&node).await;
    let mut kubelet = node.kubelet().await;
    assert_eq!(node.cdi_files(), [file(A), file(B)]);
    let (_, shown) = node_command(&node, &["holdings"]);
    assert_eq!(shown.matches("EarlierBoot").count(), 2, "{shown}");
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    let refusal = kubelet.prepare(C, &["test-0"]).await.unwrap_err();
    assert!(refusal.contains("held"), "{refusal}");
    kubelet.prepare(C, &["test-1"]).await.unwrap();
    assert_eq!(node.cdi_files(), [file(A), file(C)]);
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_damaged_missing_or_newer_checkpoint_costs_no_device() {
    let Some(node) = Node::new() else { return };
    let checkpoint = node.path(STATE).join("checkpoint.json");
    let process = Process::start(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    kubelet.prepare(B, &["test-1", "test-2"]).await.unwrap();
    node.kubelet_lists(&[(A, &["test-0"]), (B, &["test-1", "test-2"])]);
    process.kill();
    let good = std::fs::read(&checkpoint).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 4;
    let newer = {
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&9_u32.to_le_bytes());
        checksum.update(b"{}");
        format!(
            r#"{{"version":9,"checksum":{},"data":{{}}}}"#,
            checksum.finalize()
        )
        .into_bytes()
    };
    for (damage, content) in [
        ("truncated", Some(good[..good.len() / 2].to_vec())),
        ("flipped", Some(flipped)),
        ("empty", Some(Vec::new())),
        ("zeros", Some(vec![0; 4096])),
        ("newer", Some(newer)),
        ("gone", None),
    ] {
        match content {
            Some(content) => std::fs::write(&checkpoint, content).unwrap(),
            // The whole state directory is deleted.
            None => std::fs::remove_dir_all(node.path(STATE)).unwrap(),
        }
        // The CDI file of one claim is damaged too, so that only kubelet's checkpoint has its devices.
        std::fs::write(node.path("cdi").join(file(B)), "{").unwrap();
        let process = Process::start(&node).await;
        let mut kubelet = node.kubelet().await;
        for device in ["test-0", "test-1", "test-2"] {
            let refusal = kubelet.prepare(C, &[device]).await.unwrap_err();
            assert!(
                refusal.contains("held by claim default/claim"),
                "{damage}: {refusal}"
            );
        }
        assert!(
            process.log().contains("CheckpointLost"),
            "{damage}: {}",
            process.log()
        );
        kubelet.prepare(A, &["test-0"]).await.unwrap();
        let cdi = std::fs::read_to_string(node.path("cdi").join(file(B))).unwrap();
        assert!(cdi.contains("/dev/test-2"), "{damage}: {cdi}");
        process.kill();
    }
    let process = Process::start(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.unprepare(A).await.unwrap();
    kubelet.unprepare(B).await.unwrap();
    kubelet.prepare(C, &["test-0", "test-1", "test-2"]).await.unwrap();
    assert_eq!(node.cdi_files(), [file(C)]);
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_claim_known_only_by_a_file_name_withholds_all_devices() {
    let Some(node) = Node::new() else { return };
    let process = Process::start(&node).await;
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    process.kill();
    std::fs::write(node.path(STATE).join("checkpoint.json"), "x").unwrap();
    std::fs::write(node.path("cdi").join(file(A)), "y").unwrap();
    node.api.set(|state| state.away = true);

    let process = Start::new()
        .argument("--orphan-grace-period=100ms")
        .run(&node)
        .await;
    process.logged("the devices that the claim of uid").await;
    // The lost checkpoint also recorded that the cluster serves claims. Kubelet cannot call before the API server has confirmed it.
    assert!(
        !std::fs::exists(node.dra_socket()).unwrap() || !process.log().contains("the DRA service is ready")
    );
    node.api.set(|state| {
        state.away = false;
        state.stored_claims.insert("other".into(), stored(B, &["test-2"]));
    });
    // The claim is deleted from the API, and kubelet's checkpoint is unreadable: still unknown.
    let mut kubelet = node.kubelet().await;
    let refusal = kubelet.prepare(C, &["test-1"]).await.unwrap_err();
    assert!(
        refusal.contains("drayman node release") && refusal.contains(A),
        "{refusal}"
    );
    let inventory = node
        .api
        .until(|state| {
            let inventory = state.inventory.clone()?;
            (inventory["status"]["conditions"][1]["type"] == "Quarantined").then_some(inventory)
        })
        .await;
    let message = inventory["status"]["conditions"][1]["message"].as_str().unwrap();
    assert!(
        message.contains(A) && message.contains("lost with the checkpoint"),
        "{message}"
    );
    let event = node.api.until(|state| state.events.first().cloned()).await;
    assert_eq!(
        (event["reason"].as_str(), event["regarding"]["kind"].as_str()),
        (Some("ClaimQuarantined"), Some("Node"))
    );
    process.kill();

    node.api.set(|state| {
        state.stored_claims.insert("claim".into(), stored(A, &["test-0"]));
    });
    let process = Process::start(&node).await;
    process
        .logged("the API server shows the devices of the claim")
        .await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(C, &["test-1"]).await.unwrap();
    let refusal = kubelet.prepare(B, &["test-0"]).await.unwrap_err();
    assert!(refusal.contains("held"), "{refusal}");
    assert_eq!(node.cdi_files(), [file(A), file(C)]);
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_missing_or_replaced_device_stays_with_its_claim() {
    let Some(node) = Node::new() else { return };
    let process = Process::start(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    kubelet.prepare(B, &["test-1"]).await.unwrap();
    process.kill();
    std::fs::remove_file(node.path("dev/test-0")).unwrap();
    std::fs::remove_file(node.path("dev/test-1")).unwrap();
    // Another device number at the same path, as after a reboot with another order.
    node.device("test-1", 77);

    let process = Process::start(&node).await;
    let mut kubelet = node.kubelet().await;
    assert_eq!(
        node.cdi_files(),
        [file(B)],
        "no container starts with a missing device"
    );
    // The inventory of the killed process remains for a moment.
    let gone = node
        .api
        .until(|state| {
            let devices = state.inventory.as_ref()?["spec"]["devices"].as_array()?;
            let mut unhealthy = devices.iter().filter(|device| device["unhealthy"].is_string());
            unhealthy.find(|device| device["name"] == "test-0").cloned()
        })
        .await;
    assert!(gone["unhealthy"].as_str().unwrap().contains("gone"), "{gone}");
    assert!(kubelet.prepare(A, &["test-0"]).await.is_err());
    kubelet.prepare(B, &["test-1"]).await.unwrap();
    kubelet.unprepare(A).await.unwrap();
    node.device("test-0", 0);
    node.api
        .until(|state| {
            let devices = state.inventory.as_ref()?["spec"]["devices"].as_array()?.clone();
            devices
                .iter()
                .any(|device| device["name"] == "test-0" && device.get("unhealthy").is_none())
                .then_some(())
        })
        .await;
    kubelet.prepare(C, &["test-0"]).await.unwrap();
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_sigterm_at_any_time_in_a_prepare_ends_cleanly() {
    let Some(node) = Node::new() else { return };
    for (round, delay) in [0, 1, 2, 3, 5, 8, 13, 30].into_iter().enumerate() {
        let process = Process::start(&node).await;
        let mut kubelet = node.kubelet().await;
        let call = tokio::spawn(async move { kubelet.prepare(A, &["test-0"]).await });
        tokio::time::sleep(Duration::from_millis(delay)).await;
        let status = process.stop().await;
        assert!(status.success(), "round {round}: {status}");
        let answered = call.await.unwrap().is_ok();
        for directory in [
            "kubelet/plugins_registry/drayman.dev",
            "kubelet/device-plugins",
            STATE,
        ] {
            let sockets: Vec<_> = std::fs::read_dir(node.path(directory))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| name.contains(".sock"))
                .collect();
            assert_eq!(sockets, Vec::<String>::new(), "{directory}");
        }
        assert!(
            !answered || node.checkpoint().contains(A),
            "the answered call is kept"
        );

        let process = Process::start(&node).await;
        let mut kubelet = node.kubelet().await;
        kubelet.prepare(A, &["test-0"]).await.unwrap();
        kubelet.unprepare(A).await.unwrap();
        assert_eq!(node.cdi_files(), Vec::<String>::new());
        process.kill();
    }
}

#[tokio::test]
async fn a_second_companion_waits_and_takes_over() {
    let Some(node) = Node::new() else { return };
    let first = Process::start(&node).await;
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    let second = Process::start(&node).await;
    second.logged("another companion runs on this node").await;
    node.kubelet().await.prepare(B, &["test-1"]).await.unwrap();
    first.signal(Signal::KILL);
    second.logged("the DRA service is ready").await;
    let mut kubelet = node.kubelet().await;
    for device in ["test-0", "test-1"] {
        let refusal = kubelet.prepare(C, &[device]).await.unwrap_err();
        assert!(refusal.contains("held"), "{refusal}");
    }
    drop(first);
    assert!(second.stop().await.success());
}

#[tokio::test]
async fn a_second_companion_that_times_out_names_the_first() {
    let Some(node) = Node::new() else { return };
    let first = Process::start(&node).await;
    node.kubelet().await;
    let mut second = Process::start(&node).await;
    assert_eq!(second.ended().await.code(), Some(1));
    assert!(
        second
            .log()
            .contains("another companion of this driver runs on this node"),
        "{}",
        second.log()
    );
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    assert!(first.stop().await.success());
}

/// Waits for the next file that is created in the directory of the checkpoint: the first change of a prepare.
async fn next_file(node: &Node) {
    let inotify = Inotify::init().unwrap();
    inotify
        .watches()
        .add(node.path(STATE), WatchMask::CREATE)
        .unwrap();
    let mut events = inotify.into_event_stream([0; 4096]).unwrap();
    events.next().await.unwrap().unwrap();
}

/// Prepares claim A, stops the companion as soon as it works on the call, and abandons the call. Returns whether that was before the
/// answer. The companion may drop a call that is abandoned before it has begun, so it is not enough to stop it before the call.
async fn stopped_within_prepare(node: &Node, process: &Process, kubelet: &mut Kubelet) -> bool {
    let call = kubelet.prepare(A, &["test-0"]);
    tokio::pin!(call);
    tokio::select! {
        // The directory is watched before the call begins.
        biased;
        () = next_file(node) => process.signal(Signal::STOP),
        answer = &mut call => {
            answer.unwrap();
            return false;
        }
    }
    // An answer that was sent before the stop arrives by then.
    tokio::time::timeout(Duration::from_millis(200), call)
        .await
        .is_err()
}

#[tokio::test]
async fn an_abandoned_call_is_done_and_found_by_the_next_one() {
    let Some(node) = Node::new() else { return };
    let process = Process::start(&node).await;
    let mut kubelet = node.kubelet().await;
    // No other write of the checkpoint is to come.
    node.api.until_ready("True", "Serving").await;
    node.until_checkpoint(|text| text.contains("\"servesClaims\":true"))
        .await;
    let mut is_abandoned = false;
    for _ in 0..50 {
        is_abandoned = stopped_within_prepare(&node, &process, &mut kubelet).await;
        process.signal(Signal::CONT);
        if is_abandoned {
            break;
        }
        kubelet.unprepare(A).await.unwrap();
    }
    assert!(is_abandoned, "the companion was always faster");
    // Done before anybody calls again.
    node.until_exists(&node.path("cdi").join(file(A))).await;
    let ids = node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    assert_eq!(ids, [format!("drayman.dev/claim={A}")]);
    assert_eq!(node.cdi_files(), [file(A)]);
    node.kubelet().await.unprepare(A).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_node_without_inotify_is_polled_instead() {
    let Some(node) = Node::new() else { return };
    let process = Start::new().without_inotify().run(&node).await;
    let mut kubelet = node.kubelet().await;
    assert!(process.log().contains(" is polled"), "{}", process.log());
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    // A removed file is still noticed soon.
    let registration = node.path("kubelet/plugins_registry/drayman.dev/reg.sock");
    node.until_exists(&registration).await;
    std::fs::remove_file(&registration).unwrap();
    node.until_exists(&registration).await;
    kubelet.unprepare(A).await.unwrap();
    assert!(process.stop().await.success());
}
