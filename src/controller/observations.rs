//! Passes observations to the driver in order, in a task of their own, so that a slow driver cannot block the deciding task.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::core::claims::Event;
use crate::driver::{Driver, Observation};

use super::ControllerError;

/// Minimum time limit of an observation: exceeding it ends the controller.
const MIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Observations that may wait for the driver: about 64 MiB, since each keeps its version of a claim, some 4 KiB. A driver that cannot keep
/// up would fill the memory. A restart is the cure: it passes all claims in one observation.
const MAX_BACKLOG: usize = 16_384;

/// The observations that the driver has yet to process. A driver that exceeds the time limit or [`MAX_BACKLOG`] ends the controller.
pub(super) struct Observations {
    queue: mpsc::UnboundedSender<Observation>,
    queued: u64,
    processed: watch::Receiver<u64>,
    task: JoinHandle<Result<(), ControllerError>>,
}

impl Observations {
    /// Starts the task. It ends when `self` is dropped and the queue is empty. The driver's findings are sent to `findings`.
    pub(super) fn start<D: Driver>(
        driver: Arc<D>,
        call_timeout: Duration,
        findings: mpsc::UnboundedSender<Event>,
        tasks: &TaskTracker,
    ) -> Self {
        let limit = call_timeout.max(MIN_TIMEOUT);
        let (queue, mut observations) = mpsc::unbounded_channel();
        let (done, processed) = watch::channel(0);
        let task = tasks.spawn(async move {
            while let Some(observation) = observations.recv().await {
                if observations.len() > MAX_BACKLOG {
                    let message = format!("it is too slow: more than {MAX_BACKLOG} observations wait for it");
                    return Err(ControllerError::Observe(message));
                }
                let found = timeout(limit, driver.observe(&observation)).await;
                let found = found.map_err(|_| {
                    ControllerError::Observe(format!("it has not processed an observation within {limit:?}"))
                })?;
                if !found.is_empty() {
                    let _ = findings.send(Event::Found(found));
                }
                done.send_modify(|number| *number += 1);
            }
            Ok(())
        });
        Self {
            queue,
            queued: 0,
            processed,
            task,
        }
    }

    pub(super) fn push(&mut self, observation: Observation) {
        self.queued += 1;
        // Fails only if the task has ended, which `failed` reports.
        let _ = self.queue.send(observation);
    }

    /// Returns a future that waits until the driver has processed all observations so far. It never returns if the task has failed.
    pub(super) fn processed(&self) -> impl Future<Output = ()> + Send + 'static {
        let (mut processed, queued) = (self.processed.clone(), self.queued);
        async move {
            if processed.wait_for(|number| *number >= queued).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until the driver fails to process an observation. Its state is then unknown.
    pub(super) async fn failed(&mut self) -> ControllerError {
        match (&mut self.task).await {
            Ok(Err(error)) => error,
            Err(panic) => ControllerError::Observe(format!("it panicked: {panic}")),
            // The queue is open as long as `self` exists.
            Ok(Ok(())) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::sync::Semaphore;

    use super::*;
    use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
    use crate::driver::{ClaimRequest, Deallocation, Finding, Result, UnsuitableNodes};

    const LIMIT: Duration = MIN_TIMEOUT;

    /// Processes an observation when it gets a permit.
    struct Gated(Semaphore, Mutex<Vec<Observation>>);

    impl Driver for Gated {
        type ClassParameters = ();
        type ClaimParameters = ();

        fn name(&self) -> &'static str {
            "gated.example.com"
        }

        async fn class_parameters(&self, _: &ResourceClass) -> Result<()> {
            Ok(())
        }

        async fn claim_parameters(&self, _: &ResourceClaim, _: &ResourceClass, (): &()) -> Result<()> {
            Ok(())
        }

        async fn unsuitable_nodes(
            &self,
            _: &Pod,
            _: &[ClaimRequest<Self>],
            _: &[String],
        ) -> Result<Vec<UnsuitableNodes>> {
            Ok(Vec::new())
        }

        async fn allocate(&self, _: &[ClaimRequest<Self>], _: Option<&str>) -> Result<Vec<AllocationResult>> {
            Ok(Vec::new())
        }

        async fn deallocate(&self, _: Deallocation<'_>) -> Result<()> {
            Ok(())
        }

        async fn observe(&self, observation: &Observation) -> Vec<Finding> {
            self.0.acquire().await.unwrap().forget();
            assert_ne!(*observation, gone("panic"));
            self.1.lock().unwrap().push(observation.clone());
            vec![Finding::new(&ResourceClaim::default(), "Found", "")]
        }
    }

    fn gone(uid: &str) -> Observation {
        Observation::Gone { uid: uid.to_owned() }
    }

    fn start() -> (Arc<Gated>, Observations, mpsc::UnboundedReceiver<Event>) {
        let driver = Arc::new(Gated(Semaphore::new(0), Mutex::default()));
        let (sender, findings) = mpsc::unbounded_channel();
        let observations = Observations::start(driver.clone(), LIMIT, sender, &TaskTracker::new());
        (driver, observations, findings)
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_waits_for_the_observations_before_it() {
        let (driver, mut observations, mut findings) = start();
        observations.processed().await;
        observations.push(gone("a"));
        observations.push(gone("b"));
        let both = observations.processed();
        observations.push(gone("c"));
        driver.0.add_permits(1);
        let mut both = std::pin::pin!(both);
        assert!(timeout(LIMIT / 2, &mut both).await.is_err());
        driver.0.add_permits(1);
        both.await;
        assert_eq!(*driver.1.lock().unwrap(), [gone("a"), gone("b")]);
        assert!(matches!(findings.recv().await, Some(Event::Found(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_or_a_panic_is_a_failure() {
        let (_driver, mut observations, _findings) = start();
        observations.push(gone("a"));
        let message = observations.failed().await.to_string();
        assert!(message.contains("within 30s"), "{message}");

        let (driver, mut observations, _findings) = start();
        driver.0.add_permits(1);
        observations.push(gone("panic"));
        let message = observations.failed().await.to_string();
        assert!(message.contains("it panicked"), "{message}");
        assert!(timeout(LIMIT, observations.processed()).await.is_err());
    }
    #[tokio::test(start_paused = true)]
    async fn a_driver_that_falls_too_far_behind_is_a_failure() {
        for (waiting, fails) in [(MAX_BACKLOG, false), (MAX_BACKLOG + 1, true)] {
            let (_driver, mut observations, _findings) = start();
            // One is with the driver.
            for _ in 0..=waiting {
                observations.push(gone("a"));
            }
            let failed = timeout(LIMIT / 2, observations.failed()).await;
            let message = failed.map(|error| error.to_string());
            assert_eq!(
                message.is_ok_and(|message| message.contains("more than 16384")),
                fails
            );
        }
    }
}
