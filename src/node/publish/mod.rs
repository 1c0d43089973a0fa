//! Writes what the node has to the API server: the NodeInventory, and events about the Node.

pub(crate) mod events;
pub mod inventory;
