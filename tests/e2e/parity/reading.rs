//! Lists and watches.

use serde_json::{Value, json};

use crate::parity::server::{CLAIMS, JSON, MERGE, Server, both, version};

async fn make(server: &mut Server, names: &[&str]) -> anyhow::Result<Value> {
    let mut last = Value::Null;
    for name in names {
        let claim = json!({ "metadata": { "name": name, "labels": { "l": name } }, "spec": { "resourceClassName": "t" } });
        last = server.create(CLAIMS, &claim).await?;
    }
    Ok(last)
}

#[test]
fn a_list_is_selected_by_labels_and_fields() {
    both("list-selectors", async |server| {
        make(server, &["a", "b", "c"]).await?;
        for query in [
            "labelSelector=l%3Da",
            "labelSelector=l+in+(a,c)",
            "labelSelector=l!%3Da",
            "labelSelector=!l",
            "fieldSelector=metadata.name%3Db",
            "fieldSelector=metadata.name!%3Db",
        ] {
            let (_, list) = server
                .send("GET", &format!("{CLAIMS}?{query}"), JSON, Vec::new())
                .await?;
            let items = list["items"].as_array().cloned().unwrap_or_default();
            let names: Vec<&Value> = items.iter().map(|item| &item["metadata"]["name"]).collect();
            server.note(json!({ query: names, "kind": list["kind"], "of": items.first().map(|item| item["kind"].clone()) }));
        }
        for query in [
            "labelSelector=a+in+b",
            "fieldSelector=spec.color%3Dred",
            "fieldSelector=nonsense",
        ] {
            let (code, answer) = server
                .send("GET", &format!("{CLAIMS}?{query}"), JSON, Vec::new())
                .await?;
            server.note(json!({ query: [json!(code), answer["reason"].clone()] }));
        }
        Ok(())
    });
}

#[test]
fn a_list_comes_in_pages_of_one_version() {
    both("list-pages", async |server| {
        let _remembered = server.lock_history().await?;
        make(server, &["a", "b", "c", "d", "e"]).await?;
        let mut token = String::new();
        for page in 0..4 {
            let path = format!("{CLAIMS}?limit=2&continue={token}");
            let (code, list) = server.send("GET", &path, JSON, Vec::new()).await?;
            let items = list["items"].as_array().cloned().unwrap_or_default();
            let names: Vec<&Value> = items.iter().map(|item| &item["metadata"]["name"]).collect();
            server.note(json!([code, names, list["metadata"]["remainingItemCount"]]));
            let next = list["metadata"]["continue"].as_str().unwrap_or_default();
            let escaped: Vec<String> = next.bytes().map(|byte| format!("%{byte:02X}")).collect();
            token = escaped.concat();
            if token.is_empty() {
                break;
            }
            // Changes between two pages are not visible.
            if page == 0 {
                server.delete(&format!("{CLAIMS}/e")).await?;
                make(server, &["cc"]).await?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_watch_tells_what_has_happened_since_a_version() {
    both("watch-since", async |server| {
        let last = make(server, &["a"]).await?;
        make(server, &["b"]).await?;
        server
            .patch(
                &format!("{CLAIMS}/a"),
                MERGE,
                &json!({ "metadata": { "labels": { "l": "x" } } }),
            )
            .await?;
        server.delete(&format!("{CLAIMS}/b")).await?;
        make(server, &["b"]).await?;
        let since = version(&last);
        server
            .watch(&format!("{CLAIMS}?watch=true&resourceVersion={since}"), 4)
            .await?;
        // An object that no longer matches is deleted for this watch.
        server
            .watch(
                &format!("{CLAIMS}?watch=true&resourceVersion={since}&labelSelector=l%3Da"),
                1,
            )
            .await?;
        let one = format!("{CLAIMS}?watch=true&resourceVersion={since}&fieldSelector=metadata.name%3Db");
        server.watch(&one, 3).await?;
        let events = server
            .watch(&format!("{CLAIMS}?watch=true&labelSelector=l%3Db"), 1)
            .await?;
        assert_eq!(events[0]["type"], "ADDED");
        Ok(())
    });
}

#[test]
fn a_watch_ends_when_it_was_asked_to() {
    both("watch-end", async |server| {
        make(server, &["a"]).await?;
        server
            .watch(&format!("{CLAIMS}?watch=true&timeoutSeconds=1"), 5)
            .await
            .map(drop)
    });
}
