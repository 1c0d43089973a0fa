//! Watches the configuration file and applies changes without a restart.
//!
//! Kubernetes changes a mounted ConfigMap by renaming a symbolic link beside the file (`..data`); an editor renames or rewrites the
//! file. Both are events of the directory. SIGHUP triggers a read as well, for files that change in other ways. A file that is invalid or
//! cannot be read is rejected, and the previous configuration remains in force; it is read again after a pause, since the cause may pass
//! without an event of the directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use inotify::WatchMask;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::core::discovery::device_events::DeviceEvent;
use crate::core::prepare::device_plugin::ExtendedResource;
use crate::node::config::NodeConfiguration;
use crate::node::directory_watch::DirectoryWatches;

/// How long to gather events before reading the file: a writer causes several.
const GATHER: Duration = Duration::from_millis(200);
/// Read interval if the file cannot be watched, or was rejected.
const POLL_INTERVAL: Duration = Duration::from_secs(60);

/// Extended resources by name.
pub(super) type ConfiguredResources = BTreeMap<String, ExtendedResource>;

/// Watches one configuration file.
#[derive(Debug)]
pub(super) struct Follower {
    pub(super) file: PathBuf,
    pub(super) configuration: watch::Sender<Arc<NodeConfiguration>>,
    pub(super) resources: watch::Sender<Arc<ConfiguredResources>>,
    /// Events about configuration changes.
    pub(super) notices: mpsc::Sender<DeviceEvent>,
}

/// The extended resources of a configuration.
pub(super) fn resources(configuration: &NodeConfiguration) -> ConfiguredResources {
    configuration
        .kinds
        .iter()
        .filter_map(|kind| kind.apis.extended_resource(&kind.name))
        .collect()
}

/// The parent directory of a file; `.` for a bare file name.
fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    }
}

impl Follower {
    /// Watches the file until the token is cancelled.
    pub(super) async fn run(self, shutdown: CancellationToken) {
        let mut hangup = signal(SignalKind::hangup())
            .inspect_err(|error| warn!(%error, "cannot install the SIGHUP handler"))
            .ok();
        let mut refused = None;
        loop {
            // Recreated each time: the directory itself may have been replaced.
            let mut changes = self.changes();
            self.reload(&mut refused).await;
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = changed(&mut changes) => {
                    sleep(GATHER).await;
                    changes.drain();
                }
                () = sleep(POLL_INTERVAL), if refused.is_some() => {}
                () = heard(hangup.as_mut()) => {
                    info!("SIGHUP: the configuration is read again");
                    refused = None;
                }
            }
        }
    }

    fn changes(&self) -> DirectoryWatches {
        let fallback = format!("the configuration is read every {} s", POLL_INTERVAL.as_secs());
        let mut changes = DirectoryWatches::new(WatchMask::CLOSE_WRITE, fallback);
        changes.watch(&BTreeSet::from([directory_of(&self.file).to_owned()]));
        changes
    }

    /// Reads the file and applies it if it is valid and has changed.
    async fn reload(&self, refused: &mut Option<String>) {
        let file = self.file.clone();
        let Ok(read) = spawn_blocking(move || NodeConfiguration::read(&file)).await else {
            return;
        };
        let configuration = match read {
            Ok(configuration) => configuration,
            Err(error) => {
                let problem = error.to_string();
                if refused.as_ref() != Some(&problem) {
                    let reason = error.reason();
                    let note = format!(
                        "the configuration has changed and is refused; the previous one stays in force: {problem}"
                    );
                    warn!(reason, "{note}");
                    self.report(DeviceEvent {
                        reason,
                        warning: true,
                        note,
                    });
                    *refused = Some(problem);
                }
                return;
            }
        };
        *refused = None;
        if **self.configuration.borrow() == configuration {
            return;
        }
        let names: Vec<&str> = configuration
            .kinds
            .iter()
            .map(|kind| kind.name.as_str())
            .collect();
        let names = names.join(", ");
        info!(kinds = names, "the configuration has changed and is in force");
        self.report(DeviceEvent {
            reason: "ConfigurationChanged",
            warning: false,
            note: format!("the configuration has changed and is in force; kinds: {names}"),
        });
        let resources = resources(&configuration);
        self.configuration.send_replace(Arc::new(configuration));
        self.resources.send_if_modified(|before| {
            let changed = **before != resources;
            if changed {
                *before = Arc::new(resources);
            }
            changed
        });
    }

    fn report(&self, event: DeviceEvent) {
        // Already logged; the event is dropped if the queue is full.
        let _ = self.notices.try_send(event);
    }
}

async fn changed(changes: &mut DirectoryWatches) {
    if changes.is_watching() {
        changes.changed(|_| true).await;
    } else {
        sleep(POLL_INTERVAL).await;
    }
}

async fn heard(signal: Option<&mut Signal>) {
    let heard = match signal {
        Some(signal) => signal.recv().await,
        None => None,
    };
    if heard.is_none() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_file_that_cannot_be_read_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let [watched, elsewhere] = ["watched", "elsewhere"].map(|name| directory.path().join(name));
        fs::create_dir(&watched).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        // A link into another directory, whose changes cause no event.
        let (file, target) = (watched.join("node.yaml"), elsewhere.join("node.yaml"));
        symlink(&target, &file).unwrap();
        let (configuration, mut read) = watch::channel(Arc::default());
        let (resources, _) = watch::channel(Arc::default());
        let (notices, mut events) = mpsc::channel(8);
        let follower = Follower {
            file,
            configuration,
            resources,
            notices,
        };
        let end = CancellationToken::new();
        tokio::spawn(follower.run(end.clone()));
        assert_eq!(events.recv().await.unwrap().reason, "ConfigurationUnreadable");
        sleep(POLL_INTERVAL * 5 / 2).await;
        assert!(
            events.try_recv().is_err(),
            "an equal problem is not reported again"
        );

        let text = "apiVersion: drayman.dev/v1alpha1\n\
            kind: NodeConfiguration\n\
            kinds: [{name: test, paths: [/dev/test-0]}]\n";
        fs::write(target, text).unwrap();
        timeout(2 * POLL_INTERVAL, read.changed())
            .await
            .expect("the file is read again")
            .unwrap();
        assert_eq!(read.borrow().kinds.len(), 1);
        assert_eq!(events.recv().await.unwrap().reason, "ConfigurationChanged");
        end.cancel();
    }

    #[test]
    fn a_file_without_a_directory_is_in_the_working_directory() {
        for (file, directory) in [
            ("node.yaml", "."),
            ("a/node.yaml", "a"),
            ("/node.yaml", "/"),
            ("/etc/drayman/node.yaml", "/etc/drayman"),
        ] {
            assert_eq!(directory_of(Path::new(file)), Path::new(directory), "{file}");
        }
    }
}
