//! Tests of the Helm chart: values, rendered manifests, their validation by a real API server, and releases on real nodes (install,
//! upgrade, rollback, uninstall) with the image of `hack/image`.
//!
//! The harness builds Helm itself.

mod admitted;
mod allowed;
mod beside;
mod containers;
pub(crate) mod helm;
pub(crate) mod image;
mod inside;
mod kinds;
mod kubelet_apis;
mod lacking;
pub(crate) mod life;
mod options;
mod pools;
mod refused;
mod rendered;
mod rights;
pub(crate) mod stage;
mod structured;
mod types;
mod values;
