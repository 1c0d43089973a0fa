//! A fault of one kubelet API does not affect the other, and the companion exits if kubelet cannot see its files.

use super::fixture::Node;
use super::process::Start;
use super::reload::events;

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";

#[tokio::test]
async fn a_missing_plugin_directory_stops_no_claim() {
    let Some(node) = Node::new() else { return };
    // The directory is not mounted and cannot be created.
    let directory = node.path("kubelet/device-plugins");
    std::fs::remove_dir(&directory).unwrap();
    std::fs::write(&directory, "").unwrap();
    let process = node.start();
    let inventory = node.api.until_ready("True", "Serving").await;
    let message = |state: &super::api::State| events(state, "KubeletApiDown").pop();
    let message = node.api.until(message).await;
    assert!(
        message.contains("example.com/camera") && message.contains("device-plugins"),
        "{message}"
    );
    let why = |state: &super::api::State| {
        let message = &state.inventory.as_ref()?["status"]["conditions"][0]["message"];
        message.as_str()?.contains("example.com/camera").then_some(())
    };
    node.api.until(why).await;
    assert_eq!(inventory["status"]["conditions"][0]["status"], "True");
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    // Once the directory exists, the resource is offered without a restart.
    std::fs::remove_file(&directory).unwrap();
    std::fs::create_dir(&directory).unwrap();
    node.until_exists(&node.plugin_socket("example.com/camera")).await;
    kubelet.unprepare(A).await.unwrap();
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_mount_of_a_removed_directory_ends_the_companion() {
    for (of_host, mounted) in [("host-state", "kubelet/plugins/drayman.dev"), ("host-cdi", "cdi")] {
        let Some(node) = Node::new() else { return };
        for directory in [of_host, mounted] {
            std::fs::create_dir_all(node.path(directory)).unwrap();
        }
        let mount = format!("mount --bind $NODE/{of_host} $NODE/{mounted}");
        let mut process = Start::new().mount(&mount).run(&node).await;
        process.logged("the DRA service is ready").await;
        // The companion may write a file meanwhile.
        while let Err(error) = std::fs::remove_dir_all(node.path(of_host)) {
            assert_eq!(error.kind(), std::io::ErrorKind::DirectoryNotEmpty, "{error}");
        }
        std::fs::create_dir(node.path(of_host)).unwrap();
        assert_eq!(process.ended().await.code(), Some(1));
        let log = process.log();
        assert!(
            log.contains("the host removed or replaced directory") && log.contains(mounted),
            "{log}"
        );
        // As a restarted container, which gets new mounts.
        let process = Start::new().mount(&mount).run(&node).await;
        process.logged("the DRA service is ready").await;
        assert!(process.stop().await.success());
    }
}
