use std::sync::Arc;

use super::fixture::*;
use crate::api::cdi::Spec;
use crate::api::crd::Mode;
use crate::core::prepare::checkpoint::ClusterFacts;

const SERIAL: &str = "example.com/serial";

#[tokio::test]
async fn allocate_and_prepare_copy_none_of_a_thousand_devices() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    let names: Vec<String> = (0..1_000).map(|number| format!("port-{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    driver.say(&names, "serial", Mode::ExtendedResource);
    let (mut owner, run) = begin(root.path(), "boot", &driver, None).await;
    assert_eq!(run.inventory.borrow().len(), 1_000);
    assert!(
        !owner.rebuild_inventory() && !owner.publish(),
        "nothing has happened since"
    );
    for name in ["port-7", "port-9"] {
        let allocated = owner.allocate(SERIAL, &[vec![name.to_owned()]]).await;
        assert_eq!(allocated.unwrap().len(), 1);
        assert!(
            !owner.rebuild_inventory() && !owner.publish(),
            "an Allocate rebuilds no list"
        );
    }

    driver.say(&names, "test", Mode::Claims);
    owner.found.changed().await.unwrap();
    owner.refresh().await;
    owner.publish();
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    owner.update_cluster().await;
    let before = owner.inventory.clone();
    owner.prepare(&claim(A, &["port-7"]), None, None).await.unwrap();
    assert!(
        owner.rebuild_inventory() && owner.publish(),
        "the prepared claims have changed"
    );
    assert!(Arc::ptr_eq(&before, &owner.inventory), "the devices are the same");
    assert!(Arc::ptr_eq(&before, &run.inventory.borrow()));
}

#[tokio::test]
async fn a_device_that_vanishes_during_a_prepare_loses_its_file() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    let closed = driver.gate.acquire().await.unwrap();
    let (prepared, ()) = tokio::join!(run.prepare(B, &["y"]), async {
        // Yield until the task waits for its driver and has received the next list.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        driver.gone.lock().unwrap().insert("x".into());
        driver.say(&["y"], "test", Mode::Claims);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        drop(closed);
    });
    prepared.unwrap();
    let gone = tokio::time::timeout(std::time::Duration::from_secs(20), async {
        while files(root.path()) != [file(B)] {
            tokio::task::yield_now().await;
        }
    });
    assert!(gone.await.is_ok(), "{:?}", files(root.path()));
    run.end().await;
}

#[tokio::test]
async fn two_devices_at_one_container_path_are_refused_and_not_held() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    for device in ["x", "y"] {
        let path = "/dev/port".to_owned();
        driver.renamed.lock().unwrap().insert(device.into(), path);
    }
    let run = live_and_know(root.path(), "boot", &driver).await;
    let refused = run.prepare(A, &["x", "y"]).await.unwrap_err();
    assert_eq!(
        (refused.reason(), refused.is_invalid_request()),
        ("ContainerPathTaken", false)
    );
    for word in ["/dev/x", "/dev/y", "/dev/port", "containerPaths"] {
        assert!(refused.to_string().contains(word), "{word} in {refused}");
    }
    assert_eq!(files(root.path()), Vec::<String>::new());
    run.prepare(A, &["x"]).await.unwrap();
    run.prepare(B, &["y"])
        .await
        .expect("another claim, another container");
    run.unprepare(A).await.unwrap();
    run.unprepare(B).await.unwrap();

    for resource in [SERIAL, "example.com/camera"] {
        let kind = resource.trim_start_matches("example.com/");
        driver.say(&["x", "y"], kind, Mode::ExtendedResource);
        let mut devices = run.handle.plugin_devices(resource).unwrap();
        devices.wait_for(|devices| devices.len() == 2).await.unwrap();
        let allocate = async |containers: &[&[&str]]| {
            let ids = |ids: &&[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
            let containers = containers.iter().map(ids).collect();
            run.handle.allocate(resource, containers).await
        };
        let refused = allocate(&[&["x", "y"]]).await.unwrap_err();
        assert_eq!(refused.reason(), "ContainerPathTaken", "{resource}");
        assert_eq!(allocate(&[&["x"], &["y"]]).await.unwrap().len(), 2);
    }
    run.end().await;
}

#[tokio::test]
async fn a_node_of_two_devices_is_there_once_with_all_permissions() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    for (device, permissions) in [("x", "r"), ("y", "rw")] {
        driver.control.lock().unwrap().insert(device.into(), permissions);
    }
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x", "y"]).await.unwrap();
    run.prepare(B, &["x"]).await.unwrap_err();
    let control = |uid: &str| {
        let spec: Spec =
            serde_json::from_slice(&std::fs::read(root.path().join("cdi").join(file(uid))).unwrap()).unwrap();
        let nodes = spec
            .devices
            .into_iter()
            .flat_map(|device| device.container_edits.device_nodes);
        let control = nodes.filter(|node| node.path == CONTROL);
        control.map(|node| node.permissions).collect::<Vec<_>>()
    };
    assert_eq!(control(A), ["rw"]);
    run.unprepare(A).await.unwrap();
    run.prepare(B, &["x"]).await.unwrap();
    assert_eq!(control(B), ["r"], "only the permissions of its own device");
    run.unprepare(B).await.unwrap();

    driver.say(&["x", "y"], "serial", Mode::ExtendedResource);
    let mut devices = run.handle.plugin_devices(SERIAL).unwrap();
    devices.wait_for(|devices| devices.len() == 2).await.unwrap();
    let containers = vec![vec!["x".to_owned(), "y".to_owned()]];
    let granted = run.handle.allocate(SERIAL, containers).await.unwrap();
    let control = granted[0]
        .device_nodes
        .iter()
        .filter(|node| node.host_path == CONTROL);
    assert_eq!(
        control.map(|node| node.permissions.as_str()).collect::<Vec<_>>(),
        ["rw"]
    );
    run.end().await;
}
