//! The file of the checkpoint.

use std::io;
use std::path::{Path, PathBuf};

use super::{StoreError, files};
use crate::core::node::checkpoint::{Checkpoint, CheckpointError};

/// The size of a checkpoint that is read, at most, in bytes: far above what the pods of a node can make.
const SIZE_MAX: u64 = 16 * 1024 * 1024;
/// How many damaged checkpoints are kept for a look at them; the last is overwritten from then on.
const KEPT_MAX: u32 = 16;

/// The checkpoint in the state directory of a driver, `checkpoint.json`.
#[derive(Debug)]
pub struct CheckpointFile {
    directory: PathBuf,
    path: PathBuf,
}

/// What was found.
#[derive(Debug)]
pub enum Loaded {
    /// No file: this driver has not run on this node before.
    Nothing,
    /// A checkpoint.
    Read(Checkpoint),
    /// Something else, which was renamed.
    Damaged {
        /// What is wrong with it.
        error: String,
        /// Its new name.
        kept_as: PathBuf,
    },
}

impl CheckpointFile {
    /// The checkpoint in a directory, which must be there.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            path: directory.join("checkpoint.json"),
        }
    }

    /// Reads the checkpoint. A damaged one is put aside under another name; a newer release's is an error and stays.
    pub fn load(&self) -> Result<Loaded, StoreError> {
        let error = match files::read(&self.path, SIZE_MAX) {
            Ok(None) => return Ok(Loaded::Nothing),
            Ok(Some(text)) => match Checkpoint::decode(&text) {
                Ok(checkpoint) => return Ok(Loaded::Read(checkpoint)),
                Err(error @ CheckpointError::Newer(_)) => {
                    return Err(StoreError::Newer {
                        path: self.path.clone(),
                        error,
                    });
                }
                Err(error) => error.to_string(),
            },
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => error.to_string(),
            Err(error) => return Err(StoreError::io("read", &self.path)(error)),
        };
        let kept_as = self.name_for_damaged();
        std::fs::rename(&self.path, &kept_as).map_err(StoreError::io("put aside", &self.path))?;
        files::sync_directory(&self.directory)?;
        Ok(Loaded::Damaged { error, kept_as })
    }

    /// Stores a checkpoint; when this returns, it outlives a power loss.
    pub fn save(&self, text: &str) -> Result<(), StoreError> {
        files::replace(&self.path, text.as_bytes(), 0o600)?;
        files::sync_directory(&self.directory)
    }

    fn name_for_damaged(&self) -> PathBuf {
        let name = |number: u32| self.directory.join(format!("checkpoint.json.damaged-{number}"));
        (1..KEPT_MAX)
            .map(name)
            .find(|path| path.symlink_metadata().is_err())
            .unwrap_or_else(|| name(KEPT_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        assert!(matches!(file.load().unwrap(), Loaded::Nothing));
        file.save(&Checkpoint::default().encode().unwrap()).unwrap();
        assert!(
            matches!(file.load().unwrap(), Loaded::Read(checkpoint) if checkpoint == Checkpoint::default())
        );
    }

    #[test]
    fn damaged_checkpoints_are_put_aside_each_under_its_own_name() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        for content in ["", "{}", "\0\0\0", "{\"version\":1"] {
            std::fs::write(&file.path, content).unwrap();
            let Loaded::Damaged { kept_as, .. } = file.load().unwrap() else {
                panic!("{content:?} was taken")
            };
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
            assert!(matches!(file.load().unwrap(), Loaded::Damaged { .. }));
        }
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            KEPT_MAX as usize
        );
    }

    #[test]
    fn a_newer_releases_checkpoint_is_refused_and_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(directory.path());
        // The checksum of version 2 over "{}", as a later release would write it.
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&2_u32.to_le_bytes());
        hasher.update(b"{}");
        let text = format!(r#"{{"version":2,"checksum":{},"data":{{}}}}"#, hasher.finalize());
        std::fs::write(&file.path, &text).unwrap();
        let error = file.load().unwrap_err();
        assert_eq!(error.reason(), "NewerCheckpoint");
        assert_eq!(std::fs::read_to_string(&file.path).unwrap(), text);
    }
}
