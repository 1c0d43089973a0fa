//! Strategic merge patches (`k8s.io/apimachinery/pkg/util/strategicpatch`): merge patches that distinguish maps and
//! sets.
//!
//! Supports `$patch: delete`, `$patch: replace`, `$deleteFromPrimitiveList` and `$retainKeys`. Ignores
//! `$setElementOrder`.

use serde_json::{Map, Value};

use super::kinds::ResourceKind;
use super::lists::{Asker, ListKind, list_kind};
use super::status_error::StatusError;

const DELETE_FROM: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";
const RETAIN: &str = "$retainKeys";
const PATCH: &str = "$patch";

/// Applies a patch to an object.
pub(crate) fn apply(kind: &ResourceKind, object: &mut Value, patch: &Value) -> Result<(), StatusError> {
    let Some(patch) = patch.as_object() else {
        return Err(StatusError::bad_request(
            "a strategic merge patch is a JSON object",
        ));
    };
    merge(kind, &mut Vec::new(), object, patch)
}

fn merge(
    kind: &ResourceKind,
    path: &mut Vec<String>,
    target: &mut Value,
    patch: &Map<String, Value>,
) -> Result<(), StatusError> {
    match patch.get(PATCH).and_then(Value::as_str) {
        Some("replace") => {
            let mut whole = patch.clone();
            whole.remove(PATCH);
            *target = Value::Object(whole);
            return Ok(());
        }
        Some("delete") => {
            *target = Value::Object(Map::new());
            return Ok(());
        }
        Some("merge") | None => {}
        Some(other) => {
            return Err(StatusError::internal(format!(
                "Unknown patch type found: {other}"
            )));
        }
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(target) = target.as_object_mut() else {
        return Ok(());
    };
    if let Some(retained) = patch.get(RETAIN).and_then(Value::as_array) {
        target.retain(|key, _| retained.iter().any(|each| each == key));
    }
    for (key, value) in patch {
        if key == PATCH || key == RETAIN || key.starts_with(ORDER) {
            continue;
        }
        if let Some(name) = key.strip_prefix(DELETE_FROM) {
            remove_values(target, name, value);
            continue;
        }
        path.push(key.clone());
        match value {
            Value::Null => {
                target.remove(key);
            }
            Value::Object(inner) if inner.get(PATCH).and_then(Value::as_str) == Some("delete") => {
                target.remove(key);
            }
            Value::Object(inner) => merge(
                kind,
                path,
                target.entry(key.clone()).or_insert(Value::Null),
                inner,
            )?,
            Value::Array(elements) => {
                let merged = match list_kind(kind, path, Asker::Strategic) {
                    ListKind::Atomic => without_directives(elements),
                    ListKind::Set => merged_set(target.get(key), elements),
                    ListKind::Map(keys) => {
                        let known = target
                            .get(key)
                            .and_then(Value::as_array)
                            .cloned()
                            .unwrap_or_default();
                        merged_map(
                            kind,
                            path,
                            known,
                            elements,
                            keys.first().map_or("", String::as_str),
                        )?
                    }
                };
                target.insert(key.clone(), Value::Array(merged));
            }
            value => {
                target.insert(key.clone(), value.clone());
            }
        }
        path.pop();
    }
    Ok(())
}

fn remove_values(target: &mut Map<String, Value>, name: &str, values: &Value) {
    let values = values.as_array().map_or(&[][..], Vec::as_slice);
    if let Some(list) = target.get_mut(name).and_then(Value::as_array_mut) {
        list.retain(|element| !values.contains(element));
    }
}

fn without_directives(elements: &[Value]) -> Vec<Value> {
    elements
        .iter()
        .filter(|element| element.get(PATCH).is_none())
        .cloned()
        .collect()
}

fn merged_set(known: Option<&Value>, added: &[Value]) -> Vec<Value> {
    let known = known.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let mut patch: Vec<Value> = Vec::new();
    for element in added {
        if !patch.contains(element) {
            patch.push(element.clone());
        }
    }
    ordered(known, patch, Value::eq)
}

/// Orders elements like `mergeSortedSlice`: patched elements in the patch's order, others in their old order between
/// them; a new element precedes the existing one it competes with.
fn ordered(known: &[Value], patch: Vec<Value>, same: impl Fn(&Value, &Value) -> bool) -> Vec<Value> {
    let position = |element: &Value| known.iter().position(|each| same(each, element));
    let others: Vec<Value> = known
        .iter()
        .filter(|each| !patch.iter().any(|named| same(each, named)))
        .cloned()
        .collect();
    let mut others = others.into_iter().peekable();
    let mut merged = Vec::new();
    for element in patch {
        while let Some(other) = others.peek()
            && let (Some(left), Some(right)) = (position(other), position(&element))
            && left < right
        {
            merged.extend(others.next());
        }
        merged.push(element);
    }
    merged.extend(others);
    merged
}

fn merged_map(
    kind: &ResourceKind,
    path: &mut Vec<String>,
    mut known: Vec<Value>,
    patches: &[Value],
    key: &str,
) -> Result<Vec<Value>, StatusError> {
    if patches
        .iter()
        .any(|patch| patch.get(PATCH).and_then(Value::as_str) == Some("replace"))
    {
        return Ok(without_directives(patches));
    }
    let mut named: Vec<Value> = Vec::new();
    for patch in patches {
        let Some(inner) = patch.as_object() else {
            return Err(StatusError::bad_request(format!(
                "{}: expected objects in the list",
                path.join(".")
            )));
        };
        let Some(id) = inner.get(key) else {
            return Err(StatusError::unprocessable());
        };
        if inner.get(PATCH).and_then(Value::as_str) == Some("delete") {
            known.retain(|element| element.get(key) != Some(id));
            continue;
        }
        let element = known.iter().find(|element| element.get(key) == Some(id));
        let mut element = element.cloned().unwrap_or_default();
        merge(kind, path, &mut element, inner)?;
        named.retain(|each| each.get(key) != Some(id));
        named.push(element);
    }
    Ok(ordered(&known, named, |one, other| {
        one.get(key) == other.get(key)
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::kinds::classic_kind;
    use super::*;

    fn patched(mut object: Value, patch: &Value) -> Value {
        apply(&classic_kind("ResourceClaim"), &mut object, patch).unwrap();
        object
    }

    #[test]
    fn finalizers_are_added_to_and_removed_from_by_value() {
        let object = json!({ "metadata": { "finalizers": ["a", "b"] } });
        let added = patched(
            object.clone(),
            &json!({ "metadata": { "finalizers": ["c", "a"] } }),
        );
        assert_eq!(added["metadata"]["finalizers"], json!(["c", "a", "b"]));
        let removed = patched(
            object,
            &json!({ "metadata": { "$deleteFromPrimitiveList/finalizers": ["a", "x"] } }),
        );
        assert_eq!(removed["metadata"]["finalizers"], json!(["b"]));
    }

    #[test]
    fn list_map_entries_are_merged_added_and_deleted_by_key() {
        let object = json!({ "status": { "reservedFor": [{ "uid": "1", "name": "a" }, { "uid": "2", "name": "b" }] } });
        let patch = json!({ "status": { "reservedFor": [
            { "uid": "1", "name": "c" }, { "uid": "3", "name": "d" }, { "uid": "2", "$patch": "delete" },
        ] } });
        assert_eq!(
            patched(object, &patch)["status"]["reservedFor"],
            json!([{ "uid": "1", "name": "c" }, { "uid": "3", "name": "d" }])
        );
    }

    #[test]
    fn an_atomic_list_is_replaced_and_null_removes_a_field() {
        let object = json!({ "status": { "allocation": { "resourceHandles": [1, 2] }, "driverName": "x" } });
        let patch = json!({ "status": { "allocation": { "resourceHandles": [3] }, "driverName": null } });
        assert_eq!(
            patched(object, &patch),
            json!({ "status": { "allocation": { "resourceHandles": [3] } } })
        );
    }
}
