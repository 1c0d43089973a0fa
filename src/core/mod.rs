//! Pure decisions: no client, clock, files, randomness or unordered maps.
//!
//! Everything here is a function of its arguments, so that a run can be logged, replayed, crashed between any two steps and searched by a
//! property test. `tests/docs/architecture.rs` enforces this.
//!
//! | module | decides for |
//! |---|---|
//! | [`claims`], [`lease`] | `controller` |
//! | [`allocation`] | `host` |
//! | [`prepare`], [`discovery`], [`slices`] | `node` |
//! | [`scheduler`] | `testcluster` and the commands in structured mode |
//! | [`names`], [`distribution`] | several |

pub mod allocation;
pub mod claims;
pub mod discovery;
pub mod distribution;
pub mod lease;
pub mod names;
pub mod prepare;
pub mod scheduler;
pub mod slices;
