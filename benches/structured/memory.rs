//! Memory of an idle companion on a real node.

use std::time::Duration;

use tokio::time::sleep;

use crate::Options;
use crate::companion;
use crate::figures::{Goal, figure, resident_kib_of};
use crate::fixture::Slices;
use crate::setup::{Program, Setup};

/// Devices of a large node.
const MANY: u32 = 1_000;
const REST: Duration = Duration::from_secs(10);

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let (setup, companion) = companion::cluster(options, 4).await?;
    at_rest(&setup, companion, 4, 12).await?;
    companion::make_devices(&setup, 4..MANY)?;
    let companion = companion::start(&setup, options, &[])?;
    companion.logged("kubelet has registered the driver").await?;
    at_rest(&setup, companion, MANY, 20).await?;
    setup.cluster.stop().await
}

async fn at_rest(setup: &Setup, companion: Program, devices: u32, megabytes: u64) -> anyhow::Result<()> {
    Slices::watch(setup)
        .until_offered(&companion::names(devices))
        .await?;
    sleep(REST).await;
    let id = companion.id()?.to_string();
    let [kib, most, own] = ["VmRSS:", "VmHWM:", "RssAnon:"].map(|line| resident_kib_of(&id, line));
    figure(
        &format!("resident memory of the companion at rest with {devices} devices (goal {megabytes} MB)"),
        // Which part of the program's file is resident depends on the kernel.
        &format!("{kib} KiB, {most} KiB at most; {own} KiB of it are not pages of the program's file"),
        Goal::below(kib, megabytes * 1_000_000 / 1024),
    );
    companion.end().await.map(drop)
}
