//! The disk of a program whose steps can fail, or be its last.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::{Life, Place, Trouble};
use crate::node::state::storage::disk::{Disk, DiskStep, DiskWatcher};

impl Life {
    /// The disk, as this life of the program has it.
    pub fn disk(&self) -> Disk {
        Disk::watched(Arc::new(self.clone()))
    }
}

impl DiskWatcher for Life {
    fn before(&self, step: DiskStep, path: &Path) -> io::Result<()> {
        // What an earlier step that failed has left.
        AFTER.set(None);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self.meet(Place::Disk, &format!("{step:?} {name}")) {
            Ok(Some(Trouble::Refused)) => Err(io::Error::from(io::ErrorKind::StorageFull)),
            Ok(Some(Trouble::KilledAfter)) => {
                // Remembered on this thread until the step is done: one thread does one step at a time.
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
    /// Stops the thread until nothing of the program decides anything any more, and gives it an error that nobody reads.
    fn dead(&self) -> io::Error {
        self.rest();
        io::Error::other("the program was killed")
    }
}
