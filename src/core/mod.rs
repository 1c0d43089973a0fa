//! The pure core: decisions without a client, a clock, files, randomness or unordered maps.
//!
//! Everything here is a function of its arguments, so that a run can be logged, replayed, crashed between any two steps and
//! searched by a property test. `tests/architecture` keeps it so.

pub mod allocation;
pub mod claims;
pub mod discovery;
pub mod distribution;
pub mod lease;
pub mod prepare;
