//! The books: what the nodes have and who holds it, and every question and change that concerns both.
//!
//! The owner keeps them behind one lock, so that in [`Books::allocate`] check and hold are one step.
//! What changes the books is here; what is asked of them is in [`super::allocate`].

use std::collections::{BTreeMap, BTreeSet};

use crate::api::resource::{AllocationResult, ResourceClaim};
use crate::core::devices::allocation::{self, claim_name};
use crate::core::devices::errors::Problem;
use crate::core::devices::holdings::{Change, Holder, Holdings, State};
use crate::core::devices::inventory::{Device, Inventory, Node, Replaced};

/// The inventory and the holdings of one driver.
#[derive(Clone, Debug)]
pub struct Books {
    pub(super) driver: String,
    pub(super) inventory: Inventory,
    pub(super) holdings: Holdings,
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

    /// Puts what a NodeInventory object says in place of what it said before; `None` if it is gone. Answers with how many
    /// devices a claim can get now and could not before, or that have changed.
    pub fn set_inventory(&mut self, object: &str, node: Option<Node>) -> usize {
        self.inventory
            .set(object, node)
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
        all.map(|(object, node)| self.set_inventory(&object, node)).sum()
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
        let record = allocation::read(&self.driver, uid, allocation);
        let mut problems = Vec::new();
        if before != Some(&record.state) {
            if let State::Unreadable { nodes, error } = &record.state {
                let nodes = nodes.iter().map(|node| &**node).collect::<Vec<_>>().join(", ");
                problems.push(Problem::Unreadable {
                    claim: claim_name(claim),
                    nodes,
                    error: error.to_string(),
                });
            }
            let made_for = record.made_for;
            problems.extend(made_for.map(|made_for| Problem::MadeForAnother {
                claim: claim_name(claim),
                made_for,
            }));
        }
        let change = self.put(claim, record.state);
        let freed = self.available_again(&change);
        problems.extend(change.conflicts.into_iter().map(Problem::Conflict));
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
        let status = &claim.status;
        let recorded = status.allocation.is_some() && status.driver_name.as_deref() == Some(&self.driver);
        match self.holdings.get(uid).map(|holder| &holder.state) {
            Some(State::Held(_)) if !recorded => self.gone(uid),
            _ => 0,
        }
    }

    /// Says that a claim of ours holds something.
    pub(super) fn put(&mut self, claim: &ResourceClaim, state: State) -> Change {
        let metadata = &claim.metadata;
        let created = metadata.creation_timestamp.as_ref().map(|time| time.0);
        let holder = Holder {
            claim: claim_name(claim).into(),
            created,
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
                    .filter(|device| device.claimable())
                    .map(|_| (&*place.node_name, &*place.device)),
            );
        }
        for name in &change.unblocked {
            let node = self.open_node(name);
            let devices = node.iter().flat_map(|node| self.available(node));
            places.extend(devices.map(|device| (&**name, &*device.name)));
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

    /// The devices of a node that are healthy and held by nobody.
    pub fn available<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Device> {
        let held = self.holdings.on_node(node.uid());
        let free = move |device: &&Device| held.is_none_or(|held| !held.contains_key(&device.name));
        node.devices()
            .iter()
            .filter(|device| device.claimable())
            .filter(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::resource::ResourceHandle;
    use crate::core::devices::allocate::Target;
    use crate::core::devices::fixture::{DRIVER, claim, demand, node};
    use crate::core::devices::judge::Wish;

    fn books(devices: &[&str]) -> Books {
        let mut books = Books::new(DRIVER);
        books.set_inventory("a", Some(node("a", "1", devices)));
        books
    }

    fn allocate(books: &mut Books, uid: &str) -> Option<AllocationResult> {
        let wish = Wish {
            claim: &claim(uid, None),
            demand: &demand("test", &[1]),
            suitable_nodes: None,
        };
        books.allocate(&[wish], Target::Node("a")).answers.pop()?.ok()
    }

    fn observe(books: &mut Books, uid: &str, allocation: Option<&AllocationResult>) -> Observed {
        books.observe(&claim(uid, allocation), allocation)
    }

    #[test]
    fn what_was_never_recorded_is_free_when_it_is_given_back() {
        let mut books = books(&["d"]);
        allocate(&mut books, "u").unwrap();
        assert_eq!(
            observe(&mut books, "u", None),
            Observed::default(),
            "not written yet: still held"
        );
        assert!(allocate(&mut books, "v").is_none());
        assert_eq!(books.deallocate(&claim("u", None)), 1);
        assert_eq!(books.deallocate(&claim("u", None)), 0);
        assert!(allocate(&mut books, "v").is_some());
    }

    #[test]
    fn what_is_recorded_stays_held_until_it_is_seen_to_be_gone() {
        let mut books = books(&["d"]);
        let allocation = allocate(&mut books, "u").unwrap();
        assert_eq!(
            books.deallocate(&claim("u", Some(&allocation))),
            0,
            "recorded, although that was not observed yet"
        );
        observe(&mut books, "u", Some(&allocation));
        assert_eq!(books.deallocate(&claim("u", None)), 0);
        assert!(allocate(&mut books, "v").is_none());
        assert_eq!(observe(&mut books, "u", None).freed, 1);
        assert!(allocate(&mut books, "v").is_some());
    }

    #[test]
    fn a_claim_that_no_longer_exists_holds_nothing_however_it_held_it() {
        let mut books = books(&["d", "e"]);
        let allocation = allocate(&mut books, "u").unwrap();
        observe(&mut books, "u", Some(&allocation));
        allocate(&mut books, "v").unwrap();
        assert_eq!((books.gone("u"), books.gone("v"), books.gone("w")), (1, 1, 0));
    }

    #[test]
    fn books_made_from_the_claims_alone_say_the_same() {
        let mut before = books(&["d", "e"]);
        let allocation = allocate(&mut before, "u").unwrap();
        observe(&mut before, "u", Some(&allocation));
        allocate(&mut before, "lost").unwrap();
        let mut after = books(&["d", "e"]);
        let claims = [claim("u", Some(&allocation)), claim("lost", None)];
        after.observe_all(
            claims
                .iter()
                .map(|claim| (claim, claim.status.allocation.as_ref())),
        );
        assert_eq!(after.holdings().uids().collect::<Vec<_>>(), ["u"]);
        before.observe_all(
            claims
                .iter()
                .map(|claim| (claim, claim.status.allocation.as_ref())),
        );
        assert_eq!(before.observe_all([]).freed, 2);
    }

    #[test]
    fn a_holding_on_a_node_that_was_made_again_blocks_nothing_and_can_be_given_back() {
        let mut books = books(&["d"]);
        let allocation = allocate(&mut books, "u").unwrap();
        observe(&mut books, "u", Some(&allocation));
        assert_eq!(books.set_inventory("a", None), 0);
        assert_eq!(books.set_inventory("a", Some(node("a", "2", &["d"]))), 1);
        assert!(allocate(&mut books, "v").is_some());
        assert_eq!(books.deallocate(&claim("u", Some(&allocation))), 0);
        assert_eq!(observe(&mut books, "u", None), Observed::default());
    }

    #[test]
    fn an_unreadable_allocation_is_reported_once_and_blocks_its_node_until_it_is_gone() {
        let mut books = books(&["d", "e"]);
        let mut allocation = allocate(&mut books, "u").unwrap();
        let newer = Some(r#"{"version":2}"#.to_owned());
        allocation.resource_handles = vec![ResourceHandle {
            data: newer,
            ..ResourceHandle::default()
        }];
        let observed = observe(&mut books, "u", Some(&allocation));
        let [problem] = observed.problems.as_slice() else {
            panic!("{observed:?}")
        };
        assert_eq!(problem.reason(), "HoldingUnreadable");
        assert!(
            problem
                .to_string()
                .starts_with("ResourceClaim ns/u holds something that cannot be read: "),
            "{problem}"
        );
        assert_eq!(observe(&mut books, "u", Some(&allocation)), Observed::default());
        assert!(allocate(&mut books, "v").is_none());
        assert_eq!(books.deallocate(&claim("u", Some(&allocation))), 0);
        assert_eq!(observe(&mut books, "u", None).freed, 2);
        assert!(allocate(&mut books, "v").is_some());
    }

    #[test]
    fn an_allocation_copied_from_another_claim_is_reported_and_both_hold_the_device() {
        let mut books = books(&["d"]);
        let allocation = allocate(&mut books, "u").unwrap();
        observe(&mut books, "u", Some(&allocation));
        let observed = observe(&mut books, "v", Some(&allocation));
        let reasons: Vec<&str> = observed.problems.iter().map(Problem::reason).collect();
        assert_eq!(reasons, ["AllocationMadeForAnother", "DeviceHeldTwice"]);
        assert_eq!(observe(&mut books, "v", None).freed, 0);
        assert_eq!(observe(&mut books, "u", None).freed, 1);
    }

    #[test]
    fn a_list_of_inventories_replaces_all_and_counts_only_what_is_new() {
        let mut books = books(&["d"]);
        let list = |nodes: &[(&str, &[&str])]| {
            nodes
                .iter()
                .map(|&(name, devices)| (name.to_owned(), node(name, "1", devices)))
                .collect()
        };
        assert_eq!(
            books.replace_inventories(list(&[("a", &["d", "e"]), ("b", &["d"])])),
            2
        );
        assert_eq!(
            books.replace_inventories(list(&[("a", &["d", "e"]), ("b", &["d"])])),
            0
        );
        assert_eq!(books.replace_inventories(list(&[])), 0);
        assert!(books.inventory().node("a").is_none());
    }
}
