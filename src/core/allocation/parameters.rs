//! The device request of a claim: the parameters of its class and its own, validated.
//!
//! Everything is validated although the CRDs have schemas: an object may be older than its schema, or the schema may have been replaced.
//! Selector expressions are not validated here: the runtime compiles them.

mod error;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::api::crd::{
    ATTRIBUTE_NAME_MAX, AllocationMode, CLAIM_DEVICES_MAX, CONSTRAINTS_MAX, DeviceClaimParametersSpec,
    DeviceClassParametersSpec, DeviceConstraint, DeviceRequest, DeviceSelector, EXPRESSION_MAX,
    PlacementPolicy, REQUESTS_MAX, SELECTORS_MAX,
};
use crate::core::allocation::reference::{CLAIM_PARAMETERS_KIND, CLASS_PARAMETERS_KIND};

pub use error::ParametersError;

/// Name of the only request of a claim without parameters.
pub const DEFAULT_REQUEST: &str = "device";

/// The validated parameters of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassParameters {
    kind: String,
    selectors: Vec<Selector>,
    policy: PlacementPolicy,
}

/// A condition on devices, with its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    namespace: Arc<str>,
    object: Arc<str>,
    label: Arc<str>,
    expression: Arc<str>,
}

impl Selector {
    fn check(
        namespace: &str,
        object: &str,
        place: &str,
        selectors: &[DeviceSelector],
    ) -> Result<Vec<Self>, ParametersError> {
        let (number, object) = (selectors.len(), Arc::<str>::from(object));
        let namespace: Arc<str> = namespace.into();
        if number > SELECTORS_MAX {
            let (object, place) = (object.to_string(), place.to_owned());
            return Err(ParametersError::Selectors {
                object,
                place,
                number,
            });
        }
        let check = |(index, selector): (usize, &DeviceSelector)| {
            let expression = &selector.cel.expression;
            let (length, label) = (expression.len(), format!("selector {} of {place}", index + 1));
            if !(1..=EXPRESSION_MAX).contains(&length) {
                let (object, selector) = (object.to_string(), label);
                return Err(ParametersError::ExpressionLength {
                    object,
                    selector,
                    length,
                });
            }
            Ok(Self {
                namespace: Arc::clone(&namespace),
                object: Arc::clone(&object),
                label: label.into(),
                expression: expression.as_str().into(),
            })
        };
        selectors.iter().enumerate().map(check).collect()
    }

    /// Namespace of the object that contains it; empty for a class.
    pub fn namespace(&self) -> &Arc<str> {
        &self.namespace
    }

    /// Kind and name of the object that contains it.
    pub fn object(&self) -> &Arc<str> {
        &self.object
    }

    /// Its name in messages: `selector 1 of request gpu`.
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// The condition, in the Common Expression Language.
    pub fn expression(&self) -> &Arc<str> {
        &self.expression
    }

    /// The error that refuses this selector.
    pub fn refusal(&self, error: impl Into<String>) -> ParametersError {
        ParametersError::Selector {
            object: self.object.to_string(),
            selector: self.label.to_string(),
            error: error.into(),
        }
    }
}

impl ClassParameters {
    /// Validates the class parameters called `name`.
    pub fn check(name: &str, spec: &DeviceClassParametersSpec) -> Result<Self, ParametersError> {
        let object = format!("{CLASS_PARAMETERS_KIND} {name}");
        if is_label(&spec.kind) {
            Ok(Self {
                kind: spec.kind.clone(),
                selectors: Selector::check("", &object, "the class", &spec.selectors)?,
                policy: spec.policy.unwrap_or_default(),
            })
        } else {
            Err(ParametersError::NotALabel {
                object,
                field: "spec.kind".into(),
                value: shortened(&spec.kind),
            })
        }
    }

    /// The kind of the devices, as in the nodes' configuration.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The selectors that each device must match.
    pub fn selectors(&self) -> &[Selector] {
        &self.selectors
    }
}

/// The device request of a claim: at least one device, at most [`CLAIM_DEVICES_MAX`], all of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRequests {
    kind: String,
    requests: Vec<Request>,
    constraints: Vec<Constraint>,
    policy: PlacementPolicy,
}

/// A request for a number of devices, or for all that match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    name: String,
    amount: Amount,
    selectors: Vec<Selector>,
}

/// The number of devices that a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// This many: 1 to [`CLAIM_DEVICES_MAX`].
    Exactly(usize),
    /// Every device that matches, held or not; at least one.
    All,
}

impl Request {
    /// Name, unique within the claim.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of devices.
    pub fn amount(&self) -> Amount {
        self.amount
    }

    /// The minimum number of devices.
    pub fn least(&self) -> usize {
        match self.amount {
            Amount::Exactly(count) => count,
            Amount::All => 1,
        }
    }

    /// The selectors that each device must match: those of the class, then those of the request.
    pub fn selectors(&self) -> &[Selector] {
        &self.selectors
    }
}

/// An attribute that must have the same value on all devices of some requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constraint {
    attribute: String,
    requests: Vec<usize>,
}

impl Constraint {
    /// Qualified name of the attribute.
    pub fn attribute(&self) -> &str {
        &self.attribute
    }

    /// Indexes into [`DeviceRequests::requests`], sorted.
    pub fn requests(&self) -> &[usize] {
        &self.requests
    }

    /// Adds the constraint to others. Constraints on one attribute that share a request are merged.
    fn join(mut self, others: &mut Vec<Self>) {
        let shares = |other: &Self| {
            other.attribute == self.attribute
                && other
                    .requests
                    .iter()
                    .any(|request| self.requests.contains(request))
        };
        let Some(place) = others.iter().position(shares) else {
            others.push(self);
            return;
        };
        let other = others.remove(place);
        self.requests.extend(other.requests);
        self.requests.sort_unstable();
        self.requests.dedup();
        self.join(others);
    }

    fn check(
        object: &str,
        number: usize,
        constraint: &DeviceConstraint,
        requests: &[Request],
    ) -> Result<Self, ParametersError> {
        let attribute = &constraint.match_attribute;
        let qualified = matches!(
            attribute.split_once('/'),
            Some((domain, name)) if !domain.is_empty() && !name.is_empty() && !name.contains('/')
        );
        if !qualified || attribute.chars().count() > ATTRIBUTE_NAME_MAX {
            return Err(ParametersError::MatchAttribute {
                object: object.to_owned(),
                constraint: number,
                attribute: shortened(attribute),
            });
        }
        let place = |name: &String| {
            let place = requests.iter().position(|request| request.name == *name);
            place.ok_or_else(|| ParametersError::UnknownRequest {
                object: object.to_owned(),
                constraint: number,
                request: shortened(name),
            })
        };
        let named = constraint
            .requests
            .iter()
            .map(place)
            .collect::<Result<BTreeSet<_>, _>>()?;
        let requests = if named.is_empty() {
            (0..requests.len()).collect()
        } else {
            named.into_iter().collect()
        };
        let attribute = attribute.clone();
        Ok(Self { attribute, requests })
    }
}

impl DeviceRequests {
    /// The device request of a claim without parameters: one device.
    pub fn one(class: &ClassParameters) -> Self {
        Self {
            kind: class.kind.clone(),
            requests: vec![Request {
                name: DEFAULT_REQUEST.to_owned(),
                amount: Amount::Exactly(1),
                selectors: class.selectors.clone(),
            }],
            constraints: Vec::new(),
            policy: class.policy,
        }
    }

    /// Validates the claim parameters called `name` in `namespace`.
    pub fn check(
        class: &ClassParameters,
        namespace: &str,
        name: &str,
        spec: &DeviceClaimParametersSpec,
    ) -> Result<Self, ParametersError> {
        let object = format!("{CLAIM_PARAMETERS_KIND} {namespace}/{name}");
        let number = spec.requests.len();
        if !(1..=REQUESTS_MAX).contains(&number) {
            return Err(ParametersError::Requests { object, number });
        }
        let mut names = BTreeSet::new();
        let mut requests = Vec::with_capacity(number);
        for request in &spec.requests {
            requests.push(Self::check_request(class, namespace, &object, request)?);
            if !names.insert(request.name.as_str()) {
                let request = request.name.clone();
                return Err(ParametersError::Twice { object, request });
            }
        }
        let total: usize = requests.iter().map(Request::least).sum();
        if total > CLAIM_DEVICES_MAX {
            let total = u64::try_from(total).unwrap_or(u64::MAX);
            return Err(ParametersError::Total { object, total });
        }
        let number = spec.constraints.len();
        if number > CONSTRAINTS_MAX {
            return Err(ParametersError::Constraints { object, number });
        }
        let mut constraints: Vec<Constraint> = Vec::with_capacity(number);
        for (index, constraint) in spec.constraints.iter().enumerate() {
            Constraint::check(&object, index + 1, constraint, &requests)?.join(&mut constraints);
        }
        Ok(Self {
            kind: class.kind.clone(),
            requests,
            constraints,
            policy: class.policy,
        })
    }

    fn check_request(
        class: &ClassParameters,
        namespace: &str,
        object: &str,
        request: &DeviceRequest,
    ) -> Result<Request, ParametersError> {
        if !is_label(&request.name) {
            return Err(ParametersError::NotALabel {
                object: object.to_owned(),
                field: "spec.requests[].name".into(),
                value: shortened(&request.name),
            });
        }
        let amount = match (request.allocation_mode.unwrap_or_default(), request.count) {
            (AllocationMode::All, None) => Amount::All,
            (AllocationMode::All, Some(_)) => {
                let (object, request) = (object.to_owned(), request.name.clone());
                return Err(ParametersError::CountWithAll { object, request });
            }
            (AllocationMode::ExactCount, count) => {
                let count = count.unwrap_or(1);
                let number = usize::try_from(count).unwrap_or(usize::MAX);
                if !(1..=CLAIM_DEVICES_MAX).contains(&number) {
                    let (object, request, count) =
                        (object.to_owned(), request.name.clone(), u64::from(count));
                    return Err(ParametersError::Count {
                        object,
                        request,
                        count,
                    });
                }
                Amount::Exactly(number)
            }
        };
        let mut selectors = class.selectors.clone();
        let place = format!("request {}", request.name);
        selectors.extend(Selector::check(namespace, object, &place, &request.selectors)?);
        Ok(Request {
            name: request.name.clone(),
            amount,
            selectors,
        })
    }

    /// The kind of the devices.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The requests, in the user's order.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The constraints between the devices.
    pub fn constraints(&self) -> &[Constraint] {
        &self.constraints
    }

    /// The policy that selects one of several groups of devices.
    pub fn policy(&self) -> PlacementPolicy {
        self.policy
    }

    /// The minimum number of devices of all requests.
    pub fn total(&self) -> usize {
        self.requests.iter().map(Request::least).sum()
    }
}

/// Whether a string is a DNS label (RFC 1123).
fn is_label(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends =
        bytes.first().is_some_and(|&b| alphanumeric(b)) && bytes.last().is_some_and(|&b| alphanumeric(b));
    ends && bytes.len() <= 63 && bytes.iter().all(|&b| alphanumeric(b) || b == b'-')
}

/// Truncates an untrusted value for an event.
pub(super) fn shortened(value: &str) -> String {
    value.chars().take(64).collect()
}

#[cfg(test)]
mod tests;
