//! Receives the kernel's device events (`NETLINK_KOBJECT_UEVENT`).
//!
//! The kernel sends them to every network namespace owned by the host's user namespace, including a pod's.

use std::io;
use std::os::fd::OwnedFd;

use futures::FutureExt;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with, sockopt};
use tokio::io::unix::AsyncFd;
use tracing::{debug, warn};

use crate::core::discovery::uevent::{MESSAGE_MAX, Uevent, parse};

/// Multicast group of the kernel; udev uses another one.
const GROUP_KERNEL: u32 = 1;
/// Receive buffer in bytes, large enough for a hub with all its devices.
const RECEIVE_BUFFER: usize = 256 * 1024;

/// A subscription to the kernel's device events.
#[derive(Debug)]
pub(super) struct Uevents {
    /// `None` if the socket cannot be opened; directory watches and resyncs remain.
    socket: Option<AsyncFd<OwnedFd>>,
    losses: Losses,
}

impl Uevents {
    pub(super) fn new() -> Self {
        let socket = Self::open();
        if let Err(error) = &socket {
            warn!(%error, "cannot receive kernel device events; directory watches and periodic searches remain");
        }
        Self {
            socket: socket.ok(),
            losses: Losses::default(),
        }
    }

    #[expect(
        deprecated,
        reason = "the replacement is unsafe only because a value may change its descriptor; an OwnedFd cannot"
    )]
    fn open() -> io::Result<AsyncFd<OwnedFd>> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(KOBJECT_UEVENT),
        )?;
        // Best effort.
        let _ = sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER);
        bind(&socket, &SocketAddrNetlink::new(0, GROUP_KERNEL))?;
        AsyncFd::new(socket)
    }

    /// Waits for an event about devices, or `None` after lost messages.
    pub(super) async fn changed(&mut self) -> Option<Uevent> {
        let Some(socket) = &self.socket else {
            return std::future::pending().await;
        };
        loop {
            let Ok(mut ready) = socket.readable().await else {
                return std::future::pending().await;
            };
            match ready.try_io(|socket| receive(socket.get_ref())) {
                Ok(Ok(Some(event))) if event.concerns_devices() => {
                    debug!(?event, "received a kernel device event");
                    return Some(event);
                }
                Ok(Ok(_)) | Err(_) => {}
                Ok(Err(error)) => {
                    if self.losses.count() {
                        warn!(%error, "kernel device events were lost; discovery searches again");
                    } else {
                        debug!(%error, "kernel device events were lost again");
                    }
                    return None;
                }
            }
        }
    }

    /// Discards pending events.
    pub(super) fn drain(&mut self) {
        while self.changed().now_or_never().is_some() {}
    }

    /// Notes the end of a search.
    pub(super) fn searched(&mut self) {
        self.losses.searched();
    }
}

/// Lost messages. Only the first loss is worth a warning, until a search passes without one: a container can cause any number of them.
#[derive(Debug, Default)]
struct Losses {
    /// Whether there was one since the last search.
    since: bool,
    /// Whether there was one between the last two searches.
    before: bool,
}

impl Losses {
    /// Counts a loss. Returns whether it is worth a warning.
    fn count(&mut self) -> bool {
        let is_first = !self.since && !self.before;
        self.since = true;
        is_first
    }

    fn searched(&mut self) {
        self.before = std::mem::take(&mut self.since);
    }
}

/// Receives one message; `None` if the kernel did not send it.
fn receive(socket: &OwnedFd) -> io::Result<Option<Uevent>> {
    let mut buffer = [0; MESSAGE_MAX];
    let (_, length, sender) = recvfrom(socket, &mut buffer, RecvFlags::empty())?;
    // Any host process with the capability can send to the group, but only the kernel has port id 0.
    let kernel = sender
        .and_then(|sender| SocketAddrNetlink::try_from(sender).ok())
        .is_some_and(|sender| sender.pid() == 0);
    Ok(kernel.then(|| buffer.get(..length).and_then(parse)).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_of_repeated_losses_is_worth_a_warning() {
        let mut losses = Losses::default();
        let mut search_after = |count: usize| -> Vec<bool> {
            let warnings = (0..count).map(|_| losses.count()).collect();
            losses.searched();
            warnings
        };
        assert_eq!(search_after(2), [true, false]);
        assert_eq!(search_after(1), [false]);
        assert!(search_after(0).is_empty());
        assert_eq!(search_after(1), [true], "a search passed without a loss");
    }
}
