//! Fault injection for file operations.

use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::thread::ThreadId;

use super::{Fault, Killed, Operation, ProgramProcess};
use crate::node::state::storage::disk::{Disk, DiskStep, DiskWatcher};

impl ProgramProcess {
    /// Returns the disk of this process. Called on the thread of its runtime.
    pub fn disk(&self) -> Disk {
        Disk::watched(Arc::new(ProcessDisk {
            process: self.clone(),
            thread: std::thread::current().id(),
        }))
    }
}

/// The disk of a process.
#[derive(Debug)]
struct ProcessDisk {
    process: ProgramProcess,
    /// The thread of the process's runtime.
    thread: ThreadId,
}

impl DiskWatcher for ProcessDisk {
    fn before(&self, step: DiskStep, path: &Path) -> io::Result<()> {
        // Clears the state of an earlier, failed step.
        AFTER.set(None);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self
            .process
            .start_operation(Operation::Disk, &format!("{step:?} {name}"))
        {
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
        self.process.notify(Operation::Disk, &format!("{step:?} {name}"));
        match AFTER.take() {
            Some(Fault::KilledAfter) => {
                self.process.kill();
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

impl ProcessDisk {
    /// Ends the task, so that it does nothing after the kill. A blocking task cannot be ended: it waits until the process has ended, and the
    /// returned error is ignored.
    fn dead(&self) -> io::Error {
        if std::thread::current().id() == self.thread {
            resume_unwind(Box::new(Killed));
        }
        self.process.wait_until_ended();
        io::Error::other("the program was killed")
    }
}
