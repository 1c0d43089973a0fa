//! Decodes built-in kinds by their types: drops unknown fields with a warning and rejects values of a wrong type.
//!
//! The types are those of 1.34; fields that exist only in 1.30 are preserved separately.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, Pod};
use k8s_openapi::api::events::v1::Event as NewEvent;
use k8s_openapi::api::resource::v1 as structured;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::kinds::{ClusterMode, RESOURCE, ResourceKind};
use crate::api::resource;

/// Returns the object in its typed form and its unknown fields. An error names a value of a wrong type.
pub(crate) fn typed(kind: &ResourceKind, mut object: Value) -> Result<(Value, Vec<String>), String> {
    let mut unknown = Vec::new();
    let through = match (kind.group.as_str(), kind.kind.as_str()) {
        (RESOURCE, "DeviceClass") => through::<structured::DeviceClass>,
        (RESOURCE, "ResourceSlice") => through::<structured::ResourceSlice>,
        (RESOURCE, "ResourceClaim") if kind.is_structured() => through::<structured::ResourceClaim>,
        (RESOURCE, "ResourceClaimTemplate") if kind.is_structured() => {
            through::<structured::ResourceClaimTemplate>
        }
        (RESOURCE, "ResourceClass") => through::<resource::ResourceClass>,
        (RESOURCE, "ResourceClaim") => through::<resource::ResourceClaim>,
        (RESOURCE, "ResourceClaimTemplate") => through::<resource::ResourceClaimTemplate>,
        (RESOURCE, _) => through::<resource::PodSchedulingContext>,
        ("", "Pod") => through::<Pod>,
        ("", "Node") => through::<Node>,
        ("", "Namespace") => through::<Namespace>,
        ("", "ConfigMap") => through::<ConfigMap>,
        ("", _) => through::<Event>,
        ("events.k8s.io", _) => through::<NewEvent>,
        ("coordination.k8s.io", _) => through::<Lease>,
        _ => through::<CustomResourceDefinition>,
    };
    if kind.is("", "pods") && kind.mode == ClusterMode::Classic {
        let sources = take_sources(&mut object, &mut unknown)?;
        object = through(&object, &mut unknown)?;
        put_sources(&mut object, sources);
    } else {
        object = through(&object, &mut unknown)?;
    }
    // Go always serializes these structures, even if empty.
    if matches!(kind.kind.as_str(), "Lease" | "Namespace" | "Pod" | "Node")
        && let Some(map) = object.as_object_mut()
    {
        map.entry("spec").or_insert_with(|| json!({}));
    }
    Ok((object, unknown))
}

/// Round-trips an object through its type: drops unknown fields and fields that Go omits if empty.
fn through<T: DeserializeOwned + Serialize>(
    object: &Value,
    unknown: &mut Vec<String>,
) -> Result<Value, String> {
    let typed = T::deserialize(object).map_err(|error| error.to_string())?;
    let typed = serde_json::to_value(typed).map_err(|error| error.to_string())?;
    lost(object, &typed, "", unknown);
    Ok(typed)
}

/// Collects non-empty paths lost in the round trip, except those in metadata.
pub(crate) fn lost(before: &Value, after: &Value, path: &str, unknown: &mut Vec<String>) {
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

/// Returns whether Go omits the value.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(is_empty),
        _ => false,
    }
}

/// Extracts the sources of a pod's claims, a field that the newer types lack; 1.30 in turn lacks the newer fields.
fn take_sources(pod: &mut Value, unknown: &mut Vec<String>) -> Result<Vec<Option<Value>>, String> {
    const FIELDS: [&str; 2] = ["resourceClaimName", "resourceClaimTemplateName"];
    let claims = pod
        .pointer_mut("/spec/resourceClaims")
        .and_then(Value::as_array_mut);
    let mut sources = Vec::new();
    for (index, claim) in claims.into_iter().flatten().enumerate() {
        let at = format!("spec.resourceClaims[{index}]");
        let Some(claim) = claim.as_object_mut() else {
            return Err(format!("{at}: cannot unmarshal it into an object"));
        };
        for field in FIELDS {
            if claim.remove(field).is_some() {
                unknown.push(format!("{at}.{field}"));
            }
        }
        let source = match claim.remove("source") {
            None | Some(Value::Null) => None,
            Some(Value::Object(given)) => {
                let mut source = Map::new();
                for (key, value) in given {
                    match (FIELDS.contains(&key.as_str()), &value) {
                        (false, _) => unknown.push(format!("{at}.source.{key}")),
                        (true, Value::Null) => {}
                        (true, Value::String(_)) => {
                            source.insert(key, value);
                        }
                        _ => return Err(format!("{at}.source.{key}: cannot unmarshal it into a string")),
                    }
                }
                Some(Value::Object(source))
            }
            Some(_) => return Err(format!("{at}.source: cannot unmarshal it into an object")),
        };
        sources.push(source);
    }
    Ok(sources)
}

fn put_sources(pod: &mut Value, sources: Vec<Option<Value>>) {
    let claims = pod
        .pointer_mut("/spec/resourceClaims")
        .and_then(Value::as_array_mut);
    for (claim, source) in claims.into_iter().flatten().zip(sources) {
        if let (Some(claim), Some(source)) = (claim.as_object_mut(), source) {
            claim.insert("source".to_owned(), source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::classic_kind;
    use super::*;

    fn of(kind: &str, mut object: Value) -> Result<(Value, Vec<String>), String> {
        let kind = classic_kind(kind);
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = kind.kind.clone().into();
        object["metadata"] = json!({ "name": "a" });
        typed(&kind, object)
    }

    #[test]
    fn unknown_fields_are_dropped_and_reported() {
        let container =
            json!({ "name": "c", "image": "i", "imagee": "x", "resources": { "limits": { "a/b": 1 } } });
        let pod = json!({ "spec": { "colour": "red", "containers": [container] } });
        let (pod, mut unknown) = of("Pod", pod).unwrap();
        unknown.sort();
        assert_eq!(unknown, ["spec.colour", "spec.containers[0].imagee"]);
        assert_eq!(pod["spec"].get("colour"), None);
        assert_eq!(
            pod["spec"]["containers"][0]["resources"]["limits"],
            json!({ "a/b": "1" })
        );
    }

    #[test]
    fn a_pod_keeps_the_sources_of_its_claims() {
        let claims = json!([
            { "name": "a", "source": { "resourceClaimName": "x" } },
            { "name": "b", "resourceClaimName": "y", "source": { "color": 1 } },
            { "name": "c", "source": { "resourceClaimTemplateName": "z" } },
        ]);
        let pod = json!({ "spec": { "containers": [{ "name": "c" }], "resourceClaims": claims } });
        let (pod, unknown) = of("Pod", pod).unwrap();
        assert_eq!(
            unknown,
            [
                "spec.resourceClaims[1].resourceClaimName",
                "spec.resourceClaims[1].source.color"
            ]
        );
        assert_eq!(
            pod["spec"]["resourceClaims"],
            json!([
                { "name": "a", "source": { "resourceClaimName": "x" } },
                { "name": "b", "source": {} },
                { "name": "c", "source": { "resourceClaimTemplateName": "z" } },
            ])
        );
        for wrong in [
            json!([7]),
            json!([{ "name": "a", "source": 7 }]),
            json!([{ "name": "a", "source": { "resourceClaimName": 7 } }]),
        ] {
            let pod = json!({ "spec": { "containers": [], "resourceClaims": wrong } });
            assert!(of("Pod", pod).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_field_of_another_type_is_refused() {
        for (kind, object) in [
            ("ConfigMap", json!({ "data": 7 })),
            ("ConfigMap", json!({ "data": { "a": 7 } })),
            ("Namespace", json!({ "status": "s" })),
            ("Node", json!({ "spec": [] })),
            ("Lease", json!({ "spec": { "leaseDurationSeconds": "5" } })),
            ("Lease", json!({ "spec": { "renewTime": "yesterday" } })),
            ("Event", json!({ "count": "many" })),
            ("CustomResourceDefinition", json!({ "spec": { "versions": 7 } })),
        ] {
            assert!(of(kind, object.clone()).is_err(), "{kind} {object}");
        }
    }
}
