//! Many pods at once, with exactly enough devices.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use drayman::api::resource::{Pod, ResourceClaimSchedulingStatus};
use futures::TryStreamExt as _;
use kube::api::{ListParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use crate::Options;
use crate::common::{self, Controller, USER};
use crate::figures::{Goal, Times, figure, load};
use crate::memory_driver;
use crate::requests::{self, Count};
use crate::setup::{Setup, claim_name, pod_with_claim};

const PODS: usize = 500;
const NODES: usize = 128;
const LIMIT: Duration = Duration::from_secs(120);
/// The claim controller creates and releases a claim per pod; its default QPS of 20 would limit the result.
const FLAGS: [(&str, &str); 2] = [
    ("controller-manager", "--kube-api-qps=2000"),
    ("controller-manager", "--kube-api-burst=4000"),
];

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    println!("flags: {FLAGS:?}; scheduler: qps 1000, burst 1000, backoff 1 s to 10 s (its default)");
    built_in(options, PODS, "exactly enough devices").await?;
    let ours = built_in(options, 2 * PODS, "twice as many devices").await?;

    let setup = start(PODS).await?;
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": "memory" },
            "driverName": memory_driver::DRIVER,
        }))
        .await?;
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate", "metadata": { "name": "test" },
            "spec": { "spec": { "resourceClassName": "memory" } },
        }))
        .await?;
    let this = std::env::current_exe()?;
    let controller = Controller::spawn(&setup, &this, "memory-load", &[memory_driver::COMMAND]).await?;
    let memory = measure(
        &setup,
        &controller,
        "memory-load",
        "driver that answers from memory",
    )
    .await?;
    controller.end().await?;
    figure(
        "pods per second of the built-in driver with twice as many devices, of the other's",
        &format!("{:.0} %", 100.0 * ours / memory),
        Goal::none(),
    );
    setup.cluster.stop().await
}

async fn built_in(options: &Options, devices: usize, what: &str) -> anyhow::Result<f64> {
    let setup = start(devices).await?;
    setup.make_template(None).await?;
    let controller = Controller::start(&setup, options).await?;
    let rate = measure(&setup, &controller, USER, &format!("built-in driver, {what}")).await?;
    controller.end().await?;
    setup.cluster.stop().await?;
    Ok(rate)
}

/// A control plane with this many devices.
async fn start(devices: usize) -> anyhow::Result<Setup> {
    let setup = common::start(&FLAGS, false).await?;
    let of_node = |node| devices / NODES + usize::from(node < devices % NODES);
    common::make_nodes(&setup, (0..NODES).map(|node| (node, of_node(node)))).await?;
    // The scheduler learns of nodes through its own watch.
    tokio::time::sleep(Duration::from_secs(3)).await;
    Ok(setup)
}

/// Returns the number of pods bound per second.
async fn measure(setup: &Setup, controller: &Controller, user: &str, what: &str) -> anyhow::Result<f64> {
    let load_before = load();
    let start = Instant::now();
    let create = common::each(0..PODS, |number| async move {
        let pod = pod_with_claim(&format!("pod-{number:03}"))?;
        setup.pods().create(&PostParams::default(), &pod).await?;
        Ok(())
    });
    let bound = count_bound(setup, start + LIMIT);
    let (created, bound) = tokio::join!(create, bound);
    created?;
    let moments: Times = bound?
        .into_iter()
        .map(|moment| moment.duration_since(start))
        .collect();
    let (bound, elapsed) = (moments.len(), moments.quantile(100));
    #[expect(clippy::cast_precision_loss, reason = "some hundreds")]
    let rate = bound as f64 / elapsed.as_secs_f64();
    figure(
        &format!("{PODS} pods at once over {NODES} nodes, {what}"),
        &format!(
            "{bound} bound in {elapsed:.1?}, {rate:.1} pods/s; half of them after {:.1?}, 9 of 10 after {:.1?} (load before: {load_before})",
            moments.median(),
            moments.quantile(90)
        ),
        Goal::is(bound == PODS),
    );
    if bound < PODS {
        explain(setup).await?;
    }
    let entries = requests::of(setup, user).await?;
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

/// Prints the state of the first pods that are not bound.
async fn explain(setup: &Setup) -> anyhow::Result<()> {
    let pods = setup.pods().list(&ListParams::default()).await?.items;
    let unbound: Vec<Pod> = pods
        .into_iter()
        .filter(|pod| pod.spec.node_name.is_none())
        .collect();
    println!("{} pods are not bound; the first of them:", unbound.len());
    for pod in unbound.iter().take(5) {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let claim = match claim_name(Some(pod)) {
            Some(claim) => setup.claims().get_opt(&claim).await?,
            None => None,
        };
        let context = setup.contexts().get_opt(&name).await?;
        let unsuitable = |entries: &[ResourceClaimSchedulingStatus]| {
            entries
                .iter()
                .map(|entry| entry.unsuitable_nodes.len())
                .collect::<Vec<_>>()
        };
        println!(
            "  {name}: claim {:?}, context {:?}",
            claim.map(|claim| (
                claim.metadata.finalizers,
                claim.metadata.deletion_timestamp,
                claim.status
            )),
            context.map(|context| (
                context.spec.selected_node,
                context.spec.potential_nodes.len(),
                unsuitable(&context.status.resource_claims)
            )),
        );
    }
    Ok(())
}

/// Times at which the pods were bound, until all are or the deadline has passed.
async fn count_bound(setup: &Setup, deadline: Instant) -> anyhow::Result<Vec<Instant>> {
    let mut bound = BTreeSet::new();
    let mut moments = Vec::new();
    let mut pods = pin!(watcher(setup.pods(), watcher::Config::default()).applied_objects());
    while moments.len() < PODS {
        let Ok(pod) = timeout_at(deadline, pods.try_next()).await else {
            break;
        };
        let Some(pod): Option<Pod> = pod? else { break };
        if pod.spec.node_name.is_some() && bound.insert(pod.metadata.name) {
            moments.push(Instant::now());
        }
    }
    Ok(moments)
}
