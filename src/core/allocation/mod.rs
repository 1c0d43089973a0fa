//! Devices and their allocation, for the built-in driver: decisions without any Kubernetes write.
//!
//! ```text
//! NodeInventory, selector results --> inventory --+
//! claims ---------------------------> index ------+--> allocator --> evaluate --> search
//! parameters -----------------------> parameters -+
//! ```
//!
//! * [`parameters`]: validated parameters of classes and claims.
//! * [`inventory`]: the devices of all nodes with their attributes, selector results by attribute set, and the pending evaluations of the
//!   active selectors.
//! * [`index`]: the allocation index: the devices that each claim holds, read from the claims.
//! * [`search`]: finds devices for the requests of all claims of a pod, with a limit on its work.
//! * [`evaluate`]: whether the claims of a pod fit on a node, or why not.
//! * [`allocator`]: the device allocator, which owns inventory, index and selector results.

pub mod allocator;
pub mod evaluate;
pub mod index;
pub mod inventory;
pub mod parameters;
pub mod search;

#[cfg(test)]
pub(crate) mod tests;
