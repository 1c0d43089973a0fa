//! Merge strategies of lists: the tags of the Go types (`listType`, `patchMergeKey`) for built-in kinds, and
//! `x-kubernetes-list-type` for CRDs.

use serde_json::Value;

use super::kinds::ResourceKind;

/// Merge strategy of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    /// Replaced as a whole.
    Atomic,
    /// A set of scalar values.
    Set,
    /// Elements are identified by these fields.
    Map(Vec<String>),
}

/// Operation that merges lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// Strategic merge patch.
    Strategic,
    Apply,
}

/// Columns: kind (empty for all), path without indices, keys (empty for a set), merged by strategic merge patches. Server-side apply merges
/// all of them.
const LISTS: &[(&str, &str, &str, bool)] = &[
    ("", "metadata.finalizers", "", true),
    ("", "metadata.ownerReferences", "uid", true),
    ("ResourceClaim", "status.reservedFor", "uid", true),
    (
        "ResourceClaim",
        "status.devices",
        "driver,device,pool,shareID",
        false,
    ),
    ("ResourceClaim", "status.devices.conditions", "type", false),
    ("PodSchedulingContext", "status.resourceClaims", "name", false),
    ("Pod", "spec.containers", "name", true),
    ("Pod", "spec.initContainers", "name", true),
    ("Pod", "spec.containers.env", "name", true),
    ("Pod", "spec.containers.resources.claims", "name", false),
    ("Pod", "spec.volumes", "name", true),
    ("Pod", "spec.resourceClaims", "name", true),
    ("Pod", "status.conditions", "type", true),
    ("Pod", "status.resourceClaimStatuses", "name", true),
    ("Node", "status.conditions", "type", true),
    ("Node", "status.addresses", "type", true),
];

/// Structures that server-side apply treats as one field (`structType=atomic`).
const ATOMIC_STRUCTURES: &[(&str, &str)] = &[
    ("ResourceClaim", "status.allocation.availableOnNodes"),
    ("ResourceClaim", "status.allocation.nodeSelector"),
    ("ResourceSlice", "spec.nodeSelector"),
    ("ResourceClass", "suitableNodes"),
    ("ResourceClass", "parametersRef"),
    ("ResourceClaim", "spec.parametersRef"),
];

/// Returns the merge strategy of the list at `path`.
pub(crate) fn list_kind(kind: &ResourceKind, path: &[String], asker: Asker) -> ListKind {
    let dotted = path.join(".");
    let known = LISTS.iter().find(|(of, at, ..)| {
        *at == dotted && (of.is_empty() || (kind.definition.is_none() && *of == kind.kind))
    });
    if let Some((_, _, key, strategic)) = known {
        return match (*strategic || asker == Asker::Apply, *key) {
            (false, _) => ListKind::Atomic,
            (true, "") => ListKind::Set,
            (true, keys) => ListKind::Map(keys.split(',').map(str::to_owned).collect()),
        };
    }
    kind.definition
        .as_ref()
        .and_then(|definition| schema_at(&definition.schema, path))
        .map_or(ListKind::Atomic, |schema| {
            let keys = schema.get("x-kubernetes-list-map-keys").and_then(Value::as_array);
            match (schema.get("x-kubernetes-list-type").and_then(Value::as_str), keys) {
                (Some("set"), _) => ListKind::Set,
                (Some("map"), Some(keys)) => {
                    ListKind::Map(keys.iter().filter_map(Value::as_str).map(str::to_owned).collect())
                }
                _ => ListKind::Atomic,
            }
        })
}

/// Returns whether a missing key of the list map at `path` is an empty string, because Go always serializes the key.
pub(crate) fn key_has_default(kind: &ResourceKind, path: &[String]) -> bool {
    kind.definition.is_none() && path.join(".") != "status.resourceClaims"
}

/// Returns whether the object at `path` is one field.
pub(crate) fn is_atomic_structure(kind: &ResourceKind, path: &[String]) -> bool {
    let dotted = path.join(".");
    ATOMIC_STRUCTURES
        .iter()
        .any(|(of, at)| kind.definition.is_none() && *of == kind.kind && *at == dotted)
}

/// Returns whether each element of the list at `path` is one field.
pub(crate) fn has_atomic_elements(path: &[String]) -> bool {
    path.join(".") == "metadata.ownerReferences"
}

/// Returns the schema at a path; elements of lists have the path of the list.
fn schema_at<'a>(schema: &'a Value, path: &[String]) -> Option<&'a Value> {
    let mut schema = schema;
    for part in path {
        if let Some(items) = schema.get("items") {
            schema = items;
        }
        schema = schema
            .get("properties")
            .and_then(|properties| properties.get(part))
            .or_else(|| schema.get("additionalProperties"))?;
    }
    Some(schema)
}
