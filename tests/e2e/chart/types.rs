//! Rejects every value of the chart that has a wrong JSON type.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::chart::helm::{chart, yaml};
use crate::chart::values::{assert_each_refused, resolve, schema};

/// The JSON types that a schema accepts.
fn types(root: &Value, schema: &Value) -> BTreeSet<String> {
    let schema = resolve(root, schema);
    let name = |value: &Value| match value {
        Value::String(_) => "string",
        Value::Number(_) => "integer",
        Value::Bool(_) => "boolean",
        Value::Array(_) => "array",
        _ => "object",
    };
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(|value| name(value).to_owned()).collect();
    }
    let several = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array());
    match (&schema["type"], several) {
        (Value::String(one), _) => [one.clone()].into(),
        (Value::Array(several), _) => several
            .iter()
            .filter_map(|one| one.as_str().map(str::to_owned))
            .collect(),
        (_, Some(several)) => several.iter().flat_map(|one| types(root, one)).collect(),
        _ => unreachable!("a schema without a type: {schema}"),
    }
}

/// The schema of a path in a variant; `None` below Kubernetes' own types (an affinity, a toleration).
fn within<'a>(root: &'a Value, schema: &'a Value, name: &str) -> Option<&'a Value> {
    let schema = resolve(root, schema);
    let property = &schema["properties"][name];
    if property.is_object() {
        return Some(property);
    }
    let inner = if name.parse::<usize>().is_ok() {
        &schema["items"]
    } else {
        &schema["additionalProperties"]
    };
    inner.is_object().then_some(inner)
}

/// The leaves of a variant's values, each with its schema.
fn leaves<'a>(
    root: &'a Value,
    schema: &'a Value,
    value: &Value,
    path: &str,
    found: &mut Vec<(String, &'a Value)>,
) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) if !map.is_empty() => {
            map.iter().map(|(name, value)| (name.clone(), value)).collect()
        }
        Value::Array(items) if !items.is_empty() => items
            .iter()
            .enumerate()
            .map(|(index, value)| (index.to_string(), value))
            .collect(),
        _ => {
            found.push((path.to_owned(), schema));
            return;
        }
    };
    for (name, child) in children {
        if let Some(schema) = within(root, schema, &name) {
            // Escaped for a JSON pointer.
            let name = name.replace('~', "~0").replace('/', "~1");
            leaves(root, schema, child, &format!("{path}/{name}"), found);
        }
    }
}

/// Replaces each value of a variant, down to list entries, by each other JSON type; all are rejected.
#[test]
fn a_value_of_each_other_type_is_refused_by_its_place() {
    let root = schema();
    let everything = yaml(&chart("ci/everything-values.yaml"));
    let mut found = Vec::new();
    leaves(&root, &root, &everything, "", &mut found);
    assert!(found.len() > 110, "{}", found.len());
    let others = [
        ("string", json!("x")),
        ("integer", json!(7)),
        ("number", json!(0.5)),
        ("boolean", json!(true)),
        ("array", json!([])),
        ("object", json!({ "x": {} })),
    ];
    for (kind, other) in others {
        let mut values = everything.clone();
        let mut paths = Vec::new();
        for (path, schema) in &found {
            let taken = types(&root, schema);
            // Other tests cover restrictions beyond the type.
            if taken.contains(kind) {
                continue;
            }
            *values.pointer_mut(path).expect("a place of this variant") = other.clone();
            paths.push(path.clone());
        }
        assert!(paths.len() > 30, "{kind}: {}", paths.len());
        assert_each_refused(&values, &paths, kind);
    }
}
