//! Limits of the history for lists and watches.

use std::time::Duration;

use serde_json::{Value, json};

use crate::parity::custom::{INVENTORIES, define};
use crate::parity::server::{CLAIMS, JSON, Server, both, names, version};

async fn make(server: &mut Server, names: &[&str]) -> anyhow::Result<Value> {
    let mut last = Value::Null;
    for name in names {
        let claim = json!({ "metadata": { "name": name }, "spec": { "resourceClassName": "t" } });
        last = server.create(CLAIMS, &claim).await?;
    }
    Ok(last)
}

/// A message without its numbers.
fn without_numbers(text: &Value) -> String {
    let text = text.as_str().unwrap_or_default();
    text.chars()
        .filter(|character| !character.is_ascii_digit())
        .collect()
}

/// Code, reason, message, and names of a list.
fn summary(answer: &(u16, Value)) -> Value {
    let (code, body) = answer;
    json!([
        code,
        body["reason"],
        without_numbers(&body["message"]),
        names(body)
    ])
}

/// A continue token as part of a query.
pub(crate) fn escaped(token: &Value) -> String {
    let bytes = token.as_str().unwrap_or_default().bytes();
    let escaped: Vec<String> = bytes.map(|byte| format!("%{byte:02X}")).collect();
    escaped.concat()
}

#[test]
fn a_watch_from_before_the_history_receives_a_410() {
    both("history-gone", async |server| {
        // A new kind has no earlier events: the real server caches those of its first kinds.
        define(server).await?;
        server.compact_history().await?;
        make(server, &["a"]).await?;
        let events = server
            .read_events(&format!("{INVENTORIES}?watch=true&resourceVersion=1"), 5)
            .await?;
        let seen: Vec<Value> = events
            .iter()
            .map(|event| {
                let status = &event["object"];
                let message = without_numbers(&status["message"]);
                let (kind, code, reason) = (&status["kind"], &status["code"], &status["reason"]);
                json!([event["type"], kind, code, reason, message])
            })
            .collect();
        assert_eq!(seen.len(), 1, "one error event, and the watch ends");
        server.note(json!(seen));
        Ok(())
    });
}

#[test]
fn a_watch_of_a_future_version_is_silent_and_a_list_times_out() {
    both("history-future", async |server| {
        let last: u64 = version(&make(server, &["a"]).await?).parse()?;
        let future = last + 1_000_000;
        let path = format!("{CLAIMS}?watch=true&timeoutSeconds=2&resourceVersion={future}");
        let (events, made) = tokio::join!(server.read_events(&path, 1), async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let claim = json!({ "metadata": { "name": "b" }, "spec": { "resourceClassName": "t" } });
            server.send("POST", CLAIMS, JSON, &claim).await
        });
        let (events, code) = (events?, made?.0);
        server.note(json!({ "events": events, "made": code }));
        for query in [
            format!("resourceVersion={future}"),
            format!("resourceVersion={future}&resourceVersionMatch=NotOlderThan"),
        ] {
            let answer = server.peek(&format!("{CLAIMS}?{query}")).await?;
            server.note(summary(&answer));
        }
        Ok(())
    });
}

#[test]
fn a_watch_with_bookmarks_gets_one_before_it_ends() {
    both("history-bookmarks", async |server| {
        let last = make(server, &["a"]).await?;
        let since = version(&last);
        let watch = format!("{CLAIMS}?watch=true&timeoutSeconds=12&resourceVersion={since}");
        // The real server sends bookmarks only for versions newer than the start of the watch, even if they are not in its scope.
        let newer = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let path = "/apis/resource.k8s.io/v1alpha2/namespaces/default/resourceclaims";
            let claim =
                json!({ "metadata": { "generateName": "newer-" }, "spec": { "resourceClassName": "t" } });
            server.send("POST", path, JSON, &claim).await
        };
        let path = format!("{watch}&allowWatchBookmarks=true");
        let (with, newer) = tokio::join!(server.read_events(&path, 3), newer);
        let (with, newer) = (with?, newer?);
        anyhow::ensure!(newer.0 == 201, "{}", newer.1);
        let without = server.read_events(&watch, 3).await?;
        let shown = |events: &[Value]| -> Vec<Value> {
            let known = |event: &Value| {
                let version = version(&event["object"]).parse::<u64>().unwrap_or(0);
                version >= since.parse().unwrap_or(u64::MAX)
            };
            let one = |event: &Value| {
                let object = &event["object"];
                let (kind, version) = (&object["kind"], &object["apiVersion"]);
                json!([
                    event["type"],
                    kind,
                    version,
                    object["metadata"]["name"],
                    known(event)
                ])
            };
            events.iter().map(one).collect()
        };

        // One or two, depending on the ticks of the real server.
        assert!(!with.is_empty() && without.is_empty(), "{with:?} {without:?}");
        assert!(with.iter().all(|event| event["type"] == "BOOKMARK"), "{with:?}");
        server.note(json!(shown(&with).first()));
        Ok(())
    });
}

#[test]
fn a_list_is_continued_only_as_long_as_its_version_is_known() {
    both("history-continue", async |server| {
        make(server, &["a", "b", "c"]).await?;
        let remembered = server.lock_history().await?;
        let first = server.peek(&format!("{CLAIMS}?limit=1")).await?;
        server.note(summary(&first));
        let token = escaped(&first.1["metadata"]["continue"]);
        for query in [
            "limit=1&continue=nonsense".to_owned(),
            format!("limit=1&continue={token}&resourceVersion=1"),
            format!("limit=1&continue={token}&resourceVersion=0"),
        ] {
            let (code, body) = server.peek(&format!("{CLAIMS}?{query}")).await?;
            server.note(json!([code, body["reason"]]));
        }
        make(server, &["bb"]).await?;
        drop(remembered);
        server.compact_history().await?;
        let path = format!("{CLAIMS}?limit=1&continue={token}");
        let expired = server.peek(&path).await?;
        server.note(summary(&expired));
        // The error has a continue token for an inconsistent list.
        let token = escaped(&expired.1["metadata"]["continue"]);
        assert!(!token.is_empty(), "{}", expired.1);
        let path = format!("{CLAIMS}?limit=5&continue={token}");
        let rest = server.peek(&path).await?;
        server.note(summary(&rest));
        Ok(())
    });
}

#[test]
fn a_list_of_a_version_that_is_forgotten_is_refused() {
    both("history-exact", async |server| {
        let remembered = server.lock_history().await?;
        let first = version(&make(server, &["a"]).await?);
        make(server, &["b"]).await?;
        let path = format!("{CLAIMS}?resourceVersion={first}&resourceVersionMatch=Exact");
        let then = server.peek(&path).await?;
        drop(remembered);
        server.note(summary(&then));
        server.compact_history().await?;
        let gone = server.peek(&path).await?;
        server.note(json!([gone.0, gone.1["reason"]]));
        Ok(())
    });
}
