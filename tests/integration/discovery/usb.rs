//! USB devices of a desktop machine: hubs, serial adapters, a camera and a modem.

use crate::discovery::host::{Host, int, text};

/// A machine with one xHCI controller: two root hubs, a four-port hub with two serial adapters, a camera with a microphone, and a modem
/// with three serial ports.
pub(crate) const DESKTOP: &str = "
/devices/pci0000:00/0000:00:14.0 subsystem=pci vendor=0x8086 device=0xa36d class=0x0c0330 driver=xhci_hcd numa_node=-1
/devices/pci0000:00/0000:00:14.0/usb1 subsystem=usb idVendor=1d6b idProduct=0002 bDeviceClass=09 version=2.00 speed=480 serial=0000:00:14.0 product=xHCI_Host_Controller node=c189:0:bus/usb/001/001
/devices/pci0000:00/0000:00:14.0/usb2 subsystem=usb idVendor=1d6b idProduct=0003 bDeviceClass=09 version=3.10 speed=10000 serial=0000:00:14.0 product=xHCI_Host_Controller node=c189:128:bus/usb/002/001
/devices/pci0000:00/0000:00:14.0/usb1/1-1 subsystem=usb idVendor=05e3 idProduct=0608 bDeviceClass=09 speed=480 product=USB2.0_Hub node=c189:1:bus/usb/001/002
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0 subsystem=usb driver=hub
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.4 subsystem=usb idVendor=0403 idProduct=6001 bDeviceClass=00 speed=12 serial=A50285BI manufacturer=FTDI product=FT232R_USB_UART node=c189:4:bus/usb/001/005
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.4/1-1.4:1.0 subsystem=usb driver=ftdi_sio
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.4/1-1.4:1.0/ttyUSB0 subsystem=usb-serial driver=ftdi_sio
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.4/1-1.4:1.0/ttyUSB0/tty/ttyUSB0 subsystem=tty node=c188:0:ttyUSB0
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.2 subsystem=usb idVendor=1a86 idProduct=7523 bDeviceClass=ff speed=12 product=USB_Serial node=c189:3:bus/usb/001/004
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.2/1-1.2:1.0 subsystem=usb driver=ch341
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.2/1-1.2:1.0/ttyUSB1 subsystem=usb-serial driver=ch341
/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1.2/1-1.2:1.0/ttyUSB1/tty/ttyUSB1 subsystem=tty node=c188:1:ttyUSB1
/devices/pci0000:00/0000:00:14.0/usb1/1-8 subsystem=usb idVendor=046d idProduct=0825 bDeviceClass=ef speed=480 serial=9E0C2F40 node=c189:5:bus/usb/001/006
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.0 subsystem=usb driver=uvcvideo
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.0/video4linux/video0 subsystem=video4linux node=c81:0:video0
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.0/video4linux/video1 subsystem=video4linux node=c81:1:video1
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.0/media0 subsystem=media node=c510:0:media0
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.2 subsystem=usb driver=snd-usb-audio
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.2/sound/card1 subsystem=sound
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.2/sound/card1/controlC1 subsystem=sound node=c116:8:snd/controlC1
/devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:1.2/sound/card1/pcmC1D0c subsystem=sound node=c116:9:snd/pcmC1D0c
/devices/pci0000:00/0000:00:14.0/usb1/1-2 subsystem=usb idVendor=12d1 idProduct=1506 bDeviceClass=00 speed=480 node=c189:6:bus/usb/001/007
/devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0/ttyUSB2/tty/ttyUSB2 subsystem=tty node=c188:2:ttyUSB2
/devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.1/ttyUSB3/tty/ttyUSB3 subsystem=tty node=c188:3:ttyUSB3
/devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.2/ttyUSB4/tty/ttyUSB4 subsystem=tty node=c188:4:ttyUSB4
";

/// The same adapters after a reboot, one at another port: all numbers differ.
const RENUMBERED: &str = "
/devices/pci0000:00/0000:00:14.0 subsystem=pci vendor=0x8086 device=0xa36d class=0x0c0330
/devices/pci0000:00/0000:00:14.0/usb3 subsystem=usb idVendor=1d6b idProduct=0002 bDeviceClass=09 version=2.00 speed=480 node=c189:256:bus/usb/003/001
/devices/pci0000:00/0000:00:14.0/usb3/3-2 subsystem=usb idVendor=0403 idProduct=6001 bDeviceClass=00 serial=A50285BI node=c189:265:bus/usb/003/010
/devices/pci0000:00/0000:00:14.0/usb3/3-2/3-2:1.0 subsystem=usb driver=ftdi_sio
/devices/pci0000:00/0000:00:14.0/usb3/3-2/3-2:1.0/ttyUSB7/tty/ttyUSB7 subsystem=tty node=c188:7:ttyUSB7
/devices/pci0000:00/0000:00:14.0/usb3/3-1 subsystem=usb idVendor=05e3 idProduct=0608 bDeviceClass=09 node=c189:257:bus/usb/003/002
/devices/pci0000:00/0000:00:14.0/usb3/3-1/3-1.2 subsystem=usb idVendor=1a86 idProduct=7523 bDeviceClass=ff node=c189:266:bus/usb/003/011
/devices/pci0000:00/0000:00:14.0/usb3/3-1/3-1.2/3-1.2:1.0/ttyUSB6/tty/ttyUSB6 subsystem=tty node=c188:6:ttyUSB6
";

const ADAPTERS: &str = "- name: serial\n  usb:\n    match: [{vendor: \"0403\"}, {vendor: \"1a86\", product: \"7523\"}]\n    nodes: [tty]";

#[tokio::test]
async fn a_device_is_found_by_its_ids_with_its_nodes() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let found = host
        .survey("- {name: serial, usb: {match: [{vendor: \"0403\", product: \"6001\"}], nodes: [bus, tty]}}")
        .await;
    let device = found.only();
    assert_eq!(
        found.nodes(&device.name),
        [
            ("/dev/bus/usb/001/005", "/dev/bus/usb/001/005"),
            ("/dev/ttyUSB0", "/dev/ttyUSB0")
        ]
    );
    for (name, value) in [
        ("drayman.dev/bus", "usb"),
        ("drayman.dev/vendor", "0403"),
        ("drayman.dev/product", "6001"),
        ("drayman.dev/serial", "A50285BI"),
        ("drayman.dev/manufacturer", "FTDI"),
        ("drayman.dev/model", "FT232R_USB_UART"),
        ("drayman.dev/port", "pci-0000:00:14.0-usbv2-1.4"),
        ("drayman.dev/path", "/dev/bus/usb/001/005"),
        ("drayman.dev/nodes", "/dev/bus/usb/001/005,/dev/ttyUSB0"),
    ] {
        assert_eq!(text(device, name), value, "{name}");
    }
    assert_eq!(int(device, "drayman.dev/linkSpeed"), Some(12));
    assert_eq!(int(device, "drayman.dev/major"), Some(189));
    assert!(
        found.why("1-8").contains("vendor is 046d, not 0403"),
        "{}",
        found.why("1-8")
    );
}

#[tokio::test]
async fn a_composite_device_has_the_nodes_of_all_interfaces() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let found = host
        .survey("- {name: camera, usb: {match: [{vendor: \"046d\"}], nodes: [video4linux], optionalNodes: [media, sound, hidraw]}}")
        .await;
    let nodes: Vec<&str> = found
        .nodes(&found.only().name)
        .iter()
        .map(|(host, _)| *host)
        .collect();
    assert_eq!(
        nodes,
        [
            "/dev/video0",
            "/dev/video1",
            "/dev/media0",
            "/dev/snd/controlC1",
            "/dev/snd/pcmC1D0c"
        ]
    );
}

#[tokio::test]
async fn a_hub_and_a_device_plugged_into_it_are_two_devices() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let kind = |hubs: &str| {
        format!("- {{name: any, usb: {{match: [{{port: 1-1}}, {{vendor: 1d6b}}], hubs: {hubs}}}}}")
    };
    let found = host.survey(&kind("false")).await;
    assert_eq!(found.names(), Vec::<&str>::new());
    assert!(found.why("1-1 ").contains("hubs: true"));
    let found = host.survey(&kind("true")).await;
    // Both root hubs have the serial number of their controller but different product IDs.
    assert_eq!(found.names().len(), 3, "{:#?}", found.0.candidates);
    assert!(
        found
            .0
            .container_edits_of
            .values()
            .all(|container_edits| container_edits.device_nodes.len() == 1)
    );
}

#[tokio::test]
async fn a_device_without_the_requested_nodes_lists_its_own() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let found = host
        .survey("- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [hidraw]}}")
        .await;
    assert_eq!(found.names(), Vec::<&str>::new());
    assert!(
        found
            .why("1-1.4")
            .contains("no device node of hidraw, only bus, tty"),
        "{}",
        found.why("1-1.4")
    );
    assert!(
        found
            .0
            .candidates
            .iter()
            .any(|one| one.problem && one.candidate.contains("1-1.4"))
    );
}

#[tokio::test]
async fn names_survive_a_boot_that_renumbers_everything() {
    let (Some(before), Some(after)) = (Host::with(DESKTOP), Host::with(RENUMBERED)) else {
        return;
    };
    let (before, after) = (before.survey(ADAPTERS).await, after.survey(ADAPTERS).await);
    assert_eq!(before.names().len(), 2);
    assert_eq!(
        before.names(),
        after.names(),
        "one has moved to another port and has a serial number, the other has none and has stayed"
    );
    for (device, path) in [
        ("usb-0403-6001-a50285bi", "/dev/ttyUSB7"),
        ("usb-pci-0000-00-14-0", "/dev/ttyUSB6"),
    ] {
        let name = *after
            .names()
            .iter()
            .find(|name| name.starts_with(device))
            .unwrap();
        assert_eq!(after.nodes(name)[0].0, path);
    }
}

#[tokio::test]
async fn identical_devices_are_refused_or_distinguished_by_port() {
    let Some(host) = Host::with(DESKTOP) else { return };
    host.plug(
        "/devices/pci0000:00/0000:00:14.0/usb1/1-5 subsystem=usb idVendor=0403 idProduct=6001 serial=A50285BI node=c189:8:bus/usb/001/009
         /devices/pci0000:00/0000:00:14.0/usb1/1-5/1-5:1.0/ttyUSB9/tty/ttyUSB9 subsystem=tty node=c188:9:ttyUSB9",
    );
    let found = host
        .survey("- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty]}}")
        .await;
    assert_eq!(found.names(), Vec::<&str>::new());
    assert!(
        found.why("1-5").contains("identity: port"),
        "{}",
        found.why("1-5")
    );
    let found = host
        .survey("- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty], identity: port}}")
        .await;
    assert_eq!(found.names().len(), 2);
}

#[tokio::test]
async fn several_nodes_are_renamed_one_by_one() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let kind = |path: &str| {
        format!(
            "- {{name: modem, usb: {{match: [{{vendor: 12d1}}], nodes: [tty]}}, containerPaths: {{tty: \"{path}\"}}}}"
        )
    };
    let found = host.survey(&kind("/dev/modem{n}")).await;
    assert_eq!(
        found.nodes(&found.only().name),
        [
            ("/dev/ttyUSB2", "/dev/modem0"),
            ("/dev/ttyUSB3", "/dev/modem1"),
            ("/dev/ttyUSB4", "/dev/modem2")
        ]
    );
    let found = host.survey(&kind("/dev/modem")).await;
    assert!(found.why("1-2").contains("{n}"), "{}", found.why("1-2"));
}

#[tokio::test]
async fn the_first_of_two_matching_kinds_gets_the_device() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let found = host
        .survey(&format!(
            "- {{name: ports, paths: [\"/dev/ttyUSB*\"]}}\n{ADAPTERS}"
        ))
        .await;
    assert_eq!(found.names().len(), 5);
    assert!(found.0.devices.iter().all(|device| device.kind == "ports"));
    assert!(
        found
            .why("USB device 1-1.4")
            .contains("/dev/ttyUSB0 belongs to kind \"ports\""),
        "{}",
        found.why("USB device 1-1.4")
    );
    let port = found
        .0
        .devices
        .iter()
        .find(|device| text(device, "drayman.dev/path") == "/dev/ttyUSB0")
        .unwrap();
    assert_eq!(
        text(port, "drayman.dev/serial"),
        "A50285BI",
        "a path has the attributes of its device"
    );
    assert_eq!(text(port, "drayman.dev/driver"), "ftdi_sio");
}

#[tokio::test]
async fn a_node_that_differs_from_sysfs_is_refused() {
    let Some(host) = Host::with(DESKTOP) else { return };
    host.character("ttyUSB0", 188, 77);
    let found = host
        .survey("- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty]}}")
        .await;
    assert!(
        found.why("1-1.4").contains("sysfs says"),
        "{}",
        found.why("1-1.4")
    );
}

#[tokio::test]
async fn invalid_sysfs_entries_are_skipped_without_a_panic() {
    let Some(host) = Host::with(DESKTOP) else { return };
    host.plug(
        "/devices/junk/9-1 subsystem=usb idVendor=zzzz idProduct=6001
         /devices/junk/9-2 subsystem=usb idVendor=12345 idProduct=6001
         /devices/junk/9-3 subsystem=usb idVendor=0403
         /devices/junk/9-4 subsystem=usb idVendor=0403 idProduct=6001 bDeviceClass=xyz serial=S node=c189:200:../../etc/passwd
         /devices/junk/0000:00:zz.0 subsystem=pci vendor=0x8086 device=0x1 class=0x1234567890",
    );
    std::os::unix::fs::symlink("/etc", host.path("sys/bus/usb/devices/9-5")).unwrap();
    std::os::unix::fs::symlink("9-6", host.path("sys/bus/usb/devices/9-6")).unwrap();
    let found = host
        .survey("- {name: serial, usb: {match: [{vendor: \"0403\"}]}}")
        .await;
    assert_eq!(found.names().len(), 1, "{:#?}", found.0.candidates);
    assert!(
        found.why("9-4").contains("no device node of bus"),
        "{}",
        found.why("9-4")
    );
}
