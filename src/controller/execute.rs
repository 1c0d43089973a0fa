//! Serves: applies events, executes commands, and returns their results as events. It makes no decisions.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::FutureExt as _;
use kube::api::Api;
use tokio::sync::{Semaphore, mpsc, watch as watch_value};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::api::resource::{Pod, ResourceClaim};
use crate::core::claims::{
    Answer, CallError, CallErrorKind, CallErrorSubject, CallId, ClaimToAllocate, ClaimWrite, Command,
    ControllerState, DriverRequest, Event, LATE_ALLOCATION, MESSAGE_MAX, Moment, ObjectKey, Outcome,
};
use crate::core::names::truncated;
use crate::driver::keyed_locks::KeyedLocks;
use crate::driver::{ClaimRequest, Deallocation, Driver, DriverError, Observation};

use super::error::ControllerError;
use super::events::EventWriter;
use super::watch::{self, Kept, Prune, Standby, Watched, trimmed};
use super::write::{self, ENDS, Fence, MAX_REQUESTS, Pause, fenced, instant_of, sleep_until, turn};
use super::{Controller, Options};

/// Maximum number of calls younger than [`CALL_SLOT_TIME`].
const MAX_CALLS: usize = 64;
/// Age after which a call no longer counts, so that hanging calls leave room for others. With the usual time limit of 30 s, at most
/// 64 × 31 calls are pending. Namespaces take turns: a call waits for the earlier calls of its namespace and for one call of each other
/// namespace per turn, at most one second for each 64.
const CALL_SLOT_TIME: Duration = Duration::from_secs(1);
/// First delay before `Driver::ready` is called again after an error; it doubles up to [`MAX_READY_RETRY_INTERVAL`].
const READY_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// The longest delay: a driver serves at most this long after its fault has ended.
const MAX_READY_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Minimum time limit of an observation: exceeding it ends the controller.
const MIN_OBSERVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Observations that may wait for the driver: about 64 MiB, since each keeps its version of a claim, some 4 KiB. A driver that cannot keep
/// up would fill the memory. A restart is the cure: it passes all claims in one observation.
const MAX_OBSERVATIONS: usize = 16_384;

pub(super) struct Executor<D> {
    shared: Arc<ExecutorInner<D>>,
    observations: Observations,
    events: EventWriter,
    answers: mpsc::UnboundedSender<Event>,
    tasks: TaskTracker,
}

struct ExecutorInner<D> {
    client: kube::Client,
    options: Arc<Options<D>>,
    requests: Semaphore,
    calls: CallSlots,
    fence: Fence,
    pause: Pause,
    /// When the last allocation write of each claim was given up without a clear answer.
    unclear_allocations: Mutex<BTreeMap<String, Instant>>,
}

impl<D: Driver> Controller<D> {
    /// Serves until `shutdown` is cancelled or the driver fails, starting from a new list of all claims; claims seen before are not
    /// trusted. Returns whether no call and no write can have an effect any more.
    pub(super) async fn serve(
        &self,
        standby: Standby,
        fence: &Fence,
        pause: Pause,
        shutdown: &CancellationToken,
    ) -> Result<bool, ControllerError> {
        let (mut watches, seen) = standby.begin();
        watches.push(watch::claims(&self.client));
        let options = &self.options;
        let mut capacity_changes = pin!(options.driver.capacity_changes());
        let mut findings = pin!(options.driver.findings());
        let (answers, mut answered) = mpsc::unbounded_channel();
        let mut executor = Executor::new(self, fence.clone(), pause, answers);
        let mut state = ControllerState::new(options.settings.clone());
        let start = Instant::now();
        let now = || Moment::new(start.elapsed());
        for event in seen {
            state.apply(event, now());
        }
        let failure = loop {
            let next = state.next_deadline();
            let deadline = next.and_then(|moment| instant_of(start, moment));
            let event = tokio::select! {
                () = shutdown.cancelled() => break None,
                error = executor.failed() => break Some(error),
                Some(event) = watches.next() => Some(event),
                Some(event) = answered.recv() => Some(event),
                Some(change) = capacity_changes.next() => Some(Event::Capacity(change)),
                Some(finding) = findings.next() => Some(Event::Found(vec![finding])),
                () = sleep_until(deadline) => None,
            };
            if let Some(event) = event {
                state.apply(event, now());
            }
            // Apply all pending events before deciding.
            while let Ok(event) = answered.try_recv() {
                state.apply(event, now());
            }
            while let Some(Some(event)) = watches.next().now_or_never() {
                state.apply(event, now());
            }
            for command in state.decide(now()) {
                tracing::trace!(?command, "decided");
                executor.execute(command);
            }
            // Without a receiver, as in most vendors' tests, the statistics are not collected.
            if options.metrics.receiver_count() > 0 {
                let statistics = state.statistics();
                options.metrics.send_modify(|metrics| {
                    metrics.since = start;
                    metrics.statistics = statistics;
                });
            }
        };
        let is_settled = executor.finish(options.request_timeout).await;
        failure.map_or(Ok(is_settled), Err)
    }
}

impl<D: Driver> Executor<D> {
    pub(super) fn new(
        controller: &Controller<D>,
        fence: Fence,
        pause: Pause,
        answers: mpsc::UnboundedSender<Event>,
    ) -> Self {
        let Controller { client, options } = controller;
        let shared = ExecutorInner {
            client: client.clone(),
            options: options.clone(),
            requests: Semaphore::new(MAX_REQUESTS),
            calls: CallSlots::default(),
            fence,
            pause,
            unclear_allocations: Mutex::default(),
        };
        let tasks = TaskTracker::new();
        let observations = Observations::start(
            options.driver.clone(),
            options.call_timeout,
            answers.clone(),
            &tasks,
        );
        let events = EventWriter::start(
            client.clone(),
            shared.pause.clone(),
            &options.settings.driver_name,
            options.instance.clone(),
            options.request_timeout,
            answers.clone(),
        );
        Self {
            shared: Arc::new(shared),
            observations,
            events,
            answers,
            tasks,
        }
    }

    /// Waits until the driver fails to process an observation.
    pub(super) async fn failed(&mut self) -> ControllerError {
        self.observations.failed().await
    }

    /// Starts to execute a command. A driver call waits for the observations before it.
    pub(super) fn execute(&mut self, command: Command) {
        let shared = self.shared.clone();
        match command {
            Command::Observe(observation) => self.observations.push(observation),
            Command::AwaitDriver => {
                let (answers, observed) = (self.answers.clone(), self.observations.processed());
                // Not tracked: a driver that never becomes ready must not delay the shutdown.
                tokio::spawn(async move {
                    let until_ready = async {
                        observed.await;
                        ready(&shared).await;
                    };
                    if shared.fence.unless_closed(until_ready).await.is_some() {
                        let _ = answers.send(Event::DriverReady);
                    }
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
                Answer::ClaimWritten(shared.write_claim(&key, &uid, &write).await)
            }),
            Command::WriteContext {
                id,
                key,
                uid,
                entries,
            } => self.answer(id, async move {
                let (client, pause, fence) = (&shared.client, &shared.pause, &shared.fence);
                let driver_name = &shared.options.settings.driver_name;
                let write = write::context(client, pause, fence, &key, &uid, driver_name, &entries);
                Answer::ContextWritten(shared.write(write).await)
            }),
            Command::CallDriver { id, request } => {
                let observed = self.observations.processed();
                self.answer_unless_closed(id, async move {
                    let namespace = request.namespace().to_owned();
                    let made = call(shared.clone(), observed, request);
                    shared.calls.run(&namespace, &shared.fence, made).await
                });
            }
            Command::Report(report) => self.events.send(report),
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

    /// Starts nothing new, and waits at most `limit` for pending operations, and then as long for reports. Returns whether all operations
    /// have finished, and no allocation without an answer can still be stored: the next leader would not know of it.
    pub(super) async fn finish(self, limit: Duration) -> bool {
        let Self {
            shared,
            observations,
            events,
            tasks,
            ..
        } = self;
        shared.fence.close();
        drop(observations);
        tasks.close();
        let ended = tokio::time::timeout(limit, tasks.wait()).await.is_ok();
        if !ended {
            tracing::warn!(left = tasks.len(), "the controller stops with unanswered calls");
        }
        let is_settled = ended && !shared.has_late_allocation();
        events.finish(limit).await;
        is_settled
    }
}

impl<D: Driver> ExecutorInner<D> {
    /// Waits for the observations before a call. They are never processed if the driver has failed; the call is then not made.
    async fn processed(&self, observed: impl Future<Output = ()>) -> Result<(), CallError> {
        let processed = self.fence.unless_closed(observed).await;
        processed.ok_or_else(|| CallError {
            kind: CallErrorKind::TimedOut,
            subject: CallErrorSubject::Call,
            reason: "DriverTimeout",
            message: ENDS.to_owned(),
        })
    }

    async fn read_pod(&self, key: &ObjectKey) -> Result<Option<Arc<Pod>>, String> {
        let api = Api::<Kept<Pod>>::namespaced(self.client.clone(), &key.namespace);
        self.read(api.get_opt(&key.name)).await
    }

    async fn read_claim(&self, key: &ObjectKey) -> Result<Option<Arc<ResourceClaim>>, String> {
        let api = Api::<Kept<ResourceClaim>>::namespaced(self.client.clone(), &key.namespace);
        self.read(api.get_opt(&key.name)).await
    }

    async fn read<K: Watched>(
        &self,
        request: impl Future<Output = Result<Option<Kept<K>>, kube::Error>>,
    ) -> Result<Option<Arc<K>>, String> {
        let Some(_permit) = turn(&self.requests, &self.pause, &self.fence).await else {
            return Err(ENDS.to_owned());
        };
        let timeout = self.options.request_timeout;
        match tokio::time::timeout(timeout, request).await {
            Ok(Ok(object)) => Ok(object.map(|object| object.0)),
            Ok(Err(error)) => {
                tracing::warn!(%error, "read failed");
                Err(error.to_string())
            }
            Err(_) => Err(format!("no answer within {timeout:?}")),
        }
    }

    async fn write_claim(
        &self,
        key: &ObjectKey,
        uid: &str,
        write: &ClaimWrite,
    ) -> Outcome<Arc<ResourceClaim>> {
        let driver_name = &self.options.settings.driver_name;
        let mut is_sent = false;
        let request = async {
            is_sent = true;
            write::claim(&self.client, key, uid, driver_name, write).await
        };
        let outcome = self.write(request).await;
        if matches!(write, ClaimWrite::Allocate { .. }) {
            let mut unclear = self.unclear_allocations();
            match outcome {
                // An earlier write that is stored late tests that the claim is not allocated.
                Outcome::Done(_) => drop(unclear.remove(uid)),
                Outcome::Unknown(_) if is_sent => drop(unclear.insert(uid.to_owned(), Instant::now())),
                _ => {}
            }
            unclear.retain(|_, at| at.elapsed() < LATE_ALLOCATION);
        }
        outcome
    }

    fn unclear_allocations(&self) -> MutexGuard<'_, BTreeMap<String, Instant>> {
        self.unclear_allocations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an allocation without a clear answer may still be stored.
    fn has_late_allocation(&self) -> bool {
        let unclear = self.unclear_allocations();
        unclear.values().any(|at| at.elapsed() < LATE_ALLOCATION)
    }

    async fn write<T: Prune>(&self, request: impl Future<Output = Outcome<T>>) -> Outcome<Arc<T>> {
        match fenced(
            &self.requests,
            &self.pause,
            &self.fence,
            self.options.request_timeout,
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
            Outcome::Busy(message) => {
                tracing::warn!(answer = message, "write rejected by a busy server");
                Outcome::Busy(message)
            }
            Outcome::Unknown(message) => {
                tracing::warn!(answer = message, "write without a clear answer");
                Outcome::Unknown(message)
            }
        }
    }

    /// Reads and checks the parameters of claims, and builds the requests for the driver.
    async fn requests(&self, claims: Vec<ClaimToAllocate>) -> Result<Vec<ClaimRequest<D>>, CallError> {
        let driver = &self.options.driver;
        let mut requests = Vec::with_capacity(claims.len());
        for ClaimToAllocate {
            pod_claim_name,
            claim,
            class,
        } in claims
        {
            let name = class.metadata.name.clone().unwrap_or_default();
            let class_parameters = driver
                .class_parameters(&class)
                .await
                .map_err(|error| call_error(error, CallErrorSubject::Class(name)))?;
            let key = ObjectKey::of(&claim.metadata);
            let claim_parameters = driver
                .claim_parameters(&claim, &class, &class_parameters)
                .await
                .map_err(|error| call_error(error, CallErrorSubject::Claim(key)))?;
            let request = ClaimRequest::new(claim, class, class_parameters, claim_parameters);
            requests.push(request.pod_claim_name(pod_claim_name));
        }
        Ok(requests)
    }
}

/// Waits until the driver is ready.
async fn ready<D: Driver>(shared: &Arc<ExecutorInner<D>>) {
    let mut delay = READY_RETRY_INTERVAL;
    loop {
        let driver = shared.options.driver.clone();
        // In a separate task, so that a panic is an error like others.
        let answer = AbortOnDropHandle::new(tokio::spawn(async move { driver.ready().await })).await;
        let answer =
            answer.unwrap_or_else(|_| Err(DriverError::retry("DriverPanicked", "the driver panicked")));
        let not_ready = answer.err();
        if let Some(error) = &not_ready {
            let source = std::error::Error::source(error).map(tracing::field::display);
            tracing::warn!(reason = error.reason, %error, source, "the driver is not ready");
        }
        let is_ready = not_ready.is_none();
        shared
            .options
            .metrics
            .send_modify(|metrics| metrics.not_ready = not_ready);
        if is_ready {
            return;
        }
        tokio::time::sleep(delay).await;
        delay = delay.saturating_mul(2).min(MAX_READY_RETRY_INTERVAL);
    }
}

/// Calls the driver with a time limit in a separate task, so that a panic or a hang affects only this call.
async fn call<D: Driver>(
    shared: Arc<ExecutorInner<D>>,
    observed: impl Future<Output = ()> + Send + 'static,
    request: DriverRequest,
) -> Answer {
    let (timeout, driver) = (shared.options.call_timeout, shared.options.driver.clone());
    match request {
        DriverRequest::UnsuitableNodes { pod, claims, nodes } => Answer::Evaluated(
            limited(timeout, async move {
                shared.processed(observed).await?;
                let requests = shared.requests(claims).await?;
                let answer = driver.unsuitable_nodes(&pod, &requests, &nodes).await;
                answer.map_err(|error| request_error(error, &requests))
            })
            .await,
        ),
        DriverRequest::Allocate { claims, node } => Answer::Allocated(
            limited(timeout, async move {
                shared.processed(observed).await?;
                let requests = shared.requests(claims).await?;
                let answer = driver.allocate(&requests, node.as_deref()).await;
                answer.map_err(|error| request_error(error, &requests))
            })
            .await,
        ),
        DriverRequest::Deallocate { claim, allocation } => Answer::Deallocated(
            limited(timeout, async move {
                shared.processed(observed).await?;
                let deallocation = Deallocation::new(&claim).allocation(allocation.as_ref());
                let answer = driver.deallocate(deallocation).await;
                answer.map_err(|error| {
                    call_error(error, CallErrorSubject::Claim(ObjectKey::of(&claim.metadata)))
                })
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
        subject: CallErrorSubject::Call,
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

/// An error of a call for several claims. Its subject is the claim that the driver names.
fn request_error<D: Driver>(error: DriverError, requests: &[ClaimRequest<D>]) -> CallError {
    let at_fault = |request: &&ClaimRequest<D>| error.claim.as_deref() == Some(request.uid());
    let at_fault = requests.iter().find(at_fault);
    let subject = at_fault.map_or(CallErrorSubject::Call, |request| {
        CallErrorSubject::Claim(ObjectKey::of(&request.claim.metadata))
    });
    call_error(error, subject)
}

fn call_error(mut error: DriverError, subject: CallErrorSubject) -> CallError {
    error.message = truncated(error.message, MESSAGE_MAX);
    if let Some(source) = std::error::Error::source(&error) {
        tracing::warn!(reason = error.reason, %error, %source, "a call of the driver failed");
    }
    CallError {
        kind: error.kind.into(),
        subject,
        reason: error.reason,
        message: error.message,
    }
}

/// The calls of the driver. Those of a namespace start in the order in which they were requested, and namespaces take turns.
#[derive(Debug)]
pub(super) struct CallSlots {
    slots: Semaphore,
    /// Per namespace, the lock for which its calls queue. Its holder alone waits for a slot, so the number of calls of a namespace does not
    /// matter to others.
    namespaces: KeyedLocks<String>,
}

impl Default for CallSlots {
    fn default() -> Self {
        Self {
            slots: Semaphore::new(MAX_CALLS),
            namespaces: KeyedLocks::default(),
        }
    }
}

impl CallSlots {
    /// Makes a call as soon as there is room; returns `None` if the fence is closed first.
    pub(super) async fn run<T>(
        &self,
        namespace: &str,
        fence: &Fence,
        call: impl Future<Output = T>,
    ) -> Option<T> {
        let slot = async {
            let _next = self.namespaces.lock(namespace.to_owned()).await;
            // Fails only on a closed semaphore, and this one is never closed.
            self.slots.acquire().await
        };
        let permit = fence.unless_closed(slot).await?;
        let mut call = pin!(call);
        tokio::select! {
            biased;
            answer = &mut call => return Some(answer),
            () = tokio::time::sleep(CALL_SLOT_TIME) => {}
        }
        drop(permit);
        Some(call.await)
    }
}

/// The observations that the driver has yet to process. A task of their own passes them on in order, so that a slow driver cannot block the
/// deciding task. A driver that exceeds the time limit or [`MAX_OBSERVATIONS`] ends the controller.
pub(super) struct Observations {
    queue: mpsc::UnboundedSender<Observation>,
    queued: u64,
    processed: watch_value::Receiver<u64>,
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
        let limit = call_timeout.max(MIN_OBSERVE_TIMEOUT);
        let (queue, mut observations) = mpsc::unbounded_channel();
        let (done, processed) = watch_value::channel(0);
        let task = tasks.spawn(async move {
            while let Some(observation) = observations.recv().await {
                if observations.len() > MAX_OBSERVATIONS {
                    let message =
                        format!("it is too slow: more than {MAX_OBSERVATIONS} observations wait for it");
                    return Err(ControllerError::Observe(message));
                }
                let found = tokio::time::timeout(limit, driver.observe(&observation)).await;
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
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;
    use crate::api::resource::{AllocationResult, ResourceClass};
    use crate::driver::{Finding, Result, UnsuitableNodes};

    /// Starts `number` calls of duration `time` for a namespace, and counts the started ones.
    fn begin(
        calls: &Arc<CallSlots>,
        namespace: &'static str,
        number: usize,
        time: Duration,
        begun: &Arc<AtomicUsize>,
    ) {
        for _ in 0..number {
            let (calls, begun) = (Arc::clone(calls), Arc::clone(begun));
            tokio::spawn(async move {
                let call = async {
                    begun.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(time).await;
                };
                calls.run(namespace, &Fence::new(None, None), call).await;
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_call_frees_its_slot_and_a_burst_waits() {
        let (calls, hanging, quick) = (Arc::new(CallSlots::default()), Arc::default(), Arc::default());
        let after = |millis| tokio::time::sleep(Duration::from_millis(millis));
        begin(&calls, "n", 3 * MAX_CALLS, Duration::from_secs(3600), &hanging);
        begin(&calls, "n", 1, Duration::from_millis(1), &quick);
        let begun = || (hanging.load(Ordering::Relaxed), quick.load(Ordering::Relaxed));
        after(900).await;
        assert_eq!(begun(), (MAX_CALLS, 0), "no more than these at once");
        after(1000).await;
        assert_eq!(begun(), (2 * MAX_CALLS, 0));
        after(1000).await;
        assert_eq!(begun(), (3 * MAX_CALLS, 0));
        after(1000).await;
        assert_eq!(begun(), (3 * MAX_CALLS, 1), "although all before it still hang");
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_are_answered_follow_each_other_at_once() {
        let (calls, begun) = (Arc::new(CallSlots::default()), Arc::default());
        begin(&calls, "n", 10 * MAX_CALLS, Duration::from_millis(1), &begun);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(begun.load(Ordering::Relaxed), 10 * MAX_CALLS);
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_calls_of_a_namespace_delay_no_other_namespace() {
        let (calls, crowd, small) = (Arc::new(CallSlots::default()), Arc::default(), Arc::default());
        begin(&calls, "crowd", 20 * MAX_CALLS, CALL_SLOT_TIME * 25, &crowd);
        begin(&calls, "small", 1, Duration::from_millis(1), &small);
        tokio::time::sleep(CALL_SLOT_TIME * 3 / 2).await;
        assert_eq!(small.load(Ordering::Relaxed), 1);
        tokio::time::sleep(CALL_SLOT_TIME * 20).await;
        assert_eq!(crowd.load(Ordering::Relaxed), 20 * MAX_CALLS);
    }

    const LIMIT: Duration = MIN_OBSERVE_TIMEOUT;

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
        assert!(tokio::time::timeout(LIMIT / 2, &mut both).await.is_err());
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
        assert!(
            tokio::time::timeout(LIMIT, observations.processed())
                .await
                .is_err()
        );
    }

    /// Sends a write that the API server does not answer, and ends after some more time. Returns whether the lease may be released.
    async fn ends_settled(write: ClaimWrite, is_closed: bool, time: Duration) -> bool {
        let silent = tower::service_fn(|_: Request<Body>| async {
            std::future::pending::<()>().await;
            Ok::<_, Infallible>(Response::new(Body::empty()))
        });
        let driver = Gated(Semaphore::new(0), Mutex::default());
        let controller = Controller::builder(driver)
            .build(kube::Client::new(silent, "default"))
            .unwrap();
        let (answers, mut answered) = mpsc::unbounded_channel();
        let mut executor = Executor::new(&controller, Fence::new(None, None), Pause::default(), answers);
        if is_closed {
            executor.shared.fence.close();
        }
        executor.execute(Command::WriteClaim {
            id: CallId(1),
            key: ObjectKey::new("default", "claim"),
            uid: "1".to_owned(),
            write,
        });
        let answer = answered.recv().await;
        assert!(matches!(answer, Some(Event::Answer { .. })), "{answer:?}");
        tokio::time::sleep(time).await;
        executor.finish(LIMIT).await
    }

    #[tokio::test(start_paused = true)]
    async fn an_allocation_without_an_answer_keeps_the_lease() {
        let allocate = ClaimWrite::Allocate {
            allocation: AllocationResult::default(),
            reserved_for: None,
            version: None,
        };
        assert!(!ends_settled(allocate.clone(), false, LATE_ALLOCATION / 2).await);
        assert!(ends_settled(allocate.clone(), false, LATE_ALLOCATION).await);
        let is_never_sent = true;
        assert!(ends_settled(allocate, is_never_sent, Duration::ZERO).await);
        let other = ClaimWrite::RemoveFinalizer { version: None };
        assert!(ends_settled(other, false, Duration::ZERO).await);
    }

    #[tokio::test(start_paused = true)]
    async fn no_task_outlives_a_failed_driver() {
        // Every list is empty, and every watch is silent.
        let empty = |request: Request<Body>| {
            let is_watch = request
                .uri()
                .query()
                .is_some_and(|query| query.contains("watch="));
            async move {
                if is_watch {
                    std::future::pending::<()>().await;
                }
                let list =
                    r#"{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":"1"},"items":[]}"#;
                Ok::<_, Infallible>(Response::new(Body::from(list.as_bytes().to_vec())))
            }
        };
        let driver = Gated(Semaphore::new(0), Mutex::default());
        let controller = Controller::builder(driver)
            .build(kube::Client::new(tower::service_fn(empty), "default"))
            .unwrap();
        let (standby, fence) = (Standby::new(&controller.client), Fence::new(None, None));
        let shutdown = CancellationToken::new();
        let ended = controller
            .serve(standby, &fence, Pause::default(), &shutdown)
            .await;
        assert!(matches!(ended, Err(ControllerError::Observe(_))), "{ended:?}");
        assert!(!fence.holds());
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(Arc::strong_count(&controller.options), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_falls_too_far_behind_is_a_failure() {
        for (waiting, fails) in [(MAX_OBSERVATIONS, false), (MAX_OBSERVATIONS + 1, true)] {
            let (_driver, mut observations, _findings) = start();
            // One is with the driver.
            for _ in 0..=waiting {
                observations.push(gone("a"));
            }
            let failed = tokio::time::timeout(LIMIT / 2, observations.failed()).await;
            let message = failed.map(|error| error.to_string());
            assert_eq!(
                message.is_ok_and(|message| message.contains("more than 16384")),
                fails
            );
        }
    }
}
