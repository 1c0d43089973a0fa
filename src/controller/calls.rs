//! Limits concurrent driver calls.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::leader::Fence;

/// Maximum number of calls younger than [`PATIENCE`].
const CALLS: usize = 64;
/// Age after which a call no longer counts, so that hanging calls leave room for others. With the usual time limit of a call (30 s)
/// at most 64 times 31 calls are pending, and the next call waits at most one second for each 64 that hang.
const PATIENCE: Duration = Duration::from_secs(1);

/// The calls of the driver, started in the order in which they were requested.
#[derive(Debug)]
pub(super) struct Calls(Semaphore);

impl Default for Calls {
    fn default() -> Self {
        Self(Semaphore::new(CALLS))
    }
}

impl Calls {
    /// Makes a call as soon as there is room; returns `None` if the fence is closed first.
    pub(super) async fn make<T>(&self, fence: &Fence, call: impl Future<Output = T>) -> Option<T> {
        // `acquire` fails only on a closed semaphore, and this one is never closed.
        let permit = fence.unless_closed(self.0.acquire()).await?;
        let mut call = pin!(call);
        tokio::select! {
            biased;
            answer = &mut call => return Some(answer),
            () = tokio::time::sleep(PATIENCE) => {}
        }
        drop(permit);
        Some(call.await)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Starts `number` calls of duration `time`, and counts the started ones.
    fn begin(calls: &Arc<Calls>, number: usize, time: Duration, begun: &Arc<AtomicUsize>) {
        for _ in 0..number {
            let (calls, begun) = (Arc::clone(calls), Arc::clone(begun));
            tokio::spawn(async move {
                let call = async {
                    begun.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(time).await;
                };
                calls.make(&Fence::open(), call).await;
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_takes_its_time_makes_room_for_the_next_and_a_burst_waits() {
        let (calls, hanging, quick) = (Arc::new(Calls::default()), Arc::default(), Arc::default());
        let after = |millis| tokio::time::sleep(Duration::from_millis(millis));
        begin(&calls, 3 * CALLS, Duration::from_secs(3600), &hanging);
        begin(&calls, 1, Duration::from_millis(1), &quick);
        let begun = || (hanging.load(Ordering::Relaxed), quick.load(Ordering::Relaxed));
        after(900).await;
        assert_eq!(begun(), (CALLS, 0), "no more than these at once");
        after(1000).await;
        assert_eq!(begun(), (2 * CALLS, 0));
        after(1000).await;
        assert_eq!(begun(), (3 * CALLS, 0));
        after(1000).await;
        assert_eq!(begun(), (3 * CALLS, 1), "although all before it still hang");
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_are_answered_follow_each_other_at_once() {
        let (calls, begun) = (Arc::new(Calls::default()), Arc::default());
        begin(&calls, 10 * CALLS, Duration::from_millis(1), &begun);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(begun.load(Ordering::Relaxed), 10 * CALLS);
    }
}
