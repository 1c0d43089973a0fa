//! Garbage collector and namespace controller.

use std::collections::BTreeSet;

use serde_json::json;

use crate::testcluster::api::object;
use crate::testcluster::client::ApiClient;

/// Deletes objects without a remaining owner and the contents of terminating namespaces.
pub(crate) fn reconcile(client: &ApiClient) {
    // One snapshot: if an owner were read before its dependents, it could appear to be missing.
    let all = client.server.snapshot();
    let alive: BTreeSet<&str> = all.iter().map(|(_, object)| object::uid(object)).collect();
    for (plural, object) in &all {
        let owners = object::list(object, "/metadata/ownerReferences");
        let orphaned = !owners.is_empty()
            && owners
                .iter()
                .all(|owner| !alive.contains(object::text(owner, "/uid")));
        let space = object::namespace(object);
        let going = all.iter().any(|(kind, each)| {
            kind == "namespaces" && object::name(each) == space && object::is_deleting(each)
        });
        if (orphaned || going && !space.is_empty()) && !object::is_deleting(object) {
            // A concurrent deletion has the same effect.
            let _ = client.delete(plural, object, None);
        }
    }
    for (plural, namespace) in all.iter().filter(|(plural, _)| plural == "namespaces") {
        let name = object::name(namespace);
        let empty = !all.iter().any(|(_, object)| object::namespace(object) == name);
        if object::is_deleting(namespace) && empty {
            let _ = client.merge(
                plural,
                namespace,
                "finalize",
                json!({ "spec": { "finalizers": null } }),
            );
        }
    }
}
