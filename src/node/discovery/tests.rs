use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode as FileMode, OFlags, makedev, mknodat, open};
use tokio::time::{advance, resume, sleep};

use super::device::{FoundByName, FoundDevice};
use super::scan::{Scan, scan};
use super::search::published;
use super::*;
use crate::api::crd::{AttributeValue, Device, Devices, Mode};
use crate::core::discovery::attributes::fit;
use crate::core::discovery::health::HealthRecords;
use crate::core::names::device_name;
use crate::core::prepare::container_edits::DeviceNode;
use crate::node::driver::NodeDriver;

#[path = "../../../tests/support/not_run.rs"]
mod not_run;

/// A host with its own `/dev`. Creating device nodes requires root.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Option<Self> {
        if !not_run::is_root() {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("dev")).unwrap();
        std::fs::write(
            directory.path().join("mountinfo"),
            "1 1 259:1 / / rw - ext4 /dev/root rw\n",
        )
        .unwrap();
        Some(Self { directory })
    }

    fn paths(&self) -> HostPaths {
        let path = |name: &str| self.directory.path().join(name);
        HostPaths {
            dev: path("dev"),
            sys: path("sys"),
            mountinfo: path("mountinfo"),
            swaps: path("swaps"),
        }
    }

    fn dev(&self, path: &str) -> PathBuf {
        let path = self.directory.path().join("dev").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn node(&self, path: &str, file_type: FileType, major: u32, minor: u32) {
        mknodat(
            CWD,
            self.dev(path),
            file_type,
            FileMode::RUSR,
            makedev(major, minor),
        )
        .unwrap();
    }

    fn character(&self, path: &str, minor: u32) {
        self.node(path, FileType::CharacterDevice, 240, minor);
    }

    /// Adds a directory below `/sys/devices`.
    fn sysfs(&self, path: &str, subsystem: &str) -> PathBuf {
        let directory = self.paths().sys.join("devices").join(path);
        std::fs::create_dir_all(&directory).unwrap();
        symlink(
            Path::new("/sys/class").join(subsystem),
            directory.join("subsystem"),
        )
        .unwrap();
        directory
    }

    /// Adds the block device 259:`minor` to sysfs.
    fn disk(&self, path: &str, minor: u32) {
        let directory = self.sysfs(path, "block");
        std::fs::write(directory.join("dev"), format!("259:{minor}\n")).unwrap();
        let uevent = format!("MAJOR=259\nMINOR={minor}\nDEVNAME=disk\nDEVTYPE=disk\n");
        std::fs::write(directory.join("uevent"), uevent).unwrap();
    }

    /// Adds a character device at `name`, and to sysfs at `path`, with a link to `device`.
    fn character_of(&self, name: &str, minor: u32, path: &str, subsystem: &str, device: Option<&str>) {
        self.character(name, minor);
        let directory = self.sysfs(path, subsystem);
        let sys = self.paths().sys;
        if let Some(device) = device {
            symlink(sys.join("devices").join(device), directory.join("device")).unwrap();
        }
        let numbers = sys.join("dev/char");
        std::fs::create_dir_all(&numbers).unwrap();
        symlink(&directory, numbers.join(format!("240:{minor}"))).unwrap();
    }

    fn scan(&self, kinds: &str) -> Scan {
        self.scan_after(&FoundByName::new(), kinds)
    }

    fn scan_after(&self, before: &FoundByName, kinds: &str) -> Scan {
        scan(&configuration(kinds), &self.paths(), before)
    }
}

fn configuration(kinds: &str) -> NodeConfiguration {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.yaml");
    let text = format!("apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n{kinds}");
    std::fs::write(&path, text).unwrap();
    NodeConfiguration::read(&path).unwrap()
}

fn names(scan: &Scan) -> Vec<&str> {
    scan.found.keys().map(String::as_str).collect()
}

fn problems(scan: &Scan) -> Vec<&Candidate> {
    scan.candidates
        .iter()
        .filter(|candidate| candidate.problem)
        .collect()
}

fn problem<'a>(scan: &'a Scan, path: &str) -> &'a str {
    problems(scan)
        .into_iter()
        .find(|problem| problem.candidate == path)
        .map_or("", |problem| &problem.why)
}

#[test]
fn device_nodes_are_found_and_nothing_else() {
    let Some(host) = Host::new() else { return };
    host.character("test-b", 2);
    host.character("test-a", 1);
    host.character("other", 3);
    host.character(".test-hidden", 4);
    std::fs::write(host.dev("test-file"), "").unwrap();
    std::fs::create_dir(host.dev("test-directory")).unwrap();
    let scan = host.scan("- {name: test, paths: [\"/dev/test-*\"], permissions: r}");
    assert_eq!(names(&scan), ["test-a", "test-b"]);
    assert!(problems(&scan).is_empty(), "{scan:?}");
    let device = scan.found["test-a"].device("test-a");
    assert_eq!((device.kind.as_str(), device.mode), ("test", Mode::Claims));
    assert_eq!(
        device
            .attributes
            .get("drayman.dev/path")
            .unwrap()
            .string
            .as_deref(),
        Some("/dev/test-a")
    );
    assert_eq!(device.attributes.get("drayman.dev/major").unwrap().int, Some(240));
    assert_eq!(device.attributes.get("drayman.dev/minor").unwrap().int, Some(1));
}

#[test]
fn a_link_is_known_by_its_own_path_and_leads_to_the_node() {
    let Some(host) = Host::new() else { return };
    host.character("ttyUSB0", 1);
    host.character("ttyUSB1", 2);
    symlink("../../ttyUSB0", host.dev("serial/by-id/usb-A")).unwrap();
    symlink("/dev/ttyUSB1", host.dev("serial/by-id/usb-B")).unwrap();
    let scan = host.scan("- {name: serial, paths: [\"/dev/serial/by-*/usb-?\"]}");
    let nodes: Vec<(&str, &str)> = scan
        .found
        .values()
        .map(|found| (&*found.nodes[0].path, &*found.nodes[0].node.host_path))
        .collect();
    assert_eq!(
        nodes,
        [
            ("serial/by-id/usb-A", "/dev/ttyUSB0"),
            ("serial/by-id/usb-B", "/dev/ttyUSB1")
        ]
    );
    for directory in ["", "serial", "serial/by-id"] {
        let directory = host.dev(directory).canonicalize().unwrap();
        assert!(
            scan.directories
                .iter()
                .any(|path| path.canonicalize().unwrap() == directory),
            "{directory:?}"
        );
    }
}

#[test]
fn links_out_of_dev_are_refused_wherever_they_stand_in_the_path() {
    let Some(host) = Host::new() else { return };
    let outside = host.directory.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    mknodat(
        CWD,
        outside.join("secret"),
        FileType::CharacterDevice,
        FileMode::RUSR,
        makedev(240, 9),
    )
    .unwrap();
    symlink(outside.join("secret"), host.dev("test-link")).unwrap();
    symlink("../outside", host.dev("test-directory")).unwrap();
    let scan = host.scan(
        "- {name: test, paths: [\"/dev/test-*\", \"/dev/test-directory/*\", /dev/test-directory/secret]}",
    );
    assert_eq!(names(&scan), Vec::<&str>::new());
    assert!(
        problem(&scan, "/dev/test-link").contains("leads out of /dev"),
        "{scan:?}"
    );
    assert!(
        problem(&scan, "/dev/test-directory").contains("leads out of /dev"),
        "{scan:?}"
    );
    assert!(scan.directories.iter().all(|path| !path.ends_with("outside")));
}

#[test]
fn a_device_of_two_kinds_belongs_to_the_first_with_a_warning() {
    let Some(host) = Host::new() else { return };
    host.character("test-a", 1);
    symlink("test-a", host.dev("alias")).unwrap();
    let scan = host.scan(
        "- {name: first, paths: [\"/dev/test-*\"]}\n- {name: second, paths: [/dev/test-a]}\n- {name: third, paths: [/dev/alias]}",
    );
    assert_eq!(names(&scan), ["test-a"]);
    assert_eq!(scan.found["test-a"].kind.name, "first");
    assert!(problem(&scan, "/dev/test-a").contains("\"first\""), "{scan:?}");
    assert!(
        problem(&scan, "/dev/alias").contains("same device as /dev/test-a"),
        "{scan:?}"
    );
}

#[test]
fn the_first_of_two_devices_with_one_name_is_found() {
    let Some(host) = Host::new() else { return };
    // A name that is shortened, and a path that is the same.
    let shortened = device_name("by-id/x");
    host.character("by-id/x", 1);
    host.character(&shortened, 2);
    let scan = host.scan("- {name: all, paths: [\"/dev/by-id/*\", \"/dev/by-id-*\"]}");
    assert_eq!(names(&scan), [&shortened]);
    assert_eq!(&*scan.found[&shortened].nodes[0].path, "by-id/x");
    let why = problem(&scan, &format!("/dev/{shortened}"));
    assert!(why.contains("is taken by another device"), "{scan:?}");
}

#[test]
fn memory_devices_and_system_disks_must_be_allowed_one_by_one() {
    let Some(host) = Host::new() else { return };
    for (name, minor) in [("mem", 1), ("kmem", 2), ("port", 4), ("null", 3)] {
        host.node(name, FileType::CharacterDevice, 1, minor);
    }
    host.node("root", FileType::BlockDevice, 259, 1);
    host.node("spare", FileType::BlockDevice, 259, 2);
    let scan = host.scan("- {name: all, paths: [\"/dev/*\"]}");
    assert_eq!(names(&scan), ["null", "spare"]);
    assert!(problem(&scan, "/dev/mem").contains("dangerousPaths"), "{scan:?}");
    assert!(problem(&scan, "/dev/root").contains("is mounted"), "{scan:?}");
    let named = "- {name: named, paths: [/dev/mem, /dev/root]";
    assert_eq!(names(&host.scan(&format!("{named}}}"))), Vec::<&str>::new());
    let scan = host.scan(&format!("{named}, dangerousPaths: [/dev/root, /dev/port]}}"));
    assert_eq!(names(&scan), ["root"], "each is allowed by its own name");
}

/// Adds disks to sysfs, of which one per kind is mounted, and the character devices that send commands to them.
fn add_disks_with_commands(host: &Host) {
    // 259:1 is mounted. Two disks each of SCSI, of NVMe, and of NVMe with several controllers, then one each of flash, MMC and USB.
    let disks = [
        ("scsi0/block/sda", 1),
        ("scsi1/block/sdb", 2),
        ("nvme0/nvme0n1", 1),
        ("nvme1/nvme1n1", 3),
        ("subsys2/nvme2n1", 1),
        ("subsys3/nvme3n1", 4),
        ("mtd0/mtdblock0", 1),
        ("mmc0/block/mmcblk0", 1),
        ("usb1/host0/block/sdc", 1),
    ];
    for (path, minor) in disks {
        host.disk(path, minor);
    }
    let nodes = [
        ("sg0", "scsi0/scsi_generic/sg0", "scsi_generic", Some("scsi0")),
        ("sg1", "scsi1/scsi_generic/sg1", "scsi_generic", Some("scsi1")),
        ("bsg/0", "scsi0/bsg/0", "bsg", Some("scsi0")),
        ("bsg/1", "scsi1/bsg/1", "bsg", Some("scsi1")),
        ("nvme0", "nvme0", "nvme", None),
        ("nvme1", "nvme1", "nvme", None),
        ("ng0n1", "nvme0/ng0n1", "nvme-generic", Some("nvme0")),
        ("ng1n1", "nvme1/ng1n1", "nvme-generic", Some("nvme1")),
        ("nvme2", "nvme2", "nvme", None),
        ("nvme3", "nvme3", "nvme", None),
        ("ng2n1", "subsys2/ng2n1", "nvme-generic", Some("subsys2")),
        ("ng3n1", "subsys3/ng3n1", "nvme-generic", Some("subsys3")),
        ("mtd0", "mtd0", "mtd", None),
        ("rpmb", "mmc0/rpmb", "mmc_rpmb", None),
        ("bus/usb/001/002", "usb1", "usb", None),
        // Of no disk, although one is below the same device.
        ("tty0", "scsi0/tty0", "tty", Some("scsi0")),
    ];
    for (minor, (name, path, subsystem, device)) in (0..).zip(nodes) {
        host.character_of(name, minor, path, subsystem, device);
    }
    let sys = host.paths().sys;
    for (subsystem, controller) in [("subsys2", "nvme2"), ("subsys3", "nvme3")] {
        let class = sys.join("class/nvme-subsystem");
        std::fs::create_dir_all(&class).unwrap();
        symlink(sys.join("devices").join(subsystem), class.join(subsystem)).unwrap();
        let link = sys.join("devices").join(subsystem).join(controller);
        symlink(sys.join("devices").join(controller), link).unwrap();
    }
}

#[test]
fn character_devices_of_disks_in_use_must_be_allowed_one_by_one() {
    let Some(host) = Host::new() else { return };
    add_disks_with_commands(&host);
    let kinds = "- {name: all, paths: [\"/dev/*\", \"/dev/bsg/*\", \"/dev/bus/usb/001/*\"]";
    let scan = host.scan(&format!("{kinds}}}"));
    assert_eq!(names(&scan), ["ng1n1", "ng3n1", "sg1", "tty0"]);
    for (path, same) in [("nvme1", "ng1n1"), ("nvme3", "ng3n1"), ("bsg/1", "sg1")] {
        let problem = problem(&scan, &format!("/dev/{path}"));
        assert!(
            problem.contains(&format!("to the disk of /dev/{same}")),
            "{problem}"
        );
    }
    let in_use = [
        "sg0",
        "bsg/0",
        "nvme0",
        "ng0n1",
        "nvme2",
        "ng2n1",
        "mtd0",
        "rpmb",
        "bus/usb/001/002",
    ];
    for path in in_use {
        let problem = problem(&scan, &format!("/dev/{path}"));
        assert!(
            problem.contains("sends commands to a disk that is mounted"),
            "{problem}"
        );
        assert!(problem.contains("dangerousPaths"), "{problem}");
    }
    let scan = host.scan(&format!("{kinds}, dangerousPaths: [/dev/sg0]}}"));
    assert!(names(&scan).contains(&"sg0"), "{scan:?}");
    assert!(!names(&scan).contains(&"nvme0"), "{scan:?}");
    host.node("sdb", FileType::BlockDevice, 259, 2);
    let both = [
        "- {name: disks, paths: [/dev/sdb]}",
        "- {name: sg, paths: [/dev/sg1], dangerousPaths: [/dev/sg1]}",
    ];
    let scan = host.scan(&both.join("\n"));
    assert_eq!(names(&scan), ["sdb"]);
    assert!(
        problem(&scan, "/dev/sg1").contains("to the disk of /dev/sdb"),
        "{scan:?}"
    );
    let scan = host.scan(&[both[1], both[0]].join("\n"));
    assert_eq!(names(&scan), ["sg1"]);
    assert!(
        problem(&scan, "/dev/sdb").contains("the commands of /dev/sg1"),
        "{scan:?}"
    );
    std::fs::remove_file(host.dev("sdb")).unwrap();
    // Whether the disk is mounted is not known.
    std::fs::remove_file(host.paths().mountinfo).unwrap();
    let scan = host.scan(&format!("{kinds}}}"));
    assert_eq!(names(&scan), ["tty0"]);
    assert!(problem(&scan, "/dev/sg1").contains("is unknown"), "{scan:?}");
}

#[test]
fn a_disk_and_its_partition_are_never_two_devices() {
    let Some(host) = Host::new() else { return };
    let numbers = host.paths().sys.join("dev/block");
    std::fs::create_dir_all(&numbers).unwrap();
    for (name, path, minor) in [
        ("sdb", "sdb", 16),
        ("sdb1", "sdb/sdb1", 17),
        ("sdb2", "sdb/sdb2", 18),
    ] {
        let directory = host.paths().sys.join("devices").join(path);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join("dev"), format!("8:{minor}\n")).unwrap();
        if path != name {
            std::fs::write(directory.join("partition"), "1\n").unwrap();
        }
        symlink(&directory, numbers.join(format!("8:{minor}"))).unwrap();
        host.node(name, FileType::BlockDevice, 8, minor);
    }
    let scan = host.scan("- {name: all, paths: [\"/dev/sd*\"]}");
    assert_eq!(names(&scan), ["sdb"]);
    assert!(
        problem(&scan, "/dev/sdb1").contains("is a partition of /dev/sdb,"),
        "{scan:?}"
    );
    let scan = host.scan("- {name: parts, paths: [\"/dev/sdb?\"]}\n- {name: disks, paths: [/dev/sdb]}");
    assert_eq!(names(&scan), ["sdb1", "sdb2"]);
    assert!(
        problem(&scan, "/dev/sdb").contains("has the partition /dev/sdb2"),
        "{scan:?}"
    );
    // The disk of the partitions cannot be read.
    let disk = host.paths().sys.join("devices/sdb/dev");
    std::fs::remove_file(&disk).unwrap();
    std::fs::create_dir(&disk).unwrap();
    let scan = host.scan("- {name: all, paths: [\"/dev/sd*\"]}");
    assert_eq!(names(&scan), ["sdb"]);
    assert!(problem(&scan, "/dev/sdb1").contains("cannot be read"), "{scan:?}");
}

/// A path that cannot be read, because a part of it is too long.
fn unreadable() -> String {
    format!("/dev/{}", "x".repeat(300))
}

#[test]
fn devices_remain_while_their_directory_cannot_be_read() {
    let Some(host) = Host::new() else { return };
    host.character("test-a", 1);
    host.character("test-b", 2);
    host.character("hidden", 3);
    let kinds = format!(
        "- {{name: test, paths: [\"/dev/test-*\", \"{}/*\"]}}",
        unreadable()
    );
    let mut before = host.scan(&kinds).found;
    let hidden = host.scan("- {name: test, paths: [/dev/hidden]}").found["hidden"].clone();
    let kind = before["test-a"].kind.clone();
    before.insert("hidden".into(), FoundDevice { kind, ..hidden });
    std::fs::remove_file(host.dev("test-b")).unwrap();
    let scan = host.scan_after(&before, &kinds);
    assert!(scan.is_incomplete);
    assert_eq!(names(&scan), ["hidden", "test-a"], "the others have gone");
    assert!(problem(&scan, "/dev/").contains("too long"), "{scan:?}");
    // A device that another kind finds, or that another kind had, does not remain.
    let first = format!("- {{name: first, paths: [/dev/hidden]}}\n{kinds}");
    assert_eq!(
        host.scan_after(&before, &first).found["hidden"].kind.name,
        "first"
    );
    let other = kinds.replace("name: test", "name: other");
    assert_eq!(names(&host.scan_after(&before, &other)), ["test-a"]);
    // Nor does one whose node has another number.
    std::fs::remove_file(host.dev("hidden")).unwrap();
    host.character("hidden", 4);
    assert_eq!(names(&host.scan_after(&before, &kinds)), ["test-a"]);
}

#[test]
fn a_device_keeps_an_optional_node_that_cannot_be_searched() {
    let Some(host) = Host::new() else { return };
    host.character("test-a", 1);
    host.character("more-a", 2);
    let kinds = |optional: &str| {
        format!(
            "- {{name: test, groups: [{{required: [\"/dev/test-{{key}}\"], optional: [\"{optional}\"]}}]}}"
        )
    };
    let complete = host.scan(&kinds("/dev/more-{key}")).found["test-a"].clone();
    let unreadable = kinds(&format!("{}/{{key}}", unreadable()));
    let found = host.scan(&unreadable).found["test-a"].clone();
    assert_eq!((complete.nodes.len(), found.nodes.len()), (2, 1));
    let kind = found.kind;
    let before = FoundByName::from([("test-a".into(), FoundDevice { kind, ..complete })]);
    let scan = host.scan_after(&before, &unreadable);
    assert_eq!(scan.found["test-a"].nodes.len(), 2);
    std::fs::remove_file(host.dev("more-a")).unwrap();
    let scan = host.scan_after(&before, &unreadable);
    assert_eq!(scan.found["test-a"].nodes.len(), 1, "the node has gone");
}

#[test]
fn only_an_inventory_limits_the_attributes_of_all_devices() {
    let Some(host) = Host::new() else { return };
    host.character("test-a", 1);
    let mut device = host.scan("- {name: test, paths: [\"/dev/*\"]}").found["test-a"].clone();
    let attribute = |number| {
        let name = format!("drayman.dev/a{number}");
        (name, AttributeValue::string("x".repeat(60)))
    };
    device.attributes = (0..32).map(attribute).collect();
    let found: FoundByName = (0..1024)
        .map(|number| (format!("test-{number}"), device.clone()))
        .collect();
    let devices = published(&found, &HealthRecords::default());
    assert!(devices.values().all(|device| device.attributes.len() == 32));
    let mut devices: Vec<Device> = devices.into_values().collect();
    assert!(!fit(&mut devices).is_empty(), "they exceed an inventory");
}

#[test]
fn a_usb_device_remains_while_sysfs_cannot_be_read() {
    let Some(host) = Host::new() else { return };
    host.node("ttyUSB0", FileType::CharacterDevice, 188, 0);
    let device = host.paths().sys.join("devices/usb1/1-1");
    let bus = host.paths().sys.join("bus/usb/devices");
    for directory in [&device.join("tty"), &bus] {
        std::fs::create_dir_all(directory).unwrap();
    }
    symlink(&device, bus.join("1-1")).unwrap();
    symlink("../../../class/tty", device.join("tty/subsystem")).unwrap();
    for (file, text) in [
        ("idVendor", "0403"),
        ("idProduct", "6001"),
        ("serial", "a1"),
        ("tty/dev", "188:0"),
        ("tty/uevent", "MAJOR=188\nMINOR=0\nDEVNAME=ttyUSB0"),
    ] {
        std::fs::write(device.join(file), text).unwrap();
    }
    let kinds = "- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty]}}";
    let before = host.scan(kinds).found;
    assert!(before.contains_key("usb-0403-6001-a1"), "{before:?}");
    for (file, candidate) in [
        ("tty/uevent", "USB device 1-1 (0403:6001)"),
        ("idVendor", "/sys/bus/usb"),
    ] {
        // A directory cannot be read as a file.
        std::fs::remove_file(device.join(file)).unwrap();
        std::fs::create_dir(device.join(file)).unwrap();
        let scan = host.scan_after(&before, kinds);
        assert_eq!(scan.found, before, "{file}");
        assert!(problem(&scan, candidate).contains("cannot be read"), "{scan:?}");
    }
    std::fs::remove_file(host.dev("ttyUSB0")).unwrap();
    assert_eq!(names(&host.scan_after(&before, kinds)), Vec::<&str>::new());
}

#[test]
fn a_node_belongs_to_one_device_or_is_shared() {
    let Some(host) = Host::new() else { return };
    host.character("test-a", 1);
    host.character("test-b", 2);
    symlink("test-a", host.dev("alias")).unwrap();
    let owner = "- {name: owner, paths: [/dev/test-a]}\n";
    let sharer = "- {name: sharer, groups: [{required: [/dev/test-b], shared: [/dev/alias]}]}\n";
    let scan = host.scan(&format!("{owner}{sharer}"));
    assert_eq!(names(&scan), ["test-a"]);
    assert!(
        problem(&scan, "/dev/test-b").contains("shared node /dev/alias is the same device as /dev/test-a"),
        "{scan:?}"
    );
    let scan = host.scan(&format!("{sharer}{owner}"));
    assert_eq!(names(&scan), ["test-b"]);
    assert!(
        problem(&scan, "/dev/test-a").contains("is the same device as /dev/alias"),
        "{scan:?}"
    );
    let several = "- {name: owner, shares: 2, paths: [/dev/test-a]}\n";
    for kinds in [format!("{several}{sharer}"), format!("{sharer}{several}")] {
        assert_eq!(names(&host.scan(&kinds)), ["test-a", "test-b"]);
    }
}

#[test]
fn without_mountinfo_every_block_device_is_in_use() {
    let Some(host) = Host::new() else { return };
    host.node("spare", FileType::BlockDevice, 259, 2);
    std::fs::remove_file(host.paths().mountinfo).unwrap();
    let scan = host.scan("- {name: all, paths: [\"/dev/*\"]}");
    assert_eq!(names(&scan), Vec::<&str>::new());
    assert!(problem(&scan, "/dev/spare").contains("is unknown"), "{scan:?}");
}

#[test]
fn a_literal_path_is_reported_unless_it_is_missing() {
    let Some(host) = Host::new() else { return };
    std::fs::write(host.dev("file"), "").unwrap();
    symlink("nowhere", host.dev("broken")).unwrap();
    let scan = host.scan("- {name: test, paths: [/dev/file, /dev/missing, /dev/broken]}");
    assert!(
        problem(&scan, "/dev/file").contains("not a character or block device"),
        "{scan:?}"
    );
    assert!(problem(&scan, "/dev/broken").contains("No such file"), "{scan:?}");
    assert_eq!(problems(&scan).len(), 2);
}

#[test]
fn a_missing_dev_directory_is_reported() {
    let paths = HostPaths {
        dev: "/nonexistent".into(),
        ..HostPaths::default()
    };
    let kinds = configuration("- {name: test, paths: [/dev/x]}");
    let scan = scan(&kinds, &paths, &FoundByName::new());
    assert!(
        problems(&scan)
            .iter()
            .any(|problem| problem.candidate == "/nonexistent")
    );
}

async fn start(host: &Host, shutdown: &CancellationToken) -> HostDevices {
    let kinds = "- {name: test, paths: [\"/dev/test-*\", \"/dev/by-id/*\"], permissions: rw}";
    HostDevices::start(
        value::channel(Arc::new(configuration(kinds))).1,
        host.paths(),
        shutdown.clone(),
    )
    .await
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_first_search_is_repeated() {
    let Some(host) = Host::new() else { return };
    let shutdown = CancellationToken::new();
    host.character("test-a", 1);
    let kinds = format!("- {{name: test, paths: [/dev/test-a, {}]}}", unreadable());
    let began = tokio::time::Instant::now();
    let driver = HostDevices::start(
        value::channel(Arc::new(configuration(&kinds))).1,
        host.paths(),
        shutdown.clone(),
    )
    .await;
    assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
    assert!(driver.devices.borrow().contains_key("test-a"));
    shutdown.cancel();
}

/// Adds a USB device whose serial number cannot be read until [`answer`]. Returns the file.
fn add_hanging(sys: &Path) -> PathBuf {
    let device = sys.join("bus/usb/devices/1-1");
    std::fs::create_dir_all(&device).unwrap();
    // Opening a FIFO to read waits for a writer.
    let serial = device.join("serial");
    mknodat(CWD, &serial, FileType::Fifo, FileMode::RUSR | FileMode::WUSR, 0).unwrap();
    for (file, text) in [("idProduct", "6001"), ("idVendor", "0403")] {
        std::fs::write(device.join(file), text).unwrap();
    }
    serial
}

/// Ends a search that hangs. Needed before an assertion fails, because the runtime waits for the search.
async fn answer(serial: &Path) {
    let fifo = serial.with_extension("fifo");
    std::fs::rename(serial, &fifo).unwrap();
    resume();
    for _ in 0..500 {
        // Fails if no search reads it.
        if open(&fifo, OFlags::WRONLY | OFlags::NONBLOCK, FileMode::empty()).is_ok() {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// Advances the paused time until the condition holds. It stands still while a search hangs.
async fn advance_until(holds: impl Fn() -> bool) {
    for _ in 0..500 {
        if holds() {
            break;
        }
        advance(Duration::from_secs(1)).await;
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_search_that_hangs_is_awaited() {
    let root = tempfile::tempdir().unwrap();
    let paths = HostPaths {
        sys: root.path().to_owned(),
        ..HostPaths::default()
    };
    let serial = add_hanging(&paths.sys);
    let kinds = "- {name: test, paths: [/dev/null]}\n- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty]}}";
    let (_sender, followed) = value::channel(Arc::new(configuration(kinds)));
    let end = CancellationToken::new();
    let starting = tokio::spawn(HostDevices::start(followed, paths, end.clone()));
    for _ in 0..100 {
        advance(Duration::from_secs(1)).await;
        std::thread::sleep(Duration::from_millis(10));
    }
    let has_started = starting.is_finished();
    answer(&serial).await;
    assert!(
        !has_started,
        "an empty list would make devices of claims count as gone"
    );
    let driver = starting.await.unwrap();
    assert!(driver.devices.borrow().keys().eq(["null"]));
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn known_devices_are_probed_while_a_search_hangs() {
    let root = tempfile::tempdir().unwrap();
    let paths = HostPaths {
        sys: root.path().to_owned(),
        ..HostPaths::default()
    };
    // The numbers of `/dev/null`.
    let state = paths.sys.join("dev/char/1:3/state");
    std::fs::create_dir_all(state.parent().unwrap()).unwrap();
    std::fs::write(&state, "good").unwrap();
    let kinds = "- {name: test, paths: [/dev/null], health: {sysfs: [{file: state, equals: good}]}}\n\
                 - {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty]}}";
    let (_sender, followed) = value::channel(Arc::new(configuration(kinds)));
    let end = CancellationToken::new();
    let driver = HostDevices::start(followed, paths.clone(), end.clone()).await;
    let is_bad = || {
        let devices = driver.devices.borrow();
        let cause = devices.get("null").and_then(|device| device.unhealthy.as_deref());
        cause.is_some_and(|cause| cause.contains("bad"))
    };
    let was_bad = is_bad();
    let serial = add_hanging(&paths.sys);
    std::fs::write(&state, "bad").unwrap();
    driver.found.rescan.notify_one();
    advance_until(is_bad).await;
    let has_become_bad = is_bad();
    answer(&serial).await;
    assert!(!was_bad && has_become_bad);
    end.cancel();
}

async fn until(devices: &mut value::Receiver<Arc<Devices>>, names: &[&str]) {
    let here = devices.wait_for(|devices| devices.keys().eq(names));
    // Far below the resync interval.
    tokio::time::timeout(Duration::from_secs(10), here)
        .await
        .expect("the change was not noticed")
        .unwrap();
}

#[tokio::test]
async fn devices_are_noticed_at_once_also_in_new_directories() {
    let Some(host) = Host::new() else { return };
    let shutdown = CancellationToken::new();
    host.character("test-a", 1);
    let driver = start(&host, &shutdown).await;
    let mut devices = driver.devices.clone();
    until(&mut devices, &["test-a"]).await;
    host.character("test-b", 2);
    until(&mut devices, &["test-a", "test-b"]).await;
    std::fs::remove_file(host.dev("test-a")).unwrap();
    until(&mut devices, &["test-b"]).await;
    host.character("tty", 3);
    symlink("../tty", host.dev("by-id/x")).unwrap();
    until(&mut devices, &[&device_name("by-id/x"), "test-b"]).await;
    std::fs::remove_dir_all(host.dev("by-id")).unwrap();
    until(&mut devices, &["test-b"]).await;
    symlink("../tty", host.dev("by-id/x")).unwrap();
    until(&mut devices, &[&device_name("by-id/x"), "test-b"]).await;
    shutdown.cancel();
}

#[tokio::test]
async fn a_flood_of_events_causes_one_search_a_second() {
    let Some(host) = Host::new() else { return };
    let shutdown = CancellationToken::new();
    let driver = start(&host, &shutdown).await;
    let mut devices = driver.devices.clone();
    let began = std::time::Instant::now();
    for _ in 0..7 {
        host.character("test-a", 1);
        until(&mut devices, &["test-a"]).await;
        std::fs::remove_file(host.dev("test-a")).unwrap();
        until(&mut devices, &[]).await;
    }
    // The first ten are a burst, and a periodic search may notice one change. A slow machine takes longer still.
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    shutdown.cancel();
}

#[tokio::test]
async fn a_container_gets_the_node_at_the_path_that_was_configured() {
    let Some(host) = Host::new() else { return };
    let shutdown = CancellationToken::new();
    host.character("tty", 3);
    symlink("../tty", host.dev("by-id/x")).unwrap();
    let driver = start(&host, &shutdown).await;
    let container_edits = driver.container_edits(&device_name("by-id/x")).await.unwrap();
    let node = DeviceNode {
        host_path: "/dev/tty".into(),
        container_path: "/dev/by-id/x".into(),
        permissions: "rw".into(),
    };
    assert_eq!(container_edits.device_nodes, [node]);
    assert_eq!(container_edits.environment.len(), 1);
    shutdown.cancel();
}

#[tokio::test]
async fn a_device_that_has_gone_or_become_another_is_refused_at_once() {
    let Some(host) = Host::new() else { return };
    let shutdown = CancellationToken::new();
    host.character("test-a", 1);
    host.character("test-b", 2);
    let driver = start(&host, &shutdown).await;
    assert_eq!(
        driver.container_edits("nowhere").await.unwrap_err().reason(),
        "DeviceGone"
    );
    // These calls never wait, so that no search intervenes.
    std::fs::remove_file(host.dev("test-a")).unwrap();
    assert_eq!(
        driver.container_edits("test-a").await.unwrap_err().reason(),
        "DeviceGone"
    );
    std::fs::remove_file(host.dev("test-b")).unwrap();
    host.character("test-b", 7);
    assert_eq!(
        driver.container_edits("test-b").await.unwrap_err().reason(),
        "DeviceChanged"
    );
    let mut devices = driver.devices.clone();
    until(&mut devices, &["test-b"]).await;
    // One search may see the removal, and only the next one the new number.
    while driver.container_edits("test-b").await.is_err() {
        devices.changed().await.unwrap();
    }
    std::fs::remove_file(host.dev("test-b")).unwrap();
    symlink(Path::new("/etc/passwd"), host.dev("test-b")).unwrap();
    assert_eq!(
        driver.container_edits("test-b").await.unwrap_err().reason(),
        "DeviceGone"
    );
    shutdown.cancel();
}

#[tokio::test]
async fn a_disk_is_checked_again_when_it_is_allocated() {
    let Some(host) = Host::new() else { return };
    host.node("spare", FileType::BlockDevice, 259, 2);
    host.node("meant", FileType::BlockDevice, 259, 3);
    host.node("part", FileType::BlockDevice, 259, 4);
    host.disk("scsi/block/sda", 5);
    host.character_of("sg", 0, "scsi/scsi_generic/sg", "scsi_generic", Some("scsi"));
    let configuration = configuration("- {name: all, paths: [\"/dev/*\"], dangerousPaths: [/dev/meant]}");
    let (_sender, configuration) = value::channel(Arc::new(configuration));
    let end = CancellationToken::new();
    let devices = HostDevices::start(configuration, host.paths(), end.clone()).await;
    for device in ["spare", "meant", "part", "sg"] {
        devices.check_unused(device).await.unwrap();
    }
    let disk_of_sg = host.paths().sys.join("dev/block/259:5");
    std::fs::create_dir_all(disk_of_sg.join("holders")).unwrap();
    std::fs::write(disk_of_sg.join("holders/dm-1"), "").unwrap();
    let refused = devices.check_unused("sg").await.unwrap_err().to_string();
    assert!(
        refused.contains("the kernel has dm-1 on the disk of /dev/sg;"),
        "{refused}"
    );
    let unhealthy = |all: &Arc<Devices>| all.get("sg").is_some_and(|sg| sg.unhealthy.is_some());
    let mut list = devices.devices.clone();
    let shown = tokio::time::timeout(Duration::from_secs(30), list.wait_for(unhealthy)).await;
    shown.expect("unhealthy within 30 s").unwrap();
    std::fs::remove_dir_all(disk_of_sg).unwrap();
    let mounts = "1 1 259:1 / / rw - ext4 /dev/root rw\n\
                  2 1 259:2 / /mnt rw - ext4 /dev/spare rw\n\
                  3 1 259:3 / /opt rw - ext4 /dev/meant rw\n\
                  4 1 259:5 / /srv rw - ext4 /dev/sda rw\n";
    std::fs::write(host.paths().mountinfo, mounts).unwrap();
    // The first refusal causes a search, after which both have gone.
    let (refused, of_sg) = tokio::join!(devices.check_unused("spare"), devices.check_unused("sg"));
    let (refused, of_sg) = (refused.unwrap_err(), of_sg.unwrap_err().to_string());
    assert_eq!(refused.reason(), "DeviceInUse");
    assert!(refused.to_string().contains("/dev/spare is mounted"), "{refused}");
    assert!(
        of_sg.contains("/dev/sg sends commands to a disk that is mounted"),
        "{of_sg}"
    );
    devices.check_unused("meant").await.unwrap();
    let holders = host.paths().sys.join("dev/block/259:4/holders");
    std::fs::create_dir_all(&holders).unwrap();
    std::fs::write(holders.join("dm-3"), "").unwrap();
    let refused = devices.check_unused("part").await.unwrap_err();
    assert!(refused.to_string().contains("dm-3"), "{refused}");
    let disk = host.paths().sys.join("dev/block/259:4");
    std::fs::remove_dir_all(&disk).unwrap();
    symlink("x".repeat(300), disk).unwrap();
    let refused = devices.check_unused("part").await.unwrap_err().to_string();
    for text in [
        "on /dev/part is unknown",
        "list \"/dev/part\" in the kind's dangerousPaths",
    ] {
        assert!(refused.contains(text), "{refused}");
    }
    end.cancel();
}

#[tokio::test]
async fn a_forgotten_device_is_published_and_not_counted() {
    let Some(host) = Host::new() else { return };
    host.character("test-a", 1);
    host.character("test-b", 2);
    let (sender, followed) =
        value::channel(Arc::new(configuration("- {name: all, paths: [\"/dev/test-*\"]}")));
    let end = CancellationToken::new();
    let driver = HostDevices::start(followed, host.paths(), end.clone()).await;
    let mut devices = driver.devices.clone();
    sender.send_replace(Arc::new(configuration("- {name: b, paths: [\"/dev/test-b*\"]}")));
    until(&mut devices, &["test-b"]).await;
    let before = devices.borrow_and_update().clone();
    let counted = driver.change_counts();
    std::fs::remove_file(host.dev("test-a")).unwrap();
    let published = tokio::time::timeout(Duration::from_secs(10), devices.changed());
    published.await.expect("a claim may hold it").unwrap();
    assert_eq!((&*before, driver.change_counts()), (&**devices.borrow(), counted));
    end.cancel();
}
