//! Client of kubelet's PodResources API, v1, which lists the devices of each container.
//!
//! Kubelet serves it since 1.20 at `pod-resources/kubelet.sock` below its root directory. It allows 100 calls a second with a burst
//! of ten, shared by all clients on the node. We use at most a tenth of that rate.

mod grants;

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{sleep, sleep_until, timeout};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::KubeletPaths;
use crate::api::proto::pod_resources_v1 as v1;
use crate::api::proto::pod_resources_v1::pod_resources_lister_client::PodResourcesListerClient;
use crate::node::rate_limit::RateLimit;
pub use grants::{KubeletGrants, withdrawn_devices};

/// Deadline of a call, including the connection.
const CALL_LIMIT: Duration = Duration::from_secs(3);
/// Largest response in bytes. Kubelet sends all pods of the node in one message.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// Burst size, and the interval in which one further call becomes available.
const BURST: u32 = 5;
const REFILL: Duration = Duration::from_millis(100);
/// Number of retries after kubelet's rate limit, and the delay before each.
const RETRIES: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Why a PodResources call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum PodResourcesError {
    /// The socket cannot be reached: kubelet is down, older than 1.20, or has another root directory.
    #[error("kubelet does not answer at {socket:?}: {problem}")]
    Absent { socket: PathBuf, problem: String },
    /// Kubelet does not implement this call, or has it disabled.
    #[error("this kubelet does not offer it: {0}")]
    Unsupported(String),
    #[error("kubelet's rate limit for the PodResources API, shared by all clients on the node, is exhausted")]
    TooMany,
    #[error("no answer within {} s", CALL_LIMIT.as_secs())]
    Timeout,
    /// Any other error from kubelet.
    #[error("kubelet refuses: {0}")]
    Refused(String),
}

impl PodResourcesError {
    /// CamelCase, from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Absent { .. } => "PodResourcesAbsent",
            Self::Unsupported(_) => "PodResourcesUnsupported",
            Self::TooMany => "PodResourcesTooMany",
            Self::Timeout => "PodResourcesTimeout",
            Self::Refused(_) => "PodResourcesRefused",
        }
    }
}

/// PodResources client. It connects on the first call, and again after a failed one.
#[derive(Debug)]
pub struct PodResourcesClient {
    socket: PathBuf,
    state: Mutex<ClientState>,
}

#[derive(Debug)]
struct ClientState {
    channel: Option<Channel>,
    rate_limit: RateLimit,
}

impl PodResourcesClient {
    /// Uses the kubelet with these directories.
    pub fn new(paths: &KubeletPaths) -> Self {
        Self {
            socket: paths.pod_resources_socket(),
            state: Mutex::new(ClientState {
                channel: None,
                rate_limit: RateLimit::new(BURST, REFILL),
            }),
        }
    }

    /// All pods of the node with their containers' devices.
    pub async fn list(&self) -> Result<Vec<v1::PodResources>, PodResourcesError> {
        // The lock serialises calls, which also protects the rate limit.
        let mut state = self.state.lock().await;
        let mut retries = 0;
        loop {
            sleep_until(state.rate_limit.due()).await;
            state.rate_limit.take();
            let answer = timeout(CALL_LIMIT, self.once(&mut state.channel)).await;
            let error = match answer.unwrap_or(Err(PodResourcesError::Timeout)) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if error == PodResourcesError::TooMany && retries < RETRIES {
                retries += 1;
                sleep(RETRY_PAUSE).await;
                continue;
            }
            // The next call opens a new connection.
            state.channel = None;
            return Err(error);
        }
    }

    async fn once(&self, channel: &mut Option<Channel>) -> Result<Vec<v1::PodResources>, PodResourcesError> {
        let absent = |problem: String| PodResourcesError::Absent {
            socket: self.socket.clone(),
            problem,
        };
        let connected = if let Some(channel) = channel {
            channel.clone()
        } else {
            let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket.display()))
                .map_err(|error| absent(error.to_string()))?;
            let connected = endpoint.connect().await.map_err(|error| {
                let cause = std::error::Error::source(&error).map_or_else(String::new, ToString::to_string);
                absent(format!("{error}: {cause}"))
            })?;
            channel.insert(connected).clone()
        };
        let mut client = PodResourcesListerClient::new(connected).max_decoding_message_size(MAX_ANSWER);
        let answer = client.list(v1::ListPodResourcesRequest {}).await;
        answer
            .map(|answer| answer.into_inner().pod_resources)
            .map_err(|status| match status.code() {
                Code::Unimplemented => PodResourcesError::Unsupported(status.message().to_owned()),
                Code::ResourceExhausted if status.message().contains("rate limit") => {
                    PodResourcesError::TooMany
                }
                Code::Unavailable | Code::Cancelled => absent(status.message().to_owned()),
                _ => PodResourcesError::Refused(status.message().to_owned()),
            })
    }
}
