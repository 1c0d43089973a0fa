//! The companion, which runs on every node: the runtime of [`crate::core::prepare`].

pub mod admin;
pub mod companion;
pub mod config;
pub mod container_runtime;
pub mod discovery;
pub mod driver;
pub mod kubelet;
pub mod metrics;
mod orphans;
pub mod publish;
mod reload;
mod resync;
pub mod run;
pub mod state;

pub use crate::core::prepare::request;
pub use run::{Node, NodeBuilder, NodeError};
