//! The CDI files of devices that the device plugin API passes by name: one file per device, for as long as the device exists.
//!
//! Kubelet restarts a container with its original CDI names, so a file outlives every container.

use std::collections::BTreeSet;
use std::io;

use super::cdi::CdiDirectory;
use super::{StoreError, files};
use crate::core::prepare::container_edits::{ContainerEdits, cdi_spec_of_device};

impl CdiDirectory {
    /// Updates the file of a device, whose name is a DNS label.
    pub(super) fn write_device(
        &self,
        device: &str,
        container_edits: &ContainerEdits,
    ) -> Result<(), StoreError> {
        let path = self.directory.join(self.driver.cdi_device_file(device));
        self.write_spec(&path, &cdi_spec_of_device(&self.driver, device, container_edits))
    }

    /// Removes the files of all other devices, and incomplete files of an earlier process.
    pub(super) fn keep_devices(&self, devices: &BTreeSet<String>) -> Result<(), StoreError> {
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(StoreError::io("list", &self.directory)(error)),
        };
        let prefix = self.driver.cdi_device_file_prefix();
        for entry in entries {
            let entry = entry.map_err(StoreError::io("list", &self.directory))?;
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(&prefix)) else {
                continue;
            };
            let (file, half_written) = match rest.strip_suffix(files::TEMPORARY) {
                Some(file) => (file, true),
                None => (rest, false),
            };
            if let Some(device) = file.strip_suffix(".json")
                && (half_written || !devices.contains(device))
            {
                files::remove(&self.disk, &entry.path())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use container_device_interface::cache::{new_cache, with_auto_refresh};
    use container_device_interface::spec_dirs::with_spec_dirs;

    use super::*;
    use crate::core::prepare::container_edits::{DeviceNode, Mount};
    use crate::core::prepare::names::DriverName;

    fn names(directory: &std::path::Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn only_the_files_of_devices_that_are_there_stay() {
        let directory = tempfile::tempdir().unwrap();
        let files = CdiDirectory::new(DriverName::parse("drayman.dev").unwrap(), directory.path());
        for device in ["a", "b"] {
            files.write_device(device, &ContainerEdits::default()).unwrap();
        }
        for name in [
            "drayman.dev-claim_x.json",
            "drayman.dev-device_c.json.tmp",
            "other.dev-device_a.json",
        ] {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        files.keep_devices(&BTreeSet::from(["b".to_owned()])).unwrap();
        assert_eq!(
            names(directory.path()),
            [
                "drayman.dev-claim_x.json",
                "drayman.dev-device_b.json",
                "other.dev-device_a.json"
            ]
        );
    }

    #[test]
    fn the_runtime_finds_a_cdi_device_by_name_with_its_mount() {
        let directory = tempfile::tempdir().unwrap();
        let driver = DriverName::parse("drayman.dev").unwrap();
        let files = CdiDirectory::new(driver.clone(), directory.path());
        let node = DeviceNode {
            host_path: "/dev/null".into(),
            container_path: "/dev/a".into(),
            permissions: "rw".into(),
        };
        let container_edits = ContainerEdits {
            mounts: vec![Mount {
                host_path: "/opt".into(),
                container_path: "/vendor".into(),
                read_only: true,
            }],
            ..ContainerEdits::of_device_node("a", node)
        };
        files.write_device("a", &container_edits).unwrap();
        let cache = new_cache(vec![
            with_spec_dirs(&[directory.path().to_str().unwrap()]),
            with_auto_refresh(false),
        ]);
        let mut cache = cache.lock().unwrap();
        cache.refresh().unwrap();
        let mut container = oci_spec::runtime::Spec::default();
        let before = container.mounts().as_ref().map_or(0, Vec::len);
        cache
            .inject_devices(Some(&mut container), vec![driver.cdi_device_id("a")])
            .unwrap();
        let container = serde_json::to_value(&container).unwrap();
        assert_eq!(container["linux"]["devices"][0]["path"], "/dev/a");
        let mounts = container["mounts"].as_array().unwrap();
        assert_eq!(mounts.len(), before + 1);
        let mount = mounts
            .iter()
            .find(|mount| mount["destination"] == "/vendor")
            .unwrap();
        assert_eq!(mount["source"], "/opt");
    }
}
