//! Pretend devices: pseudo-terminals. They are real character devices, need no root, and can be unplugged and plugged in again.

use std::io;
use std::os::fd::OwnedFd;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// How many lower numbers are free while a device is unplugged, for terminals that other programs open meanwhile: the kernel hands out
/// the lowest, and its own must be there when it is plugged in again.
const SPARE: usize = 4;
/// How many lower numbers may have come free besides.
const ATTEMPTS: usize = 64;

/// A device that is plugged in as long as this exists.
#[derive(Debug)]
pub(super) struct Device {
    /// `/dev/pts/<number>`
    pub(super) path: String,
    master: Option<OwnedFd>,
    /// Terminals of lower numbers.
    spare: Vec<OwnedFd>,
}

fn open() -> io::Result<(OwnedFd, String)> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    // Until then its node is there and cannot be opened.
    unlockpt(&master)?;
    let path = ptsname(&master, Vec::new())?.to_string_lossy().into_owned();
    Ok((master, path))
}

impl Device {
    /// Plugs a new device in.
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

    /// Unplugs it: its node under `/dev` vanishes.
    pub(super) fn unplug(&mut self) {
        self.spare.clear();
        self.master = None;
    }

    /// Plugs it in again, at the place where it was.
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
            "{} was taken by another program; play the demonstration once more",
            self.path
        )))
    }
}

/// Held by each test that opens terminals: more than are spared at a time would take the number of one that is unplugged.
#[cfg(test)]
pub(super) static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_comes_back_although_other_terminals_were_opened_meanwhile() {
        let _alone = ALONE.blocking_lock();
        let mut device = Device::new().unwrap();
        let number = device.path.clone();
        device.unplug();
        assert!(!std::path::Path::new(&number).exists());
        // Fewer than are spared: a terminal of somebody else may be opened just now.
        let others: Vec<_> = (1..SPARE).map(|_| open().unwrap()).collect();
        assert!(!std::path::Path::new(&number).exists());
        device.plug().unwrap();
        assert!(std::path::Path::new(&number).exists() && device.path == number);
        drop(others);
    }
}
