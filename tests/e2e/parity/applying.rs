//! Invalid configurations in server-side apply.

use serde_json::{Value, json};

use crate::parity::custom::{INVENTORIES, define};
use crate::parity::server::{APPLY, CLAIMS, CONTEXTS, MAPS, MERGE, both, code_and_reason};

#[test]
fn a_configuration_of_another_object_is_refused() {
    both("applying-bodies", async |server| {
        let path = format!("{MAPS}/a?fieldManager=x");
        let text = |rest: Value| map(rest).to_string();
        let bodies = [
            "7".to_owned(),
            "[]".to_owned(),
            "\"x\"".to_owned(),
            "a: [".to_owned(),
            text(json!({ "data": 7 })),
            text(json!({ "data": { "a": 7 } })),
            text(json!({ "metadata": { "labels": 7 } })),
            text(json!({ "metadata": { "finalizers": ["a/b", "a/b"] } })),
        ];
        let invalid = [
            String::new(),
            "null".to_owned(),
            "{}".to_owned(),
            r#"{"apiVersion":"v1"}"#.to_owned(),
            r#"{"kind":"ConfigMap"}"#.to_owned(),
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"}}"#.to_owned(),
            r#"{"apiVersion":"v1","kind":"ConfigMap"}"#.to_owned(),
            text(json!({ "metadata": { "name": "other" } })),
            text(json!({ "metadata": { "namespace": "other" } })),
            text(json!({ "dat": { "x": "y" } })),
            text(json!({ "metadata": { "color": "red" } })),
            text(json!({ "metadata": { "managedFields": [{ "manager": "x" }] } })),
        ];
        // First the object does not exist, then it does.
        for _ in 0..2 {
            for body in &bodies {
                let answer = server.send_text("PATCH", &path, APPLY, body).await?;
                server.note(json!({ body: code_and_reason(&answer) }));
            }
            for body in &invalid {
                let (code, answer) = server.send_text("PATCH", &path, APPLY, body).await?;
                // The name may be omitted for an existing object; the answer then is that object.
                let expected_answer = if code < 300 { json!(null) } else { answer };
                server.note(json!([body, code, expected_answer]));
            }
            server
                .patch(&path, APPLY, &map(json!({ "data": { "a": "b" } })))
                .await?;
        }
        let mut stale = map(json!({ "metadata": { "resourceVersion": "5" } }));
        server.patch(&path, APPLY, &stale).await?;
        stale["metadata"]["name"] = "new".into();
        let path = format!("{MAPS}/new?fieldManager=x");
        server.patch(&path, APPLY, &stale).await.map(drop)
    });
}

/// A map with these fields.
fn map(rest: Value) -> Value {
    let mut map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a" } });
    json_patch_merge(&mut map, &rest);
    map
}

/// A simple merge patch.
fn json_patch_merge(target: &mut Value, patch: &Value) {
    match patch.as_object() {
        Some(map) => {
            for (key, value) in map {
                json_patch_merge(&mut target[key], value);
            }
        }
        None => *target = patch.clone(),
    }
}

#[test]
fn an_unreadable_configuration_is_refused_for_any_kind() {
    both("applying-kinds", async |server| {
        define(server).await?;
        let context = |entries: Value| {
            json!({
                "apiVersion": "resource.k8s.io/v1alpha2", "kind": "PodSchedulingContext",
                "metadata": { "name": "p" }, "status": { "resourceClaims": entries },
            })
        };
        let claim = |spec: Value| {
            json!({
                "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim",
                "metadata": { "name": "c" }, "spec": spec,
            })
        };
        let inventory = |more: Value| {
            let mut spec =
                json!({ "driverName": "drayman.dev", "nodeName": "n", "nodeUid": "u", "devices": [] });
            json_patch_merge(&mut spec, &more);
            json!({
                "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
                "metadata": { "name": "applying.drayman.dev" }, "spec": spec,
            })
        };
        let device = json!({ "name": "a", "kind": "k", "mode": "claims" });
        let made = json!({ "metadata": { "name": "p" }, "spec": { "potentialNodes": ["a"] } });
        server.create(CONTEXTS, &made).await?;
        let of_context = &format!("{CONTEXTS}/p/status");
        let of_claim = &format!("{CLAIMS}/c");
        let of_inventory = &format!("{INVENTORIES}/applying.drayman.dev");
        for (path, configuration) in [
            (of_context, context(json!([{ "name": "a" }, { "name": "a" }]))),
            (of_context, context(json!([{ "unsuitableNodes": ["x"] }]))),
            (of_context, context(json!([7]))),
            (of_context, context(json!([{ "name": "a", "color": 1 }]))),
            (of_claim, claim(json!({ "resourceClassName": "t", "color": "x" }))),
            (of_inventory, inventory(json!({ "devices": [device, device] }))),
            (
                of_inventory,
                inventory(json!({ "devices": [{ "kind": "k", "mode": "claims" }] })),
            ),
            (of_inventory, inventory(json!({ "color": 1 }))),
        ] {
            for validation in ["", "&fieldValidation=Ignore"] {
                let path = format!("{path}?fieldManager=x{validation}");
                let answer = server.send("PATCH", &path, APPLY, &configuration).await?;
                let sentence = answer.1["message"].as_str().unwrap_or_default().to_owned();
                // The real path identifies an element by its key, ours by its index.
                let sentence = if sentence.contains("].") {
                    Value::Null
                } else {
                    sentence.into()
                };
                server.note(json!([path, code_and_reason(&answer), sentence]));
            }
        }
        for (path, configuration) in [
            (of_context, context(json!(7))),
            (of_context, context(json!([{ "name": 7 }]))),
            (of_claim, claim(json!({ "resourceClassName": 7 }))),
            (of_inventory, inventory(json!({ "nodeName": 7 }))),
        ] {
            let path = format!("{path}?fieldManager=x");
            let answer = server.send("PATCH", &path, APPLY, &configuration).await?;
            server.note(json!([path, code_and_reason(&answer)]));
        }
        let missing = server.peek(of_inventory).await?;
        server.note(code_and_reason(&missing));
        Ok(())
    });
}

#[test]
fn the_last_writer_of_a_field_owns_it() {
    both("applying-owners", async |server| {
        let at = format!("{MAPS}/a");
        let as_manager = |name: &str, more: &str| format!("{at}?fieldManager={name}{more}");
        let labels = json!({ "labels": { "l": "1", "m": "2" } });
        let made = map(json!({ "metadata": labels, "data": { "a": "1", "b": "2" } }));
        server.create(MAPS, &made).await?;
        // An equal value is shared, a different one is a conflict, and force changes the owner.
        let same = map(json!({ "data": { "a": "1" } }));
        server.patch(&as_manager("x", ""), APPLY, &same).await?;
        let other = map(json!({ "data": { "a": "3", "c": "4" }, "metadata": { "labels": { "l": "1" } } }));
        let (code, _) = server.send("PATCH", &as_manager("x", ""), APPLY, &other).await?;
        server.note(json!(code));
        server
            .patch(&as_manager("x", "&force=true"), APPLY, &other)
            .await?;
        server
            .patch(&as_manager("y", ""), APPLY, &map(json!({ "data": { "c": "4" } })))
            .await?;
        // A patch takes ownership of changed fields and gives up removed ones.
        let patch = json!({ "data": { "c": "5", "b": null, "d": "6" }, "metadata": { "labels": null } });
        server.patch(&as_manager("z", ""), MERGE, &patch).await?;
        // An update without managedFields also has a manager.
        let whole =
            map(json!({ "data": { "a": "3", "e": "7" }, "metadata": { "finalizers": ["a/b", "c/d"] } }));
        server.put(&as_manager("z", ""), &whole).await?;
        server.put(&as_manager("w", ""), &whole).await?;
        let emptied = json!({ "metadata": { "finalizers": null }, "data": null });
        server.patch(&as_manager("w", ""), MERGE, &emptied).await?;
        server
            .patch(&as_manager("x", ""), APPLY, &map(json!({})))
            .await
            .map(drop)
    });
}

#[test]
fn each_writer_owns_its_fields_of_a_claim() {
    both("applying-claims", async |server| {
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim",
            "metadata": { "name": "c", "finalizers": ["a/b"] }, "spec": { "resourceClassName": "t" },
        });
        server.create(CLAIMS, &claim).await?;
        let at = format!("{CLAIMS}/c");
        let allocated = json!({ "status": {
            "driverName": "a.b", "allocation": { "shareable": true, "resourceHandles": [{ "driverName": "a.b", "data": "d" }] },
            "reservedFor": [{ "resource": "pods", "name": "p", "uid": "u" }],
        } });
        server
            .patch(&format!("{at}/status?fieldManager=driver"), MERGE, &allocated)
            .await?;
        let reserved = json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim", "metadata": { "name": "c" },
            "status": { "reservedFor": [{ "resource": "pods", "name": "q", "uid": "v" }] },
        });
        server
            .patch(&format!("{at}/status?fieldManager=scheduler"), APPLY, &reserved)
            .await?;
        let labelled = json!({ "metadata": { "labels": { "a": "b" }, "finalizers": ["a/b", "c/d"] } });
        server
            .patch(&format!("{at}?fieldManager=somebody"), MERGE, &labelled)
            .await?;
        let free = json!({ "status": { "reservedFor": null } });
        let emptied = json!({ "metadata": { "finalizers": null } });
        server
            .patch(&format!("{at}/status?fieldManager=driver"), MERGE, &free)
            .await?;
        server
            .patch(&format!("{at}?fieldManager=somebody"), MERGE, &emptied)
            .await
            .map(drop)
    });
}
