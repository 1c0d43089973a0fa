//! Less common features of the device plugin API: the plugin watcher, shared devices, CDI names, PreStartContainer; and PodResources.

use drayman::api::crd::{Mode, NodeInventory};
use drayman::node::kubelet::KubeletPaths;
use drayman::node::kubelet::pod_resources::PodResourcesClient;
use kube::api::Api;

use crate::kubelet_plugin::helper::{devices_inside, pod_resources, until_granted, wait_for_inventory};
use crate::setup::{DRIVER, Setup};

const RESOURCE: &str = "drayman.dev/shared";

fn configuration() -> String {
    // Kubelets before 1.29 ignore CDI names.
    let version = std::env::var("DRAYMAN_TEST_KUBERNETES").unwrap_or_default();
    let by_name = !version.starts_with("1.27") && !version.starts_with("1.28");
    format!(
        "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
         - name: shared\n  mode: extended-resource\n  resourceName: {RESOURCE}\n  shares: 3\n  cdiDevices: {by_name}\n  \
         preStartCheck: true\n  paths: [\"/dev/drayman-shared-*\"]\n"
    )
}

#[tokio::test]
async fn a_shared_device_is_found_by_the_plugin_watcher() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    let device = "/dev/drayman-shared-0";
    node.make_device(device, 1, 5)?;
    let flags = ["--device-plugin-registration=plugin-watcher"];
    let companion = setup.companion_with(0, &configuration(), &flags)?;
    setup.until_allocatable(RESOURCE, "3").await?;
    for name in ["one", "two"] {
        setup.make_limit_pod(name, RESOURCE).await?;
    }
    for name in ["one", "two"] {
        setup.until_running(name).await?;
        assert_eq!(
            devices_inside(&setup, name, "drayman-").await?,
            ["drayman-shared-0"]
        );
        let environment = setup.cluster.kubectl(&["exec", name, "--", "env"]).await?;
        assert!(environment.contains(&format!("DRAYMAN_DEVICE_DRAYMAN_SHARED_0={device}")));
    }

    // Kubelet's own answer.
    let kubelet = PodResourcesClient::new(&KubeletPaths {
        root_dir: node.path("/var/lib/kubelet"),
        device_plugin_dir: node.path("/var/lib/kubelet/device-plugins"),
    });
    let held = |list: Vec<drayman::api::proto::pod_resources_v1::PodResources>| {
        let mut held: Vec<(String, Vec<String>)> = list
            .into_iter()
            .map(|pod| {
                let ids = pod.containers.into_iter().flat_map(|container| container.devices);
                (pod.name, ids.flat_map(|devices| devices.device_ids).collect())
            })
            .collect();
        held.sort();
        held
    };
    let listed = held(kubelet.list().await?);
    assert_eq!(
        listed
            .iter()
            .map(|(pod, ids)| (pod.as_str(), ids.len()))
            .collect::<Vec<_>>(),
        [("one", 1), ("two", 1)]
    );
    assert_ne!(listed[0].1, listed[1].1, "two shares");
    until_granted(&pod_resources(node).await?, RESOURCE, 3).await?;

    // A restarted kubelet finds the socket by itself.
    node.restart_kubelet().await?;
    setup.until_allocatable(RESOURCE, "3").await?;
    setup.make_limit_pod("three", RESOURCE).await?;
    setup.until_running("three").await?;

    // A container whose device is missing is not restarted until the device is back.
    node.remove(device)?;
    setup.until_allocatable(RESOURCE, "0").await?;
    // A container's first process gets only signals that it handles. It may end this command with it, before the exit code is read.
    let ended = setup
        .cluster
        .kubectl(&["exec", "three", "--", "kill", "-TERM", "1"])
        .await;
    if let Err(error) = ended {
        assert!(error.to_string().contains("exit code 137"), "{error}");
    }
    setup
        .wait_for_event("three", "Failed", "not on this node")
        .await?;
    node.make_device(device, 1, 5)?;
    let restarted = |pod: Option<&k8s_openapi::api::core::v1::Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref()?.container_statuses.as_ref()?.first());
        status.is_some_and(|status| status.ready && status.restart_count > 0)
    };
    let pods = kube::api::Api::namespaced(setup.cluster.client(), "default");
    setup.wait(pods, "three", "running again", restarted).await?;
    setup.end([companion]).await
}

/// A device with shares is in as many pods. For a kind with `claims`, the named devices are used through one API and the others through the
/// other.
#[tokio::test]
async fn claims_share_a_device_and_a_split_kind_serves_both_apis() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    for (name, minor) in [
        ("drayman-test-0", 5),
        ("drayman-split-0", 7),
        ("drayman-split-1", 8),
    ] {
        node.make_device(format!("/dev/{name}"), 1, minor)?;
    }
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let configuration = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
        - {name: test, shares: 2, paths: [\"/dev/drayman-test-*\"]}\n\
        - {name: split, mode: split, resourceName: drayman.dev/split, extendedResourceDevices: [drayman-split-1], \
           paths: [\"/dev/drayman-split-*\"]}\n";
    let companion = setup.companion(0, configuration)?;
    wait_for_inventory(&setup, DRIVER, 3, 0).await?;
    for name in ["one", "two"] {
        setup.make_pod(name).await?;
    }
    for name in ["one", "two"] {
        setup.until_running(name).await?;
        assert_eq!(
            devices_inside(&setup, name, "drayman-").await?,
            ["drayman-test-0"]
        );
    }
    setup.make_pod("three").await?;
    setup.wait_for_event("three", "NoSuitableDevice", "of 1").await?;
    setup.cluster.kubectl(&["delete", "pod", "one"]).await?;
    setup.until_running("three").await?;

    setup.until_allocatable("drayman.dev/split", "1").await?;
    let name = format!("{}.{DRIVER}", node.name());
    let inventory = Api::<NodeInventory>::all(setup.cluster.client())
        .get(&name)
        .await?;
    let modes: Vec<_> = inventory
        .spec
        .devices
        .iter()
        .map(|device| (device.name.as_str(), device.mode, device.shares))
        .collect();
    assert_eq!(
        modes,
        [
            ("drayman-split-0", Mode::Claims, None),
            ("drayman-split-1", Mode::ExtendedResource, None),
            ("drayman-test-0", Mode::Claims, Some(2)),
        ]
    );
    setup.make_limit_pod("plugged", "drayman.dev/split").await?;
    setup.until_running("plugged").await?;
    assert_eq!(
        devices_inside(&setup, "plugged", "drayman-").await?,
        ["drayman-split-1"]
    );
    setup.end([companion, controller]).await
}
