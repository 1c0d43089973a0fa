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

use self::answer::{
    Explained, ObjectArgument, about_claim, about_pod, events, explain_limits, pod_answer, scheduler_says,
};
use super::kubectl_flags::KubectlFlags;
use super::read::{ClaimScope, Namespaces};
use super::{candidates, read};
use crate::api::crd::{DeviceClassParameters, NodeInventory};
use crate::api::resource::{Pod, PodResourceClaim, PodSchedulingContext, ResourceClaim, ResourceClass};
use crate::cli::diagnose::explain::{ExplainInput, explain, find};
use crate::cli::diagnose::qualified_name;
use crate::cli::error::Error;
use crate::cli::objects;
use crate::cli::output::OutputFlags;
use crate::cli::runtime::{block_on, choose_tls_provider};
use crate::cli::value;
use crate::core::allocation::parameters::{Amount, DeviceRequests};
use crate::core::claims::Resolved;
use crate::driver::{ClaimRequest, Driver as _, Holding, Observation};
use crate::host::HostDriver;

/// Limit for the driver to read inventories and parameters.
const READY_LIMIT: Duration = Duration::from_secs(30);

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
    choose_tls_provider();
    let answer = block_on(async {
        let (client, context_namespace) = arguments.cluster.connect().await?;
        let namespace = arguments.namespace.clone().unwrap_or(context_namespace);
        let driver = &arguments.cluster.driver.name;
        match read::api(&client).await? {
            read::ServedApi::Structured => structured::answer(&client, &namespace, driver, &subject).await,
            read::ServedApi::Classic => classic_answer(client, namespace, driver, &subject).await,
        }
    })?;
    let Some(answer) = answer else {
        eprintln!(
            "error: there is no {} here; is the namespace right (-n)?",
            arguments.object.join("/")
        );
        return Ok(ExitCode::FAILURE);
    };
    arguments.output.print(&answer)?;
    Ok(ExitCode::SUCCESS)
}

/// The answer in classic mode, and without claims. `None` if the object does not exist.
async fn classic_answer(
    client: Client,
    namespace: String,
    driver: &str,
    subject: &ObjectArgument,
) -> Result<Option<Explained>, Error> {
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    let pod = match subject {
        ObjectArgument::Pod(name) | ObjectArgument::Either(name) => {
            pods.get_opt(name).await.context("cannot read the pod")?
        }
        ObjectArgument::Claim(_) => None,
    };
    let claims = read::claims(&client, &Namespaces::AllOr(namespace.clone())).await?;
    let claim = match subject {
        ObjectArgument::Claim(name) | ObjectArgument::Either(name) if pod.is_none() => {
            claims.items.iter().find(|claim| {
                claim.metadata.namespace.as_ref() == Some(&namespace)
                    && claim.metadata.name.as_ref() == Some(name)
            })
        }
        _ => None,
    };
    if pod.is_none() && claim.is_none() {
        return Ok(None);
    }
    let cluster = Reading {
        client,
        namespace,
        driver,
        claims: &claims,
    };
    cluster.answer(pod.as_ref(), claim).await.map(Some)
}

/// Access to the cluster and the claims read so far.
struct Reading<'a> {
    client: Client,
    namespace: String,
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
    async fn answer(&self, pod: Option<&Pod>, claim: Option<&ResourceClaim>) -> Result<Explained, Error> {
        let classes = read::classes(&self.client).await?;
        let context = match pod {
            Some(pod) => {
                let contexts: Api<PodSchedulingContext> =
                    Api::namespaced(self.client.clone(), &self.namespace);
                read::get(&contexts, &pod.name_any())
                    .await
                    .context("cannot read the pod's scheduling context")?
            }
            None => None,
        };
        // Pairs of entry and claim.
        let found: Vec<(Option<&PodResourceClaim>, Resolved<&ResourceClaim>)> = match (pod, claim) {
            (Some(pod), _) => {
                let entries = pod.spec.resource_claims.iter();
                entries
                    .map(|entry| (Some(entry), find(pod, entry, &self.claims.items)))
                    .collect()
            }
            (None, Some(claim)) => vec![(None, Resolved::Claim(claim))],
            (None, None) => Vec::new(),
        };
        let mut evaluations = self.ask_driver(pod, &found, &classes).await?;
        if let Some(context) = &context {
            // Without inventories, the driver has not evaluated any node.
            for evaluation in evaluations
                .iter_mut()
                .filter(|evaluation| evaluation.wants.is_none())
            {
                evaluation.nodes = context
                    .spec
                    .potential_nodes
                    .iter()
                    .map(|node| (node.clone(), None))
                    .collect();
            }
            let judged_by_driver = evaluations.iter().all(|evaluation| evaluation.wants.is_some());
            if matches!(self.claims.scope, ClaimScope::Namespace(_)) || !judged_by_driver {
                ask_controller(&mut evaluations, &found, context);
            }
        }
        let explanations = found
            .iter()
            .zip(&evaluations)
            .map(|((entry, found), evaluation)| {
                let class = match found {
                    Resolved::Claim(claim) => class_of(claim, &classes),
                    _ => None,
                };
                explain(&ExplainInput {
                    driver: self.driver,
                    pod,
                    entry: *entry,
                    found: *found,
                    class,
                    wants: evaluation
                        .wants
                        .as_ref()
                        .map(|wants| wants.as_deref().map_err(String::as_str)),
                    context: context.as_ref(),
                    nodes: &evaluation.nodes,
                })
            });
        // Our own pod type lacks conditions and limits.
        let whole = match pod {
            Some(pod) => Api::<objects::PartialPod>::namespaced(self.client.clone(), &self.namespace)
                .get_opt(&pod.name_any())
                .await
                .context("cannot read the pod")?,
            None => None,
        };
        Ok(Explained {
            pod: pod.map(|pod| {
                pod_answer(
                    qualified_name(pod),
                    pod.status.phase.as_deref(),
                    pod.spec.node_name.as_deref(),
                    whole.as_ref().and_then(scheduler_says),
                )
            }),
            claims: explanations.collect(),
            limits: match &whole {
                Some(whole) => explain_limits(&self.client, whole).await?,
                None => Vec::new(),
            },
            events: {
                let claims = found.iter().filter_map(|(_, found)| match found {
                    Resolved::Claim(claim) => Some(*claim),
                    _ => None,
                });
                let about = pod.into_iter().map(about_pod).chain(claims.map(about_claim));
                events(&self.client, &self.namespace, about.collect()).await?
            },
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
        let ours = |found: &Resolved<&ResourceClaim>| match found {
            Resolved::Claim(claim) if claim.status.allocation.is_none() => {
                let class = class_of(claim, classes)?;
                let served = class.driver_name == self.driver && class.structured_parameters != Some(true);
                served.then(|| ((*claim).clone(), class.clone()))
            }
            _ => None,
        };
        let wanted: Vec<_> = found.iter().map(|(_, found)| ours(found)).collect();
        if wanted.iter().all(Option::is_none) {
            return Ok(evaluations);
        }
        // The driver's watches would retry a forbidden list forever.
        match read::can_list::<NodeInventory>(&self.client).await {
            Err(error) if read::is_forbidden(&error) => {
                eprintln!(
                    "note: you may not list nodeinventories; nodes are judged only by what the controller has written into the pod's \
                     scheduling context (an operator can set rbac.readInventoriesByAuthenticated)"
                );
                return Ok(evaluations);
            }
            listed => listed?,
        }
        read::can_list::<DeviceClassParameters>(&self.client).await?;
        let ended = CancellationToken::new();
        let _end = ended.clone().drop_guard();
        let driver =
            HostDriver::start_for_namespace(self.client.clone(), self.driver, &self.namespace, ended);
        let holds = |claim: &&ResourceClaim| claim.status.driver_name.as_deref() == Some(self.driver);
        let holdings = self.claims.items.iter().filter(holds).cloned().map(Holding::new);
        driver.observe(&Observation::All(holdings.collect())).await;
        tokio::time::timeout(READY_LIMIT, driver.ready()).await.context(
            "the inventories and parameters cannot be read: you need the right to list and watch nodeinventories, \
             deviceclassparameters and deviceclaimparameters (and `drayman doctor` says whether they are defined)",
        )?.map_err(anyhow::Error::from)?;
        let mut requests = Vec::new();
        let mut indexes = Vec::new();
        for (index, wanted) in wanted.into_iter().enumerate() {
            let Some((claim, class)) = wanted else { continue };
            let entry = found.get(index).and_then(|(entry, _)| *entry);
            let parameters = async {
                let class_parameters = driver.class_parameters(&class).await?;
                let demand = driver.claim_parameters(&claim, &class, &class_parameters).await?;
                Ok::<_, crate::driver::DriverError>((class_parameters, demand))
            };
            let wants = match parameters.await {
                Ok((class_parameters, claim_parameters)) => {
                    let wants = in_words(&claim_parameters);
                    indexes.push(index);
                    let name = entry.map(|entry| entry.name.as_str()).unwrap_or_default();
                    let request =
                        ClaimRequest::<HostDriver>::new(claim, class, class_parameters, claim_parameters);
                    requests.push(request.pod_claim_name(name));
                    Ok(wants)
                }
                Err(error) => Err(error.to_string()),
            };
            if let Some(evaluation) = evaluations.get_mut(index) {
                evaluation.wants = Some(wants);
            }
        }
        let nodes = self.nodes().await?;
        let no_pod = Pod::default();
        let verdicts = driver
            .unsuitable_nodes(pod.unwrap_or(&no_pod), &requests, &nodes)
            .await
            .context("the driver cannot evaluate the nodes")?;
        for (index, verdict) in indexes.into_iter().zip(verdicts) {
            if let Some(evaluation) = evaluations.get_mut(index) {
                let reason = |node: &String| (node.clone(), verdict.get(node).cloned());
                evaluation.nodes = nodes.iter().map(reason).collect();
            }
        }
        Ok(evaluations)
    }

    /// Returns the names of all nodes; only of nodes with an inventory if the user may not list nodes.
    async fn nodes(&self) -> Result<Vec<String>, Error> {
        match read::all::<Node>(&self.client).await {
            Ok(nodes) => Ok(nodes.iter().map(kube::ResourceExt::name_any).collect()),
            Err(error) if read::is_forbidden(&error) => {
                eprintln!("note: you may not list nodes; only those with devices of the driver are shown");
                let inventories: Vec<NodeInventory> = read::all(&self.client).await?;
                Ok(inventories
                    .into_iter()
                    .filter(|inventory| inventory.spec.driver_name == self.driver)
                    .map(|inventory| inventory.spec.node_name)
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
                *reason =
                    Some("not by the controller's word, which knows claims that you may not read".to_owned());
            }
        }
    }
}

fn class_of<'a>(claim: &ResourceClaim, classes: &'a [ResourceClass]) -> Option<&'a ResourceClass> {
    let name = Some(&claim.spec.resource_class_name);
    classes.iter().find(|class| class.metadata.name.as_ref() == name)
}

fn in_words(demand: &DeviceRequests) -> String {
    let mut parts: Vec<String> = demand
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
            format!("{number} of kind {}{selected}", demand.kind())
        })
        .collect();
    for constraint in demand.constraints() {
        parts.push(format!("with an equal {}", constraint.attribute()));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::tool::mock::Server;

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
        let answer = classic_answer(server.client(), "shop".into(), "drayman.dev", &subject)
            .await
            .unwrap();
        let answer = serde_json::to_value(answer.unwrap()).unwrap();
        assert_eq!(answer["pod"]["name"], "shop/one", "{answer}");
    }
}
