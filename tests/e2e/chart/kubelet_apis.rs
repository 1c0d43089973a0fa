//! Kinds of modes `extended-resource` and `both`, installed by the chart on a real node.

use anyhow::ensure;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep_until};

use crate::chart::life::{pod, template};
use crate::chart::stage::Stage;
use crate::harness::{Cluster, IMAGE};

/// Longer than the companion counts a device as held after an Allocate, regardless of PodResources (docs/dev/architecture.md).
const AFTER_ADMISSION: Duration = Duration::from_secs(40);

/// One device per kind.
const VALUES: &str = "\
deviceKinds:
- name: both
  mode: both
  resourceName: drayman.dev/both
  paths: [/dev/drayman-test-0]
- name: plugged
  mode: extended-resource
  resourceName: drayman.dev/plugged
  paths: [/dev/drayman-test-1]
classes:
- name: both
  kind: both
";

/// A pod whose container requests one extended resource. With `init`, an init container that runs this command requests it instead.
fn pod_with_limit(name: &str, resource: &str, init: Option<&str>) -> Value {
    let limits = json!({ "limits": { resource: "1" } });
    let mut pod = pod(name, &[]);
    if let Some(command) = init {
        pod["spec"]["initContainers"] = json!([{
            "name": "first", "image": IMAGE, "imagePullPolicy": "Never",
            "command": ["sh", "-c", command], "resources": limits,
        }]);
    } else {
        pod["spec"]["containers"][0]["resources"] = limits;
    }
    pod
}

/// Allocatable count of an extended resource on the node.
async fn allocatable(stage: &Stage, resource: &str) -> anyhow::Result<String> {
    let field = format!(".status.allocatable.{}", resource.replace('.', "\\."));
    stage.field(&["node", "node-0"], &field).await
}

/// Messages of a pod's events.
async fn events(stage: &Stage, pod: &str) -> anyhow::Result<Vec<String>> {
    let about = ListParams::default().fields(&format!("involvedObject.name={pod}"));
    let events = Api::<Event>::namespaced(stage.cluster.client(), "default");
    let events = events.list(&about).await?.items;
    Ok(events.into_iter().filter_map(|event| event.message).collect())
}

#[tokio::test]
async fn a_device_of_an_init_container_is_given_to_no_claim() -> anyhow::Result<()> {
    let stage = Stage::start(1).await?;
    let values = stage.cluster.directory().join("both-apis.yaml");
    std::fs::write(&values, VALUES)?;
    stage.deploy("install", &values, &[]).await?;
    stage.ready("node-0.drayman.dev").await?;
    for resource in ["drayman.dev/plugged", "drayman.dev/both"] {
        stage
            .until(&format!("a device of {resource} can be had"), async || {
                Ok(allocatable(&stage, resource).await? == "1")
            })
            .await?;
    }

    // `helm test` requests this resource by a limit. Its other pod would claim the device of mode `both`.
    let test = [
        "test",
        "drayman",
        "--namespace=drayman",
        "--filter=name=drayman-test-limit",
    ];
    let said = stage.helm(&test).await?;
    ensure!(said.contains("Phase:          Succeeded"), "{said}");

    // A device of mode `extended-resource`.
    stage
        .apply(&pod_with_limit("plugged", "drayman.dev/plugged", None))
        .await?;
    stage.running("plugged").await?;
    let devices = stage.devices("plugged").await?;
    ensure!(
        devices.values().eq(["/dev/drayman-test-1"]),
        "the pod has {devices:?}"
    );

    // Kubelet's PodResources API does not list init containers.
    let command = "test -c /dev/drayman-test-0 && sleep 3600";
    stage
        .apply(&pod_with_limit("init", "drayman.dev/both", Some(command)))
        .await?;
    stage
        .until("the init container runs", async || {
            let started = ".status.initContainerStatuses[0].state.running.startedAt";
            Ok(!stage.field(&["pod", "init"], started).await?.is_empty())
        })
        .await?;
    sleep_until(Instant::now() + AFTER_ADMISSION).await;
    stage.apply(&template("both", "both")).await?;
    stage.apply(&pod("claimed", &["both"])).await?;
    stage
        .until("the claim is refused by the companion", async || {
            let told = events(&stage, "claimed").await?;
            let refused = told.iter().any(|message| {
                message.contains("drayman-test-0") && message.contains("is in use by a container")
            });
            let phase = stage.field(&["pod", "claimed"], ".status.phase").await?;
            ensure!(phase == "Pending", "the pod is {phase}: {told:?}");
            Ok(refused)
        })
        .await?;
    // Nor is the device allocated to another claim.
    stage
        .until("the inventory says why", async || {
            let unhealthy = ".spec.devices[?(@.name==\"drayman-test-0\")].unhealthy";
            let cause = stage
                .field(&["nodeinventory", "node-0.drayman.dev"], unhealthy)
                .await?;
            Ok(cause.contains("a container has it"))
        })
        .await?;
    look_with_the_tool(&stage).await?;
    let started = ".status.containerStatuses[0].started";
    assert_ne!(stage.field(&["pod", "claimed"], started).await?, "true");
    stage.cluster.stop().await
}

/// Output of `drayman devices` and `drayman node` about devices that containers hold.
async fn look_with_the_tool(stage: &Stage) -> anyhow::Result<()> {
    let ask = async |words: &[&str]| anyhow::Ok(String::from_utf8(stage.ask(words).await?.stdout)?);
    let said = ask(&["who", "drayman-test-1"]).await?;
    println!("{said}");
    ensure!(
        said.contains("NotForClaims") && said.contains("Held by:  not by a claim; a container may have it"),
        "{said}"
    );
    let said = ask(&["who", "drayman-test-0"]).await?;
    println!("{said}");
    ensure!(
        said.contains("Unhealthy") && said.contains("a container has it as an extended resource"),
        "{said}"
    );
    // Kubelet does not name the init container; only the device is known.
    let exec = ["--namespace=drayman", "exec", "daemonset/drayman-node", "--"];
    let command = ["/drayman", "node", "holdings"];
    let said = stage.cluster.kubectl(&[&exec[..], &command].concat()).await?;
    println!("{said}");
    ensure!(
        said.contains(
            "drayman-test-0: a container that kubelet does not name has it as an extended resource"
        ),
        "{said}"
    );
    Ok(())
}

/// Directories that neither kubelet nor the chart uses by default. The device plugin directory does not follow the kubelet root.
const KUBELET_ROOT: &str = "/var/lib/kubelet/elsewhere";
const CDI_ROOT: &str = "/run/cdi";

#[tokio::test]
async fn a_kubelet_with_another_root_directory_is_served() -> anyhow::Result<()> {
    let root = format!("--root-dir={KUBELET_ROOT}");
    let stage = Stage::start_with(Cluster::builder().flag("kubelet", &root), 1).await?;
    let values = stage.cluster.directory().join("both-apis.yaml");
    std::fs::write(&values, VALUES)?;
    let root = format!("--set=node.kubeletRoot={KUBELET_ROOT}");
    let cdi = format!("--set=node.cdiRoot={CDI_ROOT}");
    stage.deploy("install", &values, &[&root, &cdi]).await?;
    stage.ready("node-0.drayman.dev").await?;
    stage
        .until("the extended resource can be had", async || {
            Ok(allocatable(&stage, "drayman.dev/plugged").await? == "1")
        })
        .await?;

    stage.apply(&template("both", "both")).await?;
    stage.apply(&pod("claimed", &["both"])).await?;
    stage
        .apply(&pod_with_limit("plugged", "drayman.dev/plugged", None))
        .await?;
    for (name, device) in [
        ("claimed", "/dev/drayman-test-0"),
        ("plugged", "/dev/drayman-test-1"),
    ] {
        stage.running(name).await?;
        let devices = stage.devices(name).await?;
        ensure!(devices.values().eq([device]), "{name} has {devices:?}");
    }
    // Nothing is written below kubelet's default directories.
    let node = stage.cluster.node(0);
    let plugins = node.list(format!("{KUBELET_ROOT}/plugins"))?;
    assert_eq!(plugins, ["drayman.dev"]);
    assert_eq!(
        node.list("/var/lib/kubelet")?,
        ["device-plugins", "elsewhere", "volume-plugins"]
    );
    stage.cluster.stop().await
}
