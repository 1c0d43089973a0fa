//! Watches directories for names that come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use futures::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchDescriptor, WatchMask};
use tracing::warn;

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
            warn!(%error, "directories cannot be watched; the kernel's messages and the search now and then are left");
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
                        warn!(path = %path.display(), %error, "cannot be watched; it is searched now and then only");
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
            warn!("events of directories were lost");
        }
    }

    /// Forgets what has happened up to now.
    pub(super) fn drain(&mut self) {
        if let Some(events) = &mut self.events {
            while let Some(Some(Ok(_))) = events.next().now_or_never() {}
        }
    }
}
