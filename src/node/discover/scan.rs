//! One search for the devices of all kinds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use super::HostPaths;
use super::in_use::in_use;
use super::node::{DevRoot, Node, NodeError, NodeKind, Numbers};
use crate::api::crd::{AttributeValue, DEVICES_MAX, Device, GROUP, Mode};
use crate::core::node::naming::device_name;
use crate::node::config::{DeviceKind, NodeConfiguration, PathPattern};

/// The length of a path that the inventory can show, in bytes.
const PATH_MAX: usize = 256;
/// Problems that are told, at most: a pattern that matches everything must not fill the log.
const PROBLEMS_MAX: usize = 100;

/// As a shell matches: `*` does not stand for a dot at the beginning.
const MATCH: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// A device that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) kind: String,
    pub(super) mode: Mode,
    pub(super) shares: Option<u32>,
    pub(super) permissions: String,
    /// The path that matched, relative to `/dev`: what identifies the device.
    pub(super) path: String,
    pub(super) node: Node,
}

/// Something that matches a pattern and is not handed out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Problem {
    pub(super) path: String,
    pub(super) kind: String,
    pub(super) what: String,
}

/// The result of a search.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// By name.
    pub(super) found: BTreeMap<String, Found>,
    pub(super) problems: BTreeSet<Problem>,
    /// The directories that were looked into: the result can change only if one of them does.
    pub(super) directories: BTreeSet<PathBuf>,
}

impl Found {
    /// The device as the inventory shows it.
    pub(super) fn device(&self, name: &str) -> Device {
        let attribute = |attribute: &str, value| (format!("{GROUP}/{attribute}"), value);
        Device {
            name: name.to_owned(),
            kind: self.kind.clone(),
            mode: self.mode,
            attributes: BTreeMap::from([
                attribute("path", AttributeValue::string(format!("/dev/{}", self.path))),
                attribute("major", AttributeValue::int(self.node.numbers.major.into())),
                attribute("minor", AttributeValue::int(self.node.numbers.minor.into())),
            ]),
            unhealthy: None,
            shares: self.shares,
        }
    }
}

/// Searches for the devices of all kinds, in the order of the configuration: what two of them describe is the first's.
pub(super) fn scan(configuration: &NodeConfiguration, paths: &HostPaths) -> Scan {
    let root = match DevRoot::new(&paths.dev) {
        Ok(root) => root,
        Err(error) => {
            let problem = Problem {
                path: paths.dev.display().to_string(),
                kind: String::new(),
                what: error.to_string(),
            };
            return Scan {
                problems: BTreeSet::from([problem]),
                ..Scan::default()
            };
        }
    };
    let mut search = Searching {
        root,
        paths,
        in_use: None,
        paths_seen: BTreeMap::new(),
        numbers_seen: BTreeMap::new(),
        scan: Scan::default(),
    };
    for kind in &configuration.kinds {
        for pattern in &kind.paths {
            for path in search.matches(kind, pattern) {
                search.take(kind, pattern, path);
            }
        }
    }
    search.scan
}

struct Searching<'a> {
    root: DevRoot,
    paths: &'a HostPaths,
    /// Looked up for the first block device; an error is one for all of them.
    in_use: Option<Result<BTreeSet<(u32, u32)>, String>>,
    /// The kind that took each path.
    paths_seen: BTreeMap<String, String>,
    /// The path that each device was taken by.
    numbers_seen: BTreeMap<Numbers, String>,
    scan: Scan,
}

impl Searching<'_> {
    /// The paths that match, relative to the root, in the order of their names.
    fn matches(&mut self, kind: &DeviceKind, pattern: &PathPattern) -> Vec<String> {
        let mut level = vec![String::new()];
        let parts: Vec<&str> = pattern.relative().split('/').collect();
        for (depth, part) in parts.iter().enumerate() {
            let mut next = Vec::new();
            for parent in level {
                let directory = self.root.path().join(&parent);
                if depth > 0 && !self.may_enter(kind, &parent, &directory) {
                    continue;
                }
                let names = names_in(&directory, part);
                self.scan.directories.insert(directory);
                next.extend(names.into_iter().map(|name| {
                    if depth == 0 {
                        name
                    } else {
                        format!("{parent}/{name}")
                    }
                }));
            }
            level = next;
        }
        level
    }

    /// Whether a match in the middle of a pattern is a directory inside of the root.
    fn may_enter(&mut self, kind: &DeviceKind, relative: &str, directory: &Path) -> bool {
        match self.root.resolve(directory) {
            Ok(real) => real.is_dir(),
            Err(NodeError::Outside(target)) => {
                self.problem(kind, relative, NodeError::Outside(target).to_string());
                false
            }
            Err(_) => false,
        }
    }

    fn take(&mut self, kind: &DeviceKind, pattern: &PathPattern, path: String) {
        match self.judge(kind, pattern, &path) {
            Ok(Some(node)) => {
                let name = device_name(&path);
                self.paths_seen.insert(path.clone(), kind.name.clone());
                self.numbers_seen.insert(node.numbers, path.clone());
                let found = Found {
                    kind: kind.name.clone(),
                    mode: kind.doors.mode_of(&name),
                    shares: kind.doors.shown_shares(),
                    permissions: kind.permissions.clone(),
                    path,
                    node,
                };
                self.scan.found.insert(name, found);
            }
            Ok(None) => {}
            Err(what) => self.problem(kind, &path, what),
        }
    }

    /// The device, or nothing if there is nothing to be said, or why it is not handed out.
    fn judge(
        &mut self,
        kind: &DeviceKind,
        pattern: &PathPattern,
        path: &str,
    ) -> Result<Option<Node>, String> {
        if let Some(first) = self.paths_seen.get(path) {
            return if *first == kind.name {
                Ok(None)
            } else {
                Err(format!(
                    "belongs to kind {first:?}, which stands first in the configuration"
                ))
            };
        }
        if path.len() + "/dev/".len() > PATH_MAX || path.chars().any(char::is_control) {
            return Err(format!(
                "its path has more than {PATH_MAX} bytes or a control character"
            ));
        }
        let node = match self.root.look(path) {
            Ok(node) => node,
            // A pattern that matches directories and files besides devices is nobody's fault.
            Err(NodeError::NoDevice) if !pattern.is_literal() => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        if let Some(first) = self.numbers_seen.get(&node.numbers) {
            return Err(format!("is the same device as /dev/{first} ({})", node.numbers));
        }
        if !pattern.is_literal() {
            self.refuse_dangerous(node.numbers)?;
        }
        if self.scan.found.contains_key(&device_name(path)) {
            return Err(format!(
                "its name {:?} is taken by another device",
                device_name(path)
            ));
        }
        if self.scan.found.len() >= DEVICES_MAX {
            return Err(format!(
                "this node has {DEVICES_MAX} devices already, more are not handed out"
            ));
        }
        Ok(Some(node))
    }

    /// Refuses what would hand out the machine itself.
    fn refuse_dangerous(&mut self, numbers: Numbers) -> Result<(), String> {
        let remedy = "name it in the configuration without a wildcard if it is meant";
        if numbers.is_memory() {
            return Err(format!("is the machine's own memory or ports; {remedy}"));
        }
        if numbers.kind == NodeKind::Character {
            return Ok(());
        }
        match self
            .in_use
            .get_or_insert_with(|| in_use(self.paths).map_err(|error| error.to_string()))
        {
            Ok(used) if used.contains(&(numbers.major, numbers.minor)) => {
                Err(format!("is mounted, or something on it is; {remedy}"))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(format!(
                "whether it is mounted cannot be seen ({error}); {remedy}"
            )),
        }
    }

    fn problem(&mut self, kind: &DeviceKind, path: &str, what: String) {
        if self.scan.problems.len() < PROBLEMS_MAX {
            self.scan.problems.insert(Problem {
                path: format!("/dev/{path}"),
                kind: kind.name.clone(),
                what,
            });
        }
    }
}

/// The names in a directory that match one part of a pattern, sorted. Names that are not UTF-8 never match: nothing that
/// they would have to go through (JSON, protobuf) can carry them.
fn names_in(directory: &Path, part: &str) -> Vec<String> {
    if !part.contains(['*', '?', '[']) {
        let exists = directory.join(part).symlink_metadata().is_ok();
        return if exists { vec![part.to_owned()] } else { Vec::new() };
    }
    let Ok(pattern) = Pattern::new(part) else {
        return Vec::new();
    };
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .map(|entries| {
            entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .collect()
        })
        .unwrap_or_default();
    names.retain(|name| pattern.matches_with(name, MATCH));
    names.sort_unstable();
    names
}
