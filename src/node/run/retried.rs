//! Serves one kubelet API for the companion's lifetime, independent of failures of the others.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::node::kubelet::{KubeletApiError, KubeletApiState};

/// First and longest delay before a retry. A directory that is mounted or recreated is thus used within a minute.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Serves an API until `end`, and retries with increasing delay after a failure. Reports its state; each error is logged once.
pub(super) async fn serve_again<F>(
    api: &str,
    report: impl Fn(KubeletApiState),
    end: &CancellationToken,
    mut serve: impl FnMut(watch::Sender<KubeletApiState>) -> F,
) where
    F: Future<Output = Result<(), KubeletApiError>>,
{
    let mut pause = RETRY.0;
    let mut logged = None;
    loop {
        // A separate channel per attempt, so that no follower of an attempt's state outlives it.
        let (sender, mut seen) = watch::channel(KubeletApiState::Starting);
        let served = serve(sender);
        tokio::pin!(served);
        let ended = loop {
            tokio::select! {
                ended = &mut served => break ended,
                Ok(()) = seen.changed() => {
                    let now = seen.borrow_and_update().clone();
                    if !matches!(now, KubeletApiState::Starting | KubeletApiState::Closed) {
                        (pause, logged) = (RETRY.0, None);
                        report(now);
                    }
                }
            }
        };
        let Err(failure) = ended else { break };
        let message = failure.to_string();
        if logged.as_ref() != Some(&message) {
            error!(
                api,
                reason = failure.reason(),
                "this kubelet API cannot be served and is retried; the others continue: {message}"
            );
        }
        logged = Some(message.clone());
        report(KubeletApiState::Failed { message });
        tokio::select! {
            () = end.cancelled() => break,
            () = sleep(pause) => pause = RETRY.1.min(pause * 2),
        }
    }
    report(KubeletApiState::Closed);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::Instant;

    use super::*;

    fn failure() -> KubeletApiError {
        KubeletApiError::NoSuchResource {
            resource_name: "a.dev/x".into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_that_fails_is_tried_again_with_growing_pauses() {
        let state = watch::Sender::new(KubeletApiState::Starting);
        let end = CancellationToken::new();
        let attempts = Cell::new(0_u32);
        let start = Instant::now();
        let report = |now| drop(state.send_replace(now));
        let served = serve_again("x", report, &end, |sender| {
            attempts.set(attempts.get() + 1);
            let (attempt, end) = (attempts.get(), end.clone());
            async move {
                if attempt < 9 {
                    return Err(failure());
                }
                sender.send_replace(KubeletApiState::Waiting);
                end.cancelled().await;
                Ok(())
            }
        });
        let mut seen = state.subscribe();
        let watched = async {
            let failed = |state: &KubeletApiState| matches!(state, KubeletApiState::Failed { message } if message.contains("a.dev/x"));
            seen.wait_for(failed).await.unwrap();
            seen.wait_for(|state| *state == KubeletApiState::Waiting)
                .await
                .unwrap();
            // 1, 2, 4, 8, 16, 32 and twice 60 s.
            assert_eq!(start.elapsed().as_secs(), 183);
            end.cancel();
        };
        tokio::join!(served, watched);
        assert_eq!(*state.borrow(), KubeletApiState::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_does_not_wait_for_the_next_attempt() {
        let end = CancellationToken::new();
        end.cancel();
        let start = Instant::now();
        serve_again("x", drop, &end, |_| async { Err(failure()) }).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
