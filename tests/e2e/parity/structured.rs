//! `resource.k8s.io/v1`: defaults, and the validation of claims, classes and slices.

use serde_json::{Value, json};

use crate::parity::server::{
    JSON, JSON_PATCH, MERGE, PODS, STRUCTURED_CLAIMS as CLAIMS, Server, both_structured as both,
    both_structured_but_managers as both_but_managers, merged,
};

const TEMPLATES: &str = "/apis/resource.k8s.io/v1/namespaces/{ns}/resourceclaimtemplates";
const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

fn claim(name: &str, devices: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "name": name }, "spec": { "devices": devices },
    })
}

/// A request named `r` with more fields.
fn exactly(fields: &Value) -> Value {
    json!({ "requests": [{ "name": "r", "exactly": merged(json!({ "deviceClassName": "c" }), fields) }] })
}

fn template(devices: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": { "name": "t" },
        "spec": { "spec": { "devices": devices } },
    })
}

/// Constraints or configurations beside two requests, one of which has alternatives.
fn beside_requests(fields: &Value) -> Value {
    let alternative = |name: &str| json!({ "name": name, "deviceClassName": "c" });
    let requests = json!([
        { "name": "a", "exactly": { "deviceClassName": "c" } },
        { "name": "b", "firstAvailable": [alternative("x"), alternative("y")] },
    ]);
    merged(json!({ "requests": requests }), fields)
}

fn slice(name: &str, spec: &Value) -> Value {
    let plain = json!({
        "driver": "x.dev", "nodeName": "n", "pool": { "name": "n", "generation": 1, "resourceSliceCount": 1 },
    });
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": { "name": name }, "spec": merged(plain, spec),
    })
}

fn device(fields: &Value) -> Value {
    merged(json!({ "name": "d" }), fields)
}

fn class(name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": name }, "spec": spec })
}

/// Sends objects that the real server rejects.
async fn refused(
    server: &mut Server,
    path: &str,
    objects: impl IntoIterator<Item = Value>,
) -> anyhow::Result<()> {
    for object in objects {
        let (code, answer) = server.ask_causes("POST", path, JSON, &object).await?;
        if code == 201 {
            anyhow::ensure!(!server.is_real(), "{object} is accepted");
            let name = answer["metadata"]["name"].as_str().unwrap_or_default();
            server.remove(&format!("{path}/{name}")).await?;
        }
    }
    Ok(())
}

#[test]
fn requests_of_a_claim_get_their_defaults() {
    both("v1-defaults", async |server| {
        let tolerations = json!([{ "key": "k" }, { "operator": "Exists", "effect": "NoSchedule" }]);
        let all = json!({ "allocationMode": "All", "tolerations": tolerations });
        server.create(CLAIMS, &claim("one", &exactly(&json!({})))).await?;
        server.create(CLAIMS, &claim("all", &exactly(&all))).await?;
        let alternatives = json!({ "requests": [{ "name": "r", "firstAvailable": [
            { "name": "x", "deviceClassName": "c", "count": 2 },
            { "name": "y", "deviceClassName": "c", "tolerations": [{ "key": "k", "value": "v" }] },
        ] }] });
        let mut either = claim("either", &alternatives);
        // A status cannot be set at creation.
        either["status"] = json!({ "reservedFor": [{ "resource": "pods", "name": "p", "uid": "u" }] });
        server.create(CLAIMS, &either).await?;
        let mut empty = exactly(&json!({ "selectors": [], "tolerations": [{ "operator": "Equal" }] }));
        (empty["constraints"], empty["config"]) = (json!([]), json!([]));
        server.create(CLAIMS, &claim("empty", &empty)).await?;
        let capacity = json!({ "capacity": { "requests": { "x.dev/memory": "2Gi" } }, "adminAccess": false });
        server
            .create(CLAIMS, &claim("capacity", &exactly(&capacity)))
            .await?;
        let mut generated = claim("", &exactly(&json!({})));
        generated["metadata"] = json!({ "generateName": "g-", "labels": { "a": "b" } });
        let (code, made) = server.send("POST", CLAIMS, JSON, &generated).await?;
        let name = made["metadata"]["name"].as_str().unwrap_or_default();
        server.note(json!({ "code": code, "name": name.get(..2), "length": name.len() }));
        server.remove(&format!("{CLAIMS}/{name}")).await?;
        let mut template = template(&exactly(&json!({})));
        template["spec"]["metadata"] = json!({ "labels": { "a": "b" } });
        server.create(TEMPLATES, &template).await?;
        server.get(&format!("{CLAIMS}/one/status")).await.map(drop)
    });
}

#[test]
fn invalid_requests_of_a_claim_are_refused() {
    both("v1-requests", async |server| {
        let many = |count: usize, one: fn(usize) -> Value| (0..count).map(one).collect::<Vec<Value>>();
        let request = |number| json!({ "name": format!("r{number}"), "exactly": { "deviceClassName": "c" } });
        let alternative = |number| json!({ "name": format!("a{number}"), "deviceClassName": "c" });
        let named =
            |name: &str| json!({ "requests": [{ "name": name, "exactly": { "deviceClassName": "c" } }] });
        let devices = [
            json!({ "requests": [{ "name": "r" }] }),
            json!({ "requests": [{ "exactly": { "deviceClassName": "c" } }] }),
            json!({ "requests": [{ "name": "r", "exactly": {} }] }),
            json!({ "requests": [{ "name": "r", "firstAvailable": [] }] }),
            json!({ "requests": many(33, request) }),
            json!({ "requests": [{ "name": "r", "firstAvailable": many(9, alternative) }] }),
            json!({ "requests": [request(1), request(1)] }),
            json!({ "requests": [{ "name": "r", "firstAvailable": [alternative(1), alternative(1)] }] }),
            json!({ "requests": [{ "name": "r", "firstAvailable": [{ "name": "A_", "deviceClassName": "" }] }] }),
            json!({ "requests": [
                { "name": "r", "exactly": { "deviceClassName": "c" }, "firstAvailable": [alternative(1)] }] }),
            named("Upper"),
            named("a.b"),
            named("a/b"),
            named(&"x".repeat(64)),
            exactly(&json!({ "deviceClassName": "Upper" })),
            exactly(&json!({ "count": -1 })),
            exactly(&json!({ "allocationMode": "All", "count": 2 })),
            exactly(&json!({ "allocationMode": "Some" })),
            exactly(&json!({ "selectors": [{}] })),
            exactly(&json!({ "selectors": vec![json!({ "cel": { "expression": "true" } }); 33] })),
            exactly(
                &json!({ "selectors": [{ "cel": { "expression": format!("\"{}\" != \"\"", "x".repeat(10 << 10)) } }] }),
            ),
            exactly(&json!({ "tolerations": [{ "key": "a b" }] })),
            exactly(&json!({ "tolerations": [{ "key": "k", "operator": "Sometimes" }] })),
            exactly(&json!({ "tolerations": [{ "key": "k", "operator": "Exists", "value": "v" }] })),
            exactly(&json!({ "tolerations": [{ "key": "k", "effect": "Never" }] })),
            exactly(&json!({ "tolerations": [{ "key": "k", "value": "a b" }] })),
        ];
        let claims = devices.iter().map(|devices| claim("c", devices));
        refused(server, CLAIMS, claims).await?;
        let template = template(&json!({ "requests": [{ "name": "r" }] }));
        refused(server, TEMPLATES, [template]).await
    });
}

#[test]
fn invalid_constraints_and_configurations_are_refused() {
    both("v1-constraints", async |server| {
        let match_attribute = |name: &str| json!({ "constraints": [{ "matchAttribute": name }] });
        let config = |fields: &Value| {
            let opaque = merged(json!({ "driver": "x.dev", "parameters": { "a": 1 } }), fields);
            json!({ "config": [{ "opaque": opaque }] })
        };
        let fields = [
            json!({ "constraints": [{}] }),
            json!({ "constraints": [{ "requests": ["a"] }] }),
            json!({ "constraints": [{ "matchAttribute": "x.dev/a", "requests": ["c", "b/z"] }] }),
            json!({ "constraints": [{ "matchAttribute": "x.dev/a", "requests": ["a", "a"] }] }),
            json!({ "constraints": vec![json!({ "matchAttribute": "x.dev/a" }); 33] }),
            match_attribute("a"),
            match_attribute("/a"),
            match_attribute("x.dev/"),
            match_attribute("x.dev/a-b"),
            match_attribute("UPPER_/a"),
            match_attribute(&format!("x.dev/{}", "a".repeat(33))),
            match_attribute(&format!("{}/a", "a".repeat(64))),
            json!({ "constraints": [{ "distinctAttribute": "a" }] }),
            json!({ "config": [{}] }),
            json!({ "config": [{ "requests": ["c"], "opaque": { "driver": "x.dev", "parameters": {} } }] }),
            json!({ "config": [{ "opaque": { "driver": "x.dev" } }] }),
            config(&json!({ "driver": "" })),
            config(&json!({ "driver": "no name" })),
            config(&json!({ "driver": format!("{}.dev", "x".repeat(60)) })),
            config(&json!({ "parameters": { "a": "x".repeat(10 << 10) } })),
            json!({ "config": vec![json!({ "opaque": { "driver": "x.dev", "parameters": {} } }); 33] }),
        ];
        let claims = fields.iter().map(|fields| claim("c", &beside_requests(fields)));
        refused(server, CLAIMS, claims).await?;
        let valid = json!({
            "constraints": [{ "matchAttribute": "x.dev/a", "requests": ["a", "b/x"] }, { "distinctAttribute": "x.dev/b" }],
            "config": [{ "requests": ["b"], "opaque": { "driver": "x.dev", "parameters": { "list": [], "nothing": null } } }],
        });
        let valid = claim("c", &beside_requests(&valid));
        server.create(CLAIMS, &valid).await.map(drop)
    });
}

#[test]
fn the_spec_of_a_claim_or_a_template_is_immutable() {
    both("v1-immutable", async |server| {
        server.create(CLAIMS, &claim("c", &exactly(&json!({})))).await?;
        server.create(TEMPLATES, &template(&exactly(&json!({})))).await?;
        let devices = json!({ "devices": exactly(&json!({ "count": 2 })) });
        let (claim, template) = (format!("{CLAIMS}/c"), format!("{TEMPLATES}/t"));
        let labels = json!({ "metadata": { "labels": { "a": "b" } }, "status": { "reservedFor": [] } });
        // The same spec without its defaults.
        let same = json!({ "spec": { "devices": exactly(&json!({})) } });
        let of_template = [json!({ "spec": { "spec": devices } }), labels.clone()];
        let of_claim = [json!({ "spec": devices }), labels, same];
        server.patch_each(&claim, MERGE, of_claim).await?;
        server.patch_each(&template, MERGE, of_template).await
    });
}

#[test]
fn a_slice_is_stored_with_its_defaults_and_a_generation() {
    both("v1-slices", async |server| {
        let devices = json!([
            device(&json!({ "attributes": {
                "kind": { "string": "k" }, "x.dev/number": { "int": 3 }, "is": { "bool": false }, "version": { "version": "1.2.3" },
            }, "capacity": { "memory": { "value": "2Gi" }, "count": { "value": "1k" } } })),
            { "name": "e", "attributes": {}, "capacity": {}, "taints": [{ "key": "k", "effect": "NoSchedule" },
                { "key": "l", "value": "v", "effect": "None", "timeAdded": "2026-01-01T00:00:00Z" }] },
            { "name": "f", "allowMultipleAllocations": true, "capacity": { "shares": { "value": "4", "requestPolicy": {
                "default": "1", "validRange": { "min": "1", "max": "1" } } } } },
        ]);
        let made = server
            .create(SLICES, &slice("v1-slices", &json!({ "devices": devices })))
            .await?;
        let path = format!("{SLICES}/v1-slices");
        let mut written = made.clone();
        written["spec"]["pool"]["generation"] = 2.into();
        server.put(&path, &written).await?;
        // The slice has changed meanwhile.
        server.put(&path, &written).await?;
        written["metadata"]
            .as_object_mut()
            .map(|map| map.remove("resourceVersion"));
        server.put(&path, &written).await?;
        let patches = [
            json!({ "metadata": { "labels": { "a": "b" } } }),
            json!({ "spec": { "devices": [] } }),
            json!({ "spec": { "driver": "y.dev" } }),
            json!({ "spec": { "nodeName": "m" } }),
            json!({ "spec": { "nodeName": null, "allNodes": true } }),
            json!({ "spec": { "pool": { "name": "m" } } }),
        ];
        server.patch_each(&path, MERGE, patches).await?;
        let other = json!({ "driver": "v1-slices.dev", "nodeName": "v1-slices" });
        server.create(SLICES, &slice("v1-slices-other", &other)).await?;
        for fields in [
            "spec.driver=v1-slices.dev",
            "spec.nodeName=v1-slices",
            "spec.nodeName!=v1-slices,spec.driver=v1-slices.dev",
            "spec.pool.name=n",
        ] {
            server.get(&format!("{SLICES}?fieldSelector={fields}")).await?;
        }
        let preconditions = json!({ "preconditions": { "uid": "7d0a" } });
        server.ask("DELETE", &path, JSON, &preconditions).await?;
        server.delete(&path).await?;
        server
            .delete(&format!("{SLICES}/v1-slices-other"))
            .await
            .map(drop)
    });
}

#[test]
fn invalid_slices_are_refused() {
    both("v1-bad-slices", async |server| {
        let pool = |fields: &Value| {
            let plain = json!({ "name": "n", "generation": 1, "resourceSliceCount": 1 });
            json!({ "pool": merged(plain, fields) })
        };
        let selector = |fields: &Value| json!({ "nodeName": null, "nodeSelector": fields });
        let count = |count: usize, fields: &Value| {
            let device = |number| merged(json!({ "name": format!("d-{number}") }), fields);
            json!({ "devices": (0..count).map(device).collect::<Vec<Value>>() })
        };
        let field = json!({ "key": "metadata.name", "operator": "In", "values": ["n"] });
        let specs = [
            json!({ "driver": "" }),
            json!({ "driver": "no name" }),
            json!({ "driver": "x".repeat(64) }),
            json!({ "nodeName": null }),
            json!({ "nodeName": "" }),
            json!({ "nodeName": "no name" }),
            json!({ "allNodes": true }),
            json!({ "nodeName": null, "allNodes": false }),
            pool(&json!({ "name": "" })),
            pool(&json!({ "name": "no name" })),
            pool(&json!({ "name": "x".repeat(254) })),
            pool(&json!({ "name": "a//b" })),
            pool(&json!({ "generation": -1 })),
            pool(&json!({ "resourceSliceCount": 0 })),
            selector(&json!({ "nodeSelectorTerms": [] })),
            selector(
                &json!({ "nodeSelectorTerms": [{ "matchFields": [field] }, { "matchFields": [field] }] }),
            ),
            count(129, &json!({})),
            count(65, &json!({ "taints": [{ "key": "k", "effect": "NoSchedule" }] })),
            json!({ "devices": [device(&json!({})), device(&json!({}))] }),
        ];
        refused(server, SLICES, specs.iter().map(|spec| slice("v1-bad", spec))).await
    });
}

#[test]
fn invalid_devices_are_refused() {
    both("v1-devices", async |server| {
        let attributes = |value: &Value| device(&json!({ "attributes": value }));
        let many = |count: usize| {
            let numbered = |number| (format!("a{number}"), json!({ "int": number }));
            Value::Object((0..count).map(numbered).collect())
        };
        let taint = |fields: &Value| {
            let plain = json!({ "key": "k", "effect": "NoSchedule" });
            device(&json!({ "taints": [merged(plain, fields)] }))
        };
        let devices = [
            json!({ "name": "" }),
            json!({ "name": "a.b" }),
            json!({ "name": "x".repeat(64) }),
            device(&json!({ "nodeName": "n" })),
            attributes(&many(33)),
            attributes(&json!({ "a": {} })),
            attributes(&json!({ "a": { "int": 1, "bool": true } })),
            attributes(&json!({ "a": { "string": "x".repeat(65) } })),
            attributes(&json!({ "a": { "version": "1.2" } })),
            attributes(&json!({ "by-id": { "int": 1 } })),
            attributes(&json!({ "/a": { "int": 1 } })),
            attributes(&json!({ "x.dev/": { "int": 1 } })),
            attributes(&json!({ "no name/a": { "int": 1 } })),
            attributes(&json!({ "a".repeat(33): { "int": 1 } })),
            device(&json!({ "capacity": { "by-id": { "value": "1" } } })),
            device(&json!({ "capacity": { "a": { "value": "1", "requestPolicy": { "default": "1" } } } })),
            taint(&json!({ "key": "" })),
            taint(&json!({ "key": "a b" })),
            taint(&json!({ "effect": "" })),
            taint(&json!({ "effect": "Never" })),
            taint(&json!({ "value": "a b" })),
            device(&json!({ "taints": vec![json!({ "key": "k", "effect": "None" }); 17] })),
        ];
        let slices = devices
            .iter()
            .map(|device| slice("v1-bad", &json!({ "devices": [device] })));
        refused(server, SLICES, slices).await
    });
}

#[test]
fn a_class_can_be_changed_and_its_selectors_are_checked() {
    both("v1-classes", async |server| {
        let cel = |expression: &str| json!({ "selectors": [{ "cel": { "expression": expression } }] });
        server.create(CLASSES, &class("v1-class", &cel("true"))).await?;
        let path = format!("{CLASSES}/v1-class");
        let opaque = |driver: &str, parameters: Value| json!({ "config": [{ "opaque": { "driver": driver, "parameters": parameters } }] });
        let patches = [
            json!({ "spec": cel("device.driver == \"x.dev\"") }),
            json!({ "spec": cel("device.driver == \"y.dev\"") }),
            json!({ "metadata": { "labels": { "a": "b" } } }),
            json!({ "spec": opaque("x.dev", json!({ "a": {} })) }),
        ];
        server.patch_each(&path, MERGE, patches).await?;
        let classes = [
            class("v1-bad", &json!({ "selectors": [{}] })),
            class("v1-bad", &json!({ "config": [{}] })),
            class("v1-bad", &opaque("", json!({}))),
            class("Upper", &json!({})),
        ];
        refused(server, CLASSES, classes).await?;
        server.delete(&path).await.map(drop)
    });
}

fn consumer(number: usize) -> Value {
    json!({ "resource": "pods", "name": format!("pod-{number}"), "uid": format!("u-{number}") })
}

fn result(fields: &Value) -> Value {
    merged(
        json!({ "request": "r", "driver": "x.dev", "pool": "n", "device": "d" }),
        fields,
    )
}

fn allocation(results: &Value) -> Value {
    json!({ "devices": { "results": results } })
}

#[test]
fn an_allocation_is_one_write_of_the_status_until_it_is_cleared() {
    // The two differ in which manager owns the status of a device that is no longer allocated.
    both_but_managers("v1-status", async |server| {
        server.create(CLAIMS, &claim("c", &exactly(&json!({})))).await?;
        let path = format!("{CLAIMS}/c/status");
        let one = allocation(&json!([result(&json!({}))]));
        let field = json!({ "key": "metadata.name", "operator": "In", "values": ["n"] });
        let mut placed = one.clone();
        placed["nodeSelector"] = json!({ "nodeSelectorTerms": [{ "matchFields": [field] }] });
        let write = |status: Value| json!({ "status": status });
        for status in [
            json!({ "reservedFor": [consumer(1)] }),
            json!({ "devices": [{ "driver": "x.dev", "pool": "n", "device": "d" }] }),
            json!({ "allocation": allocation(&json!([result(&json!({ "request": "s" }))])) }),
            json!({ "allocation": allocation(&json!([result(&json!({ "driver": "" }))])) }),
            json!({ "allocation": allocation(&json!([result(&json!({ "pool": "no pool" }))])) }),
            json!({ "allocation": allocation(&json!([result(&json!({ "device": "no.device" }))])) }),
            json!({ "allocation": allocation(&json!(vec![result(&json!({})); 33])) }),
            json!({ "allocation": { "devices": {}, "nodeSelector": { "nodeSelectorTerms": [] } } }),
            json!({ "allocation": placed, "reservedFor": [consumer(1)] }),
            json!({ "reservedFor": [consumer(1), consumer(2)] }),
            json!({ "reservedFor": [consumer(1), consumer(1)] }),
            json!({ "reservedFor": (0..257).map(consumer).collect::<Vec<Value>>() }),
            json!({ "allocation": one }),
            json!({ "devices": [{ "driver": "x.dev", "pool": "n", "device": "e" }] }),
            json!({ "devices": [{ "driver": "x.dev", "pool": "n", "device": "d", "data": { "a": 1 }, "conditions": [
                { "type": "Ready", "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z" }] }] }),
            json!({ "allocation": null }),
            json!({ "allocation": null, "reservedFor": null }),
        ] {
            server.ask_causes("PATCH", &path, MERGE, &write(status)).await?;
        }
        // Status and spec have separate endpoints.
        let both = json!({ "metadata": { "labels": { "a": "b" } }, "spec": { "devices": null } });
        server.patch(&path, MERGE, &both).await.map(drop)
    });
}

#[test]
fn a_deleted_claim_stays_allocated_until_its_finalizer_goes() {
    both("v1-deletion", async |server| {
        let mut protected = claim("c", &exactly(&json!({})));
        protected["metadata"]["finalizers"] = json!(["resource.kubernetes.io/delete-protection"]);
        server.create(CLAIMS, &protected).await?;
        let (path, status) = (format!("{CLAIMS}/c"), format!("{CLAIMS}/c/status"));
        let allocated = json!({ "status": {
            "allocation": allocation(&json!([result(&json!({}))])), "reservedFor": [consumer(1)] } });
        server.patch(&status, MERGE, &allocated).await?;
        server.delete(&path).await?;
        let another = json!({ "status": { "reservedFor": [consumer(1), consumer(2)] } });
        server.patch(&status, MERGE, &another).await?;
        let unreserved = json!({ "status": { "reservedFor": null } });
        server.patch(&status, MERGE, &unreserved).await?;
        let cleared = json!([{ "op": "remove", "path": "/status/allocation" }]);
        server.patch(&status, JSON_PATCH, &cleared).await?;
        let unprotected = json!({ "metadata": { "finalizers": null } });
        server.patch(&path, MERGE, &unprotected).await?;
        server.get(&path).await.map(drop)
    });
}

#[test]
fn admin_access_needs_the_label_of_the_namespace() {
    both("v1-admin", async |server| {
        let admin = exactly(&json!({ "adminAccess": true }));
        server.create(CLAIMS, &claim("c", &admin)).await?;
        let template = template(&admin);
        server.create(TEMPLATES, &template).await?;
        let plain = claim("plain", &exactly(&json!({})));
        server.create(CLAIMS, &plain).await?;
        let result = result(&json!({ "adminAccess": true }));
        let status = json!({ "status": { "allocation": allocation(&json!([result])) } });
        let path = format!("{CLAIMS}/plain/status");
        server.patch(&path, MERGE, &status).await?;
        let label = |value: &str| json!({ "metadata": { "labels": { "resource.kubernetes.io/admin-access": value } } });
        let namespace = "/api/v1/namespaces/{ns}";
        for value in ["false", "true"] {
            let (code, _) = server.send("PATCH", namespace, MERGE, &label(value)).await?;
            server.note(code.into());
            server.create(CLAIMS, &claim(value, &admin)).await?;
        }
        server.create(TEMPLATES, &template).await?;
        server.patch(&path, MERGE, &status).await.map(drop)
    });
}

#[test]
fn pods_name_their_claims_and_requests() {
    both("v1-pods", async |server| {
        let pod = |entries: Value, uses: Value| {
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" },
                "spec": {
                    "resourceClaims": entries,
                    // Nothing is scheduled here.
                    "schedulerName": "nobody",
                    "containers": [{ "name": "main", "image": "i", "resources": { "claims": uses } }],
                },
            })
        };
        let entries = json!([{ "name": "a", "resourceClaimName": "x" }, { "name": "b", "resourceClaimTemplateName": "y" }]);
        let uses = json!([{ "name": "a", "request": "r" }, { "name": "b" }]);
        let (_, made) = server.send("POST", PODS, JSON, &pod(entries, uses)).await?;
        server.note(made["spec"]["resourceClaims"].clone());
        server.note(made["spec"]["containers"][0]["resources"].clone());
        Ok(())
    });
}
