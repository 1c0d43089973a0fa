//! Effect of expensive claims on others: latency of `/livez`, and of allocations in another namespace.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use drayman::api::crd::NodeInventory;
use drayman::api::resource::{PodSchedulingContext, ResourceClaim};
use k8s_openapi::api::core::v1::{Event, Namespace};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::Options;
use crate::common::{self, Controller, TIMEOUT};
use crate::fair;
use crate::figures::{Goal, Times, figure};
use crate::setup::{DRIVER, Setup};

/// Workloads beside the measured pods: name of the parameters, and label of the figure.
const CROWDS: [(&str, &str); 3] = [
    ("refused", "pods that ask for more devices than a node has"),
    (
        "impossible",
        "pods that ask for 9 of 8 devices, each in a group of its own",
    ),
    (
        "search",
        "pods whose claims ask for 4 devices of one of 10 groups of 6 each",
    ),
];
/// Maximum number of nodes that the scheduler lists in a context.
const POTENTIAL_NODES: usize = 128;
/// Nodes of the honest pods; `fair` chooses among them.
const HONEST_NODES: usize = 16;
const SAMPLES: usize = 100;
/// Interval between pods of the crowd.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval between probes of `/livez`.
const PROBE_PERIOD: Duration = Duration::from_millis(5);
const NAMESPACE: &str = "hostile";
/// Number of parameters objects, each in its own namespace and with the maximum number of expressions.
const EXPRESSION_OBJECTS: usize = 100;
/// Devices with distinct attributes, 100 on each node.
const EXPRESSION_DEVICES: usize = 5000;
/// 32 MB, where 1 MB is 10^6 bytes.
const EXPRESSIONS_KIB: u64 = 31_250;

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    for nodes in [64, 1000] {
        let flags = [
            ("controller-manager", "--kube-api-qps=2000"),
            ("controller-manager", "--kube-api-burst=4000"),
        ];
        let setup = Arc::new(common::start(&flags, true).await?);
        // This program acts as the scheduler: it only selects the node.
        setup.cluster.stop_component("scheduler", 15).await?;
        common::make_nodes(&setup, (0..HONEST_NODES).map(|node| (node, 8))).await?;
        make_hostile_nodes(&setup, nodes).await?;
        make_parameters(&setup).await?;
        measure(&setup, options, nodes).await?;
        Arc::into_inner(setup)
            .context("nothing uses the cluster")?
            .cluster
            .stop()
            .await?;
    }
    Ok(())
}

async fn measure(setup: &Arc<Setup>, options: &Options, nodes: usize) -> anyhow::Result<()> {
    let (controller, address) = start(setup, options).await?;
    fair::samples(setup, &format!("warm-{nodes}"), 40).await?;
    // The standby makes no decisions; the longest response time of its `/livez` shows the machine's share.
    let (standby, standby_address) = start(setup, options).await?;
    common::until("the standby answers probes", TIMEOUT, || async {
        Ok(TcpStream::connect(standby_address).await.is_ok())
    })
    .await?;
    let alone = fair::samples(setup, &format!("alone-{nodes}"), SAMPLES).await?;
    let allocation = "context written -> allocation stored";
    figure(
        &format!("{allocation}, alone, {nodes} nodes"),
        &alone.to_string(),
        Goal::none(),
    );
    for claims in [1, 16] {
        for (parameters, what) in CROWDS {
            let stop = CancellationToken::new();
            let crowd = tokio::spawn(crowd(Arc::clone(setup), parameters, nodes, claims, stop.clone()));
            let answers = probe(address, stop.clone());
            let answers_of_standby = probe(standby_address, stop.clone());
            let used = controller.processor_time();
            let start = Instant::now();
            // The first pods of the crowd are in progress.
            sleep(Duration::from_secs(1)).await;
            let beside = fair::samples(setup, &format!("{parameters}-{nodes}-{claims}"), SAMPLES).await?;
            stop.cancel();
            let used = controller
                .processor_time()
                .saturating_sub(used)
                .div_duration_f64(start.elapsed());
            let (answers, pods) = (answers.await??, crowd.await??);
            let machine = answers_of_standby.await??.quantile(100);
            ensure!(pods > 0, "no pod of the crowd was answered");
            let about = format!("{nodes} nodes, beside {pods} {what}, with 2 x {claims} claims each");
            let longest = answers.quantile(100);
            figure(
                &format!("longest answer of /livez, {about}"),
                &format!(
                    "{longest:.1?}, n={}; of a standby meanwhile {machine:.1?}; the controller used {:.0} % of a processor",
                    answers.len(),
                    100.0 * used
                ),
                Goal::at_most(longest, Duration::from_millis(100)),
            );
            figure(
                &format!("{allocation}, {about}"),
                &beside.to_string(),
                Goal::at_most(beside.quantile(99), 2 * alone.quantile(99)),
            );
        }
    }
    standby.end().await?;
    controller.end().await
}

/// Starts a controller and returns the address of its probes.
async fn start(setup: &Setup, options: &Options) -> anyhow::Result<(Controller, SocketAddr)> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let probes = format!("--health-probe-bind-address={address}");
    Ok((Controller::start_with(setup, options, &[&probes]).await?, address))
}

/// Probes `/livez` with a new connection each time until `stop`.
fn probe(address: SocketAddr, stop: CancellationToken) -> JoinHandle<anyhow::Result<Times>> {
    tokio::spawn(async move {
        let mut times = Times::default();
        while !stop.is_cancelled() {
            let start = Instant::now();
            let mut connection = TcpStream::connect(address).await?;
            connection
                .write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                .await?;
            let mut answer = String::new();
            connection.read_to_string(&mut answer).await?;
            ensure!(answer.starts_with("HTTP/1.1 200 "), "/livez answered {answer}");
            times.push(start.elapsed());
            sleep(PROBE_PERIOD).await;
        }
        Ok(times)
    })
}

/// Creates one pod after the other until `stop`, and returns the number of answered pods.
async fn crowd(
    setup: Arc<Setup>,
    parameters: &'static str,
    nodes: usize,
    claims: usize,
    stop: CancellationToken,
) -> anyhow::Result<usize> {
    let mut answered = 0;
    while !stop.is_cancelled() {
        let name = format!("{parameters}-{nodes}-{claims}-{answered}");
        one(&setup, &name, parameters, nodes, claims).await?;
        answered += 1;
        sleep(PAUSE).await;
    }
    Ok(answered)
}

/// One pod from its context to the controller's answer, with `claims` claims, and as many immediate claims.
async fn one(setup: &Setup, name: &str, parameters: &str, nodes: usize, claims: usize) -> anyhow::Result<()> {
    let client = setup.cluster.client();
    let claim_api = Api::<ResourceClaim>::namespaced(client.clone(), NAMESPACE);
    let names: Vec<String> = (0..claims).map(|claim| format!("{name}-{claim}")).collect();
    for claim in &names {
        for (suffix, mode) in [("", "WaitForFirstConsumer"), ("-now", "Immediate")] {
            let claim = serde_json::from_value(json!({
                "metadata": { "name": format!("{claim}{suffix}") },
                "spec": { "resourceClassName": format!("hostile-{}", kind_of(parameters)), "allocationMode": mode,
                    "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": parameters } },
            }))?;
            claim_api.create(&PostParams::default(), &claim).await?;
        }
    }
    let mut pod = serde_json::to_value(common::held_pod(name, name)?)?;
    let source = |claim: &String| json!({ "name": claim, "source": { "resourceClaimName": claim } });
    pod["spec"]["resourceClaims"] = names.iter().map(source).collect();
    let claims_of_container: Vec<Value> = names.iter().map(|claim| json!({ "name": claim })).collect();
    pod["spec"]["containers"][0]["resources"]["claims"] = json!(claims_of_container);
    let pods = Api::namespaced(client.clone(), NAMESPACE);
    let pod = pods
        .create(&PostParams::default(), &serde_json::from_value(pod)?)
        .await?;
    let potential: Vec<String> = (0..nodes.min(POTENTIAL_NODES)).map(hostile_node).collect();
    let contexts = Api::<PodSchedulingContext>::namespaced(client, NAMESPACE);
    let context = common::context_of(&pod, None, &potential)?;
    contexts.create(&PostParams::default(), &context).await?;
    common::until("the controller has answered the pod", TIMEOUT, || async {
        let context = contexts.get_opt(name).await?;
        Ok(context.is_some_and(|context| context.status.resource_claims.len() == claims))
    })
    .await?;
    common::remove_pod(&pods, name).await?;
    for claim in &names {
        for suffix in ["", "-now"] {
            claim_api
                .delete(&format!("{claim}{suffix}"), &DeleteParams::default())
                .await?;
        }
    }
    Ok(())
}

/// The kind of devices for these parameters.
fn kind_of(parameters: &str) -> &'static str {
    if parameters == "search" { "60" } else { "8" }
}

/// Memory of the controller for users' expressions.
pub(crate) async fn expressions(options: &Options) -> anyhow::Result<()> {
    let setup = &common::start(&[], true).await?;
    setup.cluster.stop_component("scheduler", 15).await?;
    common::make_nodes(setup, (0..HONEST_NODES).map(|node| (node, 8))).await?;
    make_parameters(setup).await?;
    let device = |number: usize| {
        json!({ "name": format!("text-{number}"), "kind": "hostile-8", "mode": "claims",
            "attributes": { "drayman.dev/text": { "string": format!("a text of its own, number {number}") } } })
    };
    common::each(0..EXPRESSION_DEVICES / 100, |node| async move {
        let devices: Vec<Value> = (100 * node..100 * (node + 1)).map(device).collect();
        make_node(setup, &format!("text-{node:03}"), &devices).await
    })
    .await?;
    let controller = Controller::start(setup, options).await?;
    fair::samples(setup, "before-expressions", 8).await?;
    let (rest, _) = controller.resident_kib();
    common::each(0..EXPRESSION_OBJECTS, |object| async move {
        let namespace = format!("expressions-{object:03}");
        make_namespace(setup, &namespace).await?;
        setup
            .apply(&json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters",
                "metadata": { "name": namespace, "namespace": namespace }, "spec": { "requests": requests_with_expressions(object) } }))
            .await?;
        Ok(())
    })
    .await?;
    // Once a later object is processed, the watch has delivered all earlier ones.
    fair::samples(setup, "after-expressions", 8).await?;
    let (stored, _) = controller.resident_kib();
    figure(
        &format!("memory for {EXPRESSION_OBJECTS} objects with 256 expressions each that no claim names"),
        &format!("{} KiB above {rest} KiB", stored.saturating_sub(rest)),
        Goal::none(),
    );
    common::each(0..EXPRESSION_OBJECTS, |object| async move {
        let namespace = format!("expressions-{object:03}");
        let claim = serde_json::from_value(json!({
            "metadata": { "name": "expressions" },
            "spec": { "resourceClassName": "hostile-8", "allocationMode": "Immediate",
                "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": namespace } },
        }))?;
        let claims = Api::<ResourceClaim>::namespaced(setup.cluster.client(), &namespace);
        claims.create(&PostParams::default(), &claim).await?;
        Ok(())
    })
    .await?;
    let events = Api::<Event>::all(setup.cluster.client());
    let of_claims = ListParams::default().fields("involvedObject.name=expressions");
    let reasons = async || {
        let mut reasons = BTreeMap::<String, usize>::new();
        for event in events.list(&of_claims).await? {
            *reasons.entry(event.reason.unwrap_or_default()).or_default() += 1;
        }
        anyhow::Ok(reasons)
    };
    common::until("every claim has its answer", TIMEOUT, || async {
        Ok(reasons().await?.values().sum::<usize>() >= EXPRESSION_OBJECTS)
    })
    .await?;
    common::until("the controller is at rest", 3 * TIMEOUT, || async {
        let before = controller.processor_time();
        sleep(Duration::from_secs(5)).await;
        Ok(controller.processor_time() <= before + Duration::from_millis(50))
    })
    .await?;
    let (now, most) = controller.resident_kib();
    figure(
        &format!(
            "memory for {EXPRESSION_OBJECTS} objects with 256 expressions each in as many namespaces, {EXPRESSION_DEVICES} different devices"
        ),
        &format!(
            "{} KiB above {rest} KiB, {most} KiB at most; events: {:?}",
            now.saturating_sub(rest),
            reasons().await?
        ),
        Goal::below(now.saturating_sub(rest), EXPRESSIONS_KIB),
    );
    controller.end().await
}

/// Distinct expressions; half of them fail on each device with a distinct attribute.
fn requests_with_expressions(object: usize) -> Vec<Value> {
    let expression = |number: usize| {
        let text = r#"device.attributes["drayman.dev"].text"#;
        let expression = if number.is_multiple_of(2) {
            format!("int({text}) == {number}")
        } else {
            format!("{text}.endsWith(\"{number}\")")
        };
        json!({ "cel": { "expression": expression } })
    };
    let request = |request: usize| {
        let first = 16 * (16 * object + request);
        let selectors: Vec<Value> = (first..first + 16).map(expression).collect();
        json!({ "name": format!("r{request}"), "count": 1, "selectors": selectors })
    };
    (0..16).map(request).collect()
}

fn hostile_node(number: usize) -> String {
    format!("hostile-{number:04}")
}

/// Nodes with 8 devices, each in its own group, and 60 devices of another kind in groups of 6.
async fn make_hostile_nodes(setup: &Setup, nodes: usize) -> anyhow::Result<()> {
    let device = |kind: usize, group: usize, number: usize| {
        json!({ "name": format!("hostile-{kind}-{number}"), "kind": format!("hostile-{kind}"), "mode": "claims",
            "attributes": { "drayman.dev/group": { "int": number / group } } })
    };
    let mut devices: Vec<Value> = (0..8).map(|number| device(8, 1, number)).collect();
    devices.extend((0..60).map(|number| device(60, 6, number)));
    common::each(0..nodes, |number| {
        let devices = devices.clone();
        async move { make_node(setup, &hostile_node(number), &devices).await }
    })
    .await
}

async fn make_node(setup: &Setup, node: &str, devices: &[Value]) -> anyhow::Result<()> {
    setup.make_fake_devices(node, 0).await?;
    let api = Api::<NodeInventory>::all(setup.cluster.client());
    let patch = Patch::Merge(json!({ "spec": { "devices": devices } }));
    api.patch(&format!("{node}.{DRIVER}"), &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

async fn make_namespace(setup: &Setup, name: &str) -> anyhow::Result<()> {
    let namespace: Namespace = serde_json::from_value(json!({ "metadata": { "name": name } }))?;
    Api::all(setup.cluster.client())
        .create(&PostParams::default(), &namespace)
        .await?;
    Ok(())
}

/// A class for each kind of devices, and the parameters of [`CROWDS`].
async fn make_parameters(setup: &Setup) -> anyhow::Result<()> {
    make_namespace(setup, NAMESPACE).await?;
    for kind in ["hostile-8", "hostile-60"] {
        setup
            .apply(
                &json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClassParameters",
                "metadata": { "name": kind }, "spec": { "kind": kind } }),
            )
            .await?;
        setup
            .apply(
                &json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass",
                "metadata": { "name": kind }, "driverName": DRIVER,
                "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClassParameters", "name": kind } }),
            )
            .await?;
    }
    let requests: Vec<Value> = (1..=8)
        .map(|number| json!({ "name": format!("r{number}"), "count": if number == 8 { 2 } else { 1 } }))
        .collect();
    let constraints: Vec<Value> = (1..=7)
        .map(|number| json!({ "matchAttribute": "drayman.dev/group", "requests": [format!("r{number}")] }))
        .collect();
    let group = json!([{ "matchAttribute": "drayman.dev/group" }]);
    let specs = [
        json!({ "requests": [{ "name": "r", "count": 9 }] }),
        json!({ "requests": requests, "constraints": constraints }),
        json!({ "requests": [{ "name": "r", "count": 4 }], "constraints": group }),
    ];
    for ((name, _), spec) in CROWDS.into_iter().zip(specs) {
        setup
            .apply(
                &json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters",
                "metadata": { "name": name, "namespace": NAMESPACE }, "spec": spec }),
            )
            .await?;
    }
    Ok(())
}
