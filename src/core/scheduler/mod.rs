//! Devices and claims of structured Dynamic Resource Allocation (`resource.k8s.io/v1`) as the scheduler of Kubernetes 1.34 to 1.37 sees
//! them.
//!
//! ```text
//! ResourceSlices --> pools ----------------+
//! allocated claims --> allocated_devices --+--> search --> allocate: AllocationResults
//! classes, claims --> requests ------------+           \-> report: why a node does not fit
//! ```
//!
//! * [`pools()`]: the pools of a node, and their devices in the scheduler's order; [`PoolIndex`] does it for many nodes.
//! * [`allocated_devices`]: the devices of allocated claims.
//! * [`allocate()`] takes the first devices that fit, as upstream's allocator (`k8s.io/dynamic-resource-allocation/structured`) does.
//! * [`report()`] says for each request which devices match, and why they are not available.
//!
//! Feature gates are not modelled: the API server drops the fields of a gate that is off, so the objects show which are on. Devices that
//! consume counters (partitionable devices) are never allocated here.

mod allocate;
pub mod allocated_devices;
mod capacity;
mod pools;
mod quantity;
mod report;
mod requests;
mod search;

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceClaim, ResourceSlice};

use crate::core::allocation::inventory::Match;

pub use allocate::{AllocationFailure, allocate};
pub use allocated_devices::{AllocatedDevices, AllocatedResult, Usage};
pub use pools::{DeviceId, Pool, PoolIndex, PoolState, all_pools, node_matches, pools};
pub use quantity::Quantity;
pub use report::{Availability, NodeReport, RequestReport, report};
pub use requests::untolerated;
pub use search::RESULTS_MAX;

/// Evaluates a CEL expression for a device of a driver. An error says why drayman cannot evaluate the expression; the scheduler
/// still can.
pub type Evaluate<'e> = dyn FnMut(&str, &str, &Device) -> Result<Match, Arc<str>> + 'e;

/// The objects that allocation depends on.
#[derive(Clone, Copy, Debug)]
pub struct ClusterState<'a> {
    /// All slices.
    pub slices: &'a [ResourceSlice],
    /// All classes.
    pub classes: &'a [DeviceClass],
    /// Devices of allocated claims.
    pub allocated_devices: &'a AllocatedDevices<'a>,
}

/// `namespace/name` of a claim.
fn claim_name(claim: &ResourceClaim) -> String {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    match &claim.metadata.namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests;
