//! Fault injection for file operations.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::{Life, Place, Trouble};
use crate::node::state::storage::disk::{Disk, DiskStep, DiskWatcher};

impl Life {
    /// Returns the disk of this process.
    pub fn disk(&self) -> Disk {
        Disk::watched(Arc::new(self.clone()))
    }
}

impl DiskWatcher for Life {
    fn before(&self, step: DiskStep, path: &Path) -> io::Result<()> {
        // Clears the state of an earlier, failed step.
        AFTER.set(None);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self.meet(Place::Disk, &format!("{step:?} {name}")) {
            Ok(Some(Trouble::Refused)) => Err(io::Error::from(io::ErrorKind::StorageFull)),
            Ok(Some(Trouble::KilledAfter)) => {
                // Thread-local until the step is done: each thread executes one step at a time.
                AFTER.set(Some(Trouble::KilledAfter));
                Ok(())
            }
            Ok(Some(Trouble::Failed)) => {
                AFTER.set(Some(Trouble::Failed));
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(_) => Err(self.dead()),
        }
    }

    fn after(&self, step: DiskStep, path: &Path) -> io::Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.show(Place::Disk, &format!("{step:?} {name}"));
        match AFTER.take() {
            Some(Trouble::KilledAfter) => {
                self.kill();
                Err(self.dead())
            }
            Some(_) => Err(io::Error::other("Input/output error")),
            None => Ok(()),
        }
    }
}

thread_local! {
    static AFTER: std::cell::Cell<Option<Trouble>> = const { std::cell::Cell::new(None) };
}

impl Life {
    /// Blocks the thread until the process has fully ended, then returns an error that is ignored.
    fn dead(&self) -> io::Error {
        self.rest();
        io::Error::other("the program was killed")
    }
}
