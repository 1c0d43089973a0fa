//! Explains the allocation step of claims that the scheduler allocates, what blocks them, and the fix.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, PodResourceClaim};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kube::ResourceExt as _;

use super::devices::pods;
use super::doctor::ON_SINCE;
use super::filters::rejection;
use crate::cli::diagnose::explain::{
    ClaimExplanation, ClaimStep, DeviceExplanation, NodeExplanation, claim_missing, claim_not_owned,
    claim_of, deleting, ended, not_needed, reserved,
};
use crate::cli::diagnose::qualified_name;
use crate::cli::objects::PartialPod;
use crate::core::claims::Resolved;
use crate::core::scheduler::{
    AllocationFailure, Availability, ClusterState, DeviceId, Evaluate, NodeReport, PoolIndex, RequestReport,
    allocated_devices, node_matches, report,
};

/// Number of pods that one claim serves, at most (`ResourceClaimReservedForMaxSize`).
const RESERVED_FOR_MAX: usize = 256;

/// Finds the claim for an entry of `pod`, as the scheduler does.
pub(crate) fn find<'a>(
    pod: &PartialPod,
    entry: &PodResourceClaim,
    claims: &'a [ResourceClaim],
) -> Resolved<&'a ResourceClaim> {
    let by_name = |name: &str| {
        claims.iter().find(|claim| {
            claim.metadata.namespace == pod.metadata.namespace && claim.metadata.name.as_deref() == Some(name)
        })
    };
    if let Some(name) = &entry.resource_claim_name {
        return by_name(name).map_or(Resolved::Awaited, Resolved::Claim);
    }
    let statuses = pod
        .status
        .iter()
        .flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let mut of_entry = statuses.filter(|status| status.name == entry.name);
    let Some(status) = of_entry.next() else {
        return Resolved::Awaited;
    };
    let Some(name) = &status.resource_claim_name else {
        return Resolved::NotNeeded;
    };
    let Some(claim) = by_name(name) else {
        return Resolved::Awaited;
    };
    let mut owners = claim.owner_references().iter();
    let is_owner =
        owners.any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref());
    if is_owner {
        Resolved::Claim(claim)
    } else {
        Resolved::NotOwned(claim)
    }
}

/// The state of each node for the unallocated claims of a pod; an error if the node is out of the question.
pub type Nodes = BTreeMap<String, Result<NodeReport, String>>;

/// Evaluates the nodes for the claims of a pod: those that wait for allocation together, beside those that have it. If `pod` is given,
/// nodes that it cannot use are out of the question.
pub fn evaluate_nodes(
    cluster: ClusterState<'_>,
    nodes: &[Node],
    pod: Option<&PartialPod>,
    claims: &[&ResourceClaim],
    evaluate: &mut Evaluate<'_>,
) -> Nodes {
    let with = |matches: fn(&ResourceClaim) -> bool| -> Vec<&ResourceClaim> {
        claims.iter().copied().filter(|claim| matches(claim)).collect()
    };
    let (allocated, waiting) = (with(is_allocated), with(is_waiting));
    let pools = PoolIndex::new(cluster.slices);
    let mut evaluated = Nodes::new();
    for node in nodes {
        let elsewhere = || {
            let claim = allocated.iter().find(|claim| {
                let status = claim.status.as_ref();
                let allocation = status.and_then(|status| status.allocation.as_ref());
                let selector = allocation.and_then(|allocation| allocation.node_selector.as_ref());
                selector.is_some_and(|selector| node_matches(selector, node) != Ok(true))
            })?;
            let claim = qualified_name(*claim);
            Some(format!(
                "ResourceClaim {claim} of the pod is allocated on another node"
            ))
        };
        let result = match pod.and_then(|pod| rejection(pod, node)).or_else(elsewhere) {
            Some(reason) => Err(reason),
            None => report(cluster, &pools, node, &waiting, evaluate).map_err(|error| error.to_string()),
        };
        evaluated.insert(node.name_any(), result);
    }
    evaluated
}

/// Input to the explanation of one claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StructuredExplainInput<'a> {
    pub driver: &'a str,
    /// Why companions do without gates.
    pub unused_gates: &'a [String],
    /// Nodes whose companions do without the gates, because their kubelet is too old.
    pub old_kubelets: &'a [String],
    /// Whether only the claims of one namespace could be read, so that devices of others appear free.
    pub of_one_namespace: bool,
    /// The pod, if the question concerns one.
    pub pod: Option<&'a PartialPod>,
    /// The pod's entry in `spec.resourceClaims`.
    pub entry: Option<&'a PodResourceClaim>,
    pub found: Resolved<&'a ResourceClaim>,
    /// Index of the claim among the unallocated ones of the pod.
    pub index: usize,
    /// All classes, if they can be read.
    pub classes: Option<&'a [DeviceClass]>,
    /// The state of the nodes; absent if slices or classes cannot be read.
    pub nodes: Option<&'a Nodes>,
}

/// Explains one claim.
pub(crate) fn explain(input: &StructuredExplainInput<'_>) -> ClaimExplanation {
    let claim = claim_of(input.found);
    let (step, because, advice) = current_step(input);
    let is_bound = input.pod.and_then(PartialPod::node_name).is_some();
    let waits = matches!(step, ClaimStep::WaitsForDevice | ClaimStep::WaitsForScheduler) && !is_bound;
    let nodes = input.nodes.into_iter().flatten().filter(|_| waits);
    let of_kubelet = |node: &String| {
        if input.old_kubelets.contains(node) {
            format!("; kubelet is older than 1.{ON_SINCE} there: unhealthy and shared devices are left out")
        } else {
            String::new()
        }
    };
    let fit = |(node, report): (&String, &Result<NodeReport, String>)| NodeExplanation {
        node: node.clone(),
        reason: match report {
            Ok(report) => reason(report, input.index).map(|reason| reason + &of_kubelet(node)),
            Err(error) => Some(error.clone()),
        },
    };
    let mut drivers = BTreeSet::new();
    let mut devices = Vec::new();
    for (node, report) in nodes.clone() {
        for request in report.iter().flat_map(|report| &report.requests) {
            if request.claim != input.index {
                continue;
            }
            for (id, state) in &request.matching {
                drivers.insert(id.driver.as_str());
                devices.push(DeviceExplanation {
                    node: node.clone(),
                    request: request.request.clone(),
                    device: device_name(id, input.driver),
                    reason: unavailable(state),
                });
            }
        }
    }
    if let Some(claim) = claim {
        drivers.extend(allocated_devices::results(claim).map(|result| result.driver.as_str()));
    }
    let drivers: Vec<&str> = drivers.into_iter().collect();
    ClaimExplanation {
        entry: input.entry.map(|entry| entry.name.clone()),
        claim: claim.map(qualified_name),
        class: claim.map(classes_of).map(|classes| classes.join(", ")),
        driver: Some(drivers.join(", ")).filter(|drivers| !drivers.is_empty()),
        wants: claim.map(wants).filter(|wants| !wants.is_empty()),
        step,
        because,
        advice: Some(advice).filter(|advice| !advice.is_empty()),
        nodes: nodes.map(fit).collect(),
        devices,
    }
}

fn device_name(id: &DeviceId, driver: &str) -> String {
    if id.driver == driver {
        id.device.clone()
    } else {
        id.to_string()
    }
}

fn is_allocated(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .is_some_and(|status| status.allocation.is_some())
}

/// Whether the scheduler has yet to allocate the claim.
pub fn is_waiting(claim: &ResourceClaim) -> bool {
    !is_allocated(claim) && claim.metadata.deletion_timestamp.is_none()
}

/// A request or subrequest: its name, class, allocation mode and count.
fn requests(claim: &ResourceClaim) -> Vec<(String, &str, Option<&str>, Option<i64>)> {
    let devices = claim.spec.devices.iter();
    let mut all = Vec::new();
    for request in devices.flat_map(|devices| devices.requests.iter().flatten()) {
        if let Some(exactly) = &request.exactly {
            let (class, mode) = (
                exactly.device_class_name.as_str(),
                exactly.allocation_mode.as_deref(),
            );
            all.push((request.name.clone(), class, mode, exactly.count));
        }
        for sub in request.first_available.iter().flatten() {
            let (class, mode) = (sub.device_class_name.as_str(), sub.allocation_mode.as_deref());
            all.push((format!("{}/{}", request.name, sub.name), class, mode, sub.count));
        }
    }
    all
}

fn classes_of(claim: &ResourceClaim) -> Vec<String> {
    let classes: BTreeSet<String> = requests(claim)
        .into_iter()
        .map(|(_, class, ..)| class.to_owned())
        .collect();
    classes.into_iter().collect()
}

fn wants(claim: &ResourceClaim) -> String {
    let mut parts: Vec<String> = requests(claim)
        .iter()
        .map(|(name, class, mode, count)| match mode {
            Some("All") => format!("{name}: all of class {class}"),
            _ => format!("{name}: {} of class {class}", count.unwrap_or(1)),
        })
        .collect();
    let devices = claim.spec.devices.iter();
    for constraint in devices.flat_map(|devices| devices.constraints.iter().flatten()) {
        if let Some(name) = &constraint.match_attribute {
            parts.push(format!("with an equal {name}"));
        }
        if let Some(name) = &constraint.distinct_attribute {
            parts.push(format!("with distinct {name}"));
        }
    }
    parts.join(", ")
}

/// Returns the step, its cause and a suggested fix.
fn current_step(input: &StructuredExplainInput<'_>) -> (ClaimStep, String, String) {
    let claim = match input.found {
        Resolved::NotNeeded => return not_needed(),
        Resolved::Awaited => {
            let entry = input.entry;
            let missing = || {
                claim_missing(
                    entry.and_then(|entry| entry.resource_claim_name.as_deref()),
                    entry.and_then(|entry| entry.resource_claim_template_name.as_deref()),
                )
            };
            return ended(input.pod, &[]).unwrap_or_else(missing);
        }
        Resolved::NotOwned(claim) => return claim_not_owned(&qualified_name(claim)),
        Resolved::Claim(claim) => claim,
    };
    if claim.metadata.deletion_timestamp.is_some() {
        let finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
        return deleting(&pods(claim), &finalizers);
    }
    if let Some(ended) = ended(input.pod, &users(claim)) {
        return ended;
    }
    if is_allocated(claim) {
        let (step, because, advice) = reserved(&users(claim), RESERVED_FOR_MAX, input.pod);
        let status = claim.status.as_ref();
        let allocation = status.and_then(|status| status.allocation.as_ref());
        let is_on_some_nodes = allocation.is_some_and(|allocation| allocation.node_selector.is_some());
        if step == ClaimStep::WaitsForReservation && advice.is_empty() && is_on_some_nodes {
            let pools: BTreeSet<&str> = allocated_devices::results(claim)
                .map(|result| result.pool.as_str())
                .collect();
            let pools = pools.into_iter().collect::<Vec<_>>().join(", ");
            return (
                step,
                format!(
                    "{because}; its devices are in pool {pools}, and the pod can run only on a node that reaches them"
                ),
                "if this persists, the node does not meet the pod's other requirements: kubectl describe pod"
                    .into(),
            );
        }
        return (step, because, advice);
    }
    if let Some(classes) = input.classes {
        let exists = |name: &String| {
            classes
                .iter()
                .any(|class| class.metadata.name.as_ref() == Some(name))
        };
        if let Some(missing) = classes_of(claim).into_iter().find(|name| !exists(name)) {
            return (
                ClaimStep::ClassMissing,
                format!("there is no DeviceClass {missing}"),
                "create it, or recreate the claim with an existing class: kubectl get deviceclasses".into(),
            );
        }
    }
    waiting(input)
}

/// Uids of the pods that a claim is reserved for.
fn users(claim: &ResourceClaim) -> Vec<&str> {
    let status = claim.status.iter();
    let users = status.flat_map(|status| status.reserved_for.iter().flatten());
    users.map(|user| user.uid.as_str()).collect()
}

fn waiting(input: &StructuredExplainInput<'_>) -> (ClaimStep, String, String) {
    if let Some(node) = input.pod.and_then(PartialPod::node_name) {
        return (
            ClaimStep::WaitsForScheduler,
            format!("the pod is bound to node {node}, and the scheduler allocates only before it binds a pod"),
            "create the pod without spec.nodeName, and select the node by a nodeSelector; if it was not set, the claim has been replaced: \
             delete the pod"
                .into(),
        );
    }
    let Some(nodes) = input.nodes else {
        return (
            ClaimStep::WaitsForScheduler,
            "it is not allocated yet, and the suitable nodes are unknown".into(),
            "with the right to list resourceslices and deviceclasses, this command evaluates the nodes; see also the pod's events: \
             kubectl describe pod"
                .into(),
        );
    };
    let outcomes = || nodes.values().flatten().map(|report| &report.outcome);
    let failure = |is: fn(&AllocationFailure) -> bool| {
        let mut failures = outcomes().filter_map(|outcome| outcome.as_ref().err());
        failures.find(|failure| is(failure))
    };
    if let Some(error) = failure(|failure| matches!(failure, AllocationFailure::Invalid(_))) {
        return (
            ClaimStep::ParametersInvalid,
            format!("the scheduler gives up: {error}"),
            "correct the class, or create the claim and its pod again, since a claim cannot be changed; in a selector, has(...) checks an \
             attribute that some devices lack"
                .into(),
        );
    }
    if let Some(error) = failure(|failure| matches!(failure, AllocationFailure::PoolUpdating(_))) {
        return (
            ClaimStep::WaitsForDevice,
            format!("the scheduler allocates on no node for now: {error}"),
            "the scheduler tries again when the pool is complete; if this persists, see the log of that driver (`drayman doctor`)"
                .into(),
        );
    }
    let (total, able) = (nodes.len(), outcomes().filter(|outcome| outcome.is_ok()).count());
    if able == 0
        && let Some(error) = failure(|failure| matches!(failure, AllocationFailure::NotEvaluated(_)))
    {
        return (
            ClaimStep::WaitsForScheduler,
            format!("the suitable nodes are unknown, and the scheduler decides: {error}"),
            if input.pod.is_some() {
                "the API server accepts the selector, so it needs no change; the pod's events say why the pod waits: kubectl describe pod"
            } else {
                "the API server accepts the selector, so it needs no change; the claim is allocated when a pod needs it"
            }
            .into(),
        );
    }
    if able == 0 {
        return no_node(input, nodes);
    }
    let doubt = if input.of_one_namespace {
        ", unless claims of other namespaces, which you may not list, hold the devices"
    } else {
        ""
    };
    if input.pod.is_none() {
        return (
            ClaimStep::WaitsForScheduler,
            format!("{able} of {total} nodes can serve it{doubt}; it is allocated when a pod needs it"),
            "nothing is wrong: create a pod that names it".into(),
        );
    }
    (
        ClaimStep::WaitsForScheduler,
        format!("{able} of {total} nodes can serve it{doubt}; the scheduler has not allocated it yet"),
        "if this persists, other requirements of the pod are not met there: kubectl describe pod".into(),
    )
}

/// The step of a claim that no node can serve.
fn no_node(input: &StructuredExplainInput<'_>, nodes: &Nodes) -> (ClaimStep, String, String) {
    let total = nodes.len();
    let after = |why: &String| format!("; {why}");
    let gates: String = input.unused_gates.iter().map(after).collect();
    let requests = || nodes.values().flatten().flat_map(|report| &report.requests);
    // A selector that drayman cannot evaluate may match a device in use.
    let has_unevaluated = requests().any(|request| request.error.is_some());
    let mut matching = requests().flat_map(|request| &request.matching);
    let (of_excluded, place) = if nodes.values().any(Result::is_err) {
        let reasons = "the pod cannot use some of these nodes, for the reasons shown; ";
        (reasons, "on the others")
    } else {
        ("", "on any of these nodes")
    };
    let fix = if has_unevaluated || matching.any(|(_, state)| matches!(state, Availability::Held(_))) {
        "the scheduler tries again as soon as a device is freed, added or repaired; to speed this up, delete a pod that holds \
         one (drayman devices), add a node, or request less"
            .to_owned()
    } else if total > 0 && nodes.values().all(Result::is_err) {
        "the reasons of the nodes name the cause; if it is another claim of the pod, see what to do about that one".to_owned()
    } else if nodes.values().flatten().all(NodeReport::is_without_driver) {
        format!(
            "{of_excluded}no driver offers devices {place}: `drayman doctor`, with the rights of an operator, names the cause"
        )
    } else {
        format!(
            "{of_excluded}no device that the claim wants is held {place}, so waiting may not help: compare the claim with the devices \
             (drayman devices -o wide), and create it and its pod again with another request; the scheduler tries again as soon as a \
             device is added or repaired"
        )
    };
    (
        ClaimStep::WaitsForDevice,
        format!("none of {total} nodes can serve it now{gates}"),
        fix,
    )
}

/// Why a node cannot serve a claim; `None` if it can.
fn reason(report: &NodeReport, claim: usize) -> Option<String> {
    match &report.outcome {
        Ok(()) => return None,
        Err(AllocationFailure::DoesNotFit) => {}
        Err(refusal) => return Some(refusal.to_string()),
    }
    if report.is_without_driver() {
        return Some("no ResourceSlice is for this node: no driver runs here".to_owned());
    }
    let mut reasons: Vec<String> = report
        .unusable
        .iter()
        .map(|(pool, state)| format!("pool {pool} is {state}"))
        .collect();
    let requests = report.requests.iter();
    let short: Vec<&RequestReport> = requests
        .filter(|request| request.is_short(&report.requests))
        .collect();
    reasons.extend(
        short
            .iter()
            .filter(|request| request.claim == claim)
            .map(|request| shortage(request)),
    );
    if reasons.is_empty() {
        reasons.push(if !short.is_empty() {
            "another claim of the pod does not fit".to_owned()
        } else if report.only_constraints {
            "enough devices are free, but no combination of them meets the constraints".to_owned()
        } else {
            "enough devices are free for each request, but not for all requests of the pod together"
                .to_owned()
        });
    }
    Some(reasons.join("; "))
}

fn shortage(request: &RequestReport) -> String {
    let (name, class) = (&request.request, &request.class);
    if request.matching.is_empty() {
        return match (&request.error, request.of_class) {
            (Some(error), _) => format!("request {name}: {error}"),
            (None, 0) => format!("request {name}: no device matches DeviceClass {class}"),
            (None, number) => {
                format!(
                    "request {name}: none of {number} devices of DeviceClass {class} matches its selectors"
                )
            }
        };
    }
    let needed = request
        .count
        .map_or_else(|| "all".to_owned(), |count| count.to_string());
    let mut text = format!(
        "request {name}: {} of {} matching devices free, {needed} needed",
        request.free(),
        request.matching.len()
    );
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, state) in &request.matching {
        let word = match state {
            Availability::Free => continue,
            Availability::Held(_) => "held",
            Availability::Tainted(_) => "tainted",
            Availability::NoCapacity => "without enough capacity",
            Availability::NoAttribute(_) => "without the attribute of a constraint",
            Availability::Counters => "with counters, which are not evaluated",
        };
        *counts.entry(word).or_default() += 1;
    }
    let counts: Vec<String> = counts
        .into_iter()
        .map(|(word, number)| format!("{number} {word}"))
        .collect();
    if !counts.is_empty() {
        text = format!("{text} ({})", counts.join(", "));
    }
    text
}

/// Why a device is not available; `None` if it is.
fn unavailable(state: &Availability) -> Option<String> {
    Some(match state {
        Availability::Free => return None,
        // The pod itself has chosen the device for another request.
        Availability::Held(claims) if claims.is_empty() => "in use".to_owned(),
        Availability::Held(claims) => format!("held by {}", claims.join(", ")),
        Availability::NoCapacity => "not enough capacity".to_owned(),
        Availability::Tainted(taint) => format!("taint {taint} is not tolerated"),
        Availability::NoAttribute(name) => format!("lacks attribute {name} of a constraint"),
        Availability::Counters => "consumes counters, which are not evaluated".to_owned(),
    })
}
