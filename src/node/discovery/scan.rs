//! A single search for the devices of all kinds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::HostPaths;
use super::found::{Found, FoundNode};
use super::in_use::in_use;
use super::node::{DevRoot, Node, NodeError, NodeKind, Numbers};
use super::report::Candidate;
use super::sysfs::SysRoot;
use crate::api::crd::DEVICES_MAX;
use crate::core::discovery::attributes::Attributes;
use crate::core::prepare::names::device_name;
use crate::node::config::{DeviceKind, NodeConfiguration, Source};

/// Longest path in bytes that the inventory can show.
const PATH_MAX: usize = 256;
/// Maximum number of reported problems, so that a pattern that matches everything does not fill the log.
const PROBLEMS_MAX: usize = 100;
/// Maximum number of listed candidates.
const CANDIDATES_MAX: usize = 8192;

/// The result of a search.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// The devices by name.
    pub(super) found: BTreeMap<String, Found>,
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
    /// Name for display.
    pub(super) shown: String,
    /// Its nodes; the first one identifies the device.
    pub(super) members: Vec<Member>,
    pub(super) key: Option<String>,
    pub(super) attributes: Attributes,
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
    pub(super) expected: Option<Numbers>,
}

/// Searches for the devices of all kinds, in the order of the configuration. A device that matches several kinds belongs to the
/// first.
pub(super) fn scan(configuration: &NodeConfiguration, paths: &HostPaths) -> Scan {
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
            return Scan {
                candidates: vec![candidate],
                ..Scan::default()
            };
        }
    };
    let mut search = Searching {
        root,
        sys: SysRoot::new(&paths.sys),
        paths,
        in_use: None,
        paths_seen: BTreeMap::new(),
        numbers_seen: BTreeMap::new(),
        scan: Scan::default(),
    };
    for kind in &configuration.kinds {
        match &kind.source {
            Source::Paths(patterns) => search.paths(kind, patterns),
            Source::Groups(groups) => search.groups(kind, groups),
            Source::Usb(usb) => search.usb(kind, usb),
            Source::Pci(pci) => search.pci(kind, pci),
        }
    }
    search.scan
}

pub(super) struct Searching<'a> {
    pub(super) root: DevRoot,
    pub(super) sys: Option<SysRoot>,
    paths: &'a HostPaths,
    /// Loaded for the first block device; an error applies to all of them.
    in_use: Option<Result<BTreeSet<(u32, u32)>, String>>,
    /// The kind of each path.
    paths_seen: BTreeMap<Box<str>, Arc<DeviceKind>>,
    /// The path of each device number.
    numbers_seen: BTreeMap<Numbers, Box<str>>,
    pub(super) scan: Scan,
}

/// Why a draft is rejected.
pub(super) struct Refused {
    why: String,
    problem: bool,
}

impl Refused {
    pub(super) fn problem(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            problem: true,
        }
    }

    pub(super) fn quiet(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            problem: false,
        }
    }
}

impl Searching<'_> {
    /// Adds a draft as a device, or records why it is rejected.
    pub(super) fn take(&mut self, kind: &Arc<DeviceKind>, draft: Draft) {
        let shown = draft.shown.clone();
        match self.judge(kind, draft) {
            Ok((name, found)) => {
                for node in &found.nodes {
                    self.paths_seen.insert(node.path.clone(), Arc::clone(kind));
                    if node.own {
                        self.numbers_seen.insert(node.node.numbers, node.path.clone());
                    }
                }
                self.note(Candidate {
                    kind: kind.name.clone(),
                    candidate: shown,
                    device: Some(name.clone()),
                    why: String::new(),
                    problem: false,
                });
                self.scan.found.insert(name, found);
            }
            Err(refused) => self.refuse(kind, shown, refused),
        }
    }

    /// Records a rejected candidate.
    pub(super) fn refuse(&mut self, kind: &DeviceKind, candidate: String, refused: Refused) {
        let Refused { why, problem } = refused;
        self.note(Candidate {
            kind: kind.name.clone(),
            candidate,
            device: None,
            why,
            problem,
        });
    }

    fn note(&mut self, candidate: Candidate) {
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

    fn judge(&mut self, kind: &Arc<DeviceKind>, draft: Draft) -> Result<(String, Found), Refused> {
        let name = device_name(&draft.identity);
        let mut nodes = Vec::new();
        for member in &draft.members {
            let node = self.look(kind, member, draft.literal)?;
            nodes.push((member, node));
        }
        if self.scan.found.contains_key(&name) {
            return Err(Refused::problem(format!(
                "its name {name:?} is taken by another device"
            )));
        }
        if self.scan.found.len() >= DEVICES_MAX {
            return Err(Refused::problem(format!(
                "this node has {DEVICES_MAX} devices already, more are not handed out"
            )));
        }
        let nodes = place(kind, &name, draft.key.as_deref(), nodes)?;
        let mut attributes = draft.attributes;
        let mut sysfs = draft.sysfs;
        if let Some(first) = nodes.first() {
            if sysfs.is_none()
                && let Some(sys) = &self.sys
                && let Some(directory) = sys.directory_of(first.node.numbers)
            {
                sys.describe(&directory, &mut attributes);
                sysfs = Some(directory);
            }
            let own = nodes.iter().filter(|node| node.own);
            let host: Vec<&str> = own.map(|node| &*node.node.host_path).collect();
            attributes
                .text("path", Some(&format!("/dev/{}", first.path)))
                .text("nodes", Some(&host.join(",")))
                .int("major", Some(first.node.numbers.major.into()))
                .int("minor", Some(first.node.numbers.minor.into()));
        }
        let sysfs = sysfs.map(PathBuf::into_boxed_path);
        let found = Found::new(kind, &name, nodes, attributes.finish(), sysfs);
        Ok((name, found))
    }

    /// Identifies one node, and rejects it if it belongs to another device or is dangerous.
    fn look(&mut self, kind: &DeviceKind, member: &Member, literal: bool) -> Result<Node, Refused> {
        let path = &member.path;
        if member.own
            && let Some(first) = self.paths_seen.get(path.as_str()).map(|kind| &kind.name)
        {
            return Err(if *first == kind.name {
                Refused::quiet(format!(
                    "/dev/{path} belongs to another device of this kind already"
                ))
            } else {
                Refused::problem(format!(
                    "/dev/{path} belongs to kind {first:?}, which stands first in the configuration"
                ))
            });
        }
        if path.len() + "/dev/".len() > PATH_MAX || path.chars().any(char::is_control) {
            return Err(Refused::problem(format!(
                "its path has more than {PATH_MAX} bytes or a control character"
            )));
        }
        let node = self.root.look(path).map_err(|error| Refused {
            why: error.to_string(),
            // A pattern may match directories and files besides devices.
            problem: literal || !matches!(error, NodeError::NoDevice),
        })?;
        if let Some(expected) = member.expected
            && expected != node.numbers
        {
            return Err(Refused::problem(format!(
                "/dev/{path} is {}, but sysfs says {expected}; it has just changed, or this /dev is not this /sys's",
                node.numbers
            )));
        }
        if member.own
            && let Some(first) = self.numbers_seen.get(&node.numbers)
        {
            return Err(Refused::problem(format!(
                "is the same device as /dev/{first} ({})",
                node.numbers
            )));
        }
        if !kind.dangerous_paths.contains(path.as_str()) {
            self.refuse_dangerous(path, node.numbers)?;
        }
        Ok(node)
    }

    /// Rejects memory, I/O ports and block devices that the node uses.
    fn refuse_dangerous(&mut self, path: &str, numbers: Numbers) -> Result<(), Refused> {
        let remedy = format!("put \"/dev/{path}\" into dangerousPaths of the kind if it is meant");
        if numbers.is_memory() {
            return Err(Refused::problem(format!(
                "is the machine's own memory or ports; {remedy}"
            )));
        }
        if numbers.kind == NodeKind::Character {
            return Ok(());
        }
        match self
            .in_use
            .get_or_insert_with(|| in_use(self.paths).map_err(|error| error.to_string()))
        {
            Ok(used) if used.contains(&(numbers.major, numbers.minor)) => Err(Refused::problem(format!(
                "is mounted, or something on it is; {remedy}"
            ))),
            Ok(_) => Ok(()),
            Err(error) => Err(Refused::problem(format!(
                "whether it is mounted cannot be seen ({error}); {remedy}"
            ))),
        }
    }
}

/// Chooses the container path of each node.
fn place(
    kind: &DeviceKind,
    device: &str,
    key: Option<&str>,
    nodes: Vec<(&Member, Node)>,
) -> Result<Vec<FoundNode>, Refused> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut taken: BTreeMap<String, String> = BTreeMap::new();
    let mut placed = Vec::with_capacity(nodes.len());
    for (member, node) in nodes {
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
        if let Some(other) = taken.insert(container_path.clone(), member.path.clone()) {
            return Err(Refused::problem(format!(
                "/dev/{other} and /dev/{} would both be {container_path} in a container; write {{n}} into containerPaths",
                member.path
            )));
        }
        placed.push(FoundNode {
            path: member.path.as_str().into(),
            container_path: (container_path != own_path).then(|| container_path.into()),
            own: member.own,
            node,
        });
    }
    Ok(placed)
}
