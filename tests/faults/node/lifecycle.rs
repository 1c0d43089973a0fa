use std::time::{Duration, Instant};

use drayman::api::proto::device_plugin_v1beta1::Empty;
use drayman::api::proto::device_plugin_v1beta1::{AllocateRequest, ContainerAllocateRequest};
use drayman::core::prepare::checkpoint::Checkpoint;
use drayman::core::prepare::claims_api::ClaimsApi;

use super::fixture::Node;
use super::reload::events;

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

fn file(uid: &str) -> String {
    format!("drayman.dev-claim_{uid}.json")
}

fn device_names(inventory: &serde_json::Value) -> Vec<&str> {
    inventory["spec"]["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|device| device["name"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn prepare_and_unprepare_need_no_api_server() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    let inventory = node.api.until_ready("True", "Serving").await;
    assert_eq!(
        device_names(&inventory),
        ["camera-0", "test-0", "test-1", "test-2"]
    );
    assert_eq!(inventory["spec"]["nodeUid"], "n-1");
    assert_eq!(inventory["status"]["devices"], 4);
    let mut kubelet = node.kubelet().await;
    node.api.set(|state| state.requests.clear());

    let ids = kubelet.prepare(A, &["test-0", "test-1"]).await.unwrap();
    assert_eq!(ids, [format!("drayman.dev/claim={A}")]);
    let cdi: serde_json::Value =
        serde_json::from_slice(&std::fs::read(node.path("cdi").join(file(A))).unwrap()).unwrap();
    let edits = &cdi["devices"][0]["containerEdits"];
    assert_eq!(edits["env"][0], "DRAYMAN_DEVICE_TEST_0=/dev/test-0");
    assert_eq!(edits["deviceNodes"][1]["hostPath"], "/dev/test-1");
    assert!(node.checkpoint().contains(A));
    assert_eq!(kubelet.prepare(A, &["test-0", "test-1"]).await.unwrap(), ids);
    let refusal = kubelet.prepare(B, &["test-1"]).await.unwrap_err();
    assert!(
        refusal.contains("held by claim default/claim") && refusal.contains(A),
        "{refusal}"
    );
    let wrong_api = kubelet.prepare(B, &["camera-0"]).await.unwrap_err();
    assert!(wrong_api.contains("extended resource"), "{wrong_api}");
    kubelet.unprepare(A).await.unwrap();
    kubelet.unprepare(A).await.unwrap();
    kubelet.prepare(B, &["test-1"]).await.unwrap();
    kubelet.unprepare(B).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    assert!(!node.checkpoint().contains(A) && !node.checkpoint().contains(B));

    node.api.set(|state| {
        // On a busy machine, the companion reports the state of its APIs after the inventory is ready.
        let is_status = |request: &&String| request.starts_with("PATCH") && request.ends_with("/status");
        let statuses = state.requests.iter().filter(is_status).count();
        assert!(
            statuses <= 1 && state.requests.len() == statuses,
            "{:?}",
            state.requests
        );
    });
    process.stop().await.unwrap();
    node.api.until_ready("False", "Stopped").await;
    assert!(!node.dra_socket().exists());
}

#[tokio::test]
async fn the_inventory_is_written_only_when_something_changes() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    node.api.set(|state| {
        // The number of intermediate API states before Ready depends on the load.
        let applied = state
            .requests
            .iter()
            .filter(|request| request.starts_with("PATCH") && !request.ends_with("/status"))
            .count();
        assert_eq!(applied, 1, "{:?}", state.requests);
        state.requests.clear();
    });
    node.device("test-3", 9);
    node.api
        .until(|state| (state.inventory.as_ref()?["status"]["devices"] == 5).then_some(()))
        .await;
    node.api.set(|state| {
        let is_status = |request: &&String| request.ends_with("/status");
        let statuses = state.requests.iter().filter(is_status).count();
        // On a busy machine, the companion reports the state of its APIs after the inventory is ready.
        assert!((1..=2).contains(&statuses), "{:?}", state.requests);
        assert_eq!(
            state.requests.len() - statuses,
            1,
            "one spec: {:?}",
            state.requests
        );
    });
    process.stop().await.unwrap();

    // A restart without changes applies the spec once and reports Ready again.
    node.api.set(|state| state.requests.clear());
    let process = node.start();
    let inventory = node.api.until_ready("True", "Serving").await;
    assert_eq!(inventory["metadata"]["generation"], 2);

    // An event that does not affect the inventory: the inventory is checked and not written.
    std::fs::write(node.path("node.yaml"), "nonsense").unwrap();
    node.api
        .until(|state| (!events(state, "ConfigurationInvalid").is_empty()).then_some(()))
        .await;
    node.device("test-4", 10);
    node.api
        .until(|state| (state.inventory.as_ref()?["status"]["devices"] == 6).then_some(()))
        .await;
    process.stop().await.unwrap();
    node.api
        .set(|state| assert!(state.idle_writes.is_empty(), "{:?}", state.idle_writes));
}

#[tokio::test]
async fn prepared_claims_outlive_the_process() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    process.kill();
    std::fs::remove_dir_all(node.path("cdi")).unwrap();

    // The API server is down now: neither Prepare nor Unprepare needs it.
    node.api.set(|state| state.away = true);
    let process = node.start();
    let mut kubelet = node.kubelet().await;
    assert_eq!(node.cdi_files(), [file(A)]);
    assert!(
        kubelet
            .prepare(B, &["test-0"])
            .await
            .unwrap_err()
            .contains("held")
    );
    kubelet.prepare(B, &["test-1"]).await.unwrap();
    kubelet.unprepare(A).await.unwrap();
    process.kill();

    node.api.set(|state| state.away = false);
    let process = node.start();
    let mut kubelet = node.kubelet().await;
    assert_eq!(node.cdi_files(), [file(B)]);
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    process.stop().await.unwrap();
}

/// Prepares claim A with a companion that ends.
async fn leave_prepared(node: &Node, structured: bool) {
    node.api.set(|state| state.structured = structured);
    let process = node.start();
    if structured {
        node.allocate("a", A, &["test-0"]);
        node.structured_kubelet().await.prepare("a", A).await.unwrap();
    } else {
        node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    }
    process.stop().await.unwrap();
}

/// Replaces the stored answer of the API server.
fn store_claims_api(node: &Node, claims: Option<ClaimsApi>) {
    let mut checkpoint = Checkpoint::decode(node.checkpoint().as_bytes()).unwrap();
    assert_eq!(checkpoint.entries.len(), 1);
    checkpoint.cluster.claims = claims;
    let path = node.path("kubelet/plugins/drayman.dev/checkpoint.json");
    std::fs::write(path, checkpoint.encode().unwrap()).unwrap();
}

/// Restarts the companion in a cluster without claims, and calls Unprepare for claim A.
async fn unprepare_without_api(node: &Node, structured: bool) {
    node.api.set(|state| state.claims = false);
    let process = node.start();
    if structured {
        let mut kubelet = node.structured_kubelet().await;
        kubelet.unprepare("a", A).await.unwrap();
    } else {
        node.kubelet().await.unprepare(A).await.unwrap();
    }
    node.until_gone(&node.dra_socket()).await;
    process.stop().await.unwrap();
}

#[tokio::test]
async fn claims_outlive_their_api_and_a_restart_after_it() {
    for structured in [false, true] {
        // The API server answers before the restart, or after it.
        for stored in [Some(ClaimsApi::None), None] {
            let Some(node) = Node::new() else { return };
            leave_prepared(&node, structured).await;
            store_claims_api(&node, stored);
            unprepare_without_api(&node, structured).await;
        }
    }
}

#[tokio::test]
async fn an_api_server_that_comes_late_is_waited_for() {
    let Some(node) = Node::new() else { return };
    node.api.set(|state| state.away = true);
    let process = node.start();
    node.until_exists(&node.plugin_socket("example.com/camera")).await;
    assert!(
        !node.dra_socket().exists(),
        "it is unknown whether the cluster serves claims"
    );
    node.api.set(|state| state.away = false);
    node.api.until_ready("True", "Serving").await;
    node.kubelet().await.prepare(A, &["test-0"]).await.unwrap();
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_cluster_without_claims_gets_extended_resources_only() {
    let Some(node) = Node::new() else { return };
    node.api.set(|state| state.claims = false);
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    // Until the API for the extended resource is served, the message is about that.
    let names_the_versions = |state: &super::api::State| {
        let ready = &state.inventory.as_ref()?["status"]["conditions"][0];
        let message = ready["message"].as_str()?;
        message
            .contains("neither resource.k8s.io/v1 nor v1alpha2")
            .then_some(())
    };
    node.api.until(names_the_versions).await;
    assert!(!node.dra_socket().exists());

    let mut plugin = node.plugin("example.com/camera").await;
    let mut devices = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
    let first = devices.message().await.unwrap().unwrap();
    assert_eq!(
        first
            .devices
            .iter()
            .map(|device| device.id.as_str())
            .collect::<Vec<_>>(),
        ["camera-0"]
    );
    node.device("camera-1", 11);
    let second = devices.message().await.unwrap().unwrap();
    assert_eq!(second.devices.len(), 2);
    let container = ContainerAllocateRequest {
        devices_ids: vec!["camera-1".into()],
    };
    let request = AllocateRequest {
        container_requests: vec![container],
    };
    let answer = plugin.allocate(request).await.unwrap().into_inner();
    let container = &answer.container_responses[0];
    assert_eq!(container.devices[0].host_path, "/dev/camera-1");
    assert_eq!(container.envs["DRAYMAN_DEVICE_CAMERA_1"], "/dev/camera-1");
    process.stop().await.unwrap();
}

#[tokio::test]
async fn an_inventory_deleted_with_its_node_returns_with_the_next() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    node.api.set(|state| state.node_uid = "n-2".into());
    node.api.delete_inventory();
    let inventory = node.api.until_ready("True", "Serving").await;
    assert_eq!(inventory["spec"]["nodeUid"], "n-2");
    assert_eq!(inventory["metadata"]["ownerReferences"][0]["uid"], "n-2");
    let refusal = node.kubelet().await.prepare(A, &["test-0"]).await.unwrap_err();
    assert!(refusal.contains("earlier node"), "{refusal}");
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_companion_that_cannot_run_logs_the_reason_and_ends() {
    let Some(node) = Node::new() else { return };
    std::fs::write(node.path("node.yaml"), "kinds: 7\n").unwrap();
    let error = node.start().ended().await.unwrap_err();
    assert_eq!(error.reason(), "ConfigurationInvalid");
    assert!(error.to_string().contains("node.yaml:"), "{error}");
    let mut options = node.options();
    options.driver_name = "../x".into();
    let error = drayman::node::run::run(options, tokio_util::sync::CancellationToken::new())
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "InvalidDriverName");
}

/// A real kubelet has up to 110 pods with a claim or more per container.
#[tokio::test]
async fn a_prepare_with_500_claims_held_loses_none() {
    const HELD: usize = 500;
    let Some(node) = Node::new() else { return };
    let configuration = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
        - {name: test, shares: 1000, paths: [\"/dev/test-*\"]}\n";
    std::fs::write(node.path("node.yaml"), configuration).unwrap();
    let uid = |number: usize| format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f{number:04x}");
    let held = || {
        let checkpoint: serde_json::Value = serde_json::from_str(&node.checkpoint()).unwrap();
        checkpoint["data"]["entries"].as_object().unwrap().len()
    };
    let process = node.start();
    let mut kubelet = node.kubelet().await;
    let mut times = Vec::new();
    for number in 0..=HELD {
        let start = Instant::now();
        kubelet.prepare(&uid(number), &["test-0"]).await.unwrap();
        times.push(start.elapsed());
    }
    let median = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort();
        times[times.len() / 2]
    };
    println!(
        "prepare, median of 20: {:?} with none held, {:?} with {HELD} held",
        median(&times[..20]),
        median(&times[times.len() - 20..])
    );
    assert_eq!((held(), node.cdi_files().len()), (HELD + 1, HELD + 1));
    process.kill();
    let process = node.start();
    let mut kubelet = node.kubelet().await;
    for number in 0..=HELD {
        kubelet.unprepare(&uid(number)).await.unwrap();
    }
    assert_eq!((held(), node.cdi_files().len()), (0, 0));
    process.stop().await.unwrap();
}

#[tokio::test]
#[ignore = "a measurement: run it with --ignored --nocapture in a release build"]
async fn the_duration_of_a_durable_prepare_is_measured() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    let mut kubelet = node.kubelet().await;
    let mut times = Vec::new();
    for number in 0..500 {
        let uid = format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f{number:04x}");
        let start = Instant::now();
        kubelet.prepare(&uid, &["test-0"]).await.unwrap();
        times.push(start.elapsed());
        kubelet.unprepare(&uid).await.unwrap();
    }
    times.sort();
    println!(
        "prepare: median {:?}, p99 {:?}, longest {:?}",
        times[250], times[495], times[499]
    );
    assert!(times[495] <= Duration::from_millis(20), "the goal is 20 ms");
    process.stop().await.unwrap();
}
