//! Watches directories for created and removed entries.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use futures::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchDescriptor, WatchMask};
use tracing::warn;

/// Buffer bytes for several events with names of maximal length.
const BUFFER: usize = 4096;

/// A set of watched directories.
pub(super) struct DirectoryWatches {
    /// `None` if no inotify instance is available; uevents and resyncs remain.
    events: Option<EventStream<[u8; BUFFER]>>,
    watched: BTreeMap<PathBuf, WatchDescriptor>,
    /// Directories that cannot be watched, already logged.
    refused: BTreeSet<PathBuf>,
}

impl DirectoryWatches {
    pub(super) fn new() -> Self {
        let events = Inotify::init().and_then(|inotify| inotify.into_event_stream([0; BUFFER]));
        if let Err(error) = &events {
            warn!(%error, "cannot watch directories; kernel device events and periodic searches remain");
        }
        Self {
            events: events.ok(),
            watched: BTreeMap::new(),
            refused: BTreeSet::new(),
        }
    }

    /// Watches exactly these directories. Returns true if at least one was not watched before.
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
                // Fails if the directory is gone, which has also removed the watch.
                let _ = watches.remove(watch);
            }
        }
        let mut added = false;
        for path in directories {
            let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ONLYDIR;
            // Added each time: a recreated directory needs a new watch, and for a watched one the kernel returns the existing
            // watch.
            match watches.add(path, mask) {
                Ok(watch) => {
                    added |= self.watched.get(path) != Some(&watch);
                    self.watched.insert(path.clone(), watch);
                    self.refused.remove(path);
                }
                Err(error) => {
                    self.watched.remove(path);
                    if self.refused.insert(path.clone()) {
                        warn!(path = %path.display(), %error, "cannot watch the directory; kernel device events and periodic searches remain");
                    }
                }
            }
        }
        added
    }

    /// Waits until something in a directory may have changed.
    pub(super) async fn changed(&mut self) {
        let Some(events) = &mut self.events else {
            return std::future::pending().await;
        };
        if !matches!(events.next().await, Some(Ok(_))) {
            warn!("directory events were lost; discovery searches again");
        }
    }

    /// Discards pending events.
    pub(super) fn drain(&mut self) {
        if let Some(events) = &mut self.events {
            while let Some(Some(Ok(_))) = events.next().now_or_never() {}
        }
    }
}
