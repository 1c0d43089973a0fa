//! In-memory API server of the test cluster, for a [`kube::Client`] in this process and for kubectl over TCP.
//!
//! It serves only the kinds that the project needs, without authentication, admission or API aggregation.
//! `docs/dev/testcluster.md` lists its guarantees.

mod apply;
mod configuration;
mod custom;
mod decode;
mod deletion;
mod discovery;
mod events;
mod field_error;
mod fields;
mod kinds;
mod last_applied;
mod lists;
pub(crate) mod object;
mod openapi;
pub mod patch;
mod pods;
mod query;
mod restrict;
pub mod rules;
mod selector;
mod serve;
mod server;
mod status_error;
mod store;
mod strategic;
pub(crate) mod structured;
mod table;
mod typed;
mod watch;
mod write;

pub(crate) use deletion::Deletion;
pub use kinds::ClusterMode;
pub(crate) use kinds::ResourcePath;
pub(crate) use patch::Patch;
pub(crate) use query::{ListQuery, percent_decoded};
pub use serve::kubeconfig;
pub(crate) use server::WriteOptions;
pub use server::{ApiServer, ObjectChange};
pub(crate) use status_error::StatusError;
#[cfg(test)]
pub(crate) use store::StorageKey;
pub(crate) use store::StoreChange;
