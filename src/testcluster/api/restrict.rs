//! Initial fields of new objects, and fields that a request to an endpoint cannot change.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::kinds::{ResourceKind, ResourcePath};
use super::object::{self, copy_root, set_metadata, text};
use super::pods;

/// Sets the initial fields of a new object.
pub(crate) fn begin(kind: &ResourceKind, object: &mut Value) {
    if kind.is("", "pods") {
        pods::tolerate(object);
        object["status"] = json!({ "phase": "Pending", "qosClass": pods::quality(object) });
    } else if kind.is("", "namespaces") {
        object["spec"] = json!({ "finalizers": ["kubernetes"] });
        object["status"] = json!({ "phase": "Active" });
        let name = object::name(object).to_owned();
        let mut labels = object
            .pointer("/metadata/labels")
            .cloned()
            .unwrap_or_else(|| json!({}));
        labels["kubernetes.io/metadata.name"] = name.into();
        set_metadata(object, "labels", Some(labels));
    } else if kind.status && !kind.is("", "nodes") {
        match kind.definition {
            Some(_) => {
                if let Some(map) = object.as_object_mut() {
                    map.remove("status");
                }
            }
            None => object["status"] = json!({}),
        }
    }
}

/// Restores fields that a request to this endpoint cannot change.
pub(crate) fn restrict(target: &ResourcePath, before: &Value, after: &mut Value) {
    let keep = |after: &mut Value, key: &str| {
        set_metadata(after, key, before["metadata"].get(key).cloned());
    };
    match target.subresource.as_str() {
        "" if target.kind.status => copy_root(after, before, "status"),
        "" => {}
        subresource => {
            let part = if subresource == "finalize" {
                "spec"
            } else {
                "status"
            };
            let mut kept = before.clone();
            copy_root(&mut kept, after, part);
            copy_root(&mut kept, after, "metadata");
            *after = kept;
            // Restores the metadata except `managedFields` and the preconditions, which are checked later.
            for key in [
                "labels",
                "annotations",
                "finalizers",
                "ownerReferences",
                "generateName",
            ] {
                keep(after, key);
            }
        }
    }
    for key in [
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "resourceVersion",
    ] {
        keep(after, key);
    }
    for key in ["uid", "name", "namespace"] {
        if text(after, &format!("/metadata/{key}")).is_empty() {
            keep(after, key);
        }
    }
    for key in ["finalizers", "ownerReferences", "labels", "annotations"] {
        let empty = match after.pointer(&format!("/metadata/{key}")) {
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            _ => false,
        };
        if empty {
            set_metadata(after, key, None);
        }
    }
    if after.pointer("/metadata/managedFields").is_none() {
        keep(after, "managedFields");
    }
}

/// Returns all fields except metadata and status: their changes increment the generation.
pub(crate) fn content(object: &Value) -> BTreeMap<&String, &Value> {
    object
        .as_object()
        .map(|map| {
            map.iter()
                .filter(|(key, _)| !matches!(key.as_str(), "metadata" | "status"))
                .collect()
        })
        .unwrap_or_default()
}
