//! A device in the form of `resource.k8s.io/v1`.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use semver::Version;

use crate::api::crd::{self, AttributeValue, DeviceAttributes, Mode};
use crate::core::discovery::Devices;
use crate::core::discovery::attributes::{NUMA_NODE, importance};
use crate::core::names::{beginning, is_dns_subdomain};

/// Attribute with the kind of a device.
pub const KIND: &str = "drayman.dev/kind";
/// Attribute with the mode of a device that is an extended resource, too. Only for the commands: other devices do not have it.
pub const MODE: &str = "drayman.dev/mode";
/// Taint of an unhealthy device, and attribute with the cause, shortened; absent if the device is healthy.
pub const UNHEALTHY: &str = "drayman.dev/unhealthy";
/// The capacity of a device with shares, of which each claim takes one.
pub const SHARES: &str = "drayman.dev/shares";
/// The standard attribute for the NUMA node (`k8s.io/dynamic-resource-allocation/deviceattribute`).
const STANDARD_NUMA_NODE: &str = "resource.kubernetes.io/numaNode";

/// Devices in one slice without taints, at most (`ResourceSliceMaxDevices`).
pub(super) const DEVICES_MAX: usize = 128;
/// Devices in one slice with taints, at most (`ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`).
pub(super) const DEVICES_WITH_TAINTS_MAX: usize = 64;

/// Attributes and capacities of a device together, at most (`ResourceSliceMaxAttributesAndCapacitiesPerDevice`).
const ATTRIBUTES_MAX: usize = 32;
/// Bytes in a string or version, at most (`DeviceAttributeMaxValueLength`).
const VALUE_MAX: usize = 64;
/// NUMA nodes of a machine, at most (`maxNUMANodes` of `k8s.io/dynamic-resource-allocation/deviceattribute`).
const NUMA_NODES_MAX: i64 = 1024;
/// Characters in the domain of an attribute name, at most (`DeviceMaxDomainLength`).
const DOMAIN_MAX: usize = 63;
/// Characters in an attribute name after its domain, at most (`DeviceMaxIDLength`).
const IDENTIFIER_MAX: usize = 32;

/// Parts of the API that depend on feature gates. A gate that is off makes the API server drop the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Device taints (DRADeviceTaints): an unhealthy device is tainted. Otherwise it is left out.
    pub taints: bool,
    /// Consumable capacity (DRAConsumableCapacity): devices with shares are published. Otherwise they are left out.
    pub shares: bool,
}

impl Features {
    /// The features that a Kubernetes 1.x server has by default.
    pub fn of_minor(minor: u32) -> Self {
        Self {
            taints: minor >= 36,
            shares: minor >= 36,
        }
    }

    /// Where taints are possible, a slice never has more devices than one with taints may have. Otherwise the first unhealthy device of a
    /// full slice would move half of the devices, and with them rewrite the whole pool.
    pub(super) fn devices_per_slice(self) -> usize {
        if self.taints {
            DEVICES_WITH_TAINTS_MAX
        } else {
            DEVICES_MAX
        }
    }
}

/// A device that is not published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Omitted {
    /// Name of the device.
    pub device: String,
    /// The reason.
    pub why: Omission,
}

/// Why a device is not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Omission {
    /// It is unhealthy, and the API server has no taints.
    Unhealthy,
    /// It has shares, and the API server has no consumable capacity.
    Shares,
}

impl Omission {
    /// Every reason.
    pub const ALL: [Self; 2] = [Self::Shares, Self::Unhealthy];

    /// The value of the metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shares => "shares",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// Renders the devices that serve claims, in the order of their names.
pub(super) fn render(devices: &Devices, features: Features) -> (Vec<Device>, Vec<Omitted>) {
    let (mut rendered, mut omitted) = (Vec::new(), Vec::new());
    for device in devices.values().filter(|device| device.mode.serves_claims()) {
        let why = if device.unhealthy.is_some() && !features.taints {
            Omission::Unhealthy
        } else if shares(device) > 1 && !features.shares {
            Omission::Shares
        } else {
            rendered.push(render_device(device));
            continue;
        };
        omitted.push(Omitted {
            device: device.name.clone(),
            why,
        });
    }
    (rendered, omitted)
}

fn shares(device: &crd::Device) -> u32 {
    device.shares.unwrap_or(1)
}

pub(super) fn has_shares(device: &Device) -> bool {
    device.allow_multiple_allocations == Some(true)
}

fn render_device(device: &crd::Device) -> Device {
    let shared = shares(device) > 1;
    let taint = device.unhealthy.as_ref().map(|_| DeviceTaint {
        key: UNHEALTHY.to_owned(),
        effect: device.taint_effect.name().to_owned(),
        ..DeviceTaint::default()
    });
    let attributes = attributes(device, ATTRIBUTES_MAX - usize::from(shared), VALUE_MAX);
    let attributes = attributes.into_iter().map(|(name, value)| (name, convert(value)));
    Device {
        name: device.name.clone(),
        attributes: Some(attributes.collect()),
        capacity: shared.then(|| BTreeMap::from([(SHARES.to_owned(), capacity(shares(device)))])),
        allow_multiple_allocations: shared.then_some(true),
        taints: taint.map(|taint| vec![taint]),
        ..Device::default()
    }
}

/// One share for each claim, and no more.
fn capacity(shares: u32) -> DeviceCapacity {
    let one = || Quantity("1".to_owned());
    DeviceCapacity {
        value: quantity(shares),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(one()),
            valid_range: Some(CapacityRequestPolicyRange {
                min: one(),
                max: Some(one()),
                step: None,
            }),
            valid_values: None,
        }),
    }
}

/// A number in the form that the API server stores.
fn quantity(number: u32) -> Quantity {
    match number % 1000 {
        0 => Quantity(format!("{}k", number / 1000)),
        _ => Quantity(number.to_string()),
    }
}

/// The attributes of a device for its containers: those of its slice, and texts that are too long for a slice.
pub(in crate::core) fn metadata_attributes(device: &crd::Device) -> DeviceAttributes {
    attributes(device, ATTRIBUTES_MAX, usize::MAX)
        .into_iter()
        .collect()
}

/// The attributes that v1 can store: the most important ones if there are too many. Texts of more than `longest` bytes are left out, since a
/// shortened one would match other devices.
fn attributes(device: &crd::Device, room: usize, longest: usize) -> BTreeMap<String, AttributeValue> {
    let kind = AttributeValue::string(device.kind.as_str());
    let mut attributes = BTreeMap::from([(KIND.to_owned(), kind)]);
    if device.mode == Mode::Both {
        attributes.insert(MODE.to_owned(), AttributeValue::string(device.mode.name()));
    }
    if let Some(why) = &device.unhealthy {
        let why = AttributeValue::string(beginning(why, VALUE_MAX));
        attributes.insert(UNHEALTHY.to_owned(), why);
    }
    // A device without a NUMA node must not have the standard attribute.
    let numa_node = device.attributes.get(NUMA_NODE).and_then(|value| value.int);
    if let Some(node) = numa_node.filter(|node| (0..NUMA_NODES_MAX).contains(node)) {
        attributes.insert(STANDARD_NUMA_NODE.to_owned(), AttributeValue::int(node));
    }
    let mut rest: Vec<(&String, &AttributeValue)> = device
        .attributes
        .iter()
        .filter(|(name, _)| is_attribute_name(name) && !attributes.contains_key(*name))
        .filter(|(_, value)| is_valid(value, longest))
        .collect();
    rest.sort_by_key(|(name, _)| importance(name));
    rest.truncate(room.saturating_sub(attributes.len()));
    let rest = rest.into_iter();
    attributes.extend(rest.map(|(name, value)| (name.clone(), value.clone())));
    attributes
}

fn convert(value: AttributeValue) -> DeviceAttribute {
    let AttributeValue {
        string,
        int,
        bool,
        version,
    } = value;
    DeviceAttribute {
        string,
        int,
        bool,
        version,
    }
}

/// Whether the API server accepts this value. It would reject the whole slice because of one that it does not accept.
fn is_valid(value: &AttributeValue, longest: usize) -> bool {
    match value {
        AttributeValue {
            string: Some(text),
            int: None,
            bool: None,
            version: None,
        } => text.len() <= longest,
        AttributeValue {
            string: None,
            int: None,
            bool: None,
            version: Some(text),
        } => text.len() <= VALUE_MAX && Version::parse(text).is_ok(),
        AttributeValue {
            string: None,
            version: None,
            int,
            bool,
        } => int.is_some() != bool.is_some(),
        _ => false,
    }
}

/// Whether the API accepts this name: `domain/identifier`, where the identifier is a C identifier.
fn is_attribute_name(name: &str) -> bool {
    let Some((domain, identifier)) = name.split_once('/') else {
        return false;
    };
    let mut characters = identifier.chars();
    is_dns_subdomain(domain, DOMAIN_MAX)
        && identifier.len() <= IDENTIFIER_MAX
        && characters
            .next()
            .is_some_and(|first| first == '_' || first.is_ascii_alphabetic())
        && characters.all(|character| character == '_' || character.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Features = Features {
        taints: true,
        shares: true,
    };
    const NONE: Features = Features {
        taints: false,
        shares: false,
    };

    fn one(device: crd::Device) -> Devices {
        Devices::from([(device.name.clone(), device)])
    }

    fn camera() -> crd::Device {
        crd::Device {
            name: "camera".into(),
            kind: "cameras".into(),
            ..crd::Device::default()
        }
    }

    #[test]
    fn an_unhealthy_device_is_tainted_or_left_out() {
        let mut device = camera();
        device.unhealthy = Some("ü".repeat(200));
        let (rendered, omitted) = render(&one(device.clone()), ALL);
        let taint = &rendered[0].taints.as_ref().unwrap()[0];
        assert_eq!(
            (taint.key.as_str(), taint.effect.as_str()),
            (UNHEALTHY, "NoSchedule")
        );
        let why = &rendered[0].attributes.as_ref().unwrap()[UNHEALTHY];
        assert_eq!(why.string.as_ref().unwrap().len(), VALUE_MAX);
        assert!(omitted.is_empty());
        device.taint_effect = crd::TaintEffect::NoExecute;
        let (rendered, _) = render(&one(device.clone()), ALL);
        assert_eq!(rendered[0].taints.as_ref().unwrap()[0].effect, "NoExecute");
        let (rendered, omitted) = render(&one(device), NONE);
        assert_eq!(rendered, []);
        assert_eq!(omitted[0].why, Omission::Unhealthy);
    }

    #[test]
    fn shares_are_capacity_or_the_device_is_left_out() {
        let mut device = camera();
        device.shares = Some(4);
        let (rendered, _) = render(&one(device.clone()), ALL);
        assert_eq!(rendered[0].capacity.as_ref().unwrap()[SHARES].value.0, "4");
        assert_eq!(rendered[0].allow_multiple_allocations, Some(true));
        assert_eq!(render(&one(device), NONE).1[0].why, Omission::Shares);
    }

    #[test]
    fn numbers_are_written_as_the_api_server_stores_them() {
        for (number, text) in [(2, "2"), (999, "999"), (1000, "1k"), (1024, "1024")] {
            assert_eq!(quantity(number).0, text);
        }
    }

    #[test]
    fn only_devices_that_serve_claims_are_published() {
        for (mode, published) in [(Mode::Claims, 1), (Mode::Both, 1), (Mode::ExtendedResource, 0)] {
            let mut device = camera();
            device.mode = mode;
            assert_eq!(render(&one(device), ALL).0.len(), published);
        }
    }

    #[test]
    fn attributes_beyond_the_limits_of_v1_are_left_out() {
        let mut device = camera();
        for (name, value) in [
            ("drayman.dev/path", "x".repeat(VALUE_MAX)),
            ("drayman.dev/link", "x".repeat(VALUE_MAX + 1)),
            ("drayman.dev/not-c", "x".into()),
            ("drayman.dev/9th", "x".into()),
            ("bare", "x".into()),
            ("Bad_Domain/name", "x".into()),
        ] {
            device
                .attributes
                .insert(name.to_owned(), AttributeValue::string(value));
        }
        device
            .attributes
            .insert(NUMA_NODE.to_owned(), AttributeValue::int(1));
        let (rendered, _) = render(&one(device), ALL);
        let names: Vec<&String> = rendered[0].attributes.as_ref().unwrap().keys().collect();
        assert_eq!(names, [KIND, NUMA_NODE, "drayman.dev/path", STANDARD_NUMA_NODE]);
    }

    #[test]
    fn metadata_has_texts_that_are_too_long_for_a_slice() {
        let mut device = camera();
        let link = "x".repeat(VALUE_MAX + 1);
        for (name, value) in [("drayman.dev/link", link.as_str()), ("bare", "x")] {
            device
                .attributes
                .insert(name.to_owned(), AttributeValue::string(value));
        }
        let metadata = metadata_attributes(&device);
        assert_eq!(
            metadata,
            [
                (KIND.to_owned(), AttributeValue::string("cameras")),
                ("drayman.dev/link".to_owned(), AttributeValue::string(link)),
            ]
            .into_iter()
            .collect()
        );
    }

    #[test]
    fn only_a_device_of_mode_both_names_its_mode() {
        for (mode, expected) in [(Mode::Claims, None), (Mode::Both, Some("both"))] {
            let device = crd::Device { mode, ..camera() };
            let (rendered, _) = render(&one(device), ALL);
            let attribute = rendered[0].attributes.as_ref().unwrap().get(MODE);
            let found = attribute.and_then(|attribute| attribute.string.as_deref());
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_value_that_v1_rejects_is_left_out() {
        let version = |version: &str| AttributeValue {
            version: Some(version.into()),
            ..AttributeValue::default()
        };
        let two = AttributeValue {
            int: Some(1),
            ..AttributeValue::string("1")
        };
        for (value, expected) in [
            (version("1.2.3-rc.1+build"), true),
            (version("1.2"), false),
            (version("v1.2.3"), false),
            (AttributeValue::default(), false),
            (two, false),
            (AttributeValue::string("ü".repeat(VALUE_MAX / 2)), true),
            (AttributeValue::string("ü".repeat(VALUE_MAX / 2 + 1)), false),
            (AttributeValue::string(""), true),
        ] {
            assert_eq!(is_valid(&value, VALUE_MAX), expected, "{value:?}");
        }
    }

    #[test]
    fn a_device_without_numa_node_has_no_standard_attribute() {
        for (node, published) in [(-1, false), (0, true), (1023, true), (1024, false)] {
            let mut device = camera();
            device
                .attributes
                .insert(NUMA_NODE.to_owned(), AttributeValue::int(node));
            let (rendered, _) = render(&one(device), ALL);
            let attributes = rendered[0].attributes.as_ref().unwrap();
            assert_eq!(attributes.contains_key(STANDARD_NUMA_NODE), published, "{node}");
        }
    }

    #[test]
    fn the_most_important_attributes_stay() {
        let mut device = camera();
        device.shares = Some(2);
        for index in 0..40 {
            device
                .attributes
                .insert(format!("drayman.dev/a{index}"), AttributeValue::int(index));
        }
        device
            .attributes
            .insert("drayman.dev/path".into(), AttributeValue::string("/dev/video0"));
        let (rendered, _) = render(&one(device), ALL);
        let attributes = rendered[0].attributes.as_ref().unwrap();
        assert_eq!(attributes.len(), ATTRIBUTES_MAX - 1);
        assert!(attributes.contains_key("drayman.dev/path"));
    }
}
