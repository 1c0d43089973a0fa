//! Turns the matches of each source into drafts of devices, before their nodes are checked. A draft's identity becomes its name: see
//! [`device_name`](crate::core::names::device_name). Identities come from `paths` and `group_identity` here, from `usb::identities` and from
//! `PciFacts::identity`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use glob::{MatchOptions, Pattern};

use super::device::{DevRoot, DevicePathError};
use super::scan::{Draft, Member, Rejection, Scanner};
use super::sysfs::{NodeOf, OnBus, SysRoot, if_exists, names, nodes_of};
use crate::core::discovery::group::{DeviceGroup, GroupMatches, Matched, assemble};
use crate::core::discovery::pci::{self, PciFacts, Vfio};
use crate::core::discovery::usb::{self, UsbFacts};
use crate::node::config::{
    DeviceKind, NODE_BUS, NODE_VFIO, NodeGroup, PathPattern, PciSource, UsbSource, VFIO_CONTAINER,
};

/// Matches like a shell: `*` does not match a leading dot.
const MATCH: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

impl Scanner<'_> {
    /// Adds a draft for each path that a pattern matches.
    pub(super) fn paths(&mut self, kind: &Arc<DeviceKind>, patterns: &[PathPattern]) {
        for pattern in patterns {
            for path in self.matches(kind, pattern) {
                let shown = format!("/dev/{path}");
                let draft = Draft {
                    identity: path.clone(),
                    members: vec![Member {
                        entry: pattern.text().to_owned(),
                        path,
                        own: true,
                        expected: None,
                    }],
                    key: None,
                    sysfs: None,
                    literal: pattern.is_literal(),
                };
                self.take(kind, shown, Ok(draft));
            }
        }
    }

    /// Adds a draft for each group of device nodes.
    pub(super) fn groups(&mut self, kind: &Arc<DeviceKind>, groups: &[NodeGroup]) {
        for group in groups {
            let mut all = |patterns: &[PathPattern]| {
                let matched = patterns.iter().flat_map(|pattern| self.matched(kind, pattern));
                matched.collect::<Vec<_>>()
            };
            let matches = GroupMatches {
                required: group
                    .required
                    .iter()
                    .map(|pattern| (pattern.text().to_owned(), all(std::slice::from_ref(pattern))))
                    .collect(),
                optional: all(&group.optional),
                shared: all(&group.shared),
            };
            for assembled in assemble(&matches) {
                match assembled {
                    Ok(assembled) => {
                        let own = assembled
                            .own
                            .iter()
                            .map(|matched| format!("/dev/{}", matched.path));
                        let shown = own.collect::<Vec<_>>().join(" + ");
                        let identity = group_identity(kind, groups, group, &assembled);
                        self.take(kind, shown, Ok(group_draft(identity, assembled)));
                    }
                    Err((Some(key), why)) => {
                        self.refuse(kind, format!("the group of {key:?}"), Rejection::problem(why));
                    }
                    Err((None, why)) => self.refuse(kind, "the group".to_owned(), Rejection::quiet(why)),
                }
            }
        }
    }

    /// Adds a draft for each USB device with its device nodes.
    pub(super) fn usb(&mut self, kind: &Arc<DeviceKind>, source: &UsbSource) {
        let devices = match self.sys.as_ref().map(SysRoot::usb_devices) {
            Some(Ok(devices)) => devices,
            Some(Err(error)) => return self.refuse(kind, "/sys/bus/usb".to_owned(), error.into()),
            None => return self.refuse(kind, "/sys".to_owned(), Rejection::problem("is not available")),
        };
        let facts: Vec<UsbFacts> = devices.iter().map(|device| device.facts.clone()).collect();
        let identities = usb::identities(&facts, source.identity);
        for (device, identity) in devices.into_iter().zip(identities) {
            let shown = device.facts.to_string();
            self.take(kind, shown, usb_draft(source, device, identity));
        }
    }

    /// Adds a draft for each PCI device with its device nodes.
    pub(super) fn pci(&mut self, kind: &Arc<DeviceKind>, source: &PciSource) {
        let devices = match self.sys.as_ref().map(SysRoot::pci_devices) {
            Some(Ok(devices)) => devices,
            Some(Err(error)) => return self.refuse(kind, "/sys/bus/pci".to_owned(), error.into()),
            None => return self.refuse(kind, "/sys".to_owned(), Rejection::problem("is not available")),
        };
        let facts: Vec<PciFacts> = devices.iter().map(|device| device.facts.clone()).collect();
        let matching: Vec<&PciFacts> = facts
            .iter()
            .filter(|facts| pci::refuse(facts, &source.matching).is_none())
            .collect();
        let wants_vfio = [&source.nodes, &source.optional_nodes]
            .iter()
            .any(|nodes| nodes.iter().any(|node| node == NODE_VFIO));
        let vfio = if wants_vfio {
            pci::vfio(&matching, &facts)
        } else {
            BTreeMap::new()
        };
        for device in devices {
            let shown = device.facts.to_string();
            let vfio = vfio.get(&device.facts.address);
            self.take(kind, shown, pci_draft(source, device, vfio));
        }
    }

    fn matched(&mut self, kind: &DeviceKind, pattern: &PathPattern) -> Vec<Matched> {
        let paths = self.matches(kind, pattern);
        let matched = paths.into_iter().map(|path| Matched {
            pattern: pattern.text().to_owned(),
            key: pattern.key_of(&path),
            path,
        });
        // A directory among the matches (`/dev/snd/by-path`) is ignored: it neither belongs to the group nor invalidates it.
        let is_node = |path: &str| !matches!(self.root.identify(path), Err(DevicePathError::NoDevice));
        matched
            .filter(|matched| matched.key.is_some() == pattern.has_key() && is_node(&matched.path))
            .collect()
    }

    /// Returns the matching paths, and notes a candidate for a pattern without matches.
    fn matches(&mut self, kind: &DeviceKind, pattern: &PathPattern) -> Vec<String> {
        let (paths, refused) = walk(&self.root, pattern, &mut self.scan.directories);
        for (path, error) in refused {
            self.refuse(kind, format!("/dev/{path}"), error.into());
        }
        if paths.is_empty() {
            let why = if pattern.is_literal() {
                "is not there"
            } else {
                "matches nothing"
            };
            self.refuse(kind, pattern.text().to_owned(), Rejection::quiet(why));
        }
        paths
    }
}

/// Finds the matches of a pattern: sorted paths relative to the root, and the directories that are outside the root or cannot be read. Records
/// the directories that were read: the result changes only if one of them does.
fn walk(
    root: &DevRoot,
    pattern: &PathPattern,
    directories: &mut BTreeSet<PathBuf>,
) -> (Vec<String>, Vec<(String, DevicePathError)>) {
    let mut level = vec![String::new()];
    let mut refused = Vec::new();
    for (depth, part) in pattern.relative().split('/').enumerate() {
        let mut next = Vec::new();
        for parent in level {
            let directory = root.path().join(&parent);
            // A match for an inner part must be a directory inside the root.
            if depth > 0 {
                match root.resolve(&directory) {
                    Ok(real) if real.is_dir() => {}
                    Err(error) if error.is_unread() || matches!(error, DevicePathError::Outside(_)) => {
                        refused.push((parent, error));
                        continue;
                    }
                    Ok(_) | Err(_) => continue,
                }
            }
            let names = matching_names(&directory, part);
            directories.insert(directory);
            match names {
                Ok(names) if depth == 0 => next.extend(names),
                Ok(names) => next.extend(names.into_iter().map(|name| format!("{parent}/{name}"))),
                Err(error) => refused.push((parent, error.into())),
            }
        }
        level = next;
    }
    (level, refused)
}

/// Sorted names in a directory that match one part of a pattern.
fn matching_names(directory: &Path, part: &str) -> io::Result<Vec<String>> {
    if !part.contains(['*', '?', '[']) {
        let found = if_exists(directory.join(part).symlink_metadata())?;
        return Ok(found.map(|_| part.to_owned()).into_iter().collect());
    }
    let Ok(pattern) = Pattern::new(part) else {
        return Ok(Vec::new());
    };
    let mut names = names(directory)?;
    names.retain(|name| pattern.matches_with(name, MATCH));
    Ok(names)
}

/// Identity of a group: its first node if the key or a literal pattern determines it, otherwise the kind. A wildcard alone may
/// match another node first tomorrow.
fn group_identity(
    kind: &DeviceKind,
    groups: &[NodeGroup],
    group: &NodeGroup,
    assembled: &DeviceGroup,
) -> String {
    let named = assembled.key.is_some() || group.required.first().is_some_and(PathPattern::is_literal);
    match (named, assembled.own.first(), group.required.first()) {
        (true, Some(first), _) => first.path.clone(),
        (_, _, Some(pattern)) if groups.len() > 1 => format!("{}/{}", kind.name, pattern.text()),
        _ => kind.name.clone(),
    }
}

fn group_draft(identity: String, group: DeviceGroup) -> Draft {
    let member = |matched: Matched, own| Member {
        entry: matched.pattern,
        path: matched.path,
        own,
        expected: None,
    };
    let own = group.own.into_iter().map(|matched| member(matched, true));
    let shared = group.shared.into_iter().map(|matched| member(matched, false));
    Draft {
        identity,
        members: own.chain(shared).collect(),
        key: group.key,
        sysfs: None,
        literal: false,
    }
}

fn usb_draft(
    source: &UsbSource,
    device: OnBus<UsbFacts>,
    identity: Result<String, String>,
) -> Result<Draft, Rejection> {
    let OnBus { directory, facts } = device;
    if let Some(why) = usb::refuse(&facts, &source.matching, source.hubs) {
        return Err(Rejection::quiet(why));
    }
    let identity = identity.map_err(Rejection::problem)?;
    let entry = |node: &NodeOf| {
        let own = if node.subsystem == "usb" {
            NODE_BUS
        } else {
            &node.subsystem
        };
        own.to_owned()
    };
    let members = choose(
        &nodes_of(&directory)?,
        entry,
        &source.nodes,
        &source.optional_nodes,
    )?;
    Ok(Draft {
        identity,
        members,
        key: None,
        sysfs: Some(directory),
        literal: true,
    })
}

fn pci_draft(source: &PciSource, device: OnBus<PciFacts>, vfio: Option<&Vfio>) -> Result<Draft, Rejection> {
    let OnBus { directory, facts } = device;
    if let Some(why) = pci::refuse(&facts, &source.matching) {
        return Err(Rejection::quiet(why));
    }
    let mut members = match vfio {
        None => Vec::new(),
        Some(Vfio::Unit { group }) => {
            let member = |path: String, own| Member {
                entry: NODE_VFIO.to_owned(),
                path,
                own,
                expected: None,
            };
            vec![
                member(format!("vfio/{group}"), true),
                member(VFIO_CONTAINER.to_owned(), false),
            ]
        }
        Some(Vfio::PartOf { address }) => {
            let why = format!("it is part of the IOMMU group that {address} represents");
            return Err(Rejection::quiet(why));
        }
        Some(Vfio::Unusable(why)) => return Err(Rejection::problem(why.as_str())),
    };
    let mut nodes = nodes_of(&directory)?;
    // In sysfs, the VFIO node of an IOMMU group belongs to no PCI function.
    nodes.retain(|node| node.subsystem != NODE_VFIO);
    let others = |nodes: &[String]| {
        nodes
            .iter()
            .filter(|node| *node != NODE_VFIO)
            .cloned()
            .collect::<Vec<_>>()
    };
    let entry = |node: &NodeOf| node.subsystem.clone();
    let (required, optional) = (others(&source.nodes), others(&source.optional_nodes));
    members.extend(choose(&nodes, entry, &required, &optional)?);
    Ok(Draft {
        identity: facts.identity(),
        members,
        key: None,
        sysfs: Some(directory),
        literal: true,
    })
}

/// Selects the configured nodes, in the order of the configuration.
fn choose(
    nodes: &[NodeOf],
    entry: impl Fn(&NodeOf) -> String,
    required: &[String],
    optional: &[String],
) -> Result<Vec<Member>, Rejection> {
    let mut members = Vec::new();
    for (name, must) in required
        .iter()
        .map(|name| (name, true))
        .chain(optional.iter().map(|name| (name, false)))
    {
        let before = members.len();
        members.extend(
            nodes
                .iter()
                .filter(|node| entry(node) == *name)
                .map(|node| Member {
                    entry: name.clone(),
                    path: node.path.clone(),
                    own: true,
                    expected: Some(node.number),
                }),
        );
        if must && members.len() == before {
            let has: BTreeSet<String> = nodes.iter().map(&entry).collect();
            let has = if has.is_empty() {
                "and no other; check that a driver is bound to it".to_owned()
            } else {
                format!("only {}", has.into_iter().collect::<Vec<_>>().join(", "))
            };
            return Err(Rejection::problem(format!(
                "it has no device node of {name}, {has}"
            )));
        }
    }
    Ok(members)
}
