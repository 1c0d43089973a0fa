//! Container edits for a device: built once per device from the configuration, rendered as a CDI spec for claims and as a
//! `ContainerAllocateResponse` for the device plugin API. A lost checkpoint is rebuilt from the CDI specs.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::cdi;
use crate::core::names::{ClaimUid, DriverName, device_of_environment_name, environment_name};

/// The edits to a container. None of them comes from an object that a user can write.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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

    /// Splits the edits of a claim into those of each device, given the edits that the driver has for each device alone. An edit that none of
    /// them has is for the claim as a whole, so every device gets it.
    pub fn of_each(&self, own: &BTreeMap<String, Self>) -> BTreeMap<String, Self> {
        let is_own = |node: &DeviceNode, other: &DeviceNode| {
            (&node.host_path, &node.container_path) == (&other.host_path, &other.container_path)
        };
        let is_own_mount = |mount: &Mount, other: &Mount| {
            (&mount.host_path, &mount.container_path) == (&other.host_path, &other.container_path)
        };
        let of_any = |check: &dyn Fn(&Self) -> bool| own.values().any(check);
        let mut split = BTreeMap::new();
        for (device, own) in own {
            let mut edits = Self::default();
            for node in &self.device_nodes {
                match own.device_nodes.iter().find(|other| is_own(node, other)) {
                    Some(own) => edits.add_node(own.clone()),
                    None if of_any(&|other| other.device_nodes.iter().any(|other| is_own(node, other))) => {}
                    None => edits.add_node(node.clone()),
                }
            }
            for mount in &self.mounts {
                match own.mounts.iter().find(|other| is_own_mount(mount, other)) {
                    Some(own) => edits.add_mount(own.clone()),
                    None if of_any(&|other| other.mounts.iter().any(|other| is_own_mount(mount, other))) => {}
                    None => edits.add_mount(mount.clone()),
                }
            }
            let named = environment_name(device);
            for (name, value) in &self.environment {
                let of_another = device_of_environment_name(name).is_some() && *name != named;
                let is_own = own.environment.contains_key(name);
                if is_own || (!of_another && !of_any(&|other| other.environment.contains_key(name))) {
                    edits.environment.insert(name.clone(), value.clone());
                }
            }
            split.insert(device.clone(), edits);
        }
        split
    }

    /// Refuses two different edits at one container path: the container would silently see only one of them. Identical edits are already
    /// merged by [`Self::extend`].
    pub fn check_paths(&self) -> Result<(), PathConflict> {
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
                return Err(PathConflict {
                    container_path: container_path.to_owned(),
                    first,
                    second,
                });
            }
        }
        Ok(())
    }
}

/// Two different edits at one path of a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{first} and {second} would both be {container_path} in a container, which can see only one of them: use {{device}} or {{n}} in containerPaths of the kind, or request one device at a time"
)]
pub struct PathConflict {
    /// The path in the container.
    pub container_path: String,
    /// The first edit: `device node` or `mount of`, and its path on the node.
    pub first: String,
    /// The second edit, in the same form.
    pub second: String,
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

/// Mount option for read-only mounts.
const READ_ONLY: &str = "ro";

/// Builds the CDI file of a classic claim.
pub fn cdi_spec(driver: &DriverName, uid: &ClaimUid, container_edits: &ContainerEdits) -> cdi::Spec {
    spec(driver.cdi_kind(), uid.to_string(), container_edits)
}

/// Builds the CDI file of a device for the device plugin API, for kinds configured to be passed by CDI name.
pub fn cdi_spec_of_device(driver: &DriverName, device: &str, container_edits: &ContainerEdits) -> cdi::Spec {
    spec(driver.cdi_device_kind(), device.to_owned(), container_edits)
}

fn spec(kind: String, name: String, container_edits: &ContainerEdits) -> cdi::Spec {
    cdi::Spec {
        cdi_version: cdi::VERSION.to_owned(),
        kind,
        devices: vec![cdi_device(name, container_edits)],
    }
}

/// Builds one CDI device.
pub(super) fn cdi_device(name: String, container_edits: &ContainerEdits) -> cdi::Device {
    let node = |node: &DeviceNode| cdi::DeviceNode {
        path: node.container_path.clone(),
        host_path: node.host_path.clone(),
        permissions: node.permissions.clone(),
    };
    cdi::Device {
        name,
        container_edits: cdi::ContainerEdits {
            env: container_edits
                .environment
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect(),
            device_nodes: container_edits.device_nodes.iter().map(node).collect(),
            mounts: container_edits.mounts.iter().map(cdi_mount).collect(),
        },
    }
}

/// A mount in the form of CDI. Mounted files grant no set-uid privileges and no further devices.
pub(super) fn cdi_mount(mount: &Mount) -> cdi::Mount {
    cdi::Mount {
        host_path: mount.host_path.clone(),
        container_path: mount.container_path.clone(),
        options: [
            "rbind",
            "nosuid",
            "nodev",
            if mount.read_only { READ_ONLY } else { "rw" },
        ]
        .map(str::to_owned)
        .to_vec(),
    }
}

/// The edits of a CDI device; `None` if a variable has no value.
pub(super) fn edits_of_cdi(edits: &cdi::ContainerEdits) -> Option<ContainerEdits> {
    let variable = |variable: &String| {
        let (name, value) = variable.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    };
    let node = |node: &cdi::DeviceNode| DeviceNode {
        host_path: node.host_path.clone(),
        container_path: node.path.clone(),
        permissions: node.permissions.clone(),
    };
    let mount = |mount: &cdi::Mount| Mount {
        host_path: mount.host_path.clone(),
        container_path: mount.container_path.clone(),
        read_only: mount.options.iter().any(|option| option == READ_ONLY),
    };
    Some(ContainerEdits {
        device_nodes: edits.device_nodes.iter().map(node).collect(),
        environment: edits.env.iter().map(variable).collect::<Option<_>>()?,
        mounts: edits.mounts.iter().map(mount).collect(),
        ..ContainerEdits::default()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::plan::Refusal;
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
    fn equal_edits_of_two_devices_appear_once() {
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
    fn two_sources_at_one_container_path_are_refused() {
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
        let conflict = two(at("/dev/ttyUSB0", "/dev/port"), at("/dev/ttyUSB1", "/dev/port"))
            .check_paths()
            .unwrap_err();
        let text = conflict.to_string();
        assert_eq!(Refusal::from(conflict).reason(), "ContainerPathTaken");
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
    fn the_same_device_node_twice_has_the_union_of_permissions() {
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
        fn only_our_own_variables_are_set(device in ".{0,40}|LD_PRELOAD|PATH|BASH_ENV|[A-Z_=\\n\\x00]{1,20}") {
            let container_edits = ContainerEdits::of_device_node(&device, node("/dev/null"));
            for name in container_edits.environment.keys() {
                prop_assert!(name.starts_with("DRAYMAN_DEVICE_"));
                prop_assert!(name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_'));
            }
        }
    }

    #[test]
    fn a_container_gets_only_the_edits_of_its_devices() {
        let of = |device: &str, path: &str, permissions: &str| {
            let node = DeviceNode {
                host_path: path.into(),
                container_path: path.into(),
                permissions: permissions.into(),
            };
            let mut edits = ContainerEdits::of_device_node(device, node);
            edits.add_node(DeviceNode {
                host_path: "/dev/control".into(),
                container_path: "/dev/control".into(),
                permissions: permissions.into(),
            });
            edits
        };
        let (a, b) = (of("a", "/dev/a", "r"), of("b", "/dev/b", "rw"));
        let mut all = a.clone();
        all.extend(b.clone());
        // The driver adds an edit for the claim as a whole.
        all.environment.insert("SESSION".into(), "7".into());
        let own = BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), b)]);
        let split = all.of_each(&own);
        for (device, other) in [("a", "b"), ("b", "a")] {
            let edits = &split[device];
            let sorted = |edits: &ContainerEdits| {
                let mut nodes = edits.device_nodes.clone();
                nodes.sort();
                nodes
            };
            assert_eq!(sorted(edits), sorted(&own[device]));
            assert!(edits.environment.contains_key("SESSION"));
            assert!(
                !edits.environment.contains_key(&environment_name(other)),
                "{edits:?}"
            );
        }
    }
}
