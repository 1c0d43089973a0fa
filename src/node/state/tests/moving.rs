use std::sync::atomic::Ordering;

use super::super::*;
use super::fixture::*;
use crate::api::crd::Mode;
use crate::core::prepare::containers::{Containers, PodContainer, ResourceSnapshot};
use crate::node::service::{PluginDevice, ServiceError};

const OLD: &str = "example.com/camera";
const NEW: &str = "example.com/eye";

/// A pod holds camera `x` under the original name of the resource.
fn granted() -> ResourceSnapshot {
    let container = PodContainer {
        namespace: "default".into(),
        pod: "plugged".into(),
        container: "main".into(),
    };
    ResourceSnapshot {
        pods: [("default".to_owned(), "plugged".to_owned())].into(),
        listed: [("x".to_owned(), container)].into(),
        ..ResourceSnapshot::default()
    }
}

async fn live_with(
    mode: Mode,
    shown: Option<ResourceSnapshot>,
) -> (tempfile::TempDir, Run, Arc<FakeDriver>, Arc<Kubelet>) {
    let root = tempfile::tempdir().unwrap();
    let (driver, kubelet) = (FakeDriver::new(&[]), Arc::new(Kubelet::default()));
    driver.say(&["x", "y"], "camera", mode);
    *kubelet.under.lock().unwrap() = Some(OLD.to_owned());
    *kubelet.shown.lock().unwrap() = shown;
    let run = live_beside(root.path(), "boot", &driver, Some(kubelet.clone())).await;
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    run.publisher.send_replace(Arc::new(AllocatedClaims::none()));
    (root, run, driver, kubelet)
}

fn resources(name: Option<&str>, also_by_claims: bool) -> Arc<BTreeMap<String, ExtendedResource>> {
    let resource = ExtendedResource {
        also_by_claims,
        ..ExtendedResource::of_kind("camera")
    };
    Arc::new(name.map(|name| (name.to_owned(), resource)).into_iter().collect())
}

async fn until_offered(run: &Run, resource: &str, expected: &str) {
    let mut shown = String::new();
    let offered = async {
        while shown != expected {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let Some(devices) = run.handle.plugin_devices(resource) else {
                continue;
            };
            let mark =
                |device: &PluginDevice| format!("{}{}", device.id, if device.healthy { "" } else { "?" });
            shown = devices.borrow().iter().map(mark).collect::<Vec<_>>().join(" ");
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(20), offered)
        .await
        .is_ok();
    assert!(in_time, "{shown:?} is not {expected:?}");
}

async fn allocate(run: &Run, resource: &str, device: &str) -> Result<(), ServiceError> {
    let containers = vec![vec![device.to_owned()]];
    run.handle.allocate(resource, containers).await.map(drop)
}

async fn until_published(run: &mut Run, such: impl Fn(Option<&str>) -> bool) {
    let seen = run
        .inventory
        .wait_for(|devices| devices.get("x").is_some_and(|x| such(x.unhealthy.as_deref())));
    soon(seen).await.unwrap();
}

/// The pod ends, and all devices become free.
async fn ends(run: &mut Run, kubelet: &Kubelet) {
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    until_published(run, |unhealthy| unhealthy.is_none()).await;
}

#[tokio::test]
async fn a_renamed_resource_withholds_devices_of_the_old_name() {
    let (_root, mut run, _driver, kubelet) = live_with(Mode::Both, Some(granted())).await;
    until_offered(&run, OLD, "x y").await;
    run.configured.send_replace(resources(Some(NEW), true));
    until_offered(&run, NEW, "x? y").await;
    until_published(&mut run, |unhealthy| {
        unhealthy.is_some_and(|why| why.contains("default/plugged") && why.contains(OLD))
    })
    .await;
    let refused = run.prepare(A, &["x"]).await.unwrap_err();
    assert!(refused.to_string().contains("pod default/plugged"), "{refused}");
    let refused = allocate(&run, NEW, "x").await.unwrap_err();
    assert!(refused.to_string().contains("pod default/plugged"), "{refused}");
    allocate(&run, NEW, "y").await.unwrap();
    ends(&mut run, &kubelet).await;
    until_offered(&run, NEW, "x y").await;
    run.prepare(A, &["x"]).await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn a_kind_that_changes_to_claims_waits_for_its_containers() {
    for before in [Mode::Both, Mode::ExtendedResource] {
        let (_root, mut run, driver, kubelet) = live_with(before, Some(granted())).await;
        if before == Mode::ExtendedResource {
            run.configured.send_replace(resources(Some(OLD), false));
        }
        until_offered(&run, OLD, "x y").await;
        run.configured.send_replace(resources(None, false));
        driver.say(&["x", "y"], "camera", Mode::Claims);
        // The new devices may arrive before or after the new resources.
        until_published(&mut run, |unhealthy| {
            unhealthy.is_some_and(|why| why.contains("default/plugged"))
        })
        .await;
        let refused = run.prepare(A, &["x"]).await.unwrap_err();
        assert!(refused.to_string().contains("pod default/plugged"), "{refused}");
        run.prepare(B, &["y"]).await.unwrap();
        ends(&mut run, &kubelet).await;
        run.prepare(A, &["x"]).await.unwrap();
        run.end().await;
    }
}

#[tokio::test]
async fn a_container_keeps_its_device_while_the_mode_changes() {
    let (_root, run, _driver, _kubelet) = live_with(Mode::Both, Some(granted())).await;
    until_offered(&run, OLD, "x y").await;
    let unshared = resources(Some(OLD), false);
    run.configured.send_replace(unshared.clone());
    soon(run.handle.serves(OLD, &unshared[OLD])).await;
    let refused = run.prepare(A, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "PodResourcesUnavailable", "{refused}");
    run.end().await;
}

#[tokio::test]
async fn a_device_that_leaves_its_resource_is_waited_for() {
    let (_root, mut run, driver, kubelet) = live_with(Mode::ExtendedResource, Some(granted())).await;
    run.configured.send_replace(resources(Some(OLD), false));
    until_offered(&run, OLD, "x y").await;
    driver.say(&["x", "y"], "camera", Mode::Claims);
    until_published(&mut run, |unhealthy| {
        unhealthy.is_some_and(|why| why.contains("default/plugged"))
    })
    .await;
    let refused = run.prepare(A, &["x"]).await.unwrap_err();
    assert!(refused.to_string().contains("pod default/plugged"), "{refused}");
    ends(&mut run, &kubelet).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn a_renamed_resource_withholds_all_while_kubelet_is_silent() {
    let (_root, mut run, _driver, kubelet) = live_with(Mode::Both, Some(granted())).await;
    until_offered(&run, OLD, "x y").await;
    *kubelet.shown.lock().unwrap() = None;
    run.configured.send_replace(resources(Some(NEW), true));
    until_offered(&run, NEW, "x? y?").await;
    let refused = allocate(&run, NEW, "y").await.unwrap_err();
    assert!(refused.to_string().contains(OLD), "{refused}");
    *kubelet.shown.lock().unwrap() = Some(granted());
    until_offered(&run, NEW, "x? y").await;
    ends(&mut run, &kubelet).await;
    until_offered(&run, NEW, "x y").await;
    run.end().await;
}

#[tokio::test]
async fn kubelets_silence_about_a_withdrawn_name_is_logged_once() {
    let root = tempfile::tempdir().unwrap();
    let kubelet = Arc::new(Kubelet::default());
    let (mut owner, run) = begin(root.path(), "boot", &FakeDriver::new(&[]), Some(kubelet.clone())).await;
    owner.query.has_warned = false;
    let devices = [("x".to_owned(), Vec::new())].into();
    let mut withdrawn = WithdrawnDevices::default();
    withdrawn.withdraw("example.com/old", devices, Containers::default());
    owner.resources = ExtendedResources::new(AllocatedClaims::default(), Some(withdrawn));
    let log = tempfile::NamedTempFile::new().unwrap();
    let writer = std::sync::Mutex::new(log.reopen().unwrap());
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(writer)
        .finish();
    let _logs = tracing::subscriber::set_default(subscriber);
    // At the first time, though nothing was known before, and not again.
    for _ in 0..2 {
        owner.query_and_wait(Duration::MAX).await;
        assert!(owner.query.has_warned);
        let lines = std::fs::read_to_string(log.path()).unwrap();
        let warnings = lines.matches("kubelet does not show which devices its containers hold");
        assert_eq!(warnings.count(), 1, "{lines}");
    }
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    owner.query_and_wait(Duration::MAX).await;
    assert!(!owner.query.has_warned && !owner.resources.has_withdrawn());
    drop(run);
}

#[tokio::test]
async fn an_unlisted_grant_counts_after_a_rename_of_the_resource() {
    let (_root, mut run, _driver, _kubelet) = live_with(Mode::Both, Some(ResourceSnapshot::default())).await;
    until_offered(&run, OLD, "x y").await;
    allocate(&run, OLD, "x").await.unwrap();
    run.configured.send_replace(resources(Some(NEW), true));
    until_offered(&run, NEW, "x? y").await;
    until_published(&mut run, |unhealthy| {
        unhealthy.is_some_and(|why| why.contains(OLD))
    })
    .await;
    assert!(run.prepare(A, &["x"]).await.is_err());
    run.end().await;
}

/// Gives the devices of `live_with` other names, with the device numbers of `numbers`.
fn rename(driver: &FakeDriver, kind: &str, mode: Mode, numbers: [u32; 2]) {
    let [x, y] = numbers;
    driver.say_numbered(&[("by-id-x", x), ("by-id-y", y)], kind, mode);
}

#[tokio::test]
async fn a_reload_that_renames_devices_gives_no_node_twice() {
    for (before, after) in [
        (Mode::ExtendedResource, Mode::ExtendedResource),
        (Mode::ExtendedResource, Mode::Claims),
        (Mode::Both, Mode::Claims),
        (Mode::Both, Mode::Both),
    ] {
        let (_root, run, driver, kubelet) = live_with(before, Some(granted())).await;
        run.configured
            .send_replace(resources(Some(OLD), before == Mode::Both));
        driver.say_numbered(&[("x", 6), ("y", 7)], "camera", before);
        until_offered(&run, OLD, "x y").await;
        allocate(&run, OLD, "x").await.unwrap();
        rename(&driver, "camera", after, [6, 7]);
        if after == Mode::Claims {
            run.configured.send_replace(resources(None, false));
        } else {
            until_offered(&run, OLD, "by-id-x? by-id-y").await;
            let refused = allocate(&run, OLD, "by-id-x").await.unwrap_err();
            assert!(refused.to_string().contains("as x"), "{refused}");
            allocate(&run, OLD, "by-id-y").await.unwrap();
        }
        if after != Mode::ExtendedResource {
            let mut inventory = run.inventory.clone();
            let withheld =
                inventory.wait_for(|all| all.get("by-id-x").is_some_and(|x| x.unhealthy.is_some()));
            soon(withheld).await.unwrap();
            let refused = run.prepare(A, &["by-id-x"]).await.unwrap_err();
            assert!(refused.to_string().contains("pod default/plugged"), "{refused}");
        }
        *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
        let mut inventory = run.inventory.clone();
        let free = inventory.wait_for(|all| all.get("by-id-x").is_some_and(|x| x.unhealthy.is_none()));
        soon(free).await.unwrap();
        if after != Mode::ExtendedResource {
            run.prepare(A, &["by-id-x"]).await.unwrap();
        }
        run.end().await;
    }
}

/// Allocates a device whose list changes before the driver answers.
async fn allocate_while_moving(
    run: &Run,
    driver: &FakeDriver,
    device: &str,
    moved: [(&str, u32); 2],
    mode: Mode,
) -> Result<Vec<ContainerEdits>, ServiceError> {
    let (asked, closed) = (driver.asked.load(Ordering::SeqCst), driver.gate.acquire().await);
    let containers = vec![vec![device.to_owned()]];
    let (allocated, ()) = tokio::join!(run.handle.allocate(OLD, containers), async {
        while driver.asked.load(Ordering::SeqCst) == asked {
            tokio::task::yield_now().await;
        }
        driver.say_numbered(&moved, "camera", mode);
        // Yield until the next list has arrived.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        drop(closed);
    });
    allocated
}

#[tokio::test]
async fn a_device_does_not_move_to_the_node_of_a_container() {
    let mode = Mode::ExtendedResource;
    let (_root, run, driver, _kubelet) = live_with(mode, Some(granted())).await;
    run.configured.send_replace(resources(Some(OLD), false));
    driver.say_numbered(&[("x", 6), ("y", 7)], "camera", mode);
    until_known(&run, [("x", 6), ("y", 7)]).await;
    let refused = allocate_while_moving(&run, &driver, "y", [("x", 7), ("y", 6)], mode).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    assert!(refused.to_string().contains("as x"), "{refused}");
    run.end().await;
}

#[tokio::test]
async fn a_device_that_moves_during_an_allocate_has_one_holder() {
    for (moved, is_refused) in [([("x", 8), ("y", 7)], false), ([("x", 7), ("y", 6)], true)] {
        let (_root, run, driver, _kubelet) = live_with(Mode::Both, Some(ResourceSnapshot::default())).await;
        driver.say_numbered(&[("x", 6), ("y", 7)], "camera", Mode::Both);
        until_known(&run, [("x", 6), ("y", 7)]).await;
        run.prepare(A, &["y"]).await.unwrap();
        match allocate_while_moving(&run, &driver, "x", moved, Mode::Both).await {
            Ok(made) => {
                assert_eq!(made[0].annotations["drayman.dev/x"], "c120:8");
                assert!(!is_refused);
            }
            Err(refused) => assert_eq!((refused.reason(), is_refused), ("DeviceHeld", true), "{refused}"),
        }
        run.end().await;
    }
}

#[tokio::test]
async fn a_device_with_the_number_of_an_unplugged_one_waits() {
    let (_root, run, driver, kubelet) = live_with(Mode::ExtendedResource, Some(granted())).await;
    run.configured.send_replace(resources(Some(OLD), false));
    driver.say_numbered(&[("x", 6), ("y", 7)], "camera", Mode::ExtendedResource);
    until_offered(&run, OLD, "x y").await;
    allocate(&run, OLD, "x").await.unwrap();
    driver.say_numbered(&[("y", 7)], "camera", Mode::ExtendedResource);
    until_offered(&run, OLD, "y").await;
    driver.say_numbered(&[("y", 7), ("z", 6)], "camera", Mode::ExtendedResource);
    until_offered(&run, OLD, "y z?").await;
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    until_offered(&run, OLD, "y z").await;
    run.end().await;
}

#[tokio::test]
async fn a_claim_keeps_its_node_from_every_other_name_and_api() {
    for numbers in [[6, 7], [7, 6]] {
        let (_root, run, driver, _kubelet) = live_with(Mode::Both, Some(ResourceSnapshot::default())).await;
        driver.say_numbered(&[("by-id-x", 6), ("by-id-y", 7)], "camera", Mode::Both);
        until_offered(&run, OLD, "by-id-x by-id-y").await;
        run.prepare(A, &["by-id-x"]).await.unwrap();
        rename(&driver, "camera", Mode::Both, numbers);
        // The claim keeps its device under the first name. If that name moves to another node, the other name has the claim's device node.
        let (offered, held) = if numbers == [6, 7] {
            ("by-id-x? by-id-y", "by-id-x")
        } else {
            ("by-id-x? by-id-y?", "by-id-y")
        };
        until_offered(&run, OLD, offered).await;
        for refused in [
            run.prepare(B, &[held]).await.map(drop).unwrap_err(),
            allocate(&run, OLD, held).await.unwrap_err(),
        ] {
            assert_eq!(refused.reason(), "DeviceHeld");
            assert!(refused.to_string().contains("default/claim"), "{refused}");
        }
        run.unprepare(A).await.unwrap();
        run.prepare(B, &[held]).await.unwrap();
        run.end().await;
    }
}

#[tokio::test]
async fn a_renamed_device_stays_with_its_claim_over_a_restart() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.end().await;
    driver.say_numbered(&[("by-id-x", 6)], "other", Mode::Claims);
    let run = live_and_know(root.path(), "boot", &driver).await;
    let refused = run.prepare(B, &["by-id-x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld");
    run.end().await;
    // No container of an earlier boot runs, and its device numbers are meaningless.
    let run = live_and_know(root.path(), "the next boot", &driver).await;
    run.prepare(B, &["by-id-x"]).await.unwrap();
    run.end().await;
}

async fn until_known(run: &Run, numbers: [(&str, u32); 2]) {
    let mut inventory = run.inventory.clone();
    let known = inventory.wait_for(|all| {
        numbers.iter().all(|(name, minor)| {
            let device = all.get(*name);
            device.is_some_and(|device| device.device_numbers.iter().any(|number| number.minor == *minor))
        })
    });
    soon(known).await.unwrap();
}

#[tokio::test]
async fn claims_whose_devices_exchange_numbers_wait_for_each_other() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say_numbered(&[("x", 6), ("y", 7)], "test", Mode::Claims);
    let run = live_and_know(root.path(), "boot", &driver).await;
    until_known(&run, [("x", 6), ("y", 7)]).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.prepare(B, &["y"]).await.unwrap();
    // Plugged in again in another order. The containers may still have the earlier nodes.
    driver.say_numbered(&[("x", 7), ("y", 6)], "test", Mode::Claims);
    until_files(root.path(), &[]).await;
    for claim in [(A, "x"), (B, "y")] {
        let refused = run.prepare(claim.0, &[claim.1]).await.unwrap_err();
        assert_eq!(refused.reason(), "DeviceHeld");
    }
    run.unprepare(A).await.unwrap();
    until_files(root.path(), &[file(B)]).await;
    run.prepare(A, &["x"]).await.unwrap_err();
    run.unprepare(B).await.unwrap();
    run.prepare(A, &["x"]).await.unwrap();
    run.end().await;

    // The same while no companion ran, and not after a boot, which ends all containers.
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(B, &["y"]).await.unwrap();
    run.end().await;
    driver.say_numbered(&[("x", 6), ("y", 7)], "test", Mode::Claims);
    let run = live_and_know(root.path(), "boot", &driver).await;
    assert_eq!(files(root.path()), Vec::<String>::new());
    run.end().await;
    let run = live_and_know(root.path(), "the next boot", &driver).await;
    until_files(root.path(), &[file(A), file(B)]).await;
    run.end().await;
}

#[tokio::test]
async fn a_claim_does_not_get_the_node_of_a_container() {
    let (root, run, driver, kubelet) = live_with(Mode::Both, Some(ResourceSnapshot::default())).await;
    driver.say_numbered(&[("x", 6), ("y", 7)], "camera", Mode::Both);
    until_offered(&run, OLD, "x y").await;
    run.prepare(A, &["y"]).await.unwrap();
    *kubelet.shown.lock().unwrap() = Some(granted());
    allocate(&run, OLD, "x").await.unwrap();
    let files_of_claims = || -> Vec<String> {
        let files = files(root.path()).into_iter();
        files.filter(|name| name.contains("claim")).collect()
    };
    let until = async |expected: &[String]| {
        soon(async {
            while files_of_claims() != expected {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    };
    until(&[file(A)]).await;
    driver.say_numbered(&[("x", 7), ("y", 6)], "camera", Mode::Both);
    until(&[]).await;
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    until(&[file(A)]).await;
    run.end().await;
}

#[tokio::test]
async fn a_device_that_the_driver_forgets_loses_its_file() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    // No longer configured, but still there.
    driver.say(&["y"], "test", Mode::Claims);
    let mut inventory = run.inventory.clone();
    let gone = inventory.wait_for(|all| all["x"].unhealthy.is_some());
    soon(gone).await.unwrap();
    assert_eq!(files(root.path()), [file(A)]);
    driver.gone.lock().unwrap().insert("x".into());
    driver.say(&["y"], "test", Mode::Claims);
    until_files(root.path(), &[]).await;
    run.end().await;
}

#[tokio::test]
async fn no_container_starts_with_the_node_of_another_device() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    let kubelet = Arc::new(Kubelet::default());
    *kubelet.shown.lock().unwrap() = Some(granted());
    driver.say_numbered(&[("w", 9), ("x", 6), ("y", 7)], "serial", Mode::ExtendedResource);
    let run = live_beside(root.path(), "boot", &driver, Some(kubelet)).await;
    let serial = "example.com/serial";
    until_offered(&run, serial, "w x y").await;
    allocate(&run, serial, "x").await.unwrap();
    let start = async |device: &str| run.handle.check_start(serial, vec![device.to_owned()]).await;
    start("x").await.unwrap();
    driver.say_numbered(&[("w", 12), ("x", 7), ("y", 6)], "serial", Mode::ExtendedResource);
    until_known(&run, [("x", 7), ("y", 6)]).await;
    let refused = start("x").await.unwrap_err();
    assert!(refused.to_string().contains("another device node"), "{refused}");
    // A container that is new has the present node.
    allocate(&run, serial, "w").await.unwrap();
    start("w").await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn an_equal_list_costs_nothing() {
    let (_root, run, driver, kubelet) = live_with(Mode::Both, Some(ResourceSnapshot::default())).await;
    until_offered(&run, OLD, "x y").await;
    run.prepare(A, &["x"]).await.unwrap();
    let queries = || kubelet.queries.load(Ordering::SeqCst);
    let before = queries();
    for _ in 0..3 {
        driver.say(&["x", "y"], "camera", Mode::Both);
        // Otherwise the lists could arrive as one.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // A change after them costs one query.
    driver.say(&["x", "y", "z"], "camera", Mode::Both);
    until_offered(&run, OLD, "x? y z").await;
    assert_eq!(queries(), before + 1);
    run.end().await;
}
