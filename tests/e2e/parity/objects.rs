//! Names, resource versions and deletion of any kind of object.

use serde_json::{Value, json};

use crate::parity::custom::{INVENTORIES, define};
use crate::parity::server::{CLAIMS, JSON, LEASES, MAPS, MERGE, both, code_and_reason, merged, uid, version};

const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/{ns}/events";
const CORE_EVENTS: &str = "/api/v1/namespaces/{ns}/events";

fn map(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "a": "b" } })
}

fn event(namespace: &str) -> Value {
    json!({
        "metadata": { "name": "e" },
        "regarding": { "kind": "Pod", "name": "p", "namespace": namespace, "apiVersion": "v1" },
        "reason": "Waiting", "note": "3 of 3 held", "type": "Warning", "action": "Allocate",
        "reportingController": "drayman.dev", "reportingInstance": "x", "eventTime": "2026-01-01T00:00:00.000000Z",
    })
}

#[test]
fn a_name_is_unique_and_must_be_valid() {
    both("object-names", async |server| {
        server.create(MAPS, &map("a")).await?;
        server.create(MAPS, &map("a")).await?;
        server.create(MAPS, &map("Upper_Case")).await?;
        let elsewhere = json!({ "metadata": { "name": "b", "namespace": "elsewhere" } });
        server.create(MAPS, &elsewhere).await?;
        server
            .create("/api/v1/namespaces/nowhere/configmaps", &map("a"))
            .await?;
        server.get(&format!("{MAPS}/missing")).await?;
        let generated = json!({ "metadata": { "generateName": "made-" } });
        let (code, made) = server.send("POST", MAPS, JSON, &generated).await?;
        let name = made["metadata"]["name"].as_str().unwrap_or_default();
        server.note(json!([code, name.len(), name.starts_with("made-")]));
        Ok(())
    });
}

#[test]
fn a_write_from_an_older_version_is_a_conflict() {
    both("object-versions", async |server| {
        let at = format!("{MAPS}/a");
        let made = server.create(MAPS, &map("a")).await?;
        let mut next = made.clone();
        next["data"]["a"] = "c".into();
        let stored = server.put(&at, &next).await?;
        assert_ne!(version(&made), version(&stored));
        next["data"]["a"] = "d".into();
        server.put(&at, &next).await?;
        // Without a resource version, any existing object is replaced.
        server.put(&at, &map("a")).await?;
        let again = server.put(&at, &map("a")).await?;
        let same = server.put(&at, &map("a")).await?;
        assert_eq!(version(&again), version(&same));
        let mut other = map("a");
        other["metadata"]["uid"] = "11111111-1111-4111-8111-111111111111".into();
        server.put(&at, &other).await?;
        server.put(&at, &map("b")).await?;
        server.put(&format!("{MAPS}/b"), &map("b")).await?;
        let patch = json!({ "metadata": { "resourceVersion": version(&made) }, "data": { "x": "y" } });
        server.patch(&at, MERGE, &patch).await?;
        let mut versioned = map("c");
        versioned["metadata"]["resourceVersion"] = "1".into();
        server.create(MAPS, &versioned).await.map(drop)
    });
}

#[test]
fn a_deletion_may_have_preconditions() {
    both("object-deletion", async |server| {
        let made = server.create(MAPS, &map("a")).await?;
        let at = format!("{MAPS}/a");
        for preconditions in [
            json!({ "uid": "7d0a" }),
            json!({ "resourceVersion": "1" }),
            json!({ "uid": uid(&made) }),
        ] {
            let body = json!({ "kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions });
            let answer = server.send("DELETE", &at, JSON, &body).await?;
            server.note(code_and_reason(&answer));
        }
        server.delete(&at).await.map(drop)
    });
}

#[test]
fn a_lease_is_made_and_taken_over_by_its_version() {
    both("object-lease", async |server| {
        let lease = |holder: &str| {
            json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": "l" },
                "spec": { "holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z" },
            })
        };
        let made = server.create(LEASES, &lease("a")).await?;
        server.create(LEASES, &lease("b")).await?;
        let mut taken = lease("b");
        taken["metadata"]["resourceVersion"] = version(&made).into();
        server.put(&format!("{LEASES}/l"), &taken).await?;
        server.put(&format!("{LEASES}/l"), &taken).await.map(drop)
    });
}

#[test]
fn an_event_of_either_group_is_seen_in_both() {
    both("object-event", async |server| {
        let event = event("object-event");
        let (code, _) = server.send("POST", EVENTS, JSON, &event).await?;
        let core = server.peek(&format!("{CORE_EVENTS}/e")).await?.1;
        let path = format!("{CORE_EVENTS}?fieldSelector=involvedObject.name%3Dp,reason%3DWaiting");
        let selected = server.peek(&path).await?.1;
        server.note(json!({
            "code": code, "message": core["message"], "about": core["involvedObject"], "type": core["type"],
            "component": core["reportingComponent"], "kind": core["kind"], "api": core["apiVersion"],
            "selected": selected["items"].as_array().map(Vec::len),
        }));
        Ok(())
    });
}

#[test]
fn a_merge_patch_sets_and_removes() {
    both("object-merge", async |server| {
        server.create(MAPS, &map("a")).await?;
        let at = format!("{MAPS}/a");
        let patches = [
            json!({ "data": { "a": null, "c": "d" }, "metadata": { "labels": { "l": "m" } } }),
            json!({ "metadata": { "labels": null, "annotations": { "x": "y" } } }),
        ];
        server.patch_each(&at, MERGE, patches).await?;
        server
            .patch(&format!("{MAPS}/missing"), MERGE, &json!({}))
            .await
            .map(drop)
    });
}

#[test]
fn a_lease_is_replaced_by_its_version_and_made_by_a_replacement() {
    both("object-lease-version", async |server| {
        let lease = |name: &str, more: Value| {
            let metadata = merged(json!({ "name": name }), &more);
            json!({ "metadata": metadata, "spec": { "holderIdentity": "a" } })
        };
        let at = |name: &str| format!("{LEASES}/{name}");
        for (name, more) in [
            ("new", json!({})),
            ("newer", json!({ "resourceVersion": "5" })),
            ("newest", json!({ "uid": "11111111-1111-4111-8111-111111111111" })),
        ] {
            server.put(&at(name), &lease(name, more)).await?;
        }
        for version in [json!(null), json!("0"), json!("abc"), json!("1")] {
            let lease = lease("new", json!({ "resourceVersion": version }));
            server.put(&at("new"), &lease).await?;
            let patch =
                json!({ "metadata": { "resourceVersion": version }, "spec": { "holderIdentity": "b" } });
            server.patch(&at("new"), MERGE, &patch).await?;
        }
        server.put(&at("new"), &lease("other", json!({}))).await?;
        server.put(&at("new"), &json!({ "spec": {} })).await?;
        let elsewhere = lease("new", json!({ "namespace": "elsewhere" }));
        server.put(&at("new"), &elsewhere).await?;
        let patch = json!({ "spec": { "holderIdentity": "c" } });
        server.patch(&at("new"), MERGE, &patch).await?;
        server.patch(&at("missing"), MERGE, &patch).await?;
        let empty = json!({ "metadata": { "name": "empty" } });
        server.create(LEASES, &empty).await.map(drop)
    });
}

#[test]
fn a_replacement_creates_events_but_no_other_kind() {
    both("object-put", async |server| {
        for path in [MAPS, CLAIMS, "/api/v1/nodes", "/api/v1/namespaces"] {
            let body = json!({ "metadata": { "name": "made.by.put" } });
            server.put(&format!("{path}/made.by.put"), &body).await?;
        }
        let event = event("object-put");
        let path = format!("{EVENTS}/e");
        for _ in 0..2 {
            let (code, answer) = server.send("PUT", &path, JSON, &event).await?;
            server.note(json!([code, answer["kind"], answer["note"]]));
        }
        Ok(())
    });
}

#[test]
fn an_object_of_a_defined_kind_is_replaced_by_its_version() {
    both("object-custom-version", async |server| {
        define(server).await?;
        let name = "versions.drayman.dev";
        let inventory = json!({
            "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory", "metadata": { "name": name },
            "spec": { "driverName": "drayman.dev", "nodeName": "n", "nodeUid": "u", "devices": [] },
        });
        let at = format!("{INVENTORIES}/{name}");
        server.put(&at, &inventory).await?;
        let made = server.create(INVENTORIES, &inventory).await?;
        server.put(&at, &inventory).await?;
        server.put(&format!("{at}/status"), &inventory).await?;
        let patch = json!({ "metadata": { "resourceVersion": null, "labels": { "a": "b" } } });
        server.patch(&at, MERGE, &patch).await?;
        let mut other = inventory.clone();
        other["metadata"]["uid"] = "11111111-1111-4111-8111-111111111111".into();
        other["metadata"]["resourceVersion"] = version(&made).into();
        server.put(&at, &other).await?;
        let mut next = inventory.clone();
        next["metadata"]["resourceVersion"] = version(&made).into();
        next["spec"]["nodeName"] = "m".into();
        server.put(&at, &next).await?;
        server.put(&at, &next).await?;
        let nothing = json!({ "metadata": { "name": name } });
        let (code, answer) = server.send("PUT", &at, JSON, &nothing).await?;
        server.note(json!([code, answer["reason"]]));
        let definition =
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodeinventories.drayman.dev";
        let (_, mut known) = server.peek(definition).await?;
        known["metadata"]["resourceVersion"] = Value::Null;
        let (code, answer) = server.send("PUT", definition, JSON, &known).await?;
        server.note(json!([code, answer]));
        server.delete(&at).await.map(drop)
    });
}

#[test]
fn owners_are_named_in_full() {
    both("object-owners", async |server| {
        let owner = |more: Value| {
            let plain = json!({ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u" });
            merged(plain, &more)
        };
        let event = owner(json!({ "apiVersion": "events.k8s.io/v1", "kind": "Event" }));
        for (name, owners) in [
            ("a", vec![json!({})]),
            ("b", vec![owner(json!({ "apiVersion": "a/b/c" }))]),
            (
                "c",
                vec![owner(json!({ "name": "" })), owner(json!({ "uid": "" }))],
            ),
            ("d", vec![owner(json!({}))]),
            ("e", vec![event]),
        ] {
            let object = json!({ "metadata": { "name": name, "ownerReferences": owners } });
            server.create(MAPS, &object).await?;
        }
        // The real server prints this value as Go does.
        let controllers = [
            json!({ "controller": true }),
            json!({ "uid": "v", "controller": true }),
        ];
        for owners in [
            vec![owner(json!({ "kind": "Event" }))],
            controllers.map(owner).to_vec(),
        ] {
            let object = json!({ "metadata": { "name": "f", "ownerReferences": owners } });
            let (code, answer) = server.send("POST", MAPS, JSON, &object).await?;
            let message = answer["message"].as_str().unwrap_or_default();
            let end = message.rsplit(": ").next();
            let field = &answer["details"]["causes"][0]["field"];
            server.note(json!([code, answer["reason"], field, end]));
        }
        Ok(())
    });
}
