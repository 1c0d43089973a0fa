//! Watches: changes as they come, from a version on.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::kinds::Kind;
use super::object;
use super::refusal::Refusal;
use super::selector::Selector;
use super::server::{ApiServer, Target, shown};
use super::table;

/// Changes that a watch takes from the history at once: a client that does not read makes nothing grow.
const BATCH: usize = 100;
/// How often a watch that wants bookmarks gets one.
const BOOKMARK: Duration = Duration::from_secs(60);
/// How long before its end such a watch gets its last one.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);
/// How long a watch lasts that does not say.
const LIFE: Duration = Duration::from_secs(45 * 60);

/// What a watch asks for.
#[derive(Clone, Debug)]
pub(crate) struct WatchQuery {
    pub(crate) selector: Selector,
    pub(crate) version: String,
    pub(crate) bookmarks: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) table: bool,
}

struct Watcher {
    server: ApiServer,
    changes: watch::Receiver<u64>,
    target: Target,
    query: WatchQuery,
    position: u64,
    waiting: VecDeque<Bytes>,
    end: Instant,
    bookmark: Instant,
    ended: bool,
}

/// The lines of a watch.
pub(crate) fn watch(
    server: &ApiServer,
    target: Target,
    query: WatchQuery,
) -> Result<impl Stream<Item = Result<Bytes, Infallible>> + Send + use<>, Refusal> {
    let changes = server.changes();
    let state = server.state();
    let current = state.store.version();
    let mut waiting = VecDeque::new();
    let position = match query.version.as_str() {
        "" | "0" => {
            let objects = state
                .store
                .at(current, &target.kind.storage(), &target.namespace)
                .unwrap_or_default();
            waiting.extend(
                objects
                    .into_iter()
                    .filter(|(key, object)| concerns(&target, &query.selector, &key.name, object))
                    .map(|(_, object)| line(server, "ADDED", &target.kind, &object, None, query.table)),
            );
            current
        }
        version => version
            .parse()
            .map_err(|_| Refusal::bad_request(format!("invalid resource version {version:?}")))?,
    };
    drop(state);
    let now = Instant::now();
    let end = now + query.timeout.unwrap_or(LIFE);
    // The last one comes shortly before the end, so that the next watch begins there.
    let before_end = end.checked_sub(LAST_BOOKMARK).filter(|last| *last > now);
    let bookmark = before_end.unwrap_or(now + BOOKMARK).min(now + BOOKMARK);
    let watcher = Watcher {
        server: server.clone(),
        changes,
        target,
        position,
        waiting,
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
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(line) = self.waiting.pop_front() {
                return Some(line);
            }
            if self.ended {
                return None;
            }
            self.changes.borrow_and_update();
            if self.take() {
                continue;
            }
            tokio::select! {
                changed = self.changes.changed() => if changed.is_err() { return None },
                () = sleep_until(self.end) => return None,
                () = sleep_until(self.bookmark), if self.query.bookmarks => self.remind(),
            }
        }
    }

    /// Takes what has changed since; whether there was anything.
    fn take(&mut self) -> bool {
        let state = self.server.state();
        let before = self.position;
        let Some(changes) = state.store.changes_after(self.position) else {
            let message = format!(
                "too old resource version: {} ({})",
                self.position,
                state.store.forgotten()
            );
            let error = json!({ "type": "ERROR", "object": Refusal::expired(message).status() });
            self.waiting.push_back(Bytes::from(format!("{error}\n")));
            self.ended = true;
            return true;
        };
        let storage = self.target.kind.storage();
        for change in changes.take(BATCH) {
            self.position = change.version;
            let key = &change.key;
            if key.storage != storage
                || (!self.target.namespace.is_empty() && self.target.namespace != key.namespace)
            {
                continue;
            }
            let concerned = |object: &Option<Arc<Value>>| {
                object
                    .as_ref()
                    .is_some_and(|object| concerns(&self.target, &self.query.selector, &key.name, object))
            };
            let event = match (concerned(&change.before), concerned(&change.after)) {
                (false, true) => change.after.as_ref().map(|object| ("ADDED", object)),
                (true, true) => change.after.as_ref().map(|object| ("MODIFIED", object)),
                (true, false) => change.before.as_ref().map(|object| ("DELETED", object)),
                (false, false) => None,
            };
            if let Some((sort, object)) = event {
                let version = (sort == "DELETED").then_some(change.version);
                self.waiting.push_back(line(
                    &self.server,
                    sort,
                    &self.target.kind,
                    object,
                    version,
                    self.query.table,
                ));
            }
        }
        self.position != before
    }

    fn remind(&mut self) {
        self.bookmark = Instant::now() + BOOKMARK;
        let kind = &self.target.kind;
        let object = json!({
            "kind": kind.kind,
            "apiVersion": kind.api_version(),
            "metadata": { "resourceVersion": self.position.to_string(), "creationTimestamp": null },
        });
        let event = json!({ "type": "BOOKMARK", "object": object });
        self.waiting.push_back(Bytes::from(format!("{event}\n")));
    }
}

fn concerns(target: &Target, selector: &Selector, name: &str, object: &Value) -> bool {
    (target.name.is_empty() || target.name == name) && selector.matches(object)
}

fn line(
    server: &ApiServer,
    sort: &str,
    kind: &Kind,
    stored: &Value,
    version: Option<u64>,
    as_table: bool,
) -> Bytes {
    let mut object = shown(kind, stored);
    // What was deleted has the version of its deletion.
    if let Some(version) = version {
        object::set_metadata(&mut object, "resourceVersion", Some(version.to_string().into()));
    }
    if as_table {
        object = table::table(kind, json!({}), &[object], server.time());
    }
    Bytes::from(format!("{}\n", json!({ "type": sort, "object": object })))
}
