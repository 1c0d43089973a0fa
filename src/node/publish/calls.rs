//! Calls of the API server, with a deadline.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;

/// Deadline of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest delay after a failed call.
pub(super) const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Why a call to the API server failed.
#[derive(Debug, thiserror::Error)]
pub(in crate::node) enum PublishError {
    #[error("the Node object {0:?} does not exist: check --node-name")]
    NoNode(String),
    #[error("the Node object {0:?} has no uid")]
    NoUid(String),
    #[error("the API server does not answer within {} s", CALL_TIMEOUT.as_secs())]
    Timeout,
    #[error(
        "the API server rejects the {kind} of {bytes} bytes as too large ({said}): let the configuration describe fewer devices of this \
         node, or raise --max-request-bytes of etcd, which is 1.5 MiB by default"
    )]
    TooLarge {
        kind: &'static str,
        bytes: usize,
        said: String,
    },
    #[error(transparent)]
    Api(#[from] kube::Error),
}

impl PublishError {
    /// Converts the error of a write of this object: a rejection for its size names that size.
    pub(super) fn of_write(self, kind: &'static str, object: &impl serde::Serialize) -> Self {
        match self {
            // etcd's rejection arrives as an internal error.
            Self::Api(kube::Error::Api(status))
                if status.code == 413 || status.message.contains("request is too large") =>
            {
                Self::TooLarge {
                    kind,
                    bytes: serde_json::to_vec(object).map_or(0, |json| json.len()),
                    said: status.message.clone(),
                }
            }
            other => other,
        }
    }
}

/// Waits for a call until the deadline.
pub(in crate::node) async fn call<T>(
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, PublishError> {
    timeout(CALL_TIMEOUT, call)
        .await
        .map_err(|_| PublishError::Timeout)?
        .map_err(PublishError::from)
}

/// Adds up to half of the delay, depending on the node name, so that not all nodes reach a recovered API server in the same second.
pub(super) fn spread(pause: Duration, node_name: &str) -> Duration {
    pause + pause.mul_f64(f64::from(crc32fast::hash(node_name.as_bytes())) / f64::from(u32::MAX) / 2.0)
}
