//! One lock per key. The controller and the built-in driver use it to let namespaces take turns.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// A lock for each key that is in use. Those who wait for a lock get it in the order of their requests.
#[derive(Debug, Default)]
pub(crate) struct KeyedLocks<K>(Mutex<BTreeMap<K, Weak<AsyncMutex<()>>>>);

impl<K: Ord> KeyedLocks<K> {
    /// Waits for the lock of a key.
    pub(crate) async fn lock(&self, key: K) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| lock.strong_count() > 0);
            let lock = locks.get(&key).and_then(Weak::upgrade).unwrap_or_default();
            locks.insert(key, Arc::downgrade(&lock));
            lock
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn each_key_has_a_lock_and_unused_locks_are_removed() {
        let locks = KeyedLocks::<&str>::default();
        let known = || locks.0.lock().unwrap().keys().copied().collect::<Vec<_>>();
        let first = locks.lock("a").await;
        let other = locks.lock("b").await;
        assert!(locks.lock("a").now_or_never().is_none(), "it is held");
        assert_eq!(known(), ["a", "b"]);
        drop(first);
        let last = locks.lock("c").await;
        assert_eq!(known(), ["b", "c"]);
        drop((other, last));
        let _again = locks.lock("a").await;
        assert_eq!(known(), ["a"]);
    }
}
