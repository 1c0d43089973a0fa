//! The CDI files of claims.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::{StoreError, files};
use crate::api::cdi::Spec;
use crate::core::prepare::container_edits::cdi_spec_of_entry;
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
            if let Err(error) = files::remove(&self.disk, &self.directory.join(&name)) {
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
            let (rest, temporary) = match rest.strip_suffix(files::TEMPORARY) {
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

    /// Updates the file of a claim. Writes nothing if it is up to date.
    pub fn write(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), StoreError> {
        match cdi_spec_of_entry(&self.driver, uid, entry) {
            Some(spec) => self.write_spec(&self.path(uid), &spec),
            None => Ok(()),
        }
    }

    /// Updates a CDI file. Writes nothing if it is up to date.
    pub(super) fn write_spec(&self, path: &Path, spec: &Spec) -> Result<(), StoreError> {
        let text = serde_json::to_vec(spec).map_err(|error| StoreError::io("write", path)(error.into()))?;
        if files::read(path, SIZE_MAX).is_ok_and(|found| found.as_ref() == Some(&text)) {
            return Ok(());
        }
        // The directory may have been removed together with the rest of /var/run.
        files::make_directory(&self.directory, 0o755)?;
        files::replace(&self.disk, path, &text, 0o644)
    }

    /// Reads the file of a claim. Returns `None` if it is missing or not a valid CDI file. An error is an I/O error; a retry may succeed.
    pub fn read(&self, uid: &ClaimUid) -> Result<Option<Spec>, StoreError> {
        let path = self.path(uid);
        let text = match files::read(&path, SIZE_MAX) {
            Err(error) if files::is_no_file_of_ours(&error) => None,
            read => read.map_err(StoreError::io("read", &path))?,
        };
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Removes the file of a claim, if it exists. The removal survives a power loss, because a stale file would indicate a prepared claim.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        let path = self.path(uid);
        if path.symlink_metadata().is_err() {
            return files::remove(&self.disk, &path);
        }
        files::remove(&self.disk, &path)?;
        files::sync_directory(&self.disk, &self.directory)
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
    use crate::core::prepare::container_edits::{ContainerEdits, DeviceNode};
    use crate::core::prepare::prepared_claims::{HeldDevice, Progress};

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
        let cache = new_cache(vec![
            with_spec_dirs(&[directory.path().to_str().unwrap()]),
            with_auto_refresh(false),
        ]);
        let mut cache = cache.lock().unwrap();
        cache.refresh().unwrap();
        let mut container = oci_spec::runtime::Spec::default();
        let id = DriverName::parse("drayman.dev").unwrap().cdi_id(&uid('1'));
        cache.inject_devices(Some(&mut container), vec![id]).unwrap();
        let container = serde_json::to_value(&container).unwrap();
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
    fn removing_twice_is_as_good_as_once() {
        let (_directory, files) = directory();
        files.write(&uid('1'), &null()).unwrap();
        files.remove(&uid('1')).unwrap();
        files.remove(&uid('1')).unwrap();
        assert_eq!(files.claims().unwrap(), BTreeSet::new());
    }
}
