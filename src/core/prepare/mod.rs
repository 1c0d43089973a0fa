//! Decisions of the node: prepared claims, device holders, and container edits for both kubelet APIs.

pub mod allocate;
pub mod announced;
pub mod census;
mod check;
pub mod checkpoint;
pub mod claim_uid;
pub mod claims_api;
pub mod containers;
pub mod device_manager;
pub mod driver_name;
pub mod former;
pub mod identity;
pub mod injection;
pub mod inventory;
pub mod kubelet_apis;
pub mod kubelet_state;
pub mod ledger;
pub mod name;
pub mod naming;
pub mod orphans;
pub mod plan;
pub mod preferred;
pub mod recovery;
pub mod refusal;
pub mod release;
pub mod rendering;
pub mod request;
pub mod retries;
pub mod step;
pub mod witness;

#[cfg(test)]
pub(crate) mod model;
