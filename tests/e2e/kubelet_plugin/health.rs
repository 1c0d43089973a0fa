//! An unhealthy device of an extended resource, as kubelet, the scheduler and pods see it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::harness::Node;
use crate::kubelet_plugin::helper::{devices_inside, pod_resources, restarts, until_granted};
use crate::pods::make_devices;
use crate::setup::Setup;

const RESOURCE: &str = "drayman.dev/probed";
const PREFIX: &str = "drayman-probed-";
const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: probed
  mode: extended-resource
  resourceName: drayman.dev/probed
  paths: [\"/dev/drayman-probed-*\"]
  health: {sysfs: [{file: state, equals: well}], recoverAfter: 2}
";
/// Minor numbers of the zero and the full device.
const MINORS: [u32; 2] = [5, 7];

/// A fake `/sys` with the health of the test's devices. The devices themselves do not change.
struct Sysfs(PathBuf);

impl Sysfs {
    fn make(setup: &Setup) -> anyhow::Result<Self> {
        let root = setup.cluster.directory().join("sysfs");
        std::fs::create_dir_all(root.join("dev/char"))?;
        for minor in MINORS {
            let device = format!("devices/virtual/mem/{minor}");
            std::fs::create_dir_all(root.join(&device))?;
            std::os::unix::fs::symlink(
                format!("../../{device}"),
                root.join(format!("dev/char/1:{minor}")),
            )?;
        }
        let sysfs = Self(root);
        for number in 0..MINORS.len() {
            sysfs.set_state(number, "well")?;
        }
        Ok(sysfs)
    }

    fn set_state(&self, number: usize, state: &str) -> anyhow::Result<()> {
        let file = self
            .0
            .join(format!("devices/virtual/mem/{}/state", MINORS[number]));
        std::fs::write(file, state).map_err(Into::into)
    }
}

/// Triggers a rescan by a change in `/dev`.
fn trigger_rescan(node: Node<'_>) -> anyhow::Result<()> {
    std::fs::write(node.path("/dev/drayman-poke"), "")?;
    node.remove("/dev/drayman-poke")
}

#[tokio::test]
async fn an_unhealthy_device_is_withdrawn_until_it_recovers() -> anyhow::Result<()> {
    let setup = Setup::without_class(crate::harness::Cluster::builder().nodes(1).start().await?).await?;
    let node = setup.cluster.node(0);
    let sysfs = Sysfs::make(&setup)?;
    make_devices(node, PREFIX, &MINORS)?;
    let flag = format!("--sysfs-root={}", sysfs.0.display());
    let companion = setup.companion_with(0, CONFIGURATION, &[&flag])?;
    setup.until_allocatable(RESOURCE, "2").await?;
    let kubelet = pod_resources(node).await?;
    let create = async |name: &str| {
        setup.make_limit_pod(name, RESOURCE).await?;
        anyhow::Ok(())
    };
    let run = async |name: &str| {
        setup.until_running(name).await?;
        devices_inside(&setup, name, PREFIX)
            .await?
            .pop()
            .context("it has a device")
    };
    create("holder").await?;
    let device = run("holder").await?;
    let number: usize = device.trim_start_matches(PREFIX).parse()?;

    sysfs.set_state(number, "ill")?;
    trigger_rescan(node)?;
    let start = Instant::now();
    until_granted(&kubelet, RESOURCE, 1).await?;
    println!("kubelet does not grant it any more after {:?}", start.elapsed());
    setup.until_allocatable(RESOURCE, "1").await?;
    println!("the node's allocatable says so after {:?}", start.elapsed());
    setup
        .wait_for_event(node.name(), "DeviceUnhealthy", "state is \"ill\"")
        .await?;
    // The pod that holds it keeps it. The scheduler counts it against the remaining devices, so the next pod waits until the first one has
    // ended.
    create("second").await?;
    let waits = async |name: &str| {
        let text = "Insufficient drayman.dev/probed";
        setup.wait_for_event(name, "FailedScheduling", text).await
    };
    waits("second").await?;
    let held = devices_inside(&setup, "holder", PREFIX).await?;
    assert_eq!(held, std::slice::from_ref(&device));
    assert_eq!(restarts(&setup, "holder").await?, 0);
    setup.cluster.kubectl(&["delete", "pod", "holder"]).await?;
    assert_ne!(run("second").await?, device, "it gets the healthy device");
    create("third").await?;
    waits("third").await?;

    // Checked at once; a single healthy result is not enough. Measured from before the change, so that no pause of this process shortens
    // the time.
    let start = Instant::now();
    sysfs.set_state(number, "well")?;
    trigger_rescan(node)?;
    until_granted(&kubelet, RESOURCE, 2).await?;
    println!("kubelet grants it again after {:?}", start.elapsed());
    assert!(start.elapsed() >= Duration::from_secs(4), "{:?}", start.elapsed());
    assert_eq!(run("third").await?, device);
    setup.until_allocatable(RESOURCE, "2").await?;
    setup
        .wait_for_event(node.name(), "DeviceRecovered", &device)
        .await?;
    setup.end([companion]).await
}
