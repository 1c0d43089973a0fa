//! Structured mode on the latest Kubernetes: the scheduler allocates from ResourceSlices.

mod commands;
mod device_metadata;
pub(crate) mod fixture;
mod health;
mod lifecycle;
mod metrics;
mod requests;
pub(crate) mod rolling_update;
mod slices;
