//! Pretend devices: pseudo-terminals. They are real character devices, need no root, and can be unplugged and plugged in again.

use std::io;
use std::os::fd::OwnedFd;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// How many other terminals may take the number that a device is to have again.
const ATTEMPTS: usize = 64;

/// A device that is plugged in as long as this exists.
#[derive(Debug)]
pub(super) struct Device {
    /// `/dev/pts/<number>`
    pub(super) path: String,
    master: Option<OwnedFd>,
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
        let (master, path) = open()?;
        Ok(Self {
            path,
            master: Some(master),
        })
    }

    /// Unplugs it: its node under `/dev` vanishes.
    pub(super) fn unplug(&mut self) {
        self.master = None;
    }

    /// Plugs it in again, at the place where it was.
    pub(super) fn plug(&mut self) -> io::Result<()> {
        let mut others = Vec::new();
        for _ in 0..ATTEMPTS {
            let (master, path) = open()?;
            if path == self.path {
                self.master = Some(master);
                return Ok(());
            }
            others.push(master);
        }
        Err(io::Error::other(format!(
            "{} was taken by another program",
            self.path
        )))
    }
}
