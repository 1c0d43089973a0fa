//! Watches directories for names that come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchDescriptor, WatchMask};
use tokio::time::sleep;
use tracing::warn;

/// How often a search is made although nothing seems to have changed: what inotify cannot tell (a mount over a
/// directory, a queue that ran over) is found then.
const RESCAN: Duration = Duration::from_secs(60);
/// How long changes are gathered before a search: a device that is plugged in makes several.
const GATHER: Duration = Duration::from_millis(100);
/// Room for some events with the longest of names, in bytes.
const BUFFER: usize = 4096;

/// A set of directories that is watched.
pub(super) struct DirectoryWatches {
    /// Absent if the system gives none: then there is only the search now and then.
    events: Option<EventStream<[u8; BUFFER]>>,
    watched: BTreeMap<PathBuf, WatchDescriptor>,
    /// Directories that the system would not watch, which was logged.
    refused: BTreeSet<PathBuf>,
}

impl DirectoryWatches {
    pub(super) fn new() -> Self {
        let events = Inotify::init().and_then(|inotify| inotify.into_event_stream([0; BUFFER]));
        if let Err(error) = &events {
            warn!(%error, "directories cannot be watched; devices are searched for every {} s only", RESCAN.as_secs());
        }
        Self {
            events: events.ok(),
            watched: BTreeMap::new(),
            refused: BTreeSet::new(),
        }
    }

    /// Watches these directories and no others. True if one is among them that was not watched before.
    pub(super) fn watch(&mut self, directories: &BTreeSet<PathBuf>) -> bool {
        let Some(events) = &self.events else { return false };
        let mut watches = events.watches();
        self.refused.retain(|path| directories.contains(path));
        let stale: Vec<PathBuf> = self
            .watched
            .keys()
            .filter(|path| !directories.contains(*path))
            .cloned()
            .collect();
        for path in stale {
            if let Some(watch) = self.watched.remove(&path) {
                // Fails if the directory is gone, and the watch with it.
                let _ = watches.remove(watch);
            }
        }
        let mut added = false;
        for path in directories {
            let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ONLYDIR;
            // Asked for again each time: a directory that was made anew under its old name is another one, and for one that
            // is watched already the system returns the same watch.
            match watches.add(path, mask) {
                Ok(watch) => {
                    added |= self.watched.get(path) != Some(&watch);
                    self.watched.insert(path.clone(), watch);
                    self.refused.remove(path);
                }
                Err(error) => {
                    self.watched.remove(path);
                    if self.refused.insert(path.clone()) {
                        warn!(path = %path.display(), %error, "cannot be watched; it is searched every {} s only", RESCAN.as_secs());
                    }
                }
            }
        }
        added
    }

    /// Waits until something may have changed, or until it is time to look anyway.
    pub(super) async fn changed(&mut self) {
        let Some(events) = &mut self.events else {
            return sleep(RESCAN).await;
        };
        tokio::select! {
            event = events.next() => {
                if !matches!(event, Some(Ok(_))) {
                    warn!("events of directories were lost");
                }
            }
            () = sleep(RESCAN) => return,
        }
        sleep(GATHER).await;
        while let Some(Some(Ok(_))) = events.next().now_or_never() {}
    }
}
