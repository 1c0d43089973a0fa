//! A device that a search has found.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::node::Node;
use crate::api::crd::{Device, DeviceAttributes, Mode};
use crate::core::node::injection::{DeviceNode, Injection, Mount};
use crate::core::node::naming::environment_name;
use crate::node::config::{DeviceKind, Probe};

/// A device that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) kind: String,
    pub(super) mode: Mode,
    pub(super) shares: Option<u32>,
    pub(super) attributes: DeviceAttributes,
    /// The nodes, the one that the device is known by first.
    pub(super) nodes: Vec<FoundNode>,
    /// Its directory in sysfs, if it has one.
    pub(super) sysfs: Option<PathBuf>,
    pub(super) mounts: Vec<Mount>,
    pub(super) environment: BTreeMap<String, String>,
    pub(super) probe: Probe,
}

/// A node of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundNode {
    /// The path by which it was found, relative to `/dev`.
    pub(super) path: String,
    /// Where a container sees it.
    pub(super) container_path: String,
    pub(super) permissions: String,
    /// Whether it is this device's alone.
    pub(super) own: bool,
    pub(super) node: Node,
}

impl Found {
    pub(super) fn new(
        kind: &DeviceKind,
        name: &str,
        nodes: Vec<FoundNode>,
        attributes: DeviceAttributes,
        sysfs: Option<PathBuf>,
    ) -> Self {
        Self {
            kind: kind.name.clone(),
            mode: kind.doors.mode_of(name),
            shares: kind.shares,
            attributes,
            nodes,
            sysfs,
            mounts: kind.mounts.clone(),
            environment: kind.environment.clone(),
            probe: kind.probe.clone(),
        }
    }

    /// The device as the inventory shows it.
    pub(super) fn device(&self, name: &str) -> Device {
        Device {
            name: name.to_owned(),
            kind: self.kind.clone(),
            mode: self.mode,
            attributes: self.attributes.clone(),
            unhealthy: None,
            shares: self.shares,
        }
    }

    /// What a container gets: the nodes, a variable with the paths of those that are this device's alone, and what the
    /// operator gives besides.
    pub(super) fn injection(&self, name: &str) -> Injection {
        let own = self.nodes.iter().filter(|node| node.own);
        let paths: Vec<&str> = own.map(|node| node.container_path.as_str()).collect();
        let mut environment = self.environment.clone();
        environment.insert(environment_name(name), paths.join(","));
        let node = |node: &FoundNode| DeviceNode {
            host_path: node.node.host_path.clone(),
            container_path: node.container_path.clone(),
            permissions: node.permissions.clone(),
        };
        Injection {
            device_nodes: self.nodes.iter().map(node).collect(),
            environment,
            mounts: self.mounts.clone(),
            ..Injection::default()
        }
    }
}
