//! The contract of a classic DRA controller, point by point, on a real control plane. `tests/docs/coverage/conformance.md` says which test shows
//! which point.
//!
//! A scripted driver runs in the test's own process under [`drayman::controller::Controller`]; API server, claim controller,
//! garbage collector and scheduler are the real ones. Where it is sharper the test itself acts as the scheduler: its pods name a
//! scheduler that does not exist, and it writes their PodSchedulingContexts. All tests share one cluster, each in a namespace, with
//! a driver and a user of its own.

#[path = "../support/harness/mod.rs"]
mod harness;

mod batch;
mod call;
mod classes;
mod contexts;
mod hand;
mod immediate;
mod limits;
mod names;
mod objects;
mod outcome;
mod owners;
mod pods;
mod queue;
mod release;
mod script;
mod stage;
mod trouble;
mod undo;
mod world;
