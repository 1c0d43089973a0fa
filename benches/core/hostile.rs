//! Cost of expensive claims for other namespaces, with the built-in driver and the controller's calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drayman::api::resource::{Pod, ResourceClaim, ResourceClass};
use drayman::driver::{ClaimRequest, Deallocation, Driver as _};
use drayman::host::HostDriver;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::figures::{Goal, Times, figure};
use super::selectors::{inventory_of, list, server};
use super::{DRIVER, node_name};

/// Number of honest allocations measured alone.
const ALONE: usize = 500;
/// Minimum number of honest allocations measured beside hostile pods.
const BESIDE: usize = 200;

/// The devices of a node, and the request of each claim of the hostile pod.
struct Hostile {
    what: &'static str,
    devices: usize,
    /// Number of devices with the same value of the attribute `group`.
    group: usize,
    parameters: Value,
}

fn hostile() -> [Hostile; 3] {
    let requests: Vec<Value> = (1..=8)
        .map(|number| json!({ "name": format!("r{number}"), "count": if number == 8 { 2 } else { 1 } }))
        .collect();
    let alone: Vec<Value> = (1..=7)
        .map(|number| json!({ "matchAttribute": "drayman.dev/group", "requests": [format!("r{number}")] }))
        .collect();
    [
        Hostile {
            what: "9 of 8 devices",
            devices: 8,
            group: 1,
            parameters: json!({ "requests": [{ "name": "r", "count": 9 }] }),
        },
        Hostile {
            what: "9 of 8 devices, each in a group of its own",
            devices: 8,
            group: 1,
            parameters: json!({ "requests": requests, "constraints": alone }),
        },
        Hostile {
            what: "4 devices of one of 10 groups of 6",
            devices: 60,
            group: 6,
            parameters: json!({ "requests": [{ "name": "r", "count": 4 }],
                "constraints": [{ "matchAttribute": "drayman.dev/group" }] }),
        },
    ]
}

pub(super) fn run() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    for hostile in hostile() {
        for (nodes, claims) in [(64, 1), (64, 16), (1000, 1), (1000, 16)] {
            runtime.block_on(measure(&hostile, nodes, claims));
        }
    }
}

async fn measure(hostile: &Hostile, nodes: usize, claims: usize) {
    let driver = driver(hostile, nodes);
    driver.ready().await.unwrap();
    let names: Vec<String> = (0..nodes).map(node_name).collect();
    let honest = requests(&driver, "honest", 1).await;
    let mut alone = Times::default();
    for _ in 0..ALONE {
        allocate(&driver, &honest, &mut alone).await;
        tokio::task::yield_now().await;
    }
    let pod = tokio::spawn({
        let driver = driver.clone();
        async move {
            let requests = requests(&driver, "hostile", claims).await;
            // The controller's calls for a pod with a context, and for a pod with immediate claims.
            for _ in 0..4 {
                driver
                    .unsuitable_nodes(&Pod::default(), &requests, &names)
                    .await
                    .unwrap();
                let _ = driver.allocate(&requests, None).await;
                for request in &requests {
                    deallocate(&driver, request).await;
                }
            }
        }
    });
    // Immediate claims are allocated in concurrent calls.
    let at_once = requests(&driver, "hostile", claims)
        .await
        .into_iter()
        .map(|request| {
            let driver = driver.clone();
            tokio::spawn(async move {
                for _ in 0..4 {
                    let _ = driver.allocate(std::slice::from_ref(&request), None).await;
                    deallocate(&driver, &request).await;
                }
            })
        });
    let at_once: Vec<_> = at_once.collect();
    let (mut beside, mut silence, mut last) = (Times::default(), Duration::ZERO, Instant::now());
    let mut number = 0;
    while !pod.is_finished() || at_once.iter().any(|claim| !claim.is_finished()) || number < BESIDE {
        allocate(&driver, &honest, &mut beside).await;
        tokio::task::yield_now().await;
        silence = silence.max(last.elapsed());
        last = Instant::now();
        number += 1;
    }
    pod.await.unwrap();
    for claim in at_once {
        claim.await.unwrap();
    }
    let about = format!("{nodes} nodes, {claims} claims of {}", hostile.what);
    figure(
        &format!("longest silence of the controller's thread, {about}"),
        &format!("{silence:.1?}"),
        Goal::at_most(silence, Duration::from_millis(50)),
    );
    figure(
        &format!("an honest allocation alone, {about}"),
        &alone.to_string(),
        Goal::none(),
    );
    figure(
        &format!("the same beside the hostile pod, {about}"),
        &beside.to_string(),
        Goal::at_most(beside.quantile(99), Duration::from_millis(1)),
    );
}

/// One cycle of an honest pod: check of the node, allocation, deallocation.
async fn allocate(driver: &HostDriver, honest: &[ClaimRequest<HostDriver>], times: &mut Times) {
    let (start, node) = (Instant::now(), ["honest".to_owned()]);
    driver
        .unsuitable_nodes(&Pod::default(), honest, &node)
        .await
        .unwrap();
    driver.allocate(honest, Some("honest")).await.unwrap();
    times.push(start.elapsed());
    for request in honest {
        deallocate(driver, request).await;
    }
}

async fn deallocate(driver: &HostDriver, request: &ClaimRequest<HostDriver>) {
    driver
        .deallocate(Deallocation::new(&request.claim))
        .await
        .unwrap();
}

async fn requests(driver: &HostDriver, name: &str, number: usize) -> Vec<ClaimRequest<HostDriver>> {
    let class: ResourceClass = serde_json::from_value(json!({
        "metadata": { "name": name }, "driverName": DRIVER,
        "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClassParameters", "name": name },
    }))
    .unwrap();
    let class = Arc::new(class);
    let mut requests = Vec::new();
    for index in 0..number {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": { "namespace": "default", "name": format!("{name}-{index}"), "uid": format!("{name}-{index}") },
            "spec": { "resourceClassName": name,
                "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": name } },
        }))
        .unwrap();
        let class_parameters = driver.class_parameters(&class).await.unwrap();
        let claim_parameters = driver
            .claim_parameters(&claim, &class, &class_parameters)
            .await
            .unwrap();
        requests.push(ClaimRequest::new(
            claim,
            Arc::clone(&class),
            class_parameters,
            claim_parameters,
        ));
    }
    requests
}

/// A driver with these nodes, and one with a device for the honest pod.
fn driver(hostile: &Hostile, nodes: usize) -> HostDriver {
    let object = |kind: &str, name: &str, spec: &Value| {
        json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": kind,
            "metadata": { "name": name, "namespace": "default", "resourceVersion": "1" }, "spec": spec })
    };
    let class = |name: &str| object("DeviceClassParameters", name, &json!({ "kind": name }));
    let one = json!({ "requests": [{ "name": "device", "count": 1 }] });
    let device = |kind: &str, number: usize| {
        json!({ "name": format!("device-{number:03}"), "kind": kind, "mode": "claims",
            "attributes": { "drayman.dev/group": { "int": number / hostile.group } } })
    };
    let devices: Vec<Value> = (0..hostile.devices)
        .map(|number| device("hostile", number))
        .collect();
    let mut inventories: Vec<Value> = (0..nodes)
        .map(|node| inventory_of(&node_name(node), &devices))
        .collect();
    inventories.push(inventory_of("honest", &[device("honest", 0)]));
    let parameters = [
        object("DeviceClaimParameters", "hostile", &hostile.parameters),
        object("DeviceClaimParameters", "honest", &one),
    ];
    let lists = BTreeMap::from([
        ("nodeinventories", list(&inventories)),
        (
            "deviceclassparameters",
            list(&[class("hostile"), class("honest")]),
        ),
        ("deviceclaimparameters", list(&parameters)),
    ]);
    HostDriver::start(server(lists), DRIVER, CancellationToken::new())
}
