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
use super::table;

/// Interval of bookmarks.
const BOOKMARK: Duration = Duration::from_secs(60);
/// Time of the last bookmark before the end of a watch.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);
/// Default duration of a watch.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(45 * 60);
/// Maximum duration of a watch.
const MAX_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 60 * 60);

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
    /// The objects of the initial list that have not been sent yet.
    initial: VecDeque<Arc<Value>>,
    end: Instant,
    bookmark: Instant,
    ended: bool,
}

/// Returns the lines of a watch.
pub(crate) fn watch(
    server: &ApiServer,
    target: ResourcePath,
    query: WatchQuery,
) -> Result<impl Stream<Item = Result<Bytes, Infallible>> + Send + use<>, StatusError> {
    let changes = server.changes();
    let asked = super::query::version(&query.version)?;
    let state = server.state();
    let current = state.store.version();
    let mut initial = VecDeque::new();
    if asked.is_none()
        && let Some(objects) = state.store.at(current, &target.kind.storage(), &target.namespace)
    {
        let objects = objects.into_iter();
        let concerned = objects.filter(|(key, object)| concerns(&target, &query.selector, &key.name, object));
        initial.extend(concerned.map(|(_, object)| object));
    }
    drop(state);
    let now = Instant::now();
    let timeout = match query.timeout {
        None | Some(0) => DEFAULT_TIMEOUT,
        // A negative timeout ends the watch at once.
        Some(seconds) => Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(MAX_TIMEOUT),
    };
    let end = now + timeout;
    // Shortly before the end, so that the next watch resumes there.
    let before_end = end.checked_sub(LAST_BOOKMARK).filter(|last| *last > now);
    let bookmark = before_end.unwrap_or(now + BOOKMARK).min(now + BOOKMARK);
    let watcher = Watcher {
        server: server.clone(),
        changes,
        target,
        position: asked.unwrap_or(current),
        initial,
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
            if let Some(object) = self.initial.pop_front() {
                return Some(self.line("ADDED", &object, None));
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

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;

    use super::super::kinds::classic_kind;
    use super::*;
    use crate::testcluster::client::ApiClient;
    use crate::testcluster::clock_and_rng::ClockAndRng;

    #[tokio::test]
    async fn the_initial_list_is_of_the_version_of_the_request() {
        let server = ApiServer::new(Arc::new(ClockAndRng::system()));
        let client = ApiClient::new(&server, "test");
        let make = |name: &str| {
            let map = json!({ "metadata": { "name": name } });
            client.create("configmaps", "default", map).unwrap()
        };
        let first = make("a");
        make("c");
        let target = ResourcePath::new(classic_kind("ConfigMap"), "default", "", "");
        let query = WatchQuery {
            selector: ObjectSelector::default(),
            version: String::new(),
            bookmarks: false,
            timeout: None,
            table: false,
        };
        let events = watch(&server, target, query).unwrap();
        client.delete("configmaps", &first, None).unwrap();
        make("b");
        let lines: Vec<_> = events.take(4).collect().await;
        let seen = lines.into_iter().map(|line| {
            let event: Value = serde_json::from_slice(&line.unwrap()).unwrap();
            let name = object::name(&event["object"]);
            format!("{} {name}", object::text(&event, "/type"))
        });
        let seen: Vec<String> = seen.collect();
        assert_eq!(seen, ["ADDED a", "ADDED c", "DELETED a", "ADDED b"]);
    }
}
