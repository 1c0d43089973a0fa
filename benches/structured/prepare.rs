//! Prepare and Unprepare on a real node, from kubelet's metrics. Kubelet's directory is on tmpfs.

use std::net::TcpListener;
use std::time::Duration;

use anyhow::Context as _;

use crate::Options;
use crate::common;
use crate::companion;
use crate::figures::{Goal, Times, figure};
use crate::fixture::{Slices, delete, make_pod_with_claim, one_device};
use crate::harness::TIMEOUT;
use crate::metrics::{CALL, Metrics, OPERATION};
use crate::setup::{Setup, is_running};

/// Pods one after the other, so that kubelet's metrics show single calls.
const LONE: usize = 30;
/// Concurrent pods: slightly fewer than kubelet's default limit.
const AT_ONCE: u32 = 100;

const READ: &str = "rest_client_request_duration_seconds";
const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let (setup, companion) = companion::cluster(options, 1).await?;
    companion.end().await?;
    companion::make_devices(&setup, 1..AT_ONCE)?;
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let companion = companion::start(&setup, options, &["--metrics-bind-address", &address])?;
    companion.logged("kubelet has registered the driver").await?;
    Slices::watch(&setup)
        .until_offered(&companion::names(AT_ONCE))
        .await?;
    lone(&setup, &address).await?;
    at_once(&setup, &address).await?;
    companion.end().await?;
    setup.cluster.stop().await
}

async fn lone(setup: &Setup, address: &str) -> anyhow::Result<()> {
    let (mut prepares, mut unprepares) = (Times::default(), Times::default());
    let mut before = Metrics::of_kubelet(setup).await?;
    let first = before.durations(OPERATION, "\"PrepareResources\"");
    let ours = Metrics::of_companion(address).await?;
    for number in 0..LONE {
        let name = format!("lone-{number}");
        make_pod_with_claim(setup, &name, &one_device()).await?;
        setup.wait(setup.pods(), &name, "running", is_running()).await?;
        delete(setup, &name).await?;
        let after = Metrics::of_kubelet(setup).await?;
        for (method, times) in [(PREPARE, &mut prepares), (UNPREPARE, &mut unprepares)] {
            let call = after
                .durations(CALL, method)
                .since(before.durations(CALL, method));
            anyhow::ensure!(call.count == 1, "{} calls of {method} for {name}", call.count);
            times.push(call.sum);
        }
        before = after;
    }
    for (what, times, mean) in [("Prepare", &prepares, 4_000), ("Unprepare", &unprepares, 2_500)] {
        let mean_goal = Duration::from_micros(mean);
        let p99_goal = Duration::from_millis(25);
        let mean = times.sum() / u32::try_from(times.len())?;
        figure(
            &format!("{what} of a lone pod by {CALL} (goals: mean {mean_goal:?}, p99 {p99_goal:?})"),
            &format!("mean {mean:.2?}, {times}"),
            Goal::is(mean <= mean_goal && times.quantile(99) <= p99_goal),
        );
    }
    let reads = Metrics::of_companion(address)
        .await?
        .durations(READ, "\"GET\"")
        .since(ours.durations(READ, "\"GET\""));
    figure(
        &format!("the read of the claim in them, by the companion's {READ}"),
        &format!("mean {:.2?}, n={}", reads.mean(), reads.count),
        Goal::none(),
    );
    let operations = before.durations(OPERATION, "\"PrepareResources\"").since(first);
    figure(
        &format!("the same with kubelet's own part, by {OPERATION}"),
        &format!("Prepare mean {:.2?}", operations.mean()),
        Goal::none(),
    );
    Ok(())
}

async fn at_once(setup: &Setup, address: &str) -> anyhow::Result<()> {
    let before = Metrics::of_kubelet(setup).await?;
    let ours_before = Metrics::of_companion(address).await?;
    common::each(0..AT_ONCE, |number| async move {
        make_pod_with_claim(setup, &format!("pod-{number}"), &one_device()).await
    })
    .await?;
    // The node authorizer denies kubelet the claims that it does not know yet, and kubelet retries their pods much later.
    common::until("all claims are prepared", TIMEOUT, || async {
        let now = Metrics::of_kubelet(setup).await?;
        Ok(now
            .durations(CALL, PREPARE)
            .since(before.durations(CALL, PREPARE))
            .count
            >= AT_ONCE)
    })
    .await?;
    let after = Metrics::of_kubelet(setup).await?;
    let calls = after
        .durations(CALL, PREPARE)
        .since(before.durations(CALL, PREPARE));
    let label = "\"PrepareResources\"";
    let operations = after
        .durations(OPERATION, label)
        .since(before.durations(OPERATION, label));
    let ours = Metrics::of_companion(address).await?;
    figure(
        &format!("Prepare of {AT_ONCE} pods at once by the companion's grpc_server_handling_seconds"),
        &format!(
            "p99 at most {} s",
            ours.quantile_since(&ours_before, PREPARE, 99).context("calls")?
        ),
        Goal::none(),
    );
    figure(
        &format!("the same by kubelet's metrics, {} calls", calls.count),
        &format!(
            "mean {:.2?} per call, {:.2?} with kubelet's own part",
            calls.mean(),
            operations.mean()
        ),
        Goal::none(),
    );
    Ok(())
}

impl Metrics {
    /// Upper bound and cumulative count of each bucket of a method, over all services.
    fn buckets(&self, method: &str) -> Vec<(String, u64)> {
        let lines = self.0.lines().filter(|line| {
            line.starts_with("grpc_server_handling_seconds_bucket{")
                && line.contains(&format!("grpc_method=\"{method}\""))
        });
        let mut buckets: Vec<(String, u64)> = Vec::new();
        for line in lines {
            let bound = line.split("le=\"").nth(1).and_then(|rest| rest.split('"').next());
            let count = line.rsplit(' ').next().and_then(|count| count.parse().ok());
            let (Some(bound), Some(count)) = (bound, count) else {
                continue;
            };
            match buckets.iter_mut().find(|(known, _)| known == bound) {
                Some((_, sum)) => *sum += count,
                None => buckets.push((bound.to_owned(), count)),
            }
        }
        buckets
    }

    /// The bucket bound at this percentile of the calls since `earlier`.
    fn quantile_since(&self, earlier: &Self, method: &str, percent: u64) -> Option<String> {
        let before = earlier.buckets(method);
        let counts: Vec<(String, u64)> = self
            .buckets(method)
            .into_iter()
            .map(|(bound, count)| {
                let had = before.iter().find(|(known, _)| *known == bound);
                let count = count - had.map_or(0, |(_, count)| *count);
                (bound, count)
            })
            .collect();
        let all = counts.last()?.1;
        let rank = (all * percent).div_ceil(100);
        let bucket = counts.into_iter().find(|(_, count)| *count >= rank);
        bucket.map(|(bound, _)| bound)
    }
}
