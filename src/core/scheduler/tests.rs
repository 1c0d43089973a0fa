//! Cases from upstream's allocator (`structured/internal/allocatortesting`), with the results that it gives.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, Device, DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

use super::*;
use crate::core::allocation::inventory::Match;

const DRIVER: &str = "drayman.dev";

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn node() -> Node {
    read(json!({ "metadata": { "name": "node-a", "labels": { "zone": "a", "rack": "7" } } }))
}

/// A slice of a pool with one slice.
fn slice(name: &str, devices: Value) -> Value {
    let mut slice = json!({
        "metadata": { "name": name },
        "spec": {
            "driver": DRIVER, "nodeName": "node-a",
            "pool": { "name": "node-a", "generation": 1, "resourceSliceCount": 1 },
        },
    });
    slice["spec"]["devices"] = devices;
    slice
}

/// An object with more fields.
fn with(mut object: Value, more: Value) -> Value {
    if let (Value::Object(fields), Value::Object(more)) = (&mut object, more) {
        fields.extend(more);
    }
    object
}

fn device(name: &str) -> Value {
    json!({ "name": name, "attributes": { "drayman.dev/kind": { "string": "cameras" } } })
}

fn on_numa(name: &str, numa: i64) -> Value {
    json!({ "name": name, "attributes": { "numa": { "int": numa } } })
}

/// A device with `n` shares, one for each request.
fn shared(name: &str, n: &str) -> Value {
    json!({
        "name": name, "allowMultipleAllocations": true,
        "capacity": { "drayman.dev/shares": { "value": n, "requestPolicy": {
            "default": "1", "validRange": { "min": "1", "step": "1" },
        } } },
    })
}

fn request(name: &str, more: Value) -> Value {
    let exactly = json!({ "deviceClassName": "any", "allocationMode": "ExactCount", "count": 1 });
    let mut exactly = with(exactly, more);
    if exactly["allocationMode"] == "All" {
        exactly.as_object_mut().unwrap().remove("count");
    }
    json!({ "name": name, "exactly": exactly })
}

fn claim(name: &str, devices: Value) -> ResourceClaim {
    let mut claim = json!({ "metadata": { "name": name, "namespace": "shop" } });
    claim["spec"]["devices"] = devices;
    read(claim)
}

fn one(more: Value) -> ResourceClaim {
    claim("one", json!({ "requests": [request("device", more)] }))
}

fn held(name: &str, results: Value) -> ResourceClaim {
    let mut claim = json!({ "metadata": { "name": name, "namespace": "shop" }, "spec": {} });
    claim["status"]["allocation"]["devices"]["results"] = results;
    read(claim)
}

fn result(device: &str, more: Value) -> Value {
    let result = json!({ "request": "device", "driver": DRIVER, "pool": "node-a", "device": device });
    with(result, more)
}

/// Understands `true`, `kind=...` and `kind`, which fails on a device without a kind. `beyond` is beyond its limits.
fn evaluate(expression: &str, _: &str, device: &Device) -> Result<Match, Arc<str>> {
    if expression == "beyond" {
        return Err("it is too long".into());
    }
    let attributes = device.attributes.clone().unwrap_or_default();
    let kind = attributes
        .get("drayman.dev/kind")
        .and_then(|kind| kind.string.clone());
    Ok(match expression.strip_prefix("kind=") {
        Some(expected) if kind.as_deref() == Some(expected) => Match::Yes,
        Some(_) => Match::No,
        None if expression == "true" || (expression == "kind" && kind.is_some()) => Match::Yes,
        None => Match::Failed("no such key".into()),
    })
}

struct Fixture {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    allocated: Vec<ResourceClaim>,
}

impl Fixture {
    fn new(slices: Vec<Value>) -> Self {
        let class = |name: &str, expression: &str| {
            read(json!({
                "metadata": { "name": name }, "spec": { "selectors": [{ "cel": { "expression": expression } }] },
            }))
        };
        Self {
            slices: slices.into_iter().map(read).collect(),
            classes: vec![
                class("any", "true"),
                class("cameras", "kind=cameras"),
                class("failing", "fail"),
                class("with-kind", "kind"),
            ],
            allocated: Vec::new(),
        }
    }

    fn of_devices(devices: Value) -> Self {
        Self::new(vec![slice("s", devices)])
    }

    fn held(mut self, claim: ResourceClaim) -> Self {
        self.allocated.push(claim);
        self
    }

    fn with<T>(&self, run: impl FnOnce(ClusterState<'_>) -> T) -> T {
        let allocated_devices = AllocatedDevices::read(&self.allocated);
        run(ClusterState {
            slices: &self.slices,
            classes: &self.classes,
            allocated_devices: &allocated_devices,
        })
    }

    fn allocate(&self, claims: &[&ResourceClaim]) -> Result<Vec<AllocationResult>, AllocationFailure> {
        let mut shares = 0;
        let mut share_id = || {
            shares += 1;
            format!("share-{shares}")
        };
        self.with(|cluster| allocate(cluster, &node(), claims, &mut evaluate, &mut share_id))
    }

    /// The allocated devices of a single claim, as `request:device`.
    fn devices(&self, claim: &ResourceClaim) -> Result<Vec<String>, AllocationFailure> {
        let allocations = self.allocate(&[claim])?;
        Ok(names(&allocations[0]))
    }

    fn report(&self, claim: &ResourceClaim) -> NodeReport {
        self.report_by(claim, &mut evaluate)
    }

    fn report_by(&self, claim: &ResourceClaim, evaluate: &mut Evaluate<'_>) -> NodeReport {
        self.with(|cluster| {
            let pools = PoolIndex::new(cluster.slices);
            report(cluster, &pools, &node(), &[claim], evaluate)
        })
        .unwrap()
    }
}

fn names(allocation: &AllocationResult) -> Vec<String> {
    let results = allocation
        .devices
        .as_ref()
        .and_then(|devices| devices.results.as_ref());
    let name = |result: &k8s_openapi::api::resource::v1::DeviceRequestAllocationResult| {
        format!("{}:{}", result.request, result.device)
    };
    results.into_iter().flatten().map(name).collect()
}

fn invalid(outcome: Result<Vec<String>, AllocationFailure>) -> String {
    match outcome {
        Err(AllocationFailure::Invalid(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_device_by_pool_slice_and_name_is_taken() {
    let in_pool = |name: &str, pool: &str, count: i64, device_name: &str| {
        let mut slice = slice(name, json!([device(device_name)]));
        slice["spec"]["pool"] = json!({ "name": pool, "generation": 1, "resourceSliceCount": count });
        slice
    };
    let cluster = Fixture::new(vec![
        in_pool("a", "pool-b", 1, "z"),
        in_pool("c", "pool-a", 2, "x"),
        in_pool("b", "pool-a", 2, "y"),
    ]);
    let three = cluster.devices(&one(json!({ "count": 3 })));
    assert_eq!(three.unwrap(), ["device:y", "device:x", "device:z"]);
}

#[test]
fn only_the_newest_generation_counts() {
    let mut old = slice("a", json!([device("old")]));
    let mut new = slice("b", json!([device("new")]));
    new["spec"]["pool"]["generation"] = json!(2);
    let cluster = Fixture::new(vec![old.clone(), new.clone()]);
    assert_eq!(cluster.devices(&one(json!({}))).unwrap(), ["device:new"]);

    // The newest generation has moved to another node.
    new["spec"]["nodeName"] = json!("node-b");
    old["spec"]["pool"]["resourceSliceCount"] = json!(2);
    let cluster = Fixture::new(vec![old, new]);
    assert_eq!(
        cluster.devices(&one(json!({}))),
        Err(AllocationFailure::DoesNotFit)
    );
    assert_eq!(pools(&cluster.slices, &node()).unwrap().len(), 0);
}

#[test]
fn incomplete_and_invalid_pools_are_not_used() {
    let mut incomplete = slice("a", json!([device("x")]));
    incomplete["spec"]["pool"]["resourceSliceCount"] = json!(2);
    let cluster = Fixture::new(vec![incomplete]);
    let state = PoolState::Incomplete {
        found: 1,
        expected: 2,
    };
    assert_eq!(pools(&cluster.slices, &node()).unwrap()[0].state, state);
    assert_eq!(
        cluster.devices(&one(json!({}))),
        Err(AllocationFailure::DoesNotFit)
    );
    assert_eq!(
        cluster.report(&one(json!({}))).unusable,
        [("drayman.dev/node-a".to_owned(), state)]
    );
    let all = cluster.devices(&one(json!({ "allocationMode": "All" })));
    assert!(matches!(all, Err(AllocationFailure::PoolUpdating(_))), "{all:?}");

    let cluster = Fixture::of_devices(json!([device("x"), device("x")]));
    assert_eq!(
        pools(&cluster.slices, &node()).unwrap()[0].state,
        PoolState::Invalid("duplicate device name x".to_owned())
    );
    assert_eq!(
        cluster.devices(&one(json!({}))),
        Err(AllocationFailure::DoesNotFit)
    );
}

#[test]
fn slices_are_for_nodes_by_name_selector_or_device() {
    let of = |key: &str, value: Value| {
        let mut slice = slice("a", json!([device("x")]));
        slice["spec"].as_object_mut().unwrap().remove("nodeName");
        slice["spec"][key] = value;
        Fixture::new(vec![slice])
    };
    let selector = |key: &str, operator: &str, values: Value| {
        let requirement = json!({ "key": key, "operator": operator, "values": values });
        json!({ "nodeSelectorTerms": [{ "matchExpressions": [requirement] }] })
    };
    let usable = |cluster: &Fixture| cluster.devices(&one(json!({}))).is_ok();
    assert!(usable(&of("nodeName", json!("node-a"))));
    assert!(!usable(&of("nodeName", json!("node-b"))));
    assert!(usable(&of("allNodes", json!(true))));
    for (key, operator, values, expected) in [
        ("zone", "In", json!(["a", "b"]), true),
        ("zone", "NotIn", json!(["a"]), false),
        ("other", "NotIn", json!(["a"]), true),
        ("zone", "Exists", json!([]), true),
        ("zone", "DoesNotExist", json!([]), false),
        ("rack", "Gt", json!(["6"]), true),
        ("rack", "Lt", json!(["7"]), false),
    ] {
        let cluster = of("nodeSelector", selector(key, operator, values));
        assert_eq!(usable(&cluster), expected, "{key} {operator}");
    }
    let nothing = of("nodeSelector", json!({ "nodeSelectorTerms": [{}] }));
    assert!(!usable(&nothing));
    let unknown = of("nodeSelector", selector("zone", "Like", json!(["a"])));
    assert!(invalid(unknown.devices(&one(json!({})))).contains("operator \"Like\""));

    let mut each = slice("a", json!([device("here"), device("there")]));
    each["spec"].as_object_mut().unwrap().remove("nodeName");
    each["spec"]["perDeviceNodeSelection"] = json!(true);
    each["spec"]["devices"][0]["nodeName"] = json!("node-b");
    each["spec"]["devices"][1]["allNodes"] = json!(true);
    assert_eq!(
        Fixture::new(vec![each]).devices(&one(json!({}))).unwrap(),
        ["device:there"]
    );
}

#[test]
fn pools_with_slices_of_other_nodes_only_are_left_out() {
    let of = |pool: &str, more: Value| -> ResourceSlice {
        let mut slice = slice(pool, json!([device("x")]));
        slice["spec"]["pool"]["name"] = json!(pool);
        slice["spec"].as_object_mut().unwrap().remove("nodeName");
        slice["spec"] = with(slice["spec"].take(), more);
        read(slice)
    };
    let selector = |operator: &str| {
        let requirement = json!({ "key": "zone", "operator": operator });
        json!({ "nodeSelector": { "nodeSelectorTerms": [{ "matchExpressions": [requirement] }] } })
    };
    let mut slices = vec![
        of("d", selector("Exists")),
        of(
            "c",
            json!({ "nodeName": "node-b", "perDeviceNodeSelection": true }),
        ),
        of("b", json!({ "nodeName": "node-a" })),
        of("b", json!({ "nodeName": "node-b" })),
        of("a", json!({ "nodeName": "node-b" })),
    ];
    let index = PoolIndex::new(&slices);
    let node = node();
    let names: Vec<&str> = index.candidates(&node).map(|((_, name), _)| name).collect();
    assert_eq!(names, ["b", "c", "d"]);
    let pools = index.pools(&node).unwrap();
    let names: Vec<&str> = pools.iter().map(|pool| pool.name).collect();
    assert_eq!(names, ["b", "d"]);
    // An invalid slice counts for every node.
    slices.push(of("e", selector("Like")));
    let error = PoolIndex::new(&slices).pools(&node).unwrap_err();
    assert!(error.contains("operator \"Like\""), "{error}");
}

#[test]
fn an_allocation_is_for_the_nodes_of_its_devices() {
    let selector = |slice: Value| {
        let allocation = Fixture::new(vec![slice])
            .allocate(&[&one(json!({}))])
            .unwrap()
            .remove(0);
        serde_json::to_value(allocation.node_selector).unwrap()
    };
    let local = slice("a", json!([device("x")]));
    let by_name = json!({ "key": "metadata.name", "operator": "In", "values": ["node-a"] });
    assert_eq!(
        selector(local.clone()),
        json!({ "nodeSelectorTerms": [{ "matchFields": [by_name] }] })
    );
    let mut everywhere = local;
    everywhere["spec"].as_object_mut().unwrap().remove("nodeName");
    everywhere["spec"]["allNodes"] = json!(true);
    assert_eq!(selector(everywhere), Value::Null);
}

#[test]
fn class_and_request_selectors_must_match() {
    let cluster = Fixture::of_devices(json!([{ "name": "disk" }, device("camera")]));
    let class = |class: &str| one(json!({ "deviceClassName": class }));
    assert_eq!(cluster.devices(&class("cameras")).unwrap(), ["device:camera"]);
    let selectors = json!({ "selectors": [{ "cel": { "expression": "kind=disks" } }] });
    assert_eq!(
        cluster.devices(&one(selectors)),
        Err(AllocationFailure::DoesNotFit)
    );
    assert_eq!(
        invalid(cluster.devices(&class("failing"))),
        "DeviceClass failing: selector #0 fails on device drayman.dev/node-a/disk: no such key"
    );
    assert_eq!(
        invalid(cluster.devices(&class("none"))),
        "ResourceClaim shop/one, request device: there is no DeviceClass none"
    );
}

#[test]
fn a_selector_fails_only_on_devices_that_are_tried() {
    let cluster = Fixture::of_devices(json!([device("camera"), { "name": "disk" }]));
    let with_kind = one(json!({ "deviceClassName": "with-kind" }));
    assert_eq!(cluster.devices(&with_kind).unwrap(), ["device:camera"]);
    let cluster = cluster.held(held("other", json!([result("camera", json!({}))])));
    assert!(invalid(cluster.devices(&with_kind)).contains("fails on device drayman.dev/node-a/disk"));
    // A device in use is not evaluated.
    let cluster = cluster.held(held("more", json!([result("disk", json!({}))])));
    assert_eq!(cluster.devices(&with_kind), Err(AllocationFailure::DoesNotFit));
}

#[test]
fn a_selector_that_only_the_scheduler_evaluates_is_no_error() {
    let cluster = Fixture::of_devices(json!([device("x")]));
    let selectors = json!({ "selectors": [{ "cel": { "expression": "beyond" } }] });
    let report = cluster.report(&one(selectors));
    let reason =
        "drayman cannot evaluate selector #0 of ResourceClaim shop/one, request device: it is too long";
    let outcome = AllocationFailure::NotEvaluated(reason.to_owned());
    assert_eq!(report.outcome, Err(outcome));
    assert_eq!(report.requests[0].error.as_deref(), Some(reason));
}

#[test]
fn held_devices_are_left_out_and_their_claim_is_named() {
    let cluster = Fixture::of_devices(json!([device("x"), device("y")]))
        .held(held("other", json!([result("x", json!({}))])));
    assert_eq!(cluster.devices(&one(json!({}))).unwrap(), ["device:y"]);
    assert_eq!(
        cluster.devices(&one(json!({ "count": 2 }))),
        Err(AllocationFailure::DoesNotFit)
    );
    let report = cluster.report(&one(json!({ "count": 2 })));
    assert_eq!(report.outcome, Err(AllocationFailure::DoesNotFit));
    assert_eq!(
        report.requests[0].matching,
        [
            (
                DeviceId::new(DRIVER, "node-a", "x"),
                Availability::Held(vec!["shop/other".to_owned()])
            ),
            (DeviceId::new(DRIVER, "node-a", "y"), Availability::Free),
        ]
    );
    assert!(!report.requests[0].is_satisfiable());
}

#[test]
fn admin_access_passes_beside_a_holder_and_holds_nothing() {
    let admin = one(json!({ "adminAccess": true }));
    let cluster = Fixture::of_devices(json!([device("x")])).held(held(
        "monitor",
        json!([result("x", json!({ "adminAccess": true }))]),
    ));
    assert_eq!(cluster.devices(&one(json!({}))).unwrap(), ["device:x"]);
    let cluster = cluster.held(held("other", json!([result("x", json!({}))])));
    assert_eq!(
        cluster.devices(&one(json!({}))),
        Err(AllocationFailure::DoesNotFit)
    );
    let allocation = cluster.allocate(&[&admin]).unwrap().remove(0);
    let results = allocation.devices.unwrap().results.unwrap();
    assert_eq!(results[0].admin_access, Some(true));
    // One claim gets each device once.
    let two = one(json!({ "adminAccess": true, "count": 2 }));
    assert_eq!(cluster.devices(&two), Err(AllocationFailure::DoesNotFit));
}

#[test]
fn all_takes_every_matching_device_or_none() {
    let all = one(json!({ "deviceClassName": "cameras", "allocationMode": "All" }));
    let devices = json!([device("x"), { "name": "disk" }, device("y")]);
    let cluster = Fixture::of_devices(devices);
    assert_eq!(cluster.devices(&all).unwrap(), ["device:x", "device:y"]);
    let cluster = cluster.held(held("other", json!([result("y", json!({}))])));
    assert_eq!(cluster.devices(&all), Err(AllocationFailure::DoesNotFit));
    let none = Fixture::of_devices(json!([{ "name": "disk" }]));
    assert_eq!(none.devices(&all), Err(AllocationFailure::DoesNotFit));
}

#[test]
fn all_devices_include_none_that_is_too_small() {
    let with_memory = |name: &str, memory: &str| {
        let capacity = json!({ "memory": { "value": memory } });
        json!({ "name": name, "capacity": capacity })
    };
    let mut small = with_memory("small", "1Gi");
    small["taints"] = json!([{ "key": "drayman.dev/unhealthy", "effect": "NoSchedule" }]);
    let cluster = Fixture::of_devices(json!([with_memory("large", "8Gi"), small]));
    let of_2_gib = |mode: &str| {
        let capacity = json!({ "requests": { "memory": "2Gi" } });
        one(json!({ "allocationMode": mode, "capacity": capacity }))
    };
    for mode in ["All", "ExactCount"] {
        assert_eq!(cluster.devices(&of_2_gib(mode)).unwrap(), ["device:large"]);
        let report = cluster.report(&of_2_gib(mode));
        assert_eq!(report.outcome, Ok(()));
        assert!(report.requests[0].is_satisfiable(), "{report:?}");
        assert_eq!(report.requests[0].matching[1].1, Availability::NoCapacity);
    }
}

#[test]
fn the_first_subrequest_that_fits_is_chosen() {
    let sub = |name: &str, class: &str, count: i64| json!({ "name": name, "deviceClassName": class, "allocationMode": "ExactCount", "count": count });
    let wants = |subrequests: Value| {
        claim(
            "one",
            json!({ "requests": [{ "name": "device", "firstAvailable": subrequests }] }),
        )
    };
    let cluster = Fixture::of_devices(json!([{ "name": "disk" }, device("x")]));
    let choice = wants(json!([sub("two", "cameras", 2), sub("any", "any", 2)]));
    assert_eq!(
        cluster.devices(&choice).unwrap(),
        ["device/any:disk", "device/any:x"]
    );
    // A subrequest with too many devices gives way to the next.
    let choice = wants(json!([sub("many", "any", 33), sub("few", "cameras", 1)]));
    assert_eq!(cluster.devices(&choice).unwrap(), ["device/few:x"]);
    let choice = wants(json!([sub("many", "any", 33)]));
    assert!(invalid(cluster.devices(&choice)).contains("needs 33 devices; at most 32"));
    let none = wants(json!([sub("two", "cameras", 2)]));
    assert_eq!(cluster.devices(&none), Err(AllocationFailure::DoesNotFit));
    let report = cluster.report(&none);
    assert_eq!(
        (report.requests[0].request.as_str(), report.requests[0].free()),
        ("device/two", 1)
    );
}

#[test]
fn constraints_make_the_search_backtrack() {
    let numa = json!([on_numa("a", 0), on_numa("b", 1), on_numa("c", 1), { "name": "d" }]);
    let cluster = Fixture::of_devices(numa);
    let wants = |constraint: Value, count: i64| {
        claim(
            "one",
            json!({ "requests": [request("device", json!({ "count": count }))], "constraints": [constraint] }),
        )
    };
    let matching = |count| wants(json!({ "matchAttribute": "drayman.dev/numa" }), count);
    assert_eq!(cluster.devices(&matching(2)).unwrap(), ["device:b", "device:c"]);
    assert_eq!(cluster.devices(&matching(3)), Err(AllocationFailure::DoesNotFit));
    let distinct = |count| wants(json!({ "distinctAttribute": "drayman.dev/numa" }), count);
    assert_eq!(cluster.devices(&distinct(2)).unwrap(), ["device:a", "device:b"]);
    assert_eq!(cluster.devices(&distinct(3)), Err(AllocationFailure::DoesNotFit));

    let report = cluster.report(&matching(3));
    assert!(report.only_constraints);
    let lacks = Availability::NoAttribute("drayman.dev/numa".to_owned());
    assert_eq!(report.requests[0].matching[3].1, lacks);
    // A constraint for other requests has no effect.
    let other = wants(
        json!({ "matchAttribute": "drayman.dev/numa", "requests": ["other"] }),
        4,
    );
    assert_eq!(cluster.devices(&other).unwrap().len(), 4);
}

#[test]
fn a_constraint_that_excludes_one_of_all_is_an_error() {
    let cluster = Fixture::of_devices(json!([on_numa("a", 0), on_numa("b", 1)]));
    let all = claim(
        "one",
        json!({
            "requests": [request("device", json!({ "allocationMode": "All" }))],
            "constraints": [{ "matchAttribute": "drayman.dev/numa" }],
        }),
    );
    assert!(invalid(cluster.devices(&all)).contains("a constraint excludes device drayman.dev/node-a/b"));
}

#[test]
fn taints_are_tolerated_as_by_the_scheduler() {
    let tainted = |effect: &str, value: Value| {
        let mut device = device("x");
        device["taints"] = json!([{ "key": "drayman.dev/unhealthy", "effect": effect, "value": value }]);
        Fixture::of_devices(json!([device]))
    };
    let tolerates = |toleration: Value| one(json!({ "tolerations": [toleration] }));
    let cluster = tainted("NoSchedule", json!("gone"));
    assert_eq!(
        cluster.devices(&one(json!({}))),
        Err(AllocationFailure::DoesNotFit)
    );
    let report = cluster.report(&one(json!({})));
    let says = Availability::Tainted("drayman.dev/unhealthy=gone:NoSchedule".to_owned());
    assert_eq!(report.requests[0].matching[0].1, says);
    for (toleration, expected) in [
        (json!({ "operator": "Exists" }), true),
        (
            json!({ "key": "drayman.dev/unhealthy", "operator": "Exists", "effect": "NoSchedule" }),
            true,
        ),
        (
            json!({ "key": "drayman.dev/unhealthy", "operator": "Exists", "effect": "NoExecute" }),
            false,
        ),
        (
            json!({ "key": "drayman.dev/unhealthy", "operator": "Equal", "value": "gone" }),
            true,
        ),
        (json!({ "key": "drayman.dev/unhealthy", "value": "other" }), false),
        (json!({ "key": "other", "operator": "Exists" }), false),
    ] {
        let fits = cluster.devices(&tolerates(toleration.clone())).is_ok();
        assert_eq!(fits, expected, "{toleration}");
    }
    assert!(
        tainted("NoExecute", Value::Null)
            .devices(&one(json!({})))
            .is_err()
    );
    assert!(tainted("None", Value::Null).devices(&one(json!({}))).is_ok());
}

#[test]
fn shares_are_given_until_none_is_left() {
    let share = |id: &str| {
        let amount = json!({ "shareID": id, "consumedCapacity": { "drayman.dev/shares": "1" } });
        result("x", amount)
    };
    let cluster = Fixture::of_devices(json!([shared("x", "3")])).held(held("other", json!([share("1")])));
    let allocation = cluster.allocate(&[&one(json!({}))]).unwrap().remove(0);
    let results = serde_json::to_value(allocation.devices.unwrap().results).unwrap();
    assert_eq!(
        results,
        json!([{
            "request": "device", "driver": DRIVER, "pool": "node-a", "device": "x",
            "shareID": "share-1", "consumedCapacity": { "drayman.dev/shares": "1" },
        }])
    );
    // Within a request, each device is taken once; two requests get a share each.
    assert_eq!(
        cluster.devices(&one(json!({ "count": 2 }))),
        Err(AllocationFailure::DoesNotFit)
    );
    let requests = |n: usize| {
        let each: Vec<_> = (0..n).map(|i| request(&format!("r{i}"), json!({}))).collect();
        claim("one", json!({ "requests": each }))
    };
    assert_eq!(cluster.devices(&requests(2)).unwrap(), ["r0:x", "r1:x"]);
    assert_eq!(cluster.devices(&requests(3)), Err(AllocationFailure::DoesNotFit));
    let full = cluster.held(held("more", json!([share("2"), share("3")])));
    assert_eq!(full.devices(&one(json!({}))), Err(AllocationFailure::DoesNotFit));
    let holders = Availability::Held(vec!["shop/more".to_owned(), "shop/other".to_owned()]);
    assert_eq!(full.report(&one(json!({}))).requests[0].matching[0].1, holders);
}

#[test]
fn capacity_requests_follow_the_policy_of_the_device() {
    let consumed = |policy: Value, asked: Value| {
        let device = json!({
            "name": "x", "allowMultipleAllocations": true,
            "capacity": { "memory": { "value": "8Gi", "requestPolicy": policy } },
        });
        let claim = one(json!({ "capacity": { "requests": asked } }));
        let allocations = Fixture::of_devices(json!([device])).allocate(&[&claim])?;
        let results = allocations[0].devices.clone().unwrap().results.unwrap();
        Ok::<_, AllocationFailure>(results[0].consumed_capacity.clone().unwrap()["memory"].0.clone())
    };
    let range = json!({ "default": "1Gi", "validRange": { "min": "1Gi", "step": "1Gi", "max": "4Gi" } });
    let values = json!({ "default": "1Gi", "validValues": ["1Gi", "2Gi"] });
    for (policy, asked, expected) in [
        (&range, json!({}), "1Gi"),
        (&range, json!({ "memory": "1Mi" }), "1Gi"),
        (&range, json!({ "memory": "3Gi" }), "3Gi"),
        (&range, json!({ "memory": "1.5Gi" }), "2Gi"),
        (&values, json!({ "memory": "1.5Gi" }), "2Gi"),
        (&Value::Null, json!({}), "8Gi"),
        (&Value::Null, json!({ "memory": "1Gi" }), "1Gi"),
    ] {
        assert_eq!(
            consumed(policy.clone(), asked.clone()).unwrap(),
            expected,
            "{policy} {asked}"
        );
    }
    for (policy, asked) in [
        (&range, json!({ "memory": "5Gi" })),
        (&values, json!({ "memory": "3Gi" })),
        (&Value::Null, json!({ "memory": "9Gi" })),
        (&Value::Null, json!({ "bandwidth": "1" })),
    ] {
        let outcome = consumed(policy.clone(), asked.clone());
        assert_eq!(outcome, Err(AllocationFailure::DoesNotFit), "{policy} {asked}");
    }
    let negative = consumed(Value::Null, json!({ "memory": "-1" }));
    assert!(
        matches!(negative, Err(AllocationFailure::Invalid(_))),
        "{negative:?}"
    );
}

#[test]
fn claims_of_one_pod_are_allocated_together() {
    let cluster = Fixture::of_devices(json!([device("x"), { "name": "disk" }]));
    let any = one(json!({}));
    let camera = one(json!({ "deviceClassName": "cameras" }));
    // The first claim gives up the camera, which the second needs.
    let allocations = cluster.allocate(&[&any, &camera]).unwrap();
    assert_eq!(names(&allocations[0]), ["device:disk"]);
    assert_eq!(names(&allocations[1]), ["device:x"]);
}

#[test]
fn a_claim_has_at_most_32_devices() {
    let devices: Vec<_> = (0..40).map(|number| device(&format!("d{number:02}"))).collect();
    let cluster = Fixture::of_devices(json!(devices));
    assert_eq!(cluster.devices(&one(json!({ "count": 32 }))).unwrap().len(), 32);
    let too_many = invalid(cluster.devices(&one(json!({ "count": 33 }))));
    assert!(too_many.contains("at most 32"), "{too_many}");
    let all = invalid(cluster.devices(&one(json!({ "allocationMode": "All" }))));
    assert!(all.contains("needs 40 devices"), "{all}");
}

#[test]
fn the_search_ends_at_its_limit() {
    let devices: Vec<_> = (0..40)
        .map(|number| on_numa(&format!("d{number:02}"), number / 8))
        .collect();
    let cluster = Fixture::of_devices(json!(devices));
    let impossible = claim(
        "one",
        json!({
            "requests": [request("a", json!({ "count": 20 })), request("b", json!({ "count": 9 }))],
            "constraints": [{ "matchAttribute": "drayman.dev/numa", "requests": ["b"] }],
        }),
    );
    assert_eq!(
        cluster.devices(&impossible),
        Err(AllocationFailure::TooManyCombinations)
    );
}

#[test]
fn a_node_with_too_few_devices_needs_no_search() {
    let devices: Vec<_> = (0..40).map(|number| device(&format!("d{number:02}"))).collect();
    let cluster = Fixture::of_devices(json!(devices));
    let disks = json!({ "selectors": [{ "cel": { "expression": "kind=disks" } }] });
    // The first request has many combinations of devices, the second has none.
    let requests = json!([request("a", json!({ "count": 20 })), request("b", disks)]);
    let impossible = claim("one", json!({ "requests": requests }));
    assert_eq!(
        cluster.devices(&impossible),
        Err(AllocationFailure::TooManyCombinations)
    );
    let report = cluster.report(&impossible);
    assert_eq!(report.outcome, Err(AllocationFailure::DoesNotFit));
}

#[test]
fn too_few_devices_hide_no_error() {
    let error = |cluster: &Fixture, claim: &ResourceClaim| {
        let report = cluster.report(claim);
        assert!(!report.requests[0].is_satisfiable(), "{report:?}");
        invalid(report.outcome.map(|()| Vec::new()))
    };
    let small = json!({ "name": "x", "capacity": { "memory": { "value": "1Gi" } } });
    let negative = one(json!({ "capacity": { "requests": { "memory": "-1" } } }));
    let negative = error(&Fixture::of_devices(json!([small])), &negative);
    assert!(negative.contains("the amount is negative"), "{negative}");
    let all = claim(
        "one",
        json!({
            "requests": [request("device", json!({ "allocationMode": "All" }))],
            "constraints": [{ "matchAttribute": "drayman.dev/numa" }],
        }),
    );
    let cluster = Fixture::of_devices(json!([on_numa("a", 0), { "name": "b" }]));
    let excluded = error(&cluster, &all);
    assert!(excluded.contains("a constraint excludes device"), "{excluded}");
}

#[test]
fn a_claim_without_constraints_is_searched_once() {
    let cluster = Fixture::of_devices(json!([device("x")]));
    let evaluations = |constraints: Value| {
        let requests = json!([request("a", json!({})), request("b", json!({}))]);
        let claim = claim("one", json!({ "requests": requests, "constraints": constraints }));
        let mut number = 0;
        let mut counted = |expression: &str, driver: &str, device: &Device| {
            number += 1;
            evaluate(expression, driver, device)
        };
        let report = cluster.report_by(&claim, &mut counted);
        assert_eq!(report.outcome, Err(AllocationFailure::DoesNotFit));
        number
    };
    // One for each request, and one in each search: the second request does not meet the device.
    assert_eq!(evaluations(json!([])), 3);
    let kind = json!([{ "matchAttribute": "drayman.dev/kind" }]);
    assert_eq!(evaluations(kind), 4);
}

#[test]
fn configuration_of_classes_and_claim_is_copied() {
    let mut cluster = Fixture::of_devices(json!([device("x"), device("y")]));
    let opaque = |value: i64| json!({ "driver": DRIVER, "parameters": { "value": value } });
    cluster.classes = vec![
        read(json!({ "metadata": { "name": "any" }, "spec": { "config": [{ "opaque": opaque(1) }] } })),
        read(json!({ "metadata": { "name": "bare" }, "spec": {} })),
    ];
    let claim = claim(
        "one",
        json!({
            "requests": [request("a", json!({})), request("b", json!({ "deviceClassName": "bare" }))],
            "config": [
                { "opaque": opaque(2) },
                { "requests": ["a", "b"], "opaque": opaque(3) },
                { "requests": ["other"], "opaque": opaque(4) },
            ],
        }),
    );
    let allocation = cluster.allocate(&[&claim]).unwrap().remove(0);
    assert_eq!(
        serde_json::to_value(allocation.devices.unwrap().config).unwrap(),
        json!([
            { "source": "FromClass", "requests": ["a"], "opaque": opaque(1) },
            { "source": "FromClaim", "opaque": opaque(2) },
            { "source": "FromClaim", "opaque": opaque(3) },
        ])
    );
}
