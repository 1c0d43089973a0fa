//! A discovered device and its container edits.

use std::path::Path;
use std::sync::Arc;

use super::HostPaths;
use super::in_use::{holders, in_use};
use super::node::{Node, NodeKind};
use crate::api::crd::{Device, DeviceAttributes, Mode};
use crate::core::prepare::container_edits::{ContainerEdits, DeviceNode};
use crate::core::prepare::names::environment_name;
use crate::node::config::DeviceKind;

/// A discovered device. A node may have a thousand of them, and twice as many during a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) kind: Arc<DeviceKind>,
    pub(super) mode: Mode,
    pub(super) attributes: DeviceAttributes,
    /// The device nodes; the first one identifies the device.
    pub(super) nodes: Box<[FoundNode]>,
    /// Its sysfs directory, if any.
    pub(super) sysfs: Option<Box<Path>>,
}

/// A device node of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundNode {
    /// The path of discovery, relative to `/dev`.
    pub(super) path: Box<str>,
    /// The path in the container, if it differs from `/dev/{path}`.
    pub(super) container_path: Option<Box<str>>,
    /// Whether the node belongs to this device alone.
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
            mode: kind.apis.mode_of(name),
            attributes,
            nodes: nodes.into(),
            sysfs,
        }
    }

    /// The device for the inventory.
    pub(super) fn device(&self, name: &str) -> Device {
        Device {
            name: name.to_owned(),
            kind: self.kind.name.clone(),
            mode: self.mode,
            attributes: self.attributes.clone(),
            unhealthy: None,
            shares: self.kind.shares,
            device_numbers: self
                .nodes
                .iter()
                .filter(|node| node.own)
                .map(|node| node.node.numbers.into())
                .collect(),
        }
    }

    /// Describes the node's own use of a block device of this device, except paths in the kind's `dangerousPaths`. Mounts are
    /// checked only with `with_mounts`, since a search has already checked them.
    pub(super) fn used_by(&self, paths: &HostPaths, with_mounts: bool) -> Option<String> {
        let disks = self.nodes.iter().filter(|node| {
            node.node.numbers.kind == NodeKind::Block && !self.kind.dangerous_paths.contains(&*node.path)
        });
        let mut mounted = None;
        for disk in disks {
            let numbers = (disk.node.numbers.major, disk.node.numbers.minor);
            let path = &disk.path;
            let remedy = format!("put \"/dev/{path}\" into dangerousPaths of the kind if it is meant");
            if with_mounts {
                match mounted.get_or_insert_with(|| in_use(paths)) {
                    Ok(used) if used.contains(&numbers) => {
                        return Some(format!("/dev/{path} is mounted, or something on it is; {remedy}"));
                    }
                    Ok(_) => {}
                    Err(error) => {
                        return Some(format!(
                            "whether /dev/{path} is mounted cannot be seen ({error}); {remedy}"
                        ));
                    }
                }
            }
            let holders: Vec<String> = holders(&paths.sys, numbers).into_iter().collect();
            if !holders.is_empty() {
                let holders = holders.join(", ");
                return Some(format!("the kernel has {holders} on /dev/{path}; {remedy}"));
            }
        }
        None
    }

    /// Container edits: the device nodes, a variable with the paths of the device's own nodes, and the kind's mounts and
    /// environment.
    pub(super) fn container_edits(&self, name: &str) -> ContainerEdits {
        let own = self.nodes.iter().filter(|node| node.own);
        let paths: Vec<String> = own.map(FoundNode::container_path).collect();
        let mut environment = self.kind.environment.clone();
        environment.insert(environment_name(name), paths.join(","));
        let node = |node: &FoundNode| DeviceNode {
            host_path: node.node.host_path.to_string(),
            container_path: node.container_path(),
            permissions: self.kind.permissions.clone(),
        };
        ContainerEdits {
            device_nodes: self.nodes.iter().map(node).collect(),
            environment,
            mounts: self.kind.mounts.clone(),
            ..ContainerEdits::default()
        }
    }
}
