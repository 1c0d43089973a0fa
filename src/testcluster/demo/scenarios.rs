//! The demo's scenarios.

use std::fs::OpenOptions;
use std::path::Path;

use serde_json::Value;

use super::narrator::devices_of;
use super::{CAMERA, DEVICES, Demo, Halt, extended_resources, real, structured};
use crate::testcluster::api::Mode;
use crate::testcluster::api::object::{list, text};
use crate::testcluster::runtime::Outfit;

const CLASS: &str = include_str!("../../../examples/basic/class.yaml");
const TEMPLATE: &str = include_str!("../../../examples/basic/claim-template.yaml");
const POD: &str = include_str!("../../../examples/basic/pod.yaml");
const SEVERAL_TEMPLATE: &str = include_str!("../../../examples/several/claim-template.yaml");
const SEVERAL_POD: &str = include_str!("../../../examples/several/pod.yaml");

/// A scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// Mode of its cluster.
    pub mode: Mode,
    /// Name for `--scenario`.
    pub name: &'static str,
    /// Summary.
    pub about: &'static str,
}

/// Default scenarios, in order.
pub const SCENARIOS: [Scenario; 9] = [
    Scenario {
        mode: Mode::Structured,
        name: "structured",
        about: "the scheduler allocates a device to a pod's claim, and the companion prepares it",
    },
    Scenario {
        mode: Mode::Structured,
        name: "scheduled",
        about: "all devices are held; a pod waits and runs once a device is free",
    },
    Scenario {
        mode: Mode::Structured,
        name: "tainted",
        about: "a device is unplugged while a pod holds it: it has a taint until it is plugged in again",
    },
    Scenario {
        mode: Mode::Classic,
        name: "basic",
        about: "a pod with one device, from its claim to its deletion (examples/basic)",
    },
    Scenario {
        mode: Mode::Classic,
        name: "several",
        about: "a pod with two devices of one claim, both on one node (examples/several)",
    },
    Scenario {
        mode: Mode::Classic,
        name: "waiting",
        about: "all devices are held; a pod waits, an event says why, and it runs once a device is free",
    },
    Scenario {
        mode: Mode::Classic,
        name: "unplugged",
        about: "a device is unplugged while a pod holds it, and plugged in again",
    },
    Scenario {
        mode: Mode::Classic,
        name: "both-apis",
        about: "a claim, and two pods that request one camera through the device plugin API",
    },
    Scenario {
        mode: Mode::Classic,
        name: "competing",
        about: "a claim and pods with a limit compete for one device of mode `both`",
    },
];

/// Additional scenario of `--real-devices`; it requires the node of this machine.
pub const REAL: Scenario = Scenario {
    mode: Mode::Classic,
    name: "real",
    about: "the devices of this machine, one claim per kind",
};

pub(super) async fn play(demo: &mut Demo, scenario: &Scenario) -> Result<(), Halt> {
    if scenario.mode == Mode::Structured {
        return structured::play(demo, scenario).await;
    }
    demo.apply("examples/basic/class.yaml", CLASS)?;
    demo.apply("examples/basic/claim-template.yaml", TEMPLATE)?;
    match scenario.name {
        "basic" => basic(demo).await,
        "several" => several(demo).await,
        "waiting" => waiting(demo).await,
        "unplugged" => unplugged(demo).await,
        "competing" => extended_resources::competing(demo).await,
        "real" => real::play(demo).await,
        _ => extended_resources::both_apis(demo).await,
    }
}

/// Returns the pod of the first example under another name.
pub(super) fn pod(name: &str) -> String {
    POD.replace("\n  name: basic\n", &format!("\n  name: {name}\n"))
}

pub(super) fn camera_pod(name: &str) -> String {
    limit_pod(name, CAMERA)
}

/// Returns a pod with a limit of one unit of an extended resource.
pub(super) fn limit_pod(name: &str, resource: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: main\n    image: localhost/busybox:1\n    resources:\n      limits:\n        {resource}: 1\n  terminationGracePeriodSeconds: 0\n"
    )
}

impl Demo {
    pub(super) fn apply(&self, file: &str, yaml: &str) -> Result<(), Halt> {
        let known = self.stage.server().state().store.version();
        self.stage.apply(yaml)?;
        if self.stage.server().state().store.version() != known {
            self.step("user", format!("applies {file}"));
        }
        Ok(())
    }

    fn pod(&self, name: &str) -> Option<Value> {
        self.client.get("pods", "default", name)
    }

    pub(super) fn runs(&self, name: &str) -> bool {
        self.pod(name)
            .is_some_and(|pod| text(&pod, "/status/phase") == "Running")
    }

    pub(super) fn node_of(&self, name: &str) -> String {
        self.pod(name)
            .map(|pod| text(&pod, "/spec/nodeName").to_owned())
            .unwrap_or_default()
    }

    /// Returns the devices, environment and mounts of a pod's only container.
    pub(super) fn outfit(&self, name: &str) -> Option<Outfit> {
        let kubelet = self.kubelets.get(&self.node_of(name))?;
        kubelet
            .outfits()
            .remove(&("default".to_owned(), name.to_owned()))?
            .into_values()
            .next()
    }

    pub(super) fn tell_outfit(&self, name: &str) {
        let Some(outfit) = self.outfit(name) else { return };
        let devices: Vec<String> = outfit
            .devices
            .iter()
            .map(|(path, _, permissions)| format!("{path} ({permissions})"))
            .collect();
        let variables: Vec<String> = outfit
            .environment
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let mounts = outfit
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
    pub(super) fn opens(&self, name: &str) -> usize {
        let Some(outfit) = self.outfit(name) else { return 0 };
        let can_open = |host: &String| OpenOptions::new().read(true).write(true).open(host).is_ok();
        outfit
            .devices
            .iter()
            .filter(|(_, host, _)| can_open(host))
            .count()
    }

    pub(super) fn delete(&self, name: &str) {
        if let Some(pod) = self.pod(name) {
            self.step("user", format!("deletes pod {name}"));
            // The pod may already be deleted.
            let _ = self.client.delete("pods", &pod, None);
        }
    }

    pub(super) fn claim_of(&self, pod: &str) -> Option<Value> {
        self.client.list("resourceclaims").into_iter().find(|claim| {
            list(claim, "/metadata/ownerReferences")
                .iter()
                .any(|owner| owner["name"] == pod)
        })
    }

    /// Counts the CDI files of claims on all nodes.
    pub(super) fn cdi_files(&self) -> usize {
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
    pub(super) async fn clear(&mut self, pods: &[String]) -> Result<(), Halt> {
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
        let pods = pods.to_vec();
        self.expect(&what, move |demo| {
            pods.iter()
                .all(|pod| demo.pod(pod).is_none() && demo.claim_of(pod).is_none())
                && demo.cdi_files() == 0
        })
        .await
    }
}

async fn basic(demo: &mut Demo) -> Result<(), Halt> {
    demo.apply("examples/basic/pod.yaml", POD)?;
    demo.expect("pod basic runs", |demo| demo.runs("basic")).await?;
    demo.tell_outfit("basic");
    demo.expect("its container has one device, which can be opened", |demo| {
        demo.opens("basic") == 1
    })
    .await?;
    demo.clear(&["basic".to_owned()]).await?;
    Ok(())
}

async fn several(demo: &mut Demo) -> Result<(), Halt> {
    demo.apply("examples/several/claim-template.yaml", SEVERAL_TEMPLATE)?;
    demo.apply("examples/several/pod.yaml", SEVERAL_POD)?;
    demo.expect("pod several runs", |demo| demo.runs("several"))
        .await?;
    demo.tell_outfit("several");
    demo.expect("its container has two devices, which can be opened", |demo| {
        demo.opens("several") == 2
    })
    .await?;
    demo.clear(&["several".to_owned()]).await?;
    Ok(())
}

async fn waiting(demo: &mut Demo) -> Result<(), Halt> {
    let count = demo.devices.len() * DEVICES;
    let holders: Vec<String> = (1..=count).map(|number| format!("holder-{number}")).collect();
    for holder in &holders {
        demo.stage.apply(&pod(holder))?;
    }
    let all = holders.clone();
    demo.expect("a pod runs for each device that there is", move |demo| {
        all.iter().all(|pod| demo.runs(pod))
    })
    .await?;
    demo.stage.apply(&pod("late"))?;
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
    demo.tell_outfit("late");
    let same = demo
        .claim_of("late")
        .is_some_and(|claim| devices_of(&claim) == (freed.clone(), node.clone()));
    demo.check(
        &format!("it has the device that was freed, {} on {node}", freed.join(", ")),
        same,
    )?;
    let rest: Vec<String> = holders
        .into_iter()
        .filter(|holder| holder != "holder-3")
        .chain(["late".to_owned()])
        .collect();
    demo.clear(&rest).await?;
    Ok(())
}

async fn unplugged(demo: &mut Demo) -> Result<(), Halt> {
    demo.stage.apply(&pod("plugged"))?;
    demo.expect("pod plugged runs", |demo| demo.runs("plugged"))
        .await?;
    let node = demo.node_of("plugged");
    let path = demo
        .outfit("plugged")
        .and_then(|outfit| outfit.devices.first().map(|(_, host, _)| host.clone()))
        .unwrap_or_default();
    let unhealthy = |demo: &Demo| {
        demo.client.list("nodeinventories").iter().any(|inventory| {
            list(inventory, "/spec/devices")
                .iter()
                .any(|device| !text(device, "/unhealthy").is_empty())
        })
    };
    plug(demo, &node, &path, false)?;
    demo.expect("the inventory says that the device is unhealthy", unhealthy)
        .await?;
    demo.expect(
        "the claim's CDI file is away, so that no container starts with another device",
        |demo| demo.cdi_files() == 0,
    )
    .await?;
    plug(demo, &node, &path, true)?;
    demo.expect(
        "the device is healthy again, and the CDI file is back",
        move |demo| !unhealthy(demo) && demo.cdi_files() == 1,
    )
    .await?;
    demo.clear(&["plugged".to_owned()]).await?;
    plug(demo, &node, &path, false)?;
    let has = move |demo: &Demo, wanted: &str| {
        demo.client.list("nodeinventories").iter().any(|inventory| {
            list(inventory, "/spec/devices")
                .iter()
                .any(|device| device["attributes"]["drayman.dev/path"]["string"] == wanted)
        })
    };
    let wanted = path.clone();
    demo.expect(
        "a device that nobody holds leaves the inventory when it is unplugged",
        move |demo| !has(demo, &wanted),
    )
    .await?;
    plug(demo, &node, &path, true)?;
    demo.expect("and is in it again when it is back", move |demo| has(demo, &path))
        .await?;
    Ok(())
}

/// Plugs or unplugs a device of a node.
pub(super) fn plug(demo: &mut Demo, node: &str, path: &str, plugged: bool) -> Result<(), Halt> {
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
    demo.step("somebody", format!("{word} {path} of {node}"));
    Ok(())
}
