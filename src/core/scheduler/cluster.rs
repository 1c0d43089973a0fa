//! The objects that allocation depends on.

use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceClaim, ResourceSlice};

use super::holdings::DeviceHoldings;
use crate::core::allocation::inventory::Match;

/// Evaluates a CEL expression for a device of a driver.
pub type Evaluate<'e> = dyn FnMut(&str, &str, &Device) -> Match + 'e;

/// The objects that allocation depends on.
#[derive(Clone, Copy, Debug)]
pub struct ClusterState<'a> {
    /// All slices.
    pub slices: &'a [ResourceSlice],
    /// All classes.
    pub classes: &'a [DeviceClass],
    /// Devices held by allocated claims.
    pub holdings: &'a DeviceHoldings<'a>,
}

/// `namespace/name` of a claim.
pub(super) fn claim_name(claim: &ResourceClaim) -> String {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    match &claim.metadata.namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}
