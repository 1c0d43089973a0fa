//! Rejects kinds that give a container the same node or mount with different access.
//!
//! For a claim, the container runtime combines the access of all its devices. For two extended resources of one container, kubelet
//! takes each device node and each mount from an arbitrary one (1.27 to 1.36, `pkg/kubelet/cm/devicemanager/pod_devices.go`,
//! `deviceRunContainerOptions`), so the container's access would be random.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::{ContentError, Position};
use super::kind::{DeviceKind, RawKind};
use super::kubelet_apis::KindMode;
use super::pattern::PathPattern;
use super::schema::NODE_VFIO;
use super::source::{Source, VFIO_CONTAINER};

/// Rejects a kind that gives the same node or mount as an earlier kind with different access, if both use the device plugin API.
/// Only literal paths are compared. `whole` is the position of the kind, for absent fields.
pub(super) fn check(
    earlier: &[Arc<DeviceKind>],
    kind: &DeviceKind,
    raw: &RawKind,
    field: &str,
    whole: Position,
) -> Result<(), ContentError> {
    if !described_to_kubelet(kind) {
        return Ok(());
    }
    let permissions = raw.permissions.as_ref().map(|raw| Position::of(raw.referenced));
    let mounts = raw.mounts.as_ref().map(|raw| Position::of(raw.referenced));
    for other in earlier.iter().filter(|other| described_to_kubelet(other)) {
        check_permissions(other, kind, field).map_err(|problem| (permissions.unwrap_or(whole), problem))?;
        check_mounts(other, kind, field).map_err(|problem| (mounts.unwrap_or(whole), problem))?;
    }
    Ok(())
}

/// Whether kubelet combines the container edits of the kind's devices. Edits by CDI name are combined by the container runtime.
fn described_to_kubelet(kind: &DeviceKind) -> bool {
    !matches!(kind.apis.mode, KindMode::Claims) && !kind.apis.cdi_devices
}

fn check_permissions(other: &DeviceKind, kind: &DeviceKind, field: &str) -> Result<(), String> {
    if other.permissions == kind.permissions {
        return Ok(());
    }
    let theirs = nodes(other);
    // A node that is not shared belongs to the first kind alone.
    let both = nodes(kind).into_iter().find(|(position, shared)| {
        let other = theirs.get(position);
        other.is_some_and(|other_shared| *shared || *other_shared)
    });
    match both {
        None => Ok(()),
        Some(((path, _), _)) => Err(format!(
            "{field}.permissions {:?}: kind {:?} gives /dev/{path} too, with {:?}, and kubelet applies only one of them to a container with both resources; give both kinds the same permissions, or the node another path in containerPaths",
            kind.permissions, other.name, other.permissions
        )),
    }
}

fn check_mounts(other: &DeviceKind, kind: &DeviceKind, field: &str) -> Result<(), String> {
    for (index, mount) in kind.mounts.iter().enumerate() {
        let differs = other.mounts.iter().any(|other| {
            (&other.host_path, &other.container_path) == (&mount.host_path, &mount.container_path)
                && other.read_only != mount.read_only
        });
        if differs {
            return Err(format!(
                "{field}.mounts[{index}].readOnly {}: kind {:?} mounts {:?} with {}, and kubelet applies only one of them to a container with both resources; write the same in both, or give one another containerPath",
                mount.read_only, other.name, mount.host_path, !mount.read_only
            ));
        }
    }
    Ok(())
}

/// A device node below the host's `/dev`, and its path in the container.
type At<'a> = (&'a str, String);

/// The device nodes of a kind that are known without discovery, and whether they are shared.
fn nodes(kind: &DeviceKind) -> BTreeMap<At<'_>, bool> {
    match &kind.source {
        Source::Paths(paths) => paths.iter().filter_map(|path| named(kind, path, false)).collect(),
        Source::Groups(groups) => {
            let own = groups
                .iter()
                .flat_map(|group| group.required.iter().chain(&group.optional));
            let shared = groups.iter().flat_map(|group| &group.shared);
            own.filter_map(|path| named(kind, path, false))
                .chain(shared.filter_map(|path| named(kind, path, true)))
                .collect()
        }
        Source::Usb(_) => BTreeMap::new(),
        Source::Pci(pci) => {
            let mut entries = pci.nodes.iter().chain(&pci.optional_nodes);
            let vfio = entries.any(|entry| entry == NODE_VFIO);
            // The container follows the group's own node, which is number 0.
            let container = vfio.then(|| seen(kind, NODE_VFIO, VFIO_CONTAINER, "1"));
            container.flatten().map(|node| (node, true)).into_iter().collect()
        }
    }
}

fn named<'a>(kind: &DeviceKind, pattern: &'a PathPattern, shared: bool) -> Option<(At<'a>, bool)> {
    let literal = pattern.is_literal();
    let node = literal.then(|| seen(kind, pattern.text(), pattern.relative(), "0"));
    node.flatten().map(|node| (node, shared))
}

/// The node and its container path; `None` if the path differs for each device.
fn seen<'a>(kind: &DeviceKind, entry: &str, path: &'a str, number: &str) -> Option<At<'a>> {
    match kind.container_paths.get(entry) {
        None => Some((path, format!("/dev/{path}"))),
        Some(template) if template.contains("{device}") || template.contains("{key}") => None,
        Some(template) => Some((path, template.replace("{n}", number))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::NodeConfiguration;

    /// Two kinds, the second from line 5 on, each with an extended resource by default.
    fn read(kinds: [&str; 2]) -> Result<(), String> {
        let [first, second] = [("a", kinds[0]), ("b", kinds[1])].map(|(name, kind)| {
            let mode = if kind.contains("mode: ") {
                String::new()
            } else {
                format!("mode: extended-resource, resourceName: example.com/{name}, ")
            };
            format!("- {{name: {name}, {mode}{kind}}}\n")
        });
        let header = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n";
        let text = format!("{header}{first}{second}");
        NodeConfiguration::parse(&text)
            .map(drop)
            .map_err(|(position, problem)| format!("{}: {problem}", position.line))
    }

    const READS: &str = "groups: [{required: [\"/dev/a{key}\"], shared: [/dev/control]}], permissions: r";
    const WRITES: &str = "groups: [{required: [\"/dev/b{key}\"], shared: [/dev/control]}]";

    #[test]
    fn one_node_with_different_permissions_in_two_kinds_is_refused() {
        let gpu = "pci: {match: [{vendor: \"10de\"}]}";
        let network = "pci: {match: [{class: \"02\"}]}, permissions: rwm";
        for (kinds, expected) in [
            (
                [READS, WRITES],
                "5: kinds[1].permissions \"rw\": kind \"a\" gives /dev/control too, with \"r\"",
            ),
            (
                [WRITES, READS],
                "5: kinds[1].permissions \"r\": kind \"a\" gives /dev/control too, with \"rw\"",
            ),
            (
                ["paths: [/dev/control], permissions: r", WRITES],
                "kind \"a\" gives /dev/control too, with \"r\"",
            ),
            (
                [gpu, network],
                "\"rwm\": kind \"a\" gives /dev/vfio/vfio too, with \"rw\"",
            ),
            (
                [
                    READS,
                    "mode: both, resourceName: example.com/b, groups: [{required: [/dev/b], shared: [/dev/control]}]",
                ],
                "kind \"a\" gives /dev/control too",
            ),
        ] {
            let message = read(kinds).unwrap_err();
            assert!(message.contains(expected), "{expected} in {message}");
            assert!(
                message.contains("the same permissions") && message.contains("containerPaths"),
                "{message}"
            );
        }
    }

    #[test]
    fn one_mount_with_different_access_in_two_resources_is_refused() {
        let mounting = |path: &str, rest: &str| {
            format!("paths: [{path}], mounts: [{{hostPath: /opt/lib, containerPath: /lib/vendor{rest}}}]")
        };
        let (reads, writes) = (mounting("/dev/a", ""), mounting("/dev/b", ", readOnly: false"));
        let message = read([&reads, &writes]).unwrap_err();
        for word in [
            "5: kinds[1].mounts[0].readOnly false",
            "kind \"a\" mounts \"/opt/lib\" with true",
            "the same in both",
        ] {
            assert!(message.contains(word), "{word} in {message}");
        }
        read([&reads, &mounting("/dev/b", "")]).unwrap();
        read([&reads, &format!("mode: claims, {writes}")]).unwrap();
    }

    #[test]
    fn permissions_merged_by_the_runtime_are_accepted() {
        for kinds in [
            // Claims and devices given by CDI name.
            [&format!("mode: claims, {READS}"), WRITES],
            [READS, &format!("mode: claims, {WRITES}")],
            [&format!("cdiDevices: true, {READS}"), WRITES],
            // The same permissions, another path, and a different path for each device.
            [READS, &format!("{WRITES}, permissions: r")],
            [
                READS,
                &format!("{WRITES}, containerPaths: {{/dev/control: /dev/writable}}"),
            ],
            [
                READS,
                &format!("{WRITES}, containerPaths: {{/dev/control: \"/dev/c-{{device}}\"}}"),
            ],
            // A device that matches two kinds belongs to the first.
            ["paths: [/dev/a], permissions: r", "paths: [/dev/a]"],
        ] {
            read(kinds).unwrap_or_else(|message| panic!("{kinds:?}: {message}"));
        }
    }
}
