//! The requests of claims, with their classes.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceRequest, DeviceSelector, DeviceSubRequest, DeviceTaint, DeviceToleration,
    ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

use super::{ClusterState, claim_name};
use crate::core::allocation::parameters::Amount;

/// A request of a claim.
#[derive(Debug)]
pub(super) struct StructuredRequest<'a> {
    /// Index of the claim.
    pub(super) claim: usize,
    /// Claim and request in messages.
    pub(super) label: String,
    pub(super) name: &'a str,
    /// The subrequests in order of preference, or the request itself.
    pub(super) alternatives: Vec<Alternative<'a>>,
}

/// A request without alternatives, or one subrequest.
#[derive(Debug)]
pub(super) struct Alternative<'a> {
    /// Name of the subrequest; `None` if the request has none.
    pub(super) subrequest: Option<&'a str>,
    pub(super) class: &'a DeviceClass,
    pub(super) selectors: &'a [DeviceSelector],
    pub(super) tolerations: &'a [DeviceToleration],
    pub(super) capacity: Option<&'a BTreeMap<String, Text>>,
    pub(super) amount: Amount,
    pub(super) admin_access: bool,
}

impl StructuredRequest<'_> {
    /// Name of the request in a result: `request` or `request/subrequest`.
    pub(super) fn result_name(&self, alternative: &Alternative<'_>) -> String {
        match alternative.subrequest {
            Some(subrequest) => format!("{}/{subrequest}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// Whether a list of request names in a constraint or configuration contains the request; an empty list contains all.
    pub(super) fn is_in(&self, alternative: &Alternative<'_>, names: &[String]) -> bool {
        names.is_empty()
            || names.iter().any(|name| name == self.name)
            || names.contains(&self.result_name(alternative))
    }
}

impl Alternative<'_> {
    /// The first taint that prevents allocation.
    pub(super) fn taint<'t>(&self, taints: Option<&'t Vec<DeviceTaint>>) -> Option<&'t DeviceTaint> {
        untolerated(taints.into_iter().flatten(), self.tolerations)
    }
}

/// The first taint that keeps a pod away. Taints of nodes follow the same rule.
pub fn untolerated<'t>(
    mut taints: impl Iterator<Item = &'t DeviceTaint>,
    tolerations: &[DeviceToleration],
) -> Option<&'t DeviceTaint> {
    // The scheduler ignores other effects.
    taints.find(|taint| {
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
            && !tolerations.iter().any(|toleration| tolerates(toleration, taint))
    })
}

fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let matches = |expected: Option<&str>, found: &str| {
        expected.is_none_or(|expected| expected.is_empty() || expected == found)
    };
    matches(toleration.effect.as_deref(), &taint.effect)
        && matches(toleration.key.as_deref(), &taint.key)
        && match toleration.operator.as_deref().unwrap_or_default() {
            "" | "Equal" => {
                toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
            }
            "Exists" => true,
            _ => false,
        }
}

/// Reads the requests of all claims, in their order.
pub(super) fn requests<'a>(
    cluster: ClusterState<'a>,
    claims: &[&'a ResourceClaim],
) -> Result<Vec<StructuredRequest<'a>>, String> {
    let mut requests = Vec::new();
    for (index, claim) in claims.iter().enumerate() {
        for request in claim
            .spec
            .devices
            .iter()
            .flat_map(|devices| devices.requests.iter().flatten())
        {
            let label = format!("ResourceClaim {}, request {}", claim_name(claim), request.name);
            let alternatives = alternatives(cluster, request).map_err(|error| format!("{label}: {error}"))?;
            requests.push(StructuredRequest {
                claim: index,
                label,
                name: &request.name,
                alternatives,
            });
        }
    }
    Ok(requests)
}

fn alternatives<'a>(
    cluster: ClusterState<'a>,
    request: &'a DeviceRequest,
) -> Result<Vec<Alternative<'a>>, String> {
    if let Some(exactly) = &request.exactly {
        return Ok(vec![Alternative {
            subrequest: None,
            class: class(cluster, &exactly.device_class_name)?,
            selectors: exactly.selectors.as_deref().unwrap_or_default(),
            tolerations: exactly.tolerations.as_deref().unwrap_or_default(),
            capacity: exactly
                .capacity
                .as_ref()
                .and_then(|capacity| capacity.requests.as_ref()),
            amount: amount(exactly.allocation_mode.as_deref(), exactly.count)?,
            admin_access: exactly.admin_access == Some(true),
        }]);
    }
    let subrequests = request.first_available.as_deref().unwrap_or_default();
    if subrequests.is_empty() {
        return Err("it has neither exactly nor firstAvailable".to_owned());
    }
    let alternative = |subrequest: &'a DeviceSubRequest| {
        Ok(Alternative {
            subrequest: Some(&subrequest.name),
            class: class(cluster, &subrequest.device_class_name)?,
            selectors: subrequest.selectors.as_deref().unwrap_or_default(),
            tolerations: subrequest.tolerations.as_deref().unwrap_or_default(),
            capacity: subrequest
                .capacity
                .as_ref()
                .and_then(|capacity| capacity.requests.as_ref()),
            amount: amount(subrequest.allocation_mode.as_deref(), subrequest.count)?,
            admin_access: false,
        })
    };
    subrequests.iter().map(alternative).collect()
}

fn class<'a>(cluster: ClusterState<'a>, name: &str) -> Result<&'a DeviceClass, String> {
    let mut classes = cluster.classes.iter();
    classes
        .find(|class| class.metadata.name.as_deref() == Some(name))
        .ok_or_else(|| format!("there is no DeviceClass {name}"))
}

fn amount(mode: Option<&str>, count: Option<i64>) -> Result<Amount, String> {
    match mode.unwrap_or("ExactCount") {
        "ExactCount" => {
            let count = count.unwrap_or(1);
            let number = usize::try_from(count).map_err(|_| format!("the count {count} is not usable"))?;
            Ok(Amount::Exactly(number))
        }
        "All" => Ok(Amount::All),
        other => Err(format!("the allocation mode {other:?} is unknown")),
    }
}
