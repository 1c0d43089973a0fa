//! A private directory of this process that is removed on drop.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// Maximum number of names that are tried.
const ATTEMPTS: usize = 100;

/// A directory below that of temporary files. Names should be short, because the length of a socket path is limited.
#[derive(Debug)]
pub(crate) struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    /// Creates a directory. If the name is taken, because a killed process of the same id has left its directory, a number is appended.
    pub(crate) fn create(name: &str) -> std::io::Result<Self> {
        let mut path = std::env::temp_dir().join(name);
        for number in 1..=ATTEMPTS {
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                    path.set_file_name(format!("{name}-{number}"));
                }
                made => return made.map(|()| Self(path)),
            }
        }
        Err(std::io::ErrorKind::AlreadyExists.into())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_left_by_a_killed_process_does_not_matter() {
        let name = format!("drayman-unit-{}", std::process::id());
        let left = TemporaryDirectory::create(&name).unwrap();
        let new = TemporaryDirectory::create(&name).unwrap();
        assert!(left.path() != new.path() && new.path().is_dir());
    }
}
