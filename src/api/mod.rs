//! Wire types without logic: the data exchanged with the API server, kubelet and the container runtime.

pub mod cdi;
pub(crate) mod claim;
pub mod crd;
pub mod handle;
#[cfg(not(feature = "internals"))]
pub(crate) mod proto;
#[cfg(feature = "internals")]
pub mod proto;
pub mod resource;
