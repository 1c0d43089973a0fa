//! gRPC servers on the Unix sockets that kubelet calls.
//!
//! ```text
//! accept -> peer's user -> number of connections -> authority rewritten, unfinished headers cut off -> tonic
//! ```
//!
//! An established connection has no idle or age limit, because kubelet marks all devices unhealthy when its ListAndWatch ends. It is
//! closed if the client does not answer a ping.

mod count;
mod listen;
pub mod relay;
mod socket;

pub use count::{GrpcCalls, GrpcMethod, MethodMetrics};
pub use listen::{Listening, MAX_CONNECTIONS, listen};
pub use socket::{MAX_PATH, SocketError, SocketPath};
pub(crate) use socket::{check_path, remove_stale};
