//! Compares the test cluster with real Kubernetes: each test sends the same requests to the test cluster and to a real control plane, and
//! the answers must be equal. `docs/dev/testcluster.md` lists the covered parts.
#![allow(
    clippy::similar_names,
    clippy::needless_pass_by_value,
    reason = "conversations in JSON, written in full"
)]

mod allocation;
mod answers;
mod applying;
mod claims;
mod contexts;
mod custom;
mod deletions;
mod dry_run;
mod history;
mod kubectl;
mod loops;
mod objects;
mod parameters;
mod pods;
mod reading;
mod refusals;
mod server;
mod structured;
mod watchers;
