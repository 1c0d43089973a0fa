//! Leader election: a lease that one controller at a time acquires and renews.
//!
//! A step depends only on observed records and on the local clock: another holder's lease has expired when its record has stayed
//! unchanged for its duration on the local clock, so clock differences between machines do no harm (client-go's leader election
//! does the same). A holder stops before its lease can be taken: it sends no write after `renew_deadline` without a renewal, and a
//! request that is pending by then has succeeded or failed before the duration ends.
//!
//! [`Lease::step`] gives a lease up as [`LeaseStep::Lost`], at `renew_deadline` or when another holder is seen. At a shutdown
//! `Controller::run` releases it, unless a call or a write may still be under way.
//!
//! The lease of a process that has ended need not expire: that process sent all its requests before this process's clock started, so
//! they are over one request timeout later.
//!
//! A lease cannot fence a process that is paused between its last check of the clock and the write; the node companion guards against
//! such a late write.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use super::claims::Moment;

/// A lease that was taken over is used only after another tenth of its duration, because clocks run at different rates. The clocks of
/// machines differ by less than a thousandth, and by a twelfth while one of them is being corrected.
const CLOCK_MARGIN: u32 = 10;

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseSettings {
    /// Unique identity of this process; differs also from that of an earlier process in the same pod.
    pub identity: String,
    /// The identities of processes that had ended before this one's clock started.
    pub ended: BTreeSet<String>,
    /// How long other processes wait before they take over a lease that is not renewed.
    pub duration: Duration,
    /// How long the holder continues without a renewal. Shorter than `duration` by at least `request_timeout`.
    pub renew_deadline: Duration,
    /// Time between two attempts.
    pub retry_period: Duration,
    /// Maximum duration of a request. After a process has ended, its lease is used only this much later, when none of its requests can
    /// still arrive.
    pub request_timeout: Duration,
}

/// Why settings are rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseSettingsError {
    /// The old holder's last write could arrive after the new holder's first.
    #[error(
        "the lease duration ({duration:?}) must be at least the renew deadline ({renew_deadline:?}) and the request timeout ({request_timeout:?}) together, or two controllers could write at once"
    )]
    TooShort {
        /// The duration.
        duration: Duration,
        /// The renew deadline.
        renew_deadline: Duration,
        /// The request timeout.
        request_timeout: Duration,
    },
    /// A second attempt would come too late.
    #[error(
        "the renew deadline ({renew_deadline:?}) must be longer than the retry period ({retry_period:?})"
    )]
    NoRetry {
        /// The renew deadline.
        renew_deadline: Duration,
        /// The retry period.
        retry_period: Duration,
    },
}

impl LeaseSettings {
    /// Rejects settings under which two controllers could write at once, or a single lost request would end the lease.
    pub fn check(&self) -> Result<(), LeaseSettingsError> {
        let Self {
            duration,
            renew_deadline,
            retry_period,
            request_timeout,
            ..
        } = *self;
        if renew_deadline.saturating_add(request_timeout) > duration {
            return Err(LeaseSettingsError::TooShort {
                duration,
                renew_deadline,
                request_timeout,
            });
        }
        if renew_deadline <= retry_period || retry_period.is_zero() {
            return Err(LeaseSettingsError::NoRetry {
                renew_deadline,
                retry_period,
            });
        }
        Ok(())
    }
}

/// A stored lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseRecord {
    /// The holder's identity; empty if it was released.
    pub holder: String,
    /// How long other processes must wait without a renewal.
    pub duration: Duration,
    /// How often the holder has changed.
    pub transitions: i32,
    /// The object's resource version: a write is refused if another one is stored. If none is stored, because the Lease was deleted, the
    /// server creates it.
    pub version: String,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// The stored lease; `None` if it does not exist.
    Read(Option<LeaseRecord>),
    /// Our write is stored.
    Written(LeaseRecord),
    /// Another process has written, or the result is unknown: the lease must be read again.
    Unclear,
}

/// The next action on the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseStep {
    Read,
    /// Write the lease with this process as its holder: create it, or replace this version.
    Write {
        /// The version to replace; `None` to create.
        version: Option<String>,
        /// The new number of transitions.
        transitions: i32,
        /// Whether this write takes the lease over; a renewal keeps the acquisition time.
        take: bool,
    },
    /// Do nothing until then.
    Wait(Moment),
    /// The lease was not renewed before the renew deadline, or has another holder: stop.
    Lost,
}

/// The observed state of the lease.
#[derive(Clone, Debug)]
pub struct Lease {
    settings: LeaseSettings,
    /// The record, and when it was first seen in this version.
    seen: Option<(Option<LeaseRecord>, Moment)>,
    /// After a deletion, which does not stop the holder: when none of its requests can still arrive.
    deleted_free_from: Option<Moment>,
    must_read: bool,
    /// When the request was sent that last acquired or renewed the lease.
    held: Option<Moment>,
    /// When this process may start to write.
    usable: Option<Moment>,
    last_request: Option<Moment>,
    /// An acquisition without an answer yet. If it arrived, the lease is held since it was sent.
    attempt: Option<(Moment, Option<Moment>)>,
}

impl Lease {
    /// Returns a lease with nothing observed yet.
    pub fn new(settings: LeaseSettings) -> Self {
        Self {
            settings,
            seen: None,
            deleted_free_from: None,
            must_read: true,
            held: None,
            usable: None,
            last_request: None,
            attempt: None,
        }
    }

    /// The operator's settings.
    pub fn settings(&self) -> &LeaseSettings {
        &self.settings
    }

    /// The record to release, if this process holds the lease.
    pub fn own_record(&self) -> Option<&LeaseRecord> {
        let (record, _) = self.seen.as_ref()?;
        self.held.and(record.as_ref())
    }

    /// When this process may write if it does not renew the lease again. `None` if it does not hold the lease.
    pub fn term(&self) -> Option<Range<Moment>> {
        Some(self.usable?..self.valid_until()?)
    }

    fn valid_until(&self) -> Option<Moment> {
        self.held.map(|held| held.after(self.settings.renew_deadline))
    }

    /// The next action at `now`.
    pub fn step(&self, now: Moment) -> LeaseStep {
        if let Some(end) = self.valid_until()
            && now >= end
        {
            return LeaseStep::Lost;
        }
        let next = self
            .last_request
            .map(|last| last.after(self.settings.retry_period))
            .filter(|next| *next > now);
        let Some((record, since)) = self.seen.as_ref().filter(|_| !self.must_read) else {
            // The first read happens at once, a repeated one after the retry period.
            return next.map_or(LeaseStep::Read, LeaseStep::Wait);
        };
        let Some(record) = record else {
            let create = LeaseStep::Write {
                version: None,
                transitions: 0,
                take: true,
            };
            // The holder has read at once, so it waits before it writes again.
            return next
                .filter(|_| self.held.is_some())
                .map_or(create, LeaseStep::Wait);
        };
        let version = Some(record.version.clone());
        if self.held.is_some() {
            if record.holder != self.settings.identity {
                return LeaseStep::Lost;
            }
            return next.map_or(
                LeaseStep::Write {
                    version,
                    transitions: record.transitions,
                    take: false,
                },
                LeaseStep::Wait,
            );
        }
        let expiry = since.after(record.duration);
        if record.holder.is_empty() || self.has_ended(&record.holder) || expiry <= now {
            return LeaseStep::Write {
                version,
                transitions: record.transitions.saturating_add(1),
                take: true,
            };
        }
        next.map_or(LeaseStep::Read, |next| LeaseStep::Wait(next.min(expiry)))
    }

    /// Records that a step's request is being sent.
    pub fn sent(&mut self, step: &LeaseStep, now: Moment) {
        self.last_request = Some(now);
        if let LeaseStep::Write { take: true, .. } = step {
            self.attempt = Some((now, self.free_from()));
        }
    }

    /// When no request of the last holder can still arrive. `None` if there was none, or if it released the lease, before which it stopped.
    fn free_from(&self) -> Option<Moment> {
        let (record, since) = self.seen.as_ref()?;
        let Some(record) = record else {
            return self.deleted_free_from;
        };
        if record.holder.is_empty() {
            return None;
        }
        if self.has_ended(&record.holder) {
            return Some(Moment::default().after(self.settings.request_timeout));
        }
        // By the holder's clock, its last request was over when the lease expired.
        let margin = record.duration / CLOCK_MARGIN;
        Some(since.after(record.duration).after(margin))
    }

    /// Whether a holder had ended before this process's clock started.
    fn has_ended(&self, holder: &str) -> bool {
        self.settings.ended.contains(holder)
    }

    /// Records an answer. `sent` is when its request was sent: a renewal counts from then.
    pub fn answered(&mut self, answer: LeaseAnswer, sent: Moment, now: Moment) {
        match answer {
            LeaseAnswer::Unclear => {
                // After a failed renewal, the holder reads at once: another process may have the lease.
                if self.held.is_some() && !self.must_read {
                    self.last_request = None;
                }
                self.must_read = true;
            }
            LeaseAnswer::Written(record) => {
                if self.held.is_none() {
                    let free = self.attempt.take().and_then(|(_, free)| free);
                    self.usable = Some(free.unwrap_or(now));
                }
                self.held = Some(sent);
                self.see(Some(record), now);
            }
            LeaseAnswer::Read(record) => {
                let is_ours = record
                    .as_ref()
                    .is_some_and(|record| record.holder == self.settings.identity);
                match (self.held, self.attempt) {
                    // Our attempt did arrive.
                    (None, Some((attempted, free))) if is_ours => {
                        self.held = Some(attempted);
                        self.usable = Some(free.unwrap_or(attempted));
                    }
                    _ => {}
                }
                self.see(record, now);
            }
        }
    }

    fn see(&mut self, record: Option<LeaseRecord>, now: Moment) {
        self.must_read = false;
        let unchanged = self.seen.as_ref().is_some_and(|(known, _)| *known == record);
        if !unchanged {
            if record.is_none() {
                self.deleted_free_from = self.free_from();
            }
            self.seen = Some((record, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(identity: &str) -> LeaseSettings {
        LeaseSettings {
            identity: identity.to_owned(),
            ended: BTreeSet::from(["ended".to_owned()]),
            duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
            request_timeout: Duration::from_secs(5),
        }
    }

    fn at(seconds: u64) -> Moment {
        Moment::new(Duration::from_secs(seconds))
    }

    fn record(holder: &str, version: &str) -> LeaseRecord {
        LeaseRecord {
            holder: holder.to_owned(),
            duration: Duration::from_secs(15),
            transitions: 3,
            version: version.to_owned(),
        }
    }

    /// A lease that `me` created at second 0.
    fn held() -> Lease {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(None), at(0), at(0));
        let step = lease.step(at(0));
        assert_eq!(
            step,
            LeaseStep::Write {
                version: None,
                transitions: 0,
                take: true
            }
        );
        lease.sent(&step, at(0));
        lease.answered(LeaseAnswer::Written(record("me", "1")), at(0), at(0));
        lease
    }

    fn usable_from(lease: &Lease) -> Option<Moment> {
        lease.term().map(|term| term.start)
    }

    #[test]
    fn a_lease_without_a_holder_is_usable_at_once() {
        assert_eq!(held().term(), Some(at(0)..at(10)));
    }

    #[test]
    fn a_foreign_lease_is_respected_until_it_stands_unchanged() {
        let mut lease = Lease::new(settings("me"));
        assert_eq!(lease.step(at(0)), LeaseStep::Read);
        for second in (0..20).step_by(2) {
            let step = lease.step(at(second));
            assert_eq!(step, LeaseStep::Read, "at {second}");
            lease.sent(&step, at(second));
            // Renewed once, at second 8.
            let version = if second < 8 { "1" } else { "2" };
            lease.answered(
                LeaseAnswer::Read(Some(record("other", version))),
                at(second),
                at(second),
            );
            assert_eq!(lease.step(at(second)), LeaseStep::Wait(at(second + 2)));
        }
        assert_eq!(
            lease.step(at(8 + 15)),
            LeaseStep::Write {
                version: Some("2".to_owned()),
                transitions: 4,
                take: true
            }
        );
    }

    #[test]
    fn an_expired_lease_is_taken_when_no_late_write_is_possible() {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(Some(record("other", "1"))), at(0), at(0));
        let step = lease.step(at(15));
        lease.sent(&step, at(15));
        lease.answered(LeaseAnswer::Written(record("me", "2")), at(15), at(16));
        let usable = at(16).after(Duration::from_millis(500));
        assert_eq!(lease.term(), Some(usable..at(25)), "a tenth later");
    }

    #[test]
    fn the_lease_of_an_ended_process_is_taken_at_once() {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(Some(record("ended", "1"))), at(1), at(1));
        let step = lease.step(at(1));
        assert_eq!(
            step,
            LeaseStep::Write {
                version: Some("1".to_owned()),
                transitions: 4,
                take: true
            }
        );
        lease.sent(&step, at(1));
        lease.answered(LeaseAnswer::Written(record("me", "2")), at(1), at(2));
        assert_eq!(
            usable_from(&lease),
            Some(at(5)),
            "a request timeout after its end"
        );
    }

    #[test]
    fn a_late_renewal_of_an_ended_process_does_not_block_its_lease() {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(Some(record("ended", "1"))), at(1), at(1));
        let step = lease.step(at(1));
        lease.sent(&step, at(1));
        lease.answered(LeaseAnswer::Unclear, at(1), at(1));
        assert_eq!(lease.step(at(3)), LeaseStep::Read);
        lease.answered(LeaseAnswer::Read(Some(record("ended", "2"))), at(3), at(3));
        let step = lease.step(at(3));
        assert!(matches!(step, LeaseStep::Write { take: true, .. }), "{step:?}");
        lease.sent(&step, at(3));
        lease.answered(LeaseAnswer::Written(record("me", "3")), at(3), at(3));
        assert_eq!(usable_from(&lease), Some(at(5)));
    }

    #[test]
    fn a_released_lease_is_taken_and_used_at_once() {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(Some(record("", "7"))), at(0), at(0));
        let step = lease.step(at(0));
        assert_eq!(
            step,
            LeaseStep::Write {
                version: Some("7".to_owned()),
                transitions: 4,
                take: true
            }
        );
        lease.sent(&step, at(0));
        lease.answered(LeaseAnswer::Written(record("me", "8")), at(0), at(1));
        assert_eq!(lease.term(), Some(at(1)..at(10)));
    }

    #[test]
    fn a_deleted_lease_is_used_when_its_holder_has_stopped() {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(Some(record("other", "1"))), at(0), at(0));
        // Read, a lost creation, read again, created.
        for second in [2, 4] {
            lease.answered(LeaseAnswer::Read(None), at(second), at(second));
            let step = lease.step(at(second));
            assert!(matches!(step, LeaseStep::Write { version: None, .. }), "{step:?}");
            lease.sent(&step, at(second));
            lease.answered(LeaseAnswer::Unclear, at(second), at(second));
        }
        lease.answered(LeaseAnswer::Read(Some(record("me", "2"))), at(5), at(5));
        let usable = at(16).after(Duration::from_millis(500));
        assert_eq!(usable_from(&lease), Some(usable));
    }

    #[test]
    fn a_released_lease_that_was_deleted_is_usable_at_once() {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(Some(record("", "1"))), at(0), at(0));
        lease.answered(LeaseAnswer::Read(None), at(0), at(0));
        let step = lease.step(at(1));
        lease.sent(&step, at(1));
        lease.answered(LeaseAnswer::Written(record("me", "2")), at(1), at(1));
        assert_eq!(lease.term(), Some(at(1)..at(11)));
    }

    #[test]
    fn the_first_read_is_repeated_after_the_retry_period() {
        let mut lease = Lease::new(settings("me"));
        assert_eq!(lease.step(at(0)), LeaseStep::Read);
        lease.sent(&LeaseStep::Read, at(0));
        lease.answered(LeaseAnswer::Unclear, at(0), at(0));
        assert_eq!(lease.step(at(0)), LeaseStep::Wait(at(2)));
        assert_eq!(lease.step(at(2)), LeaseStep::Read);
    }

    #[test]
    fn a_holder_reads_at_once_after_a_failed_renewal() {
        for found in [Some(record("me", "1")), None] {
            let mut lease = held();
            let step = lease.step(at(2));
            assert!(matches!(step, LeaseStep::Write { take: false, .. }), "{step:?}");
            lease.sent(&step, at(2));
            lease.answered(LeaseAnswer::Unclear, at(2), at(3));
            assert_eq!(lease.step(at(3)), LeaseStep::Read);
            lease.sent(&LeaseStep::Read, at(3));
            // A failed read is repeated later.
            lease.answered(LeaseAnswer::Unclear, at(3), at(3));
            assert_eq!(lease.step(at(3)), LeaseStep::Wait(at(5)));
            lease.answered(LeaseAnswer::Read(found), at(3), at(3));
            assert_eq!(lease.step(at(3)), LeaseStep::Wait(at(5)));
            let step = lease.step(at(5));
            assert!(matches!(step, LeaseStep::Write { .. }), "{step:?}");
        }
    }

    #[test]
    fn a_holder_that_cannot_renew_stops_before_the_lease_expires() {
        let mut lease = held();
        for second in (2..10).step_by(2) {
            let step = lease.step(at(second));
            assert!(
                matches!(step, LeaseStep::Write { take: false, .. } | LeaseStep::Read),
                "{step:?} at {second}"
            );
            lease.sent(&step, at(second));
            lease.answered(LeaseAnswer::Unclear, at(second), at(second));
        }
        assert_eq!(lease.term(), Some(at(0)..at(10)));
        assert_eq!(lease.step(at(10)), LeaseStep::Lost);
    }

    #[test]
    fn a_renewal_counts_from_when_it_was_sent() {
        let mut lease = held();
        lease.answered(LeaseAnswer::Written(record("me", "2")), at(4), at(9));
        assert_eq!(lease.term(), Some(at(0)..at(14)));
    }

    #[test]
    fn a_holder_that_sees_another_holder_stops_at_once() {
        let mut lease = held();
        lease.answered(LeaseAnswer::Read(Some(record("other", "5"))), at(1), at(1));
        assert_eq!(lease.step(at(1)), LeaseStep::Lost);
    }

    #[test]
    fn an_attempt_with_a_lost_answer_counts_from_its_sending() {
        let mut lease = Lease::new(settings("me"));
        lease.answered(LeaseAnswer::Read(None), at(0), at(0));
        let step = lease.step(at(0));
        lease.sent(&step, at(0));
        lease.answered(LeaseAnswer::Unclear, at(0), at(5));
        assert_eq!(lease.step(at(5)), LeaseStep::Read);
        lease.answered(LeaseAnswer::Read(Some(record("me", "1"))), at(5), at(5));
        assert_eq!(lease.term(), Some(at(0)..at(10)));
    }

    #[test]
    fn settings_under_which_two_could_write_at_once_are_refused() {
        assert_eq!(settings("me").check(), Ok(()));
        let wrong = LeaseSettings {
            renew_deadline: Duration::from_secs(11),
            ..settings("me")
        };
        assert!(matches!(wrong.check(), Err(LeaseSettingsError::TooShort { .. })));
        let wrong = LeaseSettings {
            retry_period: Duration::from_secs(10),
            ..settings("me")
        };
        assert!(matches!(wrong.check(), Err(LeaseSettingsError::NoRetry { .. })));
    }
}
