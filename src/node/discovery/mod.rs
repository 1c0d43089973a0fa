//! Finds the devices that the node's configuration describes.
//!
//! Device nodes below `/dev` are identified by the path that a pattern matched, which may be a symbolic link that udev
//! keeps (`/dev/serial/by-id/...`); USB and PCI devices by what they are and where they are plugged in. The search is repeated
//! when the kernel tells of a device, when a directory concerned changes, and now and then anyway.

mod found;
mod in_use;
mod node;
mod probe;
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
pub use self::report::Candidate;
use self::search::Search;
pub use self::search::{Caught, Cause};
use crate::api::crd::Device;
use crate::core::prepare::injection::Injection;
use crate::core::prepare::inventory::Devices;
use crate::node::config::NodeConfiguration;
use crate::node::driver::{NodeDriver, NodeDriverError};

/// Where the host's files are seen by this process. What is told to others always says `/dev`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPaths {
    /// The host's `/dev`.
    pub dev: PathBuf,
    /// The host's `/sys`, which knows which disks partitions and volumes lie on.
    pub sys: PathBuf,
    /// The mounts of the host. In a pod that does not share the host's process ids this is the pod's own table, which shows
    /// only part of them.
    pub mountinfo: PathBuf,
    /// The swap areas of the host.
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

/// What one search has found, for people.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// The devices, in the order of their names.
    pub devices: Vec<Device>,
    /// What a container would get for each of them, by the device's name.
    pub injections: BTreeMap<String, Injection>,
    /// Everything that was looked at.
    pub candidates: Vec<Candidate>,
}

/// Searches once and probes what is found, without any cluster.
pub async fn survey(configuration: NodeConfiguration, paths: HostPaths) -> Survey {
    search::survey(configuration, paths).await
}

/// The built-in [`NodeDriver`]: what the node's configuration describes.
#[derive(Debug)]
pub struct HostDevices {
    shared: Arc<Shared>,
    devices: value::Receiver<Arc<Devices>>,
}

#[derive(Debug)]
struct Shared {
    paths: HostPaths,
    /// What was found last, by name.
    found: Mutex<BTreeMap<String, Found>>,
    /// What an earlier configuration described and the present one does not: claims that hold it keep it.
    retired: Mutex<BTreeMap<String, Found>>,
    /// Told when something was seen to be not as it was found.
    look_again: Notify,
    caught: Caught,
}

impl HostDevices {
    /// Searches once and goes on searching until the token is cancelled, each time by the configuration as it is then.
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
            caught: Caught::default(),
        });
        let (sender, devices) = value::channel(Arc::default());
        Search::start(shared.clone(), configuration, sender, shutdown).await;
        Self { shared, devices }
    }

    /// The devices by name, now and after each change.
    pub fn watch(&self) -> value::Receiver<Arc<Devices>> {
        self.devices.clone()
    }

    /// How many changes were noticed in which way.
    pub fn caught(&self) -> &Caught {
        &self.shared.caught
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

    async fn injection(&self, device: &str) -> Result<Injection, NodeDriverError> {
        let shared = self.shared.clone();
        let name = device.to_owned();
        spawn_blocking(move || shared.injection(&name))
            .await
            .unwrap_or_else(|_| Err(NodeDriverError::Ended(device.to_owned())))
    }
}

impl Shared {
    /// Looks again for what the search looks for: mounts, swap areas, and what the kernel has built on a block device. The search comes
    /// once a minute, and nobody tells of a mount.
    fn check_unused(&self, device: &str) -> Result<(), NodeDriverError> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        // A device that is gone is refused when it is looked at.
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

    fn injection(&self, device: &str) -> Result<Injection, NodeDriverError> {
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
        Ok(found.injection(device))
    }
}

#[cfg(test)]
mod tests;
