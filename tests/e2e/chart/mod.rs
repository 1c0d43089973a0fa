//! The chart: its values and what is rendered from them, what the API server says to that, and releases that are installed,
//! upgraded, rolled back and removed on real nodes, with the image that `hack/image` makes.
//!
//! Helm itself is what renders and installs; the harness builds it.

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
