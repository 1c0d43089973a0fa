//! Periodic resyncs, aligned so that an idle node wakes once per interval instead of once per watcher.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::time::Instant;

/// The interval. A resync finds changes that neither the kernel nor inotify reports: a mount over a directory, an overflowed queue.
pub(super) const EVERY: Duration = Duration::from_secs(60);

/// When this process first asked for a resync; all resyncs are aligned to it.
static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The next resync: within [`EVERY`], at the moment shared by all callers.
pub(super) fn next() -> Instant {
    let first = *FIRST;
    next_after(first, Instant::now())
}

fn next_after(first: Instant, now: Instant) -> Instant {
    now + until_next(now.duration_since(first))
}

/// Time until the next resync. Never zero, so that a caller in a loop always waits.
fn until_next(since_first: Duration) -> Duration {
    let since_last = since_first.as_nanos() % EVERY.as_nanos();
    EVERY.saturating_sub(Duration::from_nanos(
        u64::try_from(since_last).unwrap_or_default(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periodic_resyncs_share_their_wake_ups() {
        let nanosecond = Duration::from_nanos(1);
        for rounds in [0, 1, 1000, 60 * 24 * 365 * 100] {
            let last = EVERY * rounds;
            for since in [
                Duration::ZERO,
                nanosecond,
                Duration::from_millis(1),
                Duration::from_secs(31),
                EVERY.saturating_sub(nanosecond),
            ] {
                let pause = until_next(last + since);
                assert_eq!(
                    last + since + pause,
                    last + EVERY,
                    "{rounds} rounds and {since:?}"
                );
                assert!(!pause.is_zero() && pause <= EVERY, "{pause:?}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn resyncs_with_different_starts_align() {
        let began = Instant::now();
        let first = next_after(began, began);
        tokio::time::sleep(EVERY / 3).await;
        let second = next_after(began, Instant::now());
        assert_eq!(first, second);
        tokio::time::sleep_until(second).await;
        assert_eq!(next_after(began, Instant::now()), second + EVERY);
    }
}
