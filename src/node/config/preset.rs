//! Predefined kinds for common devices: `preset: kvm`.

use super::pattern::PathPattern;
use super::source::{NodeGroup, Source};

/// A predefined kind. The file can override each field except its source.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// The value of `preset`, and the default name of the kind.
    pub name: &'static str,
    /// The purpose of the device.
    pub summary: &'static str,
    /// Capabilities of a container with the device, and its other requirements.
    pub caveat: &'static str,
    /// Access to the device nodes: a subset of `rwm`.
    pub permissions: &'static str,
    /// How many holders may share a device; one if unset.
    pub shares: Option<u32>,
    required: &'static [&'static str],
    optional: &'static [&'static str],
}

/// Kubelet's default limit of pods per node.
const EACH_POD: Option<u32> = Some(110);

/// All presets, sorted by name.
pub const PRESETS: [Preset; 10] = [
    Preset {
        name: "dri",
        summary: "graphics cards, to render and to compute",
        caveat: "each card with its render node; the render node is enough for most. Needs the group that owns the nodes (render, video) in the pod's supplementalGroups",
        permissions: "rw",
        shares: None,
        required: &["/dev/dri/by-path/{key}-render"],
        optional: &["/dev/dri/by-path/{key}-card"],
    },
    Preset {
        name: "fuse",
        summary: "file systems in user space",
        caveat: "to mount, the container needs CAP_SYS_ADMIN as well, or a user namespace of its own",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/fuse"],
        optional: &[],
    },
    Preset {
        name: "hwrng",
        summary: "the hardware's random number generator",
        caveat: "to read only. What one container reads, no other gets: a greedy one slows the others down",
        permissions: "r",
        shares: EACH_POD,
        required: &["/dev/hwrng"],
        optional: &[],
    },
    Preset {
        name: "kvm",
        summary: "virtual machines",
        caveat: "a container can run any number of virtual machines within its limits of CPU and memory; a flaw in KVM is a flaw in the node",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/kvm"],
        optional: &[],
    },
    Preset {
        name: "loop",
        summary: "block devices made of files",
        caveat: "to mount, the container needs CAP_SYS_ADMIN. Loop devices that are mounted on the node are left out; one that is only attached is not",
        permissions: "rw",
        shares: None,
        // Without partitions (`loop0p1`), whose data is that of the loop device.
        required: &[
            "/dev/loop[0-9]",
            "/dev/loop[0-9][0-9]",
            "/dev/loop[0-9][0-9][0-9]",
        ],
        optional: &[],
    },
    Preset {
        name: "serial",
        summary: "serial ports that are plugged in",
        caveat: "by the links that udev keeps, so that a port keeps its name; on a node without udev nothing is found, and usb with nodes: [tty] is the way. Needs the group dialout in the pod's supplementalGroups",
        permissions: "rw",
        shares: None,
        required: &["/dev/serial/by-id/*"],
        optional: &[],
    },
    Preset {
        name: "sound",
        summary: "the sound cards of the node, all of them as one device",
        caveat: "the container can listen to every microphone. Needs the group audio in the pod's supplementalGroups",
        permissions: "rw",
        shares: None,
        required: &["/dev/snd/controlC*"],
        optional: &["/dev/snd/*"],
    },
    Preset {
        name: "tun",
        summary: "tunnels and virtual network interfaces",
        caveat: "to make an interface, the container needs CAP_NET_ADMIN; it works in the pod's own network only",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/net/tun"],
        optional: &[],
    },
    Preset {
        name: "vhost-net",
        summary: "fast networks for virtual machines",
        caveat: "goes with kvm and tun. The kernel works for the container in threads that are counted to it, on kernels of 6.4 and later only",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/vhost-net"],
        optional: &[],
    },
    Preset {
        name: "video",
        summary: "cameras and capture cards",
        caveat: "each camera with the node for its metadata, by the links that udev keeps. Needs the group video in the pod's supplementalGroups",
        permissions: "rw",
        shares: None,
        required: &["/dev/v4l/by-path/{key}-video-index0"],
        optional: &["/dev/v4l/by-path/{key}-video-index1"],
    },
];

impl Preset {
    /// The preset with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        PRESETS.iter().find(|preset| preset.name == name)
    }

    /// The source of its devices: a group if it has optional nodes.
    pub(super) fn source(&self) -> Source {
        let patterns = |texts: &[&str], parse: fn(&str) -> Result<PathPattern, _>| {
            texts
                .iter()
                .filter_map(|text| parse(text).ok())
                .collect::<Vec<_>>()
        };
        if self.optional.is_empty() {
            return Source::Paths(patterns(self.required, PathPattern::parse));
        }
        Source::Groups(vec![NodeGroup {
            required: patterns(self.required, PathPattern::parse_of_group),
            optional: patterns(self.optional, PathPattern::parse_of_group),
            shared: Vec::new(),
        }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_describes_what_it_says() {
        for preset in &PRESETS {
            let mut wanted: Vec<&str> = preset.required.to_vec();
            wanted.extend(preset.optional);
            assert_eq!(preset.source().entries(), wanted, "{}", preset.name);
            assert!(Preset::named(preset.name).is_some());
        }
        let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        assert!(names.is_sorted(), "{names:?}");
    }

    #[test]
    fn the_preset_loop_has_no_partitions() {
        let preset = Preset::named("loop").unwrap();
        let is_matched = |path: &str| {
            let mut patterns = preset.required.iter();
            patterns.any(|text| glob::Pattern::new(text).unwrap().matches(path))
        };
        for (path, expected) in [
            ("/dev/loop0", true),
            ("/dev/loop17", true),
            ("/dev/loop255", true),
            ("/dev/loop0p1", false),
            ("/dev/loop-control", false),
        ] {
            assert_eq!(is_matched(path), expected, "{path}");
        }
    }
}
