//! Fault injection for file operations.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::{Fault, Operation, ProgramProcess};
use crate::node::state::storage::disk::{Disk, DiskStep, DiskWatcher};

impl ProgramProcess {
    /// Returns the disk of this process.
    pub fn disk(&self) -> Disk {
        Disk::watched(Arc::new(self.clone()))
    }
}

impl DiskWatcher for ProgramProcess {
    fn before(&self, step: DiskStep, path: &Path) -> io::Result<()> {
        // Clears the state of an earlier, failed step.
        AFTER.set(None);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self.start_operation(Operation::Disk, &format!("{step:?} {name}")) {
            Ok(Some(Fault::Refused)) => Err(io::Error::from(io::ErrorKind::StorageFull)),
            Ok(Some(Fault::KilledAfter)) => {
                // Thread-local until the step is done: each thread executes one step at a time.
                AFTER.set(Some(Fault::KilledAfter));
                Ok(())
            }
            Ok(Some(Fault::Failed)) => {
                AFTER.set(Some(Fault::Failed));
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(_) => Err(self.dead()),
        }
    }

    fn after(&self, step: DiskStep, path: &Path) -> io::Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.notify(Operation::Disk, &format!("{step:?} {name}"));
        match AFTER.take() {
            Some(Fault::KilledAfter) => {
                self.kill();
                Err(self.dead())
            }
            Some(_) => Err(io::Error::other("Input/output error")),
            None => Ok(()),
        }
    }
}

thread_local! {
    static AFTER: std::cell::Cell<Option<Fault>> = const { std::cell::Cell::new(None) };
}

impl ProgramProcess {
    /// Blocks the thread until the process has fully ended, then returns an error that is ignored.
    fn dead(&self) -> io::Error {
        self.wait_until_ended();
        io::Error::other("the program was killed")
    }
}
