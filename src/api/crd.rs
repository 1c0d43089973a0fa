//! Our own kinds, `drayman.dev/v1alpha1`: the devices of a node, and the parameters of classes (by operators) and claims (by users).
//! Selectors, constraints and allocation modes have the shape and the meaning of `resource.k8s.io/v1`.
//!
//! The files under `crds/` are made from these types by `make generate`.

#![expect(
    unreachable_pub,
    reason = "kube's derive wraps the spec in a way that rustc takes for unreachable"
)]
#![expect(clippy::duplicated_attributes, reason = "each printcolumn sets its own type")]
#![expect(
    dead_code,
    reason = "KubeSchema derives a copy of Device, whose fields outside the schema are never read"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::str::FromStr;
use std::sync::Arc;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use litemap::LiteMap;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The API group of our kinds.
pub const GROUP: &str = "drayman.dev";
/// The version of our kinds.
pub const VERSION: &str = "v1alpha1";
// A rule of the schema (CEL) that adds up over a list would be refused by API servers up to 1.29, which cannot estimate its cost.

/// Maximum number of devices in one [`NodeInventory`]. With two attributes for each and the lengths below, an inventory stays under
/// the 1.5 MiB that etcd accepts, if its texts are ASCII. The companion leaves out attributes that do not fit.
pub const DEVICES_MAX: usize = 1024;
/// Maximum number of attributes of one device.
pub const ATTRIBUTES_MAX: usize = 32;
/// Maximum characters in the name of an attribute: a domain of 63, a slash and 32.
pub const ATTRIBUTE_NAME_MAX: usize = 96;
/// Maximum characters in a text attribute and in the reason why a device is unhealthy.
pub const TEXT_MAX: usize = 256;
/// Maximum characters in an attribute that is a version.
pub const VERSION_MAX: usize = 64;
/// Maximum number of devices in one claim: with the longest names they still fit into a resource handle.
pub const CLAIM_DEVICES_MAX: usize = 64;
/// Maximum number of requests in one claim.
pub const REQUESTS_MAX: usize = 16;
/// Maximum number of selectors of one class or of one request.
pub const SELECTORS_MAX: usize = 16;
/// Maximum bytes of one expression, as in `resource.k8s.io/v1`.
pub const EXPRESSION_MAX: usize = 10 * 1024;
/// Maximum number of constraints of one claim.
pub const CONSTRAINTS_MAX: usize = 8;

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

/// Status of an inventory.
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
    /// The device numbers of the nodes that belong to this device alone. They identify it in the containers of its node, regardless of
    /// its name. Known on the node only, and not part of the object.
    #[serde(skip)]
    pub device_numbers: Box<[DeviceNumber]>,
    /// The effect of the taint that the device has in a ResourceSlice while it is unhealthy. Known on the node only, and no part of the
    /// object.
    #[serde(skip)]
    pub taint_effect: TaintEffect,
}

impl Device {
    /// Whether several claims can hold the device, so that a holder of one share does not block the others.
    pub(crate) fn is_shared(&self) -> bool {
        self.shares.is_some_and(|shares| shares > 1)
    }
}

/// The devices of a node, by name.
pub type Devices = BTreeMap<String, Device>;

/// The type and the device number of a device node: `c120:6` for character device 120:6, `b8:0` for block device 8:0. Two device nodes
/// with the same number are the same device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceNumber {
    /// The type of the device node.
    pub kind: DeviceNodeKind,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

/// The type of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceNodeKind {
    /// A character device.
    Character,
    /// A block device.
    Block,
}

/// The string is not a device number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device number such as c120:6 or b8:0")]
pub struct DeviceNumberError(String);

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            DeviceNodeKind::Character => 'c',
            DeviceNodeKind::Block => 'b',
        };
        write!(f, "{kind}{}:{}", self.major, self.minor)
    }
}

impl FromStr for DeviceNumber {
    type Err = DeviceNumberError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = || {
            let (kind, numbers) = if let Some(numbers) = text.strip_prefix('c') {
                (DeviceNodeKind::Character, numbers)
            } else {
                (DeviceNodeKind::Block, text.strip_prefix('b')?)
            };
            let (major, minor) = numbers.split_once(':')?;
            Some(Self {
                kind,
                major: major.parse().ok()?,
                minor: minor.parse().ok()?,
            })
        };
        parsed().ok_or_else(|| DeviceNumberError(text.chars().take(64).collect()))
    }
}

impl TryFrom<String> for DeviceNumber {
    type Error = DeviceNumberError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<DeviceNumber> for String {
    fn from(number: DeviceNumber) -> Self {
        number.to_string()
    }
}

/// What the taint of an unhealthy device does (Kubernetes 1.36 and later).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaintEffect {
    /// The scheduler does not allocate the device. Pods keep it.
    #[default]
    NoSchedule,
    /// The same, and kube-controller-manager evicts the pods that have it.
    NoExecute,
}

impl TaintEffect {
    /// Its name in a taint.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
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

    /// The name, as in the configuration and the NodeInventory.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Claims => "claims",
            Self::ExtendedResource => "extended-resource",
            Self::Both => "both",
            Self::Unknown => "of a newer release",
        }
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

type AttributeMap = LiteMap<String, AttributeValue>;

/// Attributes of a device by qualified name, as a copy-on-write map.
///
/// Most devices have one to five attributes, a node may have a thousand devices, and several lists of them exist at the same time
/// (discovered, offered, published). A sorted vector takes a tenth of a tree's memory, and copies share it until one changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAttributes(Arc<AttributeMap>);

impl Deref for DeviceAttributes {
    type Target = AttributeMap;

    fn deref(&self) -> &AttributeMap {
        &self.0
    }
}

impl DerefMut for DeviceAttributes {
    fn deref_mut(&mut self) -> &mut AttributeMap {
        Arc::make_mut(&mut self.0)
    }
}

impl FromIterator<(String, AttributeValue)> for DeviceAttributes {
    fn from_iter<T: IntoIterator<Item = (String, AttributeValue)>>(attributes: T) -> Self {
        AttributeMap::from_iter(attributes).into()
    }
}

impl From<AttributeMap> for DeviceAttributes {
    fn from(map: AttributeMap) -> Self {
        // Attribute lists are long-lived and rarely grow.
        let mut exact = map.into_tuple_vec();
        exact.shrink_to_fit();
        Self(Arc::new(AttributeMap::from_sorted_store_unchecked(exact)))
    }
}

impl<'a> IntoIterator for &'a DeviceAttributes {
    type Item = <&'a AttributeMap as IntoIterator>::Item;
    type IntoIter = <&'a AttributeMap as IntoIterator>::IntoIter;

    fn into_iter(self) -> Self::IntoIter {
        (&*self.0).into_iter()
    }
}

impl Serialize for DeviceAttributes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // LiteMap would serialize an empty map as an empty list.
        serializer.collect_map(self.0.iter())
    }
}

impl<'de> Deserialize<'de> for DeviceAttributes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        AttributeMap::deserialize(deserializer).map(Self::from)
    }
}

/// Parameters of a ResourceClass of the built-in driver. Cluster-scoped, created by operators.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "DeviceClassParameters",
    doc = "Parameters of a ResourceClass of the built-in driver. Created by operators.",
    plural = "deviceclassparameters",
    category = "drayman",
    derive = "PartialEq",
    printcolumn(name = "Kind", type_ = "string", json_path = ".spec.kind"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceClassParametersSpec {
    /// Kind of devices in the nodes' configuration.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub kind: String,
    /// Selectors that every device of the class must match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub selectors: Vec<DeviceSelector>,
    /// Which of several groups of devices with an equal attribute is taken, or which of several shared devices, if more than
    /// one would do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PlacementPolicy>,
}

/// Choice among several groups of devices with an equal attribute, and among shared devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum PlacementPolicy {
    /// The group with the fewest free devices that are enough, so that large groups stay whole; the device with the fewest
    /// shares left. The default.
    #[default]
    Packing,
    /// The group with the most free devices; the device with the most shares left.
    Spreading,
}

/// Devices that a claim requests from its class. In the claim's namespace, created by users.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "DeviceClaimParameters",
    doc = "Devices that a ResourceClaim requests from its class. In the claim's namespace, created by users.",
    plural = "deviceclaimparameters",
    category = "drayman",
    namespaced,
    derive = "PartialEq",
    printcolumn(name = "Requests", type_ = "string", json_path = ".spec.requests[*].name"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceClaimParametersSpec {
    /// Requests of the claim; it is allocated only if one node satisfies all of them.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub requests: Vec<DeviceRequest>,
    /// Constraints between devices of the claim; all must be met.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub constraints: Vec<DeviceConstraint>,
}

/// A number of devices of the class, or all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = (
    "!has(self.count) || !has(self.allocationMode) || self.allocationMode != 'All'",
    "count must not be set with allocationMode All"
))]
pub struct DeviceRequest {
    /// Unique within the claim.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub name: String,
    /// Whether the request is for `count` devices or for all matching devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation_mode: Option<DeviceAllocationMode>,
    /// Number of devices. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64), extend("format" = "int32"))]
    pub count: Option<u32>,
    /// Selectors that every device of the request must match, in addition to the class's selectors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub selectors: Vec<DeviceSelector>,
}

/// Number of devices of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum DeviceAllocationMode {
    /// As many as `count` says. The default.
    #[default]
    ExactCount,
    /// Every device of the class on the node that matches: at least one, and none of them may be held or unhealthy.
    All,
}

/// A condition on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceSelector {
    /// CEL selector.
    pub cel: CelDeviceSelector,
}

/// A condition on one device, in the Common Expression Language.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CelDeviceSelector {
    /// Expression that is true for matching devices: `device.attributes["drayman.dev"].vendor == "0403"`.
    #[schemars(length(min = 1, max = 10240))]
    pub expression: String,
}

impl DeviceSelector {
    /// The condition `expression`.
    pub fn cel(expression: impl Into<String>) -> Self {
        let expression = expression.into();
        Self {
            cel: CelDeviceSelector { expression },
        }
    }
}

/// A constraint between devices of the claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceConstraint {
    /// Requests that the constraint covers; all requests if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub requests: Vec<String>,
    /// Qualified attribute that must have the same value for all these devices: `drayman.dev/numaNode`.
    #[schemars(length(min = 3, max = 96), regex(pattern = r"^[^/]+/[^/]+$"))]
    pub match_attribute: String,
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
            ..Device::default()
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

    #[test]
    fn a_device_number_is_read_as_it_is_written() {
        for text in ["c120:6", "b8:0", "c0:4294967295"] {
            assert_eq!(text.parse::<DeviceNumber>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "120:6",
            "x1:2",
            "c1",
            "c1:",
            "c-1:2",
            "c1:2:3",
            "c4294967296:0",
        ] {
            let error = text.parse::<DeviceNumber>().unwrap_err();
            assert!(error.to_string().contains("c120:6"), "{text}");
        }
    }

    #[test]
    fn copies_share_memory_until_one_changes() {
        let first: DeviceAttributes = [("a".to_owned(), AttributeValue::int(1))].into_iter().collect();
        let mut second = first.clone();
        assert!(Arc::ptr_eq(&first.0, &second.0));
        second.insert("b".to_owned(), AttributeValue::string("x"));
        assert_eq!((first.len(), second.len()), (1, 2));
        assert_ne!(first, second);
    }

    #[test]
    fn attributes_are_read_and_written_as_a_map() {
        let text = r#"{"a":{"int":1},"b":{"string":"x"}}"#;
        let read: DeviceAttributes = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert_eq!(serde_json::to_string(&DeviceAttributes::default()).unwrap(), "{}");
    }
}
