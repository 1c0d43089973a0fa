//! Scheduler for claims and extended resources: the plugin `dynamicresources` of 1.30 (classic mode) or 1.37 (structured
//! mode), and resource fit.
//!
//! A cycle filters the nodes and selects the one with the fewest pods. There is no backoff: every change starts a cycle.
//! In classic mode, a cycle negotiates with the drivers until all claims are allocated ([`negotiation`](super::negotiation)); if no
//! node remains, it requests deallocation of a blocking claim. In structured mode, it allocates and deallocates the claims itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, NodeSelector};
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::ObjectMeta;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::api::resource as classic;
use crate::core::scheduler::{AllocatedDevices, ClusterState, allocate as allocate_claims, node_matches};
use crate::host::selectors::with_selectors;
use crate::testcluster::api::ClusterMode;
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::api::structured::FINALIZER;
use crate::testcluster::claims::{consumer, may_reserve, versioned, write_reservations};
use crate::testcluster::client::{
    ApiClient, claims_of, is_done, is_reserved_for, typed, typed_claims, write_context,
};
use crate::testcluster::negotiation::{FilterResult, Negotiation, NextStep};

/// The scheduler name of its pods.
const NAME: &str = "default-scheduler";

/// Runs one cycle for each waiting pod.
pub(crate) fn reconcile(client: &ApiClient) {
    let mut waiting: Vec<Arc<Value>> = client
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
    let context = client.get("podschedulingcontexts", object::namespace(pod), object::name(pod));
    let typed_claims = typed_claims(claims).map_err(Wait::Unschedulable)?;
    let typed_context = typed(&context).map_err(Wait::Unschedulable)?;
    let negotiation = Negotiation {
        pod_uid: object::uid(pod),
        claims: &typed_claims,
        context: typed_context.first(),
    };
    let class = |name: &str| {
        let class = client.get("resourceclasses", "", name)?;
        serde_json::from_value::<classic::ResourceClass>(class).ok()
    };
    if let Some(obstacle) = negotiation.obstacle(|name| class(name).is_some()) {
        return Err(Wait::Unschedulable(obstacle));
    }
    let mut unavailable = Vec::new();
    let passing = suitable(client, pod, |node| {
        let is_suitable = |name: &str| {
            let selector = class(name).and_then(|class| class.suitable_nodes);
            selects(selector.as_ref(), node)
        };
        let is_available =
            |allocation: &classic::AllocationResult| selects(allocation.available_on_nodes.as_ref(), node);
        let name = node.metadata.name.as_deref().unwrap_or_default();
        match negotiation.filter(name, is_available, is_suitable) {
            FilterResult::Fits => Ok(()),
            FilterResult::Unsuitable(reason) => Err(reason.to_owned()),
            FilterResult::Unavailable(indices) => {
                unavailable.extend(indices);
                Err("resourceclaim not available on the node".to_owned())
            }
        }
    });
    let passing: Vec<String> = match passing {
        Ok(passing) => passing.into_iter().map(|(name, ())| name).collect(),
        Err(message) => {
            let mut unavailable = unavailable
                .into_iter()
                .filter_map(|index| claims.get(index).zip(typed_claims.get(index)))
                .filter(|(_, (_, claim))| negotiation.may_deallocate(claim));
            if let Some(((_, claim), _)) = unavailable.next() {
                request_deallocation(client, claim, context.as_ref());
            }
            return Err(Wait::Unschedulable(message));
        }
    };
    // The selected node, as long as it fits, else the best one.
    let selected = negotiation.context.map(|context| &context.spec.selected_node);
    let node = selected
        .filter(|node| passing.contains(node))
        .or_else(|| passing.first())
        .cloned()
        .unwrap_or_default();
    match negotiation.next_step(&passing, &node) {
        NextStep::Bind => {
            let claims = claims.iter().map(|(_, claim)| claim.clone()).collect();
            bind(client, pod, claims, Vec::new(), &node)?;
            if let Some(context) = context {
                // Otherwise it is deleted with its owner.
                let _ = client.delete("podschedulingcontexts", &context, None);
            }
            Ok(())
        }
        NextStep::Wait => Err(Wait::Pending),
        NextStep::Publish {
            potential_nodes,
            selected_node,
        } => {
            let mut spec = json!({});
            if let Some(nodes) = potential_nodes {
                spec["potentialNodes"] = json!(nodes);
            }
            if let Some(node) = selected_node {
                spec["selectedNode"] = node.into();
            }
            write_context(client, pod, context.as_ref(), spec);
            Err(Wait::Pending)
        }
    }
}

/// PostFilter: requests the deallocation of a claim that makes all nodes unsuitable. First, the driver must stop to allocate for the
/// selected node.
fn request_deallocation(client: &ApiClient, claim: &Value, context: Option<&Value>) {
    if let Some(context) = context.filter(|context| !text(context, "/spec/selectedNode").is_empty()) {
        let spec = json!({ "spec": { "selectedNode": null } });
        let _ = client.merge("podschedulingcontexts", context, "", spec);
    }
    let _ = write_reservations(client, claim, &[], true);
}

/// Returns the nodes on which the pod can run and that `evaluate` accepts, those with the fewest pods first; or why there
/// are none.
fn suitable<T>(
    client: &ApiClient,
    pod: &Value,
    mut evaluate: impl FnMut(&Node) -> Result<T, String>,
) -> Result<Vec<(String, T)>, String> {
    let nodes = client.list("nodes");
    let mut used: BTreeMap<String, Vec<Arc<Value>>> = BTreeMap::new();
    for other in client.list("pods").into_iter().filter(|other| !is_done(other)) {
        used.entry(text(&other, "/spec/nodeName").to_owned())
            .or_default()
            .push(other);
    }
    let no_pods = Vec::new();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut passing = Vec::new();
    for node in &nodes {
        let name = object::name(node);
        let others = used.get(name).unwrap_or(&no_pods);
        let evaluated = match unfit(pod, node, others) {
            Some(reason) => Err(reason),
            None => Node::deserialize(&**node)
                .map_err(|error| error.to_string())
                .and_then(|node| evaluate(&node)),
        };
        match evaluated {
            Err(reason) => *reasons.entry(reason).or_default() += 1,
            Ok(evaluated) => passing.push((others.len(), name.to_owned(), evaluated)),
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
        .map(|(_, name, evaluated)| (name, evaluated))
        .collect())
}

/// Returns why the pod cannot run on a node, claims aside.
fn unfit(pod: &Value, node: &Value, others: &[Arc<Value>]) -> Option<String> {
    if !object::is_ready(node) || node.pointer("/spec/unschedulable") == Some(&Value::Bool(true)) {
        return Some("node(s) were unschedulable".to_owned());
    }
    let selector = pod.pointer("/spec/nodeSelector").and_then(Value::as_object);
    let labels = node.pointer("/metadata/labels");
    if selector.is_some_and(|selector| {
        selector
            .iter()
            .any(|(key, value)| labels.and_then(|labels| labels.get(key)) != Some(value))
    }) {
        return Some("node(s) didn't match Pod's node affinity/selector".to_owned());
    }
    for (resource, amount) in requested(pod) {
        let free = quantity(
            node.pointer("/status/allocatable")
                .and_then(|all| all.get(&resource)),
        ) - others
            .iter()
            .filter_map(|other| requested(other).remove(&resource))
            .sum::<i64>();
        if amount > free {
            return Some(format!("Insufficient {resource}"));
        }
    }
    None
}

fn quantity(value: Option<&Value>) -> i64 {
    match value {
        Some(Value::String(text)) => text.parse().unwrap_or(0),
        Some(Value::Number(number)) => number.as_i64().unwrap_or(0),
        _ => 0,
    }
}

/// Returns the amount of each extended resource that a container requests.
pub(crate) fn extended_resources(container: &Value) -> Vec<(String, i64)> {
    let limits = container.pointer("/resources/limits").and_then(Value::as_object);
    let extended = limits
        .into_iter()
        .flatten()
        .filter(|(name, _)| name.contains('/'));
    extended
        .map(|(resource, amount)| (resource.clone(), quantity(Some(amount))))
        .collect()
}

/// Returns the amount of each extended resource that a pod requests.
fn requested(pod: &Value) -> BTreeMap<String, i64> {
    let mut amounts = BTreeMap::new();
    for (resource, amount) in list(pod, "/spec/containers").iter().flat_map(extended_resources) {
        *amounts.entry(resource).or_default() += amount;
    }
    amounts
}

/// Returns whether an allocation is available on a node of the testkit.
pub(crate) fn reaches(allocation: &classic::AllocationResult, node: &str) -> bool {
    let metadata = ObjectMeta {
        name: Some(node.to_owned()),
        labels: Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into()),
        ..ObjectMeta::default()
    };
    let node = Node {
        metadata,
        ..Node::default()
    };
    selects(allocation.available_on_nodes.as_ref(), &node)
}

/// Returns whether a NodeSelector, if any, selects a node.
fn selects(selector: Option<&NodeSelector>, node: &Node) -> bool {
    selector.is_none_or(|selector| node_matches(selector, node).unwrap_or(false))
}

/// Allocates and reserves the claims of a pod on a node, and binds the pod (structured mode). If no node fits, deallocates a claim that no
/// other pod uses.
fn allocate(client: &ApiClient, pod: &Value, claims: Vec<Value>) -> Result<(), Wait> {
    for claim in &claims {
        if is_allocated(claim) {
            if !may_reserve(claim) && !is_reserved_for(claim, pod) {
                return Err(Wait::Unschedulable("resourceclaim in use".to_owned()));
            }
        } else if let Some(message) = missing_class(client, claim) {
            return Err(Wait::Unschedulable(message));
        }
    }
    let objects = ClusterObjects::read(client, &claims).map_err(Wait::Unschedulable)?;
    let mut unavailable: Vec<&Value> = Vec::new();
    let passing = suitable(client, pod, |node| {
        let elsewhere = claims.iter().filter(|claim| {
            let selector = claim.pointer("/status/allocation/nodeSelector");
            let selector = selector.and_then(|selector| NodeSelector::deserialize(selector).ok());
            !selects(selector.as_ref(), node)
        });
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
            bind(client, pod, claims, allocations, &node)
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

/// The objects that decide the allocation of a pod's claims.
struct ClusterObjects {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    /// All claims of the cluster.
    claims: Vec<ResourceClaim>,
    /// The unallocated claims of the pod.
    requested: Vec<ResourceClaim>,
}

impl ClusterObjects {
    fn read(client: &ApiClient, claims: &[Value]) -> Result<Self, String> {
        let requested = claims.iter().filter(|claim| !is_allocated(claim));
        Ok(Self {
            slices: typed(client.list("resourceslices"))?,
            classes: typed(client.list("deviceclasses"))?,
            claims: typed(client.list("resourceclaims"))?,
            requested: typed(requested)?,
        })
    }

    /// Allocates the claims on a node.
    fn allocate(&self, client: &ApiClient, node: &Node) -> Result<Vec<AllocationResult>, String> {
        if self.requested.is_empty() {
            return Ok(Vec::new());
        }
        let allocated_devices = AllocatedDevices::read(&self.claims);
        let cluster = ClusterState {
            slices: &self.slices,
            classes: &self.classes,
            allocated_devices: &allocated_devices,
        };
        let requested: Vec<&ResourceClaim> = self.requested.iter().collect();
        let allocated = with_selectors(|evaluate| {
            allocate_claims(cluster, node, &requested, evaluate, &mut || {
                client.server.source.uid()
            })
        })?;
        allocated.map_err(|refusal| refusal.to_string())
    }
}

/// Writes the allocation, if it is new, and the reservation of each claim in one request, binds the pod and reports it.
fn bind(
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
    client.bind(pod, node).map_err(|_| Wait::Pending)?;
    let message = format!(
        "Successfully assigned {}/{} to {node}",
        object::namespace(pod),
        object::name(pod)
    );
    client.event(pod, "Normal", "Scheduled", &message);
    Ok(())
}
