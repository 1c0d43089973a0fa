//! Unhealthy devices.

use crate::discovery::host::{Host, RunningDiscovery};

fn cause(devices: &drayman::api::crd::Devices, name: &str) -> Option<String> {
    devices.get(name).and_then(|device| device.unhealthy.clone())
}

#[tokio::test]
async fn a_node_that_cannot_be_opened_is_unhealthy_with_a_reason() {
    let Some(host) = Host::new() else { return };
    // The device numbers of no driver, of the null device, and of the watchdog, which must not be opened.
    host.character("test-broken", 240, 250);
    host.character("test-good", 1, 3);
    host.character("test-watchdog", 10, 130);
    // The second watchdog has a dynamic major number without a driver.
    host.character("test-watchdog1", 240, 251);
    let directory = host.path("sys").join("dev/char/240:251");
    std::fs::create_dir_all(&directory).unwrap();
    std::os::unix::fs::symlink("../../../class/watchdog", directory.join("subsystem")).unwrap();
    let found = host
        .survey("- {name: test, paths: [\"/dev/test-*\"], health: {open: readWrite}}")
        .await;
    let cause = |name: &str| found.device(name).unhealthy.clone().unwrap_or_default();
    assert_eq!(cause("test-good"), "");
    assert!(
        cause("test-broken").contains("/dev/test-broken cannot be opened: No such"),
        "{}",
        cause("test-broken")
    );
    for watchdog in ["test-watchdog", "test-watchdog1"] {
        let cause = cause(watchdog);
        assert!(cause.contains("reboots the machine"), "{cause}");
    }
}

#[tokio::test]
async fn a_kind_without_a_probe_is_not_opened() {
    let Some(host) = Host::new() else { return };
    host.character("test-broken", 240, 250);
    let found = host.survey("- {name: test, paths: [\"/dev/test-*\"]}").await;
    assert_eq!(found.only().unhealthy, None);
}

#[tokio::test]
async fn a_sysfs_value_decides_the_health_of_a_device() {
    let Some(host) = Host::with(crate::discovery::usb::DESKTOP) else {
        return;
    };
    let device = "devices/pci0000:00/0000:00:14.0/usb1/1-8";
    host.write_sysfs(&format!("{device}/authorized"), "1");
    let kind = "- {name: camera, usb: {match: [{vendor: 046d}]}, health: {sysfs: [{file: authorized, equals: \"1\"}], recoverAfter: 2}}";
    let mut discovery = RunningDiscovery::start(host.configuration(kind), host.paths()).await;
    let name = discovery.now().keys().next().unwrap().clone();
    assert_eq!(cause(&discovery.now(), &name), None);
    host.write_sysfs(&format!("{device}/authorized"), "0");
    // Any kernel event triggers a search, which reads the file.
    host.character("bus/usb/001/099", 189, 98);
    let triggered = std::fs::write("/sys/class/mem/null/uevent", "change").is_ok();
    if !triggered {
        return crate::not_run::not_run("kernel events cannot be triggered on this machine");
    }
    let devices = discovery
        .until("it is unhealthy", |devices| cause(devices, &name).is_some())
        .await;
    assert_eq!(cause(&devices, &name).unwrap(), "authorized is \"0\", expected 1");
    // Before the change, so that no pause of this process shortens the time.
    let began = std::time::Instant::now();
    host.write_sysfs(&format!("{device}/authorized"), "1");
    discovery
        .until("it is healthy again", |devices| cause(devices, &name).is_none())
        .await;
    println!("two good results took {:?}", began.elapsed());
    assert!(began.elapsed().as_secs() >= 4, "one good result is not enough");
}

#[tokio::test]
async fn a_file_that_leads_out_of_sysfs_is_not_read() {
    let Some(host) = Host::with(crate::discovery::usb::DESKTOP) else {
        return;
    };
    let link = host.path("sys/devices/pci0000:00/0000:00:14.0/usb1/1-8/secret");
    std::os::unix::fs::symlink("/etc/hostname", link).unwrap();
    let found = host
        .survey(
            "- {name: camera, usb: {match: [{vendor: 046d}]}, health: {sysfs: [{file: secret, equals: x}]}}",
        )
        .await;
    assert!(
        found
            .only()
            .unhealthy
            .as_deref()
            .unwrap()
            .contains("leads out of /sys")
    );
}
