//! The disk operations of the store, with a hook for each: a test can make one fail, or end the process there.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::files;
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
            files::replace(&disk, &path, b"new", 0o600).unwrap_err();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "old", "{at:?}");
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "{at:?}");
            assert_eq!(watcher.seen.lock().unwrap().last(), Some(&Remove));
        }
        let (watcher, disk) = failing(DiskStep::FlushDirectory, false);
        let directory = tempfile::tempdir().unwrap();
        files::replace(&disk, &directory.path().join("file"), b"new", 0o600).unwrap();
        assert_eq!(*watcher.seen.lock().unwrap(), [Create, Write, Flush, Rename]);
    }

    #[test]
    fn a_step_that_was_done_may_be_told_as_failed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (_, disk) = failing(DiskStep::Rename, true);
        files::replace(&disk, &path, b"new", 0o600).unwrap_err();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
    }
}
