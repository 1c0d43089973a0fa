//! Rejects container paths that collide for every device of a kind.

use std::collections::BTreeMap;

use super::error::{ContentError, Position, at};
use super::kind::{DeviceKind, RawKind};
use super::pattern::PathPattern;
use super::source::Source;

/// Rejects two nodes of the same device, or a node and a mount, with the same container path. Collisions that depend on the discovered
/// devices or on the number of devices per container are rejected later. `whole` is the position of the kind, for absent fields.
pub(super) fn check(
    kind: &DeviceKind,
    raw: &RawKind,
    field: &str,
    whole: Position,
) -> Result<(), ContentError> {
    for entries in together(&kind.source) {
        let mut taken: BTreeMap<&str, &str> = BTreeMap::new();
        for (entry, own_path) in entries {
            // A node without an entry keeps its own path.
            let path = kind.container_paths.get(entry).map(String::as_str);
            let Some(path) = path.or(own_path) else {
                continue;
            };
            if let Some(other) = taken.insert(path, entry) {
                let problem = format!(
                    "{field}.containerPaths: {other} and {entry} would both be {path} in a container; give each its own path"
                );
                return Err(of_entry(raw, &[entry, other], whole, problem));
            }
            let mount = kind.mounts.iter().position(|mount| mount.container_path == path);
            if let Some(index) = mount {
                let problem = format!(
                    "{field}.mounts[{index}].containerPath {path:?} is where a container sees {entry}; give one of them another path"
                );
                return Err(match &raw.mounts {
                    Some(raw) => at(raw, problem),
                    None => (whole, problem),
                });
            }
        }
    }
    Ok(())
}

/// The error at the position of the first entry with a container path in the file.
fn of_entry(raw: &RawKind, entries: &[&str], whole: Position, problem: String) -> ContentError {
    let paths = raw.container_paths.as_ref();
    match entries.iter().find_map(|entry| paths?.value.get(*entry)) {
        Some(raw) => at(raw, problem),
        None => (whole, problem),
    }
}

/// Entries that every device of a source has, each with its host path if that is literal.
fn together(source: &Source) -> Vec<Vec<(&str, Option<&str>)>> {
    fn pattern(pattern: &PathPattern) -> (&str, Option<&str>) {
        (pattern.text(), pattern.is_literal().then(|| pattern.text()))
    }
    match source {
        Source::Paths(paths) => paths.iter().map(|path| vec![pattern(path)]).collect(),
        Source::Groups(groups) => groups
            .iter()
            .map(|group| group.required.iter().map(pattern).collect())
            .collect(),
        Source::Usb(usb) => vec![usb.nodes.iter().map(|node| (node.as_str(), None)).collect()],
        Source::Pci(pci) => vec![pci.nodes.iter().map(|node| (node.as_str(), None)).collect()],
    }
}

#[cfg(test)]
mod tests {
    use super::super::NodeConfiguration;

    fn read(kind: &str) -> Result<(), String> {
        let text = format!(
            "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n- {{name: a, {kind}}}\n"
        );
        NodeConfiguration::parse(&text)
            .map(drop)
            .map_err(|(position, problem)| format!("{}: {problem}", position.line))
    }

    #[test]
    fn two_devices_at_one_path_are_refused_with_a_fix() {
        for (kind, words) in [
            (
                "paths: [/dev/a], mounts: [{hostPath: /opt/a, containerPath: /dev/a}]",
                ["kinds[0].mounts[0].containerPath \"/dev/a\"", "another path"],
            ),
            (
                "paths: [\"/dev/a*\"], containerPaths: {\"/dev/a*\": /dev/x}, mounts: [{hostPath: /opt/a, containerPath: /dev/x}]",
                ["where a container sees /dev/a*", "another path"],
            ),
            (
                "groups: [{required: [/dev/a, /dev/b]}], containerPaths: {/dev/a: /dev/x, /dev/b: /dev/x}",
                ["kinds[0].containerPaths: /dev/a and /dev/b", "be /dev/x in"],
            ),
            (
                "groups: [{required: [/dev/a, /dev/b]}], containerPaths: {/dev/b: /dev/a}",
                ["/dev/a and /dev/b would both be /dev/a", "its own path"],
            ),
            (
                "usb: {match: [{vendor: \"0403\"}], nodes: [bus, tty]}, containerPaths: {bus: \"/dev/x{n}\", tty: \"/dev/x{n}\"}",
                ["bus and tty would both be /dev/x{n}", "its own path"],
            ),
        ] {
            let message = read(kind).unwrap_err();
            assert!(message.starts_with("4: "), "{message}");
            for word in words {
                assert!(message.contains(word), "{word} in {message}");
            }
        }
    }

    #[test]
    fn one_path_for_nodes_of_different_devices_is_accepted() {
        for kind in [
            "paths: [/dev/a, /dev/b], containerPaths: {/dev/a: /dev/x, /dev/b: /dev/x}",
            "paths: [\"/dev/a*\"], containerPaths: {\"/dev/a*\": /dev/x}",
            "groups: [{required: [/dev/a]}, {required: [/dev/b]}], containerPaths: {/dev/a: /dev/x, /dev/b: /dev/x}",
            "groups: [{required: [/dev/a], optional: [/dev/b, /dev/c]}], containerPaths: {/dev/b: /dev/x, /dev/c: /dev/x}",
        ] {
            read(kind).unwrap();
        }
    }
}
