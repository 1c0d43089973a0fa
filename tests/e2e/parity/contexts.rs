//! PodSchedulingContexts: entries by server-side apply, each with its own manager.

use serde_json::{Value, json};

use crate::parity::server::{APPLY, CONTEXTS, MERGE, both, uid, version};

fn context() -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1alpha2",
        "kind": "PodSchedulingContext",
        "metadata": { "name": "p" },
        "spec": { "potentialNodes": ["a", "b"], "selectedNode": "a" },
    })
}

fn entries(uid: Option<&str>, entries: &Value) -> Value {
    let mut patch = json!({
        "apiVersion": "resource.k8s.io/v1alpha2",
        "kind": "PodSchedulingContext",
        "metadata": { "name": "p" },
        "status": { "resourceClaims": entries },
    });
    if let Some(uid) = uid {
        patch["metadata"]["uid"] = uid.into();
    }
    patch
}

fn as_manager(name: &str, force: bool) -> String {
    let force = if force { "&force=true" } else { "" };
    format!("{CONTEXTS}/p/status?fieldManager={name}{force}")
}

#[test]
fn each_manager_has_entries_of_its_own() {
    both("context-entries", async |server| {
        let made = server.create(CONTEXTS, &context()).await?;
        let of = uid(&made);
        let (ours, theirs) = (as_manager("drayman.dev", true), as_manager("other.dev", true));
        let first = entries(
            Some(&of),
            &json!([{ "name": "x", "unsuitableNodes": ["b"] }, { "name": "y", "unsuitableNodes": ["b"] }]),
        );
        // No list is empty: the real server stores an empty one as none, and takes it for a change when it is applied again a second
        // later.
        let stored = server.patch(&ours, APPLY, &first).await?;
        let again = server.patch(&ours, APPLY, &first).await?;
        assert_eq!(version(&stored), version(&again));
        server
            .patch(
                &theirs,
                APPLY,
                &entries(Some(&of), &json!([{ "name": "z", "unsuitableNodes": ["a"] }])),
            )
            .await?;
        // Entries that are no longer applied are removed; those of other managers stay.
        server
            .patch(
                &ours,
                APPLY,
                &entries(Some(&of), &json!([{ "name": "y", "unsuitableNodes": [] }])),
            )
            .await?;
        server
            .patch(&theirs, APPLY, &entries(Some(&of), &json!([])))
            .await?;
        let _ = server
            .patch(
                &as_manager("third", false),
                APPLY,
                &entries(None, &json!([{ "name": "y", "unsuitableNodes": ["b"] }])),
            )
            .await?;
        server
            .patch(
                &as_manager("third", true),
                APPLY,
                &entries(None, &json!([{ "name": "y", "unsuitableNodes": ["b"] }])),
            )
            .await?;
        server
            .patch(&ours, APPLY, &entries(None, &json!([])))
            .await
            .map(drop)
    });
}

#[test]
fn an_apply_to_a_missing_or_another_context_is_refused() {
    both("context-missing", async |server| {
        let ours = as_manager("drayman.dev", true);
        server.patch(&ours, APPLY, &entries(None, &json!([]))).await?;
        server.create(CONTEXTS, &context()).await?;
        let other = "11111111-1111-4111-8111-111111111111";
        server
            .patch(&ours, APPLY, &entries(Some(other), &json!([{ "name": "x" }])))
            .await?;
        server
            .patch(&format!("{CONTEXTS}/p/status"), APPLY, &entries(None, &json!([])))
            .await?;
        server
            .patch(&as_manager("x", true), MERGE, &json!({}))
            .await
            .map(drop)
    });
}

#[test]
fn lists_of_nodes_are_limited_and_checked() {
    both("context-nodes", async |server| {
        let nodes =
            |count: usize| -> Vec<String> { (0..count).map(|number| format!("n-{number}")).collect() };
        let mut context = context();
        for potential in [json!(nodes(129)), json!(["a", "a"]), json!(["Upper"])] {
            context["spec"]["potentialNodes"] = potential;
            server.create(CONTEXTS, &context).await?;
        }
        context["spec"]["potentialNodes"] = json!(nodes(128));
        server.create(CONTEXTS, &context).await?;
        let ours = as_manager("drayman.dev", true);
        for unsuitable in [json!(nodes(129)), json!(["a", "a"]), json!(nodes(128))] {
            server
                .patch(
                    &ours,
                    APPLY,
                    &entries(None, &json!([{ "name": "x", "unsuitableNodes": unsuitable }])),
                )
                .await?;
        }
        let twice = json!({ "status": { "resourceClaims": [{ "name": "x" }, { "name": "x" }] } });
        server
            .patch(&format!("{CONTEXTS}/p/status"), MERGE, &twice)
            .await?;
        // The scheduler owns the spec and may change it.
        server
            .patch(
                &format!("{CONTEXTS}/p"),
                MERGE,
                &json!({ "spec": { "selectedNode": null } }),
            )
            .await
            .map(drop)
    });
}
