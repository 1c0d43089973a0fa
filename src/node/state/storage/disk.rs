//! Atomic file operations, and a hook before and after each step: a test can make one fail, or end the process there.

use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

use crate::core::prepare::checkpoint::CheckpointError;

/// Maximum size of a checkpoint, in bytes: far above the needs of a node's pods.
pub(super) const CHECKPOINT_MAX: usize = 16 * 1024 * 1024;

/// Why state could not be stored or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An I/O operation failed.
    #[error("cannot {action} {path:?}: {source}")]
    Io {
        /// The operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Another companion of the same driver runs on this node.
    #[error("another companion of this driver runs on this node and holds {0:?}: stop it first")]
    Locked(PathBuf),
    /// The checkpoint could not be serialized.
    #[error("cannot write the prepared claims as a checkpoint: {0}")]
    Encode(CheckpointError),
    /// The next start could not read the checkpoint.
    #[error(
        "the checkpoint would have {0} bytes, and at most {CHECKPOINT_MAX} are read at a start: delete pods with claims from this node"
    )]
    TooLarge(usize),
}

impl StoreError {
    /// CamelCase reason from a small fixed set, for the event and the metric label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Io { .. } => "StorageFailed",
            Self::Locked(_) => "AlreadyRunning",
            Self::Encode(_) | Self::TooLarge(_) => "CheckpointFailed",
        }
    }

    /// Whether reading failed, for instance due to too many open files or a failing disk. The content may be intact.
    pub fn is_of_a_read(&self) -> bool {
        matches!(
            self,
            Self::Io {
                action: "read" | "list",
                ..
            }
        )
    }

    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// A disk operation. Between any two, the power may fail or the process may be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DiskStep {
    /// An empty file is created under a temporary name.
    Create,
    /// The content is written.
    Write,
    /// The content is flushed.
    Flush,
    /// The file gets its final name.
    Rename,
    /// A file is removed.
    Remove,
    /// The renames and removals in a directory are flushed.
    FlushDirectory,
}

/// Observes the disk operations of the store.
pub trait DiskWatcher: fmt::Debug + Send + Sync {
    /// Called before an operation. On an error, the operation is skipped and the store gets the error instead.
    fn before(&self, step: DiskStep, path: &Path) -> io::Result<()>;

    /// Called after a completed operation. On an error, the store gets the error although the operation was done.
    fn after(&self, step: DiskStep, path: &Path) -> io::Result<()>;
}

/// The disk, observed only in tests. Clones share the observer.
#[derive(Clone, Debug, Default)]
pub struct Disk(Option<Arc<dyn DiskWatcher>>);

impl Disk {
    /// A disk with an observer.
    pub fn watched(watcher: Arc<dyn DiskWatcher>) -> Self {
        Self(Some(watcher))
    }

    /// Performs one operation.
    pub(super) fn step<T>(
        &self,
        step: DiskStep,
        path: &Path,
        action: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let Some(watcher) = &self.0 else {
            return action();
        };
        watcher.before(step, path)?;
        let done = action()?;
        watcher.after(step, path)?;
        Ok(done)
    }
}

/// Device, inode and change time of a file. The change time distinguishes reused inode numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) struct Identity {
    /// Device and inode.
    pub(in crate::node) file: (u64, u64),
    changed: (i64, i64),
}

impl Identity {
    /// Identity of the file at `path`, without following symbolic links; `None` if there is none.
    pub(in crate::node) fn of(path: &Path) -> Option<Self> {
        let found = path.symlink_metadata().ok()?;
        Some(Self {
            file: (found.dev(), found.ino()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// Suffix of incomplete files. Readers of CDI files accept only `.json` and `.yaml`.
pub(super) const TEMPORARY: &str = ".tmp";

/// Creates a directory and its parents, if missing, with `mode`.
pub(super) fn make_directory(path: &Path, mode: u32) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(StoreError::io("create directory", path))
}

/// The lock that excludes a second process. Dropping it or killing the process releases it.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Whether the next process would find this lock. False if the file or its directory was removed.
    pub(super) fn is_in_place(&self) -> bool {
        match (self.file.metadata(), self.path.symlink_metadata()) {
            (Ok(ours), Ok(found)) => (ours.dev(), ours.ino()) == (found.dev(), found.ino()),
            _ => false,
        }
    }
}

/// Acquires the lock.
///
/// The file is opened for reading, so that a companion can also start on a disk that has become read-only. The standard library does not
/// create a file that is only read.
pub(super) fn lock(path: &Path) -> Result<Lock, StoreError> {
    let file = OpenOptions::new()
        .read(true)
        .mode(0o600)
        .custom_flags(no_follow() | OFlags::CREATE.bits().cast_signed())
        .open(path)
        .map_err(StoreError::io("open", path))?;
    take(file, path)
}

/// Acquires the lock without creating the file, for read-only access. Returns `None` if the file does not exist.
pub(super) fn lock_if_there(path: &Path) -> Result<Option<Lock>, StoreError> {
    match OpenOptions::new().read(true).custom_flags(no_follow()).open(path) {
        Ok(file) => take(file, path).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StoreError::io("open", path)(error)),
    }
}

fn take(file: File, path: &Path) -> Result<Lock, StoreError> {
    match file.try_lock() {
        Ok(()) => Ok(Lock {
            file,
            path: path.to_owned(),
        }),
        Err(TryLockError::WouldBlock) => Err(StoreError::Locked(path.to_owned())),
        Err(TryLockError::Error(source)) => Err(StoreError::Io {
            action: "lock",
            path: path.to_owned(),
            source,
        }),
    }
}

/// Reads a file of at most `max` bytes, or returns `None` if it does not exist. Symbolic links are not followed.
pub(super) fn read(path: &Path, max: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match OpenOptions::new().read(true).custom_flags(no_follow()).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut content = Vec::new();
    file.take(max + 1).read_to_end(&mut content)?;
    if content.len() as u64 > max {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("more than {max} bytes"),
        ));
    }
    Ok(Some(content))
}

/// Whether [`read`] failed because the path is not a valid file of this program: a symbolic link, a directory or an oversized file. Other
/// errors are I/O errors and reveal nothing about the content.
pub(super) fn is_no_file_of_ours(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidInput | io::ErrorKind::FileTooLarge
    ) || error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error())
}

/// Atomically replaces a file or a symbolic link, which is not followed.
///
/// The content is written under another name in the same directory, flushed and then renamed. Readers see either the old or the new
/// content, even after a power loss.
pub(super) fn replace(disk: &Disk, path: &Path, content: &[u8], mode: u32) -> Result<(), StoreError> {
    let temporary = temporary_of(path);
    let rename = || disk.step(DiskStep::Rename, path, || std::fs::rename(&temporary, path));
    let result = write_new(disk, &temporary, content, mode)
        .and_then(|()| rename().map_err(StoreError::io("rename to", path)));
    if result.is_err() {
        // An incomplete file must not stay; a full disk needs the space.
        let _ = disk.step(DiskStep::Remove, &temporary, || std::fs::remove_file(&temporary));
    }
    result
}

fn write_new(disk: &Disk, path: &Path, content: &[u8], mode: u32) -> Result<(), StoreError> {
    if path.symlink_metadata().is_ok() {
        remove(disk, path)?;
    }
    let mut options = OpenOptions::new();
    options
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(no_follow());
    let mut file = disk
        .step(DiskStep::Create, path, || options.open(path))
        .map_err(StoreError::io("create", path))?;
    disk.step(DiskStep::Write, path, || file.write_all(content))
        // Set the mode again, because the umask may have reduced it.
        .and_then(|()| file.set_permissions(Permissions::from_mode(mode)))
        .and_then(|()| disk.step(DiskStep::Flush, path, || file.sync_all()))
        .map_err(StoreError::io("write", path))
}

/// Removes a file or a symbolic link, if it exists.
pub(super) fn remove(disk: &Disk, path: &Path) -> Result<(), StoreError> {
    match disk.step(DiskStep::Remove, path, || std::fs::remove_file(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Makes renames and removals in a directory survive a power loss.
pub(super) fn sync_directory(disk: &Disk, path: &Path) -> Result<(), StoreError> {
    let flush = || File::open(path).and_then(|directory| directory.sync_all());
    disk.step(DiskStep::FlushDirectory, path, flush)
        .map_err(StoreError::io("flush directory", path))
}

fn temporary_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(TEMPORARY);
    name.into()
}

fn no_follow() -> i32 {
    (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::Mutex;

    use super::*;

    /// Fails at one operation, and records all.
    #[derive(Debug)]
    struct Failing {
        at: DiskStep,
        afterwards: bool,
        seen: Mutex<Vec<DiskStep>>,
    }

    impl DiskWatcher for Failing {
        fn before(&self, step: DiskStep, _: &Path) -> io::Result<()> {
            self.seen.lock().unwrap().push(step);
            if step == self.at && !self.afterwards {
                return Err(io::ErrorKind::StorageFull.into());
            }
            Ok(())
        }

        fn after(&self, step: DiskStep, _: &Path) -> io::Result<()> {
            if step == self.at && self.afterwards {
                return Err(io::Error::other("EIO"));
            }
            Ok(())
        }
    }

    fn failing(at: DiskStep, afterwards: bool) -> (Arc<Failing>, Disk) {
        let seen = Mutex::default();
        let watcher = Arc::new(Failing { at, afterwards, seen });
        (watcher.clone(), Disk::watched(watcher))
    }

    #[test]
    fn replacing_a_file_may_fail_in_four_steps_and_keeps_the_old() {
        use DiskStep::{Create, Flush, Remove, Rename, Write};
        for at in [Create, Write, Flush, Rename] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("file");
            std::fs::write(&path, "old").unwrap();
            let (watcher, disk) = failing(at, false);
            replace(&disk, &path, b"new", 0o600).unwrap_err();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "old", "{at:?}");
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "{at:?}");
            assert_eq!(watcher.seen.lock().unwrap().last(), Some(&Remove));
        }
        let (watcher, disk) = failing(DiskStep::FlushDirectory, false);
        let directory = tempfile::tempdir().unwrap();
        replace(&disk, &directory.path().join("file"), b"new", 0o600).unwrap();
        assert_eq!(*watcher.seen.lock().unwrap(), [Create, Write, Flush, Rename]);
    }

    #[test]
    fn a_completed_step_may_be_reported_as_failed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (_, disk) = failing(DiskStep::Rename, true);
        replace(&disk, &path, b"new", 0o600).unwrap_err();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn a_planted_symbolic_link_is_replaced_and_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let victim = directory.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        let path = directory.path().join("file.json");
        symlink(&victim, &path).unwrap();
        symlink(&victim, temporary_of(&path)).unwrap();
        replace(&Disk::default(), &path, b"content", 0o644).unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert!(path.symlink_metadata().unwrap().is_file());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "content");
        assert!(!temporary_of(&path).exists());
    }

    #[test]
    fn files_have_the_requested_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        replace(&Disk::default(), &path, b"", 0o644).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o644);
    }

    #[test]
    fn a_file_that_cannot_be_put_in_place_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("taken");
        std::fs::create_dir_all(path.join("full")).unwrap();
        let error = replace(&Disk::default(), &path, b"content", 0o644).unwrap_err();
        assert!(error.to_string().contains("taken"), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn reading_refuses_links_directories_and_large_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert_eq!(read(&path, 10).unwrap(), None);
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read(&path, 10).unwrap().unwrap(), b"0123456789");
        assert_eq!(read(&path, 9).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        symlink(&path, directory.path().join("link")).unwrap();
        assert!(read(&directory.path().join("link"), 10).is_err());
        assert!(read(directory.path(), 10).is_err());
    }

    #[test]
    fn a_second_lock_is_refused_until_the_first_is_released() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = lock(&path).unwrap();
        assert!(matches!(lock(&path), Err(StoreError::Locked(_))));
        drop(first);
        let again = lock(&path).unwrap();
        assert!(again.is_in_place());
        std::fs::remove_file(&path).unwrap();
        assert!(!again.is_in_place());
        let other = lock(&path).unwrap();
        assert!(other.is_in_place() && !again.is_in_place());
    }
}
