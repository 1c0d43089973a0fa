//! What the server does with a request, once it is known what the request is about.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::kinds::{Kind, built_in};
use super::query;
use super::refusal::Refusal;
use super::selector::Selector;
use super::store::{Change, Key, Store};
use crate::testcluster::source::Source;

/// Changes that are remembered for watches and for later pages of lists.
const WINDOW: usize = 20_000;

/// What a request is about.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) kind: Arc<Kind>,
    /// Empty for cluster-scoped kinds, and for lists of all namespaces.
    pub(crate) namespace: String,
    /// Empty for the collection.
    pub(crate) name: String,
    /// `status`, `binding`, `finalize`, or empty.
    pub(crate) subresource: String,
}

impl Target {
    /// The collection that it is in.
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

/// How a write is made.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriteOptions {
    /// Who owns what is written.
    pub(crate) manager: String,
    /// Take fields of other managers over.
    pub(crate) force: bool,
    /// Refuse fields that nobody knows.
    pub(crate) strict: bool,
    /// Whether the object is made from a patch, and not the request's own.
    pub(crate) patches: bool,
    /// Whether that patch is a server-side apply.
    pub(crate) applies: bool,
    /// Whether nothing of it is to be stored (`dryRun=All`).
    pub(crate) pretends: bool,
    /// Fields that nobody knows, and that were dropped.
    pub(crate) unknown: Unknown,
}

/// What is told about an object that is taken all the same.
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

/// An answer: the status code, and the object.
pub(crate) type Answer = (u16, Value);

/// A change of an object, as whoever looks on sees it.
#[derive(Clone, Debug)]
pub struct Changed {
    /// The version that the change made.
    pub version: u64,
    /// The plural of its kind.
    pub plural: String,
    /// The object before; none if it was created.
    pub before: Option<Value>,
    /// The object after; none if it was deleted.
    pub after: Option<Value>,
}

/// The API server. Clones are the same server.
#[derive(Clone, Debug)]
pub struct ApiServer {
    state: Arc<Mutex<State>>,
    pub(crate) source: Arc<Source>,
    pub(crate) changed: watch::Sender<u64>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) store: Store,
    pub(crate) kinds: Vec<Arc<Kind>>,
}

impl ApiServer {
    /// A server with the namespaces that every cluster has and nothing else.
    pub fn new(source: Arc<Source>) -> Self {
        let server = Self {
            state: Arc::new(Mutex::new(State {
                store: Store::new(WINDOW),
                kinds: built_in(),
            })),
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
                // Cannot be refused: the names are right and new.
                let _ = server.create(&target, namespace, &WriteOptions::default());
            }
        }
        server
    }

    /// Forgets the history of changes, as etcd does when it is compacted: watches from before are told so.
    pub fn compact(&self) {
        self.state().store.compact();
        self.changed.send_modify(|count| *count += 1);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a change, or several that nobody sees one by one, and tells of them.
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

    /// Makes a change, or only tries what would come of it.
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

    /// All objects of the kind of this plural.
    pub fn objects(&self, plural: &str) -> Vec<Value> {
        let all = self.snapshot().into_iter();
        all.filter(|(kind, _)| kind == plural)
            .map(|(_, object)| object)
            .collect()
    }

    /// What has changed after a version, in order; the first version is 1. Nothing if that is no longer known.
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

    /// Tells when something has changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The time now.
    pub(crate) fn time(&self) -> jiff::Timestamp {
        self.source.now()
    }

    pub(crate) fn now(&self) -> String {
        // Times of objects are in whole seconds.
        self.source.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }

    pub(crate) fn kind(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        self.state()
            .kinds
            .iter()
            .find(|kind| kind.group == group && kind.version == version && kind.plural == plural)
            .cloned()
    }

    /// The kind of this plural; the core group's, if there are several.
    pub(crate) fn kind_of(&self, plural: &str) -> Option<Arc<Kind>> {
        self.state()
            .kinds
            .iter()
            .find(|kind| kind.plural == plural)
            .cloned()
    }

    /// The kind of an object that says what it is.
    pub(crate) fn kind_named(&self, api_version: &str, kind: &str) -> Option<Arc<Kind>> {
        self.state()
            .kinds
            .iter()
            .find(|each| each.kind == kind && each.api_version() == api_version)
            .cloned()
    }

    /// All objects at one moment, each with the plural of its kind.
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

    /// What has changed after a version, and the version after that. Nothing if it is too long ago.
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

    /// The objects of a list in the form of the kind, with the list's own metadata.
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
                // 0 stands for whatever is there then.
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

/// What a list or watch asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListQuery {
    pub(crate) selector: Selector,
    pub(crate) limit: Option<usize>,
    /// Version of the first page, or 0 for the newest, and the last object that was shown.
    pub(crate) continued: Option<(u64, (String, String))>,
    pub(crate) version: String,
    pub(crate) exact: bool,
}

impl ListQuery {
    /// The version that the list is of.
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

/// The object in the form of a kind.
pub(crate) fn shown(kind: &Kind, stored: &Value) -> Value {
    let mut object = stored.clone();
    super::events::from_stored(kind, &mut object);
    object
}

/// A list object. The elements of a list of Kubernetes' own kinds do not say what they are.
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
