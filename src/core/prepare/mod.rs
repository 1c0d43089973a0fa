//! Decisions of the node: prepared claims, device holders, and container edits for both kubelet APIs.

pub mod allocate;
pub mod checkpoint;
pub mod claims_api;
pub mod container_edits;
pub mod containers;
pub mod device_manager;
pub mod device_metadata;
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
