//! Requests of a pod's lifecycle, and of an idle companion.

use std::time::Duration;

use tokio::time::sleep;

use crate::Options;
use crate::companion::{self, USER};
use crate::figures::{Goal, figure};
use crate::fixture::{delete, make_pod_with_claim, one_device};
use crate::requests::{self, Count};
use crate::setup::{Setup, is_running};

const PODS: usize = 10;
const REST: Duration = Duration::from_secs(60);

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let (setup, companion) = companion::cluster(options, 2).await?;
    let before = requests::of(&setup, USER).await?.len();
    for number in 0..PODS {
        let name = format!("pod-{number}");
        start_pod(&setup, &name).await?;
        delete(&setup, &name).await?;
    }
    // Late requests belong to these pods too.
    sleep(Duration::from_secs(1)).await;
    let lives = since(&setup, before).await?;
    figure(
        &format!("requests of the companion in a pod's lifecycle, {PODS} pods"),
        &lives.per(PODS),
        Goal::is(lives.writes + lives.events + lives.failures == 0 && lives.reads == PODS),
    );

    start_pod(&setup, "resting").await?;
    sleep(Duration::from_secs(1)).await;
    let before = requests::of(&setup, USER).await?.len();
    sleep(REST).await;
    let rest = since(&setup, before).await?;
    figure(
        &format!("requests of the companion in {REST:?} at rest, with one prepared claim"),
        &format!("{}, lists and ended watches included", rest.all()),
        Goal::is(rest.all() == 0),
    );
    companion.end().await?;
    setup.cluster.stop().await
}

async fn start_pod(setup: &Setup, name: &str) -> anyhow::Result<()> {
    make_pod_with_claim(setup, name, &one_device()).await?;
    setup.wait(setup.pods(), name, "running", is_running()).await?;
    Ok(())
}

/// The companion's requests after the first ones.
async fn since(setup: &Setup, first: usize) -> anyhow::Result<Count> {
    let entries = requests::of(setup, USER).await?;
    Ok(Count::new(entries.iter().skip(first)))
}
