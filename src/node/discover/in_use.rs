//! Which block devices the node itself lives on.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::HostPaths;
use super::node::{NodeKind, Numbers};

/// The numbers of the block devices that are mounted or swapped to, and of the disks and volumes below them.
pub(super) fn in_use(paths: &HostPaths) -> io::Result<BTreeSet<(u32, u32)>> {
    let mounts = std::fs::read_to_string(&paths.mountinfo)?;
    // A kernel without swap has no such file.
    let swaps = match std::fs::read_to_string(&paths.swaps) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        swaps => swaps?,
    };
    let named = mounts
        .lines()
        .filter_map(mount_source)
        .chain(swaps.lines().skip(1).filter_map(swap_area));
    let mut above: Vec<(u32, u32)> = mounts.lines().filter_map(mounted).collect();
    above.extend(named.filter_map(|path| block_numbers(&paths.dev, path)));
    let mut all = BTreeSet::new();
    while let Some(numbers) = above.pop() {
        if all.insert(numbers) {
            above.extend(below(&paths.sys, numbers));
        }
    }
    Ok(all)
}

/// The third field of a line of `mountinfo` (`proc_pid_mountinfo(5)`), unless the file system has no device of its own.
fn mounted(line: &str) -> Option<(u32, u32)> {
    numbers(line.split_whitespace().nth(2)?).filter(|(major, _)| *major != 0)
}

/// The source of a mount if it is a path: some file systems (btrfs) have numbers that are no device's.
fn mount_source(line: &str) -> Option<&str> {
    line.split_once(" - ")?
        .1
        .split_whitespace()
        .nth(1)
        .filter(|source| source.starts_with("/dev/"))
}

fn swap_area(line: &str) -> Option<&str> {
    line.split_whitespace()
        .next()
        .filter(|path| path.starts_with("/dev/"))
}

fn block_numbers(dev: &Path, path: &str) -> Option<(u32, u32)> {
    let metadata = std::fs::metadata(dev.join(path.strip_prefix("/dev/")?)).ok()?;
    Numbers::of(&metadata)
        .filter(|numbers| numbers.kind == NodeKind::Block)
        .map(|numbers| (numbers.major, numbers.minor))
}

/// The disk of a partition, and what a volume or an array is made of.
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
        std::fs::read_to_string(device.join("dev"))
            .ok()
            .and_then(|text| numbers(text.trim()))
    };
    lower.into_iter().filter_map(number_of).collect()
}

fn numbers(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A disk 8:0 with partitions 8:1 (a physical volume) and 8:2, a volume 253:0 on the first that is mounted as root,
    /// a disk 8:16 with partition 8:17 that is not, and a swap area 8:32.
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
    fn the_disk_below_the_root_file_system_is_in_use_with_all_that_lies_between() {
        let (_root, paths) = host();
        assert_eq!(
            in_use(&paths).unwrap(),
            BTreeSet::from([(253, 0), (8, 1), (8, 0)])
        );
    }

    #[test]
    fn what_cannot_be_known_is_an_error() {
        let (_root, mut paths) = host();
        paths.mountinfo = "/nonexistent".into();
        assert!(in_use(&paths).is_err());
    }

    #[test]
    fn the_disk_of_this_machine_is_in_use() {
        // Whatever holds the root file system here, if it is a device at all.
        let used = in_use(&HostPaths::default()).unwrap();
        let mounts = std::fs::read_to_string("/proc/1/mountinfo").unwrap();
        for line in mounts.lines() {
            if let Some(numbers) = mounted(line) {
                assert!(used.contains(&numbers), "{line}");
            }
        }
    }
}
