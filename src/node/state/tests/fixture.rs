//! A companion with devices defined by the test.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures::future::BoxFuture;
use futures::{Stream, StreamExt as _};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::WatchStream;

use super::super::*;
use crate::api::crd::{Device, DeviceNodeKind, DeviceNumber, Mode};
use crate::api::handle::{DeviceHandle, HandleDevice, VERSION};
use crate::core::names::DriverName;
use crate::core::prepare::container_edits::{ContainerEdits, DeviceNode};
use crate::core::prepare::containers::ResourceSnapshot;
use crate::core::prepare::plan::{Allocation, ClaimToPrepare, ClaimToUnprepare};
use crate::core::prepare::runtime_containers::RuntimeContainers;
use crate::node::container_runtime::ContainerRuntime;
use crate::node::driver::{NodeDriverError, PreparedClaim};
use crate::node::service::{NodeService, ServiceError};

pub(in crate::node::state) const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
pub(in crate::node::state) const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

/// A device node that devices may share.
pub(in crate::node::state) const CONTROL: &str = "/dev/control";

/// A driver with devices defined by the test.
pub(in crate::node::state) struct FakeDriver {
    pub(in crate::node::state) devices: watch::Sender<Arc<Devices>>,
    pub(in crate::node::state) gone: Mutex<BTreeSet<String>>,
    /// The devices that the node itself uses.
    pub(in crate::node::state) used: Mutex<BTreeSet<String>>,
    /// The container path of a device, if it differs from its own path.
    pub(in crate::node::state) renamed: Mutex<BTreeMap<String, String>>,
    /// The permissions of a device on the shared node, if it uses it.
    pub(in crate::node::state) control: Mutex<BTreeMap<String, &'static str>>,
    pub(in crate::node::state) asked: AtomicUsize,
    /// Delays responses while the test holds the permit.
    pub(in crate::node::state) gate: tokio::sync::Semaphore,
    /// Whether Unprepare fails.
    pub(in crate::node::state) stuck: AtomicBool,
    /// The unprepared claims.
    pub(in crate::node::state) unprepared: Mutex<BTreeSet<String>>,
}

impl FakeDriver {
    pub(in crate::node::state) fn new(names: &[&str]) -> Arc<Self> {
        let said = Self {
            devices: watch::channel(Arc::default()).0,
            gone: Mutex::default(),
            used: Mutex::default(),
            renamed: Mutex::default(),
            control: Mutex::default(),
            asked: AtomicUsize::new(0),
            gate: tokio::sync::Semaphore::new(1),
            stuck: AtomicBool::new(false),
            unprepared: Mutex::default(),
        };
        said.say(names, "test", Mode::Claims);
        Arc::new(said)
    }

    pub(in crate::node::state) fn say(&self, names: &[&str], kind: &str, mode: Mode) {
        let device = |name: &&str| {
            let device = Device {
                name: (*name).into(),
                kind: kind.into(),
                mode,
                ..Device::default()
            };
            ((*name).to_owned(), device)
        };
        self.devices
            .send_replace(Arc::new(names.iter().map(device).collect()));
    }

    /// Same as `say`, with the minor number of each device's node.
    pub(in crate::node::state) fn say_numbered(&self, names: &[(&str, u32)], kind: &str, mode: Mode) {
        let device = |(name, minor): &(&str, u32)| {
            let number = DeviceNumber {
                kind: DeviceNodeKind::Character,
                major: 120,
                minor: *minor,
            };
            let device = Device {
                name: (*name).into(),
                kind: kind.into(),
                mode,
                device_numbers: [number].into(),
                ..Device::default()
            };
            ((*name).to_owned(), device)
        };
        self.devices
            .send_replace(Arc::new(names.iter().map(device).collect()));
    }
}

impl NodeDriver for FakeDriver {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        WatchStream::new(self.devices.subscribe()).map(|devices| devices.values().cloned().collect())
    }

    async fn check_unused(&self, device: &str) -> Result<(), NodeDriverError> {
        if self.used.lock().unwrap().contains(device) {
            return Err(NodeDriverError::InUse {
                device: device.into(),
                problem: "it is mounted".into(),
            });
        }
        Ok(())
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let _open = self.gate.acquire().await.unwrap();
        if self.gone.lock().unwrap().contains(device) {
            return Err(NodeDriverError::Gone {
                device: device.into(),
                problem: "unplugged".into(),
            });
        }
        let path = format!("/dev/{device}");
        let renamed = self.renamed.lock().unwrap().get(device).cloned();
        let node = DeviceNode {
            container_path: renamed.unwrap_or_else(|| path.clone()),
            host_path: path,
            permissions: "rw".into(),
        };
        let mut container_edits = ContainerEdits::of_device_node(device, node);
        if let Some(permissions) = self.control.lock().unwrap().get(device) {
            container_edits.device_nodes.push(DeviceNode {
                host_path: CONTROL.to_owned(),
                container_path: CONTROL.to_owned(),
                permissions: (*permissions).to_owned(),
            });
        }
        Ok(container_edits)
    }

    /// Like a driver that does not know about shared nodes: concatenates the edits of all devices.
    async fn prepare(&self, claim: &PreparedClaim) -> Result<ContainerEdits, NodeDriverError> {
        let mut all = ContainerEdits::default();
        for device in &claim.devices {
            let mut one = self.container_edits(device).await?;
            all.device_nodes.append(&mut one.device_nodes);
            all.extend(one);
        }
        Ok(all)
    }

    async fn unprepare(&self, claim: &PreparedClaim) -> Result<(), NodeDriverError> {
        if self.stuck.load(Ordering::SeqCst) {
            return Err(NodeDriverError::Failed {
                device: claim.devices.concat(),
                problem: "it does not answer".into(),
            });
        }
        self.unprepared.lock().unwrap().insert(claim.uid.clone());
        Ok(())
    }
}

/// One run of a companion on a node.
pub(in crate::node::state) struct Run {
    pub(in crate::node::state) handle: NodeService,
    pub(in crate::node::state) inventory: watch::Receiver<Arc<Devices>>,
    pub(in crate::node::state) cluster: watch::Sender<ClusterFacts>,
    pub(in crate::node::state) doubt: Arc<Notify>,
    /// The API server's view of the claims of this node.
    pub(in crate::node::state) publisher: watch::Sender<Arc<AllocatedClaims>>,
    /// The configured extended resources.
    pub(in crate::node::state) configured: watch::Sender<Arc<BTreeMap<String, ExtendedResource>>>,
    pub(in crate::node::state) task: JoinHandle<()>,
}

/// A kubelet whose view is defined by the test.
#[derive(Debug, Default)]
pub(in crate::node::state) struct Kubelet {
    pub(in crate::node::state) shown: Mutex<Option<ResourceSnapshot>>,
    /// The only extended resource under which it shows devices, if set.
    pub(in crate::node::state) under: Mutex<Option<String>>,
    pub(in crate::node::state) queries: AtomicUsize,
    /// Whether it does not answer.
    pub(in crate::node::state) hangs: AtomicBool,
}

impl Grants for Kubelet {
    fn query(
        &self,
        resources: BTreeSet<String>,
    ) -> BoxFuture<'_, Result<BTreeMap<String, ResourceSnapshot>, String>> {
        self.queries.fetch_add(1, Ordering::SeqCst);
        let shown = self.shown.lock().unwrap().clone();
        let under = self.under.lock().unwrap().clone();
        let of_resource = |shown: &ResourceSnapshot, resource: String| {
            let mut shown = shown.clone();
            if under.as_ref().is_some_and(|under| *under != resource) {
                shown.listed.clear();
                shown.recorded.clear();
            }
            (resource, shown)
        };
        let shown = shown.map(|shown| {
            let resources = resources.into_iter();
            resources.map(|resource| of_resource(&shown, resource)).collect()
        });
        Box::pin(async move {
            while self.hangs.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            shown.ok_or_else(|| "kubelet is down".to_owned())
        })
    }
}

pub(in crate::node::state) fn paths(root: &Path) -> Paths {
    Paths {
        driver: DriverName::parse("drayman.dev").unwrap(),
        state: root.join("state"),
        cdi: root.join("cdi"),
        kubelet_state: root.join("dra_manager_state"),
    }
}

pub(in crate::node::state) async fn live(root: &Path, boot_id: &str, driver: &Arc<FakeDriver>) -> Run {
    live_beside(root, boot_id, driver, None).await
}

/// With a kubelet, the devices of kind `camera` have mode `both`.
pub(in crate::node::state) async fn live_beside(
    root: &Path,
    boot_id: &str,
    driver: &Arc<FakeDriver>,
    kubelet: Option<Arc<Kubelet>>,
) -> Run {
    let (owner, run) = begin(root, boot_id, driver, kubelet).await;
    let task = tokio::spawn(owner.run());
    Run { task, ..run }
}

/// The same before it serves requests; the task is a dummy.
pub(in crate::node::state) async fn begin(
    root: &Path,
    boot_id: &str,
    driver: &Arc<FakeDriver>,
    kubelet: Option<Arc<Kubelet>>,
) -> (NodeState<FakeDriver>, Run) {
    begin_with(root, boot_id, driver, kubelet, None).await
}

/// A container runtime whose view is defined by the test, whether it fails, the number of its answers, and their delay.
#[derive(Debug, Default)]
pub(in crate::node::state) struct Runtime(
    pub(in crate::node::state) Mutex<RuntimeContainers>,
    pub(in crate::node::state) AtomicBool,
    pub(in crate::node::state) AtomicUsize,
    pub(in crate::node::state) Mutex<Duration>,
);

impl ContainerRuntime for Runtime {
    fn list_containers(&self) -> BoxFuture<'_, Result<Arc<RuntimeContainers>, String>> {
        let seen = self.0.lock().unwrap().clone();
        let fails = self.1.load(Ordering::SeqCst);
        self.2.fetch_add(1, Ordering::SeqCst);
        let delay = *self.3.lock().unwrap();
        Box::pin(async move {
            tokio::time::sleep(delay).await;
            if fails {
                return Err("no answer within 5 s".to_owned());
            }
            Ok(Arc::new(seen))
        })
    }
}

pub(in crate::node::state) async fn begin_with(
    root: &Path,
    boot_id: &str,
    driver: &Arc<FakeDriver>,
    kubelet: Option<Arc<Kubelet>>,
    runtime: Option<Arc<Runtime>>,
) -> (NodeState<FakeDriver>, Run) {
    let paths = paths(root);
    let opened = Store::open(&paths, boot_id).unwrap();
    let (cluster, receiver) = watch::channel(ClusterFacts::default());
    let doubt = Arc::new(Notify::new());
    let (publisher, allocated) = watch::channel(Arc::default());
    let camera = ExtendedResource {
        also_by_claims: kubelet.is_some(),
        cdi_devices: true,
        ..ExtendedResource::of_kind("camera")
    };
    let serial = ExtendedResource {
        pre_start_check: true,
        ..ExtendedResource::of_kind("serial")
    };
    let (configured, resources) = watch::channel(Arc::new(BTreeMap::from([
        ("example.com/camera".to_owned(), camera),
        ("example.com/serial".to_owned(), serial),
    ])));
    let (handle, backend) = NodeService::new(
        runtime
            .clone()
            .map(|runtime| runtime as Arc<dyn ContainerRuntime>),
        Arc::default(),
    );
    let (inventory_sender, inventory) = watch::channel(Arc::default());
    let owner = NodeState::start(NodeStateOptions {
        paths,
        orphan_grace: Duration::ZERO,
        node_name: "node-a".into(),
        resources,
        driver: driver.clone(),
        opened,
        cluster: receiver,
        node_in_doubt: doubt.clone(),
        runtime: runtime.map(|runtime| runtime as Arc<dyn ContainerRuntime>),
        grants: kubelet.map(|kubelet| kubelet as Arc<dyn Grants>),
        allocated,
        withdrawn: Some(WithdrawnDevices::default()),
        metrics: Arc::default(),
        backend,
        inventory: inventory_sender,
    })
    .await;
    let run = Run {
        handle,
        inventory,
        cluster,
        doubt,
        publisher,
        configured,
        task: tokio::spawn(async {}),
    };
    (owner, run)
}

pub(in crate::node::state) async fn live_and_know(
    root: &Path,
    boot_id: &str,
    driver: &Arc<FakeDriver>,
) -> Run {
    let run = live(root, boot_id, driver).await;
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    run
}

impl Run {
    pub(in crate::node::state) async fn end(self) {
        drop(self.handle);
        self.task.await.unwrap();
    }

    pub(in crate::node::state) async fn prepare(
        &self,
        uid: &str,
        devices: &[&str],
    ) -> Result<Vec<String>, ServiceError> {
        let containers = self.handle.list_containers().await;
        let mut answers = self.handle.prepare(vec![claim(uid, devices)], containers).await;
        assert_eq!(answers.len(), 1);
        answers.remove(0)
    }

    pub(in crate::node::state) async fn unprepare(&self, uid: &str) -> Result<(), ServiceError> {
        let claim = ClaimToUnprepare {
            uid: uid.into(),
            ..ClaimToUnprepare::default()
        };
        self.handle.unprepare(vec![claim]).await.remove(0)
    }
}

pub(in crate::node::state) fn claim(uid: &str, devices: &[&str]) -> ClaimToPrepare {
    let device = |name: &&str| HandleDevice {
        request: "device".into(),
        device: (*name).into(),
    };
    let handle = DeviceHandle {
        version: VERSION,
        claim_uid: uid.into(),
        node_name: "node-a".into(),
        node_uid: "n-1".into(),
        devices: devices.iter().map(device).collect(),
    };
    ClaimToPrepare {
        namespace: "default".into(),
        name: "claim".into(),
        uid: uid.into(),
        allocation: Allocation::Handle(handle.to_data().unwrap()),
    }
}

pub(in crate::node::state) fn files(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(root.join("cdi"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub(in crate::node::state) fn file(uid: &str) -> String {
    format!("drayman.dev-claim_{uid}.json")
}

pub(in crate::node::state) async fn soon<T>(wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), wait)
        .await
        .expect("in time")
}

/// Waits until the CDI files are these.
pub(in crate::node::state) async fn until_files(root: &Path, expected: &[String]) {
    soon(async {
        while files(root) != expected {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}
