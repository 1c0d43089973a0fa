//! Pods on real nodes with a real scheduler, kubelet and containerd. Containers open their devices.

use std::collections::{BTreeMap, BTreeSet};

use crate::harness::Node;
use crate::setup::{DRIVER, Program, REGISTERED, Setup};

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

/// The extended resource of this configuration.
pub(crate) const PLUGGED: &str = "drayman.dev/plugged";

/// Minor numbers of memory devices that are always readable: zero, full, random, urandom. The companion treats device nodes with equal
/// numbers as one device.
pub(crate) const MINORS: [u32; 4] = [5, 7, 8, 9];

/// Creates device nodes with these minor numbers. Their names are the prefix and an index.
pub(crate) fn make_devices(node: Node<'_>, prefix: &str, minors: &[u32]) -> anyhow::Result<()> {
    minors
        .iter()
        .enumerate()
        .try_for_each(|(number, minor)| node.make_device(format!("/dev/{prefix}{number}"), 1, *minor))
}

/// Waits until the inventory of the first node is ready and has `count` devices.
pub(crate) async fn wait_for_inventory(setup: &Setup, count: u32) -> anyhow::Result<()> {
    setup
        .until_inventory(DRIVER, move |status| status.devices == count)
        .await
}

/// A node with this many devices for claims, a controller, and a registered companion.
pub(crate) async fn start_node(devices: usize) -> anyhow::Result<(Setup, Program, Program)> {
    start_node_with(devices, &[]).await
}

/// As [`start_node`], with more flags for the companion.
pub(crate) async fn start_node_with(
    devices: usize,
    flags: &[&str],
) -> anyhow::Result<(Setup, Program, Program)> {
    let setup = Setup::start(1).await?;
    make_devices(setup.cluster.node(0), "drayman-test-", &MINORS[..devices])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion_with(0, CONFIGURATION, flags)?;
    wait_for_inventory(&setup, u32::try_from(devices)?).await?;
    companion.logged(REGISTERED).await?;
    Ok((setup, controller, companion))
}

/// Kills the companion of [`start_node`], and starts the next one.
pub(crate) async fn replace_killed(setup: &Setup, mut companion: Program) -> anyhow::Result<Program> {
    companion.kill().await?;
    let next = setup.companion(0, CONFIGURATION)?;
    next.logged(REGISTERED).await?;
    Ok(next)
}

/// Waits until the pod runs, and returns the devices in its container: those in environment variables, and the existing device nodes.
pub(crate) async fn look_inside(setup: &Setup, name: &str) -> anyhow::Result<ContainerDevices> {
    setup.until_running(name).await?;
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

/// Asserts that a claim is prepared: it has a CDI file and a checkpoint entry.
pub(crate) fn assert_prepared(node: Node<'_>, uid: &str) -> anyhow::Result<()> {
    let files = claim_files(node, uid)?;
    assert_eq!(files.len(), 2, "{files:?}");
    Ok(())
}

/// Asserts that nothing is left of a claim on a node.
pub(crate) fn assert_unprepared(node: Node<'_>, uid: &str) -> anyhow::Result<()> {
    assert_eq!(claim_files(node, uid)?, Vec::<String>::new());
    Ok(())
}

/// Reads from a device in a pod's container.
pub(crate) async fn read_device(setup: &Setup, pod: &str, device: &str) -> anyhow::Result<()> {
    let input = format!("if={device}");
    let read = ["exec", pod, "--", "dd", &input, "of=/tmp/read", "bs=4", "count=1"];
    setup.cluster.kubectl(&read).await?;
    let size = ["exec", pod, "--", "stat", "-c", "%s", "/tmp/read"];
    let size = setup.cluster.kubectl(&size).await?;
    assert_eq!(size.trim(), "4", "four bytes were read from {device}");
    Ok(())
}

#[tokio::test]
async fn a_pod_reads_from_its_device_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(2).await?;
    let node = setup.cluster.node(0);
    setup.make_pod("pod").await?;
    let inside = look_inside(&setup, "pod").await?;
    read_device(&setup, "pod", inside.only_device()).await?;
    let (uid, name) = setup.claim_ids("pod").await?;
    assert_prepared(node, &uid)?;
    setup.cluster.kubectl(&["delete", "pod", "pod"]).await?;
    setup.until_claim_gone(&name).await?;
    assert_unprepared(node, &uid)?;
    setup.end([companion, controller]).await
}

#[tokio::test]
async fn three_devices_serve_five_pods_one_after_the_other() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(3).await?;
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
    setup.end([companion, controller]).await
}

/// Waits until one of these pods runs.
pub(crate) async fn first_running(setup: &Setup, names: &BTreeSet<String>) -> anyhow::Result<String> {
    let waits = names
        .iter()
        .map(|name| Box::pin(async move { setup.until_running(name).await.map(|()| name.clone()) }));
    futures::future::select_all(waits).await.0
}

#[tokio::test]
async fn a_pod_with_a_limit_gets_its_device_through_the_device_plugin() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-plugged-", &MINORS[..2])?;
    // No controller is needed.
    let companion = setup.companion(0, CONFIGURATION)?;
    setup.until_allocatable(PLUGGED, "2").await?;
    setup.make_limit_pod("plugged", PLUGGED).await?;
    let inside = look_inside(&setup, "plugged").await?;
    read_device(&setup, "plugged", inside.only_device()).await?;
    // An unplugged device is withdrawn; a new one is added.
    node.make_device("/dev/drayman-plugged-2", 1, MINORS[2])?;
    setup.until_allocatable(PLUGGED, "3").await?;
    node.remove("/dev/drayman-plugged-2")?;
    setup.until_allocatable(PLUGGED, "2").await?;
    setup.end([companion]).await
}

#[tokio::test]
async fn a_restarted_kubelet_finds_the_companion_again() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-test-", &MINORS[..2])?;
    make_devices(node, "drayman-plugged-", &MINORS[2..])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 4).await?;
    setup.until_allocatable(PLUGGED, "2").await?;
    setup.make_pod("before").await?;
    let before = look_inside(&setup, "before").await?;

    node.restart_kubelet().await?;
    setup.until_allocatable(PLUGGED, "2").await?;
    setup.make_pod("after").await?;
    setup.make_limit_pod("plugged", PLUGGED).await?;
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
    setup.end([companion, controller]).await
}
