//! A Dynamic Resource Allocation (DRA) driver and device plugin for the host devices of Kubernetes nodes.
//!
//! ```text
//! api <- core <- {controller, host, node} <- testcluster <- {testkit, cli}
//!
//! watch / gRPC / file / driver answer -> Event -> ControllerState::apply -> decide -> Command -> shell executes -> outcome is an Event again
//! ```
//!
//! * [`api`]: wire types.
//! * [`core`]: pure decisions: claims, device allocation, and prepared claims on a node.
//! * [`driver`]: the trait that a device vendor implements.
//! * [`controller`]: the runtime between the API server and any [`driver::Driver`].
//! * [`host`]: the built-in driver, which allocates any host device to claims.
//! * [`node`]: the companion, which runs on every node and injects devices into containers.
//! * `testcluster`: an in-process cluster for demonstrations and tests (feature `testcluster`, not in the released image).
//! * `testkit`: the conformance kit for vendors' drivers, based on the test cluster (same feature).
//! * [`cli`]: the commands of the program.

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
