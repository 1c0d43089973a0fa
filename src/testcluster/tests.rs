//! Tests the control loops pass by pass.

mod structured;

use std::sync::Arc;

use serde_json::{Value, json};

use super::api::{ApiServer, object};
use super::client::ApiClient;
use super::clock_and_rng::ClockAndRng;
use super::{claims, garbage, scheduler};

fn cluster() -> ApiClient {
    let source = ClockAndRng::new(Box::new(|| jiff::Timestamp::UNIX_EPOCH), 1);
    let client = ApiClient::new(&ApiServer::new(Arc::new(source)), "test");
    for name in ["node-a", "node-b"] {
        let node = json!({
            "metadata": { "name": name },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }], "allocatable": { "x.dev/y": "1" } },
        });
        client.create("nodes", "", node).unwrap();
    }
    let class = json!({ "metadata": { "name": "test" }, "driverName": "drayman.dev" });
    client.create("resourceclasses", "", class).unwrap();
    let template =
        json!({ "metadata": { "name": "t" }, "spec": { "spec": { "resourceClassName": "test" } } });
    client
        .create("resourceclaimtemplates", "default", template)
        .unwrap();
    client
}

fn pod(client: &ApiClient, name: &str, entries: &[&str]) -> Value {
    let entries: Vec<Value> = entries
        .iter()
        .map(|entry| json!({ "name": entry, "source": { "resourceClaimTemplateName": "t" } }))
        .collect();
    let pod = json!({
        "metadata": { "name": name },
        "spec": { "resourceClaims": entries, "containers": [{ "name": "main", "image": "i" }] },
    });
    client.create("pods", "default", pod).unwrap()
}

fn the_claim(client: &ApiClient) -> Value {
    let claims = client.list("resourceclaims");
    assert_eq!(claims.len(), 1, "{claims:?}");
    (*claims[0]).clone()
}

fn allocate(client: &ApiClient, claim: &Value, node: &str) {
    let status = json!({ "status": {
        "driverName": "drayman.dev",
        "allocation": { "availableOnNodes": { "nodeSelectorTerms": [{ "matchFields": [
            { "key": "metadata.name", "operator": "In", "values": [node] }] }] } },
    } });
    client.merge("resourceclaims", claim, "status", status).unwrap();
}

fn context(client: &ApiClient) -> Option<Value> {
    client.get("podschedulingcontexts", "default", "p")
}

#[test]
fn a_claim_is_made_once_from_a_template_and_named_in_the_pod() {
    let client = cluster();
    pod(&client, "p", &["device"]);
    claims::reconcile(&client);
    claims::reconcile(&client);
    let claim = the_claim(&client);
    assert!(object::name(&claim).starts_with("p-device-"));
    let pod = client.get("pods", "default", "p").unwrap();
    assert_eq!(
        pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"],
        claim["metadata"]["name"]
    );
}

#[test]
fn a_missing_template_is_reported_only_once() {
    let client = cluster();
    let template = client.get("resourceclaimtemplates", "default", "t").unwrap();
    client.delete("resourceclaimtemplates", &template, None).unwrap();
    pod(&client, "p", &["device"]);
    claims::reconcile(&client);
    let version = client.list("events")[0]["metadata"]["resourceVersion"].clone();
    claims::reconcile(&client);
    let events = client.list("events");
    assert_eq!(events.len(), 1);
    // Each change would start another pass.
    assert_eq!(events[0]["metadata"]["resourceVersion"], version);
}

#[test]
fn with_one_claim_the_node_is_selected_at_once() {
    let client = cluster();
    pod(&client, "p", &["device"]);
    scheduler::reconcile(&client);
    assert!(context(&client).is_none(), "the claim is not there yet");
    claims::reconcile(&client);
    scheduler::reconcile(&client);
    let spec = context(&client).unwrap()["spec"].clone();
    assert_eq!(
        spec,
        json!({ "potentialNodes": ["node-a", "node-b"], "selectedNode": "node-a" })
    );
    allocate(&client, &the_claim(&client), "node-a");
    scheduler::reconcile(&client);
    let pod = client.get("pods", "default", "p").unwrap();
    assert_eq!(pod["spec"]["nodeName"], "node-a");
    assert_eq!(
        the_claim(&client)["status"]["reservedFor"][0]["uid"],
        pod["metadata"]["uid"]
    );
    assert!(context(&client).is_none());
}

#[test]
fn with_two_claims_the_node_waits_for_both_answers() {
    let client = cluster();
    pod(&client, "p", &["a", "b"]);
    claims::reconcile(&client);
    scheduler::reconcile(&client);
    let asked = context(&client).unwrap();
    assert_eq!(asked["spec"].get("selectedNode"), None);
    let answer = |entries: Value| json!({ "status": { "resourceClaims": entries } });
    client
        .merge(
            "podschedulingcontexts",
            &asked,
            "status",
            answer(json!([{ "name": "a" }])),
        )
        .unwrap();
    scheduler::reconcile(&client);
    assert_eq!(context(&client).unwrap()["spec"].get("selectedNode"), None);
    let both = json!([{ "name": "a" }, { "name": "b", "unsuitableNodes": ["node-a"] }]);
    client
        .merge("podschedulingcontexts", &asked, "status", answer(both))
        .unwrap();
    scheduler::reconcile(&client);
    assert_eq!(context(&client).unwrap()["spec"]["selectedNode"], "node-b");
}

#[test]
fn an_unschedulable_pod_gets_one_event_with_the_reason() {
    let client = cluster();
    let wants = json!({
        "metadata": { "name": "p" },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": { "x.dev/y": 2 } } }] },
    });
    client.create("pods", "default", wants).unwrap();
    scheduler::reconcile(&client);
    scheduler::reconcile(&client);
    let events = client.list("events");
    assert_eq!(events.len(), 1);
    assert_eq!(
        events[0]["message"],
        "0/2 nodes are available: 2 Insufficient x.dev/y."
    );
    assert_eq!(events[0]["count"], 1);
}

#[test]
fn a_claim_that_prevents_scheduling_must_be_deallocated() {
    let client = cluster();
    pod(&client, "p", &["device"]);
    claims::reconcile(&client);
    allocate(&client, &the_claim(&client), "elsewhere");
    scheduler::reconcile(&client);
    assert_eq!(the_claim(&client)["status"]["deallocationRequested"], true);
}

#[test]
fn the_last_pod_that_is_done_asks_for_deallocation_and_deletion() {
    let client = cluster();
    let pod = pod(&client, "p", &["device"]);
    claims::reconcile(&client);
    let claim = the_claim(&client);
    let finalizer = json!({ "metadata": { "finalizers": ["drayman.dev/deletion-protection"] } });
    client.merge("resourceclaims", &claim, "", finalizer).unwrap();
    allocate(&client, &claim, "node-a");
    scheduler::reconcile(&client);
    client
        .merge(
            "pods",
            &pod,
            "status",
            json!({ "status": { "phase": "Succeeded" } }),
        )
        .unwrap();
    claims::reconcile(&client);
    let claim = the_claim(&client);
    assert_eq!(claim["status"].get("reservedFor"), None);
    assert_eq!(claim["status"]["deallocationRequested"], true);
    assert!(object::is_deleting(&claim));
}

#[test]
fn orphans_are_collected_and_empty_namespaces_are_removed() {
    let client = cluster();
    let first = pod(&client, "p", &["device"]);
    claims::reconcile(&client);
    garbage::reconcile(&client);
    the_claim(&client);
    client.delete("pods", &first, None).unwrap();
    garbage::reconcile(&client);
    assert!(client.list("resourceclaims").is_empty());
    let namespace = client
        .create("namespaces", "", json!({ "metadata": { "name": "n" } }))
        .unwrap();
    client
        .create("configmaps", "n", json!({ "metadata": { "name": "m" } }))
        .unwrap();
    client.delete("namespaces", &namespace, None).unwrap();
    assert_eq!(
        client
            .create("configmaps", "n", json!({ "metadata": { "name": "o" } }))
            .unwrap_err()
            .code,
        403
    );
    garbage::reconcile(&client);
    garbage::reconcile(&client);
    assert!(client.get("namespaces", "", "n").is_none());
}
