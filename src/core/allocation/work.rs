//! How much work a decision may take. A step is a device, candidate or holder that is looked at.

use crate::core::allocation::fit::Unfit;

/// Steps for one node, at most: enough for 64 devices out of 1024 by 15 requests that all get in each other's way, and some ten
/// milliseconds of work.
pub const NODE_WORK_MAX: usize = 1_000_000;
/// Steps for all nodes and claims of one call of the driver, at most: eight nodes of the hardest kind, or 128 nodes with some
/// hundred devices each. It is less than half a second of work, during which other pods' searches wait.
pub const CALL_WORK_MAX: usize = 8_000_000;
/// Steps of one call that are taken at once, at most: enough for 128 nodes with 8 devices each, and half a millisecond of work, since
/// many calls may be made before the thread looks for anything else.
pub const INSTANT_WORK_MAX: usize = 10_000;
/// Steps of one call that are taken on the controller's thread in one piece, at most: enough for 128 nodes with 64 devices each,
/// and a few milliseconds of work.
pub const QUICK_WORK_MAX: usize = 100_000;

/// The steps that are left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    limit: usize,
    done: usize,
}

impl Work {
    /// So many steps.
    pub fn new(limit: usize) -> Self {
        Self { limit, done: 0 }
    }

    /// Counts steps, and refuses to go on if they are too many.
    pub fn spend(&mut self, steps: usize) -> Result<(), Unfit> {
        self.done = self.done.saturating_add(steps);
        if self.is_spent() {
            return Err(Unfit::TooMuchWork);
        }
        Ok(())
    }

    /// Whether more was asked for than there was.
    pub fn is_spent(&self) -> bool {
        self.done > self.limit
    }

    /// How many steps were taken.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Does a part of the work, which may take at most so many steps of what is left.
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
