//! Reads device properties from `/sys`. Never writes, and never reads outside.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use crate::api::crd::{DeviceNodeKind, DeviceNumber};
use crate::core::discovery::attributes::Attributes;
use crate::core::discovery::mounts::numbers;
use crate::core::discovery::pci::PciFacts;
use crate::core::discovery::usb::UsbFacts;

/// Largest read in bytes: a sysfs attribute is at most one page.
const TEXT_MAX: u64 = 4096;
/// Depth and number of directories that are searched per device.
const DEPTH_MAX: usize = 10;
const DIRECTORIES_MAX: usize = 4096;

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
    fn resolve(&self, path: &Path) -> Option<PathBuf> {
        path.canonicalize()
            .ok()
            .filter(|real| real.starts_with(&self.root))
    }

    /// USB devices, sorted by name. Includes hubs, but not interfaces, which have no vendor.
    pub(super) fn usb_devices(&self) -> Vec<OnBus<UsbFacts>> {
        self.on_bus("usb", usb_facts)
    }

    /// PCI functions, sorted by address.
    pub(super) fn pci_devices(&self) -> Vec<OnBus<PciFacts>> {
        self.on_bus("pci", pci_facts)
    }

    fn on_bus<T>(&self, bus: &str, facts_of: fn(&Path) -> Option<T>) -> Vec<OnBus<T>> {
        let devices = self.root.join("bus").join(bus).join("devices");
        let device = |name: String| {
            let directory = self.resolve(&devices.join(name))?;
            let facts = facts_of(&directory)?;
            Some(OnBus { directory, facts })
        };
        names(&devices).into_iter().filter_map(device).collect()
    }

    /// The block devices of every mounted btrfs. A mount table shows one of them, and the kernel lists no holder for the others.
    pub(super) fn btrfs_members(&self) -> Vec<(u32, u32)> {
        let file_systems = self.root.join("fs/btrfs");
        let mut members = Vec::new();
        for file_system in names(&file_systems) {
            let devices = file_systems.join(file_system).join("devices");
            for name in names(&devices) {
                let directory = self.resolve(&devices.join(name));
                members.extend(directory.and_then(|directory| numbers_of(&directory)));
            }
        }
        members
    }

    /// The disk of a partition; `None` for any other device.
    pub(super) fn disk_of(&self, number: DeviceNumber) -> Option<DeviceNumber> {
        if number.kind == DeviceNodeKind::Character {
            return None;
        }
        let directory = self.directory_of(number)?;
        let (major, minor) = numbers_of(disk_directory(&directory)?)?;
        Some(DeviceNumber {
            kind: number.kind,
            major,
            minor,
        })
    }

    /// The sysfs directory of a device number.
    pub(super) fn directory_of(&self, number: DeviceNumber) -> Option<PathBuf> {
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
    pub(super) fn describe(&self, directory: &Path, attributes: &mut Attributes) {
        let above: Vec<&Path> = directory
            .ancestors()
            .take_while(|path| path.starts_with(&self.root) && **path != self.root)
            .collect();
        for path in &above {
            if let Some(facts) = usb_facts(path) {
                attributes.usb(&facts);
                break;
            }
            if let Some(facts) = pci_facts(path) {
                attributes.pci(&facts);
                break;
            }
        }
        let numa_node = above.iter().find_map(|path| integer(&path.join("numa_node")));
        let driver = above.iter().find_map(|path| link_name(&path.join("driver")));
        attributes
            .int("numaNode", numa_node.filter(|node| *node >= 0))
            .text("driver", driver.as_deref());
    }
}

/// The device nodes of a device on a bus, in directory order. Excludes nodes of other bus devices below it, such as those behind a
/// hub or bridge.
pub(super) fn nodes_of(device: &Path) -> Vec<NodeOf> {
    let mut nodes = Vec::new();
    let mut visited = 0;
    let mut level = vec![device.to_owned()];
    for _ in 0..DEPTH_MAX {
        let mut next = Vec::new();
        for directory in level {
            visited += 1;
            if visited > DIRECTORIES_MAX {
                return nodes;
            }
            if directory != device && is_on_bus(&directory) {
                continue;
            }
            nodes.extend(node_at(&directory));
            for name in names(&directory) {
                let path = directory.join(name);
                if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
                    next.push(path);
                }
            }
        }
        level = next;
    }
    nodes
}

/// Reads a sysfs file of a device. `file` was validated to contain no `..`; links out of `/sys` are rejected.
pub(super) fn read_below(sys: &Path, directory: &Path, file: &str) -> Result<String, String> {
    let path = directory
        .join(file)
        .canonicalize()
        .map_err(|error| format!("{file} cannot be read: {error}"))?;
    let root = sys.canonicalize().map_err(|error| error.to_string())?;
    if !path.starts_with(&root) {
        return Err(format!("{file} leads out of /sys"));
    }
    read(&path).map_err(|error| format!("{file} cannot be read: {error}"))
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(TEXT_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes)
        .trim_end_matches(['\n', '\0'])
        .to_owned())
}

/// The trimmed text of an attribute; `None` if it is missing or empty.
fn text(path: &Path) -> Option<String> {
    read(path)
        .ok()
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
}

fn integer(path: &Path) -> Option<i64> {
    text(path)?.parse().ok()
}

/// A hexadecimal number, with or without `0x`.
fn hexadecimal(path: &Path) -> Option<u32> {
    let text = text(path)?;
    u32::from_str_radix(text.strip_prefix("0x").unwrap_or(&text), 16).ok()
}

fn short(path: &Path) -> Option<u16> {
    hexadecimal(path)?.try_into().ok()
}

pub(super) fn link_name(path: &Path) -> Option<String> {
    path.read_link().ok()?.file_name()?.to_str().map(str::to_owned)
}

/// The sorted names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .map(|entries| {
            entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .collect()
        })
        .unwrap_or_default();
    names.sort_unstable();
    names
}

/// The device number in a sysfs directory.
pub(super) fn numbers_of(directory: &Path) -> Option<(u32, u32)> {
    numbers(text(&directory.join("dev"))?.as_bytes())
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

fn usb_facts(directory: &Path) -> Option<UsbFacts> {
    let vendor = short(&directory.join("idVendor"))?;
    let sysfs_name = directory.file_name()?.to_str()?.to_owned();
    // The root hub is `usb<N>`; its parent directory is the controller.
    let is_root = |path: &&Path| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        name.strip_prefix("usb")
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let root = directory.ancestors().find(is_root);
    let controller = root
        .and_then(Path::parent)
        .and_then(|path| path.file_name()?.to_str())
        .map(|name| {
            let bus = if is_pci_address(name) { "pci" } else { "platform" };
            format!("{bus}-{name}")
        });
    let version = root.and_then(|root| text(&root.join("version")));
    Some(UsbFacts {
        sysfs_name,
        controller,
        bus_version: version
            .and_then(|version| version.split('.').next()?.parse().ok())
            .unwrap_or_default(),
        vendor,
        product: short(&directory.join("idProduct"))?,
        class: hexadecimal(&directory.join("bDeviceClass"))
            .and_then(|class| class.try_into().ok())
            .unwrap_or_default(),
        serial: text(&directory.join("serial")),
        manufacturer: text(&directory.join("manufacturer")),
        model: text(&directory.join("product")),
        speed: integer(&directory.join("speed")),
    })
}

fn is_pci_address(name: &str) -> bool {
    name.split(':').count() == 3 && name.contains('.')
}

fn pci_facts(directory: &Path) -> Option<PciFacts> {
    let address = directory.file_name()?.to_str()?.to_owned();
    if !is_pci_address(&address) {
        return None;
    }
    let root = directory.components().find_map(|component| match component {
        Component::Normal(name) => name
            .to_str()
            .filter(|name| name.starts_with("pci") && name.contains(':')),
        _ => None,
    });
    Some(PciFacts {
        vendor: short(&directory.join("vendor"))?,
        device: short(&directory.join("device"))?,
        class: hexadecimal(&directory.join("class"))?,
        driver: link_name(&directory.join("driver")),
        iommu_group: link_name(&directory.join("iommu_group")),
        numa_node: integer(&directory.join("numa_node")).filter(|node| *node >= 0),
        link_speed: text(&directory.join("current_link_speed")),
        link_width: integer(&directory.join("current_link_width")).filter(|width| *width > 0),
        root: root.map(str::to_owned),
        address,
    })
}

/// The device node of a sysfs directory.
fn node_at(directory: &Path) -> Option<NodeOf> {
    if !directory.join("dev").exists() {
        return None;
    }
    let uevent = read(&directory.join("uevent")).ok()?;
    let values: BTreeMap<&str, &str> = uevent.lines().filter_map(|line| line.split_once('=')).collect();
    let path = *values.get("DEVNAME")?;
    let inside = !path.split('/').any(|part| matches!(part, "" | "." | ".."));
    let subsystem = link_name(&directory.join("subsystem"))?;
    let kind = if subsystem == "block" {
        DeviceNodeKind::Block
    } else {
        DeviceNodeKind::Character
    };
    inside.then_some(())?;
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
