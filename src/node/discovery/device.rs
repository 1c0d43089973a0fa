//! [`HostDevices`], the built-in `NodeDriver`, and its devices: their device nodes, the use of these by the node itself, and their
//! container edits. Their names come from `scan`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt as _};
use rustix::fs::{major, minor};
use tokio::sync::{Notify, watch as value};
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::WatchStream;

use super::sysfs::{SysRoot, disk_directory, if_exists, is_gone, names, numbers_of};
use crate::api::crd::{Device, DeviceAttributes, DeviceNodeKind, DeviceNumber, Devices, Mode};
use crate::core::discovery::mounts::{mounts, swap_areas};
use crate::core::names::environment_name;
use crate::core::prepare::container_edits::{ContainerEdits, DeviceNode};
use crate::node::config::DeviceKind;
use crate::node::driver::{NodeDriver, NodeDriverError};

/// Where the host's files are visible to this process. Published paths always begin with the host's `/dev`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPaths {
    /// The host's `/dev`.
    pub dev: PathBuf,
    /// The host's `/sys`, which relates partitions and volumes to their disks.
    pub sys: PathBuf,
    /// The host's mounts. In a pod that does not share the host's PID namespace, this is the pod's own mount table, which is
    /// incomplete.
    pub mountinfo: PathBuf,
    /// The host's swap areas.
    pub swaps: PathBuf,
}

impl Default for HostPaths {
    fn default() -> Self {
        Self {
            dev: "/dev".into(),
            sys: "/sys".into(),
            mountinfo: "/proc/1/mountinfo".into(),
            swaps: "/proc/swaps".into(),
        }
    }
}

/// A discovered device. A node may have a thousand of them, and twice as many during a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundDevice {
    pub(super) kind: Arc<DeviceKind>,
    pub(super) mode: Mode,
    pub(super) attributes: DeviceAttributes,
    /// The device nodes; the first one identifies the device.
    pub(super) nodes: Box<[FoundNode]>,
    /// Its sysfs directory, if any.
    pub(super) sysfs: Option<Box<Path>>,
}

/// A device node of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundNode {
    /// The path of discovery, relative to `/dev`.
    pub(super) path: Box<str>,
    /// The path in the container, if it differs from `/dev/{path}`.
    pub(super) container_path: Option<Box<str>>,
    /// Whether the node belongs to this device alone.
    pub(super) own: bool,
    pub(super) node: HostDeviceNode,
    /// The disk, if the node is a partition.
    pub(super) disk: Option<DeviceNumber>,
    /// The block devices that the node gives access to: itself, or the disks that a character device sends commands to.
    pub(super) blocks: Vec<(u32, u32)>,
}

impl FoundNode {
    /// Whether the node is gone or has become another. A node that cannot be read counts as unchanged.
    pub(super) fn has_changed(&self, root: &DevRoot) -> bool {
        match root.identify(&self.path) {
            Ok(now) => now != self.node,
            Err(error) => !error.is_unread(),
        }
    }

    /// The numbers of [`Self::blocks`].
    pub(super) fn block_numbers(&self) -> impl Iterator<Item = DeviceNumber> {
        self.blocks.iter().map(|&(major, minor)| DeviceNumber {
            kind: DeviceNodeKind::Block,
            major,
            minor,
        })
    }

    /// The block device of the node, for messages.
    fn disk_name(&self) -> String {
        let path = &self.path;
        match self.node.number.kind {
            DeviceNodeKind::Block => format!("/dev/{path}"),
            DeviceNodeKind::Character => format!("the disk of /dev/{path}"),
        }
    }

    /// Continues a sentence about a node whose block device is in use.
    pub(super) fn is_mounted(&self) -> &'static str {
        match self.node.number.kind {
            DeviceNodeKind::Block => "is mounted, or something on it is",
            DeviceNodeKind::Character => "sends commands to a disk that is mounted, or something on it is",
        }
    }

    fn container_path(&self) -> String {
        match &self.container_path {
            Some(path) => path.to_string(),
            None => format!("/dev/{}", self.path),
        }
    }
}

impl FoundDevice {
    /// The device for the inventory.
    pub(super) fn device(&self, name: &str) -> Device {
        Device {
            name: name.to_owned(),
            kind: self.kind.name.clone(),
            mode: self.mode,
            attributes: self.attributes.clone(),
            unhealthy: None,
            shares: self.kind.shares,
            device_numbers: self
                .nodes
                .iter()
                .filter(|node| node.own)
                .map(|node| node.node.number)
                .collect(),
            taint_effect: self.kind.probe.taint_effect,
        }
    }

    /// The nodes with access to a block device, without those that the operator allows although it may be in use.
    fn disks(&self) -> impl Iterator<Item = &FoundNode> {
        let nodes = self.nodes.iter().filter(|node| !node.blocks.is_empty());
        nodes.filter(|node| !self.kind.dangerous_paths.contains(&*node.path))
    }

    /// Describes the node's own mount of a block device of this device.
    fn mounted(&self, paths: &HostPaths) -> Option<String> {
        let mut mounted = None;
        self.disks().find_map(|node| {
            let path = &node.path;
            match mounted.get_or_insert_with(|| in_use(paths)) {
                Ok(used) if node.blocks.iter().any(|block| used.contains(block)) => {
                    Some(format!("/dev/{path} {}; {}", node.is_mounted(), remedy(path)))
                }
                Ok(_) => None,
                Err(error) => Some(format!(
                    "whether {} is mounted is unknown ({error}); {}",
                    node.disk_name(),
                    remedy(path)
                )),
            }
        })
    }

    /// Describes the volumes and arrays that the kernel has built on a block device of this device. The error names the block device whose
    /// use is unknown.
    pub(super) fn held(&self, sys: &Path) -> Result<Option<String>, String> {
        for (node, block) in self
            .disks()
            .flat_map(|node| node.blocks.iter().map(move |block| (node, *block)))
        {
            let (disk, remedy) = (node.disk_name(), remedy(&node.path));
            let holders = holders(sys, block).map_err(|error| {
                format!("whether the kernel has a volume or array on {disk} is unknown ({error}); {remedy}")
            })?;
            if !holders.is_empty() {
                let holders: Vec<String> = holders.into_iter().collect();
                return Ok(Some(format!(
                    "the kernel has {} on {disk}; {remedy}",
                    holders.join(", ")
                )));
            }
        }
        Ok(None)
    }

    /// Container edits: the device nodes, a variable with the paths of the device's own nodes, and the kind's mounts and
    /// environment.
    pub(super) fn container_edits(&self, name: &str) -> ContainerEdits {
        let own = self.nodes.iter().filter(|node| node.own);
        let paths: Vec<String> = own.map(FoundNode::container_path).collect();
        let mut environment = self.kind.environment.clone();
        environment.insert(environment_name(name), paths.join(","));
        let node = |node: &FoundNode| DeviceNode {
            host_path: node.node.host_path.to_string(),
            container_path: node.container_path(),
            permissions: self.kind.permissions.clone(),
        };
        ContainerEdits {
            device_nodes: self.nodes.iter().map(node).collect(),
            environment,
            mounts: self.kind.mounts.clone(),
            ..ContainerEdits::default()
        }
    }
}

/// Devices by name.
pub(super) type FoundByName = BTreeMap<String, FoundDevice>;

/// The trigger of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// A uevent of the kernel.
    Kernel,
    /// A change in a watched directory.
    Directory,
    /// The periodic resync.
    Rescan,
    /// The recheck of an unhealthy device, or after an incomplete search.
    Recheck,
    /// A device that differed from the last search when it was requested.
    Request,
    /// A changed configuration.
    Configuration,
}

impl Cause {
    /// The cause as logged.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Directory => "directory",
            Self::Rescan => "rescan",
            Self::Recheck => "recheck",
            Self::Request => "request",
            Self::Configuration => "configuration",
        }
    }
}

/// Number of device changes detected by each cause. A cause that stays at zero on a machine with hotplugged devices is broken.
pub type ChangeCounts = BTreeMap<Cause, u64>;

/// The discovered devices, which the driver and its search share.
#[derive(Debug)]
pub(super) struct FoundDevices {
    pub(super) paths: HostPaths,
    /// Result of the last search.
    found: Mutex<Arc<FoundByName>>,
    /// Devices of earlier configurations, which claims may still hold.
    retired: Mutex<FoundByName>,
    /// Requests a search after a device was found changed.
    pub(super) rescan: Notify,
    pub(super) change_counts: value::Sender<ChangeCounts>,
}

impl FoundDevices {
    pub(super) fn new(paths: HostPaths) -> Self {
        Self {
            paths,
            found: Mutex::default(),
            retired: Mutex::default(),
            rescan: Notify::new(),
            change_counts: value::Sender::default(),
        }
    }

    /// Result of the last search.
    pub(super) fn found(&self) -> Arc<FoundByName> {
        Arc::clone(&self.found.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn retired(&self) -> MutexGuard<'_, FoundByName> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result of a search. Devices dropped by a new configuration are kept as retired, because claims may hold them.
    pub(super) fn remember(&self, found: Arc<FoundByName>, is_another: bool) {
        let mut retired = self.retired();
        retired.retain(|name, _| !found.contains_key(name));
        if is_another {
            let before = self.found();
            let gone = before.iter().filter(|(name, _)| !found.contains_key(*name));
            retired.extend(gone.map(|(name, found)| (name.clone(), found.clone())));
        }
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    /// Checks that the nodes of a device exist and still have the numbers that they had when it was found.
    fn check_unchanged(&self, device: &str, found: &FoundDevice) -> Result<(), NodeDriverError> {
        let gone = |problem: String| NodeDriverError::Gone {
            device: device.to_owned(),
            problem,
        };
        let root = DevRoot::new(&self.paths.dev).map_err(|error| gone(error.to_string()))?;
        for node in &found.nodes {
            let now = root
                .identify(&node.path)
                .map_err(|error: DevicePathError| gone(format!("/dev/{} {error}", node.path)))?;
            if now != node.node {
                return Err(NodeDriverError::Changed {
                    device: device.to_owned(),
                    before: node.node.to_string(),
                    now: now.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Forgets the retired devices whose nodes are gone or have changed: another device may come at their paths. Returns whether there
    /// were any.
    pub(super) fn forget_changed(&self) -> bool {
        let Ok(root) = DevRoot::new(&self.paths.dev) else {
            return false;
        };
        let mut retired = self.retired();
        let before = retired.len();
        retired.retain(|_, device| !device.nodes.iter().any(|node| node.has_changed(&root)));
        retired.len() < before
    }
}

/// The built-in [`NodeDriver`]: devices described by the node's configuration.
#[derive(Debug)]
pub struct HostDevices {
    pub(super) found: Arc<FoundDevices>,
    pub(super) devices: value::Receiver<Arc<Devices>>,
}

impl NodeDriver for HostDevices {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        WatchStream::new(self.devices.clone()).map(|devices| devices.values().cloned().collect())
    }

    /// Repeats the search's checks for mounts, swap areas and volumes on the device's disks, because a mount causes no event and the
    /// periodic search runs only once a minute.
    async fn check_unused(&self, device: &str) -> Result<(), NodeDriverError> {
        // A missing device is rejected by `container_edits`. For one without block devices there is nothing to read.
        let found = self.found.found().get(device).cloned();
        let Some(found) = found.filter(|found| found.disks().next().is_some()) else {
            return Ok(());
        };
        let all = self.found.clone();
        let name = device.to_owned();
        let check = spawn_blocking(move || {
            let held = || found.held(&all.paths.sys).unwrap_or_else(Some);
            let Some(problem) = found.mounted(&all.paths).or_else(held) else {
                return Ok(());
            };
            all.rescan.notify_one();
            Err(NodeDriverError::InUse {
                device: name,
                problem,
            })
        });
        check
            .await
            .unwrap_or_else(|_| Err(NodeDriverError::Ended(device.to_owned())))
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        // Only links and nodes in /dev are looked up, in memory.
        let found = self.found.found().get(device).cloned();
        let found = found.or_else(|| self.found.retired().get(device).cloned());
        let found = found.ok_or_else(|| NodeDriverError::Gone {
            device: device.to_owned(),
            problem: "device discovery does not find it".to_owned(),
        })?;
        self.found
            .check_unchanged(device, &found)
            .inspect_err(|_| self.found.rescan.notify_one())?;
        Ok(found.container_edits(device))
    }
}

/// The device number at a host path, with the host's `/dev` mounted at `dev`; `None` if there is no device node.
pub(in crate::node) fn device_number(dev: &Path, host_path: &str) -> Option<DeviceNumber> {
    let node = DevRoot::new(dev)
        .ok()?
        .identify(host_path.strip_prefix("/dev/")?)
        .ok()?;
    Some(node.number)
}

/// The directory where the host's `/dev` is visible.
pub(super) struct DevRoot {
    /// Canonical path, without symbolic links.
    root: PathBuf,
}

/// Identity of a device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostDeviceNode {
    /// Path of the node on the host, without symbolic links.
    pub(super) host_path: Box<str>,
    pub(super) number: DeviceNumber,
}

/// Why a path is not a usable device node.
#[derive(Debug, thiserror::Error)]
pub(super) enum DevicePathError {
    #[error("cannot be accessed: {0}")]
    Io(#[from] io::Error),
    #[error("leads out of /dev, to {0:?}")]
    Outside(PathBuf),
    #[error("is not a character or block device")]
    NoDevice,
    #[error("has a name that is not UTF-8")]
    NotUtf8,
}

impl DevicePathError {
    /// Whether the path could not be read, so that it may still lead to a device.
    pub(super) fn is_unread(&self) -> bool {
        matches!(self, Self::Io(error) if !is_gone(error))
    }
}

impl DevRoot {
    pub(super) fn new(root: &Path) -> Result<Self, DevicePathError> {
        Ok(Self {
            root: root.canonicalize()?,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.root
    }

    /// Identifies the device node at a path relative to the root. Symbolic links are followed within the root.
    pub(super) fn identify(&self, relative: &str) -> Result<HostDeviceNode, DevicePathError> {
        let real = self.resolve(&self.root.join(relative))?;
        // Does not follow links: a node that was replaced by a link meanwhile is detected.
        let number = number_of(&real.symlink_metadata()?).ok_or(DevicePathError::NoDevice)?;
        let below = real
            .strip_prefix(&self.root)
            .map_err(|_| DevicePathError::Outside(real.clone()))?;
        let below = below.to_str().ok_or(DevicePathError::NotUtf8)?;
        Ok(HostDeviceNode {
            host_path: format!("/dev/{below}").into(),
            number,
        })
    }

    /// Resolves a path, which must stay inside the root. An absolute link target below `/dev` refers to the host's `/dev`, even if
    /// that is mounted elsewhere.
    pub(super) fn resolve(&self, path: &Path) -> Result<PathBuf, DevicePathError> {
        let real = match path.read_link() {
            Ok(target) if target.starts_with("/dev") => {
                let below = target.strip_prefix("/dev").unwrap_or(&target);
                self.root.join(below).canonicalize()?
            }
            _ => path.canonicalize()?,
        };
        if real.starts_with(&self.root) {
            Ok(real)
        } else {
            Err(DevicePathError::Outside(real))
        }
    }
}

/// The device number of a device node; `None` for another file.
pub(super) fn number_of(metadata: &Metadata) -> Option<DeviceNumber> {
    let file_type = metadata.file_type();
    let kind = if file_type.is_char_device() {
        DeviceNodeKind::Character
    } else if file_type.is_block_device() {
        DeviceNodeKind::Block
    } else {
        return None;
    };
    Some(DeviceNumber {
        kind,
        major: major(metadata.rdev()),
        minor: minor(metadata.rdev()),
    })
}

/// Whether this is the machine's memory or I/O ports: `mem`, `kmem` and `port` in the kernel's
/// `Documentation/admin-guide/devices.txt`.
pub(super) fn is_memory(number: DeviceNumber) -> bool {
    number.kind == DeviceNodeKind::Character && number.major == 1 && matches!(number.minor, 1 | 2 | 4)
}

/// How to offer a dangerous device.
pub(super) fn remedy(path: &str) -> String {
    format!("to offer it anyway, list \"/dev/{path}\" in the kind's dangerousPaths")
}

/// Describes a device node for messages.
pub(super) fn described(number: DeviceNumber) -> String {
    let kind = match number.kind {
        DeviceNodeKind::Character => "character",
        DeviceNodeKind::Block => "block",
    };
    format!("{kind} device {}:{}", number.major, number.minor)
}

impl fmt::Display for HostDeviceNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", described(self.number), self.host_path)
    }
}

/// The numbers of block devices that are mounted or used as swap, of the disks and volumes below them, and of the partitions of all these.
/// But a disk that is in use only because of a partition has other partitions that are free.
pub(super) fn in_use(paths: &HostPaths) -> io::Result<BTreeSet<(u32, u32)>> {
    let mounted = mounts(&std::fs::read(&paths.mountinfo)?);
    // A kernel without swap support has no such file.
    let swapped = match std::fs::read(&paths.swaps) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
        swaps => swap_areas(&swaps?),
    };
    let named = mounted.sources.iter().chain(&swapped);
    let mut above: Vec<(u32, u32)> = named.filter_map(|path| block_numbers(&paths.dev, path)).collect();
    above.extend(mounted.numbers);
    if let Some(sys) = SysRoot::new(&paths.sys) {
        above.extend(sys.btrfs_members()?);
    }
    let mut above: Vec<((u32, u32), bool)> = above.into_iter().map(|numbers| (numbers, true)).collect();
    // Has a disk twice that is in use as a whole and by a partition.
    let mut all = BTreeSet::new();
    while let Some((numbers, is_whole)) = above.pop() {
        if all.insert((numbers, is_whole)) {
            above.extend(below(&paths.sys, numbers, is_whole)?);
        }
    }
    Ok(all.into_iter().map(|(numbers, _)| numbers).collect())
}

fn block_numbers(dev: &Path, path: &[u8]) -> Option<(u32, u32)> {
    let below = Path::new(OsStr::from_bytes(path)).strip_prefix("/dev").ok()?;
    let metadata = std::fs::metadata(dev.join(below)).ok()?;
    number_of(&metadata)
        .filter(|number| number.kind == DeviceNodeKind::Block)
        .map(|number| (number.major, number.minor))
}

/// The disk of a partition, the members of a volume or array, and the partitions of a disk that is in use as a whole; each with whether it
/// is in use as a whole itself, as members are.
fn below(sys: &Path, (major, minor): (u32, u32), is_whole: bool) -> io::Result<Vec<((u32, u32), bool)>> {
    let Some(device) = if_exists(sys.join(format!("dev/block/{major}:{minor}")).canonicalize())? else {
        return Ok(Vec::new());
    };
    let slaves = device.join("slaves");
    let members = names(&slaves)?.into_iter().map(|name| slaves.join(name));
    let mut lower: Vec<(PathBuf, bool)> = members.map(|member| (member, true)).collect();
    lower.extend(disk_directory(&device).map(|disk| (disk.to_owned(), false)));
    if is_whole {
        let partitions = partitions(&device)?.into_iter();
        lower.extend(partitions.map(|partition| (partition, false)));
    }
    let mut found = Vec::new();
    for (device, is_whole) in lower {
        found.extend(numbers_of(&device)?.map(|numbers| (numbers, is_whole)));
    }
    Ok(found)
}

/// The sysfs directories of a disk's partitions, given that of the disk.
fn partitions(disk: &Path) -> io::Result<Vec<PathBuf>> {
    let mut partitions: Vec<PathBuf> = names(disk)?.into_iter().map(|name| disk.join(name)).collect();
    partitions.retain(|directory| directory.join("partition").exists());
    Ok(partitions)
}

/// Names of the volumes and arrays that the kernel has built on a block device, its partitions or its disk, from `/sys/block/*/holders`.
fn holders(sys: &Path, (major, minor): (u32, u32)) -> io::Result<BTreeSet<String>> {
    let Some(device) = if_exists(sys.join(format!("dev/block/{major}:{minor}")).canonicalize())? else {
        return Ok(BTreeSet::new());
    };
    let mut directories = partitions(&device)?;
    // A volume on a whole disk contains its partitions, and is listed at the disk only.
    directories.extend(disk_directory(&device).map(Path::to_owned));
    directories.push(device);
    let mut holders = BTreeSet::new();
    for directory in directories {
        holders.extend(names(&directory.join("holders"))?);
    }
    Ok(holders)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    impl FoundNode {
        /// A node at this path, with a number that no device of a test has.
        pub(in crate::node::discovery) fn at(path: &str) -> Self {
            let number = DeviceNumber {
                kind: DeviceNodeKind::Character,
                major: 240,
                minor: 1,
            };
            Self {
                path: path.into(),
                container_path: None,
                own: true,
                node: HostDeviceNode {
                    host_path: format!("/dev/{path}").into(),
                    number,
                },
                disk: None,
                blocks: Vec::new(),
            }
        }
    }

    /// Adds a block device, whose path is below `/sys/devices`.
    fn add(sys: &Path, path: &str, numbers: &str) -> PathBuf {
        let device = sys.join("devices").join(path);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("dev"), format!("{numbers}\n")).unwrap();
        // Below its disk.
        if path.contains('/') {
            std::fs::write(device.join("partition"), "1\n").unwrap();
        }
        symlink(&device, sys.join("dev/block").join(numbers)).unwrap();
        device
    }

    /// A disk 8:0 with partitions 8:1 (a physical volume) and 8:2; a volume 253:0 on 8:1, mounted as root; an unused disk 8:16 with
    /// partition 8:17; and a swap area 8:32.
    fn host() -> (tempfile::TempDir, HostPaths) {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        std::fs::create_dir_all(sys.join("dev/block")).unwrap();
        add(&sys, "sda", "8:0");
        let volume_of = add(&sys, "sda/sda1", "8:1");
        add(&sys, "sda/sda2", "8:2");
        add(&sys, "sdb", "8:16");
        add(&sys, "sdb/sdb1", "8:17");
        let volume = add(&sys, "dm-0", "253:0");
        std::fs::create_dir(volume.join("slaves")).unwrap();
        symlink(volume_of, volume.join("slaves/sda1")).unwrap();
        std::fs::write(
            root.path().join("mountinfo"),
            "22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/mapper/root rw\n\
             23 22 0:21 / /proc rw - proc proc rw\n\
             24 22 0:44 /home /home rw - btrfs /dev/missing rw\n\
             a line of a newer kernel\n",
        )
        .unwrap();
        std::fs::write(
            root.path().join("swaps"),
            "Filename Type Size Used Priority\n/dev/missing partition 1 0 -2\n",
        )
        .unwrap();
        let paths = HostPaths {
            dev: root.path().join("dev"),
            sys,
            mountinfo: root.path().join("mountinfo"),
            swaps: root.path().join("swaps"),
        };
        (root, paths)
    }

    #[test]
    fn disks_below_the_root_file_system_are_in_use() {
        let (_root, paths) = host();
        assert_eq!(
            in_use(&paths).unwrap(),
            BTreeSet::from([(253, 0), (8, 1), (8, 0)])
        );
    }

    #[test]
    fn partitions_of_a_disk_in_use_as_a_whole_are_in_use() {
        let (_root, paths) = host();
        add(&paths.sys, "sdb/sdb2", "8:18");
        let used_with = |mounts: &str| {
            std::fs::write(&paths.mountinfo, mounts).unwrap();
            in_use(&paths).unwrap()
        };
        let first = "30 1 8:17 / /first rw - ext4 /dev/sdb1 rw\n";
        let disk = "31 1 8:16 / /disk ro - iso9660 /dev/sdb ro\n";
        let all = BTreeSet::from([(8, 16), (8, 17), (8, 18)]);
        assert_eq!(
            used_with(first),
            BTreeSet::from([(8, 16), (8, 17)]),
            "the other partition is free"
        );
        assert_eq!(used_with(disk), all);
        assert_eq!(used_with(&format!("{first}{disk}")), all);
        // A partition of a multipath device, which has the disk as a path.
        let partition = add(&paths.sys, "dm-2", "253:2");
        let multipath = add(&paths.sys, "dm-1", "253:1");
        let path = paths.sys.join("devices/sdb");
        for (device, member) in [(&partition, &multipath), (&multipath, &path)] {
            std::fs::create_dir(device.join("slaves")).unwrap();
            symlink(member, device.join("slaves/member")).unwrap();
        }
        let mut used = used_with("32 1 253:2 / /volume rw - ext4 /dev/mapper/mpatha2 rw\n");
        assert!(used.remove(&(253, 2)) && used.remove(&(253, 1)), "{used:?}");
        assert_eq!(used, all);
    }

    #[test]
    fn all_members_of_a_mounted_btrfs_are_in_use() {
        let (_root, paths) = host();
        let members = paths.sys.join("fs/btrfs/0c5b6f0e/devices");
        std::fs::create_dir_all(&members).unwrap();
        std::fs::create_dir(paths.sys.join("fs/btrfs/features")).unwrap();
        symlink("../../../../devices/sdb/sdb1", members.join("sdb1")).unwrap();
        let used = in_use(&paths).unwrap();
        assert!(
            used.contains(&(8, 17)) && used.contains(&(8, 16)),
            "with its disk: {used:?}"
        );
    }

    #[test]
    fn a_volume_on_a_disk_or_its_partition_holds_both() {
        let (_root, paths) = host();
        add(&paths.sys, "sdb/sdb2", "8:18");
        for (device, partition) in [("sdb", false), ("sdb/sdb1", true)] {
            let holders_of = paths.sys.join("devices").join(device).join("holders");
            std::fs::create_dir_all(&holders_of).unwrap();
            std::fs::write(holders_of.join(if partition { "dm-7" } else { "md0" }), "").unwrap();
        }
        let named = |numbers| {
            let holders = holders(&paths.sys, numbers).unwrap();
            holders.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(named((8, 16)), ["dm-7", "md0"]);
        assert_eq!(named((8, 17)), ["dm-7", "md0"]);
        assert_eq!(
            named((8, 18)),
            ["md0"],
            "a volume on another partition holds nothing of this one"
        );
        assert_eq!(named((8, 0)), Vec::<String>::new());
        assert_eq!(named((9, 9)), Vec::<String>::new());
    }

    #[test]
    fn a_mount_with_a_non_utf8_name_does_not_withhold_every_disk() {
        let (_root, paths) = host();
        let mut mountinfo = std::fs::read(&paths.mountinfo).unwrap();
        mountinfo.extend(b"25 22 0:50 / /mnt/\xff rw - fuse \xfe rw\n");
        std::fs::write(&paths.mountinfo, mountinfo).unwrap();
        assert!(in_use(&paths).unwrap().contains(&(8, 0)));
    }

    #[test]
    fn unreadable_disk_numbers_and_mounts_are_errors() {
        let (_root, mut paths) = host();
        // A disk below the root file system, whose number cannot be read.
        let number = paths.sys.join("devices/sda/dev");
        std::fs::remove_file(&number).unwrap();
        std::fs::create_dir(&number).unwrap();
        assert!(in_use(&paths).is_err());
        paths.mountinfo = "/nonexistent".into();
        assert!(in_use(&paths).is_err());
    }

    #[test]
    fn a_node_that_cannot_be_read_counts_as_unchanged() {
        let (root, _) = host();
        let root = DevRoot::new(root.path()).unwrap();
        for (path, has_changed) in [("missing", true), ("swaps", true), (&*"x".repeat(300), false)] {
            assert_eq!(FoundNode::at(path).has_changed(&root), has_changed, "{path}");
        }
    }

    #[test]
    fn the_disk_of_this_machine_is_in_use() {
        // The device of the root file system, if it is a block device.
        let used = in_use(&HostPaths::default()).unwrap();
        let told = std::fs::read("/proc/1/mountinfo").unwrap();
        for numbers in mounts(&told).numbers {
            assert!(used.contains(&numbers), "{numbers:?}");
        }
    }
}
