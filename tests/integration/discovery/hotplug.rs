//! Devices that appear and disappear during discovery, detected by kernel events, directory changes and periodic searches.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drayman::node::discovery::{Cause, HostPaths};
use drayman::node::driver::NodeDriver;
use futures::StreamExt as _;

use crate::discovery::host::{Host, RunningDiscovery};
use crate::discovery::usb::DESKTOP;
use crate::not_run::not_run;

const ADAPTERS: &str = "- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty]}}";

/// Triggers a kernel event of a device that is always present and does not change.
fn trigger_kernel_event() -> bool {
    std::fs::write("/sys/class/mem/null/uevent", "change").is_ok()
}

#[tokio::test]
async fn kernel_events_are_seen_without_directory_changes() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let mut discovery = RunningDiscovery::start(host.configuration(ADAPTERS), host.paths()).await;
    assert_eq!(discovery.now().len(), 1);
    // Only sysfs changes, which inotify does not report.
    let started = Instant::now();
    host.unplug("/devices/pci0000:00/0000:00:14.0/usb1/1-1");
    if !trigger_kernel_event() {
        return not_run("kernel events cannot be triggered on this machine");
    }
    discovery
        .until("the adapter is gone", std::collections::BTreeMap::is_empty)
        .await;
    println!(
        "disappearance, from the unplugging to the list without it: {:?}",
        started.elapsed()
    );
    assert_eq!(discovery.driver.change_counts()[&Cause::Kernel], 1);
    let started = Instant::now();
    host.plug(DESKTOP);
    trigger_kernel_event();
    discovery
        .until("the adapter is back", |devices| devices.len() == 1)
        .await;
    println!(
        "appearance, from the plugging to the list with it: {:?}",
        started.elapsed()
    );
    let before = discovery.now();
    let name = before.keys().next().unwrap();
    assert_eq!(
        discovery.driver.container_edits(name).await.unwrap().device_nodes[0].host_path,
        "/dev/ttyUSB0"
    );
    // Replugged into the same port: new numbers, the same device.
    host.unplug("/devices/pci0000:00/0000:00:14.0/usb1/1-1");
    host.plug(
        &DESKTOP
            .replace("ttyUSB0", "ttyUSB5")
            .replace("c188:0:", "c188:5:")
            .replace("001/005", "001/042"),
    );
    trigger_kernel_event();
    discovery
        .until("the adapter has another number", |devices| {
            *devices != *before && devices.len() == 1
        })
        .await;
    assert_eq!(
        discovery.driver.container_edits(name).await.unwrap().device_nodes[0].host_path,
        "/dev/ttyUSB5"
    );
}

#[tokio::test]
async fn a_change_of_a_directory_is_caught_by_the_directory() {
    let Some(host) = Host::new() else { return };
    let mut discovery = RunningDiscovery::start(
        host.configuration("- {name: test, paths: [\"/dev/test-*\"]}"),
        host.paths(),
    )
    .await;
    for round in 0..5 {
        let started = Instant::now();
        host.character("test-a", 240, 1);
        discovery.until("it appears", |devices| devices.len() == 1).await;
        let appeared = started.elapsed();
        let started = Instant::now();
        host.remove("test-a");
        discovery
            .until("it is gone", std::collections::BTreeMap::is_empty)
            .await;
        println!(
            "round {round}: appearance {appeared:?}, disappearance {:?}",
            started.elapsed()
        );
    }
    let change_counts = discovery.driver.change_counts();
    println!("change counts by {change_counts:?}");
    assert_eq!(change_counts.values().sum::<u64>(), 10);
}

/// A block device that the kernel can add and remove.
struct Zram(Option<String>);

impl Zram {
    const CONTROL: &str = "/sys/class/zram-control";

    fn add() -> Option<Self> {
        let number = std::fs::read_to_string(format!("{}/hot_add", Self::CONTROL)).ok()?;
        Some(Self(Some(number.trim().to_owned())))
    }

    fn node(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.0.as_deref().unwrap_or_default()))
    }

    fn remove(&mut self) {
        if let Some(number) = self.0.take() {
            std::fs::write(format!("{}/hot_remove", Self::CONTROL), number).unwrap();
        }
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        self.remove();
    }
}

#[tokio::test]
async fn a_device_of_the_running_kernel_is_found_and_lost() {
    let Some(host) = Host::new() else { return };
    let kinds = "- {name: ram, paths: [\"/dev/zram[0-9]*\"]}";
    let mut discovery = RunningDiscovery::start(host.configuration(kinds), HostPaths::default()).await;
    let before = discovery.now().len();
    let started = Instant::now();
    let Some(mut zram) = Zram::add() else {
        return not_run("this kernel makes no zram devices");
    };
    let node = zram.node();
    let has = move |devices: &drayman::api::crd::Devices| {
        devices
            .values()
            .any(|device| crate::discovery::host::text(device, "drayman.dev/path") == node.to_str().unwrap())
    };
    discovery.until("it appears", &has).await;
    println!("a real device: appearance {:?}", started.elapsed());
    let started = Instant::now();
    zram.remove();
    discovery.until("it is gone", |devices| !has(devices)).await;
    println!("a real device: disappearance {:?}", started.elapsed());
    assert_eq!(discovery.now().len(), before);
    let change_counts = discovery.driver.change_counts();
    println!("change counts by {change_counts:?}");
    let counts = [Cause::Kernel, Cause::Directory].map(|cause| change_counts.get(&cause));
    assert!(counts.into_iter().flatten().sum::<u64>() >= 2);
}

#[tokio::test]
async fn another_configuration_counts_at_once() {
    let Some(host) = Host::new() else { return };
    host.character("test-a", 240, 1);
    host.character("test-b", 240, 2);
    let mut discovery = RunningDiscovery::start(
        host.configuration("- {name: first, paths: [/dev/test-a]}"),
        host.paths(),
    )
    .await;
    assert_eq!(discovery.now().keys().collect::<Vec<_>>(), ["test-a"]);
    let second = host.configuration("- {name: second, paths: [/dev/test-b]}");
    discovery.configuration.send_replace(Arc::new(second));
    let devices = discovery
        .until("the other kind appears", |devices| devices.contains_key("test-b"))
        .await;
    assert_eq!(devices.len(), 1);
    assert_eq!(devices["test-b"].kind, "second");
    assert_eq!(discovery.driver.change_counts()[&Cause::Configuration], 1);
    // A claim may hold a device that is no longer configured, and keeps it while it exists.
    discovery.driver.container_edits("test-a").await.unwrap();
    let mut lists = std::pin::pin!(discovery.driver.devices());
    let before = lists.next().await;
    host.remove("test-a");
    let after = tokio::time::timeout(Duration::from_secs(20), lists.next()).await;
    assert_eq!(after.expect("a list without changes"), before);
    // What comes at its path later is another device.
    host.character("test-a", 240, 1);
    let gone = discovery.driver.container_edits("test-a").await.unwrap_err();
    assert_eq!(gone.reason(), "DeviceGone");
}
