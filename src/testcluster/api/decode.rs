//! Decodes a request body to an object in its stored form: typed if the type is known, with the server's defaults.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize as _;
use serde_json::{Map, Value, json};

use super::custom;
use super::events;
use super::kinds::ResourceKind;
use super::pods;
use super::server::WriteOptions;
use super::status_error::StatusError;
use super::structured;
use super::typed::{is_empty, lost, typed};

/// Decodes the object of a request. Rejects unknown fields, or drops them with a warning.
pub(crate) fn decode(
    kind: &ResourceKind,
    value: Value,
    options: &WriteOptions,
) -> Result<Value, StatusError> {
    let (mut object, unknown) = read(kind, value)?;
    let unknown: Vec<String> = unknown
        .iter()
        .map(|path| format!("unknown field {path:?}"))
        .collect();
    if !options.strict {
        for field in &unknown {
            options.unknown.add(field.clone());
        }
    } else if !unknown.is_empty() {
        return Err(StatusError::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: strict decoding error: {}",
            kind.kind,
            kind.version,
            kind.kind,
            unknown.join(", ")
        )));
    }
    events::to_stored(kind, &mut object);
    Ok(object)
}

/// Decodes an object of a kind and returns its unknown fields.
pub(crate) fn read(kind: &ResourceKind, value: Value) -> Result<(Value, Vec<String>), StatusError> {
    let wrong = |error: &dyn std::fmt::Display| {
        StatusError::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: json: {error}",
            kind.kind, kind.version, kind.kind
        ))
    };
    let mut map = match value {
        Value::Object(map) => map,
        Value::Null if kind.definition.is_none() => Map::new(),
        _ => return Err(wrong(&"cannot unmarshal it into Go value: it is not an object")),
    };
    for key in ["apiVersion", "kind"] {
        if map
            .get(key)
            .is_some_and(|given| !given.is_string() && !given.is_null())
        {
            return Err(StatusError::bad_request(format!(
                "the object provided is unrecognized (must be of type {}): couldn't get version/kind: {key} is no text",
                kind.kind
            )));
        }
    }
    let given = |key: &str| map.get(key).and_then(Value::as_str).unwrap_or_default();
    if kind.definition.is_some() && given("kind").is_empty() {
        return Err(StatusError::bad_request(format!(
            "the object provided is unrecognized (must be of type {}): Object 'Kind' is missing",
            kind.kind
        )));
    }
    if (!given("kind").is_empty() && given("kind") != kind.kind)
        || (!given("apiVersion").is_empty() && given("apiVersion") != kind.api_version())
    {
        return Err(StatusError::bad_request(format!(
            "the API version in the data ({}) does not match the expected API version ({})",
            format_args!("{}, Kind={}", given("apiVersion"), given("kind")),
            format_args!("{}, Kind={}", kind.api_version(), kind.kind),
        )));
    }
    map.insert("apiVersion".to_owned(), kind.api_version().into());
    map.insert("kind".to_owned(), kind.kind.clone().into());
    let given = match map.remove("metadata") {
        None | Some(Value::Null) => json!({}),
        Some(metadata) => metadata,
    };
    let metadata = ObjectMeta::deserialize(&given).map_err(|error| wrong(&error))?;
    let metadata = serde_json::to_value(metadata).map_err(|error| wrong(&error))?;
    let mut unknown = Vec::new();
    lost(&given, &metadata, "metadata", &mut unknown);
    map.insert("metadata".to_owned(), metadata);
    let mut object = Value::Object(map);
    if let Some(definition) = &kind.definition {
        unknown.extend(custom::prune(&definition.schema, &mut object));
        return Ok((object, unknown));
    }
    let mut mode = None;
    if kind.is_classic() {
        default_claim(&mut object);
        // Whether the mode is valid is decided by validation, not by decoding.
        mode = take_mode(&mut object);
    }
    let (mut object, dropped) = typed(kind, object).map_err(|error| wrong(&error))?;
    unknown.extend(dropped);
    if let Some((pointer, mode)) = mode
        && let Some(spec) = object.pointer_mut(pointer).and_then(Value::as_object_mut)
    {
        spec.insert("allocationMode".to_owned(), mode);
    }
    if let Some(map) = object.as_object_mut() {
        map.insert("apiVersion".to_owned(), kind.api_version().into());
        map.insert("kind".to_owned(), kind.kind.clone().into());
    }
    if kind.is_structured() {
        structured::default(&mut object);
    }
    if kind.is_classic() && kind.kind == "ResourceClaimTemplate" {
        // Go always prints this field, whatever its value.
        object["spec"]["metadata"]["creationTimestamp"] = Value::Null;
    }
    if kind.kind == "Pod" {
        pods::default(&mut object);
    }
    Ok((object, unknown))
}

fn take_mode(object: &mut Value) -> Option<(&'static str, Value)> {
    ["/spec", "/spec/spec"].into_iter().find_map(|pointer| {
        let spec = object.pointer_mut(pointer)?.as_object_mut()?;
        if !spec.get("allocationMode")?.is_string() {
            return None;
        }
        Some((pointer, spec.remove("allocationMode")?))
    })
}

/// Fills in strings that Go serializes as empty, and the default mode.
fn default_claim(object: &mut Value) {
    let Some(map) = object.as_object_mut() else { return };
    map.entry("spec").or_insert_with(|| json!({}));
    fill(object, "", &["driverName"], "ResourceClass");
    fill(object, "/spec", &["resourceClassName"], "ResourceClaim");
    fill(
        object,
        "/spec/spec",
        &["resourceClassName"],
        "ResourceClaimTemplate",
    );
    for reference in [
        "/parametersRef",
        "/spec/parametersRef",
        "/spec/spec/parametersRef",
    ] {
        fill(object, reference, &["kind", "name"], "");
    }
    let consumers = object
        .pointer("/status/reservedFor")
        .and_then(Value::as_array)
        .map_or(0, Vec::len);
    for index in 0..consumers {
        fill(
            object,
            &format!("/status/reservedFor/{index}"),
            &["resource", "name", "uid"],
            "",
        );
    }
    for (pointer, kind) in [
        ("/spec", "ResourceClaim"),
        ("/spec/spec", "ResourceClaimTemplate"),
    ] {
        if object["kind"] == kind
            && let Some(spec) = object.pointer_mut(pointer).and_then(Value::as_object_mut)
            && spec.get("allocationMode").is_none_or(is_empty)
        {
            spec.insert("allocationMode".to_owned(), "WaitForFirstConsumer".into());
        }
    }
}

/// Fills in empty strings, for one kind or for all (empty `kind`).
fn fill(object: &mut Value, pointer: &str, keys: &[&str], kind: &str) {
    if !kind.is_empty() && object["kind"] != kind {
        return;
    }
    if let Some(map) = object.pointer_mut(pointer).and_then(Value::as_object_mut) {
        for key in keys {
            map.entry(*key).or_insert_with(|| "".into());
        }
    }
}
