//! The interface of the node's state to kubelet's endpoints, the admin socket and the orphan check.
//!
//! An endpoint decodes its API version and calls [`NodeService`]; it keeps no state and makes no decisions. Requests are queued for the
//! task that owns the state. If the caller goes away at kubelet's deadline, the work continues, and a repeated call finds it done.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until};

use crate::api::proto::node_records::Holding;
use crate::core::names::{ClaimUid, device_of_plugin_id};
use crate::core::prepare::container_edits::ContainerEdits;
pub use crate::core::prepare::device_plugin::Preference;
use crate::core::prepare::device_plugin::{ExtendedResource, Order, preferred};
pub use crate::core::prepare::inventory::PluginDevice;
use crate::core::prepare::orphans::{ApiView, Question};
use crate::core::prepare::plan::Refusal;
pub use crate::core::prepare::plan::{Allocation, ClaimToPrepare, ClaimToUnprepare, DeviceResult};
use crate::core::prepare::recovery::ReleaseRefusal;
use crate::core::prepare::runtime_containers::RuntimeContainers;
use crate::node::container_runtime::ContainerRuntime;
use crate::node::driver::NodeDriverError;
use crate::node::kubelet::transport::GrpcCalls;
use crate::node::metrics::Metrics;
use crate::node::state::storage::StoreError;

/// Maximum number of queued requests; further callers wait for a slot.
const QUEUE: usize = 64;
/// Timeout for one driver call. Kubelet gives up after 45 s and retries.
pub(in crate::node) const DRIVER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long Prepare waits before it asks the container runtime again, which does not report when a container ends.
const RUNTIME_RETRY: Duration = Duration::from_secs(1);
/// The reason of a refusal because the device has a holder.
const HELD: &str = "DeviceHeld";
/// How long Prepare waits for the release of a device that another claim holds: for its Unprepare, or for the check whether the holder still
/// uses it, which queries the API server and the container runtime. Kubelet waits 45 s.
const CHECK_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a list of containers counts: a container without a claim may get a device at any time.
const LIST_MAX_AGE: Duration = Duration::from_secs(1);

/// Why a request failed. The message names the problem and its remedy; kubelet shows it in the pod's events.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ServiceError {
    /// The request is invalid, or the node's state prevents it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Driver(#[from] NodeDriverError),
    #[error("the driver took more than {} s for {what}; it is tried again", DRIVER_TIMEOUT.as_secs())]
    Slow {
        /// The claim or device.
        what: String,
    },
    #[error("this node cannot keep its records, so nothing was handed out: {0}")]
    Store(#[from] StoreError),
    #[error("the companion is stopping; kubelet asks again when it is back")]
    Stopping,
}

impl ServiceError {
    /// CamelCase, from a small fixed set: a metric label and log field, and the beginning of the message in the event of the pod.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.reason(),
            Self::Driver(error) => error.reason(),
            Self::Slow { .. } => "DeviceSlow",
            Self::Store(error) => error.reason(),
            Self::Stopping => "Stopping",
        }
    }

    /// Whether the request is invalid (gRPC `INVALID_ARGUMENT`) or the node's state prevents it (`FAILED_PRECONDITION`).
    pub fn is_invalid_request(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.is_invalid_request())
    }
}

/// Why a claim was not released.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ReleaseError {
    #[error(transparent)]
    Refused(#[from] ReleaseRefusal),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "nothing was released, because the driver could not revert its work for the claim: {problem}. Fix the device or the driver, and retry"
    )]
    NotRolledBack {
        /// CamelCase reason from a small fixed set.
        reason: &'static str,
        problem: String,
    },
    #[error("the companion is stopping: ask again")]
    Stopping,
}

impl From<ServiceError> for ReleaseError {
    fn from(error: ServiceError) -> Self {
        let reason = error.reason();
        match error {
            ServiceError::Store(error) => Self::Store(error),
            ServiceError::Stopping => Self::Stopping,
            ServiceError::Slow { .. } => Self::NotRolledBack {
                reason,
                problem: format!("it took more than {} s", DRIVER_TIMEOUT.as_secs()),
            },
            ServiceError::Driver(_) | ServiceError::Refused(_) => Self::NotRolledBack {
                reason,
                problem: error.to_string(),
            },
        }
    }
}

/// A claim in quarantine, for the event and the inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// Description of the claim.
    pub claim: String,
    /// The reason for the quarantine.
    pub why: String,
}

/// The claims in quarantine.
pub type Quarantine = BTreeMap<ClaimUid, Quarantined>;

/// The result of a check for orphaned claims.
#[derive(Debug, Default)]
pub struct OrphanReport {
    /// The claims in quarantine.
    pub quarantine: Quarantine,
    /// Time until the next check.
    pub next: Duration,
    /// The same, if a decision is pending.
    pub again: Option<Duration>,
}

/// The containers of this node, listed before a request was queued.
#[derive(Clone, Debug)]
pub struct ListedContainers {
    /// The containers, or the container runtime's error.
    pub containers: Result<Arc<RuntimeContainers>, String>,
    /// The count of releases when the list was requested.
    released: u64,
    /// When the list was requested.
    pub at: Instant,
}

impl ListedContainers {
    /// Lists the containers. `released` is the count of releases now.
    pub async fn list(runtime: &dyn ContainerRuntime, released: u64) -> Self {
        let at = Instant::now();
        Self {
            containers: runtime.list_containers().await,
            released,
            at,
        }
    }

    /// Whether it was requested within the last second.
    pub fn is_recent(&self) -> bool {
        self.at.elapsed() < LIST_MAX_AGE
    }

    /// Whether the list is recent enough to show every container that may still have a device without a holder. After a release it is not:
    /// the container that had the device may have started after the list was made.
    ///
    /// An error counts for the whole request: a silent runtime takes seconds to fail, and the state task, which serves one request at a time,
    /// must not wait for it again.
    pub fn is_current(&self, released: u64) -> bool {
        self.containers.is_err() || (self.released == released && self.is_recent())
    }
}

/// A request to the task that owns the node's state, with the channel for its answer.
#[derive(Debug)]
pub enum NodeRequest {
    /// See [`NodeService::prepare`].
    Prepare(
        Vec<ClaimToPrepare>,
        Option<ListedContainers>,
        oneshot::Sender<Vec<Result<Vec<String>, ServiceError>>>,
    ),
    /// See [`NodeService::unprepare`].
    Unprepare(
        Vec<ClaimToUnprepare>,
        oneshot::Sender<Vec<Result<(), ServiceError>>>,
    ),
    /// See [`NodeService::allocate`]: a resource and the device ids of each container.
    Allocate(
        String,
        Vec<Vec<String>>,
        oneshot::Sender<Result<Vec<ContainerEdits>, ServiceError>>,
    ),
    /// See [`NodeService::check_start`]: a resource, its devices and the listed containers.
    CheckStart(
        String,
        Vec<String>,
        Option<ListedContainers>,
        oneshot::Sender<Result<(), ServiceError>>,
    ),
    /// See [`NodeService::holdings`].
    Holdings(oneshot::Sender<Vec<Holding>>),
    /// See [`NodeService::in_containers`].
    InContainers(oneshot::Sender<BTreeMap<String, String>>),
    /// See [`NodeService::release`]: a claim's uid and whether it is forced.
    Release(String, bool, oneshot::Sender<Result<Holding, ReleaseError>>),
    /// See [`NodeService::find_orphans`].
    FindOrphans(Duration, oneshot::Sender<Vec<Question>>),
    /// See [`NodeService::decide_orphans`].
    DecideOrphans(
        Duration,
        BTreeMap<ClaimUid, ApiView>,
        Option<ListedContainers>,
        oneshot::Sender<OrphanReport>,
    ),
}

/// An extended resource, as served by the device plugin API.
#[derive(Clone, Debug)]
pub struct ServedResource {
    /// Its configuration.
    pub resource: ExtendedResource,
    /// Its devices.
    pub devices: watch::Receiver<Vec<PluginDevice>>,
}

/// The other end of [`NodeService`]: answers its requests, and publishes the values that it reads without a request.
#[derive(Debug)]
pub struct Backend {
    /// The queued requests.
    pub requests: mpsc::Receiver<NodeRequest>,
    /// The extended resources.
    pub resources: watch::Sender<Arc<BTreeMap<String, ServedResource>>>,
    /// The number of prepared claims.
    pub prepared: watch::Sender<usize>,
    /// Notified when a claim must be checked.
    pub check_due: Arc<Notify>,
    /// Counts the claims whose devices were released.
    pub released: watch::Sender<u64>,
}

/// The operations of this node, independent of API and version. When the last clone is dropped, the state task serves the queued requests
/// and ends.
#[derive(Clone, Debug)]
pub struct NodeService {
    requests: mpsc::Sender<NodeRequest>,
    resources: watch::Receiver<Arc<BTreeMap<String, ServedResource>>>,
    prepared: watch::Receiver<usize>,
    check_due: Arc<Notify>,
    released: watch::Receiver<u64>,
    /// The container runtime, if it reports the devices of its containers.
    runtime: Option<Arc<dyn ContainerRuntime>>,
    metrics: Arc<Metrics>,
}

impl NodeService {
    /// A service and the end that answers it.
    pub fn new(runtime: Option<Arc<dyn ContainerRuntime>>, metrics: Arc<Metrics>) -> (Self, Backend) {
        let (sender, requests) = mpsc::channel(QUEUE);
        let (resources, served) = watch::channel(Arc::default());
        let (prepared, count) = watch::channel(0);
        let (released, unprepared) = watch::channel(0);
        let check_due = Arc::new(Notify::new());
        let service = Self {
            requests: sender,
            resources: served,
            prepared: count,
            check_due: check_due.clone(),
            released: unprepared,
            runtime,
            metrics,
        };
        let backend = Backend {
            requests,
            resources,
            prepared,
            check_due,
            released,
        };
        (service, backend)
    }

    /// Metrics of the endpoints' calls.
    pub fn grpc_calls(&self) -> Arc<GrpcCalls> {
        self.metrics.calls.clone()
    }

    /// Counts a Prepare that was refused before its request was queued.
    pub fn refused_prepare(&self, reason: &'static str) {
        self.metrics.handled("prepare", Some(reason));
    }

    /// Lists this node's containers for a request. `None` if the container runtime does not report their devices.
    pub async fn list_containers(&self) -> Option<ListedContainers> {
        let runtime = self.runtime.as_ref()?;
        let released = *self.released.borrow();
        Some(ListedContainers::list(&**runtime, released).await)
    }

    /// Prepares claims. Afterwards a container with the returned CDI device ids gets the allocated devices: one id for a classic claim, one for
    /// each result in structured mode.
    ///
    /// Idempotent. The answer has one entry per request, in order. An error is a message for the pod's event, and kubelet retries.
    /// `containers`, if current, replaces the state task's own query of the container runtime.
    pub async fn prepare(
        &self,
        claims: Vec<ClaimToPrepare>,
        containers: Option<ListedContainers>,
    ) -> Vec<Result<Vec<String>, ServiceError>> {
        let mut released = self.released.clone();
        released.mark_unchanged();
        if claims.is_empty() {
            return Vec::new();
        }
        let mut answers = self.prepare_once(claims.clone(), containers).await;
        if self.runtime.is_none() {
            return answers;
        }
        // Without this wait, kubelet retries only after up to 90 s.
        let deadline = Instant::now() + CHECK_TIMEOUT;
        loop {
            let held: Vec<usize> = (0..answers.len())
                .filter(|index| answers.get(*index).is_some_and(is_held))
                .collect();
            if held.is_empty() {
                return answers;
            }
            tokio::select! {
                Ok(()) = released.changed() => {}
                () = sleep(RUNTIME_RETRY), if answers.iter().any(depends_on_containers) => {}
                () = sleep_until(deadline) => return answers,
            }
            let again: Vec<ClaimToPrepare> = held
                .iter()
                .filter_map(|index| claims.get(*index).cloned())
                .collect();
            let listed = self.list_containers().await;
            for (index, answer) in held.iter().zip(self.prepare_once(again, listed).await) {
                if let Some(first) = answers.get_mut(*index) {
                    *first = answer;
                }
            }
        }
    }

    async fn prepare_once(
        &self,
        claims: Vec<ClaimToPrepare>,
        containers: Option<ListedContainers>,
    ) -> Vec<Result<Vec<String>, ServiceError>> {
        let count = claims.len();
        let answers = self
            .send(|sender| NodeRequest::Prepare(claims, containers, sender))
            .await;
        answers.unwrap_or_else(|| stopping(count))
    }

    /// Reverts [`Self::prepare`]. An unknown claim succeeds, since nothing is prepared for it.
    ///
    /// The answer has one entry per request, in order.
    pub async fn unprepare(&self, claims: Vec<ClaimToUnprepare>) -> Vec<Result<(), ServiceError>> {
        if claims.is_empty() {
            return Vec::new();
        }
        let count = claims.len();
        let answers = self.send(|sender| NodeRequest::Unprepare(claims, sender)).await;
        answers.unwrap_or_else(|| stopping(count))
    }

    /// The devices of an extended resource, now and after each change; `None` if the resource is unknown.
    pub fn plugin_devices(&self, resource_name: &str) -> Option<watch::Receiver<Vec<PluginDevice>>> {
        let resources = self.resources.borrow();
        resources.get(resource_name).map(|served| served.devices.clone())
    }

    /// Waits until an extended resource is served with this configuration.
    pub async fn serves(&self, resource_name: &str, resource: &ExtendedResource) {
        let mut resources = self.resources.clone();
        let served = resources.wait_for(|all| {
            all.get(resource_name)
                .is_some_and(|served| served.resource == *resource)
        });
        if served.await.is_err() {
            // The state task has ended; the shutdown follows.
            std::future::pending::<()>().await;
        }
    }

    /// Whether kubelet must call [`Self::check_start`] before each container with devices of this resource starts.
    pub fn checks_start(&self, resource_name: &str) -> bool {
        let resources = self.resources.borrow();
        let served = resources.get(resource_name);
        served.is_some_and(|served| self.runtime.is_some() || served.resource.pre_start_check)
    }

    /// Chooses devices of an extended resource: one preferred allocation request and one list of device ids per container.
    pub fn choose(&self, resource_name: &str, requests: &[Preference]) -> Vec<Vec<String>> {
        let resources = self.resources.borrow().clone();
        let Some(served) = resources.get(resource_name) else {
            return vec![Vec::new(); requests.len()];
        };
        let numa_nodes: BTreeMap<String, Vec<i64>> = served
            .devices
            .borrow()
            .iter()
            .map(|device| {
                let name = device_of_plugin_id(&device.id).to_owned();
                (name, device.numa_nodes.clone())
            })
            .collect();
        let order = if served.resource.also_by_claims {
            Order::Descending
        } else {
            Order::Ascending
        };
        requests
            .iter()
            .map(|request| preferred(request, &numa_nodes, order))
            .collect()
    }

    /// Whether containers with these devices of an extended resource may start or restart now.
    pub async fn check_start(&self, resource_name: &str, devices: Vec<String>) -> Result<(), ServiceError> {
        let resource = resource_name.to_owned();
        let containers = self.list_containers().await;
        self.send(|sender| NodeRequest::CheckStart(resource, devices, containers, sender))
            .await
            .ok_or(ServiceError::Stopping)?
    }

    /// Allocates devices of an extended resource: one list of device ids and one set of container edits per container.
    pub async fn allocate(
        &self,
        resource_name: &str,
        containers: Vec<Vec<String>>,
    ) -> Result<Vec<ContainerEdits>, ServiceError> {
        let resource = resource_name.to_owned();
        self.send(|sender| NodeRequest::Allocate(resource, containers, sender))
            .await
            .ok_or(ServiceError::Stopping)?
    }

    /// Lists the prepared claims. `None` if the state task has ended.
    pub async fn holdings(&self) -> Option<Vec<Holding>> {
        self.send(NodeRequest::Holdings).await
    }

    /// Lists the devices of mode `both` that containers hold as extended resources, each with a description of its container, after a query
    /// of kubelet. `None` if the state task has ended.
    pub async fn in_containers(&self) -> Option<BTreeMap<String, String>> {
        self.send(NodeRequest::InContainers).await
    }

    /// Releases a claim manually and returns its record.
    pub async fn release(&self, uid: String, force: bool) -> Result<Holding, ReleaseError> {
        self.send(|sender| NodeRequest::Release(uid, force, sender))
            .await
            .unwrap_or(Err(ReleaseError::Stopping))
    }

    /// Compares the prepared claims with kubelet's list. `now` is the time since any fixed moment. `None` if the state task has ended.
    pub async fn find_orphans(&self, now: Duration) -> Option<Vec<Question>> {
        self.send(|sender| NodeRequest::FindOrphans(now, sender)).await
    }

    /// Decides from the API server's answers, and returns the resulting quarantine. `None` if the state task has ended.
    pub async fn decide_orphans(
        &self,
        now: Duration,
        answers: BTreeMap<ClaimUid, ApiView>,
    ) -> Option<OrphanReport> {
        // Without answers, no claim is decided.
        let containers = if answers.is_empty() {
            None
        } else {
            self.list_containers().await
        };
        self.send(|sender| NodeRequest::DecideOrphans(now, answers, containers, sender))
            .await
    }

    /// The number of prepared claims, updated on each change.
    pub fn prepared(&self) -> watch::Receiver<usize> {
        self.prepared.clone()
    }

    /// Waits until a claim must be checked.
    pub async fn check_due(&self) {
        self.check_due.notified().await;
    }

    /// Queues a request and waits for its answer. `None` if the state task has ended.
    async fn send<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> NodeRequest) -> Option<T> {
        let (sender, answer) = oneshot::channel();
        self.requests.send(request(sender)).await.ok()?;
        answer.await.ok()
    }
}

/// Whether a repeated Prepare may soon succeed.
fn is_held<T>(answer: &Result<T, ServiceError>) -> bool {
    answer.as_ref().is_err_and(|error| error.reason() == HELD) || depends_on_containers(answer)
}

/// Whether the container runtime did not answer, or a container that may soon end has the device.
fn depends_on_containers<T>(answer: &Result<T, ServiceError>) -> bool {
    matches!(
        answer,
        Err(ServiceError::Refused(
            Refusal::RuntimeUnavailable { .. } | Refusal::StillUsed { .. } | Refusal::InContainer { .. }
        ))
    )
}

fn stopping<T>(count: usize) -> Vec<Result<T, ServiceError>> {
    (0..count).map(|_| Err(ServiceError::Stopping)).collect()
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;

    use super::*;

    fn claim() -> ClaimToPrepare {
        ClaimToPrepare {
            uid: "a".into(),
            ..ClaimToPrepare::default()
        }
    }

    fn held() -> Result<Vec<String>, ServiceError> {
        Err(ServiceError::Refused(Refusal::Held {
            device: "kvm".into(),
            holder: "claim default/first".into(),
        }))
    }

    #[derive(Debug)]
    struct NoContainers;

    impl ContainerRuntime for NoContainers {
        fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>> {
            Box::pin(async { Ok(Arc::default()) })
        }
    }

    /// Answers one Prepare.
    async fn answer(backend: &mut Backend, answer: Result<Vec<String>, ServiceError>) {
        let Some(NodeRequest::Prepare(_, _, sender)) = backend.requests.recv().await else {
            panic!("a Prepare");
        };
        sender.send(vec![answer]).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_prepare_is_repeated_after_each_release() {
        let (service, mut backend) = NodeService::new(Some(Arc::new(NoContainers)), Arc::default());
        let prepare = tokio::spawn(async move { service.prepare(vec![claim()], None).await });
        for released in [1, 2] {
            answer(&mut backend, held()).await;
            backend.released.send_replace(released);
        }
        answer(&mut backend, Ok(vec!["id".into()])).await;
        assert_eq!(prepare.await.unwrap()[0].as_ref().unwrap(), &["id".to_owned()]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_prepare_is_repeated_while_a_container_ends() {
        for refusal in [
            Refusal::StillUsed {
                device: "kvm".into(),
                holder: "container main of pod default/p".into(),
            },
            Refusal::InContainer {
                device: "kvm".into(),
                holder: "container main of pod default/p".into(),
            },
        ] {
            let (service, mut backend) = NodeService::new(Some(Arc::new(NoContainers)), Arc::default());
            let prepare = tokio::spawn(async move { service.prepare(vec![claim()], None).await });
            answer(&mut backend, Err(refusal.into())).await;
            // No claim is released meanwhile.
            answer(&mut backend, Ok(vec!["id".into()])).await;
            assert_eq!(prepare.await.unwrap()[0].as_ref().unwrap(), &["id".to_owned()]);
        }
    }

    /// A runtime that does not answer.
    #[derive(Debug)]
    struct SilentRuntime;

    impl ContainerRuntime for SilentRuntime {
        fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>> {
            Box::pin(async {
                sleep(Duration::from_secs(5)).await;
                Err("no answer within 5 s".to_owned())
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_state_task_does_not_wait_for_a_silent_runtime() {
        let (service, mut backend) = NodeService::new(Some(Arc::new(SilentRuntime)), Arc::default());
        let caller = service.clone();
        let prepare = tokio::spawn(async move {
            let listed = caller.list_containers().await;
            caller.prepare(vec![claim()], listed).await
        });
        for _ in 0..2 {
            let Some(NodeRequest::Prepare(_, Some(listed), sender)) = backend.requests.recv().await else {
                panic!("a Prepare with a list");
            };
            // The state task may be busy with other requests.
            sleep(LIST_MAX_AGE).await;
            assert!(listed.is_current(1), "{listed:?}");
            let unanswered = Refusal::RuntimeUnavailable {
                device: "kvm".into(),
                problem: "no answer within 5 s".into(),
            };
            sender.send(vec![Err(unanswered.into())]).unwrap();
        }
        prepare.abort();
        let caller = service.clone();
        let start = tokio::spawn(async move { caller.check_start("example.com/a", Vec::new()).await });
        let Some(NodeRequest::CheckStart(_, _, Some(listed), _)) = backend.requests.recv().await else {
            panic!("a check with a list");
        };
        assert!(listed.is_current(1), "{listed:?}");
        start.abort();
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a").unwrap();
        let answers = BTreeMap::from([(uid, ApiView::Gone)]);
        let decide = tokio::spawn(async move { service.decide_orphans(Duration::ZERO, answers).await });
        let Some(NodeRequest::DecideOrphans(_, _, Some(listed), _)) = backend.requests.recv().await else {
            panic!("a decision with a list");
        };
        assert!(listed.containers.is_err(), "{listed:?}");
        decide.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_prepare_waits_for_a_held_device_for_a_limited_time() {
        let (service, mut backend) = NodeService::new(Some(Arc::new(NoContainers)), Arc::default());
        let begin = Instant::now();
        let prepare = tokio::spawn(async move { service.prepare(vec![claim()], None).await });
        answer(&mut backend, held()).await;
        assert_eq!(prepare.await.unwrap()[0].as_ref().unwrap_err().reason(), HELD);
        assert_eq!(begin.elapsed(), CHECK_TIMEOUT);
    }
}
