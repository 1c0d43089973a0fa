//! Invalid requests.

use serde_json::{Value, json};

use crate::parity::custom::{INVENTORIES, define};
use crate::parity::server::{
    APPLY, CLAIMS, CONTEXTS, JSON, JSON_PATCH, LEASES, MAPS, MERGE, PODS, STRATEGIC, both, code_and_reason,
};

#[test]
fn a_body_that_is_not_an_object_is_refused() {
    both("refused-bodies", async |server| {
        for (content_type, body) in [
            (JSON, "{"),
            (JSON, "[]"),
            (JSON, ""),
            (
                JSON,
                r#"{"metadata":{"name":"a"},"spec":{"resourceClassName":7}}"#,
            ),
            (
                JSON,
                r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a"}}"#,
            ),
            ("text/plain", "{}"),
        ] {
            let answer = server.send_text("POST", CLAIMS, content_type, body).await?;
            server.note(json!({ body: code_and_reason(&answer) }));
        }
        Ok(())
    });
}

#[test]
fn a_patch_that_cannot_be_applied_is_refused() {
    both("refused-patches", async |server| {
        let claim = json!({ "metadata": { "name": "a" }, "spec": { "resourceClassName": "t" } });
        server.create(CLAIMS, &claim).await?;
        for (content_type, body) in [
            (JSON_PATCH, "{"),
            (JSON_PATCH, "{}"),
            (JSON_PATCH, r#"[{"op":"remove","path":"/metadata/nothing"}]"#),
            (
                JSON_PATCH,
                r#"[{"op":"test","path":"/metadata/name","value":"b"}]"#,
            ),
            (
                JSON_PATCH,
                r#"[{"op":"add","path":"/metadata/labels","value":7}]"#,
            ),
            (MERGE, "["),
            (MERGE, "[]"),
            (MERGE, r#"{"metadata":{"labels":7}}"#),
            (STRATEGIC, r#"{"metadata":{"ownerReferences":[{"name":"x"}]}}"#),
            (STRATEGIC, r#"{"metadata":{"$patch":"dance"}}"#),
            (APPLY, "{}"),
            ("application/json", "{}"),
            ("text/plain", "{}"),
        ] {
            let answer = server
                .send_text("PATCH", &format!("{CLAIMS}/a"), content_type, body)
                .await?;
            server.note(json!({ format!("{content_type} {body}"): code_and_reason(&answer) }));
        }
        Ok(())
    });
}

#[test]
fn more_than_three_mebibytes_are_refused() {
    both("refused-size", async |server| {
        let body = json!({ "metadata": { "name": "a", "annotations": { "a": "x".repeat(3 << 20) } } });
        let answer = server.send("POST", CLAIMS, JSON, &body).await?;
        server.note(code_and_reason(&answer));
        Ok(())
    });
}

#[test]
fn each_method_refuses_an_object_that_is_too_large() {
    both("refused-large", async |server| {
        let large = |bytes: usize| json!({ "metadata": { "name": "a" }, "data": { "a": "x".repeat(bytes) } });
        server.create(MAPS, &large(1)).await?;
        let limit = 3 << 20;
        for (method, path, content_type) in [
            ("POST", MAPS.to_owned(), JSON),
            ("PUT", format!("{MAPS}/a"), JSON),
            ("PATCH", format!("{MAPS}/a"), MERGE),
            ("PATCH", format!("{MAPS}/a"), STRATEGIC),
        ] {
            let answer = server.send(method, &path, content_type, &large(limit)).await?;
            let message = &answer.1["message"];
            server.note(json!([method, content_type, code_and_reason(&answer), message]));
        }
        // Less than that, but more than the kind allows.
        for body in [
            large(1 << 20),
            large((1 << 20) + 1),
            json!({ "metadata": { "name": "a", "annotations": { "a": "x".repeat(257 << 10) } } }),
        ] {
            let answer = server.send("PUT", &format!("{MAPS}/a"), JSON, &body).await?;
            let (message, details) = (&answer.1["message"], &answer.1["details"]);
            server.note(json!([code_and_reason(&answer), message, details]));
        }
        Ok(())
    });
}

#[test]
fn an_unknown_field_is_dropped_or_refused_as_requested() {
    both("refused-fields", async |server| {
        let claim =
            json!({ "metadata": { "name": "a" }, "spec": { "resourceClassName": "t", "color": "red" } });
        let strict = format!("{CLAIMS}?fieldValidation=Strict");
        let answer = server.send("POST", &strict, JSON, &claim).await?;
        server.note(code_and_reason(&answer));
        // The complete answer and its warnings.
        let validations = [
            ("Strict", "b"),
            ("Warn", "c"),
            ("Ignore", "d"),
            ("", "e"),
            ("Loud", "f"),
        ];
        for (validation, name) in validations {
            let mut claim = claim.clone();
            claim["metadata"]["name"] = name.into();
            claim["spec"]["parametersRef"] = json!({ "kind": "k", "name": "n", "shape": "round" });
            let path = format!("{CLAIMS}?fieldValidation={validation}");
            let path = if validation.is_empty() { CLAIMS } else { &path };
            let (code, answer, warnings) = server.warned("POST", path, JSON, &claim).await?;
            server.note(json!([validation, code, answer["reason"], warnings]));
            if matches!(validation, "Strict" | "Loud") {
                server.note(json!(answer["message"]));
            }
        }
        let patch = json!({ "spec": { "color": "red" }, "metadata": { "labels": { "a": "b" } } });
        for validation in ["Strict", "Warn", "Ignore"] {
            let path = format!("{CLAIMS}/c?fieldValidation={validation}");
            let (code, answer, warnings) = server.warned("PATCH", &path, MERGE, &patch).await?;
            server.note(json!([validation, code, answer["reason"], warnings]));
        }
        server.create(CLAIMS, &claim).await.map(drop)
    });
}

#[test]
fn an_unserved_path_is_not_found() {
    both("refused-paths", async |server| {
        for (method, path) in [
            ("GET", "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/unicorns"),
            ("GET", "/apis/resource.k8s.io/v9"),
            ("POST", &format!("{CLAIMS}/a")),
            ("GET", &format!("{CLAIMS}/a/teapot")),
        ] {
            let (code, _) = server.send(method, path, JSON, &json!({})).await?;
            server.note(json!({ path: code }));
        }
        Ok(())
    });
}

#[test]
fn a_field_of_another_type_is_refused_of_every_kind() {
    both("refused-types", async |server| {
        let status = "/api/v1/namespaces/{ns}/status";
        let finalize = "/api/v1/namespaces/{ns}/finalize";
        let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        for (method, path, body) in [
            ("PUT", status, r#"{"status":"s"}"#),
            (
                "PUT",
                status,
                r#"{"metadata":{"name":"refused-types"},"status":{"phase":7}}"#,
            ),
            (
                "PUT",
                "/api/v1/namespaces/{ns}",
                r#"{"metadata":{"name":"refused-types"},"spec":7}"#,
            ),
            (
                "PUT",
                finalize,
                r#"{"metadata":{"name":"refused-types"},"spec":"x"}"#,
            ),
            (
                "POST",
                "/api/v1/namespaces",
                r#"{"metadata":{"name":"a"},"status":"s"}"#,
            ),
            ("POST", MAPS, r#"{"metadata":{"name":"a"},"data":7}"#),
            ("POST", MAPS, r#"{"metadata":{"name":"a"},"data":{"a":7}}"#),
            ("POST", MAPS, r#"{"metadata":7}"#),
            ("POST", MAPS, r#"{"metadata":{"name":7}}"#),
            ("POST", MAPS, r#"{"metadata":{"name":"a","labels":{"a":1}}}"#),
            ("POST", MAPS, r#"{"metadata":{"name":"a","ownerReferences":[7]}}"#),
            ("POST", MAPS, r#"{"apiVersion":7}"#),
            ("POST", MAPS, "null"),
            (
                "POST",
                LEASES,
                r#"{"metadata":{"name":"a"},"spec":{"leaseDurationSeconds":"5"}}"#,
            ),
            (
                "POST",
                LEASES,
                r#"{"metadata":{"name":"a"},"spec":{"renewTime":"abc"}}"#,
            ),
            (
                "POST",
                PODS,
                r#"{"metadata":{"name":"a"},"spec":{"containers":7}}"#,
            ),
            (
                "POST",
                PODS,
                r#"{"metadata":{"name":"a"},"spec":{"resourceClaims":[{"name":"a","source":7}]}}"#,
            ),
            ("POST", "/api/v1/nodes", r#"{"metadata":{"name":"a"},"spec":[]}"#),
            (
                "POST",
                "/api/v1/namespaces/{ns}/events",
                r#"{"metadata":{"name":"a"},"count":"many"}"#,
            ),
            (
                "POST",
                definitions,
                r#"{"metadata":{"name":"a"},"spec":{"versions":7}}"#,
            ),
        ] {
            let answer = server.send_text(method, path, JSON, body).await?;
            server.note(json!({ format!("{method} {path} {body}"): code_and_reason(&answer) }));
        }
        // The server still works, and the namespace can be deleted.
        let (code, _) = server.remove("/api/v1/namespaces/{ns}").await?;
        server.note(json!(code));
        Ok(())
    });
}

#[test]
fn an_unknown_field_is_reported_for_every_kind() {
    both("refused-unknown", async |server| {
        define(server).await?;
        let container = json!({ "name": "c", "image": "i", "imagee": "x" });
        let claim = json!({ "name": "c", "source": { "resourceClaimName": "x", "color": 1 } });
        let pod = json!({ "schedulerName": "nobody", "containers": [container], "resourceClaims": [claim] });
        let inventory =
            json!({ "driverName": "drayman.dev", "nodeName": "n", "nodeUid": "u", "devices": [], "x": 1 });
        let spec = json!({ "holder": "x" });
        let inventory =
            json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory", "spec": inventory });
        let objects = [
            (MAPS, json!({ "dat": { "x": "y" } })),
            (PODS, json!({ "spec": pod })),
            (LEASES, json!({ "spec": spec })),
            ("/api/v1/nodes", json!({ "spec": spec })),
            ("/api/v1/namespaces", json!({ "spec": spec })),
            (INVENTORIES, inventory),
        ];
        for (number, (path, mut object)) in objects.into_iter().enumerate() {
            for validation in ["Strict", "Warn", "Ignore"] {
                let name = format!("unknown-{number}-{}", validation.to_lowercase());
                object["metadata"] = json!({ "name": name, "color": "red" });
                let at = format!("{path}?fieldValidation={validation}");
                let (code, answer, mut warnings) = server.warned("POST", &at, JSON, &object).await?;
                warnings.sort();
                let message = answer["message"].as_str().unwrap_or_default();
                let sentences = message.split(": ").flat_map(|part| part.split(", "));
                let mut sentences: Vec<&str> = sentences.collect();
                sentences.sort_unstable();
                let unknown = [&answer["metadata"]["color"], &answer["spec"]["holder"]];
                server.note(json!([at, code, sentences, warnings, unknown]));
                // Some objects are not in the namespace.
                let gone = server.remove(&format!("{path}/{name}")).await?;
                server.note(json!(gone.0));
            }
        }
        Ok(())
    });
}

#[test]
fn an_object_that_etcd_would_not_take_is_refused() {
    both("refused-etcd", async |server| {
        define(server).await?;
        let lease = |bytes: usize| json!({ "metadata": { "name": "a" }, "spec": { "holderIdentity": "x".repeat(bytes) } });
        for bytes in [2 << 20, 1_700_000, 1_600_000, 1_500_000] {
            let answer = server.send("POST", LEASES, JSON, &lease(bytes)).await?;
            server.note(json!([bytes, code_and_reason(&answer)]));
        }
        for bytes in [1_700_000, 1_400_000] {
            let patch = json!({ "spec": { "holderIdentity": "y".repeat(bytes) } });
            let answer = server
                .send("PATCH", &format!("{LEASES}/a"), MERGE, &patch)
                .await?;
            server.note(json!([bytes, code_and_reason(&answer)]));
        }
        // The name of an owner has no other limit.
        let owner = json!({ "apiVersion": "v1", "kind": "Node", "name": "x".repeat(1_700_000), "uid": "u" });
        let inventory = json!({
            "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
            "metadata": { "name": "large.drayman.dev", "ownerReferences": [owner] },
            "spec": { "driverName": "drayman.dev", "nodeName": "n", "nodeUid": "u", "devices": [] },
        });
        let answer = server.send("POST", INVENTORIES, JSON, &inventory).await?;
        server.note(json!([code_and_reason(&answer), answer.1["message"]]));
        Ok(())
    });
}

#[test]
fn copies_of_copies_are_refused_before_they_are_made() {
    both("refused-copies", async |server| {
        let map = json!({ "metadata": { "name": "a" } });
        server.create(MAPS, &map).await?;
        let ops = |bytes: usize, copies: usize, whole: bool| {
            let mut ops = vec![json!({ "op": "add", "path": "/data", "value": { "a": "x".repeat(bytes) } })];
            let from = if whole { "/data" } else { "/data/a" };
            let copy = |number| json!({ "op": "copy", "from": from, "path": format!("/data/k{number}") });
            ops.extend((0..copies).map(copy));
            Value::Array(ops)
        };
        // Doubles the size each time; slightly above the limit; slightly below it, but more than the kind allows; and small.
        for patch in [
            ops(1000, 60, true),
            ops(100_000, 40, false),
            ops(100_000, 30, false),
            ops(1000, 3, false),
        ] {
            let answer = server
                .send("PATCH", &format!("{MAPS}/a"), JSON_PATCH, &patch)
                .await?;
            server.note(json!([code_and_reason(&answer), answer.1["message"]]));
        }
        Ok(())
    });
}

#[test]
fn bounds_of_a_context_hold_for_changes_too() {
    both("refused-contexts", async |server| {
        let nodes =
            |count: usize| -> Vec<String> { (0..count).map(|number| format!("n-{number}")).collect() };
        let context = json!({ "metadata": { "name": "p" }, "spec": { "potentialNodes": ["a"] } });
        server.create(CONTEXTS, &context).await?;
        let at = format!("{CONTEXTS}/p");
        for spec in [
            json!({ "potentialNodes": nodes(129) }),
            json!({ "potentialNodes": ["a", "a"] }),
            json!({ "potentialNodes": ["Upper"] }),
            json!({ "potentialNodes": nodes(128) }),
            json!({ "selectedNode": "Upper" }),
        ] {
            server.patch(&at, MERGE, &json!({ "spec": spec })).await?;
            let whole = json!({ "metadata": { "name": "p" }, "spec": spec });
            server.put(&at, &whole).await?;
        }
        Ok(())
    });
}
