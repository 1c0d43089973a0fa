//! The device allocator: the inventory and the allocation index, with every query and change that concerns both.
//!
//! Its owner keeps it behind one lock, so that [`DeviceAllocator::allocate`] checks and holds devices in one step. Changes are in this module;
//! evaluation and allocation are in [`super::allocate`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::api::resource::label::label_of_node;
use crate::api::resource::{AllocationResult, ResourceClaim};
use crate::core::allocation::active_selectors::Wanted;
use crate::core::allocation::allocation_result::{self, claim_name};
use crate::core::allocation::attribute_set::{AttributeSet, Match, Matches};
use crate::core::allocation::errors::Problem;
use crate::core::allocation::index::{AllocationIndex, Change, Holder, Place, State};
use crate::core::allocation::inventory::{Device, Inventory, Node, Replaced};

/// The device allocator of one driver.
#[derive(Clone, Debug)]
pub struct DeviceAllocator {
    pub(super) driver: String,
    pub(super) inventory: Inventory,
    pub(super) holdings: AllocationIndex,
    pub(super) matches: Matches,
    wanted: Wanted,
    /// Devices with several holders, until the number of their shares is known.
    doubts: BTreeSet<Place>,
    /// Whether all inventories were listed once. From then on, an unknown inventory does not exist.
    listed: bool,
}

/// The effects of an observation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Number of devices that have become available.
    pub freed: usize,
    /// New problems with the allocations of claims.
    pub problems: Vec<Problem>,
}

impl DeviceAllocator {
    /// An empty device allocator of the driver with this name.
    pub fn new(driver: impl Into<String>) -> Self {
        Self {
            driver: driver.into(),
            inventory: Inventory::default(),
            holdings: AllocationIndex::default(),
            matches: Matches::default(),
            wanted: Wanted::default(),
            doubts: BTreeSet::new(),
            listed: false,
        }
    }

    /// The devices of all nodes.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// The allocation index.
    pub fn holdings(&self) -> &AllocationIndex {
        &self.holdings
    }

    /// The selector results.
    pub fn matches(&self) -> &Matches {
        &self.matches
    }

    /// The active selectors, with their pending evaluations.
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// Activates an expression for the devices of a kind. The first time scans all of them.
    pub fn want(&mut self, kind: &str, expression: &Arc<str>) {
        if self.wanted.contains(kind, expression) {
            return;
        }
        let nodes = self.inventory.nodes_with(kind);
        let nodes = nodes.filter_map(|name| self.inventory.node(name));
        let devices = nodes
            .flat_map(|node| node.devices())
            .filter(|device| *device.kind == *kind);
        let mut numbers = Vec::new();
        for device in devices {
            let number = self.matches.number(&device.attributes);
            if !self.matches.is_judged(expression, number) {
                numbers.push(number);
            }
        }
        self.wanted.begin(kind, expression, numbers.into_iter());
    }

    /// The attribute sets of a kind that an expression has yet to evaluate.
    pub fn unjudged(&self, kind: &str, expression: &str) -> impl Iterator<Item = &AttributeSet> {
        let numbers = self.wanted.unjudged(kind, expression);
        numbers.filter_map(|number| self.matches.facts(number))
    }

    /// Stores results of an expression.
    pub fn judged(&mut self, expression: &Arc<str>, said: Vec<(AttributeSet, Match)>) {
        let numbers: Vec<usize> = said.iter().map(|(facts, _)| self.matches.number(facts)).collect();
        self.wanted.judged(expression, &numbers);
        self.matches.put(expression, said);
    }

    /// Removes an expression, at a cost that does not depend on the devices.
    pub fn forget_selector(&mut self, expression: &str) {
        self.wanted.forget(expression);
        self.matches.forget(expression);
    }

    /// Removes the results for attribute sets that no device has any more.
    pub fn forget_devices(&mut self) {
        let devices = self.inventory.nodes().flat_map(Node::devices);
        let facts = devices.map(|device| &device.attributes).collect();
        let gone = self.matches.retain(&facts);
        self.wanted.forget_devices(&gone);
    }

    /// Replaces the content of a NodeInventory object; `None` if it was deleted. Returns how many of the available devices were not
    /// available before or have changed.
    pub fn set_inventory(&mut self, object: &str, node: Option<Node>) -> usize {
        let replaced = self.inventory.set(object, node);
        for replaced in &replaced {
            if let Some(node) = self.inventory.node(&replaced.name) {
                self.wanted.see(node, &mut self.matches);
            }
        }
        replaced
            .iter()
            .map(|replaced| self.newly_available(replaced))
            .sum()
    }

    /// Replaces all NodeInventory objects, by name. Returns the sum of the results of [`DeviceAllocator::set_inventory`].
    pub fn replace_inventories(&mut self, nodes: BTreeMap<String, Node>) -> usize {
        let gone = self
            .inventory
            .objects()
            .filter(|object| !nodes.contains_key(*object))
            .map(str::to_owned);
        let gone: Vec<(String, Option<Node>)> = gone.map(|object| (object, None)).collect();
        let all = gone
            .into_iter()
            .chain(nodes.into_iter().map(|(object, node)| (object, Some(node))));
        self.listed = true;
        all.map(|(object, node)| self.set_inventory(&object, node)).sum()
    }

    /// Checks devices with several holders again, and returns the conflicts: devices with more holders than shares. Nothing is reported
    /// while the number of shares is unknown. A device in no inventory has one share, once all inventories are listed.
    pub fn settle_doubts(&mut self) -> Vec<Problem> {
        let doubts = std::mem::take(&mut self.doubts);
        self.settle(doubts)
    }

    fn settle(&mut self, doubts: impl IntoIterator<Item = Place>) -> Vec<Problem> {
        let mut problems = Vec::new();
        for place in doubts {
            let node = self
                .inventory
                .node(&place.node_name)
                .filter(|node| *node.uid() == *place.node_uid);
            let shares = node
                .and_then(|node| node.device(&place.device))
                .map(|device| device.shares);
            if shares.is_none() && !self.listed && self.holders(&place.node_uid, &place.device) > 1 {
                self.doubts.insert(place);
                continue;
            }
            let conflicts = self.holdings.conflicts(&place, shares.unwrap_or(1));
            problems.extend(conflicts.into_iter().map(Problem::Conflict));
        }
        problems
    }

    /// Applies the complete list of claims. A claim that it lacks is gone, even if its devices were granted and not recorded.
    pub fn observe_all<'a>(
        &mut self,
        claims: impl IntoIterator<Item = (&'a ResourceClaim, Option<&'a AllocationResult>)>,
    ) -> Observed {
        let claims: Vec<_> = claims.into_iter().collect();
        let listed: BTreeSet<&str> = claims
            .iter()
            .filter_map(|(claim, _)| claim.metadata.uid.as_deref())
            .collect();
        let gone: Vec<String> = self
            .holdings
            .uids()
            .filter(|uid| !listed.contains(uid))
            .map(str::to_owned)
            .collect();
        let mut observed = Observed::default();
        for uid in gone {
            observed.freed += self.gone(&uid);
        }
        for (claim, allocation) in claims {
            let one = self.observe(claim, allocation);
            observed.freed += one.freed;
            observed.problems.extend(one.problems);
        }
        observed
    }

    /// Applies an observed claim. `allocation` is the one that its status records as this driver's, if any. An unrecorded grant stays held.
    pub fn observe(&mut self, claim: &ResourceClaim, allocation: Option<&AllocationResult>) -> Observed {
        let Some(uid) = claim.metadata.uid.as_deref() else {
            return Observed::default();
        };
        let before = self.holdings.get(uid).map(|holder| &holder.state);
        let Some(allocation) = allocation else {
            let freed = match before {
                Some(State::Recorded(_) | State::Unreadable { .. }) => self.gone(uid),
                Some(State::Held(_)) | None => 0,
            };
            return Observed {
                freed,
                problems: Vec::new(),
            };
        };
        let mut record = allocation_result::read(&self.driver, uid, allocation);
        if let State::Unreadable { nodes, .. } = &mut record.state
            && nodes.is_empty()
        {
            nodes.extend(allocation_result::labelled_node(&self.driver, claim));
        }
        let mut problems = Vec::new();
        if before != Some(&record.state) {
            if let State::Unreadable { nodes, error } = &record.state {
                let nodes = nodes.iter().map(|node| &**node).collect::<Vec<_>>().join(", ");
                problems.push(Problem::Unreadable {
                    claim: claim_name(claim),
                    uid: uid.to_owned(),
                    nodes,
                    error: error.to_string(),
                });
            }
            let made_for = record.made_for.clone();
            problems.extend(made_for.map(|made_for| Problem::MadeForAnother {
                claim: claim_name(claim),
                uid: uid.to_owned(),
                made_for,
            }));
        }
        let change = self.put(claim, record.state, record.made_for.is_some());
        let freed = self.available_again(&change);
        problems.extend(self.settle(change.shared));
        Observed { freed, problems }
    }

    /// Removes a claim that no longer exists. Returns how many devices have become available.
    pub fn gone(&mut self, uid: &str) -> usize {
        let change = self.holdings.remove(uid);
        self.available_again(&change)
    }

    /// Releases the devices that were granted to a claim and never recorded in it. Recorded devices stay held until [`DeviceAllocator::observe`]
    /// shows that they are released. Returns how many devices have become available.
    pub fn deallocate(&mut self, claim: &ResourceClaim) -> usize {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let recorded = claim.status.allocation_of(&self.driver).is_some();
        match self.holdings.get(uid).map(|holder| &holder.state) {
            Some(State::Held(_)) if !recorded => self.gone(uid),
            _ => 0,
        }
    }

    /// Stores the devices of a claim; `copied` if its allocation was made for another claim.
    pub(super) fn put(&mut self, claim: &ResourceClaim, state: State, copied: bool) -> Change {
        let metadata = &claim.metadata;
        let created = metadata.creation_timestamp.as_ref().map(|time| time.0);
        let holder = Holder {
            claim: claim_name(claim).into(),
            created,
            copied,
            state,
        };
        self.holdings
            .put(metadata.uid.as_deref().unwrap_or_default(), holder)
    }

    /// How many devices have become available for claims by a change.
    pub(super) fn available_again(&self, change: &Change) -> usize {
        let mut places: BTreeSet<(&str, &str)> = BTreeSet::new();
        for place in &change.freed {
            let node = self
                .open_node(&place.node_name)
                .filter(|node| *node.uid() == *place.node_uid);
            let device = node.and_then(|node| node.device(&place.device));
            places.extend(
                device
                    .filter(|device| device.claimable() && self.has_room(&place.node_uid, device))
                    .map(|_| (&*place.node_name, &*place.device)),
            );
        }
        for name in &change.unblocked {
            let is_it = |node: &&Node| *node.name() == **name || *label_of_node(node.name()) == **name;
            let named = self.inventory.nodes().filter(is_it);
            for node in named.filter_map(|node| self.open_node(node.name())) {
                let devices = self.available(node);
                places.extend(devices.map(|device| (node.name(), &*device.name)));
            }
        }
        places.len()
    }

    fn newly_available(&self, replaced: &Replaced) -> usize {
        let Some(node) = self.open_node(&replaced.name) else {
            return 0;
        };
        let before = replaced.before.as_ref();
        let before = before.filter(|before| before.unready().is_none() && before.uid() == node.uid());
        let same = |device: &&Device| before.and_then(|before| before.device(&device.name)) == Some(*device);
        self.available(node).filter(|device| !same(device)).count()
    }

    /// The node, if devices can be allocated on it.
    fn open_node(&self, name: &str) -> Option<&Node> {
        let node = self.inventory.node(name)?;
        (node.unready().is_none() && !self.holdings.unreadable_on(name)).then_some(node)
    }

    /// The devices of a node that are healthy and have a share left.
    pub fn available<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Device> {
        let devices = node.devices().iter().filter(|device| device.claimable());
        devices.filter(|device| self.has_room(node.uid(), device))
    }

    /// Whether another claim could hold the device.
    fn has_room(&self, node_uid: &str, device: &Device) -> bool {
        self.holders(node_uid, &device.name) < device.shares
    }

    fn holders(&self, node_uid: &str, device: &str) -> usize {
        let held = self.holdings.on_node(node_uid).and_then(|held| held.get(device));
        held.map_or(0, Vec::len)
    }
}

#[cfg(test)]
mod tests;
