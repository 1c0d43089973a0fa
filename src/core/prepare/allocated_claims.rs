//! The devices of this node that are allocated to claims, as the API server shows them before kubelet calls Prepare. The device plugin API
//! withdraws such a device at once.
//!
//! This is not a record. The checkpoint records the prepared claims; this only looks ahead, and Prepare refuses any conflict it misses.

use std::collections::BTreeMap;

use crate::api::handle::DeviceHandle;
use crate::api::resource::ResourceClaim;

/// The allocated claims with devices on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatedClaims {
    known: bool,
    claims: BTreeMap<String, Allocated>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Allocated {
    claim: String,
    devices: Vec<String>,
}

impl AllocatedClaims {
    /// Whether all claims have been listed once, or the cluster cannot have any. Until then, only devices that a container already holds
    /// are offered to containers.
    pub fn known(&self) -> bool {
        self.known
    }

    /// Replaces all claims with a complete list.
    pub fn replace<'a>(
        &mut self,
        claims: impl IntoIterator<Item = &'a ResourceClaim>,
        driver_name: &str,
        node_name: &str,
    ) {
        self.claims.clear();
        for claim in claims {
            self.set(claim, driver_name, node_name);
        }
        self.known = true;
    }

    /// Records the current state of one claim.
    pub fn set(&mut self, claim: &ResourceClaim, driver_name: &str, node_name: &str) {
        let metadata = &claim.metadata;
        let uid = metadata.uid.clone().unwrap_or_default();
        let devices = devices(claim, driver_name, node_name);
        if devices.is_empty() {
            self.claims.remove(&uid);
            return;
        }
        let claim = format!(
            "claim {}/{} (uid {uid})",
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default(),
        );
        self.claims.insert(uid, Allocated { claim, devices });
    }

    /// Forgets a deleted claim.
    pub fn remove(&mut self, uid: &str) {
        self.claims.remove(uid);
    }

    /// Whether a claim has devices of this node allocated.
    pub fn has(&self, uid: &str) -> bool {
        self.claims.contains_key(uid)
    }

    /// Describes the claim that a device is allocated to.
    pub fn holder(&self, device: &str) -> Option<&str> {
        self.claims
            .values()
            .find(|allocated| allocated.devices.iter().any(|name| name == device))
            .map(|allocated| allocated.claim.as_str())
    }

    /// The devices that are allocated to claims.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.claims
            .values()
            .flat_map(|allocated| allocated.devices.iter().map(String::as_str))
    }
}

/// The devices of this node that this driver allocated to a claim.
fn devices(claim: &ResourceClaim, driver_name: &str, node_name: &str) -> Vec<String> {
    let allocation = claim.status.allocation_of(driver_name);
    let handles = allocation
        .into_iter()
        .flat_map(|allocation| &allocation.resource_handles);
    handles
        .filter_map(|handle| DeviceHandle::parse(handle.data.as_deref()?).ok())
        .filter(|handle| handle.node_name == node_name)
        .flat_map(|handle| handle.devices)
        .map(|device| device.device)
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::handle::{HandleDevice, VERSION};

    fn claim(uid: &str, node: &str, device: &str) -> ResourceClaim {
        let handle = DeviceHandle {
            version: VERSION,
            claim_uid: uid.into(),
            node_name: node.into(),
            node_uid: "n-1".into(),
            devices: vec![HandleDevice {
                request: "device".into(),
                device: device.into(),
            }],
        };
        serde_json::from_value(json!({
            "metadata": { "namespace": "default", "name": "camera", "uid": uid },
            "spec": { "resourceClassName": "camera" },
            "status": {
                "driverName": "drayman.dev",
                "allocation": { "resourceHandles": [{ "driverName": "drayman.dev", "data": handle.to_data().unwrap() }] },
            },
        }))
        .unwrap()
    }

    fn allocated_claims(claims: &[ResourceClaim]) -> AllocatedClaims {
        let mut allocated_claims = AllocatedClaims::default();
        allocated_claims.replace(claims, "drayman.dev", "node-a");
        allocated_claims
    }

    #[test]
    fn a_claim_holds_what_it_was_allocated_here_until_it_is_gone() {
        let mut allocated_claims = allocated_claims(&[claim("1", "node-a", "x")]);
        assert!(allocated_claims.known());
        assert_eq!(allocated_claims.holder("x"), Some("claim default/camera (uid 1)"));
        allocated_claims.set(&claim("2", "node-a", "y"), "drayman.dev", "node-a");
        allocated_claims.remove("1");
        assert_eq!(allocated_claims.holder("x"), None);
        assert!(allocated_claims.devices().eq(["y"]));
    }

    #[test]
    fn a_claim_whose_allocation_was_cleared_holds_nothing() {
        let mut allocated_claims = allocated_claims(&[claim("1", "node-a", "x")]);
        let mut cleared = claim("1", "node-a", "x");
        cleared.status.allocation = None;
        allocated_claims.set(&cleared, "drayman.dev", "node-a");
        assert_eq!(allocated_claims.holder("x"), None);
    }

    #[test]
    fn what_is_on_another_node_or_another_drivers_is_not_ours() {
        assert_eq!(allocated_claims(&[claim("1", "node-b", "x")]).holder("x"), None);
        let mut other = claim("1", "node-a", "x");
        other.status.driver_name = Some("other.example".into());
        assert!(
            allocated_claims(&[other.clone()]).holder("x").is_some(),
            "renamed: the handle is ours"
        );
        other.status.allocation.as_mut().unwrap().resource_handles[0].driver_name =
            Some("other.example".into());
        assert_eq!(allocated_claims(&[other]).holder("x"), None);
    }

    #[test]
    fn a_handle_that_cannot_be_read_holds_nothing_and_stops_nobody() {
        let mut broken = claim("1", "node-a", "x");
        broken.status.allocation.as_mut().unwrap().resource_handles[0].data = Some("not ours".into());
        let allocated_claims = allocated_claims(&[broken, claim("2", "node-a", "y")]);
        assert!(allocated_claims.devices().eq(["y"]));
    }
}
