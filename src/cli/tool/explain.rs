//! `drayman explain POD|CLAIM`: shows the current step, per node what blocks it, and the fix. The driver evaluates the
//! nodes with the controller's code on objects that this command reads; it reserves and writes nothing. In structured mode,
//! [`structured`] evaluates them as the scheduler does.

pub(crate) mod answer;
mod structured;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap_complete::ArgValueCompleter;
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use kube::{Client, ResourceExt as _};
use tokio_util::sync::CancellationToken;

use self::answer::{Explained, ExplainedClaims, ObjectArgument, about, unless_forbidden};
use super::kubectl_flags::KubectlFlags;
use super::read::{ClaimScope, Namespaces, ServedApi};
use super::{candidates, read};
use crate::api::crd::{DeviceClaimParameters, DeviceClassParameters, NodeInventory};
use crate::api::resource::{Pod, PodResourceClaim, PodSchedulingContext, ResourceClaim, ResourceClass};
use crate::cli::diagnose::explain::{ClaimIndex, ExplainInput, claim_of, class_of, explain, find};
use crate::cli::diagnose::inventories_of;
use crate::cli::error::Error;
use crate::cli::objects::PartialPod;
use crate::cli::output::OutputFlags;
use crate::cli::runtime::block_on;
use crate::cli::value;
use crate::core::allocation::parameters::{Amount, DeviceRequests};
use crate::core::claims::Resolved;
use crate::driver::{ClaimRequest, Driver as _, Holding, Observation};
use crate::host::HostDriver;

/// Limit for the driver to read inventories and parameters.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// The fallback without the right to list an object that the driver's evaluation needs.
const FALLBACK: &str =
    "nodes are evaluated only from the controller's entries in the pod's scheduling context";

/// Show the current step of a pod or claim, the reason, and the fix
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// pod/NAME or claim/NAME; NAME alone means the pod, or the claim if there is no such pod
    #[arg(
        value_name = "POD|CLAIM",
        num_args = 1..=2,
        required = true,
        add = ArgValueCompleter::new(candidates::pods_and_claims)
    )]
    object: Vec<String>,

    /// Namespace. Default: the kubeconfig context's
    #[arg(short, long, value_name = "NAME", value_parser = value::namespace)]
    namespace: Option<String>,

    #[command(flatten)]
    cluster: KubectlFlags,

    #[command(flatten)]
    output: OutputFlags,
}

/// Prints the explanation. Returns exit code 1 if the object does not exist.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let subject = ObjectArgument::read(&arguments.object)?;
    let answer = block_on(async {
        let (client, context_namespace) = arguments.cluster.connect().await?;
        let namespace = arguments.namespace.clone().unwrap_or(context_namespace);
        explain_object(&client, &namespace, &arguments.cluster.driver.name, &subject).await
    })?;
    let Some(answer) = answer else {
        eprintln!(
            "error: {} does not exist; check the namespace (-n)",
            arguments.object.join("/")
        );
        return Ok(ExitCode::FAILURE);
    };
    arguments.output.print(&answer)?;
    Ok(ExitCode::SUCCESS)
}

/// Explains a pod or claim; `None` if it does not exist.
async fn explain_object(
    client: &Client,
    namespace: &str,
    driver: &str,
    subject: &ObjectArgument,
) -> Result<Option<Explained>, Error> {
    let api = read::api(client).await?;
    let (ObjectArgument::Pod(name) | ObjectArgument::Claim(name) | ObjectArgument::Either(name)) = subject;
    let pods = Api::<PartialPod>::namespaced(client.clone(), namespace);
    let pod = match subject {
        ObjectArgument::Claim(_) => None,
        _ => pods.get_opt(name).await.context("cannot read the pod")?,
    };
    if pod.is_none() && matches!(subject, ObjectArgument::Pod(_)) {
        return Ok(None);
    }
    let pod = pod.as_ref();
    let claims = match api {
        ServedApi::Structured => structured::explain_claims(client, namespace, driver, pod, name).await?,
        ServedApi::Classic => explain_claims(client, namespace, driver, pod, name).await?,
    };
    match claims {
        Some(claims) => Explained::of(client, namespace, pod, claims).await.map(Some),
        None => Ok(None),
    }
}

/// Explains the claims of the pod; without a pod, the claim of this name. For classic mode, and clusters without claims. `None` if it does
/// not exist.
async fn explain_claims(
    client: &Client,
    namespace: &str,
    driver: &str,
    pod: Option<&PartialPod>,
    name: &str,
) -> Result<Option<ExplainedClaims>, Error> {
    // Unlike the other type, this one has the claims of classic mode.
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let classic_pod = match pod {
        Some(_) => pods.get_opt(name).await.context("cannot read the pod")?,
        None => None,
    };
    let claims = read::claims(client, &Namespaces::AllOr(namespace.to_owned())).await?;
    // Pairs of entry and claim.
    let found: Vec<_> = match (&classic_pod, claims.named(namespace, name)) {
        (Some(pod), _) => {
            let (entries, index) = (pod.spec.resource_claims.iter(), ClaimIndex::new(&claims.items));
            entries
                .map(|entry| (Some(entry), find(pod, entry, &index)))
                .collect()
        }
        (None, Some(claim)) if pod.is_none() => vec![(None, Resolved::Claim(claim))],
        _ => return Ok(None),
    };
    let cluster = Reading {
        client,
        namespace,
        driver,
        claims: &claims,
    };
    cluster.explain(pod, classic_pod.as_ref(), &found).await.map(Some)
}

/// Access to the cluster and the claims read so far.
struct Reading<'a> {
    client: &'a Client,
    namespace: &'a str,
    driver: &'a str,
    claims: &'a read::ClaimList,
}

/// The driver's evaluation of a claim.
#[derive(Default)]
struct Evaluation {
    wants: Option<Result<String, String>>,
    nodes: BTreeMap<String, Option<String>>,
}

impl Reading<'_> {
    async fn explain(
        &self,
        pod: Option<&PartialPod>,
        classic_pod: Option<&Pod>,
        found: &[(Option<&PodResourceClaim>, Resolved<&ResourceClaim>)],
    ) -> Result<ExplainedClaims, Error> {
        let classes = unless_forbidden(
            read::classes(self.client).await,
            &format!("resourceclasses: {FALLBACK}"),
        )?;
        let context = match pod {
            Some(pod) => {
                let contexts: Api<PodSchedulingContext> =
                    Api::namespaced(self.client.clone(), self.namespace);
                read::get(&contexts, &pod.name_any())
                    .await
                    .context("cannot read the pod's scheduling context")?
            }
            None => None,
        };
        let has_ended = pod.is_some_and(PartialPod::has_ended);
        let mut evaluations: Vec<Evaluation> = match &classes {
            Some(classes) if !has_ended => self.ask_driver(classic_pod, found, classes).await?,
            _ => found.iter().map(|_| Evaluation::default()).collect(),
        };
        if let Some(context) = &context {
            // Without the driver's evaluation, the entries that the controller has written remain.
            let entries = &context.status.resource_claims;
            for (evaluation, (entry, _)) in evaluations.iter_mut().zip(found) {
                let is_answered =
                    entry.is_some_and(|entry| entries.iter().any(|written| written.name == entry.name));
                if evaluation.wants.is_none() && is_answered {
                    evaluation.nodes = context
                        .spec
                        .potential_nodes
                        .iter()
                        .map(|node| (node.clone(), None))
                        .collect();
                }
            }
            let evaluated_by_driver = evaluations.iter().all(|evaluation| evaluation.wants.is_some());
            if matches!(self.claims.scope, ClaimScope::Namespace(_)) || !evaluated_by_driver {
                ask_controller(&mut evaluations, found, context);
            }
        }
        let explanations = found
            .iter()
            .zip(&evaluations)
            .map(|((entry, found), evaluation)| {
                let wants = evaluation.wants.as_ref();
                explain(&ExplainInput {
                    driver: self.driver,
                    pod,
                    entry: *entry,
                    found: *found,
                    classes: classes.as_deref(),
                    wants: wants.map(|wants| wants.as_deref().map_err(String::as_str)),
                    context: context.as_ref(),
                    nodes: &evaluation.nodes,
                })
            });
        let claims = found.iter().filter_map(|(_, found)| claim_of(*found));
        Ok(ExplainedClaims {
            explanations: explanations.collect(),
            about: claims.map(about).collect(),
        })
    }

    /// Evaluates each unallocated claim of ours with the driver: its request and the nodes that can serve it.
    async fn ask_driver(
        &self,
        pod: Option<&Pod>,
        found: &[(Option<&PodResourceClaim>, Resolved<&ResourceClaim>)],
        classes: &[ResourceClass],
    ) -> Result<Vec<Evaluation>, Error> {
        let mut evaluations: Vec<Evaluation> = found.iter().map(|_| Evaluation::default()).collect();
        let ours = |found: Resolved<&ResourceClaim>| {
            let claim = claim_of(found).filter(|claim| claim.status.allocation.is_none())?;
            let class = class_of(claim, classes)?;
            let served = class.driver_name == self.driver && class.structured_parameters != Some(true);
            served.then(|| (claim.clone(), class.clone()))
        };
        let pending: Vec<_> = found.iter().map(|(_, found)| ours(*found)).collect();
        if pending.iter().all(Option::is_none) {
            return Ok(evaluations);
        }
        // The driver's watches would retry a forbidden list forever.
        let inventories = Api::<NodeInventory>::all(self.client.clone());
        let listed = unless_forbidden(
            read::can_list(&inventories).await,
            &format!("nodeinventories: {FALLBACK} (an operator can set rbac.readInventoriesByAuthenticated)"),
        )?;
        if listed.is_none() {
            return Ok(evaluations);
        }
        let of_classes = Api::<DeviceClassParameters>::all(self.client.clone());
        let of_claims = Api::<DeviceClaimParameters>::namespaced(self.client.clone(), self.namespace);
        let listed = [
            unless_forbidden(
                read::can_list(&of_classes).await,
                &format!("deviceclassparameters: {FALLBACK}"),
            )?,
            unless_forbidden(
                read::can_list(&of_claims).await,
                &format!("deviceclaimparameters in the namespace: {FALLBACK}"),
            )?,
        ];
        if listed.contains(&None) {
            return Ok(evaluations);
        }
        let ended = CancellationToken::new();
        let _end = ended.clone().drop_guard();
        let driver = HostDriver::start_for_namespace(self.client.clone(), self.driver, self.namespace, ended);
        let holds = |claim: &&ResourceClaim| claim.status.driver_name.as_deref() == Some(self.driver);
        let holdings = self.claims.items.iter().filter(holds).cloned().map(Holding::new);
        driver.observe(&Observation::All(holdings.collect())).await;
        tokio::time::timeout(READY_LIMIT, driver.ready()).await.context(
            "the inventories and parameters cannot be read: you need the right to list and watch nodeinventories, \
             deviceclassparameters and deviceclaimparameters (`drayman doctor` shows whether they are defined)",
        )?.map_err(anyhow::Error::from)?;
        let (mut requests, mut asked) = (Vec::new(), Vec::new());
        for ((pending, (entry, _)), evaluation) in pending.into_iter().zip(found).zip(&mut evaluations) {
            let Some((claim, class)) = pending else { continue };
            let parameters = async {
                let class_parameters = driver.class_parameters(&class).await?;
                let claim_parameters = driver.claim_parameters(&claim, &class, &class_parameters).await?;
                Ok::<_, crate::driver::DriverError>((class_parameters, claim_parameters))
            };
            match parameters.await {
                Ok((class_parameters, claim_parameters)) => {
                    evaluation.wants = Some(Ok(in_words(&claim_parameters)));
                    let name = entry.map(|entry| entry.name.as_str()).unwrap_or_default();
                    let request =
                        ClaimRequest::<HostDriver>::new(claim, class, class_parameters, claim_parameters);
                    requests.push(request.pod_claim_name(name));
                    asked.push(evaluation);
                }
                Err(error) => evaluation.wants = Some(Err(error.to_string())),
            }
        }
        let nodes = self.nodes().await?;
        let no_pod = Pod::default();
        let unsuitable = driver
            .unsuitable_nodes(pod.unwrap_or(&no_pod), &requests, &nodes)
            .await
            .context("the driver cannot evaluate the nodes")?;
        for (evaluation, unsuitable) in asked.into_iter().zip(unsuitable) {
            let reason = |node: &String| (node.clone(), unsuitable.get(node).cloned());
            evaluation.nodes = nodes.iter().map(reason).collect();
        }
        Ok(evaluations)
    }

    /// Returns the names of all nodes; only of nodes with an inventory if the user may not list nodes.
    async fn nodes(&self) -> Result<Vec<String>, Error> {
        match read::all::<Node>(self.client).await {
            Ok(nodes) => Ok(nodes.iter().map(kube::ResourceExt::name_any).collect()),
            Err(error) if read::is_forbidden(&error) => {
                eprintln!("note: you may not list nodes; only those with devices of the driver are shown");
                let inventories: Vec<NodeInventory> = read::all(self.client).await?;
                Ok(inventories_of(self.driver, &inventories)
                    .map(|inventory| inventory.spec.node_name.clone())
                    .collect())
            }
            Err(error) => Err(error),
        }
    }
}

/// Uses the controller's results. Without access to all claims, the devices of other claims are unknown. So if the
/// driver finds a node suitable, the result in the pod's PodSchedulingContext decides.
fn ask_controller(
    evaluations: &mut [Evaluation],
    found: &[(Option<&PodResourceClaim>, Resolved<&ResourceClaim>)],
    context: &PodSchedulingContext,
) {
    for (evaluation, (entry, _)) in evaluations.iter_mut().zip(found) {
        let written = context
            .status
            .resource_claims
            .iter()
            .filter(|written| entry.is_some_and(|entry| entry.name == written.name));
        for node in written.flat_map(|written| &written.unsuitable_nodes) {
            if let Some(reason @ None) = evaluation.nodes.get_mut(node) {
                *reason = Some(
                    "the controller reports it as unsuitable; it knows claims that you may not read"
                        .to_owned(),
                );
            }
        }
    }
}

fn in_words(requested: &DeviceRequests) -> String {
    let mut parts: Vec<String> = requested
        .requests()
        .iter()
        .map(|request| {
            let number = match request.amount() {
                Amount::Exactly(number) => number.to_string(),
                Amount::All => "all".to_owned(),
            };
            let selected = match request.selectors().len() {
                0 => String::new(),
                1 => " that match a selector".to_owned(),
                number => format!(" that match {number} selectors"),
            };
            format!("{number} of kind {}{selected}", requested.kind())
        })
        .collect();
    for constraint in requested.constraints() {
        parts.push(format!("with an equal {}", constraint.attribute()));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::tool::tests::Server;

    fn subject(words: &[&str]) -> Result<ObjectArgument, Error> {
        ObjectArgument::read(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn pods_and_claims_are_named_as_for_kubectl() {
        assert_eq!(subject(&["pod/a"]).unwrap(), ObjectArgument::Pod("a".into()));
        assert_eq!(subject(&["pod", "a"]).unwrap(), ObjectArgument::Pod("a".into()));
        assert_eq!(
            subject(&["resourceclaim/a"]).unwrap(),
            ObjectArgument::Claim("a".into())
        );
        assert_eq!(subject(&["a"]).unwrap(), ObjectArgument::Either("a".into()));
        assert!(subject(&["node/a"]).unwrap_err().to_string().contains("pod/NAME"));
    }

    #[tokio::test]
    async fn a_pod_is_explained_on_a_server_without_claims() {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "one", "namespace": "shop" },
            "spec": { "containers": [{ "name": "main", "resources": { "limits": { "example.com/camera": "1" } } }] },
            "status": { "phase": "Pending" },
        });
        let server = Server::default()
            .with_object("/api/v1/namespaces/shop/pods/one", pod)
            .with("/api/v1/namespaces/shop/events", &[])
            .with("/api/v1/nodes", &[])
            .with("/api/v1/pods", &[]);
        let subject = ObjectArgument::Pod("one".into());
        let answer = explain_object(&server.client(), "shop", "drayman.dev", &subject)
            .await
            .unwrap();
        let answer = serde_json::to_value(answer.unwrap()).unwrap();
        assert_eq!(answer["pod"]["name"], "shop/one", "{answer}");
    }

    #[tokio::test]
    async fn nothing_is_evaluated_for_a_pod_that_has_ended() {
        let limits = json!({ "limits": { "example.com/camera": "1" } });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "one", "namespace": "shop", "uid": "p" },
            "spec": {
                "containers": [{ "name": "main", "resources": limits }],
                "resourceClaims": [{ "name": "a", "source": { "resourceClaimName": "waits" } }],
            },
            "status": { "phase": "Failed" },
        });
        let claim = json!({
            "metadata": { "name": "waits", "namespace": "shop", "uid": "c" },
            "spec": { "resourceClassName": "cameras" }, "status": {},
        });
        let class = json!({ "metadata": { "name": "cameras" }, "driverName": "drayman.dev" });
        // Nodes, pods of all namespaces and inventories cannot be read.
        let server = Server::default()
            .with_object("/api/v1/namespaces/shop/pods/one", pod)
            .with("/apis/resource.k8s.io/v1alpha2/resourceclaims", &[claim])
            .with("/apis/resource.k8s.io/v1alpha2/resourceclasses", &[class])
            .with("/api/v1/namespaces/shop/events", &[]);
        let subject = ObjectArgument::Pod("one".into());
        let answer = explain_object(&server.client(), "shop", "drayman.dev", &subject)
            .await
            .unwrap();
        let answer = serde_json::to_value(answer.unwrap()).unwrap();
        assert_eq!(answer["claims"][0]["step"], "NotNeeded", "{answer}");
        assert_eq!(answer["limits"][0]["step"], "Ended", "{answer}");
    }

    #[tokio::test]
    async fn without_the_right_to_list_a_kind_less_is_shown() {
        const CLASSES: &str = "/apis/resource.k8s.io/v1alpha2/resourceclasses";
        const OF_CLASSES: &str = "/apis/drayman.dev/v1alpha1/deviceclassparameters";
        const OF_CLAIMS: &str = "/apis/drayman.dev/v1alpha1/namespaces/shop/deviceclaimparameters";
        let claim = json!({
            "metadata": { "name": "waits", "namespace": "shop", "uid": "c" },
            "spec": { "resourceClassName": "cameras" }, "status": {},
        });
        let class = json!({ "metadata": { "name": "cameras" }, "driverName": "drayman.dev" });
        let server = Server::default()
            .with("/apis/resource.k8s.io/v1alpha2/resourceclaims", &[claim])
            .with(CLASSES, &[class])
            .with("/apis/drayman.dev/v1alpha1/nodeinventories", &[])
            .with(OF_CLASSES, &[])
            .with(OF_CLAIMS, &[])
            .with("/api/v1/namespaces/shop/events", &[]);
        let subject = ObjectArgument::Claim("waits".into());
        for path in [CLASSES, OF_CLASSES, OF_CLAIMS] {
            let client = server.clone().without_right(path).client();
            let answer = explain_object(&client, "shop", "drayman.dev", &subject)
                .await
                .unwrap();
            let answer = serde_json::to_value(answer.unwrap()).unwrap();
            let claim = &answer["claims"][0];
            assert_eq!(claim["step"], "WaitsForScheduler", "{path}: {answer}");
            let because = claim["because"].as_str().unwrap();
            assert!(because.contains("nodes are unknown"), "{path}: {because}");
        }
    }

    #[tokio::test]
    async fn the_events_of_a_claim_of_two_entries_are_shown_once() {
        let entry = |name: &str| json!({ "name": name, "source": { "resourceClaimName": "both" } });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "one", "namespace": "shop", "uid": "p" },
            "spec": { "containers": [], "resourceClaims": [entry("a"), entry("b")] },
            "status": { "phase": "Pending" },
        });
        let claim = json!({
            "metadata": { "name": "both", "namespace": "shop", "uid": "c" },
            "spec": { "resourceClassName": "cameras" },
            "status": { "allocation": {} },
        });
        let event =
            json!({ "metadata": { "name": "e" }, "involvedObject": {}, "reason": "Why", "message": "so" });
        let server = Server::default()
            .with_object("/api/v1/namespaces/shop/pods/one", pod)
            .with("/apis/resource.k8s.io/v1alpha2/resourceclaims", &[claim])
            .with("/api/v1/namespaces/shop/events", &[event]);
        let subject = ObjectArgument::Pod("one".into());
        let answer = explain_object(&server.client(), "shop", "drayman.dev", &subject)
            .await
            .unwrap();
        let answer = serde_json::to_value(answer.unwrap()).unwrap();
        let events = answer["events"].as_array().unwrap().iter();
        let about: Vec<&str> = events.map(|event| event["about"].as_str().unwrap()).collect();
        assert_eq!(about, ["Pod one", "ResourceClaim both"], "{answer}");
    }
}
