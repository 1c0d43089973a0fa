//! Limits on the work of a decision. A step is one device, candidate or holder that is examined.

use crate::core::allocation::fit::Unfit;

/// Maximum steps for one node: enough for 64 out of 1024 devices by 15 requests that all compete, and some ten milliseconds of work.
pub const NODE_WORK_MAX: usize = 1_000_000;
/// Maximum steps for all nodes and claims of one driver call: eight nodes of the hardest kind, or 128 nodes with some hundred devices each.
/// This is less than half a second of work, during which the searches of other pods wait.
pub const CALL_WORK_MAX: usize = 8_000_000;
/// Maximum steps of one call that run immediately: enough for 128 nodes with 8 devices each, and half a millisecond of work, because many
/// calls may follow each other before the thread does anything else.
pub const INSTANT_WORK_MAX: usize = 10_000;
/// Maximum steps of one call that run on the controller's thread in one piece: enough for 128 nodes with 64 devices each, and a few
/// milliseconds of work.
pub const QUICK_WORK_MAX: usize = 100_000;

/// A work limit, and the steps taken so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    limit: usize,
    done: usize,
}

impl Work {
    /// A limit of this many steps.
    pub fn new(limit: usize) -> Self {
        Self { limit, done: 0 }
    }

    /// Counts steps. Fails if they exceed the limit.
    pub fn spend(&mut self, steps: usize) -> Result<(), Unfit> {
        self.done = self.done.saturating_add(steps);
        if self.is_spent() {
            return Err(Unfit::TooMuchWork);
        }
        Ok(())
    }

    /// Whether the limit was exceeded.
    pub fn is_spent(&self) -> bool {
        self.done > self.limit
    }

    /// Number of steps taken.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Runs a part of the work with at most `limit` of the remaining steps.
    pub fn part<T>(&mut self, limit: usize, work: impl FnOnce(&mut Self) -> T) -> T {
        let mut part = Self::new(limit.min(self.limit.saturating_sub(self.done)));
        let result = work(&mut part);
        self.done = self.done.saturating_add(part.done);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_no_more_steps_than_are_left() {
        let mut work = Work::new(10);
        assert_eq!(work.part(8, |part| part.spend(8)), Ok(()));
        assert_eq!(work.part(8, |part| part.spend(3)), Err(Unfit::TooMuchWork));
        assert!(work.is_spent());
        assert_eq!(work.done(), 11);
    }
}
