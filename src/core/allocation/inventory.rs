//! The devices of all nodes: the NodeInventory objects of one driver, in a compact form for decisions.
//!
//! An inventory does not contain the holders of devices; those are derived from the claims ([`super::index`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;

use crate::api::crd::{Device as ApiDevice, Mode, NodeInventory, READY};
use crate::core::allocation::attribute_set::{Attribute, AttributeSet};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::AttributeValue;
    use crate::core::allocation::fixture;

    fn names(inventory: &Inventory, kind: &str) -> Vec<String> {
        inventory.nodes_with(kind).map(str::to_owned).collect()
    }

    #[test]
    fn a_node_is_found_by_name_and_by_kind_until_its_object_is_gone() {
        let mut inventory = Inventory::default();
        let replaced = inventory.set("a.x", Some(fixture::node("a", "1", &["d1", "d2"])));
        assert_eq!(
            replaced,
            [Replaced {
                name: "a".into(),
                before: None
            }]
        );
        assert_eq!(inventory.node("a").unwrap().uid(), "1");
        assert_eq!(names(&inventory, "test"), ["a"]);
        assert!(
            inventory
                .set("a.x", Some(fixture::node("a", "1", &["d1", "d2"])))
                .is_empty(),
            "nothing has changed"
        );
        assert_eq!(inventory.set("a.x", None).len(), 1);
        assert!(inventory.node("a").is_none());
        assert!(inventory.nodes_with("test").next().is_none() && inventory.objects().next().is_none());
        assert!(inventory.set("a.x", None).is_empty());
    }

    #[test]
    fn of_two_objects_for_a_node_the_older_counts_until_it_is_gone() {
        let mut inventory = Inventory::default();
        let later = Node {
            created: Some(Timestamp::from_second(2).unwrap()),
            ..fixture::node("a", "2", &["x"])
        };
        let earlier = Node {
            created: Some(Timestamp::from_second(1).unwrap()),
            ..fixture::node("a", "1", &["y"])
        };
        inventory.set("first", Some(later));
        inventory.set("second", Some(earlier.clone()));
        assert_eq!(inventory.node("a").unwrap().uid(), "1");
        inventory.set(
            "second",
            Some(Node {
                devices: Box::default(),
                ..earlier
            }),
        );
        assert!(
            names(&inventory, "test").is_empty(),
            "what the later one says does not count"
        );
        inventory.set("second", None);
        assert_eq!(inventory.node("a").unwrap().uid(), "2");
        assert_eq!(names(&inventory, "test"), ["a"]);
    }

    #[test]
    fn an_inventory_recreated_for_another_node_leaves_the_first() {
        let mut inventory = Inventory::default();
        inventory.set("o", Some(fixture::node("a", "1", &["d"])));
        let replaced = inventory.set("o", Some(fixture::node("b", "2", &["d"])));
        assert_eq!(
            replaced
                .iter()
                .map(|replaced| &*replaced.name)
                .collect::<Vec<_>>(),
            ["a", "b"]
        );
        assert!(inventory.node("a").is_none());
        assert_eq!(names(&inventory, "test"), ["b"]);
    }

    #[test]
    fn only_a_true_ready_condition_makes_a_node_ready() {
        let mut inventory = fixture::inventory("a", "1", &["d"]);
        assert_eq!(Node::read(&inventory).unready(), None);
        let condition = inventory.status.as_mut().unwrap().conditions.first_mut().unwrap();
        condition.status = "False".into();
        condition.message = "drayman was stopped".into();
        assert_eq!(Node::read(&inventory).unready(), Some("drayman was stopped"));
        inventory.status = None;
        assert_eq!(
            Node::read(&inventory).unready(),
            Some("its companion has not reported yet")
        );
        inventory.spec.node_uid.clear();
        assert_eq!(Node::read(&inventory).unready(), Some("it names no node uid"));
    }

    #[test]
    fn what_the_schema_would_refuse_is_left_out() {
        let mut inventory = fixture::inventory("a", "1", &["d", "c", "d"]);
        let both = AttributeValue {
            int: Some(1),
            ..AttributeValue::string("x")
        };
        let attributes = [("e/both".into(), both), ("e/int".into(), AttributeValue::int(7))];
        inventory.spec.devices.first_mut().unwrap().attributes = attributes.into_iter().collect();
        let node = Node::read(&inventory);
        assert_eq!(
            node.devices()
                .iter()
                .map(|device| &*device.name)
                .collect::<Vec<_>>(),
            ["c", "d"]
        );
        assert_eq!(
            *node.device("d").unwrap().attributes,
            [("e/int".into(), Attribute::Int(7))]
        );
        assert_eq!(node.device("e"), None);
    }
}
