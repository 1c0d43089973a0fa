//! Listens to what the kernel says of devices (`NETLINK_KOBJECT_UEVENT`).
//!
//! The kernel says it in every network namespace that belongs to the host's user namespace, so also in a pod's own.

use std::io;
use std::os::fd::OwnedFd;

use futures::FutureExt;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with, sockopt};
use tokio::io::unix::AsyncFd;
use tracing::{debug, warn};

use crate::core::discovery::uevent::{MESSAGE_MAX, Uevent, parse};

/// The multicast group of the kernel's own messages. What udev says is another's.
const GROUP_KERNEL: u32 = 1;
/// Room for messages that wait, in bytes: a hub with everything on it.
const RECEIVE_BUFFER: usize = 256 * 1024;

/// The kernel's messages.
#[derive(Debug)]
pub(super) struct Uevents {
    /// Absent if the system gives none: then the other ways must do.
    socket: Option<AsyncFd<OwnedFd>>,
}

impl Uevents {
    pub(super) fn new() -> Self {
        let socket = Self::open();
        if let Err(error) = &socket {
            warn!(%error, "the kernel's messages of devices cannot be heard; directories and the search now and then are left");
        }
        Self { socket: socket.ok() }
    }

    #[expect(
        deprecated,
        reason = "its replacement is an unsafe function; what makes it so, a value that changes its descriptor, an OwnedFd cannot do"
    )]
    fn open() -> io::Result<AsyncFd<OwnedFd>> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(KOBJECT_UEVENT),
        )?;
        // A wish only.
        let _ = sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER);
        bind(&socket, &SocketAddrNetlink::new(0, GROUP_KERNEL))?;
        AsyncFd::new(socket)
    }

    /// Waits until the kernel says something that concerns devices, or until messages were lost.
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
                    debug!(?event, "the kernel tells of a device");
                    return Some(event);
                }
                Ok(Ok(_)) | Err(_) => {}
                Ok(Err(error)) => {
                    warn!(%error, "messages of the kernel were lost");
                    return None;
                }
            }
        }
    }

    /// Forgets what was said up to now.
    pub(super) fn drain(&mut self) {
        while self.changed().now_or_never().is_some() {}
    }
}

/// One message, if it is the kernel's own.
fn receive(socket: &OwnedFd) -> io::Result<Option<Uevent>> {
    let mut buffer = [0; MESSAGE_MAX];
    let (_, length, sender) = recvfrom(socket, &mut buffer, RecvFlags::empty())?;
    // Any process of the host may send to the group if it has the capability; only the kernel has the id 0.
    let kernel = sender
        .and_then(|sender| SocketAddrNetlink::try_from(sender).ok())
        .is_some_and(|sender| sender.pid() == 0);
    Ok(kernel.then(|| buffer.get(..length).and_then(parse)).flatten())
}
