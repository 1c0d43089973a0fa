//! Several controllers: one leads, and no two ever write for it at once.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use anyhow::Context as _;
use drayman::api::handle::DeviceHandle;
use drayman::api::resource::{Pod, ResourceClaim, ResourceClaimStatus};
use futures::TryStreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use rustix::process::Signal;
use serde_json::json;
use tokio::time::timeout;

use crate::harness::{IMAGE, PATIENCE};

use crate::controller::assert_distinct;
use crate::pods::{CONFIGURATION, MINORS, look_inside, make_devices, wait_for_inventory};
use crate::stage::{DRIVER, FINALIZER, Stage, has_finalizer, is_allocated, is_bound, pod_from};

/// How long the lease of [`Stage::replica`] must be left alone.
const LEASE_DURATION: Duration = Duration::from_secs(7);

/// Who holds the lease, once it is not `other`.
async fn holder(stage: &Stage, other: &str) -> anyhow::Result<String> {
    let api = Api::<Lease>::namespaced(stage.cluster.client(), "kube-system");
    let of = |lease: Option<&Lease>| lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.clone());
    let other = other.to_owned();
    let met =
        move |lease: Option<&Lease>| of(lease).is_some_and(|holder| !holder.is_empty() && holder != other);
    let lease = stage.wait(api, DRIVER, "held by another", met).await?;
    Ok(of(lease.as_ref()).unwrap_or_default())
}

/// The writes to claims and contexts of one controller so far.
async fn writes(stage: &Stage, user: &str) -> anyhow::Result<usize> {
    let entries = stage.cluster.audit().of_user(user).await?;
    Ok(entries
        .iter()
        .filter(|entry| entry.is_write() && entry.group == "resource.k8s.io")
        .count())
}

/// The writes to the status of claims and contexts of one controller that the API server got at `since` or later, and stored.
///
/// A request that was on its way out of the process when it was paused goes out when it goes on: no lease can keep it back. If it
/// allocates, the server refuses it, since the claim has changed meanwhile. Finalizer and label may be stored: what comes of that is
/// tried in `tests/simulation`.
async fn stored_since(stage: &Stage, user: &str, since: Timestamp) -> anyhow::Result<Vec<String>> {
    let mut late = Vec::new();
    for entry in stage.cluster.audit().of_user(user).await? {
        let received: Timestamp = entry.received.parse()?;
        if entry.is_write() && entry.group == "resource.k8s.io" && received >= since {
            let written = format!("{received}: {} {} {}", entry.verb, entry.uri, entry.code);
            let is_status = entry
                .uri
                .split('?')
                .next()
                .is_some_and(|path| path.ends_with("/status"));
            if entry.code < 300 && is_status {
                late.push(written);
            } else {
                println!("after the end of the lease: {written}");
            }
        }
    }
    Ok(late)
}

/// Until when the lease was one controller's: its duration after the last time that the API server took a renewal.
async fn lease_ended(stage: &Stage, user: &str) -> anyhow::Result<Timestamp> {
    let entries = stage.cluster.audit().of_user(user).await?;
    let renewals = entries
        .iter()
        .filter(|entry| entry.resource == "leases" && entry.is_write() && entry.code < 300);
    let last = renewals.map(|entry| entry.completed.as_str()).max();
    let last: Timestamp = last.context("it held the lease")?.parse()?;
    Ok(last + LEASE_DURATION)
}

/// Returns as soon as so many claims have our finalizer.
async fn until_secured(stage: &Stage, count: usize) -> anyhow::Result<()> {
    let mut secured = BTreeSet::new();
    let mut claims = pin!(watcher(stage.claims(), watcher::Config::default()).applied_objects());
    while secured.len() < count {
        let claim = timeout(PATIENCE, claims.try_next()).await??;
        let claim = claim.context("a watch has no end")?;
        if has_finalizer(&claim) {
            secured.insert(claim.metadata.name);
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_paused_leader_stores_nothing_when_it_comes_back() -> anyhow::Result<()> {
    const PODS: usize = 40;
    let stage = Stage::start(0).await?;
    for node in ["node-a", "node-b"] {
        stage.pretend_devices(node, PODS / 2).await?;
    }
    let names: BTreeSet<String> = (0..PODS).map(|number| format!("pod-{number:02}")).collect();
    for name in &names {
        stage.make_claim(name, "WaitForFirstConsumer", false).await?;
    }
    let first = stage.replica("controller-a").await?;
    let leader = holder(&stage, "").await?;
    let second = stage.replica("controller-b").await?;

    // In the middle of its work: of some claims it waits for an answer, of others the news come while it cannot read them.
    let made = async {
        for name in &names {
            stage.make_pod_with(name, name).await?;
        }
        anyhow::Ok(())
    };
    let paused = async {
        until_secured(&stage, 3).await?;
        first.signal(Signal::STOP)
    };
    tokio::try_join!(made, paused)?;
    let claims = stage.claims().list(&ListParams::default()).await?;
    let left = claims.iter().filter(|claim| !is_allocated(claim)).count();
    assert!(left > PODS / 4, "{left} of {PODS} are left to do");
    println!("paused when {left} of {PODS} pods were left to serve");

    let next = holder(&stage, &leader).await?;
    for name in &names {
        stage.wait(stage.pods(), name, "bound", is_bound()).await?;
    }
    let end = lease_ended(&stage, "controller-a").await?;
    assert!(end < Timestamp::now(), "the other one has led since");
    first.signal(Signal::CONT)?;
    let status = first.ended().await?;
    assert_eq!(
        status.code(),
        Some(1),
        "a leader that was paused past its lease ends"
    );
    stage.make_claim("after", "Immediate", false).await?;
    let met = |claim: Option<&ResourceClaim>| claim.is_some_and(is_allocated);
    stage.remove_pod("pod-00").await?;
    stage.delete_claim("pod-00").await?;
    stage.wait(stage.claims(), "after", "allocated", met).await?;
    assert!(writes(&stage, "controller-a").await? > 0, "it led");
    assert_eq!(
        stored_since(&stage, "controller-a", end).await?,
        Vec::<String>::new(),
        "no allocation was stored after the end of its lease, {end}"
    );
    assert!(stored_since(&stage, "controller-b", end).await?.len() >= left);
    assert_eq!(holder(&stage, "").await?, next);
    assert_distinct(&stage).await?;
    second.end().await?;
    stage.cluster.stop().await
}

#[tokio::test]
async fn a_leader_hands_over_under_load_without_double_allocation() -> anyhow::Result<()> {
    const PODS: usize = 24;
    let stage = Stage::start(0).await?;
    for node in ["node-a", "node-b"] {
        stage.pretend_devices(node, PODS / 2).await?;
    }
    stage.make_template(None).await?;
    let first = stage.replica("controller-a").await?;
    let leader = holder(&stage, "").await?;
    let second = stage.replica("controller-b").await?;
    let names: BTreeSet<String> = (0..PODS).map(|number| format!("pod-{number:02}")).collect();
    for name in &names {
        stage.make_pod(name).await?;
        if name == "pod-08" {
            first.signal(Signal::TERM)?;
        }
    }
    let status = first.ended().await?;
    assert!(status.success(), "{status}");
    holder(&stage, &leader).await?;
    for name in &names {
        stage.wait(stage.pods(), name, "bound", is_bound()).await?;
    }
    // Exactly enough devices: one that was given twice or lost would leave a pod without.
    assert_distinct(&stage).await?;
    assert!(writes(&stage, "controller-b").await? > 0);
    second.end().await?;
    stage.cluster.stop().await
}

/// A pod that no scheduler looks at, with a claim of the same name that our finalizer protects already.
async fn unscheduled(stage: &Stage, name: &str) -> anyhow::Result<Pod> {
    let claim = json!({
        "metadata": { "name": name, "finalizers": [FINALIZER] },
        "spec": { "resourceClassName": "test" },
    });
    stage
        .claims()
        .create(&PostParams::default(), &serde_json::from_value(claim)?)
        .await?;
    let pod = pod_from(json!({
        "metadata": { "name": name },
        "spec": {
            "schedulerName": "nobody",
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimName": name } }],
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "resources": { "claims": [{ "name": "device" }] } }],
            "terminationGracePeriodSeconds": 1,
        },
    }))?;
    Ok(stage.pods().create(&PostParams::default(), &pod).await?)
}

/// Writes what an earlier leader would that was paused just before: the allocation of another claim, for this pod's.
async fn late_write(stage: &Stage, pod: &Pod, first: &ResourceClaim) -> anyhow::Result<()> {
    let name = pod.metadata.name.as_deref().context("a name")?;
    let claim = stage.claims().get(name).await?;
    let mut allocation = first.status.allocation.clone().context("an allocation")?;
    let handle = &mut allocation.resource_handles[0];
    let mut devices = DeviceHandle::parse(handle.data.as_deref().unwrap_or_default())?;
    devices.claim_uid = claim.metadata.uid.unwrap_or_default();
    handle.data = Some(devices.to_data()?);
    let user = json!({ "resource": "pods", "name": name, "uid": pod.metadata.uid });
    let status = json!({ "allocation": allocation, "driverName": DRIVER, "reservedFor": [user] });
    let patch = Patch::Merge(json!({ "status": status }));
    stage
        .claims()
        .patch_status(name, &PatchParams::default(), &patch)
        .await
        .map(drop)?;
    Ok(())
}

#[tokio::test]
async fn a_double_allocation_is_rolled_back_or_refused_at_the_node() -> anyhow::Result<()> {
    let stage = Stage::start(1).await?;
    let node = stage.cluster.node(0);
    make_devices(node, "drayman-test", &MINORS[..1])?;
    stage.make_template(None).await?;
    let mut controller = stage.controller()?;
    let companion = stage.companion(0, CONFIGURATION)?;
    wait_for_inventory(&stage, 0, 1).await?;
    stage.make_pod("first").await?;
    look_inside(&stage, "first").await?;
    let first = stage.claim_of("first", "allocated", is_allocated).await?;

    // A pod without a node: it cannot be using it yet, and loses it together with its reservation.
    let unbound = unscheduled(&stage, "unbound").await?;
    late_write(&stage, &unbound, &first).await?;
    let taken_back = |claim: Option<&ResourceClaim>| {
        claim.is_some_and(|claim| claim.status == ResourceClaimStatus::default())
    };
    stage
        .wait(stage.claims(), "unbound", "taken back", taken_back)
        .await?;
    let name = first.metadata.name.as_deref().unwrap_or_default();
    for reason in ["ResourceClaim", "Pod"] {
        let told = stage.wait_for_event("unbound", "DeviceHeldTwice", name).await?;
        assert_eq!(told.type_.as_deref(), Some("Warning"), "{reason}");
    }
    assert_distinct(&stage).await?;

    // A pod that got its node before anybody noticed: the node does not prepare it.
    controller.kill().await?;
    let bound = unscheduled(&stage, "bound").await?;
    late_write(&stage, &bound, &first).await?;
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": { "name": "bound" },
        "target": { "apiVersion": "v1", "kind": "Node", "name": node.name() },
    });
    stage
        .pods()
        .create_subresource::<_, serde_json::Value>("binding", "bound", &PostParams::default(), &binding)
        .await?;
    companion.logged("is held by").await?;
    if stage.cluster.minor() >= 28 {
        // kubelet says it on the pod since then.
        stage
            .wait_for_event("bound", "FailedPrepareDynamicResources", "is held by")
            .await?;
    }
    let controller = stage.controller()?;
    stage.wait_for_event("bound", "DeviceHeldTwice", name).await?;
    let claim = stage.claims().get("bound").await?;
    assert!(
        is_allocated(&claim),
        "nothing is taken from under a pod that has a node"
    );
    look_inside(&stage, "first").await?;
    stage.remove_pod("bound").await?;
    stage
        .wait(stage.claims(), "bound", "given back", taken_back)
        .await?;
    assert!(
        is_allocated(&stage.claims().get(name).await?),
        "the older one stands"
    );
    controller.end().await?;
    companion.end().await?;
    stage.cluster.stop().await
}
