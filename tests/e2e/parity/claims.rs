//! Claims: the controller's writes, and the validation rules of the resource API.

use serde_json::{Value, json};

use crate::parity::ground::{
    CLAIMS, Ground, JSON, JSON_PATCH, MERGE, STRATEGIC, both, both_but_managers, uid, version,
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

async fn allocated(ground: &mut Ground, name: &str) -> anyhow::Result<Value> {
    let claim = ground.create(CLAIMS, &claim(name)).await?;
    ground
        .patch(
            &status_of(name),
            MERGE,
            &allocation(&uid(&claim), &json!([consumer(1)])),
        )
        .await
}

#[test]
fn a_claim_begins_with_its_defaults_and_without_a_status() {
    both("claim-begins", async |ground| {
        let mut claim = claim("c");
        claim["status"] = json!({ "driverName": "x", "reservedFor": [consumer(1)] });
        ground.create(CLAIMS, &claim).await?;
        ground.get(&at("c")).await?;
        ground.get(&status_of("c")).await.map(drop)
    });
}

#[test]
fn the_finalizer_is_added_and_removed_by_value() {
    both("claim-finalizer", async |ground| {
        let made = ground.create(CLAIMS, &claim("c")).await?;
        let add = |name: &str| json!({ "metadata": { "uid": uid(&made), "finalizers": [name] } });
        let remove =
            json!({ "metadata": { "uid": uid(&made), "$deleteFromPrimitiveList/finalizers": [FINALIZER] } });
        ground.patch(&at("c"), STRATEGIC, &add(FINALIZER)).await?;
        let twice = ground.patch(&at("c"), STRATEGIC, &add("other.dev/x")).await?;
        // A patch without changes does not increment the resource version.
        let again = ground.patch(&at("c"), STRATEGIC, &add(FINALIZER)).await?;
        assert_eq!(version(&twice), version(&again));
        ground.patch(&at("c"), STRATEGIC, &remove).await?;
        ground.patch(&at("c"), STRATEGIC, &remove).await?;
        ground.patch(&at("c"), STRATEGIC, &add("Upper.dev/x")).await?;
        let wrong = json!({ "metadata": { "uid": "7d0a", "finalizers": ["a.dev/b"] } });
        ground.patch(&at("c"), STRATEGIC, &wrong).await?;
        let wrong =
            json!({ "metadata": { "uid": "7d0a", "$deleteFromPrimitiveList/finalizers": ["other.dev/x"] } });
        ground.patch(&at("c"), STRATEGIC, &wrong).await.map(drop)
    });
}

#[test]
fn an_allocation_is_one_write_of_the_status_and_stays_as_it_is() {
    both("claim-allocation", async |ground| {
        let first = allocated(ground, "c").await?;
        let again = allocation(&uid(&first), &json!([consumer(1)]));
        let second = ground.patch(&status_of("c"), MERGE, &again).await?;
        assert_eq!(version(&first), version(&second));
        let mut other = again;
        other["status"]["allocation"]["resourceHandles"][0]["data"] = "y".into();
        ground.patch(&status_of("c"), MERGE, &other).await?;
        other["metadata"]["uid"] = "7d0a".into();
        ground.patch(&status_of("c"), MERGE, &other).await?;
        ground.patch(&status_of("missing"), MERGE, &other).await.map(drop)
    });
}

#[test]
fn an_allocation_is_cleared_by_a_patch_that_tests_what_was_seen() {
    both("claim-clearing", async |ground| {
        let made = allocated(ground, "c").await?;
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
        ground
            .patch(&status_of("c"), JSON_PATCH, &clear(&uid(&made)))
            .await?;
        // The claim is still reserved.
        let only = json!([{ "op": "remove", "path": "/status/allocation" }]);
        ground.patch(&status_of("c"), JSON_PATCH, &only).await?;
        let request = json!({ "status": { "reservedFor": null, "deallocationRequested": true } });
        ground.patch(&status_of("c"), MERGE, &request).await?;
        ground.patch(&status_of("c"), JSON_PATCH, &clear("7d0a")).await?;
        ground
            .patch(&status_of("c"), JSON_PATCH, &clear(&uid(&made)))
            .await?;
        ground
            .patch(&status_of("c"), JSON_PATCH, &clear(&uid(&made)))
            .await
            .map(drop)
    });
}

#[test]
fn status_and_spec_of_a_claim_have_separate_endpoints() {
    // A manager that sends labels to the status endpoint owns them, although they are not stored.
    both_but_managers("claim-endpoints", async |ground| {
        let made = ground.create(CLAIMS, &claim("c")).await?;
        let everything = json!({
            "metadata": { "finalizers": [FINALIZER], "labels": { "a": "b" }, "annotations": { "c": "d" } },
            "status": { "allocation": {}, "driverName": "drayman.dev" },
        });
        ground.patch(&status_of("c"), MERGE, &everything).await?;
        ground
            .patch(
                &at("c"),
                MERGE,
                &json!({ "metadata": { "labels": { "a": "b" } }, "status": { "driverName": "x" } }),
            )
            .await?;
        ground
            .patch(
                &at("c"),
                MERGE,
                &json!({ "spec": { "resourceClassName": "other" } }),
            )
            .await?;
        ground
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
    both("claim-reservations", async |ground| {
        ground.create(CLAIMS, &claim("c")).await?;
        let reserve = |consumers: Value| json!({ "status": { "reservedFor": consumers } });
        let at = status_of("c");
        ground.patch(&at, MERGE, &reserve(json!([consumer(1)]))).await?;
        ground
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "allocation": { "shareable": true } } }),
            )
            .await?;
        let shared = json!({ "status": { "allocation": { "shareable": true }, "driverName": "d" } });
        ground.patch(&at, MERGE, &shared).await?;
        ground
            .patch(&at, MERGE, &reserve(json!([consumer(1), consumer(2)])))
            .await?;
        // A strategic merge patch merges entries by uid.
        ground
            .patch(&at, STRATEGIC, &reserve(json!([consumer(3)])))
            .await?;
        ground
            .patch(
                &at,
                STRATEGIC,
                &reserve(json!([{ "$patch": "delete", "uid": "u-1" }])),
            )
            .await?;
        ground
            .patch(&at, MERGE, &reserve(json!([consumer(1), consumer(1)])))
            .await?;
        ground
            .patch(
                &at,
                MERGE,
                &reserve(json!([{ "resource": "pods", "name": "p", "uid": "" }])),
            )
            .await?;
        ground
            .patch(&at, MERGE, &reserve((0..33).map(consumer).collect()))
            .await?;
        ground
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "deallocationRequested": true } }),
            )
            .await?;
        ground
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "deallocationRequested": true, "reservedFor": null } }),
            )
            .await?;
        ground.patch(&at, MERGE, &reserve(json!([consumer(1)]))).await?;
        ground
            .patch(
                &at,
                MERGE,
                &json!({ "status": { "deallocationRequested": false } }),
            )
            .await?;
        ground
            .patch(&at, MERGE, &json!({ "status": { "allocation": null } }))
            .await
            .map(drop)
    });
}

#[test]
fn only_a_shareable_claim_is_reserved_twice() {
    both("claim-sharing", async |ground| {
        allocated(ground, "c").await?;
        let two = json!({ "status": { "reservedFor": [consumer(1), consumer(2)] } });
        ground.patch(&status_of("c"), MERGE, &two).await.map(drop)
    });
}

#[test]
fn a_finalizer_keeps_a_deleted_claim_until_it_is_removed() {
    both("claim-deletion", async |ground| {
        let made = allocated(ground, "c").await?;
        let path = at("c");
        ground
            .patch(
                &path,
                STRATEGIC,
                &json!({ "metadata": { "finalizers": [FINALIZER] } }),
            )
            .await?;
        ground.delete(&path).await?;
        ground.delete(&path).await?;
        ground
            .patch(
                &path,
                STRATEGIC,
                &json!({ "metadata": { "finalizers": ["other.dev/x"] } }),
            )
            .await?;
        let two = json!({ "status": { "reservedFor": [consumer(2)] } });
        ground.patch(&status_of("c"), MERGE, &two).await?;
        let remove =
            json!({ "metadata": { "uid": uid(&made), "$deleteFromPrimitiveList/finalizers": [FINALIZER] } });
        let (code, _) = ground
            .send("PATCH", &path, STRATEGIC, remove.to_string().into_bytes())
            .await?;
        ground.note(json!(code));
        ground.get(&path).await?;
        // Without a finalizer, an allocated claim is deleted at once.
        allocated(ground, "d").await?;
        ground.delete(&at("d")).await?;
        ground.get(&at("d")).await?;
        ground.delete(&at("d")).await.map(drop)
    });
}

#[test]
fn handles_and_selectors_of_an_allocation_are_checked() {
    both("claim-handles", async |ground| {
        ground.create(CLAIMS, &claim("c")).await?;
        let write = |allocation: Value| json!({ "status": { "driverName": "drayman.dev", "allocation": allocation } });
        let handle = json!({ "driverName": "drayman.dev", "data": "x" });
        for allocation in [
            json!({ "resourceHandles": vec![handle.clone(); 33] }),
            json!({ "resourceHandles": [{ "driverName": "drayman.dev", "data": "x".repeat(16 * 1024 + 1) }] }),
            json!({ "resourceHandles": [{ "data": "x" }] }),
            json!({ "availableOnNodes": { "nodeSelectorTerms": [] } }),
            json!({ "resourceHandles": [handle] }),
        ] {
            ground.patch(&status_of("c"), MERGE, &write(allocation)).await?;
        }
        Ok(())
    });
}

#[test]
fn a_spec_is_checked_and_immutable() {
    both("claim-spec", async |ground| {
        for spec in [
            json!({}),
            json!({ "resourceClassName": "Upper" }),
            json!({ "resourceClassName": "test", "allocationMode": "Sometime" }),
            json!({ "resourceClassName": "test", "parametersRef": { "apiGroup": "a" } }),
        ] {
            let mut claim = claim("c");
            claim["spec"] = spec;
            ground.create(CLAIMS, &claim).await?;
        }
        let made = ground.create(CLAIMS, &claim("c")).await?;
        let mut changed = made.clone();
        changed["spec"]["allocationMode"] = "Immediate".into();
        ground.ask("PUT", &at("c"), JSON, &changed).await.map(drop)
    });
}
