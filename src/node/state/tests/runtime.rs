use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::fixture::*;
use super::*;
use crate::core::prepare::orphans::ApiView;
use crate::core::prepare::runtime_containers::{
    ContainerDevices, RuntimeContainer, RuntimeContainerState, RuntimeContainers,
};
use crate::node::service::NodeService;

fn container(minor: u32) -> RuntimeContainer {
    let number = format!("c120:{minor}").parse().unwrap();
    RuntimeContainer {
        id: format!("c{minor}"),
        container: PodContainer {
            namespace: "default".into(),
            pod: "forced".into(),
            container: "main".into(),
        },
        state: RuntimeContainerState::Running,
        age: Duration::from_secs(60),
        given: Ok(ContainerDevices {
            numbers: [number].into(),
            ..ContainerDevices::default()
        }),
    }
}

/// Checks for orphans until all are decided, with an API server that has none of the claims. `None` if the state task has ended.
async fn check_orphans(service: &NodeService, begin: Instant) -> Option<()> {
    loop {
        let questions = service.find_orphans(begin.elapsed()).await?;
        let gone = questions
            .into_iter()
            .map(|question| (question.uid, ApiView::Gone));
        let report = service.decide_orphans(begin.elapsed(), gone.collect()).await?;
        match report.again {
            Some(again) => tokio::time::sleep(again).await,
            None => return Some(()),
        }
    }
}

/// A companion that is queried for claims the API server no longer has.
async fn run(
    root: &Path,
    driver: &Arc<FakeDriver>,
    runtime: &Arc<Runtime>,
) -> (Run, tokio::task::JoinHandle<()>) {
    let (owner, run) = begin_with(root, "boot", driver, None, Some(runtime.clone())).await;
    let run = Run {
        task: tokio::spawn(owner.run()),
        ..run
    };
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    let service = run.handle.clone();
    let orphan_check = tokio::spawn(async move {
        let begin = Instant::now();
        loop {
            service.check_due().await;
            if check_orphans(&service, begin).await.is_none() {
                return;
            }
        }
    });
    (run, orphan_check)
}

#[tokio::test(start_paused = true)]
async fn a_deleted_claim_gives_way_when_its_container_has_ended() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    run.prepare(A, &["x"]).await.unwrap();
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
    let refused = run.prepare(B, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    assert!(refused.to_string().contains("pod default/forced"), "{refused}");
    assert_eq!(
        files(root.path()),
        Vec::<String>::new(),
        "nothing starts with it any more"
    );
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(7)]);
    // A check that began before the container ended may decide the first attempt; kubelet retries.
    if run.prepare(B, &["x"]).await.is_err() {
        run.prepare(B, &["x"]).await.unwrap();
    }
    assert_eq!(files(root.path()), [file(B)]);
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test]
async fn a_container_waits_until_another_no_longer_has_its_device() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "camera", Mode::ExtendedResource);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    let resource = "example.com/camera";
    assert!(run.handle.checks_start(resource), "each start is asked for");
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
    run.handle
        .allocate(resource, vec![vec!["x".to_owned()]])
        .await
        .unwrap();
    let refused = run
        .handle
        .check_start(resource, vec!["x".to_owned()])
        .await
        .unwrap_err();
    assert_eq!(
        (refused.reason(), refused.is_invalid_request()),
        ("DeviceHeld", false)
    );
    assert!(refused.to_string().contains("pod default/forced"), "{refused}");
    *runtime.0.lock().unwrap() = RuntimeContainers::default();
    run.handle
        .check_start(resource, vec!["x".to_owned()])
        .await
        .unwrap();
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test]
async fn a_claim_waits_until_no_container_has_its_device() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
    let refused = run.prepare(A, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    assert!(refused.to_string().contains("pod default/forced"), "{refused}");
    assert_eq!(files(root.path()), Vec::<String>::new());
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(7)]);
    run.prepare(A, &["x"]).await.unwrap();
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_list_of_containers_counts_until_a_claim_is_released() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    let show = |containers| *runtime.0.lock().unwrap() = RuntimeContainers(containers);
    run.prepare(A, &["x"]).await.unwrap();
    let early = run.handle.list_containers().await;
    show(vec![container(6)]);
    run.unprepare(A).await.unwrap();
    let with = async |containers| {
        let mut answers = run.handle.prepare(vec![claim(B, &["x"])], containers).await;
        answers.remove(0).map_err(|error| error.to_string())
    };
    let refused = with(early).await.unwrap_err();
    assert!(
        refused.contains("pod default/forced"),
        "the list is outdated: {refused}"
    );
    let recent = run.handle.list_containers().await;
    show(Vec::new());
    let begin = Instant::now();
    with(recent).await.unwrap();
    assert_eq!(
        begin.elapsed(),
        Duration::from_secs(1),
        "the list counts; a second attempt makes its own"
    );
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_outdated_list_is_replaced_once() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6), ("y", 7)], "test", Mode::Claims);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    let outdated = run.handle.list_containers().await;
    tokio::time::advance(Duration::from_secs(2)).await;
    let queries = runtime.2.load(Ordering::SeqCst);
    *runtime.3.lock().unwrap() = Duration::from_secs(3);
    let claims = vec![claim(A, &["x"]), claim(B, &["y"])];
    for answer in run.handle.prepare(claims, outdated).await {
        answer.unwrap();
    }
    assert_eq!(runtime.2.load(Ordering::SeqCst), queries + 1);
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_does_not_get_a_number_that_a_container_has() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    run.prepare(A, &["x"]).await.unwrap();
    let mut own = container(7);
    own.given.as_mut().unwrap().cdi_devices = [format!("drayman.dev/claim={A}")].into();
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![own.clone(), container(7)]);
    driver.say_numbered(&[("x", 7)], "test", Mode::Claims);
    until_files(root.path(), &[]).await;
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![own]);
    until_files(root.path(), &[file(A)]).await;
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test]
async fn a_claim_that_waited_for_kubelet_has_its_callers_list() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "camera", Mode::Both);
    let (kubelet, runtime) = (Arc::new(Kubelet::default()), Arc::new(Runtime::default()));
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    let started = begin_with(root.path(), "boot", &driver, Some(kubelet), Some(runtime.clone()));
    let (mut owner, run) = started.await;
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    owner.update_cluster().await;
    runtime.1.store(true, Ordering::SeqCst);
    let unanswered = run.handle.list_containers().await;
    // Another query would find a container with the device.
    runtime.1.store(false, Ordering::SeqCst);
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
    let (sender, mut answer) = tokio::sync::oneshot::channel();
    let request = NodeRequest::Prepare(vec![claim(A, &["x"])], unanswered, sender);
    owner.serve(request).await;
    assert!(answer.try_recv().is_err(), "it waits for kubelet");
    let finished = owner.query.finished().await;
    owner.finish_query(finished).await;
    answer.await.unwrap().remove(0).unwrap();
}

#[tokio::test]
async fn a_claim_of_an_earlier_boot_keeps_nothing_from_containers() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let first = live_and_know(root.path(), "boot", &driver).await;
    first.prepare(A, &["x"]).await.unwrap();
    first.end().await;
    driver.say_numbered(&[("x", 6)], "camera", Mode::ExtendedResource);
    let next = live_and_know(root.path(), "the next boot", &driver).await;
    next.handle
        .allocate("example.com/camera", vec![vec!["x".to_owned()]])
        .await
        .unwrap();
    let left = files(root.path());
    assert!(!left.contains(&file(A)), "nothing starts with it any more");
    assert!(next.handle.clone().holdings().await.unwrap().is_empty());
    next.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_orphan_keeps_a_device_of_a_privileged_container() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    run.prepare(A, &["x"]).await.unwrap();
    let empty = r#"{"version":"v1","checksum":0}"#;
    std::fs::write(root.path().join("dra_manager_state"), empty).unwrap();
    // Its device numbers are those of the whole host, so they are not used.
    let privileged = RuntimeContainer {
        given: Ok(ContainerDevices {
            cdi_devices: [format!("drayman.dev/claim={A}")].into(),
            ..ContainerDevices::default()
        }),
        ..container(6)
    };
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![privileged]);
    check_orphans(&run.handle, Instant::now()).await.unwrap();
    let refused = run.prepare(B, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    *runtime.0.lock().unwrap() = RuntimeContainers::default();
    check_orphans(&run.handle, Instant::now()).await.unwrap();
    run.prepare(B, &["x"]).await.unwrap();
    assert_eq!(files(root.path()), [file(B)]);
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_container_of_an_unprepared_claim_keeps_its_device() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.unprepare(A).await.unwrap();
    let privileged = RuntimeContainer {
        given: Ok(ContainerDevices {
            cdi_devices: [format!("drayman.dev/claim={A}-x")].into(),
            ..ContainerDevices::default()
        }),
        ..container(6)
    };
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![privileged]);
    let refused = run.prepare(B, &["x"]).await.unwrap_err();
    assert!(refused.to_string().contains("pod default/forced"), "{refused}");
    run.prepare(A, &["x"]).await.unwrap();
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

/// A container whose status the runtime cannot send.
fn unknown_container() -> RuntimeContainer {
    RuntimeContainer {
        given: Err("ResourceExhausted: message larger than max".into()),
        ..container(6)
    }
}

#[tokio::test(start_paused = true)]
async fn a_container_of_unknown_devices_blocks_those_it_may_have() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    let runtime = Arc::new(Runtime::default());
    let (first, orphan_check) = run(root.path(), &driver, &runtime).await;
    first.prepare(A, &["x"]).await.unwrap();
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![unknown_container()]);
    first.prepare(B, &["y"]).await.unwrap();
    // The pod is force-deleted: kubelet calls Unprepare while the container runs.
    first.unprepare(A).await.unwrap();
    first.unprepare(B).await.unwrap();
    let refused = first.prepare(B, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "ContainerRuntimeUnavailable");
    assert!(
        refused
            .to_string()
            .contains("the status of container main of pod default/forced"),
        "{refused}"
    );
    // It cannot have a device that was prepared after it was listed.
    first.prepare(A, &["y"]).await.unwrap();
    first.unprepare(A).await.unwrap();
    orphan_check.abort();
    let _ = orphan_check.await;
    first.end().await;

    let (next, orphan_check) = run(root.path(), &driver, &runtime).await;
    let refused = next.prepare(B, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "ContainerRuntimeUnavailable");
    *runtime.0.lock().unwrap() = RuntimeContainers::default();
    next.prepare(B, &["x"]).await.unwrap();
    let stored = std::fs::read_to_string(root.path().join("state/checkpoint.json")).unwrap();
    assert!(
        stored.contains(r#""unknownContainers":{"bootId":"boot"}"#),
        "{stored}"
    );
    orphan_check.abort();
    let _ = orphan_check.await;
    next.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_orphan_may_be_used_by_a_container_of_unknown_devices() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let runtime = Arc::new(Runtime::default());
    let begin = Instant::now();
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    run.prepare(A, &["x"]).await.unwrap();
    let empty = r#"{"version":"v1","checksum":0}"#;
    std::fs::write(root.path().join("dra_manager_state"), empty).unwrap();
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![unknown_container()]);
    let decide = async || {
        let now = begin.elapsed();
        let questions = run.handle.find_orphans(now).await.unwrap();
        let gone = questions
            .into_iter()
            .map(|question| (question.uid, ApiView::Gone));
        run.handle.decide_orphans(now, gone.collect()).await.unwrap()
    };
    let first = decide().await;
    tokio::time::sleep(first.again.unwrap()).await;
    let quarantine = decide().await.quarantine;
    let why = &quarantine.values().next().unwrap().why;
    assert!(why.contains("cannot send the status of a container"), "{why}");
    let refused = run.prepare(B, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    *runtime.0.lock().unwrap() = RuntimeContainers::default();
    check_orphans(&run.handle, Instant::now()).await.unwrap();
    run.prepare(B, &["x"]).await.unwrap();
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_stops_answering_stops_new_claims_only() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let runtime = Arc::new(Runtime::default());
    let fail = |fails| runtime.1.store(fails, Ordering::SeqCst);
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    fail(true);
    run.prepare(A, &["x"]).await.unwrap();
    run.unprepare(A).await.unwrap();
    fail(false);
    run.prepare(A, &["x"]).await.unwrap();
    fail(true);
    run.prepare(A, &["x"]).await.unwrap();
    run.unprepare(A).await.unwrap();
    let refused = run.prepare(B, &["x"]).await.unwrap_err();
    assert_eq!(
        (refused.reason(), refused.is_invalid_request()),
        ("ContainerRuntimeUnavailable", false)
    );
    assert!(refused.to_string().contains("no answer within 5 s"), "{refused}");
    let start = run.handle.check_start("example.com/camera", vec!["x".to_owned()]);
    start.await.unwrap();
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_claim_is_quarantined_while_the_runtime_is_silent() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    run.prepare(A, &["x"]).await.unwrap();
    let empty = r#"{"version":"v1","checksum":0}"#;
    std::fs::write(root.path().join("dra_manager_state"), empty).unwrap();
    runtime.1.store(true, Ordering::SeqCst);
    let check = check_orphans(&run.handle, Instant::now());
    let repeated = tokio::time::timeout(Duration::from_secs(100), check).await;
    assert!(repeated.is_err(), "it is repeated until the runtime answers");
    let holdings = run.handle.holdings().await.unwrap();
    assert!(
        holdings[0]
            .quarantine
            .contains("the container runtime does not answer"),
        "{holdings:?}"
    );
    runtime.1.store(false, Ordering::SeqCst);
    check_orphans(&run.handle, Instant::now()).await.unwrap();
    assert!(run.handle.holdings().await.unwrap().is_empty());
    orphan_check.abort();
    let _ = orphan_check.await;
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_in_order_again_gets_its_file_back() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let runtime = Arc::new(Runtime::default());
    let (run, orphan_check) = run(root.path(), &driver, &runtime).await;
    orphan_check.abort();
    let _ = orphan_check.await;
    *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
    let begin = Instant::now();
    let check = async |answer: ApiView| {
        let now = begin.elapsed();
        run.handle.find_orphans(now).await.unwrap();
        let answers = BTreeMap::from([(ClaimUid::parse(A).unwrap(), answer)]);
        let report = run.handle.decide_orphans(now, answers).await.unwrap();
        report.again
    };
    let missing = Vec::<String>::new();
    // Kubelet asks for the claim again after the first check, so that its file must be removed again.
    for _ in 0..2 {
        *runtime.0.lock().unwrap() = RuntimeContainers::default();
        run.prepare(A, &["x"]).await.unwrap();
        assert_eq!(files(root.path()), [file(A)]);
        *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
        run.prepare(B, &["x"]).await.unwrap_err();
        let again = check(ApiView::Gone).await;
        assert!(again.is_some(), "a container may have been created just before");
        assert_eq!(files(root.path()), missing);
    }
    check(ApiView::Unknown("away".into())).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(files(root.path()), missing);
    let present = ApiView::Present {
        devices: Some(vec![HeldDevice::named("x")]),
    };
    check(present).await;
    until_files(root.path(), &[file(A)]).await;
    run.end().await;
}

#[tokio::test]
async fn an_unprepared_claim_is_no_longer_in_quarantine() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let (mut owner, run) = begin(root.path(), "boot", &driver, None).await;
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    owner.update_cluster().await;
    owner.prepare(&claim(A, &["x"]), None, None).await.unwrap();
    owner.find_orphans(Duration::ZERO).await;
    // Kubelet's list cannot be read.
    let answers = BTreeMap::from([(ClaimUid::parse(A).unwrap(), ApiView::Gone)]);
    owner.decide_orphans(Duration::ZERO, &answers, None).await;
    assert_eq!(owner.orphans.quarantine().len(), 1);
    let claim = ClaimToUnprepare {
        uid: A.into(),
        ..ClaimToUnprepare::default()
    };
    owner.unprepare_all(vec![claim]).await;
    assert!(owner.orphans.quarantine().is_empty());
    // Even if other claims stay, a check publishes that.
    soon(run.handle.check_due()).await;
}

#[tokio::test]
async fn a_device_is_withheld_before_its_quarantine_is_published() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.handle.find_orphans(Duration::ZERO).await.unwrap();
    // Kubelet's list cannot be read.
    let answers = BTreeMap::from([(ClaimUid::parse(A).unwrap(), ApiView::Gone)]);
    let report = run.handle.decide_orphans(Duration::ZERO, answers).await.unwrap();
    assert_eq!(report.quarantine.len(), 1);
    let withheld = run.inventory.borrow().get("x").cloned().unwrap();
    assert!(withheld.unhealthy.is_some(), "{withheld:?}");
    run.end().await;
}
