//! Tests of the Helm chart: values, rendered manifests, their validation by a real API server, and releases on real nodes (install,
//! upgrade, rollback, uninstall) with the image of `hack/image`.
//!
//! The harness builds Helm itself.

mod admitted;
mod allowed;
mod containers;
pub(crate) mod helm;
pub(crate) mod image;
mod in_image;
mod kinds;
mod kubelet_apis;
pub(crate) mod lifecycle;
mod missing_rights;
mod options;
mod pools;
mod refused;
mod rendered;
mod rights;
pub(crate) mod setup;
mod structured;
mod two_releases;
mod types;
mod values;
