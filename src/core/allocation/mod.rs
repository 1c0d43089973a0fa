//! Devices and their allocation, for the built-in driver: decisions without any Kubernetes write.
//!
//! ```text
//! NodeInventory ------> inventory --+
//! claims -------------> index ------+--> allocator --> evaluate --> search
//! selector results ---> selectors --+        |
//! parameters ---------> parameters --------->+
//! ```
//!
//! * [`parameters`]: validated parameters of classes and claims.
//! * [`inventory`]: the devices of all nodes, with their attributes.
//! * [`index`]: the allocation index: the devices that each claim holds, read from the claims.
//! * [`selectors`]: selector results by attribute set, and the pending evaluations of the active selectors.
//! * [`search`]: finds devices for the requests of all claims of a pod, with a limit on its work.
//! * [`evaluate`]: whether the claims of a pod fit on a node, or why not.
//! * [`allocator`]: the device allocator, which owns inventory, index and selector results.

pub mod allocator;
pub mod evaluate;
pub mod index;
pub mod inventory;
pub mod parameters;
pub mod search;
pub mod selectors;

#[cfg(test)]
pub(crate) mod tests;
