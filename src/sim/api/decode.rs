//! From the bytes of a request to an object in the form in which it is stored: typed where the type is known, with the defaults
//! that the server fills in.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::custom;
use super::events;
use super::kinds::{Kind, RESOURCE};
use super::refusal::Refusal;
use super::server::WriteOptions;
use crate::api::resource;

/// Reads the object of a request. Fields that nobody knows are refused, or dropped and told.
pub(crate) fn decode(kind: &Kind, value: Value, options: &WriteOptions) -> Result<Value, Refusal> {
    let wrong = |error: &dyn std::fmt::Display| {
        Refusal::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: json: {error}",
            kind.kind, kind.version, kind.kind
        ))
    };
    let Value::Object(mut map) = value else {
        return Err(wrong(&"cannot unmarshal it into Go value: it is not an object"));
    };
    let given = |key: &str| map.get(key).and_then(Value::as_str).unwrap_or_default();
    if (!given("kind").is_empty() && given("kind") != kind.kind)
        || (!given("apiVersion").is_empty() && given("apiVersion") != kind.api_version())
    {
        return Err(Refusal::bad_request(format!(
            "the API version in the data ({}) does not match the expected API version ({})",
            format_args!("{}, Kind={}", given("apiVersion"), given("kind")),
            format_args!("{}, Kind={}", kind.api_version(), kind.kind),
        )));
    }
    map.insert("apiVersion".to_owned(), kind.api_version().into());
    map.insert("kind".to_owned(), kind.kind.clone().into());
    let metadata = map.remove("metadata").unwrap_or_else(|| json!({}));
    let metadata: ObjectMeta = serde_json::from_value(metadata).map_err(|error| wrong(&error))?;
    map.insert(
        "metadata".to_owned(),
        serde_json::to_value(metadata).unwrap_or_else(|_| json!({})),
    );
    let mut object = Value::Object(map);
    let unknown = match &kind.definition {
        Some(definition) => custom::prune(&definition.schema, &mut object),
        None if kind.group == RESOURCE => {
            default_claim(&mut object);
            // Whether a mode is one is a rule about the object, and not one about its form.
            let mode = take_mode(&mut object);
            let typed = match kind.kind.as_str() {
                "ResourceClass" => typed::<resource::ResourceClass>(&object),
                "ResourceClaim" => typed::<resource::ResourceClaim>(&object),
                "ResourceClaimTemplate" => typed::<resource::ResourceClaimTemplate>(&object),
                _ => typed::<resource::PodSchedulingContext>(&object),
            }
            .map_err(|error| wrong(&error))?;
            let mut unknown = Vec::new();
            lost(&object, &typed, "", &mut unknown);
            object = typed;
            if let Some((pointer, mode)) = mode
                && let Some(spec) = object.pointer_mut(pointer)
            {
                spec["allocationMode"] = mode;
            }
            object["apiVersion"] = kind.api_version().into();
            object["kind"] = kind.kind.clone().into();
            if kind.kind == "ResourceClaimTemplate" {
                // As Go prints the type, whatever is in it.
                object["spec"]["metadata"]["creationTimestamp"] = Value::Null;
            }
            unknown
        }
        None => {
            if kind.kind == "Pod" {
                typed::<resource::Pod>(&object).map_err(|error| wrong(&error))?;
                default_pod(&mut object);
            }
            Vec::new()
        }
    };
    let unknown: Vec<String> = unknown
        .iter()
        .map(|path| format!("unknown field {path:?}"))
        .collect();
    if !options.strict {
        for field in &unknown {
            options.unknown.add(field.clone());
        }
    } else if !unknown.is_empty() {
        return Err(Refusal::bad_request(format!(
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

/// Through the type and back: what the type does not have is gone, and so is what Go leaves out when it is empty.
fn typed<T: DeserializeOwned + Serialize>(object: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(T::deserialize(object)?)
}

/// The paths that were lost on the way, empty ones apart.
fn lost(before: &Value, after: &Value, path: &str, unknown: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before {
                if path.is_empty() && matches!(key.as_str(), "apiVersion" | "kind" | "metadata") {
                    continue;
                }
                let at = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                match after.get(key) {
                    Some(after) => lost(value, after, &at, unknown),
                    None if is_empty(value) => {}
                    None => unknown.push(at),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) => {
            for (index, (before, after)) in before.iter().zip(after).enumerate() {
                lost(before, after, &format!("{path}[{index}]"), unknown);
            }
        }
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(is_empty),
        _ => false,
    }
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

/// Texts that Go has as empty where they are left out, and the default mode.
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

/// Fills in empty texts, in objects of one kind or of any.
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

/// The defaults of a pod that somebody on the stage reads.
fn default_pod(pod: &mut Value) {
    let defaults = [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("enableServiceLinks", json!(true)),
        ("priority", json!(0)),
    ];
    if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
        for (key, value) in defaults {
            spec.entry(key).or_insert(value);
        }
    }
}
