//! drayman on real Kubernetes: the programs as they are shipped, each a user of its own with exactly its rights.
//!
//! `controller` needs a control plane only, and no root: the tests write the inventories that companions would write.
//! `pods`, `away`, `boot`, `moved`, `ends`, `faults` and `survive` have real nodes, on which containers open devices.

#[path = "../harness/mod.rs"]
mod harness;
#[path = "../discovery/host.rs"]
#[allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "shared with another target, which uses more of it and may fail so"
)]
mod host;

mod away;
mod boot;
mod controller;
mod devices;
mod doctor;
mod ends;
mod example;
mod faults;
mod hostile;
mod largest;
mod leader;
mod loss;
mod moved;
mod newer;
mod pods;
mod records;
mod refusals;
mod round_trip;
mod selectors;
mod servers;
mod stage;
mod survive;
mod takeover;
mod tool;
mod upgrade;
mod user;

use harness::not_run;
