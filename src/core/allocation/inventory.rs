//! The devices of all nodes: the NodeInventory objects of one driver, in a compact form for decisions.
//!
//! An inventory does not contain the holders of devices; those are derived from the claims ([`super::index`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;

use crate::api::crd::{AttributeValue, Device as ApiDevice, Mode, NodeInventory, READY};

/// One node, as described by one NodeInventory object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    name: Box<str>,
    uid: Box<str>,
    created: Option<Timestamp>,
    unready: Option<Box<str>>,
    devices: Box<[Device]>,
}

/// One device of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name, unique on the node and stable over reboots.
    pub name: Box<str>,
    /// The kind in the node's configuration that found the device.
    pub kind: Box<str>,
    /// The kubelet APIs through which containers may get the device.
    pub mode: Mode,
    /// Why the device must not be allocated now; `None` if it is healthy.
    pub unhealthy: Option<Box<str>>,
    /// Its attributes, by qualified name.
    pub attributes: AttributeSet,
    /// How many claims may hold it at once; at least one.
    pub shares: usize,
}

impl Node {
    /// Reads an inventory. If two devices have one name, the first counts; an attribute without exactly one of the four types is dropped.
    /// The CRD's schema refuses both, so this concerns objects that are older than the schema.
    pub fn read(inventory: &NodeInventory) -> Self {
        let spec = &inventory.spec;
        let mut devices: BTreeMap<&str, Device> = BTreeMap::new();
        for device in &spec.devices {
            devices
                .entry(&device.name)
                .or_insert_with(|| Device::read(device));
        }
        let node_uid = &spec.node_uid;
        let unready = if node_uid.is_empty() {
            Some("it names no node uid".into())
        } else {
            unready(inventory)
        };
        Self {
            name: spec.node_name.as_str().into(),
            uid: node_uid.as_str().into(),
            created: inventory.metadata.creation_timestamp.as_ref().map(|time| time.0),
            unready,
            devices: devices.into_values().collect(),
        }
    }

    /// Name of the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Uid of the Node object, which distinguishes the node from a later one with the same name.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// Why nothing can be allocated on this node now; `None` if it is ready.
    pub fn unready(&self) -> Option<&str> {
        self.unready.as_deref()
    }

    /// The devices, sorted by name.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The device with this name.
    pub fn device(&self, name: &str) -> Option<&Device> {
        let index = self
            .devices
            .binary_search_by(|device| (*device.name).cmp(name))
            .ok()?;
        self.devices.get(index)
    }

    fn kinds(&self) -> BTreeSet<&str> {
        self.devices.iter().map(|device| &*device.kind).collect()
    }
}

/// Why the node is not ready, from the object's `Ready` condition.
pub(crate) fn unready(inventory: &NodeInventory) -> Option<Box<str>> {
    let conditions = inventory
        .status
        .as_ref()
        .map(|status| status.conditions.as_slice())
        .unwrap_or_default();
    match conditions.iter().find(|condition| condition.type_ == READY) {
        None => Some("its companion has not reported yet".into()),
        Some(ready) if ready.status == "True" => None,
        Some(ready) if ready.message.is_empty() => Some(ready.reason.as_str().into()),
        Some(ready) => Some(ready.message.chars().take(256).collect::<String>().into()),
    }
}

impl Device {
    fn read(device: &ApiDevice) -> Self {
        let attributes = &device.attributes;
        Self {
            name: device.name.as_str().into(),
            kind: device.kind.as_str().into(),
            mode: device.mode,
            unhealthy: device.unhealthy.as_deref().map(Into::into),
            shares: device
                .shares
                .map_or(1, |shares| usize::try_from(shares).unwrap_or(usize::MAX).max(1)),
            attributes: attributes
                .iter()
                .filter_map(|(name, value)| Some((name.as_str().into(), Attribute::read(value)?)))
                .collect(),
        }
    }

    /// Whether the mode and the health of the device allow claims to get it.
    pub fn claimable(&self) -> bool {
        self.mode.serves_claims() && self.unhealthy.is_none()
    }
}

/// The inventories of all nodes.
///
/// A node should have one object. If it has several, the oldest counts (by creation time, then by object name) until it is deleted, so that
/// a second writer cannot override the companion.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// The node that each object describes, by object name.
    objects: BTreeMap<Box<str>, Box<str>>,
    /// The objects of each node, oldest first, never empty.
    nodes: BTreeMap<Box<str>, Entries>,
    /// The nodes with at least one device of a kind, according to the object that counts.
    kinds: BTreeMap<Box<str>, BTreeSet<Box<str>>>,
}

/// Objects with their names.
type Entries = Vec<(Box<str>, Arc<Node>)>;

impl Inventory {
    /// The node with this name.
    pub fn node(&self, name: &str) -> Option<&Arc<Node>> {
        self.nodes.get(name)?.first().map(|(_, node)| node)
    }

    /// Names of the nodes with a device of this kind, sorted.
    pub fn nodes_with(&self, kind: &str) -> impl Iterator<Item = &str> {
        self.kinds.get(kind).into_iter().flatten().map(|name| &**name)
    }

    /// All nodes, sorted by name.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes
            .values()
            .filter_map(|entries| entries.first())
            .map(|(_, node)| &**node)
    }

    /// Names of the objects, sorted.
    pub fn objects(&self) -> impl Iterator<Item = &str> {
        self.objects.keys().map(|name| &**name)
    }

    /// Replaces the content of an object; `None` if the object was deleted.
    ///
    /// Returns the former state of each node that has changed. These are two nodes if the object now describes another node.
    pub fn set(&mut self, object: &str, node: Option<Node>) -> Vec<Replaced> {
        let mut replaced = Vec::new();
        let moved_from = self
            .objects
            .get(object)
            .filter(|old| node.as_ref().is_none_or(|node| node.name != **old));
        if let Some(old_name) = moved_from.cloned() {
            self.objects.remove(object);
            replaced.extend(self.change(&old_name, |entries| entries.retain(|(name, _)| **name != *object)));
        }
        if let Some(node) = node {
            let name = node.name.clone();
            self.objects.insert(object.into(), name.clone());
            replaced.extend(self.change(&name, |entries| {
                entries.retain(|(name, _)| **name != *object);
                let key = (node.created, object);
                let place = entries.partition_point(|(name, other)| (other.created, &**name) < key);
                entries.insert(place, (object.into(), Arc::new(node)));
            }));
        }
        replaced
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Entries)) -> Option<Replaced> {
        let mut entries = self.nodes.remove(name).unwrap_or_default();
        let before = entries.first().map(|(_, node)| node.clone());
        change(&mut entries);
        let after = entries.first().map(|(_, node)| node);
        let different = before.as_ref() != after;
        if different {
            let old_kinds = before.as_deref().map(Node::kinds).unwrap_or_default();
            let new_kinds = after.map(|node| node.kinds()).unwrap_or_default();
            for &kind in old_kinds.difference(&new_kinds) {
                let nodes = self.kinds.get_mut(kind);
                if nodes.is_some_and(|nodes| nodes.remove(name) && nodes.is_empty()) {
                    self.kinds.remove(kind);
                }
            }
            for &kind in new_kinds.difference(&old_kinds) {
                self.kinds.entry(kind.into()).or_default().insert(name.into());
            }
        }
        if !entries.is_empty() {
            self.nodes.insert(name.into(), entries);
        }
        different.then(|| Replaced {
            name: name.into(),
            before,
        })
    }
}

/// A node whose inventory has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// Name of the node.
    pub name: Box<str>,
    /// Its former state.
    pub before: Option<Arc<Node>>,
}

/// The attributes of a device, sorted by name. Devices with equal sets match the same selectors.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttributeSet {
    /// Compared first: nearly all different sets differ in it, at the cost of one comparison.
    fingerprint: u64,
    attributes: Arc<[(Box<str>, Attribute)]>,
}

impl FromIterator<(Box<str>, Attribute)> for AttributeSet {
    fn from_iter<T: IntoIterator<Item = (Box<str>, Attribute)>>(attributes: T) -> Self {
        let attributes: Arc<[_]> = attributes.into_iter().collect();
        Self {
            fingerprint: fingerprint(&attributes),
            attributes,
        }
    }
}

/// FNV-1a over names and values. A collision costs one full comparison.
fn fingerprint(attributes: &[(Box<str>, Attribute)]) -> u64 {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    attributes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, (name, value)| {
            let sum = name.as_bytes().iter().fold(sum, mix);
            match value {
                Attribute::String(text) | Attribute::Version(text) => text.as_bytes().iter().fold(sum, mix),
                Attribute::Int(number) => number.to_le_bytes().iter().fold(sum, mix),
                Attribute::Bool(value) => mix(sum, &u8::from(*value)),
            }
        })
}

impl std::ops::Deref for AttributeSet {
    type Target = [(Box<str>, Attribute)];

    fn deref(&self) -> &Self::Target {
        &self.attributes
    }
}

impl AttributeSet {
    /// The value of the attribute with this qualified name.
    pub fn value(&self, name: &str) -> Option<&Attribute> {
        let index = self.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
        self.get(index).map(|(_, value)| value)
    }
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attribute {
    /// A string.
    String(Box<str>),
    /// A 64-bit integer.
    Int(i64),
    /// A boolean.
    Bool(bool),
    /// A semantic version, as written.
    Version(Box<str>),
}

impl Attribute {
    /// Reads a value. `None` unless it has exactly one of the four types.
    pub fn read(value: &AttributeValue) -> Option<Self> {
        match (&value.string, value.int, value.bool, &value.version) {
            (Some(string), None, None, None) => Some(Self::String(string.as_str().into())),
            (None, Some(int), None, None) => Some(Self::Int(int)),
            (None, None, Some(bool), None) => Some(Self::Bool(bool)),
            (None, None, None, Some(version)) => Some(Self::Version(version.as_str().into())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
