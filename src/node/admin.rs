//! The companion's admin socket, for operators on the node (lists prepared claims and releases them manually) and for the next companion
//! ([`hand_over`](super::hand_over)).
//!
//! The socket is `records.sock` beside the checkpoint, accessible only to root like all our sockets. If no companion runs, the checkpoint
//! can be read; a release requires a companion, because the driver must revert its work.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::api::proto::MAX_REQUEST;
use crate::api::proto::node_records::records_client::RecordsClient;
use crate::api::proto::node_records::records_server::{Records, RecordsServer};
use crate::api::proto::node_records::{
    HandOverRequest, HandOverResponse, Holding, HoldingsRequest, HoldingsResponse, InContainer,
    ReleaseRequest, ReleaseResponse,
};
use crate::core::prepare::recovery::holdings;
use crate::node::hand_over::HandOver;
use crate::node::kubelet::transport::{Listening, SocketError, SocketPath, listen};
use crate::node::service::{NodeService, ReleaseError};
use crate::node::state::storage::{Paths, Store, StoreError, boot_id};

/// Deadline of an answer from the companion, which itself may query kubelet for a few seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Path of the admin socket.
pub fn socket(state: &Path, kubelet_root: &Path) -> SocketPath {
    SocketPath {
        path: state.join("records.sock"),
        root: kubelet_root.to_owned(),
        option: crate::node::kubelet::ROOT_DIR_OPTION,
    }
}

/// Serves the admin socket until the shutdown.
pub(super) async fn serve(
    location: SocketPath,
    node: NodeService,
    hand_over: HandOver,
    shutdown: CancellationToken,
) -> Result<Listening, SocketError> {
    let calls = node.grpc_calls();
    let server = RecordsServer::new(AdminService { node, hand_over }).max_decoding_message_size(MAX_REQUEST);
    listen(location, Routes::new(server), calls, shutdown).await
}

struct AdminService {
    node: NodeService,
    hand_over: HandOver,
}

#[tonic::async_trait]
impl Records for AdminService {
    async fn holdings(&self, _: Request<HoldingsRequest>) -> Result<Response<HoldingsResponse>, Status> {
        let holdings = self
            .node
            .holdings()
            .await
            .ok_or_else(|| Status::unavailable("the companion is stopping"))?;
        let in_containers = self
            .node
            .in_containers()
            .await
            .ok_or_else(|| Status::unavailable("the companion is stopping"))?;
        let in_containers = in_containers
            .into_iter()
            .map(|(device, holder)| InContainer { device, holder })
            .collect();
        Ok(Response::new(HoldingsResponse {
            holdings,
            in_containers,
        }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        let ReleaseRequest { claim_uid, force } = request.into_inner();
        match self.node.release(claim_uid, force).await {
            Ok(holding) => Ok(Response::new(ReleaseResponse {
                released: Some(holding),
            })),
            Err(error @ ReleaseError::Refused(_)) => Err(Status::failed_precondition(error.to_string())),
            Err(error) => Err(Status::unavailable(error.to_string())),
        }
    }

    type HandOverStream = BoxStream<'static, Result<HandOverResponse, Status>>;

    async fn hand_over(&self, _: Request<HandOverRequest>) -> Result<Response<Self::HandOverStream>, Status> {
        let offer = self.hand_over.offer().ok_or_else(|| {
            Status::failed_precondition(
                "this companion hands over in structured mode only, and to one companion at a time",
            )
        })?;
        Ok(Response::new(offer.map(|()| Ok(HandOverResponse {})).boxed()))
    }
}

/// Why the prepared claims cannot be read or changed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum RecordsError {
    /// No companion answers, and its checkpoint cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "there are no records of driver {driver} in {directory}: check the driver name and kubelet's root directory"
    )]
    Nothing { driver: String, directory: PathBuf },
    /// The companion refused the request.
    #[error("{0}")]
    Refused(String),
    /// The companion returned an error.
    #[error("{0}")]
    Companion(String),
    #[error(
        "the companion at {socket} does not answer within {} s: check its log, and run `drayman node holdings` before you repeat a release, which may still take effect",
        ANSWER_TIMEOUT.as_secs()
    )]
    Silent { socket: PathBuf },
    #[error(
        "no companion runs on this node, and only a companion can release a claim: start it and repeat the command. Until then no device of this node is handed out"
    )]
    NotRunning,
    #[error("cannot read the boot id: {0}")]
    BootId(std::io::Error),
}

/// Access to a node's prepared claims: through the running companion, else to its checkpoint.
#[derive(Debug)]
pub enum Access {
    /// The companion is running.
    Running(Companion),
    /// No companion is running. Each read takes the companion's lock, so that none starts meanwhile.
    Checkpoint {
        /// The companion's files.
        paths: Box<Paths>,
        /// The id of this boot.
        boot_id: String,
    },
}

/// A connection to the running companion.
#[derive(Debug)]
pub struct Companion {
    client: RecordsClient<tonic::transport::Channel>,
    socket: PathBuf,
}

impl Companion {
    /// Connects to the companion; `None` if nothing listens on the socket.
    async fn connect(socket: PathBuf) -> Result<Option<Self>, RecordsError> {
        let Ok(endpoint) = Endpoint::from_shared(format!("unix://{}", socket.display())) else {
            return Ok(None);
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, endpoint.connect()).await {
            Ok(Ok(channel)) => Ok(Some(Self {
                client: RecordsClient::new(channel),
                socket,
            })),
            Ok(Err(_)) => Ok(None),
            Err(_) => Err(RecordsError::Silent { socket }),
        }
    }

    /// Calls the companion, which answers when it ends. `None` if none listens on the socket, or if it does not hand over.
    pub(super) async fn ask_for_hand_over(socket: PathBuf) -> Option<Streaming<HandOverResponse>> {
        let mut companion = Self::connect(socket).await.ok()??;
        let call = companion.client.hand_over(HandOverRequest {}).await;
        call.ok().map(Response::into_inner)
    }

    /// Waits for an answer until the deadline.
    async fn answer<T>(
        socket: &Path,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, RecordsError> {
        match tokio::time::timeout(ANSWER_TIMEOUT, call).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
                Err(RecordsError::Refused(status.message().to_owned()))
            }
            Ok(Err(status)) => Err(RecordsError::Companion(status.message().to_owned())),
            Err(_) => Err(RecordsError::Silent {
                socket: socket.to_owned(),
            }),
        }
    }
}

/// The holders of a node's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldDevices {
    /// The prepared claims.
    pub by_claims: Vec<Holding>,
    /// Devices of mode `both` that containers have as extended resources, each with its container's display name. `None` if no
    /// companion runs, because only a companion can ask kubelet.
    pub by_containers: Option<BTreeMap<String, String>>,
}

impl Access {
    /// Connects to the companion, or locates its checkpoint. Changes nothing.
    pub async fn find(paths: Paths, kubelet_root: &Path) -> Result<Self, RecordsError> {
        if !paths.state.is_dir() {
            return Err(RecordsError::Nothing {
                driver: paths.driver.to_string(),
                directory: paths.state,
            });
        }
        let socket = socket(&paths.state, kubelet_root).path;
        if let Some(companion) = Companion::connect(socket).await? {
            return Ok(Self::Running(companion));
        }
        let boot_id = boot_id().map_err(RecordsError::BootId)?;
        let paths = Box::new(paths);
        Ok(Self::Checkpoint { paths, boot_id })
    }

    /// Lists the devices held by claims and by containers without a claim.
    pub async fn holdings(&mut self) -> Result<HeldDevices, RecordsError> {
        match self {
            Self::Running(Companion { client, socket }) => {
                let HoldingsResponse {
                    holdings,
                    in_containers,
                } = Companion::answer(socket, client.holdings(HoldingsRequest {})).await?;
                let in_containers = in_containers.into_iter().map(|one| (one.device, one.holder));
                Ok(HeldDevices {
                    by_claims: holdings,
                    by_containers: Some(in_containers.collect()),
                })
            }
            Self::Checkpoint { paths, boot_id } => Ok(HeldDevices {
                by_claims: holdings(&Store::read(paths, boot_id)?, &BTreeMap::new()),
                by_containers: None,
            }),
        }
    }

    /// Releases the devices of a claim and returns the released holding.
    pub async fn release(&mut self, uid: &str, force: bool) -> Result<Holding, RecordsError> {
        match self {
            Self::Running(Companion { client, socket }) => {
                let claim_uid = uid.to_owned();
                let call = client.release(ReleaseRequest { claim_uid, force });
                let answer = Companion::answer(socket, call).await?;
                Ok(answer.released.unwrap_or_default())
            }
            Self::Checkpoint { .. } => Err(RecordsError::NotRunning),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::names::DriverName;

    #[tokio::test]
    async fn a_silent_companion_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let driver = DriverName::parse("drayman.dev").unwrap();
        let paths = Paths::new(driver, directory.path(), &directory.path().join("cdi"));
        std::fs::create_dir_all(&paths.state).unwrap();
        let path = socket(&paths.state, directory.path()).path;
        // The kernel accepts connections, but nothing reads from them.
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut access = Access::find(paths, directory.path()).await.unwrap();
        tokio::time::pause();
        let error = access.holdings().await.unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains(path.to_str().unwrap()) && error.contains("30 s"),
            "{error}"
        );
        let error = access
            .release("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10", false)
            .await;
        assert!(matches!(error, Err(RecordsError::Silent { .. })), "{error:?}");
    }
}
