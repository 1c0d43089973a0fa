//! Embedded test cluster: runs the real controller and the real companion in one process, without any installation. It
//! is not part of the product. `docs/dev/testcluster.md` lists how far it matches Kubernetes; `tests/e2e/parity` compares it
//! with a real control plane.
//!
//! * [`api`]: the API server, for [`kube::Client`] directly and over TCP.
//! * [`stage`]: the cluster with the real controller and the real companions.
//! * [`kubelet`], [`runtime`]: the nodes.
//! * [`faults`]: fault injection for the programs on the cluster.
//! * [`demo`]: implementation of `drayman demo`.
//! * [`source`]: time and randomness of the cluster.

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
pub(crate) mod client;
pub mod demo;
pub mod faults;
mod garbage;
pub mod kubelet;
pub mod runtime;
pub(crate) mod scheduler;
pub mod source;
pub mod stage;

#[cfg(test)]
mod tests;
