//! Decisions of the node: prepared claims, device holders, and container edits for both kubelet APIs.
//!
//! * [`plan`] checks kubelet's DRA requests and plans their steps. [`recovery`] plans those after a start, a failure or a change of
//!   devices, and of a manual release.
//! * [`device_plugin`] checks Allocate and chooses devices.
//! * [`prepared_claims`] holds the claims, and [`checkpoint`] is their format on disk.
//! * [`container_edits`] and [`device_metadata`] produce the content of CDI files and device metadata files.
//! * [`containers`] knows the other holders of devices, partly from [`device_manager`], kubelet's checkpoint of extended resources.
//!   [`runtime_containers`] shows the devices of containers, independent of kubelet.
//! * [`orphans`] decides when a claim that kubelet has forgotten loses its devices. [`kubelet_state`] reads kubelet's list of claims.
//! * [`inventory`] decides which devices are published, [`claims_api`] which API for claims the cluster serves. [`kubelet_apis`] summarizes
//!   the registrations.

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
