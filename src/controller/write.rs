//! Writes as patches: each changes only our own fields, and only the object that was observed.
//!
//! There are no full updates: fields that a newer server adds, other drivers' finalizers and entries, and concurrent writers are left
//! alone.

use kube::api::{Api, Patch, PatchParams};
use kube::core::Status;
use kube::core::response::StatusDetails;
use serde_json::{Value, json};

use crate::api::resource::label::NODE_LABEL;
use crate::api::resource::{
    GROUP, PodSchedulingContext, ResourceClaim, ResourceClaimSchedulingStatus, VERSION,
};
use crate::core::claims::{ClaimWrite, ObjectKey, Outcome};

/// The wire format of a claim write.
#[derive(Debug, PartialEq)]
enum ClaimPatch {
    /// A strategic merge patch of the object itself.
    Main(Value),
    /// A JSON patch of its status.
    StatusJson(Value),
}

fn claim_patch(uid: &str, finalizer: &str, driver_name: &str, write: &ClaimWrite) -> ClaimPatch {
    match write {
        // A strategic merge patch adds to and removes from the set of finalizers by value: other finalizers stay, and no index can
        // have moved.
        ClaimWrite::AddFinalizer { node } => ClaimPatch::Main(json!({ "metadata": {
            "uid": uid,
            "finalizers": [finalizer],
            "labels": { format!("{driver_name}/{NODE_LABEL}"): node },
        } })),
        ClaimWrite::RemoveFinalizer { version } => {
            let mut metadata = json!({ "uid": uid, "$deleteFromPrimitiveList/finalizers": [finalizer] });
            if let Some(version) = version {
                metadata["resourceVersion"] = json!(version);
            }
            ClaimPatch::Main(json!({ "metadata": metadata }))
        }
        // An unallocated claim is reserved for nobody, so the replaced list is empty. Concurrent writes of other fields cause no
        // conflict. The API server compares a missing field as null.
        ClaimWrite::Allocate {
            allocation,
            reserved_for,
            version,
        } => {
            let mut operations = vec![
                json!({ "op": "test", "path": "/metadata/uid", "value": uid }),
                json!({ "op": "test", "path": "/metadata/deletionTimestamp", "value": null }),
                json!({ "op": "test", "path": "/status/allocation", "value": null }),
            ];
            if let Some(version) = version {
                operations
                    .push(json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }));
            }
            operations.push(json!({ "op": "add", "path": "/status/allocation", "value": allocation }));
            operations.push(json!({ "op": "add", "path": "/status/driverName", "value": driver_name }));
            if let Some(consumer) = reserved_for {
                operations.push(json!({ "op": "add", "path": "/status/reservedFor", "value": [consumer] }));
            }
            ClaimPatch::StatusJson(Value::Array(operations))
        }
        ClaimWrite::ClearAllocation {
            deallocation_requested,
            driver_name,
        } => {
            let mut operations = vec![json!({ "op": "test", "path": "/metadata/uid", "value": uid })];
            if *deallocation_requested {
                operations
                    .push(json!({ "op": "test", "path": "/status/deallocationRequested", "value": true }));
                operations.push(json!({ "op": "remove", "path": "/status/deallocationRequested" }));
            }
            if let Some(name) = driver_name {
                operations.push(json!({ "op": "test", "path": "/status/driverName", "value": name }));
                operations.push(json!({ "op": "remove", "path": "/status/driverName" }));
            }
            operations.push(json!({ "op": "remove", "path": "/status/allocation" }));
            ClaimPatch::StatusJson(Value::Array(operations))
        }
        ClaimWrite::UndoAllocation { version, reserved } => {
            let mut operations = vec![
                json!({ "op": "test", "path": "/metadata/uid", "value": uid }),
                json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }),
            ];
            if *reserved {
                operations.push(json!({ "op": "remove", "path": "/status/reservedFor" }));
            }
            operations.push(json!({ "op": "remove", "path": "/status/driverName" }));
            operations.push(json!({ "op": "remove", "path": "/status/allocation" }));
            ClaimPatch::StatusJson(Value::Array(operations))
        }
    }
}

pub(super) async fn claim(
    client: &kube::Client,
    key: &ObjectKey,
    uid: &str,
    finalizer: &str,
    driver_name: &str,
    write: &ClaimWrite,
) -> Outcome<ResourceClaim> {
    let api = Api::<ResourceClaim>::namespaced(client.clone(), &key.namespace);
    let parameters = PatchParams::default();
    let result = match claim_patch(uid, finalizer, driver_name, write) {
        ClaimPatch::Main(patch) => api.patch(&key.name, &parameters, &Patch::Strategic(patch)).await,
        ClaimPatch::StatusJson(operations) => match serde_json::from_value(operations) {
            Ok(patch) => {
                api.patch_status(&key.name, &parameters, &Patch::Json::<()>(patch))
                    .await
            }
            Err(error) => return Outcome::Refused(format!("the patch cannot be written: {error}")),
        },
    };
    let is_conditional = matches!(
        write,
        ClaimWrite::Allocate { .. } | ClaimWrite::ClearAllocation { .. } | ClaimWrite::UndoAllocation { .. }
    );
    match result {
        Err(kube::Error::Api(status)) if is_conditional && is_failed_test(&status) => {
            Outcome::Conflict("it is not what was seen".to_owned())
        }
        result => outcome(result),
    }
}

/// Whether a JSON patch was rejected because one of its `test` operations failed, or because a removed field does not exist. The server
/// answers 422, as for an invalid object, but without a kind and without causes (`applyJSPatch` in apiserver's `patch.go`). A webhook
/// that denies a request chooses the code and sets neither; the server prefixes its message (`ToStatusErr` in apiserver's
/// `statuserror.go`).
fn is_failed_test(status: &Status) -> bool {
    let names_nothing = |details: &StatusDetails| details.kind.is_empty() && details.causes.is_empty();
    status.code == 422
        && !status.message.starts_with("admission webhook ")
        && status.details.as_ref().is_none_or(names_nothing)
}

/// Applies `entries` as our entries in a context's status.
pub(super) async fn context(
    client: &kube::Client,
    key: &ObjectKey,
    uid: &str,
    driver_name: &str,
    entries: &[ResourceClaimSchedulingStatus],
) -> Outcome<PodSchedulingContext> {
    let api = Api::<PodSchedulingContext>::namespaced(client.clone(), &key.namespace);
    let parameters = PatchParams::apply(driver_name).force();
    let patch = context_patch(key, uid, entries);
    let applied = api
        .patch_status(&key.name, &parameters, &Patch::Apply(patch))
        .await;
    let leftovers = match &applied {
        Ok(object) => leftovers(object, entries),
        // Merged with another writer's nodes, an entry would exceed its limit.
        Err(kube::Error::Api(status)) if is_too_long(status) => {
            let found = api.get_opt(&key.name).await.ok().flatten();
            found
                .filter(|object| object.metadata.uid.as_deref() == Some(uid))
                .and_then(|object| leftovers(&object, entries))
        }
        Err(_) => None,
    };
    match leftovers.map(serde_json::from_value) {
        None => outcome(applied),
        Some(Ok(patch)) => {
            let parameters = PatchParams {
                field_manager: Some(driver_name.to_owned()),
                ..PatchParams::default()
            };
            let patch = Patch::Json::<()>(patch);
            outcome(api.patch_status(&key.name, &parameters, &patch).await)
        }
        Some(Err(error)) => Outcome::Refused(format!("the patch cannot be written: {error}")),
    }
}

/// Whether the server rejects a list because of its length.
fn is_too_long(status: &kube::core::Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes
        .into_iter()
        .any(|cause| matches!(&*cause.reason, "FieldValueTooLong" | "FieldValueTooMany"))
}

/// A patch that removes other writers' nodes from our entries; `None` if there are none.
///
/// Up to 1.28 `unsuitableNodes` is a set for server-side apply, so the nodes of another writer stay, for instance those of the driver
/// that served these claims before; applying again would change nothing. From 1.29 on the whole list is replaced.
fn leftovers(object: &PodSchedulingContext, entries: &[ResourceClaimSchedulingStatus]) -> Option<Value> {
    let wanted = |name: &str| entries.iter().find(|entry| entry.name == name);
    let mut operations = vec![json!({
        "op": "test", "path": "/metadata/resourceVersion", "value": object.metadata.resource_version })];
    for (number, stored) in object.status.resource_claims.iter().enumerate() {
        if let Some(entry) = wanted(&stored.name)
            && stored
                .unsuitable_nodes
                .iter()
                .any(|node| !entry.unsuitable_nodes.contains(node))
        {
            let path = format!("/status/resourceClaims/{number}/unsuitableNodes");
            operations.push(json!({ "op": "replace", "path": path, "value": entry.unsuitable_nodes }));
        }
    }
    (operations.len() > 1).then_some(Value::Array(operations))
}

fn context_patch(key: &ObjectKey, uid: &str, entries: &[ResourceClaimSchedulingStatus]) -> Value {
    // An empty list is written too: the scheduler waits for the entry, not for its contents.
    let entries: Vec<Value> = entries
        .iter()
        .map(|entry| json!({ "name": entry.name, "unsuitableNodes": entry.unsuitable_nodes }))
        .collect();
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "PodSchedulingContext",
        "metadata": { "name": key.name, "namespace": key.namespace, "uid": uid },
        "status": { "resourceClaims": entries },
    })
}

/// Maps the server's answer, or its absence, to the outcome of a write.
fn outcome<T>(result: Result<T, kube::Error>) -> Outcome<T> {
    match result {
        Ok(object) => Outcome::Done(object),
        Err(kube::Error::Api(status)) => match status.code {
            409 => Outcome::Conflict(status.message.clone()),
            400 | 401 | 403 | 404 | 405 | 413 | 422 => Outcome::Refused(status.message.clone()),
            _ => Outcome::Unknown(status.message.clone()),
        },
        Err(error) => Outcome::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::resource::{AllocationResult, ResourceClaimConsumerReference};

    const UID: &str = "7d0a";

    fn patch(write: &ClaimWrite) -> ClaimPatch {
        claim_patch(UID, "drayman.dev/deletion-protection", "drayman.dev", write)
    }

    #[test]
    fn finalizers_are_added_and_removed_by_value_on_the_object_with_this_uid() {
        assert_eq!(
            patch(&ClaimWrite::AddFinalizer {
                node: "node-a".to_owned()
            }),
            ClaimPatch::Main(json!({ "metadata": {
                "uid": UID,
                "finalizers": ["drayman.dev/deletion-protection"],
                "labels": { "drayman.dev/node": "node-a" },
            } }))
        );
        assert_eq!(
            patch(&ClaimWrite::RemoveFinalizer { version: None }),
            ClaimPatch::Main(json!({
                "metadata": { "uid": UID, "$deleteFromPrimitiveList/finalizers": ["drayman.dev/deletion-protection"] }
            }))
        );
        let seen = Some("12".to_owned());
        assert_eq!(
            patch(&ClaimWrite::RemoveFinalizer { version: seen }),
            ClaimPatch::Main(json!({ "metadata": {
                "uid": UID,
                "$deleteFromPrimitiveList/finalizers": ["drayman.dev/deletion-protection"],
                "resourceVersion": "12",
            } }))
        );
    }

    #[test]
    fn an_allocation_goes_only_into_an_unallocated_claim() {
        for version in [None, Some("7")] {
            let write = ClaimWrite::Allocate {
                allocation: AllocationResult::default(),
                reserved_for: Some(ResourceClaimConsumerReference::pod("pod", "11")),
                version: version.map(str::to_owned),
            };
            let consumer = json!({ "resource": "pods", "name": "pod", "uid": "11" });
            let mut operations = vec![
                json!({ "op": "test", "path": "/metadata/uid", "value": UID }),
                json!({ "op": "test", "path": "/metadata/deletionTimestamp", "value": null }),
                json!({ "op": "test", "path": "/status/allocation", "value": null }),
                json!({ "op": "add", "path": "/status/allocation", "value": {} }),
                json!({ "op": "add", "path": "/status/driverName", "value": "drayman.dev" }),
                json!({ "op": "add", "path": "/status/reservedFor", "value": [consumer] }),
            ];
            if let Some(version) = version {
                let test = json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version });
                operations.insert(3, test);
            }
            assert_eq!(patch(&write), ClaimPatch::StatusJson(Value::Array(operations)));
        }
    }

    #[test]
    fn clearing_tests_what_was_seen_before_it_removes_anything() {
        let write = ClaimWrite::ClearAllocation {
            deallocation_requested: true,
            driver_name: Some("drayman.dev".to_owned()),
        };
        let ClaimPatch::StatusJson(Value::Array(operations)) = patch(&write) else {
            panic!("not a JSON patch")
        };
        let paths: Vec<(&str, &str)> = operations
            .iter()
            .map(|operation| {
                (
                    operation["op"].as_str().unwrap(),
                    operation["path"].as_str().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            paths,
            [
                ("test", "/metadata/uid"),
                ("test", "/status/deallocationRequested"),
                ("remove", "/status/deallocationRequested"),
                ("test", "/status/driverName"),
                ("remove", "/status/driverName"),
                ("remove", "/status/allocation"),
            ]
        );
    }

    #[test]
    fn an_allocation_is_undone_together_with_its_reservation_at_the_version_that_was_seen() {
        let write = ClaimWrite::UndoAllocation {
            version: "7".to_owned(),
            reserved: true,
        };
        assert_eq!(
            patch(&write),
            ClaimPatch::StatusJson(json!([
                { "op": "test", "path": "/metadata/uid", "value": UID },
                { "op": "test", "path": "/metadata/resourceVersion", "value": "7" },
                { "op": "remove", "path": "/status/reservedFor" },
                { "op": "remove", "path": "/status/driverName" },
                { "op": "remove", "path": "/status/allocation" },
            ]))
        );
    }

    #[test]
    fn a_failed_test_of_a_patch_is_told_apart_from_an_object_that_breaks_a_rule() {
        let status = |details: Value| -> Status {
            serde_json::from_value(
                json!({ "status": "Failure", "code": 422, "reason": "Invalid", "details": details }),
            )
            .unwrap()
        };
        assert!(is_failed_test(&status(json!({}))));
        let causes = json!([{ "reason": "FieldValueInvalid", "field": "status.allocation" }]);
        let details = json!({ "name": "c", "group": GROUP, "kind": "ResourceClaim", "causes": causes });
        assert!(!is_failed_test(&status(details)));
        // A webhook may deny with any code.
        let denied = Status {
            message: "admission webhook \"policy.example.com\" denied the request: not today".to_owned(),
            ..status(Value::Null)
        };
        assert!(!is_failed_test(&denied));
    }

    #[test]
    fn an_entry_without_unsuitable_nodes_is_still_written() {
        let entry = ResourceClaimSchedulingStatus {
            name: "device".to_owned(),
            unsuitable_nodes: vec![],
        };
        let patch = context_patch(&ObjectKey::new("default", "pod"), UID, &[entry]);
        assert_eq!(
            patch["status"],
            json!({ "resourceClaims": [{ "name": "device", "unsuitableNodes": [] }] })
        );
    }

    #[test]
    fn nodes_that_somebody_else_wrote_into_our_entries_are_taken_out_and_others_entries_are_left() {
        let context: PodSchedulingContext = serde_json::from_value(json!({
            "metadata": { "resourceVersion": "7" },
            "status": { "resourceClaims": [
                { "name": "theirs", "unsuitableNodes": ["x"] }, { "name": "same", "unsuitableNodes": ["b", "a"] },
                { "name": "more", "unsuitableNodes": ["a", "x"] }, { "name": "none", "unsuitableNodes": ["x"] }] },
        }))
        .unwrap();
        let entry = |name: &str, nodes: &[&str]| ResourceClaimSchedulingStatus {
            name: name.to_owned(),
            unsuitable_nodes: nodes.iter().map(|&node| node.to_owned()).collect(),
        };
        let entries = [
            entry("same", &["a", "b"]),
            entry("more", &["a"]),
            entry("none", &[]),
        ];
        assert_eq!(
            leftovers(&context, &entries),
            Some(json!([
                { "op": "test", "path": "/metadata/resourceVersion", "value": "7" },
                { "op": "replace", "path": "/status/resourceClaims/2/unsuitableNodes", "value": ["a"] },
                { "op": "replace", "path": "/status/resourceClaims/3/unsuitableNodes", "value": [] },
            ]))
        );
        assert_eq!(leftovers(&context, &entries[..1]), None);
    }
}
