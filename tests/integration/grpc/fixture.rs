//! A fake companion, and a gRPC client that can send any authority.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drayman::core::prepare::container_edits::{ContainerEdits, DeviceNode, Mount};
use drayman::core::prepare::plan::Refusal;
use drayman::node::ExtendedResource;
use drayman::node::kubelet::transport::GrpcCalls;
use drayman::node::kubelet::{KubeletApiError, KubeletApiState, KubeletPaths, dra};
use drayman::node::metrics::Metrics;
use drayman::node::service::{
    Allocation, NodeRequest as Call, NodeService, PluginDevice, ServedResource, ServiceError,
};
use loona_hpack::{Decoder, Encoder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

pub(crate) const DRIVER: &str = "test.drayman.dev";
pub(crate) const RESOURCE: &str = "test.drayman.dev/port";
pub(crate) const REFUSED: &str = "DeviceSlow: the driver took more than 10 s for refuse; it is tried again";

/// Awaits a future with a timeout.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("no timeout")
}

pub(crate) async fn until_state(state: &mut watch::Receiver<KubeletApiState>, wanted: &KubeletApiState) {
    soon(state.wait_for(|now| now == wanted))
        .await
        .expect("the endpoint is running");
}

/// Waits until a file exists or not.
pub(crate) async fn until_exists(path: &Path, wanted: bool) {
    soon(async {
        while path.exists() != wanted {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A companion that answers requests of a [`NodeService`] depending on the name of the claim or device: `refuse` and `invalid` fail,
/// `forgotten` gets no answer, `slow` never ends, all others succeed.
pub(crate) struct FakeCompanion {
    pub(crate) service: NodeService,
    pub(crate) devices: watch::Sender<Vec<PluginDevice>>,
    pub(crate) counted: Arc<GrpcCalls>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl FakeCompanion {
    pub(crate) fn new() -> Arc<Self> {
        let metrics = Arc::<Metrics>::default();
        let (service, mut backend) = NodeService::new(None, Arc::clone(&metrics));
        let devices = watch::Sender::new(vec![device("a", true)]);
        let served = ServedResource {
            resource: ExtendedResource {
                pre_start_check: true,
                ..ExtendedResource::of_kind("port")
            },
            devices: devices.subscribe(),
        };
        backend
            .resources
            .send_replace(Arc::new([(RESOURCE.to_owned(), served)].into()));
        let calls = Arc::<Mutex<Vec<String>>>::default();
        let handler = RequestHandler(Arc::clone(&calls));
        tokio::spawn(async move {
            while let Some(request) = backend.requests.recv().await {
                tokio::spawn(handler.clone().serve(request));
            }
        });
        Arc::new(Self {
            service,
            devices,
            counted: metrics.calls.clone(),
            calls,
        })
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

/// Answers requests and records the calls.
#[derive(Clone)]
struct RequestHandler(Arc<Mutex<Vec<String>>>);

impl RequestHandler {
    async fn serve(self, request: Call) {
        match request {
            Call::Prepare(claims, _, sender) => {
                let mut answers = Vec::new();
                for claim in claims {
                    let handle = match &claim.allocation {
                        Allocation::Handle(handle) => handle.clone(),
                        other => format!("{other:?}"),
                    };
                    let call = format!(
                        "prepare {}/{} {} {handle}",
                        claim.namespace, claim.name, claim.uid
                    );
                    let ids = vec![format!("v/c={}", claim.uid)];
                    answers.extend(self.answer(call, &claim.name, ids).await);
                }
                let _ = sender.send(answers);
            }
            Call::Unprepare(claims, sender) => {
                let mut answers = Vec::new();
                for claim in claims {
                    let call = format!("unprepare {}/{} {}", claim.namespace, claim.name, claim.uid);
                    answers.extend(self.answer(call, &claim.name, ()).await);
                }
                let _ = sender.send(answers);
            }
            Call::CheckStart(resource_name, devices, _, sender) => {
                let call = format!("start {resource_name} {}", devices.join(","));
                let name = devices.first().cloned().unwrap_or_default();
                let _ = sender.send(self.answer(call, &name, ()).await.unwrap_or(Ok(())));
            }
            Call::Allocate(resource_name, containers, sender) => {
                let _ = sender.send(self.allocate(&resource_name, containers).await);
            }
            other => panic!("unexpected request {other:?}"),
        }
    }

    async fn answer<T>(&self, call: String, name: &str, success: T) -> Option<Result<T, ServiceError>> {
        self.0.lock().unwrap().push(call);
        match name {
            "refuse" => Some(Err(ServiceError::Slow {
                what: name.to_owned(),
            })),
            "invalid" => Some(Err(Refusal::NoResource(name.to_owned()).into())),
            "forgotten" => None,
            "slow" => std::future::pending().await,
            _ => Some(Ok(success)),
        }
    }

    async fn allocate(
        &self,
        resource_name: &str,
        containers: Vec<Vec<String>>,
    ) -> Result<Vec<ContainerEdits>, ServiceError> {
        let mut container_edits_of = Vec::new();
        for ids in containers {
            let path = format!("/dev/{}", ids.join("+"));
            let container_edits = ContainerEdits {
                device_nodes: vec![DeviceNode {
                    host_path: path.clone(),
                    container_path: path,
                    permissions: "rw".into(),
                }],
                environment: [("DEVICES".to_owned(), ids.join(","))].into(),
                mounts: vec![Mount {
                    host_path: "/opt/vendor".into(),
                    container_path: "/vendor".into(),
                    read_only: true,
                }],
                annotations: [("vendor.example/mode".to_owned(), String::new())].into(),
                cdi_devices: vec![format!("vendor.example/device={}", ids[0])],
            };
            let call = format!("allocate {resource_name} {}", ids.join(","));
            if let Some(answer) = self.answer(call, &ids[0], container_edits).await {
                container_edits_of.push(answer?);
            }
        }
        Ok(container_edits_of)
    }
}

pub(crate) fn device(id: &str, healthy: bool) -> PluginDevice {
    PluginDevice {
        id: id.into(),
        healthy,
        numa_nodes: vec![],
    }
}

/// A kubelet root directory with a running DRA endpoint.
pub(crate) struct DraEndpoint {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) companion: Arc<FakeCompanion>,
    pub(crate) state: watch::Receiver<KubeletApiState>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) task: JoinHandle<Result<(), KubeletApiError>>,
}

impl DraEndpoint {
    pub(crate) async fn open() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (companion, shutdown) = (FakeCompanion::new(), CancellationToken::new());
        let (sender, mut state) = watch::channel(KubeletApiState::Starting);
        let serve = dra::serve(
            companion.service.clone(),
            paths(&directory),
            DRIVER.into(),
            dra::DraApi::Classic,
            sender,
            shutdown.clone(),
        );
        let task = tokio::spawn(serve);
        until_state(&mut state, &KubeletApiState::Waiting).await;
        let dra = Self {
            directory,
            companion,
            state,
            shutdown,
            task,
        };
        until_exists(&dra.registration(), true).await;
        dra
    }

    pub(crate) fn registration(&self) -> PathBuf {
        paths(&self.directory).registration_socket(DRIVER).path
    }

    pub(crate) fn service(&self) -> PathBuf {
        paths(&self.directory).service_socket(DRIVER).path
    }

    pub(crate) async fn close(self) {
        self.shutdown.cancel();
        soon(self.task).await.unwrap().unwrap();
    }
}

pub(crate) fn paths(directory: &tempfile::TempDir) -> KubeletPaths {
    KubeletPaths {
        root_dir: directory.path().into(),
        device_plugin_dir: directory.path().join("device-plugins"),
    }
}

/// A tonic channel to a socket.
pub(crate) async fn channel(socket: &Path) -> Channel {
    Endpoint::from_shared(format!("unix://{}", socket.display()))
        .unwrap()
        .connect()
        .await
        .unwrap()
}

/// A gRPC client that sends raw frames on one connection.
pub(crate) struct RawClient {
    stream: UnixStream,
    encoder: Encoder<'static>,
    decoder: Decoder<'static>,
    next_stream: u32,
}

/// The result of a call: `grpc-status`, `grpc-message` and the message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RawAnswer {
    pub(crate) status: String,
    pub(crate) message: String,
    pub(crate) body: Vec<u8>,
}

impl RawClient {
    pub(crate) async fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .unwrap();
        let mut client = Self {
            stream,
            encoder: Encoder::new(),
            decoder: Decoder::new(),
            next_stream: 1,
        };
        client.frame(4, 0, 0, &[]).await;
        client
    }

    /// The connection without the header compression tables, which would dominate the memory of many clients.
    pub(crate) fn into_connection(self) -> UnixStream {
        self.stream
    }

    /// Sends a frame. A closed connection is detected when the answer is read.
    pub(crate) async fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        let _ = self.stream.write_all(&[&head, payload].concat()).await;
    }

    /// Starts a call and sends the message with the gRPC prefix.
    pub(crate) async fn begin(&mut self, authority: &str, path: &str, body: &[u8]) {
        let stream = self.next_stream;
        self.next_stream += 2;
        let note = format!("{stream:=<200}");
        let block = self.encoder.encode([
            (&b":method"[..], &b"POST"[..]),
            (b":scheme", b"http"),
            (b":path", path.as_bytes()),
            (b":authority", authority.as_bytes()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"x-note", note.as_bytes()),
        ]);
        self.frame(1, 4, stream, &block).await;
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        let message = [&[0][..], &length, body].concat();
        let mut chunks = message.chunks(16_384).peekable();
        while let Some(chunk) = chunks.next() {
            self.frame(0, u8::from(chunks.peek().is_none()), stream, chunk)
                .await;
        }
    }

    /// Reads until the end of the last started call; `None` if the server closes the connection.
    pub(crate) async fn answer(&mut self) -> Option<RawAnswer> {
        let stream = self.next_stream - 2;
        let mut answer = RawAnswer {
            status: String::new(),
            message: String::new(),
            body: Vec::new(),
        };
        loop {
            let mut head = [0; 9];
            self.stream.read_exact(&mut head).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut payload = vec![0; length];
            self.stream.read_exact(&mut payload).await.ok()?;
            let of = u32::from_be_bytes(head[5..].try_into().unwrap());
            match head[3] {
                0 if of == stream => answer.body.extend_from_slice(&payload),
                1 => {
                    for (name, value) in self.decoder.decode(&payload).unwrap() {
                        let value = String::from_utf8(value).unwrap();
                        match name.as_slice() {
                            b"grpc-status" => answer.status = value,
                            b"grpc-message" => answer.message = value,
                            _ => {}
                        }
                    }
                }
                3 if of == stream => {
                    answer.status = format!("RST_STREAM {}", payload[3]);
                    return Some(answer);
                }
                4 if head[4] == 0 => self.frame(4, 1, 0, &[]).await,
                7 => return None,
                _ => {}
            }
            if of == stream && head[3] <= 1 && head[4] & 1 != 0 {
                answer.body.drain(..answer.body.len().min(5));
                return Some(answer);
            }
        }
    }

    /// Sends a call and returns its result.
    pub(crate) async fn call(&mut self, authority: &str, path: &str, body: &[u8]) -> RawAnswer {
        self.begin(authority, path, body).await;
        soon(self.answer()).await.expect("an answer")
    }
}
