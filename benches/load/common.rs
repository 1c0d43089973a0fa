//! Common parts of the scenarios: nodes that exist only in the API, many objects, and the controller under test.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use drayman::api::resource::{Pod, PodSchedulingContext, ResourceClaim};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::Child;
use tokio::time::{Instant, sleep};

use crate::Options;
use crate::figures::resident_kib_of;
use crate::harness::{Cluster, IMAGE};
use crate::setup::{DRIVER, FINALIZER, Setup, pod_from, replica_rules};

/// The user name of the controller under test.
pub(crate) const USER: &str = "drayman-load";
/// Maximum number of concurrent requests of the load itself.
const WIDTH: usize = 32;
/// Timeout of waits that usually take moments.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// A controller under test.
#[derive(Debug)]
pub(crate) struct Controller {
    child: Child,
    /// Start time, by the clock of the audit log.
    pub(crate) started: jiff::Timestamp,
}

impl Controller {
    /// Starts `drayman controller` with a lease, as the chart does.
    pub(crate) async fn start(setup: &Setup, options: &Options) -> anyhow::Result<Self> {
        Self::start_with(setup, options, &[]).await
    }

    /// As [`Controller::start`], with more flags.
    pub(crate) async fn start_with(setup: &Setup, options: &Options, flags: &[&str]) -> anyhow::Result<Self> {
        let lease = ["--leader-elect", "--leader-elect-resource-namespace=default"];
        let arguments = [&["controller"][..], &lease, flags, &["--kubeconfig"]].concat();
        Self::spawn(setup, &options.program, USER, &arguments).await
    }

    /// Starts a controller as its own user. Its last argument is the kubeconfig.
    pub(crate) async fn spawn(
        setup: &Setup,
        program: &Path,
        user: &str,
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        let kubeconfig = setup.cluster.user(user, &replica_rules()?).await?;
        let log = setup.cluster.directory().join(format!("{user}.log"));
        let mut command = setup.cluster.command(program);
        // As in the image.
        command.env("MALLOC_ARENA_MAX", "1");
        command.args(arguments).arg(kubeconfig);
        command
            .stdout(Stdio::null())
            .stderr(std::fs::File::options().create(true).append(true).open(log)?);
        let started = jiff::Timestamp::now();
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self { child, started })
    }

    /// Current and peak memory in KiB.
    pub(crate) fn resident_kib(&self) -> (u64, u64) {
        let process = self.child.id().map(|id| id.to_string()).unwrap_or_default();
        (
            resident_kib_of(&process, "VmRSS:"),
            resident_kib_of(&process, "VmHWM:"),
        )
    }

    /// Processor time used so far.
    pub(crate) fn processor_time(&self) -> Duration {
        // Clock ticks of a hundredth of a second, as on all supported architectures.
        let process = self.child.id().map(|id| id.to_string()).unwrap_or_default();
        let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let fields = text.rsplit(')').next().unwrap_or_default();
        let ticks: u64 = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        Duration::from_millis(ticks * 10)
    }

    /// Stops the controller and waits for its end.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        let id = self.child.id().and_then(|id| i32::try_from(id).ok());
        let Some(id) = id.and_then(Pid::from_raw) else {
            bail!("the controller has ended by itself")
        };
        kill_process(id, Signal::TERM)?;
        self.child.wait().await?;
        Ok(())
    }
}

/// A control plane for a scenario, with more flags for its components.
pub(crate) async fn start(flags: &[(&str, &str)], bodies: bool) -> anyhow::Result<Setup> {
    // Nodes that exist only in the API have no heartbeats.
    let mut builder = Cluster::builder().flag("controller-manager", "--node-monitor-grace-period=24h");
    for (component, flag) in flags {
        builder = builder.flag(component, flag);
    }
    if bodies {
        builder = builder.audit_bodies();
    }
    Setup::prepare(builder.start().await?).await
}

/// Sets the scheduler's backoff for pods.
pub(crate) async fn set_backoff(setup: &Setup, first: u32, longest: u32) -> anyhow::Result<()> {
    let path = setup.cluster.directory().join("scheduler.yaml");
    let text = std::fs::read_to_string(&path)?;
    let backoff = format!("podInitialBackoffSeconds: {first}\npodMaxBackoffSeconds: {longest}\n");
    std::fs::write(&path, text + &backoff)?;
    setup.cluster.stop_component("scheduler", 15).await?;
    setup.cluster.start_component("scheduler").await
}

/// Runs a function for each number, a few at a time.
pub(crate) async fn each<F, T>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> F,
) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    stream::iter(items)
        .map(work)
        .buffer_unordered(WIDTH)
        .try_collect::<()>()
        .await
}

pub(crate) fn node_name(number: usize) -> String {
    format!("node-{number:05}")
}

/// Creates nodes with this many devices each.
pub(crate) async fn make_nodes(
    setup: &Setup,
    nodes: impl IntoIterator<Item = (usize, usize)>,
) -> anyhow::Result<()> {
    each(nodes, |(node, devices)| async move {
        setup.make_fake_devices(&node_name(node), devices).await
    })
    .await
}

/// A pod that no scheduler handles, as the owner of other objects.
pub(crate) fn held_pod(name: &str, claim: &str) -> anyhow::Result<Pod> {
    pod_from(json!({
        "metadata": { "name": name },
        "spec": {
            "schedulingGates": [{ "name": "example.com/held" }],
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimName": claim } }],
            "containers": [{ "name": "main", "image": IMAGE, "resources": { "claims": [{ "name": "device" }] } }],
        },
    }))
}

/// The scheduling context of a pod as created by the scheduler, with or without a selected node.
pub(crate) fn context_of(
    pod: &Pod,
    selected: Option<&str>,
    potential: &[String],
) -> anyhow::Result<PodSchedulingContext> {
    let mut spec = json!({ "potentialNodes": potential });
    if let Some(node) = selected {
        spec["selectedNode"] = json!(node);
    }
    Ok(serde_json::from_value(json!({
        "metadata": { "name": pod.metadata.name, "ownerReferences": [owner(pod)] },
        "spec": spec,
    }))?)
}

fn owner(pod: &Pod) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid,
        "controller": true, "blockOwnerDeletion": true })
}

/// Creates the claim of `pod` number `number` as allocated by the controller: with finalizer, device and reservation.
pub(crate) async fn make_allocated(
    setup: &Setup,
    number: usize,
    pod: &Pod,
    (node, node_uid, device): (&str, &str, &str),
) -> anyhow::Result<()> {
    let api = setup.claims();
    let name = format!("bound-{number:05}-device");
    let claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": {
            "name": name, "finalizers": [FINALIZER], "ownerReferences": [owner(pod)],
            "annotations": { "resource.kubernetes.io/pod-claim-name": "device" },
        },
        "spec": { "resourceClassName": "test" },
    }))?;
    let made = api.create(&PostParams::default(), &claim).await?;
    let uid = made.metadata.uid.context("a claim has a uid")?;
    let data = json!({ "version": 1, "claimUid": uid, "nodeName": node, "nodeUid": node_uid,
        "devices": [{ "request": "device", "device": device }] });
    let status = json!({ "status": {
        "driverName": DRIVER,
        "allocation": {
            "resourceHandles": [{ "driverName": DRIVER, "data": data.to_string() }],
            "availableOnNodes": { "nodeSelectorTerms": [{ "matchFields": [
                { "key": "metadata.name", "operator": "In", "values": [node] }] }] },
        },
        "reservedFor": [{ "resource": "pods", "name": pod.metadata.name, "uid": pod.metadata.uid }],
    } });
    api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
        .await?;
    Ok(())
}

/// Waits until a condition holds.
pub(crate) async fn until<F>(what: &str, limit: Duration, check: impl Fn() -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<bool>>,
{
    let deadline = Instant::now() + limit;
    while !check().await? {
        if Instant::now() > deadline {
            bail!("not within {limit:?}: {what}");
        }
        sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Deletes a pod without a grace period, as kubelet does once the containers have ended.
pub(crate) async fn remove_pod(pods: &Api<Pod>, name: &str) -> anyhow::Result<()> {
    pods.delete(name, &DeleteParams::default().grace_period(0))
        .await
        .map(drop)?;
    Ok(())
}
