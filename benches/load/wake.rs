//! Waiting pods: their cost, and the time until a freed device is offered to them.

use std::time::Duration;

use anyhow::Context as _;
use drayman::api::resource::{Pod, controller_of};
use jiff::Timestamp;
use kube::api::ListParams;
use tokio::time::sleep;

use crate::Options;
use crate::common::{self, Controller, TIMEOUT, USER};
use crate::figures::{Goal, Times, figure};
use crate::harness::Entry;
use crate::requests::{self, Count, between, moment};
use crate::setup::{Setup, is_allocated, is_bound};

/// Nodes with one device each, pods that hold them, and as many waiting pods.
const PODS: usize = 22;
const WAIT: Duration = Duration::from_secs(60);
/// The scheduler's initial and maximum backoff in seconds. The defaults are 1 and 10.
const BACKOFF: (u32, u32) = (1, 1);

/// One release.
struct Release {
    claim: String,
    node: String,
    asked: Timestamp,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let setup = common::start(&[], true).await?;
    common::set_backoff(&setup, BACKOFF.0, BACKOFF.1).await?;
    println!(
        "scheduler: podInitialBackoffSeconds {}, podMaxBackoffSeconds {}",
        BACKOFF.0, BACKOFF.1
    );
    setup.make_template(None).await?;
    common::make_nodes(&setup, (0..PODS).map(|node| (node, 1))).await?;
    let controller = Controller::start(&setup, options).await?;
    let holders: Vec<String> = (0..PODS).map(|number| format!("holder-{number:02}")).collect();
    let waiters: Vec<String> = (0..PODS).map(|number| format!("waiter-{number:02}")).collect();
    common::each(&holders, |name| async { setup.make_pod(name).await.map(drop) }).await?;
    common::each(&holders, |name| async {
        setup
            .wait(setup.pods(), name, "bound", is_bound())
            .await
            .map(drop)
    })
    .await?;
    common::each(&waiters, |name| async { setup.make_pod(name).await.map(drop) }).await?;
    settle(&setup).await?;
    waiting(&setup).await?;

    let mut releases = Vec::new();
    for (number, holder) in holders.iter().enumerate() {
        let claim = setup.claim_of(holder, "allocated", is_allocated).await?;
        let node = setup
            .pods()
            .get(holder)
            .await?
            .spec
            .node_name
            .context("the pod is bound")?;
        releases.push(Release {
            claim: claim.metadata.name.context("a claim has a name")?,
            node,
            asked: Timestamp::now(),
        });
        common::remove_pod(&setup.pods(), holder).await?;
        common::until("a pod that waited is bound", TIMEOUT, || async {
            Ok(bound(&setup, "waiter-").await? > number)
        })
        .await?;
        sleep(random_pause()).await;
    }
    latencies(&setup, &releases).await?;
    controller.end().await?;
    setup.cluster.stop().await
}

/// Between 0.2 and 2.2 s, so that releases are not synchronized with any timer.
fn random_pause() -> Duration {
    let nanoseconds = Timestamp::now().as_nanosecond().unsigned_abs();
    let share =
        u64::try_from(nanoseconds.wrapping_mul(6_364_136_223_846_793_005) >> 16 & 0xffff).unwrap_or(0);
    Duration::from_millis(200 + share * 2000 / 0x1_0000)
}

async fn bound(setup: &Setup, prefix: &str) -> anyhow::Result<usize> {
    let pods = setup.pods().list(&ListParams::default()).await?;
    let is = |pod: &&Pod| {
        pod.spec.node_name.is_some()
            && pod
                .metadata
                .name
                .as_deref()
                .is_some_and(|name| name.starts_with(prefix))
    };
    Ok(pods.items.iter().filter(is).count())
}

/// Waits until the controller has sent no request for five seconds.
async fn settle(setup: &Setup) -> anyhow::Result<()> {
    let every_one = |context: &drayman::api::resource::PodSchedulingContext| {
        let entries = &context.status.resource_claims;
        controller_of(&context.metadata).is_some()
            && entries.iter().any(|entry| entry.unsuitable_nodes.len() == PODS)
    };
    common::until("every waiting pod has an event", TIMEOUT, || async {
        let contexts = setup.contexts().list(&ListParams::default()).await?;
        Ok(contexts.items.iter().filter(|context| every_one(context)).count() == PODS)
    })
    .await?;
    common::until("the controller is at rest", TIMEOUT, || async {
        let before = Count::new(&requests::of(setup, USER).await?).all();
        sleep(Duration::from_secs(5)).await;
        Ok(Count::new(&requests::of(setup, USER).await?).all() == before)
    })
    .await
}

async fn waiting(setup: &Setup) -> anyhow::Result<()> {
    let start = requests::of(setup, USER).await?;
    let before = Count::new(&start);
    sleep(WAIT).await;
    let entries = requests::of(setup, USER).await?;
    let count = Count::new(entries.iter().skip(start.len()));
    figure(
        &format!("requests while {PODS} pods wait for {WAIT:?}"),
        &format!("{}, beside those of the lease ({})", count.all(), count.per(1)),
        Goal::is(count.all() == 0),
    );
    figure(
        &format!("requests until {PODS} pods are served and {PODS} wait"),
        &before.per(2 * PODS),
        Goal::is(before.conflicts == 0),
    );
    Ok(())
}

/// Whether the response to a write no longer lists the node as unsuitable, or already contains the allocation: the scheduler may have
/// selected the node before.
fn offers(entry: &Entry, node: &str) -> bool {
    let Some(status) = entry.response.as_ref().map(|body| &body["status"]) else {
        return false;
    };
    if entry.resource == "resourceclaims" {
        let selector = &status["allocation"]["availableOnNodes"]["nodeSelectorTerms"];
        return entry.subresource == "status"
            && selector[0]["matchFields"][0]["values"][0].as_str() == Some(node);
    }
    status["resourceClaims"].as_array().is_some_and(|claims| {
        !claims.is_empty()
            && claims.iter().all(|claim| {
                let nodes = claim["unsuitableNodes"].as_array();
                nodes.is_none_or(|nodes| nodes.iter().all(|unsuitable| unsuitable != node))
            })
    })
}

async fn latencies(setup: &Setup, releases: &[Release]) -> anyhow::Result<()> {
    let entries = requests::of(setup, USER).await?;
    let (mut driver, mut whole) = (Times::default(), Times::default());
    for release in releases {
        let written = entries
            .iter()
            .filter(|entry| entry.resource == "resourceclaims" && entry.name == release.claim)
            .find(|entry| entry.is_write() && moment(&entry.received) > release.asked)
            .with_context(|| format!("claim {} was released", release.claim))?;
        let offered = entries
            .iter()
            .filter(|entry| entry.is_write() && entry.code < 300 && entry.name != release.claim)
            .find(|entry| {
                moment(&entry.received) >= moment(&written.received) && offers(entry, &release.node)
            })
            .with_context(|| format!("node {} was offered", release.node))?;
        driver.push(between(moment(&written.completed), moment(&offered.completed)));
        whole.push(between(release.asked, moment(&offered.completed)));
    }
    figure(
        "release stored -> the node is offered to a waiting pod (stored)",
        &driver.to_string(),
        Goal::is(
            driver.median() <= Duration::from_millis(50) && driver.quantile(99) <= Duration::from_millis(200),
        ),
    );
    figure(
        "deletion of the pod that held it -> the same",
        &format!("{whole} (with the claim controller's part)"),
        Goal::none(),
    );
    Ok(())
}
