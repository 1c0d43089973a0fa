//! Claims: the controller's writes, and the validation rules of the resource API.

use serde_json::{Value, json};

use crate::parity::server::{
    CLAIMS, JSON, JSON_PATCH, MERGE, STRATEGIC, Server, both, both_but_managers, uid, version,
};

const FINALIZER: &str = "drayman.dev/deletion-protection";

fn claim(name: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1alpha2",
        "kind": "ResourceClaim",
        "metadata": { "name": name },
        "spec": { "resourceClassName": "test" },
    })
}

fn at(name: &str) -> String {
    format!("{CLAIMS}/{name}")
}

fn status_of(name: &str) -> String {
    format!("{CLAIMS}/{name}/status")
}

fn consumer(number: usize) -> Value {
    json!({ "resource": "pods", "name": format!("pod-{number}"), "uid": format!("u-{number}") })
}

fn allocation(uid: &str, reserved_for: &Value) -> Value {
    json!({
        "metadata": { "uid": uid },
        "status": {
            "allocation": {
                "resourceHandles": [{ "driverName": "drayman.dev", "data": "x" }],
                "availableOnNodes": { "nodeSelectorTerms": [{ "matchFields": [
                    { "key": "metadata.name", "operator": "In", "values": ["n"] }] }] },
            },
            "driverName": "drayman.dev",
            "reservedFor": reserved_for,
        },
    })
}

async fn allocated(server: &mut Server, name: &str) -> anyhow::Result<Value> {
    let claim = server.create(CLAIMS, &claim(name)).await?;
    server
        .patch(
            &status_of(name),
            MERGE,
            &allocation(&uid(&claim), &json!([consumer(1)])),
        )
        .await
}

#[test]
fn a_claim_begins_with_its_defaults_and_without_a_status() {
    both("claim-begins", async |server| {
        let mut claim = claim("c");
        claim["status"] = json!({ "driverName": "x", "reservedFor": [consumer(1)] });
        server.create(CLAIMS, &claim).await?;
        server.get(&at("c")).await?;
        server.get(&status_of("c")).await.map(drop)
    });
}

#[test]
fn the_finalizer_is_added_and_removed_by_value() {
    both("claim-finalizer", async |server| {
        let made = server.create(CLAIMS, &claim("c")).await?;
        let add = |name: &str| json!({ "metadata": { "uid": uid(&made), "finalizers": [name] } });
        let remove =
            json!({ "metadata": { "uid": uid(&made), "$deleteFromPrimitiveList/finalizers": [FINALIZER] } });
        server.patch(&at("c"), STRATEGIC, &add(FINALIZER)).await?;
        let twice = server.patch(&at("c"), STRATEGIC, &add("other.dev/x")).await?;
        // A patch without changes does not increment the resource version.
        let again = server.patch(&at("c"), STRATEGIC, &add(FINALIZER)).await?;
        assert_eq!(version(&twice), version(&again));
        server.patch(&at("c"), STRATEGIC, &remove).await?;
        server.patch(&at("c"), STRATEGIC, &remove).await?;
        server.patch(&at("c"), STRATEGIC, &add("Upper.dev/x")).await?;
        let wrong = json!({ "metadata": { "uid": "7d0a", "finalizers": ["a.dev/b"] } });
        server.patch(&at("c"), STRATEGIC, &wrong).await?;
        let wrong =
            json!({ "metadata": { "uid": "7d0a", "$deleteFromPrimitiveList/finalizers": ["other.dev/x"] } });
        server.patch(&at("c"), STRATEGIC, &wrong).await.map(drop)
    });
}

#[test]
fn an_allocation_is_one_write_of_the_status_and_stays_as_it_is() {
    both("claim-allocation", async |server| {
        let first = allocated(server, "c").await?;
        let again = allocation(&uid(&first), &json!([consumer(1)]));
        let second = server.patch(&status_of("c"), MERGE, &again).await?;
        assert_eq!(version(&first), version(&second));
        let mut other = again;
        other["status"]["allocation"]["resourceHandles"][0]["data"] = "y".into();
        server.patch(&status_of("c"), MERGE, &other).await?;
        other["metadata"]["uid"] = "7d0a".into();
        server.patch(&status_of("c"), MERGE, &other).await?;
        server.patch(&status_of("missing"), MERGE, &other).await.map(drop)
    });
}

#[test]
fn an_allocation_is_cleared_by_a_patch_that_tests_what_was_seen() {
    both("claim-clearing", async |server| {
        let made = allocated(server, "c").await?;
        let clear = |uid: &str| {
            json!([
                { "op": "test", "path": "/metadata/uid", "value": uid },
                { "op": "test", "path": "/status/deallocationRequested", "value": true },
                { "op": "remove", "path": "/status/deallocationRequested" },
                { "op": "test", "path": "/status/driverName", "value": "drayman.dev" },
                { "op": "remove", "path": "/status/driverName" },
                { "op": "remove", "path": "/status/allocation" },
            ])
        };
        // Deallocation was not requested.
        server
            .patch(&status_of("c"), JSON_PATCH, &clear(&uid(&made)))
            .await?;
        // The claim is still reserved.
        let only = json!([{ "op": "remove", "path": "/status/allocation" }]);
        server.patch(&status_of("c"), JSON_PATCH, &only).await?;
        let request = json!({ "status": { "reservedFor": null, "deallocationRequested": true } });
        server.patch(&status_of("c"), MERGE, &request).await?;
        server.patch(&status_of("c"), JSON_PATCH, &clear("7d0a")).await?;
        server
            .patch(&status_of("c"), JSON_PATCH, &clear(&uid(&made)))
            .await?;
        server
            .patch(&status_of("c"), JSON_PATCH, &clear(&uid(&made)))
            .await
            .map(drop)
    });
}

#[test]
fn status_and_spec_of_a_claim_have_separate_endpoints() {
    // A manager that sends labels to the status endpoint owns them, although they are not stored.
    both_but_managers("claim-endpoints", async |server| {
        let made = server.create(CLAIMS, &claim("c")).await?;
        let everything = json!({
            "metadata": { "finalizers": [FINALIZER], "labels": { "a": "b" }, "annotations": { "c": "d" } },
            "status": { "allocation": {}, "driverName": "drayman.dev" },
        });
        server.patch(&status_of("c"), MERGE, &everything).await?;
        server
            .patch(
                &at("c"),
                MERGE,
                &json!({ "metadata": { "labels": { "a": "b" } }, "status": { "driverName": "x" } }),
            )
            .await?;
        server
            .patch(
                &at("c"),
                MERGE,
                &json!({ "spec": { "resourceClassName": "other" } }),
            )
            .await?;
        server
            .patch(
                &status_of("c"),
                MERGE,
                &json!({ "spec": { "resourceClassName": "other" } }),
            )
            .await?;
        let _ = made;
        Ok(())
    });
}

#[test]
fn reservations_are_limited_and_checked() {
    both("claim-reservations", async |server| {
        server.create(CLAIMS, &claim("c")).await?;
        let reserve = |consumers: Value| json!({ "status": { "reservedFor": consumers } });
        let at = status_of("c");
        server.patch(&at, MERGE, &reserve(json!([consumer(1)]))).await?;
        server
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "allocation": { "shareable": true } } }),
            )
            .await?;
        let shared = json!({ "status": { "allocation": { "shareable": true }, "driverName": "d" } });
        server.patch(&at, MERGE, &shared).await?;
        server
            .patch(&at, MERGE, &reserve(json!([consumer(1), consumer(2)])))
            .await?;
        // A strategic merge patch merges entries by uid.
        server
            .patch(&at, STRATEGIC, &reserve(json!([consumer(3)])))
            .await?;
        server
            .patch(
                &at,
                STRATEGIC,
                &reserve(json!([{ "$patch": "delete", "uid": "u-1" }])),
            )
            .await?;
        server
            .patch(&at, MERGE, &reserve(json!([consumer(1), consumer(1)])))
            .await?;
        server
            .patch(
                &at,
                MERGE,
                &reserve(json!([{ "resource": "pods", "name": "p", "uid": "" }])),
            )
            .await?;
        server
            .patch(&at, MERGE, &reserve((0..33).map(consumer).collect()))
            .await?;
        server
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "deallocationRequested": true } }),
            )
            .await?;
        server
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "deallocationRequested": true, "reservedFor": null } }),
            )
            .await?;
        server.patch(&at, MERGE, &reserve(json!([consumer(1)]))).await?;
        server
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "deallocationRequested": false } }),
            )
            .await?;
        server
            .patch(&at, MERGE, &json!({ "status": { "allocation": null } }))
            .await
            .map(drop)
    });
}

#[test]
fn only_a_shareable_claim_is_reserved_twice() {
    both("claim-sharing", async |server| {
        allocated(server, "c").await?;
        let two = json!({ "status": { "reservedFor": [consumer(1), consumer(2)] } });
        server.patch(&status_of("c"), MERGE, &two).await.map(drop)
    });
}

#[test]
fn a_finalizer_keeps_a_deleted_claim_until_it_is_removed() {
    both("claim-deletion", async |server| {
        let made = allocated(server, "c").await?;
        let path = at("c");
        server
            .patch(
                &path,
                STRATEGIC,
                &json!({ "metadata": { "finalizers": [FINALIZER] } }),
            )
            .await?;
        server.delete(&path).await?;
        server.delete(&path).await?;
        server
            .patch(
                &path,
                STRATEGIC,
                &json!({ "metadata": { "finalizers": ["other.dev/x"] } }),
            )
            .await?;
        let two = json!({ "status": { "reservedFor": [consumer(2)] } });
        server.patch(&status_of("c"), MERGE, &two).await?;
        let remove =
            json!({ "metadata": { "uid": uid(&made), "$deleteFromPrimitiveList/finalizers": [FINALIZER] } });
        let (code, _) = server
            .send("PATCH", &path, STRATEGIC, remove.to_string().into_bytes())
            .await?;
        server.note(json!(code));
        server.get(&path).await?;
        // Without a finalizer, an allocated claim is deleted at once.
        allocated(server, "d").await?;
        server.delete(&at("d")).await?;
        server.get(&at("d")).await?;
        server.delete(&at("d")).await.map(drop)
    });
}

#[test]
fn handles_and_selectors_of_an_allocation_are_checked() {
    both("claim-handles", async |server| {
        server.create(CLAIMS, &claim("c")).await?;
        let write = |allocation: Value| json!({ "status": { "driverName": "drayman.dev", "allocation": allocation } });
        let handle = json!({ "driverName": "drayman.dev", "data": "x" });
        for allocation in [
            json!({ "resourceHandles": vec![handle.clone(); 33] }),
            json!({ "resourceHandles": [{ "driverName": "drayman.dev", "data": "x".repeat(16 * 1024 + 1) }] }),
            json!({ "resourceHandles": [{ "data": "x" }] }),
            json!({ "availableOnNodes": { "nodeSelectorTerms": [] } }),
            json!({ "resourceHandles": [handle] }),
        ] {
            server.patch(&status_of("c"), MERGE, &write(allocation)).await?;
        }
        Ok(())
    });
}

#[test]
fn a_spec_is_checked_and_immutable() {
    both("claim-spec", async |server| {
        for spec in [
            json!({}),
            json!({ "resourceClassName": "Upper" }),
            json!({ "resourceClassName": "test", "allocationMode": "Sometime" }),
            json!({ "resourceClassName": "test", "parametersRef": { "apiGroup": "a" } }),
        ] {
            let mut claim = claim("c");
            claim["spec"] = spec;
            server.create(CLAIMS, &claim).await?;
        }
        let made = server.create(CLAIMS, &claim("c")).await?;
        let mut changed = made.clone();
        changed["spec"]["allocationMode"] = "Immediate".into();
        server.ask("PUT", &at("c"), JSON, &changed).await.map(drop)
    });
}
