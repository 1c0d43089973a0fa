//! Diagnosis of a cluster: tables and sentences for users, computed from objects that the caller has read.
//!
//! * [`devices`]: every device, its state and its holders.
//! * [`explain`]: the step of a pod's claims, the cause, and the fix.
//! * [`extended_resources`]: the same for pods with extended resources in container limits.
//! * [`leftovers`]: objects that still depend on classic DRA.
//! * [`doctor`]: checks of an installation, each with its fix.
//! * [`nodes`]: checks of nodes and their inventories.
//! * [`gates`]: whether the feature gate is on in each component.
//! * [`rights`]: permissions of the components.
//! * [`overlap`]: whether two drivers share one name.
//! * [`structured`]: the same for structured mode.

pub mod devices;
pub mod doctor;
pub mod explain;
pub mod extended_resources;
pub mod gates;
pub mod leftovers;
pub mod nodes;
pub mod overlap;
pub mod rights;
pub mod structured;

use kube::ResourceExt as _;

use crate::api::crd::NodeInventory;

/// Returns `namespace/name` of an object, or its name alone if it is cluster-scoped.
pub fn qualified_name<K: kube::Resource>(object: &K) -> String {
    let name = object.name_any();
    match object.meta().namespace.as_deref() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name,
    }
}

/// Returns the inventories of a driver.
pub fn inventories_of<'a>(
    driver: &str,
    inventories: &'a [NodeInventory],
) -> impl Iterator<Item = &'a NodeInventory> {
    inventories
        .iter()
        .filter(move |inventory| inventory.spec.driver_name == driver)
}
