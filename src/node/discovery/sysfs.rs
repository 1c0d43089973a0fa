//! Reads device properties from `/sys`. Never writes, and never reads outside.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use rustix::io::Errno;

use crate::api::crd::{DeviceNodeKind, DeviceNumber};
use crate::core::discovery::attributes::Attributes;
use crate::core::discovery::mounts::numbers;
use crate::core::discovery::pci::{PciFacts, megatransfers};
use crate::core::discovery::usb::UsbFacts;

/// Largest read in bytes: a sysfs attribute is at most one page.
const TEXT_MAX: u64 = 4096;
/// Depth and number of directories that are searched per device.
const DEPTH_MAX: usize = 10;
const DIRECTORIES_MAX: usize = 4096;
/// Largest number of lanes of a PCIe link. The kernel reports more if it does not know the number.
const LANES_MAX: i64 = 32;

/// The directory where the host's `/sys` is visible.
#[derive(Debug)]
pub(super) struct SysRoot {
    /// Canonical path, without symbolic links.
    root: PathBuf,
}

/// A device node of a device on a bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeOf {
    /// Subsystem: `tty`, `video4linux`, `usb`.
    pub(super) subsystem: String,
    /// Path below `/dev`.
    pub(super) path: String,
    pub(super) number: DeviceNumber,
}

/// A device on a bus, with its sysfs directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OnBus<T> {
    pub(super) directory: PathBuf,
    pub(super) facts: T,
}

impl SysRoot {
    /// `None` if the directory does not exist.
    pub(super) fn new(root: &Path) -> Option<Self> {
        Some(Self {
            root: root.canonicalize().ok()?,
        })
    }

    /// Resolves a link, which must stay inside `/sys`.
    fn resolve(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let real = if_exists(path.canonicalize())?;
        Ok(real.filter(|real| real.starts_with(&self.root)))
    }

    /// USB devices, sorted by name. Includes hubs, but not interfaces, which have no vendor.
    pub(super) fn usb_devices(&self) -> io::Result<Vec<OnBus<UsbFacts>>> {
        self.on_bus("usb", usb_facts)
    }

    /// PCI functions, sorted by address.
    pub(super) fn pci_devices(&self) -> io::Result<Vec<OnBus<PciFacts>>> {
        self.on_bus("pci", pci_facts)
    }

    fn on_bus<T>(
        &self,
        bus: &str,
        facts_of: fn(&Path) -> io::Result<Option<T>>,
    ) -> io::Result<Vec<OnBus<T>>> {
        let devices = self.root.join("bus").join(bus).join("devices");
        let mut found = Vec::new();
        for name in names(&devices)? {
            if let Some(directory) = self.resolve(&devices.join(name))?
                && let Some(facts) = facts_of(&directory)?
            {
                found.push(OnBus { directory, facts });
            }
        }
        Ok(found)
    }

    /// The block devices of every mounted btrfs. A mount table shows one of them, and the kernel lists no holder for the others.
    pub(super) fn btrfs_members(&self) -> io::Result<Vec<(u32, u32)>> {
        let file_systems = self.root.join("fs/btrfs");
        let mut members = Vec::new();
        for file_system in names(&file_systems)? {
            let devices = file_systems.join(file_system).join("devices");
            for name in names(&devices)? {
                if let Some(directory) = self.resolve(&devices.join(name))? {
                    members.extend(numbers_of(&directory)?);
                }
            }
        }
        Ok(members)
    }

    /// The disk of a partition; `None` for any other device.
    pub(super) fn disk_of(&self, number: DeviceNumber) -> io::Result<Option<DeviceNumber>> {
        if number.kind == DeviceNodeKind::Character {
            return Ok(None);
        }
        let Some(directory) = self.directory_of(number)? else {
            return Ok(None);
        };
        let disk = disk_directory(&directory).map(numbers_of).transpose()?.flatten();
        Ok(disk.map(|(major, minor)| DeviceNumber {
            kind: number.kind,
            major,
            minor,
        }))
    }

    /// The disks that receive the commands of a character device: of SCSI (`/dev/sg0`, `/dev/bsg/0:0:0:0`), NVMe (`/dev/nvme0`, `/dev/ng0n1`), MMC
    /// (`/dev/mmcblk0rpmb`), flash (`/dev/mtd0`) and USB (`/dev/bus/usb/001/002`).
    pub(super) fn disks_behind(&self, number: DeviceNumber) -> io::Result<Vec<(u32, u32)>> {
        let Some(directory) = self.directory_of(number)? else {
            return Ok(Vec::new());
        };
        let mut devices = match link_name(&directory.join("subsystem")).as_deref() {
            Some("nvme" | "mtd") => vec![directory],
            Some("mmc_rpmb") => directory.parent().map(Path::to_owned).into_iter().collect(),
            Some("usb") => {
                let nodes = nodes_of(&directory)?.into_iter().map(|node| node.number);
                let disks = nodes.filter(|number| number.kind == DeviceNodeKind::Block);
                return Ok(disks.map(|number| (number.major, number.minor)).collect());
            }
            Some("scsi_generic" | "bsg" | "nvme-generic") => {
                self.resolve(&directory.join("device"))?.into_iter().collect()
            }
            _ => return Ok(Vec::new()),
        };
        // A disk with several NVMe controllers is below their subsystem, which has a link to each.
        let subsystems = self.root.join("class/nvme-subsystem");
        for name in names(&subsystems)? {
            if let Some(subsystem) = self.resolve(&subsystems.join(name))?
                && devices
                    .iter()
                    .filter_map(|device| file_name(device))
                    .any(|controller| subsystem.join(controller).exists())
            {
                devices.push(subsystem);
            }
        }
        let mut disks = Vec::new();
        for parent in devices
            .iter()
            .flat_map(|device| [device.clone(), device.join("block")])
        {
            for name in names(&parent)? {
                let directory = parent.join(name);
                if link_name(&directory.join("subsystem")).as_deref() == Some("block") {
                    disks.extend(numbers_of(&directory)?);
                }
            }
        }
        Ok(disks)
    }

    /// The sysfs directory of a device number.
    pub(super) fn directory_of(&self, number: DeviceNumber) -> io::Result<Option<PathBuf>> {
        let kind = match number.kind {
            DeviceNodeKind::Character => "char",
            DeviceNodeKind::Block => "block",
        };
        self.resolve(
            &self
                .root
                .join(format!("dev/{kind}/{}:{}", number.major, number.minor)),
        )
    }

    /// Adds the attributes of a device: those of the closest parent on a bus, the NUMA node and the driver.
    pub(super) fn describe(&self, directory: &Path, attributes: &mut Attributes) -> io::Result<()> {
        let above: Vec<&Path> = directory
            .ancestors()
            .take_while(|path| path.starts_with(&self.root) && **path != self.root)
            .collect();
        for path in &above {
            if let Some(facts) = usb_facts(path)? {
                attributes.usb(&facts);
                break;
            }
            if let Some(facts) = pci_facts(path)? {
                attributes.pci(&facts);
                break;
            }
        }
        let numa_node = above.iter().find_map(|path| integer(&path.join("numa_node")));
        let driver = above.iter().find_map(|path| link_name(&path.join("driver")));
        attributes
            .int("numaNode", numa_node.filter(|node| *node >= 0))
            .text("driver", driver.as_deref());
        Ok(())
    }
}

/// Whether the error means that a file or directory does not exist, or was removed while it was read.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOENT | Errno::NOTDIR | Errno::NODEV | Errno::LOOP)
    )
}

/// `None` if the file or directory does not exist.
pub(super) fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if is_gone(&error) => Ok(None),
        other => other.map(Some),
    }
}

/// The sorted names in a directory, none if it does not exist. Excludes names that are not UTF-8, which neither JSON nor protobuf can
/// carry.
pub(super) fn names(directory: &Path) -> io::Result<Vec<String>> {
    let read = || -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort_unstable();
        Ok(names)
    };
    Ok(if_exists(read())?.unwrap_or_default())
}

/// The device nodes of a device on a bus, in directory order. Excludes nodes of other bus devices below it, such as those behind a
/// hub or bridge.
pub(super) fn nodes_of(device: &Path) -> io::Result<Vec<NodeOf>> {
    let mut nodes = Vec::new();
    let mut visited = 0;
    let mut level = vec![device.to_owned()];
    for _ in 0..DEPTH_MAX {
        let mut next = Vec::new();
        for directory in level {
            visited += 1;
            if visited > DIRECTORIES_MAX {
                return Ok(nodes);
            }
            if directory != device && is_on_bus(&directory) {
                continue;
            }
            nodes.extend(node_at(&directory)?);
            for name in names(&directory)? {
                let path = directory.join(name);
                if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
                    next.push(path);
                }
            }
        }
        level = next;
    }
    Ok(nodes)
}

/// Why a sysfs file of a device cannot be read. The message continues a sentence that begins with the file.
#[derive(Debug, thiserror::Error)]
pub(super) enum SysfsError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("leads out of /sys")]
    Outside,
}

/// Reads a sysfs file of a device. `file` was validated to contain no `..`; links out of `/sys` are rejected.
pub(super) fn read_below(sys: &Path, directory: &Path, file: &str) -> Result<String, SysfsError> {
    let path = directory.join(file).canonicalize()?;
    if !path.starts_with(sys.canonicalize()?) {
        return Err(SysfsError::Outside);
    }
    Ok(read(&path)?)
}

fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(TEXT_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes)
        .trim_end_matches(['\n', '\0'])
        .to_owned())
}

/// The trimmed text of an attribute; `None` if it is missing or empty.
fn text(path: &Path) -> io::Result<Option<String>> {
    let text = if_exists(read(path))?.map(|text| text.trim().to_owned());
    Ok(text.filter(|text| !text.is_empty()))
}

/// The text of an attribute that only describes a device. Some cannot be read while the device sleeps.
fn description(path: &Path) -> Option<String> {
    text(path).ok().flatten()
}

fn integer(path: &Path) -> Option<i64> {
    description(path)?.parse().ok()
}

/// A hexadecimal number, with or without `0x`.
fn hexadecimal(path: &Path) -> io::Result<Option<u32>> {
    let number = |text: String| u32::from_str_radix(text.strip_prefix("0x").unwrap_or(&text), 16).ok();
    Ok(text(path)?.and_then(number))
}

fn short(path: &Path) -> io::Result<Option<u16>> {
    Ok(hexadecimal(path)?.and_then(|number| number.try_into().ok()))
}

pub(super) fn link_name(path: &Path) -> Option<String> {
    path.read_link().ok()?.file_name()?.to_str().map(str::to_owned)
}

fn file_name(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// The device number in a sysfs directory.
pub(super) fn numbers_of(directory: &Path) -> io::Result<Option<(u32, u32)>> {
    Ok(text(&directory.join("dev"))?.and_then(|text| numbers(text.as_bytes())))
}

/// The sysfs directory of a partition's disk, given that of the partition; `None` for any other device.
pub(super) fn disk_directory(directory: &Path) -> Option<&Path> {
    let is_partition = directory.join("partition").exists();
    directory.parent().filter(|_| is_partition)
}

fn is_on_bus(directory: &Path) -> bool {
    matches!(
        link_name(&directory.join("subsystem")).as_deref(),
        Some("usb" | "pci")
    ) && (directory.join("idVendor").exists() || directory.join("vendor").exists())
}

fn usb_facts(directory: &Path) -> io::Result<Option<UsbFacts>> {
    let (Some(sysfs_name), Some(vendor)) = (file_name(directory), short(&directory.join("idVendor"))?) else {
        return Ok(None);
    };
    let Some(product) = short(&directory.join("idProduct"))? else {
        return Ok(None);
    };
    // The root hub is `usb<N>`; its parent directory is the controller.
    let is_root = |path: &&Path| {
        file_name(path)
            .and_then(|name| name.strip_prefix("usb"))
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let root = directory.ancestors().find(is_root);
    let controller = root.and_then(Path::parent).and_then(file_name).map(|name| {
        let bus = if is_pci_address(name) { "pci" } else { "platform" };
        format!("{bus}-{name}")
    });
    let version = root
        .map(|root| text(&root.join("version")))
        .transpose()?
        .flatten();
    Ok(Some(UsbFacts {
        sysfs_name: sysfs_name.to_owned(),
        controller,
        bus_version: version
            .and_then(|version| version.split('.').next()?.parse().ok())
            .unwrap_or_default(),
        vendor,
        product,
        class: hexadecimal(&directory.join("bDeviceClass"))?
            .and_then(|class| class.try_into().ok())
            .unwrap_or_default(),
        serial: text(&directory.join("serial"))?,
        manufacturer: description(&directory.join("manufacturer")),
        model: description(&directory.join("product")),
        speed: integer(&directory.join("speed")),
    }))
}

fn is_pci_address(name: &str) -> bool {
    name.split(':').count() == 3 && name.contains('.')
}

fn pci_facts(directory: &Path) -> io::Result<Option<PciFacts>> {
    let Some(address) = file_name(directory).filter(|name| is_pci_address(name)) else {
        return Ok(None);
    };
    let ids = (
        short(&directory.join("vendor"))?,
        short(&directory.join("device"))?,
        hexadecimal(&directory.join("class"))?,
    );
    let (Some(vendor), Some(device), Some(class)) = ids else {
        return Ok(None);
    };
    let root = directory.components().find_map(|component| match component {
        Component::Normal(name) => name
            .to_str()
            .filter(|name| name.starts_with("pci") && name.contains(':')),
        _ => None,
    });
    Ok(Some(PciFacts {
        address: address.to_owned(),
        vendor,
        device,
        class,
        driver: link_name(&directory.join("driver")),
        iommu_group: link_name(&directory.join("iommu_group")),
        numa_node: integer(&directory.join("numa_node")).filter(|node| *node >= 0),
        link_speed: link_maximum(directory, "max_link_speed", |text| megatransfers(&text)),
        link_width: link_maximum(directory, "max_link_width", |text| {
            text.parse().ok().filter(|width| (1..=LANES_MAX).contains(width))
        }),
        root: root.map(str::to_owned),
    }))
}

/// The maximum that both ends of a PCIe link support. The current value varies with the load.
fn link_maximum(directory: &Path, file: &str, parse: impl Fn(String) -> Option<i64>) -> Option<i64> {
    let at = |directory: &Path| description(&directory.join(file)).and_then(&parse);
    let own = at(directory)?;
    Some(directory.parent().and_then(at).map_or(own, |port| port.min(own)))
}

/// The device node of a sysfs directory.
fn node_at(directory: &Path) -> io::Result<Option<NodeOf>> {
    if !directory.join("dev").exists() {
        return Ok(None);
    }
    let uevent = text(&directory.join("uevent"))?;
    Ok(uevent.and_then(|uevent| node_of(directory, &uevent)))
}

fn node_of(directory: &Path, uevent: &str) -> Option<NodeOf> {
    let values: BTreeMap<&str, &str> = uevent.lines().filter_map(|line| line.split_once('=')).collect();
    let path = *values.get("DEVNAME")?;
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return None;
    }
    let subsystem = link_name(&directory.join("subsystem"))?;
    let kind = if subsystem == "block" {
        DeviceNodeKind::Block
    } else {
        DeviceNodeKind::Character
    };
    Some(NodeOf {
        path: path.to_owned(),
        number: DeviceNumber {
            kind,
            major: values.get("MAJOR")?.parse().ok()?,
            minor: values.get("MINOR")?.parse().ok()?,
        },
        subsystem,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_empty_only_if_it_does_not_exist() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("b"), "").unwrap();
        std::fs::write(root.path().join("a"), "").unwrap();
        assert_eq!(names(root.path()).unwrap(), ["a", "b"]);
        for gone in ["missing", "a", "a/below"] {
            assert_eq!(
                names(&root.path().join(gone)).unwrap(),
                Vec::<String>::new(),
                "{gone}"
            );
        }
        assert!(names(&root.path().join("x".repeat(300))).is_err());
    }
}
