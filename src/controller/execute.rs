//! Executes commands and returns their results as events. It makes no decisions.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kube::api::Api;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::TaskTracker;

use crate::api::resource::{Pod, ResourceClaim};
use crate::core::claims::{
    Answer, CallError, CallErrorKind, CallId, ClaimToAllocate, Command, DriverRequest, Event, ObjectKey,
    Outcome, Settings, Subject,
};
use crate::driver::{ClaimRequest, Deallocation, Driver, DriverError};

use super::calls::Calls;
use super::leader::Fence;
use super::prune::{Prune, trimmed};
use super::retry_after::Pause;
use super::{Controller, write};

/// Maximum number of concurrent requests to the API server.
const REQUESTS: usize = 64;

/// The message of an operation that was not started.
const ENDS: &str = "the controller ends";

pub(super) struct Executor<D> {
    shared: Arc<Shared<D>>,
    answers: mpsc::UnboundedSender<Event>,
    tasks: TaskTracker,
}

struct Shared<D> {
    driver: Arc<D>,
    client: kube::Client,
    settings: Settings,
    finalizer: String,
    call_timeout: Duration,
    request_timeout: Duration,
    requests: Semaphore,
    calls: Calls,
    fence: Fence,
    pause: Pause,
}

impl<D: Driver> Executor<D> {
    pub(super) fn new(
        controller: &Controller<D>,
        fence: Fence,
        pause: Pause,
        answers: mpsc::UnboundedSender<Event>,
    ) -> Self {
        let shared = Shared {
            driver: controller.driver.clone(),
            client: controller.client.clone(),
            settings: controller.settings.clone(),
            finalizer: controller.settings.finalizer(),
            call_timeout: controller.call_timeout,
            request_timeout: controller.request_timeout,
            requests: Semaphore::new(REQUESTS),
            calls: Calls::default(),
            fence,
            pause,
        };
        Self {
            shared: Arc::new(shared),
            answers,
            tasks: TaskTracker::new(),
        }
    }

    /// Starts to execute a command. Observations are passed to the driver at once, in order.
    pub(super) fn execute(&self, command: Command) {
        let shared = self.shared.clone();
        match command {
            Command::Observe(observation) => {
                let findings = shared.driver.observe(&observation);
                if !findings.is_empty() {
                    let _ = self.answers.send(Event::Found(findings));
                }
            }
            Command::AwaitDriver => {
                let answers = self.answers.clone();
                // Not tracked: a driver that never becomes ready must not delay the shutdown.
                tokio::spawn(async move {
                    shared.driver.ready().await;
                    let _ = answers.send(Event::DriverReady);
                });
            }
            Command::ReadPod { id, key } => {
                self.answer(id, async move { Answer::PodRead(shared.read_pod(&key).await) });
            }
            Command::ReadClaim { id, key } => {
                self.answer(
                    id,
                    async move { Answer::ClaimRead(shared.read_claim(&key).await) },
                );
            }
            Command::WriteClaim { id, key, uid, write } => self.answer(id, async move {
                let (finalizer, driver_name) = (&shared.finalizer, &shared.settings.driver_name);
                let write = write::claim(&shared.client, &key, &uid, finalizer, driver_name, &write);
                Answer::ClaimWritten(shared.write(write).await)
            }),
            Command::WriteContext {
                id,
                key,
                uid,
                entries,
            } => self.answer(id, async move {
                let write =
                    write::context(&shared.client, &key, &uid, &shared.settings.driver_name, &entries);
                Answer::ContextWritten(shared.write(write).await)
            }),
            Command::CallDriver { id, request } => self.answer_unless_closed(id, async move {
                let made = call(shared.clone(), request);
                shared.calls.make(&shared.fence, made).await
            }),
            // Reports have their own queue.
            Command::Report(_) => {}
        }
    }

    fn answer(&self, id: CallId, work: impl Future<Output = Answer> + Send + 'static) {
        self.answer_unless_closed(id, async move { Some(work.await) });
    }

    fn answer_unless_closed(&self, id: CallId, work: impl Future<Output = Option<Answer>> + Send + 'static) {
        let answers = self.answers.clone();
        self.tasks.spawn(async move {
            if let Some(answer) = work.await {
                tracing::trace!(?id, ?answer, "answered");
                let _ = answers.send(Event::Answer { id, answer });
            }
        });
    }

    /// Starts nothing new, and waits at most `limit` for pending operations. Returns whether all of them have finished.
    pub(super) async fn finish(self, limit: Duration) -> bool {
        self.shared.fence.close();
        self.tasks.close();
        let ended = tokio::time::timeout(limit, self.tasks.wait()).await.is_ok();
        if !ended {
            tracing::warn!(left = self.tasks.len(), "calls were left unanswered at the end");
        }
        ended
    }
}

impl<D: Driver> Shared<D> {
    async fn read_pod(&self, key: &ObjectKey) -> Result<Option<Arc<Pod>>, String> {
        let api = Api::<Pod>::namespaced(self.client.clone(), &key.namespace);
        self.read(api.get_opt(&key.name)).await
    }

    async fn read_claim(&self, key: &ObjectKey) -> Result<Option<Arc<ResourceClaim>>, String> {
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &key.namespace);
        self.read(api.get_opt(&key.name)).await
    }

    async fn read<T: Prune>(
        &self,
        request: impl Future<Output = Result<Option<T>, kube::Error>>,
    ) -> Result<Option<Arc<T>>, String> {
        let Some(_permit) = self.fence.unless_closed(self.requests.acquire()).await else {
            return Err(ENDS.to_owned());
        };
        let timeout = self.request_timeout;
        match tokio::time::timeout(timeout, request).await {
            Ok(Ok(object)) => Ok(object.map(trimmed)),
            Ok(Err(error)) => {
                tracing::warn!(%error, "read failed");
                Err(error.to_string())
            }
            Err(_) => Err(format!("no answer within {timeout:?}")),
        }
    }

    async fn write<T: Prune>(&self, request: impl Future<Output = Outcome<T>>) -> Outcome<Arc<T>> {
        match fenced(
            &self.requests,
            &self.pause,
            &self.fence,
            self.request_timeout,
            request,
        )
        .await
        {
            Outcome::Done(object) => Outcome::Done(trimmed(object)),
            Outcome::Refused(message) => {
                tracing::warn!(answer = message, "write refused");
                Outcome::Refused(message)
            }
            Outcome::Conflict(message) => {
                tracing::info!(answer = message, "write conflicts");
                Outcome::Conflict(message)
            }
            Outcome::Unknown(message) => {
                tracing::warn!(answer = message, "write without a clear answer");
                Outcome::Unknown(message)
            }
        }
    }

    /// Reads and checks the parameters of claims, and builds the requests for the driver.
    async fn requests(&self, claims: Vec<ClaimToAllocate>) -> Result<Vec<ClaimRequest<D>>, CallError> {
        let mut requests = Vec::with_capacity(claims.len());
        for ClaimToAllocate {
            pod_claim_name,
            claim,
            class,
        } in claims
        {
            let name = class.metadata.name.clone().unwrap_or_default();
            let class_parameters = self
                .driver
                .class_parameters(&class)
                .await
                .map_err(|error| call_error(error, Subject::Class(name)))?;
            let key = ObjectKey::of(&claim.metadata);
            let claim_parameters = self
                .driver
                .claim_parameters(&claim, &class, &class_parameters)
                .await
                .map_err(|error| call_error(error, Subject::Claim(key)))?;
            let class_parameters = Arc::new(class_parameters);
            requests.push(ClaimRequest {
                pod_claim_name,
                claim,
                class,
                class_parameters,
                claim_parameters,
            });
        }
        Ok(requests)
    }
}

/// Sends a write when its turn comes, if this process may then write. The fence is checked as late as possible: a write that has waited,
/// or a process that was paused, may have outlived the lease.
async fn fenced<T>(
    requests: &Semaphore,
    pause: &Pause,
    fence: &Fence,
    timeout: Duration,
    request: impl Future<Output = Outcome<T>>,
) -> Outcome<T> {
    let turn = async {
        let permit = requests.acquire().await;
        pause.over().await;
        permit
    };
    let Some(_permit) = fence.unless_closed(turn).await else {
        return Outcome::Unknown(ENDS.to_owned());
    };
    if !fence.holds() {
        return Outcome::Unknown("the lease is lost".to_owned());
    }
    match tokio::time::timeout(timeout, request).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::Unknown(format!("no answer within {timeout:?}")),
    }
}

/// Calls the driver with a time limit in a separate task, so that a panic or a hang affects only this call.
async fn call<D: Driver>(shared: Arc<Shared<D>>, request: DriverRequest) -> Answer {
    let timeout = shared.call_timeout;
    match request {
        DriverRequest::UnsuitableNodes { pod, claims, nodes } => Answer::Judged(
            limited(timeout, async move {
                let requests = shared.requests(claims).await?;
                shared
                    .driver
                    .unsuitable_nodes(&pod, &requests, &nodes)
                    .await
                    .map_err(|error| call_error(error, Subject::Call))
            })
            .await,
        ),
        DriverRequest::Allocate { claims, node } => Answer::Allocated(
            limited(timeout, async move {
                let keys: Vec<ObjectKey> = claims
                    .iter()
                    .map(|claim| ObjectKey::of(&claim.claim.metadata))
                    .collect();
                let requests = shared.requests(claims).await?;
                let results = shared
                    .driver
                    .allocate(&requests, node.as_deref())
                    .await
                    .map_err(|error| call_error(error, Subject::Call))?;
                let subjects = keys
                    .into_iter()
                    .map(Subject::Claim)
                    .chain(std::iter::repeat(Subject::Call));
                Ok(results
                    .into_iter()
                    .zip(subjects)
                    .map(|(result, subject)| result.map_err(|error| call_error(error, subject)))
                    .collect())
            })
            .await,
        ),
        DriverRequest::Deallocate { claim, allocation } => Answer::Deallocated(
            limited(timeout, async move {
                let key = ObjectKey::of(&claim.metadata);
                shared
                    .driver
                    .deallocate(Deallocation {
                        claim: &claim,
                        allocation: allocation.as_ref(),
                    })
                    .await
                    .map_err(|error| call_error(error, Subject::Claim(key)))
            })
            .await,
        ),
    }
}

async fn limited<T: Send + 'static>(
    timeout: Duration,
    call: impl Future<Output = Result<T, CallError>> + Send + 'static,
) -> Result<T, CallError> {
    let error = |kind, reason, message| CallError {
        kind,
        subject: Subject::Call,
        reason,
        message,
    };
    match tokio::spawn(tokio::time::timeout(timeout, call)).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => {
            let message = format!("the driver has not answered within {timeout:?}");
            Err(error(CallErrorKind::TimedOut, "DriverTimeout", message))
        }
        Err(failure) => {
            tracing::error!(%failure, "the driver panicked");
            Err(error(
                CallErrorKind::TimedOut,
                "DriverPanicked",
                "the driver panicked".to_owned(),
            ))
        }
    }
}

fn call_error(error: DriverError, subject: Subject) -> CallError {
    CallError {
        kind: error.kind.into(),
        subject,
        reason: error.reason,
        message: error.message,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_write_that_waits_longer_than_the_lease_is_never_sent() {
        let lease = Duration::from_secs(10);
        let (requests, fence, sent) = (Semaphore::new(1), Fence::held_for(lease), AtomicUsize::new(0));
        let pause = Pause::default();
        let write = |timeout: Duration| {
            let request = async {
                sent.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<Outcome<()>>().await
            };
            fenced(&requests, &pause, &fence, timeout, request)
        };
        // The first write takes the only permit and gets no answer; the second gets it while the lease is held, the third does not.
        let (first, second) = (lease / 4, lease);
        let outcomes = tokio::join!(write(first), write(second), write(lease));
        assert_eq!(sent.load(Ordering::Relaxed), 2);
        let unknown = |text: &str| Outcome::Unknown(text.to_owned());
        assert_eq!(outcomes.0, unknown("no answer within 2.5s"));
        assert_eq!(outcomes.1, unknown("no answer within 10s"));
        assert_eq!(outcomes.2, unknown("the lease is lost"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_waits_for_a_busy_server_longer_than_the_lease_is_never_sent() {
        let lease = Duration::from_secs(10);
        let (requests, fence, pause) = (Semaphore::new(1), Fence::held_for(lease), Pause::default());
        pause.begin(lease);
        let request = async { panic!("sent") };
        let outcome: Outcome<()> = fenced(&requests, &pause, &fence, lease * 2, request).await;
        assert_eq!(outcome, Outcome::Unknown("the lease is lost".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_when_the_controller_ends_is_never_sent() {
        let minute = Duration::from_secs(60);
        let (requests, fence, pause) = (Semaphore::new(1), Fence::held_for(minute), Pause::default());
        let under_way = async {
            tokio::time::sleep(minute / 60).await;
            Outcome::Done(())
        };
        // One write has the permit, one waits for it, and one waits for the end of a pause.
        let first = fenced(&requests, &pause, &fence, minute, under_way);
        let second = fenced(&requests, &pause, &fence, minute, async { panic!("sent") });
        let (free, busy) = (Semaphore::new(1), Pause::default());
        busy.begin(minute / 2);
        let third = fenced(&free, &busy, &fence, minute, async { panic!("sent") });
        let start = tokio::time::Instant::now();
        let (first, second, third, ()) = tokio::join!(first, second, third, async { fence.close() });
        assert_eq!(first, Outcome::Done(()));
        let unknown: Outcome<()> = Outcome::Unknown(ENDS.to_owned());
        assert_eq!((second, third), (unknown.clone(), unknown));
        assert_eq!(
            start.elapsed(),
            minute / 60,
            "nothing waits for its turn any more"
        );
        let calm = Pause::default();
        let late: Outcome<()> = fenced(&free, &calm, &fence, minute, async { panic!("sent") }).await;
        assert_eq!(late, Outcome::Unknown(ENDS.to_owned()));
    }
}
