//! PCI devices, by IDs and classes and as VFIO groups.

use crate::discovery::host::{Host, int, text};

/// A server: a graphics card with its audio function in one IOMMU group, a card with two functions bound to VFIO, and an NVMe disk.
const SERVER: &str = "
/devices/pci0000:16/0000:16:00.0 subsystem=pci vendor=0x8086 device=0x347a class=0x060400 driver=pcieport numa_node=0 iommu_group=20
/devices/pci0000:16/0000:16:00.0/0000:17:00.0 subsystem=pci vendor=0x10de device=0x1eb8 class=0x030000 driver=nouveau numa_node=0 iommu_group=40
/devices/pci0000:16/0000:16:00.0/0000:17:00.0/drm/card1 subsystem=drm node=c226:1:dri/card1
/devices/pci0000:16/0000:16:00.0/0000:17:00.0/drm/renderD128 subsystem=drm node=c226:128:dri/renderD128
/devices/pci0000:16/0000:16:00.0/0000:17:00.1 subsystem=pci vendor=0x10de device=0x10f8 class=0x040300 driver=snd_hda_intel numa_node=0 iommu_group=40
/devices/pci0000:64/0000:64:00.0/0000:65:00.0 subsystem=pci vendor=0x10de device=0x1eb8 class=0x030200 driver=vfio-pci numa_node=1 iommu_group=73
/devices/pci0000:64/0000:64:00.0/0000:65:00.0/vfio-dev/vfio0 subsystem=vfio-dev node=c511:0:vfio/devices/vfio0
/devices/pci0000:64/0000:64:00.0/0000:65:00.1 subsystem=pci vendor=0x10de device=0x10f8 class=0x040300 driver=vfio-pci numa_node=1 iommu_group=73
/devices/pci0000:64/0000:64:00.0/0000:66:00.0 subsystem=pci vendor=0x144d device=0xa80a class=0x010802 driver=nvme numa_node=1 iommu_group=74
/devices/pci0000:64/0000:64:00.0/0000:66:00.0/nvme/nvme0 subsystem=nvme node=c240:0:nvme0
/devices/pci0000:64/0000:64:00.0/0000:66:00.0/nvme/nvme0/nvme0n1 subsystem=block node=b259:1:nvme0n1
/devices/pci0000:64/0000:64:00.0/0000:67:00.0 subsystem=pci vendor=0x15b3 device=0x101e class=0x020000 driver=vfio-pci numa_node=1
";

fn server() -> Option<Host> {
    let host = Host::with(SERVER)?;
    host.character("vfio/vfio", 10, 196);
    host.character("vfio/73", 511, 1);
    let port = "devices/pci0000:64/0000:64:00.0";
    for (file, of_port, of_device) in [
        ("max_link_speed", "8.0 GT/s PCIe", "16.0 GT/s PCIe"),
        ("max_link_width", "16", "255"),
        ("current_link_speed", "2.5 GT/s PCIe", "2.5 GT/s PCIe"),
    ] {
        host.write_sysfs(&format!("{port}/{file}"), of_port);
        host.write_sysfs(&format!("{port}/0000:65:00.0/{file}"), of_device);
    }
    Some(host)
}

#[tokio::test]
async fn an_iommu_group_is_one_device_with_the_nodes_its_user_opens() {
    let Some(host) = server() else { return };
    let found = host
        .survey("- {name: gpu, pci: {match: [{vendor: 10de, driver: vfio-pci}]}}")
        .await;
    let device = found.only();
    assert_eq!(device.name, "pci-0000-65-00-0");
    let nodes: Vec<&str> = found.nodes(&device.name).iter().map(|(host, _)| *host).collect();
    assert_eq!(nodes, ["/dev/vfio/73", "/dev/vfio/vfio"]);
    assert_eq!(
        found.container_edits(&device.name).environment["DRAYMAN_DEVICE_PCI_0000_65_00_0"],
        "/dev/vfio/73"
    );
    assert!(
        found.why("65:00.1").contains("0000:65:00.0 represents"),
        "{}",
        found.why("65:00.1")
    );
    for (name, value) in [
        ("resource.kubernetes.io/pciBusID", "0000:65:00.0"),
        ("resource.kubernetes.io/pcieRoot", "pci0000:64"),
        ("drayman.dev/class", "030200"),
        ("drayman.dev/driver", "vfio-pci"),
    ] {
        assert_eq!(text(device, name), value, "{name}");
    }
    assert_eq!(int(device, "drayman.dev/numaNode"), Some(1));
    // The lower value of device and port.
    assert_eq!(int(device, "drayman.dev/linkSpeed"), Some(8000));
    // The kernel does not know the width.
    assert_eq!(int(device, "drayman.dev/linkWidth"), None);
}

#[tokio::test]
async fn an_incomplete_vfio_group_is_refused_with_its_functions() {
    let Some(host) = server() else { return };
    let found = host
        .survey("- {name: gpu, pci: {match: [{class: \"0300\"}]}}")
        .await;
    assert_eq!(found.names(), Vec::<&str>::new());
    let why = found.why("17:00.0");
    assert!(
        why.contains("0000:17:00.0 to nouveau, 0000:17:00.1 to snd_hda_intel"),
        "{why}"
    );
    let found = host
        .survey("- {name: net, pci: {match: [{address: \"0000:67:00.0\"}]}}")
        .await;
    assert!(found.why("67:00.0").contains("IOMMU"), "{}", found.why("67:00.0"));
}

#[tokio::test]
async fn a_vfio_device_keeps_its_name_when_its_group_changes() {
    let (Some(before), Some(after)) = (
        server(),
        Host::with(&SERVER.replace("iommu_group=73", "iommu_group=12")),
    ) else {
        return;
    };
    after.character("vfio/vfio", 10, 196);
    after.character("vfio/12", 511, 3);
    let kind = "- {name: gpu, pci: {match: [{vendor: 10de, driver: vfio-pci}]}}";
    let (before, after) = (before.survey(kind).await, after.survey(kind).await);
    assert_eq!(before.names(), after.names());
    assert_eq!(after.nodes(after.names()[0])[0].0, "/dev/vfio/12");
}

#[tokio::test]
async fn every_vfio_device_has_the_shared_container_node() {
    let Some(host) = server() else { return };
    host.plug("/devices/pci0000:64/0000:64:00.0/0000:68:00.0 subsystem=pci vendor=0x10de device=0x1eb8 class=0x030200 driver=vfio-pci iommu_group=75");
    host.character("vfio/75", 511, 2);
    let found = host
        .survey("- {name: gpu, pci: {match: [{vendor: 10de, driver: vfio-pci}]}}")
        .await;
    assert_eq!(found.names(), ["pci-0000-65-00-0", "pci-0000-68-00-0"]);
    for name in found.names() {
        assert_eq!(found.nodes(name)[1].0, "/dev/vfio/vfio");
    }
}

#[tokio::test]
async fn a_card_is_found_by_its_class_with_the_nodes_of_its_driver() {
    let Some(host) = server() else { return };
    let found = host
        .survey("- {name: gpu, pci: {match: [{class: \"03\", driver: nouveau}], nodes: [drm]}}")
        .await;
    let nodes: Vec<&str> = found
        .nodes(&found.only().name)
        .iter()
        .map(|(host, _)| *host)
        .collect();
    assert_eq!(nodes, ["/dev/dri/card1", "/dev/dri/renderD128"]);
}

#[tokio::test]
async fn the_system_disk_is_refused_however_it_is_found() {
    let Some(host) = server() else { return };
    let kind = "- {name: disk, pci: {match: [{class: \"0108\"}], nodes: [block]}";
    let found = host.survey(&format!("{kind}}}")).await;
    assert!(
        found.why("66:00.0").contains("is mounted"),
        "{}",
        found.why("66:00.0")
    );
    let found = host
        .survey(&format!("{kind}, dangerousPaths: [/dev/nvme0n1]}}"))
        .await;
    assert_eq!(found.names(), ["pci-0000-66-00-0"]);
}

#[tokio::test]
async fn the_functions_of_this_machine_are_read() {
    let Some(host) = Host::new() else { return };
    let kinds = host.configuration("- {name: all, pci: {match: [{driver: no-such-driver}]}}");
    let survey =
        drayman::node::discovery::survey(kinds, drayman::node::discovery::HostPaths::default()).await;
    let functions = std::fs::read_dir("/sys/bus/pci/devices").map_or(0, Iterator::count);
    let listed = survey
        .candidates
        .iter()
        .filter(|one| one.candidate.starts_with("PCI device"))
        .count();
    assert_eq!(listed, functions, "{:#?}", survey.candidates);
}
