//! Changes while pods hold devices: a restart of the container runtime, another mode of a kind, a new token.

use std::time::{Duration, Instant};

use kube::api::DeleteParams;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde_json::json;
use tokio::time::sleep;

use crate::harness::not_run::not_run;
use crate::harness::{Cluster, TIMEOUT};
use crate::kubelet_plugin::helper::{in_containers_by_number, never_in_two, wait_for_inventory};
use crate::setup::{DRIVER, Setup, node_rules};

const LIMIT: &str = "drayman.dev/limit";
const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
- name: limit
  mode: extended-resource
  resourceName: drayman.dev/limit
  paths: [\"/dev/drayman-limit-*\"]
";
const NAMES: [&str; 4] = ["test-a", "test-b", "limit-a", "limit-b"];

async fn make_pod_with_limit(setup: &Setup, name: &str) -> anyhow::Result<()> {
    setup.make_limit_pod(name, LIMIT).await?;
    Ok(())
}

async fn runs(setup: &Setup, name: &str) -> anyhow::Result<()> {
    setup.until_running(name).await.map(drop)
}

/// A node with two devices of each kind, of which one is in use.
async fn make_devices(setup: &Setup) -> anyhow::Result<()> {
    for (name, minor) in NAMES.into_iter().zip([5, 7, 8, 9]) {
        setup
            .cluster
            .node(0)
            .make_device(format!("/dev/drayman-{name}"), 1, minor)?;
    }
    setup.make_template(None).await
}

#[tokio::test]
async fn a_restart_of_containerd_costs_no_device() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(&setup).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, DRIVER, 4, 0).await?;
    setup.until_allocatable(LIMIT, "2").await?;
    let trial = async {
        setup.make_pod("claim-1").await?;
        make_pod_with_limit(&setup, "limit-1").await?;
        for pod in ["claim-1", "limit-1"] {
            runs(&setup, pod).await?;
        }
        node.stop("containerd", 9).await?;
        setup.make_pod("claim-2").await?;
        make_pod_with_limit(&setup, "limit-2").await?;
        setup.until_bound("claim-2").await?;
        let start = Instant::now();
        node.start("containerd").await?;
        for pod in ["claim-2", "limit-2"] {
            runs(&setup, pod).await?;
            println!("{pod} runs {:?} after the start of containerd", start.elapsed());
        }
        // Four pods with one device each; the first two have kept theirs.
        assert_eq!(in_containers_by_number(node).len(), 4);
        for pod in ["claim-1", "limit-1"] {
            setup.pods().delete(pod, &DeleteParams::default()).await?;
        }
        setup.make_pod("claim-3").await?;
        make_pod_with_limit(&setup, "limit-3").await?;
        for pod in ["claim-3", "limit-3"] {
            runs(&setup, pod).await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        failed = never_in_two(node) => failed?,
        done = trial => done?,
    }
    setup.end([companion, controller]).await
}

/// The kind changes from mode `extended-resource` to `claims` while a pod holds a device by its limit.
#[tokio::test]
async fn an_upgrade_to_claims_withholds_devices_held_by_limits() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(&setup).await?;
    let before = CONFIGURATION.replace("/dev/drayman-test-*", "/dev/drayman-none-*");
    let after = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-limit-*\"]
";
    let controller = setup.controller()?;
    let companion = setup.companion(0, &before)?;
    setup.until_allocatable(LIMIT, "2").await?;
    make_pod_with_limit(&setup, "limit-1").await?;
    runs(&setup, "limit-1").await?;
    companion.end().await?;
    let companion = setup.companion(0, after)?;
    wait_for_inventory(&setup, DRIVER, 2, 1).await?;
    let trial = async {
        for pod in ["claim-1", "claim-2"] {
            setup.make_pod(pod).await?;
        }
        // One of them gets the other device.
        let running = async |pod: &'static str| runs(&setup, pod).await.map(|()| pod);
        let first = tokio::select! {
            first = running("claim-1") => first?,
            first = running("claim-2") => first?,
        };
        let second = if first == "claim-1" { "claim-2" } else { "claim-1" };
        assert_eq!(in_containers_by_number(node).len(), 2);
        setup.pods().delete("limit-1", &DeleteParams::default()).await?;
        runs(&setup, second).await
    };
    tokio::select! {
        failed = never_in_two(node) => failed?,
        done = trial => done?,
    }
    setup.end([companion, controller]).await
}

/// A token bound to a Secret; it is valid until the Secret is deleted.
async fn token(setup: &Setup, secret: &str) -> anyhow::Result<String> {
    let kubectl = &setup.cluster;
    kubectl.kubectl(&["create", "secret", "generic", secret]).await?;
    let token = kubectl
        .kubectl(&[
            "create",
            "token",
            "companion",
            "--bound-object-kind=Secret",
            "--bound-object-name",
            secret,
        ])
        .await?;
    Ok(token.trim().to_owned())
}

/// The API server caches a valid token for some seconds.
async fn until_refused(setup: &Setup, token: &str) -> anyhow::Result<()> {
    let mut kubeconfig = Kubeconfig::read_from(setup.cluster.kubeconfig())?;
    for user in &mut kubeconfig.auth_infos {
        user.auth_info = Some(serde_json::from_value(json!({ "token": token }))?);
    }
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = kube::Client::try_from(config)?;
    let deadline = Instant::now() + TIMEOUT;
    while !matches!(client.apiserver_version().await, Err(kube::Error::Api(status)) if status.code == 401) {
        anyhow::ensure!(Instant::now() < deadline, "the token is still valid");
        sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

#[tokio::test]
async fn a_companion_continues_with_a_replaced_token() -> anyhow::Result<()> {
    // The client rereads the file after a minute. `faults` covers the controller with a fast clock.
    if std::env::var_os("DRAYMAN_TEST_AWAY_SECONDS").is_none() {
        not_run("it waits for minutes: make test-all runs it");
        return Ok(());
    }
    let setup = Setup::prepare(Cluster::builder().nodes(1).service_accounts().start().await?).await?;
    let node = setup.cluster.node(0);
    node.make_device("/dev/drayman-test-a", 1, 5)?;
    setup.make_template(None).await?;
    setup
        .cluster
        .kubectl(&["create", "serviceaccount", "companion"])
        .await?;
    let user = "system:serviceaccount:default:companion";
    setup.cluster.user(user, &node_rules()?).await?;
    let controller = setup.controller()?;

    let file = setup.cluster.directory().join("companion.token");
    std::fs::write(&file, token(&setup, "first").await?)?;
    let mut kubeconfig = Kubeconfig::read_from(setup.cluster.kubeconfig())?;
    for user in &mut kubeconfig.auth_infos {
        user.auth_info = Some(serde_json::from_value(json!({ "tokenFile": file }))?);
    }
    let path = setup.cluster.directory().join("companion.kubeconfig.json");
    std::fs::write(&path, serde_json::to_string(&kubeconfig)?)?;
    let configuration = setup.cluster.directory().join("companion.yaml");
    std::fs::write(&configuration, CONFIGURATION)?;
    let mut command = node.command(env!("CARGO_BIN_EXE_drayman"));
    command.args(["node", "--v=4", "--node-name", node.name(), "--kubeconfig"]);
    command.arg(&path).arg("--config").arg(&configuration);
    let companion = setup.program("companion-with-token", command)?;
    wait_for_inventory(&setup, DRIVER, 1, 0).await?;
    setup.make_pod("first").await?;
    runs(&setup, "first").await?;

    let former = std::fs::read_to_string(&file)?;
    std::fs::write(&file, token(&setup, "second").await?)?;
    setup.cluster.kubectl(&["delete", "secret", "first"]).await?;
    until_refused(&setup, &former).await?;
    let start = Instant::now();
    node.make_device("/dev/drayman-test-b", 1, 7)?;
    wait_for_inventory(&setup, DRIVER, 2, 0).await?;
    println!(
        "the inventory is written with the new token after {:?}",
        start.elapsed()
    );
    setup.make_pod("second").await?;
    runs(&setup, "second").await?;
    setup.end([companion, controller]).await
}
