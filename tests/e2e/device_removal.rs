//! Devices that disappear while a claim or a container holds them, and devices that return with another device number.

use anyhow::{Context as _, ensure};
use drayman::api::crd::NodeInventory;
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::harness::Node;
use crate::pods::{
    ContainerDevices, MINORS, assert_unprepared, claim_files, look_inside, replace_killed, start_node,
    wait_for_inventory,
};
use crate::reboot::{look_again, lose_power, was_restarted};
use crate::setup::{Program, REGISTERED, Setup};
use crate::stored_claims::devices;

/// The index of a device of `make_devices` and its minor number.
fn number_of(device: &str) -> anyhow::Result<(usize, u32)> {
    let number: usize = device
        .rsplit('-')
        .next()
        .context("a name with a number")?
        .parse()?;
    Ok((number, *MINORS.get(number).context("one of ours")?))
}

/// Waits until the companion reports a device as gone (`true`) or healthy.
async fn until_gone(setup: &Setup, device: &str, gone: bool) -> anyhow::Result<()> {
    let inventory = format!("{}.drayman.dev", setup.cluster.node(0).name());
    let name = device.to_owned();
    let met = move |inventory: Option<&NodeInventory>| {
        let mut devices = inventory.iter().flat_map(|inventory| &inventory.spec.devices);
        devices.find(|device| device.name == name).is_some_and(|device| {
            device
                .unhealthy
                .as_deref()
                .is_some_and(|why| why.contains("gone"))
                == gone
        })
    };
    let what = if gone { "gone" } else { "back" };
    setup
        .wait(Api::all(setup.cluster.client()), &inventory, what, met)
        .await
        .map(drop)
}

#[tokio::test]
async fn a_device_gone_before_prepare_is_refused_and_not_replaced() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(2).await?;
    let node = setup.cluster.node(0);
    setup.make_claim("early", "Immediate", false).await?;
    let early = setup.until_allocated("early").await?;
    let uid = early.metadata.uid.clone().context("a uid")?;
    let allocated = devices(&early)?.concat();
    let (number, minor) = number_of(&allocated)?;
    let path = format!("/dev/drayman-test-{number}");
    node.remove(&path)?;
    wait_for_inventory(&setup, 1).await?;

    // Kubelet requests the allocated device although another one is free.
    setup.make_pod_with("user", "early").await?;
    companion.logged("is not on this node").await?;
    if setup.cluster.minor() >= 28 {
        let text =
            format!("device \"drayman-test-{number}\" is not on this node (any more): plug it in again");
        setup
            .wait_for_event("user", "FailedPrepareDynamicResources", &text)
            .await?;
    }
    assert_unprepared(node, &uid)?;
    // Other pods are not blocked; the other device can be allocated.
    setup.make_pod("other").await?;
    let other = look_inside(&setup, "other").await?;
    assert_ne!(other.only_device(), path);

    // The device is plugged in again: kubelet's next attempt succeeds.
    node.make_device(&path, 1, minor)?;
    assert_eq!(look_inside(&setup, "user").await?.only_device(), path);
    assert_eq!(look_inside(&setup, "other").await?, other);
    for pod in ["user", "other"] {
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
    }
    setup.delete_claim("early").await?;
    assert_unprepared(node, &uid)?;
    setup.end([companion, controller]).await
}

/// Kills a container without kubelet, as a crash would.
async fn kill_container(node: Node<'_>, pod: &Pod) -> anyhow::Result<()> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    let id = statuses
        .and_then(|all| all.first()?.container_id.clone())
        .context("a container runs")?;
    let id = id.strip_prefix("containerd://").context("it is containerd's")?;
    node.ctr(&["task", "kill", "--signal", "9", id]).await.map(drop)
}

/// Whether the container runtime reports a missing device.
fn lacks_device(pod: Option<&Pod>) -> bool {
    let statuses = pod.and_then(|pod| pod.status.as_ref()?.container_statuses.as_ref());
    statuses.into_iter().flatten().any(|status| {
        let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
        waiting.is_some_and(|waiting| {
            waiting
                .message
                .as_deref()
                .is_some_and(|text| text.contains("CDI"))
        })
    })
}

#[tokio::test]
async fn a_device_gone_under_a_pod_stays_allocated_to_it() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(2).await?;
    let node = setup.cluster.node(0);
    let pods = || Api::<Pod>::namespaced(setup.cluster.client(), "default");
    setup.make_pod("first").await?;
    let first = look_inside(&setup, "first").await?;
    let (uid, _) = setup.claim_ids("first").await?;
    let path = first.only_device().to_owned();
    let (number, minor) = number_of(&path)?;
    let device = format!("drayman-test-{number}");

    node.remove(&path)?;
    until_gone(&setup, &device, true).await?;
    // Only the checkpoint is left: no container can start with a device node that may belong to another device by then.
    assert_eq!(claim_files(node, &uid)?, ["checkpoint.json"]);
    setup.until_running("first").await?;
    // The next companion starts with a claim whose device is missing.
    let companion = replace_killed(&setup, companion).await?;
    until_gone(&setup, &device, true).await?;
    setup.make_pod("second").await?;
    let second = look_inside(&setup, "second").await?;
    assert_ne!(second.only_device(), path);
    setup.make_pod("third").await?;
    setup
        .wait_for_event("third", "NoSuitableDevice", "of 2 held")
        .await?;

    kill_container(node, &pods().get("first").await?).await?;
    setup
        .wait(pods(), "first", "without its device", lacks_device)
        .await?;
    assert_eq!(claim_files(node, &uid)?, ["checkpoint.json"]);

    node.make_device(&path, 1, minor)?;
    until_gone(&setup, &device, false).await?;
    setup
        .wait(pods(), "first", "started again", was_restarted)
        .await?;
    assert_eq!(look_again(&setup, "first").await?, first);
    assert_eq!(look_inside(&setup, "second").await?, second);
    for pod in ["first", "second"] {
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
    }
    assert_unprepared(node, &uid)?;
    look_inside(&setup, "third").await?.only_device();
    setup.end([companion, controller]).await
}

/// Two serial adapters that differ only in their serial number, as fake sysfs; `{a}` and `{b}` are their device nodes.
const ADAPTERS: &str = "
/devices/pci0000:00/0000:00:14.0/usb1 subsystem=usb idVendor=1d6b idProduct=0002 bDeviceClass=09 version=2.00
/devices/pci0000:00/0000:00:14.0/usb1/1-1 subsystem=usb idVendor=0403 idProduct=6001 bDeviceClass=00 serial=A
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/tty/{a}
/devices/pci0000:00/0000:00:14.0/usb1/1-2 subsystem=usb idVendor=0403 idProduct=6001 bDeviceClass=00 serial=B
/devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0/tty/{b}
";
/// Path in the container: derived from the device name, not from the kernel's name.
const SERIAL: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  usb: {match: [{vendor: \"0403\"}], nodes: [tty]}
  containerPaths: {tty: \"/dev/drayman-{device}\"}
";

/// A machine with both adapters at these minor numbers: a fake `/sys`, and the device nodes in the `/dev` of the test node.
fn plug_in(node: Node<'_>, a: u32, b: u32) -> anyhow::Result<crate::host::Host> {
    let host = crate::host::Host::new().context("root makes device nodes")?;
    // The kernel numbers devices in discovery order: the first one is ttyUSB0.
    let name = |minor: u32| format!("ttyUSB{}", u32::from(minor != a.min(b)));
    let line = |minor: u32| format!("{} subsystem=tty node=c1:{minor}:{}", name(minor), name(minor));
    host.plug(&ADAPTERS.replace("{a}", &line(a)).replace("{b}", &line(b)));
    for minor in [a, b] {
        node.make_device(format!("/dev/{}", name(minor)), 1, minor)?;
    }
    Ok(host)
}

fn companion_on(setup: &Setup, host: &crate::host::Host) -> anyhow::Result<Program> {
    let flag = format!("--sysfs-root={}", host.path("sys").display());
    setup.companion_with(0, SERIAL, &[&flag])
}

/// The letter of the adapter in a pod, from the path in its container, and the minor number of the device node.
async fn adapter(setup: &Setup, pod: &str, inside: &ContainerDevices) -> anyhow::Result<(char, u32)> {
    let path = inside.only_device();
    let letter = match path.split("6001-").nth(1) {
        Some(rest) if rest.starts_with('a') => 'A',
        Some(rest) if rest.starts_with('b') => 'B',
        _ => anyhow::bail!("no serial number in {path}"),
    };
    let numbers = ["exec", pod, "--", "stat", "-c", "%t:%T", path];
    let numbers = setup.cluster.kubectl(&numbers).await?;
    let (major, minor) = numbers.trim().split_once(':').context("two numbers")?;
    ensure!(major == "1", "{numbers}");
    Ok((letter, u32::from_str_radix(minor, 16)?))
}

#[tokio::test]
async fn after_a_renumbering_boot_each_pod_has_its_adapter() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let host = plug_in(node, 5, 8)?;
    let mut companion = companion_on(&setup, &host)?;
    wait_for_inventory(&setup, 2).await?;
    companion.logged(REGISTERED).await?;
    let mut before = Vec::new();
    for pod in ["first", "second"] {
        setup.make_pod(pod).await?;
        let inside = look_inside(&setup, pod).await?;
        let (letter, minor) = adapter(&setup, pod, &inside).await?;
        assert_eq!(minor, if letter == 'A' { 5 } else { 8 }, "{pod}: {letter}");
        before.push((pod, inside, letter));
    }
    companion.kill().await?;
    lose_power(&setup, node).await?;
    // Now B comes first: it has A's former name and number, and A has a new number.
    for name in ["ttyUSB0", "ttyUSB1"] {
        node.remove(format!("/dev/{name}"))?;
    }
    drop(host);
    let host = plug_in(node, 9, 5)?;
    node.start("containerd").await?;
    node.start("kubelet").await?;
    let companion = companion_on(&setup, &host)?;
    companion.logged(REGISTERED).await?;
    for (pod, inside, letter) in &before {
        assert_eq!(&look_again(&setup, pod).await?, inside, "{pod}");
        let pods = Api::<Pod>::namespaced(setup.cluster.client(), "default");
        setup.wait(pods, pod, "started again", was_restarted).await?;
        let expected = (*letter, if *letter == 'A' { 9 } else { 5 });
        assert_eq!(adapter(&setup, pod, inside).await?, expected, "{pod}");
    }
    for (pod, _, _) in &before {
        let (uid, name) = setup.claim_ids(pod).await?;
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
        setup.until_claim_gone(&name).await?;
        assert_unprepared(node, &uid)?;
    }
    setup.end([companion, controller]).await
}
