//! A real API server validates the rendered manifests and authorizes the tokens of the components.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, ensure};
use drayman::api::crd::{NodeInventory, NodeInventorySpec};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
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
    setup.kubectl(&apply).await?;
    let wait = [
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "--filename",
        files,
    ];
    setup.kubectl(&wait).await.map(drop)
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
        let message = setup.install(Some(values), &["--dry-run=server"]).await?;
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
    let token = setup.kubectl(&arguments).await?;
    let mut admin = Kubeconfig::read_from(setup.cluster.kubeconfig())?;
    for user in &mut admin.auth_infos {
        user.auth_info = Some(serde_json::from_value(json!({ "token": token.trim() }))?);
    }
    let config = Config::from_custom_kubeconfig(admin, &KubeConfigOptions::default()).await?;
    Ok(kube::Client::try_from(config)?)
}

/// A client as the companion on node-a, one of two nodes, with all rights on a resource, so that the policy answers and not RBAC.
pub(crate) async fn companion_of_node_a(setup: &ChartSetup, resource: &str) -> anyhow::Result<kube::Client> {
    let resource = format!("--resource={resource}");
    let rights = ["create", "clusterrole", "all", "--verb=*", &resource];
    setup.kubectl(&rights).await?;
    let account = "--serviceaccount=drayman:drayman-node";
    let binding = [
        "create",
        "clusterrolebinding",
        "all",
        "--clusterrole=all",
        account,
    ];
    setup.kubectl(&binding).await?;
    for name in ["node-a", "node-b"] {
        let node: Node = serde_json::from_value(json!({ "metadata": { "name": name } }))?;
        Api::<Node>::all(setup.cluster.client())
            .create(&PostParams::default(), &node)
            .await?;
    }
    token_client(setup, "drayman-node", Some("node-a")).await
}

fn inventory(node: &str, driver: &str) -> NodeInventory {
    NodeInventory::new(
        &format!("{node}.{driver}"),
        NodeInventorySpec {
            driver_name: driver.to_owned(),
            node_name: node.to_owned(),
            node_uid: "uid".to_owned(),
            devices: Vec::new(),
        },
    )
}

/// Owners that the companion of node-a may not give to its objects.
pub(crate) const FOREIGN_OWNERS: [(&str, &str); 2] = [("Node", "node-b"), ("Namespace", "node-a")];

/// A reference to node-a, but of this kind and name.
pub(crate) async fn owner(setup: &ChartSetup, kind: &str, name: &str) -> anyhow::Result<OwnerReference> {
    Ok(OwnerReference {
        api_version: "v1".to_owned(),
        kind: kind.to_owned(),
        name: name.to_owned(),
        uid: setup.field(&["node", "node-a"], ".metadata.uid").await?,
        ..OwnerReference::default()
    })
}

/// Creates and updates the inventory of node-a with other owners and with its own.
async fn only_its_node_is_an_owner(setup: &ChartSetup, ours: &Api<NodeInventory>) -> anyhow::Result<()> {
    let apply = PatchParams::apply("test").force();
    let write = async |kind: &str, name: &str| {
        let mut object = inventory("node-a", "drayman.dev");
        object.metadata.owner_references = Some(vec![owner(setup, kind, name).await?]);
        let patch = Patch::Apply(&object);
        anyhow::Ok(ours.patch("node-a.drayman.dev", &apply, &patch).await?)
    };
    for stored in [false, true] {
        for (kind, name) in FOREIGN_OWNERS {
            let error = write(kind, name).await.expect_err("a foreign owner").to_string();
            ensure!(
                error.contains("the Node node-a is the only owner"),
                "{kind} {name}, stored: {stored}: {error}"
            );
        }
        write("Node", "node-a").await?;
    }
    Ok(())
}

#[tokio::test]
async fn the_token_of_a_node_writes_only_its_own_inventory() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::builder().service_accounts().start().await?).await?;
    if setup
        .cluster
        .is_before(30, "tokens do not contain the node name, so there is no policy")
    {
        return setup.cluster.stop().await;
    }
    // Helm installs the CRDs.
    setup.install(None, &["--set=crds.upgrade=false"]).await?;
    let admin = Api::<NodeInventory>::all(setup.cluster.client());
    let ours = companion_of_node_a(&setup, "nodeinventories,nodeinventories/status").await?;
    let ours = Api::<NodeInventory>::all(ours);
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
    // Its own name, but with the name of another node or driver in the spec.
    for (node, driver) in [("node-b", "drayman.dev"), ("node-a", "other.example.com")] {
        let mut disguised = inventory(node, driver);
        disguised.metadata.name = Some("node-a.drayman.dev".to_owned());
        let disguised = ours
            .patch("node-a.drayman.dev", &apply, &Patch::Apply(&disguised))
            .await;
        refused(
            disguised.map(drop).map_err(|error| error.to_string()),
            "say that it is another node or driver",
        );
    }
    only_its_node_is_an_owner(&setup, &ours).await?;
    // A token of the account that is not bound to a pod, as `kubectl create token` returns it.
    let unbound = token_client(&setup, "drayman-node", None).await?;
    let unbound = Api::<NodeInventory>::all(unbound);
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
    setup.cluster.stop().await
}

#[tokio::test]
async fn without_classic_dra_an_install_names_the_supported_values() -> anyhow::Result<()> {
    let mut cluster = Cluster::builder().flag("apiserver", "--runtime-config=resource.k8s.io/v1alpha2=false");
    for component in ["apiserver", "controller-manager", "scheduler"] {
        cluster = cluster.flag(component, "--feature-gates=DynamicResourceAllocation=false");
    }
    let cluster = cluster.start().await?;
    let setup = ChartSetup::prepare(cluster).await?;
    let crds = "--set=crds.upgrade=false";
    let refusal = setup.install(None, &[crds]).await;
    let refusal = refusal.expect_err("no claims").to_string();
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
    let values = Some("ci/extended-resources-values.yaml");
    setup.install(values, &[crds]).await?;
    let monitored = "--set=monitoring.prometheusRule.enabled=true";
    let refusal = setup
        .release("install", "monitored", values, &[crds, monitored])
        .await;
    let refusal = refusal.expect_err("no operator").to_string();
    ensure!(
        refusal.contains("does not have the kinds of the Prometheus operator"),
        "{refusal}"
    );
    // A user who applies rendered manifests is not stopped.
    let rendered = objects(&tokio::task::spawn_blocking(|| text(None, &[])).await?);
    object(&rendered, "Deployment", "drayman-controller");
    setup.cluster.stop().await
}
