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
        // Entries that are no longer applied are removed; those of other managers stay.
        let applied = |name: &str, nodes: Value| json!([{ "name": name, "unsuitableNodes": nodes }]);
        let (third, forced) = (as_manager("third", false), as_manager("third", true));
        for (manager, uid, applied) in [
            (&theirs, Some(&*of), applied("z", json!(["a"]))),
            (&ours, Some(&*of), applied("y", json!([]))),
            (&theirs, Some(&*of), json!([])),
            (&third, None, applied("y", json!(["b"]))),
            (&forced, None, applied("y", json!(["b"]))),
            (&ours, None, json!([])),
        ] {
            server.patch(manager, APPLY, &entries(uid, &applied)).await?;
        }
        Ok(())
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
            let applied = json!([{ "name": "x", "unsuitableNodes": unsuitable }]);
            server.patch(&ours, APPLY, &entries(None, &applied)).await?;
        }
        let twice = json!({ "status": { "resourceClaims": [{ "name": "x" }, { "name": "x" }] } });
        server
            .patch(&format!("{CONTEXTS}/p/status"), MERGE, &twice)
            .await?;
        // The scheduler owns the spec and may change it.
        let unselected = json!({ "spec": { "selectedNode": null } });
        let path = format!("{CONTEXTS}/p");
        server.patch(&path, MERGE, &unselected).await.map(drop)
    });
}
