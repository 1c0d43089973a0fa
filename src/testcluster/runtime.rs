//! Container runtime stand-in: resolves CDI device ids like a runtime and computes the resulting container edits.

use std::collections::BTreeMap;
use std::path::Path;

use crate::api::cdi;

/// Devices, environment and mounts of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerConfig {
    /// Device nodes: container path, host path, permissions.
    pub devices: Vec<(String, String, String)>,
    /// Environment variables.
    pub environment: BTreeMap<String, String>,
    /// Mounts: container path, host path, options.
    pub mounts: Vec<(String, String, Vec<String>)>,
}

/// Why a container cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeError {
    /// The device is not in exactly one CDI file.
    #[error("unresolvable CDI devices {0}")]
    Unresolvable(String),
    /// A device node does not exist.
    #[error("device node {0} does not exist on the host")]
    NoDevice(String),
}

impl ContainerConfig {
    /// Adds the container edits of a CDI device in a file of the directory `cdi`. Ignores other files there, as runtimes do.
    pub fn add_cdi(&mut self, cdi: &Path, dev: &Path, id: &str) -> Result<(), RuntimeError> {
        let unresolvable = || RuntimeError::Unresolvable(id.to_owned());
        let (kind, name) = id.split_once('=').ok_or_else(unresolvable)?;
        let mut found = Vec::new();
        for entry in std::fs::read_dir(cdi).into_iter().flatten().flatten() {
            if entry
                .path()
                .extension()
                .is_none_or(|extension| extension != "json")
            {
                continue;
            }
            let spec = std::fs::read(entry.path())
                .ok()
                .and_then(|bytes| serde_json::from_slice::<cdi::Spec>(&bytes).ok());
            let devices = spec
                .filter(|spec| spec.kind == kind)
                .map(|spec| spec.devices)
                .unwrap_or_default();
            found.extend(devices.into_iter().filter(|device| device.name == name));
        }
        // Runtimes cannot resolve a device that is in two files.
        let [device] = found.as_slice() else {
            return Err(unresolvable());
        };
        for node in &device.container_edits.device_nodes {
            self.add_device(dev, &node.path, &node.host_path, &node.permissions)?;
        }
        for mount in &device.container_edits.mounts {
            // Whether the mount would succeed is not checked.
            let (path, host) = (mount.container_path.clone(), mount.host_path.clone());
            self.mounts.push((path, host, mount.options.clone()));
        }
        for variable in &device.container_edits.env {
            if let Some((name, value)) = variable.split_once('=') {
                self.environment.insert(name.to_owned(), value.to_owned());
            }
        }
        Ok(())
    }

    /// Adds a device node, whose type and numbers a runtime reads from the host. `dev` is the host's `/dev` as this
    /// process sees it.
    pub fn add_device(
        &mut self,
        dev: &Path,
        path: &str,
        host_path: &str,
        permissions: &str,
    ) -> Result<(), RuntimeError> {
        let seen = Path::new(host_path)
            .strip_prefix("/dev")
            .map(|below| dev.join(below));
        if !seen.is_ok_and(|seen| seen.exists()) {
            return Err(RuntimeError::NoDevice(host_path.to_owned()));
        }
        self.devices
            .push((path.to_owned(), host_path.to_owned(), permissions.to_owned()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_resolved_from_the_one_file_that_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let dev = Path::new("/dev");
        let spec = cdi::Spec {
            cdi_version: cdi::VERSION.into(),
            kind: "v/claim".into(),
            devices: vec![cdi::Device {
                name: "a".into(),
                container_edits: cdi::ContainerEdits {
                    env: vec!["A=b".into()],
                    device_nodes: vec![cdi::DeviceNode {
                        path: "/dev/x".into(),
                        host_path: "/dev/null".into(),
                        permissions: "rw".into(),
                    }],
                    mounts: vec![cdi::Mount {
                        host_path: "/opt/library".into(),
                        container_path: "/library".into(),
                        options: vec!["ro".into()],
                    }],
                },
            }],
        };
        std::fs::write(
            directory.path().join("a.json"),
            serde_json::to_vec(&spec).unwrap(),
        )
        .unwrap();
        std::fs::write(directory.path().join("broken.json"), "{").unwrap();
        let mut config = ContainerConfig::default();
        config.add_cdi(directory.path(), dev, "v/claim=a").unwrap();
        assert_eq!(
            config.devices,
            [("/dev/x".into(), "/dev/null".into(), "rw".into())]
        );
        assert_eq!(config.environment["A"], "b");
        assert_eq!(
            config.mounts,
            [("/library".into(), "/opt/library".into(), vec!["ro".into()])]
        );
        for id in ["v/claim=b", "w/claim=a", "nonsense"] {
            let refused = config.add_cdi(directory.path(), dev, id);
            assert_eq!(refused, Err(RuntimeError::Unresolvable(id.to_owned())));
        }
        std::fs::write(
            directory.path().join("b.json"),
            serde_json::to_vec(&spec).unwrap(),
        )
        .unwrap();
        assert!(config.add_cdi(directory.path(), dev, "v/claim=a").is_err());
        let refused = config.add_device(dev, "/dev/x", "/dev/none", "rw");
        assert_eq!(refused, Err(RuntimeError::NoDevice("/dev/none".to_owned())));
    }
}
