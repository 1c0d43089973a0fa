//! Structured mode on the newest Kubernetes: claims that the scheduler allocates from ResourceSlices.

mod cluster;
mod fixture;
mod life;
mod requests;
mod slices;
