//! Client of the container runtime's CRI socket: shows which containers have which devices.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::info;

use crate::api::proto::cri_v1::runtime_service_client::RuntimeServiceClient;
use crate::api::proto::cri_v1::{Container, ContainerState, ContainerStatusRequest, ListContainersRequest};
use crate::core::prepare::runtime_containers::{
    Given, RuntimeContainer, RuntimeContainers, State, parse_info,
};
use crate::node::discovery::device_number;
use crate::node::kubelet::KubeletPaths;

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
/// Labels that kubelet sets on its containers.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Source of the devices that containers have: the container runtime, or a fake in tests.
pub trait ContainerRuntime: std::fmt::Debug + Send + Sync + 'static {
    /// All containers now. The error is a message for the user.
    fn look(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>>;
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
    given: Known,
    /// The containers of the last query, and when it began.
    last: Option<(Instant, Arc<RuntimeContainers>)>,
}

/// The devices of each container, which never change, and when this process first saw it.
type Known = BTreeMap<String, (Given, Instant)>;

impl CriClient {
    /// Uses this socket or, without one, the usual sockets that exist. `None` if there are none.
    pub fn find(socket: Option<&Path>, kubelet: &KubeletPaths, dev: &Path) -> Option<Self> {
        let (sockets, is_named) = if let Some(socket) = socket {
            (vec![socket.to_owned()], true)
        } else {
            let there = SOCKETS.iter().map(PathBuf::from).filter(|path| path.exists());
            (there.collect(), false)
        };
        (!sockets.is_empty()).then(|| Self {
            sockets,
            is_named,
            pods: kubelet.root_dir.join("pods"),
            dev: dev.to_owned(),
            state: Mutex::default(),
        })
    }

    async fn ask(&self) -> Result<Arc<RuntimeContainers>, String> {
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
            let looked = self.containers(&mut state.given, channel).await;
            // The next query opens a new connection.
            if looked.is_err() {
                state.channel = None;
            }
            return looked;
        }
        let mut problems = Vec::new();
        for socket in &self.sockets {
            match self.connect(&mut state.given, socket).await {
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
        given: &mut Known,
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
        let seen = self.containers(given, channel.clone()).await?;
        Ok((channel, seen))
    }

    async fn containers(&self, given: &mut Known, channel: Channel) -> Result<RuntimeContainers, String> {
        let listed = list(channel.clone()).await?;
        given.retain(|id, _| listed.iter().any(|container| container.id == *id));
        let mut all = Vec::new();
        for container in listed {
            let state = state_of(&container);
            if state == State::Exited {
                continue;
            }
            let (told, since) = match given.get(&container.id) {
                Some(known) => known.clone(),
                None => match status(channel.clone(), &container.id, &self.dev).await? {
                    // The container was removed after it was listed.
                    None => continue,
                    Some(told) => {
                        let known = (told, Instant::now());
                        given.insert(container.id.clone(), known.clone());
                        known
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
                given: told,
            });
        }
        Ok(RuntimeContainers(all))
    }
}

impl ContainerRuntime for CriClient {
    fn look(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>> {
        Box::pin(async {
            timeout(LIMIT, self.ask())
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
    Ok(answer.map_err(|status| told(&status))?.into_inner().containers)
}

/// The devices of a container; `None` if the container no longer exists.
async fn status(channel: Channel, id: &str, dev: &Path) -> Result<Option<Given>, String> {
    let mut client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let request = ContainerStatusRequest {
        container_id: id.to_owned(),
        verbose: true,
    };
    let info = match client.container_status(request).await {
        Ok(answer) => answer.into_inner().info,
        Err(status) if status.code() == Code::NotFound => return Ok(None),
        Err(status) => return Err(told(&status)),
    };
    let mut given = parse_info(&info).map_err(|error| error.to_string())?;
    let numbers = given
        .host_paths
        .iter()
        .filter_map(|path| device_number(dev, path));
    given.numbers = numbers.chain(given.numbers.iter().copied()).collect();
    Ok(Some(given))
}

fn told(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

fn state_of(container: &Container) -> State {
    match container.state() {
        ContainerState::ContainerCreated => State::Created,
        ContainerState::ContainerExited => State::Exited,
        // Unknown counts as running: nothing shows that the container has ended.
        ContainerState::ContainerRunning | ContainerState::ContainerUnknown => State::Running,
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
        let kubelet = KubeletPaths {
            root_dir: root.path().to_owned(),
            ..KubeletPaths::default()
        };
        let socket = root.path().join("cri.sock");
        let runtime = Runtime::default();
        let (listed, asked) = (runtime.lists.clone(), runtime.statuses.clone());
        let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let server = Server::builder().add_service(RuntimeServiceServer::new(runtime));
        let server = tokio::spawn(server.serve_with_incoming(listener));
        let witness = CriClient::find(Some(&socket), &kubelet, Path::new("/dev")).unwrap();
        for _ in 0..2 {
            let seen = witness.look().await.unwrap();
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
        let all = futures::future::join_all((0..10).map(|_| witness.look())).await;
        assert!(all.iter().all(Result::is_ok));
        assert_eq!(listed.load(Ordering::SeqCst) - before, 2);

        // A socket that was not configured may belong to a runtime that kubelet does not use.
        let found = || CriClient {
            is_named: false,
            ..CriClient::find(Some(&socket), &kubelet, Path::new("/dev")).unwrap()
        };
        let problem = found().look().await.unwrap_err();
        assert!(problem.contains("kubelet's runtime"), "{problem}");
        std::fs::create_dir_all(root.path().join("pods/u-1")).unwrap();
        found().look().await.unwrap();
        server.abort();
    }
}
