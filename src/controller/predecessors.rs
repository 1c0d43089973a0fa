//! Tracks processes that are known to have ended: a directory with a lock and the identities of its earlier holders.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// The file that a process keeps locked until it ends.
const LOCK: &str = "lock";
/// The file with the identities of all holders of the lock, one per line, newest last.
const IDENTITIES: &str = "identities";
/// Maximum number of identities kept. The lease names one of them, unless that many processes in a row ended before they wrote it.
const KEPT: usize = 16;

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PredecessorsError {
    /// Another process has the lock, and may lead.
    #[error(
        "{0} is locked by another controller that still runs: stop that one, or give each controller its own directory"
    )]
    Locked(PathBuf),
    /// The directory or a file in it cannot be used.
    #[error("{path} cannot be {action}: {source}; use an existing directory that this user can write to")]
    Io {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The processes that used a directory before this one. All of them have ended.
///
/// A process writes its identity into the directory while it holds the lock (`flock`); the kernel releases the lock when the process
/// ends, and not before. The holder of the lock therefore knows that every identity it read belongs to a process that no longer sends
/// anything. Identities are unique, so a listed identity never belongs to a process that still runs.
#[derive(Debug)]
pub struct Predecessors {
    ended: BTreeSet<String>,
    /// Holds the lock until dropped.
    _lock: File,
}

impl Predecessors {
    /// Takes the lock, reads the identities of its earlier holders, and adds this process.
    ///
    /// If adding it fails, the next process does not know that this one has ended, and waits for its lease to expire.
    pub fn follow(directory: &Path, identity: &str) -> Result<Self, PredecessorsError> {
        let path = directory.join(LOCK);
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| PredecessorsError::Io { action, path, source }
        };
        let mut options = OpenOptions::new();
        let lock = options.create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(io("opened", &path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => PredecessorsError::Locked(path.clone()),
            TryLockError::Error(source) => io("locked", &path)(source),
        })?;
        let path = directory.join(IDENTITIES);
        let known = match std::fs::read(&path) {
            Ok(known) => String::from_utf8_lossy(&known).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(source) => return Err(io("read", &path)(source)),
        };
        let known: Vec<&str> = known.lines().collect();
        let ended = known.iter().map(|&line| line.to_owned()).collect();
        let first = (known.len() + 1).saturating_sub(KEPT);
        let mut lines = known.get(first..).unwrap_or_default().to_vec();
        lines.push(identity);
        // Renamed, so that a kill at this point leaves either the old file or the new one.
        let new = directory.join(format!("{IDENTITIES}.new"));
        let written = std::fs::write(&new, lines.join("\n")).and_then(|()| std::fs::rename(&new, &path));
        // On a full disk the next process waits for the lease to expire, but this one still starts.
        if let Err(error) = written {
            tracing::warn!(path = %path.display(), %error, "the identity could not be written: the next process waits until the lease expires");
        }
        Ok(Self { ended, _lock: lock })
    }

    /// The identities of the ended processes.
    pub fn ended(&self) -> &BTreeSet<String> {
        &self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(directory: &Path, identity: &str) -> Vec<String> {
        let predecessors = Predecessors::follow(directory, identity).unwrap();
        predecessors.ended().iter().cloned().collect()
    }

    #[test]
    fn a_process_knows_the_ended_ones_and_not_itself() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(ended(directory.path(), "a"), Vec::<String>::new());
        assert_eq!(ended(directory.path(), "b"), ["a"]);
        assert_eq!(ended(directory.path(), "c"), ["a", "b"]);
    }

    #[test]
    fn a_process_that_still_runs_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let runs = Predecessors::follow(directory.path(), "a").unwrap();
        let refused = Predecessors::follow(directory.path(), "b").unwrap_err();
        assert!(matches!(refused, PredecessorsError::Locked(_)), "{refused}");
        drop(runs);
        assert_eq!(ended(directory.path(), "c"), ["a"]);
    }

    #[test]
    fn the_newest_identities_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..=2 * KEPT {
            ended(directory.path(), &format!("{number:02}"));
        }
        let kept = ended(directory.path(), "last");
        assert_eq!(kept.len(), KEPT);
        assert_eq!(kept.last(), Some(&format!("{:02}", 2 * KEPT)));
    }

    #[test]
    fn a_damaged_file_proves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(IDENTITIES), b"\xff\xfe\0half-an-ident").unwrap();
        // The line stays one that no process has as its identity, and those added later are whole.
        let damaged = "\u{fffd}\u{fffd}\0half-an-ident";
        assert_eq!(ended(directory.path(), "a"), [damaged]);
        assert_eq!(ended(directory.path(), "b"), ["a", damaged]);
    }

    #[test]
    fn a_directory_that_does_not_exist_is_named() {
        let refused = Predecessors::follow(Path::new("/nowhere/state"), "a").unwrap_err();
        let text = refused.to_string();
        assert!(
            text.starts_with("/nowhere/state/lock cannot be opened: "),
            "{text}"
        );
    }
}
