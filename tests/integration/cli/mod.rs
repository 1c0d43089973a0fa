//! The program as its users meet it: the real binary, its output and its exit codes.

#![expect(clippy::panic, reason = "a helper of a test fails the test")]

mod arguments;
mod connections;
mod kubeconfigs;
mod output;
mod program;
mod running;
mod tool;
