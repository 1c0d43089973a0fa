//! Observations of devices through the container runtime, kubelet and the API.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use drayman::api::proto::pod_resources_v1::AllocatableResourcesRequest;
use drayman::api::proto::pod_resources_v1::pod_resources_lister_client::PodResourcesListerClient;
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::api::Api;
use serde_json::Value;
use tonic::Code;
use tonic::transport::Channel;

use crate::harness::{Node, TIMEOUT};
use crate::setup::Setup;

/// A container in the runtime.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Running {
    /// Container id of the runtime.
    id: String,
    /// Name of its pod.
    pub(crate) pod: String,
}

/// The devices below `/dev` whose names begin with `prefix`, each with the containers that hold it and have a running process. Reads the
/// bundles of all containers and the cgroups of all processes of the machine.
pub(crate) fn in_containers(node: Node<'_>, prefix: &str) -> BTreeMap<String, BTreeSet<Running>> {
    running(in_bundles(node, |device| {
        let name = device["path"].as_str()?.strip_prefix("/dev/")?;
        name.starts_with(prefix).then(|| name.to_owned())
    }))
}

/// As [`in_containers`], but by type and number of the device nodes, regardless of their paths.
pub(crate) fn in_containers_by_number(node: Node<'_>) -> BTreeMap<String, BTreeSet<Running>> {
    running(in_bundles(node, |device| {
        Some(format!(
            "{}{}:{}",
            device["type"].as_str()?,
            device["major"],
            device["minor"]
        ))
    }))
}

/// Keeps only containers with a running process.
fn running(mut found: BTreeMap<String, BTreeSet<Running>>) -> BTreeMap<String, BTreeSet<Running>> {
    if found.is_empty() {
        return found;
    }
    // A container with processes in both passes has been running in between.
    for _ in 0..2 {
        let groups = control_groups();
        for containers in found.values_mut() {
            containers.retain(|container| groups.contains(&container.id));
        }
    }
    found.retain(|_, containers| !containers.is_empty());
    found
}

/// The cgroups of all running processes, as one text.
fn control_groups() -> String {
    let mut groups = String::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        // The process may have ended meanwhile.
        let read = |name: &str| std::fs::read_to_string(process.path().join(name)).unwrap_or_default();
        let state = read("stat");
        let state = state.rsplit(')').next().unwrap_or_default().trim_start();
        if !state.is_empty() && !state.starts_with(['Z', 'X']) {
            groups.push_str(&read("cgroup"));
        }
    }
    groups
}

fn in_bundles(node: Node<'_>, key: impl Fn(&Value) -> Option<String>) -> BTreeMap<String, BTreeSet<Running>> {
    const BUNDLES: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io";
    let mut found: BTreeMap<String, BTreeSet<Running>> = BTreeMap::new();
    for container in node.list(BUNDLES).unwrap_or_default() {
        // The bundle may have been removed meanwhile.
        let bundle = Path::new(BUNDLES).join(&container).join("config.json");
        let Ok(text) = node.read(bundle) else { continue };
        let Ok(bundle) = serde_json::from_str::<Value>(&text) else {
            continue;
        };
        let pod = bundle["annotations"]["io.kubernetes.cri.sandbox-name"].as_str();
        for device in bundle["linux"]["devices"].as_array().into_iter().flatten() {
            if let Some(name) = key(device) {
                found.entry(name).or_default().insert(Running {
                    id: container.clone(),
                    pod: pod.unwrap_or_default().to_owned(),
                });
            }
        }
    }
    found
}

/// A client of kubelet's PodResources API.
pub(crate) async fn pod_resources(node: Node<'_>) -> anyhow::Result<PodResourcesListerClient<Channel>> {
    let socket = node.path("/var/lib/kubelet/pod-resources/kubelet.sock");
    Ok(PodResourcesListerClient::connect(format!("unix://{}", socket.display())).await?)
}

/// Waits until kubelet can grant or has granted `count` devices of an extended resource.
pub(crate) async fn until_granted(
    kubelet: &PodResourcesListerClient<Channel>,
    resource: &str,
    count: usize,
) -> anyhow::Result<()> {
    let until = Instant::now() + TIMEOUT;
    loop {
        let mut kubelet = kubelet.clone();
        let answer = kubelet.get_allocatable_resources(AllocatableResourcesRequest {});
        let granted = answer.await.map(|answer| {
            let devices = answer.into_inner().devices;
            let ours = devices.iter().filter(|devices| devices.resource_name == resource);
            ours.flat_map(|devices| &devices.device_ids).count()
        });
        match &granted {
            Ok(now) if *now == count => return Ok(()),
            Err(status) if status.code() != Code::ResourceExhausted => return Err(status.clone().into()),
            _ => {}
        }
        anyhow::ensure!(
            Instant::now() < until,
            "kubelet grants not {count} devices of {resource}, but {granted:?}"
        );
        // This API has no watch, and all its clients together get 100 answers a second.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Number of container restarts of a pod.
pub(crate) async fn restarts(setup: &Setup, pod: &str) -> anyhow::Result<i32> {
    let pods = Api::<k8s_openapi::api::core::v1::Pod>::namespaced(setup.cluster.client(), "default");
    let statuses = pods
        .get(pod)
        .await?
        .status
        .and_then(|status| status.container_statuses);
    Ok(statuses
        .into_iter()
        .flatten()
        .map(|status| status.restart_count)
        .sum())
}

/// Capacity of an extended resource on the Node.
pub(crate) async fn capacity(setup: &Setup, resource: &str) -> anyhow::Result<Option<String>> {
    let nodes = Api::<NodeObject>::all(setup.cluster.client());
    let status = nodes.get(setup.cluster.node(0).name()).await?.status;
    let capacity = status.and_then(|status| status.capacity).unwrap_or_default();
    Ok(capacity.get(resource).map(|quantity| quantity.0.clone()))
}

/// Waits until an inventory is ready and has this many devices, of which `unhealthy` are unhealthy.
pub(crate) async fn wait_for_inventory(
    setup: &Setup,
    driver: &str,
    devices: u32,
    unhealthy: u32,
) -> anyhow::Result<()> {
    setup
        .until_inventory(driver, move |status| {
            (status.devices, status.unhealthy) == (devices, unhealthy)
        })
        .await
}

/// Fails if a device node is in two containers, under any name.
pub(crate) async fn never_in_two(node: Node<'_>) -> anyhow::Result<()> {
    loop {
        for (number, containers) in in_containers_by_number(node) {
            anyhow::ensure!(
                containers.len() < 2,
                "{number} is in two containers: {containers:?}"
            );
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The names below `/dev` in a running pod that begin with `prefix`.
pub(crate) async fn devices_inside(setup: &Setup, pod: &str, prefix: &str) -> anyhow::Result<Vec<String>> {
    let names = setup.cluster.kubectl(&["exec", pod, "--", "ls", "/dev"]).await?;
    let names = names.split_whitespace().filter(|name| name.starts_with(prefix));
    Ok(names.map(str::to_owned).collect())
}
