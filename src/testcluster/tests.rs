//! Tests the control loops pass by pass.

mod structured;

use std::sync::Arc;

use serde_json::{Value, json};

use super::api::{ApiServer, object};
use super::hand::Hand;
use super::source::Source;
use super::{claims, garbage, scheduler};

fn cluster() -> Hand {
    let source = Source::new(Box::new(|| jiff::Timestamp::UNIX_EPOCH), 1);
    let hand = Hand::new(&ApiServer::new(Arc::new(source)), "test");
    for name in ["node-a", "node-b"] {
        let node = json!({
            "metadata": { "name": name },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }], "allocatable": { "x.dev/y": "1" } },
        });
        hand.create("nodes", "", node).unwrap();
    }
    let class = json!({ "metadata": { "name": "test" }, "driverName": "drayman.dev" });
    hand.create("resourceclasses", "", class).unwrap();
    let template =
        json!({ "metadata": { "name": "t" }, "spec": { "spec": { "resourceClassName": "test" } } });
    hand.create("resourceclaimtemplates", "default", template)
        .unwrap();
    hand
}

fn pod(hand: &Hand, name: &str, entries: &[&str]) -> Value {
    let entries: Vec<Value> = entries
        .iter()
        .map(|entry| json!({ "name": entry, "source": { "resourceClaimTemplateName": "t" } }))
        .collect();
    let pod = json!({
        "metadata": { "name": name },
        "spec": { "resourceClaims": entries, "containers": [{ "name": "main", "image": "i" }] },
    });
    hand.create("pods", "default", pod).unwrap()
}

fn the_claim(hand: &Hand) -> Value {
    let claims = hand.list("resourceclaims");
    assert_eq!(claims.len(), 1, "{claims:?}");
    claims[0].clone()
}

fn allocate(hand: &Hand, claim: &Value, node: &str) {
    let status = json!({ "status": {
        "driverName": "drayman.dev",
        "allocation": { "availableOnNodes": { "nodeSelectorTerms": [{ "matchFields": [
            { "key": "metadata.name", "operator": "In", "values": [node] }] }] } },
    } });
    hand.merge("resourceclaims", claim, "status", status).unwrap();
}

fn context(hand: &Hand) -> Option<Value> {
    hand.get("podschedulingcontexts", "default", "p")
}

#[test]
fn a_claim_is_made_once_from_a_template_and_named_in_the_pod() {
    let hand = cluster();
    pod(&hand, "p", &["device"]);
    claims::pass(&hand);
    claims::pass(&hand);
    let claim = the_claim(&hand);
    assert!(object::name(&claim).starts_with("p-device-"));
    let pod = hand.get("pods", "default", "p").unwrap();
    assert_eq!(
        pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"],
        claim["metadata"]["name"]
    );
}

#[test]
fn with_one_claim_the_node_is_selected_at_once() {
    let hand = cluster();
    pod(&hand, "p", &["device"]);
    scheduler::pass(&hand);
    assert!(context(&hand).is_none(), "the claim is not there yet");
    claims::pass(&hand);
    scheduler::pass(&hand);
    let spec = context(&hand).unwrap()["spec"].clone();
    assert_eq!(
        spec,
        json!({ "potentialNodes": ["node-a", "node-b"], "selectedNode": "node-a" })
    );
    allocate(&hand, &the_claim(&hand), "node-a");
    scheduler::pass(&hand);
    let pod = hand.get("pods", "default", "p").unwrap();
    assert_eq!(pod["spec"]["nodeName"], "node-a");
    assert_eq!(
        the_claim(&hand)["status"]["reservedFor"][0]["uid"],
        pod["metadata"]["uid"]
    );
    assert!(context(&hand).is_none());
}

#[test]
fn with_two_claims_the_node_waits_for_both_answers() {
    let hand = cluster();
    pod(&hand, "p", &["a", "b"]);
    claims::pass(&hand);
    scheduler::pass(&hand);
    let asked = context(&hand).unwrap();
    assert_eq!(asked["spec"].get("selectedNode"), None);
    let answer = |entries: Value| json!({ "status": { "resourceClaims": entries } });
    hand.merge(
        "podschedulingcontexts",
        &asked,
        "status",
        answer(json!([{ "name": "a" }])),
    )
    .unwrap();
    scheduler::pass(&hand);
    assert_eq!(context(&hand).unwrap()["spec"].get("selectedNode"), None);
    let both = json!([{ "name": "a" }, { "name": "b", "unsuitableNodes": ["node-a"] }]);
    hand.merge("podschedulingcontexts", &asked, "status", answer(both))
        .unwrap();
    scheduler::pass(&hand);
    assert_eq!(context(&hand).unwrap()["spec"]["selectedNode"], "node-b");
}

#[test]
fn a_pod_that_fits_nowhere_is_told_why_and_only_once() {
    let hand = cluster();
    let wants = json!({
        "metadata": { "name": "p" },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": { "x.dev/y": 2 } } }] },
    });
    hand.create("pods", "default", wants).unwrap();
    scheduler::pass(&hand);
    scheduler::pass(&hand);
    let events = hand.list("events");
    assert_eq!(events.len(), 1);
    assert_eq!(
        events[0]["message"],
        "0/2 nodes are available: 2 Insufficient x.dev/y."
    );
    assert_eq!(events[0]["count"], 1);
}

#[test]
fn a_claim_that_is_in_the_way_is_given_up() {
    let hand = cluster();
    pod(&hand, "p", &["device"]);
    claims::pass(&hand);
    allocate(&hand, &the_claim(&hand), "elsewhere");
    scheduler::pass(&hand);
    assert_eq!(the_claim(&hand)["status"]["deallocationRequested"], true);
}

#[test]
fn the_last_pod_that_is_done_asks_for_deallocation_and_deletion() {
    let hand = cluster();
    let pod = pod(&hand, "p", &["device"]);
    claims::pass(&hand);
    let claim = the_claim(&hand);
    let finalizer = json!({ "metadata": { "finalizers": ["drayman.dev/deletion-protection"] } });
    hand.merge("resourceclaims", &claim, "", finalizer).unwrap();
    allocate(&hand, &claim, "node-a");
    scheduler::pass(&hand);
    hand.merge(
        "pods",
        &pod,
        "status",
        json!({ "status": { "phase": "Succeeded" } }),
    )
    .unwrap();
    claims::pass(&hand);
    let claim = the_claim(&hand);
    assert_eq!(claim["status"].get("reservedFor"), None);
    assert_eq!(claim["status"]["deallocationRequested"], true);
    assert!(object::is_deleting(&claim));
}

#[test]
fn orphans_are_collected_and_empty_namespaces_are_removed() {
    let hand = cluster();
    let first = pod(&hand, "p", &["device"]);
    claims::pass(&hand);
    garbage::pass(&hand);
    the_claim(&hand);
    hand.delete("pods", &first, None).unwrap();
    garbage::pass(&hand);
    assert!(hand.list("resourceclaims").is_empty());
    let namespace = hand
        .create("namespaces", "", json!({ "metadata": { "name": "n" } }))
        .unwrap();
    hand.create("configmaps", "n", json!({ "metadata": { "name": "m" } }))
        .unwrap();
    hand.delete("namespaces", &namespace, None).unwrap();
    assert_eq!(
        hand.create("configmaps", "n", json!({ "metadata": { "name": "o" } }))
            .unwrap_err()
            .code,
        403
    );
    garbage::pass(&hand);
    garbage::pass(&hand);
    assert!(hand.get("namespaces", "", "n").is_none());
}
