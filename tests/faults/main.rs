//! The whole programs on the embedded cluster: the controller with the real client, the companion with the real kubelet APIs, sockets and
//! files. One small life of pods and claims, and at the n-th request, watch event, step on the disk or call of kubelet one
//! trouble, for every n and every kind of trouble. What the cluster and the node show is checked at every change.
//!
//! A failure prints its trouble, the command that plays it again, and all that happened.
#![cfg(feature = "testcluster")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test may end at once where it is wrong"
)]

mod certificates;
mod check;
mod every;
mod leaders;
mod life;
mod named;
mod node;
#[path = "../support/not_run.rs"]
mod not_run;
mod objects;
mod program;
