//! The stream behind [`Driver::capacity_changes`](crate::driver::Driver::capacity_changes).
//!
//! Changes are counted, not queued: a slow reader gets the sum, so nothing is lost and memory stays bounded.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::Stream;
use tokio::sync::Notify;

use crate::driver::{CapacityCause, CapacityChange};

/// Maximum number of namespaces whose changes are counted. The next change counts for all namespaces.
const NAMESPACES_MAX: usize = 64;

/// Numbers of changes by cause, and by namespace if they concern only one.
type Counts = BTreeMap<(CapacityCause, Option<String>), usize>;

/// The sending side of the changes, for one reader.
#[derive(Debug, Default)]
pub(crate) struct CapacityChanges(Arc<PendingChanges>);

/// The changes that the reader has yet to take.
#[derive(Debug, Default)]
struct PendingChanges {
    counts: Mutex<Counts>,
    changed: Notify,
}

impl PendingChanges {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CapacityChanges {
    /// Reports that `number` devices, or parameter objects, may help waiting pods.
    pub(crate) fn report(&self, cause: CapacityCause, number: usize) {
        if number > 0 {
            self.add(cause, None, number);
        }
    }

    /// Reports that changed parameters may help pods of a namespace.
    pub(crate) fn report_in(&self, namespace: String) {
        self.add(CapacityCause::Parameters, Some(namespace), 1);
    }

    fn add(&self, cause: CapacityCause, namespace: Option<String>, number: usize) {
        {
            let mut counts = self.0.counts();
            let namespaces = counts.keys().filter(|(_, namespace)| namespace.is_some());
            let has_room =
                namespaces.count() < NAMESPACES_MAX && !counts.contains_key(&(cause, None::<String>));
            let namespace = namespace.filter(|_| has_room);
            if namespace.is_none() {
                // A change for all namespaces includes those for one.
                counts.retain(|(other, namespace), _| *other != cause || namespace.is_none());
            }
            let count = counts.entry((cause, namespace)).or_default();
            *count = count.saturating_add(number);
        }
        self.0.changed.notify_one();
    }

    /// Returns all changes reported from now on. Each is for one reader.
    pub(crate) fn subscribe(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        let pending = Arc::clone(&self.0);
        pending.counts().clear();
        futures::stream::unfold((pending, Counts::new()), |(pending, mut taken)| async move {
            loop {
                if let Some(((cause, namespace), number)) = taken.pop_first() {
                    // How many pods a change of parameters can help is unknown.
                    let pods = (cause != CapacityCause::Parameters).then_some(number);
                    let change = CapacityChange {
                        cause,
                        pods,
                        namespace,
                    };
                    return Some((change, (pending, taken)));
                }
                pending.changed.notified().await;
                taken = std::mem::take(&mut *pending.counts());
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::{FutureExt, StreamExt};

    use super::*;

    #[test]
    fn a_slow_reader_gets_the_sum_of_all_capacity_changes() {
        let changes = CapacityChanges::default();
        changes.report(CapacityCause::Freed, 7);
        let mut stream = pin!(changes.subscribe());
        assert_eq!(
            stream.next().now_or_never(),
            None,
            "earlier changes are not reported"
        );
        changes.report(CapacityCause::Freed, 0);
        assert_eq!(stream.next().now_or_never(), None, "nothing has changed");
        changes.report(CapacityCause::Freed, 1);
        changes.report(CapacityCause::Parameters, 1);
        changes.report(CapacityCause::Freed, 2);
        let change = CapacityChange::new;
        assert_eq!(
            stream.next().now_or_never(),
            Some(Some(change(CapacityCause::Freed).for_pods(3)))
        );
        assert_eq!(
            stream.next().now_or_never(),
            Some(Some(change(CapacityCause::Parameters)))
        );
        assert_eq!(stream.next().now_or_never(), None);
        changes.report(CapacityCause::Inventory, 4);
        assert_eq!(
            stream.next().now_or_never(),
            Some(Some(change(CapacityCause::Inventory).for_pods(4)))
        );
    }

    #[test]
    fn a_change_in_a_namespace_is_reported_for_it_alone() {
        let changes = CapacityChanges::default();
        let mut stream = pin!(changes.subscribe());
        let mut next = || {
            let change = stream.next().now_or_never()??;
            Some((change.cause, change.pods, change.namespace))
        };
        let parameters = |namespace: Option<&str>| {
            let namespace = namespace.map(str::to_owned);
            Some((CapacityCause::Parameters, None, namespace))
        };
        for namespace in ["b", "a", "b"] {
            changes.report_in(namespace.to_owned());
        }
        assert_eq!(next(), parameters(Some("a")));
        assert_eq!(next(), parameters(Some("b")));
        assert_eq!(next(), None);
        changes.report_in("b".to_owned());
        assert_eq!((next(), next()), (parameters(Some("b")), None));
        // A change for all namespaces includes them.
        changes.report_in("b".to_owned());
        changes.report(CapacityCause::Parameters, 1);
        assert_eq!((next(), next()), (parameters(None), None));
        for number in 0..=NAMESPACES_MAX {
            changes.report_in(number.to_string());
        }
        assert_eq!((next(), next()), (parameters(None), None));
    }
}
