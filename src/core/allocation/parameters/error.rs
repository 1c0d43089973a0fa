//! Validation errors of parameters.

use crate::api::crd::{CLAIM_DEVICES_MAX, CONSTRAINTS_MAX, EXPRESSION_MAX, REQUESTS_MAX, SELECTORS_MAX};

/// Why parameters are refused. Only a user or administrator can fix them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParametersError {
    /// The object does not exist.
    #[error("{object} does not exist; create it")]
    NotFound {
        /// Kind, namespace and name.
        object: String,
    },
    /// The object does not have the structure of its kind.
    #[error("{object} cannot be read: {error}; correct it")]
    Malformed {
        /// Kind, namespace and name.
        object: String,
        /// The parser's error.
        error: String,
    },
    /// A name is not a DNS label.
    #[error(
        "{object}: {field} is {value:?}; at most 63 of a-z, 0-9 and '-' are allowed, with a letter or digit at both ends"
    )]
    NotALabel {
        /// Kind, namespace and name.
        object: String,
        /// Path of the field.
        field: String,
        /// Its value, truncated.
        value: String,
    },
    /// Too few or too many requests.
    #[error("{object}: spec.requests has {number} entries; 1 to {REQUESTS_MAX} are allowed")]
    Requests {
        /// Kind, namespace and name.
        object: String,
        /// Number of requests.
        number: usize,
    },
    /// Two requests with the same name.
    #[error("{object}: request {request} is there twice; give each request a name of its own")]
    Twice {
        /// Kind, namespace and name.
        object: String,
        /// The repeated name.
        request: String,
    },
    /// A count outside its limits.
    #[error("{object}: request {request} has count {count}; 1 to {CLAIM_DEVICES_MAX} are allowed")]
    Count {
        /// Kind, namespace and name.
        object: String,
        /// Name of the request.
        request: String,
        /// Count of the request.
        count: u64,
    },
    /// More devices than a claim may have.
    #[error("{object}: the requests add up to {total} devices; a claim gets at most {CLAIM_DEVICES_MAX}")]
    Total {
        /// Kind, namespace and name.
        object: String,
        /// The sum of the counts.
        total: u64,
    },
    /// A request for all devices that also has a count.
    #[error("{object}: request {request} has allocationMode All and a count; remove one of them")]
    CountWithAll {
        /// Kind, namespace and name.
        object: String,
        /// Name of the request.
        request: String,
    },
    /// Too many selectors.
    #[error("{object}: {place} has {number} selectors; at most {SELECTORS_MAX} are allowed")]
    Selectors {
        /// Kind, namespace and name.
        object: String,
        /// The request, or the class.
        place: String,
        /// Number of selectors.
        number: usize,
    },
    /// An expression that is empty or too long.
    #[error("{object}: {selector} has {length} bytes; 1 to {EXPRESSION_MAX} are allowed")]
    ExpressionLength {
        /// Kind, namespace and name.
        object: String,
        /// The selector in messages: `selector 1 of request gpu`.
        selector: String,
        /// Length of the expression in bytes.
        length: usize,
    },
    /// An expression that is not a condition on devices, or costs too much.
    #[error("{object}: {selector}: {error}")]
    Selector {
        /// Kind, namespace and name.
        object: String,
        /// The selector in messages: `selector 1 of request gpu`.
        selector: String,
        /// Why the expression is refused.
        error: String,
    },
    /// Too many constraints.
    #[error("{object}: spec.constraints has {number} entries; at most {CONSTRAINTS_MAX} are allowed")]
    Constraints {
        /// Kind, namespace and name.
        object: String,
        /// Number of constraints.
        number: usize,
    },
    /// A constraint on an unknown request.
    #[error("{object}: constraint {constraint} names request {request:?}, which is not in spec.requests")]
    UnknownRequest {
        /// Kind, namespace and name.
        object: String,
        /// Number of the constraint, from 1.
        constraint: usize,
        /// Name of the unknown request.
        request: String,
    },
    /// A constraint on an invalid attribute name.
    #[error(
        "{object}: constraint {constraint} has matchAttribute {attribute:?}; it must be a domain, a slash and a name, \
         as drayman.dev/numaNode"
    )]
    MatchAttribute {
        /// Kind, namespace and name.
        object: String,
        /// Number of the constraint, from 1.
        constraint: usize,
        /// The invalid name, truncated.
        attribute: String,
    },
}

impl ParametersError {
    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "ParametersNotFound",
            Self::Malformed { .. }
            | Self::NotALabel { .. }
            | Self::Requests { .. }
            | Self::Twice { .. }
            | Self::Count { .. }
            | Self::Total { .. }
            | Self::CountWithAll { .. }
            | Self::Selectors { .. }
            | Self::ExpressionLength { .. }
            | Self::Constraints { .. }
            | Self::UnknownRequest { .. }
            | Self::MatchAttribute { .. } => "ParametersInvalid",
            Self::Selector { .. } => "SelectorInvalid",
        }
    }
}
