//! Watches a directory by path: it may be emptied, removed, replaced, or not exist yet.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchDescriptor, WatchMask};
use tokio::time::{Instant, sleep, sleep_until};

use crate::node::resync;

/// Poll interval while the directory is missing or inotify is unavailable.
const MISSING: Duration = Duration::from_millis(500);
/// Buffer bytes for several events with names of maximal length.
const EVENTS: usize = 4096;

/// Reports when entries are created in or removed from a directory.
pub(super) struct DirectoryWatch {
    path: PathBuf,
    /// `None` if no inotify instance is available (most nodes allow each user 128); the directory is then polled.
    events: Option<EventStream<[u8; EVENTS]>>,
    /// The watch, with device and inode of the watched directory.
    watched: Option<(WatchDescriptor, (u64, u64))>,
}

impl std::fmt::Debug for DirectoryWatch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("DirectoryWatch")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl DirectoryWatch {
    /// Starts watching; the directory may be missing.
    pub(super) fn new(path: &Path) -> Self {
        let events = Inotify::init().and_then(|inotify| inotify.into_event_stream([0; EVENTS]));
        if let Err(error) = &events {
            tracing::warn!(path = %path.display(), %error, "the directory cannot be watched; it is polled (see fs.inotify.max_user_instances)");
        }
        Self::with(path, events.ok())
    }

    fn with(path: &Path, events: Option<EventStream<[u8; EVENTS]>>) -> Self {
        let mut watch = Self {
            path: path.to_owned(),
            events,
            watched: None,
        };
        watch.follow();
        watch
    }

    /// Waits until something may have changed. The caller must then check the files: one event may stand for several changes, or
    /// for none.
    pub(super) async fn changed(&mut self) {
        // A rename of a parent directory, or a mount over the path, causes no event, so a resync checks the path periodically.
        let next = match self.watched {
            Some(_) => resync::next(),
            None => Instant::now() + MISSING,
        };
        let events = async {
            match &mut self.events {
                Some(events) => events.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            event = events => {
                if !matches!(event, Some(Ok(_))) {
                    tracing::warn!(path = %self.path.display(), "events of a directory are lost");
                    sleep(MISSING).await;
                }
            }
            () = sleep_until(next) => {}
        }
        self.follow();
    }

    /// Watches the directory that the path refers to now.
    fn follow(&mut self) {
        let now = std::fs::metadata(&self.path)
            .ok()
            .map(|found| (found.dev(), found.ino()));
        if self.watched.as_ref().map(|(_, directory)| *directory) == now {
            return;
        }
        let Some(events) = &self.events else { return };
        let mut watches = events.watches();
        if let Some((old, _)) = self.watched.take() {
            // Fails if the directory is gone, which has also removed the watch.
            let _ = watches.remove(old);
        }
        let Some(directory) = now else { return };
        let mask = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        match watches.add(&self.path, mask) {
            Ok(watch) => self.watched = Some((watch, directory)),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "the directory cannot be watched; it is polled");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    /// Waits for changes until the condition holds.
    async fn until(watch: &mut DirectoryWatch, condition: impl Fn() -> bool) {
        timeout(Duration::from_secs(5), async {
            while !condition() {
                watch.changed().await;
            }
        })
        .await
        .expect("an event");
    }

    #[tokio::test]
    async fn names_that_come_and_go_are_seen_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut watch = DirectoryWatch::new(directory.path());
        let file = directory.path().join("x");
        let start = Instant::now();
        let task = tokio::spawn(async move {
            watch.changed().await;
            watch
        });
        tokio::task::yield_now().await;
        std::fs::write(&file, "").unwrap();
        let mut watch = task.await.unwrap();
        std::fs::remove_file(&file).unwrap();
        watch.changed().await;
        assert!(
            start.elapsed() < resync::EVERY / 2,
            "by events, not by the safety net"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_directory_that_nothing_watches_is_looked_at_twice_a_second() {
        let parent = tempfile::tempdir().unwrap();
        let mut watch = DirectoryWatch::with(parent.path(), None);
        let start = Instant::now();
        for _ in 0..4 {
            watch.changed().await;
        }
        assert_eq!(start.elapsed(), 4 * MISSING);
    }

    #[tokio::test]
    async fn a_directory_that_is_replaced_is_watched_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("d");
        let mut watch = DirectoryWatch::new(&path);
        assert!(watch.watched.is_none());
        std::fs::create_dir(&path).unwrap();
        until(&mut watch, || path.exists()).await;
        watch.changed().await;
        let first = watch.watched.as_ref().unwrap().1;
        // Renamed instead of removed, so that its inode number is not reused.
        std::fs::rename(&path, parent.path().join("old")).unwrap();
        std::fs::create_dir(&path).unwrap();
        watch.changed().await;
        assert!(watch.watched.as_ref().is_some_and(|(_, second)| *second != first));
        std::fs::write(path.join("x"), "").unwrap();
        let start = Instant::now();
        watch.changed().await;
        assert!(start.elapsed() < resync::EVERY / 2);
    }
}
