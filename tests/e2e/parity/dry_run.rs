//! Writes with `dryRun`: the answer is that of the write, and nothing changes.

use serde_json::{Value, json};

use crate::parity::server::{APPLY, CLAIMS, JSON, JSON_PATCH, MAPS, MERGE, PODS, Server, both};

const MANAGED: &str = "fieldManager=tests";

async fn is_as_it_was(server: &mut Server) -> anyhow::Result<()> {
    for path in [format!("{MAPS}/a"), format!("{MAPS}/b"), format!("{CLAIMS}/c")] {
        server.get(&path).await?;
    }
    Ok(())
}

#[test]
fn a_dry_run_is_answered_and_changes_nothing() {
    both("pretending", async |server| {
        let map = |name: &str, data: &str| json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "a": data } });
        let claim = json!({ "metadata": { "name": "c", "finalizers": ["example.com/f"] }, "spec": { "resourceClassName": "t" } });
        server
            .ask("POST", &format!("{MAPS}?{MANAGED}"), JSON, &map("a", "1"))
            .await?;
        server
            .ask("POST", &format!("{CLAIMS}?{MANAGED}"), JSON, &claim)
            .await?;
        let all = format!("dryRun=All&{MANAGED}");
        let (a, b) = (format!("{MAPS}/a?{all}"), format!("{MAPS}/b?{all}"));
        let status = format!("{CLAIMS}/c/status?{all}");
        let reserved =
            json!({ "status": { "driverName": "example.com", "allocation": { "shareable": true } } });
        let patch = json!({ "data": { "a": "2" } });
        let old = json!({ "metadata": { "resourceVersion": "1" } });
        let tested = json!([{ "op": "test", "path": "/data/a", "value": "2" }]);
        let class = json!({ "spec": { "resourceClassName": "u" } });
        for (method, path, content_type, body) in [
            ("POST", format!("{MAPS}?{all}"), JSON, map("a", "2")),
            ("POST", format!("{MAPS}?{all}"), JSON, map("b", "2")),
            ("POST", format!("{MAPS}?{all}"), JSON, map("No", "2")),
            ("PUT", a.clone(), JSON, map("a", "2")),
            ("PATCH", a.clone(), MERGE, patch.clone()),
            ("PATCH", a.clone(), MERGE, old),
            ("PATCH", a, JSON_PATCH, tested),
            ("PATCH", b.clone(), MERGE, patch.clone()),
            ("PATCH", b, APPLY, map("b", "2")),
            ("PATCH", status, MERGE, reserved),
            ("PATCH", format!("{CLAIMS}/c?{all}"), MERGE, class),
            ("DELETE", format!("{CLAIMS}/c?dryRun=All"), JSON, Value::Null),
            ("POST", format!("{MAPS}?dryRun=Some"), JSON, map("b", "2")),
            ("POST", format!("{MAPS}?dryRun="), JSON, map("b", "2")),
            ("PUT", format!("{MAPS}/a?dryRun=all"), JSON, map("a", "2")),
            ("PATCH", format!("{MAPS}/a?dryRun=Some"), MERGE, patch),
        ] {
            server.ask(method, &path, content_type, &body).await?;
            is_as_it_was(server).await?;
        }
        Ok(())
    });
}

#[test]
fn a_binding_and_a_deletion_of_a_pod_may_be_dry_runs() {
    both("pretending-pods", async |server| {
        let pod = json!({
            "metadata": { "name": "p" },
            "spec": { "schedulerName": "nobody", "containers": [{ "name": "c", "image": "i" }] },
        });
        let binding = json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": "p" },
                              "target": { "kind": "Node", "name": "n" } });
        let bind = |pretends: &str| format!("{PODS}/p/binding{pretends}");
        for (method, path, body) in [
            ("POST", format!("{PODS}?dryRun=All"), &pod),
            ("GET", format!("{PODS}/p"), &Value::Null),
            ("POST", PODS.to_owned(), &pod),
            ("POST", bind("?dryRun=All"), &binding),
            ("DELETE", format!("{PODS}/p?dryRun=All"), &Value::Null),
            ("GET", format!("{PODS}/p"), &Value::Null),
            ("POST", bind(""), &binding),
            ("DELETE", format!("{PODS}/p?dryRun=All"), &Value::Null),
            (
                "DELETE",
                format!("{PODS}/p?dryRun=All&gracePeriodSeconds=0"),
                &Value::Null,
            ),
            ("GET", format!("{PODS}/p"), &Value::Null),
        ] {
            let (code, answer) = server.send(method, &path, JSON, body).await?;
            server.note(json!({
                "asked": format!("{method} {path}"), "code": code, "kind": answer["kind"], "reason": answer["reason"],
                "node": answer["spec"]["nodeName"], "grace": answer["metadata"]["deletionGracePeriodSeconds"],
                "deleting": answer["metadata"]["deletionTimestamp"].is_string(),
                "version": answer["metadata"]["resourceVersion"].is_string(),
                "uid": answer["metadata"]["uid"].is_string(),
                "tolerations": answer["spec"]["tolerations"], "quality": answer["status"]["qosClass"],
            }));
        }
        Ok(())
    });
}
