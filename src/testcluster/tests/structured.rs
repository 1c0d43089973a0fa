//! Tests the control loops of structured mode pass by pass.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::testcluster::api::structured::FINALIZER;
use crate::testcluster::api::{ApiServer, ClusterMode, object};
use crate::testcluster::client::ApiClient;
use crate::testcluster::clock_and_rng::ClockAndRng;
use crate::testcluster::{claims, scheduler};

/// A cluster of two nodes with a camera each, and a template for one camera.
fn cluster() -> ApiClient {
    let source = ClockAndRng::new(Box::new(|| jiff::Timestamp::UNIX_EPOCH), 1);
    let client = ApiClient::new(
        &ApiServer::with_mode(Arc::new(source), ClusterMode::Structured),
        "test",
    );
    for name in ["node-a", "node-b"] {
        let node = json!({
            "metadata": { "name": name },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        client.create("nodes", "", node).unwrap();
        let device =
            json!({ "name": "camera-1", "attributes": { "drayman.dev/kind": { "string": "cameras" } } });
        let slice = json!({
            "metadata": { "name": format!("{name}.drayman.dev-00") },
            "spec": {
                "driver": "drayman.dev", "nodeName": name, "devices": [device],
                "pool": { "name": name, "generation": 1, "resourceSliceCount": 1 },
            },
        });
        client.create("resourceslices", "", slice).unwrap();
    }
    let expression =
        r#"device.driver == "drayman.dev" && device.attributes["drayman.dev"].kind == "cameras""#;
    let class = json!({
        "metadata": { "name": "cameras" }, "spec": { "selectors": [{ "cel": { "expression": expression } }] },
    });
    client.create("deviceclasses", "", class).unwrap();
    let template = json!({ "metadata": { "name": "t" }, "spec": { "spec": spec() } });
    client
        .create("resourceclaimtemplates", "default", template)
        .unwrap();
    client
}

/// The spec of a claim for one camera.
fn spec() -> Value {
    json!({ "devices": { "requests": [{ "name": "camera", "exactly": { "deviceClassName": "cameras" } }] } })
}

fn pod(client: &ApiClient, name: &str, entry: Value) -> Value {
    let mut entry = entry;
    entry["name"] = "device".into();
    let pod = json!({
        "metadata": { "name": name },
        "spec": { "resourceClaims": [entry], "containers": [{ "name": "main", "image": "i" }] },
    });
    client.create("pods", "default", pod).unwrap()
}

fn of_template(client: &ApiClient, name: &str) -> Value {
    pod(client, name, json!({ "resourceClaimTemplateName": "t" }))
}

fn shared_claim(client: &ApiClient) -> Value {
    let claim = json!({ "metadata": { "name": "shared" }, "spec": spec() });
    client.create("resourceclaims", "default", claim).unwrap()
}

fn run(client: &ApiClient) {
    for _ in 0..2 {
        claims::reconcile(client);
        scheduler::reconcile(client);
    }
}

fn node_of(client: &ApiClient, pod: &Value) -> Value {
    client.get("pods", "default", object::name(pod)).unwrap()["spec"]["nodeName"].clone()
}

fn finish(client: &ApiClient, pod: &Value) {
    let status = json!({ "status": { "phase": "Succeeded" } });
    client.merge("pods", pod, "status", status).unwrap();
}

fn messages(client: &ApiClient) -> Vec<Value> {
    let events = client.list("events").into_iter();
    let failed = events.filter(|event| event["reason"] == "FailedScheduling");
    failed.map(|event| event["message"].clone()).collect()
}

#[test]
fn a_claim_is_allocated_and_reserved_for_its_pod() {
    let client = cluster();
    let pod = of_template(&client, "p");
    run(&client);
    assert_eq!(node_of(&client, &pod), "node-a");
    let claim = client.list("resourceclaims").remove(0);
    assert_eq!(claim["metadata"]["finalizers"], json!([FINALIZER]));
    assert_eq!(
        claim["status"]["reservedFor"],
        json!([{ "resource": "pods", "name": "p", "uid": pod["metadata"]["uid"] }])
    );
    let allocation = &claim["status"]["allocation"];
    assert_eq!(
        allocation["devices"]["results"],
        json!([{ "request": "camera", "driver": "drayman.dev", "pool": "node-a", "device": "camera-1" }])
    );
    assert_eq!(
        allocation["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"],
        json!([{ "key": "metadata.name", "operator": "In", "values": ["node-a"] }])
    );
}

#[test]
fn allocation_and_reservation_are_one_write() {
    let client = cluster();
    of_template(&client, "p");
    run(&client);
    let statuses: Vec<(bool, bool)> = client
        .server
        .history(1)
        .into_iter()
        .filter(|change| change.plural == "resourceclaims")
        .filter_map(|change| change.after)
        .map(|claim| {
            let allocated = claim.pointer("/status/allocation").is_some();
            (allocated, !object::list(&claim, "/status/reservedFor").is_empty())
        })
        .collect();
    // Created, protected by the finalizer, allocated.
    assert_eq!(statuses, [(false, false), (false, false), (true, true)]);
}

#[test]
fn a_pod_waits_until_a_device_is_released() {
    let client = cluster();
    let pods = ["a", "b", "c"].map(|name| of_template(&client, name));
    run(&client);
    assert_eq!(
        pods.each_ref().map(|pod| node_of(&client, pod)),
        [json!("node-a"), json!("node-b"), Value::Null]
    );
    assert_eq!(
        messages(&client),
        ["0/2 nodes are available: 2 cannot allocate all claims."]
    );
    finish(&client, &pods[1]);
    run(&client);
    assert_eq!(node_of(&client, &pods[2]), "node-b");
    assert_eq!(client.list("resourceclaims").len(), 2);
}

#[test]
fn a_claim_is_deallocated_after_its_last_pod() {
    let client = cluster();
    shared_claim(&client);
    let named = json!({ "resourceClaimName": "shared" });
    let pods = ["a", "b"].map(|name| pod(&client, name, named.clone()));
    run(&client);
    assert_eq!(
        pods.each_ref().map(|pod| node_of(&client, pod)),
        ["node-a", "node-a"]
    );
    finish(&client, &pods[0]);
    claims::reconcile(&client);
    let claim = client.get("resourceclaims", "default", "shared").unwrap();
    assert_eq!(object::list(&claim, "/status/reservedFor").len(), 1);
    assert!(claim.pointer("/status/allocation").is_some());
    finish(&client, &pods[1]);
    claims::reconcile(&client);
    let claim = client.get("resourceclaims", "default", "shared").unwrap();
    assert_eq!(claim["status"], json!({}));
    assert_eq!(claim["metadata"].get("finalizers"), None);
}

#[test]
fn a_deleted_claim_stays_until_its_pod_ends() {
    let client = cluster();
    let claim = shared_claim(&client);
    let pod = pod(&client, "p", json!({ "resourceClaimName": "shared" }));
    run(&client);
    client.delete("resourceclaims", &claim, None).unwrap();
    claims::reconcile(&client);
    assert!(client.get("resourceclaims", "default", "shared").is_some());
    finish(&client, &pod);
    claims::reconcile(&client);
    assert!(client.get("resourceclaims", "default", "shared").is_none());
}

#[test]
fn an_unused_allocation_on_an_unsuitable_node_is_cleared() {
    let client = cluster();
    let claim = shared_claim(&client);
    let selector = json!({ "nodeSelectorTerms": [{ "matchFields": [
        { "key": "metadata.name", "operator": "In", "values": ["elsewhere"] }] }] });
    let result =
        json!({ "request": "camera", "driver": "drayman.dev", "pool": "elsewhere", "device": "camera-1" });
    let allocation = json!({ "nodeSelector": selector, "devices": { "results": [result] } });
    let status = json!({ "status": { "allocation": allocation } });
    client.merge("resourceclaims", &claim, "status", status).unwrap();
    let pod = pod(&client, "p", json!({ "resourceClaimName": "shared" }));
    scheduler::reconcile(&client);
    assert_eq!(
        messages(&client),
        ["0/2 nodes are available: 2 resourceclaim not available on the node."]
    );
    scheduler::reconcile(&client);
    assert_eq!(node_of(&client, &pod), "node-a");
}

#[test]
fn a_missing_class_is_reported() {
    let client = cluster();
    let mut spec = spec();
    spec["devices"]["requests"][0]["exactly"]["deviceClassName"] = "lenses".into();
    let claim = json!({ "metadata": { "name": "shared" }, "spec": spec });
    client.create("resourceclaims", "default", claim).unwrap();
    pod(&client, "p", json!({ "resourceClaimName": "shared" }));
    run(&client);
    assert_eq!(
        messages(&client),
        ["request camera: device class lenses does not exist"]
    );
}
