//! The demo's scenarios.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::describe::devices_of;
use super::{CAMERA, DEVICES, Demo, Halt, OutputLine, SHARED, THIS_MACHINE};
use crate::testcluster::api::ClusterMode;
use crate::testcluster::api::object::{list, text};
use crate::testcluster::cluster::TestClusterError;
use crate::testcluster::runtime::ContainerConfig;

const CLASS: &str = include_str!("../../../examples/basic/class.yaml");
const TEMPLATE: &str = include_str!("../../../examples/basic/claim-template.yaml");
const POD: &str = include_str!("../../../examples/basic/pod.yaml");
const SEVERAL_TEMPLATE: &str = include_str!("../../../examples/several/claim-template.yaml");
const SEVERAL_POD: &str = include_str!("../../../examples/several/pod.yaml");

/// A scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// Mode of its cluster.
    pub mode: ClusterMode,
    /// Name for `--scenario`.
    pub name: &'static str,
    /// Summary.
    pub about: &'static str,
}

/// Default scenarios, in order.
pub const SCENARIOS: [Scenario; 9] = [
    Scenario {
        mode: ClusterMode::Structured,
        name: "structured",
        about: "the scheduler allocates a device to a pod's claim, and the companion prepares it",
    },
    Scenario {
        mode: ClusterMode::Structured,
        name: "scheduled",
        about: "all devices are held; a pod waits and runs once a device is free",
    },
    Scenario {
        mode: ClusterMode::Structured,
        name: "tainted",
        about: "a device is unplugged while a pod holds it: it has a taint until it is plugged in again",
    },
    Scenario {
        mode: ClusterMode::Classic,
        name: "basic",
        about: "a pod with one device, from its claim to its deletion (examples/basic)",
    },
    Scenario {
        mode: ClusterMode::Classic,
        name: "several",
        about: "a pod with two devices of one claim, both on one node (examples/several)",
    },
    Scenario {
        mode: ClusterMode::Classic,
        name: "waiting",
        about: "all devices are held; a pod waits, an event says why, and it runs once a device is free",
    },
    Scenario {
        mode: ClusterMode::Classic,
        name: "unplugged",
        about: "a device is unplugged while a pod holds it, and plugged in again",
    },
    Scenario {
        mode: ClusterMode::Classic,
        name: "both-apis",
        about: "a claim, and two pods that request one camera through the device plugin API",
    },
    Scenario {
        mode: ClusterMode::Classic,
        name: "competing",
        about: "a claim and pods with a limit compete for one device of mode `both`",
    },
];

/// Additional scenario of `--real-devices`; it requires the node of this machine.
pub const REAL: Scenario = Scenario {
    mode: ClusterMode::Classic,
    name: "real",
    about: "the devices of this machine, one claim per kind",
};

async fn run_scenario(demo: &mut Demo, scenario: &Scenario) -> Result<(), Halt> {
    if scenario.mode == ClusterMode::Structured {
        return run_structured(demo, scenario).await;
    }
    demo.apply("examples/basic/class.yaml", CLASS)?;
    demo.apply("examples/basic/claim-template.yaml", TEMPLATE)?;
    match scenario.name {
        "basic" => basic(demo).await,
        "several" => several(demo).await,
        "waiting" => waiting(demo).await,
        "unplugged" => unplugged(demo).await,
        "competing" => competing(demo).await,
        "real" => real(demo).await,
        _ => both_apis(demo).await,
    }
}

/// Returns the pod of the first example under another name.
fn pod(name: &str) -> String {
    pod_of(name, "test")
}

/// Returns the pod of the first example under another name and with another template.
fn pod_of(name: &str, template: &str) -> String {
    let template = format!("resourceClaimTemplateName: {template}");
    POD.replace("\n  name: basic\n", &format!("\n  name: {name}\n"))
        .replace("resourceClaimTemplateName: test", &template)
}

/// Returns a pod with a limit of one unit of an extended resource.
fn limit_pod(name: &str, resource: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: main\n    image: localhost/busybox:1\n    resources:\n      limits:\n        {resource}: 1\n  terminationGracePeriodSeconds: 0\n"
    )
}

impl Demo {
    /// Runs a scenario, unless an earlier one has failed and left the cluster in an unknown state. Stops at the first
    /// unmet expectation.
    pub async fn run(&mut self, scenario: &Scenario) -> Result<(), TestClusterError> {
        if self.has_failed() {
            return Ok(());
        }
        debug_assert_eq!(scenario.mode, self.cluster.server().mode(), "{}", scenario.name);
        self.heading(&format!("{}: {}", scenario.name, scenario.about));
        self.summary.scenarios += 1;
        match run_scenario(self, scenario).await {
            Ok(()) => {}
            Err(Halt::Unmet) => {
                self.show(OutputLine::Remark("the remaining steps are skipped".to_owned()));
            }
            Err(Halt::Broken(error)) => return Err(error),
        }
        Ok(())
    }

    fn apply(&self, file: &str, yaml: &str) -> Result<(), Halt> {
        let known = self.cluster.server().state().store.version();
        self.cluster.apply(yaml)?;
        if self.cluster.server().state().store.version() != known {
            self.step("user", format!("applies {file}"));
        }
        Ok(())
    }

    fn pod(&self, name: &str) -> Option<Value> {
        self.client.get("pods", "default", name)
    }

    fn runs(&self, name: &str) -> bool {
        self.pod(name)
            .is_some_and(|pod| text(&pod, "/status/phase") == "Running")
    }

    fn node_of(&self, name: &str) -> String {
        self.pod(name)
            .map(|pod| text(&pod, "/spec/nodeName").to_owned())
            .unwrap_or_default()
    }

    /// Returns the devices, environment and mounts of a pod's only container.
    fn container_config(&self, name: &str) -> Option<ContainerConfig> {
        let kubelet = self.kubelets.get(&self.node_of(name))?;
        kubelet
            .container_configs()
            .remove(&("default".to_owned(), name.to_owned()))?
            .into_values()
            .next()
    }

    fn show_container(&self, name: &str) {
        let Some(container_config) = self.container_config(name) else {
            return;
        };
        let devices: Vec<String> = container_config
            .devices
            .iter()
            .map(|(path, _, permissions)| format!("{path} ({permissions})"))
            .collect();
        let variables: Vec<String> = container_config
            .environment
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let mounts = container_config
            .mounts
            .iter()
            .map(|(path, host, options)| format!("{path} from {host} ({})", options.join(",")));
        let parts: Vec<String> = [devices.join(", "), variables.join(", ")]
            .into_iter()
            .chain(mounts)
            .filter(|part| !part.is_empty())
            .collect();
        let who = format!("runtime {}", self.node_of(name));
        self.step(
            &who,
            format!("the container of {name} gets {}", parts.join(" and ")),
        );
    }

    /// Returns how many of the pod's devices can be opened.
    fn opens(&self, name: &str) -> usize {
        let Some(container_config) = self.container_config(name) else {
            return 0;
        };
        let can_open = |host: &String| OpenOptions::new().read(true).write(true).open(host).is_ok();
        container_config
            .devices
            .iter()
            .filter(|(_, host, _)| can_open(host))
            .count()
    }

    fn delete(&self, name: &str) {
        if let Some(pod) = self.pod(name) {
            self.step("user", format!("deletes pod {name}"));
            // The pod may already be deleted.
            let _ = self.client.delete("pods", &pod, None);
        }
    }

    fn claim_of(&self, pod: &str) -> Option<Arc<Value>> {
        self.client.list("resourceclaims").into_iter().find(|claim| {
            list(claim, "/metadata/ownerReferences")
                .iter()
                .any(|owner| owner["name"] == pod)
        })
    }

    /// Counts the CDI files of claims on all nodes.
    fn cdi_files(&self) -> usize {
        let of = |node: &String| {
            let files = std::fs::read_dir(self.directory.join(node).join("cdi"));
            files
                .into_iter()
                .flatten()
                .flatten()
                .filter(|file| file.path().extension().is_some_and(|e| e == "json"))
                .count()
        };
        self.kubelets.keys().map(of).sum()
    }

    /// Deletes pods and waits until they, their claims and their CDI files are gone.
    async fn clear(&mut self, pods: &[String]) -> Result<(), Halt> {
        for pod in pods {
            self.delete(pod);
        }
        let what = match pods {
            [one] => format!("pod {one}, its claim and its CDI file are gone"),
            several => format!(
                "{} pods, their claims and their CDI files are gone",
                several.len()
            ),
        };
        self.expect(&what, |demo| {
            pods.iter()
                .all(|pod| demo.pod(pod).is_none() && demo.claim_of(pod).is_none())
                && demo.cdi_files() == 0
        })
        .await
    }
}

/// Checks a pod that has been created, up to its deletion.
async fn one_pod(demo: &mut Demo, name: &str, devices: usize) -> Result<(), Halt> {
    demo.expect(&format!("pod {name} runs"), |demo| demo.runs(name))
        .await?;
    demo.show_container(name);
    let what = match devices {
        1 => "its container has one device, which can be opened",
        _ => "its container has two devices, which can be opened",
    };
    demo.expect(what, |demo| demo.opens(name) == devices).await?;
    demo.clear(&[name.to_owned()]).await
}

async fn basic(demo: &mut Demo) -> Result<(), Halt> {
    demo.apply("examples/basic/pod.yaml", POD)?;
    one_pod(demo, "basic", 1).await
}

async fn several(demo: &mut Demo) -> Result<(), Halt> {
    demo.apply("examples/several/claim-template.yaml", SEVERAL_TEMPLATE)?;
    demo.apply("examples/several/pod.yaml", SEVERAL_POD)?;
    one_pod(demo, "several", 2).await
}

/// Creates a pod for each device, waits until all run, and creates one more, `late`. Returns all names but that of
/// `holder-3`, which makes room for it.
async fn hold_all(demo: &mut Demo, pod: fn(&str) -> String, what: &str) -> Result<Vec<String>, Halt> {
    let count = demo.devices.len() * DEVICES;
    let mut pods: Vec<String> = (1..=count).map(|number| format!("holder-{number}")).collect();
    for name in &pods {
        demo.cluster.apply(&pod(name))?;
    }
    demo.expect(what, |demo| pods.iter().all(|pod| demo.runs(pod)))
        .await?;
    demo.cluster.apply(&pod("late"))?;
    pods.retain(|name| name != "holder-3");
    pods.push("late".to_owned());
    Ok(pods)
}

async fn waiting(demo: &mut Demo) -> Result<(), Halt> {
    let holders = hold_all(demo, pod, "a pod runs for each device").await?;
    demo.expect(
        "one more pod waits, and an event on it says how many devices are held",
        |demo| {
            demo.client.list("events").iter().any(|event| {
                text(event, "/involvedObject/name") == "late"
                    && text(event, "/message").contains("held")
                    && text(event, "/reportingComponent") == super::DRIVER
            })
        },
    )
    .await?;
    let (freed, node) = demo
        .claim_of("holder-3")
        .map(|claim| devices_of(&claim))
        .unwrap_or_default();
    demo.delete("holder-3");
    demo.expect("it runs as soon as another pod is gone", |demo| demo.runs("late"))
        .await?;
    demo.show_container("late");
    let same = demo
        .claim_of("late")
        .is_some_and(|claim| devices_of(&claim) == (freed.clone(), node.clone()));
    demo.check(
        &format!("it has the freed device, {} on {node}", freed.join(", ")),
        same,
    )?;
    demo.clear(&holders).await
}

/// Creates pod `plugged`, waits until it runs, and returns its node and its device.
async fn run_plugged(demo: &mut Demo, pod: &str) -> Result<(String, String), Halt> {
    demo.cluster.apply(pod)?;
    demo.expect("pod plugged runs", |demo| demo.runs("plugged"))
        .await?;
    let mut devices = hosts(demo.container_config("plugged")).into_iter();
    Ok((demo.node_of("plugged"), devices.next().unwrap_or_default()))
}

async fn unplugged(demo: &mut Demo) -> Result<(), Halt> {
    let (node, path) = run_plugged(demo, &pod("plugged")).await?;
    let unhealthy = |demo: &Demo| {
        demo.client.list("nodeinventories").iter().any(|inventory| {
            list(inventory, "/spec/devices")
                .iter()
                .any(|device| !text(device, "/unhealthy").is_empty())
        })
    };
    plug(demo, &node, &path, false)?;
    demo.expect("the inventory lists the device as unhealthy", unhealthy)
        .await?;
    demo.expect(
        "the claim's CDI file is gone, so that no container starts with another device",
        |demo| demo.cdi_files() == 0,
    )
    .await?;
    plug(demo, &node, &path, true)?;
    demo.expect("the device is healthy again, and the CDI file is back", |demo| {
        !unhealthy(demo) && demo.cdi_files() == 1
    })
    .await?;
    demo.clear(&["plugged".to_owned()]).await?;
    plug(demo, &node, &path, false)?;
    let is_listed = |demo: &Demo| {
        demo.client.list("nodeinventories").iter().any(|inventory| {
            list(inventory, "/spec/devices")
                .iter()
                .any(|device| device["attributes"]["drayman.dev/path"]["string"] == path.as_str())
        })
    };
    demo.expect(
        "a device without a holder leaves the inventory when it is unplugged",
        |demo| !is_listed(demo),
    )
    .await?;
    plug(demo, &node, &path, true)?;
    demo.expect("and returns to the inventory when it is plugged in", is_listed)
        .await
}

/// Plugs or unplugs a device of a node.
fn plug(demo: &mut Demo, node: &str, path: &str, plugged: bool) -> Result<(), Halt> {
    let device = demo
        .devices
        .get_mut(node)
        .into_iter()
        .flatten()
        .find(|device| device.path == path);
    if let Some(device) = device {
        if plugged {
            device.plug()?;
        } else {
            device.unplug();
        }
    }
    debug_assert_eq!(Path::new(path).exists(), plugged, "{path}");
    let word = if plugged { "plugs in" } else { "unplugs" };
    demo.step("operator", format!("{word} {path} of {node}"));
    Ok(())
}

// === extended resources ===

/// Returns the host paths of a container's device nodes.
fn hosts(container_config: Option<ContainerConfig>) -> Vec<String> {
    container_config
        .map(|container_config| {
            container_config
                .devices
                .into_iter()
                .map(|(_, host, _)| host)
                .collect()
        })
        .unwrap_or_default()
}

fn has_event(demo: &Demo, pod: &str, words: &str) -> bool {
    demo.client
        .list("events")
        .iter()
        .any(|event| text(event, "/involvedObject/name") == pod && text(event, "/message").contains(words))
}

async fn both_apis(demo: &mut Demo) -> Result<(), Halt> {
    demo.expect("node-a has one allocatable camera", |demo| {
        let node = demo.client.get("nodes", "", "node-a").unwrap_or_default();
        node["status"]["allocatable"][CAMERA] == "1"
    })
    .await?;
    demo.cluster.apply(&limit_pod("camera-1", CAMERA))?;
    demo.expect(
        "pod camera-1 has the camera, through the device plugin API",
        |demo| demo.opens("camera-1") == 1,
    )
    .await?;
    demo.show_container("camera-1");
    demo.cluster.apply(&limit_pod("camera-2", CAMERA))?;
    demo.cluster.apply(&pod("claiming"))?;
    demo.expect(
        "pod claiming gets a device through its claim at the same time",
        |demo| demo.opens("claiming") == 1,
    )
    .await?;
    demo.show_container("claiming");
    demo.expect("pod camera-2 waits, and an event names the resource", |demo| {
        has_event(demo, "camera-2", CAMERA)
    })
    .await?;
    let camera = demo
        .container_config("camera-1")
        .map(|container_config| container_config.devices);
    demo.delete("camera-1");
    demo.expect("camera-2 runs when camera-1 is gone", |demo| {
        demo.runs("camera-2")
    })
    .await?;
    let same = demo
        .container_config("camera-2")
        .map(|container_config| container_config.devices)
        == camera;
    demo.check("and has the same camera", same)?;
    let (claimed, cameras) = (
        hosts(demo.container_config("claiming")),
        hosts(demo.container_config("camera-2")),
    );
    let apart = !claimed.is_empty() && claimed.iter().all(|device| !cameras.contains(device));
    demo.check("no device was allocated through both APIs", apart)?;
    demo.clear(&["camera-2".to_owned(), "claiming".to_owned()]).await
}

/// A claim and an extended resource compete for one device.
async fn competing(demo: &mut Demo) -> Result<(), Halt> {
    demo.apply("a class for the device of mode `both`", &classic_class("either"))?;
    demo.expect("node-b has one device of mode `both`", |demo| {
        let node = demo.client.get("nodes", "", "node-b").unwrap_or_default();
        node["status"]["allocatable"][SHARED] == "1"
    })
    .await?;
    demo.cluster.apply(&limit_pod("first", SHARED))?;
    demo.expect("pod first has it, through the device plugin API", |demo| {
        demo.opens("first") == 1
    })
    .await?;
    demo.show_container("first");
    demo.cluster.apply(&pod_of("claiming", "either"))?;
    // Only the node knows the devices of containers, so its Prepare is the last check.
    demo.expect(
        "pod claiming gets it by its claim, and the node refuses to prepare it and names the holder",
        |demo| has_event(demo, "claiming", "first"),
    )
    .await?;
    demo.check(
        "pod claiming has no container yet",
        demo.container_config("claiming").is_none(),
    )?;
    let device = hosts(demo.container_config("first"));
    demo.delete("first");
    demo.expect("it runs when pod first is gone", |demo| {
        demo.opens("claiming") == 1
    })
    .await?;
    demo.show_container("claiming");
    demo.check(
        "with the same device",
        hosts(demo.container_config("claiming")) == device,
    )?;
    demo.expect("the device plugin API no longer offers the device", |demo| {
        let node = demo.client.get("nodes", "", "node-b").unwrap_or_default();
        node["status"]["allocatable"][SHARED] == "0"
    })
    .await?;
    demo.cluster.apply(&limit_pod("second", SHARED))?;
    demo.expect("pod second waits for it through the device plugin API", |demo| {
        has_event(demo, "second", SHARED)
    })
    .await?;
    let held = demo.claim_of("claiming").map(|claim| devices_of(&claim).0);
    demo.delete("claiming");
    demo.expect("and runs when the claim is deleted", |demo| {
        demo.opens("second") == 1
    })
    .await?;
    let named = held.unwrap_or_default().join(", ");
    demo.check(
        &format!("one device, {named}, has served all three, one after the other"),
        hosts(demo.container_config("second")) == device && !named.is_empty(),
    )?;
    demo.clear(&["second".to_owned()]).await
}

// === devices of this machine ===

/// Returns the class, parameters and template for a kind.
fn classic_class(kind: &str) -> String {
    format!(
        "apiVersion: drayman.dev/v1alpha1\nkind: DeviceClassParameters\nmetadata: {{ name: {kind} }}\nspec: {{ kind: {kind} }}\n---\n\
         apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClass\nmetadata: {{ name: {kind} }}\ndriverName: drayman.dev\n\
         parametersRef: {{ apiGroup: drayman.dev, kind: DeviceClassParameters, name: {kind} }}\n---\n\
         apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClaimTemplate\nmetadata: {{ name: {kind} }}\n\
         spec: {{ spec: {{ resourceClassName: {kind} }} }}\n"
    )
}

/// Returns the healthy devices by kind.
fn healthy_devices(demo: &Demo) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for inventory in demo.client.list("nodeinventories") {
        if text(&inventory, "/spec/nodeName") != THIS_MACHINE {
            continue;
        }
        for device in list(&inventory, "/spec/devices") {
            let (name, kind) = (text(device, "/name"), text(device, "/kind"));
            if text(device, "/unhealthy").is_empty() {
                found.entry(kind.to_owned()).or_default().push(name.to_owned());
            }
        }
    }
    found
}

async fn real(demo: &mut Demo) -> Result<(), Halt> {
    let found = healthy_devices(demo);
    if found.is_empty() {
        let text = "this machine has no healthy device of a ready-made kind; run drayman node discover for the reasons";
        demo.show(OutputLine::Remark(text.to_owned()));
        return Ok(());
    }
    let mut pods = Vec::new();
    for (kind, devices) in &found {
        demo.apply(
            &format!("a class for {kind} with the devices {}", devices.join(", ")),
            &classic_class(kind),
        )?;
        let name = format!("real-{kind}");
        demo.cluster.apply(&pod_of(&name, kind))?;
        demo.expect(
            &format!("pod {name} runs on {THIS_MACHINE} with a device of this machine"),
            // Whether this user may open the device does not matter here.
            |demo| demo.runs(&name) && !hosts(demo.container_config(&name)).is_empty(),
        )
        .await?;
        demo.show_container(&name);
        pods.push(name);
    }
    demo.clear(&pods).await
}

// === structured mode ===

const STRUCTURED_CLASS: &str = r#"apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: test
spec:
  selectors:
  - cel:
      expression: device.driver == "drayman.dev" && device.attributes["drayman.dev"].kind == "test"
"#;
const STRUCTURED_TEMPLATE: &str = "apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: test
spec:
  spec:
    devices:
      requests:
      - name: device
        exactly:
          deviceClassName: test
";

/// Returns a pod with one device.
fn structured_pod(name: &str) -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata:
  name: {name}
spec:
  resourceClaims:
  - name: device
    resourceClaimTemplateName: test
  containers:
  - name: main
    image: localhost/busybox:1
    resources:
      claims:
      - name: device
  terminationGracePeriodSeconds: 0
"
    )
}

impl Demo {
    fn tainted(&self, node: &str) -> usize {
        let devices = self.published(node).into_iter();
        devices.filter(|is_tainted| *is_tainted).count()
    }
}

async fn run_structured(demo: &mut Demo, scenario: &Scenario) -> Result<(), Halt> {
    demo.apply("a DeviceClass for the devices of kind test", STRUCTURED_CLASS)?;
    demo.apply(
        "a ResourceClaimTemplate for one device of the class",
        STRUCTURED_TEMPLATE,
    )?;
    match scenario.name {
        "structured" => structured(demo).await,
        "scheduled" => scheduled(demo).await,
        _ => tainted(demo).await,
    }
}

async fn structured(demo: &mut Demo) -> Result<(), Halt> {
    demo.cluster.apply(&structured_pod("first"))?;
    one_pod(demo, "first", 1).await
}

async fn scheduled(demo: &mut Demo) -> Result<(), Halt> {
    let holders = hold_all(demo, structured_pod, "one pod per device runs").await?;
    demo.expect("one more pod waits, and an event says why", |demo| {
        has_event(demo, "late", "cannot allocate all claims")
    })
    .await?;
    let freed = demo.claim_of("holder-3").map(|claim| devices_of(&claim));
    demo.delete("holder-3");
    demo.expect("it runs once another pod is gone", |demo| demo.runs("late"))
        .await?;
    demo.show_container("late");
    let same = freed.is_some() && demo.claim_of("late").map(|claim| devices_of(&claim)) == freed;
    demo.check("it has the device of that pod", same)?;
    demo.clear(&holders).await
}

async fn tainted(demo: &mut Demo) -> Result<(), Halt> {
    let (node, path) = run_plugged(demo, &structured_pod("plugged")).await?;
    plug(demo, &node, &path, false)?;
    demo.expect(
        "the device has a taint, and its CDI file is gone, so that no container starts with another device",
        |demo| demo.tainted(&node) == 1 && demo.cdi_files() == 0,
    )
    .await?;
    plug(demo, &node, &path, true)?;
    demo.expect("the taint is gone, and the CDI file is back", |demo| {
        demo.tainted(&node) == 0 && demo.cdi_files() == 1
    })
    .await?;
    demo.clear(&["plugged".to_owned()]).await
}
