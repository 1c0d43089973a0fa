//! The container runtime: shows which containers have which devices, and checks whether any still has one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::{debug, info, warn};

use crate::api::crd::{Device, DeviceNumber};
use crate::api::proto::cri_v1::runtime_service_client::RuntimeServiceClient;
use crate::api::proto::cri_v1::{Container, ContainerState, ContainerStatusRequest, ListContainersRequest};
use crate::core::names::{ClaimUid, DriverName};
use crate::core::prepare::inventory::Devices;
use crate::core::prepare::plan::Refusal;
use crate::core::prepare::prepared_claims::{Entry, PreparedClaims};
use crate::core::prepare::runtime_containers::{
    ContainerDevices, RuntimeContainer, RuntimeContainerState, RuntimeContainers, parse_info,
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
/// Largest response in bytes: a list of all containers, or the OCI spec of one.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// How long after the removal of a CDI file the runtime may not yet list a container created with it: the runtime reads the file during the
/// create call, shortly before it lists the container.
const SETTLE: Duration = Duration::from_secs(2);
/// Labels that kubelet sets on its containers.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Source of the devices that containers have: the container runtime, or a fake in tests.
pub trait ContainerRuntime: std::fmt::Debug + Send + Sync + 'static {
    /// All containers now. The error is a message for the user.
    fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>>;
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
    channel: Option<(PathBuf, Channel)>,
    known: KnownContainers,
    /// The containers of the last query, and when it began.
    last: Option<(Instant, Arc<RuntimeContainers>)>,
}

/// The devices of each container, which never change, and when this process first saw it.
type KnownContainers = BTreeMap<String, (ContainerDevices, Instant)>;

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
        if let Some((_, channel)) = state.channel.clone() {
            let listed = self.containers(&mut state.known, channel).await;
            // The next query opens a new connection.
            if listed.is_err() {
                state.channel = None;
            }
            return listed;
        }
        let mut problems = Vec::new();
        for socket in &self.sockets {
            match self.connect(&mut state.known, socket).await {
                Ok((channel, seen)) => {
                    info!(socket = %socket.display(), "the container runtime shows which containers have devices");
                    state.channel = Some((socket.clone(), channel));
                    return Ok(seen);
                }
                Err(problem) => problems.push(format!("{}: {problem}", socket.display())),
            }
        }
        Err(problems.join("; "))
    }

    async fn connect(
        &self,
        known: &mut KnownContainers,
        socket: &Path,
    ) -> Result<(Channel, RuntimeContainers), String> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))
            .map_err(|error| error.to_string())?;
        let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
        if !self.is_named {
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
        let seen = self.containers(known, channel.clone()).await?;
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
            let (given, since) = match known.get(&container.id) {
                Some(devices) => devices.clone(),
                None => match status(channel.clone(), &container.id, &self.dev).await? {
                    // The container was removed after it was listed.
                    None => continue,
                    Some(devices) => {
                        let devices = (devices, Instant::now());
                        known.insert(container.id.clone(), devices.clone());
                        devices
                    }
                },
            };
            let label = |name: &str| container.labels.get(name).cloned().unwrap_or_default();
            all.push(RuntimeContainer {
                namespace: label(POD_NAMESPACE),
                pod: label(POD_NAME),
                container: label(CONTAINER_NAME),
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
                    format!("the container runtime does not tell which containers have devices: {problem}")
                })
        })
    }
}

async fn list(channel: Channel) -> Result<Vec<Container>, String> {
    let mut client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let answer = client.list_containers(ListContainersRequest {}).await;
    Ok(answer.map_err(|status| message(&status))?.into_inner().containers)
}

/// The devices of a container; `None` if the container no longer exists.
async fn status(channel: Channel, id: &str, dev: &Path) -> Result<Option<ContainerDevices>, String> {
    let mut client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let request = ContainerStatusRequest {
        container_id: id.to_owned(),
        verbose: true,
    };
    let info = match client.container_status(request).await {
        Ok(answer) => answer.into_inner().info,
        Err(status) if status.code() == Code::NotFound => return Ok(None),
        Err(status) => return Err(message(&status)),
    };
    let mut given = parse_info(&info).map_err(|error| error.to_string())?;
    let numbers = given
        .host_paths
        .iter()
        .filter_map(|path| device_number(dev, path));
    given.numbers = numbers.chain(given.numbers.iter().copied()).collect();
    Ok(Some(given))
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

/// The result of a check whether containers use the devices of claims.
#[derive(Debug)]
pub(in crate::node) enum ClaimUse {
    /// The runtime does not answer or is not known.
    Unknown,
    /// It is too early to decide; repeat the check after this time.
    TooEarly(Duration),
    /// The claims whose devices no container has, and the others.
    Known {
        unused: BTreeSet<ClaimUid>,
        in_use: BTreeSet<ClaimUid>,
    },
}

/// The container runtime, and the claims that no further container can start with.
#[derive(Debug)]
pub(in crate::node) struct RuntimeCheck {
    /// `None` if no runtime reports the devices of its containers.
    runtime: Option<Arc<dyn ContainerRuntime>>,
    driver_name: DriverName,
    /// When the CDI files of claims that the API server no longer shows as holders were removed.
    cdi_removed: BTreeMap<ClaimUid, Instant>,
}

impl RuntimeCheck {
    pub(in crate::node) fn new(runtime: Option<Arc<dyn ContainerRuntime>>, driver_name: DriverName) -> Self {
        Self {
            runtime,
            driver_name,
            cdi_removed: BTreeMap::new(),
        }
    }

    /// Whether a runtime reports the devices of its containers.
    pub(in crate::node) fn is_possible(&self) -> bool {
        self.runtime.is_some()
    }

    async fn containers(&self) -> Option<Result<Arc<RuntimeContainers>, String>> {
        match &self.runtime {
            Some(runtime) => Some(runtime.list_containers().await),
            None => None,
        }
    }

    /// Adds the container that has the device to the error, if the runtime shows it.
    pub(in crate::node) async fn name_container(&self, refusal: Refusal, inventory: &Devices) -> Refusal {
        let (Refusal::Held { device, .. } | Refusal::InContainer { device, .. }) = &refusal else {
            return refusal;
        };
        let Some(Ok(containers)) = self.containers().await else {
            return refusal;
        };
        let numbers = inventory.get(device).map(|device| &*device.device_numbers);
        let numbers = numbers.unwrap_or_default();
        let has = |given: &ContainerDevices| {
            given.has_one_of(numbers) && !given.has_admin_access(&self.driver_name, device)
        };
        let Some(user) = containers.user(has) else {
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

    /// Refuses a starting container or a claim a device that another container still has: kubelet forgets pods deleted by force while their
    /// containers are ending. A runtime failure does not block: kubelet needs the runtime to start the container, too. `listed` are the
    /// containers, if the caller has listed them.
    pub(in crate::node) async fn check_unused(
        &self,
        devices: &[&Device],
        listed: Option<Result<Arc<RuntimeContainers>, String>>,
    ) -> Result<(), Refusal> {
        let containers = match listed {
            Some(listed) => Some(listed),
            None => self.containers().await,
        };
        let containers = match containers {
            None => return Ok(()),
            Some(Ok(containers)) => containers,
            Some(Err(problem)) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "whether another container has a device is not checked: {problem}"
                );
                return Ok(());
            }
        };
        for device in devices {
            if device.shares.is_some_and(|shares| shares > 1) {
                continue;
            }
            let cdi_device = self.driver_name.cdi_device_id(&device.name);
            let has = |given: &ContainerDevices| {
                let has_it =
                    given.has_one_of(&device.device_numbers) || given.cdi_devices.contains(&cdi_device);
                has_it && !given.has_admin_access(&self.driver_name, &device.name)
            };
            if let Some(user) = containers.user(has) {
                return Err(Refusal::StillUsed {
                    device: device.name.clone(),
                    holder: user.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Restricts the check to these claims, and returns those whose CDI files must be removed first, so that no further container starts
    /// with them.
    pub(in crate::node) fn begin(&mut self, uids: &[ClaimUid]) -> Vec<ClaimUid> {
        self.cdi_removed.retain(|uid, _| uids.contains(uid));
        let present = uids.iter().filter(|uid| !self.cdi_removed.contains_key(uid));
        present.cloned().collect()
    }

    /// Records that the CDI file of a claim was removed.
    pub(in crate::node) fn cdi_removed(&mut self, uid: ClaimUid) {
        self.cdi_removed.insert(uid, Instant::now());
    }

    /// Asks the runtime whether containers use the devices of these claims.
    pub(in crate::node) async fn claim_use(
        &self,
        uids: Vec<ClaimUid>,
        prepared_claims: &PreparedClaims,
    ) -> ClaimUse {
        if uids.is_empty() {
            return ClaimUse::Unknown;
        }
        if self.cdi_removed.values().any(|since| since.elapsed() < SETTLE) {
            return ClaimUse::TooEarly(SETTLE);
        }
        let containers = match self.containers().await {
            None => return ClaimUse::Unknown,
            Some(Ok(containers)) => containers,
            Some(Err(problem)) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "whether containers use the devices of claims is not checked: {problem}"
                );
                return ClaimUse::Unknown;
            }
        };
        let (unused, in_use) = uids.into_iter().partition(|uid| {
            self.cdi_removed.contains_key(uid) && !self.is_used(uid, prepared_claims, &containers)
        });
        ClaimUse::Known { unused, in_use }
    }

    /// Whether a container uses a claim's devices. Without known device numbers, only the CDI device identifies it.
    fn is_used(
        &self,
        uid: &ClaimUid,
        prepared_claims: &PreparedClaims,
        containers: &RuntimeContainers,
    ) -> bool {
        let held = prepared_claims
            .entry(uid)
            .into_iter()
            .flat_map(Entry::held_devices);
        let numbers: Vec<DeviceNumber> = held.flat_map(|held| held.numbers.iter().copied()).collect();
        let driver = &self.driver_name;
        let is_of_claim = |id: &String| driver.claim_of_cdi_id(id).as_ref() == Some(uid);
        let has = |given: &ContainerDevices| {
            given.has_one_of(&numbers) || given.cdi_devices.iter().any(is_of_claim)
        };
        match containers.user(has) {
            Some(user) => {
                debug!(claim_uid = %uid, holder = %user, "a container uses the devices of the claim");
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;
    use tonic::{Request, Response};

    use super::*;
    use crate::api::proto::cri_v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
    use crate::api::proto::cri_v1::{
        ContainerStatusResponse, ListContainersResponse, StatusRequest, StatusResponse, VersionRequest,
        VersionResponse,
    };

    /// A runtime with a running container, an exited one, one removed after the list, and one not started yet.
    #[derive(Clone, Default)]
    struct Runtime {
        lists: Arc<AtomicUsize>,
        statuses: Arc<AtomicUsize>,
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
            let containers = vec![
                container("runs", ContainerState::ContainerRunning),
                container("ended", ContainerState::ContainerExited),
                container("gone", ContainerState::ContainerRunning),
                container("created", ContainerState::ContainerCreated),
            ];
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
        let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let server = Server::builder().add_service(RuntimeServiceServer::new(runtime));
        let server = tokio::spawn(server.serve_with_incoming(listener));
        let client = CriClient::find(Some(&socket), root.path(), Path::new("/dev")).unwrap();
        for _ in 0..2 {
            let seen = client.list_containers().await.unwrap();
            let user = seen
                .user(|given| given.has_one_of(&["c120:6".parse().unwrap()]))
                .unwrap();
            assert_eq!(user.to_string(), "container main of pod default/p");
            assert_eq!(seen.0.len(), 2);
            // A created container may start at any time, however old the runtime says it is.
            assert!(
                seen.user(|given| given.has_one_of(&["c120:7".parse().unwrap()]))
                    .is_some()
            );
        }
        assert_eq!(
            asked.load(Ordering::SeqCst),
            4,
            "what a container was given is kept"
        );

        // Those who call during a query share the next one.
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
        server.abort();
    }
}
