//! The conformance kit for vendors: our own drivers and those of the examples conform, and a driver that breaks a rule is found out.
#![cfg(feature = "sim")]

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
