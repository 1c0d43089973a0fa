//! The user commands that answer questions about a cluster, on a real control plane.

use std::path::Path;
use std::process::{Output, Stdio};

use anyhow::{Context as _, ensure};
use drayman::api::crd::DeviceClassParameters;
use kube::api::{Api, DeleteParams};
use serde_json::Value;

use crate::harness::{Cluster, rule};
use crate::setup::{DRIVER, Setup, is_allocated};

/// Runs the program as administrator and returns its stdout.
pub(crate) async fn drayman(
    cluster: &Cluster,
    kubeconfig: &Path,
    arguments: &[&str],
) -> anyhow::Result<Output> {
    let mut command = cluster.command(env!("CARGO_BIN_EXE_drayman"));
    command.args(arguments).arg("--kubeconfig").arg(kubeconfig);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command.output().await?)
}

/// Runs the program with this kubeconfig. Returns exit code, stdout and stderr.
pub(crate) async fn run_as(
    cluster: &Cluster,
    kubeconfig: &Path,
    arguments: &[&str],
) -> anyhow::Result<(Option<i32>, String, String)> {
    let output = drayman(cluster, kubeconfig, arguments).await?;
    Ok((
        output.status.code(),
        String::from_utf8(output.stdout)?,
        String::from_utf8(output.stderr)?,
    ))
}

/// Runs the program as administrator. Returns exit code, stdout and stderr.
pub(crate) async fn run(setup: &Setup, arguments: &[&str]) -> anyhow::Result<(Option<i32>, String, String)> {
    run_as(&setup.cluster, setup.cluster.kubeconfig(), arguments).await
}

pub(crate) async fn json(setup: &Setup, arguments: &[&str]) -> anyhow::Result<Value> {
    let (code, stdout, stderr) = run(setup, &[arguments, &["--output=json"]].concat()).await?;
    anyhow::ensure!(
        !stdout.is_empty(),
        "{arguments:?} printed nothing, exit code {code:?}: {stderr}"
    );
    Ok(serde_json::from_str(&stdout)?)
}

/// Two pods and one device: the first pod holds it, the second waits for it.
pub(crate) async fn one_of_two_pods_waits() -> anyhow::Result<(Setup, crate::setup::Program)> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_fake_node("node-b").await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    setup.serve("first").await?;
    setup.make_pod("second").await?;
    setup.claim_of("second", "made", |_| true).await?;
    Ok((setup, controller))
}

#[tokio::test]
async fn devices_and_their_holders_are_listed_and_found() -> anyhow::Result<()> {
    let (setup, _controller) = one_of_two_pods_waits().await?;
    let claim = setup.claim_of("first", "allocated", is_allocated).await?;
    let claim = format!("default/{}", claim.metadata.name.unwrap_or_default());

    let (code, table, _) = run(&setup, &["devices"]).await?;
    println!("{table}");
    assert_eq!(code, Some(0));
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0], ["NODE", "DEVICE", "KIND", "STATE", "HELD", "BY"]);
    assert_eq!(
        lines[1],
        ["node-a", "drayman-test-0", "test", "Held", claim.as_str()]
    );

    let all = json(&setup, &["devices"]).await?;
    assert_eq!(
        all["items"][0]["holders"][0]["pods"],
        serde_json::json!(["first"])
    );
    assert_eq!(
        json(&setup, &["devices", "--state=free"]).await?["items"],
        serde_json::json!([])
    );

    let (code, text, _) = run(&setup, &["who", "node-a/drayman-test-0"]).await?;
    println!("{text}");
    assert_eq!(code, Some(0));
    assert!(text.contains(&format!("ResourceClaim {claim} (request device), used by first")));

    let (code, _, error) = run(&setup, &["who", "nothing"]).await?;
    assert_eq!(code, Some(1));
    assert!(error.contains("has no device nothing"), "{error}");
    let (code, _, error) = run(&setup, &["who", "node-b/drayman-test-0"]).await?;
    assert_eq!(code, Some(1));
    assert!(error.contains("did you mean node-a/drayman-test-0?"), "{error}");
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_waiting_pod_is_explained_node_by_node() -> anyhow::Result<()> {
    let (setup, _controller) = one_of_two_pods_waits().await?;

    let (code, text, _) = run(&setup, &["explain", "second"]).await?;
    println!("{text}");
    assert_eq!(code, Some(0));
    let explained = json(&setup, &["explain", "pod/second"]).await?;
    let claim = &explained["claims"][0];
    assert_eq!(claim["step"], "WaitsForDevice");
    assert_eq!(claim["wants"], "1 of kind test");
    assert_eq!(
        claim["nodes"],
        serde_json::json!([
            { "node": "node-a", "reason": "1 of 1 held" },
            { "node": "node-b", "reason": "no inventory: drayman node does not run here" },
        ])
    );

    let name = claim["claim"]
        .as_str()
        .unwrap_or_default()
        .replace("default/", "claim/");
    assert_eq!(
        json(&setup, &["explain", &name]).await?["claims"][0]["step"],
        "WaitsForDevice"
    );
    assert_eq!(
        json(&setup, &["explain", "pod", "first"]).await?["claims"][0]["step"],
        "Preparing",
        "nothing runs on a fake node"
    );

    // Another output after the fix.
    setup.remove_pod("first").await?;
    setup.until_bound("second").await?;
    assert_eq!(
        json(&setup, &["explain", "pod/second"]).await?["claims"][0]["step"],
        "Preparing"
    );

    let parameters = Api::<DeviceClassParameters>::all(setup.cluster.client());
    parameters.delete("test", &DeleteParams::default()).await?;
    setup.make_pod("third").await?;
    setup.claim_of("third", "made", |_| true).await?;
    let third = json(&setup, &["explain", "pod/third"]).await?;
    assert_eq!(third["claims"][0]["step"], "ParametersInvalid");
    let because = third["claims"][0]["because"].as_str().unwrap_or_default();
    assert!(because.contains("DeviceClassParameters test"), "{because}");

    let (code, _, error) = run(&setup, &["explain", "pod/nobody"]).await?;
    assert_eq!(code, Some(1));
    assert!(error.contains("pod/nobody"), "{error}");
    setup.cluster.stop().await
}

#[tokio::test]
async fn nodes_with_devices_appear_without_the_right_to_list_nodes() -> anyhow::Result<()> {
    let (setup, _controller) = one_of_two_pods_waits().await?;
    let read = ["get", "list", "watch"];
    let kubeconfig = setup
        .cluster
        .user(
            "reader",
            &[
                rule(&[""], &["pods", "events"], &read),
                rule(
                    &["resource.k8s.io"],
                    &["resourceclaims", "resourceclasses", "podschedulingcontexts"],
                    &read,
                ),
                rule(
                    &[DRIVER],
                    &[
                        "nodeinventories",
                        "deviceclassparameters",
                        "deviceclaimparameters",
                    ],
                    &read,
                ),
            ],
        )
        .await?;
    let output = drayman(&setup.cluster, &kubeconfig, &["explain", "second"]).await?;
    let (stdout, stderr) = (
        String::from_utf8(output.stdout)?,
        String::from_utf8(output.stderr)?,
    );
    assert!(output.status.success(), "{stderr}");
    assert!(stdout.contains("node-a"), "{stdout}");
    assert!(stderr.contains("you may not list nodes"), "{stderr}");
    setup.cluster.stop().await
}

#[tokio::test]
async fn leftovers_lists_all_objects_of_classic_dra() -> anyhow::Result<()> {
    let (setup, _controller) = one_of_two_pods_waits().await?;
    let (code, text, _) = run(&setup, &["leftovers"]).await?;
    println!("{text}");
    assert_eq!(code, Some(1));
    let kinds: Vec<&str> = text
        .lines()
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(
        kinds,
        [
            "Pod",
            "Pod",
            "ResourceClaim",
            "ResourceClaim",
            "ResourceClaimTemplate",
            "ResourceClass"
        ]
    );

    for pod in ["first", "second"] {
        let claim = setup
            .claim_of(pod, "made", |_| true)
            .await?
            .metadata
            .name
            .unwrap_or_default();
        setup.remove_pod(pod).await?;
        setup.until_claim_gone(&claim).await?;
    }
    setup
        .cluster
        .kubectl(&["delete", "resourceclaimtemplate", "test"])
        .await?;
    setup
        .cluster
        .kubectl(&["delete", "resourceclass", "test"])
        .await?;
    let (code, text, _) = run(&setup, &["leftovers"]).await?;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("Nothing uses"), "{text}");
    setup.cluster.stop().await
}

/// Output in a machine-readable format, with the exit code.
async fn run_in_format(
    setup: &Setup,
    arguments: &[&str],
    form: &str,
) -> anyhow::Result<(Option<i32>, Value)> {
    let (code, stdout, stderr) = run(setup, &[arguments, &["--output", form]].concat()).await?;
    let parsed: anyhow::Result<Value> = match form {
        "json" => serde_json::from_str(&stdout).map_err(Into::into),
        _ => serde_saphyr::from_str(&stdout).map_err(Into::into),
    };
    let parsed = parsed.with_context(|| format!("{arguments:?} as {form}: {stdout}{stderr}"))?;
    Ok((code, parsed))
}

#[tokio::test]
async fn yaml_and_json_have_the_same_content() -> anyhow::Result<()> {
    let (setup, _controller) = one_of_two_pods_waits().await?;
    let claim = setup.claim_of("second", "made", |_| true).await?;
    let claim = format!("claim/{}", claim.metadata.name.unwrap_or_default());
    for arguments in [
        &["devices"][..],
        &["who", "node-a/drayman-test-0"],
        &["explain", "pod/first"],
        &["explain", "pod/second"],
        &["explain", &claim],
        &["doctor"],
        &["leftovers"],
        &["leftovers", "--this-driver"],
    ] {
        // The cluster changes meanwhile, so the output is compared with an earlier and a later one.
        let mut tries = 0;
        let (json, yaml) = loop {
            let before = run_in_format(&setup, arguments, "json").await?;
            let between = run_in_format(&setup, arguments, "yaml").await?;
            let after = run_in_format(&setup, arguments, "json").await?;
            tries += 1;
            if before == after || tries == 10 {
                break (after, between);
            }
        };
        assert_eq!(json, yaml, "{arguments:?}");
        assert_eq!(json.1["apiVersion"], "cli.drayman.dev/v1alpha1", "{arguments:?}");
    }
    setup.cluster.stop().await
}

#[tokio::test]
async fn kubectl_runs_the_program_as_its_plugin() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    let plugins = setup.cluster.directory().join("plugins");
    std::fs::create_dir(&plugins)?;
    for name in ["kubectl-drayman", "kubectl_complete-drayman"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_drayman"), plugins.join(name))?;
    }
    let kubectl = |arguments: &[&str]| {
        let mut command = setup.cluster.command(setup.cluster.kubectl_program());
        command.args(arguments).env("PATH", &plugins);
        // kubectl passes no flags that precede the plugin's name.
        command.env("KUBECONFIG", setup.cluster.kubeconfig());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let output = kubectl(&["drayman", "devices"]).output().await?;
    let (table, error) = (
        String::from_utf8(output.stdout)?,
        String::from_utf8(output.stderr)?,
    );
    println!("{table}");
    assert_eq!(output.status.code(), Some(0), "{error}");
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0], ["NODE", "DEVICE", "KIND", "STATE", "HELD", "BY"]);
    assert_eq!(lines[1], ["node-a", "drayman-test-0", "test", "Free"]);

    // kubectl's shell completion runs this command on TAB.
    let output = kubectl(&["__complete", "drayman", "ex"]).output().await?;
    let offered = String::from_utf8(output.stdout)?;
    ensure!(
        offered.starts_with("explain\t") && offered.ends_with("\n:4\n"),
        "{offered}"
    );

    // Exit code and stderr pass through too.
    let output = kubectl(&["drayman", "who", "nothing"]).output().await?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("has no device nothing"), "{error}");
    let output = kubectl(&["drayman", "devices", "--help"]).output().await?;
    let help = String::from_utf8(output.stdout)?;
    assert!(help.contains("Usage: kubectl drayman devices"), "{help}");
    setup.cluster.stop().await
}
