//! Classic DRA between the scheduler, ResourceClaims and a driver: events in, commands out.
//!
//! The controller task owns a [`ControllerState`]. It applies each [`Event`] and then calls [`ControllerState::decide`]; the runtime executes the [`Command`]s
//! and reports each answer as an event. This module knows claims, contexts and pending calls, but no devices.
//!
//! ```text
//! context ──read pod──▶ judge (driver) ──suitable──▶ transaction: finalizers ─▶ allocate (driver) ─▶ status
//!    ▲                     │ unsuitable                │ refused: give back (driver)
//!    └── publish entries ◀─┘◀──────────────────────────┘
//! claim, unused and deleted or to be deallocated ─▶ deallocate (driver) ─▶ clear status ─▶ remove finalizer
//! ```
//!
//! Upstream: KEP-3063, and `controller.go` of `k8s.io/dynamic-resource-allocation` at release-1.30.

mod claim;
mod context;
mod event;
pub(crate) mod resolve;
mod retry;
mod state;
mod statistics;
mod transaction;
mod wakeup;

pub use event::{
    Answer, CallError, CallErrorKind, CallId, ClaimToAllocate, ClaimWrite, Command, DriverRequest, Event,
    Moment, ObjectKey, Outcome, Regarding, Report, Subject,
};
pub use state::{ControllerState, Settings};
pub use statistics::{QueueStatistics, Statistics};
