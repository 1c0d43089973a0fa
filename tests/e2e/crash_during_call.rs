//! The companion is killed during its calls and restarted: same end state, no leak.

use std::path::PathBuf;

use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};

use crate::harness::TIMEOUT;
use crate::pods::{CONFIGURATION, MINORS, claim_files, look_inside, make_devices, wait_for_inventory};
use crate::setup::{Setup, is_allocated, is_gone};

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
        tokio::time::timeout(TIMEOUT, self.0.next()).await?;
        Ok(())
    }
}

/// Kubelet's reaction to a companion that dies during a call. `tests/faults` kills it at every step on the disk.
#[tokio::test]
async fn kubelet_repeats_calls_in_which_a_companion_is_killed() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..1])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let mut companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 0, 1).await?;

    // Killed while it writes the checkpoint in Prepare.
    let change = Change::expect(node.path("/var/lib/kubelet/plugins/drayman.dev"))?;
    setup.make_pod("pod").await?;
    change.seen().await?;
    companion.kill().await?;
    companion = setup.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    look_inside(&setup, "pod").await?.only_device();
    let claim = setup.claim_of("pod", "allocated", is_allocated).await?;
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    assert_eq!(
        claim_files(node, &uid)?.len(),
        2,
        "prepared once: {:?}",
        claim_files(node, &uid)?
    );

    // Killed while it removes the CDI file in Unprepare.
    let change = Change::expect(node.path("/run/cdi"))?;
    setup
        .cluster
        .kubectl(&["delete", "pod", "pod", "--wait=false"])
        .await?;
    change.seen().await?;
    companion.kill().await?;
    companion = setup.companion(0, CONFIGURATION)?;
    companion.logged(REGISTERED).await?;
    setup
        .wait(
            setup.claims(),
            claim.metadata.name.as_deref().unwrap_or_default(),
            "gone",
            is_gone(),
        )
        .await?;
    assert_eq!(claim_files(node, &uid)?, Vec::<String>::new());
    companion.end().await?;
    controller.end().await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_companion_killed_after_prepare_knows_its_claims() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..2])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let mut companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 0, 2).await?;
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
    let claim_is_gone = setup.wait(setup.pods(), "first", "gone", is_gone());
    claim_is_gone.await?;
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
    companion.end().await?;
    controller.end().await?;
    setup.cluster.stop().await
}
