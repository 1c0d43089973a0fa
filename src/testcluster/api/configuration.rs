//! Validates the body of a server-side apply before the merge (`managedfields` in `k8s.io/apimachinery`, `typed` in
//! `sigs.k8s.io/structured-merge-diff`).

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::custom;
use super::decode::read;
use super::kinds::{ResourceKind, ResourcePath};
use super::lists::{Asker, ListKind, key_has_default, list_kind};
use super::object::{self, text};
use super::status_error::StatusError;

/// Rejects a configuration that does not belong to this object. `creates` means that the object does not exist yet.
pub(crate) fn check(target: &ResourcePath, configuration: &Value, creates: bool) -> Result<(), StatusError> {
    let kind = &target.kind;
    let (version, sort) = (text(configuration, "/apiVersion"), text(configuration, "/kind"));
    if version != kind.api_version() || sort != kind.kind {
        return Err(StatusError::bad_request(format!(
            "invalid object type: {}, Kind={sort}",
            group_version(version)
        )));
    }
    if !object::list(configuration, "/metadata/managedFields").is_empty() {
        return Err(StatusError::bad_request("metadata.managedFields must be nil"));
    }
    if let Some(wrong) = untyped(kind, configuration) {
        return Err(StatusError::internal(format!(
            "failed to create typed patch object ({}/{}; {}, Kind={sort}): {wrong}",
            object::namespace(configuration),
            object::name(configuration),
            group_version(version),
        )));
    }
    match object::name(configuration) {
        "" if creates => return Err(StatusError::nameless(&target.name)),
        name if !name.is_empty() && name != target.name => {
            return Err(StatusError::misnamed(name, &target.name));
        }
        _ => {}
    }
    let namespace = object::namespace(configuration);
    if kind.namespaced && !namespace.is_empty() && namespace != target.namespace {
        return Err(StatusError::misplaced());
    }
    Ok(())
}

/// Formats a group version like Go, which prints the core group as an empty name.
fn group_version(version: &str) -> String {
    if version.contains('/') {
        version.to_owned()
    } else {
        format!("/{version}")
    }
}

/// Returns why the configuration does not match the type of its kind.
fn untyped(kind: &ResourceKind, configuration: &Value) -> Option<String> {
    if let Some(map) = configuration.as_object()
        && let Some(wrong) = wrong_list(kind, &mut Vec::new(), "", map)
    {
        return Some(wrong);
    }
    if let Some(definition) = &kind.definition
        && let Some(wrong) = custom::mistyped(&definition.schema, configuration)
    {
        return Some(wrong);
    }
    match read(kind, configuration.clone()) {
        Err(refusal) => Some(refusal.message),
        Ok((_, unknown)) => {
            let wrong: Vec<String> = unknown
                .iter()
                .map(|path| format!(".{path}: field not declared in schema"))
                .collect();
            match wrong.as_slice() {
                [] => None,
                [one] => Some(one.clone()),
                several => Some(format!("errors:\n  {}", several.join("\n  "))),
            }
        }
    }
}

/// Finds a list map or set with duplicate elements.
fn wrong_list(
    kind: &ResourceKind,
    names: &mut Vec<String>,
    at: &str,
    map: &Map<String, Value>,
) -> Option<String> {
    for (key, value) in map {
        names.push(key.clone());
        let at = format!("{at}.{key}");
        let wrong = match value {
            Value::Object(inner) => wrong_list(kind, names, &at, inner),
            Value::Array(elements) => wrong_elements(kind, names, &at, elements),
            _ => None,
        };
        names.pop();
        if wrong.is_some() {
            return wrong;
        }
    }
    None
}

fn wrong_elements(
    kind: &ResourceKind,
    names: &mut Vec<String>,
    at: &str,
    elements: &[Value],
) -> Option<String> {
    let mut seen = BTreeSet::new();
    match list_kind(kind, names, Asker::Apply) {
        ListKind::Atomic => None,
        ListKind::Set => elements.iter().find_map(|element| {
            let twice = !seen.insert(element.to_string());
            twice.then(|| format!("{at}: duplicate entries for key [={element}]"))
        }),
        ListKind::Map(keys) => elements.iter().enumerate().find_map(|(index, element)| {
            let Some(map) = element.as_object() else {
                return Some(format!(
                    "{at}: element {index}: associative list with keys may not have non-map elements"
                ));
            };
            let mut shown = Vec::new();
            for key in &keys {
                match map.get(key) {
                    Some(value) => shown.push(format!("{key}={value}")),
                    None if key_has_default(kind, names) => shown.push(format!("{key}=\"\"")),
                    None => {
                        return Some(format!(
                            "{at}: element {index}: associative list with keys has an element that omits key field {key:?} (and doesn't have default value)"
                        ));
                    }
                }
            }
            let id = format!("[{}]", shown.join(","));
            if !seen.insert(id.clone()) {
                return Some(format!("{at}: duplicate entries for key {id}"));
            }
            wrong_list(kind, names, &format!("{at}{id}"), map)
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::kinds::classic_kind;
    use super::*;

    fn checked(kind: &str, configuration: Value) -> Result<(), (u16, String)> {
        let target = ResourcePath::new(classic_kind(kind), "t", "a", "");
        check(&target, &configuration, true).map_err(|refusal| (refusal.code, refusal.message))
    }

    #[test]
    fn a_configuration_must_name_its_kind_and_object() {
        let refused = |configuration| checked("ConfigMap", configuration).unwrap_err();
        for (configuration, message) in [
            (json!(null), "invalid object type: /, Kind="),
            (json!({ "apiVersion": "v1" }), "invalid object type: /v1, Kind="),
            (
                json!({ "apiVersion": "v1", "kind": "Pod" }),
                "invalid object type: /v1, Kind=Pod",
            ),
            (
                json!({ "apiVersion": "v1", "kind": "ConfigMap" }),
                "the name of the object (a based on URL) was undeterminable: name must be provided",
            ),
            (
                json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "b" } }),
                "the name of the object (b) does not match the name on the URL (a)",
            ),
        ] {
            assert_eq!(refused(configuration), (400, message.to_owned()));
        }
        let fine = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a" } });
        assert_eq!(checked("ConfigMap", fine), Ok(()));
    }

    #[test]
    fn entries_of_a_list_need_unique_keys() {
        let with = |entries: Value| {
            json!({
                "apiVersion": "resource.k8s.io/v1alpha2", "kind": "PodSchedulingContext",
                "metadata": { "name": "a" }, "status": { "resourceClaims": entries },
            })
        };
        for (entries, end) in [
            (
                json!([{ "name": "x" }, { "name": "x" }]),
                "duplicate entries for key [name=\"x\"]",
            ),
            (
                json!([{ "unsuitableNodes": [] }]),
                "omits key field \"name\" (and doesn't have default value)",
            ),
            (
                json!([7]),
                "associative list with keys may not have non-map elements",
            ),
        ] {
            let (code, message) = checked("PodSchedulingContext", with(entries)).unwrap_err();
            assert!(code == 500 && message.ends_with(end), "{message}");
        }
    }
}
