//! Finds the devices that the node's configuration describes.
//!
//! Device nodes below `/dev` are identified by the path that a pattern matched, which may be a symbolic link that udev
//! keeps (`/dev/serial/by-id/...`). The search is repeated when a directory concerned changes, and now and then anyway.

mod in_use;
mod node;
mod scan;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures::{Stream, StreamExt as _};
use tokio::sync::{Notify, watch as value};
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::node::{DevRoot, NodeError};
use self::scan::{Found, Problem, Scan, scan};
use self::watch::DirectoryWatches;
use super::config::NodeConfiguration;
use super::driver::{NodeDriver, NodeDriverError};
use crate::api::crd::Device;
use crate::core::node::injection::{DeviceNode, Injection};
use crate::core::node::inventory::Devices;

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

/// The built-in [`NodeDriver`]: device nodes below `/dev`.
#[derive(Debug)]
pub struct HostDevices {
    shared: Arc<Shared>,
    devices: value::Receiver<Arc<Devices>>,
}

#[derive(Debug)]
struct Shared {
    configuration: NodeConfiguration,
    paths: HostPaths,
    /// What was found last, by name.
    found: Mutex<BTreeMap<String, Found>>,
    /// Told when something was seen to be not as it was found.
    look_again: Notify,
}

impl HostDevices {
    /// Searches once and goes on searching until the token is cancelled.
    pub async fn start(
        configuration: NodeConfiguration,
        paths: HostPaths,
        shutdown: CancellationToken,
    ) -> Self {
        let shared = Arc::new(Shared {
            configuration,
            paths,
            found: Mutex::default(),
            look_again: Notify::new(),
        });
        let (sender, devices) = value::channel(Arc::default());
        let mut search = Search {
            shared: shared.clone(),
            sender,
            reported: BTreeSet::new(),
        };
        let watches = DirectoryWatches::new();
        // The directories are watched before they are searched, so that nothing falls between.
        let directories = search.once().await;
        tokio::spawn(search.go_on(watches, directories, shutdown));
        Self { shared, devices }
    }
}

impl NodeDriver for HostDevices {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        WatchStream::new(self.devices.clone()).map(|devices| devices.values().cloned().collect())
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
    fn injection(&self, device: &str) -> Result<Injection, NodeDriverError> {
        let found = self
            .found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(device)
            .cloned();
        let gone = |problem: String| NodeDriverError::Gone {
            device: device.to_owned(),
            problem,
        };
        let found = found.ok_or_else(|| gone("the search for devices does not find it".to_owned()))?;
        let now = DevRoot::new(&self.paths.dev)
            .and_then(|root| root.look(&found.path))
            .inspect_err(|_| self.look_again.notify_one())
            .map_err(|error: NodeError| gone(error.to_string()))?;
        if now != found.node {
            self.look_again.notify_one();
            return Err(NodeDriverError::Changed {
                device: device.to_owned(),
                before: found.node.to_string(),
                now: now.to_string(),
            });
        }
        let node = DeviceNode {
            host_path: now.host_path,
            container_path: format!("/dev/{}", found.path),
            permissions: found.permissions,
        };
        Ok(Injection::of_device_node(device, node))
    }
}

/// The task that searches.
struct Search {
    shared: Arc<Shared>,
    sender: value::Sender<Arc<Devices>>,
    /// What was logged already: a problem is told when it comes and when it goes, not at each search.
    reported: BTreeSet<Problem>,
}

impl Search {
    /// Searches, publishes what has changed, and returns the directories that the result depends on.
    async fn once(&mut self) -> BTreeSet<PathBuf> {
        let shared = self.shared.clone();
        let Ok(Scan {
            found,
            problems,
            directories,
        }) = spawn_blocking(move || scan(&shared.configuration, &shared.paths)).await
        else {
            warn!("a search for devices was broken off; the next one comes by itself");
            return BTreeSet::new();
        };
        self.report(problems);
        let devices: Devices = found
            .iter()
            .map(|(name, found)| (name.clone(), found.device(name)))
            .collect();
        // First what is looked up, then what is announced.
        *self.shared.found.lock().unwrap_or_else(PoisonError::into_inner) = found;
        self.sender.send_if_modified(|published| {
            let changed = **published != devices;
            if changed {
                info!(devices = devices.len(), "the devices of this node have changed");
                *published = Arc::new(devices);
            }
            changed
        });
        directories
    }

    fn report(&mut self, problems: BTreeSet<Problem>) {
        for problem in problems.difference(&self.reported) {
            warn!(path = %problem.path, kind = %problem.kind, "not handed out: {}", problem.what);
        }
        for problem in self.reported.difference(&problems) {
            info!(path = %problem.path, kind = %problem.kind, "no longer so: {}", problem.what);
        }
        self.reported = problems;
    }

    async fn go_on(
        mut self,
        mut watches: DirectoryWatches,
        mut directories: BTreeSet<PathBuf>,
        shutdown: CancellationToken,
    ) {
        loop {
            // A directory that was not watched yet may have changed since it was searched.
            if !watches.watch(&directories) {
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = watches.changed() => {}
                    () = self.shared.look_again.notified() => {}
                }
            }
            directories = self.once().await;
        }
    }
}

#[cfg(test)]
mod tests;
