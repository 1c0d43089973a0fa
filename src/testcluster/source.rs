//! Time and randomness of the stage. Nothing else on it asks for either, so that a test can own both.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;

/// What the API server appends to a `generateName` (`k8s.io/apimachinery/pkg/util/rand`): no vowels, so no words.
const SUFFIX_LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// How much of it.
const SUFFIX_LENGTH: usize = 5;

/// Says what time it is.
pub type Clock = Box<dyn Fn() -> Timestamp + Send + Sync>;

/// Time, and random numbers that a seed decides.
pub struct Source {
    clock: Clock,
    state: Mutex<u64>,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

impl Source {
    /// The machine's clock, and numbers that differ from run to run.
    pub fn system() -> Self {
        Self::new(Box::new(Timestamp::now), RandomState::new().hash_one("stage"))
    }

    /// A clock of the caller's, and the numbers of a seed.
    pub fn new(clock: Clock, seed: u64) -> Self {
        Self {
            clock,
            state: Mutex::new(seed),
        }
    }

    /// The time now.
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// A number below `limit`; 0 if that is 0.
    pub fn below(&self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        self.next()
            .checked_rem(limit)
            .and_then(|number| usize::try_from(number).ok())
            .unwrap_or_default()
    }

    /// A uid in the form of a random UUID.
    pub fn uid(&self) -> String {
        let bytes = (u128::from(self.next()) << 64) | u128::from(self.next());
        uuid::Builder::from_random_bytes(bytes.to_be_bytes())
            .into_uuid()
            .to_string()
    }

    /// The end of a generated name.
    pub fn suffix(&self) -> String {
        (0..SUFFIX_LENGTH)
            .filter_map(|_| SUFFIX_LETTERS.get(self.below(SUFFIX_LETTERS.len())))
            .map(|letter| char::from(*letter))
            .collect()
    }

    /// SplitMix64: each seed has a sequence of its own, and no state is a bad one.
    fn next(&self) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = *state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seeded(seed: u64) -> Source {
        Source::new(Box::new(|| Timestamp::UNIX_EPOCH), seed)
    }

    #[test]
    fn one_seed_is_one_sequence() {
        let draw = |source: Source| (source.uid(), source.suffix(), source.below(1000));
        assert_eq!(draw(seeded(7)), draw(seeded(7)));
        assert_ne!(draw(seeded(7)), draw(seeded(8)));
    }

    #[test]
    fn a_uid_is_a_random_uuid() {
        let uid = uuid::Uuid::parse_str(&seeded(1).uid()).unwrap();
        assert_eq!(uid.get_version_num(), 4);
    }
}
