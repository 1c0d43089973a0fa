//! Tests of each point of the contract of a classic DRA controller on a real control plane. `tests/docs/coverage/conformance.md` maps
//! points to tests.
//!
//! A [`fake_driver::FakeDriver`] runs in the test process under [`drayman::controller::Controller`]; API server, claim controller, garbage
//! collector and scheduler are real. Where a test needs more control, it acts as the scheduler: its pods name a scheduler that does not
//! exist, and it writes their PodSchedulingContexts. All tests share one cluster; each has its own namespace, driver and user.

#[path = "../support/harness/mod.rs"]
mod harness;

mod call;
mod classes;
mod contexts;
mod driver_failures;
mod fake_driver;
mod fixture;
mod immediate;
mod limits;
mod manual_edits;
mod names;
mod objects;
mod owners;
mod pods;
mod queue;
mod release;
mod rollback;
mod state;
mod transaction;
mod wait;
