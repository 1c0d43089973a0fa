//! Parameters of classes (by operators) and claims (by users): DeviceClassParameters and DeviceClaimParameters.
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
    /// Whether `count` says how many, or all are wanted that match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation_mode: Option<AllocationMode>,
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
