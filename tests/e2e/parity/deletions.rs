//! Delete options, for single objects and collections.

use serde_json::{Value, json};

use crate::parity::custom::define;
use crate::parity::server::{CLAIMS, JSON, MAPS, Server, both, code_and_reason};

async fn make(server: &Server, names: &[&str]) -> anyhow::Result<()> {
    for name in names {
        let map = json!({ "metadata": { "name": name, "labels": { "l": name } }, "data": { "a": "b" } });
        let (code, answer) = server.send("POST", MAPS, JSON, &map).await?;
        anyhow::ensure!(code == 201 || code == 409, "{answer}");
    }
    Ok(())
}

/// The remaining names, without objects of the real server's controllers.
async fn left(server: &Server) -> anyhow::Result<Vec<Value>> {
    let (_, list) = server.peek(MAPS).await?;
    let items = list["items"].as_array().cloned().unwrap_or_default();
    let names = items.into_iter().map(|item| item["metadata"]["name"].clone());
    Ok(names.filter(|name| name != "kube-root-ca.crt").collect())
}

#[test]
fn a_deletion_with_invalid_options_is_refused() {
    both("deletion-bodies", async |server| {
        make(server, &["a"]).await?;
        for body in [
            "[]",
            "7",
            "\"x\"",
            "{",
            r#"{"gracePeriodSeconds":"x"}"#,
            r#"{"preconditions":7}"#,
            r#"{"dryRun":"All"}"#,
            r#"{"dryRun":["Some"]}"#,
            r#"{"kind":"Pod","apiVersion":"v1"}"#,
            r#"{"propagationPolicy":"Sometimes"}"#,
            r#"{"propagationPolicy":"Background","orphanDependents":true}"#,
        ] {
            for path in [
                format!("{MAPS}/a"),
                format!("{MAPS}/a?gracePeriodSeconds=5"),
                MAPS.to_owned(),
            ] {
                let answer = server.send_text("DELETE", &path, JSON, body).await?;
                server.note(json!({ format!("{path} {body}"): code_and_reason(&answer) }));
                if answer.0 == 422 {
                    server.note(answer.1);
                }
            }
        }
        for query in [
            "gracePeriodSeconds=x",
            "gracePeriodSeconds=",
            "propagationPolicy=Sometimes",
            "dryRun=Some",
        ] {
            for path in [format!("{MAPS}/a?{query}"), format!("{MAPS}?{query}")] {
                server.delete(&path).await?;
            }
        }
        let left = left(server).await?;
        server.note(json!(left));
        // Empty options are accepted.
        for body in [
            "null",
            "{}",
            r#"{"unknown":1}"#,
            r#"{"gracePeriodSeconds":-1}"#,
            r#"{"dryRun":[]}"#,
        ] {
            make(server, &["a"]).await?;
            let path = format!("{MAPS}/a?gracePeriodSeconds=x");
            let answer = server.send_text("DELETE", &path, JSON, body).await?;
            server.note(json!({ body: code_and_reason(&answer) }));
        }
        Ok(())
    });
}

#[test]
fn a_dry_run_of_a_deletion_deletes_nothing() {
    both("deletion-dry", async |server| {
        make(server, &["a", "b"]).await?;
        let body = r#"{"kind":"DeleteOptions","apiVersion":"v1","dryRun":["All"]}"#;
        for (path, body) in [
            (format!("{MAPS}/a"), body),
            (format!("{MAPS}/a?dryRun=All"), ""),
            (MAPS.to_owned(), body),
            (format!("{MAPS}?dryRun=All"), ""),
            (format!("{MAPS}/a?dryRun=Some"), ""),
        ] {
            let answer = server.send_text("DELETE", &path, JSON, body).await?;
            server.note(json!([
                code_and_reason(&answer),
                answer.1["kind"],
                answer.1["details"]
            ]));
            let left = left(server).await?;
            server.note(json!(left));
        }
        // Query parameters are ignored if there is a body.
        let path = format!("{MAPS}/a?dryRun=All");
        let answer = server.send("DELETE", &path, JSON, &json!({})).await?;
        let left = left(server).await?;
        server.note(json!([code_and_reason(&answer), left]));
        Ok(())
    });
}

#[test]
fn a_collection_is_deleted_by_selector() {
    both("deletion-many", async |server| {
        make(server, &["a", "b", "c", "d"]).await?;
        for query in [
            "labelSelector=l%3Dnothing",
            "labelSelector=l%3Da",
            "fieldSelector=metadata.name%3Db",
            "limit=abc",
            "timeoutSeconds=abc",
            "resourceVersion=abc",
            "resourceVersionMatch=Exact",
            "labelSelector=a+in+b",
        ] {
            let answer = server.remove(&format!("{MAPS}?{query}")).await?;
            let items = answer.1["items"].as_array().map(Vec::len);
            let left = left(server).await?;
            server.note(json!([
                query,
                code_and_reason(&answer),
                answer.1["kind"],
                items,
                left
            ]));
        }
        Ok(())
    });
}

#[test]
fn the_collection_of_all_namespaces_can_only_be_read() {
    both("deletion-all", async |server| {
        define(server).await?;
        make(server, &["a"]).await?;
        let claim = json!({ "metadata": { "name": "a" }, "spec": { "resourceClassName": "t" } });
        server.create(CLAIMS, &claim).await?;
        let claims = "/apis/resource.k8s.io/v1alpha2/resourceclaims";
        let parameters = "/apis/drayman.dev/v1alpha1/deviceclaimparameters";
        for (method, path) in [
            ("DELETE", "/api/v1/configmaps"),
            ("POST", "/api/v1/configmaps"),
            ("PUT", "/api/v1/configmaps"),
            ("DELETE", claims),
            ("POST", claims),
            ("DELETE", "/api/v1/namespaces"),
            ("DELETE", parameters),
            ("POST", parameters),
            ("PUT", MAPS),
            ("DELETE", &format!("{CLAIMS}/a/status")),
            ("DELETE", &format!("{CLAIMS}/a/teapot")),
            ("DELETE", &format!("{MAPS}/a/status")),
        ] {
            let (code, answer) = server.send(method, path, JSON, &json!({})).await?;
            // For our kinds, the real server reports another reason.
            let reason = if path == parameters {
                &Value::Null
            } else {
                &answer["reason"]
            };
            server.note(json!({ format!("{method} {path}"): code, "reason": reason }));
        }
        let left = left(server).await?;
        server.note(json!(left));
        server.get(&format!("{CLAIMS}/a")).await.map(drop)
    });
}
