//! Versioned objects, and the history for watches and later pages of lists.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::Value;

use super::object;

/// Approximate maximum size of the history in bytes.
const SIZE_MAX: usize = 32 << 20;

/// Key of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StorageKey {
    /// [`ResourceKind::storage`](super::kinds::ResourceKind::storage).
    pub(crate) storage: String,
    /// Empty for cluster-scoped objects.
    pub(crate) namespace: String,
    pub(crate) name: String,
}

#[derive(Clone, Debug)]
pub(crate) struct StoreChange {
    /// Resource version after the change.
    pub(crate) version: u64,
    pub(crate) key: StorageKey,
    /// Previous object; `None` if created.
    pub(crate) before: Option<Arc<Value>>,
    /// New object; `None` if deleted.
    pub(crate) after: Option<Arc<Value>>,
}

impl StoreChange {
    /// Approximates the size in bytes. Both objects are retained, but usually each is shared with another change, so only the larger one
    /// counts.
    fn size(&self) -> usize {
        let sizes = [&self.before, &self.after].map(|object| object.as_deref().map_or(0, size));
        sizes.into_iter().max().unwrap_or_default()
    }
}

#[derive(Debug)]
pub(crate) struct ObjectStore {
    version: u64,
    objects: BTreeMap<StorageKey, Arc<Value>>,
    history: VecDeque<StoreChange>,
    /// Approximate size of the history in bytes.
    size: usize,
    window: usize,
    /// Last version that is no longer in the history.
    forgotten: u64,
    /// Whether this is a dry run: stored objects keep their resource version.
    dry_run: bool,
}

impl ObjectStore {
    /// Creates an empty store that keeps `window` changes.
    pub(crate) fn new(window: usize) -> Self {
        Self {
            // As in etcd, versions start at 1; requests give 0 a special meaning.
            version: 1,
            objects: BTreeMap::new(),
            history: VecDeque::new(),
            size: 0,
            window,
            forgotten: 1,
            dry_run: false,
        }
    }

    /// Copies the objects without their history, for a dry run.
    pub(crate) fn for_dry_run(&self) -> Self {
        Self {
            version: self.version,
            objects: self.objects.clone(),
            forgotten: self.version,
            dry_run: true,
            ..Self::new(self.window)
        }
    }

    /// Returns the version of the last change.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the last version that is no longer in the history.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Drops the history, as an etcd compaction does.
    pub(crate) fn compact(&mut self) {
        self.history.clear();
        self.size = 0;
        self.forgotten = self.version;
    }

    pub(crate) fn get(&self, key: &StorageKey) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// Stores an object with its new resource version.
    pub(crate) fn put(&mut self, key: StorageKey, mut object: Value) -> Arc<Value> {
        self.version += 1;
        let version = if self.dry_run {
            let before = self.objects.get(&key);
            before.and_then(|before| before.pointer("/metadata/resourceVersion").cloned())
        } else {
            Some(self.version.to_string().into())
        };
        object::set_metadata(&mut object, "resourceVersion", version);
        let object = Arc::new(object);
        let before = self.objects.insert(key.clone(), object.clone());
        self.record(key, before, Some(object.clone()));
        object
    }

    pub(crate) fn remove(&mut self, key: &StorageKey) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        self.version += 1;
        self.record(key.clone(), Some(before.clone()), None);
        Some(before)
    }

    fn record(&mut self, key: StorageKey, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        let change = StoreChange {
            version: self.version,
            key,
            before,
            after,
        };
        self.size += change.size();
        self.history.push_back(change);
        while (self.history.len() > self.window || (self.size > SIZE_MAX && self.history.len() > 1))
            && let Some(change) = self.history.pop_front()
        {
            self.size -= change.size();
            self.forgotten = change.version;
        }
    }

    /// Returns the changes after a version, in order. `None` if the version has expired.
    pub(crate) fn changes_after(&self, version: u64) -> Option<impl Iterator<Item = &StoreChange>> {
        let known = version >= self.forgotten;
        let first = self.history.partition_point(|change| change.version <= version);
        known.then(|| self.history.range(first..))
    }

    /// Returns the objects of a storage at a version, sorted by name. `None` if the version has expired.
    pub(crate) fn at(
        &self,
        version: u64,
        storage: &str,
        namespace: &str,
    ) -> Option<BTreeMap<StorageKey, Arc<Value>>> {
        let belongs =
            |key: &StorageKey| key.storage == storage && (namespace.is_empty() || key.namespace == namespace);
        let mut objects: BTreeMap<StorageKey, Arc<Value>> = self
            .objects
            .range(
                StorageKey {
                    storage: storage.to_owned(),
                    namespace: namespace.to_owned(),
                    name: String::new(),
                }..,
            )
            .take_while(|(key, _)| belongs(key))
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect();
        if version < self.version {
            let later: Vec<&StoreChange> = self
                .changes_after(version)?
                .filter(|change| belongs(&change.key))
                .collect();
            for change in later.into_iter().rev() {
                match &change.before {
                    Some(before) => objects.insert(change.key.clone(), before.clone()),
                    None => objects.remove(&change.key),
                };
            }
        }
        Some(objects)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&StorageKey, &Arc<Value>)> {
        self.objects.iter()
    }
}

/// Approximates the size of a value by the bytes of its strings and keys.
fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(size).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + size(value)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(name: &str) -> StorageKey {
        StorageKey {
            storage: "things".into(),
            namespace: "n".into(),
            name: name.into(),
        }
    }

    fn names(store: &ObjectStore, version: u64) -> Option<Vec<String>> {
        let objects = store.at(version, "things", "n")?;
        Some(objects.into_keys().map(|key| key.name).collect())
    }

    #[test]
    fn a_list_of_an_earlier_version_is_available() {
        let mut store = ObjectStore::new(10);
        let object = || json!({ "metadata": {} });
        store.put(key("a"), object());
        store.put(key("b"), object());
        let then = store.version();
        store.remove(&key("a"));
        store.put(key("c"), object());
        assert_eq!(names(&store, then).unwrap(), ["a", "b"]);
        assert_eq!(names(&store, store.version()).unwrap(), ["b", "c"]);
    }

    #[test]
    fn a_dry_run_has_no_version_and_changes_nothing() {
        let mut store = ObjectStore::new(10);
        let object = || json!({ "metadata": {} });
        let stored = store.put(key("a"), object());
        let then = store.version();
        let mut tried = store.for_dry_run();
        assert_eq!(tried.put(key("b"), object())["metadata"], json!({}));
        let again = tried.put(key("a"), json!({ "metadata": {}, "data": 1 }));
        assert_eq!(again["metadata"], stored["metadata"]);
        tried.remove(&key("a"));
        assert_eq!(store.version(), then);
        assert_eq!(names(&store, then).unwrap(), ["a"]);
        assert_eq!(store.get(&key("a")).unwrap(), &stored);
    }

    #[test]
    fn large_objects_make_the_history_short() {
        let mut store = ObjectStore::new(1000);
        let large = || json!({ "metadata": {}, "data": "x".repeat(SIZE_MAX / 8) });
        for _ in 0..100 {
            store.put(key("a"), large());
        }
        let known = store.changes_after(store.forgotten()).unwrap().count();
        assert!((2..=8).contains(&known), "{known}");
        assert!(store.changes_after(store.forgotten() - 1).is_none());
    }

    #[test]
    fn deleted_objects_count_for_the_size_of_the_history() {
        let mut store = ObjectStore::new(1000);
        for number in 0..100 {
            let large = json!({ "metadata": {}, "data": "x".repeat(SIZE_MAX / 8) });
            store.put(key(&number.to_string()), large);
        }
        store.compact();
        for number in 0..100 {
            store.remove(&key(&number.to_string()));
        }
        let held = store.changes_after(store.forgotten()).unwrap().count();
        assert!((2..=8).contains(&held), "{held}");
        for _ in 0..100 {
            store.put(
                key("a"),
                json!({ "metadata": {}, "data": "x".repeat(SIZE_MAX / 8) }),
            );
            store.put(key("a"), json!({ "metadata": {} }));
        }
        let held = store.changes_after(store.forgotten()).unwrap().count();
        assert!((2..=8).contains(&held), "{held}");
    }

    #[test]
    fn a_forgotten_version_has_no_changes_and_no_list() {
        let mut store = ObjectStore::new(2);
        let then = store.version();
        for name in ["a", "b", "c"] {
            store.put(key(name), json!({ "metadata": {} }));
        }
        assert!(store.changes_after(then).is_none());
        assert!(names(&store, then).is_none());
        assert_eq!(store.changes_after(store.forgotten()).unwrap().count(), 2);
    }
}
