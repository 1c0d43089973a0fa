//! The stream behind [`Driver::capacity_changes`](crate::driver::Driver::capacity_changes).
//!
//! Changes are counted, not queued: a slow reader gets the sum, so nothing is lost and memory stays bounded.

use std::collections::{BTreeMap, VecDeque};

use futures::Stream;
use tokio::sync::watch;

use crate::driver::{CapacityCause, CapacityChange};

/// Maximum number of namespaces whose changes are counted. A further one counts as a change for all namespaces.
const NAMESPACES_MAX: usize = 64;

/// Numbers of changes since the start; wrap around.
#[derive(Clone, Debug, Default)]
struct Totals {
    freed: usize,
    inventory: usize,
    /// Changes of parameters for all namespaces.
    parameters: usize,
    /// Changes of parameters for one namespace.
    namespaces: BTreeMap<String, usize>,
}

/// The sending side of the changes.
#[derive(Debug)]
pub(crate) struct CapacityChanges(watch::Sender<Totals>);

impl CapacityChanges {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(Totals::default()))
    }

    /// Reports that `number` devices, or parameter objects, may help waiting pods.
    pub(crate) fn report(&self, cause: CapacityCause, number: usize) {
        if number == 0 {
            return;
        }
        self.0.send_modify(|totals| {
            let total = match cause {
                CapacityCause::Freed => &mut totals.freed,
                CapacityCause::Inventory => &mut totals.inventory,
                CapacityCause::Parameters => &mut totals.parameters,
            };
            *total = total.wrapping_add(number);
        });
    }

    /// Reports that changed parameters may help pods of a namespace.
    pub(crate) fn report_in(&self, namespace: String) {
        self.0.send_modify(|totals| {
            if totals.namespaces.len() < NAMESPACES_MAX {
                let total = totals.namespaces.entry(namespace).or_default();
                *total = total.wrapping_add(1);
            } else {
                totals.namespaces.clear();
                totals.parameters = totals.parameters.wrapping_add(1);
            }
        });
    }

    /// Returns all changes reported from now on; the stream ends when the reporter is dropped.
    pub(crate) fn subscribe(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        let receiver = self.0.subscribe();
        let seen = receiver.borrow().clone();
        futures::stream::unfold(
            (receiver, seen, VecDeque::new()),
            |(mut receiver, mut seen, mut due)| async move {
                loop {
                    if let Some(change) = due.pop_front() {
                        return Some((change, (receiver, seen, due)));
                    }
                    receiver.changed().await.ok()?;
                    let now = receiver.borrow_and_update().clone();
                    due.extend(between(&seen, &now));
                    seen = now;
                }
            },
        )
    }
}

fn between(before: &Totals, now: &Totals) -> Vec<CapacityChange> {
    let freed = now.freed.wrapping_sub(before.freed);
    let inventory = now.inventory.wrapping_sub(before.inventory);
    let mut changes: Vec<CapacityChange> = [
        (CapacityCause::Freed, freed),
        (CapacityCause::Inventory, inventory),
    ]
    .into_iter()
    .filter(|(_, number)| *number > 0)
    .map(|(cause, number)| CapacityChange::new(cause).for_pods(number))
    .collect();
    let parameters = CapacityChange::new(CapacityCause::Parameters);
    if before.parameters == now.parameters {
        let is_new =
            |(namespace, total): &(&String, &usize)| before.namespaces.get(*namespace) != Some(*total);
        let namespaces = now.namespaces.iter().filter(is_new);
        changes.extend(namespaces.map(|(namespace, _)| parameters.clone().in_namespace(namespace)));
    } else {
        changes.push(parameters);
    }
    changes
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::{FutureExt, StreamExt};

    use super::*;

    #[test]
    fn a_slow_reader_gets_the_sum_of_all_capacity_changes() {
        let changes = CapacityChanges::new();
        changes.report(CapacityCause::Freed, 7);
        let mut stream = pin!(changes.subscribe());
        assert_eq!(
            stream.next().now_or_never(),
            None,
            "what was before is not reported"
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
        drop(changes);
        assert_eq!(stream.next().now_or_never(), Some(None));
    }

    #[test]
    fn a_change_in_a_namespace_is_reported_for_it_alone() {
        let changes = CapacityChanges::new();
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

    #[test]
    fn each_reader_has_a_count_of_its_own() {
        let changes = CapacityChanges::new();
        let (mut first, mut second) = (pin!(changes.subscribe()), pin!(changes.subscribe()));
        changes.report(CapacityCause::Freed, 1);
        assert!(first.next().now_or_never().is_some());
        changes.report(CapacityCause::Freed, 1);
        let pods = |change: Option<Option<CapacityChange>>| change.unwrap().unwrap().pods;
        assert_eq!(pods(first.next().now_or_never()), Some(1));
        assert_eq!(pods(second.next().now_or_never()), Some(2));
    }
}
