//! The devices of all nodes, and the selectors that they match: the NodeInventory objects of one driver, in a compact form for decisions.
//!
//! An inventory does not contain the holders of devices; those are derived from the claims ([`super::index`]).
//!
//! A selector depends on attributes only, so its results are stored by attribute set ([`SelectorResults`]): they are never outdated, and
//! equal devices are evaluated once. The runtime evaluates selectors ([`crate::host`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;

use crate::api::crd::{AttributeValue, Device, NodeInventory, READY};

/// One node, as described by one NodeInventory object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    name: Box<str>,
    uid: Box<str>,
    created: Option<Timestamp>,
    unready: Option<Box<str>>,
    devices: Box<[DeviceInfo]>,
}

/// One device of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name, unique on the node and stable over reboots.
    pub name: Box<str>,
    /// The kind in the node's configuration that found the device.
    pub kind: Box<str>,
    /// Whether claims can have the device, according to its mode.
    pub serves_claims: bool,
    /// Why the device must not be allocated now; `None` if it is healthy.
    pub unhealthy: Option<Box<str>>,
    /// Its attributes, by qualified name.
    pub attributes: AttributeSet,
    /// How many claims may hold it at once; at least one.
    pub shares: usize,
}

impl NodeInfo {
    /// Reads an inventory. If two devices have one name, the first counts; an attribute without exactly one of the four types is dropped.
    /// The CRD's schema refuses both, so this concerns objects that are older than the schema.
    pub fn read(inventory: &NodeInventory) -> Self {
        let spec = &inventory.spec;
        let mut devices: BTreeMap<&str, DeviceInfo> = BTreeMap::new();
        for device in &spec.devices {
            devices
                .entry(&device.name)
                .or_insert_with(|| DeviceInfo::read(device));
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
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    pub fn device(&self, name: &str) -> Option<&DeviceInfo> {
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

impl DeviceInfo {
    fn read(device: &Device) -> Self {
        let attributes = &device.attributes;
        Self {
            name: device.name.as_str().into(),
            kind: device.kind.as_str().into(),
            serves_claims: device.mode.serves_claims(),
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
        self.serves_claims && self.unhealthy.is_none()
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
type Entries = Vec<(Box<str>, Arc<NodeInfo>)>;

impl Inventory {
    pub fn node(&self, name: &str) -> Option<&Arc<NodeInfo>> {
        self.nodes.get(name)?.first().map(|(_, node)| node)
    }

    /// Names of the nodes with a device of this kind, sorted.
    pub fn nodes_with(&self, kind: &str) -> impl Iterator<Item = &str> {
        self.kinds.get(kind).into_iter().flatten().map(|name| &**name)
    }

    /// All nodes, sorted by name.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
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
    /// Returns the previous state of each node that has changed. These are two nodes if the object now describes another node.
    pub fn set(&mut self, object: &str, node: Option<NodeInfo>) -> Vec<Replaced> {
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
                let index = entries.partition_point(|(name, other)| (other.created, &**name) < key);
                entries.insert(index, (object.into(), Arc::new(node)));
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
            let old_kinds = before.as_deref().map(NodeInfo::kinds).unwrap_or_default();
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
    pub name: Box<str>,
    /// Its previous state.
    pub before: Option<Arc<NodeInfo>>,
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
    String(Box<str>),
    Int(i64),
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

/// The result of a selector for a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    Yes,
    No,
    /// The selector fails on the device, with this error. Counts as no match.
    Failed(Arc<str>),
}

/// Maximum number of errors kept for one expression. A device with a further error gets [`OTHER_ERROR`], so that an expression whose errors
/// quote attributes needs no text per device.
const ERRORS_MAX: usize = 4;
/// The error of a device whose own error is not kept.
const OTHER_ERROR: &str =
    "its error differs from those on other devices; evaluate it with the attributes of this one";

/// A set of small numbers, with one bit for each number up to the largest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Bits {
    fn contains(&self, number: usize) -> bool {
        let word = self.words.get(number / 64);
        word.is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    pub(super) fn set(&mut self, number: usize, value: bool) {
        if self.contains(number) == value {
            return;
        }
        let (index, bit) = (number / 64, 1 << (number % 64));
        if self.words.len() <= index {
            self.words.resize(index + 1, 0);
        }
        if let Some(word) = self.words.get_mut(index) {
            *word ^= bit;
        }
        self.len = if value { self.len + 1 } else { self.len - 1 };
    }

    /// The numbers in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.words.iter().enumerate().flat_map(|(index, word)| {
            let bits = (0..64).filter(move |bit| word & (1 << bit) != 0);
            bits.map(move |bit| 64 * index + bit)
        })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// The results of one expression, by the number of the attribute set.
#[derive(Clone, Debug, Default)]
pub(super) struct ExpressionResults {
    evaluated: Bits,
    matching: Bits,
    errors: Vec<(Arc<str>, Bits)>,
}

impl ExpressionResults {
    pub(super) fn get(&self, number: usize) -> Option<Match> {
        if !self.evaluated.contains(number) {
            return None;
        }
        if self.matching.contains(number) {
            return Some(Match::Yes);
        }
        let error = self.errors.iter().find(|(_, failed)| failed.contains(number));
        Some(error.map_or(Match::No, |(error, _)| Match::Failed(Arc::clone(error))))
    }

    fn put(&mut self, number: usize, result: Match) {
        self.forget(number);
        self.evaluated.set(number, true);
        match result {
            Match::Yes => self.matching.set(number, true),
            Match::No => {}
            Match::Failed(error) => {
                let known = self.errors.iter().position(|(other, _)| *other == error);
                let index = known.unwrap_or_else(|| {
                    if self.errors.len() < ERRORS_MAX {
                        self.errors.push((error, Bits::default()));
                    } else if self.errors.len() == ERRORS_MAX {
                        self.errors.push((OTHER_ERROR.into(), Bits::default()));
                    }
                    self.errors.len() - 1
                });
                if let Some((_, failed)) = self.errors.get_mut(index) {
                    failed.set(number, true);
                }
            }
        }
    }

    fn forget(&mut self, number: usize) {
        self.evaluated.set(number, false);
        self.matching.set(number, false);
        for (_, failed) in &mut self.errors {
            failed.set(number, false);
        }
    }
}

/// Selector results by expression and attribute set; a few bits for each pair.
#[derive(Clone, Debug, Default)]
pub struct SelectorResults {
    /// The numbers of all attribute sets with a stored or pending result.
    numbers: Arc<BTreeMap<AttributeSet, usize>>,
    /// The reverse of `numbers`; `None` for an unused number.
    attributes: Vec<Option<AttributeSet>>,
    /// Unused numbers below the largest.
    unused: Vec<usize>,
    results: BTreeMap<Arc<str>, Arc<ExpressionResults>>,
}

impl SelectorResults {
    /// The results of an expression. The lookup compares whole expressions: do it once for all devices.
    pub(super) fn of_expression(&self, expression: &str) -> Option<&ExpressionResults> {
        self.results.get(expression).map(|results| &**results)
    }

    /// The number of an attribute set that has one.
    pub(super) fn known_number(&self, attributes: &AttributeSet) -> Option<usize> {
        self.numbers.get(attributes).copied()
    }

    /// Whether the result of an expression for the attribute set with this number is stored.
    pub(super) fn is_evaluated(&self, expression: &str, number: usize) -> bool {
        let results = self.results.get(expression);
        results.is_some_and(|results| results.evaluated.contains(number))
    }

    /// The number of an attribute set. A new set gets an unused number.
    pub(super) fn number(&mut self, attributes: &AttributeSet) -> usize {
        if let Some(&number) = self.numbers.get(attributes) {
            return number;
        }
        let number = self.unused.pop().unwrap_or(self.attributes.len());
        if self.attributes.len() <= number {
            self.attributes.resize(number + 1, None);
        }
        if let Some(entry) = self.attributes.get_mut(number) {
            *entry = Some(attributes.clone());
        }
        Arc::make_mut(&mut self.numbers).insert(attributes.clone(), number);
        number
    }

    pub(super) fn attribute_set(&self, number: usize) -> Option<&AttributeSet> {
        self.attributes.get(number)?.as_ref()
    }

    /// Stores results of an expression.
    pub fn put(&mut self, expression: &Arc<str>, results: impl IntoIterator<Item = (AttributeSet, Match)>) {
        let results: Vec<_> = results
            .into_iter()
            .map(|(attributes, result)| (self.number(&attributes), result))
            .collect();
        let known = Arc::make_mut(self.results.entry(Arc::clone(expression)).or_default());
        for (number, result) in results {
            known.put(number, result);
        }
    }

    /// Returns the results of these expressions, sharing their memory.
    #[must_use]
    pub fn some<'a>(&self, expressions: impl Iterator<Item = &'a Arc<str>>) -> Self {
        let known = expressions.filter_map(|expression| self.results.get_key_value(expression));
        Self {
            numbers: Arc::clone(&self.numbers),
            attributes: Vec::new(),
            unused: Vec::new(),
            results: known
                .map(|(expression, results)| (Arc::clone(expression), Arc::clone(results)))
                .collect(),
        }
    }

    /// Removes the results of an expression.
    pub fn forget(&mut self, expression: &str) {
        self.results.remove(expression);
    }

    /// Keeps the results for these attribute sets only. Returns the numbers that have become unused.
    pub fn retain(&mut self, attributes: &BTreeSet<&AttributeSet>) -> Vec<usize> {
        let gone = self
            .numbers
            .iter()
            .filter(|(known, _)| !attributes.contains(known));
        let gone: Vec<usize> = gone.map(|(_, number)| *number).collect();
        if gone.is_empty() {
            return gone;
        }
        Arc::make_mut(&mut self.numbers).retain(|known, _| attributes.contains(known));
        for results in self.results.values_mut() {
            let results = Arc::make_mut(results);
            for &number in &gone {
                results.forget(number);
            }
        }
        for &number in &gone {
            if let Some(entry) = self.attributes.get_mut(number) {
                *entry = None;
            }
        }
        self.unused.extend(&gone);
        gone
    }
}

/// The active selectors by device kind, each with the numbers of the attribute sets that it has yet to evaluate. Stored as bits, because
/// all devices can change at once, under every selector.
#[derive(Clone, Debug, Default)]
pub struct ActiveSelectors(BTreeMap<Box<str>, BTreeMap<Arc<str>, Bits>>);

impl ActiveSelectors {
    pub fn contains(&self, kind: &str, expression: &str) -> bool {
        self.0
            .get(kind)
            .is_some_and(|selectors| selectors.contains_key(expression))
    }

    /// The attribute sets of a kind that an expression has yet to evaluate, by number.
    pub(super) fn pending(&self, kind: &str, expression: &str) -> impl Iterator<Item = usize> {
        let selectors = self.0.get(kind);
        selectors
            .and_then(|selectors| selectors.get(expression))
            .into_iter()
            .flat_map(Bits::iter)
    }

    /// The kinds and expressions with pending evaluations.
    pub fn due(&self) -> impl Iterator<Item = (&str, &Arc<str>)> {
        self.all()
            .filter(|(_, _, pending)| pending.len() > 0)
            .map(|(kind, expression, _)| (kind, expression))
    }

    pub fn kinds(&self, expression: &str) -> impl Iterator<Item = &str> {
        self.all()
            .filter(move |(_, active, _)| ***active == *expression)
            .map(|(kind, _, _)| kind)
    }

    fn all(&self) -> impl Iterator<Item = (&str, &Arc<str>, &Bits)> {
        self.0.iter().flat_map(|(kind, selectors)| {
            selectors
                .iter()
                .map(move |(expression, pending)| (&**kind, expression, pending))
        })
    }

    /// Activates an expression for a kind. `pending` are the attribute sets without a result.
    pub(super) fn begin(&mut self, kind: &str, expression: &Arc<str>, pending: impl Iterator<Item = usize>) {
        let mut bits = Bits::default();
        for number in pending {
            bits.set(number, true);
        }
        let selectors = self.0.entry(kind.into()).or_default();
        selectors.insert(Arc::clone(expression), bits);
    }

    /// Adds the pending evaluations for the devices of a node.
    pub(super) fn see(&mut self, node: &NodeInfo, matches: &mut SelectorResults) {
        for device in node.devices() {
            let Some(selectors) = self.0.get_mut(&device.kind) else {
                continue;
            };
            let number = matches.number(&device.attributes);
            for (expression, pending) in selectors {
                if !matches.is_evaluated(expression, number) {
                    pending.set(number, true);
                }
            }
        }
    }

    /// Removes evaluations whose results are stored.
    pub(super) fn evaluated(&mut self, expression: &str, numbers: &[usize]) {
        for selectors in self.0.values_mut() {
            if let Some(pending) = selectors.get_mut(expression) {
                for &number in numbers {
                    pending.set(number, false);
                }
            }
        }
    }

    pub(super) fn forget(&mut self, expression: &str) {
        self.0.retain(|_, selectors| {
            selectors.remove(expression);
            !selectors.is_empty()
        });
    }

    /// Removes attribute sets that no device has any more.
    pub(super) fn forget_devices(&mut self, gone: &[usize]) {
        for pending in self.0.values_mut().flat_map(BTreeMap::values_mut) {
            for &number in gone {
                pending.set(number, false);
            }
        }
    }
}

#[cfg(test)]
mod tests;
