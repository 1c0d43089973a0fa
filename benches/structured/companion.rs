//! A companion on a real node.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::Options;
use crate::fixture::{self, CONFIGURATION, Slices};
use crate::harness::Cluster;
use crate::setup::{Program, Setup};

/// The user name of the companion.
pub(crate) const USER: &str = "drayman-node";

/// A cluster with one node, the class `test`, and a companion with this many devices of the class.
pub(crate) async fn cluster(options: &Options, devices: u32) -> anyhow::Result<(Setup, Program)> {
    let setup = Setup::structured(Cluster::structured().nodes(1).start().await?).await?;
    make_devices(&setup, 0..devices)?;
    fixture::make_class(&setup, "test", "test").await?;
    let companion = start(&setup, options, &[])?;
    Slices::watch(&setup).until_offered(&names(devices)).await?;
    companion.logged("kubelet has registered the driver").await?;
    Ok((setup, companion))
}

/// Creates device nodes without a driver: containers get them, but nothing opens them.
pub(crate) fn make_devices(setup: &Setup, numbers: Range<u32>) -> anyhow::Result<()> {
    let node = setup.cluster.node(0);
    numbers
        .into_iter()
        .try_for_each(|number| node.make_device(format!("/dev/drayman-test-{number}"), 240, number))
}

/// Names of the first devices.
pub(crate) fn names(devices: u32) -> BTreeSet<String> {
    (0..devices)
        .map(|number| format!("drayman-test-{number}"))
        .collect()
}

/// Starts the program under test as in the image.
pub(crate) fn start(setup: &Setup, options: &Options, flags: &[&str]) -> anyhow::Result<Program> {
    let node = setup.cluster.node(0);
    let file = setup.cluster.directory().join("node.yaml");
    std::fs::write(&file, CONFIGURATION)?;
    let mut command = node.command(&options.program);
    command.env("MALLOC_ARENA_MAX", "1");
    command.args(["node", "--node-name", node.name(), "--kubeconfig"]);
    command
        .arg(setup.node_kubeconfig())
        .arg("--config")
        .arg(file)
        // Otherwise the companion detects kubelet's runtime by a running pod, which a real node always has.
        .args(["--container-runtime-socket", "/run/containerd/containerd.sock"])
        .args(flags);
    setup.program("companion", command)
}
