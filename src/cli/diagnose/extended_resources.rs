//! Explains pods that request devices as extended resources in container limits; no claim records their state.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::Serialize;

use super::explain::NodeExplanation;
use crate::cli::objects::{PartialContainer, PartialPod};
use crate::core::scheduler;

/// Reason for a pod that kubelet rejects because its devices are unavailable (`pkg/kubelet/lifecycle/predicate.go`).
const NOT_ADMITTED: &str = "UnexpectedAdmissionError";

/// Step of a pod with an extended resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
pub enum ExtendedResourceStep {
    /// No node offers the resource.
    NotOffered,
    /// No node has enough left.
    WaitsForDevice,
    /// At least one node has enough left, but the scheduler has not chosen one.
    WaitsForScheduler,
    /// Kubelet has rejected the pod permanently because the resource was unavailable.
    TurnedAway,
    /// The pod is bound, but kubelet has not started it yet.
    Starting,
    /// The pod uses the resource.
    InUse,
    /// The pod has ended.
    Ended,
}

/// Explanation of one extended resource of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExtendedResourceExplanation {
    /// Resource name, such as `drayman.dev/fuse`.
    pub resource: String,
    /// Requested amount.
    pub amount: u64,
    /// Current step.
    pub step: ExtendedResourceStep,
    /// Why the pod is at this step.
    pub because: String,
    /// Suggested fix; absent if no action is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Results for each node that offers the resource, as long as they matter.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeExplanation>,
}

/// Returns the extended resources that a pod requests, by name; native resources (CPU, memory, huge pages) are omitted.
/// Init containers run one after the other before the others and release their resources, unless restartable
/// (`restartPolicy: Always`): see `PodLimits` in `pkg/api/v1/resource`.
pub fn requested(pod: &PartialPod) -> BTreeMap<String, u64> {
    let Some(spec) = &pod.spec else {
        return BTreeMap::new();
    };
    let (mut staying, mut most) = (BTreeMap::new(), BTreeMap::new());
    for container in spec.init_containers.iter().flatten() {
        let mut together = staying.clone();
        add(&mut together, container);
        if container.restart_policy.as_deref() == Some("Always") {
            staying.clone_from(&together);
        }
        raise(&mut most, together);
    }
    for container in &spec.containers {
        add(&mut staying, container);
    }
    raise(&mut most, staying);
    most.retain(|_, amount| *amount > 0);
    most
}

fn add(sums: &mut BTreeMap<String, u64>, container: &PartialContainer) {
    for (resource, amount) in limits(container) {
        let sum = sums.entry(resource).or_default();
        *sum = sum.saturating_add(amount);
    }
}

fn raise(most: &mut BTreeMap<String, u64>, amounts: BTreeMap<String, u64>) {
    for (resource, amount) in amounts {
        let known = most.entry(resource).or_default();
        *known = (*known).max(amount);
    }
}

fn limits(container: &PartialContainer) -> impl Iterator<Item = (String, u64)> {
    let limits = container
        .resources
        .as_ref()
        .and_then(|resources| resources.limits.as_ref());
    let extended = limits.into_iter().flatten().filter(|(name, _)| is_extended(name));
    extended.map(|(name, amount)| (name.clone(), number(amount)))
}

/// The amount of an extended resource, which is an integer. The API server stores 1000 as `1k`.
fn number(amount: &Quantity) -> u64 {
    let amount = scheduler::Quantity::read(amount).map(|amount| amount.to_string());
    amount
        .ok()
        .and_then(|amount| amount.parse().ok())
        .unwrap_or_default()
}

/// Mirrors `IsExtendedResourceName` in `pkg/apis/core/v1/helper`.
fn is_extended(name: &str) -> bool {
    name.split_once('/').is_some_and(|(domain, _)| {
        domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io") && !name.starts_with("requests.")
    })
}

/// Explains each extended resource of a pod. `pods` are the pods of all namespaces, for the amounts in use. `None`
/// means that the user may not read the objects.
pub fn explain(
    pod: &PartialPod,
    nodes: Option<&[Node]>,
    pods: Option<&[PartialPod]>,
) -> Vec<ExtendedResourceExplanation> {
    let explained = requested(pod).into_iter().map(|(resource, amount)| {
        let (step, because, advice, nodes) = current_step(pod, &resource, amount, nodes, pods);
        ExtendedResourceExplanation {
            resource,
            amount,
            step,
            because,
            advice: Some(advice).filter(|advice| !advice.is_empty()),
            nodes,
        }
    });
    explained.collect()
}

fn current_step(
    pod: &PartialPod,
    resource: &str,
    amount: u64,
    nodes: Option<&[Node]>,
    pods: Option<&[PartialPod]>,
) -> (ExtendedResourceStep, String, String, Vec<NodeExplanation>) {
    let status = pod.status.as_ref();
    let phase = status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default();
    let reason = status.and_then(|status| status.reason.as_deref());
    let (step, because, advice) = match (pod.node_name(), phase, reason) {
        (Some(node), "Failed", Some(NOT_ADMITTED)) => {
            let message = status
                .and_then(|status| status.message.as_deref())
                .unwrap_or(NOT_ADMITTED);
            (
                ExtendedResourceStep::TurnedAway,
                format!("kubelet on {node} rejected the pod: {message}"),
                "delete the pod: kubelet does not retry it, and its owner creates another one",
            )
        }
        _ if pod.has_ended() => (
            ExtendedResourceStep::Ended,
            format!("the pod has {}", phase.to_lowercase()),
            "",
        ),
        (Some(node), "Running", _) => (
            ExtendedResourceStep::InUse,
            format!("the pod runs with it on {node}"),
            "",
        ),
        (Some(node), ..) => (
            ExtendedResourceStep::Starting,
            format!("kubelet on {node} has to allocate it and start the pod"),
            "if this persists, see the pod's events and the log of the companion there",
        ),
        (None, ..) => match nodes {
            Some(nodes) => return waiting(resource, amount, nodes, pods),
            None => (
                ExtendedResourceStep::WaitsForScheduler,
                "no node is selected, and the nodes that offer it are unknown".to_owned(),
                "see the scheduler's events: kubectl describe pod",
            ),
        },
    };
    (step, because, advice.to_owned(), Vec::new())
}

fn waiting(
    resource: &str,
    amount: u64,
    nodes: &[Node],
    pods: Option<&[PartialPod]>,
) -> (ExtendedResourceStep, String, String, Vec<NodeExplanation>) {
    let used = pods.map(|pods| used(pods, resource));
    let offering: Vec<(&str, u64)> = nodes.iter().filter_map(|node| offers(node, resource)).collect();
    let fits: Vec<NodeExplanation> = offering
        .iter()
        .map(|(node, offered)| NodeExplanation {
            node: (*node).to_owned(),
            reason: why_not(
                *offered,
                amount,
                used.as_ref()
                    .map(|used| used.get(node).copied().unwrap_or_default()),
            ),
        })
        .collect();
    let able = fits.iter().filter(|fit| fit.reason.is_none()).count();
    let (step, because, advice) = if fits.is_empty() {
        (
            ExtendedResourceStep::NotOffered,
            format!("none of {} nodes offers it", nodes.len()),
            "the nodes' configuration sets a kind's mode and resource name; check the name, and that the companion runs there \
             (drayman doctor)",
        )
    } else if offering.iter().all(|(_, offered)| *offered < amount) {
        (
            ExtendedResourceStep::WaitsForDevice,
            format!(
                "none of the {} nodes that offer it offers as many as {amount}",
                fits.len()
            ),
            "request less, or check for devices that are unhealthy or held by claims (drayman devices)",
        )
    } else if able == 0 {
        (
            ExtendedResourceStep::WaitsForDevice,
            format!("none of the {} nodes that offer it has {amount} left", fits.len()),
            "it is bound as soon as a pod with one ends; with mode both, also when a claim frees one (drayman devices)",
        )
    } else {
        (
            ExtendedResourceStep::WaitsForScheduler,
            format!(
                "{able} of the {} nodes that offer it have {amount} left",
                fits.len()
            ),
            "if this persists, other requirements of the pod are not met there: kubectl describe pod",
        )
    };
    (step, because, advice.to_owned(), fits)
}

/// Returns the node's name and its allocatable amount, if its status lists the resource (an amount of 0 included).
fn offers<'a>(node: &'a Node, resource: &str) -> Option<(&'a str, u64)> {
    let allocatable = node.status.as_ref()?.allocatable.as_ref()?;
    let amount = allocatable.get(resource)?;
    Some((node.metadata.name.as_deref().unwrap_or_default(), number(amount)))
}

/// Sums the amounts that pods use, by node.
fn used<'a>(pods: &'a [PartialPod], resource: &str) -> BTreeMap<&'a str, u64> {
    let mut used: BTreeMap<&str, u64> = BTreeMap::new();
    for pod in pods {
        if let Some(node) = pod.node_name()
            && !pod.has_ended()
            && let Some(amount) = requested(pod).remove(resource)
        {
            let sum = used.entry(node).or_default();
            *sum = sum.saturating_add(amount);
        }
    }
    used
}

fn why_not(offered: u64, amount: u64, used: Option<u64>) -> Option<String> {
    let Some(used) = used else {
        return (offered < amount).then(|| format!("it offers {offered}"));
    };
    if offered == 0 {
        return Some("it offers 0: its devices are gone, unhealthy or held by claims".to_owned());
    }
    (offered.saturating_sub(used) < amount).then(|| format!("{used} of {offered} in use"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const RESOURCE: &str = "drayman.dev/fuse";

    fn pod(spec: &Value, status: &Value) -> PartialPod {
        serde_json::from_value(json!({ "metadata": { "name": "p" }, "spec": spec, "status": status }))
            .unwrap()
    }

    fn asking(amount: &str, node: Option<&str>, phase: &str) -> PartialPod {
        let container = json!({ "name": "c", "resources": { "limits": { RESOURCE: amount, "cpu": "2" } } });
        pod(
            &json!({ "nodeName": node, "containers": [container] }),
            &json!({ "phase": phase }),
        )
    }

    fn node(name: &str, amount: &str) -> Node {
        let allocatable = if amount.is_empty() {
            json!({})
        } else {
            json!({ RESOURCE: amount })
        };
        serde_json::from_value(
            json!({ "metadata": { "name": name }, "status": { "allocatable": allocatable } }),
        )
        .unwrap()
    }

    fn one(pod: &PartialPod, nodes: &[Node], pods: Option<&[PartialPod]>) -> ExtendedResourceExplanation {
        let mut all = explain(pod, Some(nodes), pods);
        assert_eq!(all.len(), 1);
        all.remove(0)
    }

    fn reasons(explanation: &ExtendedResourceExplanation) -> Vec<(&str, Option<&str>)> {
        let fits = explanation.nodes.iter();
        fits.map(|fit| (fit.node.as_str(), fit.reason.as_deref()))
            .collect()
    }

    #[test]
    fn amounts_are_quantities() {
        let large = asking("1k", None, "Pending");
        assert_eq!(requested(&large), BTreeMap::from([(RESOURCE.to_owned(), 1000)]));
        let explanation = one(&large, &[node("a", "2k"), node("b", "999")], Some(&[]));
        assert_eq!(explanation.amount, 1000);
        assert_eq!(
            reasons(&explanation),
            [("a", None), ("b", Some("0 of 999 in use"))]
        );
    }

    #[test]
    fn only_restartable_init_containers_keep_their_amounts() {
        let container = |amount: &str, restart: Option<&str>| {
            json!({ "name": "c", "restartPolicy": restart, "resources": { "limits": {
                RESOURCE: amount, "memory": "1Gi", "hugepages-2Mi": "2", "kubernetes.io/x": "1", "example.com/zero": "0" } } })
        };
        let spec = json!({
            "initContainers": [container("3", None), container("1", Some("Always"))],
            "containers": [container("1", None), container("2", None)],
        });
        assert_eq!(
            requested(&pod(&spec, &json!({}))),
            BTreeMap::from([(RESOURCE.to_owned(), 4)])
        );
        // A restartable init container keeps its devices while later containers run.
        let spec = json!({
            "initContainers": [container("2", Some("Always")), container("3", None)],
            "containers": [container("1", None)],
        });
        assert_eq!(
            requested(&pod(&spec, &json!({}))),
            BTreeMap::from([(RESOURCE.to_owned(), 5)])
        );
        let spec = json!({ "initContainers": [container("3", None)], "containers": [container("1", None)] });
        assert_eq!(
            requested(&pod(&spec, &json!({}))),
            BTreeMap::from([(RESOURCE.to_owned(), 3)])
        );
    }

    #[test]
    fn a_waiting_pod_lists_the_nodes_with_too_few() {
        let waiting = asking("2", None, "Pending");
        let nodes = [node("a", "2"), node("b", "0"), node("c", ""), node("d", "3")];
        let pods = [
            asking("1", Some("a"), "Running"),
            asking("2", Some("d"), "Pending"),
            // A finished pod holds nothing.
            asking("1", Some("d"), "Succeeded"),
            waiting.clone(),
        ];
        let explanation = one(&waiting, &nodes, Some(&pods));
        assert_eq!(
            (explanation.step, explanation.amount),
            (ExtendedResourceStep::WaitsForDevice, 2)
        );
        let none = "it offers 0: its devices are gone, unhealthy or held by claims";
        assert_eq!(
            reasons(&explanation),
            [
                ("a", Some("1 of 2 in use")),
                ("b", Some(none)),
                ("d", Some("2 of 3 in use"))
            ]
        );
        let explanation = one(&waiting, &nodes, Some(&pods[..1]));
        assert_eq!(explanation.step, ExtendedResourceStep::WaitsForScheduler);
        assert_eq!(explanation.because, "1 of the 3 nodes that offer it have 2 left");
        // Without access to all pods, only certain results are reported.
        let explanation = one(&waiting, &nodes[..2], None);
        assert_eq!(reasons(&explanation), [("a", None), ("b", Some("it offers 0"))]);
        let explanation = one(&asking("4", None, "Pending"), &nodes, Some(&[]));
        assert_eq!(explanation.step, ExtendedResourceStep::WaitsForDevice);
        assert!(
            explanation.because.ends_with("offers as many as 4"),
            "{explanation:?}"
        );
        let explanation = one(&waiting, &nodes[2..3], Some(&pods));
        assert_eq!(
            (explanation.step, explanation.nodes.len()),
            (ExtendedResourceStep::NotOffered, 0)
        );
        let explanation = explain(&waiting, None, None);
        assert_eq!(
            explanation.first().map(|explanation| explanation.step),
            Some(ExtendedResourceStep::WaitsForScheduler)
        );
    }

    #[test]
    fn a_bound_pod_is_starting_running_ended_or_rejected() {
        for (phase, step) in [
            ("Pending", ExtendedResourceStep::Starting),
            ("Running", ExtendedResourceStep::InUse),
            ("Failed", ExtendedResourceStep::Ended),
        ] {
            assert_eq!(one(&asking("1", Some("a"), phase), &[], None).step, step);
        }
        // The scheduler did not bind it before it ended.
        let mut unbound = asking("1", None, "Failed");
        unbound.status.as_mut().unwrap().reason = Some(NOT_ADMITTED.to_owned());
        let explanation = one(&unbound, &[node("a", "1")], Some(&[]));
        assert_eq!(explanation.step, ExtendedResourceStep::Ended);
        let mut refused = asking("1", Some("a"), "Failed");
        let status = refused.status.as_mut().unwrap();
        status.reason = Some(NOT_ADMITTED.to_owned());
        status.message = Some("Allocate failed due to no healthy devices present".to_owned());
        let explanation = one(&refused, &[], None);
        assert_eq!(explanation.step, ExtendedResourceStep::TurnedAway);
        assert!(
            explanation.because.contains("no healthy devices"),
            "{explanation:?}"
        );
        assert!(explanation.advice.is_some());
    }
}
