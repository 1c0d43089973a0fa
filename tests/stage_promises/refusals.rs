//! Requests that are wrong.

use serde_json::{Value, json};

use crate::ground::{APPLY, CLAIMS, JSON, JSON_PATCH, MERGE, STRATEGIC, both};

/// What must be the same of a refusal whose sentence is that of a parser.
fn code_and_reason(answer: &(u16, Value)) -> Value {
    json!([answer.0, answer.1["reason"], answer.1["status"]])
}

#[test]
fn a_body_that_is_no_object_is_refused() {
    both("refused-bodies", async |ground| {
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
            let answer = ground.send("POST", CLAIMS, content_type, body.into()).await?;
            ground.note(json!({ body: code_and_reason(&answer) }));
        }
        Ok(())
    });
}

#[test]
fn a_patch_that_cannot_be_applied_is_refused() {
    both("refused-patches", async |ground| {
        ground
            .create(
                CLAIMS,
                &json!({ "metadata": { "name": "a" }, "spec": { "resourceClassName": "t" } }),
            )
            .await?;
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
            let answer = ground
                .send("PATCH", &format!("{CLAIMS}/a"), content_type, body.into())
                .await?;
            ground.note(json!({ format!("{content_type} {body}"): code_and_reason(&answer) }));
        }
        Ok(())
    });
}

#[test]
fn more_than_three_mebibytes_are_refused() {
    both("refused-size", async |ground| {
        let body = json!({ "metadata": { "name": "a", "annotations": { "a": "x".repeat(3 << 20) } } });
        let answer = ground
            .send("POST", CLAIMS, JSON, body.to_string().into_bytes())
            .await?;
        ground.note(code_and_reason(&answer));
        Ok(())
    });
}

#[test]
fn what_is_too_large_is_refused_by_each_way_in() {
    const MAPS: &str = "/api/v1/namespaces/{ns}/configmaps";
    both("refused-large", async |ground| {
        let large = |bytes: usize| json!({ "metadata": { "name": "a" }, "data": { "a": "x".repeat(bytes) } });
        ground.create(MAPS, &large(1)).await?;
        let limit = 3 << 20;
        for (method, path, content_type) in [
            ("POST", MAPS.to_owned(), JSON),
            ("PUT", format!("{MAPS}/a"), JSON),
            ("PATCH", format!("{MAPS}/a"), MERGE),
            ("PATCH", format!("{MAPS}/a"), STRATEGIC),
        ] {
            let body = large(limit).to_string().into_bytes();
            let answer = ground.send(method, &path, content_type, body).await?;
            ground.note(json!([
                method,
                content_type,
                code_and_reason(&answer),
                answer.1["message"]
            ]));
        }
        // Less than that, and more than the kind takes.
        for body in [
            large(1 << 20),
            large((1 << 20) + 1),
            json!({ "metadata": { "name": "a", "annotations": { "a": "x".repeat(257 << 10) } } }),
        ] {
            let bytes = body.to_string().into_bytes();
            let answer = ground.send("PUT", &format!("{MAPS}/a"), JSON, bytes).await?;
            ground.note(json!([
                code_and_reason(&answer),
                answer.1["message"],
                answer.1["details"]
            ]));
        }
        Ok(())
    });
}

#[test]
fn a_field_that_nobody_knows_is_dropped_or_refused_as_asked() {
    both("refused-fields", async |ground| {
        let claim =
            json!({ "metadata": { "name": "a" }, "spec": { "resourceClassName": "t", "color": "red" } });
        let strict = format!("{CLAIMS}?fieldValidation=Strict");
        let answer = ground
            .send("POST", &strict, JSON, claim.to_string().into_bytes())
            .await?;
        ground.note(code_and_reason(&answer));
        // In full, and what is told beside the answer.
        for (validation, name) in [
            ("Strict", "b"),
            ("Warn", "c"),
            ("Ignore", "d"),
            ("", "e"),
            ("Loud", "f"),
        ] {
            let mut claim = claim.clone();
            claim["metadata"]["name"] = name.into();
            claim["spec"]["parametersRef"] = json!({ "kind": "k", "name": "n", "shape": "round" });
            let path = format!("{CLAIMS}?fieldValidation={validation}");
            let path = if validation.is_empty() { CLAIMS } else { &path };
            let (code, answer, warnings) = ground.warned("POST", path, JSON, &claim).await?;
            ground.note(json!([validation, code, answer["reason"], warnings]));
            if matches!(validation, "Strict" | "Loud") {
                ground.note(json!(answer["message"]));
            }
        }
        let patch = json!({ "spec": { "color": "red" }, "metadata": { "labels": { "a": "b" } } });
        for validation in ["Strict", "Warn", "Ignore"] {
            let path = format!("{CLAIMS}/c?fieldValidation={validation}");
            let (code, answer, warnings) = ground.warned("PATCH", &path, MERGE, &patch).await?;
            ground.note(json!([validation, code, answer["reason"], warnings]));
        }
        ground.create(CLAIMS, &claim).await.map(drop)
    });
}

#[test]
fn what_is_not_served_is_not_found() {
    both("refused-paths", async |ground| {
        for (method, path) in [
            ("GET", "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/unicorns"),
            ("GET", "/apis/resource.k8s.io/v9"),
            (
                "POST",
                "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/resourceclaims/a",
            ),
            (
                "GET",
                "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/resourceclaims/a/teapot",
            ),
        ] {
            let (code, _) = ground.send(method, path, JSON, b"{}".to_vec()).await?;
            ground.note(json!({ path: code }));
        }
        Ok(())
    });
}
