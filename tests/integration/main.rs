//! Integration tests of library modules and of the program, without a cluster.

mod allocation_model;
mod cli;
#[cfg(feature = "testcluster")]
mod demo;
mod discovery;
mod grpc;
#[path = "../support/not_run.rs"]
mod not_run;
mod runner;
#[cfg(feature = "testcluster")]
mod testkit;
mod wire;
