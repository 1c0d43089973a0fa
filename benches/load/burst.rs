//! Many pods at once, with exactly enough devices.

use std::pin::pin;
use std::time::Duration;

use drayman::api::resource::Pod;
use futures::TryStreamExt as _;
use kube::api::PostParams;
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use crate::Options;
use crate::figures::{Goal, figure, load};
use crate::ground::{self, Controller, USER};
use crate::memory_driver;
use crate::requests::{self, Count};
use crate::stage::{Stage, pod_with_claim};

const PODS: usize = 500;
const NODES: usize = 128;
const LIMIT: Duration = Duration::from_secs(120);
/// The claim controller makes and releases a claim for each pod; with the default of 20 it would be what is measured.
const FLAGS: [(&str, &str); 2] = [
    ("controller-manager", "--kube-api-qps=2000"),
    ("controller-manager", "--kube-api-burst=4000"),
];

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    println!("flags: {FLAGS:?}; scheduler: qps 1000, burst 1000, backoff 1 s to 10 s (its default)");
    let stage = stage().await?;
    stage.make_template(None).await?;
    let controller = Controller::start(&stage, options).await?;
    let ours = measure(
        &stage,
        &controller,
        USER,
        "built-in driver, exactly enough devices",
    )
    .await?;
    controller.end().await?;
    stage.cluster.stop().await?;

    let stage = self::stage().await?;
    stage
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": "memory" },
            "driverName": memory_driver::DRIVER,
        }))
        .await?;
    stage
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate", "metadata": { "name": "test" },
            "spec": { "spec": { "resourceClassName": "memory" } },
        }))
        .await?;
    let this = std::env::current_exe()?;
    let controller = Controller::spawn(&stage, &this, "memory-load", &[memory_driver::COMMAND]).await?;
    let memory = measure(
        &stage,
        &controller,
        "memory-load",
        "driver that answers from memory",
    )
    .await?;
    controller.end().await?;
    figure(
        "pods per second of the built-in driver, of the other's",
        &format!("{:.0} %", 100.0 * ours / memory),
        Goal::none(),
    );
    stage.cluster.stop().await
}

/// A control plane with as many devices as there are pods.
async fn stage() -> anyhow::Result<Stage> {
    let stage = ground::stage(&FLAGS, false).await?;
    let devices = |node| PODS / NODES + usize::from(node < PODS % NODES);
    ground::make_nodes(&stage, (0..NODES).map(|node| (node, devices(node)))).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    Ok(stage)
}

/// The answer is how many pods were bound in a second.
async fn measure(stage: &Stage, controller: &Controller, user: &str, what: &str) -> anyhow::Result<f64> {
    let load_before = load();
    let start = Instant::now();
    let create = ground::each(0..PODS, |number| async move {
        let pod = pod_with_claim(&format!("pod-{number:03}"))?;
        stage.pods().create(&PostParams::default(), &pod).await?;
        Ok(())
    });
    let bound = count_bound(stage, start + LIMIT);
    let (created, bound) = tokio::join!(create, bound);
    created?;
    let (bound, last) = bound?;
    let elapsed = last.duration_since(start);
    #[expect(clippy::cast_precision_loss, reason = "some hundreds")]
    let rate = bound as f64 / elapsed.as_secs_f64();
    figure(
        &format!("{PODS} pods at once over {NODES} nodes, {what}"),
        &format!("{bound} bound in {elapsed:.1?}, {rate:.1} pods/s (load before: {load_before})"),
        Goal::is(bound == PODS),
    );
    let entries = requests::of(stage, user).await?;
    let (resident, most) = controller.resident_kib();
    figure(
        &format!("its requests per pod, {what}"),
        &format!(
            "{}; {:?} of processor time, {resident} KiB resident, {most} KiB at most",
            Count::new(&entries).per(PODS),
            controller.processor_time()
        ),
        Goal::none(),
    );
    Ok(rate)
}

/// Counts the pods that are bound until all are or the time is over; also when the last one was.
async fn count_bound(stage: &Stage, deadline: Instant) -> anyhow::Result<(usize, Instant)> {
    let mut bound = std::collections::BTreeSet::new();
    let mut last = Instant::now();
    let mut pods = pin!(watcher(stage.pods(), watcher::Config::default()).applied_objects());
    while bound.len() < PODS {
        let Ok(pod) = timeout_at(deadline, pods.try_next()).await else {
            break;
        };
        let Some(pod): Option<Pod> = pod? else { break };
        if pod.spec.node_name.is_some() && bound.insert(pod.metadata.name) {
            last = Instant::now();
        }
    }
    Ok((bound.len(), last))
}
