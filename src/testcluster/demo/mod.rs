//! `drayman demo`: runs the product on the test cluster and prints each event.
//!
//! The demo has three nodes with simulated devices, a real companion per node and, in classic mode, the real controller
//! and the files of `examples/`. It prints events with their source as they occur, and each expectation with its result.

mod describe;
mod pseudo_terminal;
mod scenarios;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::describe::Line;
use self::pseudo_terminal::PseudoTerminal;
use super::api::{ClusterMode, kubeconfig};
use super::client::ApiClient;
use super::clock_and_rng::ClockAndRng;
use super::cluster::{TestCluster, TestClusterError};
use super::kubelet::Kubelet;
use crate::node::config::PRESETS;
use crate::testcluster::api::object::{is_ready, list, text};

pub use scenarios::{REAL, SCENARIOS, Scenario};

/// Driver name of the examples.
const DRIVER: &str = "drayman.dev";
/// Extended resource of the first node.
const CAMERA: &str = "example.com/camera";
/// Extended resource of the second node; its device can be claimed as well.
const SHARED: &str = "example.com/either";
/// Additional node with the devices of this machine.
const THIS_MACHINE: &str = "this-machine";
/// Number of claimable devices per node.
const DEVICES: usize = 2;
/// Limit for an expectation.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Poll interval for changes that bypass the API server.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// One line of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputLine {
    /// Start of a scenario.
    Heading(String),
    /// An event: time since the start, source and description.
    Step(Duration, String, String),
    /// An expectation, and whether it was met.
    Check(String, bool),
    /// A remark.
    Remark(String),
}

/// Result of the demo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of scenarios run.
    pub scenarios: usize,
    /// Number of expectations.
    pub expected: usize,
    /// Number of expectations met.
    pub held: usize,
    /// Time from the start to the first allocation.
    pub first_allocation: Option<Duration>,
}

impl Summary {
    /// Adds the result of another cluster.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            scenarios: self.scenarios + other.scenarios,
            expected: self.expected + other.expected,
            held: self.held + other.held,
            first_allocation: self.first_allocation.or(other.first_allocation),
        }
    }

    /// Returns an error unless all expectations were met.
    pub fn result(&self) -> Result<(), String> {
        match self.expected.saturating_sub(self.held) {
            0 if self.expected == 0 => Err("no expectation was checked".to_owned()),
            0 => Ok(()),
            1 => Err("1 expectation did not hold".to_owned()),
            count => Err(format!("{count} expectations did not hold")),
        }
    }
}

/// Why a scenario stops.
#[derive(Debug)]
enum Halt {
    /// An expectation was not met. Later steps would depend on it.
    Unmet,
    /// A part of the cluster has failed.
    Broken(TestClusterError),
}

impl From<TestClusterError> for Halt {
    fn from(error: TestClusterError) -> Self {
        Self::Broken(error)
    }
}

impl From<io::Error> for Halt {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.into())
    }
}

/// The running demo.
#[derive(Debug)]
pub struct Demo {
    cluster: TestCluster,
    directory: PathBuf,
    kubelets: BTreeMap<String, Kubelet>,
    /// Claimable devices by node.
    devices: BTreeMap<String, Vec<PseudoTerminal>>,
    /// The camera and the device in mode `both`.
    _others: [PseudoTerminal; 2],
    client: ApiClient,
    shown: mpsc::UnboundedSender<OutputLine>,
    start: Instant,
    /// Stops with the demo.
    _describing: JoinSet<()>,
    summary: Summary,
    /// Time from the start to the first allocation.
    first_allocation: Arc<OnceLock<Duration>>,
    /// Limit for an expectation.
    timeout: Duration,
}

impl Demo {
    /// Starts a cluster in an empty directory and sends output to `shown`. `real_devices` adds a node with the
    /// devices of this machine.
    pub async fn start(
        mode: ClusterMode,
        directory: &Path,
        shown: mpsc::UnboundedSender<OutputLine>,
        real_devices: bool,
    ) -> Result<Self, TestClusterError> {
        let start = Instant::now();
        let mut cluster = TestCluster::with_mode(ClockAndRng::system(), mode);
        let client = ApiClient::new(cluster.server(), "user");
        let first_allocation = Arc::default();
        let mut describing = JoinSet::new();
        describing.spawn(describe_changes(
            client.clone(),
            shown.clone(),
            start,
            Arc::clone(&first_allocation),
        ));
        if mode == ClusterMode::Classic {
            for definition in crate::api::crd::definitions() {
                let definition = serde_json::to_value(definition)
                    .map_err(|error| TestClusterError::Yaml(error.to_string()))?;
                cluster.apply(&definition.to_string())?;
            }
        }
        let others = [PseudoTerminal::new()?, PseudoTerminal::new()?];
        let [camera, either] = &others;
        let (mut devices, mut kubelets) = (BTreeMap::new(), BTreeMap::new());
        for name in ["node-a", "node-b", "node-c"] {
            let own = (0..DEVICES)
                .map(|_| PseudoTerminal::new())
                .collect::<io::Result<Vec<_>>>()?;
            let configuration = configuration(
                &own,
                (mode == ClusterMode::Classic && name == "node-a").then_some(camera),
                (mode == ClusterMode::Classic && name == "node-b").then_some(either),
            );
            let directory = directory.join(name);
            std::fs::create_dir_all(&directory)?;
            kubelets.insert(
                name.to_owned(),
                cluster.add_node(name, &directory, &configuration)?,
            );
            devices.insert(name.to_owned(), own);
        }
        if real_devices {
            let directory = directory.join(THIS_MACHINE);
            std::fs::create_dir_all(&directory)?;
            let kubelet = cluster.add_node(THIS_MACHINE, &directory, &preset_configuration())?;
            kubelets.insert(THIS_MACHINE.to_owned(), kubelet);
        }
        if mode == ClusterMode::Classic {
            cluster.add_controller(DRIVER)?;
        }
        let mut demo = Self {
            cluster,
            directory: directory.to_owned(),
            kubelets,
            devices,
            _others: others,
            client,
            shown,
            start,
            _describing: describing,
            summary: Summary::default(),
            first_allocation,
            timeout: TIMEOUT,
        };
        let machine = if real_devices { "; and this machine" } else { "" };
        let (what, camera) = match mode {
            ClusterMode::Structured => ("structured mode (Kubernetes 1.34 and later)", ""),
            ClusterMode::Classic => (
                "classic mode (Kubernetes 1.27 to 1.30)",
                ", and a camera on node-a",
            ),
        };
        demo.heading(&format!(
            "{what}: a cluster of three nodes, each with two devices{camera}{machine}"
        ));
        let started = match mode {
            ClusterMode::Structured => demo.expect_slices().await,
            ClusterMode::Classic => {
                let ready = |demo: &Self| {
                    let inventories = demo.client.list("nodeinventories");
                    inventories.iter().filter(|inventory| is_ready(inventory)).count()
                };
                let what = "the companions of all nodes are served by their kubelets";
                demo.expect(what, |demo| ready(demo) == demo.kubelets.len()).await
            }
        };
        match started {
            Ok(()) | Err(Halt::Unmet) => Ok(demo),
            Err(Halt::Broken(error)) => Err(error),
        }
    }

    fn has_failed(&self) -> bool {
        self.summary.held < self.summary.expected
    }

    /// Returns the result so far.
    pub fn summary(&self) -> Summary {
        Summary {
            first_allocation: self.first_allocation.get().copied(),
            ..self.summary
        }
    }

    /// Serves the API over TCP and writes a kubeconfig. Returns its path.
    pub async fn keep(&self, shutdown: CancellationToken) -> Result<PathBuf, TestClusterError> {
        let address = self.cluster.server().listen(shutdown).await?;
        let file = self.directory.join("kubeconfig");
        std::fs::write(&file, kubeconfig(address))?;
        Ok(file)
    }

    /// Returns when a part of the cluster has failed; never otherwise.
    pub async fn broken(&mut self) -> TestClusterError {
        self.cluster.broken().await
    }

    /// Stops the cluster.
    pub async fn stop(self) {
        self.cluster.stop().await;
    }

    fn show(&self, shown: OutputLine) {
        // Fails only if the receiver is gone.
        let _ = self.shown.send(shown);
    }

    fn heading(&self, text: &str) {
        self.show(OutputLine::Heading(text.to_owned()));
    }

    fn step(&self, who: &str, what: impl Into<String>) {
        self.show(OutputLine::Step(
            self.start.elapsed(),
            who.to_owned(),
            what.into(),
        ));
    }

    /// Waits for an expectation and prints its result.
    async fn expect(&mut self, what: &str, holds: impl Fn(&Self) -> bool) -> Result<(), Halt> {
        let mut changes = self.cluster.server().changes();
        let end = Instant::now() + self.timeout;
        let held = loop {
            changes.borrow_and_update();
            if holds(self) {
                break true;
            }
            if let Some(error) = self.cluster.broken_by_now() {
                return Err(Halt::Broken(error));
            }
            tokio::select! {
                _ = changes.changed() => {}
                // File changes do not notify the server's watches.
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
            if Instant::now() >= end {
                break holds(self);
            }
        };
        // Lets pending events print before the result.
        tokio::task::yield_now().await;
        self.check(what, held)
    }

    /// Waits until kubelet can call each companion, and each companion has published its devices.
    async fn expect_slices(&mut self) -> Result<(), Halt> {
        let what = "kubelet has registered each companion, and each has published its devices";
        self.expect(what, |demo| {
            demo.kubelets
                .iter()
                .all(|(node, kubelet)| kubelet.has_plugin(DRIVER) && demo.published(node).len() == DEVICES)
        })
        .await
    }

    /// Returns for each device in a node's ResourceSlices whether it has a taint.
    fn published(&self, node: &str) -> Vec<bool> {
        let slices = self.client.list("resourceslices");
        let of_node = slices
            .iter()
            .filter(|slice| text(slice, "/spec/nodeName") == node);
        of_node
            .flat_map(|slice| list(slice, "/spec/devices"))
            .map(|device| !list(device, "/taints").is_empty())
            .collect()
    }

    /// Checks an expectation now and prints its result.
    fn check(&mut self, what: &str, held: bool) -> Result<(), Halt> {
        self.summary.expected += 1;
        self.summary.held += usize::from(held);
        self.show(OutputLine::Check(what.to_owned(), held));
        if held { Ok(()) } else { Err(Halt::Unmet) }
    }
}

/// Returns the companion's configuration of a node. Kind `test` is the one in `examples/`.
fn configuration(
    own: &[PseudoTerminal],
    camera: Option<&PseudoTerminal>,
    either: Option<&PseudoTerminal>,
) -> String {
    let paths: Vec<&str> = own.iter().map(|device| device.path.as_str()).collect();
    let mut kinds = vec![json!({ "name": "test", "mode": "claims", "paths": paths })];
    let camera = camera.map(|device| ("camera", "extended-resource", CAMERA, device));
    let either = either.map(|device| ("either", "both", SHARED, device));
    for (name, mode, resource, device) in camera.into_iter().chain(either) {
        let paths = [&device.path];
        kinds.push(json!({ "name": name, "mode": mode, "resourceName": resource, "paths": paths }));
    }
    configuration_of(&kinds)
}

/// Returns a configuration as JSON, which is valid YAML.
fn configuration_of(kinds: &[Value]) -> String {
    json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeConfiguration", "kinds": kinds }).to_string()
}

/// Returns the companion's configuration of this machine: every preset, for claims.
fn preset_configuration() -> String {
    let kinds: Vec<Value> = PRESETS
        .iter()
        .map(|preset| json!({ "preset": preset.name }))
        .collect();
    configuration_of(&kinds)
}

/// Prints changes as they occur.
async fn describe_changes(
    client: ApiClient,
    shown: mpsc::UnboundedSender<OutputLine>,
    start: Instant,
    first_allocation: Arc<OnceLock<Duration>>,
) {
    let mut changes = client.server.changes();
    let mut version = 1;
    loop {
        changes.borrow_and_update();
        let (news, now) = client.server.changes_after(version);
        version = now;
        for change in &news {
            let is_claim = change.key.storage.starts_with("resourceclaims.");
            let after = change.after.as_ref().filter(|_| is_claim);
            if after.is_some_and(|claim| claim.pointer("/status/allocation").is_some()) {
                // Only the first call has an effect.
                let _ = first_allocation.set(start.elapsed());
            }
            for Line { who, what } in describe::describe(change) {
                if shown.send(OutputLine::Step(start.elapsed(), who, what)).is_err() {
                    return;
                }
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::config::NodeConfiguration;

    #[test]
    fn the_demo_succeeds_only_if_all_of_some_expectations_held() {
        let result = |expected, held| {
            let (scenarios, first_allocation) = (1, None);
            let summary = Summary {
                scenarios,
                expected,
                held,
                first_allocation,
            };
            summary.result()
        };
        assert_eq!(result(3, 3), Ok(()));
        assert!(result(3, 2).unwrap_err().starts_with("1 expectation "));
        assert!(result(3, 1).unwrap_err().starts_with("2 expectations "));
        assert!(result(0, 0).is_err());
    }

    #[test]
    fn every_ready_made_kind_is_looked_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), preset_configuration()).unwrap();
        assert_eq!(
            NodeConfiguration::read(file.path()).unwrap().kinds.len(),
            PRESETS.len()
        );
    }

    #[tokio::test]
    async fn a_failed_expectation_is_counted_and_ends_the_demo() {
        let _alone = pseudo_terminal::ALONE.lock().await;
        let directory = tempfile::tempdir().unwrap();
        let (shown, mut lines) = mpsc::unbounded_channel();
        let mut demo = Demo::start(ClusterMode::Structured, directory.path(), shown, false)
            .await
            .unwrap();
        demo.timeout = Duration::from_millis(100);
        let unmet = demo.expect("pigs fly", |_| false).await;
        assert!(matches!(unmet, Err(Halt::Unmet)), "{unmet:?}");
        demo.run(&SCENARIOS[0]).await.unwrap();
        let summary = demo.summary();
        demo.stop().await;
        assert_eq!((summary.scenarios, summary.expected - summary.held), (0, 1));
        assert!(summary.result().is_err());
        lines.close();
        let mut shown = Vec::new();
        while let Some(line) = lines.recv().await {
            shown.push(line);
        }
        assert!(
            shown.contains(&OutputLine::Check("pigs fly".to_owned(), false)),
            "{shown:?}"
        );
    }
}
