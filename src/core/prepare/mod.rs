//! Decisions of the node: prepared claims, device holders, and container edits for both kubelet APIs.
//!
//! * [`plan`] checks kubelet's DRA requests and plans their steps; [`recovery`] does after a start or a failure. [`device_plugin`] checks Allocate.
//! * [`prepared_claims`] holds the claims, and [`checkpoint`] is their format on disk.
//! * [`container_edits`] and [`device_metadata`] make what a container gets.
//! * [`containers`] has the other holders of devices, from [`device_manager`] (kubelet's checkpoint) and [`runtime_containers`].
//! * [`orphans`] decides about claims that are no longer in [`kubelet_state`], kubelet's other checkpoint.
//! * [`inventory`], [`claims_api`] and [`kubelet_apis`] decide which devices, APIs and registrations are published.

pub mod checkpoint;
pub mod claims_api;
pub mod container_edits;
pub mod containers;
pub mod device_manager;
pub mod device_metadata;
pub mod device_plugin;
pub mod inventory;
pub mod kubelet_apis;
pub mod kubelet_state;
pub mod orphans;
pub mod plan;
pub mod prepared_claims;
pub mod recovery;
pub mod runtime_containers;

#[cfg(test)]
pub(crate) mod tests;
