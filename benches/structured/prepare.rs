//! Prepare and Unprepare on a real node, from kubelet's metrics. Kubelet's directory is on tmpfs.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::json;

use crate::Options;
use crate::common;
use crate::companion;
use crate::figures::{Goal, Times, figure};
use crate::fixture::{Slices, claims, delete, make_claim, make_pod_with_claim, one_device, one_device_of};
use crate::harness::TIMEOUT;
use crate::metrics::{CALL, Durations, Metrics, OPERATION};
use crate::setup::{Program, Setup, is_running};

/// Pods one after the other, so that kubelet's metrics show single calls.
const LONE: usize = 30;
/// Concurrent pods: slightly fewer than kubelet's default limit.
const AT_ONCE: u32 = 100;

/// Pause before each pod: kubelet, container runtime and API server finish the previous one, and are idle as the goal requires.
const IDLE: Duration = Duration::from_secs(2);

/// Reads of a claim that nothing else accompanies.
const BARE_READS: u32 = 15;

/// Histogram of the companion's gRPC calls.
const HANDLING: &str = "grpc_server_handling_seconds";
const READ: &str = "rest_client_request_duration_seconds";
const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";
/// Labels of kubelet's operations.
const OPERATIONS: [&str; 2] = ["\"PrepareResources\"", "\"UnprepareResources\""];

/// The driver of dra-example-driver's default profile.
const PEER: &str = "gpu.example.com";

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
    let peer = match &options.peer {
        Some(program) => Some(start_peer(&setup, program).await?),
        None => None,
    };
    lone(&setup, &address, peer.is_some()).await?;
    if let Some(peer) = peer {
        peer.end().await?;
    }
    at_once(&setup, &address).await?;
    companion.end().await?;
    setup.cluster.stop().await
}

/// Starts dra-example-driver, and waits until it has prepared a pod's claim.
async fn start_peer(setup: &Setup, program: &Path) -> anyhow::Result<Program> {
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": PEER },
            "spec": { "selectors": [{ "cel": { "expression": format!("device.driver == \"{PEER}\"") } }] },
        }))
        .await?;
    let node = setup.cluster.node(0);
    let mut command = node.command(program);
    command.args([
        "--node-name",
        node.name(),
        "--cdi-root",
        "/var/run/cdi",
        "--kubeconfig",
    ]);
    command.arg(setup.cluster.kubeconfig());
    let program = setup.program("peer", command)?;
    run_pod(setup, "peer-first", PEER).await?;
    Ok(program)
}

/// Runs a pod with a device of a class, and deletes it.
async fn run_pod(setup: &Setup, name: &str, class: &str) -> anyhow::Result<()> {
    make_pod_with_claim(setup, name, &one_device_of(class)).await?;
    setup.wait(setup.pods(), name, "running", is_running()).await?;
    delete(setup, name).await
}

/// Calls for the pods of a class, one pod after the other.
struct Lone {
    class: &'static str,
    prepares: Times,
    unprepares: Times,
    /// Kubelet's operations for the pods, including the calls. Kubelet may repeat a Prepare before it calls the driver.
    operations: [Durations; 2],
}

impl Lone {
    fn of(class: &'static str) -> Self {
        Self {
            class,
            prepares: Times::default(),
            unprepares: Times::default(),
            operations: Default::default(),
        }
    }

    /// Runs a pod, and adds its calls. `before` are kubelet's metrics before it; returns those after it.
    async fn pod(&mut self, setup: &Setup, name: &str, before: &Metrics) -> anyhow::Result<Metrics> {
        tokio::time::sleep(IDLE).await;
        run_pod(setup, name, self.class).await?;
        let after = Metrics::of_kubelet(setup).await?;
        for (method, times) in [(PREPARE, &mut self.prepares), (UNPREPARE, &mut self.unprepares)] {
            let call = after
                .durations(CALL, method)
                .since(before.durations(CALL, method));
            anyhow::ensure!(call.count == 1, "{} calls of {method} for {name}", call.count);
            times.push(call.sum);
        }
        for (label, sum) in OPERATIONS.into_iter().zip(&mut self.operations) {
            let operations = after
                .durations(OPERATION, label)
                .since(before.durations(OPERATION, label));
            sum.count += operations.count;
            sum.sum += operations.sum;
        }
        Ok(after)
    }

    /// The means of kubelet's operations.
    fn operations(&self) -> String {
        let [prepare, unprepare] = self.operations.map(Durations::mean);
        format!("Prepare mean {prepare:.2?}, Unprepare mean {unprepare:.2?}")
    }
}

async fn lone(setup: &Setup, address: &str, has_peer: bool) -> anyhow::Result<()> {
    let mut own = Lone::of("test");
    let mut peer = has_peer.then(|| Lone::of(PEER));
    let ours = Metrics::of_companion(address).await?;
    let mut before = Metrics::of_kubelet(setup).await?;
    for number in 0..LONE {
        before = own.pod(setup, &format!("lone-{number}"), &before).await?;
        if let Some(peer) = &mut peer {
            before = peer.pod(setup, &format!("peer-{number}"), &before).await?;
        }
    }
    for (what, times, mean) in [
        ("Prepare", &own.prepares, 4_000),
        ("Unprepare", &own.unprepares, 2_500),
    ] {
        let mean_goal = Duration::from_micros(mean);
        let p99_goal = Duration::from_millis(25);
        let mean = times.mean();
        figure(
            &format!("{what} of a lone pod by {CALL} (goals: mean {mean_goal:?}, p99 {p99_goal:?})"),
            &format!("mean {mean:.2?}, {times}"),
            Goal::is(mean <= mean_goal && times.quantile(99) <= p99_goal),
        );
    }
    let ours_after = Metrics::of_companion(address).await?;
    let handled = ours_after
        .durations(HANDLING, PREPARE)
        .since(ours.durations(HANDLING, PREPARE));
    figure(
        &format!("the companion's part of Prepare, by its {HANDLING}"),
        &format!("mean {:.2?}, n={}", handled.mean(), handled.count),
        Goal::none(),
    );
    let reads = ours_after
        .durations(READ, "\"GET\"")
        .since(ours.durations(READ, "\"GET\""));
    figure(
        &format!("the read of the claim in them, by the companion's {READ}"),
        &format!("mean {:.2?}, n={}", reads.mean(), reads.count),
        Goal::none(),
    );
    figure(
        "the read of a claim by another client, on the idle node",
        &format!("mean {:.2?}, n={BARE_READS}", bare_read(setup).await?),
        Goal::none(),
    );
    figure(
        &format!("the same with kubelet's own part, by {OPERATION}"),
        &own.operations(),
        Goal::none(),
    );
    if let Some(peer) = peer {
        for (what, own, peer) in [
            ("Prepare", &own.prepares, &peer.prepares),
            ("Unprepare", &own.unprepares, &peer.unprepares),
        ] {
            let ratio = own.mean().div_duration_f64(peer.mean());
            figure(
                &format!("{what} of a lone pod, beside dra-example-driver in the same cluster"),
                &format!("{ratio:.2} of its mean {:.2?}, {peer}", peer.mean()),
                Goal::none(),
            );
        }
        figure(
            &format!("dra-example-driver with kubelet's own part, by {OPERATION}"),
            &peer.operations(),
            Goal::none(),
        );
    }
    Ok(())
}

/// The mean time of reading a claim while nothing else happens: the least that a driver needs on this machine, since only the claim has its
/// allocation.
async fn bare_read(setup: &Setup) -> anyhow::Result<Duration> {
    make_claim(setup, "bare-read", &one_device()).await?;
    let claims = claims(setup);
    let mut sum = Duration::ZERO;
    for _ in 0..BARE_READS {
        tokio::time::sleep(IDLE).await;
        let since = Instant::now();
        claims.get("bare-read").await?;
        sum += since.elapsed();
    }
    Ok(sum / BARE_READS)
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
    let label = OPERATIONS[0];
    let operations = after
        .durations(OPERATION, label)
        .since(before.durations(OPERATION, label));
    let p99 = |histogram, label| {
        after
            .quantile_since(&before, histogram, label, 99)
            .context("kubelet's calls")
    };
    let ours = Metrics::of_companion(address).await?;
    figure(
        &format!("Prepare of {AT_ONCE} pods at once by the companion's {HANDLING}"),
        &format!(
            "p99 at most {} s",
            ours.quantile_since(&ours_before, HANDLING, PREPARE, 99)
                .context("calls")?
        ),
        Goal::none(),
    );
    figure(
        &format!("the same by kubelet's metrics, {} calls", calls.count),
        &format!(
            "mean {:.2?}, p99 at most {} s per call; {:.2?} and {} s with kubelet's own part",
            calls.mean(),
            p99(CALL, PREPARE)?,
            operations.mean(),
            p99(OPERATION, label)?
        ),
        Goal::none(),
    );
    Ok(())
}
