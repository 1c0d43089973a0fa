//! Requests that kubelet never sends, and devices that conflict in one container: refused with a reason, without files on disk.

use drayman::api::proto::device_plugin_v1beta1::{AllocateRequest, ContainerAllocateRequest};
use drayman::api::proto::dra_v1alpha3::Claim;

use super::fixture::{Node, claim, handle};

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

/// Path and content of all files of the node, except sockets and logs.
fn files(node: &Node) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut directories = vec![node.path("")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file() {
                let content = std::fs::read(entry.path()).unwrap();
                let content = String::from_utf8_lossy(&content).into_owned();
                all.push((entry.path().display().to_string(), content));
            }
        }
    }
    all.sort();
    all
}

#[tokio::test]
async fn invalid_claims_and_foreign_handles_are_refused() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    let mut kubelet = node.kubelet().await;
    // The companion writes information about its cluster in the background.
    node.until_checkpoint(|text| text.contains("\"servesClaims\":true"))
        .await;
    let before = files(&node);
    let good = || claim(A, "n-1", &["test-0"]);
    let with_uid = |uid: &str| Claim {
        uid: uid.into(),
        ..good()
    };
    let with_handle = |handle: String| Claim {
        resource_handle: handle,
        ..good()
    };
    let newer = good().resource_handle.replace("\"version\":1", "\"version\":2");
    for (hostile, word) in [
        (with_uid("../../../../etc/cron.d/x"), "not a UUID"),
        (with_uid(&A.to_uppercase()), "not a UUID"),
        (with_uid(&format!("{A}/../x")), "not a UUID"),
        (
            Claim {
                namespace: "../x".into(),
                ..good()
            },
            "namespace",
        ),
        (
            Claim {
                name: "a\nb".into(),
                ..good()
            },
            "name",
        ),
        (
            with_handle(String::new()),
            "only drayman's controller may write it",
        ),
        (
            with_handle("gpu-0,gpu-1: of another driver".into()),
            "only drayman's controller may write it",
        ),
        (
            with_handle(format!("{{\"padding\":\"{}\"}}", "x".repeat(20_000))),
            "only drayman's controller may write it",
        ),
        (with_handle(newer), "version 2"),
        (
            with_handle(handle(B, "n-1", &["test-0"])),
            "not written for this claim",
        ),
        (with_handle(handle(A, "n-0", &["test-0"])), "earlier node"),
        (
            with_handle(handle(A, "n-1", &["../../etc/passwd"])),
            "not on this node",
        ),
        (
            with_handle(handle(A, "n-1", &["test-0", "test-0"])),
            "named twice",
        ),
        (
            with_handle(handle(A, "n-1", &[])),
            "the allocation names no device",
        ),
    ] {
        let shown = format!("{hostile:?}").chars().take(300).collect::<String>();
        let refusal = kubelet.prepare_claim(hostile).await.unwrap_err();
        assert!(refusal.contains(word), "{shown}: {refusal}");
        assert!(refusal.len() < 1_000, "{refusal}");
    }
    assert_eq!(files(&node), before);
    kubelet.prepare_claim(good()).await.unwrap();
    process.stop().await.unwrap();
}

#[tokio::test]
async fn two_devices_at_one_container_path_are_refused_by_both_apis() {
    let Some(node) = Node::new() else { return };
    node.device("camera-1", 11);
    let kinds = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
        - {name: test, paths: [\"/dev/test-*\"], containerPaths: {\"/dev/test-*\": /dev/port}}\n\
        - {name: camera, mode: extended-resource, resourceName: example.com/camera, paths: [\"/dev/camera-*\"], \
           containerPaths: {\"/dev/camera-*\": /dev/video}}\n";
    std::fs::write(node.path("node.yaml"), kinds).unwrap();
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    let mut kubelet = node.kubelet().await;
    let refusal = kubelet.prepare(A, &["test-0", "test-1"]).await.unwrap_err();
    for word in ["/dev/test-0", "/dev/test-1", "/dev/port", "containerPaths"] {
        assert!(refusal.contains(word), "{word} in {refusal}");
    }
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    assert!(!node.checkpoint().contains(A), "nothing is held");
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    kubelet.prepare(B, &["test-1"]).await.unwrap();

    let mut plugin = node.plugin("example.com/camera").await;
    let containers = |lists: &[&[&str]]| {
        let ids = |ids: &&[&str]| ContainerAllocateRequest {
            devices_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        AllocateRequest {
            container_requests: lists.iter().map(ids).collect(),
        }
    };
    let refusal = plugin
        .allocate(containers(&[&["camera-0", "camera-1"]]))
        .await
        .unwrap_err();
    assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
    assert!(
        refusal.message().contains("would both be /dev/video"),
        "{refusal}"
    );
    let apart = plugin
        .allocate(containers(&[&["camera-0"], &["camera-1"]]))
        .await
        .unwrap()
        .into_inner();
    for container in apart.container_responses {
        assert_eq!(container.devices[0].container_path, "/dev/video");
    }
    process.stop().await.unwrap();
}
