//! The garbage collector, and the controller that empties namespaces which are deleted.

use std::collections::BTreeSet;

use serde_json::json;

use crate::testcluster::api::object;
use crate::testcluster::hand::Hand;

/// Deletes what has lost all of its owners, and what is in namespaces that go.
pub(crate) fn pass(hand: &Hand) {
    // As they were at one moment: an owner that is read before what it owns could seem to be missing.
    let all = hand.server.snapshot();
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
            // Whoever deletes it at the same time does the same.
            let _ = hand.delete(plural, object, None);
        }
    }
    for (plural, namespace) in all.iter().filter(|(plural, _)| plural == "namespaces") {
        let name = object::name(namespace);
        let empty = !all.iter().any(|(_, object)| object::namespace(object) == name);
        if object::is_deleting(namespace) && empty {
            let _ = hand.merge(
                plural,
                namespace,
                "finalize",
                json!({ "spec": { "finalizers": null } }),
            );
        }
    }
}
