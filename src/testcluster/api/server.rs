//! Executes decoded requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::kinds::{Kind, Mode, built_in};
use super::query;
use super::refusal::Refusal;
use super::selector::Selector;
use super::store::{Change, Key, Store};
use crate::testcluster::source::Source;

/// Number of changes kept for watches and for later pages of lists.
const WINDOW: usize = 20_000;

/// Resource that a request refers to.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) kind: Arc<Kind>,
    /// Empty for cluster-scoped kinds, and for lists of all namespaces.
    pub(crate) namespace: String,
    /// Empty for a collection.
    pub(crate) name: String,
    /// `status`, `binding`, `finalize`, or empty.
    pub(crate) subresource: String,
}

impl Target {
    /// Returns the collection of this object.
    pub(crate) fn collection(&self) -> Self {
        Self {
            name: String::new(),
            subresource: String::new(),
            ..self.clone()
        }
    }

    pub(crate) fn key(&self) -> Key {
        Key {
            storage: self.kind.storage(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct WriteOptions {
    /// Field manager.
    pub(crate) manager: String,
    /// Take over fields of other managers.
    pub(crate) force: bool,
    /// Reject unknown fields.
    pub(crate) strict: bool,
    /// Whether the object results from a patch instead of the request body.
    pub(crate) patches: bool,
    /// Whether the patch is a server-side apply.
    pub(crate) applies: bool,
    /// Whether the request is a dry run (`dryRun=All`).
    pub(crate) pretends: bool,
    /// Unknown fields that were dropped.
    pub(crate) unknown: Unknown,
}

/// Warnings about an accepted object.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unknown(Arc<Mutex<Vec<String>>>);

impl Unknown {
    pub(crate) fn add(&self, warning: String) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(warning);
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Status code and object of a successful response.
pub(crate) type Answer = (u16, Value);

/// A change of an object, as watches see it.
#[derive(Clone, Debug)]
pub struct Changed {
    /// Resource version after the change.
    pub version: u64,
    /// Plural of the object's kind.
    pub plural: String,
    /// Previous object; `None` if created.
    pub before: Option<Value>,
    /// New object; `None` if deleted.
    pub after: Option<Value>,
}

/// In-memory API server. Clones share state.
#[derive(Clone, Debug)]
pub struct ApiServer {
    state: Arc<Mutex<State>>,
    mode: Mode,
    pub(crate) source: Arc<Source>,
    pub(crate) changed: watch::Sender<u64>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) store: Store,
    pub(crate) kinds: Vec<Arc<Kind>>,
}

impl ApiServer {
    /// Creates a server in classic mode, with only the initial namespaces of every cluster.
    pub fn new(source: Arc<Source>) -> Self {
        Self::with_mode(source, Mode::Classic)
    }

    /// Like [`ApiServer::new`], in the given mode.
    pub fn with_mode(source: Arc<Source>, mode: Mode) -> Self {
        let server = Self {
            state: Arc::new(Mutex::new(State {
                store: Store::new(WINDOW),
                kinds: built_in(mode),
            })),
            mode,
            source,
            changed: watch::Sender::new(0),
        };
        if let Some(kind) = server.kind("", "v1", "namespaces") {
            for name in ["default", "kube-system", "kube-public", "kube-node-lease"] {
                let target = Target {
                    kind: kind.clone(),
                    namespace: String::new(),
                    name: String::new(),
                    subresource: String::new(),
                };
                let namespace = json!({ "metadata": { "name": name } });
                // Cannot fail: the names are valid and new.
                let _ = server.create(&target, namespace, &WriteOptions::default());
            }
        }
        server
    }

    /// Returns the mode of the cluster.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Drops the history of changes, as an etcd compaction does: older watches fail as expired.
    pub fn compact(&self) {
        self.state().store.compact();
        self.changed.send_modify(|count| *count += 1);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes one or more changes atomically and notifies watches.
    pub(crate) fn change<T>(
        &self,
        make: impl FnOnce(&mut State) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut state = self.state();
        let before = state.store.version();
        let made = make(&mut state);
        let changed = state.store.version() != before;
        drop(state);
        if changed {
            self.changed.send_modify(|count| *count += 1);
        }
        made
    }

    /// Executes a change, or computes its result as a dry run.
    pub(crate) fn change_or_try<T>(
        &self,
        pretends: bool,
        make: impl FnOnce(&mut State) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        if !pretends {
            return self.change(make);
        }
        let mut tried = {
            let state = self.state();
            State {
                store: state.store.pretence(),
                kinds: state.kinds.clone(),
            }
        };
        make(&mut tried)
    }

    /// Returns all objects of the kind with this plural.
    pub fn objects(&self, plural: &str) -> Vec<Value> {
        let all = self.snapshot().into_iter();
        all.filter(|(kind, _)| kind == plural)
            .map(|(_, object)| object)
            .collect()
    }

    /// Returns the changes after a version, in order; the first version is 1. Empty if that version has expired.
    pub fn history(&self, version: u64) -> Vec<Changed> {
        let plurals: BTreeMap<String, String> = {
            let state = self.state();
            let plural = |kind: &Arc<Kind>| (kind.storage(), kind.plural.clone());
            state.kinds.iter().map(plural).collect()
        };
        let seen = |change: Change| Changed {
            version: change.version,
            plural: plurals.get(&change.key.storage).cloned().unwrap_or_default(),
            before: change.before.as_deref().cloned(),
            after: change.after.as_deref().cloned(),
        };
        self.changes_after(version).0.into_iter().map(seen).collect()
    }

    /// Subscribes to changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Returns the current time.
    pub(crate) fn time(&self) -> jiff::Timestamp {
        self.source.now()
    }

    pub(crate) fn now(&self) -> String {
        // Timestamps of objects are in whole seconds.
        self.source.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }

    pub(crate) fn kind(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        self.state()
            .kinds
            .iter()
            .find(|kind| kind.group == group && kind.version == version && kind.plural == plural)
            .cloned()
    }

    /// Returns the kind with this plural; the core group takes precedence.
    pub(crate) fn kind_of(&self, plural: &str) -> Option<Arc<Kind>> {
        self.state()
            .kinds
            .iter()
            .find(|kind| kind.plural == plural)
            .cloned()
    }

    /// Returns the kind with this apiVersion and kind.
    pub(crate) fn kind_named(&self, api_version: &str, kind: &str) -> Option<Arc<Kind>> {
        self.state()
            .kinds
            .iter()
            .find(|each| each.kind == kind && each.api_version() == api_version)
            .cloned()
    }

    /// Returns a consistent snapshot of all objects, each with the plural of its kind.
    pub(crate) fn snapshot(&self) -> Vec<(String, Value)> {
        let state = self.state();
        let plural = |storage: &str| {
            state
                .kinds
                .iter()
                .find(|kind| kind.storage() == storage)
                .map(|kind| kind.plural.clone())
        };
        state
            .store
            .all()
            .filter_map(|(key, object)| Some((plural(&key.storage)?, (**object).clone())))
            .collect()
    }

    /// Returns the changes after a version and the current version. No changes if the version has expired.
    pub(crate) fn changes_after(&self, version: u64) -> (Vec<Change>, u64) {
        let state = self.state();
        let changes = state
            .store
            .changes_after(version)
            .map(|changes| changes.cloned().collect());
        (changes.unwrap_or_default(), state.store.version())
    }

    // === reading ===

    pub(crate) fn get(&self, target: &Target) -> Result<Answer, Refusal> {
        let state = self.state();
        let object = state.existing(target)?;
        Ok((200, shown(&target.kind, object)))
    }

    /// Returns the objects of a list, converted to the kind, and the list metadata.
    pub(crate) fn list(&self, target: &Target, query: &ListQuery) -> Result<(Value, Vec<Value>), Refusal> {
        let state = self.state();
        let current = state.store.version();
        let (version, after) = match &query.continued {
            Some((0, after)) => (current, Some(after.clone())),
            Some((version, after)) => (*version, Some(after.clone())),
            None => (query.version(current)?, None),
        };
        let Some(objects) = state.store.at(version, &target.kind.storage(), &target.namespace) else {
            return Err(match &query.continued {
                // 0 stands for the current version.
                Some((_, (namespace, name))) => {
                    Refusal::expired_continue(json!([0, namespace, name]).to_string())
                }
                None => Refusal::expired("The resourceVersion for the provided list is too old."),
            });
        };
        let after = after.map(|(namespace, name)| Key {
            storage: target.kind.storage(),
            namespace,
            name,
        });
        let mut remaining = objects.iter().filter(|(key, object)| {
            after.as_ref().is_none_or(|after| *key > after) && query.selector.matches(object)
        });
        let limit = query.limit.unwrap_or(usize::MAX);
        let page: Vec<(&Key, &Arc<Value>)> = remaining.by_ref().take(limit).collect();
        let left = remaining.count();
        let mut metadata = json!({ "resourceVersion": version.to_string() });
        if let (true, Some((last, _))) = (left > 0, page.last()) {
            metadata["continue"] = json!([version, last.namespace, last.name]).to_string().into();
            if query.selector.is_empty() {
                metadata["remainingItemCount"] = left.into();
            }
        }
        Ok((
            metadata,
            page.into_iter()
                .map(|(_, object)| shown(&target.kind, object))
                .collect(),
        ))
    }
}

/// Parameters of a list or watch.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListQuery {
    pub(crate) selector: Selector,
    pub(crate) limit: Option<usize>,
    /// Version of the first page (0 for the current one), and the last returned object.
    pub(crate) continued: Option<(u64, (String, String))>,
    pub(crate) version: String,
    pub(crate) exact: bool,
}

impl ListQuery {
    /// Returns the version of the list.
    fn version(&self, current: u64) -> Result<u64, Refusal> {
        match query::version(&self.version)? {
            Some(asked) if asked > current => Err(Refusal::from_the_future(asked, current)),
            Some(asked) if self.exact => Ok(asked),
            _ => Ok(current),
        }
    }
}

impl State {
    pub(crate) fn existing(&self, target: &Target) -> Result<&Arc<Value>, Refusal> {
        self.store
            .get(&target.key())
            .ok_or_else(|| Refusal::not_found(&target.kind, &target.name))
    }
}

/// Converts the stored object to the kind.
pub(crate) fn shown(kind: &Kind, stored: &Value) -> Value {
    let mut object = stored.clone();
    super::events::from_stored(kind, &mut object);
    object
}

/// Returns a list object. Items of built-in kinds have no apiVersion and kind.
pub(crate) fn list_of(kind: &Kind, metadata: Value, mut items: Vec<Value>) -> Value {
    if kind.definition.is_none() {
        for item in items.iter_mut().filter_map(Value::as_object_mut) {
            item.remove("apiVersion");
            item.remove("kind");
        }
    }
    json!({
        "kind": format!("{}List", kind.kind),
        "apiVersion": kind.api_version(),
        "metadata": metadata,
        "items": items,
    })
}
