//! The CDI files of claims, and those of devices that the device plugin API passes by name: one file per device, for as long as the device
//! exists. Kubelet restarts a container with its original CDI names, so such a file outlives every container.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use super::StoreError;
use super::disk::{self, Disk, DiskStep};
use crate::api::cdi::Spec;
use crate::core::prepare::container_edits::{
    ContainerEdits, cdi_mount, cdi_spec_of_device, cdi_spec_of_entry,
};
use crate::core::prepare::device_metadata::metadata_files;
use crate::core::prepare::names::{ClaimUid, DriverName};
use crate::core::prepare::prepared_claims::Entry;

/// Maximum size of a CDI file, in bytes.
const SIZE_MAX: u64 = 1024 * 1024;

/// The CDI files of one driver. Other files in the directory are never touched.
#[derive(Debug)]
pub struct CdiDirectory {
    pub(super) driver: DriverName,
    pub(super) directory: PathBuf,
    pub(super) disk: Disk,
}

impl CdiDirectory {
    /// The files of a driver in a directory.
    pub fn new(driver: DriverName, directory: &Path) -> Self {
        Self {
            driver,
            directory: directory.to_owned(),
            disk: Disk::default(),
        }
    }

    /// Uses this disk, which a test can observe.
    #[must_use]
    pub(super) fn on(mut self, disk: Disk) -> Self {
        self.disk = disk;
        self
    }

    /// The claims with a CDI file; none if the directory is missing.
    pub fn claims(&self) -> Result<BTreeSet<ClaimUid>, StoreError> {
        self.list().map(|(claims, _)| claims)
    }

    /// Removes incomplete files of an earlier process, as far as possible.
    pub fn remove_half_written(&self) -> Result<(), StoreError> {
        for name in self.list()?.1 {
            if let Err(error) = disk::remove(&self.disk, &self.directory.join(&name)) {
                tracing::warn!(reason = error.reason(), "{error}");
            }
        }
        Ok(())
    }

    /// The claims with a file, and the names of incomplete files.
    fn list(&self) -> Result<(BTreeSet<ClaimUid>, Vec<String>), StoreError> {
        let list = StoreError::io("list", &self.directory);
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
            Err(error) => return Err(list(error)),
        };
        let names: Vec<String> = entries
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<io::Result<Vec<_>>>()
            .map_err(list)?
            .into_iter()
            .filter_map(|name| name.into_string().ok())
            .collect();
        let prefix = self.driver.cdi_file_prefix();
        let (mut claims, mut half_written) = (BTreeSet::new(), Vec::new());
        for name in names {
            let Some(rest) = name.strip_prefix(&prefix) else {
                continue;
            };
            let (rest, temporary) = match rest.strip_suffix(disk::TEMPORARY) {
                Some(rest) => (rest, true),
                None => (rest, false),
            };
            let Some(Ok(uid)) = rest.strip_suffix(".json").map(ClaimUid::parse) else {
                continue;
            };
            if temporary {
                half_written.push(name);
            } else {
                claims.insert(uid);
            }
        }
        Ok((claims, half_written))
    }

    /// Updates the file of a claim, and before it the metadata files that it mounts. Writes nothing if they are up to date.
    pub fn write(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), StoreError> {
        let Some(mut spec) = cdi_spec_of_entry(&self.driver, uid, entry) else {
            return Ok(());
        };
        let directory = self.metadata_directory(uid);
        for file in metadata_files(&self.driver, uid, entry) {
            let path = directory.join(&file.name);
            self.write_file(&path, file.content.as_bytes())?;
            let mut devices = spec.devices.iter_mut();
            if let Some(device) = devices.find(|device| device.name == file.cdi_device) {
                let mount = file.mount(path.display().to_string());
                device.container_edits.mounts.push(cdi_mount(&mount));
            }
        }
        self.write_spec(&self.path(uid), &spec)
    }

    /// Updates a CDI file. Writes nothing if it is up to date.
    pub(super) fn write_spec(&self, path: &Path, spec: &Spec) -> Result<(), StoreError> {
        let text = serde_json::to_vec(spec).map_err(|error| StoreError::io("write", path)(error.into()))?;
        self.write_file(path, &text)
    }

    fn write_file(&self, path: &Path, text: &[u8]) -> Result<(), StoreError> {
        if disk::read(path, SIZE_MAX).is_ok_and(|found| found.as_deref() == Some(text)) {
            return Ok(());
        }
        // The directory may have been removed together with the rest of /var/run.
        disk::make_directory(path.parent().unwrap_or(&self.directory), 0o755)?;
        disk::replace(&self.disk, path, text, 0o644)
    }

    /// Reads the file of a claim. Returns `None` if it is missing or not a valid CDI file. An error is an I/O error; a retry may succeed.
    pub fn read(&self, uid: &ClaimUid) -> Result<Option<Spec>, StoreError> {
        let path = self.path(uid);
        let text = match disk::read(&path, SIZE_MAX) {
            Err(error) if disk::is_no_file_of_ours(&error) => None,
            read => read.map_err(StoreError::io("read", &path))?,
        };
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Removes the file of a claim, if it exists. The removal survives a power loss, because a stale file would indicate a prepared claim.
    /// Then removes the metadata files of the claim.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        let path = self.path(uid);
        if path.symlink_metadata().is_err() {
            disk::remove(&self.disk, &path)?;
        } else {
            disk::remove(&self.disk, &path)?;
            disk::sync_directory(&self.disk, &self.directory)?;
        }
        self.remove_metadata(uid)
    }

    /// Removes the metadata files of claims that are not prepared, as far as possible: a process may have been killed before it removed them.
    pub fn keep_metadata(&self, claims: &BTreeMap<ClaimUid, Entry>) {
        let directory = self.directory.join(self.driver.metadata_directory());
        let Ok(entries) = std::fs::read_dir(directory) else {
            return;
        };
        let uids = entries
            .flatten()
            .filter_map(|entry| ClaimUid::parse(entry.file_name().to_str()?).ok());
        for uid in uids.filter(|uid| !claims.contains_key(uid)) {
            if let Err(error) = self.remove_metadata(&uid) {
                tracing::warn!(reason = error.reason(), "{error}");
            }
        }
    }

    fn remove_metadata(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        let directory = self.metadata_directory(uid);
        if directory.symlink_metadata().is_err() {
            return Ok(());
        }
        self.disk
            .step(DiskStep::Remove, &directory, || {
                std::fs::remove_dir_all(&directory)
            })
            .map_err(StoreError::io("remove", &directory))
    }

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
            let (file, half_written) = match rest.strip_suffix(disk::TEMPORARY) {
                Some(file) => (file, true),
                None => (rest, false),
            };
            if let Some(device) = file.strip_suffix(".json")
                && (half_written || !devices.contains(device))
            {
                disk::remove(&self.disk, &entry.path())?;
            }
        }
        Ok(())
    }

    fn metadata_directory(&self, uid: &ClaimUid) -> PathBuf {
        self.directory
            .join(self.driver.metadata_directory())
            .join(uid.as_str())
    }

    fn path(&self, uid: &ClaimUid) -> PathBuf {
        self.directory.join(self.driver.cdi_file(uid))
    }
}

#[cfg(test)]
mod tests {
    use container_device_interface::cache::{new_cache, with_auto_refresh};
    use container_device_interface::spec::{parse_spec, read_spec, validate_spec};
    use container_device_interface::spec_dirs::with_spec_dirs;

    use super::*;
    use crate::api::crd::Device;
    use crate::core::prepare::container_edits::{DeviceNode, Mount};
    use crate::core::prepare::device_metadata::DeviceMetadata;
    use crate::core::prepare::prepared_claims::{HeldDevice, Progress, Structured};

    /// A container to which the runtime's library has added a CDI device.
    fn injected(directory: &Path, id: String) -> serde_json::Value {
        let cache = new_cache(vec![
            with_spec_dirs(&[directory.to_str().unwrap()]),
            with_auto_refresh(false),
        ]);
        let mut cache = cache.lock().unwrap();
        cache.refresh().unwrap();
        let mut container = oci_spec::runtime::Spec::default();
        cache.inject_devices(Some(&mut container), vec![id]).unwrap();
        serde_json::to_value(&container).unwrap()
    }

    fn uid(last: char) -> ClaimUid {
        ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0{last}")).unwrap()
    }

    fn directory() -> (tempfile::TempDir, CdiDirectory) {
        let directory = tempfile::tempdir().unwrap();
        let files = CdiDirectory::new(DriverName::parse("drayman.dev").unwrap(), directory.path());
        (directory, files)
    }

    fn null() -> Entry {
        let node = DeviceNode {
            host_path: "/dev/null".into(),
            container_path: "/dev/drayman-test-0".into(),
            permissions: "rw".into(),
        };
        Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: "boot".into(),
            devices: vec![HeldDevice::named("drayman-test-0")],
            progress: Progress::Done {
                container_edits: ContainerEdits::of_device_node("drayman-test-0", node),
            },
        }
    }

    #[test]
    fn a_runtimes_own_reader_takes_what_is_written() {
        let (_directory, files) = directory();
        files.write(&uid('1'), &null()).unwrap();
        let path = files.path(&uid('1'));
        validate_spec(&parse_spec(&path).unwrap()).unwrap();
        assert_eq!(read_spec(&path, 1).unwrap().get_vendor(), "drayman.dev");
    }

    #[test]
    fn the_runtime_adds_the_node_and_variable_of_a_cdi_file() {
        let (directory, files) = directory();
        files.write(&uid('1'), &null()).unwrap();
        let id = DriverName::parse("drayman.dev").unwrap().cdi_id(&uid('1'));
        let container = injected(directory.path(), id);
        let variables = container["process"]["env"].as_array().unwrap();
        assert!(
            variables
                .iter()
                .any(|v| v == "DRAYMAN_DEVICE_DRAYMAN_TEST_0=/dev/drayman-test-0"),
            "{variables:?}"
        );
        let device = &container["linux"]["devices"][0];
        assert_eq!(
            (device["path"].as_str(), device["major"].as_i64()),
            (Some("/dev/drayman-test-0"), Some(1))
        );
        assert_eq!(container["hooks"], serde_json::Value::Null);
    }

    #[test]
    fn only_our_files_are_seen_and_partial_ones_are_removed() {
        let (directory, files) = directory();
        files.write(&uid('1'), &null()).unwrap();
        let half = format!("drayman.dev-claim_{}.json.tmp", uid('2'));
        for name in [
            half.as_str(),
            "drayman.dev-claim_x.json",
            "other.dev-claim_7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a03.json",
            "drayman.dev-claim_7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a04.yaml",
            "drayman.dev-claim-claim_7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a05.json",
        ] {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        assert_eq!(files.claims().unwrap(), BTreeSet::from([uid('1')]));
        assert!(directory.path().join(&half).exists());
        files.remove_half_written().unwrap();
        assert!(!directory.path().join(half).exists());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 5);
    }

    #[test]
    fn a_file_that_says_the_same_already_is_not_written_again() {
        let (_directory, files) = directory();
        files.write(&uid('1'), &null()).unwrap();
        let before = files.path(&uid('1')).metadata().unwrap().modified().unwrap();
        files.write(&uid('1'), &null()).unwrap();
        assert_eq!(
            files.path(&uid('1')).metadata().unwrap().modified().unwrap(),
            before
        );
        std::fs::write(files.path(&uid('1')), "damaged").unwrap();
        files.write(&uid('1'), &null()).unwrap();
        assert!(files.read(&uid('1')).unwrap().is_some());
    }

    #[test]
    fn metadata_is_mounted_and_removed_with_the_claim() {
        let (directory, files) = directory();
        let mut metadata = DeviceMetadata::new("node-a", "request", None);
        metadata.describe(&Device::default());
        let mut entry = null();
        entry.devices[0].structured = Some(Structured {
            metadata,
            ..Structured::default()
        });
        let path = directory
            .path()
            .join(format!("drayman.dev-metadata/{}/0.json", uid('1')));
        let mounted = || {
            let spec = files.read(&uid('1')).unwrap().unwrap();
            let mounts = &spec.devices[0].container_edits.mounts;
            assert_eq!(mounts[0].host_path, path.to_str().unwrap());
            assert!(mounts[0].options.iter().any(|option| option == "ro"));
            std::fs::read_to_string(&path).unwrap()
        };
        files.write(&uid('1'), &entry).unwrap();
        let content = mounted();
        // Both are restored.
        std::fs::write(&path, "damaged").unwrap();
        files.write(&uid('1'), &entry).unwrap();
        assert_eq!(mounted(), content);
        std::fs::remove_dir_all(directory.path().join("drayman.dev-metadata")).unwrap();
        files.write(&uid('1'), &entry).unwrap();
        assert_eq!(mounted(), content);

        files.write(&uid('2'), &entry).unwrap();
        files.keep_metadata(&BTreeMap::from([(uid('2'), entry)]));
        assert!(!path.exists());
        files.remove(&uid('2')).unwrap();
        let left = directory.path().join("drayman.dev-metadata");
        assert_eq!(std::fs::read_dir(left).unwrap().count(), 0);
    }

    #[test]
    fn removing_twice_is_as_good_as_once() {
        let (_directory, files) = directory();
        files.write(&uid('1'), &null()).unwrap();
        files.remove(&uid('1')).unwrap();
        files.remove(&uid('1')).unwrap();
        assert_eq!(files.claims().unwrap(), BTreeSet::new());
    }

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
        let before = oci_spec::runtime::Spec::default()
            .mounts()
            .as_ref()
            .map_or(0, Vec::len);
        let container = injected(directory.path(), driver.cdi_device_id("a"));
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
