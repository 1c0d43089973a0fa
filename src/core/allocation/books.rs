//! The books: what the nodes have and who holds it, and every question and change that concerns both.
//!
//! The owner keeps them behind one lock, so that in [`Books::allocate`] check and hold are one step.
//! What changes the books is here; what is asked of them is in [`super::allocate`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::api::resource::label::label_of_node;
use crate::api::resource::{AllocationResult, ResourceClaim};
use crate::core::allocation::allocation_result::{self, claim_name};
use crate::core::allocation::errors::Problem;
use crate::core::allocation::facts::{Facts, Match, Matches};
use crate::core::allocation::holdings::{Change, Holder, Holdings, Place, State};
use crate::core::allocation::inventory::{Device, Inventory, Node, Replaced};
use crate::core::allocation::wanted::Wanted;

/// The inventory and the holdings of one driver.
#[derive(Clone, Debug)]
pub struct Books {
    pub(super) driver: String,
    pub(super) inventory: Inventory,
    pub(super) holdings: Holdings,
    pub(super) matches: Matches,
    wanted: Wanted,
    /// Devices that more than one claim was seen to hold, until it is known how many may.
    doubts: BTreeSet<Place>,
    /// Whether all inventories were listed once: what is not among them is not there.
    listed: bool,
}

/// What an observation has brought to light.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Devices that have become available.
    pub freed: usize,
    /// What is wrong with what claims hold and was not said before.
    pub problems: Vec<Problem>,
}

impl Books {
    /// Empty books of the driver of this name.
    pub fn new(driver: impl Into<String>) -> Self {
        Self {
            driver: driver.into(),
            inventory: Inventory::default(),
            holdings: Holdings::default(),
            matches: Matches::default(),
            wanted: Wanted::default(),
            doubts: BTreeSet::new(),
            listed: false,
        }
    }

    /// What the nodes have.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// Who holds what.
    pub fn holdings(&self) -> &Holdings {
        &self.holdings
    }

    /// What the selectors say of the devices.
    pub fn matches(&self) -> &Matches {
        &self.matches
    }

    /// The selectors by which devices are judged, and what each of them has not said anything of yet.
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// From now on the devices of a kind are judged by an expression. The first time costs a look at all of them.
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

    /// What is not judged yet of the devices of a kind, by an expression.
    pub fn unjudged(&self, kind: &str, expression: &str) -> impl Iterator<Item = &Facts> {
        let numbers = self.wanted.unjudged(kind, expression);
        numbers.filter_map(|number| self.matches.facts(number))
    }

    /// Takes note of what an expression says.
    pub fn judged(&mut self, expression: &Arc<str>, said: Vec<(Facts, Match)>) {
        let numbers: Vec<usize> = said.iter().map(|(facts, _)| self.matches.number(facts)).collect();
        self.wanted.judged(expression, &numbers);
        self.matches.put(expression, said);
    }

    /// Forgets an expression, at a cost that does not depend on the devices.
    pub fn forget_selector(&mut self, expression: &str) {
        self.wanted.forget(expression);
        self.matches.forget(expression);
    }

    /// Forgets what is said of devices that are gone.
    pub fn forget_devices(&mut self) {
        let devices = self.inventory.nodes().flat_map(Node::devices);
        let facts = devices.map(|device| &device.attributes).collect();
        let gone = self.matches.retain(&facts);
        self.wanted.forget_devices(&gone);
    }

    /// Puts what a NodeInventory object says in place of what it said before; `None` if it is gone. Answers with how many
    /// devices a claim can get now and could not before, or that have changed.
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

    /// Puts all NodeInventory objects, by name, in place of those before. Answers like [`Books::set_inventory`].
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

    /// What has turned out to be wrong: devices that more claims hold than may. As long as it is not known whether a device may
    /// be shared, nothing is said of it; one that is in no inventory may not.
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

    /// Takes note of everything that claims hold; whatever is not in it is gone, granted by us or not.
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

    /// Takes note of what a claim holds. `allocation` is the one that its status records as this driver's, if there is one;
    /// what was granted and is not recorded yet stays granted.
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

    /// Takes note that a claim no longer exists. Answers with how many devices have become available.
    pub fn gone(&mut self, uid: &str) -> usize {
        let change = self.holdings.remove(uid);
        self.available_again(&change)
    }

    /// Gives back what was granted to a claim and never recorded in it. What is recorded stays held until
    /// [`Books::observe`] shows that it is gone. Answers with how many devices have become available.
    pub fn deallocate(&mut self, claim: &ResourceClaim) -> usize {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let recorded = claim.status.allocation_of(&self.driver).is_some();
        match self.holdings.get(uid).map(|holder| &holder.state) {
            Some(State::Held(_)) if !recorded => self.gone(uid),
            _ => 0,
        }
    }

    /// Says that a claim of ours holds something; `copied` if by an allocation that was made for another claim.
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

    /// How many of the devices that nobody holds any more a claim can get now.
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

    /// The node, if something can be allocated on it at all.
    fn open_node(&self, name: &str) -> Option<&Node> {
        let node = self.inventory.node(name)?;
        (node.unready().is_none() && !self.holdings.unreadable_on(name)).then_some(node)
    }

    /// The devices of a node that are healthy and of which something is left.
    pub fn available<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Device> {
        let devices = node.devices().iter().filter(|device| device.claimable());
        devices.filter(|device| self.has_room(node.uid(), device))
    }

    /// Whether one claim more could hold the device.
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
