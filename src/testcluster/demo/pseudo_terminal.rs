//! Simulated devices: pseudo-terminals. They are real character devices, need no root, and can be unplugged and
//! replugged.

use std::io;
use std::os::fd::OwnedFd;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// Number of lower terminal numbers released while a device is unplugged, for terminals that other programs open
/// meanwhile. The kernel assigns the lowest free number, and the device needs its own number when replugged.
const SPARE: usize = 4;
/// Maximum number of further lower numbers that may have become free.
const ATTEMPTS: usize = 64;

/// A device that is plugged in; dropping it unplugs it.
#[derive(Debug)]
pub(super) struct PseudoTerminal {
    /// Path of the form `/dev/pts/<number>`.
    pub(super) path: String,
    master: Option<OwnedFd>,
    /// Terminals with lower numbers.
    spare: Vec<OwnedFd>,
}

fn open() -> io::Result<(OwnedFd, String)> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    // Before this call, the device node exists but cannot be opened.
    unlockpt(&master)?;
    let path = ptsname(&master, Vec::new())?.to_string_lossy().into_owned();
    Ok((master, path))
}

impl PseudoTerminal {
    /// Plugs in a new device.
    pub(super) fn new() -> io::Result<Self> {
        let mut spare = Vec::new();
        for _ in 0..SPARE {
            spare.push(open()?.0);
        }
        let (master, path) = open()?;
        Ok(Self {
            path,
            master: Some(master),
            spare,
        })
    }

    /// Unplugs the device: its node under `/dev` disappears.
    pub(super) fn unplug(&mut self) {
        self.spare.clear();
        self.master = None;
    }

    /// Replugs the device at its old path.
    pub(super) fn plug(&mut self) -> io::Result<()> {
        for _ in 0..ATTEMPTS {
            let (master, path) = open()?;
            if path == self.path {
                self.master = Some(master);
                self.spare.truncate(SPARE);
                return Ok(());
            }
            self.spare.push(master);
        }
        Err(io::Error::other(format!(
            "another program has opened {}; run the demo again",
            self.path
        )))
    }
}

/// Serializes tests that open terminals: several at a time could exceed the spare numbers and take that of an unplugged
/// device.
#[cfg(test)]
pub(super) static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_comes_back_although_other_terminals_were_opened() {
        let _alone = ALONE.blocking_lock();
        let mut device = PseudoTerminal::new().unwrap();
        let number = device.path.clone();
        device.unplug();
        assert!(!std::path::Path::new(&number).exists());
        // Fewer than the spare numbers, because another program may open a terminal at the same time.
        let others: Vec<_> = (1..SPARE).map(|_| open().unwrap()).collect();
        assert!(!std::path::Path::new(&number).exists());
        device.plug().unwrap();
        assert!(std::path::Path::new(&number).exists() && device.path == number);
        drop(others);
    }
}
