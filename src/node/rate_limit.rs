//! Limits the rate of calls.

use std::time::Duration;

use tokio::time::Instant;

/// Token bucket: a burst of calls at once, then one per interval.
#[derive(Debug)]
pub(in crate::node) struct RateLimit {
    burst: u32,
    interval: Duration,
    /// When the whole burst is available again.
    full: Instant,
}

impl RateLimit {
    /// Allows a whole burst now.
    pub(in crate::node) fn new(burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            full: Instant::now(),
        }
    }

    /// When the next call may begin.
    pub(in crate::node) fn due(&self) -> Instant {
        let ahead = self.interval * (self.burst - 1);
        self.full.checked_sub(ahead).unwrap_or(self.full)
    }

    /// Counts a call.
    pub(in crate::node) fn take(&mut self) {
        self.full = self.full.max(Instant::now()) + self.interval;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_goes_at_once_and_later_calls_one_by_one() {
        let mut limit = RateLimit::new(5, Duration::from_millis(100));
        let mut delays = |calls| -> Vec<u128> {
            let delay = |_| {
                let delay = limit.due().saturating_duration_since(Instant::now());
                limit.take();
                delay.as_millis()
            };
            (0..calls).map(delay).collect()
        };
        assert_eq!(delays(8), [0, 0, 0, 0, 0, 100, 200, 300]);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(delays(6), [0, 0, 0, 0, 0, 100], "no more are saved up");
    }
}
