//! Configuration reloads while the companion runs, and devices that become unhealthy.

use std::os::unix::fs::symlink;

use tokio::sync::Mutex;

use super::api::State;
use super::fixture::Node;

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

fn file(kinds: &str) -> String {
    format!("apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n{kinds}")
}

/// Names and kinds of the devices, if the inventory exists.
fn devices(state: &State) -> Vec<(String, String)> {
    let devices = state
        .inventory
        .iter()
        .flat_map(|inventory| inventory["spec"]["devices"].as_array().unwrap());
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    devices
        .map(|device| (text(&device["name"]), text(&device["kind"])))
        .collect()
}

fn is_unhealthy(state: &State, name: &str) -> Option<String> {
    let devices = state.inventory.as_ref()?["spec"]["devices"].as_array()?;
    let device = devices.iter().find(|device| device["name"] == name)?;
    device["unhealthy"].as_str().map(str::to_owned)
}

pub(crate) fn events(state: &State, reason: &str) -> Vec<String> {
    let events = state.events.iter().filter(|event| event["reason"] == reason);
    events
        .map(|event| event["note"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn a_replaced_configmap_counts_at_once_and_claims_keep_devices() {
    let Some(mut node) = Node::new() else { return };
    // As a mounted ConfigMap: the file is a link into a directory that is replaced as a whole.
    for (version, kinds) in [
        ("..first", "- {name: test, paths: [\"/dev/test-*\"]}\n"),
        ("..second", "- {name: other, paths: [/dev/test-1, /dev/test-2]}\n"),
    ] {
        std::fs::create_dir_all(node.path("config").join(version)).unwrap();
        std::fs::write(node.path("config").join(version).join("node.yaml"), file(kinds)).unwrap();
    }
    symlink("..first", node.path("config/..data")).unwrap();
    symlink("..data/node.yaml", node.path("config/node.yaml")).unwrap();
    node.config = Some(node.path("config/node.yaml"));
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["test-0", "test-1"]).await.unwrap();

    symlink("..second", node.path("config/..data_tmp")).unwrap();
    std::fs::rename(node.path("config/..data_tmp"), node.path("config/..data")).unwrap();
    node.api
        .until(|state| {
            devices(state)
                .contains(&("test-2".into(), "other".into()))
                .then_some(())
        })
        .await;
    node.api
        .until(|state| is_unhealthy(state, "test-0").filter(|why| why.contains("no longer described")))
        .await;
    // Held devices stay: the CDI file remains, so a restarted container gets them.
    assert_eq!(node.cdi_files().len(), 1);
    kubelet.prepare(A, &["test-0", "test-1"]).await.unwrap();
    assert!(
        kubelet
            .prepare(B, &["test-1"])
            .await
            .unwrap_err()
            .contains("held by")
    );
    kubelet.unprepare(A).await.unwrap();
    node.api
        .until(|state| (devices(state).len() == 2).then_some(()))
        .await;
    kubelet.prepare(B, &["test-1"]).await.unwrap();
    node.api
        .until(|state| events(state, "ConfigurationChanged").first().cloned())
        .await;
    process.stop().await.unwrap();
}

/// SIGHUP reaches every companion of this process and makes each repeat its warnings.
static SIGHUP: Mutex<()> = Mutex::const_new(());

#[tokio::test]
async fn a_broken_file_changes_nothing_and_is_reported_once() {
    let _alone = SIGHUP.lock().await;
    let Some(node) = Node::new() else { return };
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    std::fs::write(node.path("node.yaml"), file("- {name: test, path: [/dev/x]}\n")).unwrap();
    let message = node
        .api
        .until(|state| events(state, "ConfigurationInvalid").first().cloned())
        .await;
    assert!(
        message.contains("node.yaml:4") && message.contains("stays in force"),
        "{message}"
    );
    std::fs::write(node.path("node.yaml"), file("- {name: test, path: [/dev/x]}\n")).unwrap();
    node.device("test-9", 9);
    node.api
        .until(|state| {
            devices(state)
                .contains(&("test-9".into(), "test".into()))
                .then_some(())
        })
        .await;
    node.api.set(|state| {
        assert_eq!(
            events(state, "ConfigurationInvalid"),
            std::slice::from_ref(&message)
        );
    });
    std::fs::write(
        node.path("node.yaml"),
        file("- {name: test, paths: [/dev/test-9]}\n"),
    )
    .unwrap();
    node.api
        .until(|state| (devices(state).len() == 1).then_some(()))
        .await;
    process.stop().await.unwrap();
}

#[tokio::test]
async fn a_renamed_resource_becomes_empty_and_the_new_one_is_offered() {
    let Some(node) = Node::new() else { return };
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    let before = node.plugin_socket("example.com/camera");
    let mut lists = node.plugin_lists("example.com/camera").await;
    assert_eq!(lists.message().await.unwrap().unwrap().devices.len(), 1);
    let kinds = "- {name: camera, mode: extended-resource, resourceName: example.com/eye, paths: [\"/dev/camera-*\"]}\n";
    std::fs::write(node.path("node.yaml"), file(kinds)).unwrap();
    let last = lists.message().await.unwrap().unwrap();
    assert_eq!(
        last.devices.len(),
        0,
        "kubelet receives an empty list before the API closes"
    );
    assert!(
        !matches!(lists.message().await, Ok(Some(_))),
        "and then it closes"
    );
    node.until_exists(&node.plugin_socket("example.com/eye")).await;
    node.until_gone(&before).await;
    let mut lists = node.plugin_lists("example.com/eye").await;
    assert_eq!(lists.message().await.unwrap().unwrap().devices[0].id, "camera-0");
    node.api.until_ready("True", "Serving").await;
    process.stop().await.unwrap();
}

/// Replaces a device node atomically, so that it is never missing. The new one is made outside the watched directory, so that its rename is
/// the only change there.
fn replace_device(node: &Node, name: &str, major: u32, minor: u32) {
    node.device_of("../next", major, minor);
    std::fs::rename(node.path("next"), node.path("dev").join(name)).unwrap();
}

#[tokio::test]
async fn an_unhealthy_device_stays_with_its_claim() {
    let Some(node) = Node::new() else { return };
    // The null device, which can be opened.
    node.device_of("probe-0", 1, 3);
    std::fs::write(
        node.path("node.yaml"),
        file("- {name: probe, paths: [\"/dev/probe-*\"], health: {open: readWrite, recoverAfter: 1}}\n"),
    )
    .unwrap();
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    let mut kubelet = node.kubelet().await;
    kubelet.prepare(A, &["probe-0"]).await.unwrap();
    node.api
        .set(|state| assert_eq!(is_unhealthy(state, "probe-0"), None));
    // Replaces it by a device without a driver, which cannot be opened. The device number differs, so the CDI file is removed, and the
    // claim stays.
    replace_device(&node, "probe-0", 240, 250);
    let why = node.api.until(|state| is_unhealthy(state, "probe-0")).await;
    assert!(why.contains("cannot be opened"), "{why}");
    let message = node
        .api
        .until(|state| events(state, "DeviceUnhealthy").first().cloned())
        .await;
    assert!(
        message.contains("probe-0") && message.contains("cannot be opened"),
        "{message}"
    );
    let refusal = kubelet.prepare(B, &["probe-0"]).await.unwrap_err();
    assert!(refusal.contains("probe-0"), "{refusal}");
    assert!(node.checkpoint().contains(A), "the claim keeps it");
    replace_device(&node, "probe-0", 1, 3);
    node.api
        .until(|state| (!events(state, "DeviceRecovered").is_empty()).then_some(()))
        .await;
    node.api
        .set(|state| assert_eq!(events(state, "DeviceUnhealthy").len(), 1, "{:?}", state.events));
    // The next process does not repeat the event.
    process.stop().await.unwrap();
    node.api.set(|state| state.events.clear());
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    process.stop().await.unwrap();
    node.api
        .set(|state| assert_eq!(state.events.len(), 0, "{:?}", state.events));
}

#[tokio::test]
async fn sighup_reloads_a_file_whose_changes_cause_no_event() {
    let _alone = SIGHUP.lock().await;
    let Some(mut node) = Node::new() else { return };
    // A link to a file in another directory, whose changes cause no event.
    std::fs::create_dir_all(node.path("elsewhere")).unwrap();
    std::fs::create_dir_all(node.path("config")).unwrap();
    let target = node.path("elsewhere/node.yaml");
    std::fs::write(&target, file("- {name: test, paths: [/dev/test-0]}\n")).unwrap();
    symlink("../elsewhere/node.yaml", node.path("config/node.yaml")).unwrap();
    node.config = Some(node.path("config/node.yaml"));
    let process = node.start();
    node.api.until_ready("True", "Serving").await;
    node.api.set(|state| assert_eq!(devices(state).len(), 1));
    std::fs::write(&target, file("- {name: test, paths: [\"/dev/test-*\"]}\n")).unwrap();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::HUP).unwrap();
    node.api
        .until(|state| (devices(state).len() == 3).then_some(()))
        .await;
    process.stop().await.unwrap();
}
