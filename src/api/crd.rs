//! Our own kinds, `drayman.dev/v1alpha1`. The files under `crds/` are made from these types by `drayman crds`.

#![expect(unreachable_pub, reason = "kube's derive wraps the spec in a way that rustc takes for unreachable")]

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The API group of our kinds.
pub const GROUP: &str = "drayman.dev";
/// The version of our kinds.
pub const VERSION: &str = "v1alpha1";
/// Devices in one [`NodeInventory`], at most: with every attribute at its limit the object stays below the 1.5 MiB that etcd takes.
pub const DEVICES_MAX: usize = 1024;
/// Devices in one request of a claim, at most.
pub const COUNT_MAX: u32 = 64;
/// Requests in one claim, at most.
pub const REQUESTS_MAX: usize = 16;

/// What a node has. Cluster-scoped, one per node and driver, written only by that node's companion and only on change;
/// it says nothing of who holds a device.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "NodeInventory",
    plural = "nodeinventories",
    shortname = "ninv",
    category = "drayman",
    status = "NodeInventoryStatus",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".spec.driverName"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Devices", type_ = "integer", json_path = ".status.devices"),
    printcolumn(name = "Unhealthy", type_ = "integer", json_path = ".status.unhealthy"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = ("self.driverName == oldSelf.driverName", "driverName is immutable"))]
#[x_kube(validation = ("self.nodeName == oldSelf.nodeName", "nodeName is immutable"))]
pub struct NodeInventorySpec {
    /// The driver that serves these devices.
    #[schemars(length(min = 1, max = 63))]
    pub driver_name: String,
    /// The node that has these devices.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// The uid of the Node object, which tells the node from a later one of the same name.
    #[schemars(length(min = 1, max = 64))]
    pub node_uid: String,
    /// The devices, in the order of their names.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub devices: Vec<Device>,
}

/// How an inventory stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeInventoryStatus {
    /// How many devices there are.
    #[serde(default)]
    pub devices: u32,
    /// How many of them are unhealthy.
    #[serde(default)]
    pub unhealthy: u32,
    /// The generation of the object that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`: the companion runs and serves kubelet. A companion that stops cleanly sets it to False.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// The condition of a [`NodeInventory`] that says whether its companion serves kubelet.
pub const READY: &str = "Ready";

/// One device, in the shape of `resource.k8s.io/v1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Unique on the node and stable over reboots: a DNS label made from what identifies the device.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// The kind of the node's configuration that found it.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub kind: String,
    /// Through which door of kubelet the device may leave the node.
    #[serde(default)]
    pub mode: Mode,
    /// Facts about the device, by qualified name (`drayman.dev/path`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub attributes: BTreeMap<String, AttributeValue>,
    /// Why the device must not be given to anybody now; absent if it is healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub unhealthy: Option<String>,
}

/// Through which door of kubelet the devices of a kind leave the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Through ResourceClaims.
    #[default]
    Claims,
    /// Through the device plugin API, as an extended resource in `resources.limits`.
    ExtendedResource,
}

/// The value of an attribute: exactly one field is set, as in `resource.k8s.io/v1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("minProperties" = 1, "maxProperties" = 1))]
pub struct AttributeValue {
    /// A text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub string: Option<String>,
    /// A whole number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int: Option<i64>,
    /// A truth value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bool: Option<bool>,
    /// A semantic version (semver.org 2.0.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub version: Option<String>,
}

impl AttributeValue {
    /// A text.
    pub fn string(value: impl Into<String>) -> Self {
        Self { string: Some(value.into()), ..Self::default() }
    }

    /// A whole number.
    pub fn int(value: i64) -> Self {
        Self { int: Some(value), ..Self::default() }
    }
}

/// What a ResourceClass of the built-in driver stands for. Cluster-scoped, made by operators.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "DeviceClassParameters",
    plural = "deviceclassparameters",
    category = "drayman",
    derive = "PartialEq",
    printcolumn(name = "Kind", type_ = "string", json_path = ".spec.kind"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceClassParametersSpec {
    /// The kind of device, as the nodes' configuration names it.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub kind: String,
}

/// Which devices of its class a claim wants. In the claim's namespace, made by users.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "DeviceClaimParameters",
    plural = "deviceclaimparameters",
    category = "drayman",
    namespaced,
    derive = "PartialEq",
    printcolumn(name = "Requests", type_ = "string", json_path = ".spec.requests[*].name"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceClaimParametersSpec {
    /// What is wanted; the claim is allocated only if all of it is to be had on one node.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub requests: Vec<DeviceRequest>,
}

/// A number of devices of the class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceRequest {
    /// Unique within the claim.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// How many devices.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub count: u32,
}

fn one() -> u32 {
    1
}

/// Every definition that the API server needs, in the order in which `drayman crds` prints them.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![NodeInventory::crd(), DeviceClassParameters::crd(), DeviceClaimParameters::crd()]
}
