//! Duration histograms.

use std::time::Duration;

/// Durations, counted in buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    counts: [u64; Self::BOUNDS.len() + 1],
    sum: Duration,
}

impl Distribution {
    /// The inclusive upper bound of each bucket. One more bucket counts all longer durations.
    pub const BOUNDS: [Duration; 10] = [
        Duration::from_millis(1),
        Duration::from_millis(5),
        Duration::from_millis(10),
        Duration::from_millis(50),
        Duration::from_millis(100),
        Duration::from_millis(500),
        Duration::from_secs(1),
        Duration::from_secs(5),
        Duration::from_secs(10),
        Duration::from_secs(60),
    ];

    /// Counts a duration.
    pub fn observe(&mut self, value: Duration) {
        let class = Self::BOUNDS.iter().take_while(|bound| value > **bound).count();
        if let Some(count) = self.counts.get_mut(class) {
            *count += 1;
        }
        self.sum = self.sum.saturating_add(value);
    }

    /// The number of durations in each bucket: one for each bound, and one for longer durations.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The number of all durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all durations.
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_counted_in_the_smallest_class_that_has_it() {
        let mut all = Distribution::default();
        for milliseconds in [0, 1, 2, 60_000, 60_001] {
            all.observe(Duration::from_millis(milliseconds));
        }
        assert_eq!(all.counts(), [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!((all.count(), all.sum()), (5, Duration::from_millis(120_004)));
        assert!(Distribution::BOUNDS.is_sorted());
    }
}
