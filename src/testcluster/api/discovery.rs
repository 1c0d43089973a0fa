//! API discovery: `/api`, `/apis` and the resource lists.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use super::kinds::{ClusterMode, ResourceKind};

/// `/version`.
pub(crate) fn version(mode: ClusterMode) -> Value {
    let version = mode.kubernetes();
    let minor = version.split('.').nth(1);
    json!({ "major": "1", "minor": minor, "gitVersion": version, "platform": "linux/amd64" })
}

/// `/api`.
pub(crate) fn core() -> Value {
    json!({ "kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [] })
}

/// `/apis`.
pub(crate) fn groups(kinds: &[Arc<ResourceKind>]) -> Value {
    let names: BTreeSet<&str> = kinds
        .iter()
        .map(|kind| kind.group.as_str())
        .filter(|group| !group.is_empty())
        .collect();
    let groups: Vec<Value> = names.into_iter().filter_map(|name| group(kinds, name)).collect();
    json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups })
}

/// `/apis/<group>`; `None` if the group does not exist.
pub(crate) fn group(kinds: &[Arc<ResourceKind>], name: &str) -> Option<Value> {
    let versions: BTreeSet<&str> = kinds
        .iter()
        .filter(|kind| kind.group == name)
        .map(|kind| kind.version.as_str())
        .collect();
    let versions: Vec<Value> = versions
        .into_iter()
        .map(|version| json!({ "groupVersion": format!("{name}/{version}"), "version": version }))
        .collect();
    let preferred = versions.first()?.clone();
    Some(
        json!({ "kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": versions, "preferredVersion": preferred }),
    )
}

/// `/api/v1` and `/apis/<group>/<version>`; `None` if the version does not exist.
pub(crate) fn resources(kinds: &[Arc<ResourceKind>], group: &str, version: &str) -> Option<Value> {
    const VERBS: [&str; 8] = [
        "create",
        "delete",
        "deletecollection",
        "get",
        "list",
        "patch",
        "update",
        "watch",
    ];
    let mut kinds = kinds
        .iter()
        .filter(|kind| kind.group == group && kind.version == version)
        .peekable();
    let group_version = kinds.peek()?.api_version();
    let mut resources = Vec::new();
    for kind in kinds {
        resources.push(json!({
            "name": kind.plural,
            "singularName": kind.singular,
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": VERBS,
            "shortNames": kind.short_names,
            "categories": kind.categories,
        }));
        if kind.status {
            resources.push(json!({
                "name": format!("{}/status", kind.plural),
                "singularName": "",
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": ["get", "patch", "update"],
            }));
        }
    }
    Some(
        json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources }),
    )
}
