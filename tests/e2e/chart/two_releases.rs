//! Two releases on one cluster.

use std::collections::BTreeSet;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::chart::helm::{chart, objects};
use crate::chart::lifecycle::{COMPANION, CONTROLLER, pod, template};
use crate::chart::setup::ChartSetup;
use crate::harness;

#[tokio::test]
async fn two_releases_with_different_names_serve_one_pod() -> anyhow::Result<()> {
    let setup = ChartSetup::start(1).await?;
    // The last device belongs to the second release.
    let node = setup.cluster.node(0);
    node.remove("/dev/drayman-test-2")?;
    node.make_device("/dev/drayman-other", 1, 9)?;
    setup
        .deploy("install", &chart("ci/one-kind-values.yaml"), &[])
        .await?;

    let chart = chart("");
    let chart = chart.to_str().unwrap_or_default();
    setup.namespace("other", "privileged").await?;
    let install = |name: &'static str| {
        let name = format!("--set=driverName={name}");
        let setup = &setup;
        async move {
            let mut arguments = vec!["install", "other", chart, "--namespace", "other", &name];
            arguments.extend([
                "--set=crds.upgrade=false",
                "--set=deviceKinds[0].name=other",
                "--set=deviceKinds[0].paths[0]=/dev/drayman-other",
                "--set=classes[0].name=other",
                "--set=classes[0].kind=other",
            ]);
            setup.helm(&arguments).await
        }
    };
    let same = install("drayman.dev")
        .await
        .expect_err("the same driver name")
        .to_string();
    ensure!(
        same.contains(
            "The driver name drayman.dev is served by the release drayman in the namespace drayman already"
        ) && same.contains("set driverName to another name"),
        "{same}"
    );
    roles_made_by_hand(&setup).await?;
    let mut left = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": { "name": "left", "labels": { "drayman.dev/driver-name": "left.example.com" } }, "rules": [],
    });
    left["metadata"]["annotations"] =
        json!({ "meta.helm.sh/release-name": "left", "meta.helm.sh/release-namespace": "deleted" });
    setup.apply(&left).await?;
    let deleted = install("left.example.com")
        .await
        .expect_err("a deleted namespace");
    let advice = "namespace deleted was deleted before helm uninstall: install it there again";
    ensure!(deleted.to_string().contains(advice), "{deleted}");
    install("other.example.com").await?;
    setup.rolled_out("other", "other-drayman").await?;
    setup.ready("node-0.drayman.dev").await?;
    setup.ready("node-0.other.example.com").await?;

    setup.apply(&template("test", "test")).await?;
    setup.apply(&template("other", "other")).await?;
    setup.apply(&pod("both", &["test", "other"])).await?;
    setup.running("both").await?;
    let devices: BTreeSet<String> = setup.devices("both").await?.into_values().collect();
    assert_eq!(devices.len(), 2, "{devices:?}");
    ensure!(devices.contains("/dev/drayman-other"), "{devices:?}");
    setup.kubectl(&["delete", "pod", "both"]).await?;
    setup.until_no_claims().await?;

    // One release is uninstalled, and the other is not affected.
    let before = (
        setup.run_of("drayman", CONTROLLER).await?,
        setup.run_of("drayman", COMPANION).await?,
    );
    setup
        .helm(&["uninstall", "other", "--namespace", "other", "--wait"])
        .await?;
    setup.apply(&pod("one", &["test"])).await?;
    setup.running("one").await?;
    assert_eq!(setup.devices("one").await?.len(), 1);
    let after = (
        setup.run_of("drayman", CONTROLLER).await?,
        setup.run_of("drayman", COMPANION).await?,
    );
    assert_eq!(before, after);
    setup.cluster.stop().await
}

/// `rbac.create=false` as in docs/operator/install.md: roles created by hand do not count as another release.
async fn roles_made_by_hand(setup: &ChartSetup) -> anyhow::Result<()> {
    setup.namespace("third", "privileged").await?;
    let (chart, name) = (chart(""), "--set=driverName=third.example.com");
    let chart = chart.to_str().unwrap_or_default();
    let files = ["controller/rbac", "node/rbac", "crds/upgrade"].map(|file| format!("templates/{file}.yaml"));
    let mut words = vec!["template", "third", chart, "--namespace=third", name];
    words.extend(["--kube-version", harness::VERSION]);
    words.extend(files.iter().flat_map(|file| ["--show-only", file]));
    let rendered = objects(&setup.helm(&words).await?);
    let roles: Vec<Value> = rendered
        .into_iter()
        .filter(|object| {
            let kind = object["kind"].as_str().unwrap_or_default();
            kind.contains("Role")
        })
        .collect();
    ensure!(roles.len() > 5, "{roles:#?}");
    let file = setup.cluster.directory().join("roles.json");
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": roles });
    std::fs::write(&file, list.to_string())?;
    let file = file.to_str().unwrap_or_default();
    setup.kubectl(&["apply", "--filename", file]).await?;
    let install = [
        "install",
        "third",
        chart,
        "--namespace=third",
        name,
        "--set=rbac.create=false",
        "--dry-run=server",
    ];
    setup.helm(&install).await?;
    setup.kubectl(&["delete", "--filename", file]).await.map(drop)
}
