//! Many pods at once, with companions and without.
//!
//! The scheduler allocates from the stored slices in both cases, so the run without companions shows its own limit. Fake kubelets read the
//! claim of each bound pod, as real ones do, and call Prepare if there are companions.
//!
//! Control plane and nodes have processors of their own, as in a cluster. Otherwise the figure would be the CPU time of the
//! companions.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use drayman::api::proto::dra_v1::dra_plugin_client::DraPluginClient;
use drayman::api::proto::dra_v1::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use drayman::api::resource::Pod;
use drayman::node::driver::{ContainerEdits, Device, NodeDriver, NodeDriverError};
use drayman::node::{KubeletPaths, Node, NodeError};
use futures::{Stream, TryStreamExt as _, stream};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::common::{self, TIMEOUT, node_name};
use crate::figures::{Goal, Times, figure};
use crate::fixture::{Slices, claims, make_class, one_device};
use crate::harness::{Cluster, IMAGE};
use crate::setup::{DRIVER, Setup, claim_name, pod_from};

const PODS: usize = 500;
const NODES: usize = 16;
/// 16 × 34 devices: 44 more than pods.
const DEVICES: usize = 34;
/// Bursts of each sort, alternating.
const ROUNDS: usize = 3;
/// The claim controller creates and releases a claim per pod; its default QPS of 20 would limit the result.
const FLAGS: [&str; 3] = [
    "--kube-api-qps=2000",
    "--kube-api-burst=4000",
    "--node-monitor-grace-period=24h",
];

pub(crate) async fn run() -> anyhow::Result<()> {
    println!("flags of the controller manager: {FLAGS:?}; scheduler: qps 1000, burst 1000");
    let cluster = FLAGS.iter().fold(Cluster::structured(), |cluster, flag| {
        cluster.flag("controller-manager", flag)
    });
    let processors = std::thread::available_parallelism()?.get();
    ensure!(
        processors > 1,
        "the control plane and the nodes need a processor each"
    );
    let half = processors / 2;
    // The processes of the cluster inherit it.
    run_on(0..half)?;
    let cluster = cluster.start().await?;
    run_on(half..processors)?;
    println!("control plane on {half} of {processors} processors, nodes on the others");
    measure(cluster).await?;
    run_on(0..processors)
}

/// Restricts this process to some processors.
fn run_on(processors: Range<usize>) -> anyhow::Result<()> {
    let (first, last) = (processors.start, processors.end - 1);
    let set = Command::new("taskset")
        .args(["--all-tasks", "--pid", "--cpu-list", &format!("{first}-{last}")])
        .arg(std::process::id().to_string())
        .stdout(Stdio::null())
        .status()
        .context("taskset, of util-linux")?;
    ensure!(set.success(), "taskset: {set}");
    Ok(())
}

async fn measure(cluster: Cluster) -> anyhow::Result<()> {
    let setup = Setup::structured(cluster).await?;
    make_class(&setup, "test", "test").await?;
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": { "name": "test" },
            "spec": { "spec": one_device() },
        }))
        .await?;
    for node in 0..NODES {
        setup.make_fake_node(&node_name(node)).await?;
    }
    let directory = tempfile::tempdir()?;
    // A warm-up, which also creates the slices.
    with_companions(&setup, &directory).await?;
    let (mut with, mut without, mut prepares) = (Times::default(), Times::default(), Times::default());
    for _ in 0..ROUNDS {
        without.push(burst(&setup, &[]).await?.0);
        let (time, calls) = with_companions(&setup, &directory).await?;
        with.push(time);
        for call in calls {
            prepares.push(call);
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let rate = |times: &Times| (times.len() * PODS) as f64 / times.sum().as_secs_f64();
    let (with_rate, without_rate) = (rate(&with), rate(&without));
    figure(
        &format!("{PODS} pods at once over {NODES} nodes, {ROUNDS} times with companions and without"),
        &format!(
            "{with_rate:.1} pods/s with ({with:.1?}), {without_rate:.1} without ({without:.1?}): {:.0} %",
            100.0 * with_rate / without_rate
        ),
        Goal::is(with_rate >= 0.95 * without_rate),
    );
    figure(
        "Prepare meanwhile, seen by the pretended kubelets",
        &prepares.to_string(),
        Goal::none(),
    );
    setup.cluster.stop().await
}

/// A driver whose devices do not exist.
struct FakeDriver;

impl NodeDriver for FakeDriver {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        let device = |number| Device {
            name: format!("device-{number}"),
            kind: "test".to_owned(),
            ..Device::default()
        };
        stream::iter([(0..DEVICES).map(device).collect()])
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        let environment = [("DEVICE".to_owned(), device.to_owned())].into();
        Ok(ContainerEdits {
            environment,
            ..ContainerEdits::default()
        })
    }
}

/// A burst with a companion for each node. They end afterwards and leave their slices.
async fn with_companions(setup: &Setup, directory: &TempDir) -> anyhow::Result<(Duration, Vec<Duration>)> {
    let shutdown = CancellationToken::new();
    let _stop = shutdown.clone().drop_guard();
    let mut companions: JoinSet<Result<(), NodeError>> = JoinSet::new();
    let mut kubelets = Vec::new();
    for node in 0..NODES {
        let root = directory.path().join(node.to_string());
        let paths = KubeletPaths {
            root_dir: root.clone(),
            device_plugin_dir: root.join("device-plugins"),
        };
        std::fs::create_dir_all(&paths.device_plugin_dir)?;
        let client = setup.cluster.client_of(setup.node_kubeconfig()).await?;
        let companion = Node::builder(FakeDriver, node_name(node), client)
            .driver_name(DRIVER)
            .cdi_dir(root.join("cdi"))
            .kubelet(paths);
        companions.spawn(companion.run(shutdown.clone()));
        kubelets.push(Kubelet::connect(root.join(format!("plugins/{DRIVER}/dra.sock"))).await?);
    }
    Slices::watch(setup)
        .until("complete", |slices| slices.len() == NODES)
        .await?;
    let bound = burst(setup, &kubelets).await?;
    shutdown.cancel();
    while let Some(ended) = companions.join_next().await {
        ended??;
    }
    Ok(bound)
}

/// Creates the pods, and returns the time until the last one is bound and the durations of Prepare. Deletes the pods.
async fn burst(setup: &Setup, kubelets: &[Kubelet]) -> anyhow::Result<(Duration, Vec<Duration>)> {
    let start = Instant::now();
    let create = common::each(0..PODS, |number| async move {
        let pod = pod_from(json!({
            "metadata": { "name": format!("pod-{number:03}") },
            "spec": {
                "resourceClaims": [{ "name": "claim", "resourceClaimTemplateName": "test" }],
                "containers": [{ "name": "main", "image": IMAGE, "resources": { "claims": [{ "name": "claim" }] } }],
            },
        }))?;
        setup.pods().create(&PostParams::default(), &pod).await?;
        Ok(())
    });
    let (created, bound) = tokio::join!(create, prepare_bound(setup, kubelets));
    created?;
    let (last, prepared) = bound?;
    let mut times = Vec::new();
    for (kubelet, claim, time) in prepared {
        if let Some(mut kubelet) = kubelet {
            kubelet.unprepare(claim).await?;
            times.push(time);
        }
    }
    let at_once = DeleteParams::default().grace_period(0);
    setup
        .pods()
        .delete_collection(&at_once, &ListParams::default())
        .await?;
    common::until("the claims are gone", TIMEOUT, || async {
        Ok(claims(setup)
            .list(&ListParams::default().limit(1))
            .await?
            .items
            .is_empty())
    })
    .await?;
    Ok((last.duration_since(start), times))
}

type Prepared = (Option<Kubelet>, Claim, Duration);

/// Prepares the claim of each bound pod. Returns when the last one was bound.
async fn prepare_bound(setup: &Setup, kubelets: &[Kubelet]) -> anyhow::Result<(Instant, Vec<Prepared>)> {
    let mut pods = pin!(watcher(setup.pods(), watcher::Config::default()).applied_objects());
    let mut bound = BTreeSet::new();
    let mut last = Instant::now();
    let mut calls: JoinSet<anyhow::Result<Prepared>> = JoinSet::new();
    while bound.len() < PODS {
        let pod: Pod = timeout(TIMEOUT, pods.try_next())
            .await
            .with_context(|| format!("{} pods are bound", bound.len()))??
            .context("the watch has ended")?;
        let Some(node) = pod.spec.node_name.clone() else {
            continue;
        };
        if !bound.insert(pod.metadata.name.clone()) {
            continue;
        }
        last = Instant::now();
        let number: usize = node.rsplit('-').next().unwrap_or_default().parse()?;
        let (claims, kubelet) = (claims(setup), kubelets.get(number).cloned());
        calls.spawn(async move {
            let name = claim_name(Some(&pod)).context("a claim")?;
            let claim = claims.get(&name).await?.metadata;
            let claim = Claim {
                namespace: claim.namespace.unwrap_or_default(),
                uid: claim.uid.unwrap_or_default(),
                name,
            };
            let start = Instant::now();
            let mut kubelet = kubelet;
            if let Some(kubelet) = &mut kubelet {
                kubelet.prepare(claim.clone()).await?;
            }
            Ok((kubelet, claim, start.elapsed()))
        });
    }
    let prepared = calls.join_all().await;
    Ok((last, prepared.into_iter().collect::<anyhow::Result<_>>()?))
}

/// The calls of a fake kubelet.
#[derive(Clone)]
struct Kubelet(DraPluginClient<Channel>);

impl Kubelet {
    async fn connect(socket: PathBuf) -> anyhow::Result<Self> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        common::until("the companion listens", TIMEOUT, || async {
            Ok(endpoint.connect().await.is_ok())
        })
        .await?;
        Ok(Self(DraPluginClient::new(endpoint.connect().await?)))
    }

    async fn prepare(&mut self, claim: Claim) -> anyhow::Result<()> {
        let claims = vec![claim];
        let answer = self
            .0
            .node_prepare_resources(NodePrepareResourcesRequest { claims });
        let entries = answer.await?.into_inner().claims;
        let result = entries
            .into_iter()
            .next()
            .and_then(|entry| entry.value)
            .context("an entry")?;
        ensure!(result.error.is_empty(), "{}", result.error);
        Ok(())
    }

    async fn unprepare(&mut self, claim: Claim) -> anyhow::Result<()> {
        let claims = vec![claim];
        let answer = self
            .0
            .node_unprepare_resources(NodeUnprepareResourcesRequest { claims });
        let entries = answer.await?.into_inner().claims;
        let result = entries
            .into_iter()
            .next()
            .and_then(|entry| entry.value)
            .context("an entry")?;
        ensure!(result.error.is_empty(), "{}", result.error);
        Ok(())
    }
}
