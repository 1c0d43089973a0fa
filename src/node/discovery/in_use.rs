//! Finds the block devices that the node itself uses.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::HostPaths;
use super::node::{NodeKind, Numbers};
use crate::core::discovery::mounts::{mounts, numbers, swap_areas};

/// Numbers of mounted block devices and swap areas, and of the disks and volumes below them.
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
    let mut all = BTreeSet::new();
    while let Some(numbers) = above.pop() {
        if all.insert(numbers) {
            above.extend(below(&paths.sys, numbers));
        }
    }
    Ok(all)
}

fn block_numbers(dev: &Path, path: &[u8]) -> Option<(u32, u32)> {
    let below = Path::new(OsStr::from_bytes(path)).strip_prefix("/dev").ok()?;
    let metadata = std::fs::metadata(dev.join(below)).ok()?;
    Numbers::of(&metadata)
        .filter(|numbers| numbers.kind == NodeKind::Block)
        .map(|numbers| (numbers.major, numbers.minor))
}

/// The disk of a partition, and the members of a volume or array.
fn below(sys: &Path, (major, minor): (u32, u32)) -> Vec<(u32, u32)> {
    let Ok(device) = sys.join(format!("dev/block/{major}:{minor}")).canonicalize() else {
        return Vec::new();
    };
    let mut lower: Vec<PathBuf> = std::fs::read_dir(device.join("slaves"))
        .map(|slaves| slaves.flatten().map(|slave| slave.path()).collect())
        .unwrap_or_default();
    if device.join("partition").exists() {
        lower.extend(device.parent().map(Path::to_owned));
    }
    let number_of = |device: PathBuf| {
        std::fs::read(device.join("dev"))
            .ok()
            .and_then(|text| numbers(text.trim_ascii()))
    };
    lower.into_iter().filter_map(number_of).collect()
}

/// Names of the volumes and arrays that the kernel has built on a block device or its partitions, from `/sys/block/*/holders`.
pub(super) fn holders(sys: &Path, (major, minor): (u32, u32)) -> BTreeSet<String> {
    let device = sys.join(format!("dev/block/{major}:{minor}"));
    let entries = |directory: &Path| {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<PathBuf>>()
    };
    let partitions = entries(&device)
        .into_iter()
        .filter(|path| path.join("partition").exists());
    std::iter::once(device.clone())
        .chain(partitions)
        .flat_map(|device| entries(&device.join("holders")))
        .filter_map(|holder| Some(holder.file_name()?.to_string_lossy().into_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A disk 8:0 with partitions 8:1 (a physical volume) and 8:2; a volume 253:0 on 8:1, mounted as root; an unused disk 8:16 with
    /// partition 8:17; and a swap area 8:32.
    fn host() -> (tempfile::TempDir, HostPaths) {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        let devices = sys.join("devices");
        std::fs::create_dir_all(sys.join("dev/block")).unwrap();
        let add = |path: &str, numbers: &str, partition: bool| {
            let device = devices.join(path);
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("dev"), format!("{numbers}\n")).unwrap();
            if partition {
                std::fs::write(device.join("partition"), "1\n").unwrap();
            }
            symlink(&device, sys.join("dev/block").join(numbers)).unwrap();
            device
        };
        add("sda", "8:0", false);
        let volume_of = add("sda/sda1", "8:1", true);
        add("sda/sda2", "8:2", true);
        add("sdb", "8:16", false);
        add("sdb/sdb1", "8:17", true);
        let volume = add("dm-0", "253:0", false);
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
    fn a_volume_on_a_disk_or_its_partition_holds_both() {
        let (_root, paths) = host();
        for (device, partition) in [("sdb", false), ("sdb/sdb1", true)] {
            let holders_of = paths.sys.join("devices").join(device).join("holders");
            std::fs::create_dir_all(&holders_of).unwrap();
            std::fs::write(holders_of.join(if partition { "dm-7" } else { "md0" }), "").unwrap();
        }
        let named = |numbers| holders(&paths.sys, numbers).into_iter().collect::<Vec<_>>();
        assert_eq!(named((8, 16)), ["dm-7", "md0"]);
        assert_eq!(named((8, 17)), ["dm-7"]);
        assert_eq!(named((8, 0)), Vec::<String>::new());
        assert_eq!(named((9, 9)), Vec::<String>::new());
    }

    #[test]
    fn a_mount_whose_name_is_no_utf_8_does_not_withhold_every_disk() {
        let (_root, paths) = host();
        let mut mountinfo = std::fs::read(&paths.mountinfo).unwrap();
        mountinfo.extend(b"25 22 0:50 / /mnt/\xff rw - fuse \xfe rw\n");
        std::fs::write(&paths.mountinfo, mountinfo).unwrap();
        assert!(in_use(&paths).unwrap().contains(&(8, 0)));
    }

    #[test]
    fn what_cannot_be_known_is_an_error() {
        let (_root, mut paths) = host();
        paths.mountinfo = "/nonexistent".into();
        assert!(in_use(&paths).is_err());
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
