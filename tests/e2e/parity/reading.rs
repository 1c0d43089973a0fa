//! Lists and watches.

use serde_json::{Value, json};

use crate::parity::history::escaped;
use crate::parity::server::{CLAIMS, MERGE, Server, both, code_and_reason, names, version};

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
            let (_, list) = server.peek(&format!("{CLAIMS}?{query}")).await?;
            server.note(json!({ query: names(&list), "kind": list["kind"], "of": list["items"][0]["kind"] }));
        }
        for query in [
            "labelSelector=a+in+b",
            "fieldSelector=spec.color%3Dred",
            "fieldSelector=nonsense",
        ] {
            let answer = server.peek(&format!("{CLAIMS}?{query}")).await?;
            server.note(json!({ query: code_and_reason(&answer) }));
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
            let (code, list) = server.peek(&path).await?;
            server.note(json!([
                code,
                names(&list),
                list["metadata"]["remainingItemCount"]
            ]));
            token = escaped(&list["metadata"]["continue"]);
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
fn a_watch_sends_the_events_since_a_version() {
    both("watch-since", async |server| {
        let last = make(server, &["a"]).await?;
        make(server, &["b"]).await?;
        let label = json!({ "metadata": { "labels": { "l": "x" } } });
        server.patch(&format!("{CLAIMS}/a"), MERGE, &label).await?;
        server.delete(&format!("{CLAIMS}/b")).await?;
        make(server, &["b"]).await?;
        let since = version(&last);
        let watch = format!("{CLAIMS}?watch=true&resourceVersion={since}");
        server.watch(&watch, 4).await?;
        // An object that no longer matches is deleted for this watch.
        let labelled = format!("{watch}&labelSelector=l%3Da");
        server.watch(&labelled, 1).await?;
        let one = format!("{watch}&fieldSelector=metadata.name%3Db");
        server.watch(&one, 3).await?;
        let events = server
            .watch(&format!("{CLAIMS}?watch=true&labelSelector=l%3Db"), 1)
            .await?;
        assert_eq!(events[0]["type"], "ADDED");
        Ok(())
    });
}

#[test]
fn a_watch_ends_after_its_timeout() {
    both("watch-end", async |server| {
        make(server, &["a"]).await?;
        server
            .watch(&format!("{CLAIMS}?watch=true&timeoutSeconds=1"), 5)
            .await
            .map(drop)
    });
}
