//! What a container gets for a device: made once per device from the operator's configuration, rendered twice, as a CDI
//! spec for claims and as a `ContainerAllocateResponse` for the device plugin API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a container gets. Nothing in it comes from an object that a user wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Injection {
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Environment, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
}

/// A device node in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Absolute path on the node.
    pub host_path: String,
    /// Absolute path in the container.
    pub container_path: String,
    /// What the container may do with it, a non-empty subset of `rwm` in that order: read, write, make nodes.
    pub permissions: String,
}
