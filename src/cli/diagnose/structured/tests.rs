use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

use super::add_taints;
use super::devices::devices;
use super::doctor::{GATES, classes, dropped_fields, gate, kubelets, slices, why_unused};
use super::explain::{StructuredExplainInput, evaluate_nodes, explain, find, is_waiting};
use crate::cli::diagnose::devices::{DeviceRow, DeviceState, DeviceTable};
use crate::cli::diagnose::doctor::{DoctorFinding, Level};
use crate::cli::diagnose::explain::{ClaimExplanation, ClaimStep, claim_of};
use crate::cli::diagnose::gates::GateState;
use crate::cli::objects::PartialPod;
use crate::core::claims::Resolved;
use crate::core::scheduler::{AllocatedDevices, ClusterState};
use crate::host::selectors::with_selectors;

pub(crate) const DRIVER: &str = "drayman.dev";

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A device of kind `cameras`.
pub(crate) fn camera(name: &str) -> Value {
    json!({ "name": name, "attributes": { "drayman.dev/kind": { "string": "cameras" } } })
}

fn unhealthy(name: &str) -> Value {
    let mut device = camera(name);
    device["attributes"]["drayman.dev/unhealthy"] = json!({ "string": "unplugged" });
    device["taints"] = json!([{ "key": "drayman.dev/unhealthy", "effect": "NoSchedule" }]);
    device
}

fn shared(name: &str, shares: &str) -> Value {
    let mut device = camera(name);
    device["allowMultipleAllocations"] = json!(true);
    device["capacity"] =
        json!({ "drayman.dev/shares": { "value": shares, "requestPolicy": { "default": "1" } } });
    device
}

/// The only slice of a node.
pub(crate) fn slice(node: &str, devices: Value) -> Value {
    let mut slice = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {
            "name": format!("{node}.drayman.dev-00"),
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Node", "name": node, "uid": format!("uid-{node}"), "controller": true,
            }],
        },
        "spec": {
            "driver": DRIVER, "nodeName": node,
            "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
        },
    });
    slice["spec"]["devices"] = devices;
    slice
}

/// A class for a kind.
pub(crate) fn class(kind: &str) -> Value {
    let expression =
        format!("device.driver == \"drayman.dev\" && device.attributes[\"drayman.dev\"].kind == \"{kind}\"");
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
        "metadata": { "name": kind }, "spec": { "selectors": [{ "cel": { "expression": expression } }] },
    })
}

/// A claim for devices of a class.
pub(crate) fn claim(name: &str, class: &str, count: u32) -> Value {
    let exactly = json!({ "deviceClassName": class, "allocationMode": "ExactCount", "count": count });
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "namespace": "shop", "name": name, "uid": format!("uid-{name}") },
        "spec": { "devices": { "requests": [{ "name": "device", "exactly": exactly }] } },
    })
}

/// A claim that has devices of a node, for a pod `till`.
pub(crate) fn held(name: &str, node: &str, devices: &[&str]) -> Value {
    let mut claim = claim(name, "cameras", 1);
    let result =
        |device: &&str| json!({ "request": "device", "driver": DRIVER, "pool": node, "device": device });
    let by_name = json!({ "key": "metadata.name", "operator": "In", "values": [node] });
    claim["status"] = json!({
        "allocation": {
            "devices": { "results": devices.iter().map(result).collect::<Vec<_>>() },
            "nodeSelector": { "nodeSelectorTerms": [{ "matchFields": [by_name] }] },
        },
        "reservedFor": [{ "resource": "pods", "name": "till", "uid": "uid-till" }],
    });
    claim
}

/// A pod that names claims.
pub(crate) fn pod(name: &str, claims: &[&str]) -> Value {
    let entry = |claim: &&str| json!({ "name": claim, "resourceClaimName": claim });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": "shop", "name": name, "uid": format!("uid-{name}") },
        "spec": { "containers": [], "resourceClaims": claims.iter().map(entry).collect::<Vec<_>>() },
        "status": { "phase": "Pending" },
    })
}

pub(crate) fn node(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "uid": format!("uid-{name}") } })
}

fn table(slices: Vec<Value>, claims: Vec<Value>) -> DeviceTable {
    let slices: Vec<ResourceSlice> = slices.into_iter().map(read).collect();
    let claims: Vec<ResourceClaim> = claims.into_iter().map(read).collect();
    devices(DRIVER, &slices, &claims)
}

fn states(table: &DeviceTable) -> Vec<(&str, DeviceState)> {
    table
        .devices
        .iter()
        .map(|row| (row.device.as_str(), row.state))
        .collect()
}

#[test]
fn devices_have_the_state_that_slices_and_claims_give() {
    let mut tainted = camera("d");
    tainted["taints"] = json!([{ "key": "example.com/repair", "value": "soon", "effect": "NoExecute" }]);
    let all = json!([camera("a"), camera("b"), unhealthy("c"), tainted]);
    let mut other = slice("node-a", json!([camera("x")]));
    other["spec"]["driver"] = json!("other.example");
    let table = table(
        vec![slice("node-a", all), other],
        vec![held("one", "node-a", &["b", "gone"])],
    );
    assert_eq!(
        states(&table),
        [
            ("a", DeviceState::Free),
            ("b", DeviceState::Held),
            ("c", DeviceState::Unhealthy),
            ("d", DeviceState::Tainted),
            ("gone", DeviceState::Gone),
        ]
    );
    let [a, b, c, d, gone] = table.devices.as_slice() else {
        panic!("{table:?}")
    };
    assert_eq!((a.kind.as_str(), a.node_uid.as_str()), ("cameras", "uid-node-a"));
    assert_eq!(b.holders[0].claim, "shop/one");
    assert_eq!(
        (b.holders[0].request.as_str(), b.holders[0].pods.as_slice()),
        ("device", &["till".to_owned()][..])
    );
    assert_eq!(c.cause.as_deref(), Some("unplugged"));
    assert_eq!(
        d.cause.as_deref(),
        Some("taint example.com/repair=soon:NoExecute")
    );
    assert_eq!((gone.node.as_str(), gone.holders.len()), ("node-a", 1));
}

#[test]
fn a_shared_device_is_held_when_no_share_is_left() {
    let share = |name: &str| {
        let mut claim = held(name, "node-a", &["a"]);
        let result = &mut claim["status"]["allocation"]["devices"]["results"][0];
        result["shareID"] = json!(format!("share-{name}"));
        result["consumedCapacity"] = json!({ "drayman.dev/shares": "1" });
        claim
    };
    let of = |claims: Vec<Value>| table(vec![slice("node-a", json!([shared("a", "2")]))], claims);
    let one = of(vec![share("one")]);
    assert_eq!(states(&one), [("a", DeviceState::Free)]);
    assert_eq!((one.devices[0].shares, one.devices[0].holders.len()), (2, 1));
    assert_eq!(
        states(&of(vec![share("one"), share("two")])),
        [("a", DeviceState::Held)]
    );
}

#[test]
fn devices_of_an_incomplete_pool_are_not_ready() {
    let mut incomplete = slice("node-a", json!([camera("a")]));
    incomplete["spec"]["pool"]["resourceSliceCount"] = json!(2);
    let table = table(vec![incomplete], Vec::new());
    assert_eq!(states(&table), [("a", DeviceState::NotReady)]);
    let cause = table.devices[0].cause.as_deref();
    assert_eq!(cause, Some("its pool is incomplete, with 1 of 2 slices"));
}

#[test]
fn only_the_newest_generation_is_listed() {
    let mut newer = slice("node-a", json!([camera("b")]));
    newer["metadata"]["name"] = json!("newer");
    newer["spec"]["pool"]["generation"] = json!(2);
    let table = table(vec![slice("node-a", json!([camera("a")])), newer], Vec::new());
    assert_eq!(states(&table), [("b", DeviceState::Free)]);
}

#[test]
fn admin_access_holds_no_device() {
    let mut monitor = held("monitor", "node-a", &["a"]);
    monitor["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = json!(true);
    let table = table(vec![slice("node-a", json!([camera("a")]))], vec![monitor]);
    assert_eq!(states(&table), [("a", DeviceState::Free)]);
}

#[test]
fn a_device_that_a_container_may_have_is_not_free() {
    let with_mode = |name: &str, mode: &str| {
        let mut device = camera(name);
        device["attributes"]["drayman.dev/mode"] = json!({ "string": mode });
        device
    };
    let devices = json!([
        camera("a"),
        with_mode("b", "both"),
        with_mode("c", "both"),
        with_mode("d", "new")
    ]);
    let table = table(
        vec![slice("node-a", devices)],
        vec![held("one", "node-a", &["c"])],
    );
    assert_eq!(
        states(&table),
        [
            ("a", DeviceState::Free),
            ("b", DeviceState::NotClaimed),
            ("c", DeviceState::Held),
            ("d", DeviceState::NotClaimed),
        ]
    );
    let may: Vec<bool> = table
        .devices
        .iter()
        .map(DeviceRow::may_be_in_a_container)
        .collect();
    assert_eq!(may, [false, true, true, true]);
}

#[derive(Default)]
struct Question {
    slices: Vec<Value>,
    classes: Vec<Value>,
    claims: Vec<Value>,
    pod: Value,
    old_kubelets: Vec<String>,
    of_one_namespace: bool,
}

impl Question {
    /// Explains the pod's claims.
    fn ask(self) -> Vec<ClaimExplanation> {
        let slices: Vec<ResourceSlice> = self.slices.into_iter().map(read).collect();
        let classes: Vec<DeviceClass> = self.classes.into_iter().map(read).collect();
        let claims: Vec<ResourceClaim> = self.claims.into_iter().map(read).collect();
        let nodes: Vec<Node> = ["node-a", "node-b"].map(node).map(read).into();
        let pod: PartialPod = read(self.pod);
        let entries = pod.spec.as_ref().unwrap().resource_claims.clone().unwrap();
        let found: Vec<Resolved<&ResourceClaim>> =
            entries.iter().map(|entry| find(&pod, entry, &claims)).collect();
        let own: Vec<&ResourceClaim> = found.iter().filter_map(|found| claim_of(*found)).collect();
        let allocated_devices = AllocatedDevices::read(&claims);
        let cluster = ClusterState {
            slices: &slices,
            classes: &classes,
            allocated_devices: &allocated_devices,
        };
        let nodes =
            with_selectors(|evaluate| evaluate_nodes(cluster, &nodes, Some(&pod), &own, evaluate)).unwrap();
        let mut index = 0;
        let mut explanations = Vec::new();
        for (entry, found) in entries.iter().zip(found) {
            explanations.push(explain(&StructuredExplainInput {
                driver: DRIVER,
                unused_gates: &[],
                old_kubelets: &self.old_kubelets,
                of_one_namespace: self.of_one_namespace,
                pod: Some(&pod),
                entry: Some(entry),
                found,
                index,
                classes: Some(&classes),
                nodes: Some(&nodes),
            }));
            index += usize::from(claim_of(found).is_some_and(is_waiting));
        }
        explanations
    }

    fn of(slices: Vec<Value>, claims: Vec<Value>, names: &[&str]) -> Vec<ClaimExplanation> {
        Self {
            slices,
            classes: vec![class("cameras"), class("radios")],
            claims,
            pod: pod("waiting", names),
            ..Self::default()
        }
        .ask()
    }
}

fn reasons(explanation: &ClaimExplanation) -> Vec<&str> {
    let nodes = explanation.nodes.iter();
    nodes
        .map(|node| node.reason.as_deref().unwrap_or("can serve it"))
        .collect()
}

#[test]
fn a_waiting_claim_is_explained_by_node_and_device() {
    let slices = vec![slice("node-a", json!([camera("a"), camera("b"), unhealthy("c")]))];
    let claims = vec![claim("two", "cameras", 2), held("one", "node-a", &["a"])];
    let explanation = Question::of(slices, claims, &["two"]).remove(0);
    assert_eq!(explanation.step, ClaimStep::WaitsForDevice);
    assert_eq!(explanation.because, "none of 2 nodes can serve it now");
    assert_eq!(explanation.wants.as_deref(), Some("device: 2 of class cameras"));
    assert_eq!(explanation.driver.as_deref(), Some(DRIVER));
    assert_eq!(
        reasons(&explanation),
        [
            "request device: 1 of 3 matching devices free, 2 needed (1 held, 1 tainted)",
            "no ResourceSlice is for this node: no driver runs here",
        ]
    );
    let of_devices: Vec<(&str, Option<&str>)> = explanation
        .devices
        .iter()
        .map(|device| (device.device.as_str(), device.reason.as_deref()))
        .collect();
    assert_eq!(
        of_devices,
        [
            ("a", Some("held by shop/one")),
            ("b", None),
            (
                "c",
                Some("taint drayman.dev/unhealthy:NoSchedule is not tolerated")
            ),
        ]
    );
}

#[test]
fn a_node_without_matching_devices_has_a_reason() {
    let mut selected = claim("one", "cameras", 1);
    selected["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
        json!([{ "cel": { "expression": "device.allowMultipleAllocations" } }]);
    let mut incomplete = slice("node-b", json!([camera("x")]));
    incomplete["spec"]["pool"]["resourceSliceCount"] = json!(2);
    let slices = || vec![slice("node-a", json!([camera("a")])), incomplete.clone()];
    let explanation = Question::of(slices(), vec![selected], &["one"]).remove(0);
    assert_eq!(
        reasons(&explanation),
        [
            "request device: none of 1 devices of DeviceClass cameras matches its selectors",
            "pool drayman.dev/node-b is incomplete, with 1 of 2 slices; request device: no device matches DeviceClass cameras",
        ]
    );
    let explanation = Question::of(slices(), vec![claim("one", "radios", 1)], &["one"]).remove(0);
    assert_eq!(
        reasons(&explanation)[0],
        "request device: no device matches DeviceClass radios"
    );
}

#[test]
fn constraints_and_other_claims_are_named_as_the_cause() {
    let on_numa = |name: &str, numa: i64| {
        let mut device = camera(name);
        device["attributes"]["resource.kubernetes.io/numaNode"] = json!({ "int": numa });
        device
    };
    let mut matched = claim("one", "cameras", 2);
    matched["spec"]["devices"]["constraints"] =
        json!([{ "matchAttribute": "resource.kubernetes.io/numaNode" }]);
    let slices = vec![slice("node-a", json!([on_numa("a", 0), on_numa("b", 1)]))];
    let explanation = Question::of(slices.clone(), vec![matched], &["one"]).remove(0);
    assert_eq!(
        reasons(&explanation)[0],
        "enough devices are free, but no combination of them meets the constraints"
    );
    let claims = vec![claim("one", "cameras", 1), claim("two", "radios", 1)];
    let both = Question::of(slices.clone(), claims, &["one", "two"]);
    assert_eq!(reasons(&both[0])[0], "another claim of the pod does not fit");
    assert_eq!(
        reasons(&both[1])[0],
        "request device: no device matches DeviceClass radios"
    );
    let claims = vec![claim("one", "cameras", 2), claim("two", "cameras", 1)];
    let both = Question::of(slices, claims, &["one", "two"]);
    let together = "enough devices are free for each request, but not for all requests of the pod together";
    assert_eq!([reasons(&both[0])[0], reasons(&both[1])[0]], [together, together]);
}

#[test]
fn an_allocated_claim_binds_the_others_to_its_node() {
    let mut mine = held("one", "node-b", &["x"]);
    mine["status"]["reservedFor"][0]["uid"] = json!("uid-waiting");
    let slices = vec![
        slice("node-a", json!([camera("a")])),
        slice("node-b", json!([camera("x")])),
    ];
    let both = Question::of(slices, vec![mine, claim("two", "cameras", 1)], &["one", "two"]);
    assert_eq!(
        (both[0].step, both[0].nodes.len()),
        (ClaimStep::WaitsForBinding, 0)
    );
    assert_eq!(
        reasons(&both[1]),
        [
            "ResourceClaim shop/one of the pod is allocated on another node",
            "request device: 0 of 1 matching devices free, 1 needed (1 held)",
        ]
    );
}

#[test]
fn each_step_of_a_claim_is_recognised() {
    let slices = || vec![slice("node-a", json!([camera("a")]))];
    let step = |claims: Vec<Value>| {
        let explanation = Question::of(slices(), claims, &["one"]).remove(0);
        (explanation.step, explanation.because)
    };
    assert_eq!(step(Vec::new()).0, ClaimStep::ClaimMissing);
    let (waits, because) = step(vec![claim("one", "cameras", 1)]);
    assert_eq!(waits, ClaimStep::WaitsForScheduler);
    assert!(because.starts_with("1 of 2 nodes can serve it"), "{because}");
    assert_eq!(
        step(vec![claim("one", "none", 1)]),
        (ClaimStep::ClassMissing, "there is no DeviceClass none".to_owned())
    );
    let mut wrong = claim("one", "cameras", 1);
    wrong["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
        json!([{ "cel": { "expression": "device.attributes['drayman.dev'].model == 'x'" } }]);
    let (step_of_wrong, because) = step(vec![wrong]);
    assert_eq!(step_of_wrong, ClaimStep::ParametersInvalid);
    assert!(
        because.contains("selector #0 fails on device drayman.dev/node-a/a"),
        "{because}"
    );
    assert_eq!(
        step(vec![held("one", "node-a", &["a"])]).0,
        ClaimStep::WaitsForReservation
    );
    let mut deleting = claim("one", "cameras", 1);
    deleting["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert_eq!(step(vec![deleting]).0, ClaimStep::Deleting);
}

/// The explanation of the only claim, a camera, of a pod beside a free camera on `node-a`.
fn of_a_free_camera(change: impl FnOnce(&mut Question)) -> ClaimExplanation {
    let mut question = Question {
        slices: vec![slice("node-a", json!([camera("a")]))],
        classes: vec![class("cameras")],
        claims: vec![claim("one", "cameras", 1)],
        pod: pod("waiting", &["one"]),
        ..Question::default()
    };
    change(&mut question);
    question.ask().remove(0)
}

#[test]
fn a_selector_beyond_our_limits_is_left_to_the_scheduler() {
    let explanation = of_a_free_camera(|question| {
        question.classes[0]["spec"]["selectors"][0]["cel"]["expression"] =
            json!("[1].all(x, [2].all(y, x < y))");
    });
    assert_eq!(explanation.step, ClaimStep::WaitsForScheduler);
    let reason = "drayman cannot evaluate selector #0 of DeviceClass cameras: it has more than one of all";
    let because = format!("the suitable nodes are unknown, and the scheduler decides: {reason}");
    assert!(explanation.because.starts_with(&because), "{explanation:?}");
    let reasons = reasons(&explanation);
    assert!(reasons[0].starts_with(reason), "{reasons:?}");
}

#[test]
fn a_selector_beyond_our_limits_may_match_a_held_device() {
    let advice = of_a_free_camera(|question| {
        question.classes[0]["spec"]["selectors"][0]["cel"]["expression"] =
            json!("[1].all(x, [2].all(y, x < y))");
        question.claims.push(held("other", "node-a", &["a"]));
    });
    let advice = advice.advice.unwrap();
    assert!(advice.starts_with("the scheduler tries again"), "{advice}");
}

#[test]
fn a_node_with_an_empty_slice_has_a_driver() {
    let explanation = of_a_free_camera(|question| question.slices = vec![slice("node-a", json!([]))]);
    assert_eq!(
        reasons(&explanation),
        [
            "request device: no device matches DeviceClass cameras",
            "no ResourceSlice is for this node: no driver runs here",
        ]
    );
    let advice = explanation.advice.unwrap();
    assert!(
        advice.starts_with("no device that the claim wants is held"),
        "{advice}"
    );
}

#[test]
fn a_claim_behind_another_one_is_not_the_drivers_fault() {
    let advice = |other: Value| {
        let explanation = of_a_free_camera(|question| {
            question.claims.push(other);
            question.pod = pod("waiting", &["one", "two"]);
        });
        explanation.advice.unwrap()
    };
    let expected = "the reasons of the nodes name the cause; if it is another claim of the pod, see what to do about that one";
    assert_eq!(advice(claim("two", "none", 1)), expected);
    let mut elsewhere = held("two", "node-gone", &["x"]);
    elsewhere["status"]["reservedFor"][0]["uid"] = json!("uid-waiting");
    assert_eq!(advice(elsewhere), expected);
}

#[test]
fn a_pod_that_was_bound_first_gets_no_allocation() {
    let explanation = of_a_free_camera(|question| question.pod["spec"]["nodeName"] = json!("node-a"));
    assert_eq!(
        (explanation.step, explanation.because.as_str()),
        (
            ClaimStep::WaitsForScheduler,
            "the pod is bound to node node-a, and the scheduler allocates only before it binds a pod"
        )
    );
    assert!(explanation.nodes.is_empty());
}

#[test]
fn a_shared_claim_names_the_only_place_for_its_pods() {
    let explanation = of_a_free_camera(|question| question.claims = vec![held("one", "node-b", &["x"])]);
    assert_eq!(explanation.step, ClaimStep::WaitsForReservation);
    assert_eq!(
        explanation.because,
        "it is allocated, and reserved for 1 other pod(s); its devices are in pool node-b, and the pod can run only on a node that reaches them"
    );
}

#[test]
fn a_pool_that_is_being_updated_is_worth_waiting_for() {
    let explanation = of_a_free_camera(|question| {
        question.slices[0]["spec"]["pool"]["resourceSliceCount"] = json!(2);
        question.claims[0]["spec"]["devices"]["requests"][0]["exactly"] =
            json!({ "deviceClassName": "cameras", "allocationMode": "All" });
    });
    assert_eq!(explanation.step, ClaimStep::WaitsForDevice);
    assert!(
        explanation.because.ends_with("is being updated"),
        "{explanation:?}"
    );
    let beside_a_free_one = of_a_free_camera(|question| {
        let mut updating = slice("node-b", json!([camera("x")]));
        updating["spec"]["pool"]["resourceSliceCount"] = json!(2);
        question.slices.push(updating);
        question.claims[0]["spec"]["devices"]["requests"][0]["exactly"] =
            json!({ "deviceClassName": "cameras", "allocationMode": "All" });
    });
    assert!(
        beside_a_free_one.because.ends_with("is being updated"),
        "{beside_a_free_one:?}"
    );
    let advice = explanation.advice.unwrap();
    assert!(
        advice.starts_with("the scheduler tries again when the pool is complete"),
        "{advice}"
    );
}

#[test]
fn claims_that_the_user_may_not_list_leave_doubt() {
    let explanation = of_a_free_camera(|question| question.of_one_namespace = true);
    assert!(
        explanation
            .because
            .starts_with("1 of 2 nodes can serve it, unless claims of other namespaces"),
        "{}",
        explanation.because
    );
}

#[test]
fn a_kubelet_that_is_too_old_for_taints_is_named() {
    let explanation = of_a_free_camera(|question| {
        question.slices = vec![slice("node-a", json!([]))];
        question.old_kubelets = vec!["node-a".to_owned()];
    });
    assert_eq!(
        reasons(&explanation)[0],
        "request device: no device matches DeviceClass cameras; kubelet is older than 1.36 there: unhealthy and shared devices are left out"
    );
    let finding = |kubelet: &str, api_server: u32, slices: &[Value]| {
        let mut node = node("node-a");
        node["status"] = json!({ "nodeInfo": {
            "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
            "kubeletVersion": kubelet, "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": "",
        } });
        let slices: Vec<ResourceSlice> = slices.iter().cloned().map(read).collect();
        let found = kubelets(DRIVER, &slices, &[read(node)], Some(api_server));
        found.map(|finding| (finding.level, finding.message))
    };
    let served = [slice("node-a", json!([camera("a")]))];
    let note = "kubelet is older than 1.36 on node-a; until it is upgraded there, companions leave out unhealthy devices instead of \
                tainting them, and companions leave out devices with shares";
    assert_eq!(
        finding("v1.35.4", 37, &served),
        Some((Level::Note, note.to_owned()))
    );
    assert_eq!(finding("v1.36.3", 37, &served), None);
    assert_eq!(
        finding("v1.33.1", 37, &served),
        None,
        "no devices at all: another finding"
    );
    assert_eq!(
        finding("v1.35.4", 35, &served),
        None,
        "the findings of the gates say it"
    );
    assert_eq!(finding("v1.35.4", 37, &[]), None);
}

#[test]
fn taint_rules_taint_the_devices_that_they_select() {
    let state = |selector: Value| {
        let mut slices: Vec<ResourceSlice> = vec![read(slice("node-a", json!([camera("a"), camera("b")])))];
        let taint = json!({ "key": "example.com/repair", "effect": "NoSchedule" });
        let rule = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule", "metadata": { "name": "repair" },
            "spec": { "deviceSelector": selector, "taint": taint },
        });
        add_taints(&mut slices, &[read(rule)]);
        let states: Vec<DeviceState> = devices(DRIVER, &slices, &[])
            .devices
            .iter()
            .map(|row| row.state)
            .collect();
        states
    };
    let (free, tainted) = (DeviceState::Free, DeviceState::Tainted);
    assert_eq!(state(json!({ "pool": "node-a", "device": "b" })), [free, tainted]);
    assert_eq!(state(json!({ "driver": DRIVER })), [tainted, tainted]);
    assert_eq!(state(json!({})), [tainted, tainted]);
    assert_eq!(
        state(json!({ "driver": "other.example", "device": "b" })),
        [free, free]
    );
    assert_eq!(state(json!({ "pool": "node-b" })), [free, free]);
    assert_eq!(state(Value::Null), [free, free]);
}

#[test]
fn a_pod_that_has_ended_needs_no_claim() {
    let explain = |claims: Vec<Value>| {
        let mut pod = pod("waiting", &["one"]);
        pod["status"]["phase"] = json!("Succeeded");
        pod["spec"]["nodeName"] = json!("node-a");
        let question = Question {
            slices: vec![slice("node-a", json!([camera("a")]))],
            classes: vec![class("cameras")],
            claims,
            pod,
            ..Question::default()
        };
        question.ask().remove(0)
    };
    let of_another = held("one", "node-a", &["a"]);
    for claims in [
        Vec::new(),
        vec![claim("one", "cameras", 1)],
        vec![of_another.clone()],
    ] {
        let explanation = explain(claims);
        assert_eq!(explanation.step, ClaimStep::NotNeeded, "{explanation:?}");
        assert_eq!(explanation.advice, None);
    }
    let mut own = of_another;
    own["status"]["reservedFor"][0]["uid"] = json!("uid-waiting");
    let explanation = explain(vec![own]);
    assert_eq!(
        (explanation.step, explanation.because.as_str()),
        (ClaimStep::InUse, "the pod has succeeded")
    );
}

#[test]
fn a_claim_of_a_template_is_found_by_the_status_of_the_pod() {
    let mut of_template = pod("waiting", &[]);
    of_template["spec"]["resourceClaims"] = json!([{ "name": "c", "resourceClaimTemplateName": "t" }]);
    let mut made = claim("made", "cameras", 1);
    made["metadata"]["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": "Pod", "name": "waiting", "uid": "uid-waiting", "controller": true }]);
    let step = |statuses: Value, made: &Value| {
        let mut pod = of_template.clone();
        pod["status"]["resourceClaimStatuses"] = statuses;
        let question = Question {
            slices: vec![slice("node-a", json!([camera("a")]))],
            classes: vec![class("cameras")],
            claims: vec![made.clone()],
            pod,
            ..Question::default()
        };
        question.ask().remove(0).step
    };
    let status = json!([{ "name": "c", "resourceClaimName": "made" }]);
    assert_eq!(step(status.clone(), &made), ClaimStep::WaitsForScheduler);
    assert_eq!(
        step(status, &claim("made", "cameras", 1)),
        ClaimStep::ClaimNotOwned
    );
    assert_eq!(step(json!([]), &made), ClaimStep::ClaimMissing);
    assert_eq!(step(json!([{ "name": "c" }]), &made), ClaimStep::NotNeeded);
}

fn messages(findings: &[DoctorFinding]) -> Vec<(Level, &str)> {
    findings
        .iter()
        .map(|finding| (finding.level, finding.message.as_str()))
        .collect()
}

fn of_classes(of: Vec<Value>, slices: Vec<Value>) -> Vec<DoctorFinding> {
    let of: Vec<DeviceClass> = of.into_iter().map(read).collect();
    let slices: Vec<ResourceSlice> = slices.into_iter().map(read).collect();
    with_selectors(|evaluate| classes(DRIVER, &of, &slices, evaluate)).unwrap()
}

#[test]
fn unmatched_classes_and_devices_are_reported() {
    let slices = || vec![slice("node-a", json!([camera("a")]))];
    let fine = of_classes(vec![class("cameras")], slices());
    assert_eq!(
        messages(&fine),
        [(Level::Fine, "1 for driver drayman.dev, all usable")]
    );
    let findings = of_classes(vec![class("cameras"), class("radios")], slices());
    assert_eq!(
        messages(&findings),
        [(
            Level::Warning,
            "DeviceClass radios matches no device of driver drayman.dev"
        )]
    );
    let findings = of_classes(Vec::new(), slices());
    assert_eq!(
        messages(&findings),
        [
            (
                Level::Warning,
                "no DeviceClass selects the devices of kind \"cameras\" in pool node-a"
            ),
            (Level::Warning, "no DeviceClass is for driver drayman.dev"),
        ]
    );
    let mut never = class("never");
    never["spec"]["selectors"][0]["cel"]["expression"] =
        json!("device.driver == \"drayman.dev\" && device.attributes[\"drayman.dev\"].kind == \"\"");
    let findings = of_classes(vec![class("cameras"), never], slices());
    assert_eq!(
        messages(&findings),
        [(
            Level::Warning,
            "DeviceClass never matches no device of driver drayman.dev"
        )]
    );
    let mut careless = class("careless");
    careless["spec"]["selectors"][0]["cel"]["expression"] =
        json!("device.attributes['other.example'].model == 'x'");
    let findings = of_classes(vec![class("cameras"), careless], slices());
    let message = &findings[0].message;
    assert!(
        message.starts_with("DeviceClass careless fails on device node-a/a: "),
        "{message}"
    );
}

#[test]
fn a_class_beyond_our_limits_is_a_note() {
    let mut complex = class("cameras");
    complex["spec"]["selectors"][0]["cel"]["expression"] = json!("[1].all(x, [2].all(y, x < y))");
    let findings = of_classes(vec![complex], vec![slice("node-a", json!([camera("a")]))]);
    let found = messages(&findings);
    let says = "drayman cannot evaluate DeviceClass cameras: it has more than one of all";
    assert!(
        matches!(found[..], [(Level::Note, message)] if message.starts_with(says)),
        "{found:?}"
    );
}

fn of_slices(all: Vec<Value>, nodes: &[&str]) -> Vec<DoctorFinding> {
    let all: Vec<ResourceSlice> = all.into_iter().map(read).collect();
    let nodes: Vec<Node> = nodes.iter().map(|name| read(node(name))).collect();
    slices(DRIVER, &all, Some(&nodes))
}

/// Checks that one finding has this level and text.
#[track_caller]
fn contains(findings: &[DoctorFinding], level: Level, text: &str) {
    let found = messages(findings);
    let says = |(of, message): &&(Level, &str)| *of == level && message.contains(text);
    assert!(found.iter().find(says).is_some(), "{text}: {found:?}");
}

#[test]
fn slices_of_a_healthy_node_are_fine() {
    let findings = of_slices(vec![slice("node-a", json!([camera("a")]))], &["node-a"]);
    assert!(
        findings.iter().all(|finding| finding.level == Level::Fine),
        "{findings:?}"
    );
    contains(&findings, Level::Fine, "1 of 1 nodes offer 1 devices");
}

#[test]
fn slices_that_the_scheduler_does_not_use_are_problems() {
    let mut incomplete = slice("node-a", json!([camera("a")]));
    incomplete["spec"]["pool"]["resourceSliceCount"] = json!(3);
    let findings = of_slices(vec![incomplete], &["node-a"]);
    contains(
        &findings,
        Level::Problem,
        "pool node-a is incomplete, with 1 of 3 slices",
    );

    let twice = slice("node-a", json!([camera("a"), camera("a")]));
    contains(
        &of_slices(vec![twice], &["node-a"]),
        Level::Problem,
        "duplicate device name a",
    );

    let mut newer = slice("node-a", json!([camera("a")]));
    newer["metadata"]["name"] = json!("newer");
    newer["spec"]["pool"]["generation"] = json!(2);
    let findings = of_slices(vec![slice("node-a", json!([])), newer], &["node-a"]);
    contains(
        &findings,
        Level::Warning,
        "pool node-a is at generation 2, and older slices remain: node-a.drayman.dev-00",
    );
}

#[test]
fn two_drivers_of_one_name_are_a_problem() {
    let mut other = slice("node-a", json!([camera("x")]));
    other["metadata"]["name"] = json!("other");
    other["spec"]["pool"]["name"] = json!("usb");
    let own = || slice("node-a", json!([camera("a")]));
    let findings = of_slices(vec![own(), other.clone()], &["node-a"]);
    contains(
        &findings,
        Level::Problem,
        "slices of node node-a are in more than one pool: node-a, usb",
    );
    other["spec"]["pool"]["name"] = json!("node-a");
    other["metadata"]["ownerReferences"] = json!([]);
    let findings = of_slices(vec![own(), other], &["node-a"]);
    contains(
        &findings,
        Level::Problem,
        "slices of node node-a have different owners: Node node-a (uid-node-a), no owner",
    );
}

#[test]
fn nodes_and_slices_must_agree() {
    let mut earlier = slice("node-a", json!([unhealthy("a")]));
    earlier["metadata"]["ownerReferences"][0]["uid"] = json!("earlier");
    let empty = slice("node-b", json!([]));
    let findings = of_slices(
        vec![earlier, empty, slice("gone", json!([camera("x")]))],
        &["node-a", "node-b", "node-c"],
    );
    contains(
        &findings,
        Level::Problem,
        "slices of node node-a belong to an earlier node",
    );
    contains(
        &findings,
        Level::Warning,
        "device node-a/a is unhealthy: unplugged",
    );
    contains(
        &findings,
        Level::Note,
        "1 of 2 nodes with a companion offer no device to claims: node-b",
    );
    contains(
        &findings,
        Level::Warning,
        "there are slices of node gone, and no such node",
    );
    contains(&findings, Level::Note, "1 of 3 nodes have no companion: node-c");
    contains(&findings, Level::Fine, "1 of 3 nodes offer 1 devices");
    contains(
        &of_slices(Vec::new(), &["node-a"]),
        Level::Problem,
        "no node offers devices",
    );
}

#[test]
fn nodes_without_a_device_are_one_finding() {
    let names = ["a", "b", "c", "d", "e", "f"];
    let empty = names.map(|name| slice(name, json!([])));
    let findings = of_slices(empty.to_vec(), &names);
    let mut found = messages(&findings);
    found.retain(|(_, message)| message.contains("offer no device to claims"));
    let message = "6 of 6 nodes with a companion offer no device to claims: a, b, c, d, e and 1 more";
    assert_eq!(found, [(Level::Warning, message)]);
}

#[test]
fn dropped_fields_show_which_gate_is_off() {
    let find = |device: Value| {
        let slices: Vec<ResourceSlice> = vec![read(slice("node-a", json!([device])))];
        dropped_fields(DRIVER, &slices)
    };
    assert_eq!(find(unhealthy("a")), []);
    assert_eq!(find(shared("a", "2")), []);
    let mut untainted = unhealthy("a");
    untainted.as_object_mut().unwrap().remove("taints");
    contains(
        &find(untainted),
        Level::Problem,
        "have no taint, so that the scheduler allocates them: node-a/a;",
    );
    let mut exclusive = shared("a", "2");
    exclusive
        .as_object_mut()
        .unwrap()
        .remove("allowMultipleAllocations");
    contains(&find(exclusive), Level::Problem, "DRAConsumableCapacity is off");
}

#[test]
fn a_gate_that_is_off_is_expected_below_its_release() {
    let level = |answer: GateState, minor| gate(GATES[0], &answer, Some(minor)).level;
    assert_eq!(level(GateState::On, 37), Level::Fine);
    assert_eq!(level(GateState::Off, 37), Level::Warning);
    assert_eq!(level(GateState::Off, 35), Level::Note);
    assert_eq!(level(GateState::NotAsked("no right".into()), 37), Level::Note);
    assert_eq!(
        level(GateState::On, 35),
        Level::Note,
        "companions do not use it there"
    );
    let why = |answer: GateState, minor| why_unused(GATES[0], &answer, Some(minor)).unwrap_or_default();
    assert!(why(GateState::Off, 37).starts_with("the gate DRADeviceTaints is off: companions"));
    for answer in [GateState::On, GateState::Silent] {
        assert_eq!(why(answer, 36), "");
    }
    for answer in [GateState::On, GateState::Off] {
        assert!(why(answer, 35).starts_with("DRADeviceTaints is used from Kubernetes 1.36 on: "));
    }
}
