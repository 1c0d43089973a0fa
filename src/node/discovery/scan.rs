//! A single search for the devices of all kinds. It names the devices by [`device_name`], and rejects a device whose name is taken.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

use super::device::{
    DevRoot, DevicePathError, FoundByName, FoundDevice, FoundNode, HostPaths, described, in_use, is_memory,
    remedy,
};
use super::sysfs::{SysRoot, is_gone};
use crate::api::crd::{DEVICES_MAX, DeviceNodeKind, DeviceNumber};
use crate::core::discovery::attributes::Attributes;
use crate::core::names::device_name;
use crate::node::config::{DeviceKind, NodeConfiguration, Source};

/// Longest path in bytes that the inventory can show.
const PATH_MAX: usize = 256;
/// Maximum number of reported problems, so that a pattern that matches everything does not fill the log.
const PROBLEMS_MAX: usize = 100;
/// Maximum number of listed candidates.
const CANDIDATES_MAX: usize = 8192;

/// A path, device or pattern that a kind may describe.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Name of the kind.
    pub kind: String,
    /// The path, the USB or PCI device, or a pattern without matches.
    pub candidate: String,
    /// Name of the resulting device; absent if the candidate was rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Why it was rejected; empty if it was not.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Whether the operator probably meant this candidate to be a device, but it was rejected.
    pub problem: bool,
}

/// The result of a search.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) found: FoundByName,
    /// Whether something could not be read, so that more devices may exist.
    pub(super) is_incomplete: bool,
    /// The candidates, in the order of the configuration.
    pub(super) candidates: Vec<Candidate>,
    /// The directories that were read: without a uevent, the result changes only if one of them does.
    pub(super) directories: BTreeSet<PathBuf>,
    problems: usize,
}

/// A candidate with its nodes, before they are checked.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) identity: String,
    /// Its nodes. The first one identifies a device that is found by its path.
    pub(super) members: Vec<Member>,
    pub(super) key: Option<String>,
    /// Its sysfs directory, if it was found there.
    pub(super) sysfs: Option<PathBuf>,
    /// Whether the configuration names it literally, so that a missing device is a problem.
    pub(super) literal: bool,
}

/// A node of a draft.
#[derive(Debug)]
pub(super) struct Member {
    /// The pattern or subsystem in the configuration.
    pub(super) entry: String,
    /// Path below `/dev`.
    pub(super) path: String,
    /// Whether the node belongs to this device alone.
    pub(super) own: bool,
    /// The device number according to sysfs.
    pub(super) expected: Option<DeviceNumber>,
}

/// Searches for the devices of all kinds, in the order of the configuration. A device that matches several kinds belongs to the
/// first. Of a kind that cannot be searched completely, the devices of the search `before` remain, unless they are gone.
pub(super) fn scan(configuration: &NodeConfiguration, paths: &HostPaths, before: &FoundByName) -> Scan {
    let root = match DevRoot::new(&paths.dev) {
        Ok(root) => root,
        Err(error) => {
            let candidate = Candidate {
                kind: String::new(),
                candidate: paths.dev.display().to_string(),
                device: None,
                why: error.to_string(),
                problem: true,
            };
            let is_incomplete = error.is_unread();
            let is_kept = |device: &FoundDevice| is_incomplete && configuration.kinds.contains(&device.kind);
            let kept = before.iter().filter(|(_, device)| is_kept(device));
            return Scan {
                found: kept
                    .map(|(name, device)| (name.clone(), device.clone()))
                    .collect(),
                is_incomplete,
                candidates: vec![candidate],
                ..Scan::default()
            };
        }
    };
    let mut scanner = Scanner {
        root,
        sys: SysRoot::new(&paths.sys),
        paths,
        before,
        in_use: None,
        paths_seen: BTreeMap::new(),
        own: NodesSeen::default(),
        exclusive: NodesSeen::default(),
        shared: NodesSeen::default(),
        is_unread: false,
        scan: Scan::default(),
    };
    for kind in &configuration.kinds {
        match &kind.source {
            Source::Paths(patterns) => scanner.paths(kind, patterns),
            Source::Groups(groups) => scanner.groups(kind, groups),
            Source::Usb(usb) => scanner.usb(kind, usb),
            Source::Pci(pci) => scanner.pci(kind, pci),
        }
        if std::mem::take(&mut scanner.is_unread) {
            scanner.scan.is_incomplete = true;
            scanner.keep(kind);
        }
    }
    scanner.scan
}

pub(super) struct Scanner<'a> {
    pub(super) root: DevRoot,
    pub(super) sys: Option<SysRoot>,
    paths: &'a HostPaths,
    /// The devices that the last search found.
    before: &'a FoundByName,
    /// Loaded for the first node with access to a disk; an error applies to all of them.
    in_use: Option<io::Result<BTreeSet<(u32, u32)>>>,
    /// The kind of each path that belongs to one device.
    paths_seen: BTreeMap<Box<str>, Arc<DeviceKind>>,
    /// The nodes that belong to one device.
    own: NodesSeen,
    /// Those of devices without shares.
    exclusive: NodesSeen,
    /// The nodes that several devices share.
    shared: NodesSeen,
    /// Whether something of the kind could not be read.
    is_unread: bool,
    pub(super) scan: Scan,
}

/// Nodes of the devices found so far.
#[derive(Default)]
struct NodesSeen {
    /// The path of each device number.
    paths: BTreeMap<DeviceNumber, Box<str>>,
    /// The path of a partition, by the number of its disk.
    partitions: BTreeMap<DeviceNumber, Box<str>>,
    /// The path of a character device, by the disks that it sends commands to.
    commands: BTreeMap<DeviceNumber, Box<str>>,
}

impl NodesSeen {
    fn insert(&mut self, node: &FoundNode) {
        self.paths.insert(node.node.number, node.path.clone());
        if let Some(disk) = node.disk {
            self.partitions.insert(disk, node.path.clone());
        }
        if node.node.number.kind == DeviceNodeKind::Character {
            let commands = node.block_numbers().map(|disk| (disk, node.path.clone()));
            self.commands.extend(commands);
        }
    }

    /// Describes the data that a node has in common with one of these; `None` if there is none.
    fn overlap(&self, node: &FoundNode) -> Option<String> {
        let number = node.node.number;
        if let Some(path) = self.paths.get(&number) {
            return Some(format!(
                "is the same device as /dev/{path} ({})",
                described(number)
            ));
        }
        if let Some(path) = node.disk.and_then(|disk| self.paths.get(&disk)) {
            return Some(format!("is a partition of /dev/{path}"));
        }
        if let Some(path) = self.partitions.get(&number) {
            return Some(format!("has the partition /dev/{path}"));
        }
        if number.kind == DeviceNodeKind::Character {
            let maps = [&self.paths, &self.partitions, &self.commands];
            let path = node
                .block_numbers()
                .find_map(|disk| maps.iter().find_map(|map| map.get(&disk)))?;
            return Some(format!("sends commands to the disk of /dev/{path}"));
        }
        let path = [Some(number), node.disk]
            .into_iter()
            .flatten()
            .find_map(|disk| self.commands.get(&disk))?;
        Some(format!("receives the commands of /dev/{path}"))
    }
}

/// Why a draft is rejected.
pub(super) struct Rejection {
    why: String,
    problem: bool,
    /// Whether something could not be read, so that the device may still exist.
    is_unread: bool,
}

impl Rejection {
    pub(super) fn problem(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            problem: true,
            is_unread: false,
        }
    }

    pub(super) fn quiet(why: impl Into<String>) -> Self {
        Self {
            problem: false,
            ..Self::problem(why)
        }
    }
}

impl From<DevicePathError> for Rejection {
    fn from(error: DevicePathError) -> Self {
        Self {
            is_unread: error.is_unread(),
            ..Self::problem(error.to_string())
        }
    }
}

impl From<io::Error> for Rejection {
    fn from(error: io::Error) -> Self {
        Self {
            is_unread: true,
            ..Self::problem(format!("cannot be read: {error}"))
        }
    }
}

impl Scanner<'_> {
    /// Adds a draft as a device, or records why it is rejected. `shown` is its name for display.
    pub(super) fn take(&mut self, kind: &Arc<DeviceKind>, shown: String, draft: Result<Draft, Rejection>) {
        match draft.and_then(|draft| self.check(kind, draft)) {
            Ok((name, found)) => {
                self.record(Candidate {
                    kind: kind.name.clone(),
                    candidate: shown,
                    device: Some(name.clone()),
                    why: String::new(),
                    problem: false,
                });
                self.add(name, found);
            }
            Err(rejection) => self.refuse(kind, shown, rejection),
        }
    }

    fn add(&mut self, name: String, found: FoundDevice) {
        for node in &found.nodes {
            if !node.own {
                self.shared.insert(node);
                continue;
            }
            self.paths_seen.insert(node.path.clone(), Arc::clone(&found.kind));
            self.own.insert(node);
            if is_exclusive(&found.kind) {
                self.exclusive.insert(node);
            }
        }
        self.scan.found.insert(name, found);
    }

    /// Adds the devices of a kind that the last search found and this one did not, or not with all nodes, unless they are gone.
    fn keep(&mut self, kind: &DeviceKind) {
        let before = self.before;
        for (name, device) in before.iter().filter(|(_, device)| *device.kind == *kind) {
            let found = self.scan.found.get(name);
            let is_found = |node: &&FoundNode| found.is_some_and(|found| found.nodes.contains(node));
            let (seen, unseen): (Vec<_>, Vec<_>) = device.nodes.iter().partition(is_found);
            let is_same = match found {
                Some(found) => *found.kind == *kind && found.nodes.len() == seen.len(),
                None => self.scan.found.len() < DEVICES_MAX,
            };
            if is_same && !unseen.is_empty() && unseen.into_iter().all(|node| self.is_kept(kind, node)) {
                self.add(name.clone(), device.clone());
            }
        }
    }

    fn is_kept(&mut self, kind: &DeviceKind, node: &FoundNode) -> bool {
        !node.has_changed(&self.root)
            && self
                .check_available(kind, node)
                .map_or_else(|rejection| rejection.is_unread, |()| true)
    }

    /// Records a rejected candidate.
    pub(super) fn refuse(&mut self, kind: &DeviceKind, candidate: String, rejection: Rejection) {
        let Rejection {
            why,
            problem,
            is_unread,
        } = rejection;
        self.is_unread |= is_unread;
        self.record(Candidate {
            kind: kind.name.clone(),
            candidate,
            device: None,
            why,
            problem,
        });
    }

    fn record(&mut self, candidate: Candidate) {
        if candidate.problem {
            self.scan.problems += 1;
            if self.scan.problems > PROBLEMS_MAX {
                return;
            }
        }
        if self.scan.candidates.len() < CANDIDATES_MAX {
            self.scan.candidates.push(candidate);
        }
    }

    fn check(&mut self, kind: &Arc<DeviceKind>, draft: Draft) -> Result<(String, FoundDevice), Rejection> {
        let name = device_name(&draft.identity);
        let mut nodes = Vec::new();
        for member in &draft.members {
            let node = self.identify(kind, member, draft.literal)?;
            nodes.push((member, node));
        }
        if self.scan.found.contains_key(&name) {
            return Err(Rejection::problem(format!(
                "its name {name:?} is taken by another device"
            )));
        }
        if self.scan.found.len() >= DEVICES_MAX {
            return Err(Rejection::problem(format!(
                "this node already has {DEVICES_MAX} devices, the maximum"
            )));
        }
        let nodes = with_container_paths(kind, &name, draft.key.as_deref(), nodes)?;
        let mut attributes = Attributes::default();
        let mut sysfs = draft.sysfs;
        if let Some(first) = nodes.first() {
            if let Some(sys) = &self.sys {
                if sysfs.is_none() {
                    sysfs = sys.directory_of(first.node.number)?;
                }
                if let Some(directory) = &sysfs {
                    sys.describe(directory, &mut attributes)?;
                }
            }
            let own = nodes.iter().filter(|node| node.own);
            let host: Vec<&str> = own.map(|node| &*node.node.host_path).collect();
            attributes
                .text("path", Some(&format!("/dev/{}", first.path)))
                .list("nodes", &host)
                .int("major", Some(first.node.number.major.into()))
                .int("minor", Some(first.node.number.minor.into()));
        }
        let found = FoundDevice {
            kind: Arc::clone(kind),
            mode: kind.apis.mode_of(&name),
            attributes: attributes.finish(),
            nodes: nodes.into(),
            sysfs: sysfs.map(PathBuf::into_boxed_path),
        };
        Ok((name, found))
    }

    /// Identifies one node, and rejects it if it belongs to another device or is dangerous.
    fn identify(
        &mut self,
        kind: &DeviceKind,
        member: &Member,
        literal: bool,
    ) -> Result<FoundNode, Rejection> {
        let path = &member.path;
        if path.len() + "/dev/".len() > PATH_MAX || path.chars().any(char::is_control) {
            return Err(Rejection::problem(format!(
                "its path has more than {PATH_MAX} bytes or a control character"
            )));
        }
        let node = self.root.identify(path).map_err(|error| Rejection {
            // A pattern may match directories and files besides devices.
            problem: literal || !matches!(error, DevicePathError::NoDevice),
            ..error.into()
        })?;
        let number = node.number;
        if let Some(expected) = member.expected
            && expected != number
        {
            return Err(Rejection::problem(format!(
                "/dev/{path} is {}, but sysfs says {}; it has just changed, or /dev and /sys belong to different hosts",
                described(number),
                described(expected)
            )));
        }
        let disk = match &self.sys {
            Some(sys) => sys.disk_of(number)?,
            None => None,
        };
        let blocks = match (number.kind, &self.sys) {
            (DeviceNodeKind::Block, _) => vec![(number.major, number.minor)],
            (DeviceNodeKind::Character, Some(sys)) => sys.disks_behind(number)?,
            (DeviceNodeKind::Character, None) => Vec::new(),
        };
        let node = FoundNode {
            path: path.as_str().into(),
            container_path: None,
            own: member.own,
            node,
            disk,
            blocks,
        };
        self.check_available(kind, &node)?;
        Ok(node)
    }

    /// Rejects a node that belongs to another device or is dangerous.
    fn check_available(&mut self, kind: &DeviceKind, node: &FoundNode) -> Result<(), Rejection> {
        let path = &node.path;
        if node.own
            && let Some(first) = self.paths_seen.get(path).map(|kind| &kind.name)
        {
            return Err(if *first == kind.name {
                Rejection::quiet(format!(
                    "/dev/{path} already belongs to another device of this kind"
                ))
            } else {
                Rejection::problem(format!(
                    "/dev/{path} belongs to kind {first:?}, which comes first in the configuration"
                ))
            });
        }
        // Others may share the node of a device with shares.
        let others = if node.own { &self.own } else { &self.exclusive };
        if let Some(overlap) = others.overlap(node) {
            let which = if node.own { "" } else { "the shared node " };
            return Err(Rejection::problem(format!(
                "{which}/dev/{path} {overlap}, which is already offered"
            )));
        }
        // The devices that share the node would have this one too.
        if node.own
            && is_exclusive(kind)
            && let Some(overlap) = self.shared.overlap(node)
        {
            return Err(Rejection::problem(format!(
                "/dev/{path} {overlap}, which other devices share; remove it from shared, or do not offer it"
            )));
        }
        if !kind.dangerous_paths.contains(&**path) {
            self.refuse_dangerous(node)?;
        }
        Ok(())
    }

    /// Rejects memory, I/O ports, block devices that the node uses, and character devices that send commands to these.
    fn refuse_dangerous(&mut self, node: &FoundNode) -> Result<(), Rejection> {
        let remedy = remedy(&node.path);
        if is_memory(node.node.number) {
            return Err(Rejection::problem(format!(
                "gives access to physical memory or I/O ports; {remedy}"
            )));
        }
        if node.blocks.is_empty() {
            return Ok(());
        }
        match self.in_use.get_or_insert_with(|| in_use(self.paths)) {
            Ok(used) if node.blocks.iter().any(|block| used.contains(block)) => {
                Err(Rejection::problem(format!("{}; {remedy}", node.is_mounted())))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(Rejection {
                is_unread: !is_gone(error),
                ..Rejection::problem(format!(
                    "whether its disk is mounted is unknown ({error}); {remedy}"
                ))
            }),
        }
    }
}

fn is_exclusive(kind: &DeviceKind) -> bool {
    kind.shares.is_none_or(|shares| shares <= 1)
}

/// Chooses the container path of each node.
fn with_container_paths(
    kind: &DeviceKind,
    device: &str,
    key: Option<&str>,
    nodes: Vec<(&Member, FoundNode)>,
) -> Result<Vec<FoundNode>, Rejection> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut taken: BTreeMap<String, &str> = BTreeMap::new();
    let mut placed = Vec::with_capacity(nodes.len());
    for (member, mut node) in nodes {
        let number = counts.entry(&member.entry).or_default();
        let own_path = format!("/dev/{}", member.path);
        let container_path = match kind.container_paths.get(&member.entry) {
            None => own_path.clone(),
            Some(template) => template
                .replace("{device}", device)
                .replace("{key}", key.unwrap_or_default())
                .replace("{n}", &number.to_string()),
        };
        *number += 1;
        // A key is a part of a name, such as a serial number, which may be "..".
        let mut parts = container_path.split('/').skip(1);
        if parts.any(|part| matches!(part, "" | "." | "..")) {
            return Err(Rejection::problem(format!(
                "/dev/{} would be {container_path} in a container, which has an empty component, \".\" or \"..\"; change containerPaths",
                member.path
            )));
        }
        if let Some(other) = taken.insert(container_path.clone(), &member.path) {
            return Err(Rejection::problem(format!(
                "/dev/{other} and /dev/{} would both be {container_path} in a container; write {{n}} into containerPaths",
                member.path
            )));
        }
        node.container_path = (container_path != own_path).then(|| container_path.into());
        placed.push(node);
    }
    Ok(placed)
}
