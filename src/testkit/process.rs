//! A simulated process that can be killed: its own runtime, whose tasks end at an await point.
//!
//! Completed effects of a killed process remain: API objects and files. Pending ones never happen.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use crate::testcluster::api::ApiServer;

/// Maximum time that a killed process waits for blocked threads; slower threads are abandoned.
const END: Duration = Duration::from_secs(5);

/// A fault at one step of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepFault {
    /// Index of the step among those of its sort.
    pub(super) step: usize,
    pub(super) sort: Sort,
    pub(super) kind: FaultKind,
    pub(super) when: When,
}

/// Sort of a step. Each sort is counted separately, so that the driver's call order does not depend on the timing of
/// concurrent requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// A driver call, such as `prepare(claim)`.
    Call,
    /// A request to the API server.
    Request,
}

impl Sort {
    fn of(step: &str) -> Self {
        if step.contains('(') {
            Self::Call
        } else {
            Self::Request
        }
    }
}

/// Returns all steps, each with its index among those of its sort.
pub(super) fn numbered(steps: &[String]) -> Vec<(Sort, usize, &String)> {
    let mut numbered: Vec<(Sort, usize, &String)> = Vec::new();
    for step in steps {
        let sort = Sort::of(step);
        let before = numbered.iter().filter(|(known, _, _)| *known == sort).count();
        numbered.push((sort, before, step));
    }
    numbered
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// Kills the process.
    Crash,
    /// The step exceeds its time limit.
    Slow,
    /// The step returns an error.
    Fail,
}

/// Whether the fault occurs before the step has any effect, or after it, when only the response is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Before,
    After,
}

impl StepFault {
    /// Describes the fault in words.
    pub(super) fn describe(self) -> String {
        let sort = match self.sort {
            Sort::Call => "call of the driver",
            Sort::Request => "request",
        };
        let step = format!("{sort} {}", self.step + 1);
        match (self.kind, self.when) {
            (FaultKind::Crash, When::Before) => format!("killed before {step}"),
            (FaultKind::Crash, When::After) => format!("killed after {step}"),
            (FaultKind::Slow, When::Before) => format!("{step} hangs before it does anything"),
            (FaultKind::Slow, When::After) => format!("{step} is done and its answer hangs"),
            (FaultKind::Fail, When::Before) => format!("{step} fails before it does anything"),
            (FaultKind::Fail, When::After) => format!("{step} is done and answers with an error"),
        }
    }
}

/// Steps of a process and its fault plan. Clones share state.
#[derive(Clone, Debug)]
pub(super) struct FaultPlan {
    steps: Arc<Mutex<Vec<String>>>,
    fault: Option<StepFault>,
    dead: CancellationToken,
}

impl FaultPlan {
    pub(super) fn new(fault: Option<StepFault>) -> Self {
        Self {
            steps: Arc::default(),
            fault,
            dead: CancellationToken::new(),
        }
    }

    /// Returns the steps so far.
    pub(super) fn steps(&self) -> Vec<String> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Kills the process: no step starts or ends afterwards.
    pub(super) fn kill(&self) {
        self.dead.cancel();
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.is_cancelled()
    }

    pub(super) async fn died(&self) {
        self.dead.cancelled().await;
    }

    /// Counts a synchronous step. Returns whether to execute it.
    pub(super) fn count(&self, what: String) -> bool {
        if self.is_dead() {
            return false;
        }
        let applies = self.push(what);
        match self
            .fault
            .filter(|fault| applies && fault.kind == FaultKind::Crash)
        {
            Some(fault) => {
                self.kill();
                fault.when == When::After
            }
            None => true,
        }
    }

    /// Records a step. Returns whether the fault applies to it.
    fn push(&self, what: String) -> bool {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let sort = Sort::of(&what);
        let before = steps.iter().filter(|step| Sort::of(step) == sort).count();
        steps.push(what);
        self.fault
            .is_some_and(|fault| fault.sort == sort && fault.step == before)
    }

    /// Executes a step or applies its fault. `fail` creates the error response.
    pub(super) async fn step<T>(
        &self,
        what: String,
        work: impl Future<Output = T>,
        fail: impl FnOnce() -> T,
    ) -> T {
        if self.is_dead() {
            return std::future::pending().await;
        }
        let applies = self.push(what);
        let fault = self.fault.filter(|_| applies);
        let injected = fault.map(|fault| (fault.kind, fault.when));
        match injected {
            Some((FaultKind::Crash, When::Before)) => {
                self.kill();
                return std::future::pending().await;
            }
            Some((FaultKind::Slow, When::Before)) => return std::future::pending().await,
            Some((FaultKind::Fail, When::Before)) => return fail(),
            _ => {}
        }
        let answer = work.await;
        match injected {
            Some((FaultKind::Crash, When::After)) => {
                self.kill();
                std::future::pending().await
            }
            Some((FaultKind::Slow, When::After)) => std::future::pending().await,
            Some((FaultKind::Fail, When::After)) => fail(),
            // Another step has killed the process in the meantime.
            _ if self.is_dead() => std::future::pending().await,
            _ => answer,
        }
    }
}

/// A simulated process of the kit.
#[derive(Debug)]
pub(super) struct Process {
    runtime: Option<Runtime>,
    pub(super) fault_plan: FaultPlan,
}

impl Process {
    pub(super) fn start(fault_plan: FaultPlan) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("conformance")
            .enable_all()
            .build()?;
        Ok(Self {
            runtime: Some(runtime),
            fault_plan,
        })
    }

    /// Runs a future within the process. An error is a panic or the end of the process.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, JoinError> {
        match &self.runtime {
            Some(runtime) => runtime.spawn(work).await,
            None => std::future::pending().await,
        }
    }

    /// Spawns a detached task within the process.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(work);
        }
    }

    /// Returns an API client whose writes are steps of this process. Event writes are not: nothing depends on them.
    pub(super) fn client(&self, server: &ApiServer) -> kube::Client {
        let (router, fault_plan) = (server.router(), self.fault_plan.clone());
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (router, fault_plan) = (router.clone(), fault_plan.clone());
            async move {
                let path = request.uri().path().to_owned();
                let reads = request.method() == Method::GET || path.ends_with("/events");
                let what = format!("{} {path}", request.method());
                // Infallible: a router always responds.
                let answer = async { router.oneshot(request.map(Body::new)).await };
                if reads {
                    return answer.await;
                }
                fault_plan
                    .step(what, answer, || {
                        let mut refused = Response::new(Body::from("the answer is lost"));
                        *refused.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                        Ok(refused)
                    })
                    .await
            }
        });
        let _guard = self.runtime.as_ref().map(Runtime::enter);
        kube::Client::new(service, "default")
    }

    /// Kills the process and returns when all its tasks have ended.
    pub(super) async fn kill(mut self) {
        self.fault_plan.kill();
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        let (ended, end) = oneshot::channel();
        // A task of another runtime cannot wait for a runtime's shutdown.
        std::thread::spawn(move || {
            runtime.shutdown_timeout(END);
            let _ = ended.send(());
        });
        let _ = end.await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.fault_plan.kill();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns the result of `work`, or `None` if it is still pending after `polls` waits; then drops it.
pub(super) async fn polled<T>(work: impl Future<Output = T> + Send, polls: usize) -> Option<T> {
    let mut work = pin!(work);
    let mut left = polls;
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(answer) => Poll::Ready(Some(answer)),
        Poll::Pending => {
            left = left.saturating_sub(1);
            if left == 0 {
                Poll::Ready(None)
            } else {
                Poll::Pending
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(sort: Sort, step: usize, kind: FaultKind, when: When) -> FaultPlan {
        FaultPlan::new(Some(StepFault {
            step,
            sort,
            kind,
            when,
        }))
    }

    #[tokio::test]
    async fn a_fault_after_a_step_keeps_it_and_before_it_prevents_it() {
        for (when, expected) in [(When::Before, 0), (When::After, 1)] {
            let fault_plan = fault(Sort::Request, 1, FaultKind::Fail, when);
            let done = Mutex::new(0);
            fault_plan
                .step("first".into(), async { Ok(()) }, || Err(()))
                .await
                .unwrap();
            let work = async {
                *done.lock().unwrap() += 1;
                Ok(())
            };
            assert_eq!(fault_plan.step("second".into(), work, || Err(())).await, Err(()));
            assert_eq!(*done.lock().unwrap(), expected);
        }
    }

    #[test]
    fn calls_and_requests_are_counted_apart() {
        let steps = ["PATCH /a", "prepare(a)", "PATCH /b", "unprepare(a)"].map(str::to_owned);
        let numbers: Vec<_> = numbered(&steps)
            .iter()
            .map(|(sort, number, _)| (*sort, *number))
            .collect();
        let (call, request) = (Sort::Call, Sort::Request);
        assert_eq!(numbers, [(request, 0), (call, 0), (request, 1), (call, 1)]);
        // The fault hits the same call in every order.
        for order in [[0, 1, 2, 3], [1, 3, 0, 2], [0, 2, 1, 3]] {
            let fault_plan = fault(call, 1, FaultKind::Crash, When::Before);
            let done = order.map(|index| fault_plan.count(steps[index].clone()));
            let killed = order.iter().position(|index| *index == 3);
            assert_eq!(done.iter().position(|done| !done), killed);
        }
    }

    #[tokio::test]
    async fn after_a_crash_no_step_is_done() {
        let fault_plan = fault(Sort::Request, 0, FaultKind::Crash, When::After);
        assert!(
            fault_plan.count("observe".into()),
            "it was done, and then it died"
        );
        assert!(fault_plan.is_dead());
        assert!(!fault_plan.count("observe".into()));
        let waiting = fault_plan.step("allocate".into(), async {}, || ());
        let waited = tokio::time::timeout(Duration::from_millis(20), waiting).await;
        assert!(waited.is_err());
        assert_eq!(fault_plan.steps(), ["observe"]);
    }

    #[tokio::test]
    async fn the_tasks_of_a_killed_process_end() {
        let process = Process::start(FaultPlan::new(None)).unwrap();
        let (held, end) = oneshot::channel::<()>();
        process.spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        process.kill().await;
        assert!(end.await.is_err());
    }
}
