//! Discovers the devices that the node's configuration describes: the runtime of [`crate::core::discovery`].
//!
//! A device node is identified by the path that a pattern matched, which may be a symbolic link maintained by udev
//! (`/dev/serial/by-id/...`); a USB or PCI device by its properties or its position on the bus; a group by its first path or its kind.
//! [`device_name`](crate::core::names::device_name) makes the device's name from this identity. A uevent of the kernel, a change
//! of a relevant directory, or the periodic resync triggers another search.

mod device;
mod probe;
mod proposal;
mod scan;
mod search;
mod sources;
mod sysfs;
mod uevent;

use std::sync::Arc;

use tokio::sync::watch as value;
use tokio_util::sync::CancellationToken;

use self::device::FoundDevices;
pub(in crate::node) use self::device::device_number;
pub use self::device::{Cause, ChangeCounts, HostDevices, HostPaths};
pub use self::proposal::proposal;
pub use self::scan::Candidate;
use self::search::DeviceSearch;
pub use self::search::{Survey, survey};
use crate::node::config::NodeConfiguration;

impl HostDevices {
    /// Searches once, then keeps searching with the current configuration until the token is cancelled.
    pub async fn start(
        configuration: value::Receiver<Arc<NodeConfiguration>>,
        paths: HostPaths,
        shutdown: CancellationToken,
    ) -> Self {
        let found = Arc::new(FoundDevices::new(paths));
        let (sender, devices) = value::channel(Arc::default());
        DeviceSearch::start(found.clone(), configuration, sender, shutdown).await;
        Self { found, devices }
    }

    /// Number of changes detected by each cause.
    pub fn change_counts(&self) -> ChangeCounts {
        self.found.change_counts.borrow().clone()
    }
}

#[cfg(test)]
mod tests;
