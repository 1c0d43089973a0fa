//! `resource.k8s.io/v1alpha2` as served by Kubernetes 1.27 to 1.30, and the part of a pod that refers to claims.
//!
//! k8s-openapi no longer has this version, so the types are written by hand and are exact on the wire. They are for
//! reading: drayman changes these objects with patches only, so it never drops a field of a newer server.
//! Upstream: `staging/src/k8s.io/api/resource/v1alpha2/types.go` at release-1.30.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The API group of all kinds in this module except Pod.
pub const GROUP: &str = "resource.k8s.io";
/// The API version of this module.
pub const VERSION: &str = "v1alpha2";

/// Maximum length of `potentialNodes` and `unsuitableNodes` (`PodSchedulingNodeListMaxSize`; the KEP says 256, the code 128).
pub const NODE_LIST_MAX: usize = 128;
/// Maximum length of `reservedFor` (`ResourceClaimReservedForMaxSize`).
pub const RESERVED_FOR_MAX: usize = 32;
/// Maximum number of resource handles in one allocation (`AllocationResultResourceHandlesMaxSize`).
pub const RESOURCE_HANDLES_MAX: usize = 32;
/// Maximum size in bytes of a resource handle's `data` (`ResourceHandleDataMaxSize`).
pub const RESOURCE_HANDLE_MAX: usize = 16 * 1024;
/// The only node field that a selector's `matchFields` supports.
pub const NODE_NAME_FIELD: &str = "metadata.name";
/// The claim controller's annotation on a claim made from a template: the name in `pod.spec.resourceClaims` (1.28 and later).
pub const POD_CLAIM_NAME_ANNOTATION: &str = "resource.kubernetes.io/pod-claim-name";

/// Implements the traits that kube's blanket implementation of `kube::Resource` needs. Unlike kube's `CustomResource`, it
/// generates no CRD.
macro_rules! resource {
    ($kind:ident, $plural:literal, $scope:ty) => {
        impl k8s_openapi::Resource for $kind {
            const API_VERSION: &'static str = "resource.k8s.io/v1alpha2";
            const GROUP: &'static str = GROUP;
            const VERSION: &'static str = VERSION;
            const KIND: &'static str = stringify!($kind);
            const URL_PATH_SEGMENT: &'static str = $plural;
            type Scope = $scope;
        }

        impl k8s_openapi::Metadata for $kind {
            type Ty = ObjectMeta;

            fn metadata(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn metadata_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

/// Implements `kube::Resource` for a type that has only a part of `$whole`, by its metadata.
macro_rules! partial_resource {
    ([$($parameter:tt)*] $part:ty, $whole:ty, $self:ident => $metadata:expr, $metadata_mut:expr) => {
        impl<$($parameter)*> kube::Resource for $part {
            type DynamicType = ();
            type Scope = <$whole as kube::Resource>::Scope;

            fn kind((): &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::kind(&())
            }

            fn group((): &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::group(&())
            }

            fn version((): &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::version(&())
            }

            fn plural((): &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::plural(&())
            }

            fn meta(&$self) -> &kube::api::ObjectMeta {
                $metadata
            }

            fn meta_mut(&mut $self) -> &mut kube::api::ObjectMeta {
                $metadata_mut
            }
        }
    };
}

pub(crate) use partial_resource;

resource!(ResourceClass, "resourceclasses", ClusterResourceScope);
resource!(ResourceClaim, "resourceclaims", NamespaceResourceScope);
resource!(
    ResourceClaimTemplate,
    "resourceclaimtemplates",
    NamespaceResourceScope
);
resource!(
    PodSchedulingContext,
    "podschedulingcontexts",
    NamespaceResourceScope
);

/// Defines the driver, and the parameters, for the claims that name it. Created by cluster operators.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClass {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The driver that allocates and deallocates claims of this class.
    pub driver_name: String,
    /// Parameters that only an operator may set; the driver reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters_ref: Option<ResourceClassParametersReference>,
    /// Nodes to consider for an unallocated claim of this class; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suitable_nodes: Option<NodeSelector>,
    /// True if the scheduler itself allocates (1.30 and later); controllers ignore such claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured_parameters: Option<bool>,
}

/// The parameters object of a class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClassParametersReference {
    /// API group of the object; absent for the core group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_group: Option<String>,
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// Namespace of the object; absent for cluster-scoped ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// A user's request for resources, and its status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResourceClaim {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The request; immutable as a whole.
    pub spec: ResourceClaimSpec,
    /// The status; written only through the `status` subresource.
    #[serde(default)]
    pub status: ResourceClaimStatus,
    /// The value of [`POD_CLAIM_NAME_ANNOTATION`] if it was removed from the metadata: for an allocated claim without other annotations,
    /// the controller keeps this string instead of a map, which takes half a kilobyte. Not on the wire.
    #[serde(skip)]
    pub pod_claim_name: Option<Box<str>>,
}

/// The spec of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClaimSpec {
    /// The class, which names the driver.
    pub resource_class_name: String,
    /// Parameters of this claim, in its own namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters_ref: Option<ResourceClaimParametersReference>,
    /// When to allocate; the server fills in the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation_mode: Option<AllocationMode>,
}

/// When a claim is allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AllocationMode {
    /// When the first pod that uses it is scheduled: the server's default.
    #[default]
    WaitForFirstConsumer,
    /// As soon as the claim exists.
    Immediate,
}

/// The parameters object of a claim, in the claim's own namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClaimParametersReference {
    /// API group of the object; absent for the core group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_group: Option<String>,
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
}

/// The status of a claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClaimStatus {
    /// The driver that allocated the claim; the class may have been changed or deleted since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_name: Option<String>,
    /// The allocation. Immutable once set; may be cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<AllocationResult>,
    /// The current users of the claim: at most [`RESERVED_FOR_MAX`], and more than one only if the allocation is shareable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved_for: Vec<ResourceClaimConsumerReference>,
    /// Asks the driver to deallocate the claim; cleared together with the allocation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deallocation_requested: bool,
}

/// The allocation of a claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocationResult {
    /// One opaque record per driver, passed to that driver's kubelet plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_handles: Vec<ResourceHandle>,
    /// Nodes that can use the allocation; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_on_nodes: Option<NodeSelector>,
    /// Whether several consumers may use the claim at the same time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shareable: bool,
}

impl AllocationResult {
    /// Returns an allocation with one handle for the kubelet plugin of `driver_name`, for any node and one consumer at a time.
    pub fn new(driver_name: impl Into<String>, data: impl Into<String>) -> Self {
        Self {
            resource_handles: vec![ResourceHandle {
                driver_name: Some(driver_name.into()),
                data: Some(data.into()),
                structured_data: None,
            }],
            ..Self::default()
        }
    }

    /// Restricts the allocation to nodes with these names.
    #[must_use]
    pub fn on_nodes(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        // One term per node: the API server accepts one value in a field selector.
        let only = |name: String| NodeSelectorTerm {
            match_fields: Some(vec![NodeSelectorRequirement {
                key: NODE_NAME_FIELD.to_owned(),
                operator: "In".to_owned(),
                values: Some(vec![name]),
            }]),
            match_expressions: None,
        };
        self.available_on_nodes = Some(NodeSelector {
            node_selector_terms: names.into_iter().map(Into::into).map(only).collect(),
        });
        self
    }

    /// Allows several consumers at the same time: all pods that name the claim, up to [`RESERVED_FOR_MAX`].
    #[must_use]
    pub fn shareable(mut self) -> Self {
        self.shareable = true;
        self
    }

    /// Checks the API server's rules that a driver can violate (`validateAllocationResult` at release-1.30).
    pub fn check(&self) -> Result<(), String> {
        let count = self.resource_handles.len();
        if count > RESOURCE_HANDLES_MAX {
            return Err(format!(
                "{count} resource handles; the API allows at most {RESOURCE_HANDLES_MAX}"
            ));
        }
        for (number, handle) in self.resource_handles.iter().enumerate() {
            if handle.driver_name.as_deref().is_none_or(str::is_empty) {
                return Err(format!("resource handle {number} names no driver"));
            }
            let size = handle.data.as_deref().unwrap_or_default().len();
            if size > RESOURCE_HANDLE_MAX {
                return Err(format!(
                    "resource handle {number} has {size} bytes of data; the API allows at most {RESOURCE_HANDLE_MAX}"
                ));
            }
        }
        let nodes = self.available_on_nodes.as_ref();
        if nodes.is_some_and(|selector| selector.node_selector_terms.is_empty()) {
            let error = "availableOnNodes has no terms: omit it if all nodes can use the allocation";
            return Err(error.to_owned());
        }
        Ok(())
    }
}

/// An opaque record for one driver's kubelet plugin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceHandle {
    /// The driver whose kubelet plugin gets the data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_name: Option<String>,
    /// The data: at most [`RESOURCE_HANDLE_MAX`] bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Set instead of `data` if the scheduler allocated the claim (1.30); kept unchanged, since it is never ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured_data: Option<Value>,
}

/// A user of a claim: so far always a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClaimConsumerReference {
    /// API group of the consumer; absent for pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_group: Option<String>,
    /// Plural name of the consumer's kind: `pods`.
    pub resource: String,
    /// Name of the consumer.
    pub name: String,
    /// Uid of the consumer, which distinguishes it from a later one with the same name.
    pub uid: String,
}

impl ResourceClaimConsumerReference {
    /// Returns the reference to a pod.
    pub fn pod(name: &str, uid: &str) -> Self {
        Self {
            api_group: None,
            resource: "pods".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }
}

/// The template from which the claim controller makes a claim for each pod that names it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResourceClaimTemplate {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The claims' contents; immutable.
    pub spec: ResourceClaimTemplateSpec,
}

/// The contents of claims made from a template.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResourceClaimTemplateSpec {
    /// Labels and annotations for the claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<ObjectMeta>,
    /// The spec of the claims.
    pub spec: ResourceClaimSpec,
}

/// Negotiation between the scheduler and the drivers about the node of one pod; it has the pod's name and is owned by it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodSchedulingContext {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The scheduler's part.
    #[serde(default)]
    pub spec: PodSchedulingContextSpec,
    /// The drivers' part.
    #[serde(default)]
    pub status: PodSchedulingContextStatus,
}

/// The scheduler's side of a [`PodSchedulingContext`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSchedulingContextSpec {
    /// The node that the scheduler has selected; empty before that.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub selected_node: String,
    /// Other nodes on which the pod could run: at most [`NODE_LIST_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub potential_nodes: Vec<String>,
}

/// The drivers' side of a [`PodSchedulingContext`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSchedulingContextStatus {
    /// One entry for each claim of the pod that a driver has evaluated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_claims: Vec<ResourceClaimSchedulingStatus>,
}

/// The result of a driver's evaluation of one claim of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClaimSchedulingStatus {
    /// The name of the entry in `pod.spec.resourceClaims`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Nodes on which the claim cannot be allocated: at most [`NODE_LIST_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unsuitable_nodes: Vec<String>,
}

/// A pod, limited to the fields that concern claims. The spec keeps all others in `other`, so that a driver can read them.
#[derive(Clone, Debug, Default, PartialEq, Resource, Serialize, Deserialize)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
pub struct Pod {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The part of the spec that concerns claims.
    #[serde(default)]
    pub spec: PodSpec,
    /// The part of the status that concerns claims.
    #[serde(default)]
    pub status: PodStatus,
}

/// The part of a pod's spec that concerns claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// The node to which the pod is bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// The pod's priority, resolved by the server from its priority class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// The claims of the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_claims: Vec<PodResourceClaim>,
    /// Every other field, as the server sent it.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// One claim of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResourceClaim {
    /// The name by which the pod's containers refer to it.
    pub name: String,
    /// The source of the claim.
    #[serde(default)]
    pub source: ClaimSource,
    /// Every other field, as the server sent it: API servers of Kubernetes 1.31 and later have the fields of `source` here.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// The source of a pod's claim: one of the two fields is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    /// The name of an existing claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_claim_name: Option<String>,
    /// The name of a template from which a claim is made for this pod alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_claim_template_name: Option<String>,
}

/// The part of a pod's status that concerns claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// The phase of the pod: `Succeeded` and `Failed` are final.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The names of the claims made from templates (1.28 and later).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_claim_statuses: Vec<PodResourceClaimStatus>,
}

/// The name of the claim made for one entry of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodResourceClaimStatus {
    /// The name of the entry in `pod.spec.resourceClaims`.
    pub name: String,
    /// The claim's name; absent if no claim is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_claim_name: Option<String>,
}

/// The part of a finalizer after the driver's name (`controller.go` of `k8s.io/dynamic-resource-allocation`).
pub const FINALIZER_SUFFIX: &str = "/deletion-protection";

/// Returns the finalizer with which a driver keeps a claim until its devices are released.
pub fn finalizer_of(driver_name: &str) -> String {
    format!("{driver_name}{FINALIZER_SUFFIX}")
}

/// The owner reference of an object's controller, if it has one.
pub fn controller_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata
        .owner_references
        .as_ref()?
        .iter()
        .find(|owner| owner.controller == Some(true))
}

/// The pod that owns an object, if its controller is a pod. A claim may also belong to a Job or to a custom resource; any pod may then
/// use it.
pub fn pod_owner_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    controller_of(metadata).filter(|owner| owner.kind == "Pod" && owner.api_version == "v1")
}

impl AllocationResult {
    /// Whether a resource handle is for this driver's kubelet plugin. A handle without a driver name belongs to the driver in the
    /// claim's status.
    pub fn has_handle_of(&self, driver: &str) -> bool {
        let mut handles = self.resource_handles.iter();
        handles.any(|handle| handle.driver_name.as_deref() == Some(driver))
    }
}

impl ResourceClaimStatus {
    /// The allocation, if it contains something of `driver`: it is recorded with the driver's name, or has a resource handle of the
    /// driver. The API server permits changes of `driverName` while a pod uses the claim, and kubelet uses the handle's driver.
    pub fn allocation_of(&self, driver: &str) -> Option<&AllocationResult> {
        let is_recorded = self.driver_name.as_deref() == Some(driver);
        let allocation = self.allocation.as_ref();
        allocation.filter(|allocation| is_recorded || allocation.has_handle_of(driver))
    }
}

/// Name of the claim label `<driver>/node`, after the driver's name and a slash. It lets programs on a node watch only the claims of that
/// node.
pub const NODE_LABEL: &str = "node";
/// The value on a claim that is allocated without a selected node. It is not a valid node name.
pub const LABEL_OF_ANY_NODE: &str = "Any";
/// Maximum length of a label value.
const VALUE_MAX: usize = 63;
/// The length of the suffix: a hyphen and a checksum in hexadecimal digits.
const CHECKSUM_LENGTH: usize = 9;

/// Returns the label value for a node: the node's name, or a prefix of it with a checksum of the whole name, since a label value
/// has a lower length limit than a node name.
pub fn label_of_node(node_name: &str) -> String {
    if node_name.len() <= VALUE_MAX {
        return node_name.to_owned();
    }
    let start: String = node_name.chars().take(VALUE_MAX - CHECKSUM_LENGTH).collect();
    let start = start.trim_end_matches(['-', '.']);
    format!("{start}-{:08x}", crc32fast::hash(node_name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_belongs_to_the_driver_of_its_status_or_handle() {
        let of = |name: &str, handle: &str| {
            let status = ResourceClaimStatus {
                driver_name: Some(name.to_owned()),
                allocation: Some(AllocationResult::new(handle, "{}")),
                ..ResourceClaimStatus::default()
            };
            status.allocation_of("ours").is_some()
        };
        assert!(of("ours", "ours") && of("ours", "theirs") && of("renamed", "ours"));
        assert!(!of("theirs", "theirs") && !of("theirs", ""));
        assert_eq!(ResourceClaimStatus::default().allocation_of("ours"), None);
    }

    #[test]
    fn only_a_pod_of_the_core_group_is_a_pod() {
        let owned = |api_version: &str, kind: &str, controller: bool| {
            let owner = OwnerReference {
                api_version: api_version.to_owned(),
                kind: kind.to_owned(),
                controller: Some(controller),
                ..OwnerReference::default()
            };
            let metadata = ObjectMeta {
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            };
            pod_owner_of(&metadata).is_some()
        };
        assert!(owned("v1", "Pod", true));
        assert!(!owned("v1", "Pod", false) && !owned("batch/v1", "Job", true));
        assert!(!owned("example.com/v1", "Pod", true));
    }

    #[test]
    fn node_labels_are_unique_for_names_of_any_length() {
        assert_eq!(label_of_node("node-a.example.com"), "node-a.example.com");
        let long = |last: char| format!("{}{last}", "node-".repeat(40));
        assert!(label_of_node(&long('a')).len() <= VALUE_MAX);
        assert_ne!(label_of_node(&long('a')), label_of_node(&long('b')));
    }
}
