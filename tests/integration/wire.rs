//! Round-trip tests of the hand-written `resource.k8s.io/v1alpha2` types with objects stored by kube-apiserver 1.30, which have every field
//! of the API.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::path::Path;

use drayman::api::resource::{
    AllocationMode, Pod, PodSchedulingContext, ResourceClaim, ResourceClaimTemplate, ResourceClass,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn fixture(name: &str) -> Value {
    let directory =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/integration/fixtures/resource-v1alpha2");
    let text = std::fs::read_to_string(directory.join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Checks that a fixture survives a round trip. `apiVersion` and `kind` come from the type, and an unset time, which Go writes as null, is
/// omitted.
fn same<T: Serialize + DeserializeOwned>(name: &str) -> T {
    let mut original = fixture(name);
    let template = original
        .pointer_mut("/spec/metadata")
        .and_then(Value::as_object_mut);
    if let Some(metadata) = template {
        assert_eq!(metadata.remove("creationTimestamp"), Some(Value::Null));
    }
    let read: T = serde_json::from_value(original.clone()).unwrap();
    let mut written = serde_json::to_value(&read).unwrap();
    for field in ["apiVersion", "kind"] {
        written[field] = original[field].clone();
    }
    assert_eq!(written, original, "{name}");
    read
}

#[test]
fn classes_are_exact_on_the_wire() {
    let class: ResourceClass = same("class-everything");
    assert_eq!(class.structured_parameters, Some(true));
    assert_eq!(class.suitable_nodes.unwrap().node_selector_terms.len(), 2);
    assert_eq!(
        class.parameters_ref.unwrap().namespace.as_deref(),
        Some("fixtures")
    );
    assert_eq!(same::<ResourceClass>("class-least").parameters_ref, None);
}

#[test]
fn claims_are_exact_on_the_wire() {
    let claim: ResourceClaim = same("claim-allocated");
    let allocation = claim.status.allocation.unwrap();
    assert!(allocation.shareable && allocation.available_on_nodes.is_some());
    assert_eq!(
        (allocation.resource_handles.len(), claim.status.reserved_for.len()),
        (2, 2)
    );
    assert_eq!(claim.spec.parameters_ref.unwrap().name, "two");
    assert!(
        same::<ResourceClaim>("claim-deallocating")
            .status
            .deallocation_requested
    );
    let least: ResourceClaim = same("claim-least");
    assert_eq!(
        least.spec.allocation_mode,
        Some(AllocationMode::WaitForFirstConsumer),
        "the server's default"
    );
}

#[test]
fn an_allocation_of_the_scheduler_is_kept_unchanged() {
    let claim: ResourceClaim = same("claim-structured");
    let handle = claim.status.allocation.unwrap().resource_handles.remove(0);
    assert_eq!(handle.data, None);
    assert_eq!(
        handle.structured_data.unwrap()["results"][0]["namedResources"]["name"],
        "gpu-0"
    );
    assert_eq!(claim.spec.allocation_mode, Some(AllocationMode::Immediate));
}

#[test]
fn templates_are_exact_on_the_wire() {
    let template: ResourceClaimTemplate = same("template-everything");
    assert_eq!(template.spec.metadata.unwrap().labels.unwrap()["example"], "yes");
}

#[test]
fn scheduling_contexts_are_exact_on_the_wire() {
    let context: PodSchedulingContext = same("context-everything");
    assert_eq!(
        (
            context.spec.selected_node.as_str(),
            context.spec.potential_nodes.len()
        ),
        ("node-a", 2)
    );
    assert_eq!(context.status.resource_claims[0].unsuitable_nodes, ["node-b"]);
    assert_eq!(
        same::<PodSchedulingContext>("context-least")
            .status
            .resource_claims,
        []
    );
}

/// Only the claim-related fields of a pod status are read; all other fields of a pod are kept.
#[test]
fn pods_keep_everything_but_the_rest_of_their_status() {
    let mut original = fixture("pod");
    let pod: Pod = serde_json::from_value(original.clone()).unwrap();
    let status = original["status"].as_object_mut().unwrap();
    status.retain(|field, _| ["phase", "resourceClaimStatuses"].contains(&field.as_str()));
    let mut written = serde_json::to_value(&pod).unwrap();
    for field in ["apiVersion", "kind"] {
        written[field] = original[field].clone();
    }
    assert_eq!(written, original);
    assert_eq!(
        pod.spec.resource_claims[1].source.resource_claim_name.as_deref(),
        Some("allocated")
    );
    assert_eq!(pod.status.resource_claim_statuses[1].resource_claim_name, None);
}
