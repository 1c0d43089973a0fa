//! gRPC endpoints on real sockets, called by tonic clients and with raw frames like those of the gRPC library of kubelet.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod device_plugin;
mod dra;
mod fixture;
mod hostile;
mod monitoring;
mod pod_resources;
mod sockets;
