//! Pods on real nodes with a real scheduler, kubelet and containerd. Containers open their devices.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::crd::NodeInventory;
use drayman::api::resource::Pod;
use kube::api::{Api, PostParams};
use serde_json::json;

use crate::harness::{IMAGE, Node};
use crate::setup::{Setup, is_allocated, is_gone, is_running, pod_from};

/// Two kinds on one node: `test` for claims, `plugged` for the device plugin API.
pub(crate) const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  mode: claims
  paths: [\"/dev/drayman-test-*\"]
- name: plugged
  mode: extended-resource
  resourceName: drayman.dev/plugged
  paths: [\"/dev/drayman-plugged-*\"]
";

/// Minor numbers of memory devices that are always readable: zero, full, random, urandom. The companion treats device nodes with equal
/// numbers as one device.
pub(crate) const MINORS: [u32; 4] = [5, 7, 8, 9];

/// Creates device nodes with these minor numbers.
pub(crate) fn make_devices(node: Node<'_>, prefix: &str, minors: &[u32]) -> anyhow::Result<()> {
    minors
        .iter()
        .enumerate()
        .try_for_each(|(number, minor)| node.make_device(format!("/dev/{prefix}-{number}"), 1, *minor))
}

/// Waits until the node's inventory is ready and has `count` devices.
pub(crate) async fn wait_for_inventory(setup: &Setup, number: usize, count: u32) -> anyhow::Result<()> {
    let name = format!("{}.drayman.dev", setup.cluster.node(number).name());
    let met = move |inventory: Option<&NodeInventory>| {
        inventory
            .and_then(|inventory| inventory.status.as_ref())
            .is_some_and(|status| {
                status.devices == count
                    && status
                        .conditions
                        .iter()
                        .any(|one| one.type_ == "Ready" && one.status == "True")
            })
    };
    setup
        .wait(Api::all(setup.cluster.client()), &name, "ready", met)
        .await
        .map(drop)
}

/// Waits until the pod runs, and returns the devices in its container: those in environment variables, and the existing device nodes.
pub(crate) async fn look_inside(setup: &Setup, name: &str) -> anyhow::Result<ContainerDevices> {
    setup.wait(setup.pods(), name, "running", is_running()).await?;
    let environment = setup.cluster.kubectl(&["exec", name, "--", "env"]).await?;
    let granted = environment
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(key, _)| key.starts_with("DRAYMAN_DEVICE_"))
        .map(|(key, path)| (key.to_owned(), path.to_owned()))
        .collect();
    let devices = setup.cluster.kubectl(&["exec", name, "--", "ls", "/dev"]).await?;
    let present = devices
        .split_whitespace()
        .filter(|name| name.starts_with("drayman-"))
        .map(str::to_owned)
        .collect();
    Ok(ContainerDevices { granted, present })
}

/// Devices in a container.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ContainerDevices {
    /// Variables with the paths of devices.
    pub(crate) granted: BTreeMap<String, String>,
    /// Existing device nodes of this test.
    pub(crate) present: BTreeSet<String>,
}

impl ContainerDevices {
    /// The only device, which must be the one in the variable.
    pub(crate) fn only_device(&self) -> &str {
        assert_eq!((self.granted.len(), self.present.len()), (1, 1), "{self:?}");
        let path = self
            .granted
            .values()
            .next()
            .map(String::as_str)
            .unwrap_or_default();
        assert_eq!(
            path.strip_prefix("/dev/"),
            self.present.first().map(String::as_str),
            "{self:?}"
        );
        path
    }
}

/// Files of the companion for a claim on a node: CDI files and checkpoint entries.
pub(crate) fn claim_files(node: Node<'_>, uid: &str) -> anyhow::Result<Vec<String>> {
    let mut traces: Vec<String> = node
        .list("/run/cdi")?
        .into_iter()
        .filter(|name| name.contains(uid))
        .collect();
    for name in node.list("/var/lib/kubelet/plugins/drayman.dev")? {
        let path = format!("/var/lib/kubelet/plugins/drayman.dev/{name}");
        if node.read(&path).is_ok_and(|text| text.contains(uid)) {
            traces.push(name);
        }
    }
    Ok(traces)
}

#[tokio::test]
async fn a_pod_reads_from_its_device_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..2])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 0, 2).await?;

    setup.make_pod("pod").await?;
    let inside = look_inside(&setup, "pod").await?;
    let device = inside.only_device().to_owned();
    let status = setup
        .cluster
        .kubectl(&[
            "exec",
            "pod",
            "--",
            "dd",
            &format!("if={device}"),
            "of=/tmp/read",
            "bs=4",
            "count=1",
        ])
        .await;
    assert!(status.is_ok(), "{status:?}");
    let size = setup
        .cluster
        .kubectl(&["exec", "pod", "--", "stat", "-c", "%s", "/tmp/read"])
        .await?;
    assert_eq!(size.trim(), "4", "four bytes were read from the device");

    let claim = setup.claim_of("pod", "allocated", is_allocated).await?;
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    assert_eq!(
        claim_files(node, &uid)?.len(),
        2,
        "a CDI file and a checkpoint entry: {:?}",
        claim_files(node, &uid)?
    );
    setup.cluster.kubectl(&["delete", "pod", "pod"]).await?;
    let name = claim.metadata.name.clone().unwrap_or_default();
    setup.wait(setup.claims(), &name, "gone", is_gone()).await?;
    assert_eq!(claim_files(node, &uid)?, Vec::<String>::new());
    companion.end().await?;
    controller.end().await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn three_devices_serve_five_pods_one_after_the_other() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..3])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 0, 3).await?;
    let mut waiting: BTreeSet<String> = (0..5).map(|number| format!("pod-{number}")).collect();
    for name in &waiting {
        setup.make_pod(name).await?;
    }
    // The holder of each device.
    let mut holders: BTreeMap<String, String> = BTreeMap::new();
    for round in 0..3 {
        while holders.len() < 3 {
            let name = first_running(&setup, &waiting).await?;
            waiting.remove(&name);
            let device = look_inside(&setup, &name).await?.only_device().to_owned();
            let before = holders.insert(device.clone(), name.clone());
            assert_eq!(
                before, None,
                "{device} is in two containers, of {name} and another"
            );
        }
        for name in &waiting {
            setup
                .wait_for_event(name, "NoSuitableDevice", "3 of 3 held")
                .await?;
        }
        if round < 2 {
            let (device, name) = holders.pop_first().unwrap_or_default();
            setup.cluster.kubectl(&["delete", "pod", &name]).await?;
            println!("{name} gave {device} back");
        }
    }
    assert!(waiting.is_empty());
    companion.end().await?;
    controller.end().await?;
    setup.cluster.stop().await
}

/// Waits until one of these pods runs.
pub(crate) async fn first_running(setup: &Setup, names: &BTreeSet<String>) -> anyhow::Result<String> {
    let waits = names.iter().map(|name| {
        Box::pin(async move {
            setup
                .wait(setup.pods(), name, "running", is_running())
                .await
                .map(|_| name.clone())
        })
    });
    futures::future::select_all(waits).await.0
}

/// A pod that requests a device of the kind `plugged` in its limits.
pub(crate) fn pod_with_limit(name: &str) -> anyhow::Result<Pod> {
    pod_from(json!({
        "metadata": { "name": name },
        "spec": {
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "resources": { "limits": { "drayman.dev/plugged": "1" } } }],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    }))
}

/// Waits until the node's allocatable count of the kind `plugged` is `count`.
pub(crate) async fn wait_for_allocatable(setup: &Setup, number: usize, count: &str) -> anyhow::Result<()> {
    use k8s_openapi::api::core::v1::Node;
    let count = count.to_owned();
    let met = move |node: Option<&Node>| {
        let allocatable = node.and_then(|node| node.status.as_ref()?.allocatable.as_ref());
        allocatable
            .and_then(|all| all.get("drayman.dev/plugged"))
            .is_some_and(|quantity| quantity.0 == count)
    };
    setup
        .wait(
            Api::all(setup.cluster.client()),
            setup.cluster.node(number).name(),
            "offering devices",
            met,
        )
        .await
        .map(drop)
}

#[tokio::test]
async fn a_pod_with_a_limit_gets_its_device_through_the_device_plugin() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-plugged", &MINORS[..2])?;
    // No controller is needed.
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_allocatable(&setup, 0, "2").await?;
    setup
        .pods()
        .create(&PostParams::default(), &pod_with_limit("plugged")?)
        .await?;
    let inside = look_inside(&setup, "plugged").await?;
    let device = inside.only_device();
    setup
        .cluster
        .kubectl(&[
            "exec",
            "plugged",
            "--",
            "dd",
            &format!("if={device}"),
            "of=/tmp/read",
            "bs=4",
            "count=1",
        ])
        .await?;
    // An unplugged device is withdrawn; a new one is added.
    node.make_device("/dev/drayman-plugged-2", 1, MINORS[2])?;
    wait_for_allocatable(&setup, 0, "3").await?;
    node.remove("/dev/drayman-plugged-2")?;
    wait_for_allocatable(&setup, 0, "2").await?;
    companion.end().await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_restarted_kubelet_finds_the_companion_again() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..2])?;
    make_devices(node, "drayman-plugged", &MINORS[2..])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 0, 4).await?;
    wait_for_allocatable(&setup, 0, "2").await?;
    setup.make_pod("before").await?;
    let before = look_inside(&setup, "before").await?;

    node.restart_kubelet().await?;
    wait_for_allocatable(&setup, 0, "2").await?;
    setup.make_pod("after").await?;
    setup
        .pods()
        .create(&PostParams::default(), &pod_with_limit("plugged")?)
        .await?;
    let after = look_inside(&setup, "after").await?;
    assert_ne!(before.only_device(), after.only_device());
    look_inside(&setup, "plugged").await?.only_device();
    assert_eq!(
        look_inside(&setup, "before").await?,
        before,
        "the running pod keeps its device"
    );
    for name in ["before", "after", "plugged"] {
        setup.cluster.kubectl(&["delete", "pod", name]).await?;
    }
    assert!(
        node.list("/run/cdi")?.iter().all(|name| !name.contains(".json")),
        "{:?}",
        node.list("/run/cdi")?
    );
    companion.end().await?;
    controller.end().await?;
    setup.cluster.stop().await
}
