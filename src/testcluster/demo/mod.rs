//! `drayman demo`: the product on the stage, told line by line.
//!
//! Three nodes with pretend devices, the real controller, a real companion on each node, the files of `examples/`. What happens is
//! told as it happens, by whom; what is expected is said, and whether it came.

mod devices;
mod doors;
mod narrator;
mod real;
mod scenarios;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::devices::Device;
use self::narrator::Line;
use super::api::kubeconfig;
use super::hand::Hand;
use super::kubelet::Kubelet;
use super::source::Source;
use super::stage::{Stage, StageError};

pub use scenarios::{REAL, SCENARIOS, Scenario};

/// The driver of the examples.
const DRIVER: &str = "drayman.dev";
/// The extended resource of the first node.
const CAMERA: &str = "example.com/camera";
/// The extended resource of the second node, whose device may be claimed instead.
const SHARED: &str = "example.com/either";
/// Devices for claims on each node.
const DEVICES: usize = 2;
/// How long anything may take that is expected.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often is looked at what changes without the server's knowledge.
const LOOK: Duration = Duration::from_millis(50);

/// What is shown, one line at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    /// A scenario begins.
    Heading(String),
    /// Something happened: how long after the start, who did it, and what.
    Step(Duration, String, String),
    /// An expectation, and whether it held.
    Check(String, bool),
    /// A remark.
    Remark(String),
}

/// How it went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Scenarios that were played.
    pub scenarios: usize,
    /// Expectations that were had.
    pub expected: usize,
    /// And those that held.
    pub held: usize,
    /// From the start to the first allocation.
    pub first_allocation: Option<Duration>,
}

impl Summary {
    /// Whether all went as expected; if not, what did not.
    pub fn verdict(&self) -> Result<(), String> {
        match self.expected.saturating_sub(self.held) {
            0 if self.expected == 0 => Err("nothing was expected, so that nothing was shown".to_owned()),
            0 => Ok(()),
            1 => Err("1 expectation did not hold".to_owned()),
            count => Err(format!("{count} expectations did not hold")),
        }
    }
}

/// Why a scenario does not go on.
#[derive(Debug)]
enum Halt {
    /// An expectation did not come true. What comes after it would wait for the same.
    Unmet,
    /// A part of the cluster has broken down.
    Broken(StageError),
}

impl From<StageError> for Halt {
    fn from(error: StageError) -> Self {
        Self::Broken(error)
    }
}

impl From<io::Error> for Halt {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.into())
    }
}

/// The demonstration.
#[derive(Debug)]
pub struct Demo {
    stage: Stage,
    directory: PathBuf,
    kubelets: BTreeMap<String, Kubelet>,
    /// Devices for claims, by node.
    devices: BTreeMap<String, Vec<Device>>,
    /// The camera, and the device that may leave by either door.
    _others: [Device; 2],
    hand: Hand,
    shown: mpsc::UnboundedSender<Shown>,
    start: Instant,
    /// Ends with the demonstration.
    _telling: JoinSet<()>,
    summary: Summary,
    /// From the start to the first allocation.
    first_allocation: Arc<OnceLock<Duration>>,
    /// How long anything may take that is expected.
    patience: Duration,
}

impl Demo {
    /// Starts the cluster in an empty directory. What there is to show goes to `shown`. With `real_devices` there is a node more,
    /// which has the devices of this machine.
    pub async fn start(
        directory: &Path,
        shown: mpsc::UnboundedSender<Shown>,
        real_devices: bool,
    ) -> Result<Self, StageError> {
        let start = Instant::now();
        let mut stage = Stage::start(Source::system());
        let hand = Hand::new(stage.server(), "user");
        let first_allocation = Arc::default();
        let mut telling = JoinSet::new();
        telling.spawn(tell(
            hand.clone(),
            shown.clone(),
            start,
            Arc::clone(&first_allocation),
        ));
        let definitions = crate::api::crd::definitions();
        for definition in definitions {
            let definition =
                serde_json::to_value(definition).map_err(|error| StageError::Yaml(error.to_string()))?;
            stage.apply(&definition.to_string())?;
        }
        let others = [Device::new()?, Device::new()?];
        let [camera, either] = &others;
        let (mut devices, mut kubelets) = (BTreeMap::new(), BTreeMap::new());
        for name in ["node-a", "node-b", "node-c"] {
            let own = (0..DEVICES)
                .map(|_| Device::new())
                .collect::<io::Result<Vec<_>>>()?;
            let configuration = configuration(
                &own,
                (name == "node-a").then_some(camera),
                (name == "node-b").then_some(either),
            );
            let place = directory.join(name);
            std::fs::create_dir_all(&place)?;
            kubelets.insert(name.to_owned(), stage.add_node(name, &place, &configuration)?);
            devices.insert(name.to_owned(), own);
        }
        if real_devices {
            let place = directory.join(real::NODE);
            std::fs::create_dir_all(&place)?;
            let kubelet = stage.add_node(real::NODE, &place, &real::configuration())?;
            kubelets.insert(real::NODE.to_owned(), kubelet);
        }
        stage.add_controller(DRIVER)?;
        let mut demo = Self {
            stage,
            directory: directory.to_owned(),
            kubelets,
            devices,
            _others: others,
            hand,
            shown,
            start,
            _telling: telling,
            summary: Summary::default(),
            first_allocation,
            patience: PATIENCE,
        };
        let more = if real_devices { "; and this machine" } else { "" };
        demo.heading(&format!(
            "start: a cluster of three nodes, each with two devices, and a camera on node-a{more}"
        ));
        let ready = |demo: &Self| {
            let inventories = demo.hand.list("nodeinventories");
            inventories.iter().filter(|inventory| is_ready(inventory)).count()
        };
        let what = "the companions of all nodes are served by their kubelets";
        let served = demo.expect(what, |demo| ready(demo) == demo.kubelets.len());
        match served.await {
            Ok(()) | Err(Halt::Unmet) => Ok(demo),
            Err(Halt::Broken(error)) => Err(error),
        }
    }

    /// Plays a scenario, unless something has failed before: it would stand on what is left of that. One in which an expectation does
    /// not come true ends there.
    pub async fn play(&mut self, scenario: &Scenario) -> Result<(), StageError> {
        if self.has_failed() {
            return Ok(());
        }
        self.heading(&format!("{}: {}", scenario.name, scenario.about));
        self.summary.scenarios += 1;
        match scenarios::play(self, scenario).await {
            Ok(()) => {}
            Err(Halt::Unmet) => {
                self.show(Shown::Remark("what comes after that is not played".to_owned()));
            }
            Err(Halt::Broken(error)) => return Err(error),
        }
        Ok(())
    }

    fn has_failed(&self) -> bool {
        self.summary.held < self.summary.expected
    }

    /// How it went so far.
    pub fn summary(&self) -> Summary {
        Summary {
            first_allocation: self.first_allocation.get().copied(),
            ..self.summary
        }
    }

    /// Serves the API over TCP and writes a kubeconfig for it, whose path is returned.
    pub async fn keep(&self, shutdown: CancellationToken) -> Result<PathBuf, StageError> {
        let address = self.stage.server().listen(shutdown).await?;
        let file = self.directory.join("kubeconfig");
        std::fs::write(&file, kubeconfig(address))?;
        Ok(file)
    }

    /// Returns when a part of the cluster has broken down; never otherwise.
    pub async fn broken(&mut self) -> StageError {
        self.stage.broken().await
    }

    /// Ends it all.
    pub async fn stop(self) {
        self.stage.stop().await;
    }

    fn show(&self, shown: Shown) {
        // Nobody looks any more: then nothing needs to be shown.
        let _ = self.shown.send(shown);
    }

    fn heading(&self, text: &str) {
        self.show(Shown::Heading(text.to_owned()));
    }

    fn step(&self, who: &str, what: impl Into<String>) {
        self.show(Shown::Step(self.start.elapsed(), who.to_owned(), what.into()));
    }

    /// Waits for something, and says whether it came.
    async fn expect(&mut self, what: &str, holds: impl Fn(&Self) -> bool) -> Result<(), Halt> {
        let mut changes = self.stage.server().changes();
        let end = Instant::now() + self.patience;
        let held = loop {
            changes.borrow_and_update();
            if holds(self) {
                break true;
            }
            if let Some(error) = self.stage.broken_by_now() {
                return Err(Halt::Broken(error));
            }
            tokio::select! {
                _ = changes.changed() => {}
                // Files change without the server's knowledge.
                () = tokio::time::sleep(LOOK) => {}
            }
            if Instant::now() >= end {
                break holds(self);
            }
        };
        // What has happened is told before what it means.
        tokio::task::yield_now().await;
        self.check(what, held)
    }

    /// Says whether something is as expected.
    fn check(&mut self, what: &str, held: bool) -> Result<(), Halt> {
        self.summary.expected += 1;
        self.summary.held += usize::from(held);
        self.show(Shown::Check(what.to_owned(), held));
        if held { Ok(()) } else { Err(Halt::Unmet) }
    }
}

fn is_ready(inventory: &Value) -> bool {
    super::api::object::list(inventory, "/status/conditions")
        .iter()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// The companion's configuration of a node. The kind `test` is that of the examples.
fn configuration(own: &[Device], camera: Option<&Device>, either: Option<&Device>) -> String {
    let paths: Vec<&str> = own.iter().map(|device| device.path.as_str()).collect();
    let mut text = format!(
        "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n- name: test\n  mode: claims\n  paths: [{}]\n",
        paths.join(", ")
    );
    if let Some(camera) = camera {
        text += "- name: camera\n  mode: extended-resource\n  resourceName: ";
        text.extend([CAMERA, "\n  paths: [", camera.path.as_str(), "]\n"]);
    }
    if let Some(either) = either {
        text += "- name: either\n  mode: both\n  resourceName: ";
        text.extend([SHARED, "\n  paths: [", either.path.as_str(), "]\n"]);
    }
    text
}

/// Tells what changes, as it changes.
async fn tell(
    hand: Hand,
    shown: mpsc::UnboundedSender<Shown>,
    start: Instant,
    first_allocation: Arc<OnceLock<Duration>>,
) {
    let mut changes = hand.server.changes();
    let mut version = 1;
    loop {
        changes.borrow_and_update();
        let (news, now) = hand.server.changes_after(version);
        version = now;
        for change in &news {
            let is_claim = change.key.storage.starts_with("resourceclaims.");
            let after = change.after.as_ref().filter(|_| is_claim);
            if after.is_some_and(|claim| claim.pointer("/status/allocation").is_some()) {
                // Only the first counts.
                let _ = first_allocation.set(start.elapsed());
            }
            for Line { who, what } in narrator::tell(change) {
                if shown.send(Shown::Step(start.elapsed(), who, what)).is_err() {
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

    #[test]
    fn the_verdict_is_good_only_if_something_was_expected_and_all_of_it_held() {
        let verdict = |expected, held| {
            let (scenarios, first_allocation) = (1, None);
            let summary = Summary {
                scenarios,
                expected,
                held,
                first_allocation,
            };
            summary.verdict()
        };
        assert_eq!(verdict(3, 3), Ok(()));
        assert!(verdict(3, 2).unwrap_err().starts_with("1 expectation "));
        assert!(verdict(3, 1).unwrap_err().starts_with("2 expectations "));
        assert!(verdict(0, 0).is_err());
    }

    #[tokio::test]
    async fn an_expectation_that_does_not_come_true_is_counted_and_ends_the_demonstration() {
        let _alone = devices::ALONE.lock().await;
        let directory = tempfile::tempdir().unwrap();
        let (shown, mut lines) = mpsc::unbounded_channel();
        let mut demo = Demo::start(directory.path(), shown, false).await.unwrap();
        demo.patience = Duration::from_millis(100);
        let unmet = demo.expect("pigs fly", |_| false).await;
        assert!(matches!(unmet, Err(Halt::Unmet)), "{unmet:?}");
        demo.play(&SCENARIOS[0]).await.unwrap();
        let summary = demo.summary();
        demo.stop().await;
        assert_eq!((summary.scenarios, summary.expected - summary.held), (0, 1));
        assert!(summary.verdict().is_err());
        lines.close();
        let mut shown = Vec::new();
        while let Some(line) = lines.recv().await {
            shown.push(line);
        }
        assert!(
            shown.contains(&Shown::Check("pigs fly".to_owned(), false)),
            "{shown:?}"
        );
    }
}
