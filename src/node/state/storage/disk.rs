//! The steps in which the store changes the disk, and a seam at each of them: a test can let one fail, or end the process there.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A step. Between any two of them the power may go, or the process be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DiskStep {
    /// An empty file is made under a name that nobody reads.
    Create,
    /// It gets its content.
    Write,
    /// Its content is flushed.
    Flush,
    /// It gets the name that is read.
    Rename,
    /// A file is removed.
    Remove,
    /// What was renamed or removed in a directory is flushed.
    FlushDirectory,
}

/// Looks on while the store works.
pub trait DiskWatcher: fmt::Debug + Send + Sync {
    /// Called before a step. With an error the step is not done, and that is what the store meets in its place.
    fn before(&self, step: DiskStep, path: &Path) -> io::Result<()>;

    /// Called after a step that was done. With an error the store believes that it was not.
    fn after(&self, step: DiskStep, path: &Path) -> io::Result<()>;
}

/// The disk; with somebody who looks on only in tests. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Disk(Option<Arc<dyn DiskWatcher>>);

impl Disk {
    /// A disk at which somebody looks on.
    pub fn watched(watcher: Arc<dyn DiskWatcher>) -> Self {
        Self(Some(watcher))
    }

    /// Does one step.
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

    /// Fails at one step, and remembers all.
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
    fn a_file_is_replaced_in_four_steps_each_of_which_may_fail_and_leaves_the_old_content() {
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
