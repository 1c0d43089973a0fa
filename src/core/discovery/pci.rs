//! PCI devices: matching, and the IOMMU groups that a container can get through VFIO.
//!
//! Upstream: the kernel's `Documentation/ABI/testing/sysfs-bus-pci` and `Documentation/driver-api/vfio.rst`.

use std::collections::BTreeMap;
use std::fmt;

/// The driver that makes a device available to user space.
pub const VFIO_DRIVER: &str = "vfio-pci";
/// Base class and subclass of a PCI-to-PCI bridge, which is never allocated.
const CLASS_BRIDGE: u32 = 0x0604;

/// The properties of a PCI function in sysfs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciFacts {
    /// The address, `0000:65:00.0`.
    pub address: String,
    /// The vendor's id.
    pub vendor: u16,
    /// The device's id.
    pub device: u16,
    /// Base class, subclass and programming interface: 24 bits.
    pub class: u32,
    /// The bound driver.
    pub driver: Option<String>,
    /// The number of the IOMMU group. The kernel reassigns it at each boot.
    pub iommu_group: Option<String>,
    /// The NUMA node, if the kernel knows it.
    pub numa_node: Option<i64>,
    /// The maximum speed of the PCIe link, in millions of transfers per second and lane.
    pub link_speed: Option<i64>,
    /// The maximum number of lanes of the PCIe link.
    pub link_width: Option<i64>,
    /// The root complex, `pci0000:64`.
    pub root: Option<String>,
}

impl PciFacts {
    fn is_bridge(&self) -> bool {
        self.class >> 8 == CLASS_BRIDGE
    }

    /// The identity of the function: its address, which is stable unless the hardware moves.
    pub fn identity(&self) -> String {
        format!("pci-{}", self.address.replace([':', '.'], "-"))
    }

    fn driver(&self) -> &str {
        self.driver.as_deref().unwrap_or("no driver")
    }
}

impl fmt::Display for PciFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "PCI device {} ({:04x}:{:04x})",
            self.address, self.vendor, self.device
        )
    }
}

/// A function filter. An unset field matches any function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciMatch {
    /// The vendor's id.
    pub vendor: Option<u16>,
    /// The device's id.
    pub device: Option<u16>,
    /// A prefix of the class: two, four or six hexadecimal digits.
    pub class: Option<String>,
    /// The bound driver.
    pub driver: Option<String>,
    pub address: Option<String>,
}

fn mismatch(facts: &PciFacts, filter: &PciMatch) -> Option<String> {
    if let Some(address) = filter
        .address
        .as_ref()
        .filter(|address| **address != facts.address)
    {
        return Some(format!("its address is not {address}"));
    }
    if let Some(vendor) = filter.vendor.filter(|vendor| *vendor != facts.vendor) {
        return Some(format!("its vendor is {:04x}, not {vendor:04x}", facts.vendor));
    }
    if let Some(device) = filter.device.filter(|device| *device != facts.device) {
        return Some(format!("its device id is {:04x}, not {device:04x}", facts.device));
    }
    let class = format!("{:06x}", facts.class);
    if let Some(prefix) = filter
        .class
        .as_ref()
        .filter(|prefix| !class.starts_with(prefix.as_str()))
    {
        return Some(format!("its class is {class}, not {prefix}"));
    }
    if let Some(driver) = filter
        .driver
        .as_ref()
        .filter(|driver| facts.driver.as_ref() != Some(driver))
    {
        return Some(format!("it is bound to {}, not to {driver}", facts.driver()));
    }
    None
}

/// Returns why a function matches none of the filters; `None` if it matches one.
pub fn refuse(facts: &PciFacts, filters: &[PciMatch]) -> Option<String> {
    let mut problems = Vec::new();
    for problem in filters.iter().map(|filter| mismatch(facts, filter)) {
        let problem = problem?;
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
    Some(problems.join("; "))
}

/// The role of a matching function for VFIO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vfio {
    /// It represents its whole IOMMU group, which is one device, `/dev/vfio/<group>`.
    Unit {
        /// The group's number.
        group: String,
    },
    /// It belongs to the group that another function represents.
    PartOf {
        /// The address of that function.
        address: String,
    },
    /// It cannot be allocated; the text continues a sentence about the function.
    Unusable(String),
}

/// Returns the role of each matching function by address, given all functions of the machine.
///
/// The IOMMU cannot isolate the functions of a group from each other, so a group is allocated as a whole or not at all: all of its
/// functions except bridges must be bound to [`VFIO_DRIVER`], because the kernel refuses to open the group otherwise.
pub fn vfio(matching: &[&PciFacts], all: &[PciFacts]) -> BTreeMap<String, Vfio> {
    let mut units: BTreeMap<String, String> = BTreeMap::new();
    let mut sorted = matching.to_vec();
    sorted.sort_by(|a, b| a.address.cmp(&b.address));
    let mut role = |facts: &PciFacts| {
        let Some(group) = &facts.iommu_group else {
            return Vfio::Unusable(
                "it has no IOMMU group; enable the IOMMU in the firmware and in the kernel (intel_iommu=on, amd_iommu=on)"
                    .to_owned(),
            );
        };
        if let Some(address) = units.get(group) {
            return Vfio::PartOf {
                address: address.clone(),
            };
        }
        if let Some(problem) = foreign(group, all) {
            return Vfio::Unusable(problem);
        }
        units.insert(group.clone(), facts.address.clone());
        Vfio::Unit { group: group.clone() }
    };
    sorted
        .into_iter()
        .map(|facts| (facts.address.clone(), role(facts)))
        .collect()
}

/// The functions of a group that prevent its allocation.
fn foreign(group: &str, all: &[PciFacts]) -> Option<String> {
    let others: Vec<String> = all
        .iter()
        .filter(|facts| facts.iommu_group.as_deref() == Some(group) && !facts.is_bridge())
        .filter(|facts| facts.driver.as_deref() != Some(VFIO_DRIVER))
        .map(|facts| format!("{} to {}", facts.address, facts.driver()))
        .collect();
    (!others.is_empty()).then(|| {
        format!(
            "IOMMU group {group} is allocated as a whole, but these of its functions are not bound to {VFIO_DRIVER}: {}",
            others.join(", ")
        )
    })
}

/// Converts `8.0 GT/s PCIe` to millions of transfers per second and lane, so that links can be compared; for USB the same attribute is in
/// Mbit/s.
pub fn megatransfers(speed: &str) -> Option<i64> {
    let (whole, rest) = speed.split_once(' ')?;
    if !rest.starts_with("GT/s") {
        return None;
    }
    let (whole, tenths) = whole.split_once('.').unwrap_or((whole, "0"));
    let whole: i64 = whole.parse().ok()?;
    let tenths: i64 = tenths.get(..1)?.parse().ok()?;
    whole.checked_mul(1000)?.checked_add(tenths * 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(address: &str, group: Option<&str>, driver: Option<&str>) -> PciFacts {
        PciFacts {
            address: address.into(),
            vendor: 0x10de,
            device: 0x1eb8,
            class: 0x03_0200,
            driver: driver.map(Into::into),
            iommu_group: group.map(Into::into),
            ..PciFacts::default()
        }
    }

    #[test]
    fn a_class_is_matched_by_its_prefix() {
        let facts = function("0000:65:00.0", None, Some("nouveau"));
        for (class, taken) in [
            ("03", true),
            ("0302", true),
            ("030200", true),
            ("0300", false),
            ("02", false),
        ] {
            let filter = PciMatch {
                class: Some(class.into()),
                ..PciMatch::default()
            };
            assert_eq!(refuse(&facts, &[filter]).is_none(), taken, "{class}");
        }
        let filter = PciMatch {
            driver: Some("vfio-pci".into()),
            ..PciMatch::default()
        };
        assert_eq!(
            refuse(&facts, &[filter]).unwrap(),
            "it is bound to nouveau, not to vfio-pci"
        );
    }

    #[test]
    fn link_speeds_are_numbers() {
        for (text, number) in [
            ("2.5 GT/s PCIe", Some(2500)),
            ("16.0 GT/s PCIe", Some(16000)),
            ("Unknown", None),
            ("x GT/s", None),
        ] {
            assert_eq!(megatransfers(text), number, "{text}");
        }
    }

    #[test]
    fn an_address_is_a_name_of_its_own() {
        assert_eq!(
            function("0000:65:00.0", None, None).identity(),
            "pci-0000-65-00-0"
        );
    }

    #[test]
    fn a_group_is_one_unit_that_its_lowest_function_stands_for() {
        let all = [
            function("0000:65:00.1", Some("12"), Some("vfio-pci")),
            function("0000:65:00.0", Some("12"), Some("vfio-pci")),
            function("0000:66:00.0", Some("13"), Some("vfio-pci")),
        ];
        let units = vfio(&all.iter().collect::<Vec<_>>(), &all);
        assert_eq!(units["0000:65:00.0"], Vfio::Unit { group: "12".into() });
        assert_eq!(
            units["0000:65:00.1"],
            Vfio::PartOf {
                address: "0000:65:00.0".into()
            }
        );
        assert_eq!(units["0000:66:00.0"], Vfio::Unit { group: "13".into() });
    }

    #[test]
    fn a_group_with_a_function_of_another_driver_is_not_handed_out() {
        let bridge = PciFacts {
            class: 0x06_0400,
            ..function("0000:64:00.0", Some("12"), Some("pcieport"))
        };
        let all = [
            bridge,
            function("0000:65:00.0", Some("12"), Some("vfio-pci")),
            function("0000:65:00.1", Some("12"), Some("snd_hda_intel")),
            function("0000:65:00.2", Some("12"), None),
        ];
        let Vfio::Unusable(problem) = &vfio(&[&all[1]], &all)["0000:65:00.0"] else {
            panic!("it is taken")
        };
        assert!(
            problem.ends_with("0000:65:00.1 to snd_hda_intel, 0000:65:00.2 to no driver"),
            "{problem}"
        );
        let without = [all[0].clone(), all[1].clone()];
        assert!(matches!(
            vfio(&[&without[1]], &without)["0000:65:00.0"],
            Vfio::Unit { .. }
        ));
    }

    #[test]
    fn without_an_iommu_nothing_is_handed_out() {
        let all = [function("0000:65:00.0", None, Some("vfio-pci"))];
        assert!(
            matches!(&vfio(&[&all[0]], &all)["0000:65:00.0"], Vfio::Unusable(why) if why.contains("IOMMU"))
        );
    }
}
