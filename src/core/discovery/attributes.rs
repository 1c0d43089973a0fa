//! Device attributes by qualified name, in the format of `resource.k8s.io/v1`.
//!
//! Our own names are below `drayman.dev`; the two standardised attributes have Kubernetes' names
//! (`k8s.io/dynamic-resource-allocation/deviceattribute`).

use std::collections::BTreeMap;

use litemap::LiteMap;
use semver::Version;
use serde::Serialize;

use super::pci::PciFacts;
use super::usb::UsbFacts;
use crate::api::crd::{AttributeValue, Device, DeviceAttributes, GROUP, Mode, TEXT_MAX};
use crate::core::names::{beginning, is_dns_subdomain};

/// The NUMA node closest to a device.
pub const NUMA_NODE: &str = "drayman.dev/numaNode";
/// The host device nodes that belong to this device only, separated by commas; absent if the list is too long.
pub const NODES: &str = "drayman.dev/nodes";
/// Attribute with the kind of a device.
pub const KIND: &str = "drayman.dev/kind";
/// Attribute with the mode of a device that is an extended resource, too. Only for the commands: other devices do not have it.
pub const MODE: &str = "drayman.dev/mode";
/// Taint of an unhealthy device, and attribute with the cause, shortened; absent if the device is healthy.
pub const UNHEALTHY: &str = "drayman.dev/unhealthy";
/// The standard attribute for the NUMA node (`k8s.io/dynamic-resource-allocation/deviceattribute`).
const STANDARD_NUMA_NODE: &str = "resource.kubernetes.io/numaNode";

/// Attribute names without domain, most important first. If the devices of a node exceed the size of an inventory, the least important
/// attributes are omitted first. Names that are not listed come after all listed ones. The same order decides which 32 attributes a
/// ResourceSlice keeps.
const IMPORTANCE: [&str; 17] = [
    "path",
    "nodes",
    "vendor",
    "product",
    "serial",
    "numaNode",
    "driver",
    "model",
    "port",
    "class",
    "pciBusID",
    "linkSpeed",
    "linkWidth",
    "pcieRoot",
    "manufacturer",
    "major",
    "minor",
];

/// Maximum size in bytes of the devices of one inventory in etcd. Etcd accepts requests of 1.5 MiB; the remainder is for metadata and
/// status.
const BYTES_MAX: usize = 1_500_000;
/// Size in bytes of one device's managed fields without its name: they list the fields that the companion owns.
const MANAGED: usize = 128;
/// Size in bytes to which the reasons of unhealthy devices are truncated if longer ones do not fit.
const SHORT_REASON: usize = 128;

/// Attributes and capacities of a device together, at most (`ResourceSliceMaxAttributesAndCapacitiesPerDevice`).
const SLICE_ATTRIBUTES_MAX: usize = 32;
/// Bytes in a string or version, at most (`DeviceAttributeMaxValueLength`).
const VALUE_MAX: usize = 64;
/// NUMA nodes of a machine, at most (`maxNUMANodes` of `k8s.io/dynamic-resource-allocation/deviceattribute`).
const NUMA_NODES_MAX: i64 = 1024;
/// Characters in the domain of an attribute name, at most (`DeviceMaxDomainLength`).
const DOMAIN_MAX: usize = 63;
/// Characters in an attribute name after its domain, at most (`DeviceMaxIDLength`).
const IDENTIFIER_MAX: usize = 32;

/// The attributes of one device, added one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes(LiteMap<String, AttributeValue>);

impl Attributes {
    /// Adds a string. Control characters are dropped and long values truncated: an unusual name must not make a device unusable.
    pub fn text(&mut self, name: &str, value: Option<&str>) -> &mut Self {
        let value: String = value
            .unwrap_or_default()
            .chars()
            .filter(|character| !character.is_control())
            .take(TEXT_MAX)
            .collect();
        let value = value.trim();
        if !value.is_empty() {
            self.0.insert(qualified(name), AttributeValue::string(value));
        }
        self
    }

    /// Adds texts, separated by commas, unless they are too long together: the last one would be truncated.
    pub fn list(&mut self, name: &str, texts: &[&str]) -> &mut Self {
        let list = texts.join(",");
        let is_whole = list.chars().count() <= TEXT_MAX;
        self.text(name, is_whole.then_some(list.as_str()))
    }

    /// Adds a number, if there is one.
    pub fn int(&mut self, name: &str, value: Option<i64>) -> &mut Self {
        if let Some(value) = value {
            self.0.insert(qualified(name), AttributeValue::int(value));
        }
        self
    }

    /// Adds the attributes of a USB device.
    pub fn usb(&mut self, facts: &UsbFacts) -> &mut Self {
        self.text("bus", Some("usb"))
            .text("vendor", Some(&format!("{:04x}", facts.vendor)))
            .text("product", Some(&format!("{:04x}", facts.product)))
            .text("serial", facts.serial.as_deref())
            .text("manufacturer", facts.manufacturer.as_deref())
            .text("model", facts.model.as_deref())
            .text("port", facts.port().as_deref())
            .int("linkSpeed", facts.speed)
    }

    /// Adds the attributes of a PCI function.
    pub fn pci(&mut self, facts: &PciFacts) -> &mut Self {
        self.text("bus", Some("pci"))
            .text("vendor", Some(&format!("{:04x}", facts.vendor)))
            .text("product", Some(&format!("{:04x}", facts.device)))
            .text("class", Some(&format!("{:06x}", facts.class)))
            .text("driver", facts.driver.as_deref())
            .text("resource.kubernetes.io/pciBusID", Some(&facts.address))
            .text("resource.kubernetes.io/pcieRoot", facts.root.as_deref())
            .int("numaNode", facts.numa_node)
            .int("linkSpeed", facts.link_speed)
            .int("linkWidth", facts.link_width)
    }

    /// Returns all attributes by qualified name.
    pub fn finish(self) -> DeviceAttributes {
        self.0.into()
    }
}

fn qualified(name: &str) -> String {
    if name.contains('/') {
        name.to_owned()
    } else {
        format!("{GROUP}/{name}")
    }
}

/// The NUMA nodes of a device, as reported to kubelet.
pub fn numa_nodes(device: &Device) -> Vec<i64> {
    let node = device.attributes.get(NUMA_NODE).and_then(|value| value.int);
    node.into_iter().filter(|node| *node >= 0).collect()
}

/// Omits attributes, the same from all devices, until the devices fit into an inventory; returns their names. If no attribute is left,
/// the reasons of unhealthy devices are truncated.
pub fn fit(devices: &mut [Device]) -> Vec<String> {
    let mut dropped = Vec::new();
    let mut total: usize = devices.iter().map(stored_bytes).sum();
    while total > BYTES_MAX {
        let names = devices.iter().flat_map(|device| device.attributes.keys());
        let Some(last) = names
            .max_by_key(|name| (importance(name), (*name).clone()))
            .cloned()
        else {
            for reason in devices.iter_mut().filter_map(|device| device.unhealthy.as_mut()) {
                let kept = beginning(reason, SHORT_REASON).len();
                reason.truncate(kept);
            }
            return dropped;
        };
        for value in devices
            .iter_mut()
            .filter_map(|device| device.attributes.remove(&last))
        {
            total -= last.len() + json_bytes(&value);
        }
        dropped.push(last);
    }
    dropped
}

/// The size in bytes of a device in the object that the API server stores.
fn stored_bytes(device: &Device) -> usize {
    json_bytes(device) + device.name.len() + MANAGED
}

/// The size in bytes of a value in the API server's JSON, which is safe within HTML: it escapes three characters with six bytes each.
fn json_bytes(value: &impl Serialize) -> usize {
    let json = serde_json::to_vec(value).unwrap_or_default();
    let escaped = json
        .iter()
        .filter(|byte| matches!(byte, b'<' | b'>' | b'&'))
        .count();
    json.len() + 5 * escaped
}

fn importance(name: &str) -> usize {
    let bare = name.rsplit('/').next().unwrap_or(name);
    IMPORTANCE
        .iter()
        .position(|known| *known == bare)
        .unwrap_or(IMPORTANCE.len())
}

/// The attributes of a device for its slice. The capacity of a device with shares counts, too.
pub(in crate::core) fn slice_attributes(device: &Device) -> BTreeMap<String, AttributeValue> {
    let room = SLICE_ATTRIBUTES_MAX - usize::from(device.is_shared());
    attributes(device, room, VALUE_MAX)
}

/// The attributes of a device for its containers: those of its slice, and texts that are too long for a slice.
pub(in crate::core) fn metadata_attributes(device: &Device) -> DeviceAttributes {
    attributes(device, SLICE_ATTRIBUTES_MAX, usize::MAX)
        .into_iter()
        .collect()
}

/// The attributes that v1 can store: the most important ones if there are too many. Texts of more than `longest` bytes are left out, since a
/// shortened one would match other devices.
fn attributes(device: &Device, room: usize, longest: usize) -> BTreeMap<String, AttributeValue> {
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
    use crate::api::crd::{ATTRIBUTES_MAX, DEVICES_MAX};

    #[test]
    fn a_pci_function_is_described_as_kubernetes_does() {
        let mut attributes = Attributes::default();
        attributes.pci(&PciFacts {
            address: "0000:65:00.0".into(),
            vendor: 0x10de,
            device: 0x1eb8,
            class: 0x03_0200,
            driver: Some("vfio-pci".into()),
            numa_node: Some(1),
            link_speed: Some(8000),
            link_width: Some(16),
            root: Some("pci0000:64".into()),
            ..PciFacts::default()
        });
        let all = attributes.finish();
        assert_eq!(
            all.get("resource.kubernetes.io/pciBusID")
                .unwrap()
                .string
                .as_deref(),
            Some("0000:65:00.0")
        );
        assert_eq!(
            all.get("resource.kubernetes.io/pcieRoot")
                .unwrap()
                .string
                .as_deref(),
            Some("pci0000:64")
        );
        assert_eq!(all.get("drayman.dev/numaNode").unwrap().int, Some(1));
        assert_eq!(all.get("drayman.dev/linkSpeed").unwrap().int, Some(8000));
        assert_eq!(
            all.get("drayman.dev/class").unwrap().string.as_deref(),
            Some("030200")
        );
        assert!(all.len() <= ATTRIBUTES_MAX);
    }

    #[test]
    fn device_texts_are_cleaned_and_cut() {
        let mut attributes = Attributes::default();
        attributes
            .text("model", Some(&format!("a\u{7}b\n{}", "x".repeat(1000))))
            .text("serial", Some("  \n"))
            .text("driver", None)
            .int("numaNode", None);
        let all = attributes.finish();
        assert_eq!(all.len(), 1);
        let model = all.get("drayman.dev/model").unwrap().string.clone().unwrap();
        assert!(model.starts_with("abx") && model.len() == TEXT_MAX);
    }

    #[test]
    fn a_list_that_is_too_long_is_left_out() {
        let node = |number| format!("/dev/snd/pcmC0D{number}p");
        let nodes: Vec<String> = (0..20).map(node).collect();
        let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
        let listed = |nodes: &[&str]| {
            let mut attributes = Attributes::default();
            attributes.list("nodes", nodes);
            let all = attributes.finish();
            all.get(NODES).and_then(|value| value.string.clone())
        };
        let two = "/dev/snd/pcmC0D0p,/dev/snd/pcmC0D1p";
        assert_eq!(listed(&nodes[..2]).as_deref(), Some(two));
        assert_eq!(listed(&nodes), None);
        let longest = "x".repeat(TEXT_MAX);
        assert_eq!(listed(&[longest.as_str()]), Some(longest));
    }

    #[test]
    fn the_least_important_attributes_are_left_out() {
        let attributes = |count: usize| {
            let names = ["path", "vendor", "minor", "strange"];
            let attribute = |name: &&str| (qualified(name), AttributeValue::string("\"".repeat(TEXT_MAX)));
            names[..count].iter().map(attribute).collect()
        };
        let device = |index: usize| Device {
            name: format!("d{index}"),
            attributes: attributes(4),
            ..Device::default()
        };
        let mut few: Vec<Device> = (0..10).map(device).collect();
        assert_eq!(fit(&mut few), Vec::<String>::new());
        let mut many: Vec<Device> = (0..DEVICES_MAX).map(device).collect();
        assert_eq!(fit(&mut many), ["drayman.dev/strange", "drayman.dev/minor"]);
        assert!(many.iter().all(|device| device.attributes == attributes(2)));
    }

    #[test]
    fn devices_of_the_longest_texts_fit_into_an_inventory() {
        let text = |character: &str| character.repeat(TEXT_MAX);
        let device = |index: usize| Device {
            name: format!("{index:a>63}"),
            kind: "k".repeat(63),
            unhealthy: Some(text("\u{1f600}")),
            attributes: (0..ATTRIBUTES_MAX)
                .map(|index| (format!("{index:a>96}"), AttributeValue::string(text("<"))))
                .collect(),
            ..Device::default()
        };
        let mut largest: Vec<Device> = (0..DEVICES_MAX).map(device).collect();
        assert_eq!(fit(&mut largest).len(), ATTRIBUTES_MAX);
        assert!(largest.iter().map(stored_bytes).sum::<usize>() <= BYTES_MAX);
        // Without attributes, only the reasons can be shortened.
        for device in &mut largest {
            device.unhealthy = Some(text("<"));
        }
        assert_eq!(fit(&mut largest), Vec::<String>::new());
        assert!(largest.iter().map(stored_bytes).sum::<usize>() <= BYTES_MAX);
        let reasons = largest.iter().filter_map(|device| device.unhealthy.as_deref());
        assert!(
            reasons.clone().count() == DEVICES_MAX
                && reasons.max().is_some_and(|longest| longest.len() == SHORT_REASON)
        );
    }

    #[test]
    fn only_known_numa_nodes_are_reported() {
        let device = |node| Device {
            attributes: [(NUMA_NODE.to_owned(), AttributeValue::int(node))]
                .into_iter()
                .collect(),
            ..Device::default()
        };
        assert_eq!(numa_nodes(&device(1)), [1]);
        assert_eq!(numa_nodes(&device(-1)), Vec::<i64>::new());
        assert_eq!(numa_nodes(&Device::default()), Vec::<i64>::new());
    }

    fn camera() -> Device {
        Device {
            name: "camera".into(),
            kind: "cameras".into(),
            ..Device::default()
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
        let attributes = slice_attributes(&device);
        let names: Vec<&String> = attributes.keys().collect();
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
            let attributes = slice_attributes(&Device { mode, ..camera() });
            let attribute = attributes.get(MODE);
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
            let attributes = slice_attributes(&device);
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
        let attributes = slice_attributes(&device);
        assert_eq!(attributes.len(), SLICE_ATTRIBUTES_MAX - 1);
        assert!(attributes.contains_key("drayman.dev/path"));
    }
}
