//! Kubelet's requests, unvalidated, and the types of the answers.

/// A claim in kubelet's Prepare request, unvalidated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimToPrepare {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Uid of the claim: a UUID if the request is valid.
    pub uid: String,
    /// The resource handle that the controller wrote.
    pub resource_handle: String,
}

/// A claim in kubelet's Unprepare request, unvalidated. The claim may no longer exist in the API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimToUnprepare {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Uid of the claim: a UUID if the request is valid.
    pub uid: String,
}

/// A device of an extended resource, as sent in ListAndWatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginDevice {
    /// The device plugin id: the inventory name, followed by a dot and a number if several containers may hold the device.
    pub id: String,
    /// Whether kubelet may grant it.
    pub healthy: bool,
    /// The nearby NUMA nodes; empty if unknown.
    pub numa_nodes: Vec<i64>,
}

/// The identity of this node, which a resource handle must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Name of the Node object.
    pub name: String,
    /// Uid of the Node object; `None` until the API server has reported it once.
    pub uid: Option<String>,
}

/// An extended resource and how its devices are passed to containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtendedResource {
    /// The kind of its devices.
    pub kind: String,
    /// Whether devices of the kind have [`Mode::Both`](crate::api::crd::Mode::Both), so that claims may hold them, too.
    pub also_by_claims: bool,
    /// Whether containers get a device by its CDI name, with a CDI file that the companion maintains, instead of by its device nodes.
    /// Kubelet 1.27 silently ignores CDI names, as does kubelet 1.28 without the feature gate `DevicePluginCDIDevices`.
    pub cdi_devices: bool,
    /// Whether PreStartContainer checks each device before a container starts. A container whose device is missing then waits instead of
    /// starting without it.
    pub pre_start_check: bool,
}

impl ExtendedResource {
    /// The resource of a kind with default settings.
    pub fn of_kind(kind: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            ..Self::default()
        }
    }
}
