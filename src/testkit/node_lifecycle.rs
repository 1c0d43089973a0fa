//! Scenario of pods on a node with the real companion, the driver under test and the test cluster's kubelet.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::Stream;
use serde_json::json;
use tokio::time::Instant as Moment;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::fixture::{CheckFailure, CheckResult, Fixture, NAMESPACE};
use super::instance::{Instance, Kit, NODE};
use super::node_instance::{DRIVER, LeftOver, described};
use super::process::{FaultPlan, StepFault};
use super::rule::Rule;
use crate::controller::Controller;
use crate::host::HostDriver;
use crate::node::driver::{ContainerEdits, Device, NodeDriver, NodeDriverError, PreparedClaim};
use crate::node::kubelet::KubeletPaths;
use crate::node::{Node, NodeError};
use crate::testcluster::api::ClusterMode;
use crate::testcluster::api::object::{self, text};
use crate::testcluster::kubelet::{Kubelet, TestNode};
use crate::testcluster::runtime::ContainerConfig;

/// Poll interval for changes that bypass the API server.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Delay before a companion that has ended is restarted.
const RESTART_DELAY: Duration = Duration::from_millis(500);

/// Driver that injects faults between the real companion and the driver under test.
struct FaultyNodeDriver<D> {
    driver: Arc<D>,
    fault_plan: FaultPlan,
}

impl<D: NodeDriver> FaultyNodeDriver<D> {
    async fn step<T>(
        &self,
        what: String,
        device: Option<&String>,
        work: impl Future<Output = Result<T, NodeDriverError>>,
    ) -> Result<T, NodeDriverError> {
        let lost = || NodeDriverError::Failed {
            device: device.cloned().unwrap_or_default(),
            problem: "injected by the conformance test".to_owned(),
        };
        self.fault_plan.step(what, work, || Err(lost())).await
    }
}

impl<D: NodeDriver> NodeDriver for FaultyNodeDriver<D> {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        self.driver.devices()
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        let what = format!("container_edits({device})");
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

struct NodeLifecycle<'a, D> {
    kit: &'a Kit<D>,
    left_over: Option<&'a LeftOver>,
    fixture: &'a Fixture,
    rule: Rule,
    kubelet: Kubelet,
    instance: Option<Instance<'a, D>>,
    fault_plan: FaultPlan,
    ended: Arc<Mutex<Option<Ended>>>,
    past: Vec<String>,
    /// Stops kubelet and controller on drop.
    _end: DropGuard,
}

/// Runs the scenario and returns the companion's steps.
pub(super) async fn run<D: NodeDriver>(
    kit: &Kit<D>,
    left_over: Option<&LeftOver>,
    fixture: &Fixture,
    fault: Option<StepFault>,
    rule: Rule,
) -> CheckResult<Vec<String>> {
    let shutdown = CancellationToken::new();
    let server = fixture.cluster.server();
    let environment = environment(fixture);
    environment.make()?;
    let kubelet = Kubelet::new(server, environment);
    // Runs until the scenario ends; a kubelet failure shows as a missing change.
    tokio::spawn(kubelet.clone().run(shutdown.clone()));
    if fixture.mode() == ClusterMode::Classic {
        let driver = HostDriver::start(server.client(), DRIVER, shutdown.clone());
        let controller = Controller::builder(driver)
            .build(server.client())
            .map_err(|error| CheckFailure::Setup(error.to_string()))?;
        tokio::spawn(controller.run(shutdown.clone()));
    }
    let mut lifecycle = NodeLifecycle {
        kit,
        left_over,
        fixture,
        rule,
        kubelet,
        instance: None,
        fault_plan: FaultPlan::new(fault),
        ended: Arc::default(),
        past: Vec::new(),
        _end: shutdown.drop_guard(),
    };
    lifecycle.begin().await?;
    for name in ["one", "two"] {
        lifecycle.create(name)?;
        let what = format!("pod {name} runs with a device");
        lifecycle.wait(&what, |lifecycle| lifecycle.runs(name)).await?;
        let before = lifecycle.container_config(name);
        fixture.delete_pod(name);
        let what = format!("pod {name} is deleted; its claim and its CDI file are gone");
        lifecycle.wait(&what, NodeLifecycle::is_clear).await?;
        if before.is_none_or(|container_config| container_config.environment.is_empty()) {
            let expected = format!("the container of pod {name} has a device");
            return Err(lifecycle.broken(&expected, "it has none"));
        }
    }
    lifecycle.check_left().await?;
    lifecycle.past.extend(lifecycle.fault_plan.steps());
    if let Some(instance) = lifecycle.instance.take() {
        instance.kill().await;
    }
    Ok(lifecycle.past)
}

fn environment(fixture: &Fixture) -> TestNode {
    TestNode::within(NODE, fixture.directory.path())
}

impl<D: NodeDriver> NodeLifecycle<'_, D> {
    async fn begin(&mut self) -> CheckResult<()> {
        let instance = self
            .kit
            .with_faults(self.fixture, self.fault_plan.clone())
            .await?;
        let wrapped = FaultyNodeDriver {
            driver: instance.driver.clone(),
            fault_plan: self.fault_plan.clone(),
        };
        let environment = environment(self.fixture);
        let node = Node::builder(wrapped, NODE, instance.client())
            .driver_name(DRIVER)
            .kubelet(KubeletPaths {
                root_dir: environment.root,
                device_plugin_dir: environment.device_plugins,
            })
            .cdi_dir(environment.cdi);
        let ended = self.ended.clone();
        instance.spawn(async move {
            // Never cancelled: the process is killed.
            let result = node.run(CancellationToken::new()).await;
            *ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        });
        self.instance = Some(instance);
        Ok(())
    }

    async fn restart(&mut self) -> CheckResult<()> {
        self.past.extend(self.fault_plan.steps());
        self.past.push("(killed and restarted)".to_owned());
        if let Some(instance) = self.instance.take() {
            instance.kill().await;
        }
        self.fault_plan = FaultPlan::new(None);
        self.begin().await
    }

    fn create(&self, name: &str) -> CheckResult<()> {
        let spec = json!({
            "containers": [{ "name": "main", "image": "none", "resources": { "claims": [{ "name": "device" }] } }],
            "resourceClaims": [self.fixture.pod_claim("device")],
        });
        self.fixture.create_pod(name, &spec)
    }

    fn runs(&self, name: &str) -> bool {
        let pod = self
            .fixture
            .client
            .get("pods", NAMESPACE, name)
            .unwrap_or_default();
        text(&pod, "/status/phase") == "Running"
    }

    fn container_config(&self, name: &str) -> Option<ContainerConfig> {
        let key = (NAMESPACE.to_owned(), name.to_owned());
        self.kubelet
            .container_configs()
            .remove(&key)?
            .into_values()
            .next()
    }

    fn is_clear(&self) -> bool {
        let files = std::fs::read_dir(environment(self.fixture).cdi);
        let left = files.into_iter().flatten().flatten().any(|file| {
            file.path()
                .extension()
                .is_some_and(|extension| extension == "json")
        });
        let client = &self.fixture.client;
        !left && client.list("pods").is_empty() && client.list("resourceclaims").is_empty()
    }

    async fn wait(&mut self, what: &str, holds: impl Fn(&Self) -> bool) -> CheckResult<()> {
        let until = Moment::now() + self.kit.timeout;
        loop {
            if holds(self) {
                return Ok(());
            }
            if self.fault_plan.is_dead() {
                self.restart().await?;
            }
            let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
            match ended {
                None => {}
                // The driver has panicked.
                Some(Err(NodeError::Broken(error))) => {
                    return Err(self.broken(what, format!("the companion has panicked: {error}")));
                }
                // The machine temporarily prevents a start; a supervisor would restart the companion.
                Some(Err(error)) => {
                    if Moment::now() > until {
                        return Err(CheckFailure::Setup(format!("the companion cannot run: {error}")));
                    }
                    tokio::time::sleep(RESTART_DELAY).await;
                    self.restart().await?;
                }
                Some(Ok(())) => return Err(self.broken(what, "the companion has ended")),
            }
            if Moment::now() > until {
                let state = self.state();
                return Err(self.broken(what, format!("not within {:?}; {state}", self.kit.timeout)));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Checks that no leftovers remain. Kubelet's last call may still be pending.
    async fn check_left(&mut self) -> CheckResult<()> {
        let until = Moment::now() + self.kit.timeout;
        loop {
            if self.fault_plan.is_dead() {
                self.restart().await?;
            }
            let Some(instance) = &self.instance else {
                return Ok(());
            };
            let left = instance.nothing_left(self.left_over, "all pods are gone");
            if left.is_ok() {
                return Ok(());
            }
            if Moment::now() > until {
                for step in self.past.iter().chain(&self.fault_plan.steps()) {
                    self.fixture.note(step.clone());
                }
                return instance.nothing_left(self.left_over, "all pods are gone");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn state(&self) -> String {
        let client = &self.fixture.client;
        let pods = client.list("pods");
        let mut parts: Vec<String> = pods
            .iter()
            .map(|pod| format!("pod {}: {}", object::name(pod), text(pod, "/status/phase")))
            .collect();
        parts.extend(self.fixture.events());
        parts.join("; ")
    }

    fn broken(&self, expected: &str, found: impl Into<String>) -> CheckFailure {
        let steps = self.past.iter().cloned().chain(self.fault_plan.steps());
        self.fixture.broken_after(steps, self.rule, expected, found)
    }
}
