//! Objects with versions, and the history from which watches and later pages of lists are served.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use serde_json::Value;

use super::object;

/// What the changes that are remembered may take together, about, in bytes.
const SIZE_MAX: usize = 32 << 20;

/// Where an object is: the storage of its kind, its namespace and its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// [`Kind::storage`](super::kinds::Kind::storage).
    pub(crate) storage: String,
    /// Empty for cluster-scoped objects.
    pub(crate) namespace: String,
    /// The name.
    pub(crate) name: String,
}

/// One change of one object.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    /// The version that the change made.
    pub(crate) version: u64,
    /// Which object.
    pub(crate) key: Key,
    /// The object before; none if it was created.
    pub(crate) before: Option<Arc<Value>>,
    /// The object after; none if it was deleted.
    pub(crate) after: Option<Arc<Value>>,
}

/// All objects of the server.
#[derive(Debug)]
pub(crate) struct Store {
    version: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    history: VecDeque<Change>,
    /// How large each of them is, about.
    sizes: VecDeque<usize>,
    size: usize,
    window: usize,
    /// The last version that is no longer in the history.
    forgotten: u64,
    /// Whether it only pretends: what is put into it gets no version of its own.
    pretends: bool,
}

impl Store {
    /// An empty store that remembers so many changes.
    pub(crate) fn new(window: usize) -> Self {
        Self {
            // As in etcd, the first version is not zero, which means something else in requests.
            version: 1,
            objects: BTreeMap::new(),
            history: VecDeque::new(),
            sizes: VecDeque::new(),
            size: 0,
            window,
            forgotten: 1,
            pretends: false,
        }
    }

    /// The same objects without their history, for a change that is only tried and then thrown away.
    pub(crate) fn pretence(&self) -> Self {
        Self {
            version: self.version,
            objects: self.objects.clone(),
            forgotten: self.version,
            pretends: true,
            ..Self::new(self.window)
        }
    }

    /// The version of the last change.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The last version from which on changes are no longer known.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Forgets the history, as etcd does when it is compacted.
    pub(crate) fn compact(&mut self) {
        self.history.clear();
        self.sizes.clear();
        self.size = 0;
        self.forgotten = self.version;
    }

    /// An object.
    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// Stores an object, with its new version in it.
    pub(crate) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        self.version += 1;
        let version = if self.pretends {
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

    /// Removes an object.
    pub(crate) fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        self.version += 1;
        self.record(key.clone(), Some(before.clone()), None);
        Some(before)
    }

    fn record(&mut self, key: Key, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        // Both are held, though mostly each of them is also that of another change: the larger of them stands for both.
        let size = before
            .as_deref()
            .map_or(0, size)
            .max(after.as_deref().map_or(0, size));
        self.sizes.push_back(size);
        self.size += size;
        self.history.push_back(Change {
            version: self.version,
            key,
            before,
            after,
        });
        while self.history.len() > self.window || (self.size > SIZE_MAX && self.history.len() > 1) {
            self.size -= self.sizes.pop_front().unwrap_or_default();
            self.forgotten = self
                .history
                .pop_front()
                .map_or(self.version, |change| change.version);
        }
    }

    /// The changes after a version, in their order. `None` if some of them are forgotten.
    pub(crate) fn changes_after(&self, version: u64) -> Option<impl Iterator<Item = &Change>> {
        let known = version >= self.forgotten;
        let first = self.history.partition_point(|change| change.version <= version);
        known.then(|| self.history.range(first..))
    }

    /// The objects of a storage, in the order of their names, as they were at a version. `None` if that is forgotten.
    pub(crate) fn at(
        &self,
        version: u64,
        storage: &str,
        namespace: &str,
    ) -> Option<BTreeMap<Key, Arc<Value>>> {
        let belongs =
            |key: &Key| key.storage == storage && (namespace.is_empty() || key.namespace == namespace);
        let mut objects: BTreeMap<Key, Arc<Value>> = self
            .objects
            .range(
                Key {
                    storage: storage.to_owned(),
                    namespace: namespace.to_owned(),
                    name: String::new(),
                }..,
            )
            .take_while(|(key, _)| belongs(key))
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect();
        if version < self.version {
            let later: Vec<&Change> = self
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

    /// The next objects of a storage in the order of their names, as they were at a version. `None` if that is forgotten.
    pub(crate) fn page(
        &self,
        version: u64,
        storage: &str,
        namespace: &str,
        after: Option<&Key>,
        count: usize,
    ) -> Option<Vec<(Key, Arc<Value>)>> {
        let changed = self
            .changes_after(version)?
            .any(|change| change.key.storage == storage);
        let next = |(key, object): (&Key, &Arc<Value>)| (key.clone(), object.clone());
        if changed {
            let then = self.at(version, storage, namespace)?;
            let later = then
                .iter()
                .filter(|(key, _)| after.is_none_or(|after| *key > after));
            return Some(later.take(count).map(next).collect());
        }
        let first = Key {
            storage: storage.to_owned(),
            namespace: namespace.to_owned(),
            name: String::new(),
        };
        let from = after.map_or(Bound::Included(&first), Bound::Excluded);
        let later = self.objects.range((from, Bound::Unbounded));
        let belongs =
            |key: &Key| key.storage == storage && (namespace.is_empty() || key.namespace == namespace);
        Some(
            later
                .take_while(|(key, _)| belongs(key))
                .take(count)
                .map(next)
                .collect(),
        )
    }

    /// Every object.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.objects.iter()
    }
}

/// How many bytes of texts and names a value has.
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

    fn key(name: &str) -> Key {
        Key {
            storage: "things".into(),
            namespace: "n".into(),
            name: name.into(),
        }
    }

    fn names(store: &Store, version: u64) -> Option<Vec<String>> {
        let objects = store.at(version, "things", "n")?;
        Some(objects.into_keys().map(|key| key.name).collect())
    }

    #[test]
    fn a_list_can_be_had_as_it_was() {
        let mut store = Store::new(10);
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
    fn what_is_only_tried_has_no_version_and_leaves_no_trace() {
        let mut store = Store::new(10);
        let object = || json!({ "metadata": {} });
        let stored = store.put(key("a"), object());
        let then = store.version();
        let mut tried = store.pretence();
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
        let mut store = Store::new(1000);
        let large = || json!({ "metadata": {}, "data": "x".repeat(SIZE_MAX / 8) });
        for _ in 0..100 {
            store.put(key("a"), large());
        }
        let known = store.changes_after(store.forgotten()).unwrap().count();
        assert!((2..=8).contains(&known), "{known}");
        assert!(store.changes_after(store.forgotten() - 1).is_none());
    }

    #[test]
    fn what_a_deletion_holds_counts_too() {
        let mut store = Store::new(1000);
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
    fn pages_of_a_version_are_the_same_whatever_happens_meanwhile() {
        let mut store = Store::new(100);
        for name in ["a", "b", "c", "d"] {
            store.put(key(name), json!({ "metadata": {} }));
        }
        let then = store.version();
        let page = |store: &Store, after: Option<&Key>| -> Option<Vec<String>> {
            let page = store.page(then, "things", "n", after, 2)?;
            Some(page.into_iter().map(|(key, _)| key.name).collect())
        };
        assert_eq!(page(&store, None).unwrap(), ["a", "b"]);
        assert_eq!(page(&store, Some(&key("b"))).unwrap(), ["c", "d"]);
        store.remove(&key("c"));
        store.put(key("bb"), json!({ "metadata": {} }));
        assert_eq!(page(&store, Some(&key("b"))).unwrap(), ["c", "d"]);
        assert!(page(&store, Some(&key("d"))).unwrap().is_empty());
        store.compact();
        assert!(page(&store, None).is_none());
    }

    #[test]
    fn what_is_forgotten_is_not_guessed() {
        let mut store = Store::new(2);
        let then = store.version();
        for name in ["a", "b", "c"] {
            store.put(key(name), json!({ "metadata": {} }));
        }
        assert!(store.changes_after(then).is_none());
        assert!(names(&store, then).is_none());
        assert_eq!(store.changes_after(store.forgotten()).unwrap().count(), 2);
    }
}
