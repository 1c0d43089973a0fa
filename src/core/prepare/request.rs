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
    /// The device's id: its name in the inventory, with a dot and a number if several containers may have it.
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

/// An extended resource, and how its devices are handed out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtendedResource {
    /// The kind of its devices.
    pub kind: String,
    /// Whether devices of the kind have [`Mode::Both`](crate::api::crd::Mode::Both), so that it matters what else holds them.
    pub also_by_claims: bool,
    /// Whether containers get a device by its CDI name, in a file that the companion keeps, instead of by its device nodes. Kubelet
    /// 1.27 ignores CDI names without a word, and kubelet 1.28 unless its feature gate `DevicePluginCDIDevices` is on.
    pub cdi_devices: bool,
    /// Whether a device is looked at before each start of a container that has it. A container whose device has gone then waits
    /// for it instead of starting without.
    pub pre_start_check: bool,
}

impl ExtendedResource {
    /// The devices of a kind, in the simplest way.
    pub fn of_kind(kind: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            ..Self::default()
        }
    }
}
