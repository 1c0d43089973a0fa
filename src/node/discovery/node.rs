//! Resolves paths below `/dev` and identifies device nodes.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use crate::api::crd::{DeviceNodeKind, DeviceNumber};

/// The device number at a host path, with the host's `/dev` mounted at `dev`; `None` if there is no device node.
pub(in crate::node) fn device_number(dev: &Path, host_path: &str) -> Option<DeviceNumber> {
    let node = DevRoot::new(dev)
        .ok()?
        .look(host_path.strip_prefix("/dev/")?)
        .ok()?;
    Some(node.numbers.into())
}

/// The directory where the host's `/dev` is visible.
pub(super) struct DevRoot {
    /// Canonical path, without symbolic links.
    root: PathBuf,
}

/// Identity of a device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// Path of the node on the host, without symbolic links.
    pub(super) host_path: Box<str>,
    pub(super) numbers: Numbers,
}

/// Type, major and minor of a device node: nodes with equal numbers are the same device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Numbers {
    pub(super) kind: NodeKind,
    pub(super) major: u32,
    pub(super) minor: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NodeKind {
    Character,
    Block,
}

/// Why a path is not a usable device node.
#[derive(Debug, thiserror::Error)]
pub(super) enum NodeError {
    #[error("cannot be looked at: {0}")]
    Io(#[from] io::Error),
    #[error("leads out of /dev, to {0:?}")]
    Outside(PathBuf),
    #[error("is not a character or block device")]
    NoDevice,
    #[error("has a name that is not UTF-8")]
    NotUtf8,
}

impl DevRoot {
    pub(super) fn new(root: &Path) -> Result<Self, NodeError> {
        Ok(Self {
            root: root.canonicalize()?,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.root
    }

    /// Identifies the device node at a path relative to the root. Symbolic links are followed within the root.
    pub(super) fn look(&self, relative: &str) -> Result<Node, NodeError> {
        let real = self.resolve(&self.root.join(relative))?;
        // Does not follow links: a node that was replaced by a link meanwhile is detected.
        let numbers = Numbers::of(&real.symlink_metadata()?).ok_or(NodeError::NoDevice)?;
        let below = real
            .strip_prefix(&self.root)
            .map_err(|_| NodeError::Outside(real.clone()))?;
        let below = below.to_str().ok_or(NodeError::NotUtf8)?;
        Ok(Node {
            host_path: format!("/dev/{below}").into(),
            numbers,
        })
    }

    /// Resolves a path, which must stay inside the root. An absolute link target below `/dev` refers to the host's `/dev`, even if
    /// that is mounted elsewhere.
    pub(super) fn resolve(&self, path: &Path) -> Result<PathBuf, NodeError> {
        let real = match path.read_link() {
            Ok(target) if target.starts_with("/dev") => {
                let below = target.strip_prefix("/dev").unwrap_or(&target);
                self.root.join(below).canonicalize()?
            }
            _ => path.canonicalize()?,
        };
        if real.starts_with(&self.root) {
            Ok(real)
        } else {
            Err(NodeError::Outside(real))
        }
    }
}

impl Numbers {
    pub(super) fn of(metadata: &Metadata) -> Option<Self> {
        let file_type = metadata.file_type();
        let kind = if file_type.is_char_device() {
            NodeKind::Character
        } else if file_type.is_block_device() {
            NodeKind::Block
        } else {
            return None;
        };
        Some(Self {
            kind,
            major: major(metadata.rdev()),
            minor: minor(metadata.rdev()),
        })
    }

    /// Whether this is the machine's memory or I/O ports: `mem`, `kmem` and `port` in the kernel's
    /// `Documentation/admin-guide/devices.txt`.
    pub(super) fn is_memory(self) -> bool {
        self.kind == NodeKind::Character && self.major == 1 && matches!(self.minor, 1 | 2 | 4)
    }
}

impl From<Numbers> for DeviceNumber {
    fn from(numbers: Numbers) -> Self {
        Self {
            kind: match numbers.kind {
                NodeKind::Character => DeviceNodeKind::Character,
                NodeKind::Block => DeviceNodeKind::Block,
            },
            major: numbers.major,
            minor: numbers.minor,
        }
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            NodeKind::Character => "character",
            NodeKind::Block => "block",
        };
        write!(f, "{kind} device {}:{}", self.major, self.minor)
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.numbers, self.host_path)
    }
}
