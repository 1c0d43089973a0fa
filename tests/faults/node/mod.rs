//! The complete companion with real sockets, files and device nodes, and a fake API server.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod api;
mod disk;
mod faults;
mod fixture;
mod hostile;
mod isolation;
mod killed;
mod lifecycle;
mod orphans;
mod process;
mod reload;
mod structured;
