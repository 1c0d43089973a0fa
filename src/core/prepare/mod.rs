//! Decisions of the node: prepared claims, device holders, and container edits for both kubelet APIs.

pub mod allocate;
pub mod allocated_claims;
mod check;
pub mod checkpoint;
pub mod claim_uid;
pub mod claims_api;
pub mod container_edits;
pub mod containers;
pub mod device_counts;
pub mod device_manager;
pub mod driver_name;
pub mod identity;
pub mod inventory;
pub mod kubelet_apis;
pub mod kubelet_state;
pub mod name;
pub mod naming;
pub mod orphans;
pub mod plan;
pub mod preferred;
pub mod prepared_claims;
pub mod recovery;
pub mod refusal;
pub mod release;
pub mod rendering;
pub mod request;
pub mod retries;
pub mod runtime_containers;
pub mod step;
pub mod withdrawn;

#[cfg(test)]
pub(crate) mod model;
