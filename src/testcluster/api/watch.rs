//! Watches: a stream of changes after a version.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::kinds::ResourcePath;
use super::object;
use super::selector::ObjectSelector;
use super::server::{ApiServer, converted};
use super::status_error::StatusError;
use super::store::StorageKey;
use super::table;

/// Number of initial objects that a watch reads at once.
const PAGE: usize = 16;
/// Interval of bookmarks.
const BOOKMARK: Duration = Duration::from_secs(60);
/// Time of the last bookmark before the end of a watch.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);
/// Default duration of a watch.
const LIFE: Duration = Duration::from_secs(45 * 60);
/// Maximum duration of a watch.
const LIFE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Parameters of a watch.
#[derive(Clone, Debug)]
pub(crate) struct WatchQuery {
    pub(crate) selector: ObjectSelector,
    pub(crate) version: String,
    pub(crate) bookmarks: bool,
    /// In seconds; 0 means the default.
    pub(crate) timeout: Option<i64>,
    pub(crate) table: bool,
}

struct Watcher {
    server: ApiServer,
    changes: watch::Receiver<u64>,
    target: ResourcePath,
    query: WatchQuery,
    position: u64,
    /// Progress of the initial list; `None` once it is complete.
    beginning: Option<Beginning>,
    end: Instant,
    bookmark: Instant,
    ended: bool,
}

/// Progress of a watch's initial list.
#[derive(Default)]
struct Beginning {
    /// Last object sent or skipped.
    last: Option<StorageKey>,
    /// Objects read but not yet sent.
    found: VecDeque<(StorageKey, Arc<Value>)>,
}

/// Returns the lines of a watch.
pub(crate) fn watch(
    server: &ApiServer,
    target: ResourcePath,
    query: WatchQuery,
) -> Result<impl Stream<Item = Result<Bytes, Infallible>> + Send + use<>, StatusError> {
    let changes = server.changes();
    let asked = super::query::version(&query.version)?;
    let current = server.state().store.version();
    let now = Instant::now();
    let life = match query.timeout {
        None | Some(0) => LIFE,
        // A negative timeout ends the watch at once.
        Some(seconds) => Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(LIFE_MAX),
    };
    let end = now + life;
    // Shortly before the end, so that the next watch resumes there.
    let before_end = end.checked_sub(LAST_BOOKMARK).filter(|last| *last > now);
    let bookmark = before_end.unwrap_or(now + BOOKMARK).min(now + BOOKMARK);
    let watcher = Watcher {
        server: server.clone(),
        changes,
        target,
        position: asked.unwrap_or(current),
        beginning: asked.is_none().then(Beginning::default),
        end,
        bookmark,
        ended: false,
        query,
    };
    Ok(futures::stream::unfold(watcher, |mut watcher| async move {
        let line = watcher.next().await?;
        Some((Ok(line), watcher))
    }))
}

impl Watcher {
    /// Returns the next line. Computed on demand; later changes are not buffered.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.ended {
                return None;
            }
            self.changes.borrow_and_update();
            if let Some(line) = self.begin() {
                return Some(line);
            }
            if Instant::now() >= self.end {
                return None;
            }
            if let Some(line) = self.take() {
                return Some(line);
            }
            tokio::select! {
                changed = self.changes.changed() => if changed.is_err() { return None },
                () = sleep_until(self.end) => return None,
                () = sleep_until(self.bookmark), if self.query.bookmarks => return Some(self.remind()),
            }
        }
    }

    /// Returns the next line of the initial list.
    fn begin(&mut self) -> Option<Bytes> {
        let Beginning { mut last, mut found } = self.beginning.take()?;
        loop {
            while let Some((key, object)) = found.pop_front() {
                let concerned = concerns(&self.target, &self.query.selector, &key.name, &object);
                last = Some(key);
                if concerned {
                    self.beginning = Some(Beginning { last, found });
                    return Some(self.line("ADDED", &object, None));
                }
            }
            let page = self.server.state().store.page(
                self.position,
                &self.target.kind.storage(),
                &self.target.namespace,
                last.as_ref(),
                PAGE,
            );
            match page {
                None => return Some(self.gone()),
                Some(page) if page.is_empty() => return None,
                Some(page) => found = page.into(),
            }
        }
    }

    /// Returns the next line for a change.
    fn take(&mut self) -> Option<Bytes> {
        let storage = self.target.kind.storage();
        let concerned = |name: &str, object: &Option<Arc<Value>>| {
            object
                .as_ref()
                .is_some_and(|object| concerns(&self.target, &self.query.selector, name, object))
        };
        let state = self.server.state();
        let Some(changes) = state.store.changes_after(self.position) else {
            drop(state);
            return Some(self.gone());
        };
        let mut position = self.position;
        let mut event = None;
        for change in changes {
            position = change.version;
            let key = &change.key;
            if key.storage != storage
                || (!self.target.namespace.is_empty() && self.target.namespace != key.namespace)
            {
                continue;
            }
            event = match (
                concerned(&key.name, &change.before),
                concerned(&key.name, &change.after),
            ) {
                (false, true) => change.after.clone().map(|object| ("ADDED", object)),
                (true, true) => change.after.clone().map(|object| ("MODIFIED", object)),
                (true, false) => change.before.clone().map(|object| ("DELETED", object)),
                (false, false) => None,
            };
            if event.is_some() {
                break;
            }
        }
        drop(state);
        self.position = position;
        let (sort, object) = event?;
        // A deleted object has the resource version of its deletion.
        let version = (sort == "DELETED").then_some(position);
        Some(self.line(sort, &object, version))
    }

    /// Returns the last line of a watch whose position has expired.
    fn gone(&mut self) -> Bytes {
        let message = format!(
            "too old resource version: {} ({})",
            self.position,
            self.server.state().store.forgotten()
        );
        self.ended = true;
        let error = json!({ "type": "ERROR", "object": StatusError::expired(message).status() });
        Bytes::from(format!("{error}\n"))
    }

    fn remind(&mut self) -> Bytes {
        self.bookmark = Instant::now() + BOOKMARK;
        let kind = &self.target.kind;
        let object = json!({
            "kind": kind.kind,
            "apiVersion": kind.api_version(),
            "metadata": { "resourceVersion": self.position.to_string(), "creationTimestamp": null },
        });
        let event = json!({ "type": "BOOKMARK", "object": object });
        Bytes::from(format!("{event}\n"))
    }

    fn line(&self, sort: &str, stored: &Value, version: Option<u64>) -> Bytes {
        let kind = &self.target.kind;
        let mut object = converted(kind, stored);
        if let Some(version) = version {
            object::set_metadata(&mut object, "resourceVersion", Some(version.to_string().into()));
        }
        if self.query.table {
            object = table::table(kind, json!({}), &[object], self.server.time());
        }
        Bytes::from(format!("{}\n", json!({ "type": sort, "object": object })))
    }
}

fn concerns(target: &ResourcePath, selector: &ObjectSelector, name: &str, object: &Value) -> bool {
    (target.name.is_empty() || target.name == name) && selector.matches(object)
}
