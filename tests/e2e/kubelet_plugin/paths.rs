//! A reload changes the paths of device nodes while containers hold them.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;

use kube::api::DeleteParams;

use crate::kubelet_plugin::helper::{
    devices_inside, in_containers_by_number, never_in_two, wait_for_inventory,
};
use crate::setup::{DRIVER, Setup};

const RESOURCE: &str = "drayman.dev/plugged";
const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
- name: plugged
  mode: extended-resource
  resourceName: drayman.dev/plugged
  paths: [\"/dev/drayman-plugged-*\"]
";
/// Tests identity by device number alone: this companion cannot query the container runtime.
const WITHOUT_RUNTIME: &[&str] = &["--container-runtime-socket=/run/drayman-none.sock"];

#[tokio::test]
async fn a_reload_to_links_gives_no_device_node_twice() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    std::fs::create_dir(node.path("/dev/byid"))?;
    for (name, minor) in [
        ("test-a", 5),
        ("test-b", 7),
        ("plugged-a", 8),
        ("plugged-b", 9),
        ("plugged-c", 3),
    ] {
        node.make_device(format!("/dev/drayman-{name}"), 1, minor)?;
        symlink(
            format!("../drayman-{name}"),
            node.path(format!("/dev/byid/{name}")),
        )?;
    }
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion_with(0, CONFIGURATION, WITHOUT_RUNTIME)?;
    wait_for_inventory(&setup, DRIVER, 5, 0).await?;
    setup.until_allocatable(RESOURCE, "3").await?;
    tokio::select! {
        failed = never_in_two(node) => failed?,
        done = reload(&setup) => done?,
    }
    setup.end([companion, controller]).await
}

async fn reload(setup: &Setup) -> anyhow::Result<()> {
    for name in ["plugged-1", "plugged-2"] {
        setup.make_limit_pod(name, RESOURCE).await?;
    }
    for name in ["test-1", "test-2"] {
        setup.make_pod(name).await?;
    }
    // The first device stays with its pod: kubelet allocates it first.
    let mut ending = BTreeMap::new();
    for name in ["plugged-1", "plugged-2", "test-1", "test-2"] {
        setup.until_running(name).await?;
        let devices = devices_inside(setup, name, "drayman-").await?;
        if devices[0].ends_with("-b") {
            ending.insert(name, devices);
        }
    }
    assert_eq!(ending.len(), 2, "{ending:?}");

    setup.rewrite_configuration(0, &CONFIGURATION.replace("/dev/drayman-", "/dev/byid/"))?;
    // Devices for claims are listed under both names.
    wait_for_inventory(setup, DRIVER, 7, 6).await?;
    setup.until_allocatable(RESOURCE, "1").await?;
    for name in ending.keys() {
        setup.pods().delete(name, &DeleteParams::default()).await?;
    }
    // The scheduler counts the remaining pod and kubelet its device, so one of three devices is available.
    setup.until_allocatable(RESOURCE, "2").await?;
    setup.make_limit_pod("plugged-3", RESOURCE).await?;
    setup.make_pod("test-3").await?;
    for name in ["plugged-3", "test-3"] {
        setup.until_running(name).await?;
    }
    let found = in_containers_by_number(setup.cluster.node(0));
    let pods: BTreeSet<&str> = found
        .values()
        .flatten()
        .map(|container| container.pod.as_str())
        .collect();
    assert_eq!((found.len(), pods.len()), (4, 4), "{found:?}");
    Ok(())
}
