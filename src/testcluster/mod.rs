//! The embedded cluster: a stage on which the real controller and the real companion run, in one process and with nothing
//! installed. It is no part of the product; what it promises of Kubernetes is listed in `docs/stage.md` and checked against a real
//! control plane by `tests/parity`.
//!
//! * [`api`]: the API server, for [`kube::Client`] directly and over TCP.
//! * [`stage`]: the cluster as a whole, with the real controller and the real companions.
//! * [`kubelet`], [`runtime`]: the nodes.
//! * [`faults`]: what goes wrong with the programs on it, and where.
//! * [`demo`]: what `drayman demo` shows.
//! * [`source`]: where the stage has its time and its randomness from.

#![expect(
    clippy::similar_names,
    clippy::struct_field_names,
    clippy::struct_excessive_bools,
    clippy::option_option,
    clippy::needless_pass_by_value,
    reason = "the names are those of Kubernetes' API machinery, and JSON is passed on as it comes"
)]

pub mod api;
mod claims;
pub mod demo;
pub mod faults;
mod garbage;
pub(crate) mod hand;
pub mod kubelet;
pub mod runtime;
pub(crate) mod scheduler;
pub mod source;
pub mod stage;

#[cfg(test)]
mod tests;
