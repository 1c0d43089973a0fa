//! Complete programs on the embedded test cluster: the controller with the real client, and the companion with the real kubelet APIs,
//! sockets and files. Each run of a small scenario injects one fault at the n-th request, watch event, disk step or kubelet call, for every
//! n and every kind of fault. Invariants of the cluster and the node are checked at every change.
//!
//! A failure prints its fault, the command to repeat it, and a trace.
#![cfg(feature = "testcluster")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod certificates;
mod check;
mod every_fault;
mod lasting;
mod leaders;
mod node;
#[path = "../support/not_run.rs"]
mod not_run;
mod objects;
mod program;
mod scenario;
