//! drayman hands a Kubernetes node's devices to pods.
//!
//! ```text
//! api <- core <- {controller, host, node} <- testcluster <- {testkit, cli}
//!
//! watch / gRPC / file / driver answer -> Event -> World::apply -> decide -> Command -> shell executes -> outcome is an Event again
//! ```
//!
//! * [`api`]: data on the wire.
//! * [`core`]: pure decisions: the protocol of claims, the devices and who holds them, the node's ledger.
//! * [`driver`]: the trait that a device vendor implements.
//! * [`controller`]: the shell that talks to the API server for any [`driver::Driver`].
//! * [`host`]: the built-in driver, which makes any host device claimable.
//! * [`node`]: the companion that runs on every node and hands devices into containers.
//! * `testcluster`: an embedded cluster for demonstrations and tests (feature `testcluster`, which the released image leaves out).
//! * `testkit`: the conformance kit for vendors' drivers, on that cluster (the same feature).
//! * [`cli`]: the program.

pub mod api;
pub mod cli;
pub mod controller;
pub mod core;
pub mod driver;
pub mod host;
pub mod node;
#[cfg(feature = "testcluster")]
pub mod testcluster;
#[cfg(feature = "testcluster")]
pub mod testkit;
