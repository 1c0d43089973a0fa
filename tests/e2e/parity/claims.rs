//! Claims: the controller's writes, and the validation rules of the resource API.

use serde_json::{Value, json};

use crate::parity::server::{
    CLAIMS, JSON_PATCH, MERGE, STRATEGIC, Server, both, both_but_managers, uid, version,
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

fn reserve(consumers: Value) -> Value {
    json!({ "status": { "reservedFor": consumers } })
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
fn a_patch_with_a_test_clears_an_allocation() {
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
        let clears = [clear("7d0a"), clear(&uid(&made)), clear(&uid(&made))];
        server.patch_each(&status_of("c"), JSON_PATCH, clears).await
    });
}

#[test]
fn status_and_spec_of_a_claim_have_separate_endpoints() {
    // A manager that sends labels to the status endpoint owns them, although they are not stored.
    both_but_managers("claim-endpoints", async |server| {
        server.create(CLAIMS, &claim("c")).await?;
        let everything = json!({
            "metadata": { "finalizers": [FINALIZER], "labels": { "a": "b" }, "annotations": { "c": "d" } },
            "status": { "allocation": {}, "driverName": "drayman.dev" },
        });
        server.patch(&status_of("c"), MERGE, &everything).await?;
        let labels = json!({ "metadata": { "labels": { "a": "b" } }, "status": { "driverName": "x" } });
        let spec = json!({ "spec": { "resourceClassName": "other" } });
        server.patch_each(&at("c"), MERGE, [labels, spec.clone()]).await?;
        server.patch(&status_of("c"), MERGE, &spec).await.map(drop)
    });
}

#[test]
fn reservations_are_limited_and_checked() {
    both("claim-reservations", async |server| {
        server.create(CLAIMS, &claim("c")).await?;
        let of_status = |fields: Value| json!({ "status": fields });
        let at = status_of("c");
        let patches = [
            reserve(json!([consumer(1)])),
            of_status(json!({ "allocation": { "shareable": true } })),
            of_status(json!({ "allocation": { "shareable": true }, "driverName": "d" })),
            reserve(json!([consumer(1), consumer(2)])),
        ];
        server.patch_each(&at, MERGE, patches).await?;
        // A strategic merge patch merges entries by uid.
        let entries = [
            json!([consumer(3)]),
            json!([{ "$patch": "delete", "uid": "u-1" }]),
        ];
        server.patch_each(&at, STRATEGIC, entries.map(reserve)).await?;
        let patches = [
            reserve(json!([consumer(1), consumer(1)])),
            reserve(json!([{ "resource": "pods", "name": "p", "uid": "" }])),
            reserve((0..33).map(consumer).collect()),
            of_status(json!({ "deallocationRequested": true })),
            of_status(json!({ "deallocationRequested": true, "reservedFor": null })),
            reserve(json!([consumer(1)])),
            of_status(json!({ "deallocationRequested": false })),
            of_status(json!({ "allocation": null })),
        ];
        server.patch_each(&at, MERGE, patches).await
    });
}

#[test]
fn only_a_shareable_claim_is_reserved_twice() {
    both("claim-sharing", async |server| {
        allocated(server, "c").await?;
        let two = reserve(json!([consumer(1), consumer(2)]));
        server.patch(&status_of("c"), MERGE, &two).await.map(drop)
    });
}

#[test]
fn a_finalizer_keeps_a_deleted_claim_until_it_is_removed() {
    both("claim-deletion", async |server| {
        let made = allocated(server, "c").await?;
        let path = at("c");
        let protect = |finalizer: &str| json!({ "metadata": { "finalizers": [finalizer] } });
        server.patch(&path, STRATEGIC, &protect(FINALIZER)).await?;
        server.delete(&path).await?;
        server.delete(&path).await?;
        server.patch(&path, STRATEGIC, &protect("other.dev/x")).await?;
        let two = reserve(json!([consumer(2)]));
        server.patch(&status_of("c"), MERGE, &two).await?;
        let remove =
            json!({ "metadata": { "uid": uid(&made), "$deleteFromPrimitiveList/finalizers": [FINALIZER] } });
        let (code, _) = server.send("PATCH", &path, STRATEGIC, &remove).await?;
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
        let allocations = [
            json!({ "resourceHandles": vec![handle.clone(); 33] }),
            json!({ "resourceHandles": [{ "driverName": "drayman.dev", "data": "x".repeat(16 * 1024 + 1) }] }),
            json!({ "resourceHandles": [{ "data": "x" }] }),
            json!({ "availableOnNodes": { "nodeSelectorTerms": [] } }),
            json!({ "resourceHandles": [handle] }),
        ];
        server
            .patch_each(&status_of("c"), MERGE, allocations.map(write))
            .await
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
        server.put(&at("c"), &changed).await.map(drop)
    });
}
