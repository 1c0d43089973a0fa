//! The doors over real sockets: called by tonic's clients, and by bytes as kubelet's gRPC library sends them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod device_plugin;
mod dra;
mod hostile;
#[path = "../not_run/mod.rs"]
mod not_run;
mod pod_resources;
mod seen;
mod sockets;
mod support;
