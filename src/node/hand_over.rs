//! Hand-over to the next companion of the node, so that an update with `maxSurge` fails no call of kubelet. Structured mode only: earlier
//! kubelets keep one plugin of a driver.
//!
//! ```text
//! next companion                  this companion                          kubelet
//! waits for the lock              serves
//!                                 shuts down; offers the hand-over
//! registers; calls wait           serves                                  calls the companion that registered last
//! accepts                         serves calls that kubelet has begun
//!                                 ends and frees the lock
//! reads the state; answers
//! ```
//!
//! At each moment one companion has the node's state: the one with the lock.

use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tracing::{info, warn};

use crate::api::proto::node_records::HandOverResponse;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;

/// How long a companion that ends waits until the next one is registered. Kubelet looks for new sockets once a second, and kills the pod after
/// 30 s.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a companion serves after kubelet has registered the next one. Kubelet chooses the companion before it writes its checkpoint, and
/// calls it afterwards.
const LINGER: Duration = Duration::from_secs(1);
/// How long the other companion may take to accept the call. One that hangs must not keep the next one from being ready, since an update then
/// never ends it.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of the calls that are not accepted.
const RETRY: Duration = Duration::from_millis(500);

/// The side of the companion that has the node's state.
#[derive(Clone, Debug)]
pub(super) struct HandOver {
    ending: CancellationToken,
    cluster: watch::Receiver<ClusterFacts>,
    /// The permit of the next companion, while its call is open.
    next: Arc<Semaphore>,
}

impl HandOver {
    /// Offers the hand-over when `ending` is cancelled.
    pub(super) fn new(ending: CancellationToken, cluster: watch::Receiver<ClusterFacts>) -> Self {
        Self {
            ending,
            cluster,
            next: Arc::new(Semaphore::new(1)),
        }
    }

    /// The answer to the next companion: one item when this companion ends. Its drop accepts the offer. `None` if another companion waits
    /// already, or outside of structured mode.
    pub(super) fn offer(&self) -> Option<impl Stream<Item = ()> + Send + use<>> {
        if !self.cluster.borrow().serves(ClaimsApi::Structured) {
            return None;
        }
        let permit = Arc::clone(&self.next).try_acquire_owned().ok()?;
        let ending = self.ending.clone();
        let open = stream::once(async move {
            let _permit = permit;
            std::future::pending::<()>().await;
        });
        Some(stream::once(ending.cancelled_owned()).chain(open))
    }

    /// Waits until kubelet calls the next companion, if one has asked for the offer.
    pub(super) async fn complete(&self) {
        if let Ok(_permit) = self.next.try_acquire() {
            self.next.close();
            return;
        }
        info!("another companion takes over; serving until kubelet has registered it");
        if timeout(REGISTRATION_TIMEOUT, self.next.acquire()).await.is_ok() {
            sleep(LINGER).await;
        } else {
            warn!(
                reason = "HandOverTimeout",
                "the next companion is not registered with kubelet after {REGISTRATION_TIMEOUT:?}"
            );
        }
    }
}

/// Waits until the other companion offers the hand-over. The drop of the offer accepts it. `ask` calls the other companion, which answers when
/// it ends. `asked` is cancelled after the first call: the other companion then knows of this one, or hands over to none.
pub(super) async fn wait_for_offer<F>(
    ask: impl Fn() -> F,
    asked: &CancellationToken,
) -> Streaming<HandOverResponse>
where
    F: Future<Output = Option<Streaming<HandOverResponse>>>,
{
    loop {
        let call = timeout(CALL_TIMEOUT, ask()).await;
        asked.cancel();
        if let Ok(Some(mut offer)) = call
            && let Ok(Some(HandOverResponse {})) = offer.message().await
        {
            return offer;
        }
        sleep(RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::node::admin::{self, Companion};
    use crate::node::service::NodeService;

    fn hand_over(claims: ClaimsApi) -> HandOver {
        let facts = ClusterFacts {
            claims: Some(claims),
            ..ClusterFacts::default()
        };
        HandOver::new(CancellationToken::new(), watch::channel(facts).1)
    }

    #[tokio::test(start_paused = true)]
    async fn a_companion_without_a_successor_ends_at_once() {
        let begin = Instant::now();
        let structured = hand_over(ClaimsApi::Structured);
        drop(structured.offer().expect("an offer"));
        structured.complete().await;
        assert!(structured.offer().is_none(), "it has ended");
        let classic = hand_over(ClaimsApi::Classic);
        assert!(classic.offer().is_none());
        classic.complete().await;
        assert_eq!(begin.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_successor_that_never_registers_is_given_up() {
        let hand_over = hand_over(ClaimsApi::Structured);
        let _offer = hand_over.offer().expect("an offer");
        let begin = Instant::now();
        hand_over.complete().await;
        assert_eq!(begin.elapsed(), REGISTRATION_TIMEOUT);
    }

    #[tokio::test]
    async fn the_successor_learns_of_the_end_and_accepts() {
        let directory = tempfile::tempdir().unwrap();
        let socket = admin::socket(directory.path(), directory.path());
        let path = socket.path.clone();
        let asked = CancellationToken::new();
        let told = asked.clone();
        let successor = tokio::spawn(async move {
            wait_for_offer(|| Companion::ask_for_hand_over(path.clone()), &told).await
        });
        let hand_over = hand_over(ClaimsApi::Structured);
        let (node, _backend) = NodeService::new(None, Arc::default());
        let _served = admin::serve(socket, node, hand_over.clone(), CancellationToken::new())
            .await
            .unwrap();
        while hand_over.next.available_permits() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
        assert!(hand_over.offer().is_none(), "one successor at a time");
        asked.cancelled().await;
        assert!(!successor.is_finished());

        hand_over.ending.cancel();
        let offer = successor.await.unwrap();
        let complete = hand_over.complete();
        tokio::pin!(complete);
        let still = Duration::from_millis(100);
        assert!(timeout(still, &mut complete).await.is_err(), "not accepted yet");
        let accepted = Instant::now();
        drop(offer);
        complete.await;
        assert!((LINGER..REGISTRATION_TIMEOUT).contains(&accepted.elapsed()));
    }
}
