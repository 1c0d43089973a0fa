//! Requests of a pod's lifecycle, and of an idle companion.

use std::time::Duration;

use tokio::time::sleep;

use crate::Options;
use crate::companion::{self, USER};
use crate::figures::{Goal, figure};
use crate::fixture::{delete, make_pod_with_claim, one_device};
use crate::requests::{self, Count};
use crate::stage::{Stage, is_running};

const LIVES: usize = 10;
const REST: Duration = Duration::from_secs(60);

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let (stage, companion) = companion::cluster(options, 2).await?;
    let before = requests::of(&stage, USER).await?.len();
    for life in 0..LIVES {
        let name = format!("pod-{life}");
        start_pod(&stage, &name).await?;
        delete(&stage, &name).await?;
    }
    // Late requests belong to these pods too.
    sleep(Duration::from_secs(1)).await;
    let lives = since(&stage, before).await?;
    figure(
        &format!("requests of the companion in a pod's life, {LIVES} lives"),
        &lives.per(LIVES),
        Goal::is(lives.writes + lives.events + lives.failures == 0 && lives.reads == LIVES),
    );

    start_pod(&stage, "resting").await?;
    sleep(Duration::from_secs(1)).await;
    let before = requests::of(&stage, USER).await?.len();
    sleep(REST).await;
    let rest = since(&stage, before).await?;
    figure(
        &format!("requests of the companion in {REST:?} at rest, with one prepared claim"),
        &format!("{}, lists and ended watches included", rest.all()),
        Goal::is(rest.all() == 0),
    );
    companion.end().await?;
    stage.cluster.stop().await
}

async fn start_pod(stage: &Stage, name: &str) -> anyhow::Result<()> {
    make_pod_with_claim(stage, name, &one_device()).await?;
    stage.wait(stage.pods(), name, "running", is_running()).await?;
    Ok(())
}

/// The companion's requests after the first ones.
async fn since(stage: &Stage, first: usize) -> anyhow::Result<Count> {
    let entries = requests::of(stage, USER).await?;
    Ok(Count::new(entries.iter().skip(first)))
}
