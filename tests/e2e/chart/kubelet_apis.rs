//! Kinds of modes `extended-resource` and `both`, installed by the chart on a real node.

use anyhow::ensure;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep_until};

use crate::chart::lifecycle::{pod, template};
use crate::chart::setup::ChartSetup;
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
async fn allocatable(setup: &ChartSetup, resource: &str) -> anyhow::Result<String> {
    let field = format!(".status.allocatable.{}", resource.replace('.', "\\."));
    setup.field(&["node", "node-0"], &field).await
}

/// Messages of a pod's events.
async fn events(setup: &ChartSetup, pod: &str) -> anyhow::Result<Vec<String>> {
    let about = ListParams::default().fields(&format!("involvedObject.name={pod}"));
    let events = Api::<Event>::namespaced(setup.cluster.client(), "default");
    let events = events.list(&about).await?.items;
    Ok(events.into_iter().filter_map(|event| event.message).collect())
}

#[tokio::test]
async fn a_device_of_an_init_container_is_given_to_no_claim() -> anyhow::Result<()> {
    let setup = ChartSetup::start(1).await?;
    let values = setup.cluster.directory().join("both-apis.yaml");
    std::fs::write(&values, VALUES)?;
    setup.deploy("install", &values, &[]).await?;
    setup.ready("node-0.drayman.dev").await?;
    for resource in ["drayman.dev/plugged", "drayman.dev/both"] {
        setup
            .until(&format!("a device of {resource} is allocatable"), async || {
                Ok(allocatable(&setup, resource).await? == "1")
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
    let message = setup.helm(&test).await?;
    ensure!(message.contains("Phase:          Succeeded"), "{message}");

    // A device of mode `extended-resource`.
    setup
        .apply(&pod_with_limit("plugged", "drayman.dev/plugged", None))
        .await?;
    setup.running("plugged").await?;
    let devices = setup.devices("plugged").await?;
    ensure!(
        devices.values().eq(["/dev/drayman-test-1"]),
        "the pod has {devices:?}"
    );

    // Kubelet's PodResources API does not list init containers.
    let command = "test -c /dev/drayman-test-0 && sleep 3600";
    setup
        .apply(&pod_with_limit("init", "drayman.dev/both", Some(command)))
        .await?;
    setup
        .until("the init container runs", async || {
            let started = ".status.initContainerStatuses[0].state.running.startedAt";
            Ok(!setup.field(&["pod", "init"], started).await?.is_empty())
        })
        .await?;
    sleep_until(Instant::now() + AFTER_ADMISSION).await;
    setup.apply(&template("both", "both")).await?;
    setup.apply(&pod("claimed", &["both"])).await?;
    setup
        .until("the claim is refused by the companion", async || {
            let messages = events(&setup, "claimed").await?;
            let refused = messages.iter().any(|message| {
                message.contains("drayman-test-0") && message.contains("is in use by a container")
            });
            let phase = setup.field(&["pod", "claimed"], ".status.phase").await?;
            ensure!(phase == "Pending", "the pod is {phase}: {messages:?}");
            Ok(refused)
        })
        .await?;
    // Nor is the device allocated to another claim.
    setup
        .until("the inventory says why", async || {
            let unhealthy = ".spec.devices[?(@.name==\"drayman-test-0\")].unhealthy";
            let cause = setup
                .field(&["nodeinventory", "node-0.drayman.dev"], unhealthy)
                .await?;
            Ok(cause.contains("a container has it"))
        })
        .await?;
    inspect_with_the_tool(&setup).await?;
    let started = ".status.containerStatuses[0].started";
    assert_ne!(setup.field(&["pod", "claimed"], started).await?, "true");
    setup.cluster.stop().await
}

/// Output of `drayman devices` and `drayman node` about devices that containers hold.
async fn inspect_with_the_tool(setup: &ChartSetup) -> anyhow::Result<()> {
    let ask = async |words: &[&str]| anyhow::Ok(String::from_utf8(setup.ask(words).await?.stdout)?);
    let message = ask(&["who", "drayman-test-1"]).await?;
    println!("{message}");
    ensure!(
        message.contains("NotForClaims") && message.contains("Held by:  no claim; possibly a container"),
        "{message}"
    );
    let message = ask(&["who", "drayman-test-0"]).await?;
    println!("{message}");
    ensure!(
        message.contains("Unhealthy") && message.contains("a container has it as an extended resource"),
        "{message}"
    );
    // Kubelet does not name the init container; only the device is known.
    let exec = ["--namespace=drayman", "exec", "daemonset/drayman-node", "--"];
    let command = ["/drayman", "node", "holdings"];
    let message = setup.kubectl(&[&exec[..], &command].concat()).await?;
    println!("{message}");
    ensure!(
        message.contains(
            "drayman-test-0: a container that kubelet does not name has it as an extended resource"
        ),
        "{message}"
    );
    Ok(())
}

/// Directories that neither kubelet nor the chart uses by default. The device plugin directory does not follow the kubelet root.
const KUBELET_ROOT: &str = "/var/lib/kubelet/elsewhere";
const CDI_ROOT: &str = "/run/cdi";

#[tokio::test]
async fn a_kubelet_with_another_root_directory_is_served() -> anyhow::Result<()> {
    let root = format!("--root-dir={KUBELET_ROOT}");
    let setup = ChartSetup::start_with(Cluster::builder().flag("kubelet", &root), 1).await?;
    let values = setup.cluster.directory().join("both-apis.yaml");
    std::fs::write(&values, VALUES)?;
    let root = format!("--set=node.kubeletRoot={KUBELET_ROOT}");
    let cdi = format!("--set=node.cdiRoot={CDI_ROOT}");
    setup.deploy("install", &values, &[&root, &cdi]).await?;
    setup.ready("node-0.drayman.dev").await?;
    setup
        .until("the extended resource is allocatable", async || {
            Ok(allocatable(&setup, "drayman.dev/plugged").await? == "1")
        })
        .await?;

    setup.apply(&template("both", "both")).await?;
    setup.apply(&pod("claimed", &["both"])).await?;
    setup
        .apply(&pod_with_limit("plugged", "drayman.dev/plugged", None))
        .await?;
    for (name, device) in [
        ("claimed", "/dev/drayman-test-0"),
        ("plugged", "/dev/drayman-test-1"),
    ] {
        setup.running(name).await?;
        let devices = setup.devices(name).await?;
        ensure!(devices.values().eq([device]), "{name} has {devices:?}");
    }
    // Nothing is written below kubelet's default directories.
    let node = setup.cluster.node(0);
    let plugins = node.list(format!("{KUBELET_ROOT}/plugins"))?;
    assert_eq!(plugins, ["drayman.dev"]);
    assert_eq!(
        node.list("/var/lib/kubelet")?,
        ["device-plugins", "elsewhere", "volume-plugins"]
    );
    setup.cluster.stop().await
}
