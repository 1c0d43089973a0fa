//! Exponential backoff without jitter.

use std::time::Duration;

use super::event::Moment;

const FIRST: Duration = Duration::from_millis(100);
/// The longest delay: a pod waits at most this long after a fault has ended.
const LONGEST: Duration = Duration::from_secs(30);

/// How many consecutive writes with an unknown outcome are tolerated before an Event reports them. A single lost answer is no problem for a
/// user, but a failing webhook makes every write fail.
pub(in crate::core::claims) const WRITES_BEFORE_REPORT: u32 = 3;

/// The number of consecutive failures, and the time of the next attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Retry {
    failures: u32,
    not_before: Moment,
}

impl Retry {
    pub(super) fn failed(&mut self, now: Moment) {
        let delay = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_thirty_seconds_and_a_success_resets_it() {
        let now = Moment::default();
        let mut retry = Retry::default();
        let mut delays = Vec::new();
        for _ in 0..40 {
            retry.failed(now);
            delays.push(retry.wait_until(now).unwrap().since_start());
        }
        assert_eq!(delays[0], FIRST);
        assert_eq!(delays[1], FIRST * 2);
        assert_eq!(delays[39], LONGEST);
        assert_eq!(retry.wait_until(now.after(LONGEST)), None);
        retry.succeeded();
        assert_eq!(retry.wait_until(now), None);
    }
}
