//! Classic DRA between the scheduler, ResourceClaims and a driver: events in, commands out.
//!
//! The controller task owns a [`ControllerState`]. It applies each [`Event`] and then calls [`ControllerState::decide`]; the runtime executes
//! the [`Command`]s and reports each answer as an event. This module knows claims, contexts and pending calls, but no devices. [`context`]
//! decides on the Events of a pod.
//!
//! ```text
//! context ──read pod──▶ evaluate (driver) ──suitable──▶ transaction: finalizers ─▶ allocate (driver) ─▶ status
//!    ▲                     │ unsuitable                  │ refused: deallocate (driver)
//!    └── publish entries ◀─┘◀────────────────────────────┘
//! claim, unused and deleted or to be deallocated ─▶ deallocate (driver) ─▶ clear status ─▶ remove finalizer
//! ```
//!
//! Three state machines decide: [`claim::Claim`], [`context::Context`] and [`transaction::Transaction`]. Each reads the [`claim::Cache`] and
//! returns actions; [`ControllerState`] owns the maps, passes events to the machines, and executes their actions in order.
//!
//! Upstream: KEP-3063, and `controller.go` of `k8s.io/dynamic-resource-allocation` at release-1.30.

mod claim;
mod context;
mod event;
mod queue;
mod state;
mod statistics;
mod transaction;

pub(crate) use claim::{LATE_ALLOCATION, Resolved, is_made_for, resolve, unambiguous};
pub(crate) use event::MESSAGE_MAX;
pub use event::{
    Answer, CallError, CallErrorKind, CallErrorSubject, CallId, ClaimPatch, ClaimToAllocate, ClaimWrite,
    Command, DriverRequest, Event, EventReport, Moment, ObjectKey, Outcome, Regarding, Settings,
    context_patch,
};
pub use state::ControllerState;
pub use statistics::{QueueStatistics, Statistics};
