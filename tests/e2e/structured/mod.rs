//! Structured mode on the newest Kubernetes: claims that the scheduler allocates from ResourceSlices.

mod cluster;
mod commands;
mod device_metadata;
mod fixture;
mod life;
mod metrics;
mod requests;
mod rolling_update;
mod slices;
