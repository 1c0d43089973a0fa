//! Claims that kubelet has forgotten, and the `drayman node` commands.

use super::fixture::{Node, handle};
use super::process::{Process, Start, node_command};

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

fn soon() -> Start {
    Start::new().argument("--orphan-grace-period=200ms")
}

fn keep_in_the_api(node: &Node) {
    let claim = serde_json::json!({
        "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim",
        "metadata": {"name": "claim", "namespace": "default", "uid": A},
        "spec": {"resourceClassName": "test"},
        "status": {"driverName": "drayman.dev", "allocation": {"resourceHandles": [
            {"driverName": "drayman.dev", "data": handle(A, "n-1", &["test-0"])}
        ]}},
    });
    node.api.set(|state| {
        state.stored_claims.insert("claim".into(), claim);
    });
}

/// Waits until the health of a device is as wanted, and returns the reason.
async fn until_unhealthy(node: &Node, device: &'static str, wanted: bool) -> String {
    node.api
        .until(|state| {
            let devices = state.inventory.as_ref()?["spec"]["devices"].as_array()?.clone();
            let found = devices.iter().find(|one| one["name"] == device)?;
            let reason = found.get("unhealthy").and_then(|reason| reason.as_str());
            (reason.is_some() == wanted).then(|| reason.unwrap_or_default().to_owned())
        })
        .await
}

#[tokio::test]
async fn a_claim_unknown_to_kubelet_and_api_server_is_freed() {
    let Some(node) = Node::new() else { return };
    node.kubelet_lists(&[]);
    let process = soon().run(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    process.logged("OrphanFreed").await;
    kubelet.prepare(B, &["test-0"]).await.unwrap();
    assert!(!node.checkpoint().contains(A));
    node.api
        .set(|state| assert_eq!(state.events, Vec::<serde_json::Value>::new()));
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_claim_listed_by_kubelet_stays_without_its_api_object() {
    let Some(node) = Node::new() else { return };
    node.kubelet_lists(&[(A, &["test-0"])]);
    let process = soon().run(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    // B is the orphan whose release proves that the check has run.
    kubelet.prepare(B, &["test-1"]).await.unwrap();
    process.kill();
    let process = soon().run(&node).await;
    process.logged("OrphanFreed").await;
    assert!(process.log().contains(B));
    let refusal = node.kubelet().await.prepare(B, &["test-0"]).await.unwrap_err();
    assert!(refusal.contains("held"), "{refusal}");
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_claim_forgotten_by_kubelet_alone_is_quarantined() {
    let Some(node) = Node::new() else { return };
    node.kubelet_lists(&[]);
    keep_in_the_api(&node);
    // The state at the end lasts for this time only, and must be published meanwhile.
    let process = Start::new().argument("--orphan-grace-period=2s").run(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    let reason = until_unhealthy(&node, "test-0", true).await;
    assert!(
        reason.contains("withheld for claim default/claim") && reason.contains(A),
        "{reason}"
    );
    let event = node.api.until(|state| state.events.first().cloned()).await;
    let message = event["note"].as_str().unwrap();
    assert!(
        message.contains(&format!("drayman node release {A}")),
        "{message}"
    );
    let (_, shown) = node_command(&node, &["holdings"]);
    assert!(
        shown.contains(A) && shown.contains("test-0") && shown.contains("no longer lists it"),
        "{shown}"
    );
    assert!(kubelet.prepare(B, &["test-0"]).await.is_err());
    // The same claim can be prepared again at any time.
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    until_unhealthy(&node, "test-0", false).await;
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_kubelet_whose_list_cannot_be_read_frees_nothing() {
    let Some(node) = Node::new() else { return };
    std::fs::write(node.path("kubelet/dra_manager_state"), r#"{"version":"v3"}"#).unwrap();
    let process = soon().run(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    let reason = until_unhealthy(&node, "test-0", true).await;
    assert!(reason.contains("cannot be read"), "{reason}");
    assert!(kubelet.prepare(B, &["test-0"]).await.is_err());
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_person_releases_forgotten_claims_and_listed_ones_by_force() {
    let Some(node) = Node::new() else { return };
    node.kubelet_lists(&[(A, &["test-0"])]);
    let process = Process::start(&node).await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    let (done, output) = node_command(&node, &["release", A]);
    assert!(
        !done && output.contains("kubelet lists claim default/claim") && output.contains("--force"),
        "{output}"
    );
    assert!(kubelet.prepare(B, &["test-0"]).await.is_err());
    let (done, output) = node_command(&node, &["release", B]);
    assert!(!done && output.contains("holds no devices"), "{output}");
    let (done, output) = node_command(&node, &["release", "../../etc"]);
    assert!(!done && output.contains("not a UUID"), "{output}");
    let (done, output) = node_command(&node, &["release", "--force", A]);
    assert!(done && output.contains("test-0"), "{output}");
    kubelet.prepare(B, &["test-0"]).await.unwrap();
    let (done, output) = node_command(&node, &["release", B]);
    assert!(done, "{output}");
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    let (_, shown) = node_command(&node, &["holdings"]);
    assert!(shown.contains("No claim holds"), "{shown}");
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_stopped_companions_claims_are_listed_but_not_released() {
    let Some(node) = Node::new() else { return };
    let (done, output) = node_command(&node, &["holdings"]);
    assert!(
        !done && output.contains("there are no records of driver drayman.dev"),
        "{output}"
    );
    node.kubelet_lists(&[(A, &["test-0"])]);
    let process = Process::start(&node).await;
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    process.kill();
    let (_, shown) = node_command(&node, &["holdings"]);
    assert!(shown.contains(A) && shown.contains("test-0"), "{shown}");
    let (done, output) = node_command(&node, &["release", "--force", A]);
    assert!(!done && output.contains("no companion runs"), "{output}");
    let (_, unchanged) = node_command(&node, &["holdings"]);
    assert_eq!(unchanged, shown);
    let process = Process::start(&node).await;
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    let (done, output) = node_command(&node, &["release", "--force", A]);
    assert!(done && output.contains("test-0"), "{output}");
    assert!(process.stop().await.success());
}
