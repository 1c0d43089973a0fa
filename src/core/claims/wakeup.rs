//! WakeUpQueue-ups of waiting pods, a few at a time.
//!
//! When capacity is freed, as many waiting contexts are evaluated again as the capacity can serve. A wake-up ends when its pod is
//! allocated, when the pod still fits nowhere, or when it takes too long. In the last two cases the next context is woken. So a pod that
//! cannot run for other reasons blocks no other pod, and every waiting pod gets its turn.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::driver::CapacityChange;

use super::event::{Moment, ObjectKey};
use super::state::{ControllerState, Work};

/// How long a woken pod may take before the next one is woken as well. The scheduler's own backoff is 1 to 10 s.
const OFFER: Duration = Duration::from_secs(5);

/// Queue and state of the wake-ups.
#[derive(Clone, Debug, Default)]
pub(super) struct WakeUpQueue {
    /// The contexts that wait for their turn.
    queue: BTreeMap<u64, ObjectKey>,
    /// The key of each context in `queue`.
    places: BTreeMap<ObjectKey, u64>,
    /// The last key used in `queue`.
    last_place: u64,
    /// The wake-ups in progress.
    open: BTreeMap<ObjectKey, WakeUp>,
    /// How many wake-ups may be in progress at once.
    width: usize,
    /// The last turn of each namespace with waiting pods, as a number of `count`.
    turns: BTreeMap<String, u64>,
    /// The number of wake-ups so far.
    count: u64,
    /// When capacity was last freed.
    freed: Moment,
}

/// A wake-up in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WakeUp {
    /// Its number. Contexts that are awake at the same time act in this order.
    turn: u64,
    /// Its deadline.
    ends: Moment,
}

/// The facts that determine a context's turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The pod's priority. Higher values come first.
    pub(super) priority: i32,
    pub(super) since: Moment,
    /// When the next slow recheck is due.
    pub(super) recheck: Moment,
}

impl WakeUpQueue {
    /// Removes a context from the queue and ends its wake-up.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.open.remove(key);
        if let Some(place) = self.places.remove(key) {
            self.queue.remove(&place);
        }
    }

    /// Queues a context that began to wait too late for the last change, behind the others.
    pub(super) fn join(&mut self, key: ObjectKey) {
        self.width = self.width.max(1);
        if !self.open.contains_key(&key) {
            self.push(key);
        }
    }

    fn push(&mut self, key: ObjectKey) {
        if !self.places.contains_key(&key) {
            self.last_place += 1;
            self.places.insert(key.clone(), self.last_place);
            self.queue.insert(self.last_place, key);
        }
    }

    /// Replaces the queue, and allows `credits` more wake-ups than are in progress now.
    fn restart(&mut self, queue: Vec<ObjectKey>, credits: usize) {
        self.queue.clear();
        self.places.clear();
        for key in queue {
            self.push(key);
        }
        self.width = self.open.len().saturating_add(credits);
    }

    /// Ends a wake-up that has not helped. The next context is woken instead.
    pub(super) fn end(&mut self, key: &ObjectKey) {
        self.open.remove(key);
    }

    /// Ends the wake-up of a pod that has its devices now. One wake-up less may be in progress, but at least one: the pod may have taken
    /// other devices than those freed, so the rest of the queue is still woken one by one.
    pub(super) fn succeeded(&mut self, key: &ObjectKey) {
        if self.open.remove(key).is_some() {
            self.width = self.width.saturating_sub(1).max(1);
        }
    }

    /// Ends a wake-up whose deadline has passed. A context that has been woken again keeps its new wake-up.
    fn expire(&mut self, key: &ObjectKey, now: Moment) {
        if self.open.get(key).is_some_and(|wake_up| wake_up.ends <= now) {
            self.end(key);
        }
    }

    /// The turn of a woken context.
    pub(super) fn turn(&self, key: &ObjectKey) -> Option<u64> {
        self.open.get(key).map(|wake_up| wake_up.turn)
    }

    /// The woken contexts, in the order of their turns.
    fn awake(&self) -> Vec<ObjectKey> {
        let mut awake: Vec<_> = self
            .open
            .iter()
            .map(|(key, wake_up)| (wake_up.turn, key))
            .collect();
        awake.sort();
        awake.into_iter().map(|(_, key)| key.clone()).collect()
    }

    fn next(&mut self, ends: Moment) -> Option<ObjectKey> {
        if self.open.len() >= self.width {
            return None;
        }
        let (_, key) = self.queue.pop_first()?;
        self.places.remove(&key);
        self.count += 1;
        let turn = self.count;
        self.open.insert(key.clone(), WakeUp { turn, ends });
        self.turns.insert(key.namespace.clone(), turn);
        Some(key)
    }
}

/// Sorts waiting contexts by priority, then round-robin over the namespaces, starting with the least recently served one, then by waiting
/// time.
fn in_turn(
    waiting: impl Iterator<Item = (ObjectKey, Waiting)>,
    last_turns: &BTreeMap<String, u64>,
) -> Vec<ObjectKey> {
    let mut sorted: Vec<(ObjectKey, Waiting)> = waiting.collect();
    sorted.sort_by(|(left_key, left), (right_key, right)| {
        right
            .priority
            .cmp(&left.priority)
            .then(left.since.cmp(&right.since))
            .then(left_key.cmp(right_key))
    });
    // Within one priority, the n-th context of a namespace follows the (n-1)-th of every other.
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

impl ControllerState {
    pub(super) fn capacity_changed(&mut self, change: &CapacityChange, now: Moment) {
        self.capacity_generation += 1;
        let waiting = self
            .contexts
            .iter()
            .filter(|(key, _)| self.wake.turn(key).is_none())
            .filter_map(|(key, context)| context.waiting.clone().map(|waiting| (key.clone(), waiting)));
        let queue = in_turn(waiting, &self.wake.turns);
        let awake = self.wake.awake();
        let keys = queue.iter().chain(&awake);
        let namespaces: BTreeSet<&str> = keys.map(|key| key.namespace.as_str()).collect();
        self.wake
            .turns
            .retain(|namespace, _| namespaces.contains(namespace.as_str()));
        let credits = change.pods.unwrap_or(queue.len()).max(1);
        self.wake.restart(queue, credits);
        self.wake.freed = now;
        // The capacity for which these contexts were woken may be taken by now: evaluate them again, but do not extend their deadlines.
        for key in awake {
            self.wake_up(&key);
        }
        let immediate: Vec<ObjectKey> = self.unallocated_immediate.iter().cloned().collect();
        for key in immediate {
            if let Some(claim) = self.claims.get_mut(&key) {
                claim.retry.succeeded();
            }
            self.work_queue.insert(Work::Claim(key));
        }
    }

    /// Wakes as many contexts as allowed. Returns whether any was woken.
    pub(super) fn make_offers(&mut self, now: Moment) -> bool {
        let mut any = false;
        let ends = now.after(OFFER);
        while let Some(key) = self.wake.next(ends) {
            if self.wake_up(&key) {
                self.wake_at(ends, Work::Offer(key));
                any = true;
            } else {
                self.wake.remove(&key);
            }
        }
        any
    }

    /// Lets a context be evaluated again. Returns whether it still exists.
    fn wake_up(&mut self, key: &ObjectKey) -> bool {
        let capacity_generation = self.capacity_generation;
        let Some(context) = self.contexts.get_mut(key) else {
            return false;
        };
        context.offered(capacity_generation);
        let waits_since = context.waiting.as_ref().map(|waiting| waiting.since);
        context.woken = Some(waits_since.map_or(self.wake.freed, |since| since.max(self.wake.freed)));
        self.touch_context(key);
        true
    }

    /// Queues the next step of a context. Woken contexts act in the order of their turns.
    pub(super) fn touch_context(&mut self, key: &ObjectKey) {
        let work = match self.wake.turn(key) {
            Some(turn) => Work::Woken(turn, key.clone()),
            None => Work::Context(key.clone()),
        };
        self.work_queue.insert(work);
    }

    pub(super) fn end_offer(&mut self, key: &ObjectKey, now: Moment) {
        self.wake.expire(key, now);
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

    fn names(queue: Vec<ObjectKey>) -> Vec<String> {
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

    fn keys(count: usize) -> Vec<ObjectKey> {
        let key = |number| ObjectKey::new("n", format!("{number:06}"));
        (0..count).map(key).collect()
    }

    fn all_next(wake: &mut WakeUpQueue, ends: Moment) -> Vec<ObjectKey> {
        std::iter::from_fn(|| wake.next(ends)).collect()
    }

    #[test]
    fn changes_do_not_add_up_while_a_context_is_awake() {
        let mut wake = WakeUpQueue::default();
        let mut waiting = keys(100);
        let ends = Moment::new(OFFER);
        // One context is awake all the time; each change helps one of the others.
        wake.restart(vec![waiting.remove(0)], 1);
        assert_eq!(all_next(&mut wake, ends).len(), 1);
        for _ in 0..50 {
            wake.restart(waiting.clone(), 1);
            let woken = all_next(&mut wake, ends);
            assert_eq!(woken, waiting[..1]);
            wake.succeeded(&waiting.remove(0));
            assert_eq!((wake.open.len(), wake.width), (1, 1));
        }
    }

    #[test]
    fn the_whole_queue_is_woken_when_nobody_is_helped() {
        for ends_well in [false, true] {
            let mut wake = WakeUpQueue::default();
            let waiting = keys(10);
            wake.restart(waiting.clone(), 3);
            let mut woken = Vec::new();
            while let Some(key) = wake.next(Moment::default()) {
                woken.push(key.clone());
                if ends_well {
                    wake.succeeded(&key);
                } else {
                    wake.end(&key);
                }
            }
            assert_eq!(woken, waiting, "each once and in order");
        }
    }

    #[test]
    fn the_end_of_one_wake_up_does_not_end_the_next() {
        let mut wake = WakeUpQueue::default();
        let [key] = &keys(1)[..] else { unreachable!() };
        let (early, late) = (Moment::new(OFFER), Moment::new(OFFER * 2));
        wake.restart(vec![key.clone()], 1);
        assert_eq!(wake.next(early).as_ref(), Some(key));
        wake.end(key);
        wake.join(key.clone());
        assert_eq!(wake.next(late).as_ref(), Some(key));
        wake.expire(key, early);
        assert!(wake.turn(key).is_some(), "it is awake until its own time is over");
        wake.expire(key, late);
        assert_eq!(wake.turn(key), None);
    }

    #[test]
    fn a_context_leaves_a_long_queue_and_the_order_stays() {
        let all = keys(50_000);
        let mut wake = WakeUpQueue::default();
        wake.restart(all.clone(), all.len());
        let (gone, left): (Vec<_>, Vec<_>) = all.into_iter().enumerate().partition(|(n, _)| n % 5 != 0);
        for (_, key) in gone.iter().rev() {
            wake.remove(key);
        }
        let left: Vec<ObjectKey> = left.into_iter().map(|(_, key)| key).collect();
        assert_eq!(all_next(&mut wake, Moment::default()), left);
        assert!(wake.queue.is_empty() && wake.places.is_empty());
    }
}
