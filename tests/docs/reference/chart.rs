//! Generates the page of the chart's values.

use serde_json::Value;

use super::{cell, code};
use crate::page::repository;
use crate::schema::of_kind;

pub(super) fn text() -> String {
    let read = |path: &str| {
        std::fs::read_to_string(repository("charts/drayman").join(path)).expect("a file of the chart")
    };
    let schema: Value = serde_json::from_str(&schema()).expect("JSON");
    let values: Value = serde_saphyr::from_str(&read("values.yaml")).expect("YAML");
    let mut text = String::from(
        "# Values of the chart\n\nMade from the chart by `make generate`. \
         [values.yaml](../../charts/drayman/values.yaml) says the same with examples. A value that is not in this list is refused.\n\n\
         | value | default | meaning |\n|---|---|---|\n",
    );
    describe(&schema, &schema, &values, "", &mut text);
    text
}

/// The schema of the chart's values: the hand-written part, and the schemas of kinds and classes from the program's types.
pub(super) fn schema() -> String {
    let text = std::fs::read_to_string(repository("hack/values.schema.json")).expect("the schema");
    let mut schema: Value = serde_json::from_str(&text).expect("JSON");
    schema["definitions"]["deviceKind"] = drayman::node::config::kind_schema().to_value();
    let class = of_kind("DeviceClassParameters").expect("a kind of ours");
    for (field, of_field) in class["properties"]["spec"]["properties"]
        .as_object()
        .expect("fields")
    {
        schema["properties"]["classes"]["items"]["properties"][field] = of_field.clone();
    }
    serde_json::to_string_pretty(&schema).expect("JSON") + "\n"
}

/// Resolves a `$ref`.
fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let reference = schema["allOf"][0]["$ref"]
        .as_str()
        .or_else(|| schema["$ref"].as_str());
    reference.map_or(schema, |reference| {
        root.pointer(reference.trim_start_matches('#'))
            .unwrap_or_else(|| panic!("{reference}"))
    })
}

fn describe(root: &Value, schema: &Value, values: &Value, path: &str, text: &mut String) {
    for (name, value) in values.as_object().into_iter().flatten() {
        let Some(field) = schema["properties"].get(name) else {
            continue;
        };
        let path = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        let below = resolved(root, field);
        if below["properties"].is_object() && value.as_object().is_some_and(|map| !map.is_empty()) {
            describe(root, below, value, &path, text);
            continue;
        }
        let default = if value.is_string() && value.as_str() == Some("") {
            String::new()
        } else {
            code(&value.to_string())
        };
        let description = field["description"].as_str().unwrap_or_default();
        text.extend([format!(
            "| {} | {default} | {} |\n",
            code(&path),
            cell(description)
        )]);
    }
}
