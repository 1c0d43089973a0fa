//! drayman on real Kubernetes: the programs as they are shipped, each a user of its own with exactly its rights.
//!
//! `controller` needs a control plane only, and no root: the tests write the inventories that companions would write.
//! `pods`, `boot`, `faults` and `survive` have real nodes, on which containers open devices.

#[path = "../harness/mod.rs"]
mod harness;

mod boot;
mod controller;
mod devices;
mod doctor;
mod example;
mod faults;
mod hostile;
mod leader;
mod loss;
mod newer;
mod pods;
mod records;
mod round_trip;
mod selectors;
mod stage;
mod survive;
mod takeover;
mod tool;
mod upgrade;
mod user;
