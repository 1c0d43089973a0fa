//! Invalid configurations in server-side apply.

use serde_json::{Value, json};

use crate::parity::custom::{INVENTORIES, define};
use crate::parity::server::{APPLY, CLAIMS, CONTEXTS, JSON, MERGE, both};

const MAPS: &str = "/api/v1/namespaces/{ns}/configmaps";

/// Code and reason of an error whose message comes from a parser.
fn short(answer: &(u16, Value)) -> Value {
    json!([answer.0, answer.1["reason"], answer.1["status"]])
}

#[test]
fn a_configuration_of_another_object_is_refused() {
    both("applying-bodies", async |server| {
        let path = format!("{MAPS}/a?fieldManager=x");
        let map = |rest: Value| {
            let mut map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a" } });
            json_patch_merge(&mut map, &rest);
            map.to_string()
        };
        let bodies = [
            "7".to_owned(),
            "[]".to_owned(),
            "\"x\"".to_owned(),
            "a: [".to_owned(),
            map(json!({ "data": 7 })),
            map(json!({ "data": { "a": 7 } })),
            map(json!({ "metadata": { "labels": 7 } })),
            map(json!({ "metadata": { "finalizers": ["a/b", "a/b"] } })),
        ];
        let invalid = [
            String::new(),
            "null".to_owned(),
            "{}".to_owned(),
            r#"{"apiVersion":"v1"}"#.to_owned(),
            r#"{"kind":"ConfigMap"}"#.to_owned(),
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"}}"#.to_owned(),
            r#"{"apiVersion":"v1","kind":"ConfigMap"}"#.to_owned(),
            map(json!({ "metadata": { "name": "other" } })),
            map(json!({ "metadata": { "namespace": "other" } })),
            map(json!({ "dat": { "x": "y" } })),
            map(json!({ "metadata": { "color": "red" } })),
            map(json!({ "metadata": { "managedFields": [{ "manager": "x" }] } })),
        ];
        // First the object does not exist, then it does.
        for _ in 0..2 {
            for body in &bodies {
                let answer = server.send("PATCH", &path, APPLY, body.clone().into()).await?;
                server.note(json!({ body: short(&answer) }));
            }
            for body in &invalid {
                let (code, answer) = server.send("PATCH", &path, APPLY, body.clone().into()).await?;
                // The name may be omitted for an existing object; the answer then is that object.
                let expected_answer = if code < 300 { json!(null) } else { answer };
                server.note(json!([body, code, expected_answer]));
            }
            server
                .patch(
                    &path,
                    APPLY,
                    &serde_json::from_str(&map(json!({ "data": { "a": "b" } })))?,
                )
                .await?;
        }
        let stale = map(json!({ "metadata": { "resourceVersion": "5" } }));
        server.patch(&path, APPLY, &serde_json::from_str(&stale)?).await?;
        let stale = stale.replace("\"a\"", "\"new\"");
        server
            .patch(
                &format!("{MAPS}/new?fieldManager=x"),
                APPLY,
                &serde_json::from_str(&stale)?,
            )
            .await?;
        Ok(())
    });
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
        server
            .create(
                CONTEXTS,
                &json!({ "metadata": { "name": "p" }, "spec": { "potentialNodes": ["a"] } }),
            )
            .await?;
        for (path, configuration) in [
            (
                format!("{CONTEXTS}/p/status"),
                context(json!([{ "name": "a" }, { "name": "a" }])),
            ),
            (
                format!("{CONTEXTS}/p/status"),
                context(json!([{ "unsuitableNodes": ["x"] }])),
            ),
            (format!("{CONTEXTS}/p/status"), context(json!([7]))),
            (
                format!("{CONTEXTS}/p/status"),
                context(json!([{ "name": "a", "color": 1 }])),
            ),
            (
                format!("{CLAIMS}/c"),
                claim(json!({ "resourceClassName": "t", "color": "x" })),
            ),
            (
                format!("{INVENTORIES}/applying.drayman.dev"),
                inventory(json!({ "devices": [device, device] })),
            ),
            (
                format!("{INVENTORIES}/applying.drayman.dev"),
                inventory(json!({ "devices": [{ "kind": "k", "mode": "claims" }] })),
            ),
            (
                format!("{INVENTORIES}/applying.drayman.dev"),
                inventory(json!({ "color": 1 })),
            ),
        ] {
            for validation in ["", "&fieldValidation=Ignore"] {
                let path = format!("{path}?fieldManager=x{validation}");
                let body = configuration.to_string().into_bytes();
                let answer = server.send("PATCH", &path, APPLY, body).await?;
                let sentence = answer.1["message"].as_str().unwrap_or_default().to_owned();
                // The real path identifies an element by its key, ours by its index.
                let sentence = if sentence.contains("].") {
                    Value::Null
                } else {
                    sentence.into()
                };
                server.note(json!([path, short(&answer), sentence]));
            }
        }
        for (path, configuration) in [
            (format!("{CONTEXTS}/p/status"), context(json!(7))),
            (format!("{CONTEXTS}/p/status"), context(json!([{ "name": 7 }]))),
            (format!("{CLAIMS}/c"), claim(json!({ "resourceClassName": 7 }))),
            (
                format!("{INVENTORIES}/applying.drayman.dev"),
                inventory(json!({ "nodeName": 7 })),
            ),
        ] {
            let path = format!("{path}?fieldManager=x");
            let body = configuration.to_string().into_bytes();
            let answer = server.send("PATCH", &path, APPLY, body).await?;
            server.note(json!([path, short(&answer)]));
        }
        let missing = server
            .send(
                "GET",
                &format!("{INVENTORIES}/applying.drayman.dev"),
                JSON,
                Vec::new(),
            )
            .await?;
        server.note(short(&missing));
        Ok(())
    });
}

#[test]
fn a_field_belongs_to_whoever_has_written_it_last() {
    both("applying-owners", async |server| {
        let map = |rest: Value| {
            let mut map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a" } });
            json_patch_merge(&mut map, &rest);
            map
        };
        let at = format!("{MAPS}/a");
        let as_manager = |name: &str, more: &str| format!("{at}?fieldManager={name}{more}");
        let labels = json!({ "labels": { "l": "1", "m": "2" } });
        server
            .create(
                MAPS,
                &map(json!({ "metadata": labels, "data": { "a": "1", "b": "2" } })),
            )
            .await?;
        // An equal value is shared, a different one is a conflict, and force changes the owner.
        let same = map(json!({ "data": { "a": "1" } }));
        server.patch(&as_manager("x", ""), APPLY, &same).await?;
        let other = map(json!({ "data": { "a": "3", "c": "4" }, "metadata": { "labels": { "l": "1" } } }));
        server
            .send(
                "PATCH",
                &as_manager("x", ""),
                APPLY,
                other.to_string().into_bytes(),
            )
            .await
            .map(|(code, _)| server.note(json!(code)))?;
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
        server.ask("PUT", &as_manager("z", ""), JSON, &whole).await?;
        server.ask("PUT", &as_manager("w", ""), JSON, &whole).await?;
        let emptied = json!({ "metadata": { "finalizers": null }, "data": null });
        server.patch(&as_manager("w", ""), MERGE, &emptied).await?;
        server.patch(&as_manager("x", ""), APPLY, &map(json!({}))).await?;
        Ok(())
    });
}

#[test]
fn a_claim_s_fields_belong_to_those_who_write_them() {
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
        server
            .patch(&format!("{at}/status?fieldManager=driver"), MERGE, &free)
            .await?;
        server
            .patch(
                &format!("{at}?fieldManager=somebody"),
                MERGE,
                &json!({ "metadata": { "finalizers": null } }),
            )
            .await
            .map(drop)
    });
}
