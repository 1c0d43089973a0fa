//! Validated parameters of classes and claims: [`ClassParameters`], [`ClaimParameters`], and the objects that `parametersRef` names.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::api::crd::{
    ATTRIBUTE_NAME_MAX, CLAIM_DEVICES_MAX, CONSTRAINTS_MAX, DeviceAllocationMode, DeviceClaimParametersSpec,
    DeviceClassParametersSpec, DeviceConstraint, DeviceRequest, DeviceSelector, EXPRESSION_MAX, GROUP,
    PlacementPolicy, REQUESTS_MAX, SELECTORS_MAX,
};
use crate::api::resource::{ResourceClaim, ResourceClass};
use crate::core::names::is_dns_label;

/// The validated parameters of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassParameters {
    kind: String,
    selectors: Vec<CheckedSelector>,
    spreads: bool,
}

/// A condition on devices, with its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedSelector {
    namespace: Arc<str>,
    object: Arc<str>,
    label: Arc<str>,
    expression: Arc<str>,
}

impl CheckedSelector {
    fn check(
        namespace: &str,
        object: &str,
        owner: &str,
        selectors: &[DeviceSelector],
    ) -> Result<Vec<Self>, ParametersError> {
        let number = selectors.len();
        if number > SELECTORS_MAX {
            let error = format!("{owner} has {number} selectors; at most {SELECTORS_MAX} are allowed");
            return Err(invalid(object, error));
        }
        let (namespace, object) = (Arc::<str>::from(namespace), Arc::<str>::from(object));
        let check = |(index, selector): (usize, &DeviceSelector)| {
            let expression = &selector.cel.expression;
            let (length, label) = (expression.len(), format!("selector {} of {owner}", index + 1));
            if !(1..=EXPRESSION_MAX).contains(&length) {
                let error = format!("{label} has {length} bytes; 1 to {EXPRESSION_MAX} are allowed");
                return Err(invalid(&object, error));
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
    /// Validates the class parameters called `name`; `spec` may be the error of decoding them.
    pub fn check(
        name: &str,
        spec: Result<DeviceClassParametersSpec, String>,
    ) -> Result<Self, ParametersError> {
        let object = format!("{CLASS_PARAMETERS_KIND} {name}");
        let spec = spec.map_err(|error| malformed(&object, error))?;
        check_label(&object, "spec.kind", &spec.kind)?;
        Ok(Self {
            kind: spec.kind,
            selectors: CheckedSelector::check("", &object, "the class", &spec.selectors)?,
            spreads: spec.policy == Some(PlacementPolicy::Spreading),
        })
    }

    /// The kind of the devices, as in the nodes' configuration.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The selectors that each device must match.
    pub fn selectors(&self) -> &[CheckedSelector] {
        &self.selectors
    }
}

/// The validated parameters of a claim: at least one device, at most [`CLAIM_DEVICES_MAX`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimParameters {
    requests: Vec<CheckedRequest>,
    constraints: Vec<Constraint>,
}

/// The device requests of a claim, all for devices of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRequests {
    kind: String,
    requests: Vec<CheckedRequest>,
    constraints: Vec<Constraint>,
    spreads: bool,
}

/// A request for a number of devices, or for all that match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedRequest {
    name: String,
    amount: Amount,
    selectors: Vec<CheckedSelector>,
}

/// The number of devices of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// This many: 1 to [`CLAIM_DEVICES_MAX`].
    Exactly(usize),
    /// Every device that matches, held or not; at least one.
    All,
}

impl CheckedRequest {
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

    /// The selectors that each device must match. In [`DeviceRequests`], those of the class come first.
    pub fn selectors(&self) -> &[CheckedSelector] {
        &self.selectors
    }

    fn check(namespace: &str, object: &str, request: &DeviceRequest) -> Result<Self, ParametersError> {
        check_label(object, "spec.requests[].name", &request.name)?;
        let owner = format!("request {}", request.name);
        let amount = match (request.allocation_mode.unwrap_or_default(), request.count) {
            (DeviceAllocationMode::All, None) => Amount::All,
            (DeviceAllocationMode::All, Some(_)) => {
                let error = format!("{owner} has allocationMode All and a count; remove one of them");
                return Err(invalid(object, error));
            }
            (DeviceAllocationMode::ExactCount, count) => {
                let count = count.unwrap_or(1);
                let number = usize::try_from(count).unwrap_or(usize::MAX);
                if !(1..=CLAIM_DEVICES_MAX).contains(&number) {
                    let error = format!("{owner} has count {count}; 1 to {CLAIM_DEVICES_MAX} are allowed");
                    return Err(invalid(object, error));
                }
                Amount::Exactly(number)
            }
        };
        Ok(Self {
            name: request.name.clone(),
            amount,
            selectors: CheckedSelector::check(namespace, object, &owner, &request.selectors)?,
        })
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
        let Some(index) = others.iter().position(shares) else {
            others.push(self);
            return;
        };
        let other = others.remove(index);
        self.requests.extend(other.requests);
        self.requests.sort_unstable();
        self.requests.dedup();
        self.join(others);
    }

    fn check(
        object: &str,
        number: usize,
        constraint: &DeviceConstraint,
        requests: &[CheckedRequest],
    ) -> Result<Self, ParametersError> {
        let attribute = &constraint.match_attribute;
        let qualified = matches!(
            attribute.split_once('/'),
            Some((domain, name)) if !domain.is_empty() && !name.is_empty() && !name.contains('/')
        );
        if !qualified || attribute.chars().count() > ATTRIBUTE_NAME_MAX {
            let attribute = shortened(attribute);
            let error = format!(
                "constraint {number} has matchAttribute {attribute:?}; it must be a domain, a slash and a name, \
                 as drayman.dev/numaNode"
            );
            return Err(invalid(object, error));
        }
        let index = |name: &String| {
            let index = requests.iter().position(|request| request.name == *name);
            index.ok_or_else(|| {
                let name = shortened(name);
                let error =
                    format!("constraint {number} names request {name:?}, which is not in spec.requests");
                invalid(object, error)
            })
        };
        let named = constraint
            .requests
            .iter()
            .map(index)
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

impl Default for ClaimParameters {
    /// The parameters of a claim without `parametersRef`: one device.
    fn default() -> Self {
        Self {
            requests: vec![CheckedRequest {
                name: "device".to_owned(),
                amount: Amount::Exactly(1),
                selectors: Vec::new(),
            }],
            constraints: Vec::new(),
        }
    }
}

impl ClaimParameters {
    /// Validates the claim parameters called `name` in `namespace`; `spec` may be the error of decoding them.
    pub fn check(
        namespace: &str,
        name: &str,
        spec: Result<DeviceClaimParametersSpec, String>,
    ) -> Result<Self, ParametersError> {
        let object = format!("{CLAIM_PARAMETERS_KIND} {namespace}/{name}");
        let spec = spec.map_err(|error| malformed(&object, error))?;
        let number = spec.requests.len();
        if !(1..=REQUESTS_MAX).contains(&number) {
            let error = format!("spec.requests has {number} entries; 1 to {REQUESTS_MAX} are allowed");
            return Err(invalid(&object, error));
        }
        let mut names = BTreeSet::new();
        let mut requests = Vec::with_capacity(number);
        for request in &spec.requests {
            requests.push(CheckedRequest::check(namespace, &object, request)?);
            let name = request.name.as_str();
            if !names.insert(name) {
                let error = format!("request {name} occurs twice; request names must be unique");
                return Err(invalid(&object, error));
            }
        }
        let total: usize = requests.iter().map(CheckedRequest::least).sum();
        if total > CLAIM_DEVICES_MAX {
            let error =
                format!("the requests add up to {total} devices; a claim gets at most {CLAIM_DEVICES_MAX}");
            return Err(invalid(&object, error));
        }
        let number = spec.constraints.len();
        if number > CONSTRAINTS_MAX {
            let error =
                format!("spec.constraints has {number} entries; at most {CONSTRAINTS_MAX} are allowed");
            return Err(invalid(&object, error));
        }
        let mut constraints: Vec<Constraint> = Vec::with_capacity(number);
        for (index, constraint) in spec.constraints.iter().enumerate() {
            Constraint::check(&object, index + 1, constraint, &requests)?.join(&mut constraints);
        }
        Ok(Self {
            requests,
            constraints,
        })
    }

    /// The selectors of all requests.
    pub fn selectors(&self) -> impl Iterator<Item = &CheckedSelector> {
        self.requests.iter().flat_map(CheckedRequest::selectors)
    }
}

impl DeviceRequests {
    /// Combines the parameters of a claim with those of its class.
    pub fn new(class: &ClassParameters, mut claim: ClaimParameters) -> Self {
        for request in &mut claim.requests {
            request.selectors = [class.selectors(), request.selectors()].concat();
        }
        Self {
            kind: class.kind.clone(),
            requests: claim.requests,
            constraints: claim.constraints,
            spreads: class.spreads,
        }
    }

    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The requests, in the user's order.
    pub fn requests(&self) -> &[CheckedRequest] {
        &self.requests
    }

    pub fn constraints(&self) -> &[Constraint] {
        &self.constraints
    }

    /// Whether to prefer large groups of devices, and shared devices with many shares left.
    pub fn spreads(&self) -> bool {
        self.spreads
    }

    /// The minimum number of devices of all requests.
    pub fn total(&self) -> usize {
        self.requests.iter().map(CheckedRequest::least).sum()
    }
}

/// Truncates an untrusted value for an event.
fn shortened(value: &str) -> String {
    value.chars().take(64).collect()
}

fn check_label(object: &str, field: &str, value: &str) -> Result<(), ParametersError> {
    if is_dns_label(value) {
        return Ok(());
    }
    let value = shortened(value);
    let error = format!(
        "{field} is {value:?}; at most 63 of a-z, 0-9 and '-' are allowed, with a letter or digit at both ends"
    );
    Err(invalid(object, error))
}

fn malformed(object: &str, error: String) -> ParametersError {
    let object = object.to_owned();
    ParametersError::Malformed { object, error }
}

fn invalid(object: &str, error: String) -> ParametersError {
    let object = object.to_owned();
    ParametersError::Invalid { object, error }
}

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
    /// A field is invalid or exceeds a limit.
    #[error("{object}: {error}")]
    Invalid {
        /// Kind, namespace and name.
        object: String,
        /// The field, its problem, and the allowed values.
        error: String,
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
    /// A `parametersRef` that this driver does not read, with the class or claim and the fix.
    #[error("{0}")]
    Reference(String),
}

impl ParametersError {
    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "ParametersNotFound",
            Self::Malformed { .. } | Self::Invalid { .. } => "ParametersInvalid",
            Self::Selector { .. } => "SelectorInvalid",
            Self::Reference(_) => "ParametersReferenceInvalid",
        }
    }
}

/// The kind required in a class's `parametersRef`.
pub const CLASS_PARAMETERS_KIND: &str = "DeviceClassParameters";
/// The kind required in a claim's `parametersRef`.
pub const CLAIM_PARAMETERS_KIND: &str = "DeviceClaimParameters";

/// Name of the parameters of a class.
pub fn class_reference(class: &ResourceClass) -> Result<&str, ParametersError> {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    let wrong = |error: String| {
        let error = format!("ResourceClass {name} has {error}");
        Err(ParametersError::Reference(error))
    };
    let valid = || format!("{{apiGroup: {GROUP}, kind: {CLASS_PARAMETERS_KIND}, name: ...}}");
    let Some(reference) = &class.parameters_ref else {
        return wrong(format!("no parametersRef: set it to {}", valid()));
    };
    if reference.api_group.as_deref() != Some(GROUP) || reference.kind != CLASS_PARAMETERS_KIND {
        let found = spelled(reference.api_group.as_deref(), &reference.kind);
        return wrong(format!(
            "a parametersRef to {found}, which this driver does not read: use {}",
            valid()
        ));
    }
    if reference.namespace.is_some() {
        return wrong(format!(
            "a parametersRef with a namespace: {CLASS_PARAMETERS_KIND} has none, remove it"
        ));
    }
    Ok(&reference.name)
}

/// Name of the parameters of a claim, in the claim's own namespace; `None` if the claim has none.
pub fn claim_reference(claim: &ResourceClaim) -> Result<Option<&str>, ParametersError> {
    let Some(reference) = &claim.spec.parameters_ref else {
        return Ok(None);
    };
    if reference.api_group.as_deref() == Some(GROUP) && reference.kind == CLAIM_PARAMETERS_KIND {
        return Ok(Some(&reference.name));
    }
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let found = spelled(reference.api_group.as_deref(), &reference.kind);
    Err(ParametersError::Reference(format!(
        "ResourceClaim {name} has a parametersRef to {found}, which this driver does not read: recreate the \
         claim with {{apiGroup: {GROUP}, kind: {CLAIM_PARAMETERS_KIND}, name: ...}}"
    )))
}

fn spelled(group: Option<&str>, kind: &str) -> String {
    match group {
        Some(group) if !group.is_empty() => format!("{} of group {}", shortened(kind), shortened(group)),
        _ => format!("{} of the core group", shortened(kind)),
    }
}

#[cfg(test)]
mod tests;
