//! Generates the page of our kinds' fields.

use drayman::api::crd::definitions;
use serde_json::Value;

use super::{cell, code};

pub(super) fn text() -> String {
    let mut text = String::from(
        "# Our kinds\n\nMade from the types by `make generate`; the definitions themselves are in [crds](../../crds), and \
         `drayman crds` prints them. `[]` stands for each entry of a list, `*` for each key of a map.\n",
    );
    for definition in definitions() {
        let names = &definition.spec.names;
        for version in &definition.spec.versions {
            text.extend([format!(
                "\n## {}\n\n`{}/{}`, {}, `kubectl get {}`",
                names.kind, definition.spec.group, version.name, definition.spec.scope, names.plural
            )]);
            let short = names.short_names.clone().unwrap_or_default();
            if !short.is_empty() {
                text.extend([format!(" (short: `{}`)", short.join("`, `"))]);
            }
            text.push_str(".\n\n| field | type | required | meaning |\n|---|---|---|---|\n");
            let schema = version
                .schema
                .as_ref()
                .and_then(|schema| schema.open_api_v3_schema.as_ref());
            let schema = serde_json::to_value(schema).expect("JSON");
            for part in ["spec", "status"] {
                describe(&schema["properties"][part], part, &mut text);
            }
        }
    }
    text
}

fn describe(schema: &Value, path: &str, text: &mut String) {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let (path, field, kind) = unwrapped(format!("{path}.{name}"), field);
        let is_required = required.iter().any(|required| required == name);
        text.extend([format!(
            "| {} | {} | {} | {} |\n",
            code(&path),
            cell(&kind),
            if is_required { "yes" } else { "" },
            meaning(&schema["properties"][name])
        )]);
        describe(field, &path, text);
    }
}

/// Unwraps lists and maps: the path, the inner schema, and the name of the whole type.
fn unwrapped(path: String, field: &Value) -> (String, &Value, String) {
    if field["items"].is_object() {
        let (path, inner, kind) = unwrapped(format!("{path}[]"), &field["items"]);
        return (path, inner, format!("list of {kind}"));
    }
    if field["additionalProperties"].is_object() {
        let (path, inner, kind) = unwrapped(format!("{path}.*"), &field["additionalProperties"]);
        return (path, inner, format!("map of {kind}"));
    }
    let kind = field["format"].as_str().or_else(|| field["type"].as_str());
    (path, field, kind.unwrap_or("any").to_owned())
}

/// The description with the limits.
fn meaning(field: &Value) -> String {
    let mut parts = vec![cell(field["description"].as_str().unwrap_or_default())];
    if let Some(values) = field["enum"].as_array() {
        let values: Vec<String> = values.iter().filter_map(Value::as_str).map(code).collect();
        parts.push(format!("One of {}.", values.join(", ")));
    }
    for (name, words) in [
        ("default", "Default"),
        ("minimum", "At least"),
        ("maximum", "At most"),
        ("minItems", "Entries, at least"),
        ("maxItems", "Entries, at most"),
        ("maxLength", "Length, at most"),
        ("maxProperties", "Keys, at most"),
    ] {
        if !field[name].is_null() {
            parts.push(format!(
                "{words}: {}.",
                code(field[name].to_string().trim_end_matches(".0"))
            ));
        }
    }
    parts.join(" ").trim().to_owned()
}
