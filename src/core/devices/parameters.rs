//! What a claim wants: the parameters of its class and its own, checked so far that nothing nonsensical is left.
//!
//! Everything is checked again although the CRDs have schemas: an object may be older than its schema, or the schema
//! may have been replaced.

use std::collections::BTreeSet;

use crate::api::crd::{
    CLAIM_DEVICES_MAX, DeviceClaimParametersSpec, DeviceClassParametersSpec, REQUESTS_MAX,
};
use crate::core::devices::reference::{CLAIM_PARAMETERS_KIND, CLASS_PARAMETERS_KIND};

/// The name of the one request of a claim that has no parameters.
pub const DEFAULT_REQUEST: &str = "device";

/// What a class stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassParameters {
    kind: String,
}

impl ClassParameters {
    /// Checks the parameters called `name`.
    pub fn check(name: &str, spec: &DeviceClassParametersSpec) -> Result<Self, ParametersError> {
        let object = || format!("{CLASS_PARAMETERS_KIND} {name}");
        if is_label(&spec.kind) {
            Ok(Self {
                kind: spec.kind.clone(),
            })
        } else {
            Err(ParametersError::NotALabel {
                object: object(),
                field: "spec.kind".into(),
                value: shortened(&spec.kind),
            })
        }
    }

    /// The kind of device, as the nodes' configuration names it.
    pub fn kind(&self) -> &str {
        &self.kind
    }
}

/// What a claim wants: at least one device, at most [`CLAIM_DEVICES_MAX`], all of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    kind: String,
    requests: Vec<Request>,
}

/// A number of devices, counted by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    name: String,
    count: usize,
}

impl Request {
    /// Unique within the claim.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many devices: 1 to [`CLAIM_DEVICES_MAX`].
    pub fn count(&self) -> usize {
        self.count
    }
}

impl Demand {
    /// What a claim without parameters wants: one device.
    pub fn one(class: &ClassParameters) -> Self {
        Self {
            kind: class.kind.clone(),
            requests: vec![Request {
                name: DEFAULT_REQUEST.to_owned(),
                count: 1,
            }],
        }
    }

    /// Checks the parameters called `name` in `namespace`.
    pub fn check(
        class: &ClassParameters,
        namespace: &str,
        name: &str,
        spec: &DeviceClaimParametersSpec,
    ) -> Result<Self, ParametersError> {
        let object = || format!("{CLAIM_PARAMETERS_KIND} {namespace}/{name}");
        let (least, most) = (1, REQUESTS_MAX);
        let number = spec.requests.len();
        if !(least..=most).contains(&number) {
            return Err(ParametersError::Requests {
                object: object(),
                number,
            });
        }
        let mut names = BTreeSet::new();
        let mut requests = Vec::with_capacity(number);
        let mut total = 0_u64;
        for request in &spec.requests {
            if !is_label(&request.name) {
                let (field, value) = ("spec.requests[].name".into(), shortened(&request.name));
                return Err(ParametersError::NotALabel {
                    object: object(),
                    field,
                    value,
                });
            }
            if !names.insert(request.name.as_str()) {
                return Err(ParametersError::Twice {
                    object: object(),
                    request: request.name.clone(),
                });
            }
            let count = usize::try_from(request.count).unwrap_or(usize::MAX);
            if !(1..=CLAIM_DEVICES_MAX).contains(&count) {
                let (request, count) = (request.name.clone(), u64::from(request.count));
                return Err(ParametersError::Count {
                    object: object(),
                    request,
                    count,
                });
            }
            total += u64::from(request.count);
            requests.push(Request {
                name: request.name.clone(),
                count,
            });
        }
        if usize::try_from(total).map_or(true, |total| total > CLAIM_DEVICES_MAX) {
            return Err(ParametersError::Total {
                object: object(),
                total,
            });
        }
        Ok(Self {
            kind: class.kind.clone(),
            requests,
        })
    }

    /// The kind of device.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The requests, in the order in which the user wrote them.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// How many devices in all.
    pub fn total(&self) -> usize {
        self.requests.iter().map(Request::count).sum()
    }
}

/// Why parameters are refused. Each can be put right only by a person.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParametersError {
    /// There is no such object.
    #[error("{object} does not exist; create it")]
    NotFound {
        /// Kind, namespace and name.
        object: String,
    },
    /// The object is not of the kind's shape.
    #[error("{object} cannot be read: {error}; correct it")]
    Malformed {
        /// Kind, namespace and name.
        object: String,
        /// What the parser says.
        error: String,
    },
    /// A name is not a DNS label.
    #[error(
        "{object}: {field} is {value:?}; at most 63 of a-z, 0-9 and '-' are allowed, with a letter or digit at both ends"
    )]
    NotALabel {
        /// Kind, namespace and name.
        object: String,
        /// The field.
        field: String,
        /// What it holds.
        value: String,
    },
    /// Too few or too many requests.
    #[error("{object}: spec.requests has {number} entries; 1 to {REQUESTS_MAX} are allowed")]
    Requests {
        /// Kind, namespace and name.
        object: String,
        /// How many there are.
        number: usize,
    },
    /// Two requests of one name.
    #[error("{object}: request {request} is there twice; give each request a name of its own")]
    Twice {
        /// Kind, namespace and name.
        object: String,
        /// The name.
        request: String,
    },
    /// A count outside the limits.
    #[error("{object}: request {request} has count {count}; 1 to {CLAIM_DEVICES_MAX} are allowed")]
    Count {
        /// Kind, namespace and name.
        object: String,
        /// The request.
        request: String,
        /// Its count.
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
            | Self::Total { .. } => "ParametersInvalid",
        }
    }
}

/// Whether a text is a DNS label (RFC 1123).
fn is_label(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends =
        bytes.first().is_some_and(|&b| alphanumeric(b)) && bytes.last().is_some_and(|&b| alphanumeric(b));
    ends && bytes.len() <= 63 && bytes.iter().all(|&b| alphanumeric(b) || b == b'-')
}

/// A hostile value, short enough for an event.
pub(super) fn shortened(value: &str) -> String {
    value.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::DeviceRequest;

    fn class() -> ClassParameters {
        ClassParameters::check("c", &DeviceClassParametersSpec { kind: "test".into() }).unwrap()
    }

    fn demand(requests: &[(&str, u32)]) -> Result<Demand, ParametersError> {
        let requests = requests
            .iter()
            .map(|&(name, count)| DeviceRequest {
                name: name.into(),
                count,
            })
            .collect();
        Demand::check(&class(), "ns", "p", &DeviceClaimParametersSpec { requests })
    }

    #[test]
    fn a_claim_without_parameters_wants_one_device() {
        assert_eq!(Demand::one(&class()).total(), 1);
        assert_eq!(Demand::one(&class()).kind(), "test");
    }

    #[test]
    fn requests_keep_their_order_and_add_up() {
        let demand = demand(&[("b", 2), ("a", 62)]).unwrap();
        assert_eq!(demand.total(), 64);
        assert_eq!(
            demand.requests().iter().map(Request::name).collect::<Vec<_>>(),
            ["b", "a"]
        );
    }

    #[test]
    fn nonsense_is_refused_with_the_object_the_field_and_the_limit() {
        let text = |requests: &[(&str, u32)]| demand(requests).unwrap_err().to_string();
        let limits = "1 to 64 are allowed";
        assert_eq!(
            text(&[("a", 0)]),
            format!("DeviceClaimParameters ns/p: request a has count 0; {limits}")
        );
        assert_eq!(
            text(&[("a", 1_000_000_000)]),
            format!("DeviceClaimParameters ns/p: request a has count 1000000000; {limits}")
        );
        assert_eq!(
            text(&[("a", 64), ("b", 1)]),
            "DeviceClaimParameters ns/p: the requests add up to 65 devices; a claim gets at most 64"
        );
        assert_eq!(
            text(&[("a", 1), ("a", 1)]),
            "DeviceClaimParameters ns/p: request a is there twice; give each request a name of its own"
        );
        assert_eq!(
            text(&[]),
            "DeviceClaimParameters ns/p: spec.requests has 0 entries; 1 to 16 are allowed"
        );
        for name in ["", "A", "a/b", "-a", "../x", &"x".repeat(64), "a\0", "ä"] {
            assert_eq!(
                demand(&[(name, 1)]).unwrap_err().reason(),
                "ParametersInvalid",
                "{name:?}"
            );
            assert!(
                ClassParameters::check("c", &DeviceClassParametersSpec { kind: name.into() }).is_err(),
                "{name:?}"
            );
        }
    }
}
