//! Explains the allocation step of a pod's claims, what blocks them, and the fix.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::qualified_name;
use crate::api::resource::{
    AllocationMode, Pod, PodResourceClaim, PodSchedulingContext, RESERVED_FOR_MAX, ResourceClaim,
    ResourceClass, controller_of,
};
use crate::cli::objects::PartialPod;
use crate::core::claims::{Resolved, is_made_for, resolve, unambiguous};

/// Step of a claim on its way to a running pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
pub enum ClaimStep {
    /// The pod's entry needs no claim.
    NotNeeded,
    /// The claim does not exist.
    ClaimMissing,
    /// A claim with that name exists but is not owned by the pod.
    ClaimNotOwned,
    /// The claim uses an API that this release does not serve.
    NotServed,
    /// The claim is being deleted.
    Deleting,
    /// The claim's class does not exist.
    ClassMissing,
    /// Another driver or the scheduler itself serves the claim.
    NotOurs,
    /// The parameters of the class or claim are invalid.
    ParametersInvalid,
    /// The scheduler has not requested allocation yet.
    WaitsForScheduler,
    /// No node can serve the claim now.
    WaitsForDevice,
    /// At least one node can serve the claim; allocation is imminent.
    Allocating,
    /// Allocated, but not yet reserved for the pod.
    WaitsForReservation,
    /// Will be deallocated: the scheduler could not use the allocated node.
    DeallocationRequested,
    /// Allocated; the pod is not bound to a node yet.
    WaitsForBinding,
    /// The pod is bound, but kubelet has not started it yet.
    Preparing,
    /// The pod uses the claim.
    InUse,
    /// Allocated; the question concerns no pod.
    Allocated,
}

/// Input to the explanation of one claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExplainInput<'a> {
    pub driver: &'a str,
    /// The pod, if the question concerns one.
    pub pod: Option<&'a PartialPod>,
    /// The pod's entry in `spec.resourceClaims`.
    pub entry: Option<&'a PodResourceClaim>,
    pub found: Resolved<&'a ResourceClaim>,
    /// All classes, if they can be read.
    pub classes: Option<&'a [ResourceClass]>,
    /// Description of the request, or the error in the parameters of the class or claim; absent if the driver was not
    /// asked.
    pub wants: Option<Result<&'a str, &'a str>>,
    pub context: Option<&'a PodSchedulingContext>,
    /// Per node, why it cannot serve the claim together with the pod's other claims; `None` if it can.
    pub nodes: &'a BTreeMap<String, Option<String>>,
}

/// Whether one node can serve a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeExplanation {
    /// Node name.
    pub node: String,
    /// Why the node cannot serve the claim; absent if it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Whether a matching device is available to a request (structured mode).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceExplanation {
    /// Node name.
    pub node: String,
    /// Name of the request, or `request/subrequest`.
    pub request: String,
    /// Device name; `driver/pool/device` if it is another driver's.
    pub device: String,
    /// Why the device is not available; absent if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Explanation of one claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimExplanation {
    /// Name of the pod's entry, if the question concerns a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
    /// `namespace/name` of the claim, if it exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// Name of the claim's class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Driver that serves the claim, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Description of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wants: Option<String>,
    /// Current step.
    pub step: ClaimStep,
    /// Why the claim is at this step.
    pub because: String,
    /// Suggested fix; absent if no action is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Per-node results, as long as they matter.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeExplanation>,
    /// The devices that match a request, as long as they matter. Structured mode only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceExplanation>,
}

/// Returns the claim of an entry, if it has one.
pub(crate) fn claim_of<C>(found: Resolved<C>) -> Option<C> {
    match found {
        Resolved::Claim(claim) => Some(claim),
        Resolved::NotNeeded | Resolved::Awaited | Resolved::NotOwned(_) => None,
    }
}

/// The claims of a cluster, indexed once for the entries of many pods.
#[derive(Debug, Default)]
pub(crate) struct ClaimIndex<'a> {
    /// By namespace and name.
    by_name: BTreeMap<(&'a str, &'a str), &'a ResourceClaim>,
    /// By the uid of the controlling owner.
    by_owner: BTreeMap<&'a str, Vec<&'a ResourceClaim>>,
}

impl<'a> ClaimIndex<'a> {
    pub(crate) fn new(claims: &'a [ResourceClaim]) -> Self {
        let mut index = Self::default();
        for claim in claims {
            let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
            let name = claim.metadata.name.as_deref().unwrap_or_default();
            index.by_name.insert((namespace, name), claim);
            if let Some(owner) = controller_of(&claim.metadata) {
                index.by_owner.entry(&owner.uid).or_default().push(claim);
            }
        }
        index
    }
}

/// Finds the claim for an entry of `pod` by the controller's rules.
pub(crate) fn find<'a>(
    pod: &Pod,
    entry: &PodResourceClaim,
    claims: &ClaimIndex<'a>,
) -> Resolved<&'a ResourceClaim> {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let own = |claim: &&ResourceClaim| controller_of(&claim.metadata).is_some_and(|owner| owner.uid == uid);
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let by_name = |name: &str| claims.by_name.get(&(namespace, name)).copied();
    let annotated = || {
        let owned = claims.by_owner.get(uid).into_iter().flatten().copied();
        let made_for = owned.filter(|claim| {
            claim.metadata.namespace == pod.metadata.namespace && is_made_for(claim, &entry.name)
        });
        let names = made_for.filter_map(|claim| {
            let is_deleting = claim.metadata.deletion_timestamp.is_some();
            Some((is_deleting, claim.metadata.name.as_deref()?))
        });
        by_name(unambiguous(names)?)
    };
    resolve(pod, entry, by_name, own, annotated)
}

/// Explains one claim.
pub(crate) fn explain(input: &ExplainInput<'_>) -> ClaimExplanation {
    let claim = claim_of(input.found);
    let class = claim.map(|claim| claim.spec.resource_class_name.clone());
    let driver = claim
        .and_then(|claim| claim.status.driver_name.clone())
        .or_else(|| Some(class_of(claim?, input.classes?)?.driver_name.clone()));
    let (step, because, advice) = current_step(input);
    let tell_nodes = matches!(
        step,
        ClaimStep::WaitsForDevice | ClaimStep::Allocating | ClaimStep::WaitsForScheduler
    );
    let fit = |(node, reason): (&String, &Option<String>)| NodeExplanation {
        node: node.clone(),
        reason: reason.clone(),
    };
    ClaimExplanation {
        entry: input.entry.map(|entry| entry.name.clone()),
        claim: claim.map(qualified_name),
        class,
        driver,
        wants: input.wants.and_then(Result::ok).map(str::to_owned),
        step,
        because,
        advice: Some(advice).filter(|advice| !advice.is_empty()),
        nodes: if tell_nodes {
            input.nodes.iter().map(fit).collect()
        } else {
            Vec::new()
        },
        devices: Vec::new(),
    }
}

/// Finds the claim's class; `None` if it does not exist.
pub(crate) fn class_of<'a>(claim: &ResourceClaim, classes: &'a [ResourceClass]) -> Option<&'a ResourceClass> {
    let name = Some(&claim.spec.resource_class_name);
    classes.iter().find(|class| class.metadata.name.as_ref() == name)
}

/// Returns the step, its cause and a suggested fix.
fn current_step(input: &ExplainInput<'_>) -> (ClaimStep, String, String) {
    let claim = match input.found {
        Resolved::NotNeeded => return not_needed(),
        Resolved::Awaited => return ended(input.pod, &[]).unwrap_or_else(|| missing(input.entry)),
        Resolved::NotOwned(claim) => return claim_not_owned(&qualified_name(claim)),
        Resolved::Claim(claim) => claim,
    };
    if claim.metadata.deletion_timestamp.is_some() {
        let pods = claim.status.reserved_for.iter();
        let pods: Vec<String> = pods.map(|user| user.name.clone()).collect();
        return deleting(&pods, claim.metadata.finalizers.as_deref().unwrap_or_default());
    }
    if let Some(ended) = ended(input.pod, &users(claim)) {
        return ended;
    }
    if claim.status.allocation.is_some() {
        return allocated(claim, input.pod);
    }
    if let Some(step) = input
        .classes
        .and_then(|classes| unusable_class(claim, classes, input.driver))
    {
        return step;
    }
    if let Some(Err(error)) = input.wants {
        return (
            ClaimStep::ParametersInvalid,
            error.to_owned(),
            "correct the named object; the claim is then evaluated again at once".into(),
        );
    }
    waiting(claim, input)
}

/// The step of a claim whose class does not exist or is not served by `driver`.
fn unusable_class(
    claim: &ResourceClaim,
    classes: &[ResourceClass],
    driver: &str,
) -> Option<(ClaimStep, String, String)> {
    let class_name = &claim.spec.resource_class_name;
    let Some(class) = class_of(claim, classes) else {
        return Some((
            ClaimStep::ClassMissing,
            format!("there is no ResourceClass {class_name}"),
            "create it, or recreate the claim with an existing class: kubectl get resourceclasses".into(),
        ));
    };
    if class.structured_parameters == Some(true) {
        return Some((
            ClaimStep::NotOurs,
            format!("ResourceClass {class_name} has structured parameters: the scheduler itself allocates"),
            String::new(),
        ));
    }
    let other = &class.driver_name;
    (other != driver).then(|| {
        (
            ClaimStep::NotOurs,
            format!("ResourceClass {class_name} is served by driver {other}"),
            format!(
                "see the documentation of driver {other}, or set --driver-name if it is drayman under another name"
            ),
        )
    })
}

/// Returns whether the entry refers to a claim of `resource.k8s.io/v1`: since Kubernetes 1.31 the reference has no
/// `source`, and the API server drops that field.
fn is_structured(entry: &PodResourceClaim) -> bool {
    entry.other.contains_key("resourceClaimName") || entry.other.contains_key("resourceClaimTemplateName")
}

fn missing(entry: Option<&PodResourceClaim>) -> (ClaimStep, String, String) {
    if entry.is_some_and(is_structured) {
        return (
            ClaimStep::NotServed,
            "the pod's claim is of structured Dynamic Resource Allocation, and this cluster does not serve resource.k8s.io/v1, which \
             Kubernetes has from 1.34 on"
                .to_owned(),
            "on this Kubernetes, request the device as an extended resource: give its kind mode extended-resource, and name the \
             resource in the container's resources.limits"
                .to_owned(),
        );
    }
    let source = entry.map(|entry| &entry.source);
    claim_missing(
        source.and_then(|source| source.resource_claim_name.as_deref()),
        source.and_then(|source| source.resource_claim_template_name.as_deref()),
    )
}

/// Uids of the pods that a claim is reserved for.
fn users(claim: &ResourceClaim) -> Vec<&str> {
    let users = claim.status.reserved_for.iter();
    users.map(|user| user.uid.as_str()).collect()
}

/// The step of an entry if the pod has ended and is not among the users of the claim, given by uid. Kubernetes deletes a claim of a template
/// when its pod ends.
pub(super) fn ended(pod: Option<&PartialPod>, users: &[&str]) -> Option<(ClaimStep, String, String)> {
    let pod = pod?;
    let phase = pod.status.as_ref()?.phase.as_deref()?;
    let uid = pod.metadata.uid.as_deref();
    let is_user = uid.is_some_and(|uid| users.contains(&uid));
    (pod.has_ended() && !is_user).then(|| {
        let because = format!(
            "the pod has {}, and no longer needs the claim",
            phase.to_lowercase()
        );
        (ClaimStep::NotNeeded, because, String::new())
    })
}

/// The step of an entry that needs no claim.
pub(super) fn not_needed() -> (ClaimStep, String, String) {
    (
        ClaimStep::NotNeeded,
        "the pod needs no claim here".into(),
        String::new(),
    )
}

/// The step of an entry whose claim does not exist.
pub(super) fn claim_missing(claim: Option<&str>, template: Option<&str>) -> (ClaimStep, String, String) {
    let (because, advice) = match (claim, template) {
        (Some(name), _) => (
            format!("there is no ResourceClaim {name} in the pod's namespace"),
            "create it".to_owned(),
        ),
        (None, Some(template)) => (
            format!("the claim of ResourceClaimTemplate {template} does not exist yet"),
            format!("check that the template exists: kubectl get resourceclaimtemplate {template}"),
        ),
        (None, None) => (
            "the pod names neither a claim nor a template".to_owned(),
            "name one".to_owned(),
        ),
    };
    (ClaimStep::ClaimMissing, because, advice)
}

/// The step of an entry whose claim belongs to another pod.
pub(super) fn claim_not_owned(claim: &str) -> (ClaimStep, String, String) {
    (
        ClaimStep::ClaimNotOwned,
        format!("ResourceClaim {claim} exists and was not made for this pod"),
        "delete that claim, or rename the pod or its claim".into(),
    )
}

/// The step of a claim that is being deleted.
pub(super) fn deleting(pods: &[String], finalizers: &[String]) -> (ClaimStep, String, String) {
    if !pods.is_empty() {
        return (
            ClaimStep::Deleting,
            format!("it is being deleted, and still used by {}", pods.join(", ")),
            "it is deleted when these pods have ended".into(),
        );
    }
    let finalizers = finalizers.join(", ");
    (
        ClaimStep::Deleting,
        format!("it is being deleted, and waits for {finalizers}"),
        "the driver of each finalizer must run to remove it".into(),
    )
}

fn allocated(claim: &ResourceClaim, pod: Option<&PartialPod>) -> (ClaimStep, String, String) {
    if claim.status.deallocation_requested {
        return (
            ClaimStep::DeallocationRequested,
            "it is allocated where the pod cannot run, and will be deallocated".into(),
            String::new(),
        );
    }
    let allocation = claim.status.allocation.as_ref();
    let users_max = match allocation {
        Some(allocation) if !allocation.shareable => 1,
        _ => RESERVED_FOR_MAX,
    };
    reserved(&users(claim), users_max, pod)
}

/// The step of a claim that is allocated and reserved for users, given by uid. It may have `users_max` of them.
pub(super) fn reserved(
    users: &[&str],
    users_max: usize,
    pod: Option<&PartialPod>,
) -> (ClaimStep, String, String) {
    let nothing = String::new();
    let Some(pod) = pod else {
        return match users.len() {
            0 => (
                ClaimStep::Allocated,
                "it is allocated, and no pod uses it".into(),
                nothing,
            ),
            number => (
                ClaimStep::InUse,
                format!("it is allocated and reserved for {number} pod(s)"),
                nothing,
            ),
        };
    };
    if !users.contains(&pod.metadata.uid.as_deref().unwrap_or_default()) {
        let advice = match users.len() {
            number if number < users_max => nothing,
            _ if users_max == 1 => {
                "the claim is for one pod at a time: use a template, which creates a claim for each pod"
                    .into()
            }
            _ => format!("a claim serves at most {users_max} pods: create another one"),
        };
        return (
            ClaimStep::WaitsForReservation,
            format!("it is allocated, and reserved for {} other pod(s)", users.len()),
            advice,
        );
    }
    on_node(pod)
}

/// The step of a claim that is allocated and reserved for the pod.
fn on_node(pod: &PartialPod) -> (ClaimStep, String, String) {
    let nothing = String::new();
    let node = pod.node_name();
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    match (node, phase) {
        (Some(node), Some("Running")) => (
            ClaimStep::InUse,
            format!("the pod runs with it on {node}"),
            nothing,
        ),
        (Some(_), Some(phase @ ("Succeeded" | "Failed"))) => (
            ClaimStep::InUse,
            format!("the pod has {}", phase.to_lowercase()),
            "it will be deallocated".into(),
        ),
        (Some(node), _) => (
            ClaimStep::Preparing,
            format!("kubelet on {node} has to prepare it and start the pod"),
            format!("if this persists, see the pod's events and the log of the companion on {node}"),
        ),
        (None, _) => (
            ClaimStep::WaitsForBinding,
            "it is allocated for the pod, which the scheduler has not bound yet".into(),
            "other claims or requirements of the pod delay it: kubectl describe pod".into(),
        ),
    }
}

fn waiting(claim: &ResourceClaim, input: &ExplainInput<'_>) -> (ClaimStep, String, String) {
    let total = input.nodes.len();
    let able = input.nodes.values().filter(|reason| reason.is_none()).count();
    let immediate = claim.spec.allocation_mode == Some(AllocationMode::Immediate);
    if total == 0 && input.wants.is_none() {
        return (
            ClaimStep::WaitsForScheduler,
            "it is not allocated yet, and the suitable nodes are unknown".into(),
            "with the right to list classes, parameters and inventories, this command evaluates the nodes; see also the pod's events: \
             kubectl describe pod"
                .into(),
        );
    }
    if able == 0 {
        return (
            ClaimStep::WaitsForDevice,
            format!("none of {total} nodes can serve it now"),
            "it is evaluated again as soon as a device is freed, added or repaired; to speed this up, \
             delete a pod that holds one (drayman devices), add a node, or request less"
                .into(),
        );
    }
    if immediate {
        return (
            ClaimStep::Allocating,
            format!("{able} of {total} nodes can serve it: it is allocated at once"),
            "if this persists, check that the controller runs (drayman doctor)".into(),
        );
    }
    let Some(context) = input.context.filter(|_| input.pod.is_some()) else {
        return (
            ClaimStep::WaitsForScheduler,
            "it is allocated when a pod needs it; the scheduler has not requested it yet".into(),
            if input.pod.is_some() {
                "see other causes with kubectl describe pod".into()
            } else {
                "nothing is wrong: create a pod that names it".into()
            },
        );
    };
    let selected = context.spec.selected_node.as_str();
    if input.nodes.get(selected).is_some_and(Option::is_none) {
        return (
            ClaimStep::Allocating,
            format!("the scheduler has chosen {selected}, which can serve it"),
            "if this persists, check that the controller runs (drayman doctor)".into(),
        );
    }
    (
        ClaimStep::WaitsForScheduler,
        format!("{able} of {total} nodes can serve it; the scheduler has not chosen one of them yet"),
        "it tries again within seconds; if this persists, other requirements of the pod are not met there: kubectl describe pod".into(),
    )
}

#[cfg(test)]
mod tests;
