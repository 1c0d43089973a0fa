//! The seam between kubelet's doors and the task that owns the node's ledger.
//!
//! A door decodes a wire version and calls this; it holds no state and decides nothing. The owner answers each call from a
//! detached task, so that a caller that goes away (kubelet's deadline) leaves the work running, and a repeat joins it.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;

use crate::core::prepare::injection::Injection;
pub use crate::core::prepare::preferred::Preference;
pub use crate::core::prepare::request::{ClaimToPrepare, ClaimToUnprepare, PluginDevice};
use crate::node::kubelet::transport::GrpcCalls;

/// What kubelet may ask of this node, whatever the door and the version.
pub trait Companion: Send + Sync + 'static {
    /// Where the calls of the doors are counted.
    fn grpc_calls(&self) -> Arc<GrpcCalls> {
        Arc::default()
    }

    /// Prepares claims: afterwards a container that is given the CDI ids gets what was allocated.
    ///
    /// Idempotent. The answer has one entry per request, in order; a failure is a sentence for the pod's event, and kubelet tries again.
    fn prepare(
        &self,
        claims: Vec<ClaimToPrepare>,
    ) -> impl Future<Output = Vec<Result<Vec<String>, CompanionError>>> + Send;

    /// Undoes [`Companion::prepare`]. An unknown claim is a success: there is nothing to undo.
    ///
    /// The answer has one entry per request, in order.
    fn unprepare(
        &self,
        claims: Vec<ClaimToUnprepare>,
    ) -> impl Future<Output = Vec<Result<(), CompanionError>>> + Send;

    /// The devices of an extended resource, now and after each change; `None` if there is no such resource.
    fn plugin_devices(&self, resource_name: &str) -> Option<watch::Receiver<Vec<PluginDevice>>>;

    /// Whether each container with devices of this resource asks again before it starts ([`Companion::check_start`]).
    fn checks_start(&self, resource_name: &str) -> bool;

    /// Chooses devices of an extended resource for containers: one wish per container, one list of ids each.
    fn choose(&self, resource_name: &str, wishes: Vec<Preference>) -> Vec<Vec<String>>;

    /// Whether containers with these devices of an extended resource may start now, for the first time or again.
    fn check_start(
        &self,
        resource_name: &str,
        devices: Vec<String>,
    ) -> impl Future<Output = Result<(), CompanionError>> + Send;

    /// Hands devices of an extended resource to containers: one list of device ids per container, one injection each.
    fn allocate(
        &self,
        resource_name: &str,
        containers: Vec<Vec<String>>,
    ) -> impl Future<Output = Result<Vec<Injection>, CompanionError>> + Send;
}

/// Why the companion refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CompanionError {
    /// CamelCase, from a small fixed set: the reason of the event, and a metric's label.
    pub reason: &'static str,
    /// What is wrong and what to do, as the person who reads the pod's events shall see it.
    pub message: String,
    /// Whether the request itself is at fault (gRPC `INVALID_ARGUMENT`) or the node's state is (`FAILED_PRECONDITION`).
    pub invalid_request: bool,
}
