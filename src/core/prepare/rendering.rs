//! Conversion of a claim's container edits to a CDI file and back: a lost checkpoint is rebuilt from CDI files.

use std::collections::BTreeMap;

use super::claim_uid::ClaimUid;
use super::container_edits::{ContainerEdits, DeviceNode, Mount};
use super::driver_name::DriverName;
use super::naming::device_of_environment_name;
use super::prepared_claims::{Entry, HeldDevice, Progress};
use crate::api::cdi;

/// Mount option for read-only mounts.
const READ_ONLY: &str = "ro";

/// Builds the CDI file of a claim. Kind and name derive only from the driver name and the claim's uid.
pub fn cdi_spec(driver: &DriverName, uid: &ClaimUid, container_edits: &ContainerEdits) -> cdi::Spec {
    spec(driver.cdi_kind(), uid.to_string(), container_edits)
}

/// Builds the CDI file of a device for the device plugin API, for kinds configured to be passed by CDI name.
pub fn cdi_spec_of_device(driver: &DriverName, device: &str, container_edits: &ContainerEdits) -> cdi::Spec {
    spec(driver.cdi_device_kind(), device.to_owned(), container_edits)
}

fn spec(kind: String, name: String, container_edits: &ContainerEdits) -> cdi::Spec {
    let node = |node: &DeviceNode| cdi::DeviceNode {
        path: node.container_path.clone(),
        host_path: node.host_path.clone(),
        permissions: node.permissions.clone(),
    };
    // Mounted files grant no set-uid privileges and no further devices.
    let mount = |mount: &Mount| cdi::Mount {
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
    };
    cdi::Spec {
        cdi_version: cdi::VERSION.to_owned(),
        kind,
        devices: vec![cdi::Device {
            name,
            container_edits: cdi::ContainerEdits {
                env: container_edits
                    .environment
                    .iter()
                    .map(|(name, value)| format!("{name}={value}"))
                    .collect(),
                device_nodes: container_edits.device_nodes.iter().map(node).collect(),
                mounts: container_edits.mounts.iter().map(mount).collect(),
            },
        }],
    }
}

/// Reads a claim's entry from a CDI file of this driver. The devices come from the variables named after them; namespace, name and kinds
/// are not in the file. Returns `None` if the file does not have the form that [`cdi_spec`] produces.
///
/// The entry counts as prepared in this boot. That is true if `/var/run` is kept in memory, and the safe assumption elsewhere.
pub fn entry_of_cdi_spec(
    driver: &DriverName,
    uid: &ClaimUid,
    boot_id: &str,
    spec: &cdi::Spec,
) -> Option<Entry> {
    let [device] = spec.devices.as_slice() else {
        return None;
    };
    if spec.kind != driver.cdi_kind() || device.name != uid.as_str() {
        return None;
    }
    let mut environment = BTreeMap::new();
    let mut devices = Vec::new();
    for variable in &device.container_edits.env {
        let (name, value) = variable.split_once('=')?;
        // A driver may set other variables, too.
        if let Some(device) = device_of_environment_name(name) {
            devices.push(HeldDevice {
                device,
                ..HeldDevice::default()
            });
        }
        environment.insert(name.to_owned(), value.to_owned());
    }
    if devices.is_empty() {
        return None;
    }
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
    let device_nodes = device.container_edits.device_nodes.iter().map(node).collect();
    let mounts = device.container_edits.mounts.iter().map(mount).collect();
    Some(Entry {
        namespace: String::new(),
        name: String::new(),
        boot_id: boot_id.to_owned(),
        devices,
        progress: Progress::Done {
            container_edits: ContainerEdits {
                device_nodes,
                environment,
                mounts,
                ..ContainerEdits::default()
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver() -> DriverName {
        DriverName::parse("drayman.dev").unwrap()
    }

    fn uid() -> ClaimUid {
        ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap()
    }

    fn container_edits() -> ContainerEdits {
        let node = |path: &str| DeviceNode {
            host_path: path.into(),
            container_path: path.into(),
            permissions: "rw".into(),
        };
        let mut container_edits = ContainerEdits::of_device_node("kvm", node("/dev/kvm"));
        container_edits.extend(ContainerEdits::of_device_node("tty-usb0", node("/dev/tty-usb0")));
        container_edits
    }

    fn mounting() -> ContainerEdits {
        let mount = |path: &str, read_only| Mount {
            host_path: path.into(),
            container_path: path.into(),
            read_only,
        };
        ContainerEdits {
            mounts: vec![mount("/opt/vendor", true), mount("/run/vendor", false)],
            ..container_edits()
        }
    }

    #[test]
    fn mounts_are_read_back_as_they_were_written() {
        let spec = cdi_spec(&driver(), &uid(), &mounting());
        assert_eq!(
            spec.devices[0].container_edits.mounts[0].options,
            ["rbind", "nosuid", "nodev", "ro"]
        );
        let entry = entry_of_cdi_spec(&driver(), &uid(), "boot", &spec).unwrap();
        assert_eq!(entry.container_edits(), Some(&mounting()));
    }

    #[test]
    fn a_device_has_a_file_of_another_class_than_claims() {
        let spec = cdi_spec_of_device(&driver(), "kvm", &container_edits());
        assert_eq!(
            (spec.kind.as_str(), spec.devices[0].name.as_str()),
            ("drayman.dev/device", "kvm")
        );
    }

    #[test]
    fn the_file_says_what_the_specification_asks_for() {
        let text = serde_json::to_string(&cdi_spec(&driver(), &uid(), &container_edits())).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"cdiVersion":"0.5.0","kind":"drayman.dev/claim","devices":[{"name":"7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10","#,
                r#""containerEdits":{"env":["DRAYMAN_DEVICE_KVM=/dev/kvm","DRAYMAN_DEVICE_TTY_USB0=/dev/tty-usb0"],"#,
                r#""deviceNodes":[{"path":"/dev/kvm","hostPath":"/dev/kvm","permissions":"rw"},"#,
                r#"{"path":"/dev/tty-usb0","hostPath":"/dev/tty-usb0","permissions":"rw"}]}}]}"#
            )
        );
    }

    #[test]
    fn a_file_tells_which_devices_the_claim_holds() {
        let entry = entry_of_cdi_spec(
            &driver(),
            &uid(),
            "boot",
            &cdi_spec(&driver(), &uid(), &container_edits()),
        )
        .unwrap();
        assert_eq!(entry.container_edits(), Some(&container_edits()));
        assert_eq!(
            entry
                .devices
                .iter()
                .map(|held| held.device.as_str())
                .collect::<Vec<_>>(),
            ["kvm", "tty-usb0"]
        );
    }

    #[test]
    fn a_file_that_is_not_as_we_write_it_tells_nothing() {
        let good = cdi_spec(&driver(), &uid(), &container_edits());
        let mut other_kind = good.clone();
        other_kind.kind = "other.dev/claim".into();
        let mut other_name = good.clone();
        other_name.devices[0].name = "x".into();
        let mut other_variable = good.clone();
        other_variable.devices[0].container_edits.env = vec!["PATH=/x".into()];
        let mut no_variable = good.clone();
        no_variable.devices[0].container_edits.env.clear();
        let mut two_devices = good.clone();
        two_devices.devices.push(two_devices.devices[0].clone());
        for spec in [other_kind, other_name, other_variable, no_variable, two_devices] {
            assert_eq!(
                entry_of_cdi_spec(&driver(), &uid(), "boot", &spec),
                None,
                "{spec:?}"
            );
        }
    }
}
