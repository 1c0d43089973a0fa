//! Kernel messages about added, removed and changed devices (`NETLINK_KOBJECT_UEVENT`).
//!
//! A message is `ACTION@DEVPATH` followed by `KEY=VALUE` pairs, each ended by a zero byte (`lib/kobject_uevent.c` of the kernel).
//! Messages of udev on the same family begin with `libudev` and are ignored.

use std::collections::BTreeMap;

/// Maximum size of a message in bytes: the kernel's own buffer is 2 KiB, with a header before it.
pub const MESSAGE_MAX: usize = 8 * 1024;

/// One kernel message. Its action does not matter, because discovery searches for everything after each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uevent {
    /// The device's path below `/sys`.
    pub devpath: String,
    /// The subsystem, for instance `usb` or `tty`.
    pub subsystem: Option<String>,
    /// The device node's path below `/dev`.
    pub devname: Option<String>,
}

impl Uevent {
    /// Whether it may change the devices of the node. Most messages of a busy machine concern objects that are never allocated:
    /// network interfaces, queues and control groups of the kernel itself.
    pub fn concerns_devices(&self) -> bool {
        const SUBSYSTEMS: [&str; 3] = ["usb", "pci", "vfio"];
        self.devname.is_some()
            || self
                .subsystem
                .as_deref()
                .is_some_and(|subsystem| SUBSYSTEMS.contains(&subsystem))
    }
}

/// Parses a message; `None` if it is not a kernel message.
pub fn parse(message: &[u8]) -> Option<Uevent> {
    if message.len() > MESSAGE_MAX {
        return None;
    }
    let mut parts = message.split(|&byte| byte == 0);
    let header = std::str::from_utf8(parts.next()?).ok()?;
    let (header_action, header_path) = header.split_once('@')?;
    let mut values: BTreeMap<&str, &str> = BTreeMap::new();
    for part in parts {
        // A value that is not UTF-8 is another device's name, and no reason to drop the message.
        if let Some((key, value)) = std::str::from_utf8(part)
            .ok()
            .and_then(|text| text.split_once('='))
        {
            values.entry(key).or_insert(value);
        }
    }
    let devpath = values.get("DEVPATH").copied().unwrap_or(header_path);
    if !devpath.starts_with('/') || header_action.is_empty() {
        return None;
    }
    let text = |key: &str| {
        values
            .get(key)
            .filter(|value| !value.is_empty())
            .map(|value| (*value).to_owned())
    };
    Some(Uevent {
        devpath: devpath.to_owned(),
        subsystem: text("SUBSYSTEM"),
        devname: text("DEVNAME"),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NULL: &[u8] = b"change@/devices/virtual/mem/null\0ACTION=change\0DEVPATH=/devices/virtual/mem/null\0SUBSYSTEM=mem\0\
        SYNTH_UUID=0\0MAJOR=1\0MINOR=3\0DEVNAME=null\0DEVMODE=0666\0SEQNUM=6762\0";

    #[test]
    fn a_message_of_the_kernel_is_read() {
        let event = parse(NULL).unwrap();
        assert_eq!(
            event,
            Uevent {
                devpath: "/devices/virtual/mem/null".into(),
                subsystem: Some("mem".into()),
                devname: Some("null".into()),
            }
        );
        assert!(event.concerns_devices());
    }

    #[test]
    fn driver_bind_uevents_concern_devices_and_queues_do_not() {
        let bind = b"bind@/devices/pci0000:00/0000:00:05.0\0ACTION=bind\0SUBSYSTEM=pci\0";
        assert!(parse(bind).unwrap().concerns_devices());
        let queue = b"add@/devices/virtual/net/veth1/queues/rx-0\0ACTION=add\0SUBSYSTEM=queues\0";
        assert!(!parse(queue).unwrap().concerns_devices());
    }

    #[test]
    fn other_messages_are_ignored() {
        for message in [
            &b""[..],
            b"\0",
            b"@",
            b"add@",
            b"add@relative\0",
            b"@/devices/x\0",
            b"libudev\0\xfe\xed\xca\xfe",
            b"\xff@/x\0",
        ] {
            assert_eq!(parse(message), None, "{message:?}");
        }
        let long = [b"add@/devices/x\0".as_slice(), &vec![b'x'; MESSAGE_MAX]].concat();
        assert_eq!(parse(&long), None);
    }

    #[test]
    fn broken_values_are_skipped() {
        let event =
            parse(b"add@/devices/x\0=\0NOTHING\0DEVNAME=\xff\0SEQNUM=many\0SUBSYSTEM=tty\0ACTION=teleport")
                .unwrap();
        assert_eq!((event.devname, event.subsystem), (None, Some("tty".into())));
    }

    proptest! {
        #[test]
        fn no_message_makes_the_parser_panic(message in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&message);
        }

        #[test]
        fn no_cut_or_flipped_message_makes_the_parser_panic(cut in 0..NULL.len(), at in 0..NULL.len(), bit in 0..8_u8) {
            let mut message = NULL.to_vec();
            message[at] ^= 1 << bit;
            let _ = parse(&message[..cut]);
        }
    }
}
