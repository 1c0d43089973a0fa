//! Executes decoded requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::apply::Manager;
use super::kinds::{ClusterMode, ResourceKind, ResourcePath, built_in};
use super::query::ListQuery;
use super::status_error::StatusError;
use super::store::{ObjectStore, StorageKey, StoreChange};
use crate::testcluster::clock_and_rng::ClockAndRng;

/// Number of changes kept for watches and for later pages of lists.
const WINDOW: usize = 20_000;

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
    pub(crate) dry_run: bool,
    /// Unknown fields that were dropped.
    pub(crate) unknown: Unknown,
}

impl WriteOptions {
    /// Returns the manager of the fields that are written to an endpoint.
    pub(super) fn field_manager<'a>(&'a self, subresource: &'a str, now: &'a str) -> Manager<'a> {
        Manager {
            name: &self.manager,
            subresource,
            now,
        }
    }
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
pub(crate) type ApiResponse = (u16, Value);

/// A change of an object, as watches see it.
#[derive(Clone, Debug)]
pub struct ObjectChange {
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
    state: Arc<Mutex<ServerState>>,
    mode: ClusterMode,
    pub(crate) source: Arc<ClockAndRng>,
    pub(crate) changed: watch::Sender<u64>,
}

#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) store: ObjectStore,
    pub(crate) kinds: Vec<Arc<ResourceKind>>,
}

impl ApiServer {
    /// Creates a server in classic mode, with only the initial namespaces of every cluster.
    pub fn new(source: Arc<ClockAndRng>) -> Self {
        Self::with_mode(source, ClusterMode::Classic)
    }

    /// Like [`ApiServer::new`], in the given mode.
    pub fn with_mode(source: Arc<ClockAndRng>, mode: ClusterMode) -> Self {
        let server = Self {
            state: Arc::new(Mutex::new(ServerState {
                store: ObjectStore::new(WINDOW),
                kinds: built_in(mode),
            })),
            mode,
            source,
            changed: watch::Sender::new(0),
        };
        if let Some(kind) = server.kind("", "v1", "namespaces") {
            for name in ["default", "kube-system", "kube-public", "kube-node-lease"] {
                let target = ResourcePath::new(kind.clone(), "", "", "");
                let namespace = json!({ "metadata": { "name": name } });
                // Cannot fail: the names are valid and new.
                let _ = server.create(&target, namespace, &WriteOptions::default());
            }
        }
        server
    }

    /// Returns the mode of the cluster.
    pub fn mode(&self) -> ClusterMode {
        self.mode
    }

    /// Drops the history of changes, as an etcd compaction does: older watches fail as expired.
    pub fn compact(&self) {
        self.state().store.compact();
        self.changed.send_modify(|count| *count += 1);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes one or more changes atomically and notifies watches.
    pub(crate) fn change<T>(
        &self,
        make: impl FnOnce(&mut ServerState) -> Result<T, StatusError>,
    ) -> Result<T, StatusError> {
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
        dry_run: bool,
        make: impl FnOnce(&mut ServerState) -> Result<T, StatusError>,
    ) -> Result<T, StatusError> {
        if !dry_run {
            return self.change(make);
        }
        let mut tried = {
            let state = self.state();
            ServerState {
                store: state.store.for_dry_run(),
                kinds: state.kinds.clone(),
            }
        };
        make(&mut tried)
    }

    /// Returns all objects of the kind with this plural.
    pub fn objects(&self, plural: &str) -> Vec<Value> {
        let all = self.snapshot().into_iter();
        all.filter(|(kind, _)| kind == plural)
            .map(|(_, object)| (*object).clone())
            .collect()
    }

    /// Returns the changes after a version, in order; the first version is 1. Empty if that version has expired.
    pub fn history(&self, version: u64) -> Vec<ObjectChange> {
        let plurals = self.state().plurals();
        let seen = |change: StoreChange| ObjectChange {
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
        self.time_in(0)
    }

    /// Returns the time in this many seconds, as objects contain it: in whole seconds.
    pub(super) fn time_in(&self, seconds: i64) -> String {
        let time = self
            .time()
            .saturating_add(jiff::SignedDuration::from_secs(seconds));
        time.unwrap_or(jiff::Timestamp::MAX)
            .strftime("%Y-%m-%dT%H:%M:%SZ")
            .to_string()
    }

    fn find_kind(&self, is_it: impl Fn(&ResourceKind) -> bool) -> Option<Arc<ResourceKind>> {
        self.state().kinds.iter().find(|kind| is_it(kind)).cloned()
    }

    pub(crate) fn kind(&self, group: &str, version: &str, plural: &str) -> Option<Arc<ResourceKind>> {
        self.find_kind(|kind| kind.group == group && kind.version == version && kind.plural == plural)
    }

    /// Returns the kind with this plural; the core group takes precedence.
    pub(crate) fn kind_of(&self, plural: &str) -> Option<Arc<ResourceKind>> {
        self.find_kind(|kind| kind.plural == plural)
    }

    /// Returns the kind with this apiVersion and kind.
    pub(crate) fn kind_named(&self, api_version: &str, name: &str) -> Option<Arc<ResourceKind>> {
        self.find_kind(|kind| kind.kind == name && kind.api_version() == api_version)
    }

    /// Returns a consistent snapshot of all objects, each with the plural of its kind.
    pub(crate) fn snapshot(&self) -> Vec<(String, Arc<Value>)> {
        let state = self.state();
        let plurals = state.plurals();
        state
            .store
            .all()
            .filter_map(|(key, object)| Some((plurals.get(&key.storage)?.clone(), object.clone())))
            .collect()
    }

    /// Returns the changes after a version and the current version. No changes if the version has expired.
    pub(crate) fn changes_after(&self, version: u64) -> (Vec<StoreChange>, u64) {
        let state = self.state();
        let changes = state
            .store
            .changes_after(version)
            .map(|changes| changes.cloned().collect());
        (changes.unwrap_or_default(), state.store.version())
    }

    // === reading ===

    pub(crate) fn get(&self, target: &ResourcePath) -> Result<ApiResponse, StatusError> {
        let state = self.state();
        let object = state.existing(target)?;
        Ok((200, converted(&target.kind, object)))
    }

    /// Returns the objects of a list, converted to the kind, and the list metadata.
    pub(crate) fn list(
        &self,
        target: &ResourcePath,
        query: &ListQuery,
    ) -> Result<(Value, Vec<Arc<Value>>), StatusError> {
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
                    StatusError::expired_continue(json!([0, namespace, name]).to_string())
                }
                None => StatusError::expired("The resourceVersion for the provided list is too old."),
            });
        };
        let after = after.map(|(namespace, name)| StorageKey {
            storage: target.kind.storage(),
            namespace,
            name,
        });
        let mut remaining = objects.iter().filter(|(key, object)| {
            after.as_ref().is_none_or(|after| *key > after) && query.selector.matches(object)
        });
        let limit = query.limit.unwrap_or(usize::MAX);
        let page: Vec<(&StorageKey, &Arc<Value>)> = remaining.by_ref().take(limit).collect();
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
                .map(|(_, object)| shared(&target.kind, object))
                .collect(),
        ))
    }
}

impl ServerState {
    /// The plurals of all kinds, by storage.
    fn plurals(&self) -> BTreeMap<String, String> {
        let plural = |kind: &Arc<ResourceKind>| (kind.storage(), kind.plural.clone());
        // Of several kinds with a storage, the first one counts.
        self.kinds.iter().rev().map(plural).collect()
    }

    pub(crate) fn existing(&self, target: &ResourcePath) -> Result<&Arc<Value>, StatusError> {
        self.store
            .get(&target.key())
            .ok_or_else(|| StatusError::not_found(&target.kind, &target.name))
    }
}

/// Converts the stored object to the kind.
pub(crate) fn converted(kind: &ResourceKind, stored: &Value) -> Value {
    let mut object = stored.clone();
    super::events::from_stored(kind, &mut object);
    object
}

/// As [`converted`], without a copy if the kind is that of the stored object.
fn shared(kind: &ResourceKind, stored: &Arc<Value>) -> Arc<Value> {
    if kind.is("events.k8s.io", "events") {
        Arc::new(converted(kind, stored))
    } else {
        stored.clone()
    }
}

/// Returns a list object. Items of built-in kinds have no apiVersion and kind.
pub(crate) fn list_of(kind: &ResourceKind, metadata: Value, items: Vec<Arc<Value>>) -> Value {
    let mut items: Vec<Value> = items.into_iter().map(Arc::unwrap_or_clone).collect();
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
