//! The complete companion with real sockets, files and device nodes, and a fake API server.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod alone;
mod api;
mod disk;
mod faults;
mod fixture;
mod hostile;
mod killed;
mod life;
mod orphans;
mod process;
mod reload;
mod structured;
