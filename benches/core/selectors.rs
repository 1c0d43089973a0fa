//! Cost of a claim with selectors in the largest cluster, with the built-in driver and the controller's calls.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drayman::api::resource::{Pod, ResourceClaim, ResourceClass};
use drayman::driver::{ClaimRequest, Driver, UnsuitableNodes};
use drayman::host::HostDriver;
use kube::client::Body;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::figures::{Goal, Times, figure, resident_kib};
use super::{DRIVER, node_name};

const NODES: usize = 15_000;
const DEVICES: usize = 8;
/// Number of nodes whose devices differ, as do the devices of a node: expressions are evaluated for each distinct device.
const DIFFERENT: usize = 2_000;

/// Number of objects of hostile users that try to exhaust the controller's memory. Each has the maximum number of expressions.
const HOSTILE: usize = 100;
/// Devices with distinct attributes, in inventories of 100.
const HOSTILE_DEVICES: usize = 5000;
/// 32 MB, where 1 MB is 10^6 bytes.
const HOSTILE_KIB: u64 = 31_250;

/// Makes the controller's driver calls for one claim: the parameters, then the nodes.
async fn ask(
    driver: &HostDriver,
    pod: &Pod,
    claim: &Arc<ResourceClaim>,
    class: &Arc<ResourceClass>,
    nodes: &[String],
) -> Vec<UnsuitableNodes> {
    let class_parameters = driver.class_parameters(class).await.unwrap();
    let claim_parameters = driver
        .claim_parameters(claim, class, &class_parameters)
        .await
        .unwrap();
    let request = ClaimRequest::new(
        Arc::clone(claim),
        Arc::clone(class),
        class_parameters,
        claim_parameters,
    );
    driver.unsuitable_nodes(pod, &[request], nodes).await.unwrap()
}

pub(super) fn run() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let driver = HostDriver::start(client(), DRIVER, CancellationToken::new());
        driver.ready().await.unwrap();
        let class: ResourceClass = serde_json::from_value(json!({
            "metadata": { "name": "test" }, "driverName": DRIVER,
            "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClassParameters", "name": "test" },
        }))
        .unwrap();
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": { "namespace": "default", "name": "asked", "uid": "asked" },
            "spec": { "resourceClassName": "test",
                "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": "test" } },
        }))
        .unwrap();
        let (class, claim, pod) = (Arc::new(class), Arc::new(claim), Pod::default());
        // The potential nodes are spread over the inventory.
        let asked: Vec<String> = (0..128).map(|node| node_name(node * 117)).collect();
        let start = Instant::now();
        let first = ask(&driver, &pod, &claim, &class, &asked).await;
        let first_time = start.elapsed();
        // All devices of nodes with an even number have an even serial number.
        let unsuitable = first.first().map_or(0, UnsuitableNodes::len);
        assert_eq!(unsuitable, 64, "the selectors tell nodes apart");
        let about = format!(
            "{NODES} nodes with {DEVICES} devices each, {} different ones, 2 selectors",
            DIFFERENT * DEVICES
        );
        figure(
            &format!("first time that anybody asks with these selectors, {about}"),
            &format!("{first_time:.1?}"),
            Goal::none(),
        );
        let mut times = Times::default();
        for _ in 0..1000 {
            let start = Instant::now();
            let unsuitable = ask(&driver, &pod, &claim, &class, &asked).await;
            times.push(start.elapsed());
            assert_eq!(unsuitable, first);
        }
        figure(
            &format!("parameters and unsuitable_nodes for 128 nodes after that, {about}"),
            &times.to_string(),
            Goal::at_most(times.median(), Duration::from_millis(1)),
        );
    });
}

/// Memory of the controller for users' expressions.
pub(super) fn memory() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let driver = HostDriver::start(hostile_client(), DRIVER, CancellationToken::new());
        driver.ready().await.unwrap();
        let class: ResourceClass = serde_json::from_value(json!({
            "metadata": { "name": "test" }, "driverName": DRIVER,
            "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClassParameters", "name": "test" },
        }))
        .unwrap();
        let class = Arc::new(class);
        let class_parameters = driver.class_parameters(&class).await.unwrap();
        let rest = resident_kib();
        let mut refusals = BTreeMap::<String, usize>::new();
        for object in 0..HOSTILE {
            let claim: ResourceClaim = serde_json::from_value(json!({
                "metadata": { "namespace": namespace(object), "name": "asked", "uid": format!("asked-{object}") },
                "spec": { "resourceClassName": "test",
                    "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": "test" } },
            }))
            .unwrap();
            let answer = driver
                .claim_parameters(&Arc::new(claim), &class, &class_parameters)
                .await;
            let reason = answer.err().map_or_else(String::new, |error| error.reason.to_owned());
            *refusals.entry(reason).or_default() += 1;
        }
        let more = resident_kib().saturating_sub(rest);
        let served = refusals.remove("").unwrap_or_default();
        figure(
            &format!(
                "memory for {HOSTILE} objects of {HOSTILE} namespaces with 256 expressions each, {HOSTILE_DEVICES} different devices \
                 ({served} are evaluated, refused are {refusals:?})"
            ),
            &format!("{more} KiB above {rest} KiB"),
            Goal::below(more, HOSTILE_KIB),
        );
    });
}

fn namespace(number: usize) -> String {
    format!("namespace-{number:03}")
}

/// A server with parameters whose expressions are all distinct; half of them fail on each device with a distinct attribute.
fn hostile_client() -> kube::Client {
    let object = |kind: &str, namespace: &str, spec: &Value| {
        json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": kind,
            "metadata": { "name": "test", "namespace": namespace, "resourceVersion": "1" }, "spec": spec })
    };
    let expression = |number: usize| {
        let text = r#"device.attributes["drayman.dev"].text"#;
        let expression = if number.is_multiple_of(2) {
            format!("int({text}) == {number}")
        } else {
            format!("{text}.endsWith(\"{number}\")")
        };
        json!({ "cel": { "expression": expression } })
    };
    let request = |object: usize, request: usize| {
        let first = 16 * (16 * object + request);
        let selectors: Vec<Value> = (first..first + 16).map(expression).collect();
        json!({ "name": format!("r{request}"), "count": 1, "selectors": selectors })
    };
    let claim = |number: usize| {
        let requests: Vec<Value> = (0..16).map(|part| request(number, part)).collect();
        object(
            "DeviceClaimParameters",
            &namespace(number),
            &json!({ "requests": requests }),
        )
    };
    let device = |number: usize| {
        json!({ "name": format!("device-{number:04}"), "kind": "test", "mode": "claims",
            "attributes": { "drayman.dev/text": { "string": format!("a text of its own, number {number}") } } })
    };
    let inventory = |node: usize| {
        let devices: Vec<Value> = (100 * node..100 * (node + 1)).map(device).collect();
        inventory_of(&node_name(node), &devices)
    };
    let inventories: Vec<Value> = (0..HOSTILE_DEVICES / 100).map(inventory).collect();
    let class = object("DeviceClassParameters", "default", &json!({ "kind": "test" }));
    let claims: Vec<Value> = (0..HOSTILE).map(claim).collect();
    server(BTreeMap::from([
        ("nodeinventories", list(&inventories)),
        ("deviceclassparameters", list(&[class])),
        ("deviceclaimparameters", list(&claims)),
    ]))
}

/// A server with these inventories and parameters, and without later events.
fn client() -> kube::Client {
    let selector = |expression: &str| json!([{ "cel": { "expression": expression } }]);
    let vendor = selector(r#"device.attributes["drayman.dev"].vendor == "10de""#);
    let even = selector(r#"device.attributes["drayman.dev"].serial % 2 == 0"#);
    let object = |kind: &str, spec: &Value| {
        json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": kind,
            "metadata": { "name": "test", "namespace": "default", "resourceVersion": "1" }, "spec": spec })
    };
    let class = object(
        "DeviceClassParameters",
        &json!({ "kind": "test", "selectors": vendor }),
    );
    let requests = json!([{ "name": "device", "count": 1, "selectors": even }]);
    let claim = object("DeviceClaimParameters", &json!({ "requests": requests }));
    let lists = BTreeMap::from([
        (
            "nodeinventories",
            list(&(0..NODES).map(inventory).collect::<Vec<_>>()),
        ),
        ("deviceclassparameters", list(&[class])),
        ("deviceclaimparameters", list(&[claim])),
    ]);
    server(lists)
}

/// A server that answers with these lists.
pub(super) fn server(lists: BTreeMap<&'static str, Vec<u8>>) -> kube::Client {
    let lists = Arc::new(lists);
    let server = tower::service_fn(move |request: http::Request<Body>| {
        let lists = Arc::clone(&lists);
        async move {
            let query = request.uri().query().unwrap_or_default();
            if query.contains("watch=true") {
                std::future::pending::<()>().await;
            }
            let plural = request.uri().path().rsplit('/').next().unwrap_or_default();
            let list = lists.get(plural).cloned().unwrap();
            Ok::<_, Infallible>(http::Response::new(Body::from(list)))
        }
    });
    kube::Client::new(server, "default")
}

pub(super) fn list(items: &[Value]) -> Vec<u8> {
    let list = json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "List", "metadata": { "resourceVersion": "1" },
        "items": items });
    serde_json::to_vec(&list).unwrap()
}

fn inventory(node: usize) -> Value {
    let device = |device: usize| {
        json!({ "name": format!("device-{device:03}"), "kind": "test", "mode": "claims", "attributes": {
            "drayman.dev/vendor": { "string": "10de" },
            "drayman.dev/serial": { "int": device * 100_000 + node % DIFFERENT },
            "drayman.dev/numaNode": { "int": device / 4 },
        } })
    };
    let devices: Vec<Value> = (0..DEVICES).map(device).collect();
    inventory_of(&node_name(node), &devices)
}

/// The inventory of a ready node.
pub(super) fn inventory_of(node: &str, devices: &[Value]) -> Value {
    json!({
        "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
        "metadata": { "name": format!("{node}.{DRIVER}"), "resourceVersion": "1" },
        "spec": {
            "driverName": DRIVER, "nodeName": node, "nodeUid": format!("uid-{node}"), "devices": devices,
        },
        "status": { "devices": devices.len(), "unhealthy": 0, "conditions": [{ "type": "Ready", "status": "True",
            "reason": "Serving", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }] },
    })
}
