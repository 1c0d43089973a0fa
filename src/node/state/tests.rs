use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(in crate::node::state) mod fixture;
mod moving;
mod publishing;
mod restoring;
mod roll_back;
mod runtime;
mod waiting;

use super::*;
use crate::api::crd::Mode;
use crate::api::resource::ResourceClaim;
use crate::core::prepare::containers::{PodContainer, ResourceSnapshot};
use crate::node::service::{Allocation, ClaimToPrepare, ClaimToUnprepare, PluginDevice, Preference};
use fixture::*;

#[tokio::test]
async fn prepare_is_idempotent_until_unprepare() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    for _ in 0..3 {
        assert_eq!(
            run.prepare(A, &["x"]).await.unwrap(),
            [format!("drayman.dev/claim={A}")]
        );
    }
    assert_eq!(files(root.path()), [file(A)]);
    run.unprepare(A).await.unwrap();
    run.unprepare(A).await.unwrap();
    assert_eq!(files(root.path()), Vec::<String>::new());
    run.end().await;
}

#[tokio::test]
async fn answers_keep_the_order_and_a_refusal_stops_no_other_claim() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    let hostile = ClaimToPrepare {
        uid: "../../../etc/cron.d/x".into(),
        ..claim(A, &["x"])
    };
    let answers = run
        .handle
        .prepare(
            vec![claim(A, &["x"]), hostile, claim(B, &["x"]), claim(B, &["y"])],
            None,
        )
        .await;
    assert!(answers[0].is_ok() && answers[3].is_ok(), "{answers:?}");
    let refused = answers[1].as_ref().unwrap_err();
    assert_eq!(
        (refused.reason(), refused.is_invalid_request()),
        ("InvalidClaim", true)
    );
    let held = answers[2].as_ref().unwrap_err();
    assert_eq!((held.reason(), held.is_invalid_request()), ("DeviceHeld", false));
    assert!(held.to_string().contains("default/claim"), "{held}");
    assert_eq!(files(root.path()), [file(A), file(B)]);
    run.end().await;
}

#[tokio::test]
async fn other_tasks_run_between_the_claims_of_a_call() {
    const CLAIMS: usize = 20;
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    let turns = Arc::new(AtomicUsize::new(0));
    let counted = turns.clone();
    tokio::spawn(async move {
        loop {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
        }
    });
    let uids = (0..CLAIMS).map(|number| format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f{number:04}"));
    let claims = uids.map(|uid| ClaimToUnprepare {
        namespace: "default".into(),
        name: "claim".into(),
        uid,
    });
    let before = turns.load(Ordering::SeqCst);
    let answers = run.handle.unprepare(claims.collect()).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    let between = turns.load(Ordering::SeqCst) - before;
    assert!(between >= CLAIMS, "{between} turns for {CLAIMS} claims");
    run.end().await;
}

#[tokio::test]
async fn work_continues_without_its_caller_and_unprepare_follows() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    let closed = driver.gate.acquire().await.unwrap();
    let asked = driver.asked.load(Ordering::SeqCst);
    let caller = {
        let handle = run.handle.clone();
        tokio::spawn(async move { handle.prepare(vec![claim(A, &["x"])], None).await })
    };
    while driver.asked.load(Ordering::SeqCst) == asked {
        tokio::task::yield_now().await;
    }
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    // A repeat joins the request in progress, and an Unprepare waits for both.
    let (repeat, unprepared) = tokio::join!(run.handle.prepare(vec![claim(A, &["x"])], None), async {
        tokio::task::yield_now().await;
        let unprepared = run.unprepare(A);
        tokio::pin!(unprepared);
        assert!(futures::poll!(&mut unprepared).is_pending());
        drop(closed);
        unprepared.await
    });
    repeat[0].as_ref().unwrap();
    unprepared.unwrap();
    assert_eq!(files(root.path()), Vec::<String>::new());
    run.prepare(B, &["x"]).await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn the_next_process_keeps_claims_and_restores_their_files() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.end().await;
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();

    // The API server is unavailable: its last facts come from the checkpoint.
    let run = live(root.path(), "boot", &driver).await;
    assert_eq!(files(root.path()), [file(A)]);
    assert_eq!(run.prepare(B, &["x"]).await.unwrap_err().reason(), "DeviceHeld");
    run.prepare(A, &["x"]).await.unwrap();
    run.unprepare(A).await.unwrap();
    run.prepare(B, &["x"]).await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn after_a_boot_files_are_restored_and_ended_claims_give_way() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    let run = live_and_know(root.path(), "boot-1", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.prepare(B, &["y"]).await.unwrap();
    run.end().await;
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();

    let run = live_and_know(root.path(), "boot-2", &driver).await;
    assert_eq!(
        files(root.path()),
        [file(A), file(B)],
        "also for a kubelet that does not ask again"
    );
    run.prepare(A, &["x"]).await.unwrap();
    let c = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0c";
    assert_eq!(run.prepare(c, &["x"]).await.unwrap_err().reason(), "DeviceHeld");
    run.prepare(c, &["y"]).await.unwrap();
    assert_eq!(files(root.path()), [file(A), file(c)]);
    run.end().await;
}

#[tokio::test]
async fn nothing_is_prepared_before_the_nodes_uid_is_known() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live(root.path(), "boot", &driver).await;
    assert_eq!(run.prepare(A, &["x"]).await.unwrap_err().reason(), "NodeUnknown");
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-0".into()),
        claims: None,
        minor: None,
    });
    while run.prepare(A, &["x"]).await.unwrap_err().reason() != "WrongNode" {
        tokio::task::yield_now().await;
    }
    tokio::time::timeout(Duration::from_secs(5), run.doubt.notified())
        .await
        .expect("the uid is in doubt");
    run.end().await;
}

#[tokio::test]
async fn a_device_that_vanishes_takes_the_file_and_brings_it_back() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    let mut run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    driver.gone.lock().unwrap().insert("x".into());
    driver.say(&[], "test", Mode::Claims);
    let shown = run
        .inventory
        .wait_for(|devices| devices.keys().eq(["x"]))
        .await
        .unwrap()
        .clone();
    assert!(shown["x"].unhealthy.as_deref().unwrap().contains("default/claim"));
    assert_eq!(
        files(root.path()),
        Vec::<String>::new(),
        "no container starts with a node of another device"
    );
    assert_eq!(run.prepare(A, &["x"]).await.unwrap_err().reason(), "DeviceGone");
    assert_eq!(run.prepare(B, &["x"]).await.unwrap_err().reason(), "DeviceHeld");
    driver.gone.lock().unwrap().clear();
    driver.say(&["x"], "test", Mode::Claims);
    run.inventory
        .wait_for(|devices| devices.get("x").is_some_and(|x| x.unhealthy.is_none()))
        .await
        .unwrap();
    assert_eq!(files(root.path()), [file(A)]);
    run.end().await;
}

#[tokio::test]
async fn a_full_disk_is_reported_and_leaves_no_partial_work() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.unprepare(A).await.unwrap();
    let obstacles = [
        root.path().join("state/checkpoint.json.tmp"),
        root.path().join(format!("cdi/{}.tmp", file(A))),
    ];
    for obstacle in obstacles {
        std::fs::create_dir(&obstacle).unwrap();
        let error = run.prepare(A, &["x"]).await.unwrap_err();
        assert_eq!(
            (error.reason(), error.is_invalid_request()),
            ("StorageFailed", false)
        );
        std::fs::remove_dir(&obstacle).unwrap();
        assert_eq!(files(root.path()), Vec::<String>::new());
        run.prepare(B, &["x"]).await.expect("the device is free again");
        run.unprepare(B).await.unwrap();
    }
    run.end().await;
}

#[tokio::test]
async fn an_extended_resource_is_listed_and_handed_out() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say(&["x", "y"], "serial", Mode::ExtendedResource);
    let run = live(root.path(), "boot", &driver).await;
    assert!(run.handle.plugin_devices("example.com/other").is_none());
    let devices = run.handle.plugin_devices("example.com/serial").unwrap();
    assert_eq!(
        devices
            .borrow()
            .iter()
            .map(|device| device.id.as_str())
            .collect::<Vec<_>>(),
        ["x", "y"]
    );
    let container_edits_of = run
        .handle
        .allocate("example.com/serial", vec![vec!["y".into(), "x".into()]])
        .await
        .unwrap();
    assert_eq!(container_edits_of[0].device_nodes.len(), 2);
    assert_eq!(container_edits_of[0].environment["DRAYMAN_DEVICE_X"], "/dev/x");
    let error = run
        .handle
        .allocate("example.com/other", vec![vec!["x".into()]])
        .await
        .unwrap_err();
    assert_eq!(
        (error.reason(), error.is_invalid_request()),
        ("InvalidResource", true)
    );
    run.end().await;
}

#[tokio::test]
async fn a_list_of_devices_is_sent_again_only_when_it_has_changed() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    let mut devices = run.handle.plugin_devices("example.com/camera").unwrap();
    let mut inventory = run.inventory.clone();
    devices.mark_unchanged();
    inventory.mark_unchanged();
    run.prepare(A, &["x"]).await.unwrap();
    run.unprepare(A).await.unwrap();
    // Answered after the lists that follow Unprepare.
    run.handle.holdings().await.unwrap();
    assert!(!devices.has_changed().unwrap() && !inventory.has_changed().unwrap());
    run.end().await;
}

#[tokio::test]
async fn an_answer_does_not_wait_for_the_inventory() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    let prepared = run.handle.prepared();
    run.prepare(A, &["x"]).await.unwrap();
    assert_eq!(*prepared.borrow(), 0);
    run.handle.holdings().await.unwrap();
    assert_eq!(*prepared.borrow(), 1);
    run.end().await;
}

#[tokio::test]
async fn requests_to_an_ended_companion_are_refused() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.task.abort();
    let _ = run.task.await;
    let answers = run
        .handle
        .prepare(vec![claim(A, &["x"]), claim(B, &["x"])], None)
        .await;
    assert_eq!(
        answers
            .iter()
            .map(|answer| answer.as_ref().unwrap_err().reason())
            .collect::<Vec<_>>(),
        ["Stopping"; 2]
    );
}

/// Two cameras with mode `both`, and kubelet's view of its containers.
async fn live_with_both(root: &Path) -> (Run, Arc<FakeDriver>, Arc<Kubelet>) {
    let (driver, kubelet) = (FakeDriver::new(&[]), Arc::new(Kubelet::default()));
    driver.say(&["x", "y"], "camera", Mode::Both);
    let run = live_beside(root, "boot", &driver, Some(kubelet.clone())).await;
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    (run, driver, kubelet)
}

/// Waits until the extended resource offers these devices, with a question mark for unhealthy ones.
async fn until_offered(run: &Run, expected: &str) {
    let mut devices = run.handle.plugin_devices("example.com/camera").unwrap();
    let shown = |devices: &Vec<PluginDevice>| {
        devices
            .iter()
            .map(|device| format!("{}{}", device.id, if device.healthy { "" } else { "?" }))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let result = tokio::time::timeout(
        Duration::from_secs(20),
        devices.wait_for(|devices| shown(devices) == expected),
    )
    .await;
    assert!(result.is_ok(), "not {expected:?}");
}

fn no_allocations() -> AllocatedClaims {
    AllocatedClaims::none()
}

fn allocated_claims(uid: &str, device: &str) -> AllocatedClaims {
    let Allocation::Handle(handle) = claim(uid, &[device]).allocation else {
        panic!("a classic claim");
    };
    let claim: ResourceClaim = serde_json::from_value(serde_json::json!({
        "metadata": { "namespace": "default", "name": "camera", "uid": uid },
        "spec": { "resourceClassName": "camera" },
        "status": { "driverName": "drayman.dev",
            "allocation": { "resourceHandles": [{ "driverName": "drayman.dev", "data": handle }] } },
    }))
    .unwrap();
    let mut allocated_claims = AllocatedClaims::none();
    allocated_claims.set(&claim, "drayman.dev", "node-a");
    allocated_claims
}

fn granted(device: &str) -> ResourceSnapshot {
    let container = PodContainer {
        namespace: "default".into(),
        pod: "plugged".into(),
        container: "main".into(),
    };
    ResourceSnapshot {
        pods: [("default".to_owned(), "plugged".to_owned())].into(),
        listed: [(device.to_owned(), container)].into(),
        ..ResourceSnapshot::default()
    }
}

#[tokio::test]
async fn both_mode_needs_kubelet_and_claims_before_it_serves() {
    let root = tempfile::tempdir().unwrap();
    let (run, _driver, kubelet) = live_with_both(root.path()).await;
    until_offered(&run, "x? y?").await;
    let refused = loop {
        let refused = run.prepare(A, &["x"]).await.unwrap_err();
        if refused.reason() != "NodeUnknown" {
            break refused;
        }
    };
    assert_eq!(refused.reason(), "PodResourcesUnavailable");
    assert!(refused.to_string().contains("kubelet is down"), "{refused}");
    *kubelet.shown.lock().unwrap() = Some(granted("y"));
    // Kubelet tracks the device that a container holds; the others wait for the claims.
    until_offered(&run, "x? y").await;
    run.publisher.send_replace(Arc::new(no_allocations()));
    until_offered(&run, "x y").await;
    let queries = kubelet.queries.load(Ordering::SeqCst);
    run.prepare(A, &["x"]).await.unwrap();
    assert_eq!(
        kubelet.queries.load(Ordering::SeqCst),
        queries + 1,
        "kubelet is asked at the decision"
    );
    until_offered(&run, "x? y").await;
    run.unprepare(A).await.unwrap();
    until_offered(&run, "x y").await;
    run.end().await;
}

#[tokio::test]
async fn an_allocated_device_is_withdrawn_before_prepare() {
    let root = tempfile::tempdir().unwrap();
    let (run, _driver, kubelet) = live_with_both(root.path()).await;
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    run.publisher.send_replace(Arc::new(allocated_claims(A, "x")));
    until_offered(&run, "x? y").await;
    let allocate = async |device: &str| {
        let containers = vec![vec![device.to_owned()]];
        run.handle.allocate("example.com/camera", containers).await
    };
    let refused = allocate("x").await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    assert!(refused.to_string().contains("default/camera"), "{refused}");
    allocate("y").await.unwrap();
    run.publisher.send_replace(Arc::new(no_allocations()));
    until_offered(&run, "x y").await;
    run.end().await;
}

#[tokio::test]
async fn a_device_of_a_container_is_refused_to_claims_until_it_ends() {
    let root = tempfile::tempdir().unwrap();
    let (mut run, _driver, kubelet) = live_with_both(root.path()).await;
    *kubelet.shown.lock().unwrap() = Some(granted("x"));
    run.publisher.send_replace(Arc::new(no_allocations()));
    until_offered(&run, "x y").await;
    assert!(
        run.inventory
            .borrow()
            .values()
            .all(|device| device.unhealthy.is_none()),
        "a pod without a conflict changes nothing"
    );
    run.publisher.send_replace(Arc::new(allocated_claims(A, "x")));
    let conflicting =
        |devices: &Arc<Devices>| devices["x"].unhealthy.is_some() && devices["y"].unhealthy.is_none();
    soon(run.inventory.wait_for(conflicting)).await.unwrap();
    let refused = run.prepare(A, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    assert!(refused.to_string().contains("default/plugged"), "{refused}");
    // The container keeps its device, and no other container gets it afterwards.
    until_offered(&run, "x? y").await;
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    soon(run.inventory.wait_for(|devices| devices["x"].unhealthy.is_none()))
        .await
        .unwrap();
    run.prepare(A, &["x"]).await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn a_named_device_has_a_file_from_the_start_until_it_is_gone() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say(&["x", "y"], "camera", Mode::ExtendedResource);
    let run = live(root.path(), "boot", &driver).await;
    let of = |device: &str| format!("drayman.dev-device_{device}.json");
    assert_eq!(files(root.path()), [of("x"), of("y")]);
    let containers = vec![vec!["x".to_owned()]];
    let container_edits_of = run
        .handle
        .allocate("example.com/camera", containers)
        .await
        .unwrap();
    assert_eq!(container_edits_of[0].cdi_devices, ["drayman.dev/device=x"]);
    assert!(container_edits_of[0].device_nodes.is_empty() && container_edits_of[0].environment.is_empty());
    driver.say(&["y"], "camera", Mode::ExtendedResource);
    soon(async {
        while files(root.path()) != [of("y")] {
            tokio::task::yield_now().await;
        }
    })
    .await;
    run.end().await;
}

#[tokio::test]
async fn a_named_device_keeps_its_file_after_a_configuration_change() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say(&["x", "y"], "camera", Mode::ExtendedResource);
    let run = live(root.path(), "boot", &driver).await;
    let of = |device: &str| format!("drayman.dev-device_{device}.json");
    assert_eq!(files(root.path()), [of("x"), of("y")]);
    let by_node = ExtendedResource::of_kind("camera");
    let resources = BTreeMap::from([("example.com/camera".to_owned(), by_node)]);
    run.configured.send_replace(Arc::new(resources));
    driver.say(&["y"], "camera", Mode::Claims);
    // The file of the device that is gone goes; that of the other stays, because a container may be started again with its name.
    until_files(root.path(), &[of("y")]).await;
    driver.say(&["z"], "camera", Mode::Claims);
    until_files(root.path(), &[]).await;
    run.end().await;
}

#[tokio::test]
async fn no_container_starts_with_a_missing_or_unhealthy_device() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say(&["x"], "serial", Mode::ExtendedResource);
    let run = live(root.path(), "boot", &driver).await;
    assert!(run.handle.checks_start("example.com/serial"));
    assert!(!run.handle.checks_start("example.com/camera"));
    let check = async |device: &str| {
        let devices = vec![device.to_owned()];
        run.handle
            .check_start("example.com/serial", devices)
            .await
            .map_err(|error| error.reason())
    };
    assert_eq!(check("x").await, Ok(()));
    assert_eq!(check("nowhere").await, Err("DeviceGone"));
    driver.gone.lock().unwrap().insert("x".into());
    assert_eq!(check("x").await, Err("DeviceGone"));
    run.end().await;
}

#[tokio::test]
async fn devices_shared_with_claims_are_preferred_from_the_end() {
    let root = tempfile::tempdir().unwrap();
    let (run, _driver, _kubelet) = live_with_both(root.path()).await;
    let wish = Preference {
        available: vec!["x".into(), "y".into()],
        must_include: vec![],
        size: 1,
    };
    assert_eq!(
        run.handle
            .choose("example.com/camera", std::slice::from_ref(&wish)),
        [["y"]]
    );
    assert_eq!(run.handle.choose("example.com/serial", &[wish]), [["x"]]);
    run.end().await;
}

#[tokio::test]
async fn a_device_in_use_by_the_node_is_not_allocated() {
    let root = tempfile::tempdir().unwrap();
    let driver = FakeDriver::new(&[]);
    driver.say(&["x", "y"], "test", Mode::Claims);
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    driver
        .used
        .lock()
        .unwrap()
        .extend(["x".to_owned(), "y".to_owned()]);
    assert_eq!(run.prepare(B, &["y"]).await.unwrap_err().reason(), "DeviceInUse");
    run.prepare(A, &["x"]).await.unwrap();
    assert_eq!(files(root.path()), [file(A)], "a holder keeps its device");
    driver.say(&["z"], "serial", Mode::ExtendedResource);
    driver.used.lock().unwrap().insert("z".to_owned());
    let mut inventory = run.inventory.clone();
    soon(inventory.wait_for(|all| all.contains_key("z")))
        .await
        .unwrap();
    let refused = run
        .handle
        .allocate("example.com/serial", vec![vec!["z".to_owned()]])
        .await;
    assert_eq!(refused.map(drop).unwrap_err().reason(), "DeviceInUse");
    run.end().await;
}
