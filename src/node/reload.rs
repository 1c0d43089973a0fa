//! Follows the file of device kinds: what is written into it counts without a restart.
//!
//! Kubernetes changes a mounted ConfigMap by renaming a symbolic link beside the file (`..data`), an editor by renaming or
//! rewriting the file. Both are events of the directory. SIGHUP asks for a look as well, for files that change in other ways.
//! A file that is wrong changes nothing: what was right before goes on.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchMask};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::core::discovery::events::DeviceEvent;
use crate::core::prepare::request::ExtendedResource;
use crate::node::config::NodeConfiguration;

/// How long changes are gathered before the file is read: writers make several.
const GATHER: Duration = Duration::from_millis(200);
/// How often a file that cannot be watched is read.
const LOOK: Duration = Duration::from_secs(60);
/// Room for some events with the longest of names, in bytes.
const BUFFER: usize = 4096;

/// The extended resources of a configuration, by name.
pub(super) type Resources = BTreeMap<String, ExtendedResource>;

/// What follows a file.
#[derive(Debug)]
pub(super) struct Follower {
    pub(super) file: PathBuf,
    pub(super) configuration: watch::Sender<Arc<NodeConfiguration>>,
    pub(super) resources: watch::Sender<Arc<Resources>>,
    /// Where people are told of it.
    pub(super) notices: mpsc::Sender<DeviceEvent>,
}

/// The extended resources that a configuration describes.
pub(super) fn resources(configuration: &NodeConfiguration) -> Resources {
    configuration
        .kinds
        .iter()
        .filter_map(|kind| kind.doors.extended_resource(&kind.name))
        .collect()
}

/// The directory of a file; the working directory for a relative path of one part.
fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    }
}

impl Follower {
    /// Follows the file until the token is cancelled.
    pub(super) async fn run(self, shutdown: CancellationToken) {
        let mut hangup = signal(SignalKind::hangup())
            .inspect_err(|error| warn!(%error, "SIGHUP cannot be heard"))
            .ok();
        let mut refused = None;
        loop {
            // Made anew each time: the directory itself may have been replaced.
            let mut changes = self.changes();
            self.take_up(&mut refused).await;
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = changed(changes.as_mut()) => {
                    sleep(GATHER).await;
                    if let Some(changes) = &mut changes {
                        while changes.next().now_or_never().is_some() {}
                    }
                }
                () = heard(hangup.as_mut()) => {
                    info!("SIGHUP: the configuration is read again");
                    refused = None;
                }
            }
        }
    }

    fn changes(&self) -> Option<EventStream<[u8; BUFFER]>> {
        let directory = directory_of(&self.file);
        let mask = WatchMask::CREATE
            | WatchMask::CLOSE_WRITE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::ONLYDIR;
        let watched = Inotify::init().and_then(|inotify| {
            inotify.watches().add(directory, mask)?;
            inotify.into_event_stream([0; BUFFER])
        });
        watched
            .inspect_err(|error| {
                warn!(directory = %directory.display(), %error, "cannot be watched; the configuration is read now and then");
            })
            .ok()
    }

    /// Reads the file, and lets it count if it is right and says something else.
    async fn take_up(&self, refused: &mut Option<String>) {
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
                    warn!(
                        reason,
                        "the configuration has changed and is refused; the one before stays in force: {problem}"
                    );
                    self.tell(DeviceEvent {
                        reason,
                        warning: true,
                        note: format!("the configuration has changed and is refused; the one before stays in force: {problem}"),
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
        self.tell(DeviceEvent {
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

    fn tell(&self, event: DeviceEvent) {
        // It was logged; people who look at events are told as well, unless nobody has listened for long.
        let _ = self.notices.try_send(event);
    }
}

async fn changed(changes: Option<&mut EventStream<[u8; BUFFER]>>) {
    match changes {
        Some(changes) => drop(changes.next().await),
        None => sleep(LOOK).await,
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
    use super::*;

    #[test]
    fn a_file_without_a_folder_is_in_the_working_directory() {
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
