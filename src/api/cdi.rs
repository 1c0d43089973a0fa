//! The Container Device Interface as far as drayman writes it: device nodes, mounts and environment, and never a hook.
//!
//! Upstream: `SPEC.md` of `cncf-tags/container-device-interface`. Version 0.5.0 is the lowest that has `hostPath` and device
//! names that begin with a digit; a runtime refuses versions that it does not know, so a newer one is not written.

use serde::{Deserialize, Serialize};

/// The version that is written.
pub const VERSION: &str = "0.5.0";

/// One file: the devices of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// [`VERSION`].
    pub cdi_version: String,
    /// `<vendor>/<class>`.
    pub kind: String,
    /// The devices: at least one.
    pub devices: Vec<Device>,
}

/// A device in the sense of CDI: what a container gets that is given its id, `<kind>=<name>`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Unique among the devices of the kind, in all files.
    pub name: String,
    /// What the container gets.
    pub container_edits: ContainerEdits,
}

/// What a container gets: not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment, each `NAME=value`.
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

/// A device node. Type and numbers are left to the runtime, which reads them from the node itself.
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
