//! gRPC servers on the Unix sockets that kubelet calls.
//!
//! ```text
//! accept -> peer's user -> a free slot -> connection (authority rewritten, unfinished headers cut off) -> tonic
//! ```
//!
//! An established connection has no idle or age limit and is never pinged: each of these would end kubelet's ListAndWatch, and
//! kubelet would mark all devices unhealthy. When all slots are taken, the connection that has been idle for longest without an
//! open call is closed for the next one, so idle connections cannot exhaust the slots.

pub mod authority;
mod calls;
mod connection;
mod count;
mod directory;
mod listen;
mod socket;

pub use count::{GrpcCalls, GrpcMethod, MethodFigures};
pub use listen::{Listening, MAX_CONNECTIONS, MAX_STREAMS, listen};
pub(crate) use socket::{Identity, check_path};
pub use socket::{MAX_PATH, SocketError, SocketPath};

/// Largest message in bytes, sent or received: gRPC's default, which kubelet's client keeps.
pub const MAX_MESSAGE: usize = 4 * 1024 * 1024;
