//! `drayman explain` in structured mode: the scheduler allocates, so its decision is computed from slices, classes and claims.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::Client;
use kube::api::ObjectMeta;

use super::answer::{ExplainedClaims, about, unless_forbidden};
use crate::cli::diagnose::explain::claim_of;
use crate::cli::diagnose::structured::doctor::{self, GATES};
use crate::cli::diagnose::structured::explain::{
    Nodes, StructuredExplainInput, evaluate_nodes, explain, find, is_waiting,
};
use crate::cli::error::Error;
use crate::cli::objects::PartialPod;
use crate::cli::tool::feature_gates;
use crate::cli::tool::read::{self, ClaimScope, Namespaces};
use crate::core::claims::Resolved;
use crate::core::scheduler::{AllocatedDevices, ClusterState};
use crate::host::selectors::with_selectors;

/// Explains the claims of the pod; without a pod, the claim of this name. `None` if it does not exist.
pub(super) async fn explain_claims(
    client: &Client,
    namespace: &str,
    driver: &str,
    pod: Option<&PartialPod>,
    name: &str,
) -> Result<Option<ExplainedClaims>, Error> {
    let claims = read::structured_claims(client, &Namespaces::AllOr(namespace.to_owned())).await?;
    let found: Vec<_> = match (pod, claims.named(namespace, name)) {
        (Some(pod), _) => {
            let entries = pod
                .spec
                .iter()
                .flat_map(|spec| spec.resource_claims.iter().flatten());
            entries
                .map(|entry| (Some(entry), find(pod, entry, &claims.items)))
                .collect()
        }
        (None, Some(claim)) => vec![(None, Resolved::Claim(claim))],
        (None, None) => return Ok(None),
    };
    let mut own: Vec<&ResourceClaim> = Vec::new();
    for (_, found) in &found {
        // Two entries may name one claim.
        own.extend(
            claim_of(*found)
                .filter(|claim| !own.iter().any(|other| other.metadata.name == claim.metadata.name)),
        );
    }
    let mut classes = None;
    let mut nodes = None;
    let (mut unused_gates, mut old_kubelets) = (Vec::new(), Vec::new());
    if own.iter().any(|claim| is_waiting(claim)) && !pod.is_some_and(PartialPod::has_ended) {
        classes = unless_forbidden(
            read::all::<DeviceClass>(client).await,
            "deviceclasses: the matching devices are unknown",
        )?;
        let slices = unless_forbidden(
            read::slices(client).await,
            "resourceslices: the matching devices are unknown",
        )?;
        if let (Some(classes), Some(slices)) = (&classes, &slices) {
            let listed = unless_forbidden(
                read::all::<Node>(client).await,
                "nodes: only those with devices are shown",
            )?;
            // Only the objects of nodes show which of them the pod can use.
            let pod = pod.filter(|_| listed.is_some());
            let all_nodes = listed.unwrap_or_else(|| nodes_of(slices));
            nodes = Some(evaluate(slices, classes, &claims.items, &all_nodes, pod, &own)?);
            unused_gates = feature_gates::unused_gates(client).await?;
            // Otherwise no node uses the gates.
            if unused_gates.len() < GATES.len() {
                old_kubelets = doctor::old_kubelets(driver, slices, &all_nodes);
            }
        }
    }
    let waiting: Vec<_> = own.iter().filter(|claim| is_waiting(claim)).collect();
    let mut explanations = Vec::new();
    for (entry, found) in &found {
        let name = claim_of(*found).map(|claim| &claim.metadata.name);
        let index = waiting
            .iter()
            .position(|claim| Some(&claim.metadata.name) == name);
        explanations.push(explain(&StructuredExplainInput {
            driver,
            unused_gates: &unused_gates,
            old_kubelets: &old_kubelets,
            of_one_namespace: matches!(claims.scope, ClaimScope::Namespace(_)),
            pod,
            entry: *entry,
            found: *found,
            index: index.unwrap_or_default(),
            classes: classes.as_deref(),
            nodes: nodes.as_ref(),
        }));
    }
    Ok(Some(ExplainedClaims {
        explanations,
        about: own.into_iter().map(about).collect(),
    }))
}

/// Returns the nodes that slices name.
fn nodes_of(slices: &[ResourceSlice]) -> Vec<Node> {
    let mut names: Vec<&String> = slices
        .iter()
        .filter_map(|slice| slice.spec.node_name.as_ref())
        .collect();
    names.sort();
    names.dedup();
    let node = |name: &String| Node {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            ..ObjectMeta::default()
        },
        ..Node::default()
    };
    names.into_iter().map(node).collect()
}

fn evaluate(
    slices: &[ResourceSlice],
    classes: &[DeviceClass],
    claims: &[ResourceClaim],
    nodes: &[Node],
    pod: Option<&PartialPod>,
    own: &[&ResourceClaim],
) -> Result<Nodes, Error> {
    let allocated_devices = AllocatedDevices::read(claims);
    let cluster = ClusterState {
        slices,
        classes,
        allocated_devices: &allocated_devices,
    };
    with_selectors(|evaluate| evaluate_nodes(cluster, nodes, pod, own, evaluate))
        .map_err(|error| anyhow::anyhow!(error).into())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::cli::diagnose::structured::tests::{DRIVER, camera, claim, class, held, node, pod, slice};
    use crate::cli::output::{Printable as _, Style};
    use crate::cli::tool::explain::answer::{Explained, ObjectArgument};
    use crate::cli::tool::explain::explain_object;
    use crate::cli::tool::tests::Server;

    fn server() -> Server {
        let mut waiting = pod("second", &["waits"]);
        waiting["status"]["conditions"] = json!([{
            "type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: 2 cannot allocate all claims.",
        }]);
        Server::structured()
            .with_object("/api/v1/namespaces/shop/pods/second", waiting)
            .with("/api/v1/nodes", &[node("node-a"), node("node-b")])
            .with("/apis/resource.k8s.io/v1/deviceclasses", &[class("cameras")])
            .with(
                "/apis/resource.k8s.io/v1/resourceslices",
                &[slice("node-a", json!([camera("a")]))],
            )
            .with(
                "/apis/resource.k8s.io/v1/resourceclaims",
                &[claim("waits", "cameras", 1), held("one", "node-a", &["a"])],
            )
    }

    async fn ask(server: Server, subject: ObjectArgument) -> Option<Explained> {
        explain_object(&server.client(), "shop", DRIVER, &subject)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn a_waiting_pod_is_explained_as_by_the_scheduler() {
        let answer = ask(server(), ObjectArgument::Either("second".into()))
            .await
            .unwrap();
        assert_eq!(
            answer.text(Style::default()),
            "Pod shop/second: Pending, no node yet\n  \
             scheduler says: 0/2 nodes are available: 2 cannot allocate all claims.\n\n\
             Claim waits (ResourceClaim shop/waits): WaitsForDevice\n  \
             none of 2 nodes can serve it now\n  \
             class cameras, driver drayman.dev\n  \
             wants device: 1 of class cameras\n  \
             nodes:\n    \
             node-b   no ResourceSlice is for this node: no driver runs here\n    \
             node-a   request device: 0 of 1 matching devices free, 1 needed (1 held)\n  \
             matching devices:\n    \
             node-a/a   request device   held by shop/one\n  \
             what to do: the scheduler tries again as soon as a device is freed, added or repaired; to speed this up, delete a pod \
             that holds one (drayman devices), add a node, or request less\n"
        );
    }

    #[tokio::test]
    async fn a_node_that_the_pod_cannot_use_does_not_matter() {
        const SECOND: &str = "/api/v1/namespaces/shop/pods/second";
        let mut tainted = node("node-a");
        tainted["spec"]["taints"] = json!([{ "key": "busy", "effect": "NoSchedule" }]);
        let mut failing = claim("waits", "cameras", 1);
        failing["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
            json!([{ "cel": { "expression": "device.attributes['drayman.dev'].model == 'x'" } }]);
        let server = server()
            .with("/api/v1/nodes", &[tainted, node("node-b")])
            .with("/apis/resource.k8s.io/v1/resourceclaims", &[failing]);
        let of_server = async |server: Server| {
            let answer = ask(server, ObjectArgument::Pod("second".into())).await.unwrap();
            serde_json::to_value(answer).unwrap()["claims"][0].take()
        };
        let found = of_server(server.clone()).await;
        assert_eq!(found["step"], "WaitsForDevice", "{found}");
        let advice = "the pod cannot use some of these nodes, for the reasons shown; no driver offers devices on the others";
        assert!(found["advice"].as_str().unwrap().starts_with(advice), "{found}");
        let reason = "it has the taint busy:NoSchedule, which the pod does not tolerate";
        assert_eq!(found["nodes"][0]["reason"], reason, "{found}");
        let mut tolerant = pod("second", &["waits"]);
        tolerant["spec"]["tolerations"] = json!([{ "operator": "Exists" }]);
        let found = of_server(server.clone().with_object(SECOND, tolerant)).await;
        assert_eq!(found["step"], "ParametersInvalid", "{found}");
        // Without the nodes, their labels are unknown.
        let mut selecting = pod("second", &["waits"]);
        selecting["spec"]["nodeSelector"] = json!({ "zone": "one" });
        let unlisted = server.without_right("/api/v1/nodes");
        let found = of_server(unlisted.with_object(SECOND, selecting)).await;
        assert_eq!(found["step"], "ParametersInvalid", "{found}");
    }

    #[tokio::test]
    async fn nothing_is_evaluated_for_a_pod_that_has_ended() {
        let mut ended = pod("second", &["waits"]);
        ended["status"]["phase"] = json!("Succeeded");
        let server = server()
            .with_object("/api/v1/namespaces/shop/pods/second", ended)
            .failing("/apis/resource.k8s.io/v1/resourceslices", 500);
        let answer = ask(server, ObjectArgument::Pod("second".into())).await.unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        assert_eq!(answer["claims"][0]["step"], "NotNeeded", "{answer}");
    }

    #[tokio::test]
    async fn a_gate_is_not_called_off_before_it_is_used() {
        let server = server().with_object("/version", json!({ "major": "1", "minor": "35" }));
        let answer = ask(server, ObjectArgument::Pod("second".into())).await.unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        let because = answer["claims"][0]["because"].as_str().unwrap();
        assert!(
            because.contains("; DRADeviceTaints is used from Kubernetes 1.36 on: companions leave out"),
            "{because}"
        );
        assert!(!because.contains("is off"), "{because}");
    }

    #[tokio::test]
    async fn too_few_free_devices_are_not_worth_waiting_for() {
        let claims = [claim("waits", "cameras", 2)];
        let server = server().with("/apis/resource.k8s.io/v1/resourceclaims", &claims);
        let answer = ask(server, ObjectArgument::Pod("second".into())).await.unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        let claim = &answer["claims"][0];
        assert_eq!(claim["step"], "WaitsForDevice");
        let advice = claim["advice"].as_str().unwrap();
        assert!(
            advice.starts_with("no device that the claim wants is held"),
            "{advice}"
        );
    }

    #[tokio::test]
    async fn a_cluster_without_a_running_driver_is_for_the_operator() {
        let none: [Value; 0] = [];
        let server = server().with("/apis/resource.k8s.io/v1/resourceslices", &none);
        let answer = ask(server, ObjectArgument::Pod("second".into())).await.unwrap();
        let text = answer.text(Style::default());
        assert!(
            text.contains("what to do: no driver offers devices on any of these nodes: `drayman doctor`"),
            "{text}"
        );
        assert!(
            text.contains("  class cameras\n"),
            "no slice names the driver: {text}"
        );
    }

    #[tokio::test]
    async fn a_claim_is_explained_without_a_pod() {
        let answer = ask(server(), ObjectArgument::Claim("one".into())).await.unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        assert_eq!(answer["claims"][0]["step"], "InUse");
        assert_eq!(answer["claims"][0]["driver"], DRIVER);
        assert_eq!(answer["claims"][0].get("devices"), None::<&Value>);
        assert!(
            ask(server(), ObjectArgument::Claim("none".into()))
                .await
                .is_none()
        );
        assert!(ask(server(), ObjectArgument::Pod("none".into())).await.is_none());
    }

    #[tokio::test]
    async fn without_the_right_to_read_slices_nodes_are_unknown() {
        let server = server().without_right("/apis/resource.k8s.io/v1/resourceslices");
        let answer = ask(server, ObjectArgument::Pod("second".into())).await.unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        assert_eq!(answer["claims"][0]["step"], "WaitsForScheduler");
        assert_eq!(
            answer["claims"][0]["because"],
            "it is not allocated yet, and the suitable nodes are unknown"
        );
    }

    #[tokio::test]
    async fn without_the_right_to_read_events_the_rest_is_shown() {
        let server = server().without_right("/api/v1/namespaces/shop/events");
        let answer = ask(server, ObjectArgument::Pod("second".into())).await.unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        assert_eq!(answer["claims"][0]["step"], "WaitsForDevice");
        assert_eq!(answer["events"], json!([]));
    }
}
