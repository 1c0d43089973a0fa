//! Waking pods that wait: offers, a few at a time.
//!
//! When something becomes free, as many waiting contexts are judged again as can be helped. An offer ends when its pod has been
//! allocated, when it turns out not to be helped, or when it has taken too long; then the next one gets it. So a pod that cannot
//! run for other reasons blocks nobody, and nobody is forgotten.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::driver::CapacityChange;

use super::event::{Moment, ObjectKey};
use super::world::{Work, World};

/// How long a woken pod may take before the next one is woken as well. The scheduler's own backoff is 1 to 10 s.
const OFFER: Duration = Duration::from_secs(5);

/// The contexts that are to be judged again.
#[derive(Clone, Debug, Default)]
pub(super) struct Wake {
    queue: VecDeque<ObjectKey>,
    offered: BTreeSet<ObjectKey>,
    width: usize,
    /// When each namespace with waiting pods had its last turn, counted in offers.
    turns: BTreeMap<String, u64>,
    offers: u64,
    /// When something became free last.
    freed: Moment,
}

/// What decides whose turn it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The pod's priority: the higher, the earlier.
    pub(super) priority: i32,
    /// Since when it waits.
    pub(super) since: Moment,
    /// When it is judged again although nothing is known to have changed.
    pub(super) recheck: Moment,
}

impl Wake {
    /// Forgets a context, wherever it stands.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.offered.remove(key);
        self.queue.retain(|queued| queued != key);
    }

    /// Puts a context that came too late for the last change behind those that were in time.
    pub(super) fn join(&mut self, key: ObjectKey) {
        self.width = self.width.max(1);
        self.queue.push_back(key);
    }

    /// Ends an offer.
    pub(super) fn end(&mut self, key: &ObjectKey) -> bool {
        self.offered.remove(key)
    }

    fn next(&mut self) -> Option<ObjectKey> {
        if self.offered.len() >= self.width {
            return None;
        }
        let key = self.queue.pop_front()?;
        self.offered.insert(key.clone());
        self.offers += 1;
        self.turns.insert(key.namespace.clone(), self.offers);
        Some(key)
    }
}

/// Puts waiting contexts in order: priority first, then the namespaces in turn, beginning with the one whose last turn is longest
/// ago, then the longest wait.
fn in_turn(
    waiting: impl Iterator<Item = (ObjectKey, Waiting)>,
    last_turns: &BTreeMap<String, u64>,
) -> VecDeque<ObjectKey> {
    let mut sorted: Vec<(ObjectKey, Waiting)> = waiting.collect();
    sorted.sort_by(|(left_key, left), (right_key, right)| {
        right
            .priority
            .cmp(&left.priority)
            .then(left.since.cmp(&right.since))
            .then(left_key.cmp(right_key))
    });
    // The n-th of a namespace, within one priority, comes after the n-1st of every other.
    let mut turns: BTreeMap<(i32, String), usize> = BTreeMap::new();
    let mut ranked: Vec<(i32, usize, u64, Moment, ObjectKey)> = sorted
        .into_iter()
        .map(|(key, waiting)| {
            let turn = turns
                .entry((waiting.priority, key.namespace.clone()))
                .or_default();
            *turn += 1;
            let last_turn = last_turns.get(&key.namespace).copied().unwrap_or_default();
            (waiting.priority, *turn, last_turn, waiting.since, key)
        })
        .collect();
    ranked.sort_by(|left, right| {
        right
            .0
            .cmp(&left.0)
            .then(left.1.cmp(&right.1))
            .then(left.2.cmp(&right.2))
            .then(left.3.cmp(&right.3))
            .then(left.4.cmp(&right.4))
    });
    ranked.into_iter().map(|(.., key)| key).collect()
}

impl World {
    pub(super) fn capacity_changed(&mut self, change: &CapacityChange, now: Moment) {
        self.epoch += 1;
        let waiting = self
            .contexts
            .iter()
            .filter_map(|(key, context)| context.waiting.clone().map(|waiting| (key.clone(), waiting)));
        let queue = in_turn(waiting, &self.wake.turns);
        let namespaces: BTreeSet<&str> = queue.iter().map(|key| key.namespace.as_str()).collect();
        self.wake
            .turns
            .retain(|namespace, _| namespaces.contains(namespace.as_str()));
        // A change while offers are out adds to them: what they were made for may be gone by now.
        let width = change.pods.unwrap_or(queue.len()).max(1);
        self.wake.width = if self.wake.offered.is_empty() {
            width
        } else {
            self.wake.width.saturating_add(width)
        };
        self.wake.offered.clear();
        self.wake.queue = queue;
        self.wake.freed = now;
        let immediate: Vec<ObjectKey> = self.unallocated_immediate.iter().cloned().collect();
        for key in immediate {
            if let Some(claim) = self.claims.get_mut(&key) {
                claim.retry.succeeded();
            }
            self.dirty.insert(Work::Claim(key));
        }
        self.make_offers(now);
    }

    /// Makes the offers that can be made. The answer is whether there were any.
    pub(super) fn make_offers(&mut self, now: Moment) -> bool {
        let mut any = false;
        while let Some(key) = self.wake.next() {
            let epoch = self.epoch;
            if let Some(context) = self.contexts.get_mut(&key) {
                context.offered(epoch);
                let waits_since = context.waiting.as_ref().map(|waiting| waiting.since);
                context.woken = Some(waits_since.map_or(self.wake.freed, |since| since.max(self.wake.freed)));
                self.dirty.insert(Work::Context(key.clone()));
                self.wake_at(now.after(OFFER), Work::Offer(key));
                any = true;
            } else {
                self.wake.remove(&key);
            }
        }
        any
    }

    /// The time of an offer is over.
    pub(super) fn end_offer(&mut self, key: &ObjectKey) {
        self.wake.end(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(namespace: &str, name: &str, priority: i32, seconds: u64) -> (ObjectKey, Waiting) {
        let since = Moment::new(Duration::from_secs(seconds));
        let waiting = Waiting {
            priority,
            since,
            recheck: since,
        };
        (ObjectKey::new(namespace, name), waiting)
    }

    fn names(queue: VecDeque<ObjectKey>) -> Vec<String> {
        queue.into_iter().map(|key| key.to_string()).collect()
    }

    #[test]
    fn a_namespace_with_many_waiting_pods_does_not_starve_another() {
        let crowd = (0..100).map(|n| waiting("crowd", &format!("pod-{n:03}"), 0, n));
        let all: Vec<_> = crowd.chain([waiting("small", "pod", 0, 500)]).collect();
        let queue = names(in_turn(all.clone().into_iter(), &BTreeMap::new()));
        assert_eq!(queue[..2], ["crowd/pod-000", "small/pod"]);
        let after = BTreeMap::from([("crowd".to_owned(), 1)]);
        let queue = names(in_turn(all.into_iter(), &after));
        assert_eq!(queue[..2], ["small/pod", "crowd/pod-000"]);
    }

    #[test]
    fn priority_comes_before_age_and_age_before_the_name() {
        let queue = names(in_turn(
            [
                waiting("a", "old", 0, 1),
                waiting("a", "young", 0, 9),
                waiting("a", "urgent", 5, 10),
            ]
            .into_iter(),
            &BTreeMap::new(),
        ));
        assert_eq!(queue, ["a/urgent", "a/old", "a/young"]);
    }
}
