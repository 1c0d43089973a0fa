//! The block devices that the node itself uses, from `/proc`: mounted file systems and swap areas.
//!
//! An unreadable line is ignored and never hides another: mount names may contain any bytes. The kernel writes blanks, line ends and
//! backslashes in names as three octal digits (`mangle` in `fs/proc_namespace.c`).
//!
//! The crate `procfs-core` does neither: it takes text that is UTF-8 only, fails for the whole file when one line is not as expected
//! (an empty source), and leaves the octal digits in names.

use std::collections::BTreeSet;

/// The mounts listed in `mountinfo` (`proc_pid_mountinfo(5)`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts {
    /// Major and minor numbers of the file systems on a device.
    pub numbers: BTreeSet<(u32, u32)>,
    /// Paths below `/dev` from which file systems are mounted: some file systems (btrfs) have numbers that belong to no device.
    pub sources: BTreeSet<Vec<u8>>,
}

/// Parses `mountinfo`.
pub fn mounts(mountinfo: &[u8]) -> Mounts {
    let mut mounts = Mounts::default();
    for line in mountinfo.split(|&byte| byte == b'\n') {
        mounts.numbers.extend(mounted(line));
        mounts.sources.extend(source(line));
    }
    mounts
}

/// The paths below `/dev` in `/proc/swaps`.
pub fn swap_areas(swaps: &[u8]) -> BTreeSet<Vec<u8>> {
    let area = |line: &[u8]| {
        let path = unescaped(line.split(u8::is_ascii_whitespace).next()?);
        // The kernel's suffix for a node that was removed, and perhaps recreated, since.
        let path = path.strip_suffix(b" (deleted)").unwrap_or(&path);
        is_below_dev(path).then(|| path.to_owned())
    };
    // The first line has the column names.
    let lines = swaps.split(|&byte| byte == b'\n').skip(1);
    lines.filter_map(area).collect()
}

/// The mount point of the mount that contains `path`, and whether the mount is shared, so that mounts below it reach its peers. `path`
/// must be absolute and without symbolic links.
pub fn below(mountinfo: &[u8], path: &[u8]) -> Option<(Vec<u8>, bool)> {
    let mount = |line: &[u8]| {
        let mut fields = line.split(|&byte| byte == b' ');
        let point = unescaped(fields.nth(4)?);
        let rest = path.strip_prefix(point.as_slice())?;
        let lies_on = rest.is_empty() || rest.starts_with(b"/") || point == b"/";
        // The optional fields follow the mount options, up to the lone hyphen.
        let mut optional = fields.skip(1).take_while(|field| field != b"-");
        lies_on.then(|| (point, optional.any(|field| field.starts_with(b"shared:"))))
    };
    // Of several mounts at one mount point the last hides the others, and is the last in the list.
    let mounts = mountinfo.split(|&byte| byte == b'\n').filter_map(mount);
    mounts.max_by_key(|(point, _)| point.len())
}

/// Parses a device number as the kernel writes it, `8:1`.
pub fn numbers(text: &[u8]) -> Option<(u32, u32)> {
    let (major, minor) = std::str::from_utf8(text).ok()?.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The third field, unless the file system has no device.
fn mounted(line: &[u8]) -> Option<(u32, u32)> {
    let field = line.split(|&byte| byte == b' ').nth(2)?;
    numbers(field).filter(|(major, _)| *major != 0)
}

/// The second field after the lone hyphen, which ends the optional fields.
fn source(line: &[u8]) -> Option<Vec<u8>> {
    let mut fields = line.split(|&byte| byte == b' ');
    fields.find(|field| field == b"-")?;
    Some(unescaped(fields.nth(1)?)).filter(|path| is_below_dev(path))
}

fn is_below_dev(path: &[u8]) -> bool {
    path.starts_with(b"/dev/")
}

/// Decodes the kernel's escapes of a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        let escaped = (first == b'\\')
            .then(|| behind.split_at_checked(3))
            .flatten()
            .and_then(|(digits, behind)| {
                let value = |number: u32, digit: &u8| Some(number * 8 + char::from(*digit).to_digit(8)?);
                let byte = digits.iter().try_fold(0, value)?;
                Some((u8::try_from(byte).ok()?, behind))
            });
        let (byte, behind) = escaped.unwrap_or((first, behind));
        name.push(byte);
        rest = behind;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_devices_are_known_by_number_and_by_path() {
        let told = mounts(
            b"22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/mapper/root rw\n\
              23 22 0:21 / /proc rw - proc proc rw\n\
              24 22 0:44 /home /home rw shared:2 master:1 - btrfs /dev/sdb1 rw,subvol=/home\n",
        );
        assert_eq!(told.numbers, BTreeSet::from([(253, 0)]));
        assert_eq!(
            told.sources,
            BTreeSet::from([b"/dev/mapper/root".to_vec(), b"/dev/sdb1".to_vec()])
        );
    }

    #[test]
    fn a_name_with_a_blank_or_in_no_known_encoding_hides_nothing() {
        let told = mounts(
            b"24 22 0:44 / /mnt/a\\040-\\040b rw - btrfs /dev/disk/by-label/my\\040disk rw\n\
              25 22 8:17 / /mnt/\xff\xfe rw - ext4 /dev/\xff rw\n\
              26 22 0:50 / /mnt/empty rw - tmpfs  rw\n\
              27 22 8:33 / /mnt/last rw - ext4 /dev/sdc1 rw",
        );
        assert_eq!(told.numbers, BTreeSet::from([(8, 17), (8, 33)]));
        assert!(told.sources.contains(b"/dev/disk/by-label/my disk".as_slice()));
        assert!(told.sources.contains(b"/dev/sdc1".as_slice()));
        assert_eq!(told.sources.len(), 3, "{told:?}");
    }

    #[test]
    fn swap_areas_are_read_with_spaces_and_deleted_nodes() {
        let areas = swap_areas(
            b"Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
              /dev/sda3                               partition\t1\t0\t-2\n\
              /dev/my\\040swap\\040(deleted) partition 1 0 -3\n\
              /swapfile file 1 0 -4\n",
        );
        assert_eq!(
            areas,
            BTreeSet::from([b"/dev/sda3".to_vec(), b"/dev/my swap".to_vec()])
        );
        assert_eq!(swap_areas(b""), BTreeSet::new());
    }

    #[test]
    fn a_backslash_that_begins_nothing_is_a_backslash() {
        for (field, name) in [
            (&b"a\\040b"[..], &b"a b"[..]),
            (b"a\\134040", b"a\\040"),
            (b"\\", b"\\"),
            (b"a\\04", b"a\\04"),
            (b"\\999", b"\\999"),
            (b"\\777", b"\\777"),
            (b"\\+40", b"\\+40"),
        ] {
            assert_eq!(unescaped(field), name, "{field:?}");
        }
    }

    #[test]
    fn a_path_lies_on_the_last_of_the_nearest_mounts() {
        let told = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
              23 22 0:21 / /var/lib rw master:2 - tmpfs tmpfs rw\n\
              24 23 0:22 / /var/lib rw master:2 shared:3 - tmpfs shared:9 rw\n\
              25 22 0:23 / /my\\040disk rw - tmpfs tmpfs rw\n\
              no mount\n";
        let at = |path: &str| {
            below(told, path.as_bytes())
                .map(|(point, is_shared)| (String::from_utf8(point).unwrap(), is_shared))
        };
        let expected = |point: &str, is_shared| Some((point.to_owned(), is_shared));
        assert_eq!(at("/var/lib/kubelet"), expected("/var/lib", true));
        assert_eq!(at("/var/lib"), expected("/var/lib", true));
        assert_eq!(at("/var/library"), expected("/", true));
        assert_eq!(at("/my disk/kubelet"), expected("/my disk", false));
        assert_eq!(below(b"", b"/var"), None);
    }
}
