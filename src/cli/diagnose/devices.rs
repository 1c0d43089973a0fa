//! Lists every device of a driver with its state and holders, from inventories and claims.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Serialize;

use super::{inventories_of, qualified_name};
use crate::api::crd::{Mode, NodeInventory};
use crate::api::resource::ResourceClaim;
use crate::core::allocation::index::{self, AllocationState};
use crate::core::allocation::inventory::unready;

/// State of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum DeviceState {
    /// Available to a claim, at least one of its shares.
    Free,
    /// All shares are held.
    Held,
    /// Not held by a claim. The device is also an extended resource, and only its node knows whether a container holds
    /// it. A claim can get the device if no container holds it.
    NotClaimed,
    /// Reported as unhealthy by the companion, so it is not allocated.
    Unhealthy,
    /// Has a taint, so that only requests which tolerate it get the device.
    Tainted,
    /// The node's companion does not run or does not serve kubelet, or the device's pool is incomplete.
    NotReady,
    /// Available as an extended resource only; only its node knows the pod that holds it.
    NotForClaims,
    /// Held by a claim, but missing from all inventories and slices.
    Gone,
    /// Free, or held by claims that the user may not read.
    Unknown,
}

impl DeviceRow {
    /// Returns the row of a device that claims hold and nothing lists.
    pub(super) fn gone(
        driver: &str,
        node: String,
        device: String,
        cause: &str,
        holders: Vec<DeviceHolder>,
    ) -> Self {
        Self {
            node,
            node_uid: String::new(),
            device,
            kind: String::new(),
            driver: driver.to_owned(),
            mode: None,
            state: DeviceState::Gone,
            cause: Some(cause.to_owned()),
            shares: 1,
            holders,
            attributes: BTreeMap::new(),
        }
    }

    /// Returns `node/device`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.node, self.device)
    }

    /// Identifies the device while its state changes. The node's uid is no part of it: it is unknown for a device that no ResourceSlice lists.
    pub(crate) fn identity(&self) -> (&str, &str) {
        (&self.node, &self.device)
    }

    /// Returns whether a container may hold the device without a claim; only its node knows.
    pub fn may_be_in_a_container(&self) -> bool {
        matches!(
            self.mode,
            Some(Mode::ExtendedResource | Mode::Both | Mode::Unknown)
        )
    }
}

/// A claim that holds a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceHolder {
    /// `namespace/name` of the claim.
    pub claim: String,
    /// The claim's request that the device satisfies.
    pub request: String,
    /// Pods the claim is reserved for, in the claim's namespace.
    pub pods: Vec<String>,
}

/// A device and its holders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceRow {
    /// Node name.
    pub node: String,
    /// Uid of the Node object; distinguishes a node from a later one with the same name.
    pub node_uid: String,
    /// Device name.
    pub device: String,
    /// Kind that matched the device; empty if no inventory lists it.
    pub kind: String,
    /// Driver that serves the device.
    pub driver: String,
    /// Whether the device is available to claims, as an extended resource, or both; absent if no inventory lists it.
    pub mode: Option<Mode>,
    /// State of the device.
    pub state: DeviceState,
    /// Cause of the state, unless obvious.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Maximum number of claims that can hold the device at once.
    pub shares: usize,
    /// Claims that hold the device.
    pub holders: Vec<DeviceHolder>,
    /// Attributes, by qualified name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

/// All devices of a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceTable {
    /// Devices, sorted by node and name.
    #[serde(rename = "items")]
    pub devices: Vec<DeviceRow>,
    /// Claims of the driver with an unreadable allocation, and the reason. No device on their nodes is allocated to
    /// others.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub unreadable: BTreeMap<String, String>,
}

impl DeviceTable {
    pub(super) fn sort(&mut self) {
        self.devices
            .sort_by(|a, b| (&a.node, &a.device, &a.node_uid).cmp(&(&b.node, &b.device, &b.node_uid)));
    }

    /// Returns the rows that differ from `earlier`; devices that are no longer listed are [`DeviceState::Gone`].
    #[must_use]
    pub fn changed_since(&self, earlier: &Self) -> Self {
        // Pools of other programs may have devices of one name, as may a node and an earlier one.
        let mut before: BTreeMap<_, Vec<&DeviceRow>> = BTreeMap::new();
        for row in &earlier.devices {
            before.entry(row.identity()).or_default().push(row);
        }
        let is_known = |row: &DeviceRow| {
            before
                .get(&row.identity())
                .is_some_and(|rows| rows.contains(&row))
        };
        let now: BTreeSet<_> = self.devices.iter().map(DeviceRow::identity).collect();
        let new = self.devices.iter().filter(|row| !is_known(row));
        let vanished = earlier
            .devices
            .iter()
            .filter(|row| !now.contains(&row.identity()))
            .map(|row| DeviceRow {
                state: DeviceState::Gone,
                cause: Some("it is no longer listed".to_owned()),
                ..row.clone()
            });
        Self {
            devices: new.cloned().chain(vanished).collect(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Adjusts the states if only claims in `namespace` were read: claims in other namespaces may hold any device that
    /// appears free.
    #[must_use]
    pub fn of_namespace(mut self, namespace: &str) -> Self {
        for device in &mut self.devices {
            if matches!(device.state, DeviceState::Free | DeviceState::NotClaimed) {
                device.state = DeviceState::Unknown;
                device.cause = Some(format!(
                    "claims of other namespaces than {namespace} were not read"
                ));
            }
        }
        self
    }
}

/// Joins the inventories of `driver` with its claims.
pub fn devices(driver: &str, inventories: &[NodeInventory], claims: &[ResourceClaim]) -> DeviceTable {
    let mut table = DeviceTable::default();
    // By node uid and device name.
    let mut held: BTreeMap<(String, String), (String, Vec<DeviceHolder>)> = BTreeMap::new();
    for claim in claims {
        let status = &claim.status;
        let Some(allocation) = status.allocation_of(driver) else {
            continue;
        };
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        match index::read(driver, uid, allocation).state {
            AllocationState::Recorded(grant) | AllocationState::Held(grant) => {
                let pods = status.reserved_for.iter();
                let pods: Vec<_> = pods.map(|consumer| consumer.name.clone()).collect();
                for device in grant.devices {
                    let place = (grant.node_uid.to_string(), device.device);
                    let (_, holders) = held
                        .entry(place)
                        .or_insert_with(|| (grant.node_name.to_string(), Vec::new()));
                    holders.push(DeviceHolder {
                        claim: qualified_name(claim),
                        request: device.request,
                        pods: pods.clone(),
                    });
                }
            }
            AllocationState::Unreadable { error, .. } => {
                table.unreadable.insert(qualified_name(claim), error.into());
            }
        }
    }
    for inventory in inventories_of(driver, inventories) {
        let spec = &inventory.spec;
        let unready = unready(inventory);
        for device in &spec.devices {
            let shares = device.shares.map_or(1, |shares| shares.max(1) as usize);
            let place = (spec.node_uid.clone(), device.name.clone());
            let mut holders = held
                .remove(&place)
                .map(|(_, holders)| holders)
                .unwrap_or_default();
            holders.sort();
            let (state, cause) = match (&device.unhealthy, &unready) {
                (Some(cause), _) => (DeviceState::Unhealthy, Some(cause.clone())),
                (None, _) if holders.len() >= shares => (DeviceState::Held, None),
                (None, Some(cause)) => (DeviceState::NotReady, Some(cause.to_string())),
                (None, None) if matches!(device.mode, Mode::ExtendedResource | Mode::Unknown) => {
                    (DeviceState::NotForClaims, None)
                }
                (None, None) if device.mode == Mode::Both => (DeviceState::NotClaimed, None),
                (None, None) => (DeviceState::Free, None),
            };
            table.devices.push(DeviceRow {
                node: spec.node_name.clone(),
                node_uid: spec.node_uid.clone(),
                device: device.name.clone(),
                kind: device.kind.clone(),
                driver: driver.to_owned(),
                mode: Some(device.mode),
                state,
                cause,
                shares,
                holders,
                attributes: device
                    .attributes
                    .iter()
                    .map(|(name, value)| (name.clone(), attribute(value)))
                    .collect(),
            });
        }
    }
    for ((node_uid, device), (node, mut holders)) in held {
        holders.sort();
        let cause = "a claim holds it, but no inventory of this node lists it";
        let gone = DeviceRow::gone(driver, node, device, cause, holders);
        table.devices.push(DeviceRow { node_uid, ..gone });
    }
    table.sort();
    table
}

/// Formats an attribute value.
fn attribute(value: &crate::api::crd::AttributeValue) -> String {
    value
        .string
        .clone()
        .or_else(|| value.version.clone())
        .or_else(|| value.int.map(|number| number.to_string()))
        .or_else(|| value.bool.map(|truth| truth.to_string()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::handle::HandleDevice;
    use crate::api::resource::ResourceClaimConsumerReference;
    use crate::core::allocation::index::DeviceGrant;
    use crate::core::allocation::tests::fixture::{DRIVER, inventory};

    fn claim(name: &str, node_uid: &str, device: &str) -> ResourceClaim {
        let mut claim = ResourceClaim::default();
        claim.metadata.namespace = Some("shop".into());
        claim.metadata.name = Some(name.into());
        claim.metadata.uid = Some(format!("uid-{name}"));
        let grant = DeviceGrant {
            node_name: "node-a".into(),
            node_uid: node_uid.into(),
            devices: vec![HandleDevice {
                request: "device".into(),
                device: device.into(),
            }],
        };
        claim.status.driver_name = Some(DRIVER.into());
        claim.status.allocation = Some(index::write(DRIVER, &format!("uid-{name}"), &grant).unwrap());
        claim.status.reserved_for = vec![ResourceClaimConsumerReference::pod("till", "1")];
        claim
    }

    fn states(table: &DeviceTable) -> Vec<(&str, DeviceState)> {
        table
            .devices
            .iter()
            .map(|row| (row.device.as_str(), row.state))
            .collect()
    }

    #[test]
    fn a_held_device_names_its_claim_and_its_pods() {
        let table = devices(
            DRIVER,
            &[inventory("node-a", "1", &["a", "b"])],
            &[claim("one", "1", "b")],
        );
        assert_eq!(
            states(&table),
            [("a", DeviceState::Free), ("b", DeviceState::Held)]
        );
        let holder = DeviceHolder {
            claim: "shop/one".into(),
            request: "device".into(),
            pods: vec!["till".into()],
        };
        assert_eq!(table.devices[1].holders, [holder]);
    }

    #[test]
    fn a_shared_device_is_free_until_its_last_share_is_held() {
        let mut inventory = inventory("node-a", "1", &["a"]);
        inventory.spec.devices[0].shares = Some(2);
        let one = [claim("one", "1", "a")];
        assert_eq!(
            devices(DRIVER, std::slice::from_ref(&inventory), &one).devices[0].state,
            DeviceState::Free
        );
        let both = [claim("one", "1", "a"), claim("two", "1", "a")];
        assert_eq!(
            devices(DRIVER, &[inventory], &both).devices[0].state,
            DeviceState::Held
        );
    }

    #[test]
    fn a_device_that_a_container_may_have_is_never_called_free() {
        let mut inventory = inventory("node-a", "1", &["a", "b", "c", "d"]);
        for (device, mode) in inventory.spec.devices.iter_mut().zip([
            Mode::Claims,
            Mode::ExtendedResource,
            Mode::Both,
            Mode::Both,
        ]) {
            device.mode = mode;
        }
        let inventory = [inventory];
        let table = devices(DRIVER, &inventory, &[claim("one", "1", "d")]);
        assert_eq!(
            states(&table),
            [
                ("a", DeviceState::Free),
                ("b", DeviceState::NotForClaims),
                ("c", DeviceState::NotClaimed),
                ("d", DeviceState::Held),
            ]
        );
        let may: Vec<bool> = table
            .devices
            .iter()
            .map(DeviceRow::may_be_in_a_container)
            .collect();
        assert_eq!(may, [false, true, true, true]);
        let json = serde_json::to_value(&table).unwrap();
        assert_eq!(json["items"][2]["state"], "NotClaimed");
        // Without access to all claims, this is unknown as well.
        let table = devices(DRIVER, &inventory, &[]).of_namespace("shop");
        assert_eq!(table.devices[2].state, DeviceState::Unknown);
    }

    #[test]
    fn claims_on_a_recreated_node_are_gone_and_block_nothing() {
        let table = devices(
            DRIVER,
            &[inventory("node-a", "2", &["a"])],
            &[claim("one", "1", "a")],
        );
        assert_eq!(
            states(&table),
            [("a", DeviceState::Gone), ("a", DeviceState::Free)]
        );
    }

    #[test]
    fn an_unhealthy_device_has_a_cause_and_names_its_holder() {
        let mut inventory = inventory("node-a", "1", &["a"]);
        inventory.spec.devices[0].unhealthy = Some("unplugged".into());
        let table = devices(DRIVER, &[inventory], &[claim("one", "1", "a")]);
        assert_eq!(table.devices[0].state, DeviceState::Unhealthy);
        assert_eq!(table.devices[0].cause.as_deref(), Some("unplugged"));
        assert_eq!(table.devices[0].holders.len(), 1);
    }

    #[test]
    fn a_claim_that_cannot_be_read_is_named_with_the_reason() {
        let mut broken = claim("one", "1", "a");
        broken.status.allocation.as_mut().unwrap().resource_handles[0].data = Some("nonsense".into());
        let table = devices(DRIVER, &[inventory("node-a", "1", &["a"])], &[broken]);
        assert!(table.unreadable["shop/one"].contains("cannot be read"));
    }

    #[test]
    fn devices_and_claims_of_other_drivers_are_left_out() {
        let table = devices(
            "other.example",
            &[inventory("node-a", "1", &["a"])],
            &[claim("one", "1", "a")],
        );
        assert_eq!(table, DeviceTable::default());
    }
}
