//! `resource.k8s.io/v1alpha2` as Kubernetes 1.27 to 1.30 serve it, and the part of a pod that names claims.
//!
//! k8s-openapi no longer has this version, so the types are written by hand and are exact on the wire. They are for
//! reading: drayman changes these objects with patches only, so a field that a newer server adds is never lost.
//! Upstream: `staging/src/k8s.io/api/resource/v1alpha2/types.go` at release-1.30.

pub mod label;
mod owner;

pub use owner::pod_owner_of;

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The API group of every kind here but the pod.
pub const GROUP: &str = "resource.k8s.io";
/// The version of the group that this module speaks.
pub const VERSION: &str = "v1alpha2";

/// Nodes in `potentialNodes` and in `unsuitableNodes`, at most (`PodSchedulingNodeListMaxSize`; the KEP says 256, the code 128).
pub const NODE_LIST_MAX: usize = 128;
/// Consumers in `reservedFor`, at most (`ResourceClaimReservedForMaxSize`).
pub const RESERVED_FOR_MAX: usize = 32;
/// Resource handles in one allocation, at most (`AllocationResultResourceHandlesMaxSize`).
pub const RESOURCE_HANDLES_MAX: usize = 32;
/// Bytes in one resource handle's `data`, at most (`ResourceHandleDataMaxSize`).
pub const RESOURCE_HANDLE_MAX: usize = 16 * 1024;
/// The one field of a node that a selector's `matchFields` knows.
pub const NODE_NAME_FIELD: &str = "metadata.name";
/// The annotation that the claim controller puts on a claim made from a template: the entry of the pod it is for (1.28 and later).
pub const POD_CLAIM_NAME_ANNOTATION: &str = "resource.kubernetes.io/pod-claim-name";

/// Makes a hand-written struct usable with `kube::Api` without suggesting that we publish its schema.
macro_rules! resource {
    ($kind:ident, $group:expr, $version:expr, $plural:literal, $scope:ty) => {
        impl kube::Resource for $kind {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($kind).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                $version.into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(
    ResourceClass,
    GROUP,
    VERSION,
    "resourceclasses",
    ClusterResourceScope
);
resource!(
    ResourceClaim,
    GROUP,
    VERSION,
    "resourceclaims",
    NamespaceResourceScope
);
resource!(
    ResourceClaimTemplate,
    GROUP,
    VERSION,
    "resourceclaimtemplates",
    NamespaceResourceScope
);
resource!(
    PodSchedulingContext,
    GROUP,
    VERSION,
    "podschedulingcontexts",
    NamespaceResourceScope
);
resource!(Pod, "", "v1", "pods", NamespaceResourceScope);

/// Says which driver serves the claims that name it, and with which parameters. Made by cluster operators.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClass {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The driver that allocates and deallocates claims of this class.
    pub driver_name: String,
    /// Parameters that only an operator may set, read by the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters_ref: Option<ResourceClassParametersReference>,
    /// Nodes that may be considered at all for an unallocated claim of this class; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suitable_nodes: Option<NodeSelector>,
    /// True if the scheduler itself allocates (1.30 and later): such claims are left alone by a controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured_parameters: Option<bool>,
}

/// Where the parameters of a class are.
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

/// A user's wish for resources, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResourceClaim {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The wish; immutable as a whole.
    pub spec: ResourceClaimSpec,
    /// What came of it; written through the `status` subresource only.
    #[serde(default)]
    pub status: ResourceClaimStatus,
    /// What [`POD_CLAIM_NAME_ANNOTATION`] says, where that annotation has been left out of the metadata: of an allocated claim that
    /// has no other, the controller keeps this text instead of a map, which takes half a kilobyte. Not on the wire.
    #[serde(skip)]
    pub pod_claim_name: Option<Box<str>>,
}

/// The wish of a claim.
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

/// Where the parameters of a claim are: an object in the claim's own namespace.
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

/// What came of a claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClaimStatus {
    /// The driver that allocated it; the class may have been changed or deleted since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_name: Option<String>,
    /// What was allocated. Immutable once set; may be cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<AllocationResult>,
    /// Who may use the claim now: at most [`RESERVED_FOR_MAX`], and more than one only if the allocation is shareable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved_for: Vec<ResourceClaimConsumerReference>,
    /// Set when the claim shall be deallocated by its driver; cleared together with the allocation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deallocation_requested: bool,
}

/// What was allocated for a claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocationResult {
    /// One opaque record per driver, handed to that driver's kubelet plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_handles: Vec<ResourceHandle>,
    /// Nodes that can reach what was allocated; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_on_nodes: Option<NodeSelector>,
    /// Whether several consumers may use the claim at the same time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shareable: bool,
}

impl AllocationResult {
    /// An allocation with one handle for `driver_name`'s plugin on the node, usable on every node and by one consumer at a time.
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

    /// Usable on the nodes of these names only.
    #[must_use]
    pub fn on_nodes(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        // One term for each node: the API server takes one value in a field selector.
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

    /// Usable by several consumers at the same time: all pods that name the claim, up to [`RESERVED_FOR_MAX`].
    #[must_use]
    pub fn shareable(mut self) -> Self {
        self.shareable = true;
        self
    }

    /// What the API server would refuse about it (`validateAllocationResult` at release-1.30), as far as a driver can get it wrong.
    pub fn check(&self) -> Result<(), String> {
        let count = self.resource_handles.len();
        if count > RESOURCE_HANDLES_MAX {
            return Err(format!(
                "{count} resource handles, of which the API takes {RESOURCE_HANDLES_MAX}"
            ));
        }
        for (number, handle) in self.resource_handles.iter().enumerate() {
            if handle.driver_name.as_deref().is_none_or(str::is_empty) {
                return Err(format!("resource handle {number} names no driver"));
            }
            let size = handle.data.as_deref().unwrap_or_default().len();
            if size > RESOURCE_HANDLE_MAX {
                return Err(format!(
                    "resource handle {number} has {size} bytes of data, of which the API takes {RESOURCE_HANDLE_MAX}"
                ));
            }
        }
        let nodes = self.available_on_nodes.as_ref();
        if nodes.is_some_and(|selector| selector.node_selector_terms.is_empty()) {
            return Err("availableOnNodes has no term: leave it out if every node will do".to_owned());
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
    /// Set instead of `data` when the scheduler allocated (1.30); kept as it is, since it is never ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured_data: Option<Value>,
}

/// Someone who may use a claim: so far always a pod.
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
    /// Uid of the consumer, which tells it from a later one of the same name.
    pub uid: String,
}

impl ResourceClaimConsumerReference {
    /// The pod of this name and uid.
    pub fn pod(name: &str, uid: &str) -> Self {
        Self {
            api_group: None,
            resource: "pods".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }
}

/// From which the claim controller makes a claim for each pod that names it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResourceClaimTemplate {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What the claims shall look like; immutable.
    pub spec: ResourceClaimTemplateSpec,
}

/// What the claims made from a template shall look like.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResourceClaimTemplateSpec {
    /// Labels and annotations for the claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<ObjectMeta>,
    /// The spec of the claims.
    pub spec: ResourceClaimSpec,
}

/// The talk between the scheduler and the drivers about one pod; has the pod's name and is owned by it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodSchedulingContext {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What the scheduler says.
    #[serde(default)]
    pub spec: PodSchedulingContextSpec,
    /// What the drivers say.
    #[serde(default)]
    pub status: PodSchedulingContextStatus,
}

/// The scheduler's side of a [`PodSchedulingContext`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSchedulingContextSpec {
    /// The node that the scheduler wants; empty while it has not chosen.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub selected_node: String,
    /// Nodes that the pod could run on otherwise: at most [`NODE_LIST_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub potential_nodes: Vec<String>,
}

/// The drivers' side of a [`PodSchedulingContext`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSchedulingContextStatus {
    /// One entry for each claim of the pod that a driver has judged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_claims: Vec<ResourceClaimSchedulingStatus>,
}

/// A driver's verdict on one claim of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceClaimSchedulingStatus {
    /// The entry of `pod.spec.resourceClaims`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Nodes on which the claim cannot be allocated: at most [`NODE_LIST_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unsuitable_nodes: Vec<String>,
}

/// A pod as far as claims are concerned. What is not named here is kept in `other`, so that a driver can read it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pod {
    /// Standard object metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What was asked for.
    #[serde(default)]
    pub spec: PodSpec,
    /// How it stands.
    #[serde(default)]
    pub status: PodStatus,
}

/// The part of a pod's spec that concerns claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// The node the pod is bound to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// The pod's priority, as resolved by the server from its priority class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// The claims that the pod names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_claims: Vec<PodResourceClaim>,
    /// Every other field, as the server sent it.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// One claim that a pod names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResourceClaim {
    /// The name by which the pod's containers refer to it.
    pub name: String,
    /// Where the claim comes from.
    #[serde(default)]
    pub source: ClaimSource,
    /// Every other field, as the server sent it: API servers of Kubernetes 1.31 and later have the fields of `source` here.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Where a pod's claim comes from: one of the two is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    /// A claim that exists on its own, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_claim_name: Option<String>,
    /// A template from which a claim is made for this pod alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_claim_template_name: Option<String>,
}

/// The part of a pod's status that concerns claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// Where the pod is in its life: `Succeeded` and `Failed` are final.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The names of the claims made from templates (1.28 and later).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_claim_statuses: Vec<PodResourceClaimStatus>,
}

/// The name of the claim that was made for one entry of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodResourceClaimStatus {
    /// The entry of `pod.spec.resourceClaims`.
    pub name: String,
    /// The claim's name; absent if no claim is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_claim_name: Option<String>,
}

/// The name of a driver's finalizer after the driver's name (`controller.go` of `k8s.io/dynamic-resource-allocation`).
pub const FINALIZER_SUFFIX: &str = "/deletion-protection";

/// The finalizer by which a driver keeps a claim until its devices are given back.
pub fn finalizer_of(driver_name: &str) -> String {
    format!("{driver_name}{FINALIZER_SUFFIX}")
}

/// The owner reference that says which controller owns an object, if one does.
pub fn controller_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata
        .owner_references
        .as_ref()?
        .iter()
        .find(|owner| owner.controller == Some(true))
}
