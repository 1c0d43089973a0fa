//! The four kinds of patches.

use serde_json::Value;

use super::apply::{self, Manager};
use super::kinds::Kind;
use super::refusal::Refusal;
use super::strategic;

/// Operations of one JSON patch, at most (`maxJSONPatchOperations`).
const OPERATIONS_MAX: usize = 10_000;

/// A patch, as the body of a request.
#[derive(Debug)]
pub(crate) enum Patch {
    /// RFC 6902.
    Json(json_patch::Patch),
    /// RFC 7386.
    Merge(Value),
    /// Kubernetes' own merge, for kinds that have a Go type.
    Strategic(Value),
    /// Server-side apply.
    Apply(Value),
}

impl Patch {
    /// Reads a body by its content type.
    pub(crate) fn read(kind: &Kind, content_type: &str, body: &[u8]) -> Result<Self, Refusal> {
        let strategic = if kind.definition.is_none() {
            ", application/strategic-merge-patch+json"
        } else {
            ""
        };
        let json = || -> Result<Value, Refusal> {
            serde_json::from_slice(body)
                .map_err(|error| Refusal::bad_request(format!("error decoding patch: {error}")))
        };
        let unsupported = || {
            Refusal::unsupported_media_type(&format!(
                "application/json-patch+json, application/merge-patch+json{strategic}, application/apply-patch+yaml"
            ))
        };
        match content_type.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => {
                let patch: json_patch::Patch = serde_json::from_value(json()?)
                    .map_err(|error| Refusal::bad_request(format!("error decoding patch: {error}")))?;
                if patch.0.len() > OPERATIONS_MAX {
                    return Err(Refusal::too_many_operations(OPERATIONS_MAX, patch.0.len()));
                }
                Ok(Self::Json(patch))
            }
            "application/merge-patch+json" => match json()? {
                patch @ Value::Object(_) => Ok(Self::Merge(patch)),
                _ => Err(Refusal::bad_request(
                    "error decoding patch: it is not a JSON object",
                )),
            },
            "application/strategic-merge-patch+json" if kind.definition.is_none() => {
                Ok(Self::Strategic(json()?))
            }
            "application/apply-patch+yaml" => {
                let text = std::str::from_utf8(body)
                    .map_err(|error| Refusal::bad_request(format!("error decoding YAML: {error}")))?;
                serde_saphyr::from_str(text)
                    .map(Self::Apply)
                    .map_err(|error| Refusal::bad_request(format!("error decoding YAML: {error}")))
            }
            _ => Err(unsupported()),
        }
    }

    /// The object as the patch makes it.
    pub(crate) fn apply_to(
        &self,
        kind: &Kind,
        object: &Value,
        manager: &Manager<'_>,
        force: bool,
    ) -> Result<Value, Refusal> {
        let mut patched = object.clone();
        match self {
            Self::Json(patch) => {
                json_patch::patch(&mut patched, patch).map_err(|_| Refusal::unprocessable())?;
            }
            Self::Merge(patch) => json_patch::merge(&mut patched, patch),
            Self::Strategic(patch) => strategic::apply(kind, &mut patched, patch)?,
            Self::Apply(configuration) => return apply::apply(kind, object, configuration, manager, force),
        }
        Ok(patched)
    }
}
