//! A device that a search has found.

use std::path::Path;
use std::sync::Arc;

use super::node::Node;
use crate::api::crd::{Device, DeviceAttributes, Mode};
use crate::core::node::injection::{DeviceNode, Injection};
use crate::core::node::naming::environment_name;
use crate::node::config::DeviceKind;

/// A device that was found. There may be a thousand, and twice as many while a search is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) kind: Arc<DeviceKind>,
    pub(super) mode: Mode,
    pub(super) attributes: DeviceAttributes,
    /// The nodes, the one that the device is known by first.
    pub(super) nodes: Box<[FoundNode]>,
    /// Its directory in sysfs, if it has one.
    pub(super) sysfs: Option<Box<Path>>,
}

/// A node of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundNode {
    /// The path by which it was found, relative to `/dev`.
    pub(super) path: Box<str>,
    /// Where a container sees it, if not at that path.
    pub(super) container_path: Option<Box<str>>,
    /// Whether it is this device's alone.
    pub(super) own: bool,
    pub(super) node: Node,
}

impl FoundNode {
    fn container_path(&self) -> String {
        match &self.container_path {
            Some(path) => path.to_string(),
            None => format!("/dev/{}", self.path),
        }
    }
}

impl Found {
    pub(super) fn new(
        kind: &Arc<DeviceKind>,
        name: &str,
        nodes: Vec<FoundNode>,
        attributes: DeviceAttributes,
        sysfs: Option<Box<Path>>,
    ) -> Self {
        Self {
            kind: Arc::clone(kind),
            mode: kind.doors.mode_of(name),
            attributes,
            nodes: nodes.into(),
            sysfs,
        }
    }

    /// The device as the inventory shows it.
    pub(super) fn device(&self, name: &str) -> Device {
        Device {
            name: name.to_owned(),
            kind: self.kind.name.clone(),
            mode: self.mode,
            attributes: self.attributes.clone(),
            unhealthy: None,
            shares: self.kind.shares,
        }
    }

    /// What a container gets: the nodes, a variable with the paths of those that are this device's alone, and what the
    /// operator gives besides.
    pub(super) fn injection(&self, name: &str) -> Injection {
        let own = self.nodes.iter().filter(|node| node.own);
        let paths: Vec<String> = own.map(FoundNode::container_path).collect();
        let mut environment = self.kind.environment.clone();
        environment.insert(environment_name(name), paths.join(","));
        let node = |node: &FoundNode| DeviceNode {
            host_path: node.node.host_path.to_string(),
            container_path: node.container_path(),
            permissions: self.kind.permissions.clone(),
        };
        Injection {
            device_nodes: self.nodes.iter().map(node).collect(),
            environment,
            mounts: self.kind.mounts.clone(),
            ..Injection::default()
        }
    }
}
