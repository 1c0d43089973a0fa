//! gRPC over Unix sockets that kubelet calls.
//!
//! ```text
//! accept -> peer's user -> a free slot -> connection (authority rewritten, unfinished headers cut off) -> tonic
//! ```
//!
//! A connection that is established has no limit of idle time or age, and is never pinged: each would end kubelet's ListAndWatch,
//! and with it make all devices unhealthy. But when all places are taken, the one that has been idle for longest without an open
//! call gives way to the next, so that connections which do nothing keep nobody out.

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
pub use socket::{MAX_PATH, SocketError, SocketPlace};

/// Bytes of a message, sent or received: gRPC's own default, which kubelet's client keeps.
pub const MAX_MESSAGE: usize = 4 * 1024 * 1024;
