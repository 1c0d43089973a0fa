//! A test machine with its own `/dev` and `/sys`.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drayman::api::crd::{Device, Devices};
use drayman::core::prepare::container_edits::ContainerEdits;
use drayman::node::config::NodeConfiguration;
use drayman::node::discovery::{HostDevices, HostPaths, Survey, survey};
use drayman::node::driver::NodeDriver;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use tokio::sync::watch;

use crate::not_run::is_root;

pub(crate) struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    /// A machine without devices. Returns `None` and prints the reason without root, which device nodes require.
    pub(crate) fn new() -> Option<Self> {
        if !is_root() {
            return None;
        }
        let host = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        for directory in [
            "dev",
            "sys/bus/usb/devices",
            "sys/bus/pci/devices",
            "sys/dev/char",
            "sys/dev/block",
        ] {
            std::fs::create_dir_all(host.path(directory)).unwrap();
        }
        std::fs::write(host.path("mountinfo"), "1 1 259:1 / / rw - ext4 /dev/root rw\n").unwrap();
        Some(host)
    }

    pub(crate) fn with(listing: &str) -> Option<Self> {
        let host = Self::new()?;
        host.plug(listing);
        Some(host)
    }

    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(path)
    }

    pub(crate) fn paths(&self) -> HostPaths {
        HostPaths {
            dev: self.path("dev"),
            sys: self.path("sys"),
            mountinfo: self.path("mountinfo"),
            swaps: self.path("swaps"),
        }
    }

    pub(crate) fn character(&self, path: &str, major: u32, minor: u32) {
        self.node(path, FileType::CharacterDevice, major, minor);
    }

    fn node(&self, path: &str, file_type: FileType, major: u32, minor: u32) {
        let path = self.path("dev").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        mknodat(
            CWD,
            path,
            file_type,
            Mode::RUSR | Mode::WUSR,
            makedev(major, minor),
        )
        .unwrap();
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.path("dev").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    pub(crate) fn remove(&self, path: &str) {
        std::fs::remove_file(self.path("dev").join(path)).unwrap();
    }

    pub(crate) fn write_sysfs(&self, path: &str, value: &str) {
        std::fs::write(self.path("sys").join(path), format!("{value}\n")).unwrap();
    }

    /// Adds devices. A line is a sysfs directory with its content: attributes, the links `subsystem`, `driver` and `iommu_group`, and a
    /// device node such as `node=c189:3:bus/usb/001/004`.
    pub(crate) fn plug(&self, listing: &str) {
        let sys = self.path("sys");
        for line in listing.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let mut words = line.split_whitespace();
            let device = sys.join(words.next().unwrap().trim_start_matches('/'));
            let name = device.file_name().unwrap().to_str().unwrap().to_owned();
            std::fs::create_dir_all(&device).unwrap();
            let values: BTreeMap<&str, &str> = words.map(|word| word.split_once('=').unwrap()).collect();
            for (&attribute, &value) in &values {
                let target = match attribute {
                    "subsystem" if ["usb", "pci"].contains(&value) => {
                        let _ = symlink(&device, sys.join(format!("bus/{value}/devices/{name}")));
                        sys.join("bus").join(value)
                    }
                    "subsystem" => sys.join("class").join(value),
                    "driver" => sys.join("drivers").join(value),
                    "iommu_group" => sys.join("kernel/iommu_groups").join(value),
                    "node" => {
                        self.plug_node(&device, value);
                        continue;
                    }
                    _ => {
                        std::fs::write(device.join(attribute), format!("{value}\n")).unwrap();
                        continue;
                    }
                };
                let _ = symlink(target, device.join(attribute));
            }
        }
    }

    fn plug_node(&self, device: &Path, node: &str) {
        let mut parts = node.splitn(3, ':');
        let (major, minor, path) = (
            parts.next().unwrap(),
            parts.next().unwrap(),
            parts.next().unwrap(),
        );
        let (kind, major) = major.split_at(1);
        let (file_type, folder) = match kind {
            "c" => (FileType::CharacterDevice, "char"),
            _ => (FileType::BlockDevice, "block"),
        };
        self.node(path, file_type, major.parse().unwrap(), minor.parse().unwrap());
        std::fs::write(device.join("dev"), format!("{major}:{minor}\n")).unwrap();
        let uevent = format!("MAJOR={major}\nMINOR={minor}\nDEVNAME={path}\n");
        std::fs::write(device.join("uevent"), uevent).unwrap();
        let link = self.path("sys/dev").join(folder).join(format!("{major}:{minor}"));
        let _ = std::fs::remove_file(&link);
        symlink(device, link).unwrap();
    }

    /// Removes a device with its children, nodes and links, as the kernel does.
    pub(crate) fn unplug(&self, device: &str) {
        let directory = self.path("sys").join(device.trim_start_matches('/'));
        let mut below = vec![directory.clone()];
        while let Some(path) = below.pop() {
            if let Ok(uevent) = std::fs::read_to_string(path.join("uevent")) {
                let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="));
                let _ = std::fs::remove_file(self.path("dev").join(name.unwrap_or("none")));
            }
            let entries = std::fs::read_dir(&path).unwrap().flatten();
            below.extend(
                entries
                    .filter(|entry| entry.file_type().unwrap().is_dir())
                    .map(|entry| entry.path()),
            );
            for bus in ["usb", "pci"] {
                let link = self
                    .path(format!("sys/bus/{bus}/devices"))
                    .join(path.file_name().unwrap());
                let _ = std::fs::remove_file(link);
            }
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    pub(crate) fn configuration(&self, kinds: &str) -> NodeConfiguration {
        let path = self.path("node.yaml");
        std::fs::write(&path, file(kinds)).unwrap();
        NodeConfiguration::read(&path).unwrap()
    }

    pub(crate) async fn survey(&self, kinds: &str) -> Found {
        Found(survey(self.configuration(kinds), self.paths()).await)
    }
}

/// A configuration file with these kinds.
pub(crate) fn file(kinds: &str) -> String {
    format!("apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n{kinds}")
}

/// The result of a search.
pub(crate) struct Found(pub(crate) Survey);

impl Found {
    pub(crate) fn names(&self) -> Vec<&str> {
        self.0.devices.iter().map(|device| device.name.as_str()).collect()
    }

    pub(crate) fn device(&self, name: &str) -> &Device {
        let device = self.0.devices.iter().find(|device| device.name == name);
        device.unwrap_or_else(|| panic!("no {name} among {:?}", self.names()))
    }

    pub(crate) fn only(&self) -> &Device {
        assert_eq!(self.0.devices.len(), 1, "{:#?}", self.0.candidates);
        &self.0.devices[0]
    }

    pub(crate) fn container_edits(&self, name: &str) -> &ContainerEdits {
        &self.0.container_edits_of[name]
    }

    /// Host and container paths of the nodes of a device.
    pub(crate) fn nodes(&self, name: &str) -> Vec<(&str, &str)> {
        let nodes = self.container_edits(name).device_nodes.iter();
        nodes
            .map(|node| (node.host_path.as_str(), node.container_path.as_str()))
            .collect()
    }

    /// Why a candidate was not used; `candidate` is a part of its description.
    pub(crate) fn why(&self, candidate: &str) -> &str {
        let found = self
            .0
            .candidates
            .iter()
            .find(|one| one.candidate.contains(candidate) && one.device.is_none());
        found.map_or_else(
            || panic!("no candidate {candidate} in {:#?}", self.0.candidates),
            |one| one.why.as_str(),
        )
    }
}

/// A string attribute of a device.
pub(crate) fn text<'a>(device: &'a Device, name: &str) -> &'a str {
    device
        .attributes
        .get(name)
        .and_then(|value| value.string.as_deref())
        .unwrap_or_default()
}

/// An integer attribute of a device.
pub(crate) fn int(device: &Device, name: &str) -> Option<i64> {
    device.attributes.get(name).and_then(|value| value.int)
}

/// A running discovery.
pub(crate) struct RunningDiscovery {
    pub(crate) driver: HostDevices,
    pub(crate) configuration: watch::Sender<Arc<NodeConfiguration>>,
    lists: BoxStream<'static, Vec<Device>>,
    devices: Arc<Devices>,
    _end: tokio_util::sync::DropGuard,
}

impl RunningDiscovery {
    pub(crate) async fn start(configuration: NodeConfiguration, paths: HostPaths) -> Self {
        let shutdown = tokio_util::sync::CancellationToken::new();
        let (configuration, receiver) = watch::channel(Arc::new(configuration));
        let driver = HostDevices::start(receiver, paths, shutdown.clone()).await;
        let mut discovery = Self {
            lists: driver.devices().boxed(),
            devices: Arc::default(),
            driver,
            configuration,
            _end: shutdown.drop_guard(),
        };
        discovery.next().await;
        discovery
    }

    /// Waits for the next list.
    async fn next(&mut self) {
        let list = self.lists.next().await.unwrap();
        let by_name = list.into_iter().map(|device| (device.name.clone(), device));
        self.devices = Arc::new(by_name.collect());
    }

    /// Waits until the devices meet a condition.
    pub(crate) async fn until(&mut self, what: &str, condition: impl Fn(&Devices) -> bool) -> Arc<Devices> {
        let met = async {
            while !condition(&self.devices) {
                self.next().await;
            }
        };
        // Less than the interval of periodic searches.
        let met = tokio::time::timeout(Duration::from_secs(45), met).await;
        met.unwrap_or_else(|_| panic!("timeout: {what}"));
        self.now()
    }

    /// The last list.
    pub(crate) fn now(&self) -> Arc<Devices> {
        Arc::clone(&self.devices)
    }
}
