//! Publishes the NodeInventory and events about the Node.

pub(crate) mod events;
pub mod inventory;
