//! Kinds of mode both: pods with claims and pods with limits compete for a few devices.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use drayman::api::resource::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::Value;

use crate::harness::{Node, TIMEOUT};
use crate::kubelet_plugin::helper::{
    Running, devices_inside, in_containers, pod_resources, until_granted, wait_for_inventory,
};
use crate::pods::make_devices;
use crate::setup::{DRIVER, Program, Setup, is_allocated, pod_from, pod_with_claim, pod_with_limit};

pub(crate) const RESOURCE: &str = "drayman.dev/both";
pub(crate) const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  mode: both
  resourceName: drayman.dev/both
  paths: [\"/dev/drayman-test-*\"]
";
pub(crate) const PREFIX: &str = "drayman-test-";
const MINORS: [u32; 3] = [5, 7, 8];
/// Interval between kills of the programs.
const KILLS_EVERY: Duration = Duration::from_secs(7);

/// Random numbers from a seed (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

pub(crate) fn environment(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// Devices observed in containers.
#[derive(Default)]
pub(crate) struct ObservedDevices {
    looks: usize,
    busy: usize,
    pub(crate) last: BTreeMap<String, BTreeSet<Running>>,
}

impl ObservedDevices {
    /// Finds the devices of all containers through the container runtime: kubelet forgets a force-deleted pod while its container still
    /// terminates.
    pub(crate) fn look(&mut self, node: Node<'_>) {
        let now = in_containers(node, PREFIX);
        for (device, containers) in &now {
            assert!(
                containers.len() < 2,
                "{device} is in two containers: {containers:?}"
            );
        }
        self.looks += 1;
        self.busy += now.len();
        self.last = now;
    }
}

/// The programs under test.
struct Programs {
    controller: Program,
    companion: Program,
    /// Number of kills by program.
    killed: BTreeMap<&'static str, usize>,
}

impl Programs {
    fn start(setup: &Setup) -> anyhow::Result<Self> {
        Ok(Self {
            controller: setup.controller()?,
            companion: setup.companion(0, CONFIGURATION)?,
            killed: BTreeMap::new(),
        })
    }

    /// Kills one of them with SIGKILL and restarts it; kubelet in one of nine cases, since it takes longest.
    async fn kill(&mut self, setup: &Setup, number: u64) -> anyhow::Result<()> {
        let name = match number {
            0..=3 => {
                self.controller.kill().await?;
                self.controller = setup.controller()?;
                "controller"
            }
            4..=7 => {
                self.companion.kill().await?;
                self.companion = setup.companion(0, CONFIGURATION)?;
                "companion"
            }
            _ => {
                let node = setup.cluster.node(0);
                node.stop("kubelet", 9).await?;
                node.start("kubelet").await?;
                "kubelet"
            }
        };
        *self.killed.entry(name).or_default() += 1;
        Ok(())
    }
}

/// A pod with a claim or a limit. With `is_slow`, its container runs for up to three seconds after SIGTERM.
fn pod_of(name: &str, is_slow: bool) -> anyhow::Result<Pod> {
    let mut pod = if name.starts_with("plugged-") {
        pod_with_limit(name, RESOURCE)?
    } else {
        pod_with_claim(name)?
    };
    if is_slow {
        let mut value = serde_json::to_value(&pod)?;
        value["spec"]["containers"][0]["command"] =
            serde_json::json!(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]);
        value["spec"]["terminationGracePeriodSeconds"] = serde_json::json!(3);
        pod = pod_from(value)?;
    }
    Ok(pod)
}

#[tokio::test]
async fn pods_with_claims_and_limits_never_share_a_device() -> anyhow::Result<()> {
    let seconds = environment("DRAYMAN_TEST_BOTH_APIS_SECONDS", 45);
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed()?;
    let seed = environment("DRAYMAN_TEST_BOTH_APIS_SEED", now.as_secs());
    println!("DRAYMAN_TEST_BOTH_APIS_SEED={seed}");
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, PREFIX, &MINORS)?;
    setup.make_template(None).await?;
    let mut programs = Programs::start(&setup)?;
    wait_for_inventory(&setup, DRIVER, 3, 0).await?;
    setup.until_allocatable(RESOURCE, "3").await?;

    let (mut numbers, mut watched) = (Random(seed), ObservedDevices::default());
    let mut pods: Vec<String> = Vec::new();
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    let (start, mut made) = (Instant::now(), 0);
    let mut next_kill = KILLS_EVERY;
    while start.elapsed() < Duration::from_secs(seconds) {
        watched.look(node);
        match numbers.below(10) {
            sort @ 0..=4 if pods.len() < 6 => {
                made += 1;
                let sort = if sort % 2 == 0 { "claims" } else { "plugged" };
                let name = format!("{sort}-{made}");
                let pod = pod_of(&name, numbers.below(2) == 0)?;
                setup.pods().create(&PostParams::default(), &pod).await?;
                pods.push(name);
            }
            5 if !pods.is_empty() => {
                let name = &pods[usize::try_from(numbers.below(pods.len() as u64))?];
                // Kubelet 1.27 never unprepares a claim of a force-deleted pod, and panics if an unallocated claim of the same name exists
                // (`UnprepareResources` in its `dra/manager.go`).
                if !name.starts_with("plugged-") && setup.cluster.minor() < 28 {
                    continue;
                }
                let outcome = format!("{}, deleted by force", outcome(&setup, name).await?);
                *outcomes.entry(outcome).or_default() += 1;
                // A new pod gets the same name, as in a StatefulSet.
                setup.remove_pod(name).await?;
                let pod = pod_of(name, numbers.below(2) == 0)?;
                setup.pods().create(&PostParams::default(), &pod).await?;
            }
            6..=9 if !pods.is_empty() => {
                let index = usize::try_from(numbers.below(pods.len() as u64))?;
                let name = pods.swap_remove(index);
                *outcomes.entry(outcome(&setup, &name).await?).or_default() += 1;
                setup.pods().delete(&name, &DeleteParams::default()).await?;
            }
            _ => {}
        }
        if start.elapsed() > next_kill {
            next_kill += KILLS_EVERY;
            programs.kill(&setup, numbers.below(9)).await?;
        }
        tokio::time::sleep(Duration::from_millis(150 + numbers.below(500))).await;
    }
    for name in &pods {
        *outcomes.entry(outcome(&setup, name).await?).or_default() += 1;
        setup.pods().delete(name, &DeleteParams::default()).await?;
    }
    println!(
        "{made} pods in {seconds} s (seed {seed}): {outcomes:?}; killed: {:?}; {} looks, {} times a device in use",
        programs.killed, watched.looks, watched.busy
    );
    assert!(watched.busy > 0 && made > 5, "something has happened");

    let ended = Instant::now();
    assert_all_free(&setup, &mut watched, MINORS.len()).await?;
    println!(
        "all devices are free and usable again after {:?}",
        ended.elapsed()
    );
    programs.companion.end().await?;
    programs.controller.end().await?;
    setup.cluster.stop().await
}

/// Asserts that everything is free in the end: no pod, no claim, no file on the node, and all devices can be used again through one API,
/// and then none through the other.
pub(crate) async fn assert_all_free(
    setup: &Setup,
    watched: &mut ObservedDevices,
    devices: usize,
) -> anyhow::Result<()> {
    let node = setup.cluster.node(0);
    let left = || async {
        let pods = setup.pods().list(&ListParams::default()).await?.items.len();
        let claims = setup.claims().list(&ListParams::default()).await?.items.len();
        anyhow::Ok((pods, claims))
    };
    let until = Instant::now() + TIMEOUT;
    while left().await? != (0, 0) {
        anyhow::ensure!(
            Instant::now() < until,
            "pods and claims are left: {:?}",
            left().await?
        );
        watched.look(node);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    wait_for_inventory(setup, DRIVER, u32::try_from(devices)?, 0).await?;
    setup.until_allocatable(RESOURCE, &devices.to_string()).await?;
    // The companion may still be writing it.
    let until = Instant::now() + TIMEOUT;
    loop {
        let checkpoint = node.read("/var/lib/kubelet/plugins/drayman.dev/checkpoint.json")?;
        let checkpoint: Value = serde_json::from_str(&checkpoint)?;
        let entries = &checkpoint["data"]["entries"];
        if *entries == serde_json::json!({}) {
            break;
        }
        anyhow::ensure!(Instant::now() < until, "entries are left: {entries}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for number in 0..devices {
        setup.make_pod(&format!("last-{number}")).await?;
    }
    for number in 0..devices {
        let name = format!("last-{number}");
        setup.until_running(&name).await?;
    }
    setup.until_allocatable(RESOURCE, "0").await?;
    watched.look(node);
    assert_eq!(watched.last.len(), devices);
    Ok(())
}

/// The current outcome of a pod.
async fn outcome(setup: &Setup, name: &str) -> anyhow::Result<String> {
    let pods = Api::<k8s_openapi::api::core::v1::Pod>::namespaced(setup.cluster.client(), "default");
    let status = pods.get(name).await?.status.unwrap_or_default();
    let sort = name.split('-').next().unwrap_or_default();
    let phase = status.phase.unwrap_or_default();
    let reason = status
        .reason
        .map(|reason| format!(" ({reason})"))
        .unwrap_or_default();
    Ok(format!("{sort} {phase}{reason}"))
}

/// Prints the delay between the allocation of a device and its withdrawal from kubelet and from the node's allocatable.
#[tokio::test]
async fn an_allocated_device_is_withdrawn_from_the_device_plugin() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, PREFIX, &MINORS)?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, DRIVER, 3, 0).await?;
    setup.until_allocatable(RESOURCE, "3").await?;

    // Immediate allocation for no pod, so that the claim is never prepared.
    let kubelet = pod_resources(node).await?;
    setup
        .apply(
            &serde_json::json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim",
            "metadata": { "name": "early" },
            "spec": { "resourceClassName": "test", "allocationMode": "Immediate" } }),
        )
        .await?;
    setup.until_allocated("early").await?;
    let start = Instant::now();
    until_granted(&kubelet, RESOURCE, 2).await?;
    println!(
        "kubelet withdraws the device {:?} after the allocation is visible in the API",
        start.elapsed()
    );
    setup.until_allocatable(RESOURCE, "2").await?;
    println!(
        "the node's allocatable count follows {:?} after it",
        start.elapsed()
    );
    setup
        .cluster
        .kubectl(&["delete", "resourceclaim", "early"])
        .await?;
    until_granted(&kubelet, RESOURCE, 3).await?;

    // A claim that is allocated for a node has a label for it, which the companion's watch selects.
    setup.make_pod("pod").await?;
    let claim = setup.claim_of("pod", "allocated", is_allocated).await?;
    let labels = claim.metadata.labels.unwrap_or_default();
    assert_eq!(
        labels.get("drayman.dev/node").map(String::as_str),
        Some(node.name())
    );
    until_granted(&kubelet, RESOURCE, 2).await?;
    // Claims get the first device in name order, and containers the last.
    setup.make_limit_pod("plugged", RESOURCE).await?;
    for name in ["pod", "plugged"] {
        setup.until_running(name).await?;
    }
    assert_eq!(devices_inside(&setup, "pod", PREFIX).await?, ["drayman-test-0"]);
    assert_eq!(
        devices_inside(&setup, "plugged", PREFIX).await?,
        ["drayman-test-2"]
    );
    setup.end([companion, controller]).await
}

/// A container has the only device. A claim gets it allocated, because the controller does not know about containers. Prepare is refused
/// with a reason, the next claim does not get this device, and the claim is prepared once the container has ended.
#[tokio::test]
async fn a_claim_waits_for_a_container_that_has_its_device() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, PREFIX, &MINORS[..1])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let mut companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, DRIVER, 1, 0).await?;
    setup.until_allocatable(RESOURCE, "1").await?;
    setup.make_limit_pod("plugged", RESOURCE).await?;
    setup.until_running("plugged").await?;
    // The next process knows the container only from kubelet.
    companion.kill().await?;
    companion = setup.companion(0, CONFIGURATION)?;

    setup.make_pod("first").await?;
    companion
        .logged("is in use by container main of pod default/plugged")
        .await?;
    if setup.cluster.minor() >= 28 {
        // Since 1.28, kubelet reports it as an event of the pod.
        setup
            .wait_for_event("first", "FailedPrepareDynamicResources", "default/plugged")
            .await?;
    }
    wait_for_inventory(&setup, DRIVER, 1, 1).await?;
    setup.make_pod("second").await?;
    setup.wait_for_event("second", "NoSuitableDevice", "of 1").await?;
    setup
        .cluster
        .kubectl(&["delete", "pod", "second", "plugged"])
        .await?;
    wait_for_inventory(&setup, DRIVER, 1, 0).await?;
    setup.until_running("first").await?;
    setup.until_pod_gone("plugged").await?;
    setup.end([companion, controller]).await
}

/// A container has the only device while the kind changes to claims, the companion restarts, and the resource is renamed. No one else gets
/// the device before the container has ended.
#[tokio::test]
async fn a_device_of_a_container_keeps_its_holder_when_renamed() -> anyhow::Result<()> {
    const RENAMED: &str = "drayman.dev/renamed";
    let claims = CONFIGURATION.replace("  mode: both\n  resourceName: drayman.dev/both\n", "");
    let renamed = CONFIGURATION.replace(RESOURCE, RENAMED);
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    make_devices(node, PREFIX, &MINORS[..1])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let mut companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, DRIVER, 1, 0).await?;
    setup.until_allocatable(RESOURCE, "1").await?;
    setup.make_limit_pod("plugged", RESOURCE).await?;
    setup.until_running("plugged").await?;

    let held = "containers have devices under names that are no longer configured";
    setup.rewrite_configuration(0, &claims)?;
    companion.logged(held).await?;
    wait_for_inventory(&setup, DRIVER, 1, 1).await?;
    companion.kill().await?;
    companion = setup.companion(0, &claims)?;
    companion.logged(held).await?;
    setup.make_pod("first").await?;
    setup.wait_for_event("first", "NoSuitableDevice", "of 1").await?;

    setup.rewrite_configuration(0, &renamed)?;
    setup.until_allocatable(RENAMED, "0").await?;
    setup.make_limit_pod("next", RENAMED).await?;
    setup.wait_for_event("next", "FailedScheduling", RENAMED).await?;
    assert_eq!(
        in_containers(node, PREFIX)
            .values()
            .flatten()
            .map(|container| container.pod.as_str())
            .collect::<Vec<_>>(),
        ["plugged"]
    );
    setup
        .cluster
        .kubectl(&["delete", "pod", "first", "plugged"])
        .await?;
    setup.until_running("next").await?;
    setup.end([companion, controller]).await
}
