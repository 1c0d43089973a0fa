//! Converts events between the core group and `events.k8s.io`; they are stored in the core form.

use serde_json::Value;

use super::kinds::ResourceKind;

/// Field names in `events.k8s.io/v1` and in the core group.
const NAMES: &[(&str, &str)] = &[
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("reportingController", "reportingComponent"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

fn rename(object: &mut Value, pairs: impl Iterator<Item = (&'static str, &'static str)>) {
    let Some(map) = object.as_object_mut() else { return };
    for (from, to) in pairs {
        if let Some(value) = map.remove(from) {
            map.insert(to.to_owned(), value);
        }
    }
}

/// Converts to the stored form.
pub(crate) fn to_stored(kind: &ResourceKind, object: &mut Value) {
    if kind.is("events.k8s.io", "events") {
        rename(object, NAMES.iter().copied());
        object["apiVersion"] = "v1".into();
    }
}

/// Converts from the stored form.
pub(crate) fn from_stored(kind: &ResourceKind, object: &mut Value) {
    if kind.is("events.k8s.io", "events") {
        rename(object, NAMES.iter().map(|(new, core)| (*core, *new)));
        object["apiVersion"] = kind.api_version().into();
    }
}
