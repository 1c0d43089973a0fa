//! The pure core of the controller on a stage whose time, order and faults we own.
//!
//! A model of the API server, the scheduler, the claim controller, the garbage collector, kubelets, another driver and people
//! surrounds [`drayman::core::claims::ControllerState`]. One seed decides everything; the same seed is the same run. The promises are
//! checked after every step; when faults have stopped and all is at rest, a reference says what must have been served.
//!
//! A failure prints its seed and the command that replays it. `SEEDS` says how many seeds are run, `FIRST` where they begin;
//! `VERBOSE=1` prints everything that happens in the named stories.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::format_push_string,
    clippy::unused_self,
    clippy::unnecessary_wraps,
    clippy::match_same_arms,
    clippy::struct_excessive_bools,
    reason = "a model for tests: it may end at once where it is wrong, and keeps the shape of what it models"
)]

mod calls;
mod cluster;
mod describe;
mod driver;
mod faults;
mod generate;
mod invariants;
mod lease;
mod node;
mod paused;
mod pods;
mod requests;
mod rng;
mod rules;
mod scenarios;
mod scheduler;
mod seeds;
mod shell;
mod stage;
mod store;
mod structured;
mod users;
mod verdict;
