//! The part of the Container Device Interface that drayman writes: device nodes, mounts and environment, but no hooks.
//!
//! Upstream: `SPEC.md` of `cncf-tags/container-device-interface`. Version 0.5.0 is the lowest with `hostPath` and device
//! names that begin with a digit; runtimes reject unknown versions, so no newer one is written.

use serde::{Deserialize, Serialize};

/// The CDI version of written files.
pub const VERSION: &str = "0.5.0";

/// A CDI file: the devices of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// The CDI version, [`VERSION`].
    pub cdi_version: String,
    /// The kind, `<vendor>/<class>`.
    pub kind: String,
    /// The devices, at least one.
    pub devices: Vec<Device>,
}

/// A CDI device: the edits applied to a container that requests the id `<kind>=<name>`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// The name, unique among the devices of the kind in all files.
    pub name: String,
    /// The edits that the device causes.
    pub container_edits: ContainerEdits,
}

/// Container edits; not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment variables, each `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A bind mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Absolute path on the node.
    pub host_path: String,
    /// Absolute path in the container.
    pub container_path: String,
    /// Options of `mount(8)`.
    pub options: Vec<String>,
}

/// A device node. The runtime reads type and numbers from the node itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Absolute path in the container.
    pub path: String,
    /// Absolute path on the node.
    pub host_path: String,
    /// A subset of `rwm`.
    pub permissions: String,
}
