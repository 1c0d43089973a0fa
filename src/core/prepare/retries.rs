//! Retries of failed CDI file writes. A container that restarts waits for its missing file, so the companion must retry without a request.

use std::collections::BTreeMap;
use std::time::Duration;

use super::claim_uid::ClaimUid;

/// Pause before the first retry; it doubles with each failure.
const FIRST: Duration = Duration::from_secs(1);
/// Maximum pause.
const LONGEST: Duration = Duration::from_secs(60);

/// The missing files.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// The CDI file of a claim.
    OfClaim(ClaimUid),
    /// CDI files of devices that the device plugin API passes by name.
    OfDevices,
}

/// The missing files, each with the time of its next retry. Times are since any fixed moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retries(BTreeMap<Missing, Retry>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Retry {
    pause: Duration,
    due: Duration,
}

impl Retries {
    /// Schedules a retry after a failed write.
    pub fn failed(&mut self, missing: Missing, now: Duration) {
        let before = self.0.get(&missing);
        let pause = before.map_or(FIRST, |retry| retry.pause.saturating_mul(2).min(LONGEST));
        let due = now.saturating_add(pause);
        self.0.insert(missing, Retry { pause, due });
    }

    /// Removes a file that was written or is no longer needed. Returns whether it was missing.
    pub fn done(&mut self, missing: &Missing) -> bool {
        self.0.remove(missing).is_some()
    }

    /// Whether a retry is scheduled.
    pub fn has(&self, missing: &Missing) -> bool {
        self.0.contains_key(missing)
    }

    /// The files whose retry is due.
    pub fn due(&self, now: Duration) -> Vec<Missing> {
        let due = self.0.iter().filter(|(_, retry)| retry.due <= now);
        due.map(|(missing, _)| missing.clone()).collect()
    }

    /// The time of the next retry.
    pub fn next(&self) -> Option<Duration> {
        self.0.values().map(|retry| retry.due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_tried_again_ever_less_often_until_it_is_there() {
        let (mut retries, mut now) = (Retries::default(), Duration::ZERO);
        assert_eq!(retries.next(), None);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            retries.failed(Missing::OfDevices, now);
            let due = retries.next().unwrap();
            assert!(
                retries
                    .due(due.saturating_sub(Duration::from_millis(1)))
                    .is_empty()
            );
            assert_eq!(retries.due(due), [Missing::OfDevices]);
            pauses.push(due.saturating_sub(now).as_secs());
            now = due;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(retries.done(&Missing::OfDevices) && !retries.done(&Missing::OfDevices));
        assert_eq!((retries.next(), retries.due(now)), (None, vec![]));
        retries.failed(Missing::OfDevices, now);
        assert_eq!(retries.next(), Some(now + FIRST), "the next time begins anew");
    }

    #[test]
    fn each_claim_has_its_own_time() {
        let claim = |last: char| {
            let uid = format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0{last}");
            Missing::OfClaim(ClaimUid::parse(&uid).unwrap())
        };
        let mut retries = Retries::default();
        retries.failed(claim('1'), Duration::ZERO);
        retries.failed(claim('1'), Duration::ZERO);
        retries.failed(claim('2'), Duration::ZERO);
        assert_eq!(retries.due(FIRST), [claim('2')]);
        assert_eq!(retries.due(FIRST * 2), [claim('1'), claim('2')]);
    }
}
