//! Time until slices reflect a change of the devices, and until deleted slices are restored.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams};
use tokio::time::{Instant, sleep};

use crate::Options;
use crate::companion::{self, names};
use crate::figures::{Goal, Times, figure};
use crate::fixture::{Slices, offered};

const ROUNDS: usize = 25;
/// Each takes seconds.
const RESTARTS: usize = 6;
/// The companion's burst limit is 20 writes, then one per second.
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let (setup, companion) = companion::cluster(options, 2).await?;
    let node = setup.cluster.node(0);
    let mut slices = Slices::watch(&setup);

    let (mut plugged, mut unplugged) = (Times::default(), Times::default());
    for _ in 0..ROUNDS {
        sleep(PAUSE).await;
        let start = Instant::now();
        companion::make_devices(&setup, 2..3)?;
        slices.until_offered(&names(3)).await?;
        plugged.push(start.elapsed());
        sleep(PAUSE).await;
        let start = Instant::now();
        node.remove("/dev/drayman-test-2")?;
        slices.until_offered(&names(2)).await?;
        unplugged.push(start.elapsed());
    }
    let second = Duration::from_secs(1);
    for (what, times) in [("plugged in", plugged), ("unplugged", unplugged)] {
        figure(
            &format!("{what} -> slice stored (goal p99 {second:?})"),
            &times.to_string(),
            Goal::at_most(times.quantile(99), second),
        );
    }

    let mut deleted = Times::default();
    let api = Api::<ResourceSlice>::all(setup.cluster.client());
    for _ in 0..ROUNDS {
        sleep(PAUSE).await;
        let now = slices.until("there", |slices| offered(slices).is_some()).await?;
        let name = now.keys().next().context("a slice")?.clone();
        let start = Instant::now();
        api.delete(&name, &DeleteParams::default()).await?;
        slices
            .until("deleted", |slices| !slices.contains_key(&name))
            .await?;
        slices.until_offered(&names(2)).await?;
        deleted.push(start.elapsed());
    }
    let mut wiped = Times::default();
    for _ in 0..RESTARTS {
        let back = async {
            slices.until("deleted", BTreeMap::is_empty).await?;
            let start = Instant::now();
            slices.until_offered(&names(2)).await?;
            anyhow::Ok(start.elapsed())
        };
        let (restarted, back) = tokio::join!(node.restart_kubelet(), back);
        restarted?;
        wiped.push(back?);
    }
    for (what, times) in [
        ("slice deleted by hand", deleted),
        ("slices deleted by a kubelet that starts", wiped),
    ] {
        figure(
            &format!("{what} -> stored again (goals p50 1 s, p99 3 s)"),
            &times.to_string(),
            Goal::is(times.median() <= second && times.quantile(99) <= 3 * second),
        );
    }
    companion.end().await?;
    setup.cluster.stop().await
}
