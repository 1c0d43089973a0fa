//! The companion is replaced as in a rolling update with `maxSurge`, while pods come and go.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, ListParams};
use tokio::sync::watch;
use tokio::time::timeout;

use super::fixture::{
    CONFIGURATION, delete, devices_of, make_pod_with_claim, names, one_device, print_times, start,
};
use crate::harness::{Cluster, TIMEOUT};
use crate::setup::{REGISTERED, Setup};

/// An even number, so that the last companion uses the same sockets as the first.
const UPDATES: usize = 4;
const DEVICES: [(u32, u32); 4] = [(1, 3), (1, 5), (1, 7), (1, 9)];

/// Creates pods one after the other, and records the time until each runs.
async fn pods(setup: &Setup, name: &str, times: &watch::Sender<Vec<Duration>>) -> anyhow::Result<Infallible> {
    for number in 0.. {
        let pod = format!("{name}-{number}");
        let began = Instant::now();
        make_pod_with_claim(setup, &pod, &one_device()).await?;
        ensure!(devices_of(setup, &pod).await?.len() == 1);
        times.send_modify(|times| times.push(began.elapsed()));
        delete(setup, &pod).await?;
    }
    unreachable!("the numbers end");
}

/// Checks that kubelet has called the driver, and that no call failed or found no driver.
pub(crate) async fn no_call_failed(cluster: &Cluster) -> anyhow::Result<()> {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", cluster.node(0).name());
    let metrics = cluster.kubectl(&["get", "--raw", &path]).await?;
    let calls = metrics
        .lines()
        .filter(|line| line.starts_with("dra_grpc_operations_duration_seconds_count"));
    let (answered, failed): (Vec<&str>, Vec<&str>) = calls.partition(|line| line.contains("\"OK\""));
    ensure!(answered.len() >= 2, "kubelet counts Prepare and Unprepare");
    ensure!(failed.is_empty(), "{failed:?}");
    let log = cluster.log("node-0-kubelet")?;
    let unregistered: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("DRA driver drayman.dev is not registered"))
        .collect();
    ensure!(unregistered.is_empty(), "{unregistered:?}");
    Ok(())
}

async fn slices(setup: &Setup) -> anyhow::Result<BTreeSet<String>> {
    let slices = Api::<ResourceSlice>::all(setup.cluster.client());
    let slices = slices.list(&ListParams::default()).await?;
    Ok(slices
        .into_iter()
        .filter_map(|slice| slice.metadata.uid)
        .collect())
}

#[tokio::test]
async fn an_update_with_surge_fails_no_call_of_kubelet() -> anyhow::Result<()> {
    let (setup, mut companion) = start(CONFIGURATION, &DEVICES).await?;
    make_pod_with_claim(&setup, "before", &one_device()).await?;
    let before = devices_of(&setup, "before").await?;
    let published = slices(&setup).await?;
    let times = watch::Sender::new(Vec::new());
    let mut ran = times.subscribe();
    let updates = async {
        for _ in 0..UPDATES {
            let next = setup.companion(0, CONFIGURATION)?;
            next.logged("waiting for its end").await?;
            let before = ran.borrow().len();
            companion.end().await?;
            next.logged("this one registers with kubelet").await?;
            next.logged(REGISTERED).await?;
            companion = next;
            let more = ran.wait_for(|times| times.len() > before + 1);
            timeout(TIMEOUT, more).await.context("pods run")??;
        }
        anyhow::Ok(companion)
    };
    let companion = tokio::select! {
        ended = updates => ended?,
        ended = pods(&setup, "first", &times) => match ended? {},
        ended = pods(&setup, "second", &times) => match ended? {},
        ended = pods(&setup, "third", &times) => match ended? {},
    };
    print_times(
        "from the pod to its running, during updates of the companion",
        times.borrow().clone(),
    );

    no_call_failed(&setup.cluster).await?;
    assert_eq!(slices(&setup).await?, published, "the slices were not deleted");
    assert_eq!(devices_of(&setup, "before").await?, before);
    assert!(before.is_subset(&names(&[0, 1, 2, 3])));
    delete(&setup, "before").await?;
    setup.end([companion]).await
}
