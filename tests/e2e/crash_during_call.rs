//! The companion is killed during its calls and restarted: same end state, no leak.

use std::path::PathBuf;

use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};

use crate::harness::PATIENCE;
use crate::pods::{CONFIGURATION, MINORS, look_inside, make_devices, traces, wait_for_inventory};
use crate::stage::{Stage, is_allocated, is_gone};

/// Log message of the companion after its registration.
const REGISTERED: &str = "kubelet has registered the driver";

/// Resolves at the first change in a directory.
pub(crate) struct Change(inotify::EventStream<[u8; 4096]>);

impl Change {
    pub(crate) fn expect(directory: PathBuf) -> anyhow::Result<Self> {
        let inotify = Inotify::init()?;
        inotify.watches().add(
            directory,
            WatchMask::MODIFY | WatchMask::MOVED_TO | WatchMask::CREATE | WatchMask::DELETE,
        )?;
        Ok(Self(inotify.into_event_stream([0; 4096])?))
    }

    pub(crate) async fn seen(mut self) -> anyhow::Result<()> {
        tokio::time::timeout(PATIENCE, self.0.next()).await?;
        Ok(())
    }
}

/// Kubelet's reaction to a companion that dies during a call. `tests/faults` kills it at every step on the disk.
#[tokio::test]
async fn kubelet_repeats_calls_in_which_a_companion_is_killed() -> anyhow::Result<()> {
    let stage = Stage::start(1).await?;
    let node = stage.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..1])?;
    stage.make_template(None).await?;
    let controller = stage.controller()?;
    let mut companion = stage.companion(0, CONFIGURATION)?;
    wait_for_inventory(&stage, 0, 1).await?;

    // Killed while it writes the checkpoint in Prepare.
    let change = Change::expect(node.path("/var/lib/kubelet/plugins/drayman.dev"))?;
    stage.make_pod("pod").await?;
    change.seen().await?;
    companion.kill().await?;
    companion = stage.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    look_inside(&stage, "pod").await?.only_device();
    let claim = stage.claim_of("pod", "allocated", is_allocated).await?;
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    assert_eq!(
        traces(node, &uid)?.len(),
        2,
        "prepared once: {:?}",
        traces(node, &uid)?
    );

    // Killed while it removes the CDI file in Unprepare.
    let change = Change::expect(node.path("/run/cdi"))?;
    stage
        .cluster
        .kubectl(&["delete", "pod", "pod", "--wait=false"])
        .await?;
    change.seen().await?;
    companion.kill().await?;
    companion = stage.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    stage
        .wait(
            stage.claims(),
            claim.metadata.name.as_deref().unwrap_or_default(),
            "gone",
            is_gone(),
        )
        .await?;
    assert_eq!(traces(node, &uid)?, Vec::<String>::new());
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}

#[tokio::test]
async fn a_companion_killed_after_prepare_knows_its_claims() -> anyhow::Result<()> {
    let stage = Stage::start(1).await?;
    let node = stage.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..2])?;
    stage.make_template(None).await?;
    let controller = stage.controller()?;
    let mut companion = stage.companion(0, CONFIGURATION)?;
    wait_for_inventory(&stage, 0, 2).await?;
    stage.make_pod("first").await?;
    let first = look_inside(&stage, "first").await?;
    companion.kill().await?;
    // The pod is deleted while no companion runs; it terminates once there is one to unprepare its claim.
    stage
        .cluster
        .kubectl(&["delete", "pod", "first", "--wait=false"])
        .await?;
    let companion = stage.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    let claim_is_gone = stage.wait(stage.pods(), "first", "gone", is_gone());
    claim_is_gone.await?;
    stage.make_pod("second").await?;
    stage.make_pod("third").await?;
    let (second, third) = (
        look_inside(&stage, "second").await?,
        look_inside(&stage, "third").await?,
    );
    assert_ne!(second.only_device(), third.only_device());
    assert!(
        [second.only_device(), third.only_device()].contains(&first.only_device()),
        "the device is free again"
    );
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}
