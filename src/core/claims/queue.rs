//! Decides which object is processed next: work queue, timers, wake-ups of waiting pods, and backoff. It knows keys, and no objects.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::driver::CapacityChange;

use super::event::{CallId, Moment, ObjectKey, TransactionId};
use super::statistics::QueueStatistics;

/// How long a woken pod may take before the next one is woken as well. The scheduler's own backoff is 1 to 10 s.
pub(super) const WAKE_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// How many consecutive writes that a busy server rejects, or with an unknown outcome, are tolerated before an Event reports them. A single lost answer is no problem for a
/// user, but a failing webhook makes every write fail.
pub(super) const WRITES_BEFORE_REPORT: u32 = 3;

/// Minimum time between two reports that a pod fits on no node, or that an immediate claim cannot be allocated yet. The counts in the
/// message change with every allocation for other pods. client-go's event recorder is as slow.
pub(super) const SHORTAGE_REPORT_INTERVAL: Duration = Duration::from_secs(300);

const FIRST_RETRY: Duration = Duration::from_millis(100);
/// The longest delay: a pod waits at most this long after a fault has ended.
const MAX_RETRY: Duration = Duration::from_secs(30);

/// An object to process. Objects are processed in this order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Work {
    /// A transaction in progress.
    Transaction(TransactionId),
    Claim(ObjectKey),
    /// A template claim that its owner pod has not used in time. Other pods may use it.
    OpenClaim(ObjectKey),
    /// A woken context, by its turn.
    WokenContext(u64, ObjectKey),
    Context(ObjectKey),
    /// The slow recheck of a waiting context.
    Recheck(ObjectKey),
    /// The deadline of a wake-up.
    WakeUpTimeout(ObjectKey),
}

impl Work {
    /// The queue that counts it: one of [`Statistics::QUEUES`](super::Statistics::QUEUES).
    fn queue(&self) -> &'static str {
        match self {
            Self::Transaction(_) => "batch",
            Self::Claim(_) | Self::OpenClaim(_) => "claim",
            Self::WokenContext(..) | Self::Context(_) | Self::Recheck(_) | Self::WakeUpTimeout(_) => {
                "context"
            }
        }
    }
}

/// The work queue: each piece of work once, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkQueue {
    /// Each piece of work, with the time of its addition.
    work: BTreeMap<Work, Moment>,
    /// Work that is due later.
    timers: BTreeSet<(Moment, Work)>,
    /// The current time.
    pub(super) now: Moment,
    statistics: BTreeMap<&'static str, QueueStatistics>,
    /// Start times of the pending requests and calls, the oldest first.
    pending: BTreeMap<&'static str, BTreeMap<CallId, Moment>>,
}

impl WorkQueue {
    /// Adds a piece of work unless it is queued already.
    pub(super) fn insert(&mut self, work: Work) {
        let statistics = self.statistics.entry(work.queue()).or_default();
        self.work.entry(work).or_insert_with(|| {
            statistics.adds += 1;
            statistics.depth += 1;
            self.now
        });
    }

    pub(super) fn extend(&mut self, work: impl IntoIterator<Item = Work>) {
        for work in work {
            self.insert(work);
        }
    }

    /// Adds a piece of work at `moment`.
    pub(super) fn insert_at(&mut self, moment: Moment, work: Work) {
        self.timers.insert((moment, work));
    }

    pub(super) fn next_deadline(&self) -> Option<Moment> {
        self.timers.first().map(|(moment, _)| *moment)
    }

    /// Adds all work that is due.
    pub(super) fn fire_timers(&mut self) {
        while let Some((moment, _)) = self.timers.first() {
            if *moment > self.now {
                break;
            }
            if let Some((_, work)) = self.timers.pop_first() {
                self.insert(work);
            }
        }
    }

    pub(super) fn pop_first(&mut self) -> Option<Work> {
        let (work, since) = self.work.pop_first()?;
        let statistics = self.statistics.entry(work.queue()).or_default();
        statistics.depth = statistics.depth.saturating_sub(1);
        statistics.waited.observe(self.now.since(since));
        Some(work)
    }

    /// Counts a request or call that is being sent.
    pub(super) fn sent(&mut self, queue: &'static str, id: CallId) {
        let statistics = self.statistics.entry(queue).or_default();
        statistics.under_way += 1;
        statistics.begun = statistics.begun.saturating_add(self.now.since_start());
        self.pending.entry(queue).or_default().insert(id, self.now);
    }

    /// Counts the answer to a request or call.
    pub(super) fn answered(&mut self, queue: &'static str, id: CallId, failed: bool) {
        let begun = self.pending.get_mut(queue).and_then(|all| all.remove(&id));
        let Some(begun) = begun else { return };
        let statistics = self.statistics.entry(queue).or_default();
        statistics.under_way = statistics.under_way.saturating_sub(1);
        statistics.begun = statistics.begun.saturating_sub(begun.since_start());
        statistics.worked.observe(self.now.since(begun));
        statistics.retries += u64::from(failed);
    }

    pub(super) fn statistics(&self) -> BTreeMap<&'static str, QueueStatistics> {
        let mut all = self.statistics.clone();
        for (queue, statistics) in &mut all {
            let oldest = self.pending.get(queue).and_then(BTreeMap::first_key_value);
            statistics.oldest = oldest.map(|(_, begun)| *begun);
        }
        all
    }
}

/// Wake-ups of waiting pods, a few at a time.
///
/// When capacity is freed, as many waiting contexts are evaluated again as the capacity can serve. A wake-up ends when its pod is
/// allocated, when the pod still fits nowhere, or when it takes too long. In the last two cases the next context is woken. So a pod that
/// cannot run for other reasons blocks no other pod, and every waiting pod gets its turn.
#[derive(Clone, Debug, Default)]
pub(super) struct WakeUps {
    /// The contexts that wait for their turn.
    queue: BTreeMap<u64, ObjectKey>,
    /// The position of each context in `queue`.
    positions: BTreeMap<ObjectKey, u64>,
    /// The last position used in `queue`.
    last_position: u64,
    /// The wake-ups in progress.
    awake: BTreeMap<ObjectKey, WakeUp>,
    /// How many wake-ups may be in progress at once.
    limit: usize,
    /// The last turn of each namespace with waiting pods, as a number of `count`.
    turns: BTreeMap<String, u64>,
    /// The number of wake-ups so far.
    count: u64,
    /// When capacity was last freed.
    freed_at: Moment,
}

/// A wake-up in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WakeUp {
    /// Its number. Contexts that are awake at the same time act in this order.
    turn: u64,
    deadline: Moment,
}

/// The facts that determine a context's turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WaitingPod {
    /// The pod's priority. Higher values come first.
    pub(super) priority: i32,
    pub(super) since: Moment,
}

impl WakeUps {
    /// Queues the waiting contexts that a change concerns and that are not awake. Returns those that are awake: the capacity may be taken by
    /// now, so they are evaluated again, within their old deadlines. Contexts of other namespaces keep their place in the queue.
    pub(super) fn capacity_freed(
        &mut self,
        waiting: impl Iterator<Item = (ObjectKey, WaitingPod)>,
        change: &CapacityChange,
        now: Moment,
    ) -> Vec<ObjectKey> {
        let is_due = |key: &ObjectKey| change.concerns(&key.namespace) || self.positions.contains_key(key);
        let waiting = waiting.filter(|(key, _)| !self.awake.contains_key(key) && is_due(key));
        let mut queue = in_turn(waiting, &self.turns);
        let mut awake: Vec<_> = self
            .awake
            .iter()
            .filter(|(key, _)| change.concerns(&key.namespace))
            .map(|(key, wake_up)| (wake_up.turn, key))
            .collect();
        awake.sort();
        let awake: Vec<ObjectKey> = awake.into_iter().map(|(_, key)| key.clone()).collect();
        if change.namespace.is_none() {
            let keys = queue.iter().chain(&awake);
            let namespaces: BTreeSet<&str> = keys.map(|key| key.namespace.as_str()).collect();
            self.turns
                .retain(|namespace, _| namespaces.contains(namespace.as_str()));
        }
        let is_concerned = |key: &&ObjectKey| change.concerns(&key.namespace);
        let number = queue.iter().filter(is_concerned).count();
        if change.namespace.is_some() && number == 0 {
            return awake;
        }
        // The wake-ups are for the pods that the change concerns.
        queue.sort_by_key(|key| !change.concerns(&key.namespace));
        self.restart(queue, change.pods.unwrap_or(number).max(1));
        self.freed_at = now;
        awake
    }

    /// When capacity was last freed.
    pub(super) fn freed_at(&self) -> Moment {
        self.freed_at
    }

    /// Removes a context from the queue and ends its wake-up.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.awake.remove(key);
        if let Some(position) = self.positions.remove(key) {
            self.queue.remove(&position);
        }
    }

    /// Queues a context that began to wait too late for the last change, behind the others.
    pub(super) fn join(&mut self, key: ObjectKey) {
        self.limit = self.limit.max(1);
        if !self.awake.contains_key(&key) {
            self.push(key);
        }
    }

    fn push(&mut self, key: ObjectKey) {
        if !self.positions.contains_key(&key) {
            self.last_position += 1;
            self.positions.insert(key.clone(), self.last_position);
            self.queue.insert(self.last_position, key);
        }
    }

    /// Replaces the queue, and allows `credits` more wake-ups than are in progress now.
    fn restart(&mut self, queue: Vec<ObjectKey>, credits: usize) {
        self.queue.clear();
        self.positions.clear();
        for key in queue {
            self.push(key);
        }
        self.limit = self.awake.len().saturating_add(credits);
    }

    /// Ends a wake-up that has not helped. The next context is woken instead.
    pub(super) fn end(&mut self, key: &ObjectKey) {
        self.awake.remove(key);
    }

    /// Ends the wake-up of a pod that has its devices now. One wake-up less may be in progress, but at least one: the pod may have taken
    /// other devices than those freed, so the rest of the queue is still woken one by one.
    pub(super) fn succeeded(&mut self, key: &ObjectKey) {
        if self.awake.remove(key).is_some() {
            self.limit = self.limit.saturating_sub(1).max(1);
        }
    }

    /// Ends a wake-up whose deadline has passed. A context that has been woken again keeps its new wake-up.
    pub(super) fn expire(&mut self, key: &ObjectKey, now: Moment) {
        if self.awake.get(key).is_some_and(|wake_up| wake_up.deadline <= now) {
            self.end(key);
        }
    }

    /// The next step of a context. Woken contexts act in the order of their turns.
    pub(super) fn work(&self, key: &ObjectKey) -> Work {
        match self.awake.get(key) {
            Some(wake_up) => Work::WokenContext(wake_up.turn, key.clone()),
            None => Work::Context(key.clone()),
        }
    }

    /// Wakes the next context, if another wake-up is allowed.
    pub(super) fn next(&mut self, deadline: Moment) -> Option<ObjectKey> {
        if self.awake.len() >= self.limit {
            return None;
        }
        let (_, key) = self.queue.pop_first()?;
        self.positions.remove(&key);
        self.count += 1;
        let turn = self.count;
        self.awake.insert(key.clone(), WakeUp { turn, deadline });
        self.turns.insert(key.namespace.clone(), turn);
        Some(key)
    }
}

/// Sorts waiting contexts by priority, then round-robin over the namespaces, starting with the least recently served one, then by waiting
/// time.
fn in_turn(
    waiting: impl Iterator<Item = (ObjectKey, WaitingPod)>,
    last_turns: &BTreeMap<String, u64>,
) -> Vec<ObjectKey> {
    let sorted: BTreeSet<(Reverse<i32>, Moment, ObjectKey)> = waiting
        .map(|(key, waiting)| (Reverse(waiting.priority), waiting.since, key))
        .collect();
    // Within one priority, the n-th context of a namespace follows the (n-1)-th of every other.
    let mut turns: BTreeMap<(Reverse<i32>, String), usize> = BTreeMap::new();
    let mut ranked: Vec<(Reverse<i32>, usize, u64, Moment, ObjectKey)> = sorted
        .into_iter()
        .map(|(priority, since, key)| {
            let turn = turns.entry((priority, key.namespace.clone())).or_default();
            *turn += 1;
            let last_turn = last_turns.get(&key.namespace).copied().unwrap_or_default();
            (priority, *turn, last_turn, since, key)
        })
        .collect();
    ranked.sort();
    ranked.into_iter().map(|(.., key)| key).collect()
}

/// The number of consecutive failures, and the time of the next attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backoff {
    failures: u32,
    not_before: Moment,
}

impl Backoff {
    pub(super) fn failed(&mut self, now: Moment) {
        let delay = FIRST_RETRY
            .saturating_mul(1 << self.failures.min(16))
            .min(MAX_RETRY);
        self.failures = self.failures.saturating_add(1);
        self.not_before = now.after(delay);
    }

    pub(super) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Number of failures since the last success.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// The time of the next attempt, if it is later than `now`.
    pub(super) fn wait_until(&self, now: Moment) -> Option<Moment> {
        (self.not_before > now).then_some(self.not_before)
    }
}

/// Numbers the changes of capacity, so that an answer of the driver that is older than a change is recognized.
#[derive(Clone, Debug, Default)]
pub(super) struct CapacityGenerations {
    last: u64,
    /// The last change for all namespaces.
    all: u64,
    /// The last change for each single namespace after that.
    single: BTreeMap<String, u64>,
}

impl CapacityGenerations {
    /// Counts a change for one namespace, or for all if `None`.
    pub(super) fn advance(&mut self, namespace: Option<&str>) {
        self.last += 1;
        if let Some(namespace) = namespace {
            self.single.insert(namespace.to_owned(), self.last);
        } else {
            self.all = self.last;
            self.single.clear();
        }
    }

    /// The number of the last change that concerns a namespace.
    pub(super) fn of(&self, namespace: &str) -> u64 {
        self.single.get(namespace).copied().unwrap_or(self.all)
    }
}

/// A delay between `base` and `base + spread` derived from the name, so that rechecks are spread over time.
pub(super) fn spread(name: &str, base: Duration, spread: Duration) -> Duration {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let share = u32::try_from(hash % 1024).unwrap_or_default();
    base.saturating_add(spread.saturating_mul(share) / 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::CapacityCause;

    fn waiting(namespace: &str, name: &str, priority: i32, seconds: u64) -> (ObjectKey, WaitingPod) {
        let since = Moment::new(Duration::from_secs(seconds));
        let waiting = WaitingPod { priority, since };
        (ObjectKey::new(namespace, name), waiting)
    }

    fn names(queue: Vec<ObjectKey>) -> Vec<String> {
        queue.into_iter().map(|key| key.to_string()).collect()
    }

    #[test]
    fn a_crowded_namespace_does_not_starve_another() {
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

    fn all_next(wake: &mut WakeUps, ends: Moment) -> Vec<ObjectKey> {
        std::iter::from_fn(|| wake.next(ends)).collect()
    }

    #[test]
    fn changes_do_not_add_up_while_a_context_is_awake() {
        let mut wake = WakeUps::default();
        let mut waiting = keys(100);
        let ends = Moment::new(WAKE_UP_TIMEOUT);
        // One context is awake all the time; each change helps one of the others.
        wake.restart(vec![waiting.remove(0)], 1);
        assert_eq!(all_next(&mut wake, ends).len(), 1);
        for _ in 0..50 {
            wake.restart(waiting.clone(), 1);
            let woken = all_next(&mut wake, ends);
            assert_eq!(woken, waiting[..1]);
            wake.succeeded(&waiting.remove(0));
            assert_eq!((wake.awake.len(), wake.limit), (1, 1));
        }
    }

    #[test]
    fn the_whole_queue_is_woken_if_no_wake_up_helps() {
        for ends_well in [false, true] {
            let mut wake = WakeUps::default();
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
    fn a_change_in_a_namespace_wakes_no_pod_of_another() {
        let now = Moment::default();
        let all = [
            waiting("a", "1", 0, 1),
            waiting("a", "2", 0, 2),
            waiting("b", "1", 0, 3),
            waiting("b", "2", 0, 4),
        ];
        let in_namespace =
            |namespace: &str| CapacityChange::new(CapacityCause::Parameters).in_namespace(namespace);
        let mut wake = WakeUps::default();
        let mut change = |namespace: &str, woken: &[&str], again: &[&str]| {
            let awake = wake.capacity_freed(all.clone().into_iter(), &in_namespace(namespace), now);
            assert_eq!(names(awake), again);
            assert_eq!(names(all_next(&mut wake, now)), woken);
        };
        change("b", &["b/1", "b/2"], &[]);
        change("c", &[], &[]);
        change("b", &[], &["b/1", "b/2"]);

        // Pods that wait for their turn after another change keep it.
        let mut wake = WakeUps::default();
        let freed = CapacityChange::new(CapacityCause::Freed).for_pods(1);
        wake.capacity_freed(all.clone().into_iter(), &freed, now);
        assert_eq!(names(all_next(&mut wake, now)), ["a/1"]);
        let all_waiting = || all.clone().into_iter();
        wake.capacity_freed(all_waiting(), &in_namespace("b"), now);
        assert_eq!(names(all_next(&mut wake, now)), ["b/1", "b/2"]);
        wake.capacity_freed(all_waiting(), &in_namespace("c"), now);
        assert!(names(all_next(&mut wake, now)).is_empty());
        wake.end(&ObjectKey::new("a", "1"));
        assert_eq!(names(all_next(&mut wake, now)), ["a/2"]);
    }

    #[test]
    fn a_generation_advances_only_with_changes_of_its_namespace() {
        let mut generations = CapacityGenerations::default();
        let mut after = |change| {
            generations.advance(change);
            (generations.of("a"), generations.of("b"))
        };
        assert_eq!(after(None), (1, 1));
        assert_eq!(after(Some("a")), (2, 1));
        assert_eq!(after(Some("b")), (2, 3));
        assert_eq!(after(None), (4, 4));
    }

    #[test]
    fn the_end_of_one_wake_up_does_not_end_the_next() {
        let mut wake = WakeUps::default();
        let [key] = &keys(1)[..] else { unreachable!() };
        let (early, late) = (Moment::new(WAKE_UP_TIMEOUT), Moment::new(WAKE_UP_TIMEOUT * 2));
        wake.restart(vec![key.clone()], 1);
        assert_eq!(wake.next(early).as_ref(), Some(key));
        wake.end(key);
        wake.join(key.clone());
        assert_eq!(wake.next(late).as_ref(), Some(key));
        wake.expire(key, early);
        assert!(wake.awake.contains_key(key), "it is awake until its own deadline");
        wake.expire(key, late);
        assert!(!wake.awake.contains_key(key));
    }

    #[test]
    fn a_context_that_leaves_keeps_the_order_of_the_others() {
        let all = keys(50_000);
        let mut wake = WakeUps::default();
        wake.restart(all.clone(), all.len());
        let (gone, left): (Vec<_>, Vec<_>) = all.into_iter().enumerate().partition(|(n, _)| n % 5 != 0);
        for (_, key) in gone.iter().rev() {
            wake.remove(key);
        }
        let left: Vec<ObjectKey> = left.into_iter().map(|(_, key)| key).collect();
        assert_eq!(all_next(&mut wake, Moment::default()), left);
        assert!(wake.queue.is_empty() && wake.positions.is_empty());
    }

    #[test]
    fn the_delay_doubles_up_to_30_s_and_a_success_resets_it() {
        let now = Moment::default();
        let mut backoff = Backoff::default();
        let mut delays = Vec::new();
        for _ in 0..40 {
            backoff.failed(now);
            delays.push(backoff.wait_until(now).unwrap().since_start());
        }
        assert_eq!(delays[0], FIRST_RETRY);
        assert_eq!(delays[1], FIRST_RETRY * 2);
        assert_eq!(delays[39], MAX_RETRY);
        assert_eq!(backoff.wait_until(now.after(MAX_RETRY)), None);
        backoff.succeeded();
        assert_eq!(backoff.wait_until(now), None);
    }
}
