//! Unschedulable pods in one namespace, against the allocations of another.

use std::time::Duration;

use drayman::api::resource::{Pod, PodSchedulingContext, ResourceClaim};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;
use tokio::time::sleep;

use crate::Options;
use crate::common::{self, Controller, TIMEOUT, USER};
use crate::figures::{Goal, Times, figure};
use crate::requests::{self, Count};
use crate::setup::{DRIVER, Setup, is_allocated, pod_with_claim};

const CROWD: usize = 100;
const NODES: usize = 16;
const SAMPLES: usize = 300;
/// Concurrent samples: allocations and releases overlap, as in a busy namespace.
const AT_ONCE: usize = 4;

/// Runs with the default scheduler, which retries every waiting pod on every claim event and so uses processor time, and with one
/// that retries a pod only on events that concern it.
pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    one_scheduler(options, &[]).await?;
    println!("the same with SchedulerQueueingHints:");
    one_scheduler(
        options,
        &[("scheduler", "--feature-gates=SchedulerQueueingHints=true")],
    )
    .await
}

async fn one_scheduler(options: &Options, scheduler: &[(&str, &str)]) -> anyhow::Result<()> {
    let mut flags = vec![
        ("controller-manager", "--kube-api-qps=2000"),
        ("controller-manager", "--kube-api-burst=4000"),
    ];
    flags.extend(scheduler);
    let setup = common::start(&flags, true).await?;
    common::make_nodes(&setup, (0..NODES).map(|node| (node, 8))).await?;
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": "nobody" },
            "driverName": "nobody.example.com",
        }))
        .await?;
    let controller = Controller::start(&setup, options).await?;
    // The first samples include the setup of connections and caches.
    samples(&setup, "warm", AT_ONCE * 10).await?;
    let alone = samples(&setup, "alone", SAMPLES).await?;
    show("alone", &alone, Goal::none());
    // The same pods with a driver that does not run show the share of scheduler and API server.
    crowd(&setup, "nobody", "nobody").await?;
    let beside_nobody = samples(&setup, "nobody", SAMPLES).await?;
    show(
        &format!("beside {CROWD} pods that wait for a driver that is not there"),
        &beside_nobody,
        Goal::none(),
    );
    delete_crowd(&setup, "nobody").await?;
    crowd(&setup, "crowd", "test").await?;
    let before = requests::of(&setup, USER).await?.len();
    let beside = samples(&setup, "beside", SAMPLES).await?;
    let entries = requests::of(&setup, USER).await?;
    let for_crowd = Count::new(
        entries
            .iter()
            .skip(before)
            .filter(|entry| entry.namespace == "crowd"),
    );
    let change =
        |from: &Times| 100.0 * (beside.quantile(99).as_secs_f64() / from.quantile(99).as_secs_f64() - 1.0);
    show(
        &format!("beside {CROWD} unsatisfiable pods of another namespace"),
        &beside,
        Goal::is(change(&alone) < 20.0),
    );
    figure(
        "change of p99",
        &format!(
            "{:+.0} % against alone, {:+.0} % against the other crowd",
            change(&alone),
            change(&beside_nobody)
        ),
        Goal::none(),
    );
    figure(
        "requests spent on those pods, for each allocation of the other namespace",
        &for_crowd.per(SAMPLES),
        Goal::none(),
    );
    controller.end().await?;
    setup.cluster.stop().await
}

fn show(what: &str, times: &Times, goal: Goal) {
    figure(
        &format!("context written -> allocation stored, {what}"),
        &times.to_string(),
        goal,
    );
}

/// Creates pods in their own namespace, each of which requests more devices than any node has.
async fn crowd(setup: &Setup, namespace: &str, class: &str) -> anyhow::Result<()> {
    let client = setup.cluster.client();
    let object: Namespace = serde_json::from_value(json!({ "metadata": { "name": namespace } }))?;
    Api::all(client.clone())
        .create(&PostParams::default(), &object)
        .await?;
    setup
        .apply(&json!({
            "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters",
            "metadata": { "name": "many", "namespace": namespace },
            "spec": { "requests": [{ "name": "device", "count": 64 }] },
        }))
        .await?;
    let reference = json!({ "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": "many" });
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate",
            "metadata": { "name": "test", "namespace": namespace },
            "spec": { "spec": { "resourceClassName": class, "parametersRef": reference } },
        }))
        .await?;
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    common::each(0..CROWD, |number| {
        let pods = pods.clone();
        async move {
            let pod = pod_with_claim(&format!("crowd-{number:03}"))?;
            pods.create(&PostParams::default(), &pod).await?;
            Ok(())
        }
    })
    .await?;
    let contexts = Api::<PodSchedulingContext>::namespaced(client, namespace);
    common::until("the scheduler has asked for every pod", TIMEOUT, || async {
        let contexts = contexts.list(&ListParams::default()).await?.items;
        let is_told =
            |context: &PodSchedulingContext| class == "nobody" || !context.status.resource_claims.is_empty();
        Ok(contexts.iter().filter(|context| is_told(context)).count() == CROWD)
    })
    .await?;
    sleep(Duration::from_secs(3)).await;
    Ok(())
}

async fn delete_crowd(setup: &Setup, namespace: &str) -> anyhow::Result<()> {
    let pods = Api::<Pod>::namespaced(setup.cluster.client(), namespace);
    let now = DeleteParams::default().grace_period(0);
    drop(pods.delete_collection(&now, &ListParams::default()).await?);
    let claims = Api::<ResourceClaim>::namespaced(setup.cluster.client(), namespace);
    common::until("the crowd is deleted", TIMEOUT, || async {
        Ok(claims.list(&ListParams::default()).await?.items.is_empty())
    })
    .await
}

/// Lifecycles of claims in the namespace `default`. This program acts as the scheduler: it only selects the node.
pub(crate) async fn samples(setup: &Setup, phase: &str, number: usize) -> anyhow::Result<Times> {
    let lanes = (0..AT_ONCE).map(|lane| async move {
        for sample in (lane..number).step_by(AT_ONCE) {
            one(setup, &format!("{phase}-{sample:03}"), sample % NODES).await?;
        }
        anyhow::Ok(())
    });
    futures::future::try_join_all(lanes).await?;
    let all = setup.cluster.audit().entries().await?;
    Ok(requests::allocation_times(&all, USER, |claim| {
        claim.starts_with(&format!("{phase}-")).then(|| claim.to_owned())
    }))
}

async fn one(setup: &Setup, name: &str, node: usize) -> anyhow::Result<()> {
    let (claims, pods) = (setup.claims(), setup.pods());
    let claim = serde_json::from_value(json!({
        "metadata": { "name": name }, "spec": { "resourceClassName": "test" },
    }))?;
    claims.create(&PostParams::default(), &claim).await?;
    let pod = pods
        .create(&PostParams::default(), &common::held_pod(name, name)?)
        .await?;
    let nodes: Vec<String> = (0..NODES).map(common::node_name).collect();
    let context = common::context_of(&pod, nodes.get(node).map(String::as_str), &nodes)?;
    setup.contexts().create(&PostParams::default(), &context).await?;
    common::until("the claim is allocated", TIMEOUT, || async {
        Ok(claims.get_opt(name).await?.as_ref().is_some_and(is_allocated))
    })
    .await?;
    common::remove_pod(&pods, name).await?;
    claims.delete(name, &DeleteParams::default()).await?;
    Ok(())
}
