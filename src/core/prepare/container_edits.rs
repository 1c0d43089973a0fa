//! Container edits for a device: built once per device from the configuration, rendered as a CDI spec for claims and as a
//! `ContainerAllocateResponse` for the device plugin API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::naming::environment_name;
use super::refusal::Refusal;

/// The edits to a container. None of them comes from an object that a user can write.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Environment variables, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Mounted files and directories of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Annotations for the container runtime, by name. Only the device plugin API carries them; CDI cannot, so the containers of a claim do
    /// not get them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Names of additional CDI devices (`vendor/class=name`), whose CDI files are managed by others or, for kinds configured so, by the
    /// companion. Device plugin API only; kubelet 1.27 silently ignores them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdi_devices: Vec<String>,
}

/// A device node in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Absolute path on the node.
    pub host_path: String,
    /// Absolute path in the container.
    pub container_path: String,
    /// The permitted operations: a non-empty subset of `rwm` (read, write, mknod) in that order.
    pub permissions: String,
}

/// A file or directory of the node in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Absolute path on the node. It must stay valid for as long as the container may be restarted.
    pub host_path: String,
    /// Absolute path in the container.
    pub container_path: String,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

impl ContainerEdits {
    /// The edits for a device with a single device node: the node, at its configured path, and a variable with that path.
    pub fn of_device_node(device: &str, node: DeviceNode) -> Self {
        Self {
            environment: BTreeMap::from([(environment_name(device), node.container_path.clone())]),
            device_nodes: vec![node],
            ..Self::default()
        }
    }

    /// Ensures that each device has a variable, with the device name as its value unless the driver set another. A lost checkpoint is
    /// rebuilt from these variables.
    pub fn name_devices<'a>(&mut self, devices: impl IntoIterator<Item = &'a str>) {
        for device in devices {
            self.environment
                .entry(environment_name(device))
                .or_insert_with(|| device.to_owned());
        }
    }

    /// Adds the edits of another device. Variables are named after devices, so two devices never share one. A node or mount that both
    /// devices need at the same path (a control node, a library directory) is present once, with the permissions of both: the container
    /// holds both devices, and a runtime that gets the edits separately (two claims of one container) merges the permissions, too.
    pub fn extend(&mut self, other: Self) {
        for node in other.device_nodes {
            self.add_node(node);
        }
        self.environment.extend(other.environment);
        for mount in other.mounts {
            self.add_mount(mount);
        }
        self.annotations.extend(other.annotations);
        add_new(&mut self.cdi_devices, other.cdi_devices);
    }

    fn add_node(&mut self, node: DeviceNode) {
        let alike = |other: &&mut DeviceNode| {
            (&other.host_path, &other.container_path) == (&node.host_path, &node.container_path)
        };
        match self.device_nodes.iter_mut().find(alike) {
            Some(other) => other.permissions = either(&other.permissions, &node.permissions),
            None => self.device_nodes.push(node),
        }
    }

    fn add_mount(&mut self, mount: Mount) {
        let alike = |other: &&mut Mount| {
            (&other.host_path, &other.container_path) == (&mount.host_path, &mount.container_path)
        };
        match self.mounts.iter_mut().find(alike) {
            Some(other) => other.read_only &= mount.read_only,
            None => self.mounts.push(mount),
        }
    }

    /// Refuses two different edits at one container path: the container would silently see only one of them. Identical edits are already
    /// merged by [`Self::extend`].
    pub fn check_paths(&self) -> Result<(), Refusal> {
        let nodes = self.device_nodes.iter().map(|node| {
            let what = format!("device node {}", node.host_path);
            (node.container_path.as_str(), what)
        });
        let mounts = self.mounts.iter().map(|mount| {
            let what = format!("mount of {}", mount.host_path);
            (mount.container_path.as_str(), what)
        });
        let mut taken = BTreeMap::new();
        for (container_path, second) in nodes.chain(mounts) {
            if let Some(first) = taken.insert(container_path, second.clone()) {
                return Err(Refusal::SamePath {
                    container_path: container_path.to_owned(),
                    first,
                    second,
                });
            }
        }
        Ok(())
    }
}

/// The permissions of either, in the order of [`DeviceNode::permissions`].
fn either(one: &str, other: &str) -> String {
    let permits = |permission: &char| one.contains(*permission) || other.contains(*permission);
    "rwm".chars().filter(permits).collect()
}

fn add_new<T: PartialEq>(all: &mut Vec<T>, more: Vec<T>) {
    for one in more {
        if !all.contains(&one) {
            all.push(one);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node(path: &str) -> DeviceNode {
        DeviceNode {
            host_path: path.into(),
            container_path: path.into(),
            permissions: "rw".into(),
        }
    }

    fn mount(host_path: &str, container_path: &str, read_only: bool) -> Mount {
        Mount {
            host_path: host_path.into(),
            container_path: container_path.into(),
            read_only,
        }
    }

    #[test]
    fn devices_add_up_without_overwriting_each_other() {
        let mut both = ContainerEdits::of_device_node("kvm", node("/dev/kvm"));
        both.extend(ContainerEdits::of_device_node("fuse", node("/dev/fuse")));
        assert_eq!(both.device_nodes, [node("/dev/kvm"), node("/dev/fuse")]);
        let environment: Vec<(&str, &str)> = both
            .environment
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            environment,
            [
                ("DRAYMAN_DEVICE_FUSE", "/dev/fuse"),
                ("DRAYMAN_DEVICE_KVM", "/dev/kvm")
            ]
        );
    }

    #[test]
    fn what_two_devices_bring_alike_is_there_once() {
        let control = |device: &str| ContainerEdits {
            mounts: vec![mount("/opt/lib", "/lib/vendor", true)],
            ..ContainerEdits::of_device_node(device, node("/dev/control"))
        };
        let mut both = control("a");
        both.extend(control("b"));
        assert_eq!(
            (both.device_nodes.len(), both.mounts.len(), both.environment.len()),
            (1, 1, 2)
        );
    }

    #[test]
    fn two_things_at_one_path_of_a_container_are_refused_and_the_same_thing_twice_is_not() {
        let at = |host: &str, container: &str| DeviceNode {
            host_path: host.into(),
            ..node(container)
        };
        let two = |first: DeviceNode, second: DeviceNode| {
            let mut both = ContainerEdits::of_device_node("a", first);
            both.extend(ContainerEdits::of_device_node("b", second));
            both
        };
        let apart = two(at("/dev/ttyUSB0", "/dev/port0"), at("/dev/ttyUSB1", "/dev/port1"));
        let shared = two(
            at("/dev/control", "/dev/control"),
            at("/dev/control", "/dev/control"),
        );
        assert_eq!((apart.check_paths(), shared.check_paths()), (Ok(()), Ok(())));
        let refusal = two(at("/dev/ttyUSB0", "/dev/port"), at("/dev/ttyUSB1", "/dev/port"))
            .check_paths()
            .unwrap_err();
        assert_eq!(refusal.reason(), "ContainerPathTaken");
        let text = refusal.to_string();
        for word in ["/dev/ttyUSB0", "/dev/ttyUSB1", "/dev/port ", "containerPaths"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        // The same host path does not help: a node and a mount differ.
        let mut mounted = shared;
        mounted.mounts = vec![mount("/dev/control", "/dev/control", true)];
        let text = mounted.check_paths().unwrap_err().to_string();
        for word in [
            "device node /dev/control and mount of /dev/control",
            "be /dev/control in",
        ] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn the_same_thing_from_two_devices_is_there_with_what_either_of_them_allows() {
        let of = |device: &str, permissions: &str, read_only| ContainerEdits {
            mounts: vec![mount("/opt/lib", "/lib/vendor", read_only)],
            ..ContainerEdits::of_device_node(
                device,
                DeviceNode {
                    permissions: permissions.into(),
                    ..node("/dev/control")
                },
            )
        };
        for ((one, one_reads), (other, other_reads), (all, all_read)) in [
            (("r", true), ("rw", true), ("rw", true)),
            (("rw", false), ("r", true), ("rw", false)),
            (("rm", true), ("w", false), ("rwm", false)),
            (("r", true), ("r", true), ("r", true)),
        ] {
            let mut both = of("a", one, one_reads);
            both.extend(of("b", other, other_reads));
            let (expected, named) = (of("a", all, all_read), both.environment.len());
            assert_eq!(
                (both.device_nodes.clone(), both.mounts.clone(), named),
                (expected.device_nodes, expected.mounts, 2)
            );
            both.check_paths().unwrap();
        }
        // At another container path, it is a separate node.
        let mut two = of("a", "r", true);
        two.extend(ContainerEdits::of_device_node(
            "b",
            DeviceNode {
                container_path: "/dev/other".into(),
                ..node("/dev/control")
            },
        ));
        assert_eq!(
            two.device_nodes
                .iter()
                .map(|node| node.permissions.as_str())
                .collect::<Vec<_>>(),
            ["r", "rw"]
        );
        two.check_paths().unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

        #[test]
        fn no_variable_but_our_own_can_come_out(device in ".{0,40}|LD_PRELOAD|PATH|BASH_ENV|[A-Z_=\\n\\x00]{1,20}") {
            let container_edits = ContainerEdits::of_device_node(&device, node("/dev/null"));
            for name in container_edits.environment.keys() {
                prop_assert!(name.starts_with("DRAYMAN_DEVICE_"));
                prop_assert!(name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_'));
            }
        }
    }
}
