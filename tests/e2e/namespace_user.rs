//! A user with the role `edit` in one namespace and no other rights, after an installation with the chart.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::commands::run_as;
use crate::harness::{self, TIMEOUT};
use crate::setup::{DRIVER, Setup, pod_with_claim};

const NAMESPACE: &str = "team";
const USER: &str = "developer";

/// Creates the chart's roles for users, rendered with the defaults.
async fn roles_of_the_chart(setup: &Setup) -> anyhow::Result<()> {
    let helm = tokio::task::spawn_blocking(harness::helm).await??;
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/drayman");
    let mut command = setup.cluster.command(helm);
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(variable, setup.cluster.directory().join("helm"));
    }
    command.args(["template", "drayman"]).arg(chart);
    command.args(["--namespace=drayman", "--show-only=templates/access/users.yaml"]);
    command.args(["--kube-version", harness::VERSION]);
    let rendered = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let rendered = rendered.output().await?;
    let message = String::from_utf8_lossy(&rendered.stderr).into_owned();
    ensure!(rendered.status.success(), "Helm: {message}");
    let file = setup.cluster.directory().join("users.yaml");
    std::fs::write(&file, rendered.stdout)?;
    let file = file.to_str().context("UTF-8")?;
    setup
        .cluster
        .kubectl(&["apply", "--filename", file])
        .await
        .map(drop)
}

/// Runs kubectl as the user; the error contains its stderr.
async fn kubectl(setup: &Setup, kubeconfig: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = setup.cluster.command(setup.cluster.kubectl_program());
    command.arg("--kubeconfig").arg(kubeconfig).arg("--cache-dir");
    command.arg(setup.cluster.directory().join("cache-of-the-user"));
    let output = command
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = output.output().await?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Creates a user with a RoleBinding of `edit` in one namespace, and waits until the API server knows the rights.
async fn editor(setup: &Setup) -> anyhow::Result<PathBuf> {
    roles_of_the_chart(setup).await?;
    // As with the chart's value rbac.readInventoriesByAuthenticated.
    let inventories = crate::harness::rule(&["drayman.dev"], &["nodeinventories"], &["get", "list", "watch"]);
    let kubeconfig = setup.cluster.user(USER, &[inventories]).await?;
    setup.cluster.kubectl(&["create", "namespace", NAMESPACE]).await?;
    let (user, namespace) = (format!("--user={USER}"), format!("--namespace={NAMESPACE}"));
    let binding = [
        "create",
        "rolebinding",
        USER,
        "--clusterrole=edit",
        &user,
        &namespace,
    ];
    setup.cluster.kubectl(&binding).await?;
    let deadline = Instant::now() + TIMEOUT;
    for (verb, resource) in [
        ("create", "resourceclaimtemplates.resource.k8s.io"),
        ("create", "deviceclaimparameters.drayman.dev"),
        ("list", "nodeinventories.drayman.dev"),
        ("get", "podschedulingcontexts.resource.k8s.io"),
    ] {
        let question = ["auth", "can-i", verb, resource, &namespace];
        while kubectl(setup, &kubeconfig, &question).await.is_err() {
            ensure!(Instant::now() < deadline, "{USER} may not {verb} {resource}");
            sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    Ok(kubeconfig)
}

/// The user's objects: parameters, a template that references them, and a pod.
fn objects() -> anyhow::Result<Value> {
    let mut pod = serde_json::to_value(pod_with_claim("mine")?)?;
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    let parameters = json!({ "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": "one" });
    Ok(json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters",
          "metadata": { "name": "one", "namespace": NAMESPACE }, "spec": { "requests": [{ "name": "device" }] } },
        { "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate",
          "metadata": { "name": "test", "namespace": NAMESPACE },
          "spec": { "spec": { "resourceClassName": "test", "parametersRef": parameters } } },
        pod,
    ] }))
}

#[tokio::test]
async fn a_namespace_editor_claims_a_device_and_sees_why_pods_wait() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;
    let _controller = setup.controller()?;
    // Another user's pod has the only device.
    setup.serve("first").await?;

    let kubeconfig = editor(&setup).await?;
    let classes = kubectl(&setup, &kubeconfig, &["get", "resourceclasses", "--output=name"]).await?;
    ensure!(classes.contains("/test"), "{classes}");
    let file = setup.cluster.directory().join("mine.json");
    std::fs::write(&file, objects()?.to_string())?;
    let file = file.to_str().context("UTF-8")?;
    kubectl(&setup, &kubeconfig, &["apply", "--filename", file]).await?;

    let missing = "you may not list resourceclaims.resource.k8s.io in all namespaces";
    let kubeconfig_file = kubeconfig.display().to_string();
    let context = [
        "config",
        "set-context",
        "--current",
        "--namespace",
        NAMESPACE,
        "--kubeconfig",
        &kubeconfig_file,
    ];
    setup.cluster.kubectl(&context).await?;
    let ask = async |arguments: &[&str]| {
        let arguments = [arguments, &["--output=json"]].concat();
        let (code, stdout, stderr) = run_as(&setup.cluster, &kubeconfig, &arguments).await?;
        ensure!(code == Some(0), "{arguments:?}: {stderr}");
        ensure!(stderr.contains(missing), "{stderr}");
        anyhow::Ok(serde_json::from_str::<Value>(&stdout)?)
    };
    let until = async |step: &str| {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let claim = ask(&["explain", "pod/mine"]).await?["claims"][0].clone();
            if claim["step"] == step {
                return Ok(claim);
            }
            ensure!(Instant::now() < deadline, "not {step}, but {claim}");
            sleep(std::time::Duration::from_millis(200)).await;
        }
    };
    // This user may not read who holds the device; the controller reports the node as unsuitable.
    let claim = until("WaitsForDevice").await?;
    println!("{claim:#}");
    assert_eq!(claim["wants"], "1 of kind test");
    let reason = claim["nodes"][0]["reason"].as_str().unwrap_or_default();
    ensure!(
        reason.contains("the controller reports it as unsuitable"),
        "{claim}"
    );
    let device = ask(&["devices"]).await?["items"][0].clone();
    assert_eq!(
        (&device["state"], &device["holders"]),
        (&json!("Unknown"), &json!([]))
    );
    let (_, text, _) = run_as(
        &setup.cluster,
        &kubeconfig,
        &["who", "drayman-test-0", "-n", NAMESPACE],
    )
    .await?;
    ensure!(text.contains("Held by:  unknown"), "{text}");

    setup.remove_pod("first").await?;
    until("Preparing").await?;
    let device = ask(&["devices", "--state=held"]).await?["items"][0].clone();
    assert_eq!(device["holders"][0]["pods"], json!(["mine"]));

    // Other namespaces are not accessible.
    for (arguments, words) in [
        (["explain", "first"], "cannot get resource \"pods\""),
        (
            ["devices", "--kind=test"],
            "cannot list resource \"resourceclaims\"",
        ),
    ] {
        let arguments = [&arguments[..], &["--namespace=default"]].concat();
        let (code, _, stderr) = run_as(&setup.cluster, &kubeconfig, &arguments).await?;
        assert_eq!(code, Some(3), "{arguments:?}");
        ensure!(
            stderr.contains(words) && stderr.contains("in the namespace \"default\""),
            "{stderr}"
        );
    }
    let elsewhere = std::fs::read_to_string(file)?.replace("\"team\"", "\"default\"");
    std::fs::write(file, elsewhere)?;
    let refused = kubectl(&setup, &kubeconfig, &["apply", "--filename", file]).await;
    let refused = refused.map(drop).expect_err("no right there").to_string();
    ensure!(refused.matches("orbidden").count() >= 3, "{refused}");
    setup.cluster.stop().await
}
