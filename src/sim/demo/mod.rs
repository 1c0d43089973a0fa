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
use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
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
    telling: JoinHandle<()>,
    summary: Summary,
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
        let telling = tokio::spawn(tell(hand.clone(), shown.clone(), start));
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
            telling,
            summary: Summary::default(),
        };
        let more = if real_devices { "; and this machine" } else { "" };
        demo.heading(&format!(
            "start: a cluster of three nodes, each with two devices, and a camera on node-a{more}"
        ));
        demo.expect(
            "the companions of all nodes are served by their kubelets",
            |demo| {
                let ready = demo
                    .hand
                    .list("nodeinventories")
                    .iter()
                    .filter(|inventory| is_ready(inventory))
                    .count();
                ready == demo.kubelets.len()
            },
        )
        .await;
        Ok(demo)
    }

    /// Plays a scenario.
    pub async fn play(&mut self, scenario: &Scenario) -> Result<(), StageError> {
        self.heading(&format!("{}: {}", scenario.name, scenario.about));
        self.summary.scenarios += 1;
        scenarios::play(self, scenario).await
    }

    /// How it went so far.
    pub fn summary(&self) -> Summary {
        self.summary
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
    pub async fn stop(self) -> Summary {
        self.stage.stop().await;
        self.telling.abort();
        self.summary
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
    async fn expect(&mut self, what: &str, holds: impl Fn(&Self) -> bool) -> bool {
        let mut changes = self.stage.server().changes();
        let came = async {
            loop {
                changes.borrow_and_update();
                if holds(self) {
                    return;
                }
                tokio::select! {
                    _ = changes.changed() => {}
                    // Files change without the server's knowledge.
                    () = tokio::time::sleep(Duration::from_millis(50)) => {}
                }
            }
        };
        let held = timeout(PATIENCE, came).await.is_ok();
        // What has happened is told before what it means.
        tokio::task::yield_now().await;
        self.check(what, held);
        held
    }

    fn check(&mut self, what: &str, held: bool) {
        self.summary.expected += 1;
        self.summary.held += usize::from(held);
        if self.summary.first_allocation.is_none() {
            let allocated = |claim: &Value| claim.pointer("/status/allocation").is_some();
            if self.hand.list("resourceclaims").iter().any(allocated) {
                self.summary.first_allocation = Some(self.start.elapsed());
            }
        }
        self.show(Shown::Check(what.to_owned(), held));
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
async fn tell(hand: Hand, shown: mpsc::UnboundedSender<Shown>, start: Instant) {
    let mut changes = hand.server.changes();
    let mut version = 1;
    loop {
        changes.borrow_and_update();
        let (news, now) = hand.server.changes_after(version);
        version = now;
        for change in &news {
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
