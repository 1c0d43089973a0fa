//! The endpoints over real sockets: called by tonic's clients, and by bytes as kubelet's gRPC library sends them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod device_plugin;
mod dra;
mod fixture;
mod hostile;
mod pod_resources;
mod seen;
mod sockets;
