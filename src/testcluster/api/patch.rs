//! The four patch types.

use json_patch::PatchOperation;
use serde_json::{Map, Value};

use super::apply::{self, Manager};
use super::kinds::{ClusterMode, ResourceKind, built_in};
use super::object::json_size;
use super::status_error::StatusError;
use super::strategic;

/// Maximum number of operations in a JSON patch (`maxJSONPatchOperations`).
const OPERATIONS_MAX: usize = 10_000;
/// Maximum number of bytes copied by a JSON patch (`AccumulatedCopySizeLimit`).
const COPIES_MAX: usize = 3 << 20;

/// Content type of RFC 6902.
pub(crate) const JSON_PATCH: &str = "application/json-patch+json";
/// Content type of RFC 7386.
pub(crate) const MERGE_PATCH: &str = "application/merge-patch+json";

/// A patch from a request body.
#[derive(Debug)]
pub(crate) enum Patch {
    /// RFC 6902.
    Json(json_patch::Patch),
    /// RFC 7386.
    Merge(Value),
    /// Strategic merge patch, for kinds with a Go type.
    Strategic(Value),
    Apply(Value),
}

impl Patch {
    /// Parses a body by its content type.
    pub(crate) fn read(kind: &ResourceKind, content_type: &str, body: &[u8]) -> Result<Self, StatusError> {
        let strategic = if kind.definition.is_none() {
            ", application/strategic-merge-patch+json"
        } else {
            ""
        };
        let json = || -> Result<Value, StatusError> {
            serde_json::from_slice(body)
                .map_err(|error| StatusError::bad_request(format!("error decoding patch: {error}")))
        };
        let unsupported = || {
            StatusError::unsupported_media_type(&format!(
                "application/json-patch+json, application/merge-patch+json{strategic}, application/apply-patch+yaml"
            ))
        };
        match content_type.split(';').next().unwrap_or_default().trim() {
            JSON_PATCH => {
                let patch: json_patch::Patch = serde_json::from_value(json()?)
                    .map_err(|error| StatusError::bad_request(format!("error decoding patch: {error}")))?;
                if patch.0.len() > OPERATIONS_MAX {
                    return Err(StatusError::too_many_operations(OPERATIONS_MAX, patch.0.len()));
                }
                Ok(Self::Json(patch))
            }
            MERGE_PATCH => match json()? {
                patch @ Value::Object(_) => Ok(Self::Merge(patch)),
                _ => Err(StatusError::bad_request(
                    "error decoding patch: it is not a JSON object",
                )),
            },
            "application/strategic-merge-patch+json" if kind.definition.is_none() => {
                Ok(Self::Strategic(json()?))
            }
            "application/apply-patch+yaml" => {
                let text = std::str::from_utf8(body)
                    .map_err(|error| StatusError::bad_request(format!("error decoding YAML: {error}")))?;
                let configuration: Value = serde_saphyr::from_str(text)
                    .map_err(|error| StatusError::bad_request(format!("error decoding YAML: {error}")))?;
                match configuration {
                    Value::Object(_) => Ok(Self::Apply(configuration)),
                    // Treated as an empty object, which is rejected because it lacks apiVersion and kind.
                    Value::Null => Ok(Self::Apply(Value::Object(Map::new()))),
                    _ => Err(StatusError::bad_request(
                        "error decoding YAML: error unmarshaling JSON: it is not an object",
                    )),
                }
            }
            _ => Err(unsupported()),
        }
    }

    /// Returns the patched object.
    pub(crate) fn apply_to(
        &self,
        kind: &ResourceKind,
        object: &Value,
        manager: &Manager<'_>,
        force: bool,
    ) -> Result<Value, StatusError> {
        let mut patched = object.clone();
        match self {
            Self::Json(patch) => {
                let mut copied = 0;
                for operation in &patch.0 {
                    if let PatchOperation::Copy(copy) = operation {
                        copied += patched.pointer(copy.from.as_str()).map_or(0, json_size);
                        if copied > COPIES_MAX {
                            return Err(StatusError::unprocessable());
                        }
                    }
                    // A missing value equals null.
                    if let PatchOperation::Test(test) = operation
                        && test.value.is_null()
                        && patched.pointer(test.path.as_str()).is_none()
                    {
                        let parent = test.path.parent();
                        if parent.is_some_and(|parent| patched.pointer(parent.as_str()).is_some()) {
                            continue;
                        }
                    }
                    // Works on a copy, so a partial failure has no effect.
                    json_patch::patch_unsafe(&mut patched, std::slice::from_ref(operation))
                        .map_err(|_| StatusError::unprocessable())?;
                }
            }
            Self::Merge(patch) => json_patch::merge(&mut patched, patch),
            Self::Strategic(patch) => strategic::apply(kind, &mut patched, patch)?,
            Self::Apply(configuration) => return apply::apply(kind, object, configuration, manager, force),
        }
        if !patched.is_object() {
            // Null is not an empty object.
            return Err(StatusError::unprocessable());
        }
        Ok(patched)
    }
}

/// Applies the body of a patch to an object of `resource.k8s.io/v1alpha2`, as the server does before it validates the result. An error is a
/// `Status`. For the simulation, which has a store of its own.
pub fn patched(
    kind: &str,
    subresource: &str,
    content_type: &str,
    manager: &str,
    object: &Value,
    body: &Value,
) -> Result<Value, Value> {
    let mut kinds = built_in(ClusterMode::Classic).into_iter();
    let Some(kind) = kinds.find(|known| known.kind == kind) else {
        return Err(StatusError::no_path().status());
    };
    let manager = Manager {
        name: manager,
        subresource,
        now: "",
    };
    Patch::read(&kind, content_type, body.to_string().as_bytes())
        .and_then(|patch| patch.apply_to(&kind, object, &manager, true))
        .map_err(|refusal| refusal.status())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::kinds::classic_kind;
    use super::*;

    fn patched(operations: Value) -> Result<Value, StatusError> {
        let kind = classic_kind("ConfigMap");
        let manager = Manager {
            name: "a",
            subresource: "",
            now: "",
        };
        let patch = Patch::Json(serde_json::from_value(operations).unwrap());
        patch.apply_to(
            &kind,
            &json!({ "data": { "a": "x".repeat(1000) } }),
            &manager,
            false,
        )
    }

    #[test]
    fn copies_of_copies_end_before_they_fill_the_memory() {
        let doubled: Vec<Value> = (0..60)
            .map(|number| json!({ "op": "copy", "from": "/data", "path": format!("/data/{number}") }))
            .collect();
        assert_eq!(patched(doubled.into()).unwrap_err().code, 422);
        let few = json!([{ "op": "copy", "from": "/data/a", "path": "/data/b" }]);
        assert_eq!(patched(few).unwrap()["data"]["b"], "x".repeat(1000));
    }

    #[test]
    fn a_missing_field_is_equal_to_null() {
        let test = |path: &str| patched(json!([{ "op": "test", "path": path, "value": null }]));
        assert!(test("/data/b").is_ok());
        for path in ["/data/a", "/absent/b"] {
            assert_eq!(test(path).unwrap_err().code, 422, "{path}");
        }
    }

    #[test]
    fn a_patch_that_fails_half_way_is_refused() {
        let half =
            json!([{ "op": "add", "path": "/data/b", "value": "c" }, { "op": "remove", "path": "/data/d" }]);
        assert_eq!(patched(half).unwrap_err().code, 422);
        let nothing = json!([{ "op": "replace", "path": "", "value": null }]);
        assert_eq!(patched(nothing).unwrap_err().code, 422);
    }
}
