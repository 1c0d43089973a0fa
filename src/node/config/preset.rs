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
        summary: "graphics cards, for rendering and computing",
        caveat: "each card with its render node; most programs need only the render node. Needs the group that owns the nodes (render, video) in the pod's supplementalGroups",
        permissions: "rw",
        shares: None,
        required: &["/dev/dri/by-path/{key}-render"],
        optional: &["/dev/dri/by-path/{key}-card"],
    },
    Preset {
        name: "fuse",
        summary: "file systems in user space",
        caveat: "to mount, the container also needs CAP_SYS_ADMIN or its own user namespace",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/fuse"],
        optional: &[],
    },
    Preset {
        name: "hwrng",
        summary: "the hardware's random number generator",
        caveat: "read-only. Containers share the data stream; a heavy reader slows the others down",
        permissions: "r",
        shares: EACH_POD,
        required: &["/dev/hwrng"],
        optional: &[],
    },
    Preset {
        name: "kvm",
        summary: "virtual machines",
        caveat: "a container can run any number of virtual machines within its limits of CPU and memory; a vulnerability in KVM affects the node",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/kvm"],
        optional: &[],
    },
    Preset {
        name: "loop",
        summary: "block devices made of files",
        caveat: "to mount, the container needs CAP_SYS_ADMIN. Loop devices that are mounted on the node are left out; devices that are only attached are not",
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
        summary: "serial ports of plugged-in adapters",
        caveat: "found by udev's links, so that a port keeps its name; on a node without udev, use usb with nodes: [tty]. Needs the group dialout in the pod's supplementalGroups",
        permissions: "rw",
        shares: None,
        required: &["/dev/serial/by-id/*"],
        optional: &[],
    },
    Preset {
        name: "sound",
        summary: "all sound cards of the node, as one device",
        caveat: "the container can listen to every microphone. Needs the group audio in the pod's supplementalGroups",
        permissions: "rw",
        shares: None,
        required: &["/dev/snd/controlC*"],
        optional: &["/dev/snd/*"],
    },
    Preset {
        name: "tun",
        summary: "tunnels and virtual network interfaces",
        caveat: "to create an interface, the container needs CAP_NET_ADMIN; it exists in the pod's own network only",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/net/tun"],
        optional: &[],
    },
    Preset {
        name: "vhost-net",
        summary: "fast networking for virtual machines",
        caveat: "used with kvm and tun. On kernels 6.4 and later, the worker threads count towards the container; on earlier ones, they do not",
        permissions: "rw",
        shares: EACH_POD,
        required: &["/dev/vhost-net"],
        optional: &[],
    },
    Preset {
        name: "video",
        summary: "cameras and capture cards",
        caveat: "each camera with its metadata node, found by udev's links. Needs the group video in the pod's supplementalGroups",
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
    fn every_preset_has_its_paths_and_name() {
        for preset in &PRESETS {
            let mut expected: Vec<&str> = preset.required.to_vec();
            expected.extend(preset.optional);
            assert_eq!(preset.source().entries(), expected, "{}", preset.name);
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
