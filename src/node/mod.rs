//! The companion, which runs on every node: the runtime of [`crate::core::prepare`], [`crate::core::discovery`] and
//! [`crate::core::slices`].
//!
//! * [`config`] is the node's configuration, which [`reload`] watches. [`discovery`] finds the devices that it describes: it is the
//!   built-in [`NodeDriver`](driver::NodeDriver).
//! * [`kubelet`] serves kubelet's APIs, and [`service`] queues their requests for [`state`], which owns prepared claims and storage.
//!   `core::prepare::plan` decides whether a Prepare is refused.
//! * [`publish`] writes ResourceSlices or the NodeInventory, and events about the Node.
//! * [`orphans`] looks for claims that kubelet has forgotten, and [`container_runtime`] for containers that have a device.
//! * [`run`] starts and stops all of it; [`hand_over`] passes the node to the next companion in structured mode. [`admin`] is
//!   the socket for operators on the node.

pub(crate) mod admin;
mod claim_watch;
pub(crate) mod container_runtime;
mod directory_watch;
pub mod driver;
mod hand_over;
pub mod metrics;
mod orphans;
mod rate_limit;
mod reload;
mod resync;
pub(crate) mod state;
mod watch;

#[cfg(not(feature = "internals"))]
pub(crate) mod config;
#[cfg(feature = "internals")]
pub mod config;
#[cfg(not(feature = "internals"))]
pub(crate) mod context;
#[cfg(feature = "internals")]
pub mod context;
#[cfg(not(feature = "internals"))]
pub(crate) mod discovery;
#[cfg(feature = "internals")]
pub mod discovery;
#[cfg(not(feature = "internals"))]
pub(crate) mod kubelet;
#[cfg(feature = "internals")]
pub mod kubelet;
#[cfg(not(feature = "internals"))]
pub(crate) mod publish;
#[cfg(feature = "internals")]
pub mod publish;
#[cfg(not(feature = "internals"))]
pub(crate) mod run;
#[cfg(feature = "internals")]
pub mod run;
#[cfg(not(feature = "internals"))]
pub(crate) mod service;
#[cfg(feature = "internals")]
pub mod service;

pub use crate::core::names::{DriverNameError, NameError};
pub use crate::core::prepare::checkpoint::CheckpointError;
pub use crate::core::prepare::device_plugin::ExtendedResource;
pub use config::{ConfigError, Position};
pub use kubelet::device_plugin::PluginRegistration;
pub use kubelet::transport::{SocketError, SocketPath};
pub use kubelet::{KubeletApiError, KubeletPaths};
pub use run::{Node, NodeBuilder, NodeError};
pub use state::storage::StoreError;
