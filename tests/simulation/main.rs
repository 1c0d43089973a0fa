//! Deterministic simulation of the pure core of the controller.
//!
//! Models of the API server, the scheduler, the claim controller, the garbage collector, kubelets, another driver and users surround
//! [`drayman::core::claims::ControllerState`]. The seed determines time, order and faults, so a run can be repeated. Invariants are checked
//! after every step; when faults have stopped and the cluster is idle, a reference model checks that every pod that can run does run.
//!
//! A failure prints its seed and the command that replays it. `SEEDS` is the number of seeds, `FIRST` the first one; `VERBOSE=1` traces the
//! scenarios.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::format_push_string,
    clippy::unused_self,
    clippy::unnecessary_wraps,
    clippy::match_same_arms,
    clippy::struct_excessive_bools,
    reason = "a model for tests: it may panic, and it keeps the structure of the modelled components"
)]

mod calls;
mod cluster;
mod controllers;
mod describe;
mod driver;
mod faults;
mod final_checks;
mod generate;
mod invariants;
mod lease;
mod node;
mod paused_leader;
mod pods;
mod requests;
mod rng;
mod runtime;
mod scenarios;
mod scheduler;
mod seeds;
mod store;
mod structured;
mod users;
