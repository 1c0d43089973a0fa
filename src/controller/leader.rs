//! The lease in the API: the runtime of [`crate::core::lease::Lease`].
//!
//! A lease lost after this process began to lead closes the fence, and `Controller::run` ends with [`ControllerError::LeaseLost`]. Only a
//! shutdown releases the lease, after all calls and writes have ended (`Executor::finish`); after any other end it expires.

use std::ops::Range;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease as LeaseObject, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::core::claims::Moment;
use crate::core::lease::{Lease, LeaseAnswer, LeaseRecord, LeaseSettings, LeaseStep};

use super::error::ControllerError;
use super::predecessors::{Predecessors, PredecessorsError};
use super::write::{Fence, instant_of, sleep_until};

/// Name and times of the lease. The defaults are those of the Kubernetes components.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeaderElection {
    /// The namespace of the Lease object.
    pub namespace: String,
    /// The name of the Lease: the driver's name. Leases of that name in other namespaces are reported as a second controller of the
    /// driver (`DriverNameShared`).
    pub name: String,
    /// How long other processes wait before they take over a lease that is not renewed.
    pub lease_duration: Duration,
    /// How long the leader continues without a renewal.
    pub renew_deadline: Duration,
    /// Time between two attempts.
    pub retry_period: Duration,
    /// Unique identity of this process.
    pub identity: String,
    /// Creates a client for the lease alone. Without it the lease is renewed with the controller's client, and a driver that blocks the
    /// controller's thread for longer than the renew deadline loses the lease.
    pub connection: Option<LeaseConnection>,
    /// Processes known to have ended: see [`LeaderElection::following`].
    pub predecessors: Option<Arc<Predecessors>>,
}

impl LeaderElection {
    /// Returns settings with the times of the Kubernetes components: duration 15 s, renew deadline 10 s, retry period 2 s.
    ///
    /// All controllers of one driver must name the same lease. `instance` is for people, for instance a pod's name; the start time
    /// makes the identity unique.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>, instance: &str) -> Self {
        let started = Timestamp::now().as_nanosecond();
        Self {
            namespace: namespace.into(),
            name: name.into(),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
            identity: format!("{instance}_{}_{started:x}", std::process::id()),
            connection: None,
            predecessors: None,
        }
    }

    /// Takes over the lease of earlier processes that used this directory as soon as their requests have ended, instead of when it
    /// expires. The directory must outlive the process, as an `emptyDir` does, and be on a local disk. A lock ensures that one
    /// process at a time uses it.
    pub fn following(mut self, directory: &Path) -> Result<Self, PredecessorsError> {
        let predecessors = Predecessors::follow(directory, &self.identity)?;
        self.predecessors = Some(Arc::new(predecessors));
        Ok(self)
    }

    pub(super) fn settings(&self, request_timeout: Duration) -> LeaseSettings {
        let predecessors = self.predecessors.as_deref();
        LeaseSettings {
            identity: self.identity.clone(),
            ended: predecessors
                .map(|known| known.ended().clone())
                .unwrap_or_default(),
            duration: self.lease_duration,
            renew_deadline: self.renew_deadline,
            retry_period: self.retry_period,
            request_timeout,
        }
    }
}

/// Creates a client for the lease alone, in the thread that renews it.
///
/// A [`kube::Client`] runs on the runtime in which it was created: with the controller's client, a driver that blocks the controller's
/// thread would delay the renewals too.
#[derive(Clone)]
pub struct LeaseConnection(Arc<dyn Fn() -> Result<kube::Client, String> + Send + Sync>);

impl LeaseConnection {
    /// `make` is called once, within a runtime.
    pub fn new<E: ToString>(make: impl Fn() -> Result<kube::Client, E> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move || make().map_err(|error| error.to_string())))
    }
}

impl fmt::Debug for LeaseConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseConnection").finish_non_exhaustive()
    }
}

/// Phase of an election.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ElectionPhase {
    /// Another process leads, or none yet.
    Waiting,
    /// This process leads.
    Leading,
    /// No client could be created for the lease.
    Failed(String),
}

/// A lease that is acquired and renewed in its own thread, so that blocking the controller's thread delays no renewal. The thread ends
/// when this is dropped.
pub(super) struct Election {
    fence: Fence,
    phase: watch::Receiver<ElectionPhase>,
    release: oneshot::Sender<()>,
}

impl Election {
    /// Starts to wait for the lease.
    pub(super) fn start(
        client: kube::Client,
        election: LeaderElection,
        settings: LeaseSettings,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (term, known_term) = watch::channel(None);
        let fence = Fence::new(Some(known_term), election.predecessors.clone());
        let (phases, phase) = watch::channel(ElectionPhase::Waiting);
        let (release, released) = oneshot::channel();
        let held = fence.clone();
        let thread = std::thread::Builder::new().name("lease".to_owned());
        thread.spawn(move || {
            runtime.block_on(hold(client, election, settings, term, held, phases, released));
        })?;
        Ok(Self {
            fence,
            phase,
            release,
        })
    }

    pub(super) fn fence(&self) -> Fence {
        self.fence.clone()
    }

    /// Returns when this process leads and may write.
    pub(super) async fn leads(&mut self) -> Result<(), ControllerError> {
        match self.reach(|phase| *phase != ElectionPhase::Waiting).await {
            Some(ElectionPhase::Leading) => Ok(()),
            Some(ElectionPhase::Failed(error)) => Err(ControllerError::LeaseConnection(error)),
            Some(ElectionPhase::Waiting) | None => Err(ControllerError::LeaseLost),
        }
    }

    pub(super) async fn lost(&mut self) {
        self.reach(|phase| *phase != ElectionPhase::Leading).await;
    }

    /// Releases the lease, so that the next leader need not wait for it to expire. Call it only with the fence closed and all calls and
    /// writes finished.
    pub(super) async fn release(mut self) {
        // `send` fails if the thread has ended; then there is nothing to release.
        let (unused, _) = oneshot::channel();
        if std::mem::replace(&mut self.release, unused).send(()).is_ok() {
            self.reach(|phase| *phase != ElectionPhase::Leading).await;
        }
    }

    /// Waits for a phase. `None` if the thread ends first: the lease is lost or released.
    async fn reach(&mut self, is_reached: impl FnMut(&ElectionPhase) -> bool) -> Option<ElectionPhase> {
        let reached = self.phase.wait_for(is_reached).await;
        reached.ok().map(|phase| phase.clone())
    }
}

/// The body of the thread.
async fn hold(
    client: kube::Client,
    election: LeaderElection,
    settings: LeaseSettings,
    term: watch::Sender<Option<Range<Moment>>>,
    fence: Fence,
    phases: watch::Sender<ElectionPhase>,
    released: oneshot::Receiver<()>,
) {
    let client = match election.connection.as_ref().map(|connection| (connection.0)()) {
        None => client,
        Some(Ok(client)) => client,
        Some(Err(error)) => {
            phases.send_replace(ElectionPhase::Failed(error));
            return;
        }
    };
    let mut leader = LeaderElector {
        api: Api::namespaced(client, &election.namespace),
        lease: Lease::new(settings),
        term,
        start: fence.start,
        acquired: None,
        election,
    };
    let mut released = pin!(released);
    tokio::select! {
        _ = &mut released => return,
        () = leader.lead() => {}
    }
    phases.send_replace(ElectionPhase::Leading);
    tokio::select! {
        asked = &mut released => {
            if asked.is_ok() {
                leader.release().await;
            }
        }
        () = leader.keep() => fence.close(),
    }
}

/// Acquires and renews the lease.
struct LeaderElector {
    api: Api<LeaseObject>,
    election: LeaderElection,
    lease: Lease,
    /// The term of `lease`, for the fence.
    term: watch::Sender<Option<Range<Moment>>>,
    start: Instant,
    acquired: Option<Timestamp>,
}

impl LeaderElector {
    /// Returns when this process leads and may write.
    async fn lead(&mut self) {
        tracing::info!(lease = %self.shown(), identity = self.election.identity, "waiting to lead");
        loop {
            let now = self.now();
            let usable = self.lease.term().map(|term| term.start);
            if usable.is_some_and(|usable| usable <= now) {
                tracing::info!(lease = %self.shown(), "leading");
                return;
            }
            // A lease that was lost before its first use costs nothing: start over.
            if !self.turn(usable).await {
                self.lease = Lease::new(self.lease.settings().clone());
                self.term.send_replace(self.lease.term());
            }
        }
    }

    /// Renews the lease; returns only when it is lost.
    async fn keep(&mut self) {
        while self.turn(None).await {}
        tracing::error!(lease = %self.shown(), "the lease is lost");
    }

    /// Releases the lease, so that the next leader need not wait for it to expire.
    async fn release(&mut self) {
        let Some(record) = self.lease.own_record().cloned() else {
            return;
        };
        let record = self.object(Some(record.version), record.transitions, "");
        let parameters = PostParams::default();
        let request = self.api.replace(&self.election.name, &parameters, &record);
        match tokio::time::timeout(self.request_timeout(), request).await {
            Ok(Ok(_)) => tracing::info!(lease = %self.shown(), "released"),
            Ok(Err(error)) => tracing::warn!(%error, "the lease could not be released"),
            Err(_) => tracing::warn!("the lease could not be released in time"),
        }
    }

    /// Performs one step, waiting no longer than until `limit`. Returns `false` if the lease is lost.
    async fn turn(&mut self, limit: Option<Moment>) -> bool {
        let sent = self.now();
        let step = self.lease.step(sent);
        let answer = match &step {
            LeaseStep::Lost => return false,
            LeaseStep::Wait(until) => {
                let until = limit.map_or(*until, |limit| limit.min(*until));
                sleep_until(instant_of(self.start, until)).await;
                return true;
            }
            LeaseStep::Read => {
                self.lease.sent(&step, sent);
                self.read().await
            }
            LeaseStep::Write {
                version,
                transitions,
                take,
            } => {
                self.lease.sent(&step, sent);
                self.write(version.clone(), *transitions, *take).await
            }
        };
        let now = self.now();
        self.lease.answered(answer, sent, now);
        self.term.send_replace(self.lease.term());
        true
    }

    async fn read(&self) -> LeaseAnswer {
        match tokio::time::timeout(self.request_timeout(), self.api.get_opt(&self.election.name)).await {
            Ok(Ok(object)) => LeaseAnswer::Read(object.as_ref().map(record)),
            Ok(Err(error)) => {
                tracing::warn!(lease = %self.shown(), %error, "the lease cannot be read");
                LeaseAnswer::Unclear
            }
            Err(_) => LeaseAnswer::Unclear,
        }
    }

    async fn write(&mut self, version: Option<String>, transitions: i32, take: bool) -> LeaseAnswer {
        if take {
            self.acquired = Some(Timestamp::now());
        }
        let create = version.is_none();
        let identity = self.election.identity.clone();
        let object = self.object(version, transitions, &identity);
        let parameters = PostParams::default();
        let request = async {
            if create {
                self.api.create(&parameters, &object).await
            } else {
                self.api.replace(&self.election.name, &parameters, &object).await
            }
        };
        match tokio::time::timeout(self.request_timeout(), request).await {
            Ok(Ok(object)) => LeaseAnswer::Written(record(&object)),
            Ok(Err(error)) => {
                tracing::warn!(lease = %self.shown(), %error, "the lease cannot be written");
                LeaseAnswer::Unclear
            }
            Err(_) => LeaseAnswer::Unclear,
        }
    }

    fn object(&self, version: Option<String>, transitions: i32, holder: &str) -> LeaseObject {
        let seconds = self.election.lease_duration.as_nanos().div_ceil(1_000_000_000);
        let seconds = i32::try_from(seconds).unwrap_or(i32::MAX);
        LeaseObject {
            metadata: ObjectMeta {
                name: Some(self.election.name.clone()),
                namespace: Some(self.election.namespace.clone()),
                resource_version: version,
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                lease_duration_seconds: Some(seconds),
                acquire_time: self.acquired.map(MicroTime),
                renew_time: Some(MicroTime(Timestamp::now())),
                lease_transitions: Some(transitions),
                ..LeaseSpec::default()
            }),
        }
    }

    fn request_timeout(&self) -> Duration {
        self.lease.settings().request_timeout
    }

    fn now(&self) -> Moment {
        Moment::new(self.start.elapsed())
    }

    fn shown(&self) -> String {
        format!("{}/{}", self.election.namespace, self.election.name)
    }
}

fn record(object: &LeaseObject) -> LeaseRecord {
    let spec = object.spec.clone().unwrap_or_default();
    let seconds = spec
        .lease_duration_seconds
        .and_then(|seconds| u64::try_from(seconds).ok())
        .unwrap_or_default();
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        duration: Duration::from_secs(seconds),
        transitions: spec.lease_transitions.unwrap_or_default(),
        version: object.metadata.resource_version.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Mutex, mpsc};

    use http::{Method, Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// A generous limit for operations that take milliseconds.
    const TIMEOUT: Duration = Duration::from_secs(20);

    /// An API server with one lease. It reports each spec that it has stored.
    fn server(stored: mpsc::Sender<Value>, lease: Option<Value>) -> kube::Client {
        let lease = Arc::new(Mutex::new(lease));
        let version = Arc::new(Mutex::new(0));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (lease, version, stored) = (lease.clone(), version.clone(), stored.clone());
            async move {
                let write = request.method() != Method::GET;
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut lease = lease.lock().unwrap();
                if write {
                    let mut object: Value = serde_json::from_slice(&body).unwrap();
                    *version.lock().unwrap() += 1;
                    object["metadata"]["resourceVersion"] = json!(version.lock().unwrap().to_string());
                    let _ = stored.send(object["spec"].clone());
                    *lease = Some(object);
                }
                let missing =
                    json!({ "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404 });
                let (code, answer) = lease.clone().map_or((404, missing), |lease| (200, lease));
                let answer = Response::builder()
                    .status(code)
                    .body(Body::from(answer.to_string().into_bytes()));
                Ok::<_, Infallible>(answer.unwrap())
            }
        });
        kube::Client::new(service, "default")
    }

    /// An election for this lease, and the specs that it stores.
    fn election(lease: Option<Value>) -> (Election, mpsc::Receiver<Value>) {
        let (stored, specs) = mpsc::channel();
        let election = LeaderElection {
            lease_duration: Duration::from_millis(7500),
            renew_deadline: Duration::from_secs(5),
            retry_period: Duration::from_millis(20),
            connection: Some(LeaseConnection::new(move || {
                Ok::<_, String>(server(stored.clone(), lease.clone()))
            })),
            ..LeaderElection::new("default", "d.example", "test")
        };
        let unused = kube::Client::new(
            tower::service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) }),
            "default",
        );
        let settings = election.settings(Duration::from_secs(1));
        (Election::start(unused, election, settings).unwrap(), specs)
    }

    fn is_released(spec: &Value) -> bool {
        spec["holderIdentity"] == ""
    }

    #[tokio::test]
    async fn a_blocked_runtime_keeps_its_lease() {
        let (mut election, specs) = election(None);
        election.leads().await.unwrap();
        let fence = election.fence();
        // This thread is the whole runtime, and blocks for longer than the renew deadline.
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_secs(6) {
            specs.recv_timeout(TIMEOUT).unwrap();
        }
        assert!(fence.holds());
        election.release().await;
        assert!(specs.try_iter().last().is_some_and(|last| is_released(&last)));
        assert!(specs.recv_timeout(TIMEOUT).is_err(), "nothing renews it any more");
    }

    #[tokio::test]
    async fn an_election_that_is_dropped_releases_nothing() {
        let (mut election, specs) = election(None);
        election.leads().await.unwrap();
        drop(election);
        // The iterator ends with the thread, which owns the server.
        let all: Vec<Value> = specs.iter().collect();
        assert!(!all.is_empty() && !all.iter().any(is_released), "{all:?}");
    }

    #[tokio::test]
    async fn a_release_keeps_transitions_and_a_whole_duration() {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": { "name": "d.example", "namespace": "default", "resourceVersion": "0" },
            "spec": { "holderIdentity": "", "leaseTransitions": 3 },
        });
        let (mut election, specs) = election(Some(lease));
        election.leads().await.unwrap();
        election.release().await;
        let last = specs.iter().last().unwrap();
        assert!(is_released(&last), "{last}");
        assert_eq!(last["leaseTransitions"], 4);
        assert_eq!(last["leaseDurationSeconds"], 8, "at least 7.5 s");
    }
}
