//! Both doors on a real node: one device never leaves by two of them, and a vendor's own devices go through them like the built-in.

mod away;
mod both;
mod changes;
mod forced;
#[path = "../harness/mod.rs"]
mod harness;
mod health;
mod look;
mod paths;
mod plugin;
mod releases;
#[path = "../../examples/sensors.rs"]
#[allow(dead_code, reason = "its main is called by one test")]
mod sensors;
mod sensors_on_a_node;
#[path = "../e2e/stage.rs"]
#[allow(dead_code, reason = "shared with another target")]
mod stage;
mod update;
