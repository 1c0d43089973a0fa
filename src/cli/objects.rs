//! Pods and CustomResourceDefinitions with the fields that the commands read, as in Kubernetes. Code to read the whole types would be in the
//! memory of every companion. DeviceTaintRules are here because feature `v1_34` of k8s-openapi lacks
//! their version.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{self, NodeSelector, PodResourceClaim, PodResourceClaimStatus, Toleration};
use k8s_openapi::api::resource::v1::DeviceTaint;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1 as extensions;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::ObjectMeta;
use kube::{CustomResource, Resource};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Resource, Serialize, Deserialize)]
#[resource(inherit = v1::Pod)]
pub struct PartialPod {
    pub metadata: ObjectMeta,
    pub spec: Option<PartialPodSpec>,
    pub status: Option<PartialPodStatus>,
}

impl PartialPod {
    /// The node that the pod is bound to.
    pub fn node_name(&self) -> Option<&str> {
        self.spec.as_ref()?.node_name.as_deref()
    }

    /// Whether all containers have ended for good.
    pub fn has_ended(&self) -> bool {
        let phase = self.status.as_ref().and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialPodSpec {
    pub node_name: Option<String>,
    pub node_selector: Option<BTreeMap<String, String>>,
    pub affinity: Option<PartialAffinity>,
    pub tolerations: Option<Vec<Toleration>>,
    pub service_account_name: Option<String>,
    pub resource_claims: Option<Vec<PodResourceClaim>>,
    pub init_containers: Option<Vec<PartialContainer>>,
    #[serde(default)]
    pub containers: Vec<PartialContainer>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialAffinity {
    pub node_affinity: Option<PartialNodeAffinity>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialNodeAffinity {
    pub required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialContainer {
    pub args: Option<Vec<String>>,
    pub env: Option<Vec<EnvVar>>,
    pub resources: Option<ResourceRequirements>,
    /// `Always` for an init container that stays.
    pub restart_policy: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EnvVar {
    pub name: String,
    /// The value, unless it comes from elsewhere.
    pub value: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ResourceRequirements {
    pub limits: Option<BTreeMap<String, Quantity>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialPodStatus {
    pub phase: Option<String>,
    pub reason: Option<String>,
    pub message: Option<String>,
    pub conditions: Option<Vec<Condition>>,
    /// The names of the claims made from templates.
    pub resource_claim_statuses: Option<Vec<PodResourceClaimStatus>>,
    pub container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerStatus {
    pub state: Option<ContainerState>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerState {
    pub waiting: Option<ContainerStateWaiting>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerStateWaiting {
    pub reason: Option<String>,
    pub message: Option<String>,
}

/// A condition of a pod or a definition.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Condition {
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    pub message: Option<String>,
}

#[derive(Clone, Debug, Default, Resource, Serialize, Deserialize)]
#[resource(inherit = extensions::CustomResourceDefinition)]
pub struct CustomResourceDefinition {
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: CustomResourceDefinitionSpec,
    pub status: Option<CustomResourceDefinitionStatus>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CustomResourceDefinitionSpec {
    #[serde(default)]
    pub versions: Vec<ServedVersion>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ServedVersion {
    pub name: String,
    #[serde(default)]
    pub served: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CustomResourceDefinitionStatus {
    pub conditions: Option<Vec<Condition>>,
}

impl CustomResourceDefinition {
    /// Whether the API server serves it.
    pub fn is_established(&self) -> bool {
        let status = self.status.iter();
        let mut conditions = status.flat_map(|status| status.conditions.iter().flatten());
        conditions.any(|condition| condition.type_ == "Established" && condition.status == "True")
    }
}

/// The spec of a DeviceTaintRule, which `resource.k8s.io/v1` has from 1.37 on: the scheduler adds its taint to the selected devices.
/// Upstream: `staging/src/k8s.io/api/resource/v1/types.go` at release-1.37.
#[derive(Clone, Debug, CustomResource, Serialize, Deserialize)]
#[kube(
    group = "resource.k8s.io",
    version = "v1",
    kind = "DeviceTaintRule",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct DeviceTaintRuleSpec {
    /// Without a selector, the rule selects no device.
    pub device_selector: Option<DeviceTaintSelector>,
    pub taint: DeviceTaint,
}

/// Selects devices that meet all its fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DeviceTaintSelector {
    pub driver: Option<String>,
    pub pool: Option<String>,
    pub device: Option<String>,
}
