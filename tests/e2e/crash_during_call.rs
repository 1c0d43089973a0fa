//! The companion is killed during its calls and restarted: same end state, no leak.

use std::path::PathBuf;

use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};

use crate::harness::TIMEOUT;
use crate::pods::{
    CONFIGURATION, assert_prepared, assert_unprepared, look_inside, replace_killed, start_node,
};
use crate::setup::REGISTERED;

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
        tokio::time::timeout(TIMEOUT, self.0.next()).await?;
        Ok(())
    }
}

/// Kubelet's reaction to a companion that dies during a call. `tests/faults` kills it at every step on the disk.
#[tokio::test]
async fn kubelet_repeats_calls_in_which_a_companion_is_killed() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(1).await?;
    let node = setup.cluster.node(0);

    // Killed while it writes the checkpoint in Prepare.
    let change = Change::expect(node.path("/var/lib/kubelet/plugins/drayman.dev"))?;
    setup.make_pod("pod").await?;
    change.seen().await?;
    let companion = replace_killed(&setup, companion).await?;
    look_inside(&setup, "pod").await?.only_device();
    let (uid, name) = setup.claim_ids("pod").await?;
    assert_prepared(node, &uid)?;

    // Killed while it removes the CDI file in Unprepare.
    let change = Change::expect(node.path("/run/cdi"))?;
    setup
        .cluster
        .kubectl(&["delete", "pod", "pod", "--wait=false"])
        .await?;
    change.seen().await?;
    let companion = replace_killed(&setup, companion).await?;
    setup.until_claim_gone(&name).await?;
    assert_unprepared(node, &uid)?;
    setup.end([companion, controller]).await
}

#[tokio::test]
async fn a_companion_killed_after_prepare_knows_its_claims() -> anyhow::Result<()> {
    let (setup, controller, mut companion) = start_node(2).await?;
    setup.make_pod("first").await?;
    let first = look_inside(&setup, "first").await?;
    companion.kill().await?;
    // The pod is deleted while no companion runs; it terminates once there is one to unprepare its claim.
    setup
        .cluster
        .kubectl(&["delete", "pod", "first", "--wait=false"])
        .await?;
    let companion = setup.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    setup.until_pod_gone("first").await?;
    setup.make_pod("second").await?;
    setup.make_pod("third").await?;
    let (second, third) = (
        look_inside(&setup, "second").await?,
        look_inside(&setup, "third").await?,
    );
    assert_ne!(second.only_device(), third.only_device());
    assert!(
        [second.only_device(), third.only_device()].contains(&first.only_device()),
        "the device is free again"
    );
    setup.end([companion, controller]).await
}
