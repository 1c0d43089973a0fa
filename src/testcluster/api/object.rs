//! Small looks into objects, which are JSON here: the server does not know most of their fields, and must not lose any.

use serde_json::Value;

/// The text at a pointer; empty if there is none.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// The name.
pub(crate) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

/// The namespace; empty for cluster-scoped objects.
pub(crate) fn namespace(object: &Value) -> &str {
    text(object, "/metadata/namespace")
}

/// The uid.
pub(crate) fn uid(object: &Value) -> &str {
    text(object, "/metadata/uid")
}

/// The texts of a list.
pub(crate) fn texts<'a>(object: &'a Value, pointer: &str) -> Vec<&'a str> {
    list(object, pointer).iter().filter_map(Value::as_str).collect()
}

/// The elements of a list; none if there is no list.
pub(crate) fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object
        .pointer(pointer)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// How many bytes an object has as JSON.
pub(crate) fn json_size(object: &Value) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // Cannot fail: nothing here refuses to be written.
    let _ = serde_json::to_writer(&mut count, object);
    count.0
}

/// Whether a deletion is under way.
pub(crate) fn is_deleting(object: &Value) -> bool {
    !text(object, "/metadata/deletionTimestamp").is_empty()
}

/// Sets a field of the metadata, or takes it away.
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

/// Copies a field of the object's root from another object, or takes it away.
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
