//! Accessors for objects as JSON. The server does not know most fields and must preserve all of them.

use serde_json::Value;

/// Returns the string at a pointer, or an empty one.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

/// Returns the namespace; empty for cluster-scoped objects.
pub(crate) fn namespace(object: &Value) -> &str {
    text(object, "/metadata/namespace")
}

pub(crate) fn uid(object: &Value) -> &str {
    text(object, "/metadata/uid")
}

/// Returns the strings of a list.
pub(crate) fn texts<'a>(object: &'a Value, pointer: &str) -> Vec<&'a str> {
    list(object, pointer).iter().filter_map(Value::as_str).collect()
}

/// Returns the elements of a list; none if it is missing.
pub(crate) fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object
        .pointer(pointer)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// Returns the integer at a pointer.
pub(crate) fn number(object: &Value, pointer: &str) -> Option<i64> {
    object.pointer(pointer).and_then(Value::as_i64)
}

/// Returns the conditions of an object, with this one in place of that of its type.
pub(crate) fn with_condition(object: &Value, condition: Value) -> Vec<Value> {
    let others = list(object, "/status/conditions").iter();
    let mut conditions: Vec<Value> = others
        .filter(|other| other["type"] != condition["type"])
        .cloned()
        .collect();
    conditions.push(condition);
    conditions
}

/// Returns whether an object has the condition `Ready`.
pub(crate) fn is_ready(object: &Value) -> bool {
    list(object, "/status/conditions")
        .iter()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Returns the size of the JSON encoding in bytes.
pub(crate) fn json_size(object: &Value) -> usize {
    object.to_string().len()
}

pub(crate) fn is_deleting(object: &Value) -> bool {
    !text(object, "/metadata/deletionTimestamp").is_empty()
}

/// Sets or removes a metadata field.
pub(crate) fn set_metadata(object: &mut Value, key: &str, value: Option<Value>) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return;
    };
    match value {
        Some(value) => {
            metadata.insert(key.to_owned(), value);
        }
        None => {
            metadata.remove(key);
        }
    }
}

/// Copies a top-level field from another object, or removes it if missing there.
pub(crate) fn copy_root(object: &mut Value, from: &Value, key: &str) {
    let Some(map) = object.as_object_mut() else { return };
    match from.get(key) {
        Some(value) => {
            map.insert(key.to_owned(), value.clone());
        }
        None => {
            map.remove(key);
        }
    }
}
