//! Pods and wait conditions.

use drayman::api::resource::{Pod, ResourceClaim};
use kube::runtime::wait::Condition;
use serde_json::{Value, json};

use super::FINALIZER;
use crate::harness::IMAGE;

/// A pod with one container and one claim from the template `test`.
pub(crate) fn pod_with_claim(name: &str) -> anyhow::Result<Pod> {
    pod_from(json!({
        "metadata": { "name": name },
        "spec": {
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimTemplateName": "test" } }],
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "resources": { "claims": [{ "name": "device" }] } }],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    }))
}

/// A pod that requests one extended resource in its limits.
pub(crate) fn pod_with_limit(name: &str, resource: &str) -> anyhow::Result<Pod> {
    pod_from(json!({
        "metadata": { "name": name },
        "spec": {
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "resources": { "limits": { resource: "1" } } }],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    }))
}

/// A pod from a manifest. Our type keeps the `source` of a claim, which k8s-openapi's Pod lacks.
pub(crate) fn pod_from(manifest: Value) -> anyhow::Result<Pod> {
    serde_json::from_value(manifest).map_err(Into::into)
}

/// The name of a pod's first claim, from the pod's status.
pub(crate) fn claim_name(pod: Option<&Pod>) -> Option<String> {
    pod?.status
        .resource_claim_statuses
        .first()?
        .resource_claim_name
        .clone()
}

/// Condition: the pod runs.
pub(crate) fn is_running() -> impl Condition<Pod> {
    |pod: Option<&Pod>| pod.is_some_and(|pod| pod.status.phase.as_deref() == Some("Running"))
}

/// Condition: the scheduler has bound the pod to a node.
pub(crate) fn is_bound() -> impl Condition<Pod> {
    |pod: Option<&Pod>| pod.is_some_and(|pod| pod.spec.node_name.is_some())
}

/// Whether a claim is allocated.
pub(crate) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim.status.allocation.is_some()
}

/// Whether a claim has our finalizer.
pub(crate) fn has_finalizer(claim: &ResourceClaim) -> bool {
    claim
        .metadata
        .finalizers
        .iter()
        .flatten()
        .any(|name| name == FINALIZER)
}

/// Condition: the object is gone.
pub(crate) fn is_gone<K>() -> impl Condition<K> {
    |object: Option<&K>| object.is_none()
}
