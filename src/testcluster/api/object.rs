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

/// Returns the size of the JSON encoding in bytes.
pub(crate) fn json_size(object: &Value) -> usize {
    struct ByteCounter(usize);
    impl std::io::Write for ByteCounter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = ByteCounter(0);
    // Infallible: the writer only counts, and a `Value` always serializes.
    let _ = serde_json::to_writer(&mut count, object);
    count.0
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
