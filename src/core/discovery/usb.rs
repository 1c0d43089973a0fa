//! USB devices: matching and identity.
//!
//! A device is an object with its own descriptor (`1-1.4` in sysfs). Its interfaces (`1-1.4:1.0`) are parts of it, so a
//! composite device is one device; a hub is used only if the configuration includes hubs. Upstream: the kernel's
//! `Documentation/ABI/testing/sysfs-bus-usb` and USB 2.0, section 9.6.

use std::collections::BTreeMap;
use std::fmt;

/// `bDeviceClass` of a hub.
const CLASS_HUB: u8 = 9;

/// The properties of a USB device in sysfs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsbFacts {
    /// The name in sysfs, `1-1.4`: bus and port chain. The bus number may change at a boot.
    pub sysfs_name: String,
    /// The parent of the bus, `pci-0000:00:14.0` or `platform-fe980000.usb`; `None` if it is not visible.
    pub controller: Option<String>,
    /// The major version of the root hub: a controller has one bus for USB 2 and one for USB 3, with the same port numbers.
    pub bus_version: u8,
    /// `idVendor`.
    pub vendor: u16,
    /// `idProduct`.
    pub product: u16,
    /// `bDeviceClass`; 0 if each interface has its own class.
    pub class: u8,
    /// The serial number, if the device has one.
    pub serial: Option<String>,
    /// The vendor's name, as reported by the device.
    pub manufacturer: Option<String>,
    /// The product's name, as reported by the device.
    pub model: Option<String>,
    /// The speed of the link in Mbit/s.
    pub speed: Option<i64>,
}

impl UsbFacts {
    pub fn is_hub(&self) -> bool {
        self.class == CLASS_HUB
    }

    /// The device's port, stable across boots: `pci-0000:00:14.0-usbv2-1.4`.
    pub fn port(&self) -> Option<String> {
        let (_, chain) = self.sysfs_name.split_once('-')?;
        let controller = self.controller.as_deref()?;
        Some(format!("{controller}-usbv{}-{chain}", self.bus_version))
    }

    /// A serial number that can identify the device: some devices have none, and some only blanks.
    fn usable_serial(&self) -> Option<&str> {
        self.serial
            .as_deref()
            .map(str::trim)
            .filter(|serial| !serial.is_empty() && !serial.chars().any(char::is_control))
    }
}

impl fmt::Display for UsbFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "USB device {} ({:04x}:{:04x}",
            self.sysfs_name, self.vendor, self.product
        )?;
        if let Some(model) = &self.model {
            write!(f, " {model}")?;
        }
        f.write_str(")")
    }
}

/// A device filter. An unset field matches any device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsbMatch {
    /// The vendor's id.
    pub vendor: Option<u16>,
    /// The product's id.
    pub product: Option<u16>,
    /// The complete serial number.
    pub serial: Option<String>,
    /// The port, in the format of [`UsbFacts::port`] or as the device's name in sysfs.
    pub port: Option<String>,
}

/// The basis of a device's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsbIdentity {
    /// Vendor, product and serial number, regardless of the port; the port if the device has no serial number.
    #[default]
    Serial,
    /// The port, regardless of the device.
    Port,
}

/// Why a device does not match one filter; continues a sentence about the device.
fn mismatch(facts: &UsbFacts, filter: &UsbMatch) -> Option<String> {
    if let Some(vendor) = filter.vendor.filter(|vendor| *vendor != facts.vendor) {
        return Some(format!("its vendor is {:04x}, not {vendor:04x}", facts.vendor));
    }
    if let Some(product) = filter.product.filter(|product| *product != facts.product) {
        return Some(format!("its product is {:04x}, not {product:04x}", facts.product));
    }
    if let Some(serial) = &filter.serial
        && facts.serial.as_ref() != Some(serial)
    {
        return Some(match &facts.serial {
            Some(other) => format!("its serial number is {other:?}, not {serial:?}"),
            None => format!("it has no serial number, so it is not {serial:?}"),
        });
    }
    let port = facts.port();
    if let Some(expected) = &filter.port
        && facts.sysfs_name != *expected
        && port.as_ref() != Some(expected)
    {
        let port = port.unwrap_or_else(|| facts.sysfs_name.clone());
        return Some(format!("its port is {port}, not {expected}"));
    }
    None
}

/// Returns why a device matches none of the filters; `None` if it matches one.
pub fn refuse(facts: &UsbFacts, filters: &[UsbMatch], hubs: bool) -> Option<String> {
    let mut problems = Vec::new();
    for filter in filters {
        match mismatch(facts, filter) {
            None if facts.is_hub() && !hubs => {
                return Some("it is a hub; set hubs: true to include hubs".to_owned());
            }
            None => return None,
            Some(problem) if problems.contains(&problem) => {}
            Some(problem) => problems.push(problem),
        }
    }
    Some(problems.join("; "))
}

/// Returns for each device, in order, its identity, or why it has none.
///
/// `devices` must be all devices of the machine: two with the same serial number (some vendors print the same on each) have no
/// identity, because their names would depend on the order in which they are plugged in.
pub fn identities(devices: &[UsbFacts], identity: UsbIdentity) -> Vec<Result<String, String>> {
    let key = |facts: &UsbFacts| {
        let serial = facts.usable_serial()?;
        Some(format!("usb-{:04x}-{:04x}-{serial}", facts.vendor, facts.product))
    };
    let mut twins: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for facts in devices {
        if let Some(key) = key(facts) {
            twins.entry(key).or_default().push(&facts.sysfs_name);
        }
    }
    let by_port = |facts: &UsbFacts| {
        facts
            .port()
            .map(|port| format!("usb-{port}"))
            .ok_or_else(|| "the controller of its port is not visible in sysfs".to_owned())
    };
    let name = |facts: &UsbFacts| match (identity, key(facts)) {
        (UsbIdentity::Port, _) | (UsbIdentity::Serial, None) => by_port(facts),
        (UsbIdentity::Serial, Some(key)) => match twins.get(&key).map(Vec::as_slice) {
            Some([] | [_]) | None => Ok(key),
            Some(all) => Err(format!(
                "{} have the same vendor, product and serial number, so only their ports distinguish them; set identity: port",
                all.join(" and ")
            )),
        },
    };
    devices.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter() -> UsbFacts {
        UsbFacts {
            sysfs_name: "1-1.4".into(),
            controller: Some("pci-0000:00:14.0".into()),
            bus_version: 2,
            vendor: 0x0403,
            product: 0x6001,
            serial: Some("A50285BI".into()),
            ..UsbFacts::default()
        }
    }

    fn filter(vendor: u16, product: Option<u16>) -> UsbMatch {
        UsbMatch {
            vendor: Some(vendor),
            product,
            ..UsbMatch::default()
        }
    }

    #[test]
    fn a_usb_device_matches_a_description_or_has_a_reason() {
        let all = [filter(0x10c4, None), filter(0x0403, Some(0x6001))];
        assert_eq!(refuse(&adapter(), &all, false), None);
        let other = UsbFacts {
            product: 0x6010,
            ..adapter()
        };
        assert_eq!(
            refuse(&other, &all, false).unwrap(),
            "its vendor is 0403, not 10c4; its product is 6010, not 6001"
        );
    }

    #[test]
    fn a_port_is_matched_by_its_lasting_name_and_by_that_of_sysfs() {
        for (port, taken) in [
            ("pci-0000:00:14.0-usbv2-1.4", true),
            ("1-1.4", true),
            ("1-1", false),
            ("2-1.4", false),
        ] {
            let filter = UsbMatch {
                port: Some(port.into()),
                ..UsbMatch::default()
            };
            assert_eq!(refuse(&adapter(), &[filter], false).is_none(), taken, "{port}");
        }
    }

    #[test]
    fn a_hub_is_taken_only_if_hubs_are_asked_for() {
        let hub = UsbFacts {
            class: 9,
            ..adapter()
        };
        let filters = [filter(0x0403, None)];
        assert!(refuse(&hub, &filters, false).unwrap().contains("hubs: true"));
        assert_eq!(refuse(&hub, &filters, true), None);
    }

    #[test]
    fn a_serial_number_identifies_wherever_the_device_is_plugged_in() {
        let moved = UsbFacts {
            sysfs_name: "3-2".into(),
            ..adapter()
        };
        for device in [adapter(), moved] {
            assert_eq!(
                identities(&[device], UsbIdentity::Serial),
                [Ok("usb-0403-6001-A50285BI".into())]
            );
        }
    }

    #[test]
    fn a_usb_device_without_a_serial_number_is_named_by_its_port() {
        let first = UsbFacts {
            serial: Some("  ".into()),
            ..adapter()
        };
        let renumbered = UsbFacts {
            sysfs_name: "7-1.4".into(),
            serial: None,
            ..adapter()
        };
        for device in [first, renumbered] {
            assert_eq!(
                identities(&[device], UsbIdentity::Serial),
                [Ok("usb-pci-0000:00:14.0-usbv2-1.4".into())]
            );
        }
        let usb3 = UsbFacts {
            bus_version: 3,
            ..adapter()
        };
        assert_ne!(
            identities(&[usb3], UsbIdentity::Port),
            identities(&[adapter()], UsbIdentity::Port)
        );
    }

    #[test]
    fn only_ports_distinguish_identical_devices() {
        let twin = UsbFacts {
            sysfs_name: "1-2".into(),
            ..adapter()
        };
        let both = [adapter(), twin];
        for identity in identities(&both, UsbIdentity::Serial) {
            let problem = identity.unwrap_err();
            assert!(
                problem.contains("1-1.4 and 1-2") && problem.contains("identity: port"),
                "{problem}"
            );
        }
        let ports = identities(&both, UsbIdentity::Port);
        assert!(ports.iter().all(Result::is_ok) && ports[0] != ports[1]);
    }

    #[test]
    fn a_usb_device_with_an_unknown_port_gets_no_name() {
        let device = UsbFacts {
            controller: None,
            serial: None,
            ..adapter()
        };
        assert!(identities(&[device], UsbIdentity::Serial)[0].is_err());
    }
}
