//! What kubelet asks for, as it arrives, and what it is told when it cannot have it.

/// A claim as kubelet names it at prepare. Nothing in it has been checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimToPrepare {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Uid of the claim: a UUID if the caller is honest.
    pub uid: String,
    /// The resource handle that the controller wrote.
    pub resource_handle: String,
}

/// A claim as kubelet names it at unprepare. Nothing in it has been checked, and the claim may be gone from the API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimToUnprepare {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Uid of the claim: a UUID if the caller is honest.
    pub uid: String,
}

/// A device of an extended resource, as ListAndWatch shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginDevice {
    /// The device's id: its name in the inventory, at most 63 characters.
    pub id: String,
    /// Whether kubelet may grant it.
    pub healthy: bool,
    /// The NUMA nodes that it is near to; empty if that is not known.
    pub numa_nodes: Vec<i64>,
}

/// Which node this is: what a resource handle must name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The name of the Node object.
    pub name: String,
    /// The uid of the Node object; absent until the API server has told it once.
    pub uid: Option<String>,
}
