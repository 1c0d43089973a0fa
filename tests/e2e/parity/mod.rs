//! What the stage promises of Kubernetes, checked: each promise is a conversation with an API server that is held with the stage
//! and with a real control plane, and the answers must be the same. `docs/dev/testcluster.md` lists them.
#![allow(
    clippy::similar_names,
    clippy::needless_pass_by_value,
    reason = "conversations in JSON, told as they are"
)]

mod allocation;
mod answers;
mod applying;
mod claims;
mod contexts;
mod crowds;
mod custom;
mod deletions;
mod ground;
mod history;
mod kubectl;
mod loops;
mod objects;
mod parameters;
mod pods;
mod pretending;
mod reading;
mod refusals;
mod structured;
