//! The checkpoint file.

use std::path::{Path, PathBuf};

use super::StoreError;
use super::disk::{self, Disk, DiskStep};
use crate::core::prepare::checkpoint::{Checkpoint, CheckpointError};
use crate::node::kubelet::transport::Identity;

/// Maximum size of a checkpoint, in bytes: far above the needs of a node's pods.
const SIZE_MAX: u64 = 16 * 1024 * 1024;
/// Number of damaged checkpoints kept for inspection; from then on, the last is overwritten.
const KEPT_MAX: u32 = 16;

/// The checkpoint in the state directory of a driver, `checkpoint.json`.
#[derive(Debug)]
pub struct CheckpointFile {
    directory: PathBuf,
    path: PathBuf,
    disk: Disk,
}

/// The result of loading the checkpoint.
#[derive(Debug)]
pub enum Loaded {
    /// No file: this driver has not run on this node before.
    Nothing,
    /// A valid checkpoint and its text.
    Read(Checkpoint, String),
    /// A checkpoint that this release cannot use, left in place.
    Unusable(Unusable),
}

/// A checkpoint that is damaged, or written by a newer release.
#[derive(Debug)]
pub struct Unusable {
    /// Why it is unusable.
    pub error: String,
    /// The part of the file name under which it is kept.
    label: &'static str,
}

impl CheckpointFile {
    /// The checkpoint in an existing directory.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            path: directory.join("checkpoint.json"),
            disk: Disk::default(),
        }
    }

    /// Uses this disk, which a test can observe.
    #[must_use]
    pub(super) fn on(mut self, disk: Disk) -> Self {
        self.disk = disk;
        self
    }

    /// Reads the checkpoint without changing anything.
    ///
    /// Only its content can make it unusable. An I/O error, for instance too many open files or a failing disk, is returned as an error,
    /// because a retry may succeed.
    pub fn load(&self) -> Result<Loaded, StoreError> {
        let unusable = |error: String, label| Ok(Loaded::Unusable(Unusable { error, label }));
        match disk::read(&self.path, SIZE_MAX) {
            Ok(None) => Ok(Loaded::Nothing),
            Ok(Some(text)) => match Checkpoint::decode(&text) {
                Ok(checkpoint) => Ok(Loaded::Read(
                    checkpoint,
                    String::from_utf8_lossy(&text).into_owned(),
                )),
                Err(error @ CheckpointError::Newer(_)) => unusable(error.to_string(), "newer"),
                Err(error) => unusable(error.to_string(), "damaged"),
            },
            Err(error) if disk::is_no_file_of_ours(&error) => unusable(error.to_string(), "damaged"),
            Err(error) => Err(StoreError::io("read", &self.path)(error)),
        }
    }

    /// Renames an unusable checkpoint to keep it for inspection, and returns its new name. Returns `None` if renaming fails; the next save
    /// then replaces the file.
    pub fn put_aside(&self, unusable: &Unusable) -> Option<PathBuf> {
        let kept_as = self.free_name(unusable.label);
        let rename = || std::fs::rename(&self.path, &kept_as);
        let kept_as = match self.disk.step(DiskStep::Rename, &kept_as, rename) {
            Ok(()) => Some(kept_as),
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error, "the checkpoint cannot be put aside");
                None
            }
        };
        if let Err(error) = disk::sync_directory(&self.disk, &self.directory) {
            tracing::warn!(reason = error.reason(), "{error}");
        }
        kept_as
    }

    /// Replaces the checkpoint. On failure, the last checkpoint is still in place and as durable as before. On success, the new one is in
    /// place, and [`CheckpointFile::make_durable`] makes it survive a power loss.
    pub fn replace(&self, text: &str) -> Result<(), StoreError> {
        disk::replace(&self.disk, &self.path, text.as_bytes(), 0o600)
    }

    /// The identity of the file in place: device, inode and change time.
    pub(super) fn identity(&self) -> Option<Identity> {
        Identity::of(&self.path)
    }

    /// Makes the checkpoint in place survive a power loss.
    pub fn make_durable(&self) -> Result<(), StoreError> {
        disk::sync_directory(&self.disk, &self.directory)
    }

    fn free_name(&self, label: &str) -> PathBuf {
        let name = |number: u32| self.directory.join(format!("checkpoint.json.{label}-{number}"));
        (1..KEPT_MAX)
            .map(name)
            .find(|path| path.symlink_metadata().is_err())
            .unwrap_or_else(|| name(KEPT_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads the checkpoint and renames it, like a starting companion.
    fn put_aside(file: &CheckpointFile) -> (String, Option<PathBuf>) {
        let Loaded::Unusable(unusable) = file.load().unwrap() else {
            panic!("it was taken")
        };
        let kept_as = file.put_aside(&unusable);
        (unusable.error, kept_as)
    }

    #[test]
    fn a_checkpoint_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        assert!(matches!(file.load().unwrap(), Loaded::Nothing));
        file.replace(&Checkpoint::default().encode().unwrap()).unwrap();
        file.make_durable().unwrap();
        assert!(
            matches!(file.load().unwrap(), Loaded::Read(checkpoint, _) if checkpoint == Checkpoint::default())
        );
    }

    #[test]
    fn damaged_checkpoints_are_put_aside_each_under_its_own_name() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        for content in ["", "{}", "\0\0\0", "{\"version\":1"] {
            std::fs::write(&file.path, content).unwrap();
            let kept_as = put_aside(&file).1.unwrap();
            assert_eq!(std::fs::read_to_string(kept_as).unwrap(), content);
            assert!(matches!(file.load().unwrap(), Loaded::Nothing));
        }
    }

    #[test]
    fn damaged_checkpoints_do_not_pile_up_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        for _ in 0..40 {
            std::fs::write(&file.path, "x").unwrap();
            put_aside(&file);
        }
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            KEPT_MAX as usize
        );
    }

    #[test]
    fn a_newer_checkpoint_is_kept_under_a_telling_name() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        // The checksum of version 3 over "{}", as a later release would write it.
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&3_u32.to_le_bytes());
        hasher.update(b"{}");
        let text = format!(r#"{{"version":3,"checksum":{},"data":{{}}}}"#, hasher.finalize());
        std::fs::write(&file.path, &text).unwrap();
        let (error, kept_as) = put_aside(&file);
        let kept_as = kept_as.unwrap();
        assert!(error.contains("version 3"), "{error}");
        assert!(kept_as.ends_with("checkpoint.json.newer-1"), "{kept_as:?}");
        assert_eq!(std::fs::read_to_string(kept_as).unwrap(), text);
    }

    #[test]
    fn loading_a_checkpoint_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        std::fs::write(&file.path, "damaged").unwrap();
        for _ in 0..2 {
            assert!(matches!(file.load().unwrap(), Loaded::Unusable(_)));
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        assert_eq!(std::fs::read_to_string(&file.path).unwrap(), "damaged");
    }

    #[test]
    fn a_read_that_fails_is_no_damage() {
        // A name too long for the file system simulates EMFILE and EIO: the content was never read.
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(&directory.path().join("n".repeat(300)));
        let error = file.load().unwrap_err();
        assert!(matches!(error, StoreError::Io { action: "read", .. }), "{error}");
        assert!(error.to_string().contains("checkpoint.json"), "{error}");
    }

    #[test]
    fn a_checkpoint_that_cannot_be_read_does_not_stop_the_companion() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        std::os::unix::fs::symlink("/etc/passwd", &file.path).unwrap();
        put_aside(&file);
        std::fs::create_dir(&file.path).unwrap();
        put_aside(&file);
        file.replace(&Checkpoint::default().encode().unwrap()).unwrap();
    }
}
