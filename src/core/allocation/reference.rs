//! References to parameters: only to our kinds, and for a claim only within its namespace.

use crate::api::crd::GROUP;
use crate::api::resource::{ResourceClaim, ResourceClass};
use crate::core::allocation::parameters::shortened;

/// The kind required in a class's `parametersRef`.
pub const CLASS_PARAMETERS_KIND: &str = "DeviceClassParameters";
/// The kind required in a claim's `parametersRef`.
pub const CLAIM_PARAMETERS_KIND: &str = "DeviceClaimParameters";

/// Name of the parameters of a class.
pub fn class_reference(class: &ResourceClass) -> Result<&str, ReferenceError> {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    let Some(reference) = &class.parameters_ref else {
        return Err(ReferenceError::ClassWithoutReference {
            class: name.to_owned(),
        });
    };
    if reference.api_group.as_deref() != Some(GROUP) || reference.kind != CLASS_PARAMETERS_KIND {
        return Err(ReferenceError::ClassReference {
            class: name.to_owned(),
            found: spelled(reference.api_group.as_deref(), &reference.kind),
        });
    }
    if reference.namespace.is_some() {
        return Err(ReferenceError::ClassReferenceNamespace {
            class: name.to_owned(),
        });
    }
    Ok(&reference.name)
}

/// Name of the parameters of a claim, in the claim's own namespace; `None` if the claim has none.
pub fn claim_reference(claim: &ResourceClaim) -> Result<Option<&str>, ReferenceError> {
    let Some(reference) = &claim.spec.parameters_ref else {
        return Ok(None);
    };
    if reference.api_group.as_deref() == Some(GROUP) && reference.kind == CLAIM_PARAMETERS_KIND {
        return Ok(Some(&reference.name));
    }
    Err(ReferenceError::ClaimReference {
        claim: claim.metadata.name.clone().unwrap_or_default(),
        found: spelled(reference.api_group.as_deref(), &reference.kind),
    })
}

/// Why a reference is refused. Only a user or administrator can fix it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// The class has no `parametersRef`.
    #[error(
        "ResourceClass {class} has no parametersRef: set it to {{apiGroup: {GROUP}, kind: {CLASS_PARAMETERS_KIND}, name: ...}}"
    )]
    ClassWithoutReference {
        /// Name of the class.
        class: String,
    },
    /// The class refers to a kind that this driver does not read.
    #[error(
        "ResourceClass {class} has a parametersRef to {found}, which this driver does not read: \
         use {{apiGroup: {GROUP}, kind: {CLASS_PARAMETERS_KIND}, name: ...}}"
    )]
    ClassReference {
        /// Name of the class.
        class: String,
        /// Kind and group of the reference.
        found: String,
    },
    /// The class refers to a namespace, although class parameters have none.
    #[error(
        "ResourceClass {class} has a parametersRef with a namespace: {CLASS_PARAMETERS_KIND} has none, remove it"
    )]
    ClassReferenceNamespace {
        /// Name of the class.
        class: String,
    },
    /// The claim refers to a kind that this driver does not read.
    #[error(
        "ResourceClaim {claim} has a parametersRef to {found}, which this driver does not read: \
         make the claim again with {{apiGroup: {GROUP}, kind: {CLAIM_PARAMETERS_KIND}, name: ...}}"
    )]
    ClaimReference {
        /// Name of the claim.
        claim: String,
        /// Kind and group of the reference.
        found: String,
    },
}

impl ReferenceError {
    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        "ParametersReferenceInvalid"
    }
}

fn spelled(group: Option<&str>, kind: &str) -> String {
    match group {
        Some(group) if !group.is_empty() => format!("{} of group {}", shortened(kind), shortened(group)),
        _ => format!("{} of the core group", shortened(kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::resource::{ResourceClaimParametersReference, ResourceClassParametersReference};

    #[test]
    fn a_class_must_refer_to_parameters_of_ours() {
        let mut class = ResourceClass::default();
        class.metadata.name = Some("fpga".into());
        let text = |class: &ResourceClass| class_reference(class).unwrap_err().to_string();
        assert!(
            text(&class)
                .starts_with("ResourceClass fpga has no parametersRef: set it to {apiGroup: drayman.dev,")
        );
        let reference = ResourceClassParametersReference {
            api_group: Some(GROUP.into()),
            kind: CLASS_PARAMETERS_KIND.into(),
            name: "p".into(),
            namespace: None,
        };
        class.parameters_ref = Some(reference.clone());
        assert_eq!(class_reference(&class), Ok("p"));
        class.parameters_ref = Some(ResourceClassParametersReference {
            namespace: Some("x".into()),
            ..reference.clone()
        });
        assert!(text(&class).contains("with a namespace"));
        class.parameters_ref = Some(ResourceClassParametersReference {
            api_group: None,
            ..reference
        });
        assert!(
            text(&class).contains("DeviceClassParameters of the core group, which this driver does not read")
        );
    }

    #[test]
    fn a_claim_may_refer_to_parameters_of_ours_and_to_nothing_else() {
        let mut claim = ResourceClaim::default();
        assert_eq!(claim_reference(&claim), Ok(None));
        for (group, kind, fine) in [
            (Some(GROUP), CLAIM_PARAMETERS_KIND, true),
            (Some(GROUP), CLASS_PARAMETERS_KIND, false),
            (Some("other.example"), CLAIM_PARAMETERS_KIND, false),
            (None, "ConfigMap", false),
            (Some(""), "Secret", false),
        ] {
            let api_group = group.map(str::to_owned);
            let reference = ResourceClaimParametersReference {
                api_group,
                kind: kind.into(),
                name: "p".into(),
            };
            claim.spec.parameters_ref = Some(reference);
            assert_eq!(claim_reference(&claim).is_ok(), fine, "{group:?} {kind}");
        }
    }
}
