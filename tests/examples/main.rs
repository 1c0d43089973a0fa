//! Every folder of `examples/`, run as its README says, on one real cluster.

mod folder;
#[path = "../harness/mod.rs"]
mod harness;
mod pattern;
mod person;
mod run;
#[path = "../../examples/sensors.rs"]
#[allow(dead_code, reason = "its main is called by one test")]
mod sensors;
#[path = "../e2e/stage.rs"]
#[allow(dead_code, reason = "shared with another target")]
mod stage;
