//! A Dynamic Resource Allocation (DRA) driver and device plugin for the host devices of Kubernetes nodes.
//!
//! The API for vendors:
//!
//! * [`driver`]: the trait of a driver for devices that the cluster shares; [`controller`] runs it.
//! * [`node`]: the trait of a driver for the devices of a node, and the builder of the companion that runs it.
//! * [`host`]: the built-in driver.
//! * [`api`]: wire types.
//! * `testkit`: the conformance kit for drivers (feature `testcluster`).
//!
//! Everything else is internal. The feature `internals` makes more modules public for the tests and benchmarks of this crate;
//! it is unstable.
//!
//! ```text
//! api <- driver <- core <- {controller, host, node} <- testcluster <- {testkit, cli}
//! ```
//!
//! `core` decides: the controller's Events about a pod in `core::claims::context`, refusals of a Prepare in `core::prepare::plan` (kubelet
//! writes the pod's Event), names of devices in `core::names`, the content of the checkpoint in `core::prepare::checkpoint`, the end of a
//! lease in `core::lease`.

#![allow(
    rustdoc::private_intra_doc_links,
    reason = "maintainers read the documentation with private items"
)]
#![cfg_attr(
    not(feature = "internals"),
    allow(
        unused_imports,
        dead_code,
        reason = "the tests of this crate use them with that feature"
    )
)]

pub mod api;
#[cfg(not(feature = "internals"))]
mod cli;
#[cfg(feature = "internals")]
pub mod cli;
pub mod controller;
#[cfg(not(feature = "internals"))]
mod core;
#[cfg(feature = "internals")]
#[allow(missing_docs, reason = "internal, and public with that feature only")]
pub mod core;
pub mod driver;
pub mod host;
pub mod node;
#[cfg(all(feature = "testcluster", not(feature = "internals")))]
#[allow(
    dead_code,
    reason = "tests use more of it than `drayman demo` and the test kit"
)]
mod testcluster;
#[cfg(all(feature = "testcluster", feature = "internals"))]
pub mod testcluster;
#[cfg(feature = "testcluster")]
pub mod testkit;

/// Runs the program `drayman`. Not part of the API.
#[doc(hidden)]
pub fn main(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> std::process::ExitCode {
    cli::main(arguments)
}
