//! Our own kinds, `drayman.dev/v1alpha1`. The files under `crds/` are made from these types by `make generate`.

#![expect(
    unreachable_pub,
    reason = "kube's derive wraps the spec in a way that rustc takes for unreachable"
)]
#![expect(
    clippy::duplicated_attributes,
    reason = "each printcolumn has a type of its own"
)]
#![expect(
    dead_code,
    reason = "KubeSchema derives a copy of Device in which nobody reads a field that is no part of the schema"
)]

mod attributes;
mod parameters;

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use super::device_number::{DeviceNodeKind, DeviceNumber};
pub use attributes::DeviceAttributes;
pub use parameters::{
    AllocationMode, CONSTRAINTS_MAX, CelDeviceSelector, DeviceClaimParameters, DeviceClaimParametersSpec,
    DeviceClassParameters, DeviceClassParametersSpec, DeviceConstraint, DeviceRequest, DeviceSelector,
    EXPRESSION_MAX, PlacementPolicy, SELECTORS_MAX,
};

/// The API group of our kinds.
pub const GROUP: &str = "drayman.dev";
/// The version of our kinds.
pub const VERSION: &str = "v1alpha1";
// A rule of the schema (CEL) that adds up over a list would be refused by API servers up to 1.29, which cannot estimate its cost.

/// Devices in one [`NodeInventory`], at most. With two attributes for each and the lengths below, an inventory stays under the
/// 1.5 MiB that etcd takes, as long as its texts are ASCII. The companion leaves out attributes where more do not fit.
pub const DEVICES_MAX: usize = 1024;
/// Attributes of one device, at most.
pub const ATTRIBUTES_MAX: usize = 32;
/// Characters in the name of an attribute, at most: a domain of 63, a slash and 32.
pub const ATTRIBUTE_NAME_MAX: usize = 96;
/// Characters in a text attribute and in the reason why a device is unhealthy, at most.
pub const TEXT_MAX: usize = 256;
/// Characters in an attribute that is a version, at most.
pub const VERSION_MAX: usize = 64;
/// Devices in one claim, at most: with the longest names they still fit into a resource handle.
pub const CLAIM_DEVICES_MAX: usize = 64;
/// Requests in one claim, at most.
pub const REQUESTS_MAX: usize = 16;

/// Devices of a node. Cluster-scoped, one per node and driver, written only by that node's companion and only on change.
/// Contains no holders.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "NodeInventory",
    doc = "Devices of a node, published by the node companion of one driver. Contains no holders.",
    plural = "nodeinventories",
    shortname = "ninv",
    category = "drayman",
    status = "NodeInventoryStatus",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".spec.driverName"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Devices", type_ = "integer", json_path = ".status.devices"),
    printcolumn(name = "Unhealthy", type_ = "integer", json_path = ".status.unhealthy"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = ("self.driverName == oldSelf.driverName", "driverName is immutable"))]
#[x_kube(validation = ("self.nodeName == oldSelf.nodeName", "nodeName is immutable"))]
pub struct NodeInventorySpec {
    /// Driver of these devices.
    #[schemars(length(min = 1, max = 63))]
    pub driver_name: String,
    /// Node of these devices.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// Uid of the Node object, to detect a later node of the same name.
    #[schemars(length(min = 1, max = 64))]
    pub node_uid: String,
    /// The devices, in the order of their names.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub devices: Vec<Device>,
}

/// How an inventory stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeInventoryStatus {
    /// Number of devices.
    #[serde(default)]
    #[schemars(extend("format" = "int32"))]
    pub devices: u32,
    /// Number of unhealthy devices.
    #[serde(default)]
    #[schemars(extend("format" = "int32"))]
    pub unhealthy: u32,
    /// Generation of the object that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`: the companion runs and serves kubelet. A companion that stops cleanly sets it to False.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The condition of a [`NodeInventory`] that says whether its companion serves kubelet.
pub const READY: &str = "Ready";

/// One device, in the shape of `resource.k8s.io/v1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.attributes) || self.attributes.all(name, size(name) <= 96)",
    "the name of an attribute has at most 96 characters"
))]
pub struct Device {
    /// Unique on the node and stable across reboots: a DNS label derived from the device's identity.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub name: String,
    /// Kind of the node's configuration.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub kind: String,
    /// The kubelet APIs through which the device can be allocated.
    #[serde(default)]
    pub mode: Mode,
    /// Attributes by qualified name (`drayman.dev/path`).
    #[serde(default, skip_serializing_if = "no_attributes")]
    #[schemars(
        with = "BTreeMap<String, AttributeValue>",
        extend("maxProperties" = 32, "x-kubernetes-map-type" = "atomic")
    )]
    pub attributes: DeviceAttributes,
    /// Reason why the device is not allocated; absent if it is healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub unhealthy: Option<String>,
    /// Maximum number of claims that hold the device at once. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("format" = "int32"))]
    pub shares: Option<u32>,
    /// The device numbers of the nodes that belong to this device alone: what identifies it in the containers of its node, whatever its
    /// name. Known on the node only, and no part of the object.
    #[serde(skip)]
    pub device_numbers: Box<[DeviceNumber]>,
}

fn no_attributes(attributes: &DeviceAttributes) -> bool {
    attributes.is_empty()
}

/// The kubelet APIs through which the devices of a kind can be allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Through ResourceClaims.
    #[default]
    Claims,
    /// Through the device plugin API, as an extended resource in `resources.limits`.
    ExtendedResource,
    /// Through both APIs; each device through the first one that requests it, exclusively.
    Both,
    /// A mode of a newer release: the device is not used. Never written.
    #[serde(other, skip_serializing)]
    #[schemars(skip)]
    Unknown,
}

/// The value of an attribute: exactly one field is set, as in `resource.k8s.io/v1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("minProperties" = 1, "maxProperties" = 1))]
pub struct AttributeValue {
    /// A string.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub string: Option<String>,
    /// An integer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int: Option<i64>,
    /// A boolean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bool: Option<bool>,
    /// A semantic version (semver.org 2.0.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub version: Option<String>,
}

impl Mode {
    /// Whether claims can have such a device.
    pub fn serves_claims(self) -> bool {
        matches!(self, Self::Claims | Self::Both)
    }

    /// Whether such a device is part of an extended resource.
    pub fn serves_extended_resource(self) -> bool {
        matches!(self, Self::ExtendedResource | Self::Both)
    }
}

impl AttributeValue {
    /// A string.
    pub fn string(value: impl Into<String>) -> Self {
        Self {
            string: Some(value.into()),
            ..Self::default()
        }
    }

    /// An integer.
    pub fn int(value: i64) -> Self {
        Self {
            int: Some(value),
            ..Self::default()
        }
    }
}

/// Every definition that the API server needs in classic mode.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![
        NodeInventory::crd(),
        DeviceClassParameters::crd(),
        DeviceClaimParameters::crd(),
    ]
}

/// The names of these definitions.
pub fn definition_names() -> [&'static str; 3] {
    [
        NodeInventory::crd_name(),
        DeviceClassParameters::crd_name(),
        DeviceClaimParameters::crd_name(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many devices as the schema lets through, with two of the largest attributes for each.
    fn largest() -> NodeInventory {
        let label =
            |prefix: &str, index: usize| format!("{prefix}{index:0>width$}", width = 63 - prefix.len());
        let attribute = |index| {
            (
                format!("{index:a>ATTRIBUTE_NAME_MAX$}"),
                AttributeValue::string("v".repeat(TEXT_MAX)),
            )
        };
        let device = |index| Device {
            name: label("d", index),
            kind: label("k", 0),
            mode: Mode::ExtendedResource,
            attributes: (0..2).map(attribute).collect(),
            unhealthy: Some("u".repeat(TEXT_MAX)),
            shares: Some(1024),
            device_numbers: Box::default(),
        };
        let spec = NodeInventorySpec {
            driver_name: "d".repeat(63),
            node_name: "n".repeat(253),
            node_uid: "u".repeat(64),
            devices: (0..DEVICES_MAX).map(device).collect(),
        };
        NodeInventory::new(&"n".repeat(253), spec)
    }

    #[test]
    fn the_largest_inventory_leaves_room_for_managed_fields() {
        let size = serde_json::to_vec(&largest()).unwrap().len();
        assert!(size < 1_400_000, "{size} bytes");
    }

    #[test]
    fn the_limits_of_the_schema_are_those_of_the_constants() {
        let text = serde_json::to_string(&definitions()).unwrap();
        for limit in [
            format!("\"maxItems\":{DEVICES_MAX}"),
            format!("\"maxItems\":{REQUESTS_MAX}"),
            format!("\"maxProperties\":{ATTRIBUTES_MAX}"),
            format!("\"maxLength\":{TEXT_MAX}"),
            format!("\"maximum\":{CLAIM_DEVICES_MAX}"),
            format!("\"maxItems\":{SELECTORS_MAX}"),
            format!("\"maxItems\":{CONSTRAINTS_MAX}"),
            format!("\"maxLength\":{EXPRESSION_MAX}"),
            format!("<= {ATTRIBUTE_NAME_MAX})\""),
        ] {
            assert!(text.contains(&limit), "no {limit}");
        }
    }

    #[test]
    fn formats_are_those_that_api_servers_recognize() {
        let text = serde_json::to_string_pretty(&definitions()).unwrap();
        let formats: std::collections::BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("\"format\": "))
            .map(|format| format.trim_end_matches(',').trim_matches('"'))
            .collect();
        // Kubernetes 1.32 and later warn of others, such as uint32.
        let known = std::collections::BTreeSet::from(["date-time", "int32", "int64"]);
        assert!(!formats.is_empty() && formats.is_subset(&known), "{formats:?}");
    }

    #[test]
    fn an_unknown_mode_is_read_but_is_not_in_the_schema() {
        let device: Device =
            serde_json::from_str(r#"{"name":"a","kind":"k","mode":"by-carrier-pigeon"}"#).unwrap();
        assert_eq!(device.mode, Mode::Unknown);
        assert!(
            !serde_json::to_string(&definitions())
                .unwrap()
                .contains("unknown\"")
        );
    }
}
