//! A private directory of this process that is removed on drop.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// A directory below that of temporary files. Names should be short, because the length of a socket path is limited.
#[derive(Debug)]
pub(crate) struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    pub(crate) fn create(name: &str) -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // Best effort: leftovers stay in the directory of temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
