//! Checks gates, DeviceClasses, ResourceSlices and nodes; each finding comes with its fix.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceSlice};
use kube::ResourceExt as _;

use super::devices::node_uid;
use super::{SHARES, UNHEALTHY, kind, text};
use crate::cli::diagnose::doctor::{DoctorFinding, some};
use crate::cli::diagnose::gates::GateState;
use crate::cli::diagnose::nodes::{name_of, without_companion, without_devices, without_nodes};
use crate::core::allocation::inventory::Match;
use crate::core::prepare::claims_api::{FIRST_STRUCTURED_MINOR, is_too_early, minor_of};
use crate::core::scheduler::{Evaluate, PoolState, all_pools};

/// First minor version of Kubernetes 1 with these gates on by default. Companions use them from this version on only
/// ([`Features::of_minor`](crate::core::slices::Features::of_minor)).
pub(super) const ON_SINCE: u32 = 36;

/// A feature gate of the API server, scheduler and controller manager.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// Name of the gate.
    pub name: &'static str,
    /// The effect on companions if the gate is off.
    pub without: &'static str,
}

/// Why companions do without a gate: the version is too early, or the API server says that the gate is off.
pub fn why_unused(gate: Gate, answer: &GateState, minor: Option<u32>) -> Option<String> {
    if is_early(minor) {
        return Some(too_early(gate));
    }
    (*answer == GateState::Off).then(|| format!("the gate {} is off: {}", gate.name, gate.without))
}

fn too_early(Gate { name, without }: Gate) -> String {
    format!("{name} is used from Kubernetes 1.{ON_SINCE} on: {without}")
}

fn is_early(minor: Option<u32>) -> bool {
    minor.is_some_and(|minor| minor < ON_SINCE)
}

/// The nodes with slices of `driver` whose companions do without the gates because of kubelet: they follow the older of API server and
/// kubelet. Where kubelet is too old for claims, [`offers`] says so.
pub fn old_kubelets(driver: &str, slices: &[ResourceSlice], nodes: &[Node]) -> Vec<String> {
    let ours = slices.iter().filter(|slice| slice.spec.driver == driver);
    let served: BTreeSet<&str> = ours.filter_map(|slice| slice.spec.node_name.as_deref()).collect();
    let is_old = |node: &&Node| {
        let minor = kubelet_minor(node);
        served.contains(name_of(node)) && is_early(minor) && !is_too_early(minor)
    };
    nodes
        .iter()
        .filter(is_old)
        .map(|node| name_of(node).to_owned())
        .collect()
}

fn kubelet_minor(node: &Node) -> Option<u32> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    minor_of(&info.kubelet_version)
}

/// Reports nodes with slices of `driver` whose kubelet is too old for the gates, unless the API server is, too.
pub fn kubelets(
    driver: &str,
    slices: &[ResourceSlice],
    nodes: &[Node],
    api_server: Option<u32>,
) -> Option<DoctorFinding> {
    let old = old_kubelets(driver, slices, nodes);
    if old.is_empty() || is_early(api_server) {
        return None;
    }
    let [taints, shares] = GATES.map(|gate| gate.without);
    let message = format!(
        "kubelet is older than 1.{ON_SINCE} on {}; until it is upgraded there, {taints}, and {shares}",
        some(&old)
    );
    Some(DoctorFinding::note("gates", message))
}

/// The gates that companions use.
pub const GATES: [Gate; 2] = [
    Gate {
        name: "DRADeviceTaints",
        without: "companions leave out unhealthy devices instead of tainting them",
    },
    Gate {
        name: "DRAConsumableCapacity",
        without: "companions leave out devices with shares",
    },
];

/// Checks the API server's answer about a gate.
pub fn gate(gate: Gate, answer: &GateState, minor: Option<u32>) -> DoctorFinding {
    let (check, Gate { name, without }) = ("gates", gate);
    if is_early(minor) {
        return DoctorFinding::note(check, too_early(gate));
    }
    match answer {
        GateState::On => DoctorFinding::fine(check, format!("kube-apiserver has {name} on")),
        GateState::Off => DoctorFinding::warning(
            check,
            format!("kube-apiserver has {name} off: {without}"),
            format!(
                "start kube-apiserver, kube-scheduler and kube-controller-manager with --feature-gates={name}=true; from 1.{ON_SINCE} on it is \
                 on by default"
            ),
        ),
        GateState::Silent => DoctorFinding::note(check, format!("kube-apiserver does not report {name}")),
        GateState::NotAsked(why) => DoctorFinding::note(
            check,
            format!(
                "the state of {name} in kube-apiserver is unknown (it needs the verb get on the path /metrics): {why}; by default it is on \
                 from 1.{ON_SINCE} on, and without it {without}"
            ),
        ),
    }
}

/// Reports devices whose fields the API server has dropped.
pub fn dropped_fields(driver: &str, slices: &[ResourceSlice]) -> Vec<DoctorFinding> {
    let check = "gates";
    let mut findings = Vec::new();
    let names = |is_wrong: fn(&Device) -> bool| -> Vec<String> {
        let ours = devices(driver, slices).filter(|(_, device)| is_wrong(device));
        ours.map(|(slice, device)| device_name(slice, device)).collect()
    };
    let untainted = names(|device| {
        let mut taints = device.taints.iter().flatten();
        text(device, UNHEALTHY).is_some() && !taints.any(|taint| taint.key == UNHEALTHY)
    });
    if !untainted.is_empty() {
        findings.push(DoctorFinding::problem(
            check,
            format!(
                "unhealthy devices have no taint, so that the scheduler allocates them: {}; the API server drops taints, so the gate \
                 DRADeviceTaints is off",
                some(&untainted)
            ),
            "enable the gate in every API server; running companions then write their slices again",
        ));
    }
    let unshared = names(|device| {
        let capacity = device.capacity.as_ref();
        capacity.is_some_and(|all| all.contains_key(SHARES))
            && device.allow_multiple_allocations != Some(true)
    });
    if !unshared.is_empty() {
        findings.push(DoctorFinding::problem(
            check,
            format!(
                "devices with shares go to one claim only: {}; the API server drops allowMultipleAllocations, so the gate \
                 DRAConsumableCapacity is off",
                some(&unshared)
            ),
            "enable the gate in every API server; running companions then write their slices again",
        ));
    }
    findings
}

/// The devices of a driver in the newest generation of their pools.
fn devices<'a>(
    driver: &str,
    slices: &'a [ResourceSlice],
) -> impl Iterator<Item = (&'a ResourceSlice, &'a Device)> {
    let pools = all_pools(slices)
        .into_iter()
        .filter(move |pool| pool.driver == driver);
    let slices: Vec<&ResourceSlice> = pools.flat_map(|pool| pool.slices).collect();
    slices.into_iter().flat_map(|slice| {
        let devices = slice.spec.devices.iter().flatten();
        devices.map(move |device| (slice, device))
    })
}

fn device_name(slice: &ResourceSlice, device: &Device) -> String {
    let node = slice.spec.node_name.as_ref().unwrap_or(&slice.spec.pool.name);
    format!("{node}/{}", device.name)
}

/// Checks which classes select the devices of `driver`: classes that select nothing, and devices that no class selects.
pub fn classes(
    driver: &str,
    classes: &[DeviceClass],
    slices: &[ResourceSlice],
    evaluate: &mut Evaluate<'_>,
) -> Vec<DoctorFinding> {
    let check = "classes";
    let all: Vec<_> = devices(driver, slices).collect();
    let mut selected = vec![false; all.len()];
    let mut findings = Vec::new();
    let mut ours = 0;
    for class in classes {
        let name = class.name_any();
        let selectors = class.spec.selectors.iter().flatten();
        let expressions: Vec<&str> = selectors
            .filter_map(|selector| selector.cel.as_ref())
            .map(|cel| cel.expression.as_str())
            .collect();
        let names_driver = expressions.iter().any(|expression| {
            [format!("\"{driver}\""), format!("'{driver}'")]
                .iter()
                .any(|quoted| expression.contains(quoted))
        });
        let may_be_ours = names_driver || !expressions.iter().any(|all| all.contains("device.driver"));
        let (mut matches, mut failure, mut not_evaluated) = (0, None, None);
        for ((slice, device), selected) in all.iter().zip(&mut selected) {
            let mut results = expressions
                .iter()
                .map(|expression| evaluate(expression, driver, device));
            match results.find(|result| *result != Ok(Match::Yes)) {
                None => {
                    matches += 1;
                    *selected = true;
                }
                Some(Ok(Match::Failed(error))) => {
                    failure.get_or_insert_with(|| (device_name(slice, device), error));
                }
                // The class may select it.
                Some(Err(error)) if may_be_ours => {
                    *selected = true;
                    not_evaluated.get_or_insert(error);
                }
                Some(_) => {}
            }
        }
        ours += usize::from(names_driver || matches > 0 || not_evaluated.is_some());
        if let Some((device, error)) = failure {
            findings.push(DoctorFinding::warning(
                check,
                format!(
                    "DeviceClass {name} fails on device {device}: {error}; the scheduler gives up on a claim when it meets such a device"
                ),
                "begin the selector with the driver (device.driver == \"...\" &&), and test optional attributes with has() or in",
            ));
        } else if let Some(error) = not_evaluated {
            findings.push(DoctorFinding::note(
                check,
                format!("drayman cannot evaluate DeviceClass {name}: {error}; the scheduler can"),
            ));
        } else if names_driver && matches == 0 {
            findings.push(DoctorFinding::warning(
                check,
                format!("DeviceClass {name} matches no device of driver {driver}"),
                "check the kinds of the nodes' configuration against the selector, and run `drayman node discover` on a node; an event \
                 DevicesNotPublished on the Node names devices that this version of Kubernetes cannot share",
            ));
        }
    }
    let mut unselected: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for ((slice, device), selected) in all.iter().zip(&selected) {
        if !selected {
            unselected
                .entry(kind(device))
                .or_default()
                .insert(&slice.spec.pool.name);
        }
    }
    for (kind, pools) in unselected {
        findings.push(DoctorFinding::warning(
            check,
            format!("no DeviceClass selects the devices of kind {kind:?} in pool {}", some(&pools)),
            "create one, in the chart by an entry of classes (docs/operator/devices.md); until then no claim can ask for them",
        ));
    }
    if ours == 0 && all.is_empty() {
        findings.push(DoctorFinding::note(
            check,
            format!("no DeviceClass is for driver {driver}, and no node offers devices to claims; extended resources need neither"),
        ));
    } else if ours == 0 {
        findings.push(DoctorFinding::warning(
            check,
            format!("no DeviceClass is for driver {driver}"),
            "create one; until then no claim can ask for a device",
        ));
    } else if findings.is_empty() {
        findings.push(DoctorFinding::fine(
            check,
            format!("{ours} for driver {driver}, all usable"),
        ));
    }
    findings
}

/// Checks the slices of `driver` against each other and, if they are known, against the cluster's nodes.
pub fn slices(driver: &str, slices: &[ResourceSlice], nodes: Option<&[Node]>) -> Vec<DoctorFinding> {
    let ours: Vec<&ResourceSlice> = slices
        .iter()
        .filter(|slice| slice.spec.driver == driver)
        .collect();
    let mut findings = pools(driver, slices, &ours);
    if let Some(nodes) = nodes {
        findings.extend(owners(driver, &ours, nodes));
        findings.extend(offers(driver, slices, nodes));
    }
    findings
}

/// Reports pools that the scheduler does not use, and slices of earlier generations.
fn pools(driver: &str, slices: &[ResourceSlice], ours: &[&ResourceSlice]) -> Vec<DoctorFinding> {
    let check = "slices";
    let mut findings = Vec::new();
    let all = all_pools(slices);
    for pool in all.iter().filter(|pool| pool.driver == driver) {
        let name = pool.name;
        if pool.state != PoolState::Complete {
            findings.push(DoctorFinding::problem(
                check,
                format!("pool {name} is {}: the scheduler allocates none of its devices", pool.state),
                "if this persists, check the log of the companion there, and whether another program writes or deletes its ResourceSlices",
            ));
        }
        let of_pool = ours.iter().filter(|slice| slice.spec.pool.name == name);
        let older: Vec<String> = of_pool
            .filter(|slice| slice.spec.pool.generation < pool.generation)
            .map(|slice| slice.name_any())
            .collect();
        if !older.is_empty() {
            findings.push(DoctorFinding::warning(
                check,
                format!(
                    "pool {name} is at generation {}, and older slices remain: {}",
                    pool.generation,
                    some(&older)
                ),
                "if this persists, check that the companion there runs: it deletes older slices; without one, kubectl delete resourceslice",
            ));
        }
    }
    if findings.is_empty() && !ours.is_empty() {
        findings.push(DoctorFinding::fine(
            check,
            format!("{} of driver {driver}, all pools complete", ours.len()),
        ));
    }
    findings
}

/// Reports nodes whose slices come from two programs or from an earlier node.
fn owners(driver: &str, ours: &[&ResourceSlice], nodes: &[Node]) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    let mut by_node: BTreeMap<&str, (BTreeSet<&str>, BTreeSet<String>)> = BTreeMap::new();
    for slice in ours {
        if let Some(node) = &slice.spec.node_name {
            let (pools, owners) = by_node.entry(node).or_default();
            pools.insert(&slice.spec.pool.name);
            let owner = slice
                .owner_references()
                .iter()
                .find(|owner| owner.controller == Some(true));
            owners.insert(owner.map_or_else(
                || "no owner".to_owned(),
                |owner| format!("{} {} ({})", owner.kind, owner.name, owner.uid),
            ));
        }
    }
    for (node, (pools, owners)) in &by_node {
        let fix = format!(
            "only one driver may have the name {driver} on a node: give the other another name (--driver-name), and delete its ResourceSlices"
        );
        if pools.len() > 1 {
            let message = format!("slices of node {node} are in more than one pool: {}", some(pools));
            findings.push(DoctorFinding::problem("driver name", message, fix));
        } else if owners.len() > 1 {
            let message = format!("slices of node {node} have different owners: {}", some(owners));
            findings.push(DoctorFinding::problem("driver name", message, fix));
        }
    }
    let uids = nodes
        .iter()
        .map(|node| (name_of(node), node.uid().unwrap_or_default()));
    let uids: BTreeMap<&str, String> = uids.collect();
    let of_earlier_node = |slice: &&ResourceSlice| {
        let (name, uid) = (slice.spec.node_name.as_deref()?, node_uid(slice));
        let is_earlier = !uid.is_empty() && uids.get(name).is_some_and(|current| *current != uid);
        is_earlier.then(|| name.to_owned())
    };
    let earlier: BTreeSet<String> = ours.iter().filter_map(of_earlier_node).collect();
    for name in earlier {
        findings.push(DoctorFinding::problem(
            "nodes",
            format!("slices of node {name} belong to an earlier node of that name"),
            "restart the companion there: it has not noticed that the Node was recreated",
        ));
    }
    findings
}

/// Reports which nodes offer devices, and unhealthy devices.
fn offers(driver: &str, slices: &[ResourceSlice], nodes: &[Node]) -> Vec<DoctorFinding> {
    let check = "nodes";
    let mut findings = Vec::new();
    let names: BTreeSet<&str> = nodes.iter().map(name_of).collect();
    let mut offered: BTreeMap<&str, usize> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.spec.driver == driver) {
        if let Some(node) = slice.spec.node_name.as_deref() {
            offered.entry(node).or_default();
        }
    }
    for (slice, device) in devices(driver, slices) {
        if let Some(number) = slice
            .spec
            .node_name
            .as_deref()
            .and_then(|node| offered.get_mut(node))
        {
            *number += 1;
        }
        if let Some(cause) = text(device, UNHEALTHY) {
            findings.push(DoctorFinding::warning(
                check,
                format!("device {} is unhealthy: {cause}", device_name(slice, device)),
                "repair or reconnect the device; it is allocated again once it is healthy",
            ));
        }
    }
    for node in offered.keys() {
        if !names.contains(node) {
            findings.push(DoctorFinding::warning(
                check,
                format!("there are slices of node {node}, and no such node"),
                format!("if the node is gone for good: kubectl delete resourceslice --field-selector spec.nodeName={node},spec.driver={driver}"),
            ));
        }
    }
    let early = nodes.iter().filter(|node| is_too_early(kubelet_minor(node)));
    let early: Vec<&str> = early.map(name_of).collect();
    if !early.is_empty() {
        findings.push(DoctorFinding::note(
            check,
            format!(
                "kubelet is older than 1.{FIRST_STRUCTURED_MINOR} on {}, and would start pods without the devices of their claims: \
                 companions offer none there",
                some(&early)
            ),
        ));
    }
    if offered.is_empty() {
        findings.push(without_nodes(driver));
    } else {
        let existing = offered.iter().filter(|(node, _)| names.contains(*node));
        let (offering, empty): (Vec<_>, Vec<_>) = existing.partition(|(_, number)| **number > 0);
        let (with, all) = (offering.len(), nodes.len());
        let number: usize = offering.iter().map(|(_, number)| **number).sum();
        findings.push(DoctorFinding::fine(
            check,
            format!("{with} of {all} nodes offer {number} devices"),
        ));
        let empty: Vec<&str> = empty.iter().map(|(node, _)| **node).collect();
        let fix = "`drayman node discover` on such a node shows why each candidate is excluded, and an event DevicesNotPublished on the \
                   Node which devices this version of Kubernetes cannot share; if all its kinds are extended resources, ignore this";
        findings.extend(without_devices("offer no device to claims", &empty, with, fix));
    }
    findings.extend(without_companion(&offered.keys().copied().collect(), nodes));
    findings
}
