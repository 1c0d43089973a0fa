//! Pods and CustomResourceDefinitions with the fields that the commands read. Code to read the whole types would be in the memory of
//! every companion.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{self, PodResourceClaim, PodResourceClaimStatus};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1 as extensions;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::{Deserialize, Serialize};

/// A pod.
#[derive(Clone, Debug, Default, Resource, Serialize, Deserialize)]
#[resource(inherit = v1::Pod)]
pub struct PartialPod {
    /// Standard object metadata.
    pub metadata: ObjectMeta,
    /// The spec.
    pub spec: Option<PartialPodSpec>,
    /// The status.
    pub status: Option<PartialPodStatus>,
}

/// Its spec.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialPodSpec {
    /// The node to which the pod is bound.
    pub node_name: Option<String>,
    /// The account of the pod.
    pub service_account_name: Option<String>,
    /// The claims of the pod.
    pub resource_claims: Option<Vec<PodResourceClaim>>,
    /// The init containers.
    pub init_containers: Option<Vec<PartialContainer>>,
    /// The containers.
    #[serde(default)]
    pub containers: Vec<PartialContainer>,
}

/// A container of a pod.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialContainer {
    /// The arguments.
    pub args: Option<Vec<String>>,
    /// The variables.
    pub env: Option<Vec<EnvVar>>,
    /// The resources.
    pub resources: Option<ResourceRequirements>,
    /// `Always` for an init container that stays.
    pub restart_policy: Option<String>,
}

/// A variable of a container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EnvVar {
    /// The name.
    pub name: String,
    /// The value, unless it comes from elsewhere.
    pub value: Option<String>,
}

/// The resources of a container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ResourceRequirements {
    /// The limits by resource.
    pub limits: Option<BTreeMap<String, Quantity>>,
}

/// The status of a pod.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialPodStatus {
    /// The phase.
    pub phase: Option<String>,
    /// Why the pod is in this phase.
    pub reason: Option<String>,
    /// The same as text.
    pub message: Option<String>,
    /// The conditions.
    pub conditions: Option<Vec<Condition>>,
    /// The names of the claims made from templates.
    pub resource_claim_statuses: Option<Vec<PodResourceClaimStatus>>,
    /// The status of each container.
    pub container_statuses: Option<Vec<ContainerStatus>>,
}

/// The status of a container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerStatus {
    /// Its state.
    pub state: Option<ContainerState>,
}

/// The state of a container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerState {
    /// Set while the container waits.
    pub waiting: Option<ContainerStateWaiting>,
}

/// Why a container waits.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerStateWaiting {
    /// CamelCase reason.
    pub reason: Option<String>,
    /// The same as text.
    pub message: Option<String>,
}

/// A condition of a pod or a definition.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Condition {
    /// The type.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Why, as text.
    pub message: Option<String>,
}

/// A CustomResourceDefinition.
#[derive(Clone, Debug, Default, Resource, Serialize, Deserialize)]
#[resource(inherit = extensions::CustomResourceDefinition)]
pub struct CustomResourceDefinition {
    /// Standard object metadata.
    pub metadata: ObjectMeta,
    /// The spec.
    #[serde(default)]
    pub spec: CustomResourceDefinitionSpec,
    /// The status.
    pub status: Option<CustomResourceDefinitionStatus>,
}

/// Its spec.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CustomResourceDefinitionSpec {
    /// The versions.
    #[serde(default)]
    pub versions: Vec<ServedVersion>,
}

/// A version of a definition.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ServedVersion {
    /// The name.
    pub name: String,
    /// Whether the API server serves it.
    #[serde(default)]
    pub served: bool,
}

/// Its status.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CustomResourceDefinitionStatus {
    /// The conditions.
    pub conditions: Option<Vec<Condition>>,
}

impl CustomResourceDefinition {
    /// Whether the API server serves it.
    pub fn is_established(&self) -> bool {
        let conditions = self
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        conditions
            .clone()
            .any(|condition| condition.type_ == "Established" && condition.status == "True")
    }
}
