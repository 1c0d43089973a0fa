//! Discovers the devices that the node's configuration describes.
//!
//! A device node is identified by the path that a pattern matched, which may be a symbolic link maintained by udev
//! (`/dev/serial/by-id/...`); a USB or PCI device by its properties and its position on the bus. A uevent of the kernel, a change
//! of a relevant directory, or the periodic resync triggers another search.

mod found;
mod in_use;
mod node;
mod probe;
mod proposal;
mod report;
mod scan;
mod search;
mod sources;
mod sysfs;
mod uevent;
mod walk;
mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures::{Stream, StreamExt as _};
use tokio::sync::{Notify, watch as value};
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;

use self::found::Found;
pub(in crate::node) use self::node::device_number;
use self::node::{DevRoot, NodeError};
pub use self::proposal::proposal;
pub use self::report::Candidate;
use self::search::Search;
pub use self::search::{Cause, ChangeCounts};
use crate::api::crd::Device;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::inventory::Devices;
use crate::node::config::NodeConfiguration;
use crate::node::driver::{NodeDriver, NodeDriverError};

/// Where the host's files are visible to this process. Published paths always begin with the host's `/dev`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPaths {
    /// The host's `/dev`.
    pub dev: PathBuf,
    /// The host's `/sys`, which relates partitions and volumes to their disks.
    pub sys: PathBuf,
    /// The host's mounts. In a pod that does not share the host's PID namespace, this is the pod's own mount table, which is
    /// incomplete.
    pub mountinfo: PathBuf,
    /// The host's swap areas.
    pub swaps: PathBuf,
}

impl Default for HostPaths {
    fn default() -> Self {
        Self {
            dev: "/dev".into(),
            sys: "/sys".into(),
            mountinfo: "/proc/1/mountinfo".into(),
            swaps: "/proc/swaps".into(),
        }
    }
}

/// Result of a single search, for display.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// The devices, sorted by name.
    pub devices: Vec<Device>,
    /// Container edits by device name.
    pub container_edits_of: BTreeMap<String, ContainerEdits>,
    /// All candidates, whether they became a device or not.
    pub candidates: Vec<Candidate>,
}

/// Searches once and probes the discovered devices, without a cluster.
pub async fn survey(configuration: NodeConfiguration, paths: HostPaths) -> Survey {
    search::survey(configuration, paths).await
}

/// The built-in [`NodeDriver`]: devices described by the node's configuration.
#[derive(Debug)]
pub struct HostDevices {
    shared: Arc<Shared>,
    devices: value::Receiver<Arc<Devices>>,
}

#[derive(Debug)]
struct Shared {
    paths: HostPaths,
    /// Result of the last search, by name.
    found: Mutex<BTreeMap<String, Found>>,
    /// Devices of former configurations; claims that hold them keep them.
    retired: Mutex<BTreeMap<String, Found>>,
    /// Requests a search after a device was found changed.
    look_again: Notify,
    change_counts: ChangeCounts,
}

impl HostDevices {
    /// Searches once, then keeps searching with the current configuration until the token is cancelled.
    pub async fn start(
        configuration: value::Receiver<Arc<NodeConfiguration>>,
        paths: HostPaths,
        shutdown: CancellationToken,
    ) -> Self {
        let shared = Arc::new(Shared {
            paths,
            found: Mutex::default(),
            retired: Mutex::default(),
            look_again: Notify::new(),
            change_counts: ChangeCounts::default(),
        });
        let (sender, devices) = value::channel(Arc::default());
        Search::start(shared.clone(), configuration, sender, shutdown).await;
        Self { shared, devices }
    }

    /// The devices by name, now and after each change.
    pub fn watch(&self) -> value::Receiver<Arc<Devices>> {
        self.devices.clone()
    }

    /// Number of changes detected by each cause.
    pub fn change_counts(&self) -> &ChangeCounts {
        &self.shared.change_counts
    }
}

impl NodeDriver for HostDevices {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        WatchStream::new(self.devices.clone()).map(|devices| devices.values().cloned().collect())
    }

    async fn check_unused(&self, device: &str) -> Result<(), NodeDriverError> {
        let shared = self.shared.clone();
        let name = device.to_owned();
        spawn_blocking(move || shared.check_unused(&name))
            .await
            .unwrap_or_else(|_| Err(NodeDriverError::Ended(device.to_owned())))
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        let shared = self.shared.clone();
        let name = device.to_owned();
        spawn_blocking(move || shared.container_edits(&name))
            .await
            .unwrap_or_else(|_| Err(NodeDriverError::Ended(device.to_owned())))
    }
}

impl Shared {
    /// Repeats the search's checks for mounts, swap areas and volumes on a block device, because a mount causes no event and the
    /// periodic search runs only once a minute.
    fn check_unused(&self, device: &str) -> Result<(), NodeDriverError> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        // A missing device is rejected by `container_edits`.
        let Some(found) = found.get(device).cloned() else {
            return Ok(());
        };
        found.used_by(&self.paths, true).map_or(Ok(()), |problem| {
            self.look_again.notify_one();
            Err(NodeDriverError::InUse {
                device: device.to_owned(),
                problem,
            })
        })
    }

    fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        let known = |devices: &Mutex<BTreeMap<String, Found>>| {
            let devices = devices.lock().unwrap_or_else(PoisonError::into_inner);
            devices.get(device).cloned()
        };
        let found = known(&self.found).or_else(|| known(&self.retired));
        let gone = |problem: String| NodeDriverError::Gone {
            device: device.to_owned(),
            problem,
        };
        let found = found.ok_or_else(|| gone("the search for devices does not find it".to_owned()))?;
        let root = DevRoot::new(&self.paths.dev).map_err(|error| gone(error.to_string()))?;
        for node in &found.nodes {
            let now = root
                .look(&node.path)
                .inspect_err(|_| self.look_again.notify_one())
                .map_err(|error: NodeError| gone(format!("/dev/{} {error}", node.path)))?;
            if now != node.node {
                self.look_again.notify_one();
                return Err(NodeDriverError::Changed {
                    device: device.to_owned(),
                    before: node.node.to_string(),
                    now: now.to_string(),
                });
            }
        }
        Ok(found.container_edits(device))
    }
}

#[cfg(test)]
mod tests;
