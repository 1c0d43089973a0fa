//! Devices and who holds them, for the built-in driver: decisions without a Kubernetes write.
//!
//! ```text
//! NodeInventory ---> inventory --+
//!                                +--> judge (fit) --> verdicts, allocations
//! claims ----------> holdings  --+
//! parameters ------> a demand ---+
//! ```
//!
//! * [`parameters`]: what a class and a claim ask for, checked.
//! * [`inventory`]: what the nodes have.
//! * [`holdings`]: which claim holds what, derived from the claims.
//! * [`facts`], [`wanted`]: what is known about a device, what the selectors say of it, and of what they have not said anything yet.
//! * [`fit`], [`search`], [`judge`]: which devices answer which requests, for all claims of a pod together; [`work`] is the bound.
//! * [`books`], [`allocate`]: the two indexes behind one owner, and all that changes or asks them.

pub mod allocate;
pub mod allocation_result;
pub mod anywhere;
pub mod books;
pub mod errors;
pub mod facts;
pub mod fit;
pub mod holdings;
pub mod inventory;
pub mod judge;
pub mod parameters;
pub mod reference;
pub mod search;
pub mod unsuitable;
mod view;
pub mod wanted;
pub mod work;

#[cfg(test)]
pub(crate) mod fixture;
