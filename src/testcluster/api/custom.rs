//! Custom resources: validation by schema, and processing of the CRDs themselves.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::field_error::FieldError;
use super::kinds::{ClusterMode, CustomResourceDefinitionVersion, ResourceKind};
use super::object;
use super::status_error::StatusError;

/// Returns the kinds of a CRD: one per served version.
pub(crate) fn kinds_of(definition: &Value) -> Result<Vec<Arc<ResourceKind>>, StatusError> {
    let names = |key: &str| {
        object::texts(definition, &format!("/spec/names/{key}"))
            .into_iter()
            .map(str::to_owned)
            .collect()
    };
    let name = |key: &str| object::text(definition, &format!("/spec/names/{key}")).to_owned();
    let mut kinds = Vec::new();
    for version in object::list(definition, "/spec/versions") {
        if version.get("served") != Some(&Value::Bool(true)) {
            continue;
        }
        let schema = version
            .pointer("/schema/openAPIV3Schema")
            .cloned()
            .unwrap_or_else(|| json!({}));
        let validator = jsonschema::validator_for(&draft(&schema)).map_err(|error| {
            StatusError::bad_request(format!(
                "the schema of {} cannot be used: {error}",
                object::name(definition)
            ))
        })?;
        kinds.push(Arc::new(ResourceKind {
            group: object::text(definition, "/spec/group").to_owned(),
            version: object::text(version, "/name").to_owned(),
            kind: name("kind"),
            plural: name("plural"),
            singular: name("singular"),
            short_names: names("shortNames"),
            categories: names("categories"),
            namespaced: object::text(definition, "/spec/scope") == "Namespaced",
            status: version.pointer("/subresources/status").is_some(),
            returns_deleted: false,
            generation: true,
            unconditional: false,
            created_by_update: false,
            mode: ClusterMode::default(),
            definition: Some(Arc::new(CustomResourceDefinitionVersion {
                schema,
                columns: object::list(version, "/additionalPrinterColumns").to_vec(),
                validator,
            })),
        }));
    }
    Ok(kinds)
}

/// Converts an OpenAPI schema to JSON Schema, which does not support `nullable`.
fn draft(schema: &Value) -> Value {
    match schema {
        Value::Object(map) => {
            let mut draft: Map<String, Value> = map
                .iter()
                .filter(|(key, _)| key.as_str() != "format" && !key.starts_with("x-kubernetes"))
                .map(|(key, value)| (key.clone(), draft(value)))
                .collect();
            if map.get("nullable") == Some(&Value::Bool(true)) {
                if let Some(sort) = draft.get_mut("type") {
                    *sort = json!(["null", sort]);
                }
                if let Some(Value::Array(options)) = draft.get_mut("enum") {
                    options.push(Value::Null);
                }
            }
            Value::Object(draft)
        }
        Value::Array(elements) => Value::Array(elements.iter().map(draft).collect()),
        value => value.clone(),
    }
}

/// Removes fields that the schema does not define, and returns their paths.
pub(crate) fn prune(schema: &Value, value: &mut Value) -> Vec<String> {
    fn walk(schema: &Value, value: &mut Value, path: &str, root: bool, unknown: &mut Vec<String>) {
        if schema.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true)) {
            return;
        }
        match value {
            Value::Object(map) => {
                let properties = schema.get("properties").and_then(Value::as_object);
                let additional = schema.get("additionalProperties");
                map.retain(|key, inner| {
                    if root && matches!(key.as_str(), "apiVersion" | "kind" | "metadata") {
                        return true;
                    }
                    let at = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    if let Some(schema) = properties
                        .and_then(|properties| properties.get(key))
                        .or(additional)
                    {
                        walk(schema, inner, &at, false, unknown);
                        true
                    } else {
                        unknown.push(at);
                        false
                    }
                });
            }
            Value::Array(elements) => {
                let Some(items) = schema.get("items") else { return };
                for (index, element) in elements.iter_mut().enumerate() {
                    walk(items, element, &format!("{path}[{index}]"), false, unknown);
                }
            }
            _ => {}
        }
    }
    let mut unknown = Vec::new();
    walk(schema, value, "", true, &mut unknown);
    unknown
}

/// Returns the first value with a wrong type, in the words of server-side apply.
pub(crate) fn mistyped(schema: &Value, value: &Value) -> Option<String> {
    fn walk(schema: &Value, value: &Value, at: &str, root: bool) -> Option<String> {
        let wanted = object::text(schema, "/type");
        let fits = match wanted {
            _ if value.is_null() => true,
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" | "number" => value.is_number(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => true,
        };
        if !fits {
            let word = match wanted {
                "array" => "list",
                "object" => "map",
                "integer" | "number" => "numeric (int or float)",
                word => word,
            };
            return Some(format!(
                "{at}: expected {word}, got &value.valueUnstructured{{Value:{value}}}"
            ));
        }
        match value {
            Value::Object(map) => map.iter().find_map(|(key, inner)| {
                // Metadata is not part of the schema.
                if root && key == "metadata" {
                    return None;
                }
                let below = schema
                    .get("properties")
                    .and_then(|properties| properties.get(key));
                let below = below.or_else(|| schema.get("additionalProperties"))?;
                walk(below, inner, &format!("{at}.{key}"), false)
            }),
            Value::Array(elements) => {
                let items = schema.get("items")?;
                let mut elements = elements.iter().enumerate();
                elements.find_map(|(index, element)| walk(items, element, &format!("{at}[{index}]"), false))
            }
            _ => None,
        }
    }
    walk(schema, value, "", true)
}

/// Validates a custom object against its schema, and if the schema holds, against its CEL rules.
pub(crate) fn validate(
    definition: &CustomResourceDefinitionVersion,
    value: &Value,
    before: Option<&Value>,
) -> Vec<FieldError> {
    const BLOCKING: [&str; 5] = [
        "FieldValueNotSupported",
        "FieldValueRequired",
        "FieldValueTooLong",
        "FieldValueTooMany",
        "FieldValueTypeInvalid",
    ];
    let mut errors: Vec<FieldError> = definition
        .validator
        .iter_errors(value)
        .map(|error| of_schema(&error))
        .collect();
    if errors.iter().any(|error| BLOCKING.contains(&error.cause)) {
        if has_rules(&definition.schema) {
            let detail = "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation";
            errors.push(FieldError::invalid("<nil>", "null", detail));
        }
        return errors;
    }
    errors.extend(rules(definition, value, before));
    errors
}

fn has_rules(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map
            .iter()
            .any(|(key, value)| key == "x-kubernetes-validations" || has_rules(value)),
        Value::Array(list) => list.iter().any(has_rules),
        _ => false,
    }
}

/// Returns the violated rules of `x-kubernetes-validations`.
fn rules(
    definition: &CustomResourceDefinitionVersion,
    value: &Value,
    before: Option<&Value>,
) -> Vec<FieldError> {
    match kube_cel::Validator::new().validate(&definition.schema, value, before) {
        Ok(()) => Vec::new(),
        Err(errors) => errors
            .into_vec()
            .into_iter()
            .map(|error| {
                let field = error.field_path.trim_start_matches('.');
                let shown = kind_of(value.pointer(&pointer(field)));
                FieldError::invalid(field, shown, &error.message)
            })
            .collect(),
    }
}

/// The real server shows the type instead of the value.
fn kind_of(value: Option<&Value>) -> &'static str {
    match value {
        Some(Value::Array(_)) => "array",
        Some(Value::String(_)) => "string",
        Some(Value::Number(_)) => "integer",
        Some(Value::Bool(_)) => "boolean",
        _ => "object",
    }
}

fn pointer(field: &str) -> String {
    let parts = field.split(['.', '[']).map(|part| part.trim_end_matches(']'));
    let parts: Vec<String> = parts
        .filter(|part| !part.is_empty())
        .map(|part| format!("/{part}"))
        .collect();
    parts.concat()
}

/// Formats a path like the real server: `spec.requests[0].name`.
fn dotted(location: &str) -> String {
    let mut path = String::new();
    for part in location.split('/').filter(|part| !part.is_empty()) {
        if part.chars().all(|c| c.is_ascii_digit()) {
            path.extend(["[", part, "]"]);
        } else {
            if !path.is_empty() {
                path.push('.');
            }
            path.push_str(part);
        }
    }
    path
}

fn limit_of(limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}

fn of_schema(error: &jsonschema::ValidationError<'_>) -> FieldError {
    use jsonschema::error::ValidationErrorKind as Sort;
    let field = dotted(error.instance_path().as_str());
    let instance = error.instance().as_ref();
    let simple = match instance {
        Value::Array(elements) => json!(elements.len()),
        instance => instance.clone(),
    };
    let invalid =
        |detail: &str| FieldError::invalid(field.clone(), &simple, &format!("{field} in body {detail}"));
    match error.kind() {
        Sort::Required { property } => {
            let name = property.as_str().unwrap_or_default();
            let at = if field.is_empty() {
                name.to_owned()
            } else {
                format!("{field}.{name}")
            };
            FieldError::required(at, "")
        }
        Sort::Enum { options } => {
            let options: Vec<&str> = options
                .as_array()
                .map(|options| options.iter().filter_map(Value::as_str).collect())
                .unwrap_or_default();
            FieldError::not_supported(field, instance, &options)
        }
        Sort::Pattern { pattern } => invalid(&format!("should match '{pattern}'")),
        Sort::MinLength { limit } => invalid(&format!("should be at least {limit} chars long")),
        Sort::MaxLength { limit } => FieldError::too_long(field, limit_of(*limit)),
        Sort::Minimum { limit } => invalid(&format!("should be greater than or equal to {limit}")),
        Sort::Maximum { limit } => invalid(&format!("should be less than or equal to {limit}")),
        Sort::MinItems { limit } => invalid(&format!("should have at least {limit} items")),
        Sort::MaxItems { limit } => {
            let count = instance.as_array().map_or(0, Vec::len);
            FieldError::too_many(field, count, limit_of(*limit))
        }
        Sort::Type { .. } => FieldError {
            cause: "FieldValueTypeInvalid",
            message: format!(
                "Invalid value: {:?}: {field} in body must be of another type",
                kind_of(Some(instance))
            ),
            field,
        },
        _ => FieldError::invalid(field, &simple, &error.to_string()),
    }
}

/// Marks a CRD as established immediately when it is stored.
pub(crate) fn establish(definition: &mut Value, now: &str) {
    let names = definition
        .pointer("/spec/names")
        .cloned()
        .unwrap_or_else(|| json!({}));
    let stored: Vec<Value> = object::list(definition, "/spec/versions")
        .iter()
        .filter(|version| version.get("storage") == Some(&Value::Bool(true)))
        .filter_map(|version| version.get("name").cloned())
        .collect();
    let condition = |kind: &str, reason: &str, message: &str| json!({ "type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now });
    definition["status"] = json!({
        "acceptedNames": names,
        "storedVersions": stored,
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
    });
}
