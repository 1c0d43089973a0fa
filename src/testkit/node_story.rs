//! Scenario of pods on a node with the real companion, the driver under test and the test cluster's kubelet.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::Stream;
use serde_json::json;
use tokio::time::Instant as Moment;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::node_conformance::{DRIVER, NodeKit};
use super::node_instance::{NODE, NodeInstance, described};
use super::process::{Blow, BlowKind, Fate};
use super::rule::Rule;
use super::scene::{Done, NAMESPACE, Scene, Stop};
use crate::controller::Controller;
use crate::host::HostDriver;
use crate::node::driver::{ContainerEdits, Device, NodeDriver, NodeDriverError, PreparedClaim};
use crate::node::kubelet::KubeletPaths;
use crate::node::{Node, NodeError};
use crate::testcluster::api::object::{self, text};
use crate::testcluster::kubelet::{Kubelet, NodePlace};
use crate::testcluster::runtime::Outfit;

/// Poll interval for changes that bypass the API server.
const LOOK: Duration = Duration::from_millis(50);
/// Delay before a companion that has ended is restarted.
const AGAIN: Duration = Duration::from_millis(500);

/// Driver that injects faults between the real companion and the driver under test.
struct Wrapped<D> {
    driver: Arc<D>,
    fate: Fate,
}

impl<D: NodeDriver> Wrapped<D> {
    async fn step<T>(
        &self,
        what: String,
        device: Option<&String>,
        work: impl Future<Output = Result<T, NodeDriverError>>,
    ) -> Result<T, NodeDriverError> {
        let lost = || NodeDriverError::Failed {
            device: device.cloned().unwrap_or_default(),
            problem: "the conformance test lets this call fail".to_owned(),
        };
        self.fate.step(what, work, || Err(lost())).await
    }
}

impl<D: NodeDriver> NodeDriver for Wrapped<D> {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        self.driver.devices()
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        let what = format!("injection({device})");
        let name = device.to_owned();
        self.step(what, Some(&name), self.driver.container_edits(device))
            .await
    }

    async fn check_unused(&self, device: &str) -> Result<(), NodeDriverError> {
        self.driver.check_unused(device).await
    }

    async fn prepare(&self, claim: &PreparedClaim) -> Result<ContainerEdits, NodeDriverError> {
        let what = format!("prepare({})", described(claim));
        self.step(what, claim.devices.first(), self.driver.prepare(claim))
            .await
    }

    async fn unprepare(&self, claim: &PreparedClaim) -> Result<(), NodeDriverError> {
        let what = format!("unprepare({})", described(claim));
        self.step(what, claim.devices.first(), self.driver.unprepare(claim))
            .await
    }
}

/// Result of a companion that ended unexpectedly.
type Ended = Result<(), NodeError>;

struct Story<'a, D> {
    kit: &'a NodeKit<D>,
    scene: &'a Scene,
    rule: Rule,
    kubelet: Kubelet,
    instance: Option<NodeInstance<'a, D>>,
    fate: Fate,
    ended: Arc<Mutex<Option<Ended>>>,
    past: Vec<String>,
    /// Stops kubelet and controller on drop.
    _end: DropGuard,
}

/// Runs the scenario and returns the companion's steps.
pub(super) async fn play<D: NodeDriver>(
    kit: &NodeKit<D>,
    scene: &Scene,
    blow: Option<Blow>,
) -> Done<Vec<String>> {
    let rule = match blow.map(|blow| blow.kind) {
        None => Rule::ServesPods,
        Some(BlowKind::Crash) => Rule::NodeSurvivesCrash,
        Some(BlowKind::Slow) => Rule::NodeSurvivesSlowCall,
        Some(BlowKind::Fail) => Rule::NodeSurvivesFailedCall,
    };
    let shutdown = CancellationToken::new();
    let server = scene.stage.server();
    let place = place(scene);
    place.make()?;
    let kubelet = Kubelet::new(server, place);
    // Runs until the scenario ends; a kubelet failure shows as a missing change.
    tokio::spawn(kubelet.clone().run(shutdown.clone()));
    let driver = HostDriver::start(server.client(), DRIVER, shutdown.clone());
    let controller = Controller::builder(driver)
        .build(server.client())
        .map_err(|error| Stop::Setup(error.to_string()))?;
    tokio::spawn(controller.run(shutdown.clone()));
    let mut story = Story {
        kit,
        scene,
        rule,
        kubelet,
        instance: None,
        fate: Fate::new(blow),
        ended: Arc::default(),
        past: Vec::new(),
        _end: shutdown.drop_guard(),
    };
    story.begin().await?;
    for name in ["one", "two"] {
        story.create(name)?;
        let what = format!("pod {name} runs with a device");
        story.wait(&what, |story| story.runs(name)).await?;
        let before = story.outfit(name);
        story.delete(name);
        let what = format!("pod {name} is deleted; its claim and its CDI file are gone");
        story.wait(&what, Story::is_clear).await?;
        if before.is_none_or(|outfit| outfit.environment.is_empty()) {
            let expected = format!("the container of pod {name} has a device");
            return Err(story.broken(&expected, "it has nothing"));
        }
    }
    story.check_left().await?;
    story.past.extend(story.fate.steps());
    if let Some(instance) = story.instance.take() {
        instance.kill().await;
    }
    Ok(story.past)
}

fn place(scene: &Scene) -> NodePlace {
    NodePlace::within(NODE, scene.directory.path())
}

impl<D: NodeDriver> Story<'_, D> {
    async fn begin(&mut self) -> Done<()> {
        let instance = self.kit.fated(self.scene, self.fate.clone()).await?;
        let wrapped = Wrapped {
            driver: instance.driver.clone(),
            fate: self.fate.clone(),
        };
        let place = place(self.scene);
        let node = Node::builder(wrapped, NODE, instance.client())
            .driver_name(DRIVER)
            .kubelet(KubeletPaths {
                root_dir: place.root,
                device_plugin_dir: place.device_plugins,
            })
            .cdi_dir(place.cdi);
        let ended = self.ended.clone();
        instance.spawn(async move {
            // Never cancelled: the process is killed.
            let result = node.run(CancellationToken::new()).await;
            *ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        });
        self.instance = Some(instance);
        Ok(())
    }

    async fn restart(&mut self) -> Done<()> {
        self.past.extend(self.fate.steps());
        self.past.push("(killed, and started anew)".to_owned());
        if let Some(instance) = self.instance.take() {
            instance.kill().await;
        }
        self.fate = Fate::new(None);
        self.begin().await
    }

    fn create(&self, name: &str) -> Done<()> {
        let pod = json!({
            "metadata": { "name": name },
            "spec": {
                "containers": [{ "name": "main", "image": "none", "resources": { "claims": [{ "name": "device" }] } }],
                "resourceClaims": [{ "name": "device", "source": { "resourceClaimTemplateName": self.scene.template } }],
            },
        });
        let made = self.scene.hand.create("pods", NAMESPACE, pod);
        made.map(drop)
            .map_err(|refusal| Stop::Setup(format!("pod {name}: {}", refusal.message)))
    }

    fn delete(&self, name: &str) {
        if let Some(pod) = self.scene.hand.get("pods", NAMESPACE, name) {
            // The pod may already be deleted.
            let _ = self.scene.hand.delete("pods", &pod, None);
        }
    }

    fn runs(&self, name: &str) -> bool {
        let pod = self.scene.hand.get("pods", NAMESPACE, name).unwrap_or_default();
        text(&pod, "/status/phase") == "Running"
    }

    fn outfit(&self, name: &str) -> Option<Outfit> {
        let key = (NAMESPACE.to_owned(), name.to_owned());
        self.kubelet.outfits().remove(&key)?.into_values().next()
    }

    fn is_clear(&self) -> bool {
        let files = std::fs::read_dir(place(self.scene).cdi);
        let left = files.into_iter().flatten().flatten().any(|file| {
            file.path()
                .extension()
                .is_some_and(|extension| extension == "json")
        });
        let hand = &self.scene.hand;
        !left && hand.list("pods").is_empty() && hand.list("resourceclaims").is_empty()
    }

    async fn wait(&mut self, what: &str, holds: impl Fn(&Self) -> bool) -> Done<()> {
        let until = Moment::now() + self.kit.patience;
        loop {
            if holds(self) {
                return Ok(());
            }
            if self.fate.is_dead() {
                self.restart().await?;
            }
            let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
            match ended {
                None => {}
                // The driver has panicked.
                Some(Err(NodeError::Broken(error))) => {
                    return Err(self.broken(what, format!("the companion has broken down: {error}")));
                }
                // The machine temporarily prevents a start; a supervisor would restart the companion.
                Some(Err(error)) => {
                    if Moment::now() > until {
                        return Err(Stop::Setup(format!("the companion cannot run: {error}")));
                    }
                    tokio::time::sleep(AGAIN).await;
                    self.restart().await?;
                }
                Some(Ok(())) => return Err(self.broken(what, "the companion has ended")),
            }
            if Moment::now() > until {
                let state = self.state();
                return Err(self.broken(what, format!("not within {:?}; {state}", self.kit.patience)));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Checks that no leftovers remain. Kubelet's last call may still be pending.
    async fn check_left(&mut self) -> Done<()> {
        let until = Moment::now() + self.kit.patience;
        loop {
            if self.fate.is_dead() {
                self.restart().await?;
            }
            let Some(instance) = &self.instance else {
                return Ok(());
            };
            let left = instance.nothing_left(self.kit.left_over.as_ref(), "all pods are gone");
            if left.is_ok() {
                return Ok(());
            }
            if Moment::now() > until {
                for step in self.past.iter().chain(&self.fate.steps()) {
                    self.scene.note(step.clone());
                }
                return instance.nothing_left(self.kit.left_over.as_ref(), "all pods are gone");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn state(&self) -> String {
        let hand = &self.scene.hand;
        let pods = hand.list("pods");
        let mut parts: Vec<String> = pods
            .iter()
            .map(|pod| format!("pod {}: {}", object::name(pod), text(pod, "/status/phase")))
            .collect();
        parts.extend(self.scene.events());
        parts.join("; ")
    }

    fn broken(&self, expected: &str, found: impl Into<String>) -> Stop {
        let steps = self.past.iter().cloned().chain(self.fate.steps());
        self.scene.broken_after(steps, self.rule, expected, found)
    }
}
