//! The whole companion over real sockets, files and device nodes, against an API server that is played by the test.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

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
