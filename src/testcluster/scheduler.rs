//! Scheduler for claims and extended resources: the plugin `dynamicresources` of 1.30 (classic mode) or 1.37 (structured
//! mode), and resource fit.
//!
//! A cycle filters the nodes and selects the one with the fewest pods. There is no backoff: every change starts a cycle.
//! In classic mode, a cycle negotiates with the drivers until all claims are allocated; if no node remains, it requests
//! deallocation of a blocking claim. In structured mode, it allocates and deallocates the claims itself.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::api::resource::NODE_LIST_MAX;
use crate::core::structured::{ClusterState, DeviceHoldings, allocate as allocate_claims};
use crate::host::selectors::with_selectors;
use crate::testcluster::api::ClusterMode;
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::api::structured::FINALIZER;
use crate::testcluster::claims::{consumer, may_reserve, versioned, write_reservations};
use crate::testcluster::client::{ApiClient, claims_of, is_done, is_reserved_for, owned_by, owner_uid};

/// The scheduler name of its pods.
const NAME: &str = "default-scheduler";

/// Runs one cycle for each waiting pod.
pub(crate) fn reconcile(client: &ApiClient) {
    let mut waiting: Vec<Value> = client
        .list("pods")
        .into_iter()
        .filter(|pod| text(pod, "/spec/nodeName").is_empty() && text(pod, "/spec/schedulerName") == NAME)
        .filter(|pod| !object::is_deleting(pod) && !is_done(pod))
        .collect();
    // Queue order: priority, then age; pods of the same second are ordered by resource version.
    waiting.sort_by_key(|pod| {
        let priority = pod.pointer("/spec/priority").and_then(Value::as_i64).unwrap_or(0);
        let version: u64 = text(pod, "/metadata/resourceVersion").parse().unwrap_or(0);
        (
            -priority,
            text(pod, "/metadata/creationTimestamp").to_owned(),
            version,
        )
    });
    for pod in waiting {
        cycle(client, &pod);
    }
}

/// Why a pod is not bound in this cycle.
enum Wait {
    /// No node fits; contains the message for the pod's condition.
    Unschedulable(String),
    /// Waiting for the drivers.
    Pending,
}

fn cycle(client: &ApiClient, pod: &Value) {
    match attempt(client, pod) {
        Ok(()) | Err(Wait::Pending) => {}
        Err(Wait::Unschedulable(message)) => {
            let known = list(pod, "/status/conditions")
                .iter()
                .any(|condition| condition["message"] == message.as_str());
            if known {
                return;
            }
            let condition = json!({
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
                "lastTransitionTime": client.server.now(), "lastProbeTime": null,
            });
            // A deleted pod needs no condition.
            if client
                .merge(
                    "pods",
                    pod,
                    "status",
                    json!({ "status": { "conditions": [condition] } }),
                )
                .is_ok()
            {
                client.event(pod, "Warning", "FailedScheduling", &message);
            }
        }
    }
}

fn attempt(client: &ApiClient, pod: &Value) -> Result<(), Wait> {
    let mut claims = Vec::new();
    for (entry, claim) in claims_of(client, pod) {
        // PreEnqueue: a pod is not scheduled before all its claims exist.
        let Some(claim) = claim else {
            return Err(Wait::Pending);
        };
        if object::is_deleting(&claim) {
            return Err(Wait::Unschedulable(format!(
                "resourceclaim {:?} is being deleted",
                object::name(&claim)
            )));
        }
        claims.push((entry, claim));
    }
    match client.server.mode() {
        ClusterMode::Classic => negotiate(client, pod, &claims),
        ClusterMode::Structured => {
            allocate(client, pod, claims.into_iter().map(|(_, claim)| claim).collect())
        }
    }
}

/// Binds a pod whose claims are allocated, or continues the negotiation with the drivers (classic mode).
fn negotiate(client: &ApiClient, pod: &Value, claims: &[(String, Value)]) -> Result<(), Wait> {
    let unschedulable = |message: &str| Wait::Unschedulable(message.to_owned());
    let context = client.get("podschedulingcontexts", object::namespace(pod), object::name(pod));
    if context
        .as_ref()
        .is_some_and(|context| owner_uid(context) != object::uid(pod))
    {
        return Err(unschedulable("PodSchedulingContext is owned by another pod"));
    }
    for (_, claim) in claims {
        let allocated = claim.pointer("/status/allocation").is_some();
        let taken = !list(claim, "/status/reservedFor").is_empty()
            && !is_reserved_for(claim, pod)
            && claim.pointer("/status/allocation/shareable") != Some(&Value::Bool(true));
        if claim.pointer("/status/deallocationRequested") == Some(&Value::Bool(true)) {
            return Err(unschedulable("resourceclaim must be reallocated"));
        }
        if allocated && taken {
            return Err(unschedulable("resourceclaim in use"));
        }
        if !allocated && claim["spec"]["allocationMode"] == "Immediate" {
            return Err(unschedulable("unallocated immediate resourceclaim"));
        }
        let class = text(claim, "/spec/resourceClassName");
        if !allocated && client.get("resourceclasses", "", class).is_none() {
            return Err(Wait::Unschedulable(format!(
                "resource class {class:?} does not exist"
            )));
        }
    }
    let passing = filter(client, pod, claims, context.as_ref())?;
    let node = passing.first().cloned().unwrap_or_default();
    let pending: Vec<&String> = claims
        .iter()
        .filter(|(_, claim)| claim.pointer("/status/allocation").is_none())
        .map(|(entry, _)| entry)
        .collect();
    if pending.is_empty() {
        return bind(client, pod, claims, &node);
    }
    ask(client, pod, context.as_ref(), &pending, &passing)
}

/// Returns the suitable nodes, best first.
fn filter(
    client: &ApiClient,
    pod: &Value,
    claims: &[(String, Value)],
    context: Option<&Value>,
) -> Result<Vec<String>, Wait> {
    let mut in_the_way: Vec<&Value> = Vec::new();
    let passing = suitable(client, pod, |node| {
        refusal(client, node, claims, context, &mut in_the_way).map_or(Ok(()), Err)
    });
    let message = match passing {
        Ok(mut passing) => {
            let selected = context.map(|context| text(context, "/spec/selectedNode").to_owned());
            passing.sort_by_key(|(name, ())| selected.as_ref() != Some(name));
            return Ok(passing.into_iter().map(|(name, ())| name).collect());
        }
        Err(message) => message,
    };
    // PostFilter: deallocates one claim that makes all nodes unsuitable.
    let given_up = in_the_way.into_iter().find(|claim| {
        claim["spec"]["allocationMode"] == "WaitForFirstConsumer"
            && list(claim, "/status/reservedFor")
                .iter()
                .all(|consumer| consumer["uid"] == pod["metadata"]["uid"])
    });
    if let Some(claim) = given_up {
        if let Some(context) = context.filter(|context| !text(context, "/spec/selectedNode").is_empty()) {
            let _ = client.merge(
                "podschedulingcontexts",
                context,
                "",
                json!({ "spec": { "selectedNode": null } }),
            );
        }
        let _ = write_reservations(client, claim, &[], true);
    }
    Err(Wait::Unschedulable(message))
}

/// Returns the nodes on which the pod can run and that `judge` accepts, those with the fewest pods first; or why there
/// are none.
fn suitable<T>(
    client: &ApiClient,
    pod: &Value,
    mut judge: impl FnMut(&Value) -> Result<T, String>,
) -> Result<Vec<(String, T)>, String> {
    let nodes: Vec<Value> = client.list("nodes");
    let mut used: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for other in client.list("pods").into_iter().filter(|other| !is_done(other)) {
        used.entry(text(&other, "/spec/nodeName").to_owned())
            .or_default()
            .push(other);
    }
    let nobody = Vec::new();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut passing = Vec::new();
    for node in &nodes {
        let name = object::name(node);
        let others = used.get(name).unwrap_or(&nobody);
        match unfit(pod, node, others).map_or_else(|| judge(node), Err) {
            Err(reason) => *reasons.entry(reason).or_default() += 1,
            Ok(judged) => passing.push((others.len(), name.to_owned(), judged)),
        }
    }
    if passing.is_empty() {
        let reasons: Vec<String> = reasons
            .into_iter()
            .map(|(reason, count)| format!("{count} {reason}"))
            .collect();
        return Err(format!(
            "0/{} nodes are available: {}.",
            nodes.len(),
            reasons.join(", ")
        ));
    }
    passing.sort_by(|(pods, name, _), (more, other, _)| (pods, name).cmp(&(more, other)));
    Ok(passing
        .into_iter()
        .map(|(_, name, judged)| (name, judged))
        .collect())
}

/// Returns why the pod cannot run on a node, claims aside.
fn unfit(pod: &Value, node: &Value, others: &[Value]) -> Option<String> {
    let ready = list(node, "/status/conditions")
        .iter()
        .any(|each| each["type"] == "Ready" && each["status"] == "True");
    if !ready || node.pointer("/spec/unschedulable") == Some(&Value::Bool(true)) {
        return Some("node(s) were unschedulable".to_owned());
    }
    let selector = pod.pointer("/spec/nodeSelector").and_then(Value::as_object);
    let labels = node.pointer("/metadata/labels");
    if selector.is_some_and(|wanted| {
        wanted
            .iter()
            .any(|(key, value)| labels.and_then(|labels| labels.get(key)) != Some(value))
    }) {
        return Some("node(s) didn't match Pod's node affinity/selector".to_owned());
    }
    for (resource, wanted) in extended_resources(pod) {
        let free = quantity(
            node.pointer("/status/allocatable")
                .and_then(|all| all.get(&resource)),
        ) - others
            .iter()
            .filter_map(|other| extended_resources(other).remove(&resource))
            .sum::<i64>();
        if wanted > free {
            return Some(format!("Insufficient {resource}"));
        }
    }
    None
}

/// Returns why the pod's claims make a node unsuitable.
fn refusal<'a>(
    client: &ApiClient,
    node: &Value,
    claims: &'a [(String, Value)],
    context: Option<&Value>,
    in_the_way: &mut Vec<&'a Value>,
) -> Option<String> {
    let name = object::name(node);
    let mut reason = None;
    for (entry, claim) in claims {
        match claim.pointer("/status/allocation") {
            Some(allocation) if !reaches(allocation, name) => {
                in_the_way.push(claim);
                reason = Some("resourceclaim not available on the node".to_owned());
            }
            Some(_) => {}
            None => {
                let class = client.get("resourceclasses", "", text(claim, "/spec/resourceClassName"));
                let suited = class.as_ref().and_then(|class| class.get("suitableNodes"));
                let judged = context
                    .map(|context| list(context, "/status/resourceClaims"))
                    .unwrap_or_default()
                    .iter()
                    .find(|judged| judged["name"] == entry.as_str());
                let unsuitable =
                    judged.is_some_and(|judged| list(judged, "/unsuitableNodes").contains(&json!(name)));
                if unsuitable || suited.is_some_and(|selector| !selects(selector, node)) {
                    return Some("resourceclaim cannot be allocated for the node (unsuitable)".to_owned());
                }
            }
        }
    }
    reason
}

fn quantity(value: Option<&Value>) -> i64 {
    match value {
        Some(Value::String(text)) => text.parse().unwrap_or(0),
        Some(Value::Number(number)) => number.as_i64().unwrap_or(0),
        _ => 0,
    }
}

/// Returns the amount of each extended resource that a pod requests.
pub(crate) fn extended_resources(pod: &Value) -> BTreeMap<String, i64> {
    let mut wanted = BTreeMap::new();
    for container in list(pod, "/spec/containers") {
        let limits = container.pointer("/resources/limits").and_then(Value::as_object);
        for (resource, amount) in limits
            .into_iter()
            .flatten()
            .filter(|(name, _)| name.contains('/'))
        {
            *wanted.entry(resource.clone()).or_default() += quantity(Some(amount));
        }
    }
    wanted
}

/// Returns whether an allocation is available on a node.
pub(crate) fn reaches(allocation: &Value, node: &str) -> bool {
    let node = json!({ "metadata": { "name": node, "labels": { "kubernetes.io/hostname": node } } });
    allocation
        .get("availableOnNodes")
        .is_none_or(|selector| selects(selector, &node))
}

/// Evaluates a NodeSelector: any term must match, with all its requirements.
fn selects(selector: &Value, node: &Value) -> bool {
    let meets = |requirement: &Value, value: Option<&str>| {
        let values = object::texts(requirement, "/values");
        match (text(requirement, "/operator"), value) {
            ("In", value) => value.is_some_and(|value| values.contains(&value)),
            ("NotIn", value) => value.is_none_or(|value| !values.contains(&value)),
            ("Exists", value) => value.is_some(),
            ("DoesNotExist", value) => value.is_none(),
            _ => false,
        }
    };
    list(selector, "/nodeSelectorTerms").iter().any(|term| {
        let fields = list(term, "/matchFields")
            .iter()
            .all(|each| meets(each, Some(object::name(node))));
        let labels = list(term, "/matchExpressions").iter().all(|each| {
            let value = node
                .pointer("/metadata/labels")
                .and_then(|labels| labels.get(text(each, "/key")));
            meets(each, value.and_then(Value::as_str))
        });
        fields && labels
    })
}

/// Writes the potential nodes for the drivers and, once all have answered, the selected node.
fn ask(
    client: &ApiClient,
    pod: &Value,
    context: Option<&Value>,
    pending: &[&String],
    passing: &[String],
) -> Result<(), Wait> {
    let known = context
        .map(|context| object::texts(context, "/spec/potentialNodes"))
        .unwrap_or_default();
    let potential: Option<Vec<&String>> =
        passing
            .iter()
            .any(|node| !known.contains(&node.as_str()))
            .then(|| {
                let mut nodes: Vec<&String> = passing.iter().take(NODE_LIST_MAX).collect();
                nodes.sort();
                nodes
            });
    let judged = context
        .map(|context| list(context, "/status/resourceClaims"))
        .unwrap_or_default();
    let informed = pending
        .iter()
        .filter(|entry| judged.iter().any(|each| each["name"] == entry.as_str()))
        .count();
    let node = passing.first().map(String::as_str).unwrap_or_default();
    let chosen = context
        .map(|context| text(context, "/spec/selectedNode"))
        .unwrap_or_default();
    let select = (pending.len() == 1 || informed == pending.len()) && chosen != node;
    let mut spec = json!({});
    if let Some(potential) = potential {
        spec["potentialNodes"] = json!(potential);
    }
    if select {
        spec["selectedNode"] = node.into();
    }
    if spec.as_object().is_some_and(|spec| !spec.is_empty()) {
        // A conflict means a concurrent change, which triggers another cycle.
        let _ = if let Some(context) = context {
            client.merge("podschedulingcontexts", context, "", json!({ "spec": spec }))
        } else {
            let context = json!({
                "metadata": { "name": pod["metadata"]["name"], "ownerReferences": owned_by(pod) },
                "spec": spec,
            });
            client.create("podschedulingcontexts", object::namespace(pod), context)
        };
    }
    Err(Wait::Pending)
}

/// Reserves the claims, binds the pod and deletes the PodSchedulingContext (classic mode).
fn bind(client: &ApiClient, pod: &Value, claims: &[(String, Value)], node: &str) -> Result<(), Wait> {
    for (_, claim) in claims {
        if !is_reserved_for(claim, pod) {
            let mut consumers = list(claim, "/status/reservedFor").to_vec();
            consumers.push(consumer(pod));
            write_reservations(client, claim, &consumers, false).map_err(|_| Wait::Pending)?;
        }
    }
    assign(client, pod, node)?;
    if let Some(context) = client.get("podschedulingcontexts", object::namespace(pod), object::name(pod)) {
        // Otherwise it is deleted with its owner.
        let _ = client.delete("podschedulingcontexts", &context, None);
    }
    Ok(())
}

/// Binds a pod and reports it.
fn assign(client: &ApiClient, pod: &Value, node: &str) -> Result<(), Wait> {
    client.bind(pod, node).map_err(|_| Wait::Pending)?;
    let message = format!(
        "Successfully assigned {}/{} to {node}",
        object::namespace(pod),
        object::name(pod)
    );
    client.event(pod, "Normal", "Scheduled", &message);
    Ok(())
}

/// Allocates and reserves the claims of a pod on a node, and binds the pod (structured mode). If no node fits, deallocates a claim that no
/// other pod uses.
fn allocate(client: &ApiClient, pod: &Value, claims: Vec<Value>) -> Result<(), Wait> {
    for claim in &claims {
        if is_allocated(claim) {
            if !may_reserve(client, claim) && !is_reserved_for(claim, pod) {
                return Err(Wait::Unschedulable("resourceclaim in use".to_owned()));
            }
        } else if let Some(message) = missing_class(client, claim) {
            return Err(Wait::Unschedulable(message));
        }
    }
    let objects = ClusterObjects::read(client, &claims).map_err(Wait::Unschedulable)?;
    let mut unavailable: Vec<&Value> = Vec::new();
    let passing = suitable(client, pod, |node| {
        let elsewhere = claims.iter().filter(|claim| !is_available(claim, node));
        let elsewhere: Vec<&Value> = elsewhere.collect();
        if !elsewhere.is_empty() {
            unavailable.extend(elsewhere);
            return Err("resourceclaim not available on the node".to_owned());
        }
        objects.allocate(client, node)
    });
    match passing {
        Ok(passing) => {
            let Some((node, allocations)) = passing.into_iter().next() else {
                return Err(Wait::Pending);
            };
            bind_allocated(client, pod, claims, allocations, &node)
        }
        Err(message) => {
            // PostFilter.
            let unused = |claim: &&Value| {
                list(claim, "/status/reservedFor")
                    .iter()
                    .all(|consumer| consumer["uid"] == pod["metadata"]["uid"])
            };
            if let Some(claim) = unavailable.into_iter().find(unused) {
                let status =
                    json!({ "status": { "allocation": null, "reservedFor": null, "devices": null } });
                // A conflict means a concurrent change, which triggers another cycle.
                let _ = client.merge("resourceclaims", claim, "status", versioned(claim, status));
            }
            Err(Wait::Unschedulable(message))
        }
    }
}

fn is_allocated(claim: &Value) -> bool {
    claim.pointer("/status/allocation").is_some()
}

fn missing_class(client: &ApiClient, claim: &Value) -> Option<String> {
    list(claim, "/spec/devices/requests").iter().find_map(|request| {
        let exactly = request.get("exactly").into_iter();
        let mut requests = exactly.chain(list(request, "/firstAvailable"));
        requests.find_map(|one| {
            let class = text(one, "/deviceClassName");
            let name = match text(one, "/name") {
                "" => text(request, "/name").to_owned(),
                alternative => format!("{}/{alternative}", text(request, "/name")),
            };
            let exists = client.get("deviceclasses", "", class).is_some();
            (!exists).then(|| format!("request {name}: device class {class} does not exist"))
        })
    })
}

/// Returns whether the allocation of a claim, if any, is available on a node.
fn is_available(claim: &Value, node: &Value) -> bool {
    claim
        .pointer("/status/allocation/nodeSelector")
        .is_none_or(|selector| selects(selector, node))
}

/// The objects that decide the allocation of a pod's claims.
struct ClusterObjects {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    /// All claims of the cluster.
    claims: Vec<ResourceClaim>,
    /// The unallocated claims of the pod.
    wanted: Vec<ResourceClaim>,
}

impl ClusterObjects {
    fn read(client: &ApiClient, claims: &[Value]) -> Result<Self, String> {
        let wanted = claims.iter().filter(|claim| !is_allocated(claim));
        Ok(Self {
            slices: typed(client.list("resourceslices"))?,
            classes: typed(client.list("deviceclasses"))?,
            claims: typed(client.list("resourceclaims"))?,
            wanted: typed(wanted.cloned())?,
        })
    }

    /// Allocates the claims on a node.
    fn allocate(&self, client: &ApiClient, node: &Value) -> Result<Vec<AllocationResult>, String> {
        if self.wanted.is_empty() {
            return Ok(Vec::new());
        }
        let node: Node = serde_json::from_value(node.clone()).map_err(|error| error.to_string())?;
        let holdings = DeviceHoldings::read(&self.claims);
        let cluster = ClusterState {
            slices: &self.slices,
            classes: &self.classes,
            holdings: &holdings,
        };
        let wanted: Vec<&ResourceClaim> = self.wanted.iter().collect();
        let allocated = with_selectors(|selectors| {
            allocate_claims(
                cluster,
                &node,
                &wanted,
                &mut |expression, driver, device| selectors.evaluate(expression, driver, device),
                &mut || client.server.source.uid(),
            )
        })?;
        allocated.map_err(|refusal| refusal.to_string())
    }
}

fn typed<T: DeserializeOwned>(objects: impl IntoIterator<Item = Value>) -> Result<Vec<T>, String> {
    objects
        .into_iter()
        .map(|object| serde_json::from_value(object).map_err(|error| error.to_string()))
        .collect()
}

/// Writes the allocation and the reservation of each claim in one request, and binds the pod.
fn bind_allocated(
    client: &ApiClient,
    pod: &Value,
    claims: Vec<Value>,
    allocations: Vec<AllocationResult>,
    node: &str,
) -> Result<(), Wait> {
    let mut allocations = allocations.into_iter();
    for mut claim in claims {
        let mut status = json!({});
        if !is_allocated(&claim) {
            let mut finalizers = object::texts(&claim, "/metadata/finalizers");
            if !finalizers.contains(&FINALIZER) {
                finalizers.push(FINALIZER);
                let patch = versioned(&claim, json!({ "metadata": { "finalizers": finalizers } }));
                claim = client
                    .merge("resourceclaims", &claim, "", patch)
                    .map_err(|_| Wait::Pending)?;
            }
            let allocation = allocations.next().ok_or(Wait::Pending)?;
            status["allocation"] = serde_json::to_value(allocation).map_err(|_| Wait::Pending)?;
            status["allocation"]["allocationTimestamp"] = client.server.now().into();
        }
        if !is_reserved_for(&claim, pod) {
            let mut consumers = list(&claim, "/status/reservedFor").to_vec();
            consumers.push(consumer(pod));
            status["reservedFor"] = consumers.into();
        }
        if status != json!({}) {
            let patch = versioned(&claim, json!({ "status": status }));
            // A conflict means a concurrent change, which triggers another cycle.
            client
                .merge("resourceclaims", &claim, "status", patch)
                .map_err(|_| Wait::Pending)?;
        }
    }
    assign(client, pod, node)
}
