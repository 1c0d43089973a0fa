//! What a person is told about a cluster: tables and sentences made from objects that somebody else has read.
//!
//! * [`devices`]: every device, its state, and who holds it.
//! * [`explain`]: at which step a pod's claims are, why not further, and what to do.
//! * [`limits`]: the same of a pod that asks for extended resources in the limits of its containers.
//! * [`usage`]: what still depends on classic Dynamic Resource Allocation.
//! * [`doctor`]: what is wrong with an installation, each finding with its fix.
//! * [`nodes`]: the part of that which is about nodes and what their companions list.
//! * [`gates`]: whether the feature gate is on, in each component that has one.
//! * [`rights`]: what the components may do and must be able to do.
//! * [`overlap`]: whether two drivers go by one name.

pub mod devices;
pub mod doctor;
pub mod explain;
pub mod gates;
pub mod limits;
pub mod nodes;
pub mod overlap;
pub mod rights;
pub mod usage;

use kube::ResourceExt as _;

/// `namespace/name` of an object, or its name alone if it is cluster-scoped.
pub fn qualified_name<K: kube::Resource>(object: &K) -> String {
    let name = object.name_any();
    match object.meta().namespace.as_deref() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name,
    }
}
