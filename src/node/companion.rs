//! The interface between kubelet's endpoints and the task that owns the node's prepared claims.
//!
//! An endpoint decodes its API version and calls this trait; it keeps no state and makes no decisions. Each call runs in a detached
//! task: if the caller goes away at kubelet's deadline, the work continues, and a repeated call joins it.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;

use crate::core::prepare::container_edits::ContainerEdits;
pub use crate::core::prepare::preferred::Preference;
pub use crate::core::prepare::request::{ClaimToPrepare, ClaimToUnprepare, PluginDevice};
use crate::node::kubelet::transport::GrpcCalls;

/// Operations that kubelet can request of this node, independent of API and version.
pub trait Companion: Send + Sync + 'static {
    /// Metrics of the endpoints' calls.
    fn grpc_calls(&self) -> Arc<GrpcCalls> {
        Arc::default()
    }

    /// Prepares claims. Afterwards a container with the returned CDI device ids gets the allocated devices.
    ///
    /// Idempotent. The answer has one entry per request, in order. An error is a message for the pod's event, and kubelet retries.
    fn prepare(
        &self,
        claims: Vec<ClaimToPrepare>,
    ) -> impl Future<Output = Vec<Result<Vec<String>, CompanionError>>> + Send;

    /// Undoes [`Companion::prepare`]. An unknown claim succeeds, since nothing is prepared for it.
    ///
    /// The answer has one entry per request, in order.
    fn unprepare(
        &self,
        claims: Vec<ClaimToUnprepare>,
    ) -> impl Future<Output = Vec<Result<(), CompanionError>>> + Send;

    /// The devices of an extended resource, now and after each change; `None` if the resource is unknown.
    fn plugin_devices(&self, resource_name: &str) -> Option<watch::Receiver<Vec<PluginDevice>>>;

    /// Whether kubelet must call [`Companion::check_start`] before each container with devices of this resource starts.
    fn checks_start(&self, resource_name: &str) -> bool;

    /// Chooses devices of an extended resource: one preferred allocation request and one list of device ids per container.
    fn choose(&self, resource_name: &str, wishes: Vec<Preference>) -> Vec<Vec<String>>;

    /// Whether containers with these devices of an extended resource may start or restart now.
    fn check_start(
        &self,
        resource_name: &str,
        devices: Vec<String>,
    ) -> impl Future<Output = Result<(), CompanionError>> + Send;

    /// Allocates devices of an extended resource: one list of device ids and one set of container edits per container.
    fn allocate(
        &self,
        resource_name: &str,
        containers: Vec<Vec<String>>,
    ) -> impl Future<Output = Result<Vec<ContainerEdits>, CompanionError>> + Send;
}

/// Why the companion rejects a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CompanionError {
    /// CamelCase, from a small fixed set: the reason of the event and a metric label.
    pub reason: &'static str,
    /// The problem and its remedy, as shown in the pod's events.
    pub message: String,
    /// Whether the request is invalid (gRPC `INVALID_ARGUMENT`) or the node's state prevents it (`FAILED_PRECONDITION`).
    pub invalid_request: bool,
}
