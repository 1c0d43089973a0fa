//! The whole companion over real sockets, files and device nodes, against an API server that is played by the test.

mod api;
mod life;
mod node;
