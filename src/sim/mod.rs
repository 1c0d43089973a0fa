//! The embedded cluster: a stage on which the real controller and the real companion run, in one process and with nothing
//! installed. It is no part of the product; what it promises of Kubernetes is listed in `docs/stage.md` and checked against a real
//! control plane by `tests/stage_promises`.
//!
//! * [`api`]: the API server, for [`kube::Client`] directly and over TCP.
//! * [`source`]: where the stage has its time and its randomness from.

pub mod api;
pub mod source;
