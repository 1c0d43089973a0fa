//! Invalid parameters of lists and watches.

use serde_json::{Value, json};

use crate::parity::server::{CLAIMS, both};

#[test]
fn invalid_parameters_of_lists_and_watches_are_refused() {
    both("parameters-wrong", async |server| {
        let claim = json!({ "metadata": { "name": "a" }, "spec": { "resourceClassName": "t" } });
        server.create(CLAIMS, &claim).await?;
        for query in [
            "limit=abc",
            "limit=1.5",
            "limit=",
            "limit=18446744073709551615",
            "timeoutSeconds=abc",
            "timeoutSeconds=",
            "timeoutSeconds=18446744073709551615",
            "resourceVersion=abc",
            "resourceVersion=-1",
            "resourceVersion=18446744073709551616",
            "resourceVersionMatch=Exact",
            "resourceVersionMatch=NotOlderThan",
            "resourceVersionMatch=Loud",
            "resourceVersion=0&resourceVersionMatch=Exact",
            "resourceVersion=0&resourceVersionMatch=Loud",
            "resourceVersion=1&resourceVersionMatch=Exact&watch=true",
            "resourceVersion=1&resourceVersionMatch=NotOlderThan&watch=true",
            "resourceVersionMatch=Loud&watch=true",
            "sendInitialEvents=true",
            "sendInitialEvents=true&watch=true",
            "sendInitialEvents=true&watch=true&resourceVersionMatch=NotOlderThan",
            "timeoutSeconds=18446744073709551615&watch=true",
            "timeoutSeconds=abc&watch=true",
            "timeoutSeconds=1.5&watch=true",
            "resourceVersion=abc&watch=true",
            "limit=abc&watch=true",
        ] {
            server.get(&format!("{CLAIMS}?{query}")).await?;
        }
        for query in [
            "a?resourceVersion=abc",
            "missing?resourceVersion=abc",
            "missing?limit=abc",
        ] {
            server.get(&format!("{CLAIMS}/{query}")).await?;
        }
        Ok(())
    });
}

#[test]
fn unusual_parameters_are_accepted() {
    both("parameters-odd", async |server| {
        let claim = json!({ "metadata": { "name": "a" }, "spec": { "resourceClassName": "t" } });
        server.create(CLAIMS, &claim).await?;
        for query in [
            "limit=-1",
            "limit=0",
            "timeoutSeconds=-1",
            "watch=false",
            "watch=0",
            "allowWatchBookmarks=7",
        ] {
            let (code, list) = server.peek(&format!("{CLAIMS}?{query}")).await?;
            let items = list["items"].as_array().map(Vec::len);
            server.note(json!([query, code, list["kind"], items]));
        }
        // Zero and values above the maximum mean the server's default.
        for query in [
            "watch=true&timeoutSeconds=0",
            "watch=maybe",
            "watch&timeoutSeconds=99999999999",
        ] {
            let events = server.read_events(&format!("{CLAIMS}?{query}"), 1).await?;
            let seen: Vec<&Value> = events.iter().map(|event| &event["type"]).collect();
            server.note(json!([query, seen]));
        }
        Ok(())
    });
}
