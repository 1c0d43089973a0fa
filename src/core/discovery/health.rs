//! Device health: turns the results of checks into a published state, with hysteresis.
//!
//! One bad result makes a device unhealthy at once. To become healthy again it needs several good results in a row, some time
//! apart, so that a device with a loose contact is not available each time it happens to connect. The health of a missing device
//! is remembered for a while: replugging a device does not reset it.

use std::collections::BTreeMap;
use std::time::Duration;

/// Minimum time between good results that count separately. A burst of events causes many checks and proves nothing.
pub const GOOD_SPACING: Duration = Duration::from_secs(4);
/// Minimum time between two causes of one device. Each is a write of its slice and an event, and a cause with the value of a counter is new
/// at every check.
pub const CAUSE_SPACING: Duration = Duration::from_secs(60);
/// How long the health of a missing unhealthy device is remembered.
pub const MEMORY: Duration = Duration::from_secs(60);

/// One check of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The error says why the device must not be allocated, for users; `None` if the device could not be checked, so its health remains.
    pub result: Result<(), Option<String>>,
    /// The number of consecutive good results that make it healthy again, at least 1.
    pub recover_after: u32,
}

/// The health of the devices of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthRecords {
    unhealthy: BTreeMap<String, UnhealthyDevice>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct UnhealthyDevice {
    cause: String,
    /// When the cause was reported first.
    since: Duration,
    /// Number of consecutive good results.
    good: u32,
    /// When the last good result was counted.
    counted: Option<Duration>,
    /// When the device was last present.
    seen: Duration,
    present: bool,
}

impl HealthRecords {
    /// Applies the results of a check of all present devices. `now` is the time since any fixed moment.
    pub fn observe(&mut self, now: Duration, checks: &BTreeMap<String, HealthCheck>) {
        for (name, check) in checks {
            match (&check.result, self.unhealthy.get_mut(name)) {
                (Ok(()) | Err(None), None) => {}
                (Err(None), Some(sick)) => {
                    sick.seen = now;
                    sick.present = true;
                }
                (Ok(()), Some(sick)) => {
                    sick.seen = now;
                    sick.present = true;
                    let counts = sick
                        .counted
                        .is_none_or(|counted| now.saturating_sub(counted) >= GOOD_SPACING);
                    if counts {
                        sick.good += 1;
                        sick.counted = Some(now);
                    }
                    if sick.good >= check.recover_after {
                        self.unhealthy.remove(name);
                    }
                }
                (Err(Some(cause)), Some(sick)) => {
                    // A newer cause replaces the reported one, in time.
                    if sick.cause != *cause && now.saturating_sub(sick.since) >= CAUSE_SPACING {
                        sick.cause.clone_from(cause);
                        sick.since = now;
                    }
                    sick.good = 0;
                    sick.counted = None;
                    sick.seen = now;
                    sick.present = true;
                }
                (Err(Some(cause)), None) => {
                    let fresh = UnhealthyDevice {
                        cause: cause.clone(),
                        since: now,
                        good: 0,
                        counted: None,
                        seen: now,
                        present: true,
                    };
                    self.unhealthy.insert(name.clone(), fresh);
                }
            }
        }
        self.unhealthy.retain(|name, sick| {
            if !checks.contains_key(name) {
                sick.present = false;
                sick.good = 0;
                sick.counted = None;
            }
            sick.present || now.saturating_sub(sick.seen) < MEMORY
        });
    }

    /// Why a device must not be allocated; `None` if it is healthy.
    pub fn cause(&self, device: &str) -> Option<&str> {
        self.unhealthy.get(device).map(|sick| sick.cause.as_str())
    }

    /// Whether a present device is unhealthy, so that the next check should come soon.
    pub fn has_unhealthy(&self) -> bool {
        self.unhealthy.values().any(|sick| sick.present)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(result: Result<(), Option<String>>) -> BTreeMap<String, HealthCheck> {
        let check = HealthCheck {
            result,
            recover_after: 3,
        };
        BTreeMap::from([("x".to_owned(), check)])
    }

    fn bad(cause: &str) -> BTreeMap<String, HealthCheck> {
        check(Err(Some(cause.into())))
    }

    fn good() -> BTreeMap<String, HealthCheck> {
        check(Ok(()))
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_device_is_unhealthy_at_once_and_healthy_after_several() {
        let mut records = HealthRecords::default();
        records.observe(at(0), &good());
        assert_eq!((records.cause("x"), records.has_unhealthy()), (None, false));
        records.observe(at(10), &bad("it smokes"));
        assert_eq!(
            (records.cause("x"), records.has_unhealthy()),
            (Some("it smokes"), true)
        );
        for (second, healthy) in [(15, false), (20, false), (25, true)] {
            records.observe(at(second), &good());
            assert_eq!(records.cause("x").is_none(), healthy, "{second}");
        }
        assert!(!records.has_unhealthy());
    }

    #[test]
    fn a_burst_of_good_results_counts_once() {
        let mut records = HealthRecords::default();
        records.observe(at(0), &bad("it smokes"));
        for _ in 0..10 {
            records.observe(at(5), &good());
        }
        records.observe(at(10), &good());
        assert!(records.cause("x").is_some());
        records.observe(at(15), &bad("it burns"));
        assert_eq!(records.cause("x"), Some("it smokes"));
        for second in [20, 25] {
            records.observe(at(second), &good());
        }
        assert!(records.cause("x").is_some());
        records.observe(at(30), &good());
        assert_eq!(records.cause("x"), None);
    }

    #[test]
    fn a_changing_cause_is_replaced_once_a_minute() {
        let mut records = HealthRecords::default();
        let mut causes = Vec::new();
        for second in (0..=120).step_by(5) {
            records.observe(at(second), &bad(&format!("{second} errors")));
            causes.extend(records.cause("x").map(str::to_owned));
        }
        causes.dedup();
        assert_eq!(causes, ["0 errors", "60 errors", "120 errors"]);
        // The same cause again does not delay another one.
        records.observe(at(179), &bad("120 errors"));
        records.observe(at(180), &bad("it burns"));
        assert_eq!(records.cause("x"), Some("it burns"));
    }

    #[test]
    fn a_device_that_cannot_be_checked_keeps_its_health() {
        let mut records = HealthRecords::default();
        records.observe(at(0), &check(Err(None)));
        assert_eq!((records.cause("x"), records.has_unhealthy()), (None, false));
        records.observe(at(5), &bad("it smokes"));
        for second in [10, 15, 20, 200] {
            records.observe(at(second), &check(Err(None)));
        }
        assert_eq!(
            (records.cause("x"), records.has_unhealthy()),
            (Some("it smokes"), true)
        );
        for second in [205, 210, 215] {
            records.observe(at(second), &good());
        }
        assert_eq!(records.cause("x"), None);
    }

    #[test]
    fn replugging_resets_health_only_after_a_long_absence() {
        let mut records = HealthRecords::default();
        records.observe(at(0), &bad("it smokes"));
        records.observe(at(5), &good());
        records.observe(at(10), &BTreeMap::new());
        assert!(!records.has_unhealthy(), "an absent device needs no check");
        records.observe(at(15), &good());
        assert_eq!(records.cause("x"), Some("it smokes"));
        for second in [20, 25] {
            records.observe(at(second), &good());
        }
        assert_eq!(records.cause("x"), None, "the good results before do not count");
        records.observe(at(30), &bad("it smokes"));
        records.observe(at(31), &BTreeMap::new());
        records.observe(at(95), &BTreeMap::new());
        records.observe(at(96), &good());
        assert_eq!(records.cause("x"), None);
    }

    proptest! {
        #[test]
        fn a_device_is_never_healthy_before_its_good_results(results in proptest::collection::vec((0..3_u8, 0..10_u64), 1..60)) {
            let mut records = HealthRecords::default();
            let (mut now, mut streak, mut sick) = (0, Vec::<u64>::new(), false);
            for (result, pause) in results {
                now += pause;
                match result {
                    0 => { records.observe(at(now), &bad("bad")); sick = true; streak.clear(); }
                    1 => { records.observe(at(now), &good()); streak.push(now); }
                    _ => { records.observe(at(now), &BTreeMap::new()); streak.clear(); }
                }
                if sick && records.cause("x").is_none() && result == 1 {
                    let spread = streak.last().unwrap() - streak.first().unwrap();
                    let forgotten = streak.len() < 3;
                    prop_assert!(forgotten || spread >= 2 * GOOD_SPACING.as_secs());
                    sick = false;
                }
                if result == 0 { prop_assert!(records.cause("x").is_some()); }
            }
        }
    }
}
