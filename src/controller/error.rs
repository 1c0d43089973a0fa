//! Why a controller ends.

use std::time::Duration;

use crate::api::resource::{GROUP, VERSION};
use crate::core::lease::LeaseSettingsError;

/// Why the controller cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// The API server would reject the driver's name as part of a finalizer.
    #[error(
        "driver name {0:?} is not a lower-case DNS subdomain of at most 63 characters: the API server rejects its finalizer"
    )]
    DriverName(String),
    /// The API server does not serve the alpha API, which is off by default.
    #[error(
        "the API server does not serve {GROUP}/{VERSION}: start it with --runtime-config={GROUP}/{VERSION}=true and the feature gate DynamicResourceAllocation (Kubernetes 1.27 to 1.30); without it, and on later versions, the companions alone can serve the devices as extended resources (controller.enabled=false in the chart)"
    )]
    NotServed,
    /// With these settings two controllers could write at once, or one lost request would end the lease.
    #[error("leader election: {0}")]
    LeaderElection(#[from] LeaseSettingsError),
    /// The driver has failed to process an observation, so its state is unknown.
    #[error("the driver's state is unknown: {0}: restart the controller")]
    Observe(String),
    /// The thread that renews the lease cannot be started.
    #[error("leader election: no thread for the lease: {0}")]
    LeaseThread(#[source] std::io::Error),
    /// The client for the lease cannot be created.
    #[error("leader election: no client for the lease: {0}")]
    LeaseConnection(String),
    /// Another controller may lead by now.
    #[error(
        "the lease could not be renewed in time, so another controller may lead by now: restart this one"
    )]
    LeaseLost,
    /// The API server accepted the connection but did not answer in time.
    #[error("the API server has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// A request to the API server failed.
    #[error("the API server does not answer: {0}")]
    Unreachable(#[source] Box<kube::Error>),
}
