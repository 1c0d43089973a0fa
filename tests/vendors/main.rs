//! The conformance kit for vendors: our own drivers and those of the examples conform, and a driver that breaks a rule is found out.
#![cfg(feature = "sim")]
#![expect(
    clippy::panic,
    clippy::case_sensitive_file_extension_comparisons,
    reason = "a helper of a test fails the test; the names of files are the tests' own"
)]

#[path = "../../examples/network_attached.rs"]
#[expect(dead_code, reason = "the example's program is not run here")]
mod network_attached;
#[path = "../../examples/sensors.rs"]
#[expect(dead_code, reason = "the example's program is not run here")]
mod sensors;

mod defects;
mod node_defects;
mod ours;
mod rack;
mod shelf;
