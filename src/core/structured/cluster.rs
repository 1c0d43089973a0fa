//! The objects that allocation depends on.

use std::fmt;

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
pub fn claim_name(claim: &ResourceClaim) -> impl fmt::Display + use<'_> {
    struct Name<'a>(&'a ResourceClaim);
    impl fmt::Display for Name<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let metadata = &self.0.metadata;
            if let Some(namespace) = &metadata.namespace {
                write!(f, "{namespace}/")?;
            }
            f.write_str(metadata.name.as_deref().unwrap_or_default())
        }
    }
    Name(claim)
}
