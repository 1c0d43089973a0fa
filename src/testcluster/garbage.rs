//! Garbage collector and namespace controller.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::testcluster::api::object;
use crate::testcluster::client::ApiClient;

/// Deletes objects without a remaining owner and the contents of terminating namespaces.
pub(crate) fn reconcile(client: &ApiClient) {
    // One snapshot: if an owner were read before its dependents, it could appear to be missing.
    let all = client.server.snapshot();
    let alive: BTreeSet<&str> = all.iter().map(|(_, object)| object::uid(object)).collect();
    let is_ending =
        |(plural, object): &&(String, Arc<Value>)| plural == "namespaces" && object::is_deleting(object);
    let ending: BTreeSet<&str> = all
        .iter()
        .filter(is_ending)
        .map(|(_, namespace)| object::name(namespace))
        .collect();
    for (plural, object) in &all {
        let owners = object::list(object, "/metadata/ownerReferences");
        let orphaned = !owners.is_empty()
            && owners
                .iter()
                .all(|owner| !alive.contains(object::text(owner, "/uid")));
        if (orphaned || ending.contains(object::namespace(object))) && !object::is_deleting(object) {
            // A concurrent deletion has the same effect.
            let _ = client.delete(plural, object, None);
        }
    }
    for (plural, namespace) in all.iter().filter(is_ending) {
        let name = object::name(namespace);
        if !all.iter().any(|(_, object)| object::namespace(object) == name) {
            let _ = client.merge(
                plural,
                namespace,
                "finalize",
                json!({ "spec": { "finalizers": null } }),
            );
        }
    }
}
