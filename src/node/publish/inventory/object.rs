//! Builds the desired NodeInventory.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ObjectMeta;

use super::stored::{DeviceCounts, Stored};
use crate::api::crd::{
    DEVICES_MAX, Device, Devices, NodeInventory, NodeInventorySpec, NodeInventoryStatus, READY,
};
use crate::core::discovery::attributes::fit;
use crate::core::names::DriverName;
use crate::core::prepare::kubelet_apis::ApisDown;
use crate::node::service::Quarantine;

/// Reason of the condition `Ready` while claims are served, or this cluster has no claims API. The message names other APIs that
/// are down.
const SERVING: &str = "Serving";
/// The condition that lists claims in quarantine; absent if there are none.
const QUARANTINED: &str = "Quarantined";

/// The registration status with kubelet, for the companion's readiness and the inventory's condition `Ready`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistrationStatus {
    /// Whether all endpoints are served and kubelet has rejected none of them.
    pub ready: bool,
    /// Whether claims are served, or this cluster has no claims API. Devices may then be allocated to claims, even if other APIs
    /// are down.
    pub claims_ready: bool,
    /// Reason in CamelCase.
    pub reason: String,
    /// Message for the user.
    pub message: String,
    /// Kubelet APIs that are down, for events.
    pub down: ApisDown,
}

impl RegistrationStatus {
    /// The status while another companion runs on the node. This one takes over when that one ends.
    pub fn standby() -> Self {
        Self {
            ready: true,
            reason: "Standby".to_owned(),
            message: "another companion runs on this node; this one takes over when it ends".to_owned(),
            ..Self::default()
        }
    }

    /// The status before any endpoint is served.
    pub fn starting() -> Self {
        Self {
            reason: "Starting".to_owned(),
            ..Self::default()
        }
    }
}

/// Name of the inventory of a node and driver.
pub(super) fn object_name(node_name: &str, driver_name: &DriverName) -> String {
    format!("{node_name}.{driver_name}")
}

/// The applied part of the inventory, the attributes dropped for size, and the devices left out. The Node owns the object.
pub(super) fn inventory(
    name: &str,
    driver_name: &DriverName,
    node: &Node,
    devices: &Devices,
) -> (NodeInventory, Vec<String>, Vec<String>) {
    let mut devices: Vec<Device> = devices.values().cloned().collect();
    let left_out = leave_out_surplus(&mut devices);
    let dropped = fit(&mut devices);
    let uid = node.uid().unwrap_or_default();
    let inventory = NodeInventory {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.name_any(),
                uid: uid.clone(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: NodeInventorySpec {
            driver_name: driver_name.to_string(),
            node_name: node.name_any(),
            node_uid: uid,
            devices,
        },
        status: None,
    };
    (inventory, dropped, left_out)
}

/// Leaves out devices beyond the number that the API server accepts, and returns their names. Discovery finds no more than that, but held
/// devices that are gone come on top. These stay: they are unhealthy. So do devices with shares, because the controller takes a device in
/// no inventory for exclusive, and would see a conflict between its holders.
fn leave_out_surplus(devices: &mut Vec<Device>) -> Vec<String> {
    let may_go = |device: &Device| device.unhealthy.is_none() && !device.is_shared();
    let mut left_out = Vec::new();
    while devices.len() > DEVICES_MAX {
        let last = devices.iter().rposition(may_go);
        let device = devices.remove(last.unwrap_or(DEVICES_MAX));
        left_out.push(device.name);
    }
    left_out
}

/// The desired status for a stored inventory; equal to the stored one if nothing changes.
pub(super) fn status(
    stored: &Stored<DeviceCounts>,
    registration_status: &RegistrationStatus,
    quarantine: &Quarantine,
    now: Timestamp,
) -> NodeInventoryStatus {
    let condition = |type_: &str, holds: bool, reason: &str, message: String| {
        let status = if holds { "True" } else { "False" };
        let before = stored
            .status
            .iter()
            .flat_map(|status| &status.conditions)
            .find(|condition| condition.type_ == type_);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: stored.metadata.generation,
            last_transition_time: before
                .filter(|before| before.status == status)
                .map_or(Time(now), |before| before.last_transition_time.clone()),
        }
    };
    let mut conditions = vec![condition(
        READY,
        registration_status.claims_ready,
        if registration_status.claims_ready {
            SERVING
        } else {
            &registration_status.reason
        },
        registration_status.message.clone(),
    )];
    // Added only if needed: normally there is one condition.
    if !quarantine.is_empty() {
        conditions.push(condition(
            QUARANTINED,
            true,
            "ClaimsForgotten",
            describe(quarantine),
        ));
    }
    NodeInventoryStatus {
        devices: stored.devices.devices,
        unhealthy: stored.devices.unhealthy,
        observed_generation: stored.metadata.generation,
        conditions,
    }
}

/// Describes the claims in quarantine in at most `MOST` characters (the API allows 32,768).
fn describe(quarantine: &Quarantine) -> String {
    const MOST: usize = 4096;
    let all: Vec<String> = quarantine
        .values()
        .map(|one| format!("{}: {}", one.claim, one.why))
        .collect();
    let text = format!(
        "`drayman node release UID` on the node releases devices. {}",
        all.join("; ")
    );
    text.chars().take(MOST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> NodeInventory {
        let node: Node =
            serde_json::from_value(serde_json::json!({"metadata": {"name": "node-a", "uid": "n-1"}}))
                .unwrap();
        let device = |name: &str, unhealthy: Option<&str>| {
            let unhealthy = unhealthy.map(str::to_owned);
            (
                name.to_owned(),
                Device {
                    name: name.into(),
                    unhealthy,
                    ..Device::default()
                },
            )
        };
        let devices = Devices::from([device("a", None), device("b", Some("gone"))]);
        let driver = DriverName::parse("drayman.dev").unwrap();
        let (mut inventory, ..) = inventory(&object_name("node-a", &driver), &driver, &node, &devices);
        inventory.metadata.generation = Some(3);
        inventory
    }

    #[test]
    fn surplus_devices_are_left_out_if_healthy_and_exclusive() {
        let device = |index: usize| Device {
            name: format!("d{index:04}"),
            ..Device::default()
        };
        let mut devices: Vec<Device> = (0..DEVICES_MAX).map(device).collect();
        assert_eq!(leave_out_surplus(&mut devices), Vec::<String>::new());
        devices.extend((DEVICES_MAX..DEVICES_MAX + 3).map(device));
        devices[DEVICES_MAX + 2].unhealthy = Some("gone".into());
        devices[DEVICES_MAX + 1].shares = Some(2);
        assert_eq!(leave_out_surplus(&mut devices), ["d1024", "d1023", "d1022"]);
        let last = devices.last().map(|device| device.name.as_str());
        assert_eq!((devices.len(), last), (DEVICES_MAX, Some("d1026")));
    }

    fn registration_status(ready: bool) -> RegistrationStatus {
        RegistrationStatus {
            ready,
            claims_ready: ready,
            reason: "Serving".into(),
            message: "all is well".into(),
            ..RegistrationStatus::default()
        }
    }

    #[test]
    fn the_inventory_names_its_node_and_goes_with_it() {
        let inventory = serde_json::to_value(stored()).unwrap();
        assert_eq!(inventory["metadata"]["name"], "node-a.drayman.dev");
        assert_eq!(inventory["metadata"]["ownerReferences"][0]["uid"], "n-1");
        assert_eq!(inventory["spec"]["nodeUid"], "n-1");
        assert_eq!(
            inventory.get("status"),
            None,
            "the applied object must not claim the status"
        );
    }

    /// The status for a response of the server.
    fn status_of(stored: &NodeInventory, ready: bool, now: Timestamp) -> NodeInventoryStatus {
        let answer = serde_json::to_value(stored).unwrap();
        let stored = serde_json::from_value(answer).unwrap();
        status(&stored, &registration_status(ready), &Quarantine::new(), now)
    }

    #[test]
    fn the_status_counts_and_says_which_generation_it_is_of() {
        let status = status_of(&stored(), true, Timestamp::UNIX_EPOCH);
        assert_eq!(
            (status.devices, status.unhealthy, status.observed_generation),
            (2, 1, Some(3))
        );
        assert_eq!(status.conditions[0].status, "True");
    }

    #[test]
    fn a_status_that_has_not_changed_is_the_same_at_any_later_time() {
        let mut stored = stored();
        let first = status_of(&stored, true, Timestamp::UNIX_EPOCH);
        stored.status = Some(first.clone());
        let later = Timestamp::from_second(1_000).unwrap();
        assert_eq!(status_of(&stored, true, later), first);
        let changed = status_of(&stored, false, later);
        assert_eq!(changed.conditions[0].last_transition_time, Time(later));
    }
}
