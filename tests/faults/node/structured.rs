//! Structured claims: read at Prepare, and afterwards held by the companion's own records.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::api::State;
use super::fixture::{Node, structured_claim};
use super::process::{Process, Start, node_command};

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

/// A node in a cluster of structured mode.
pub(super) fn structured_node() -> Option<Node> {
    let node = Node::new()?;
    node.api.set(|state| state.structured = true);
    Some(node)
}

/// The number of requests whose method and path contain this text.
fn requests(node: &Node, text: &str) -> usize {
    let mut number = 0;
    node.api.set(|state| {
        let requests = state.requests.iter();
        number = requests.filter(|request| request.contains(text)).count();
    });
    number
}

/// The number of reads of single claims.
fn reads(node: &Node) -> usize {
    requests(node, "/resourceclaims/")
}

fn id(uid: &str, device: &str) -> String {
    format!("drayman.dev/claim={uid}-{device}")
}

#[tokio::test]
async fn a_prepare_waits_for_the_api_server_and_an_unprepare_does_not() {
    let Some(node) = structured_node() else { return };
    let process = node.start();
    let mut kubelet = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0"]);
    node.allocate("b", B, &["test-1"]);
    assert_eq!(kubelet.prepare("a", A).await.unwrap(), [id(A, "test-0")]);
    assert_eq!(reads(&node), 1);
    node.api.set(|state| state.away = true);
    for (name, uid) in [("b", B), ("a", A)] {
        let error = kubelet.prepare(name, uid).await.unwrap_err();
        assert!(
            error.contains("the API server does not show the claim; kubelet asks again"),
            "{error}"
        );
    }
    assert!(!node.checkpoint().contains(B), "nothing is held");
    kubelet.unprepare("a", A).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    process.kill();

    // The mode is known from the checkpoint.
    let process = node.start();
    let mut kubelet = node.structured_kubelet().await;
    kubelet.prepare("b", B).await.unwrap_err();
    kubelet.unprepare("b", B).await.unwrap();
    node.api.set(|state| state.away = false);
    kubelet.prepare("b", B).await.unwrap();
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_claim_that_is_not_shown_in_time_delays_no_other() {
    let Some(node) = structured_node() else { return };
    let process = node.start();
    let mut kubelet = node.structured_kubelet().await;
    let mut waiting = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0"]);
    node.allocate("b", B, &["test-1"]);
    node.api.set(|state| state.unanswered = Some("a"));
    let start = Instant::now();
    let both = tokio::spawn(async move { waiting.prepare_all(&[("a", A), ("b", B)]).await });
    kubelet.prepare("b", B).await.unwrap();
    kubelet.unprepare("b", B).await.unwrap();
    assert!(!both.is_finished());
    let answers = both.await.unwrap().unwrap();
    // Kubelet's timeout is 45 s.
    assert!(start.elapsed() < Duration::from_secs(40));
    let error = answers[0].clone().unwrap_err();
    assert!(error.contains("in time; kubelet asks again"), "{error}");
    assert_eq!(answers[1], Ok(vec![id(B, "test-1")]));
    node.api.set(|state| state.unanswered = None);
    kubelet.prepare("a", A).await.unwrap();
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_device_allocated_twice_stays_with_the_first_claim() {
    let Some(node) = structured_node() else { return };
    let process = node.start();
    let mut kubelet = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0"]);
    node.allocate("b", B, &["test-1", "test-0"]);
    kubelet.prepare("a", A).await.unwrap();
    let refused =
        format!("DeviceHeld: device \"test-0\" is held by claim default/a (uid {A}) until it is unprepared");
    let answers = kubelet.prepare_all(&[("b", B), ("a", A)]).await.unwrap();
    assert_eq!(answers, [Err(refused), Ok(vec![id(A, "test-0")])]);
    assert!(
        !node.checkpoint().contains(B),
        "not even the other device is held"
    );
    kubelet.unprepare("a", A).await.unwrap();
    let ids = kubelet.prepare("b", B).await.unwrap();
    assert_eq!(ids, [id(B, "test-1"), id(B, "test-0")]);
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_claim_with_an_invalid_allocation_is_refused() {
    let Some(node) = structured_node() else { return };
    let process = node.start();
    let mut kubelet = node.structured_kubelet().await;
    let with = |pointer: &str, value: Value| {
        let mut claim = structured_claim("a", A, &["test-0"]);
        *claim.pointer_mut(pointer).unwrap() = value;
        claim
    };
    let result = "/status/allocation/devices/results/0";
    let opaque = |parameters: Value| {
        let config =
            json!([{"source": "FromClaim", "opaque": {"driver": "drayman.dev", "parameters": parameters}}]);
        let results =
            structured_claim("a", A, &["test-0"])["status"]["allocation"]["devices"]["results"].clone();
        with(
            "/status/allocation/devices",
            json!({"results": results, "config": config}),
        )
    };
    for (claim, word) in [
        (
            with(&format!("{result}/pool"), json!("node-b")),
            "of pool \"node-b\"",
        ),
        (
            with(&format!("{result}/driver"), json!("gpu.example.com")),
            "no device of driver",
        ),
        (
            with(&format!("{result}/device"), json!("test-9")),
            "is not on this node",
        ),
        (
            with(&format!("{result}/device"), json!("../../etc/passwd")),
            "is not on this node",
        ),
        (
            with(&format!("{result}/device"), json!("camera-0")),
            "extended resource",
        ),
        (
            with("/status/allocation/devices/results", json!([])),
            "no device of driver",
        ),
        (
            with("/status/allocation", Value::Null),
            "not allocated (any more)",
        ),
        (with("/status/reservedFor", json!([])), "reserved for no pod"),
        (with("/metadata/uid", json!(B)), "another of this name"),
        (
            opaque(json!({"apiVersion": "drayman.dev/v9"})),
            "opaque parameters",
        ),
        (
            opaque(json!({"nonsense": "x".repeat(10 * 1024)})),
            "opaque parameters",
        ),
    ] {
        node.api.set(|state| {
            state.stored_claims.insert("a".into(), claim);
        });
        let error = kubelet.prepare("a", A).await.unwrap_err();
        assert!(error.contains(word), "{word}: {error}");
        assert!(error.len() < 1_000, "{error}");
    }
    node.api.set(|state| state.stored_claims.clear());
    let error = kubelet.prepare("a", A).await.unwrap_err();
    assert!(error.contains("does not exist"), "{error}");
    assert!(!node.checkpoint().contains(A), "nothing is held");
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_prepared_claim_keeps_its_devices_when_it_changes() {
    let Some(node) = structured_node() else { return };
    let process = node.start();
    let mut kubelet = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0"]);
    kubelet.prepare("a", A).await.unwrap();
    node.allocate("a", A, &["test-1"]);
    let error = kubelet.prepare("a", A).await.unwrap_err();
    assert!(error.contains("it must be unprepared first"), "{error}");
    // The claim was deleted, and another pod has one of the same name.
    node.allocate("a", B, &["test-0"]);
    let error = kubelet.prepare("a", B).await.unwrap_err();
    assert!(
        error.contains(&format!("is held by claim default/a (uid {A})")),
        "{error}"
    );
    kubelet.unprepare("a", A).await.unwrap();
    kubelet.prepare("a", B).await.unwrap();
    process.stop().await.unwrap();
}

#[tokio::test]
async fn the_next_companion_of_an_update_has_all_claims() {
    let Some(node) = structured_node() else { return };
    let first = Process::start(&node).await;
    let mut kubelet = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0"]);
    node.allocate("b", B, &["test-0"]);
    kubelet.prepare("a", A).await.unwrap();
    let second = Process::start(&node).await;
    second.logged("another companion runs on this node").await;
    kubelet.prepare("a", A).await.unwrap();
    let slices = node
        .api
        .until(|state| (!state.slices.is_empty()).then(|| state.slices.clone()))
        .await;
    assert!(first.stop().await.success());
    second.logged("the DRA service is ready").await;
    let mut kubelet = node
        .structured_kubelet_at(&node.path("kubelet/plugins/drayman.dev/dra-2.sock"))
        .await;
    let error = kubelet.prepare("b", B).await.unwrap_err();
    assert!(error.contains("held by claim default/a"), "{error}");
    kubelet.unprepare("a", A).await.unwrap();
    kubelet.prepare("b", B).await.unwrap();
    assert!(second.stop().await.success());
    node.api
        .set(|state| assert_eq!(state.slices, slices, "the pool is the same throughout"));
}

#[tokio::test]
async fn a_boot_restores_cdi_files_and_frees_unused_devices() {
    let Some(node) = structured_node() else { return };
    let process = Start::new().boot(&node, "boot-1").run(&node).await;
    let mut kubelet = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0", "test-1"]);
    kubelet.prepare("a", A).await.unwrap();
    let file = node.path("cdi").join(&node.cdi_files()[0]);
    let before = std::fs::read_to_string(&file).unwrap();
    assert!(before.contains(&format!("{A}-test-0")), "{before}");
    process.kill();
    std::fs::remove_dir_all(node.path("cdi")).unwrap();
    node.api.set(|state| state.away = true);
    let process = Start::new().boot(&node, "boot-2").run(&node).await;
    let mut kubelet = node.structured_kubelet().await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), before);
    let (_, shown) = node_command(&node, &["holdings"]);
    assert_eq!(shown.matches("EarlierBoot").count(), 1, "{shown}");
    node.api.set(|state| state.away = false);
    node.allocate("b", B, &["test-1"]);
    kubelet.prepare("b", B).await.unwrap();
    assert!(!node.checkpoint().contains(A));
    assert!(process.stop().await.success());
}

fn with_short_grace() -> Start {
    Start::new().argument("--orphan-grace-period=200ms")
}

#[tokio::test]
async fn a_claim_unknown_to_kubelet_and_api_server_is_released() {
    let Some(node) = structured_node() else { return };
    node.kubelet_lists(&[]);
    let process = with_short_grace().run(&node).await;
    let mut kubelet = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0"]);
    node.allocate("b", B, &["test-0"]);
    kubelet.prepare("a", A).await.unwrap();
    // Kubelet alone has forgotten it: the device stays withheld until the API server has forgotten it, too.
    let instruction = format!("drayman node release {A}");
    let is_reported = |state: &State| {
        let mut notes = state.events.iter().filter_map(|event| event["note"].as_str());
        notes.any(|note| note.contains(&instruction)).then_some(())
    };
    node.api.until(is_reported).await;
    let error = kubelet.prepare("b", B).await.unwrap_err();
    assert!(error.contains("held by claim default/a"), "{error}");
    node.api.set(|state| {
        state.stored_claims.remove("a");
    });
    process.logged("OrphanFreed").await;
    kubelet.prepare("b", B).await.unwrap();
    assert!(!node.checkpoint().contains(A));
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_claim_of_a_lost_checkpoint_is_found_by_its_uid() {
    let Some(node) = structured_node() else { return };
    let process = Start::new().run(&node).await;
    let mut kubelet = node.structured_kubelet().await;
    node.allocate("a", A, &["test-0"]);
    node.allocate("b", B, &["test-0"]);
    kubelet.prepare("a", A).await.unwrap();
    process.kill();
    // Only the CDI file is left, which has the uid alone.
    std::fs::remove_dir_all(node.path("kubelet/plugins")).unwrap();
    node.kubelet_lists(&[]);
    let process = with_short_grace().run(&node).await;
    let mut kubelet = node.structured_kubelet().await;
    node.api.until(|state| state.events.first().cloned()).await;
    assert!(requests(&node, "/v1/resourceclaims") > 0);
    let error = kubelet.prepare("b", B).await.unwrap_err();
    assert!(error.contains(A), "{error}");
    kubelet.unprepare("a", A).await.unwrap();
    kubelet.prepare("b", B).await.unwrap();
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn an_upgrade_of_the_api_server_changes_the_mode() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    process.kill();
    node.api.set(|state| {
        state.structured = true;
        state.requests.clear();
    });
    let process = node.start();
    // Other API servers may still be the old ones: kubelet is served as before.
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    for answers in 1..=3 {
        let is_asked = |state: &State| {
            let requests = state.requests.iter();
            let asked = requests.filter(|request| request.ends_with("/apis/resource.k8s.io"));
            (asked.count() >= answers).then_some(())
        };
        node.api.until(is_asked).await;
    }
    node.api
        .until(|state| (!state.slices.is_empty()).then_some(()))
        .await;
    node.allocate("b", B, &["test-1"]);
    let start = Instant::now();
    // The endpoint changes meanwhile.
    loop {
        let mut kubelet = node.structured_kubelet().await;
        match kubelet.prepare("b", B).await {
            Ok(ids) => break assert_eq!(ids, [id(B, "test-1")]),
            Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut kubelet = node.structured_kubelet().await;
    kubelet.unprepare("claim", A).await.unwrap();
    assert!(!node.checkpoint().contains(A));
    // The devices are published as slices alone.
    node.api.set(|state| state.requests.clear());
    node.device("test-9", 9);
    let is_published = |state: &State| {
        let mut slices = state.slices.values();
        slices
            .any(|slice| slice.to_string().contains("test-9"))
            .then_some(())
    };
    node.api.until(is_published).await;
    assert_eq!(requests(&node, "nodeinventories"), 0);
    process.stop().await.unwrap();
}
