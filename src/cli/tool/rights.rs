//! Asks the API server for the permissions of the components' accounts.

use std::collections::BTreeSet;

use anyhow::Context as _;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Client;
use kube::api::{Api, ListParams, PostParams};

use super::read::{self, ServedApi};
use crate::cli::diagnose::doctor::DoctorFinding;
use crate::cli::diagnose::nodes::{not_running, runtime_sockets};
use crate::cli::diagnose::overlap;
use crate::cli::diagnose::rights::{
    Component, LeaseName, Right, findings, needed, needed_for_reviews, needed_in_structured_mode,
};
use crate::cli::error::Error;
use crate::cli::objects::PartialPod;

/// Label of the chart's pods.
const PODS: &str = "app.kubernetes.io/part-of=drayman";
/// Maximum number of concurrent requests.
const CONCURRENCY: usize = 8;
/// Groups of every authenticated user and of every service account.
const EVERYBODY: &str = "system:authenticated";
const SERVICE_ACCOUNTS: &str = "system:serviceaccounts";

/// An account whose permissions are checked.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Account {
    /// Component that uses the account.
    component: Component,
    /// User name in the API server.
    user: String,
    /// The component's Lease, if it elects a leader.
    lease: Option<LeaseName>,
    /// Whether its metrics are for authenticated scrapers only.
    reviews: bool,
}

/// Checks this driver's pods, and the permissions of their accounts and of `users`. `mode_both` says whether devices of that mode exist.
pub(super) async fn check_pods(
    client: &Client,
    driver: &str,
    users: [(Component, Option<&str>); 2],
    api: ServedApi,
    mode_both: bool,
) -> Result<Vec<DoctorFinding>, Error> {
    let labelled = ListParams::default().labels(PODS);
    let pods: Vec<PartialPod> = read::list(&Api::all(client.clone()), labelled).await?;
    let mut accounts: BTreeSet<Account> = pods.iter().filter_map(|pod| account(pod, driver)).collect();
    for (component, user) in users {
        accounts.extend(user.map(|user| Account {
            component,
            user: user.to_owned(),
            lease: None,
            reviews: false,
        }));
    }
    let sockets = runtime_sockets(&companions_with_socket(&pods, driver));
    let mut findings: Vec<DoctorFinding> = sockets.into_iter().collect();
    findings.extend(not_running(driver, &waiting(&pods, driver)));
    if api == ServedApi::Structured {
        findings.extend(overlap::companions(driver, &releases(&pods, driver)));
    }
    for account in &accounts {
        let rights = match (api, account.component) {
            (ServedApi::Classic, component) => needed(component, account.lease.as_ref(), mode_both),
            (ServedApi::Structured, Component::Node) => needed_in_structured_mode(),
            (ServedApi::Structured, Component::Controller) => {
                findings.push(DoctorFinding::note(
                    "controller",
                    format!(
                        "{} runs a controller, which structured mode does not use (controller.enabled of the chart)",
                        account.user
                    ),
                ));
                continue;
            }
        };
        match check(client, account, rights).await {
            Ok(found) => findings.extend(found),
            Err(error) => {
                // The other accounts have the same answer.
                findings.push(DoctorFinding::unread(&error.to_string()));
                break;
            }
        }
    }
    Ok(findings)
}

/// Returns the releases of this driver's companions, as `NAMESPACE/RELEASE`. Companions without a release's label count by their account.
/// During an update, the companions of one release may have two accounts.
fn releases(pods: &[PartialPod], driver: &str) -> BTreeSet<String> {
    let release = |pod: &PartialPod| {
        let account = account(pod, driver).filter(|account| account.component == Component::Node)?;
        let labels = pod.metadata.labels.iter().flatten();
        let mut instances = labels.filter(|(name, _)| *name == "app.kubernetes.io/instance");
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let named = |(_, instance)| format!("{namespace}/{instance}");
        Some(instances.next().map_or(account.user, named))
    };
    pods.iter().filter_map(release).collect()
}

/// Returns for each companion of this driver whether it has the container runtime's socket.
fn companions_with_socket(pods: &[PartialPod], driver: &str) -> Vec<bool> {
    let companions = pods
        .iter()
        .filter(|pod| account(pod, driver).is_some_and(|account| account.component == Component::Node));
    companions
        .map(|pod| flag(pod, "--container-runtime-socket").is_some())
        .collect()
}

/// Returns the pods of this driver with a waiting container, each as `NAMESPACE/NAME (REASON: MESSAGE)` with the message of kubelet.
fn waiting(pods: &[PartialPod], driver: &str) -> Vec<String> {
    let described = |pod: &PartialPod| {
        account(pod, driver)?;
        let containers = pod.status.as_ref()?.container_statuses.as_deref()?;
        let mut waiting = containers
            .iter()
            .filter_map(|container| container.state.as_ref()?.waiting.as_ref());
        // Each new pod has this reason for a moment.
        let waiting = waiting.find(|waiting| waiting.reason.as_deref() != Some("ContainerCreating"))?;
        let (reason, message) = (waiting.reason.as_deref(), waiting.message.as_deref());
        let why: Vec<&str> = reason.into_iter().chain(message).collect();
        let (namespace, name) = (pod.metadata.namespace.as_deref()?, pod.metadata.name.as_deref()?);
        Some(format!("{namespace}/{name} ({})", why.join(": ")))
    };
    pods.iter().filter_map(described).collect()
}

/// Returns the value of a flag of a pod's containers; the flag overrides its variable. A flag without a value counts as `true`.
fn flag<'a>(pod: &'a PartialPod, name: &str) -> Option<&'a str> {
    let containers = || pod.spec.iter().flat_map(|spec| &spec.containers);
    let arguments = || containers().flat_map(|container| container.args.iter().flatten());
    let following = arguments().skip(1).map(Some).chain([None]);
    let flag = arguments()
        .zip(following)
        .find_map(|(flag, next)| match flag.strip_prefix(name)? {
            "" => Some(
                next.filter(|next| !next.starts_with('-'))
                    .map_or("true", String::as_str),
            ),
            value => value.strip_prefix('='),
        });
    flag.or_else(|| {
        let name = name.trim_start_matches('-').to_uppercase().replace('-', "_");
        let name = format!("DRAYMAN_{name}");
        let mut variables = containers().flat_map(|container| container.env.iter().flatten());
        variables.find(|variable| variable.name == name)?.value.as_deref()
    })
}

fn account(pod: &PartialPod, driver: &str) -> Option<Account> {
    let labels = pod.metadata.labels.as_ref()?;
    let component = match labels.get("app.kubernetes.io/component")?.as_str() {
        "controller" => Component::Controller,
        "node" => Component::Node,
        _ => return None,
    };
    let spec = pod.spec.as_ref()?;
    if flag(pod, "--driver-name") != Some(driver) {
        return None;
    }
    let namespace = pod.metadata.namespace.as_deref()?;
    let name = spec.service_account_name.as_deref().unwrap_or("default");
    let elects = flag(pod, "--leader-elect") == Some("true");
    let lease = elects.then(|| LeaseName {
        namespace: flag(pod, "--leader-elect-resource-namespace")
            .unwrap_or("kube-system")
            .to_owned(),
        name: driver.to_owned(),
    });
    Some(Account {
        component,
        user: format!("system:serviceaccount:{namespace}:{name}"),
        lease,
        reviews: flag(pod, "--metrics-cert-dir").is_some(),
    })
}

/// Checks whether an account has these permissions.
async fn check(
    client: &Client,
    account: &Account,
    mut rights: Vec<Right>,
) -> Result<Vec<DoctorFinding>, Error> {
    if account.reviews {
        rights.extend(needed_for_reviews());
    }
    let mut missing: Vec<Right> = futures::stream::iter(rights)
        .map(|right| async {
            let allowed = is_allowed(client, &account.user, &right).await?;
            anyhow::Ok((!allowed).then_some(right))
        })
        .buffered(CONCURRENCY)
        .try_filter_map(|missing| async { Ok(missing) })
        .try_collect()
        .await?;
    missing.sort();
    Ok(findings(account.component, &account.user, &missing))
}

async fn is_allowed(client: &Client, user: &str, right: &Right) -> anyhow::Result<bool> {
    let (resource, subresource) = match right.resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (right.resource, None),
    };
    let mut groups = vec![EVERYBODY.to_owned()];
    if let Some(account) = user.strip_prefix("system:serviceaccount:") {
        groups.push(SERVICE_ACCOUNTS.to_owned());
        if let Some((namespace, _)) = account.split_once(':') {
            groups.push(format!("{SERVICE_ACCOUNTS}:{namespace}"));
        }
    }
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.to_owned()),
            groups: Some(groups),
            resource_attributes: Some(ResourceAttributes {
                group: Some(right.group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource,
                verb: Some(right.verb.to_owned()),
                namespace: Some(right.namespace.clone()).filter(|namespace| !namespace.is_empty()),
                name: Some(right.name.clone()).filter(|name| !name.is_empty()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer = Api::all(client.clone())
        .create(&PostParams::default(), &review)
        .await
        .context("cannot review the permissions of an account")?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(component: &str, flags: &[&str]) -> PartialPod {
        serde_json::from_value(serde_json::json!({
            "metadata": { "name": "p", "namespace": "drayman", "labels": { "app.kubernetes.io/component": component } },
            "spec": { "serviceAccountName": "acc", "containers": [{ "name": "c", "args": flags }] },
        }))
        .unwrap()
    }

    #[test]
    fn an_account_of_this_driver_is_recognised_by_any_name() {
        let flags = [
            "controller",
            "--driver-name=a",
            "--leader-elect",
            "--leader-elect-resource-namespace",
            "here",
        ];
        let found = account(&pod("controller", &flags), "a").unwrap();
        assert_eq!(
            (found.component, found.user.as_str(), found.lease),
            (
                Component::Controller,
                "system:serviceaccount:drayman:acc",
                Some(LeaseName {
                    namespace: "here".to_owned(),
                    name: "a".to_owned()
                })
            )
        );
        assert_eq!(account(&pod("controller", &flags), "b"), None);
        assert_eq!(account(&pod("crds", &flags), "a"), None);
        let node = account(&pod("node", &["node", "--driver-name=a"]), "a").unwrap();
        assert_eq!((node.component, node.lease), (Component::Node, None));

        let mut by_variable = pod("node", &["node"]);
        let variables = serde_json::json!([
            { "name": "DRAYMAN_DRIVER_NAME", "value": "a" },
            { "name": "DRAYMAN_LEADER_ELECT", "value": "true" },
        ]);
        by_variable.spec.as_mut().unwrap().containers[0].env = serde_json::from_value(variables).unwrap();
        assert!(account(&by_variable, "a").unwrap().lease.is_some());
        assert_eq!(account(&by_variable, "b"), None);
    }

    #[test]
    fn a_companion_has_the_socket_that_its_pod_names() {
        let pods = |flags: &[&str]| {
            [
                pod("node", &[&["node", "--driver-name=a"], flags].concat()),
                pod("controller", &["--driver-name=a"]),
                pod("node", &["node", "--driver-name=b"]),
            ]
        };
        assert_eq!(companions_with_socket(&pods(&[]), "a"), [false]);
        let named = ["--container-runtime-socket=/run/cri.sock"];
        assert_eq!(companions_with_socket(&pods(&named), "a"), [true]);
    }
}
