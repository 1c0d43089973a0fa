//! A real API server validates the rendered manifests and authorizes the tokens of the components.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};

use crate::chart::helm::{chart, object, objects, pod_spec, text, variants};
use crate::chart::setup::ChartSetup;
use crate::harness::{Cluster, prometheus_operator};

async fn with_definitions(setup: &ChartSetup) -> anyhow::Result<()> {
    define(setup, &chart("crds")).await
}

/// Creates the CRDs in a file or directory and waits until they are established.
async fn define(setup: &ChartSetup, files: &Path) -> anyhow::Result<()> {
    let files = files.to_str().context("UTF-8")?;
    let apply = ["apply", "--server-side", "--filename", files];
    setup.cluster.kubectl(&apply).await?;
    let wait = [
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "--filename",
        files,
    ];
    setup.cluster.kubectl(&wait).await.map(drop)
}

/// The Prometheus operator's own CRDs for the kinds that the chart renders.
async fn with_definitions_of_the_operator(setup: &ChartSetup) -> anyhow::Result<()> {
    let directory = tokio::task::spawn_blocking(prometheus_operator).await??;
    for kind in ["servicemonitors", "prometheusrules"] {
        define(
            setup,
            &directory.join(format!("monitoring.coreos.com_{kind}.yaml")),
        )
        .await?;
    }
    Ok(())
}

/// Validates the objects of every variant on the API server, rendered with these arguments.
pub(crate) async fn validate_variants(setup: &ChartSetup, arguments: &[String]) -> anyhow::Result<()> {
    with_definitions_of_the_operator(setup).await?;
    let mut of_operator = BTreeSet::new();
    for variant in variants() {
        let rendered = tokio::task::spawn_blocking({
            let (variant, arguments) = (variant.clone(), arguments.to_vec());
            move || {
                let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                text(Some(&variant), &arguments)
            }
        })
        .await?;
        let rendered = objects(&rendered);
        of_operator.extend(
            rendered
                .iter()
                .filter(|object| object["apiVersion"] == "monitoring.coreos.com/v1")
                .map(|object| object["kind"].to_string()),
        );
        let file = setup.cluster.directory().join("rendered.json");
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": rendered });
        std::fs::write(&file, list.to_string())?;
        let file = file.to_str().context("UTF-8")?;
        let arguments = [
            "create",
            "--dry-run=server",
            "--validate=strict",
            "--filename",
            file,
        ];
        let message = setup
            .cluster
            .kubectl(&arguments)
            .await
            .with_context(|| variant.display().to_string())?;
        let accepted = message.lines().filter(|line| line.contains("created")).count();
        assert_eq!(accepted, rendered.len(), "{message}");
    }
    assert_eq!(
        of_operator.len(),
        2,
        "a ServiceMonitor and a PrometheusRule: {of_operator:?}"
    );
    Ok(())
}

#[tokio::test]
async fn the_api_server_accepts_every_variant_of_the_chart() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::builder().start().await?).await?;
    with_definitions(&setup).await?;
    // The rendered objects depend on the Kubernetes version.
    let version = format!("--kube-version=1.{}.0", setup.cluster.minor());
    validate_variants(&setup, &[version]).await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn the_notes_name_three_commands_and_existing_objects() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::builder().start().await?).await?;
    with_definitions(&setup).await?;
    for (values, expected) in [
        ("ci/one-kind-values.yaml", "helm test drayman --namespace drayman"),
        ("ci/defaults-values.yaml", "deviceKinds is empty"),
        ("ci/extended-resources-values.yaml", "extended resources only"),
        (
            "ci/node-pools-values.yaml",
            "kubectl --namespace drayman get daemonsets",
        ),
        (
            "ci/controller-alone-values.yaml",
            "rollout status deployment/drayman-controller",
        ),
    ] {
        let (values, chart) = (chart(values), chart(""));
        let (values, chart) = (
            values.to_str().context("UTF-8")?,
            chart.to_str().context("UTF-8")?,
        );
        let message = setup
            .helm(&[
                "install",
                "drayman",
                chart,
                "--namespace=drayman",
                "--dry-run=server",
                "--values",
                values,
            ])
            .await?;
        let notes = message.split_once("NOTES:").context("notes")?.1;
        ensure!(notes.contains(expected), "{values}: {notes}");
        let commands = notes
            .lines()
            .filter(|line| line.starts_with("  kubectl ") || line.starts_with("  helm "))
            .count();
        assert_eq!(commands, 3, "{values}: {notes}");
    }
    setup.cluster.stop().await
}

#[tokio::test]
async fn the_controller_is_restricted_and_the_companion_privileged() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::builder().start().await?).await?;
    setup.namespace("restricted", "restricted").await?;
    let rendered = tokio::task::spawn_blocking(|| text(Some(&chart("ci/one-kind-values.yaml")), &[])).await?;
    let rendered = objects(&rendered);
    let owners: Vec<&Value> = rendered
        .iter()
        .filter(|object| pod_spec(object).is_some())
        .collect();
    ensure!(
        owners.len() == 5,
        "controller, companion, definitions, test, uninstall"
    );
    // Our own type: the Pod of k8s-openapi lacks the claim fields of classic DRA.
    let pods = Api::<drayman::api::resource::Pod>::namespaced(setup.cluster.client(), "restricted");
    for owner in owners {
        let mut spec = pod_spec(owner).cloned().unwrap_or_default();
        // The account does not exist in this namespace; the Pod Security Standard does not depend on it.
        spec["serviceAccountName"] = Value::Null;
        let pod = serde_json::from_value(json!({ "metadata": { "name": "a" }, "spec": spec }))?;
        let dry = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let answer = pods.create(&dry, &pod).await;
        if owner["kind"] == "DaemonSet" {
            let refusal = answer.expect_err("directories of the host").to_string();
            ensure!(
                refusal.contains("hostPath") && refusal.contains("runAsNonRoot"),
                "{refusal}"
            );
            // There are no other violations.
            for other in [
                "privileged",
                "capabilities",
                "allowPrivilegeEscalation",
                "seccomp",
                "host namespaces",
            ] {
                ensure!(
                    !refusal
                        .replace("PodSecurity \"restricted", "")
                        .contains(&format!("{other} (")),
                    "{refusal}"
                );
            }
        } else {
            answer.with_context(|| format!("{} {}", owner["kind"], owner["metadata"]["name"]))?;
        }
    }
    setup.cluster.stop().await
}

/// A client with the token that a pod of this account on this node gets.
pub(crate) async fn token_client(
    setup: &ChartSetup,
    account: &str,
    node: Option<&str>,
) -> anyhow::Result<kube::Client> {
    let mut arguments = vec!["create", "token", account, "--namespace=drayman"];
    let name = node.map(|node| format!("on-{node}"));
    if let (Some(node), Some(name)) = (node, &name) {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "nodeName": node, "serviceAccountName": account, "containers": [{ "name": "a", "image": "a" }] },
        }))?;
        Api::<Pod>::namespaced(setup.cluster.client(), "drayman")
            .create(&PostParams::default(), &pod)
            .await?;
        arguments.extend(["--bound-object-kind=Pod", "--bound-object-name", name]);
    }
    let token = setup.cluster.kubectl(&arguments).await?;
    let mut admin = Kubeconfig::read_from(setup.cluster.kubeconfig())?;
    for user in &mut admin.auth_infos {
        user.auth_info = Some(serde_json::from_value(json!({ "token": token.trim() }))?);
    }
    let config = Config::from_custom_kubeconfig(admin, &KubeConfigOptions::default()).await?;
    Ok(kube::Client::try_from(config)?)
}

fn inventory(node: &str, driver: &str) -> drayman::api::crd::NodeInventory {
    drayman::api::crd::NodeInventory::new(
        &format!("{node}.{driver}"),
        drayman::api::crd::NodeInventorySpec {
            driver_name: driver.to_owned(),
            node_name: node.to_owned(),
            node_uid: "uid".to_owned(),
            devices: Vec::new(),
        },
    )
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one policy, case by case")]
async fn the_token_of_a_node_writes_only_its_own_inventory() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::builder().service_accounts().start().await?).await?;
    if setup
        .cluster
        .is_before(30, "tokens do not contain the node name, so there is no policy")
    {
        return setup.cluster.stop().await;
    }
    let chart = chart("");
    // Nothing can run here, so Helm does not wait. Helm installs the CRDs.
    let arguments = [
        "install",
        "drayman",
        chart.to_str().context("UTF-8")?,
        "--namespace=drayman",
        "--set=crds.upgrade=false",
    ];
    setup.helm(&arguments).await?;
    let client = setup.cluster.client();
    for name in ["node-a", "node-b"] {
        let node: Node = serde_json::from_value(json!({ "metadata": { "name": name } }))?;
        Api::<Node>::all(client.clone())
            .create(&PostParams::default(), &node)
            .await?;
    }
    // More rights than the companion has, so that the policy answers and not RBAC.
    let rights = [
        "create",
        "clusterrole",
        "all",
        "--verb=get,create,update,patch,delete",
        "--resource=nodeinventories,nodeinventories/status",
    ];
    setup.cluster.kubectl(&rights).await?;
    let binding = [
        "create",
        "clusterrolebinding",
        "all",
        "--clusterrole=all",
        "--serviceaccount=drayman:drayman-node",
    ];
    setup.cluster.kubectl(&binding).await?;

    let admin = Api::<drayman::api::crd::NodeInventory>::all(client);
    let ours = token_client(&setup, "drayman-node", Some("node-a")).await?;
    let ours = Api::<drayman::api::crd::NodeInventory>::all(ours);
    let apply = PatchParams::apply("test").force();
    let write = |node: &'static str, driver: &'static str| {
        let (ours, apply) = (ours.clone(), apply.clone());
        async move {
            let object = inventory(node, driver);
            let name = object.metadata.name.clone().unwrap_or_default();
            ours.patch(&name, &apply, &Patch::Apply(&object))
                .await
                .map(drop)
                .map_err(|error| error.to_string())
        }
    };
    // The API server learns of policies and roles through its own watches.
    setup
        .until("the policy is in force", async || {
            let foreign = write("node-z", "drayman.dev").await;
            Ok(foreign.is_err_and(|error| error.contains("the companion of node node-a may write")))
        })
        .await?;
    let refused = |result: Result<(), String>, what: &str| {
        let error = result.expect_err(what);
        assert!(
            error
                .contains("the companion of node node-a may write the NodeInventory node-a.drayman.dev only"),
            "{what}: {error}"
        );
    };
    let status = json!({ "status": { "devices": 1 } });
    // Its own inventory: create, update, update of the status, delete.
    write("node-a", "drayman.dev").await.map_err(anyhow::Error::msg)?;
    write("node-a", "drayman.dev").await.map_err(anyhow::Error::msg)?;
    ours.patch_status(
        "node-a.drayman.dev",
        &PatchParams::default(),
        &Patch::Merge(&status),
    )
    .await?;
    ours.delete("node-a.drayman.dev", &DeleteParams::default())
        .await?;
    // The inventory of another node, and of another driver, whether or not it exists.
    refused(write("node-b", "drayman.dev").await, "create another node's");
    refused(
        write("node-a", "other.example.com").await,
        "create another driver's",
    );
    for (node, driver) in [("node-b", "drayman.dev"), ("node-a", "other.example.com")] {
        admin
            .create(&PostParams::default(), &inventory(node, driver))
            .await?;
        refused(write(node, driver).await, "change");
        let name = format!("{node}.{driver}");
        let text = |error: kube::Error| error.to_string();
        let changed = ours
            .patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
            .await;
        refused(changed.map(drop).map_err(text), "change the status");
        let deleted = ours.delete(&name, &DeleteParams::default()).await;
        refused(deleted.map(drop).map_err(text), "delete");
    }
    // Its own name, but with the name of another node in the spec.
    let mut disguised = inventory("node-b", "drayman.dev");
    disguised.metadata.name = Some("node-a.drayman.dev".to_owned());
    let disguised = ours
        .patch("node-a.drayman.dev", &apply, &Patch::Apply(&disguised))
        .await;
    refused(
        disguised.map(drop).map_err(|error| error.to_string()),
        "say that it is another node",
    );
    // A token of the account that is not bound to a pod, as `kubectl create token` returns it.
    let unbound = token_client(&setup, "drayman-node", None).await?;
    let unbound = Api::<drayman::api::crd::NodeInventory>::all(unbound);
    let made = unbound
        .create(&PostParams::default(), &inventory("node-a", "drayman.dev"))
        .await;
    let refusal = made.expect_err("a token without a node").to_string();
    ensure!(
        refusal.contains("this token is not that of a pod on a node"),
        "{refusal}"
    );
    // Other users are not restricted.
    admin
        .create(&PostParams::default(), &inventory("node-c", "drayman.dev"))
        .await?;

    may_do_what_it_should_and_no_more(&setup).await?;
    setup.cluster.stop().await
}

/// Checks the rights of both accounts by SelfSubjectAccessReview.
async fn may_do_what_it_should_and_no_more(setup: &ChartSetup) -> anyhow::Result<()> {
    setup
        .cluster
        .kubectl(&["delete", "clusterrolebinding", "all"])
        .await?;
    for (account, yes, no) in [
        (
            "drayman-controller",
            &[
                "patch resourceclaims.resource.k8s.io/status",
                "list nodeinventories.drayman.dev",
                "get pods",
            ][..],
            &[
                "delete resourceclaims.resource.k8s.io",
                "get secrets",
                "patch nodeinventories.drayman.dev",
                "list pods",
                "patch nodes",
            ][..],
        ),
        (
            "drayman-node",
            &["create nodeinventories.drayman.dev", "get nodes"][..],
            &[
                "delete nodeinventories.drayman.dev",
                "get secrets",
                "patch resourceclaims.resource.k8s.io",
                "patch nodes",
                "get pods",
            ][..],
        ),
    ] {
        let user = format!("--as=system:serviceaccount:drayman:{account}");
        for (rights, expected) in [(yes, "yes"), (no, "no")] {
            for right in rights {
                let (verb, resource) = right.split_once(' ').context("a verb and a resource")?;
                let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
                let subresource = format!("--subresource={subresource}");
                let answer = setup
                    .cluster
                    .kubectl(&["auth", "can-i", verb, resource, &subresource, &user, "--quiet"])
                    .await;
                let answer = if answer.is_ok() { "yes" } else { "no" };
                assert_eq!(answer, expected, "{account}: {right}");
            }
        }
    }
    // The Lease of its own driver in the release namespace, and no other Lease.
    for (lease, namespace, expected) in [
        ("leases/drayman.dev", "drayman", true),
        ("leases/other.example.com", "drayman", false),
        ("leases/drayman.dev", "kube-system", false),
    ] {
        let namespace = format!("--namespace={namespace}");
        let ask = ["auth", "can-i", "update", lease, "--quiet", &namespace];
        let user = ["--as=system:serviceaccount:drayman:drayman-controller"];
        let answer = setup.cluster.kubectl(&[&ask[..], &user].concat()).await;
        assert_eq!(answer.is_ok(), expected, "{lease} {namespace}");
    }
    Ok(())
}

#[tokio::test]
async fn without_classic_dra_an_install_names_the_supported_values() -> anyhow::Result<()> {
    let mut cluster = Cluster::builder().flag("apiserver", "--runtime-config=resource.k8s.io/v1alpha2=false");
    for component in ["apiserver", "controller-manager", "scheduler"] {
        cluster = cluster.flag(component, "--feature-gates=DynamicResourceAllocation=false");
    }
    let cluster = cluster.start().await?;
    let setup = ChartSetup::prepare(cluster).await?;
    let chart = chart("");
    let chart = chart.to_str().context("UTF-8")?;
    let install = [
        "install",
        "drayman",
        chart,
        "--namespace=drayman",
        "--set=crds.upgrade=false",
    ];
    let refusal = setup.helm(&install).await.expect_err("no claims").to_string();
    ensure!(
        refusal.contains("does not serve resource.k8s.io/v1alpha2")
            && refusal.contains("set controller.enabled=false"),
        "{refusal}"
    );
    let output = setup.ask(&["leftovers"]).await?;
    let message = String::from_utf8(output.stderr)?;
    ensure!(
        output.status.code() == Some(3)
            && message.contains("does not serve resource.k8s.io/v1alpha2. Objects may remain"),
        "{message}"
    );
    let values = crate::chart::helm::chart("ci/extended-resources-values.yaml");
    let values = values.to_str().context("UTF-8")?;
    setup
        .helm(&[&install[..], &["--values", values]].concat())
        .await?;
    let monitored = [
        &install[..],
        &["--set=monitoring.prometheusRule.enabled=true", "--values", values],
    ]
    .concat();
    let monitored: Vec<&str> = monitored
        .into_iter()
        .map(|word| if word == "drayman" { "monitored" } else { word })
        .collect();
    let refusal = setup.helm(&monitored).await.expect_err("no operator").to_string();
    ensure!(
        refusal.contains("does not have the kinds of the Prometheus operator"),
        "{refusal}"
    );
    // A user who applies rendered manifests is not stopped.
    let rendered = objects(&tokio::task::spawn_blocking(|| text(None, &[])).await?);
    object(&rendered, "Deployment", "drayman-controller");
    setup.cluster.stop().await
}
