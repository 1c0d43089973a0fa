//! Tests each step with the input that leads to it.

use serde_json::{Value, json};

use super::*;
use crate::api::resource::POD_CLAIM_NAME_ANNOTATION;

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn pod<T: serde::de::DeserializeOwned>() -> T {
    read(json!({
        "metadata": { "namespace": "shop", "name": "till", "uid": "p" },
        "spec": { "resourceClaims": [{ "name": "r", "source": { "resourceClaimTemplateName": "each" } }] },
        "status": { "phase": "Pending" },
    }))
}

fn claim(status: &Value) -> ResourceClaim {
    read(json!({
        "metadata": {
            "namespace": "shop", "name": "till-r-x1", "uid": "c",
            "annotations": { POD_CLAIM_NAME_ANNOTATION: "r" },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "till", "uid": "p", "controller": true }],
        },
        "spec": { "resourceClassName": "radio" },
        "status": status,
    }))
}

fn class() -> ResourceClass {
    read(json!({ "metadata": { "name": "radio" }, "driverName": "drayman.dev" }))
}

fn nodes(reasons: &[Option<&str>]) -> BTreeMap<String, Option<String>> {
    let named =
        |(number, reason): (usize, Option<&str>)| (format!("node-{number}"), reason.map(str::to_owned));
    reasons.iter().copied().enumerate().map(named).collect()
}

fn step(
    claim: &ResourceClaim,
    class: Option<&ResourceClass>,
    reasons: &[Option<&str>],
    selected: &str,
) -> ClaimExplanation {
    let (pod, classic_pod): (PartialPod, Pod) = (pod(), pod());
    let context: PodSchedulingContext = read(json!({ "spec": { "selectedNode": selected } }));
    let classes: Vec<ResourceClass> = class.cloned().into_iter().collect();
    explain(&ExplainInput {
        driver: "drayman.dev",
        pod: Some(&pod),
        entry: classic_pod.spec.resource_claims.first(),
        found: Resolved::Claim(claim),
        classes: Some(&classes),
        wants: Some(Ok("1 of kind radio")),
        context: Some(&context),
        nodes: &nodes(reasons),
    })
}

#[test]
fn a_claim_is_found_by_pod_status_annotation_and_old_name() {
    let (mut pod, mut claim) = (pod::<Pod>(), claim(&json!({})));
    let found = |pod: &Pod, claim: &ResourceClaim| {
        let entry = pod.spec.resource_claims[0].clone();
        match find(pod, &entry, &ClaimIndex::new(std::slice::from_ref(claim))) {
            Resolved::Claim(_) => "claim",
            Resolved::NotOwned(_) => "not owned",
            Resolved::Awaited => "missing",
            Resolved::NotNeeded => "not needed",
        }
    };
    assert_eq!(found(&pod, &claim), "claim");
    claim.metadata.annotations = None;
    assert_eq!(found(&pod, &claim), "missing");
    claim.metadata.name = Some("till-r".into());
    assert_eq!(found(&pod, &claim), "claim");
    claim.metadata.owner_references = None;
    assert_eq!(found(&pod, &claim), "not owned");
    pod.status.resource_claim_statuses = read(json!([{ "name": "r" }]));
    assert_eq!(found(&pod, &claim), "not needed");
}

#[test]
fn claims_of_one_name_differ_by_namespace_and_owner() {
    let mut pod = pod::<Pod>();
    let entry = pod.spec.resource_claims[0].clone();
    let others = ["bar", "shop"].map(|namespace| {
        let mut claim = claim(&json!({}));
        claim.metadata.namespace = Some(namespace.into());
        claim.metadata.owner_references.as_mut().unwrap()[0].uid = "of another pod".into();
        claim
    });
    let mut all = others.to_vec();
    all.push(claim(&json!({})));
    all[2].metadata.name = Some("by annotation".into());
    pod.status.resource_claim_statuses = read(json!([{ "name": "r", "resourceClaimName": "till-r-x1" }]));
    let found = |claims: &[ResourceClaim]| match find(&pod, &entry, &ClaimIndex::new(claims)) {
        Resolved::Claim(claim) | Resolved::NotOwned(claim) => claim.metadata.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(found(&all).name.as_deref(), Some("by annotation"));
    assert_eq!(found(&others).namespace.as_deref(), Some("shop"));
}

#[test]
fn an_unservable_claim_has_a_reason_for_each_node() {
    let explanation = step(
        &claim(&json!({})),
        Some(&class()),
        &[Some("3 of 3 held"), Some("no inventory")],
        "",
    );
    assert_eq!(explanation.step, ClaimStep::WaitsForDevice);
    assert_eq!(explanation.because, "none of 2 nodes can serve it now");
    assert_eq!(explanation.nodes[0].reason.as_deref(), Some("3 of 3 held"));
}

#[test]
fn a_servable_claim_waits_for_the_scheduler_or_is_in_progress() {
    let free = [None, Some("3 of 3 held")];
    let (claim, class) = (claim(&json!({})), class());
    assert_eq!(
        step(&claim, Some(&class), &free, "node-1").step,
        ClaimStep::WaitsForScheduler
    );
    assert_eq!(
        step(&claim, Some(&class), &free, "node-0").step,
        ClaimStep::Allocating
    );
}

#[test]
fn missing_and_foreign_classes_are_named() {
    let claim = claim(&json!({}));
    assert_eq!(step(&claim, None, &[None], "").step, ClaimStep::ClassMissing);
    let mut other = class();
    other.driver_name = "gpu.example".into();
    let explanation = step(&claim, Some(&other), &[None], "");
    assert_eq!(explanation.step, ClaimStep::NotOurs);
    assert!(explanation.because.contains("gpu.example"));
    other.structured_parameters = Some(true);
    assert!(
        step(&claim, Some(&other), &[None], "")
            .because
            .contains("scheduler")
    );
}

#[test]
fn an_allocated_claim_waits_for_binding_or_reservation() {
    let reserved =
        json!({ "allocation": {}, "reservedFor": [{ "resource": "pods", "name": "till", "uid": "p" }] });
    let explanation = step(&claim(&reserved), Some(&class()), &[], "");
    assert_eq!(explanation.step, ClaimStep::WaitsForBinding);
    let other =
        json!({ "allocation": {}, "reservedFor": [{ "resource": "pods", "name": "bar", "uid": "q" }] });
    let explanation = step(&claim(&other), Some(&class()), &[], "");
    assert_eq!(explanation.step, ClaimStep::WaitsForReservation);
    assert!(explanation.advice.unwrap().contains("template"));
}

#[test]
fn a_pod_that_has_ended_needs_no_claim() {
    let (mut pod, classic_pod): (PartialPod, Pod) = (pod(), pod());
    pod.status.as_mut().unwrap().phase = Some("Failed".into());
    let explanation = explain(&ExplainInput {
        driver: "drayman.dev",
        pod: Some(&pod),
        entry: classic_pod.spec.resource_claims.first(),
        found: Resolved::Awaited,
        classes: None,
        wants: None,
        context: None,
        nodes: &BTreeMap::new(),
    });
    assert_eq!(explanation.step, ClaimStep::NotNeeded);
    assert_eq!(
        explanation.because,
        "the pod has failed, and no longer needs the claim"
    );
}

#[test]
fn a_deleted_claim_names_its_finalizers() {
    let mut claim = claim(&json!({}));
    claim.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        jiff::Timestamp::UNIX_EPOCH,
    ));
    claim.metadata.finalizers = Some(vec!["gpu.example/deletion-protection".into()]);
    let explanation = step(&claim, Some(&class()), &[], "");
    assert_eq!(explanation.step, ClaimStep::Deleting);
    assert!(explanation.because.contains("gpu.example/deletion-protection"));
}

#[test]
fn without_inventories_the_nodes_are_unknown() {
    let (pod, classic_pod): (PartialPod, Pod) = (pod(), pod());
    let (claim, class) = (claim(&json!({})), class());
    let explanation = explain(&ExplainInput {
        driver: "drayman.dev",
        pod: Some(&pod),
        entry: classic_pod.spec.resource_claims.first(),
        found: Resolved::Claim(&claim),
        classes: Some(std::slice::from_ref(&class)),
        wants: None,
        context: None,
        nodes: &BTreeMap::new(),
    });
    assert_eq!(explanation.step, ClaimStep::WaitsForScheduler);
    assert!(explanation.because.contains("unknown"), "{}", explanation.because);
}

#[test]
fn a_claim_of_a_newer_api_is_not_served() {
    let status = json!({});
    for field in ["resourceClaimName", "resourceClaimTemplateName"] {
        let pod: Pod = read(json!({
            "metadata": { "namespace": "shop", "name": "till", "uid": "p" },
            "spec": { "resourceClaims": [{ "name": "r", field: "each" }] },
            "status": status,
        }));
        let entry = pod.spec.resource_claims.first().unwrap();
        let explanation = explain(&ExplainInput {
            driver: "drayman.dev",
            pod: None,
            entry: Some(entry),
            found: find(&pod, entry, &ClaimIndex::default()),
            classes: None,
            wants: None,
            context: None,
            nodes: &BTreeMap::new(),
        });
        assert_eq!(explanation.step, ClaimStep::NotServed);
        for word in ["does not serve resource.k8s.io/v1,", "from 1.34 on"] {
            assert!(
                explanation.because.contains(word),
                "{word}: {}",
                explanation.because
            );
        }
        assert!(explanation.advice.unwrap().contains("extended-resource"));
    }
}
