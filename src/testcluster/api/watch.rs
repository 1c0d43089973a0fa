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

use super::object;
use super::refusal::Refusal;
use super::selector::Selector;
use super::server::{ApiServer, Target, shown};
use super::store::Key;
use super::table;

/// Objects of the beginning that a watch looks up at once.
const PAGE: usize = 16;
/// How often a watch that wants bookmarks gets one.
const BOOKMARK: Duration = Duration::from_secs(60);
/// How long before its end such a watch gets its last one.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);
/// How long a watch lasts that does not say.
const LIFE: Duration = Duration::from_secs(45 * 60);
/// How long a watch lasts at most, whatever it says.
const LIFE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// What a watch asks for.
#[derive(Clone, Debug)]
pub(crate) struct WatchQuery {
    pub(crate) selector: Selector,
    pub(crate) version: String,
    pub(crate) bookmarks: bool,
    /// In seconds; 0 as if it were not said.
    pub(crate) timeout: Option<i64>,
    pub(crate) table: bool,
}

struct Watcher {
    server: ApiServer,
    changes: watch::Receiver<u64>,
    target: Target,
    query: WatchQuery,
    position: u64,
    /// What there was in the beginning, as long as it is not all told.
    beginning: Option<Beginning>,
    end: Instant,
    bookmark: Instant,
    ended: bool,
}

/// Where a watch is among the objects that it begins with.
#[derive(Default)]
struct Beginning {
    /// The last one that was told or passed over.
    last: Option<Key>,
    /// Those after it that were looked up.
    found: VecDeque<(Key, Arc<Value>)>,
}

/// The lines of a watch.
pub(crate) fn watch(
    server: &ApiServer,
    target: Target,
    query: WatchQuery,
) -> Result<impl Stream<Item = Result<Bytes, Infallible>> + Send + use<>, Refusal> {
    let changes = server.changes();
    let asked = super::query::version(&query.version)?;
    let current = server.state().store.version();
    let now = Instant::now();
    let life = match query.timeout {
        None | Some(0) => LIFE,
        // Less than nothing is over at once.
        Some(seconds) => Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(LIFE_MAX),
    };
    let end = now + life;
    // The last one comes shortly before the end, so that the next watch begins there.
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
    /// The next line. It is made when somebody takes it, and nothing of what comes after it is held until then.
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

    /// The next of the objects that there were in the beginning.
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

    /// The next of the changes since.
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
        // What was deleted has the version of its deletion.
        let version = (sort == "DELETED").then_some(position);
        Some(self.line(sort, &object, version))
    }

    /// The last line of a watch that has missed something.
    fn gone(&mut self) -> Bytes {
        let message = format!(
            "too old resource version: {} ({})",
            self.position,
            self.server.state().store.forgotten()
        );
        self.ended = true;
        let error = json!({ "type": "ERROR", "object": Refusal::expired(message).status() });
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
        let mut object = shown(kind, stored);
        if let Some(version) = version {
            object::set_metadata(&mut object, "resourceVersion", Some(version.to_string().into()));
        }
        if self.query.table {
            object = table::table(kind, json!({}), &[object], self.server.time());
        }
        Bytes::from(format!("{}\n", json!({ "type": sort, "object": object })))
    }
}

fn concerns(target: &Target, selector: &Selector, name: &str, object: &Value) -> bool {
    (target.name.is_empty() || target.name == name) && selector.matches(object)
}
