//! Several controllers: one leads, and never two write at once.

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

use crate::harness::{IMAGE, TIMEOUT};

use crate::controller::assert_distinct;
use crate::pods::{look_inside, start_node};
use crate::setup::{DRIVER, FINALIZER, Setup, has_finalizer, is_allocated, pod_from};

/// Time without renewal after which the lease of [`Setup::replica`] expires.
const LEASE_DURATION: Duration = Duration::from_secs(12);

/// Waits until `other` does not hold the lease, and returns the holder.
async fn holder(setup: &Setup, other: &str) -> anyhow::Result<String> {
    let api = Api::<Lease>::namespaced(setup.cluster.client(), "kube-system");
    let of = |lease: Option<&Lease>| lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.clone());
    let other = other.to_owned();
    let met =
        move |lease: Option<&Lease>| of(lease).is_some_and(|holder| !holder.is_empty() && holder != other);
    let lease = setup.wait(api, DRIVER, "held by another", met).await?;
    Ok(of(lease.as_ref()).unwrap_or_default())
}

/// Number of writes of one controller to claims and contexts.
async fn writes(setup: &Setup, user: &str) -> anyhow::Result<usize> {
    let entries = setup.cluster.audit().of_user(user).await?;
    Ok(entries
        .iter()
        .filter(|entry| entry.is_write() && entry.group == "resource.k8s.io")
        .count())
}

/// Status writes of one controller to claims and contexts that the API server received at `since` or later and stored.
///
/// A request that is already on the wire when the process is paused is sent when it resumes, regardless of the lease. The server refuses an
/// allocation, because the claim has changed meanwhile. It may store a finalizer and a label; `tests/simulation` covers their effect.
async fn stored_since(setup: &Setup, user: &str, since: Timestamp) -> anyhow::Result<Vec<String>> {
    let mut late = Vec::new();
    for entry in setup.cluster.audit().of_user(user).await? {
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

/// The end of a controller's lease: the last renewal that the API server accepted, plus the duration.
async fn lease_ended(setup: &Setup, user: &str) -> anyhow::Result<Timestamp> {
    let entries = setup.cluster.audit().of_user(user).await?;
    let renewals = entries
        .iter()
        .filter(|entry| entry.resource == "leases" && entry.is_write() && entry.code < 300);
    let last = renewals.map(|entry| entry.completed.as_str()).max();
    let last: Timestamp = last.context("it held the lease")?.parse()?;
    Ok(last + LEASE_DURATION)
}

/// Waits until `count` claims have our finalizer.
async fn until_finalizers(setup: &Setup, count: usize) -> anyhow::Result<()> {
    let mut secured = BTreeSet::new();
    let mut claims = pin!(watcher(setup.claims(), watcher::Config::default()).applied_objects());
    while secured.len() < count {
        let claim = timeout(TIMEOUT, claims.try_next()).await??;
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
    let setup = Setup::start(0).await?;
    for node in ["node-a", "node-b"] {
        setup.make_fake_devices(node, PODS / 2).await?;
    }
    let names: BTreeSet<String> = (0..PODS).map(|number| format!("pod-{number:02}")).collect();
    for name in &names {
        setup.make_claim(name, "WaitForFirstConsumer", false).await?;
    }
    let first = setup.replica("controller-a").await?;
    let leader = holder(&setup, "").await?;
    let second = setup.replica("controller-b").await?;

    // In the middle of its work: it waits for answers about some claims, and misses events of others while it is stopped.
    let made = async {
        for name in &names {
            setup.make_pod_with(name, name).await?;
        }
        anyhow::Ok(())
    };
    let paused = async {
        until_finalizers(&setup, 3).await?;
        first.signal(Signal::STOP)
    };
    tokio::try_join!(made, paused)?;
    let claims = setup.claims().list(&ListParams::default()).await?;
    let left = claims.iter().filter(|claim| !is_allocated(claim)).count();
    assert!(left > PODS / 4, "{left} of {PODS} are left to do");
    println!("paused when {left} of {PODS} pods were left to serve");

    let next = holder(&setup, &leader).await?;
    for name in &names {
        setup.until_bound(name).await?;
    }
    let end = lease_ended(&setup, "controller-a").await?;
    assert!(end < Timestamp::now(), "the other one leads since then");
    first.signal(Signal::CONT)?;
    let status = first.ended().await?;
    assert_eq!(
        status.code(),
        Some(1),
        "a leader that was paused longer than its lease exits"
    );
    setup.make_claim("after", "Immediate", false).await?;
    setup.remove_pod("pod-00").await?;
    setup.delete_claim("pod-00").await?;
    setup.until_allocated("after").await?;
    assert!(writes(&setup, "controller-a").await? > 0, "it led");
    assert_eq!(
        stored_since(&setup, "controller-a", end).await?,
        Vec::<String>::new(),
        "no allocation was stored after the end of its lease, {end}"
    );
    assert!(stored_since(&setup, "controller-b", end).await?.len() >= left);
    assert_eq!(holder(&setup, "").await?, next);
    assert_distinct(&setup).await?;
    setup.end([second]).await
}

#[tokio::test]
async fn a_leader_hands_over_under_load_without_double_allocation() -> anyhow::Result<()> {
    const PODS: usize = 24;
    let setup = Setup::start(0).await?;
    for node in ["node-a", "node-b"] {
        setup.make_fake_devices(node, PODS / 2).await?;
    }
    setup.make_template(None).await?;
    let first = setup.replica("controller-a").await?;
    let leader = holder(&setup, "").await?;
    let second = setup.replica("controller-b").await?;
    let names: BTreeSet<String> = (0..PODS).map(|number| format!("pod-{number:02}")).collect();
    for name in &names {
        setup.make_pod(name).await?;
        if name == "pod-08" {
            first.signal(Signal::TERM)?;
        }
    }
    let status = first.ended().await?;
    assert!(status.success(), "{status}");
    holder(&setup, &leader).await?;
    for name in &names {
        setup.until_bound(name).await?;
    }
    // Exactly enough devices: a device that is allocated twice or lost would leave a pod without one.
    assert_distinct(&setup).await?;
    assert!(writes(&setup, "controller-b").await? > 0);
    setup.end([second]).await
}

/// A pod that no scheduler handles, with a claim of the same name that already has our finalizer.
async fn unscheduled(setup: &Setup, name: &str) -> anyhow::Result<Pod> {
    let claim = json!({
        "metadata": { "name": name, "finalizers": [FINALIZER] },
        "spec": { "resourceClassName": "test" },
    });
    setup
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
    Ok(setup.pods().create(&PostParams::default(), &pod).await?)
}

/// Makes the delayed write of an earlier, paused leader: the allocation of another claim, for this pod's claim.
async fn late_write(setup: &Setup, pod: &Pod, first: &ResourceClaim) -> anyhow::Result<()> {
    let name = pod.metadata.name.as_deref().context("a name")?;
    let claim = setup.claims().get(name).await?;
    let mut allocation = first.status.allocation.clone().context("an allocation")?;
    let handle = &mut allocation.resource_handles[0];
    let mut devices = DeviceHandle::parse(handle.data.as_deref().unwrap_or_default())?;
    devices.claim_uid = claim.metadata.uid.unwrap_or_default();
    handle.data = Some(devices.to_data()?);
    let user = json!({ "resource": "pods", "name": name, "uid": pod.metadata.uid });
    let status = json!({ "allocation": allocation, "driverName": DRIVER, "reservedFor": [user] });
    let patch = Patch::Merge(json!({ "status": status }));
    setup
        .claims()
        .patch_status(name, &PatchParams::default(), &patch)
        .await
        .map(drop)?;
    Ok(())
}

#[tokio::test]
async fn a_double_allocation_is_rolled_back_or_refused_at_the_node() -> anyhow::Result<()> {
    let (setup, mut controller, companion) = start_node(1).await?;
    let node = setup.cluster.node(0);
    setup.make_pod("first").await?;
    look_inside(&setup, "first").await?;
    let first = setup.claim_of("first", "allocated", is_allocated).await?;

    // A pod without a node cannot be using the claim yet; the allocation and the reservation are removed.
    let unbound = unscheduled(&setup, "unbound").await?;
    late_write(&setup, &unbound, &first).await?;
    let rolled_back = |claim: Option<&ResourceClaim>| {
        claim.is_some_and(|claim| claim.status == ResourceClaimStatus::default())
    };
    setup
        .wait(setup.claims(), "unbound", "rolled back", rolled_back)
        .await?;
    let name = first.metadata.name.as_deref().unwrap_or_default();
    for reason in ["ResourceClaim", "Pod"] {
        let event = setup.wait_for_event("unbound", "DeviceHeldTwice", name).await?;
        assert_eq!(event.type_.as_deref(), Some("Warning"), "{reason}");
    }
    assert_distinct(&setup).await?;

    // A pod that was bound before the conflict was noticed: the node does not prepare its claim.
    controller.kill().await?;
    let bound = unscheduled(&setup, "bound").await?;
    late_write(&setup, &bound, &first).await?;
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": { "name": "bound" },
        "target": { "apiVersion": "v1", "kind": "Node", "name": node.name() },
    });
    setup
        .pods()
        .create_subresource::<_, serde_json::Value>("binding", "bound", &PostParams::default(), &binding)
        .await?;
    companion.logged("is held by").await?;
    if setup.cluster.minor() >= 28 {
        // Since 1.28, kubelet reports it as an event of the pod.
        setup
            .wait_for_event("bound", "FailedPrepareDynamicResources", "is held by")
            .await?;
    }
    let controller = setup.controller()?;
    setup.wait_for_event("bound", "DeviceHeldTwice", name).await?;
    let claim = setup.claims().get("bound").await?;
    assert!(is_allocated(&claim), "a bound pod keeps its allocation");
    look_inside(&setup, "first").await?;
    setup.remove_pod("bound").await?;
    setup
        .wait(setup.claims(), "bound", "deallocated", rolled_back)
        .await?;
    assert!(
        is_allocated(&setup.claims().get(name).await?),
        "the older allocation is kept"
    );
    setup.end([controller, companion]).await
}
