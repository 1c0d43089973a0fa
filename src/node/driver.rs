//! [`NodeDriver`]: what finds the devices of a node and knows what a container gets for one.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;

use crate::core::node::injection::Injection;
use crate::core::node::inventory::Devices;

/// The devices of a node, whatever they are. The built-in discovery of device nodes is one.
pub trait NodeDriver: Send + Sync + 'static {
    /// The devices that are there, now and after each change. The first value is the result of a complete search.
    fn devices(&self) -> watch::Receiver<Arc<Devices>>;

    /// What a container gets for a device, after a look at whether it is still the one that was found: a device that has
    /// gone or has become another is an error, never replaced. Asked again for a device that a claim holds already, for
    /// instance after a restart; must change nothing.
    fn injection(&self, device: &str) -> impl Future<Output = Result<Injection, NodeDriverError>> + Send;
}

/// Why a device cannot be handed out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeDriverError {
    /// It is not there.
    #[error("device {device:?} is not on this node (any more): {problem}")]
    Gone {
        /// The device.
        device: String,
        /// What was found instead.
        problem: String,
    },
    /// Something else is in its place.
    #[error(
        "device {device:?} has become another since it was found ({before}, now {now}); it is looked for again"
    )]
    Changed {
        /// The device.
        device: String,
        /// What it was.
        before: String,
        /// What it is.
        now: String,
    },
    /// Nobody answers.
    #[error("device {0:?} cannot be looked at, because the search for devices has ended")]
    Ended(String),
}

impl NodeDriverError {
    /// CamelCase, from a small fixed set: the reason of the event, and a metric's label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Gone { .. } => "DeviceGone",
            Self::Changed { .. } => "DeviceChanged",
            Self::Ended(_) => "DiscoveryEnded",
        }
    }
}
