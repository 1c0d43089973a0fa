//! Embedded test cluster: runs the real controller and the real companion in one process, without any installation. It
//! is not part of the product. `docs/dev/testcluster.md` lists how far it matches Kubernetes; `tests/e2e/parity` compares it
//! with a real control plane.
//!
//! * [`api`]: the API server, for [`kube::Client`] directly and over TCP.
//! * [`cluster`]: the cluster with the real controller and the real companions.
//! * [`kubelet`], [`runtime`]: the nodes.
//! * [`faults`]: fault injection for the programs on the cluster.
//! * [`demo`]: implementation of `drayman demo`.
//! * [`clock_and_rng`]: time and randomness of the cluster.

#![expect(
    clippy::similar_names,
    clippy::struct_excessive_bools,
    clippy::option_option,
    clippy::needless_pass_by_value,
    reason = "the names are those of Kubernetes' API machinery, and JSON is passed on as it comes"
)]

pub mod api;
pub mod claim_records;
mod claims;
pub(crate) mod client;
pub mod clock_and_rng;
pub mod cluster;
pub mod demo;
pub mod faults;
mod garbage;
pub mod kubelet;
pub mod negotiation;
pub mod runtime;
pub(crate) mod scheduler;
pub(crate) mod temporary_directory;

#[cfg(test)]
mod tests;
