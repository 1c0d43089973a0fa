//! A cluster of structured mode, and user objects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, bail};
use drayman::api::resource::Pod;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::api::{Api, PostParams};
use kube::runtime::watcher::{self, watcher};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::harness::{Cluster, IMAGE, TIMEOUT};
use crate::setup::{DRIVER, Program, REGISTERED, Setup, is_gone, pod_from};

/// One kind, `test`.
pub(super) const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
";

/// A cluster with one node, the class `test`, and a companion for these devices, each `(major, minor)`.
pub(super) async fn start(configuration: &str, devices: &[(u32, u32)]) -> anyhow::Result<(Setup, Program)> {
    start_with(configuration, devices, &[]).await
}

/// As [`start`], with more flags for the companion.
pub(super) async fn start_with(
    configuration: &str,
    devices: &[(u32, u32)],
    flags: &[&str],
) -> anyhow::Result<(Setup, Program)> {
    let setup = Setup::structured(Cluster::structured().nodes(1).start().await?).await?;
    for (number, (major, minor)) in devices.iter().enumerate() {
        let path = format!("/dev/drayman-test-{number}");
        setup.cluster.node(0).make_device(path, *major, *minor)?;
    }
    make_class(&setup, "test", "test").await?;
    let mut slices = Slices::watch(&setup);
    let companion = setup.companion_with(0, configuration, flags)?;
    companion.logged(REGISTERED).await?;
    let names = (0..devices.len()).map(|number| format!("drayman-test-{number}"));
    slices.until_offered(&names.collect()).await?;
    Ok((setup, companion))
}

/// Creates a class for the devices of a kind.
pub(crate) async fn make_class(setup: &Setup, name: &str, kind: &str) -> anyhow::Result<()> {
    let expression =
        format!("device.driver == \"{DRIVER}\" && device.attributes[\"{DRIVER}\"].kind == \"{kind}\"");
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": name },
            "spec": { "selectors": [{ "cel": { "expression": expression } }] },
        }))
        .await
}

/// Claims of the namespace `default`.
pub(super) fn claims(setup: &Setup) -> Api<ResourceClaim> {
    Api::namespaced(setup.cluster.client(), "default")
}

/// The spec of a claim for one device of the class `test`.
pub(crate) fn one_device() -> Value {
    one_device_of("test")
}

/// The spec of a claim for one device of a class.
pub(super) fn one_device_of(class: &str) -> Value {
    json!({ "devices": { "requests": [{ "name": "device", "exactly": { "deviceClassName": class } }] } })
}

/// Creates a claim.
pub(super) async fn make_claim(setup: &Setup, name: &str, spec: &Value) -> anyhow::Result<()> {
    let claim = json!({ "metadata": { "name": name }, "spec": spec });
    claims(setup)
        .create(&PostParams::default(), &serde_json::from_value(claim)?)
        .await
        .map(drop)
        .map_err(Into::into)
}

/// Creates a pod with one container, `main`, that uses the claim of the same name.
pub(super) async fn make_pod(setup: &Setup, name: &str) -> anyhow::Result<()> {
    make_pod_of(setup, name, &[("main", &[])]).await
}

/// Creates a pod that uses the claim of the same name. Each container names the requests whose devices it gets; none means all.
pub(super) async fn make_pod_of(
    setup: &Setup,
    name: &str,
    containers: &[(&str, &[&str])],
) -> anyhow::Result<()> {
    let container = |(name, requests): &(&str, &[&str])| {
        let claims: Vec<Value> = if requests.is_empty() {
            vec![json!({ "name": "claim" })]
        } else {
            let of = |request: &&str| json!({ "name": "claim", "request": request });
            requests.iter().map(of).collect()
        };
        json!({ "name": name, "image": IMAGE, "imagePullPolicy": "Never", "resources": { "claims": claims } })
    };
    let containers: Vec<Value> = containers.iter().map(container).collect();
    let pod = pod_from(json!({
        "metadata": { "name": name },
        "spec": {
            "resourceClaims": [{ "name": "claim", "resourceClaimName": name }],
            "containers": containers,
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    }))?;
    setup
        .pods()
        .create(&PostParams::default(), &pod)
        .await
        .map(drop)
        .map_err(Into::into)
}

/// Creates a claim and a pod that uses it.
pub(crate) async fn make_pod_with_claim(setup: &Setup, name: &str, spec: &Value) -> anyhow::Result<()> {
    make_claim(setup, name, spec).await?;
    make_pod(setup, name).await
}

/// Waits until a pod runs, and returns the devices of its container `main`.
pub(crate) async fn devices_of(setup: &Setup, pod: &str) -> anyhow::Result<BTreeSet<String>> {
    devices_in(setup, pod, "main").await
}

/// Waits until a pod runs, and returns the devices of a container. Those in its variables must equal those in its `/dev`.
pub(super) async fn devices_in(
    setup: &Setup,
    pod: &str,
    container: &str,
) -> anyhow::Result<BTreeSet<String>> {
    setup.until_running(pod).await?;
    let inside = |command: &'static [&'static str]| {
        let arguments = [&["exec", pod, "-c", container, "--"], command].concat();
        async move { setup.cluster.kubectl(&arguments).await }
    };
    let granted: BTreeMap<String, String> = inside(&["env"])
        .await?
        .lines()
        .filter_map(|line| line.strip_prefix("DRAYMAN_DEVICE_")?.split_once('='))
        .map(|(name, path)| (name.to_owned(), path.trim_start_matches("/dev/").to_owned()))
        .collect();
    let present: BTreeSet<String> = inside(&["ls", "/dev"])
        .await?
        .split_whitespace()
        .filter(|name| name.starts_with("drayman-"))
        .map(str::to_owned)
        .collect();
    for (name, path) in &granted {
        assert_eq!(*name, path.replace('-', "_").to_uppercase());
    }
    assert_eq!(granted.into_values().collect::<BTreeSet<_>>(), present);
    Ok(present)
}

/// Deletes a pod and its claim, and waits until both are gone.
pub(crate) async fn delete(setup: &Setup, pod: &str) -> anyhow::Result<()> {
    setup.cluster.kubectl(&["delete", "pod", pod]).await?;
    setup.cluster.kubectl(&["delete", "resourceclaim", pod]).await?;
    setup.wait(claims(setup), pod, "gone", is_gone()).await.map(drop)
}

/// Waits until the claim of a pod is allocated, and returns its uid and the allocated devices.
pub(super) async fn allocated(setup: &Setup, name: &str) -> anyhow::Result<(String, BTreeSet<String>)> {
    let met = |claim: Option<&ResourceClaim>| !results(claim).is_empty();
    let claim = setup.wait(claims(setup), name, "allocated", met).await?;
    let uid = claim.as_ref().and_then(|claim| claim.metadata.uid.clone());
    Ok((
        uid.context("a uid")?,
        results(claim.as_ref()).into_iter().collect(),
    ))
}

fn results(claim: Option<&ResourceClaim>) -> Vec<String> {
    let allocation = claim
        .and_then(|claim| claim.status.as_ref())
        .and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_ref());
    results
        .into_iter()
        .flatten()
        .map(|result| result.device.clone())
        .collect()
}

/// Waits until the scheduler reports a pod as unschedulable, with a reason that contains `text`.
pub(super) async fn waits(setup: &Setup, pod: &str, text: &str) -> anyhow::Result<()> {
    setup
        .wait_for_event(pod, "FailedScheduling", text)
        .await
        .map(drop)
}

/// The slices of the driver, from a watch.
pub(crate) struct Slices {
    events: BoxStream<'static, watcher::Result<watcher::Event<ResourceSlice>>>,
    now: BTreeMap<String, ResourceSlice>,
    listed: bool,
}

impl Slices {
    pub(crate) fn watch(setup: &Setup) -> Self {
        let ours = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
        Self {
            events: watcher(Api::all(setup.cluster.client()), ours).boxed(),
            now: BTreeMap::new(),
            listed: false,
        }
    }

    /// Waits until the slices meet a condition.
    pub(crate) async fn until(
        &mut self,
        what: &str,
        met: impl Fn(&BTreeMap<String, ResourceSlice>) -> bool,
    ) -> anyhow::Result<&BTreeMap<String, ResourceSlice>> {
        let following = timeout(TIMEOUT, async {
            while !(self.listed && met(&self.now)) {
                let event = self.events.next().await.context("the watch has ended")??;
                self.apply(event);
            }
            anyhow::Ok(())
        });
        match following.await {
            Ok(followed) => followed?,
            Err(_) => bail!("the slices are not {what}, but {:?}", self.now),
        }
        Ok(&self.now)
    }

    fn apply(&mut self, event: watcher::Event<ResourceSlice>) {
        let name = |slice: &ResourceSlice| slice.metadata.name.clone().unwrap_or_default();
        match event {
            watcher::Event::Init => {
                self.now.clear();
                self.listed = false;
            }
            watcher::Event::InitDone => self.listed = true,
            watcher::Event::Apply(slice) | watcher::Event::InitApply(slice) => {
                self.now.insert(name(&slice), slice);
            }
            watcher::Event::Delete(slice) => {
                self.now.remove(&name(&slice));
            }
        }
    }

    /// Waits until exactly these devices are published.
    pub(crate) async fn until_offered(&mut self, devices: &BTreeSet<String>) -> anyhow::Result<()> {
        let what = format!("{devices:?}");
        self.until(&what, |slices| {
            offered(slices)
                .is_some_and(|offered| offered.keys().cloned().collect::<BTreeSet<_>>() == *devices)
        })
        .await
        .map(drop)
    }
}

/// The devices of a complete pool: all slices exist and have the same generation.
pub(super) fn offered(slices: &BTreeMap<String, ResourceSlice>) -> Option<BTreeMap<String, Device>> {
    let first = slices.values().next()?;
    let pool = &first.spec.pool;
    let complete = usize::try_from(pool.resource_slice_count).is_ok_and(|count| count == slices.len())
        && slices.values().all(|slice| slice.spec.pool == *pool);
    complete.then(|| {
        slices
            .values()
            .flat_map(|slice| slice.spec.devices.iter().flatten())
            .map(|device| (device.name.clone(), device.clone()))
            .collect()
    })
}

/// Prints percentiles of durations.
pub(super) fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |part: usize| {
        times
            .get((times.len() - 1) * part / 100)
            .copied()
            .unwrap_or_default()
    };
    println!("{what}: p50 {:?}, p99 {:?} of {}", at(50), at(99), times.len());
}

/// Names of the devices made by [`start`].
pub(crate) fn names(numbers: &[usize]) -> BTreeSet<String> {
    numbers
        .iter()
        .map(|number| format!("drayman-test-{number}"))
        .collect()
}

/// Creates a pod.
pub(super) async fn make(setup: &Setup, pod: Value) -> anyhow::Result<Pod> {
    Ok(setup
        .pods()
        .create(&PostParams::default(), &pod_from(pod)?)
        .await?)
}
