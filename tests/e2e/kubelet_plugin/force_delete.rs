//! Pods that are force-deleted while their containers still hold a device.

use std::time::{Duration, Instant};

use drayman::api::resource::Pod;
use kube::api::PostParams;
use serde_json::json;

use crate::harness::{IMAGE, Node, TIMEOUT};
use crate::kubelet_plugin::helper::{in_containers, never_in_two, wait_for_inventory};
use crate::setup::{DRIVER, Program, REGISTERED, Setup, pod_from};

const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-claim-*\"]
- name: limit
  mode: extended-resource
  resourceName: drayman.dev/limit
  paths: [\"/dev/drayman-limit-*\"]
- name: both
  mode: both
  resourceName: drayman.dev/both
  paths: [\"/dev/drayman-both-*\"]
";
const LIMIT: &str = "drayman.dev/limit";
const BOTH: &str = "drayman.dev/both";
const PREFIX: &str = "drayman-";
/// How long the containers of these pods run after SIGTERM, which they ignore. Three pods are refused one after another meanwhile: in 27 s
/// on a busy machine, and in more on a slower one.
const GRACE_SECONDS: u64 = 100;

/// The request of a pod: a claim from a template, or an extended resource.
#[derive(Clone, Copy, Debug)]
enum Request {
    Claim(&'static str),
    Limit(&'static str),
}

/// A pod whose container ignores SIGTERM and keeps its device open until it is killed.
fn stubborn_pod(name: &str, request: Request) -> anyhow::Result<Pod> {
    let (resources, claims) = match request {
        Request::Claim(template) => (
            json!({ "claims": [{ "name": "device" }] }),
            json!([{ "name": "device", "source": { "resourceClaimTemplateName": template } }]),
        ),
        Request::Limit(resource) => (json!({ "limits": { resource: "1" } }), json!([])),
    };
    pod_from(json!({
        "metadata": { "name": name },
        "spec": {
            "resourceClaims": claims,
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never", "resources": resources,
                "command": ["sh", "-c", "trap '' TERM; for device in /dev/drayman-*; do exec 3<$device; done; while :; do sleep 1; done"] }],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
        },
    }))
}

async fn create(setup: &Setup, name: &str, request: Request) -> anyhow::Result<()> {
    let pod = stubborn_pod(name, request)?;
    setup.pods().create(&PostParams::default(), &pod).await?;
    Ok(())
}

/// The pod whose container has a device.
fn user_of(node: Node<'_>, device: &str) -> Option<String> {
    let found = in_containers(node, PREFIX);
    let mut containers = found.get(device).into_iter().flatten();
    containers.next().map(|container| container.pod.clone())
}

/// Waits until a device is in a container of this pod, or in none.
async fn until_user(setup: &Setup, device: &str, wanted: Option<&str>) -> anyhow::Result<()> {
    let until = Instant::now() + TIMEOUT;
    loop {
        let user = user_of(setup.cluster.node(0), device);
        if user.as_deref() == wanted {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < until,
            "{device} is in {user:?}, not in {wanted:?}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Kubelet forgets a force-deleted pod although its container still runs. A pod that requests the only device is refused with the name of
/// that container, and gets the device when the container has ended.
#[tokio::test]
async fn a_forced_pod_keeps_its_device_until_its_container_ends() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    if setup
        .cluster
        .is_before(28, "kubelet 1.27 does not unprepare claims of forced pods")
    {
        return setup.cluster.stop().await;
    }
    let node = setup.cluster.node(0);
    for (name, minor) in [("claim-0", 5), ("limit-0", 7), ("both-0", 8)] {
        node.make_device(format!("/dev/{PREFIX}{name}"), 1, minor)?;
    }
    setup.make_template(None).await?;
    setup.make_kind("both", DRIVER).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, DRIVER, 3, 0).await?;
    for resource in [LIMIT, BOTH] {
        setup.until_allocatable(resource, "1").await?;
    }
    tokio::select! {
        failed = never_in_two(node) => failed?,
        done = run_trials(&setup, companion) => done?,
    }
    setup.end([controller]).await
}

async fn run_trials(setup: &Setup, mut companion: Program) -> anyhow::Result<()> {
    // The limit comes first: its Allocate makes kubelet forget the force-deleted pod that holds the device of mode both.
    let trials = [
        ("limit", Request::Limit(LIMIT), Request::Limit(LIMIT)),
        ("claim", Request::Claim("test"), Request::Claim("test")),
        ("both", Request::Limit(BOTH), Request::Claim("both")),
    ];
    for (name, request, _) in trials {
        create(setup, &format!("{name}-1"), request).await?;
    }
    for (name, ..) in trials {
        let pod = format!("{name}-1");
        until_user(setup, &format!("{PREFIX}{name}-0"), Some(&pod)).await?;
        setup.until_running(&pod).await?;
    }
    for (name, ..) in trials {
        setup.remove_pod(&format!("{name}-1")).await?;
    }
    for (name, _, request) in trials {
        let (old, new) = (format!("{name}-1"), format!("{name}-2"));
        create(setup, &new, request).await?;
        let refused = match request {
            Request::Claim(_) => "FailedPrepareDynamicResources",
            Request::Limit(_) => "Failed",
        };
        setup
            .wait_for_event(&new, refused, &format!("container main of pod default/{old}"))
            .await?;
        let user = user_of(setup.cluster.node(0), &format!("{PREFIX}{name}-0"));
        assert_eq!(user, Some(old), "its container has not ended yet");
        if name == "limit" {
            // Grants that only the companion's memory records must survive a restart.
            companion.kill().await?;
            companion = setup.companion(0, CONFIGURATION)?;
            companion.logged(REGISTERED).await?;
        }
    }
    for (name, _, request) in trials {
        let (device, new) = (format!("{PREFIX}{name}-0"), format!("{name}-2"));
        let old = format!("{name}-1");
        let until = Instant::now() + TIMEOUT;
        while user_of(setup.cluster.node(0), &device).as_ref() == Some(&old) {
            anyhow::ensure!(Instant::now() < until, "{old} does not end");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let ended = Instant::now();
        if matches!(request, Request::Claim(_)) {
            // Kubelet retries the claims of a pod after up to 90 seconds, but prepares those of a new pod at once.
            setup.remove_pod(&new).await?;
            setup.until_pod_gone(&new).await?;
            create(setup, &new, request).await?;
        }
        until_user(setup, &device, Some(&new)).await?;
        println!(
            "{new} has {device} {:?} after {old} was seen to have ended",
            ended.elapsed()
        );
    }
    forgotten_pod(setup).await?;
    assert!(!companion.log()?.contains("ClaimQuarantined"));
    companion.end().await.map(drop)
}

/// A pod is force-deleted while kubelet is down. Kubelet keeps listing its claim; the next claim gets the device at once.
async fn forgotten_pod(setup: &Setup) -> anyhow::Result<()> {
    let (node, device) = (setup.cluster.node(0), "drayman-claim-0");
    let (uid, name) = setup.claim_ids("claim-2").await?;
    node.stop("kubelet", 9).await?;
    setup.remove_pod("claim-2").await?;
    setup.until_claim_gone(&name).await?;
    node.start("kubelet").await?;
    until_user(setup, device, None).await?;
    let lists = node.read("/var/lib/kubelet/dra_manager_state")?.contains(&uid);
    let begun = Instant::now();
    create(setup, "claim-3", Request::Claim("test")).await?;
    until_user(setup, device, Some("claim-3")).await?;
    println!(
        "claim-3 has {device} after {:?}; kubelet lists the claim before it: {lists}",
        begun.elapsed()
    );
    let checkpoint = node.read("/var/lib/kubelet/plugins/drayman.dev/checkpoint.json")?;
    assert!(!checkpoint.contains(&uid));
    Ok(())
}
