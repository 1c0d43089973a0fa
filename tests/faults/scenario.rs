//! The scenario: two pods that use the only device of a kind one after the other (the second one with one more device), and a pod with a
//! device of mode `both` as an extended resource, which a claim uses next. Another pod has a claim of another driver, which does not exist.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drayman::controller::Controller;
use drayman::core::prepare::containers::Conflicting;
use drayman::host::HostDriver;
use drayman::testcluster::api::{self, ApiServer};
use drayman::testcluster::clock_and_rng::ClockAndRng;
use drayman::testcluster::cluster::TestCluster;
use drayman::testcluster::faults::{Faults, Operation, PlannedFault, ProgramProcess};
use drayman::testcluster::kubelet::{Kubelet, TestNode};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, PostParams};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::check::{Checker, DRIVER, entries_without_file, files_without_entry, list, text};
use crate::objects::{
    claiming, claiming_two, class, of_another_driver, plugging, structured_class, v1_claiming,
    v1_claiming_two, viewing,
};
use crate::program::{self, until};

pub(crate) const CONTROLLER: &str = "controller";
pub(crate) const COMPANION: &str = "companion";
/// Timeout of all waits. The machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long the API server must be idle at the end.
const QUIET: Duration = Duration::from_millis(1500);

/// Time source of the test cluster.
pub(crate) type Clock = fn() -> jiff::Timestamp;

/// Result of a run.
#[derive(Debug)]
pub(crate) struct RunResult {
    pub(crate) violations: Vec<String>,
    pub(crate) counts: BTreeMap<(&'static str, Operation), u64>,
    pub(crate) hits: Vec<PlannedFault>,
    pub(crate) trace: Vec<String>,
}

/// Asserts that a request for an object was done, or that a program had deleted or changed the object before.
fn done_or_late<T>(answer: kube::Result<T>) {
    if let Err(error) = answer {
        let is_late = matches!(&error, kube::Error::Api(status) if [404, 409].contains(&status.code));
        assert!(is_late, "{error}");
    }
}

/// A node with one device for each of two kinds of mode `claims` and one of mode `both`.
fn make_node(directory: &Path) -> std::io::Result<TestNode> {
    let mut node = TestNode::within("node-a", directory);
    node.dev = directory.join("dev");
    node.make()?;
    std::fs::create_dir_all(&node.dev)?;
    for (minor, name) in ["test-0", "camera-0", "other-0"].into_iter().enumerate() {
        let numbers = makedev(240, u32::try_from(minor).unwrap_or_default());
        let mode = Mode::RUSR | Mode::WUSR;
        mknodat(CWD, node.dev.join(name), FileType::CharacterDevice, mode, numbers)?;
    }
    let configuration = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
        - {name: test, paths: [\"/dev/test-*\"]}\n\
        - {name: other, paths: [\"/dev/other-*\"]}\n\
        - {name: camera, mode: both, resourceName: example.com/camera, paths: [\"/dev/camera-*\"]}\n";
    std::fs::write(directory.join("node.yaml"), configuration)?;
    Ok(node)
}

struct Scenario {
    server: ApiServer,
    kubelet: Kubelet,
    node: TestNode,
    cluster: TestCluster,
    faults: Faults,
    checker: Arc<Mutex<Checker>>,
    never: Option<String>,
}

/// Runs the scenario of a mode with these faults.
pub(crate) async fn run(mode: api::ClusterMode, planned: Vec<PlannedFault>, clock: Clock) -> RunResult {
    let directory = tempfile::tempdir().unwrap();
    let node = make_node(directory.path()).unwrap();
    let faults = Faults::new(planned);
    let mut cluster = TestCluster::with_mode(ClockAndRng::new(Box::new(clock), 1), mode);
    let server = cluster.server().clone();
    let is_structured = mode == api::ClusterMode::Structured;
    let kubelet = Kubelet::with_faults(&server, node.clone(), &faults, COMPANION);
    if is_structured {
        for kind in ["test", "other"] {
            cluster.apply(&structured_class(kind)).unwrap();
        }
        cluster.add_kubelet(&kubelet);
    } else {
        for definition in drayman::api::crd::definitions() {
            cluster
                .apply(&serde_json::to_string(&definition).unwrap())
                .unwrap();
        }
        cluster.apply(&class("test")).unwrap();
        cluster.add_kubelet(&kubelet);
        // Classes for the second device of the pod with two claims, and for the device of mode `both`.
        for kind in ["other", "camera"] {
            cluster.apply(&class(kind)).unwrap();
        }
        cluster.apply(&of_another_driver()).unwrap();
    }
    let checker = Arc::new(Mutex::new(Checker::new(&server, Some(&kubelet))));
    check_records(&faults, &node, &checker);
    let checking = tokio::spawn(check(server.clone(), checker.clone()));
    let shutdown = CancellationToken::new();
    faults.count(true);
    let configuration = directory.path().join("node.yaml");
    let mut programs = vec![start_companion(&faults, &server, &node, configuration, &shutdown)];
    if !is_structured {
        programs.push(start_controller(&faults, &server, &shutdown));
    }
    let mut scenario = Scenario {
        server,
        kubelet,
        node,
        cluster,
        faults: faults.clone(),
        checker: checker.clone(),
        never: None,
    };
    if is_structured {
        scenario.run_structured().await;
    } else {
        scenario.run_classic().await;
    }
    shutdown.cancel();
    let mut violations = Vec::new();
    for program in programs {
        let ended = tokio::task::spawn_blocking(move || program.join()).await.unwrap();
        violations.extend(ended.unwrap_or_else(|_| vec!["I15: a program has panicked".to_owned()]));
    }
    checking.abort();
    violations.extend(scenario.never);
    scenario.cluster.stop().await;
    let mut checker = checker.lock().unwrap();
    checker.catch_up();
    checker.check_all_seen();
    violations.append(&mut checker.violations);
    RunResult {
        violations,
        counts: faults.counts(),
        hits: faults.hits(),
        trace: faults.trace(),
    }
}

/// Checks I14 after every disk step, and at every answer to Prepare.
fn check_records(faults: &Faults, node: &TestNode, checker: &Arc<Mutex<Checker>>) {
    let (cdi, checkpoint) = (node.cdi.clone(), state(node).join("checkpoint.json"));
    let checker = checker.clone();
    // A failed step leaves less than required until it is repeated.
    let may_fail = faults
        .planned()
        .iter()
        .any(|planned| planned.operation == Operation::Disk);
    faults.observe(move |_, operation, what| {
        let wrong = match operation {
            Operation::Disk => files_without_entry(&cdi, &checkpoint),
            // At the answer to another call, an Unprepare may be in progress, which removes the file first.
            Operation::Call if !may_fail && what.ends_with("/NodePrepareResources") => {
                entries_without_file(&cdi, &checkpoint)
            }
            _ => Vec::new(),
        };
        if !wrong.is_empty() {
            let text = format!("I14: after {what}, CDI files and checkpoint differ in {wrong:?}");
            checker.lock().unwrap().violate(text);
        }
    });
}

/// The state directory of the companion.
fn state(node: &TestNode) -> PathBuf {
    node.root.join("plugins").join(DRIVER)
}

/// Checks every change, and the containers between changes.
pub(crate) async fn check(server: ApiServer, checker: Arc<Mutex<Checker>>) {
    let mut changes = server.changes();
    loop {
        changes.borrow_and_update();
        checker.lock().unwrap().catch_up();
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn start_controller(
    faults: &Faults,
    server: &ApiServer,
    shutdown: &CancellationToken,
) -> std::thread::JoinHandle<Vec<String>> {
    let server = server.clone();
    let start = move |process: ProgramProcess| {
        let client = process.client(&server);
        let running = async move {
            let stop = process.stop().clone();
            let driver = HostDriver::start(client.clone(), DRIVER.to_owned(), stop.clone());
            let controller = Controller::builder(driver)
                .request_timeout(Duration::from_secs(1))
                .build(client)
                .map_err(|error| error.to_string())?;
            controller.run(stop).await.map_err(|error| error.to_string())
        };
        Box::pin(running) as _
    };
    program::run(faults.clone(), CONTROLLER, shutdown.clone(), Box::new(start))
}

fn start_companion(
    faults: &Faults,
    server: &ApiServer,
    node: &TestNode,
    configuration: PathBuf,
    shutdown: &CancellationToken,
) -> std::thread::JoinHandle<Vec<String>> {
    let (server, node) = (server.clone(), node.clone());
    let start = move |process: ProgramProcess| {
        let mut options = node.options(&configuration, process.client(&server));
        options.disk = process.disk();
        let running = async move {
            let running = drayman::node::run::run(options, process.stop().clone());
            running.await.map_err(|error| error.to_string())
        };
        Box::pin(running) as _
    };
    program::run(faults.clone(), COMPANION, shutdown.clone(), Box::new(start))
}

impl Scenario {
    async fn run_classic(&mut self) {
        let allocatable = |server: &ApiServer| {
            let nodes = server.objects("nodes");
            nodes
                .iter()
                .any(|node| text(node, "/status/allocatable/example.com~1camera") == "1")
        };
        self.until("the device plugin is registered", move |scenario| {
            allocatable(&scenario.server)
        })
        .await;
        self.until_running("first", claiming, 1).await;
        self.until_running("camera", plugging, 1).await;
        self.create(&claiming_two("second"));
        // I9: a held device is not offered; below: a free device is.
        self.until("the node is unsuitable for the second pod", Self::is_unsuitable)
            .await;
        self.delete("first").await;
        self.until_running("second", claiming_two, 2).await;
        self.until_gone("first").await;
        self.delete("second").await;
        self.until_gone("second").await;
        // The controller does not know the devices of containers until one of them is allocated to a claim.
        self.create(&viewing("viewer"));
        self.until(
            "the inventory says that a container has the camera",
            Self::is_conflicting,
        )
        .await;
        self.delete("camera").await;
        self.until_gone("camera").await;
        self.until_running("viewer", viewing, 1).await;
        self.delete("viewer").await;
        self.until_gone("viewer").await;
        self.delete("foreign").await;
        self.until_gone("foreign").await;
        self.until_nothing_is_left().await;
        // From here on, no faults are injected, and all devices are available again.
        self.faults.count(false);
        self.until_running("last", claiming_two, 2).await;
        self.until_running("last-camera", plugging, 1).await;
        for name in ["last", "last-camera"] {
            self.delete(name).await;
            self.until_gone(name).await;
        }
        self.until_nothing_is_left().await;
        self.until_quiet().await;
    }

    /// Two pods use the device one after the other. Then the slices are deleted, and edited by hand.
    async fn run_structured(&mut self) {
        self.until("the devices are published", Self::is_published).await;
        self.until_running("first", v1_claiming, 1).await;
        self.create(&v1_claiming_two("second"));
        self.delete("first").await;
        self.until_running("second", v1_claiming_two, 2).await;
        self.until_gone("first").await;
        self.delete("second").await;
        self.until_gone("second").await;
        self.until_nothing_is_left().await;
        self.delete_slices().await;
        self.until("deleted slices are back", Self::is_published).await;
        self.edit_slices().await;
        self.until("edited slices are as before", Self::is_published)
            .await;
        // From here on, no faults are injected, and all devices are available again.
        self.faults.count(false);
        self.until_running("last", v1_claiming_two, 2).await;
        self.delete("last").await;
        self.until_gone("last").await;
        self.until_nothing_is_left().await;
        self.until_quiet().await;
    }

    /// Whether the slices list each device once, in a complete pool.
    fn is_published(&self) -> bool {
        let slices = self.server.objects("resourceslices");
        let count = |slice: &Value| {
            slice
                .pointer("/spec/pool/resourceSliceCount")
                .and_then(Value::as_u64)
        };
        let mut devices: Vec<&str> = slices
            .iter()
            .flat_map(|slice| list(slice, "/spec/devices"))
            .map(|device| text(device, "/name"))
            .collect();
        devices.sort_unstable();
        devices == ["camera-0", "other-0", "test-0"]
            && slices
                .iter()
                .all(|slice| count(slice) == Some(slices.len() as u64))
    }

    async fn delete_slices(&self) {
        let slices = Api::<ResourceSlice>::all(self.server.client());
        for slice in self.server.objects("resourceslices") {
            let name = text(&slice, "/metadata/name");
            done_or_late(slices.delete(name, &DeleteParams::default()).await);
        }
    }

    /// Removes the devices from a slice and increments its generation.
    async fn edit_slices(&self) {
        let slices = Api::<ResourceSlice>::all(self.server.client());
        for slice in self.server.objects("resourceslices") {
            let mut edited: ResourceSlice = serde_json::from_value(slice).unwrap();
            edited.spec.devices = None;
            edited.spec.pool.generation += 3;
            let name = edited.metadata.name.clone().unwrap();
            done_or_late(slices.replace(&name, &PostParams::default(), &edited).await);
        }
    }

    async fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        if self.never.is_some() {
            return;
        }
        let held = until(TIMEOUT, || holds(self) || self.is_broken()).await;
        if !held {
            self.never = Some(format!("I10: timeout: {what}"));
        }
        self.faults.note(&format!("        {what}"));
    }

    /// Whether the run has failed already, so that further waits are pointless.
    fn is_broken(&self) -> bool {
        !self.checker.lock().unwrap().violations.is_empty()
    }

    /// Whether the context lists the node as unsuitable for the first claim of the second pod.
    fn is_unsuitable(&self) -> bool {
        let contexts = self.server.objects("podschedulingcontexts");
        let mut entries = contexts
            .iter()
            .filter(|context| text(context, "/metadata/name") == "second")
            .flat_map(|context| list(context, "/status/resourceClaims"));
        entries.any(|entry| entry["name"] == "device" && !list(entry, "/unsuitableNodes").is_empty())
    }

    fn is_conflicting(&self) -> bool {
        let inventories = self.server.objects("nodeinventories");
        let mut devices = inventories
            .iter()
            .flat_map(|inventory| list(inventory, "/spec/devices"));
        devices.any(|device| device["unhealthy"] == Conflicting::UNHEALTHY)
    }

    fn pod(&self, name: &str) -> Option<Value> {
        let pods = self.server.objects("pods");
        pods.into_iter().find(|pod| text(pod, "/metadata/name") == name)
    }

    fn create(&self, pod: &str) {
        if self.never.is_none() {
            self.cluster.apply(pod).unwrap();
        }
    }

    async fn delete(&self, name: &str) {
        let pods = Api::<Pod>::namespaced(self.server.client(), "default");
        let parameters = DeleteParams::default().grace_period(1);
        // The pod may be deleted already.
        let _ = pods.delete(name, &parameters).await;
    }

    /// Creates a pod, unless it exists, and waits until it runs. Kubelet rejects a pod permanently if the device plugin does not answer;
    /// then the pod is recreated, as its owner would do.
    async fn until_running(&mut self, name: &str, pod: fn(&str) -> String, devices: usize) {
        let end = Instant::now() + TIMEOUT;
        while self.never.is_none() && Instant::now() < end && !self.is_broken() {
            match self.pod(name) {
                None => self.create(&pod(name)),
                Some(found) if text(&found, "/status/phase") == "Running" => break,
                Some(found) if text(&found, "/status/phase") == "Failed" => self.delete(name).await,
                Some(_) => sleep(Duration::from_millis(10)).await,
            }
        }
        let running = |pod: Value| text(&pod, "/status/phase") == "Running";
        self.until(&format!("{name} runs"), |scenario| {
            scenario.pod(name).is_some_and(running)
        })
        .await;
        self.check_devices(name, devices);
    }

    /// Checks that a running container has the requested devices.
    fn check_devices(&mut self, name: &str, wanted: usize) {
        let configs = self.kubelet.container_configs();
        let devices = configs
            .get(&("default".to_owned(), name.to_owned()))
            .into_iter()
            .flat_map(BTreeMap::values)
            .map(|config| config.devices.len())
            .sum::<usize>();
        if devices != wanted && self.never.is_none() && !self.is_broken() {
            self.never = Some(format!("{name} runs with {devices} devices"));
        }
    }

    async fn until_gone(&mut self, name: &str) {
        self.until(&format!("{name} is gone"), |scenario| {
            scenario.pod(name).is_none()
        })
        .await;
    }

    /// I8, I11 and I14: no claim, no context, no CDI file of a claim, no temporary file, and an empty checkpoint.
    async fn until_nothing_is_left(&mut self) {
        self.until("nothing is left", |scenario| scenario.left().is_empty())
            .await;
        if let Some(never) = self.never.take() {
            let what = "nothing is left";
            let left = if never.ends_with(what) {
                self.left()
            } else {
                Vec::new()
            };
            self.never = Some(format!("{never}: {left:?}"));
        }
    }

    fn left(&self) -> Vec<String> {
        let mut left: Vec<String> = ["resourceclaims", "podschedulingcontexts"]
            .iter()
            .flat_map(|plural| self.server.objects(plural))
            .map(|object| text(&object, "/metadata/name").to_owned())
            .collect();
        let state = state(&self.node);
        for directory in [&self.node.cdi, &state] {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if ["-claim_", ".tmp", "damaged"]
                    .iter()
                    .any(|part| name.contains(part))
                {
                    left.push(name);
                }
            }
        }
        let checkpoint = std::fs::read(state.join("checkpoint.json")).unwrap_or_default();
        let checkpoint: Value = serde_json::from_slice(&checkpoint).unwrap_or_default();
        let entries = checkpoint.pointer("/data/entries").and_then(Value::as_object);
        left.extend(entries.into_iter().flat_map(|entries| entries.keys().cloned()));
        left
    }

    /// I12: an idle system sends no requests to the API server.
    async fn until_quiet(&mut self) {
        self.faults.count(true);
        let end = Instant::now() + TIMEOUT;
        let asked = |scenario: &Self| {
            let counts = scenario.faults.counts();
            let of = |program| counts.get(&(program, Operation::Request)).copied();
            (of(CONTROLLER), of(COMPANION))
        };
        let mut last = (asked(self), Instant::now());
        while last.1.elapsed() < QUIET {
            if Instant::now() > end {
                self.never
                    .get_or_insert_with(|| "I12: it is never idle".to_owned());
                return;
            }
            sleep(Duration::from_millis(50)).await;
            let now = asked(self);
            if now != last.0 {
                last = (now, Instant::now());
            }
        }
        self.faults.count(false);
        if self.server.objects("resourceslices").is_empty() {
            self.check_inventory();
        } else if !self.is_published() && self.never.is_none() {
            let slices = self.server.objects("resourceslices");
            self.never = Some(format!("I10: the slices differ from the devices: {slices:?}"));
        }
    }

    fn check_inventory(&mut self) {
        let inventory = self.server.objects("nodeinventories");
        let ready = |inventory: &Value| {
            let conditions = list(inventory, "/status/conditions").iter();
            conditions
                .filter(|condition| condition["type"] == "Ready")
                .any(|condition| condition["status"] == "True")
        };
        if !inventory.iter().any(ready) && self.never.is_none() {
            self.never = Some(format!("I10: the inventory is not ready: {inventory:?}"));
        }
    }
}
