//! A companion whose devices are there because the test says so.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::JoinHandle;

use super::*;
use crate::api::crd::{Device, Mode};
use crate::api::handle::{DeviceHandle, HandleDevice, VERSION};
use crate::core::node::injection::DeviceNode;
use crate::node::companion::Companion;
use crate::node::driver::NodeDriverError;

pub(super) const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
pub(super) const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

/// Devices that are there because the test says so.
pub(super) struct Said {
    pub(super) devices: watch::Sender<Arc<Devices>>,
    pub(super) gone: Mutex<BTreeSet<String>>,
    pub(super) asked: AtomicUsize,
    /// Holds answers back while the test has the permit.
    pub(super) gate: tokio::sync::Semaphore,
}

impl Said {
    pub(super) fn new(names: &[&str]) -> Arc<Self> {
        let said = Self {
            devices: watch::channel(Arc::default()).0,
            gone: Mutex::default(),
            asked: AtomicUsize::new(0),
            gate: tokio::sync::Semaphore::new(1),
        };
        said.say(names, "test", Mode::Claims);
        Arc::new(said)
    }

    pub(super) fn say(&self, names: &[&str], kind: &str, mode: Mode) {
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
}

impl NodeDriver for Said {
    fn devices(&self) -> watch::Receiver<Arc<Devices>> {
        self.devices.subscribe()
    }

    async fn injection(&self, device: &str) -> Result<Injection, NodeDriverError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let _open = self.gate.acquire().await.unwrap();
        if self.gone.lock().unwrap().contains(device) {
            return Err(NodeDriverError::Gone {
                device: device.into(),
                problem: "unplugged".into(),
            });
        }
        let path = format!("/dev/{device}");
        let node = DeviceNode {
            host_path: path.clone(),
            container_path: path,
            permissions: "rw".into(),
        };
        Ok(Injection::of_device_node(device, node))
    }
}

/// One life of a companion on a node.
pub(super) struct Life {
    pub(super) handle: Arc<OwnerHandle>,
    pub(super) inventory: watch::Receiver<Arc<Devices>>,
    pub(super) cluster: watch::Sender<ClusterFacts>,
    pub(super) doubt: Arc<Notify>,
    pub(super) task: JoinHandle<()>,
}

pub(super) async fn live(root: &Path, boot_id: &str, driver: &Arc<Said>) -> Life {
    let places = Places {
        driver: DriverName::parse("drayman.dev").unwrap(),
        state: root.join("state"),
        cdi: root.join("cdi"),
        kubelet_state: root.join("dra_manager_state"),
    };
    let opened = Store::open(&places, boot_id).unwrap();
    let (cluster, receiver) = watch::channel(ClusterFacts::default());
    let doubt = Arc::new(Notify::new());
    let (owner, handle, inventory) = Owner::start(OwnerOptions {
        places,
        orphan_grace: Duration::ZERO,
        node_name: "node-a".into(),
        resources: BTreeMap::from([("example.com/camera".to_owned(), "camera".to_owned())]),
        driver: driver.clone(),
        opened,
        cluster: receiver,
        node_in_doubt: doubt.clone(),
    })
    .await;
    let task = tokio::spawn(owner.run());
    Life {
        handle: Arc::new(handle),
        inventory,
        cluster,
        doubt,
        task,
    }
}

pub(super) async fn live_and_know(root: &Path, boot_id: &str, driver: &Arc<Said>) -> Life {
    let life = live(root, boot_id, driver).await;
    life.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        serves_claims: Some(true),
    });
    life
}

impl Life {
    pub(super) async fn end(self) {
        drop(self.handle);
        self.task.await.unwrap();
    }

    pub(super) async fn prepare(&self, uid: &str, devices: &[&str]) -> Result<Vec<String>, CompanionError> {
        let mut answers = self.handle.prepare(vec![claim(uid, devices)]).await;
        assert_eq!(answers.len(), 1);
        answers.remove(0)
    }

    pub(super) async fn unprepare(&self, uid: &str) -> Result<(), CompanionError> {
        let claim = ClaimToUnprepare {
            uid: uid.into(),
            ..ClaimToUnprepare::default()
        };
        self.handle.unprepare(vec![claim]).await.remove(0)
    }
}

pub(super) fn claim(uid: &str, devices: &[&str]) -> ClaimToPrepare {
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
        resource_handle: handle.to_data().unwrap(),
    }
}

pub(super) fn files(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(root.join("cdi"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub(super) fn file(uid: &str) -> String {
    format!("drayman.dev-claim_{uid}.json")
}
