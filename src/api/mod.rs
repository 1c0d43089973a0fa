//! Data on the wire, and nothing else: what the API server, kubelet and the container runtime read and write.

pub mod cdi;
pub mod crd;
pub mod device_number;
pub mod handle;
pub mod proto;
pub mod resource;
