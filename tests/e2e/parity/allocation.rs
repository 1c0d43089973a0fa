//! Allocation in structured mode: the test cluster's scheduler and claim controller beside the real ones. Nodes exist only in the API, and
//! slices are created by hand. The allocations of claims and the waiting pods are compared.

use std::collections::BTreeSet;

use anyhow::Context as _;
use drayman::testcluster::api::ClusterMode;
use drayman::testcluster::clock_and_rng::ClockAndRng;
use drayman::testcluster::cluster::TestCluster;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::time::{Duration, sleep, timeout};

use crate::harness::Cluster;
use crate::parity::answers::same_form;
use crate::parity::loops::fixture::{TIMEOUT, make_node, send};
use crate::parity::server::{JSON, MERGE, compare, merged, run};

const RESOURCE: &str = "/apis/resource.k8s.io/v1";

/// A real control plane with all controllers, separate from the one of the request tests.
static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();

async fn real() -> kube::Client {
    let cluster = CLUSTER
        .get_or_try_init(|| {
            // Nodes that exist only in the API have no heartbeats.
            Cluster::structured()
                .flag("controller-manager", "--node-monitor-grace-period=24h")
                .share("allocation", async |_| Ok(()))
        })
        .await
        .expect("a real control plane");
    cluster.client()
}

/// A cluster with a namespace, a node, a driver and a class, all with the same name.
struct Fixture {
    client: kube::Client,
    name: String,
}

/// Runs a scenario on both clusters, and compares claims and pods at its end.
fn both(name: &str, scenario: impl AsyncFn(&Fixture) -> anyhow::Result<()>) {
    run(async {
        let stage = TestCluster::with_mode(ClockAndRng::system(), ClusterMode::Structured);
        let actual = run_scenario(stage.server().client(), name, &scenario).await;
        let actual = actual.expect("the scenario succeeds on the test cluster");
        stage.stop().await;
        let expected = run_scenario(real().await, name, &scenario).await;
        let expected = expected.expect("the scenario succeeds on a real cluster");
        compare(&actual, &expected);
    });
}

async fn run_scenario(
    client: kube::Client,
    name: &str,
    scenario: &impl AsyncFn(&Fixture) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Value>> {
    let name = name.to_owned();
    let fixture = Fixture { client, name };
    fixture.begin().await?;
    let actual = scenario(&fixture).await;
    let result = same_form(fixture.end().await?, false);
    actual.with_context(|| format!("{result:#?}"))?;
    Ok(result)
}

/// A request for devices of the scenario's class.
fn request(name: &str, class: &str, fields: &Value) -> Value {
    json!({ "name": name, "exactly": merged(json!({ "deviceClassName": class }), fields) })
}

fn device(name: &str, fields: &Value) -> Value {
    merged(json!({ "name": name }), fields)
}

/// Devices with these names and values of an attribute; without the attribute if the value is 0.
fn numbered(devices: &[(&str, i64)]) -> Vec<Value> {
    let one = |(name, number): &(&str, i64)| match number {
        0 => device(name, &json!({})),
        number => device(
            name,
            &json!({ "attributes": { "x.dev/number": { "int": number } } }),
        ),
    };
    devices.iter().map(one).collect()
}

/// Selects devices by that attribute.
fn selector(number: i64) -> Value {
    let attribute = "device.attributes[\"x.dev\"].number";
    json!({ "selectors": [{ "cel": { "expression": format!("has({attribute}) && {attribute} == {number}") } }] })
}

impl Fixture {
    fn driver(&self) -> String {
        format!("{}.example.com", self.name)
    }

    fn path(&self, plural: &str, name: &str) -> String {
        let base = match plural {
            "pods" => format!("/api/v1/namespaces/{}/pods", self.name),
            "resourceslices" | "deviceclasses" => format!("{RESOURCE}/{plural}"),
            _ => format!("{RESOURCE}/namespaces/{}/{plural}", self.name),
        };
        if name.is_empty() {
            base
        } else {
            format!("{base}/{name}")
        }
    }

    async fn create(&self, plural: &str, object: &Value) -> anyhow::Result<()> {
        let path = self.path(plural, "");
        send(&self.client, "POST", &path, JSON, object).await.map(drop)
    }

    async fn get(&self, plural: &str, name: &str) -> anyhow::Result<Value> {
        let path = self.path(plural, name);
        send(&self.client, "GET", &path, JSON, &Value::Null).await
    }

    async fn patch(&self, plural: &str, name: &str, patch: &Value) -> anyhow::Result<()> {
        let path = self.path(plural, name);
        send(&self.client, "PATCH", &path, MERGE, patch).await.map(drop)
    }

    async fn delete(&self, plural: &str, name: &str) -> anyhow::Result<()> {
        let path = self.path(plural, name);
        let options = json!({ "gracePeriodSeconds": 0 });
        send(&self.client, "DELETE", &path, JSON, &options)
            .await
            .map(drop)
    }

    async fn begin(&self) -> anyhow::Result<()> {
        let labels = json!({ "resource.kubernetes.io/admin-access": "true" });
        let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": self.name, "labels": labels } });
        send(&self.client, "POST", "/api/v1/namespaces", JSON, &namespace).await?;
        make_node(&self.client, &self.name, &self.name).await?;
        self.class(&self.name, &json!({})).await
    }

    /// Creates a class for all devices of the driver.
    async fn class(&self, name: &str, fields: &Value) -> anyhow::Result<()> {
        let expression = format!("device.driver == \"{}\"", self.driver());
        let spec = merged(
            json!({ "selectors": [{ "cel": { "expression": expression } }] }),
            fields,
        );
        let class = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": name }, "spec": spec,
        });
        self.create("deviceclasses", &class).await
    }

    /// Creates a slice of the node, in a pool of one slice unless the fields override it.
    async fn slice(&self, suffix: &str, devices: &[Value], fields: &Value) -> anyhow::Result<()> {
        let plain = json!({
            "driver": self.driver(), "nodeName": self.name, "devices": devices,
            "pool": { "name": self.name, "generation": 1, "resourceSliceCount": 1 },
        });
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
            "metadata": { "name": format!("{}-{suffix}", self.name) }, "spec": merged(plain, fields),
        });
        self.create("resourceslices", &slice).await
    }

    /// Creates a slice of the node with these devices, in a pool of its own.
    async fn devices(&self, devices: &[Value]) -> anyhow::Result<()> {
        self.slice("a", devices, &json!({})).await
    }

    fn pool(&self, name: &str, generation: i64, count: i64) -> Value {
        json!({ "pool": { "name": format!("{}{name}", self.name), "generation": generation, "resourceSliceCount": count } })
    }

    /// Requests of the class with these fields, named `a`, `b` and so on.
    fn requests(&self, fields: &[Value]) -> Value {
        let one = |(name, fields)| request(name, &self.name, fields);
        let requests: Vec<Value> = ["a", "b", "c"].into_iter().zip(fields).map(one).collect();
        json!({ "requests": requests })
    }

    /// One request of the class with these fields.
    fn one(&self, fields: Value) -> Value {
        self.requests(&[fields])
    }

    async fn claim(&self, name: &str, devices: &Value) -> anyhow::Result<()> {
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": { "name": name }, "spec": { "devices": devices },
        });
        self.create("resourceclaims", &claim).await
    }

    async fn pod(&self, name: &str, claims: &[&str]) -> anyhow::Result<()> {
        let entry = |claim: &&str| json!({ "name": claim, "resourceClaimName": claim });
        self.pod_of(name, &claims.iter().map(entry).collect()).await
    }

    async fn pod_of(&self, name: &str, entries: &Value) -> anyhow::Result<()> {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
            "spec": {
                "nodeSelector": { "place": self.name }, "resourceClaims": entries,
                "containers": [{ "name": "main", "image": "none" }],
            },
        });
        self.create("pods", &pod).await
    }

    /// Creates a claim and a pod that uses it, and waits until the pod is bound.
    async fn runs(&self, name: &str, devices: &Value) -> anyhow::Result<()> {
        self.claim(name, devices).await?;
        self.pod(name, &[name]).await?;
        self.until_bound(name).await
    }

    /// Creates a claim and a pod that uses it, and waits until the pod is unschedulable.
    async fn waits(&self, name: &str, devices: &Value) -> anyhow::Result<()> {
        self.claim(name, devices).await?;
        self.pod(name, &[name]).await?;
        self.until_unschedulable(name).await
    }

    /// Deletes a pod and its claim.
    async fn end_pod(&self, name: &str) -> anyhow::Result<()> {
        self.delete("pods", name).await?;
        self.delete("resourceclaims", name).await
    }

    async fn until(&self, what: &str, plural: &str, holds: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        let waiting = async {
            loop {
                if holds(&self.get(plural, "").await?) {
                    return anyhow::Ok(());
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(TIMEOUT, waiting)
            .await
            .with_context(|| format!("timeout: {what}"))?
    }

    async fn until_pod(&self, what: &str, pod: &str, holds: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        let of_pod = |pods: &Value| {
            let mut pods = pods["items"].as_array().into_iter().flatten();
            pods.any(|one| one["metadata"]["name"] == pod && holds(one))
        };
        self.until(&format!("pod {pod} is {what}"), "pods", of_pod).await
    }

    async fn until_bound(&self, pod: &str) -> anyhow::Result<()> {
        self.until_pod("bound", pod, |pod| pod["spec"]["nodeName"].is_string())
            .await
    }

    async fn until_unschedulable(&self, pod: &str) -> anyhow::Result<()> {
        let is_unschedulable =
            |pod: &Value| scheduled(pod).is_some_and(|condition| condition["status"] == "False");
        self.until_pod("unschedulable", pod, is_unschedulable).await
    }

    /// The allocations of the claims, and the reasons of the waiting pods.
    async fn end(&self) -> anyhow::Result<Vec<Value>> {
        let mut result = Vec::new();
        let claims = self.get("resourceclaims", "").await?;
        for claim in claims["items"].as_array().into_iter().flatten() {
            result.push(json!({
                "claim": claim["metadata"]["name"], "finalizers": claim["metadata"]["finalizers"], "status": claim["status"],
            }));
        }
        let pods = self.get("pods", "").await?;
        for pod in pods["items"].as_array().into_iter().flatten() {
            let waits = scheduled(pod).filter(|_| !pod["spec"]["nodeName"].is_string());
            result.push(json!({
                "pod": pod["metadata"]["name"], "node": pod["spec"]["nodeName"],
                "waits": waits.map(|condition| json!([condition["reason"], reasons(&condition["message"])])),
            }));
        }
        Ok(result)
    }
}

fn scheduled(pod: &Value) -> Option<&Value> {
    let conditions = pod["status"]["conditions"].as_array()?;
    conditions
        .iter()
        .find(|condition| condition["type"] == "PodScheduled")
}

/// Why no node fits, without node counts, which depend on other scenarios.
fn reasons(message: &Value) -> BTreeSet<String> {
    let message = message.as_str().unwrap_or_default();
    let message = message
        .split_once(" nodes are available: ")
        .map_or(message, |(_, rest)| rest);
    let message = message.split_once(". ").map_or(message, |(first, _)| first);
    let reasons = message.trim_end_matches('.').split(", ").map(|reason| {
        let counted = reason
            .split_once(' ')
            .filter(|(count, _)| count.parse::<usize>().is_ok());
        counted.map_or(reason, |(_, reason)| reason).to_owned()
    });
    // Nodes of other scenarios. New nodes have a taint until a controller sees that they are ready.
    let elsewhere = [
        "node(s) didn't match Pod's node affinity/selector",
        "node(s) had untolerated taint(s)",
    ];
    reasons
        .filter(|reason| !elsewhere.iter().any(|other| reason.contains(other)))
        .collect()
}

#[test]
fn devices_are_allocated_in_the_order_of_slices_and_lists() {
    both("allocation-order", async |fixture| {
        let two = fixture.pool("", 1, 2);
        fixture.slice("b", &numbered(&[("z", 1), ("a", 1)]), &two).await?;
        fixture.slice("a", &numbered(&[("y", 1)]), &two).await?;
        let one = fixture.one(json!({}));
        for pod in ["first", "second", "third"] {
            fixture.runs(pod, &one).await?;
        }
        fixture.waits("fourth", &one).await
    });
}

#[test]
fn pools_are_used_in_the_order_of_their_names() {
    both("allocation-pools", async |fixture| {
        for (slice, device, pool) in [("a", "x", "-2"), ("b", "y", "-1"), ("c", "z", "-3")] {
            let pool = fixture.pool(pool, 1, 1);
            fixture.slice(slice, &numbered(&[(device, 1)]), &pool).await?;
        }
        // All three slices are used.
        fixture.runs("all", &fixture.one(json!({ "count": 3 }))).await?;
        fixture.end_pod("all").await?;
        let one = fixture.one(json!({}));
        fixture.runs("first", &one).await?;
        fixture.runs("second", &one).await
    });
}

#[test]
fn requests_and_claims_of_a_pod_get_different_devices() {
    both("allocation-requests", async |fixture| {
        let devices = [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)];
        fixture.devices(&numbered(&devices)).await?;
        // Request b can only have the first device that matches request a.
        fixture
            .claim("one", &fixture.requests(&[json!({ "count": 2 }), selector(1)]))
            .await?;
        fixture.claim("two", &fixture.one(selector(4))).await?;
        fixture.pod("pod", &["one", "two"]).await?;
        fixture.until_bound("pod").await?;
        fixture.waits("same", &fixture.one(selector(4))).await?;
        fixture.waits("many", &fixture.one(json!({ "count": 2 }))).await?;
        fixture.waits("none", &fixture.one(selector(9))).await
    });
}

#[test]
fn constraints_select_devices_by_an_attribute() {
    both("allocation-constraints", async |fixture| {
        let numbers = [1, 2, 0, 2, 3, 1, 4];
        let devices: Vec<_> = ["a", "b", "c", "d", "e", "f", "g"]
            .into_iter()
            .zip(numbers)
            .collect();
        fixture.devices(&numbered(&devices)).await?;
        let with = |requests: Value, constraint: &str| {
            let constraints = json!({ "constraints": [{ constraint: "x.dev/number" }] });
            merged(requests, &constraints)
        };
        let pair = fixture.one(json!({ "count": 2 }));
        // The only device with this value is held.
        fixture.runs("holder", &fixture.one(selector(3))).await?;
        fixture
            .runs("match", &with(pair.clone(), "matchAttribute"))
            .await?;
        let three = fixture.one(json!({ "count": 3 }));
        fixture
            .waits("match-three", &with(three, "matchAttribute"))
            .await?;
        let two = fixture.requests(&[json!({}), json!({})]);
        fixture.runs("distinct", &with(two, "distinctAttribute")).await?;
        fixture
            .waits("distinct-again", &with(pair, "distinctAttribute"))
            .await
    });
}

#[test]
fn the_first_alternative_that_fits_is_taken() {
    both("allocation-alternatives", async |fixture| {
        fixture
            .devices(&numbered(&[("a", 1), ("b", 2), ("c", 2)]))
            .await?;
        let alternative = |name: &str, fields: Value| {
            merged(json!({ "name": name, "deviceClassName": fixture.name }), &fields)
        };
        let either = json!({ "requests": [{ "name": "r", "firstAvailable": [
            alternative("two", merged(selector(1), &json!({ "count": 2 }))),
            alternative("one", selector(2)),
            alternative("any", json!({})),
        ] }] });
        for pod in ["first", "second", "third"] {
            fixture.runs(pod, &either).await?;
        }
        fixture.waits("fourth", &either).await
    });
}

#[test]
fn all_devices_must_be_free_to_be_allocated() {
    both("allocation-all", async |fixture| {
        fixture.devices(&numbered(&[("a", 1), ("b", 2)])).await?;
        let all = fixture.one(json!({ "allocationMode": "All" }));
        fixture.runs("all", &all).await?;
        fixture.waits("again", &all).await?;
        let one = fixture.one(json!({}));
        fixture.waits("one", &one).await?;
        fixture.delete("pods", "again").await?;
        fixture.delete("pods", "all").await?;
        fixture.until_bound("one").await?;
        // One device is held.
        fixture.waits("part", &all).await
    });
}

#[test]
fn admin_access_takes_held_devices_and_holds_none() {
    both("allocation-admin", async |fixture| {
        fixture.devices(&numbered(&[("a", 1), ("b", 2)])).await?;
        let one = fixture.one(json!({}));
        fixture.runs("holder", &one).await?;
        let all = fixture.one(json!({ "allocationMode": "All", "adminAccess": true }));
        fixture.runs("admin", &all).await?;
        fixture.runs("beside", &one).await?;
        fixture.waits("none", &one).await?;
        fixture
            .runs("another", &fixture.one(json!({ "adminAccess": true })))
            .await
    });
}

#[test]
fn tainted_devices_go_to_claims_that_tolerate_them() {
    both("allocation-taints", async |fixture| {
        let tainted = |name: &str, effect: &str| {
            let taint = json!({ "key": "x.dev/bad", "value": "v", "effect": effect, "timeAdded": "2026-01-01T00:00:00Z" });
            device(name, &json!({ "taints": [taint] }))
        };
        let devices = [
            tainted("a", "NoSchedule"),
            tainted("b", "NoExecute"),
            tainted("c", "None"),
            device("d", &json!({})),
        ];
        fixture.devices(&devices).await?;
        let one = fixture.one(json!({}));
        fixture.runs("first", &one).await?;
        fixture.runs("second", &one).await?;
        fixture.waits("third", &one).await?;
        let tolerates = |fields: Value| {
            let toleration = merged(json!({ "key": "x.dev/bad" }), &fields);
            fixture.one(json!({ "tolerations": [toleration] }))
        };
        let other_value = tolerates(json!({ "value": "w" }));
        fixture.waits("other-value", &other_value).await?;
        let effect = tolerates(json!({ "operator": "Exists", "effect": "NoExecute" }));
        fixture.runs("effect", &effect).await?;
        let value = tolerates(json!({ "value": "v" }));
        fixture.runs("value", &value).await
    });
}

#[test]
fn a_device_with_shares_serves_as_many_claims_as_it_has() {
    both("allocation-shares", async |fixture| {
        let policy = json!({ "default": "1", "validRange": { "min": "1", "max": "1" } });
        let memory = json!({ "default": "1Gi", "validRange": { "min": "1Gi", "step": "1Gi" } });
        let shared = |name: &str, capacity: Value| {
            device(
                name,
                &json!({ "allowMultipleAllocations": true, "capacity": capacity }),
            )
        };
        let shares = json!({ "x.dev/shares": { "value": "3", "requestPolicy": policy } });
        let memory = json!({ "x.dev/memory": { "value": "4Gi", "requestPolicy": memory } });
        let devices = [shared("a", shares), shared("b", memory)];
        fixture.devices(&devices).await?;
        let one = fixture.one(json!({}));
        fixture.runs("one", &one).await?;
        // Two requests of one claim can get one device.
        fixture
            .runs("two", &fixture.requests(&[json!({}), json!({})]))
            .await?;
        let memory =
            |amount: &str| fixture.one(json!({ "capacity": { "requests": { "x.dev/memory": amount } } }));
        fixture.waits("too-much", &memory("5Gi")).await?;
        // Rounded up to a step.
        fixture.runs("some", &memory("1500Mi")).await?;
        fixture.waits("more", &memory("3Gi")).await?;
        fixture.runs("rest", &memory("2Gi")).await?;
        fixture.waits("none", &one).await
    });
}

#[test]
fn pools_that_are_not_complete_are_not_used() {
    both("allocation-incomplete", async |fixture| {
        let pool = |generation, count| fixture.pool("", generation, count);
        fixture.slice("a", &numbered(&[("old", 1)]), &pool(1, 1)).await?;
        let one = fixture.one(json!({}));
        fixture.runs("first", &one).await?;
        let new = numbered(&[("new", 1), ("newer", 1)]);
        fixture.slice("b", &new, &pool(2, 2)).await?;
        fixture.end_pod("first").await?;
        fixture.waits("second", &one).await?;
        let newest = numbered(&[("newest", 1)]);
        fixture.slice("c", &newest, &pool(2, 2)).await?;
        fixture.until_bound("second").await
    });
}

#[test]
fn an_allocation_names_the_nodes_that_reach_its_devices() {
    both("allocation-nodes", async |fixture| {
        let everywhere = json!({ "nodeName": null, "allNodes": true });
        let expression = json!({ "key": "place", "operator": "In", "values": [fixture.name] });
        let labelled = json!({ "nodeName": null, "nodeSelector": { "nodeSelectorTerms": [{ "matchExpressions": [expression] }] } });
        for (suffix, fields) in [("all", everywhere), ("labelled", labelled), ("local", json!({}))] {
            let fields = merged(fields, &fixture.pool(&format!("-{suffix}"), 1, 1));
            fixture.slice(suffix, &numbered(&[(suffix, 1)]), &fields).await?;
        }
        fixture.runs("three", &fixture.one(json!({ "count": 3 }))).await?;
        fixture.end_pod("three").await?;
        let one = fixture.one(json!({}));
        for pod in ["first", "second", "third"] {
            fixture.runs(pod, &one).await?;
        }
        Ok(())
    });
}

#[test]
fn configurations_of_class_and_claim_reach_the_allocation() {
    both("allocation-config", async |fixture| {
        fixture.devices(&numbered(&[("a", 1), ("b", 1)])).await?;
        let opaque = |value: &str| json!({ "driver": fixture.driver(), "parameters": { "of": value } });
        let class = format!("{}-configured", fixture.name);
        fixture
            .class(&class, &json!({ "config": [{ "opaque": opaque("class") }] }))
            .await?;
        let requests = json!([
            request("a", &class, &json!({})),
            request("b", &fixture.name, &json!({}))
        ]);
        let config = json!([{ "opaque": opaque("claim") }, { "requests": ["b"], "opaque": opaque("b") }]);
        fixture
            .runs("pod", &json!({ "requests": requests, "config": config }))
            .await
    });
}

#[test]
fn a_claim_waits_for_its_class() {
    both("allocation-class", async |fixture| {
        fixture.devices(&numbered(&[("a", 1)])).await?;
        let later = format!("{}-later", fixture.name);
        for (pod, class) in [("pod", &*later), ("stays", "allocation-class-never")] {
            let devices = json!({ "requests": [request("a", class, &json!({}))] });
            fixture.waits(pod, &devices).await?;
        }
        fixture.class(&later, &json!({})).await?;
        fixture.until_bound("pod").await
    });
}

#[test]
fn claims_live_as_long_as_their_pods_or_longer() {
    both("allocation-life", async |fixture| {
        fixture.devices(&numbered(&[("a", 1), ("b", 1)])).await?;
        let one = fixture.one(json!({}));
        let template = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": { "name": "t" }, "spec": { "spec": { "devices": one } },
        });
        fixture.create("resourceclaimtemplates", &template).await?;
        // Two pods share a claim.
        fixture.claim("shared", &one).await?;
        fixture.pod("first", &["shared"]).await?;
        fixture.until_bound("first").await?;
        fixture.pod("second", &["shared"]).await?;
        fixture.until_bound("second").await?;
        fixture.delete("pods", "first").await?;
        let reserved = |count: usize| {
            move |claims: &Value| {
                let reserved = &claims["items"][0]["status"]["reservedFor"];
                reserved.as_array().map_or(0, Vec::len) == count
            }
        };
        fixture
            .until("reserved for one", "resourceclaims", reserved(1))
            .await?;
        // A template claim is deleted with its pod.
        let entries = json!([{ "name": "made", "resourceClaimTemplateName": "t" }]);
        fixture.pod_of("third", &entries).await?;
        fixture.until_bound("third").await?;
        let done = json!({ "status": { "phase": "Succeeded" } });
        fixture.patch("pods", "third/status", &done).await?;
        let is_alone = |claims: &Value| claims["items"].as_array().is_some_and(|items| items.len() == 1);
        fixture
            .until("the claim of the template is gone", "resourceclaims", is_alone)
            .await?;
        // A user's claim is kept, without its allocation.
        fixture.delete("pods", "second").await?;
        let is_free = |claims: &Value| {
            let claim = &claims["items"][0];
            claim["status"]["allocation"].is_null() && claim["metadata"]["finalizers"].is_null()
        };
        fixture.until("deallocated", "resourceclaims", is_free).await
    });
}
