//! The only source of time and randomness in the test cluster, so that a test can control both.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;

/// Alphabet of `generateName` suffixes (`k8s.io/apimachinery/pkg/util/rand`): without vowels, to avoid words.
const SUFFIX_LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Length of the suffix.
const SUFFIX_LENGTH: usize = 5;

/// Returns the current time.
pub type Clock = Box<dyn Fn() -> Timestamp + Send + Sync>;

/// Clock and seeded random numbers.
pub struct ClockAndRng {
    clock: Clock,
    state: Mutex<u64>,
}

impl fmt::Debug for ClockAndRng {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClockAndRng").finish_non_exhaustive()
    }
}

impl ClockAndRng {
    /// Uses the system clock and a random seed.
    pub fn system() -> Self {
        Self::new(
            Box::new(Timestamp::now),
            RandomState::new().hash_one("testcluster"),
        )
    }

    /// Uses the given clock and seed.
    pub fn new(clock: Clock, seed: u64) -> Self {
        Self {
            clock,
            state: Mutex::new(seed),
        }
    }

    /// Returns the current time.
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Returns a number below `limit`, or 0 if `limit` is 0.
    pub fn below(&self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        self.next()
            .checked_rem(limit)
            .and_then(|number| usize::try_from(number).ok())
            .unwrap_or_default()
    }

    /// Returns a uid in the format of a random UUID.
    pub fn uid(&self) -> String {
        let bytes = (u128::from(self.next()) << 64) | u128::from(self.next());
        uuid::Builder::from_random_bytes(bytes.to_be_bytes())
            .into_uuid()
            .to_string()
    }

    /// Returns the suffix of a generated name.
    pub fn suffix(&self) -> String {
        (0..SUFFIX_LENGTH)
            .filter_map(|_| SUFFIX_LETTERS.get(self.below(SUFFIX_LETTERS.len())))
            .map(|letter| char::from(*letter))
            .collect()
    }

    /// SplitMix64: every seed is valid and has its own sequence.
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

    fn seeded(seed: u64) -> ClockAndRng {
        ClockAndRng::new(Box::new(|| Timestamp::UNIX_EPOCH), seed)
    }

    #[test]
    fn one_seed_is_one_sequence() {
        let draw = |source: ClockAndRng| (source.uid(), source.suffix(), source.below(1000));
        assert_eq!(draw(seeded(7)), draw(seeded(7)));
        assert_ne!(draw(seeded(7)), draw(seeded(8)));
    }

    #[test]
    fn a_uid_is_a_random_uuid() {
        let uid = uuid::Uuid::parse_str(&seeded(1).uid()).unwrap();
        assert_eq!(uid.get_version_num(), 4);
    }
}
