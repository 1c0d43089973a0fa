//! Claim controller of kube-controller-manager (`pkg/controller/resourceclaim`) 1.30 and 1.37: creates claims from
//! templates, removes reservations of finished pods, and deletes the template claims of such pods.
//!
//! In classic mode it asks the drivers to deallocate unused claims. In structured mode it deallocates them itself.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::api::resource::{POD_CLAIM_NAME_ANNOTATION, ResourceClaimConsumerReference};
use crate::testcluster::api::structured::{FINALIZER, RESERVED_FOR_MAX};
use crate::testcluster::api::{ClusterMode, Patch, StatusError, object};
use crate::testcluster::client::{
    ApiClient, claims_of, is_done, is_reserved_for, owned_by, owner_uid, source_of, typed, typed_claims,
    write_context,
};
use crate::testcluster::negotiation::{BoundStep, Negotiation, without_ended_consumers};

/// Runs one reconciliation.
pub(crate) fn reconcile(client: &ApiClient) {
    for pod in client.list("pods") {
        if object::is_deleting(&pod) {
            continue;
        }
        if !is_done(&pod) {
            make_claims(client, &pod);
        }
        serve_bound(client, &pod);
    }
    for claim in client.list("resourceclaims") {
        update_reservations(client, &claim);
    }
}

/// Creates the claims of a pod's templates and records their names in the pod's status.
fn make_claims(client: &ApiClient, pod: &Value) {
    let namespace = object::namespace(pod);
    let mut statuses = Vec::new();
    for entry in object::list(pod, "/spec/resourceClaims") {
        let template = source_of(entry, "resourceClaimTemplateName");
        if template.is_empty() {
            continue;
        }
        let entry_name = object::text(entry, "/name");
        let known = client.list("resourceclaims").into_iter().find(|claim| {
            let annotation = claim
                .pointer("/metadata/annotations")
                .and_then(|annotations| annotations.get(POD_CLAIM_NAME_ANNOTATION));
            owner_uid(claim) == object::uid(pod) && annotation.is_some_and(|name| name == entry_name)
        });
        let claim = known.map_or_else(|| make_claim(client, pod, entry_name, template).map(Arc::new), Ok);
        match claim {
            Ok(claim) => {
                statuses.push(json!({ "name": entry_name, "resourceClaimName": claim["metadata"]["name"] }));
            }
            Err(message) => {
                let message = format!("PodResourceClaim {entry_name}: {message}");
                // Each event is a change, which starts another pass.
                if !client.has_event(pod, &message) {
                    client.event(pod, "Warning", "FailedResourceClaimCreation", &message);
                }
                return;
            }
        }
    }
    let written: Vec<&Value> = object::list(pod, "/status/resourceClaimStatuses")
        .iter()
        .collect();
    if !statuses.is_empty() && statuses.iter().any(|status| !written.contains(&status)) {
        let apply = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": pod["metadata"]["name"], "namespace": namespace, "uid": pod["metadata"]["uid"] },
            "status": { "resourceClaimStatuses": statuses },
        });
        // A deleted pod does not need its claims.
        let _ = client.patch("pods", pod, "status", &Patch::Apply(apply));
    }
}

fn make_claim(client: &ApiClient, pod: &Value, entry: &str, template: &str) -> Result<Value, String> {
    let namespace = object::namespace(pod);
    let template = client
        .get("resourceclaimtemplates", namespace, template)
        .ok_or_else(|| {
            format!("failed to create ResourceClaim: resource claim template {template:?} not found")
        })?;
    let mut annotations = template
        .pointer("/spec/metadata/annotations")
        .cloned()
        .unwrap_or_else(|| json!({}));
    annotations[POD_CLAIM_NAME_ANNOTATION] = entry.into();
    let claim = json!({
        "metadata": {
            "generateName": format!("{}-{entry}-", object::name(pod)),
            "annotations": annotations,
            "labels": template.pointer("/spec/metadata/labels"),
            "ownerReferences": owned_by(pod),
        },
        "spec": template["spec"]["spec"],
    });
    client
        .create("resourceclaims", namespace, claim)
        .map_err(|refusal| refusal.message)
}

/// Serves a pod bound without the scheduler: requests allocation on its node, then reserves the claims. Like the real
/// controller, requests an allocation even for a finished pod. In structured mode, nothing allocates for such a pod.
fn serve_bound(client: &ApiClient, pod: &Value) {
    let node = object::text(pod, "/spec/nodeName");
    if node.is_empty() {
        return;
    }
    // After a claim that is missing, the real controller stops too.
    let claims: Vec<(String, Value)> = claims_of(client, pod)
        .into_iter()
        .map_while(|(entry, claim)| Some((entry, claim?)))
        .collect();
    // Most pods need nothing, at each pass.
    if claims.iter().all(|(_, claim)| is_reserved_for(claim, pod)) {
        return;
    }
    if client.server.mode() == ClusterMode::Structured {
        for (_, claim) in &claims {
            if claim.pointer("/status/allocation").is_some()
                && !is_done(pod)
                && !is_reserved_for(claim, pod)
                && may_reserve(claim)
            {
                reserve(client, claim, pod);
            }
        }
        return;
    }
    let context = client.get("podschedulingcontexts", object::namespace(pod), object::name(pod));
    // The API server stores only objects that can be read.
    let (Ok(typed_claims), Ok(typed_context)) = (typed_claims(&claims), typed(&context)) else {
        return;
    };
    let negotiation = Negotiation {
        pod_uid: object::uid(pod),
        claims: &typed_claims,
        context: typed_context.first(),
    };
    match negotiation.bound_step(node) {
        Some(BoundStep::SelectNode) => {
            write_context(client, pod, context.as_ref(), json!({ "selectedNode": node }));
        }
        Some(BoundStep::Reserve(index)) if !is_done(pod) => {
            if let Some((_, claim)) = claims.get(index) {
                reserve(client, claim, pod);
            }
        }
        _ => {}
    }
}

fn reserve(client: &ApiClient, claim: &Value, pod: &Value) {
    let mut consumers = object::list(claim, "/status/reservedFor").to_vec();
    consumers.push(consumer(pod));
    // A conflict means another change, which triggers another pass.
    let _ = write_reservations(client, claim, &consumers, false);
}

/// Returns whether an allocated claim may have another consumer, in structured mode.
pub(crate) fn may_reserve(claim: &Value) -> bool {
    object::list(claim, "/status/reservedFor").len() < RESERVED_FOR_MAX
}

/// Returns the pod's entry for `reservedFor`.
pub(crate) fn consumer(pod: &Value) -> Value {
    json!({ "resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"] })
}

/// Writes the reservations of a claim, unless the claim has changed meanwhile.
pub(crate) fn write_reservations(
    client: &ApiClient,
    claim: &Value,
    consumers: &[Value],
    deallocate: bool,
) -> Result<Value, StatusError> {
    let reserved = if consumers.is_empty() {
        Value::Null
    } else {
        json!(consumers)
    };
    let mut patch = versioned(claim, json!({ "status": { "reservedFor": reserved } }));
    if deallocate {
        patch["status"]["deallocationRequested"] = true.into();
    }
    client.merge("resourceclaims", claim, "status", patch)
}

/// Removes finished pods from the reservations. After the last one, deallocates the claim or requests its deallocation,
/// and deletes a template claim.
fn update_reservations(client: &ApiClient, claim: &Value) {
    let namespace = object::namespace(claim);
    let lives = |name: &str, uid: &str| {
        client
            .get("pods", namespace, name)
            .is_some_and(|pod| object::uid(&pod) == uid && !is_done(&pod))
    };
    let reserved = object::list(claim, "/status/reservedFor");
    let kept: Vec<Value> = reserved
        .iter()
        .filter(|consumer| {
            object::text(consumer, "/resource") != "pods"
                || lives(object::text(consumer, "/name"), object::text(consumer, "/uid"))
        })
        .cloned()
        .collect();
    if client.server.mode() == ClusterMode::Structured {
        // A conflict means another change, which triggers another pass.
        let _ = update_structured_reservations(client, claim, &kept);
    } else if kept.len() < reserved.len()
        // The API server stores only claims that can be read.
        && let Ok(typed) = serde_json::from_value(claim.clone())
    {
        let is_kept = |consumer: &ResourceClaimConsumerReference| {
            kept.iter().any(|each| object::text(each, "/uid") == consumer.uid)
        };
        if let Some(status) = without_ended_consumers(&typed, is_kept) {
            // A conflict means another change, which triggers another pass.
            let _ = write_reservations(client, claim, &kept, status.deallocation_requested);
        }
    }
    if kept.is_empty() && !object::is_deleting(claim) {
        let owner = object::list(claim, "/metadata/ownerReferences")
            .iter()
            .find(|owner| owner["controller"] == true && owner["kind"] == "Pod");
        let pod = owner.and_then(|owner| {
            client
                .get("pods", namespace, object::text(owner, "/name"))
                .filter(|pod| object::uid(pod) == object::text(owner, "/uid"))
        });
        if pod.is_some_and(|pod| is_done(&pod)) {
            let _ = client.delete("resourceclaims", claim, None);
        }
    }
}

/// Writes the remaining reservations, deallocates an unused claim, and removes the finalizer of its allocation.
fn update_structured_reservations(
    client: &ApiClient,
    claim: &Value,
    kept: &[Value],
) -> Result<(), StatusError> {
    let is_protected = |claim: &Value| object::texts(claim, "/metadata/finalizers").contains(&FINALIZER);
    let is_allocated = |claim: &Value| claim.pointer("/status/allocation").is_some();
    let is_trimmed = kept.len() < object::list(claim, "/status/reservedFor").len();
    let is_deletable = is_protected(claim) && kept.is_empty() && object::is_deleting(claim);
    if !is_trimmed && !is_deletable {
        return Ok(());
    }
    let mut claim = claim.clone();
    if is_trimmed || is_allocated(&claim) {
        let mut status = json!({ "reservedFor": if kept.is_empty() { Value::Null } else { json!(kept) } });
        if kept.is_empty() && is_protected(&claim) {
            status["allocation"] = Value::Null;
        }
        claim = client.merge(
            "resourceclaims",
            &claim,
            "status",
            versioned(&claim, json!({ "status": status })),
        )?;
    }
    if is_protected(&claim) && !is_allocated(&claim) {
        let others: Vec<&str> = object::texts(&claim, "/metadata/finalizers")
            .into_iter()
            .filter(|finalizer| *finalizer != FINALIZER)
            .collect();
        let patch = versioned(&claim, json!({ "metadata": { "finalizers": others } }));
        client.merge("resourceclaims", &claim, "", patch)?;
    }
    Ok(())
}

/// Adds the uid and version of an object to a patch, so that the patch fails if the object has changed meanwhile.
pub(crate) fn versioned(object: &Value, mut patch: Value) -> Value {
    for key in ["uid", "resourceVersion"] {
        patch["metadata"][key] = object["metadata"][key].clone();
    }
    patch
}
