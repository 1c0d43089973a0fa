//! Errors of validation, with the wording of `k8s.io/apimachinery/pkg/util/validation/field`.

use serde::Serialize;
use serde_json::json;

/// An error in one field of an object (`field.Error`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldError {
    /// Cause type, such as `FieldValueInvalid`.
    pub(crate) cause: &'static str,
    /// Field path, such as `status.reservedFor[0].uid`.
    pub(crate) field: String,
    pub(crate) message: String,
}

impl FieldError {
    fn new(cause: &'static str, words: &str, field: impl Into<String>, detail: &str) -> Self {
        let message = if detail.is_empty() {
            words.to_owned()
        } else {
            format!("{words}: {detail}")
        };
        let field = field.into();
        Self {
            cause,
            field,
            message,
        }
    }

    pub(crate) fn invalid(field: impl Into<String>, value: impl Serialize, detail: &str) -> Self {
        let words = format!("Invalid value: {}", json!(value));
        Self::new("FieldValueInvalid", &words, field, detail)
    }

    pub(crate) fn required(field: impl Into<String>, detail: &str) -> Self {
        Self::new("FieldValueRequired", "Required value", field, detail)
    }

    /// A field that must not be set.
    pub(crate) fn forbidden(field: impl Into<String>, detail: &str) -> Self {
        Self::new("FieldValueForbidden", "Forbidden", field, detail)
    }

    pub(crate) fn duplicate(field: impl Into<String>, value: impl Serialize) -> Self {
        let words = format!("Duplicate value: {}", json!(value));
        Self::new("FieldValueDuplicate", &words, field, "")
    }

    /// A string or list that exceeds its maximum length.
    pub(crate) fn too_long(field: impl Into<String>, limit: usize) -> Self {
        let detail = format!("may not be longer than {limit}");
        Self::new("FieldValueTooLong", "Too long", field, &detail)
    }

    /// A string that exceeds its maximum length in bytes.
    pub(crate) fn too_many_characters(field: impl Into<String>, limit: usize) -> Self {
        let detail = format!("may not be more than {limit} bytes");
        Self::new("FieldValueTooLong", "Too long", field, &detail)
    }

    /// A list or map that exceeds its maximum length.
    pub(crate) fn too_many(field: impl Into<String>, count: usize, limit: usize) -> Self {
        let words = format!("Too many: {count}");
        let detail = format!("must have at most {limit} items");
        Self::new("FieldValueTooMany", &words, field, &detail)
    }

    /// A map that exceeds its maximum size.
    pub(crate) fn too_many_bytes(field: impl Into<String>, limit: usize) -> Self {
        let detail = format!("must have at most {limit} bytes");
        Self::new("FieldValueTooLong", "Too long", field, &detail)
    }

    /// A value outside the supported set.
    pub(crate) fn not_supported(field: impl Into<String>, value: impl Serialize, supported: &[&str]) -> Self {
        let supported: Vec<String> = supported.iter().map(|value| format!("{value:?}")).collect();
        let detail = format!("supported values: {}", supported.join(", "));
        let words = format!("Unsupported value: {}", json!(value));
        Self::new("FieldValueNotSupported", &words, field, &detail)
    }
}
