//! Discovers the devices that the node's configuration describes: the runtime of [`crate::core::discovery`].
//!
//! A device node is identified by the path that a pattern matched, which may be a symbolic link maintained by udev
//! (`/dev/serial/by-id/...`); a USB or PCI device by its properties or its position on the bus.
//! [`device_name`](crate::core::names::device_name) makes its name of that. A uevent of the kernel, a change
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

use futures::{Stream, StreamExt as _};
use tokio::sync::watch as value;
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;

use self::device::FoundDevices;
pub use self::device::HostPaths;
pub(in crate::node) use self::device::device_number;
pub use self::proposal::proposal;
pub use self::scan::Candidate;
use self::search::DeviceSearch;
pub use self::search::{Cause, ChangeCounts, Survey, survey};
use crate::api::crd::Device;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::inventory::Devices;
use crate::node::config::NodeConfiguration;
use crate::node::driver::{NodeDriver, NodeDriverError};

/// The built-in [`NodeDriver`]: devices described by the node's configuration.
#[derive(Debug)]
pub struct HostDevices {
    found: Arc<FoundDevices>,
    change_counts: value::Sender<ChangeCounts>,
    devices: value::Receiver<Arc<Devices>>,
}

impl HostDevices {
    /// Searches once, then keeps searching with the current configuration until the token is cancelled.
    pub async fn start(
        configuration: value::Receiver<Arc<NodeConfiguration>>,
        paths: HostPaths,
        shutdown: CancellationToken,
    ) -> Self {
        let found = Arc::new(FoundDevices::new(paths));
        let change_counts = value::Sender::<ChangeCounts>::default();
        let (sender, devices) = value::channel(Arc::default());
        DeviceSearch::start(
            found.clone(),
            change_counts.clone(),
            configuration,
            sender,
            shutdown,
        )
        .await;
        Self {
            found,
            change_counts,
            devices,
        }
    }

    /// Number of changes detected by each cause.
    pub fn change_counts(&self) -> ChangeCounts {
        self.change_counts.borrow().clone()
    }
}

impl NodeDriver for HostDevices {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        WatchStream::new(self.devices.clone()).map(|devices| devices.values().cloned().collect())
    }

    async fn check_unused(&self, device: &str) -> Result<(), NodeDriverError> {
        // For all other devices there is nothing to read.
        let Some(disks) = self.found.with_disks(device) else {
            return Ok(());
        };
        let found = self.found.clone();
        let name = device.to_owned();
        spawn_blocking(move || found.check_unused(&name, &disks))
            .await
            .unwrap_or_else(|_| Err(NodeDriverError::Ended(device.to_owned())))
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        // Only links and nodes in /dev are looked up, in memory.
        self.found.container_edits(device)
    }
}

#[cfg(test)]
mod tests;
