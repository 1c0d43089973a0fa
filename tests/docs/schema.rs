//! Validates objects of our kinds, and chart values, against their schemas.

use drayman::api::crd::{GROUP, VERSION, definitions};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::page::{Block, pages, repository};

/// The schema of one of our kinds without unknown fields. CRD schemas are open: an API server drops or rejects unknown fields.
pub(crate) fn of_kind(kind: &str) -> Option<Value> {
    let definition = definitions()
        .into_iter()
        .find(|definition| definition.spec.names.kind == kind)?;
    let version = definition
        .spec
        .versions
        .into_iter()
        .find(|version| version.name == VERSION)?;
    let mut schema = serde_json::to_value(version.schema?.open_api_v3_schema?).expect("JSON");
    for name in ["apiVersion", "kind"] {
        schema["properties"][name] = json!({ "type": "string" });
    }
    schema["properties"]["metadata"] = json!({ "type": "object" });
    close(&mut schema);
    Some(schema)
}

fn close(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.get("properties").is_some_and(Value::is_object)
                && !map.contains_key("additionalProperties")
            {
                map.insert("additionalProperties".to_owned(), json!(false));
            }
            map.values_mut().for_each(close);
        }
        Value::Array(list) => list.iter_mut().for_each(close),
        _ => {}
    }
}

/// Validation errors of a value.
fn faults(schema: &Value, value: &Value) -> Vec<String> {
    let validator = jsonschema::validator_for(schema).expect("a schema");
    let faults = validator.iter_errors(value);
    faults
        .map(|fault| format!("{}: {fault}", fault.instance_path()))
        .collect()
}

fn documents(text: &str, place: &str) -> Vec<Value> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{place}: {error}"));
    documents
        .into_iter()
        .filter(|document| !document.is_null())
        .collect()
}

fn blocks() -> impl Iterator<Item = Block> {
    pages()
        .into_iter()
        .flat_map(|page| page.blocks)
        .filter(|block| block.language == "yaml")
}

#[test]
fn objects_have_kind_and_name_and_ours_match_their_schema() {
    let (mut count, mut wrong) = (0, Vec::new());
    for block in blocks() {
        let schema = of_kind(&block.mark);
        if block.mark != "object" && schema.is_none() {
            continue;
        }
        for document in documents(&block.text, &block.place) {
            count += 1;
            let (schema, object) = match &schema {
                Some(schema) => (
                    Some(schema.clone()),
                    json!({ "metadata": { "name": "a" }, "spec": document }),
                ),
                None => (of_kind(document["kind"].as_str().unwrap_or_default()), document),
            };
            let is_ours = object["apiVersion"] == format!("{GROUP}/{VERSION}");
            if block.mark == "object" {
                for field in ["/apiVersion", "/kind", "/metadata/name"] {
                    if !object.pointer(field).is_some_and(Value::is_string) {
                        wrong.push(format!("{}: no {field}", block.place));
                    }
                }
                if schema.is_some() != is_ours {
                    wrong.push(format!(
                        "{}: {} is no kind of {}",
                        block.place, object["kind"], object["apiVersion"]
                    ));
                }
            }
            let found = schema.map_or_else(Vec::new, |schema| faults(&schema, &object));
            wrong.extend(found.into_iter().map(|fault| format!("{}: {fault}", block.place)));
        }
    }
    assert!(wrong.is_empty(), "\n  {}", wrong.join("\n  "));
    assert!(count > 4, "{count} objects");
}

/// An object after deserialization and serialization, without the fields that Kubernetes would drop.
fn read_and_written<T: DeserializeOwned + Serialize>(object: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(T::deserialize(object)?)
}

/// Objects of structured mode: those of the pages and of `examples/structured`.
fn structured() -> Vec<(String, Value)> {
    let of_pages = blocks().filter(|block| block.mark == "v1");
    let mut texts: Vec<(String, String)> = of_pages.map(|block| (block.place, block.text)).collect();
    for entry in std::fs::read_dir(repository("examples/structured")).expect("the examples") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            texts.push((
                path.display().to_string(),
                std::fs::read_to_string(&path).expect("UTF-8"),
            ));
        }
    }
    let objects = texts.iter().flat_map(|(place, text)| {
        let objects = documents(text, place).into_iter();
        objects.map(|object| (place.clone(), object))
    });
    objects.collect()
}

#[test]
fn objects_of_structured_mode_have_known_fields_only() {
    let objects = structured();
    assert!(objects.len() > 12, "{} objects", objects.len());
    for (place, object) in objects {
        let read = match (object["apiVersion"].as_str(), object["kind"].as_str()) {
            (Some("v1"), Some("Namespace")) => read_and_written::<Namespace>(&object),
            (Some("v1"), Some("Pod")) => read_and_written::<Pod>(&object),
            (Some("resource.k8s.io/v1"), Some("DeviceClass")) => read_and_written::<DeviceClass>(&object),
            (Some("resource.k8s.io/v1"), Some("ResourceClaim")) => read_and_written::<ResourceClaim>(&object),
            (Some("resource.k8s.io/v1"), Some("ResourceClaimTemplate")) => {
                read_and_written::<ResourceClaimTemplate>(&object)
            }
            (version, kind) => panic!("{place}: {kind:?} of {version:?}"),
        };
        assert_eq!(read.expect(&place), object, "{place}: another field");
    }
}

#[test]
fn values_of_the_chart_are_as_its_schema_wants_them() {
    let text = std::fs::read_to_string(repository("charts/drayman/values.schema.json")).expect("the schema");
    let schema: Value = serde_json::from_str(&text).expect("JSON");
    let mut count = 0;
    let check = |text: &str, place: &str| {
        for document in documents(text, place) {
            assert_eq!(faults(&schema, &document), [""; 0], "{place}");
        }
    };
    for block in blocks().filter(|block| block.mark == "values") {
        count += 1;
        check(&block.text, &block.place);
    }
    // Values that a script writes into a file.
    for block in pages()
        .into_iter()
        .flat_map(|page| page.blocks)
        .filter(|block| block.language == "sh")
    {
        if let Some((_, rest)) = block.text.split_once("cat >values.yaml <<EOF\n") {
            count += 1;
            check(rest.split("\nEOF\n").next().unwrap_or_default(), &block.place);
        }
    }
    assert!(count > 0);
    assert!(
        !faults(&schema, &json!({ "deviceKind": [] })).is_empty(),
        "the schema is closed"
    );
}

#[test]
fn a_wrong_object_is_found() {
    let schema = of_kind("DeviceClaimParameters").expect("a kind of ours");
    let object = |spec: Value| json!({ "apiVersion": "a", "kind": "b", "metadata": {}, "spec": spec });
    assert_eq!(
        faults(
            &schema,
            &object(json!({ "requests": [{ "name": "a", "count": 2 }] }))
        ),
        [""; 0]
    );
    for spec in [
        json!({}),
        json!({ "requests": [{ "name": "a", "number": 2 }] }),
        json!({ "requests": [{ "name": "a", "count": 0 }] }),
        json!({ "request": [] }),
    ] {
        assert!(!faults(&schema, &object(spec.clone())).is_empty(), "{spec}");
    }
}
