//! The container runtime: shows which containers have which devices, and checks whether any still has one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::{debug, info, warn};

use crate::api::crd::{Device, Devices};
use crate::api::proto::cri_v1::runtime_service_client::RuntimeServiceClient;
use crate::api::proto::cri_v1::{Container, ContainerState, ContainerStatusRequest, ListContainersRequest};
use crate::core::names::{ClaimUid, DriverName};
use crate::core::prepare::containers::PodContainer;
use crate::core::prepare::orphans::RuntimeView;
use crate::core::prepare::plan::Refusal;
use crate::core::prepare::prepared_claims::{Entry, PreparedClaims};
use crate::core::prepare::runtime_containers::{
    ContainerDevices, NewUser, RuntimeContainer, RuntimeContainerState, RuntimeContainers, SETTLE,
    UnknownContainers, parse_info,
};
use crate::node::discovery::device_number;

/// Usual sockets of containerd, CRI-O and k3s.
pub const SOCKETS: [&str; 3] = [
    "/run/containerd/containerd.sock",
    "/var/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
];
/// Deadline of a query. The first one fetches the status of every container on the node.
const LIMIT: Duration = Duration::from_secs(5);
/// Largest response in bytes; a runtime sends no larger one. It is a list of all containers, or the status of one, usually some ten
/// kilobytes. Users can make a status larger by the arguments and variables of a container; see [`UnknownContainers`].
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// Part of the message with which a runtime refuses to send a larger response (grpc-go).
const TOO_LARGE: &str = "larger than max";
/// Delay before the runtime is asked again if it has not answered about claims that could be freed.
const UNANSWERED_PAUSE: Duration = Duration::from_secs(30);
/// Labels that kubelet sets on its containers.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Source of the devices that containers have: the container runtime, or a fake in tests.
pub trait ContainerRuntime: std::fmt::Debug + Send + Sync + 'static {
    /// All containers now. The error is a message for the user.
    fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>>;

    /// Whether this is known to be kubelet's runtime before it has answered.
    fn is_certain(&self) -> bool {
        false
    }
}

/// The container runtime behind a CRI socket.
#[derive(Debug)]
pub struct CriClient {
    /// Candidate sockets.
    sockets: Vec<PathBuf>,
    /// Whether the operator configured the socket. Otherwise the runtime must show a container of a pod of this kubelet: a node may
    /// have a second runtime that kubelet does not use.
    is_named: bool,
    /// Kubelet's pods directory, with one subdirectory per pod.
    pods: PathBuf,
    /// The host's `/dev`, as mounted in this process.
    dev: PathBuf,
    state: Mutex<Connection>,
}

#[derive(Debug, Default)]
struct Connection {
    channel: Option<Channel>,
    /// The socket identified as that of kubelet's runtime, kept while it shows no containers.
    identified: Option<PathBuf>,
    known: KnownContainers,
    /// The containers of the last query, and when it began.
    last: Option<(Instant, Arc<RuntimeContainers>)>,
}

/// The devices of each container, which never change, or why the runtime cannot send its status; and when this process first saw it.
type KnownContainers = BTreeMap<String, (Result<ContainerDevices, String>, Instant)>;

impl CriClient {
    /// Uses this socket or, without one, the usual sockets that exist. `None` if there are none. `kubelet_root` is kubelet's root directory.
    pub fn find(socket: Option<&Path>, kubelet_root: &Path, dev: &Path) -> Option<Self> {
        let (sockets, is_named) = if let Some(socket) = socket {
            (vec![socket.to_owned()], true)
        } else {
            let there = SOCKETS.iter().map(PathBuf::from).filter(|path| path.exists());
            (there.collect(), false)
        };
        (!sockets.is_empty()).then(|| Self {
            sockets,
            is_named,
            pods: kubelet_root.join("pods"),
            dev: dev.to_owned(),
            state: Mutex::default(),
        })
    }

    async fn shared_query(&self) -> Result<Arc<RuntimeContainers>, String> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        // Callers that waited for the lock share the first query that began after their calls.
        if let Some((began, seen)) = &state.last
            && *began >= asked
        {
            return Ok(seen.clone());
        }
        let began = Instant::now();
        let seen = Arc::new(self.query(&mut state).await?);
        state.last = Some((began, seen.clone()));
        Ok(seen)
    }

    async fn query(&self, state: &mut Connection) -> Result<RuntimeContainers, String> {
        if let Some(channel) = state.channel.clone() {
            let listed = self.containers(&mut state.known, channel).await;
            // The next query opens a new connection.
            if listed.is_err() {
                state.channel = None;
            }
            return listed;
        }
        let mut problems = Vec::new();
        for socket in &self.sockets {
            match self.connect(state, socket).await {
                Ok((channel, seen)) => {
                    info!(socket = %socket.display(), "the container runtime shows which containers have devices");
                    state.channel = Some(channel);
                    state.identified = Some(socket.clone());
                    return Ok(seen);
                }
                Err(problem) => problems.push(format!("{}: {problem}", socket.display())),
            }
        }
        Err(problems.join("; "))
    }

    async fn connect(
        &self,
        state: &mut Connection,
        socket: &Path,
    ) -> Result<(Channel, RuntimeContainers), String> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))
            .map_err(|error| error.to_string())?;
        let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
        if !self.is_named && state.identified.as_deref() != Some(socket) {
            let listed = list(channel.clone()).await?;
            let mut pods = listed
                .iter()
                .filter_map(|container| container.labels.get(POD_UID));
            if !pods.any(|uid| !uid.contains('/') && self.pods.join(uid).is_dir()) {
                return Err(format!(
                    "it shows no container of a pod below {}, so it is not known to be kubelet's runtime",
                    self.pods.display()
                ));
            }
        }
        let seen = self.containers(&mut state.known, channel.clone()).await?;
        Ok((channel, seen))
    }

    async fn containers(
        &self,
        known: &mut KnownContainers,
        channel: Channel,
    ) -> Result<RuntimeContainers, String> {
        let listed = list(channel.clone()).await?;
        known.retain(|id, _| listed.iter().any(|container| container.id == *id));
        let mut all = Vec::new();
        for container in listed {
            let state = state_of(&container);
            if state == RuntimeContainerState::Exited {
                continue;
            }
            let label = |name: &str| container.labels.get(name).cloned().unwrap_or_default();
            let of_pod = PodContainer {
                namespace: label(POD_NAMESPACE),
                pod: label(POD_NAME),
                container: label(CONTAINER_NAME),
            };
            let (given, since) = match known.get(&container.id) {
                Some(devices) => devices.clone(),
                None => match status(channel.clone(), &container.id, &self.dev)
                    .await
                    // The operator has to know which pod to delete.
                    .map_err(|problem| format!("{of_pod}: {problem}"))?
                {
                    // The container was removed after it was listed.
                    None => continue,
                    Some(given) => {
                        if let Err(problem) = &given {
                            warn!(
                                reason = "ContainerRuntimeUnavailable",
                                "the devices of {of_pod} are unknown, because the runtime cannot send its status: {problem}"
                            );
                        }
                        let given = (given, Instant::now());
                        known.insert(container.id.clone(), given.clone());
                        given
                    }
                },
            };
            all.push(RuntimeContainer {
                id: container.id,
                container: of_pod,
                state,
                // Measured by our own clock: the creation time from the runtime depends on the wall clock, which may be set.
                age: since.elapsed(),
                given,
            });
        }
        Ok(RuntimeContainers(all))
    }
}

impl ContainerRuntime for CriClient {
    fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>> {
        Box::pin(async {
            timeout(LIMIT, self.shared_query())
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {} s", LIMIT.as_secs())))
                .map_err(|problem| {
                    format!("the container runtime does not show which containers have devices: {problem}")
                })
        })
    }

    fn is_certain(&self) -> bool {
        self.is_named && self.sockets.iter().any(|socket| socket.exists())
    }
}

async fn list(channel: Channel) -> Result<Vec<Container>, String> {
    let mut client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let answer = client.list_containers(ListContainersRequest {}).await;
    Ok(answer.map_err(|status| message(&status))?.into_inner().containers)
}

/// The devices of a container, or why its status is too large for a message; `None` if the container no longer exists.
async fn status(
    channel: Channel,
    id: &str,
    dev: &Path,
) -> Result<Option<Result<ContainerDevices, String>>, String> {
    let mut client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let request = ContainerStatusRequest {
        container_id: id.to_owned(),
        verbose: true,
    };
    let info = match client.container_status(request).await {
        Ok(answer) => answer.into_inner().info,
        Err(status) => match status.code() {
            Code::NotFound => return Ok(None),
            // More than is received here, or more than the runtime sends.
            Code::OutOfRange => return Ok(Some(Err(message(&status)))),
            Code::ResourceExhausted if status.message().contains(TOO_LARGE) => {
                return Ok(Some(Err(message(&status))));
            }
            _ => return Err(message(&status)),
        },
    };
    let mut given = parse_info(&info).map_err(|error| error.to_string())?;
    let numbers = given
        .host_paths
        .iter()
        .filter_map(|path| device_number(dev, path));
    given.numbers = numbers.chain(given.numbers.iter().copied()).collect();
    Ok(Some(Ok(given)))
}

fn message(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

fn state_of(container: &Container) -> RuntimeContainerState {
    match container.state() {
        ContainerState::ContainerCreated => RuntimeContainerState::Created,
        ContainerState::ContainerExited => RuntimeContainerState::Exited,
        // Unknown counts as running: nothing shows that the container has ended.
        ContainerState::ContainerRunning | ContainerState::ContainerUnknown => RuntimeContainerState::Running,
    }
}

/// The container runtime, and the claims that no further container can start with.
#[derive(Debug)]
pub(in crate::node) struct RuntimeCheck {
    /// `None` if no runtime reports the devices of its containers.
    runtime: Option<Arc<dyn ContainerRuntime>>,
    driver_name: DriverName,
    /// Whether the runtime is known to be kubelet's: the operator has named its socket, which existed at the start, or it has answered in this
    /// process.
    is_known: bool,
    unknown: UnknownContainers,
    started: Instant,
    /// When the CDI files of claims that the API server no longer shows as holders were removed.
    cdi_removed: BTreeMap<ClaimUid, Instant>,
}

impl RuntimeCheck {
    pub(in crate::node) fn new(
        runtime: Option<Arc<dyn ContainerRuntime>>,
        driver_name: DriverName,
        unknown: UnknownContainers,
    ) -> Self {
        let is_known = runtime.as_ref().is_some_and(|runtime| runtime.is_certain());
        Self {
            runtime,
            driver_name,
            is_known,
            unknown,
            started: Instant::now(),
            cdi_removed: BTreeMap::new(),
        }
    }

    /// The runtime, if it reports the devices of its containers.
    pub(in crate::node) fn runtime(&self) -> Option<Arc<dyn ContainerRuntime>> {
        self.runtime.clone()
    }

    /// Whether a runtime reports the devices of its containers.
    pub(in crate::node) fn is_possible(&self) -> bool {
        self.runtime.is_some()
    }

    /// Processes a list of containers, requested at this time, before it is used for a check.
    pub(in crate::node) fn listed(
        &mut self,
        listed: &Result<Arc<RuntimeContainers>, String>,
        at: Instant,
        prepared_claims: &PreparedClaims,
    ) {
        if let Ok(containers) = listed {
            self.is_known = true;
            let at = at.saturating_duration_since(self.started);
            self.unknown.listed(containers, at, prepared_claims);
        }
    }

    /// Records the devices that are extended resources now.
    pub(in crate::node) fn offered(&mut self, devices: &Devices) {
        self.unknown.offered(devices);
    }

    /// Records that a claim no longer holds its devices.
    pub(in crate::node) fn released(&mut self, entry: &Entry) {
        if self.runtime.is_some() {
            self.unknown.released(entry, self.started.elapsed());
        }
    }

    /// The containers whose status is too large, to be stored for the next process.
    pub(in crate::node) fn unknown_containers(&self) -> UnknownContainers {
        let unknown = self.runtime.as_ref().map(|_| self.unknown.to_store());
        unknown.unwrap_or_default()
    }

    /// Adds the container that has the device to the error, if the runtime shows it. `listed` is `None` without a runtime.
    pub(in crate::node) fn name_container(
        &self,
        refusal: Refusal,
        inventory: &Devices,
        listed: Option<Result<Arc<RuntimeContainers>, String>>,
    ) -> Refusal {
        let (Refusal::Held { device, .. } | Refusal::InContainer { device, .. }) = &refusal else {
            return refusal;
        };
        let Some(Ok(containers)) = listed else {
            return refusal;
        };
        let user_of = |device| containers.user_of_nodes(&self.driver_name, device);
        let Some(user) = inventory.get(device).and_then(user_of) else {
            return refusal;
        };
        match refusal {
            Refusal::Held { device, holder } => Refusal::Held {
                device,
                holder: format!("{holder}, and {user} has it,"),
            },
            Refusal::InContainer { device, .. } => Refusal::InContainer {
                device,
                holder: user.to_string(),
            },
            other => other,
        }
    }

    /// Refuses a device to a claim or a starting container while another container has it: kubelet forgets force-deleted pods while their
    /// containers are ending. `listed` is `None` without a runtime.
    ///
    /// If kubelet's runtime does not answer, claims are refused, and starting containers are not: kubelet needs the runtime to start them.
    pub(in crate::node) fn check_unused(
        &self,
        devices: &[&Device],
        new_user: NewUser<'_>,
        listed: Option<Result<Arc<RuntimeContainers>, String>>,
    ) -> Result<(), Refusal> {
        let exclusive = || devices.iter().filter(|device| !device.is_shared());
        let Some(first) = exclusive().next() else {
            return Ok(());
        };
        let containers = match listed {
            None => return Ok(()),
            Some(Ok(containers)) => containers,
            Some(Err(problem)) if new_user.claim().is_some() && self.is_known => {
                return Err(Refusal::RuntimeUnavailable {
                    device: first.name.clone(),
                    problem,
                });
            }
            Some(Err(problem)) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "cannot check whether another container has a device: {problem}"
                );
                return Ok(());
            }
        };
        for device in exclusive() {
            if let Some(user) = containers.other_user(&self.driver_name, device, new_user.claim()) {
                return Err(Refusal::StillUsed {
                    device: device.name.clone(),
                    holder: user.to_string(),
                });
            }
            if let Some((user, problem)) = self.unknown.other_user(&containers, device, new_user) {
                return Err(Refusal::RuntimeUnavailable {
                    device: device.name.clone(),
                    problem: format!(
                        "the runtime cannot send the status of {user}, which is too large ({problem}): delete that pod"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Ends the checks of all claims but those that `stay`, and returns the claims whose CDI files were removed for these checks.
    pub(in crate::node) fn end_checks(&mut self, stays: impl Fn(&ClaimUid) -> bool) -> Vec<ClaimUid> {
        let ended: Vec<ClaimUid> = self
            .cdi_removed
            .keys()
            .filter(|uid| !stays(uid))
            .cloned()
            .collect();
        self.cdi_removed.retain(|uid, _| !ended.contains(uid));
        ended
    }

    /// The claims whose CDI files must be removed before their check, so that no further container starts with them.
    pub(in crate::node) fn with_cdi_file(&self, uids: &[ClaimUid]) -> Vec<ClaimUid> {
        let present = uids.iter().filter(|uid| !self.cdi_removed.contains_key(uid));
        present.cloned().collect()
    }

    /// Records that the CDI file of a claim is written, so that containers can start with it.
    pub(in crate::node) fn cdi_written(&mut self, uid: &ClaimUid) {
        self.cdi_removed.remove(uid);
    }

    /// Records that the CDI file of a claim was removed.
    pub(in crate::node) fn cdi_removed(&mut self, uid: ClaimUid) {
        self.cdi_removed.insert(uid, Instant::now());
    }

    /// Whether containers use the devices of these claims, and the time until the check must be repeated. The view is empty if no runtime is
    /// known to be kubelet's. `listed` are the containers and when their list was requested, if the caller has listed them; otherwise the
    /// runtime is asked.
    pub(in crate::node) async fn claim_use(
        &mut self,
        uids: Vec<ClaimUid>,
        prepared_claims: &PreparedClaims,
        inventory: &Devices,
        listed: Option<(Instant, Result<Arc<RuntimeContainers>, String>)>,
    ) -> (RuntimeView, Option<Duration>) {
        let mut view = RuntimeView::default();
        if uids.is_empty() {
            return (view, None);
        }
        let (at, listed) = listed.unzip();
        let at = at.unwrap_or_else(Instant::now);
        let mut removed = self.cdi_removed.values();
        if removed.any(|since| at.saturating_duration_since(*since) < SETTLE) {
            view.undecided.extend(uids);
            return (view, Some(SETTLE));
        }
        let listed = match (listed, &self.runtime) {
            (Some(listed), _) => listed,
            (None, Some(runtime)) => runtime.list_containers().await,
            (None, None) => return (view, None),
        };
        self.listed(&listed, at, prepared_claims);
        let containers = match listed {
            Ok(containers) => containers,
            Err(problem) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "cannot check whether containers use the devices of claims: {problem}"
                );
                if !self.is_known {
                    return (view, None);
                }
                view.unanswered.extend(uids);
                return (view, Some(UNANSWERED_PAUSE));
            }
        };
        for uid in uids {
            let user = containers.user_of_claim(&self.driver_name, &uid, prepared_claims, inventory);
            let unknown = || {
                let entry = prepared_claims.entry(&uid)?;
                self.unknown.user_of_claim(&containers, entry)
            };
            if let Some(user) = user {
                debug!(claim_uid = %uid, holder = %user, "a container uses the devices of the claim");
                view.undecided.insert(uid);
            } else if !self.cdi_removed.contains_key(&uid) {
                view.undecided.insert(uid);
            } else if let Some(user) = unknown() {
                debug!(claim_uid = %uid, holder = %user, "a container may use the devices of the claim");
                view.unanswered.insert(uid);
            } else {
                view.unused.insert(uid);
            }
        }
        let again = (!view.unanswered.is_empty()).then_some(UNANSWERED_PAUSE);
        (view, again)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;
    use tonic::{Request, Response};

    use super::*;
    use crate::api::crd::{DeviceNodeKind, DeviceNumber};
    use crate::api::proto::cri_v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
    use crate::api::proto::cri_v1::{
        ContainerStatusResponse, ListContainersResponse, StatusRequest, StatusResponse, VersionRequest,
        VersionResponse,
    };
    use crate::core::prepare::runtime_containers::tests::running;

    const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";

    /// A runtime with one container.
    #[derive(Debug)]
    struct OneContainer(ContainerDevices);

    impl ContainerRuntime for OneContainer {
        fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>> {
            let container = running(self.0.clone());
            Box::pin(async { Ok(Arc::new(RuntimeContainers(vec![container]))) })
        }
    }

    /// A check of a container with these device numbers.
    fn check(numbers: &[DeviceNumber]) -> RuntimeCheck {
        let given = ContainerDevices {
            numbers: numbers.iter().copied().collect(),
            ..ContainerDevices::default()
        };
        let driver = DriverName::parse("drayman.dev").unwrap();
        RuntimeCheck::new(
            Some(Arc::new(OneContainer(given))),
            driver,
            UnknownContainers::default(),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_counts_if_no_container_can_have_started_since() {
        let uid = ClaimUid::parse(A).unwrap();
        let (none_prepared, inventory) = (PreparedClaims::new("boot", BTreeMap::new()), Devices::default());
        let mut check = check(&[]);
        let early = Instant::now();
        check.cdi_removed(uid.clone());
        tokio::time::advance(SETTLE).await;
        let silent = || Err("no answer within 5 s".to_owned());
        let now = Instant::now();
        let undecided = RuntimeView {
            undecided: [uid.clone()].into(),
            ..RuntimeView::default()
        };
        let unused = RuntimeView {
            unused: [uid.clone()].into(),
            ..RuntimeView::default()
        };
        let unanswered = RuntimeView {
            unanswered: [uid.clone()].into(),
            ..RuntimeView::default()
        };
        for (listed, expected) in [
            ((early, Ok(Arc::default())), (undecided.clone(), Some(SETTLE))),
            ((early, silent()), (undecided, Some(SETTLE))),
            ((now, Ok(Arc::default())), (unused, None)),
            ((now, silent()), (unanswered, Some(UNANSWERED_PAUSE))),
        ] {
            let claim_use = check.claim_use(vec![uid.clone()], &none_prepared, &inventory, Some(listed));
            assert_eq!(claim_use.await, expected);
        }
    }

    #[tokio::test]
    async fn only_a_runtime_that_answers_names_the_container() {
        let number: DeviceNumber = "c120:6".parse().unwrap();
        let device = Device {
            name: "x".into(),
            device_numbers: [number].into(),
            ..Device::default()
        };
        let inventory = Devices::from([("x".to_owned(), device)]);
        let check = check(&[number]);
        let listed = check.runtime().unwrap().list_containers().await;
        let silent = Err("no answer within 5 s".to_owned());
        for (listed, is_named) in [(listed, true), (silent, false)] {
            let refusal = Refusal::Held {
                device: "x".into(),
                holder: "claim default/a".into(),
            };
            let refusal = check.name_container(refusal, &inventory, Some(listed));
            let text = refusal.to_string();
            assert_eq!(text.contains("pod default/p"), is_named, "{text}");
        }
    }

    /// A runtime that does not answer.
    #[derive(Debug)]
    struct NeverAnswers {
        is_certain: bool,
    }

    impl ContainerRuntime for NeverAnswers {
        fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>> {
            Box::pin(async { Err("no answer within 5 s".to_owned()) })
        }

        fn is_certain(&self) -> bool {
            self.is_certain
        }
    }

    #[tokio::test]
    async fn a_named_runtime_that_has_never_answered_is_not_absent() {
        let device = Device {
            name: "x".into(),
            ..Device::default()
        };
        let uid = ClaimUid::parse(A).unwrap();
        let none_prepared = PreparedClaims::new("boot", BTreeMap::new());
        for is_certain in [false, true] {
            let driver = DriverName::parse("drayman.dev").unwrap();
            let runtime = Arc::new(NeverAnswers { is_certain });
            let mut check = RuntimeCheck::new(Some(runtime), driver, UnknownContainers::default());
            let listed = check.runtime().unwrap().list_containers().await;
            let checked = check.check_unused(&[&device], NewUser::Claim(&uid), Some(listed));
            assert_eq!(checked.is_err(), is_certain, "{checked:?}");
            let inventory = Devices::default();
            let claim_use = check.claim_use(vec![uid.clone()], &none_prepared, &inventory, None);
            let (view, _) = claim_use.await;
            assert_eq!(view.unanswered.contains(&uid), is_certain, "{view:?}");
        }
    }

    #[test]
    fn a_missing_named_socket_means_no_runtime() {
        let root = tempfile::tempdir().unwrap();
        let socket = root.path().join("cri.sock");
        let is_certain = || {
            let client = CriClient::find(Some(&socket), root.path(), Path::new("/dev"));
            client.unwrap().is_certain()
        };
        assert!(!is_certain());
        std::fs::write(&socket, "").unwrap();
        assert!(is_certain());
    }

    /// A runtime with a running container, an exited one, one removed after the list, and one not started yet.
    #[derive(Clone, Default)]
    struct Runtime {
        lists: Arc<AtomicUsize>,
        statuses: Arc<AtomicUsize>,
        /// Whether two other containers run: the status of one exceeds the limit of the runtime, that of the other ours.
        has_huge: Arc<AtomicBool>,
    }

    #[tonic::async_trait]
    impl RuntimeService for Runtime {
        async fn version(&self, _: Request<VersionRequest>) -> Result<Response<VersionResponse>, Status> {
            Err(Status::unimplemented("not used"))
        }

        async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
            Err(Status::unimplemented("not used"))
        }

        async fn list_containers(
            &self,
            _: Request<ListContainersRequest>,
        ) -> Result<Response<ListContainersResponse>, Status> {
            self.lists.fetch_add(1, Ordering::SeqCst);
            let container = |id: &str, state: ContainerState| Container {
                id: id.into(),
                state: state.into(),
                created_at: 1,
                labels: [
                    (POD_NAMESPACE, "default"),
                    (POD_NAME, "p"),
                    (POD_UID, "u-1"),
                    (CONTAINER_NAME, "main"),
                ]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            };
            let mut containers = vec![
                container("runs", ContainerState::ContainerRunning),
                container("ended", ContainerState::ContainerExited),
                container("gone", ContainerState::ContainerRunning),
                container("created", ContainerState::ContainerCreated),
            ];
            if self.has_huge.load(Ordering::SeqCst) {
                containers.push(container("huge", ContainerState::ContainerRunning));
                containers.push(container("large", ContainerState::ContainerRunning));
            }
            Ok(Response::new(ListContainersResponse { containers }))
        }

        async fn container_status(
            &self,
            request: Request<ContainerStatusRequest>,
        ) -> Result<Response<ContainerStatusResponse>, Status> {
            self.statuses.fetch_add(1, Ordering::SeqCst);
            let request = request.into_inner();
            let minor = match request.container_id.as_str() {
                "runs" if request.verbose => 6,
                "created" if request.verbose => 7,
                "huge" => return Err(Status::resource_exhausted("message larger than max")),
                "large" => {
                    let info = [("info".to_owned(), " ".repeat(MAX_ANSWER))].into();
                    return Ok(Response::new(ContainerStatusResponse { info }));
                }
                _ => return Err(Status::not_found("no such container")),
            };
            let devices = format!(r#"[{{"type":"c","major":120,"minor":{minor}}}]"#);
            let text = format!(r#"{{"runtimeSpec":{{"linux":{{"devices":{devices}}}}}}}"#);
            let info = [("info".to_owned(), text)].into();
            Ok(Response::new(ContainerStatusResponse { info }))
        }
    }

    #[tokio::test]
    async fn the_runtime_is_asked_for_each_container_once() {
        let root = tempfile::tempdir().unwrap();
        let socket = root.path().join("cri.sock");
        let runtime = Runtime::default();
        let (listed, asked) = (runtime.lists.clone(), runtime.statuses.clone());
        let has_huge = runtime.has_huge.clone();
        let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let server = Server::builder().add_service(RuntimeServiceServer::new(runtime));
        let server = tokio::spawn(server.serve_with_incoming(listener));
        let client = CriClient::find(Some(&socket), root.path(), Path::new("/dev")).unwrap();
        let driver = DriverName::parse("drayman.dev").unwrap();
        let device = |minor| Device {
            device_numbers: [DeviceNumber {
                kind: DeviceNodeKind::Character,
                major: 120,
                minor,
            }]
            .into(),
            ..Device::default()
        };
        for _ in 0..2 {
            let seen = client.list_containers().await.unwrap();
            let user = seen.user_of_nodes(&driver, &device(6)).unwrap();
            assert_eq!(user.to_string(), "container main of pod default/p");
            assert_eq!(seen.0.len(), 2);
            // A created container may start at any time, however old the runtime says it is.
            assert!(seen.user_of_nodes(&driver, &device(7)).is_some());
        }
        assert_eq!(
            asked.load(Ordering::SeqCst),
            4,
            "the devices of a container are kept"
        );

        // Calls during a query share the next one.
        let before = listed.load(Ordering::SeqCst);
        let all = futures::future::join_all((0..10).map(|_| client.list_containers())).await;
        assert!(all.iter().all(Result::is_ok));
        assert_eq!(listed.load(Ordering::SeqCst) - before, 2);

        // A socket that was not configured may belong to a runtime that kubelet does not use.
        let found = || CriClient {
            is_named: false,
            ..CriClient::find(Some(&socket), root.path(), Path::new("/dev")).unwrap()
        };
        let problem = found().list_containers().await.unwrap_err();
        assert!(problem.contains("kubelet's runtime"), "{problem}");
        std::fs::create_dir_all(root.path().join("pods/u-1")).unwrap();
        found().list_containers().await.unwrap();

        has_huge.store(true, Ordering::SeqCst);
        let before = asked.load(Ordering::SeqCst);
        for _ in 0..2 {
            let seen = client.list_containers().await.unwrap();
            let problems = seen
                .0
                .iter()
                .filter_map(|container| container.given.as_ref().err());
            let [of_runtime, own] = problems.collect::<Vec<_>>()[..] else {
                panic!("{seen:?}");
            };
            assert_eq!(of_runtime, "ResourceExhausted: message larger than max");
            assert!(own.contains("OutOfRange"), "{own}");
        }
        // Three more containers; the removed one is asked for each time.
        assert_eq!(asked.load(Ordering::SeqCst) - before, 4);
        server.abort();
    }
}
