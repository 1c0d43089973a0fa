//! Watches directories for created and removed entries.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::PathBuf;

use futures::{FutureExt, StreamExt};
use inotify::{Event, EventMask, EventStream, Inotify, WatchDescriptor, WatchMask};
use tracing::warn;

/// Buffer bytes for several events with names of maximal length.
const BUFFER: usize = 4096;

/// A set of watched directories.
pub(super) struct DirectoryWatches {
    /// `None` if no inotify instance is available (most nodes allow each user 128).
    events: Option<EventStream<[u8; BUFFER]>>,
    mask: WatchMask,
    /// The replacement of a watch, for messages.
    fallback: String,
    watched: BTreeMap<PathBuf, WatchDescriptor>,
    /// Directories that cannot be watched, already logged.
    refused: BTreeSet<PathBuf>,
}

impl DirectoryWatches {
    /// Watches for these events besides entries that come and go.
    pub(super) fn new(also: WatchMask, fallback: String) -> Self {
        let events = Inotify::init().and_then(|inotify| inotify.into_event_stream([0; BUFFER]));
        if let Err(error) = &events {
            warn!(%error, "directories cannot be watched (see fs.inotify.max_user_instances); {fallback}");
        }
        Self {
            events: events.ok(),
            mask: WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ONLYDIR | also,
            fallback,
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
        let mut unused = Vec::new();
        for path in stale {
            unused.extend(self.watched.remove(&path));
        }
        let mut added = false;
        for path in directories {
            // Added each time: a recreated directory needs a new watch, and for a watched one the kernel returns the existing
            // watch.
            match watches.add(path, self.mask) {
                Ok(watch) => {
                    let before = self.watched.insert(path.clone(), watch.clone());
                    if before.as_ref() != Some(&watch) {
                        added = true;
                        unused.extend(before);
                    }
                    self.refused.remove(path);
                }
                Err(error) => {
                    unused.extend(self.watched.remove(path));
                    if self.refused.insert(path.clone()) {
                        warn!(path = %path.display(), %error, "the directory cannot be watched; {}", self.fallback);
                    }
                }
            }
        }
        // A directory that was renamed away would stay watched. Another path may lead to the same directory.
        unused.retain(|watch| !self.watched.values().any(|used| used == watch));
        for watch in unused {
            // Fails if the directory is gone, which has also removed the watch.
            let _ = watches.remove(watch);
        }
        added
    }

    /// Whether a directory is watched.
    pub(super) fn is_watching(&self) -> bool {
        !self.watched.is_empty()
    }

    /// Waits until a directory, or an entry with a relevant name, may have changed. Returns false if events were lost.
    pub(super) async fn changed(&mut self, is_relevant: impl Fn(&OsStr) -> bool) -> bool {
        let Some(events) = &mut self.events else {
            return std::future::pending().await;
        };
        loop {
            match events.next().await {
                Some(Ok(event)) if event.name.as_deref().is_some_and(|name| !is_relevant(name)) => {}
                event => {
                    let is_complete = |event: &Event<_>| !event.mask.contains(EventMask::Q_OVERFLOW);
                    return event.and_then(Result::ok).as_ref().is_some_and(is_complete);
                }
            }
        }
    }

    /// Discards pending events.
    pub(super) fn drain(&mut self) {
        if let Some(events) = &mut self.events {
            while let Some(Some(Ok(_))) = events.next().now_or_never() {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    impl DirectoryWatches {
        /// Watches nothing from now on, as without an inotify instance.
        pub(in crate::node) fn stop(&mut self) {
            self.events = None;
            self.watched.clear();
        }

        async fn has_changed(&mut self) -> bool {
            let changed = timeout(Duration::from_millis(200), self.changed(|_| true));
            changed.await.is_ok()
        }
    }

    #[tokio::test]
    async fn a_renamed_directory_is_watched_only_by_its_other_path() {
        let parent = tempfile::tempdir().unwrap();
        let [path, old, link] = ["d", "old", "link"].map(|name| parent.path().join(name));
        let directories = BTreeSet::from([path.clone()]);
        let mut watches = DirectoryWatches::new(WatchMask::empty(), String::new());
        fs::create_dir(&path).unwrap();
        assert!(watches.watch(&directories) && !watches.watch(&directories));
        let replace = |watches: &mut DirectoryWatches, directories: &BTreeSet<PathBuf>, to: &PathBuf| {
            fs::rename(&path, to).unwrap();
            fs::create_dir(&path).unwrap();
            assert!(watches.watch(directories) && !watches.watch(directories));
        };
        replace(&mut watches, &directories, &old);
        // The removed watch is an event, too.
        while watches.has_changed().await {}
        fs::write(old.join("a"), "").unwrap();
        assert!(!watches.has_changed().await);
        fs::write(path.join("a"), "").unwrap();
        assert!(watches.has_changed().await);

        let moved = parent.path().join("moved");
        symlink(&path, &link).unwrap();
        let both = BTreeSet::from([path.clone(), link.clone()]);
        assert!(
            watches.watch(&both) && !watches.watch(&directories),
            "one directory"
        );
        let directories = both;
        assert!(watches.watch(&directories));
        fs::remove_file(&link).unwrap();
        symlink(&moved, &link).unwrap();
        replace(&mut watches, &directories, &moved);
        while watches.has_changed().await {}
        fs::write(moved.join("b"), "").unwrap();
        assert!(watches.has_changed().await);
    }
}
