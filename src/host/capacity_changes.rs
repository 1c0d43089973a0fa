//! The stream behind [`Driver::capacity_changes`](crate::driver::Driver::capacity_changes).
//!
//! Changes are counted, not queued: a slow reader gets the sum, so nothing is lost and memory stays bounded.

use std::collections::VecDeque;

use futures::Stream;
use tokio::sync::watch;

use crate::driver::{CapacityCause, CapacityChange};

/// Numbers of changes since the start; wrap around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Totals {
    freed: usize,
    inventory: usize,
    parameters: usize,
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

    /// Returns all changes reported from now on; the stream ends when the reporter is dropped.
    pub(crate) fn subscribe(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        let receiver = self.0.subscribe();
        let seen = *receiver.borrow();
        futures::stream::unfold(
            (receiver, seen, VecDeque::new()),
            |(mut receiver, mut seen, mut due)| async move {
                loop {
                    if let Some(change) = due.pop_front() {
                        return Some((change, (receiver, seen, due)));
                    }
                    receiver.changed().await.ok()?;
                    let now = *receiver.borrow_and_update();
                    due.extend(between(seen, now));
                    seen = now;
                }
            },
        )
    }
}

fn between(before: Totals, now: Totals) -> impl Iterator<Item = CapacityChange> {
    let devices = |before: usize, now: usize| Some(now.wrapping_sub(before)).filter(|number| *number > 0);
    let freed = devices(before.freed, now.freed).map(|number| (CapacityCause::Freed, Some(number)));
    let inventory =
        devices(before.inventory, now.inventory).map(|number| (CapacityCause::Inventory, Some(number)));
    let parameters = (before.parameters != now.parameters).then_some((CapacityCause::Parameters, None));
    [freed, inventory, parameters]
        .into_iter()
        .flatten()
        .map(|(cause, pods)| CapacityChange { cause, pods })
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
        let change = |cause, pods| Some(Some(CapacityChange { cause, pods }));
        assert_eq!(
            stream.next().now_or_never(),
            change(CapacityCause::Freed, Some(3))
        );
        assert_eq!(
            stream.next().now_or_never(),
            change(CapacityCause::Parameters, None)
        );
        assert_eq!(stream.next().now_or_never(), None);
        changes.report(CapacityCause::Inventory, 4);
        assert_eq!(
            stream.next().now_or_never(),
            change(CapacityCause::Inventory, Some(4))
        );
        drop(changes);
        assert_eq!(stream.next().now_or_never(), Some(None));
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
