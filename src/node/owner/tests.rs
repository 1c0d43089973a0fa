use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::JoinHandle;

use super::*;
use crate::api::crd::{Device, Mode};
use crate::api::handle::{DeviceHandle, HandleDevice, VERSION};
use crate::core::node::injection::DeviceNode;

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

/// Devices that are there because the test says so.
struct Said {
    devices: watch::Sender<Arc<Devices>>,
    gone: Mutex<BTreeSet<String>>,
    asked: AtomicUsize,
    /// Holds answers back while the test has the permit.
    gate: tokio::sync::Semaphore,
}

impl Said {
    fn new(names: &[&str]) -> Arc<Self> {
        let said = Self {
            devices: watch::channel(Arc::default()).0,
            gone: Mutex::default(),
            asked: AtomicUsize::new(0),
            gate: tokio::sync::Semaphore::new(1),
        };
        said.say(names, "test", Mode::Claims);
        Arc::new(said)
    }

    fn say(&self, names: &[&str], kind: &str, mode: Mode) {
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
struct Life {
    handle: Arc<OwnerHandle>,
    inventory: watch::Receiver<Arc<Devices>>,
    cluster: watch::Sender<ClusterFacts>,
    doubt: Arc<Notify>,
    task: JoinHandle<()>,
}

async fn live(root: &Path, boot_id: &str, driver: &Arc<Said>) -> Life {
    let driver_name = DriverName::parse("drayman.dev").unwrap();
    let opened = Store::open(&driver_name, &root.join("state"), &root.join("cdi"), boot_id).unwrap();
    let (cluster, receiver) = watch::channel(ClusterFacts::default());
    let doubt = Arc::new(Notify::new());
    let (owner, handle, inventory) = Owner::start(OwnerOptions {
        driver_name,
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

async fn live_and_know(root: &Path, boot_id: &str, driver: &Arc<Said>) -> Life {
    let life = live(root, boot_id, driver).await;
    life.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        serves_claims: Some(true),
    });
    life
}

impl Life {
    async fn end(self) {
        drop(self.handle);
        self.task.await.unwrap();
    }

    async fn prepare(&self, uid: &str, devices: &[&str]) -> Result<Vec<String>, CompanionError> {
        let mut answers = self.handle.prepare(vec![claim(uid, devices)]).await;
        assert_eq!(answers.len(), 1);
        answers.remove(0)
    }

    async fn unprepare(&self, uid: &str) -> Result<(), CompanionError> {
        let claim = ClaimToUnprepare {
            uid: uid.into(),
            ..ClaimToUnprepare::default()
        };
        self.handle.unprepare(vec![claim]).await.remove(0)
    }
}

fn claim(uid: &str, devices: &[&str]) -> ClaimToPrepare {
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

fn files(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(root.join("cdi"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn file(uid: &str) -> String {
    format!("drayman.dev-claim_{uid}.json")
}

#[tokio::test]
async fn a_claim_is_prepared_again_and_again_with_the_same_id_until_it_is_unprepared() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    for _ in 0..3 {
        assert_eq!(
            life.prepare(A, &["x"]).await.unwrap(),
            [format!("drayman.dev/claim={A}")]
        );
    }
    assert_eq!(files(root.path()), [file(A)]);
    life.unprepare(A).await.unwrap();
    life.unprepare(A).await.unwrap();
    assert_eq!(files(root.path()), Vec::<String>::new());
    life.end().await;
}

#[tokio::test]
async fn the_answers_come_in_the_order_of_the_requests_and_one_refusal_stops_nobody() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x", "y"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    let hostile = ClaimToPrepare {
        uid: "../../../etc/cron.d/x".into(),
        ..claim(A, &["x"])
    };
    let answers = life
        .handle
        .prepare(vec![
            claim(A, &["x"]),
            hostile,
            claim(B, &["x"]),
            claim(B, &["y"]),
        ])
        .await;
    assert!(answers[0].is_ok() && answers[3].is_ok(), "{answers:?}");
    let refused = answers[1].as_ref().unwrap_err();
    assert_eq!((refused.reason, refused.invalid_request), ("InvalidClaim", true));
    let held = answers[2].as_ref().unwrap_err();
    assert_eq!((held.reason, held.invalid_request), ("DeviceHeld", false));
    assert!(held.message.contains("default/claim"), "{held}");
    assert_eq!(files(root.path()), [file(A), file(B)]);
    life.end().await;
}

#[tokio::test]
async fn the_work_goes_on_when_the_caller_goes_away_and_unprepare_comes_after_it() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    let closed = driver.gate.acquire().await.unwrap();
    let asked = driver.asked.load(Ordering::SeqCst);
    let caller = {
        let handle = life.handle.clone();
        tokio::spawn(async move { handle.prepare(vec![claim(A, &["x"])]).await })
    };
    while driver.asked.load(Ordering::SeqCst) == asked {
        tokio::task::yield_now().await;
    }
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    // A repeat joins what is under way, and an Unprepare waits for both.
    let (repeat, undone) = tokio::join!(life.handle.prepare(vec![claim(A, &["x"])]), async {
        tokio::task::yield_now().await;
        let undone = life.unprepare(A);
        tokio::pin!(undone);
        assert!(futures::poll!(&mut undone).is_pending());
        drop(closed);
        undone.await
    });
    repeat[0].as_ref().unwrap();
    undone.unwrap();
    assert_eq!(files(root.path()), Vec::<String>::new());
    life.prepare(B, &["x"]).await.unwrap();
    life.end().await;
}

#[tokio::test]
async fn the_next_process_keeps_what_is_held_and_brings_files_back() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    life.prepare(A, &["x"]).await.unwrap();
    life.end().await;
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();

    // The API server is away: what it told is known from the checkpoint.
    let life = live(root.path(), "boot", &driver).await;
    assert_eq!(files(root.path()), [file(A)]);
    assert_eq!(life.prepare(B, &["x"]).await.unwrap_err().reason, "DeviceHeld");
    life.prepare(A, &["x"]).await.unwrap();
    life.unprepare(A).await.unwrap();
    life.prepare(B, &["x"]).await.unwrap();
    life.end().await;
}

#[tokio::test]
async fn after_a_boot_files_are_back_and_what_no_longer_runs_gives_way() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x", "y"]));
    let life = live_and_know(root.path(), "boot-1", &driver).await;
    life.prepare(A, &["x"]).await.unwrap();
    life.prepare(B, &["y"]).await.unwrap();
    life.end().await;
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();

    let life = live_and_know(root.path(), "boot-2", &driver).await;
    assert_eq!(
        files(root.path()),
        [file(A), file(B)],
        "also for a kubelet that does not ask again"
    );
    life.prepare(A, &["x"]).await.unwrap();
    let c = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0c";
    assert_eq!(life.prepare(c, &["x"]).await.unwrap_err().reason, "DeviceHeld");
    life.prepare(c, &["y"]).await.unwrap();
    assert_eq!(files(root.path()), [file(A), file(c)]);
    life.end().await;
}

#[tokio::test]
async fn nothing_is_prepared_before_the_nodes_uid_is_known() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x"]));
    let life = live(root.path(), "boot", &driver).await;
    assert_eq!(life.prepare(A, &["x"]).await.unwrap_err().reason, "NodeUnknown");
    life.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-0".into()),
        serves_claims: None,
    });
    while life.prepare(A, &["x"]).await.unwrap_err().reason != "WrongNode" {
        tokio::task::yield_now().await;
    }
    tokio::time::timeout(Duration::from_secs(5), life.doubt.notified())
        .await
        .expect("the uid is in doubt");
    life.end().await;
}

#[tokio::test]
async fn a_device_that_vanishes_takes_the_file_and_brings_it_back() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x", "y"]));
    let mut life = live_and_know(root.path(), "boot", &driver).await;
    life.prepare(A, &["x"]).await.unwrap();
    driver.gone.lock().unwrap().insert("x".into());
    driver.say(&[], "test", Mode::Claims);
    let shown = life
        .inventory
        .wait_for(|devices| devices.keys().eq(["x"]))
        .await
        .unwrap()
        .clone();
    assert!(shown["x"].unhealthy.as_deref().unwrap().contains("default/claim"));
    assert_eq!(
        files(root.path()),
        Vec::<String>::new(),
        "no container is started with what is now another's node"
    );
    assert_eq!(life.prepare(A, &["x"]).await.unwrap_err().reason, "DeviceGone");
    assert_eq!(
        life.prepare(B, &["x"]).await.unwrap_err().reason,
        "DeviceUnhealthy"
    );
    driver.gone.lock().unwrap().clear();
    driver.say(&["x"], "test", Mode::Claims);
    life.inventory
        .wait_for(|devices| devices.get("x").is_some_and(|x| x.unhealthy.is_none()))
        .await
        .unwrap();
    assert_eq!(files(root.path()), [file(A)]);
    life.end().await;
}

#[tokio::test]
async fn a_full_disk_is_told_and_leaves_nothing_half_done() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    life.prepare(A, &["x"]).await.unwrap();
    life.unprepare(A).await.unwrap();
    let obstacles = [
        root.path().join("state/checkpoint.json.tmp"),
        root.path().join(format!("cdi/{}.tmp", file(A))),
    ];
    for obstacle in obstacles {
        std::fs::create_dir(&obstacle).unwrap();
        let error = life.prepare(A, &["x"]).await.unwrap_err();
        assert_eq!((error.reason, error.invalid_request), ("StorageFailed", false));
        std::fs::remove_dir(&obstacle).unwrap();
        assert_eq!(files(root.path()), Vec::<String>::new());
        life.prepare(B, &["x"]).await.expect("the device is free again");
        life.unprepare(B).await.unwrap();
    }
    life.end().await;
}

#[tokio::test]
async fn an_extended_resource_is_listed_and_handed_out() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&[]));
    driver.say(&["x", "y"], "camera", Mode::ExtendedResource);
    let life = live(root.path(), "boot", &driver).await;
    assert!(life.handle.plugin_devices("example.com/other").is_none());
    let devices = life.handle.plugin_devices("example.com/camera").unwrap();
    assert_eq!(
        devices
            .borrow()
            .iter()
            .map(|device| device.id.as_str())
            .collect::<Vec<_>>(),
        ["x", "y"]
    );
    let injections = life
        .handle
        .allocate("example.com/camera", vec![vec!["y".into(), "x".into()]])
        .await
        .unwrap();
    assert_eq!(injections[0].device_nodes.len(), 2);
    assert_eq!(injections[0].environment["DRAYMAN_DEVICE_X"], "/dev/x");
    let error = life
        .handle
        .allocate("example.com/other", vec![vec!["x".into()]])
        .await
        .unwrap_err();
    assert_eq!((error.reason, error.invalid_request), ("InvalidResource", true));
    life.end().await;
}

#[tokio::test]
async fn a_list_of_devices_is_sent_again_only_when_it_has_changed() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    let mut devices = life.handle.plugin_devices("example.com/camera").unwrap();
    let mut inventory = life.inventory.clone();
    devices.mark_unchanged();
    inventory.mark_unchanged();
    life.prepare(A, &["x"]).await.unwrap();
    life.unprepare(A).await.unwrap();
    assert!(!devices.has_changed().unwrap() && !inventory.has_changed().unwrap());
    life.end().await;
}

#[tokio::test]
async fn who_asks_a_companion_that_has_ended_is_told_so() {
    let (root, driver) = (tempfile::tempdir().unwrap(), Said::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    life.task.abort();
    let _ = life.task.await;
    let answers = life
        .handle
        .prepare(vec![claim(A, &["x"]), claim(B, &["x"])])
        .await;
    assert_eq!(
        answers
            .iter()
            .map(|answer| answer.as_ref().unwrap_err().reason)
            .collect::<Vec<_>>(),
        ["Stopping"; 2]
    );
}
