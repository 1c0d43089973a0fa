//! Devices and their allocation, for the built-in driver: decisions without any Kubernetes write.
//!
//! ```text
//! NodeInventory ---> inventory --+
//!                                +--> judge (fit) --> verdicts, allocations
//! claims ----------> holdings  --+
//! parameters ------> a demand ---+
//! ```
//!
//! * [`parameters`]: validated parameters of classes and claims.
//! * [`inventory`]: the devices of all nodes.
//! * [`index`]: the allocation index: the devices that each claim holds, derived from the claims.
//! * [`attribute_set`], [`active_selectors`]: attribute sets of devices, selector results for them, and pending evaluations of the active selectors.
//! * [`fit`], [`search`], [`evaluate`]: find devices for the requests of all claims of a pod; [`work`] bounds the search.
//! * [`allocator`], [`allocate`]: the device allocator, which owns inventory and allocation index; its changes and its queries.

pub mod active_selectors;
pub mod allocate;
pub mod allocation_result;
pub mod allocator;
pub mod anywhere;
pub mod attribute_set;
pub mod errors;
pub mod evaluate;
pub mod fit;
pub mod index;
pub mod inventory;
pub mod parameters;
pub mod reference;
pub mod search;
pub mod unsuitable;
mod view;
pub mod work;

#[cfg(test)]
pub(crate) mod fixture;
