//! The companion that runs on every node: a shell around [`crate::core::node`].

mod announce;
pub mod companion;
pub mod config;
pub mod discover;
pub mod door;
pub mod driver;
mod events;
pub mod figures;
pub mod inventory;
mod orphans;
pub mod owner;
pub mod records;
mod reload;
mod rounds;
pub mod run;
pub mod store;
pub mod transport;
pub mod witness;

pub use crate::core::node::request;
pub use run::{Node, NodeBuilder, NodeError};
