//! The companion that runs on every node: a shell around [`crate::core::node`].

pub mod companion;
pub mod door;
pub mod store;
pub mod transport;
