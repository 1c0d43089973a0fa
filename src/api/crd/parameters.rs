//! What operators say about a class and users about a claim: DeviceClassParameters and DeviceClaimParameters.
//!
//! Selectors, constraints and allocation modes have the shape and the meaning of `resource.k8s.io/v1`.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Selectors of one class or of one request, at most.
pub const SELECTORS_MAX: usize = 16;
/// Bytes of one expression, at most, as in `resource.k8s.io/v1`.
pub const EXPRESSION_MAX: usize = 10 * 1024;
/// Constraints of one claim, at most.
pub const CONSTRAINTS_MAX: usize = 8;

/// What a ResourceClass of the built-in driver stands for. Cluster-scoped, made by operators.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "DeviceClassParameters",
    doc = "What a ResourceClass of the built-in driver stands for: a kind of device. Made by operators.",
    plural = "deviceclassparameters",
    category = "drayman",
    derive = "PartialEq",
    printcolumn(name = "Kind", type_ = "string", json_path = ".spec.kind"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceClassParametersSpec {
    /// The kind of device, as the nodes' configuration names it.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub kind: String,
    /// What each device of the class must match; all must hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub selectors: Vec<DeviceSelector>,
    /// Which of several groups of devices with an equal attribute is taken, or which of several shared devices, if more than
    /// one would do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PlacementPolicy>,
}

/// Which of several groups of devices with an equal attribute a claim with constraints gets, and which of several shared devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum PlacementPolicy {
    /// The group with the fewest free devices that are enough, so that large groups stay whole; the device with the fewest
    /// shares left. The default.
    #[default]
    Packing,
    /// The group with the most free devices; the device with the most shares left.
    Spreading,
}

/// Which devices of its class a claim wants. In the claim's namespace, made by users.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "drayman.dev",
    version = "v1alpha1",
    kind = "DeviceClaimParameters",
    doc = "Which devices of its class a ResourceClaim wants. In the claim's namespace, made by users.",
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
    /// What must hold between the devices of the claim; all must hold.
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
    /// Whether `count` says how many, or all are wanted that match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation_mode: Option<AllocationMode>,
    /// How many devices; one if it is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64), extend("format" = "int32"))]
    pub count: Option<u32>,
    /// What each device of the request must match besides the selectors of the class; all must hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub selectors: Vec<DeviceSelector>,
}

/// How many devices a request wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum AllocationMode {
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
    /// The condition.
    pub cel: CelDeviceSelector,
}

/// A condition on one device, in the Common Expression Language.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CelDeviceSelector {
    /// True for the devices that are wanted: `device.attributes["drayman.dev"].vendor == "0403"`.
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

/// What must hold between devices of the claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceConstraint {
    /// The requests whose devices are meant; all of the claim's if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub requests: Vec<String>,
    /// The attribute, with its domain, that all of them have with the same value: `drayman.dev/numaNode`.
    #[schemars(length(min = 3, max = 96), regex(pattern = r"^[^/]+/[^/]+$"))]
    pub match_attribute: String,
}
