//! Devices of allocated ResourceClaims.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};

use super::pools::DeviceId;
use super::quantity::Quantity;

/// A claim that holds a device, and its result for the device.
#[derive(Clone, Copy, Debug)]
pub struct AllocatedResult<'a> {
    pub claim: &'a ResourceClaim,
    pub result: &'a DeviceRequestAllocationResult,
}

/// Use of one device.
#[derive(Clone, Debug, Default)]
pub struct Usage<'a> {
    /// The claims that hold the device.
    pub holders: Vec<AllocatedResult<'a>>,
    /// Whether one claim holds the whole device.
    pub exclusive: bool,
    /// Consumed capacity of a shared device.
    pub consumed: BTreeMap<&'a str, Quantity>,
}

/// The use of all devices.
#[derive(Clone, Debug, Default)]
pub struct AllocatedDevices<'a>(BTreeMap<DeviceId, Usage<'a>>);

impl<'a> AllocatedDevices<'a> {
    /// Reads the allocated claims. A result with admin access holds nothing.
    pub fn read(claims: impl IntoIterator<Item = &'a ResourceClaim>) -> Self {
        let mut allocated_devices = Self::default();
        for claim in claims {
            for result in results(claim) {
                allocated_devices.add(claim, result);
            }
        }
        allocated_devices
    }

    fn add(&mut self, claim: &'a ResourceClaim, result: &'a DeviceRequestAllocationResult) {
        if result.admin_access == Some(true) {
            return;
        }
        let id = DeviceId::new(&result.driver, &result.pool, &result.device);
        let usage = self.0.entry(id).or_default();
        usage.holders.push(AllocatedResult { claim, result });
        if result.share_id.is_none() {
            usage.exclusive = true;
        }
        for (name, amount) in result.consumed_capacity.iter().flatten() {
            match Quantity::read(amount) {
                Ok(amount) => {
                    let sum = usage.consumed.entry(name).or_default();
                    *sum = sum.plus(amount);
                }
                // Only a server other than Kubernetes stores this. The device goes to no other claim.
                Err(_) => usage.exclusive = true,
            }
        }
    }

    /// The use of a device; `None` if no claim holds it.
    pub fn get(&self, id: &DeviceId) -> Option<&Usage<'a>> {
        self.0.get(id)
    }

    /// All held devices.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceId, &Usage<'a>)> {
        self.0.iter()
    }
}

/// The results of a claim's allocation; none if it is not allocated.
pub fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices
        .into_iter()
        .flat_map(|devices| devices.results.iter().flatten())
}
