//! Several controllers: one leads, and no two ever write for it at once.

use std::collections::BTreeSet;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use rustix::process::Signal;

use crate::controller::assert_distinct;
use crate::stage::{DRIVER, Stage, is_bound};

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

#[tokio::test]
async fn a_paused_leader_writes_nothing_when_it_comes_back_and_ends() -> anyhow::Result<()> {
    let stage = Stage::start(0).await?;
    stage.pretend_devices("node-a", 4).await?;
    stage.make_template(None).await?;
    let first = stage.replica("controller-a").await?;
    let leader = holder(&stage, "").await?;
    stage.make_pod("before").await?;
    stage.wait(stage.pods(), "before", "bound", is_bound()).await?;
    let second = stage.replica("controller-b").await?;

    first.signal(Signal::STOP)?;
    let before = writes(&stage, "controller-a").await?;
    assert!(before > 0, "the first one led");
    let next = holder(&stage, &leader).await?;
    stage.make_pod("during").await?;
    stage.wait(stage.pods(), "during", "bound", is_bound()).await?;
    first.signal(Signal::CONT)?;
    let status = first.ended().await?;
    assert_eq!(
        status.code(),
        Some(1),
        "a leader that was paused past its lease ends"
    );
    stage.make_pod("after").await?;
    stage.wait(stage.pods(), "after", "bound", is_bound()).await?;
    assert_eq!(
        writes(&stage, "controller-a").await?,
        before,
        "and has written nothing any more"
    );
    assert_eq!(holder(&stage, "").await?, next);
    assert_distinct(&stage).await?;
    second.end().await?;
    stage.cluster.stop().await
}

#[tokio::test]
async fn a_leader_that_is_asked_to_end_hands_over_under_load_without_a_double_allocation()
-> anyhow::Result<()> {
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
