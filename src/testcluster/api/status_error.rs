//! API errors with the form and wording of the real API server (`k8s.io/apimachinery/pkg/api/errors`).

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::field_error::FieldError;
use super::kinds::ResourceKind;

/// A rejected request, returned as a `Status`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StatusError {
    /// HTTP status code.
    pub(crate) code: u16,
    /// Machine-readable reason.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) details: Option<Value>,
    /// Continue token for the rest of a list whose version has expired.
    pub(crate) go_on: Option<String>,
}

impl StatusError {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            details: None,
            go_on: None,
        }
    }

    fn with(mut self, details: Value) -> Self {
        self.details = Some(details);
        self
    }

    fn about(self, kind: &ResourceKind, name: &str) -> Self {
        self.with(details(kind, &kind.plural, name))
    }

    pub(crate) fn not_found(kind: &ResourceKind, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} {name:?} not found", kind.resource())).about(kind, name)
    }

    /// The path does not exist.
    pub(crate) fn no_path() -> Self {
        let message = "the server could not find the requested resource";
        Self::new(404, "NotFound", message).with(json!({}))
    }

    pub(crate) fn already_exists(kind: &ResourceKind, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", kind.resource());
        Self::new(409, "AlreadyExists", message).about(kind, name)
    }

    /// The object differs from the expected one, or has changed.
    pub(crate) fn conflict(kind: &ResourceKind, name: &str, why: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} {name:?}: {why}",
            kind.resource()
        );
        Self::new(409, "Conflict", message).about(kind, name)
    }

    /// A precondition of a deletion does not hold. Unlike other conflicts, it names the kind.
    pub(crate) fn precondition(kind: &ResourceKind, name: &str, why: &str) -> Self {
        let what = kind.qualified();
        let message = format!("Operation cannot be fulfilled on {what} {name:?}: {why}");
        Self::new(409, "Conflict", message).with(details(kind, &kind.kind, name))
    }

    /// The request is based on an older resource version.
    pub(crate) fn modified(kind: &ResourceKind, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, why)
    }

    /// Fields owned by other managers.
    pub(crate) fn apply_conflict(causes: &[FieldError], message: String) -> Self {
        Self::new(409, "Conflict", message).with(json!({ "causes": causes_of(causes) }))
    }

    /// The object is invalid.
    pub(crate) fn invalid(kind: &ResourceKind, name: &str, errors: &[FieldError]) -> Self {
        let mut details = details(kind, &kind.kind, name);
        details["causes"] = causes_of(errors).into();
        Self::of_fields(&format!("{} {name:?}", kind.qualified()), errors).with(details)
    }

    /// Combines field errors into one message, without duplicates.
    fn of_fields(what: &str, errors: &[FieldError]) -> Self {
        let mut seen = BTreeSet::new();
        let sentences: Vec<String> = errors
            .iter()
            .map(|error| match error.field.as_str() {
                "" => error.message.clone(),
                field => format!("{field}: {}", error.message),
            })
            .filter(|sentence| seen.insert(sentence.clone()))
            .collect();
        let all = match sentences.as_slice() {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        };
        Self::new(422, "Invalid", format!("{what} is invalid: {all}"))
    }

    /// The pod cannot be bound.
    pub(crate) fn binding_conflict(name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on pods/binding {name:?}: {why}");
        Self::new(409, "Conflict", message).with(json!({ "name": name, "kind": "pods/binding" }))
    }

    /// A patch whose result cannot be decoded as an object of its kind.
    pub(crate) fn invalid_patch(message: &str) -> Self {
        let error = FieldError::invalid("patch", "the patched object", message);
        let message = format!(" \"\" is invalid: patch: {}", error.message);
        Self::new(422, "Invalid", message).with(json!({ "causes": causes_of(&[error]) }))
    }

    /// A well-formed patch that does not apply to the object.
    pub(crate) fn unprocessable() -> Self {
        let message = "the server rejected our request due to an error in our request";
        Self::new(422, "Invalid", message).with(json!({}))
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(crate) fn forbidden(kind: &ResourceKind, name: &str, why: &str) -> Self {
        let message = format!("{} {name:?} is forbidden: {why}", kind.resource());
        Self::new(403, "Forbidden", message).about(kind, name)
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(405, "MethodNotAllowed", message).with(json!({}))
    }

    pub(crate) fn unsupported_media_type(accepted: &str) -> Self {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {accepted}"
        );
        Self::new(415, "UnsupportedMediaType", message)
    }

    /// The body exceeds the server's limit.
    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("Request entity too large: limit is {limit}");
        Self::new(413, "RequestEntityTooLarge", message)
    }

    /// Invalid, missing or forbidden parameters: `ListOptions`, `PatchOptions` and others.
    pub(crate) fn options(options: &str, errors: &[FieldError]) -> Self {
        let details = json!({ "group": "meta.k8s.io", "kind": options, "causes": causes_of(errors) });
        Self::of_fields(&format!("{options}.meta.k8s.io \"\""), errors).with(details)
    }

    /// A missing or forbidden parameter of a patch.
    pub(crate) fn patch_options(field: &str, detail: &str) -> Self {
        let error = match field {
            "fieldManager" => FieldError::required(field, detail),
            _ => FieldError::forbidden(field, detail),
        };
        Self::options("PatchOptions", &[error])
    }

    /// Invalid parameters of a write.
    pub(crate) fn write_options(method: &str, errors: &[FieldError]) -> Self {
        let options = match method {
            "POST" => "CreateOptions",
            "PUT" => "UpdateOptions",
            _ => "PatchOptions",
        };
        Self::options(options, errors)
    }

    /// An update without the resource version that its kind requires.
    pub(crate) fn version_required(kind: &ResourceKind, name: &str) -> Self {
        let error = FieldError {
            cause: "FieldValueInvalid",
            field: "metadata.resourceVersion".to_owned(),
            message: "Invalid value: 0x0: must be specified for an update".to_owned(),
        };
        let errors = [error];
        let mut details = details(kind, &kind.plural, name);
        details["causes"] = causes_of(&errors).into();
        Self::of_fields(&format!("{} {name:?}", kind.resource()), &errors).with(details)
    }

    /// The object's name differs from the name in the path.
    pub(crate) fn misnamed(given: &str, name: &str) -> Self {
        Self::bad_request(format!(
            "the name of the object ({given}) does not match the name on the URL ({name})"
        ))
    }

    /// The object has no name.
    pub(crate) fn nameless(name: &str) -> Self {
        Self::bad_request(format!(
            "the name of the object ({name} based on URL) was undeterminable: name must be provided"
        ))
    }

    /// The object's namespace differs from the namespace in the path.
    pub(crate) fn misplaced() -> Self {
        Self::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        )
    }

    /// The object exceeds etcd's request limit.
    pub(crate) fn too_large_for_etcd() -> Self {
        Self::internal("etcdserver: request is too large")
    }

    pub(crate) fn too_many_operations(limit: usize, count: usize) -> Self {
        let message = format!("The allowed maximum operations in a JSON patch is {limit}, got {count}");
        Self::new(413, "RequestEntityTooLarge", message)
    }

    /// The version is no longer in the history.
    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    /// The continue token's version is no longer in the history; `go_on` continues with current objects.
    pub(crate) fn expired_continue(go_on: String) -> Self {
        let message = "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.";
        let mut refusal = Self::expired(message);
        refusal.go_on = Some(go_on);
        refusal
    }

    /// The requested version does not exist yet.
    pub(crate) fn from_the_future(asked: u64, current: u64) -> Self {
        let message = format!("Timeout: Too large resource version: {asked}, current: {current}");
        let cause = json!({ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" });
        Self::new(504, "Timeout", message).with(json!({ "causes": [cause], "retryAfterSeconds": 1 }))
    }

    /// An error for which the real server has no specific reason.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        // The real server leaves the reason empty for unclassified errors.
        Self::new(500, "", message)
    }

    /// Returns the `Status` object.
    pub(crate) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        });
        if !self.reason.is_empty() {
            status["reason"] = self.reason.into();
        }
        if let Some(go_on) = &self.go_on {
            status["metadata"]["continue"] = go_on.clone().into();
        }
        if let Some(details) = &self.details {
            status["details"] = details.clone();
        }
        status
    }
}

/// Returns the details of a Status about an object: its name, and the kind or its plural.
pub(super) fn details(kind: &ResourceKind, word: &str, name: &str) -> Value {
    let mut details = json!({ "name": name, "kind": word });
    if !kind.group.is_empty() {
        details["group"] = kind.group.clone().into();
    }
    details
}

fn causes_of(errors: &[FieldError]) -> Vec<Value> {
    errors
        .iter()
        .map(|error| json!({ "reason": error.cause, "message": error.message, "field": error.field }))
        .collect()
}
