//! The requests of a pod's life, and how long it waits for its allocation.

use std::time::Duration;

use drayman::api::resource::Pod;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use tokio::time::sleep;

use crate::Options;
use crate::figures::{Goal, figure};
use crate::ground::{self, Controller, PATIENCE, USER};
use crate::requests::{self, Count};
use crate::stage::{Stage, is_bound, is_gone};

/// Pods that finish and are deleted then, one after the other.
const FINISHING: usize = 10;
/// Pods that are deleted while they are bound.
const DELETED: usize = 4;

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let stage = ground::stage(&[], false).await?;
    stage.make_template(None).await?;
    let controller = Controller::start(&stage, options).await?;
    let mut made = 0;
    for nodes in [1, 16, 128] {
        ground::make_nodes(&stage, (made..nodes).map(|node| (node, 2))).await?;
        made = nodes;
        // The scheduler learns of nodes by its own watch.
        sleep(Duration::from_secs(2)).await;
        lives(&stage, nodes).await?;
    }
    controller.end().await?;
    stage.cluster.stop().await
}

async fn lives(stage: &Stage, nodes: usize) -> anyhow::Result<()> {
    let mut before = requests::of(stage, USER).await?.len();
    for (what, number) in [("finishes", FINISHING), ("is deleted while bound", DELETED)] {
        for life in 0..number {
            one(
                stage,
                &format!("n{nodes}-{}-{life}", &what[..2]),
                what == "finishes",
            )
            .await?;
        }
        // Whatever comes late belongs to these pods too.
        sleep(Duration::from_secs(1)).await;
        let entries = requests::of(stage, USER).await?;
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
    let all = stage.cluster.audit().entries().await?;
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
    let events = Api::<Event>::all(stage.cluster.client())
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

async fn one(stage: &Stage, name: &str, finishes: bool) -> anyhow::Result<()> {
    stage.make_pod(name).await?;
    stage.wait(stage.pods(), name, "bound", is_bound()).await?;
    let pod: Pod = stage.pods().get(name).await?;
    let claim = crate::stage::claim_name(Some(&pod)).unwrap_or_default();
    if finishes {
        let over = json!({ "status": { "phase": "Succeeded" } });
        stage
            .pods()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(over))
            .await?;
        stage.wait(stage.claims(), &claim, "gone", is_gone()).await?;
        ground::remove_pod(&stage.pods(), name).await?;
    } else {
        ground::remove_pod(&stage.pods(), name).await?;
        stage.wait(stage.claims(), &claim, "gone", is_gone()).await?;
    }
    let contexts = stage.contexts();
    ground::until("the pod's context is gone", PATIENCE, || async {
        Ok(contexts.get_opt(name).await?.is_none())
    })
    .await
}
