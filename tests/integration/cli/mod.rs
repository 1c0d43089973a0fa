//! Tests of the program: output and exit codes of the binary.

#![expect(clippy::panic, reason = "a failing helper fails the test")]

mod arguments;
mod commands;
mod connections;
mod kubeconfigs;
mod lifecycle;
mod output;
mod program;
