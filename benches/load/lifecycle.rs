//! Requests of a pod's lifecycle, and the latency of its allocation.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use drayman::api::resource::Pod;
use futures::AsyncReadExt as _;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::Options;
use crate::common::{self, Controller, TIMEOUT, USER};
use crate::figures::{Goal, figure};
use crate::requests::{self, Count};
use crate::setup::{Setup, is_bound, is_gone};

/// Pods that finish and are then deleted, one after the other.
const FINISHING: usize = 10;
/// Pods that are deleted while they are bound.
const DELETED: usize = 4;

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let setup = common::start(&[], false).await?;
    setup.make_template(None).await?;
    let controller = Controller::start(&setup, options).await?;
    let mut made = 0;
    for nodes in [1, 16, 128] {
        common::make_nodes(&setup, (made..nodes).map(|node| (node, 2))).await?;
        made = nodes;
        // The scheduler learns of nodes through its own watch.
        sleep(Duration::from_secs(2)).await;
        lifecycles(&setup, nodes).await?;
    }
    bytes(&setup).await?;
    controller.end().await?;
    setup.cluster.stop().await
}

async fn lifecycles(setup: &Setup, nodes: usize) -> anyhow::Result<()> {
    let mut before = requests::of(setup, USER).await?.len();
    for (what, number) in [("finishes", FINISHING), ("is deleted while bound", DELETED)] {
        for index in 0..number {
            one(
                setup,
                &format!("n{nodes}-{}-{index}", &what[..2]),
                what == "finishes",
            )
            .await?;
        }
        // Late requests belong to these pods too.
        sleep(Duration::from_secs(1)).await;
        let entries = requests::of(setup, USER).await?;
        let count = Count::new(entries.iter().skip(before));
        before = entries.len();
        figure(
            &format!("requests of a pod that {what}, N = {nodes}, {number} lives"),
            &count.per(number),
            Goal::is(
                count.writes <= 3 * number
                    && count.reads <= number
                    && count.failures == 0
                    && count.events == 0,
            ),
        );
    }
    let prefix = format!("n{nodes}-");
    let all = setup.cluster.audit().entries().await?;
    let times = requests::allocation_times(&all, USER, |claim| {
        let pod = claim.rsplit_once("-device-").map(|(pod, _)| pod.to_owned())?;
        pod.starts_with(&prefix).then_some(pod)
    });
    figure(
        &format!("context written by the scheduler -> allocation stored, lone pod, N = {nodes}"),
        &times.to_string(),
        Goal::at_most(times.median(), Duration::from_millis(8)),
    );
    figure(
        &format!(
            "of which within the API server, for a read and two writes one after the other, N = {nodes}"
        ),
        &requests::server_times(&all, USER, |pod| pod.starts_with(&prefix)).to_string(),
        Goal::none(),
    );
    let events = Api::<Event>::all(setup.cluster.client())
        .list(&ListParams::default())
        .await?;
    let warnings = |ours: bool| {
        events
            .items
            .iter()
            .filter(|event| event.type_.as_deref() == Some("Warning"))
            .filter(|event| {
                let about = event.involved_object.name.as_deref().unwrap_or_default();
                about.starts_with(&prefix)
            })
            .filter(|event| {
                let source = event
                    .source
                    .as_ref()
                    .and_then(|source| source.component.as_deref());
                let reporter = event.reporting_component.as_deref().or(source);
                ours == reporter.is_some_and(|name| name.contains("drayman"))
            })
            .count()
    };
    figure(
        &format!("Warning events of those pods and claims, N = {nodes}"),
        &format!(
            "{} of the controller, {} of Kubernetes itself",
            warnings(true),
            warnings(false)
        ),
        Goal::is(warnings(true) == 0),
    );
    Ok(())
}

/// Bytes of the one read per pod, compared with a watch of all pods for the same lifecycles.
async fn bytes(setup: &Setup) -> anyhow::Result<()> {
    let whole = WatchTraffic::of_pods(setup, "application/json").await?;
    let metadata = WatchTraffic::of_pods(setup, METADATA_ONLY).await?;
    // A watch starts with the existing objects.
    sleep(Duration::from_secs(1)).await;
    for what in ["finishes", "is deleted while bound"] {
        let (whole_before, metadata_before) = (whole.bytes(), metadata.bytes());
        let mut read = 0;
        for index in 0..DELETED {
            let name = format!("bytes-{}-{index}", &what[..2]);
            read += one(setup, &name, what == "finishes").await?;
        }
        sleep(Duration::from_secs(1)).await;
        let read = read / DELETED;
        let (whole, metadata) = (whole.bytes() - whole_before, metadata.bytes() - metadata_before);
        let (whole, metadata) = (whole / DELETED, metadata / DELETED);
        figure(
            &format!("bytes of a pod that {what}, in its one read, {DELETED} lives"),
            &format!(
                "{read}; {whole} in a watch of all pods, {metadata} in one for metadata alone, where the claims are missing"
            ),
            Goal::is(0 < read && read <= whole),
        );
    }
    Ok(())
}

/// `Accept` header for object metadata only.
const METADATA_ONLY: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// Number of bytes that a watch has received.
struct WatchTraffic {
    bytes: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl WatchTraffic {
    /// Watches the pods of all namespaces, as a controller without single reads would.
    async fn of_pods(setup: &Setup, accept: &str) -> anyhow::Result<Self> {
        let request = http::Request::get("/api/v1/pods?watch=true")
            .header(http::header::ACCEPT, accept)
            .body(Vec::new())?;
        let stream = setup.cluster.client().request_stream(request).await?;
        let bytes = Arc::new(AtomicUsize::new(0));
        let sum = Arc::clone(&bytes);
        let task = tokio::spawn(async move {
            let (mut stream, mut buffer) = (pin!(stream), vec![0; 64 << 10]);
            while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                sum.fetch_add(read, Ordering::Relaxed);
            }
        });
        Ok(Self { bytes, task })
    }

    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for WatchTraffic {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Runs the lifecycle of a pod. Returns the size of the pod as read by the controller, just after its creation.
async fn one(setup: &Setup, name: &str, finishes: bool) -> anyhow::Result<usize> {
    setup.make_pod(name).await?;
    let request = http::Request::get(format!("/api/v1/namespaces/default/pods/{name}")).body(Vec::new())?;
    let read = setup.cluster.client().request_text(request).await?.len();
    setup.wait(setup.pods(), name, "bound", is_bound()).await?;
    let pod: Pod = setup.pods().get(name).await?;
    let claim = crate::setup::claim_name(Some(&pod)).unwrap_or_default();
    if finishes {
        let over = json!({ "status": { "phase": "Succeeded" } });
        setup
            .pods()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(over))
            .await?;
        setup.wait(setup.claims(), &claim, "gone", is_gone()).await?;
        common::remove_pod(&setup.pods(), name).await?;
    } else {
        common::remove_pod(&setup.pods(), name).await?;
        setup.wait(setup.claims(), &claim, "gone", is_gone()).await?;
    }
    let contexts = setup.contexts();
    common::until("the pod's context is gone", TIMEOUT, || async {
        Ok(contexts.get_opt(name).await?.is_none())
    })
    .await?;
    Ok(read)
}
