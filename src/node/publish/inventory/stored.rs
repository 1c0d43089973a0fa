//! Decodes only the required fields of a NodeInventory.
//!
//! Each write and watch event returns the whole object, with all attributes and a `managedFields` entry for each. On a large node
//! that is a megabyte in thousands of small allocations, freed at once, which would fragment the heap. These fields are therefore
//! never decoded.

use std::fmt;

use kube::api::ObjectMeta;
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::api::crd::{Device, Devices, NodeInventory, NodeInventoryStatus};
use crate::api::resource::partial_resource;

/// A NodeInventory with its devices reduced to `D`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stored<D> {
    /// Only the fields used here.
    pub(super) metadata: ObjectMeta,
    pub(super) devices: D,
    pub(super) status: Option<NodeInventoryStatus>,
}

/// Device counts of a stored inventory. They show whether others have added devices, or fields that we do not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceCounts {
    pub(super) devices: u32,
    pub(super) unhealthy: u32,
    with_attributes: u32,
    with_shares: u32,
}

impl DeviceCounts {
    /// The counts of an inventory with these devices.
    pub(super) fn of(devices: &[Device]) -> Self {
        let mut counted = Self::default();
        for device in devices {
            let has_attributes = !device.attributes.is_empty();
            counted.add(
                device.unhealthy.is_some(),
                has_attributes,
                device.shares.is_some(),
            );
        }
        counted
    }

    fn add(&mut self, is_unhealthy: bool, has_attributes: bool, has_shares: bool) {
        self.devices = self.devices.saturating_add(1);
        self.unhealthy = self.unhealthy.saturating_add(is_unhealthy.into());
        self.with_attributes = self.with_attributes.saturating_add(has_attributes.into());
        self.with_shares = self.with_shares.saturating_add(has_shares.into());
    }
}

/// The devices of a stored inventory, reduced to kind and health: the fields that events report.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct StoredDevices(pub(super) Devices);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
}

#[derive(Deserialize)]
struct StoredSpec<D> {
    #[serde(default)]
    devices: D,
}

#[derive(Deserialize)]
struct Whole<D: Default> {
    metadata: Metadata,
    #[serde(bound(deserialize = "D: Deserialize<'de> + Default"))]
    spec: StoredSpec<D>,
    status: Option<NodeInventoryStatus>,
}

impl<'de, D: Deserialize<'de> + Default> Deserialize<'de> for Stored<D> {
    fn deserialize<S: Deserializer<'de>>(deserializer: S) -> Result<Self, S::Error> {
        let Whole {
            metadata,
            spec,
            status,
        } = Whole::deserialize(deserializer)?;
        let metadata = ObjectMeta {
            name: metadata.name,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
            generation: metadata.generation,
            ..ObjectMeta::default()
        };
        Ok(Self {
            metadata,
            devices: spec.devices,
            status,
        })
    }
}

partial_resource!([D] Stored<D>, NodeInventory, self => &self.metadata, &mut self.metadata);

impl<'de> Deserialize<'de> for DeviceCounts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Optional {
            unhealthy: Option<IgnoredAny>,
            attributes: Option<IgnoredAny>,
            shares: Option<IgnoredAny>,
        }
        struct DeviceCounter;
        impl<'de> Visitor<'de> for DeviceCounter {
            type Value = DeviceCounts;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of devices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut devices: A) -> Result<DeviceCounts, A::Error> {
                let mut counted = DeviceCounts::default();
                while let Some(device) = devices.next_element::<Optional>()? {
                    let Optional {
                        unhealthy,
                        attributes,
                        shares,
                    } = device;
                    counted.add(unhealthy.is_some(), attributes.is_some(), shares.is_some());
                }
                Ok(counted)
            }
        }
        deserializer.deserialize_seq(DeviceCounter)
    }
}

impl<'de> Deserialize<'de> for StoredDevices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct StoredDevice {
            name: String,
            kind: String,
            unhealthy: Option<String>,
        }
        let device = |known: StoredDevice| {
            let device = Device {
                name: known.name.clone(),
                kind: known.kind,
                unhealthy: known.unhealthy,
                ..Device::default()
            };
            (known.name, device)
        };
        let all = Vec::<StoredDevice>::deserialize(deserializer)?;
        Ok(Self(all.into_iter().map(device).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{
        "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
        "metadata": { "name": "a.drayman.dev", "uid": "1", "resourceVersion": "7", "generation": 3, "labels": { "a": "b" },
            "managedFields": [{ "manager": "drayman-node", "fieldsV1": { "f:spec": { "f:devices": {} } } }] },
        "spec": { "driverName": "drayman.dev", "nodeName": "a", "nodeUid": "n", "devices": [
            { "name": "x", "kind": "k", "mode": "claims", "attributes": { "drayman.dev/path": { "string": "/dev/x" } } },
            { "name": "y", "kind": "k", "mode": "claims", "unhealthy": "gone" }] },
        "status": { "devices": 2, "unhealthy": 1, "observedGeneration": 3 }
    }"#;

    #[test]
    fn the_devices_of_an_answer_are_counted_and_not_kept() {
        let stored: Stored<DeviceCounts> = serde_json::from_str(TEXT).unwrap();
        let whole: NodeInventory = serde_json::from_str(TEXT).unwrap();
        assert_eq!((stored.devices.devices, stored.devices.unhealthy), (2, 1));
        assert_eq!(stored.devices, DeviceCounts::of(&whole.spec.devices));
        assert_eq!(stored.status, whole.status);
        let expected = ObjectMeta {
            labels: None,
            managed_fields: None,
            ..whole.metadata
        };
        assert_eq!(stored.metadata, expected);
    }

    #[test]
    fn stored_devices_keep_kind_and_health() {
        let StoredDevices(devices) = serde_json::from_str::<Stored<StoredDevices>>(TEXT)
            .unwrap()
            .devices;
        let shown = |name: &str| (devices[name].kind.as_str(), devices[name].unhealthy.as_deref());
        assert_eq!((shown("x"), shown("y")), (("k", None), ("k", Some("gone"))));
        assert!(devices.values().all(|device| device.attributes.is_empty()));
    }

    #[test]
    fn an_inventory_without_devices_or_status_is_accepted() {
        let text = r#"{ "metadata": {}, "spec": {} }"#;
        let stored: Stored<DeviceCounts> = serde_json::from_str(text).unwrap();
        assert_eq!(stored, Stored::default());
    }
}
