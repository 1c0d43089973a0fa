//! Events have two forms, of the core group and of `events.k8s.io`, and are stored in the first.

use serde_json::Value;

use super::kinds::Kind;

/// Fields of `events.k8s.io/v1`, and what the core group calls them.
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

/// Into the stored form.
pub(crate) fn to_stored(kind: &Kind, object: &mut Value) {
    if kind.is("events.k8s.io", "events") {
        rename(object, NAMES.iter().copied());
        object["apiVersion"] = "v1".into();
    }
}

/// From the stored form into that of a kind.
pub(crate) fn from_stored(kind: &Kind, object: &mut Value) {
    if kind.is("events.k8s.io", "events") {
        rename(object, NAMES.iter().map(|(new, core)| (*core, *new)));
        object["apiVersion"] = kind.api_version().into();
    }
}
