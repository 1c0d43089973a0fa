//! The allocation index: the devices that each claim holds, derived from the claims. The claim is the only durable record; the index adds
//! grants that are not yet recorded.
//!
//! Devices are indexed by the *uid* of their node: allocations on a deleted or recreated node do not block the devices of the node that now
//! has the name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;

use crate::api::handle::HandleDevice;
use crate::api::resource::label::label_of_node;

/// The devices of one node that one claim holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Name of the node.
    pub node_name: Box<str>,
    /// Uid of the Node object at the time of the allocation.
    pub node_uid: Box<str>,
    /// The devices, sorted by request, then by name.
    pub devices: Vec<HandleDevice>,
}

/// How a claim holds its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Granted by this driver and not yet observed in the claim. Ends when it is observed or released.
    Held(Grant),
    /// Observed in the claim. Ends only when the claim is observed without it.
    Recorded(Grant),
    /// The claim has an unreadable allocation of this driver, for example one of a newer release. Its devices are on one of these nodes, so
    /// no device on them is granted to other claims meanwhile.
    Unreadable {
        /// Names or label values of the nodes, as far as they are known.
        nodes: BTreeSet<Box<str>>,
        /// Why the allocation cannot be read.
        error: Box<str>,
    },
}

impl State {
    /// The devices, if they are known.
    pub fn grant(&self) -> Option<&Grant> {
        match self {
            Self::Held(grant) | Self::Recorded(grant) => Some(grant),
            Self::Unreadable { .. } => None,
        }
    }
}

/// A claim that holds devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// `namespace/name`, for messages.
    pub claim: Box<str>,
    /// Creation time of the claim.
    pub created: Option<Timestamp>,
    /// Whether the allocation was made for another claim and copied into this one.
    pub copied: bool,
    /// How the claim holds its devices.
    pub state: State,
}

impl Holder {
    /// The order of claims that hold one device: the lowest keeps it. An original allocation comes before a copy, a recorded one before an
    /// unrecorded one, then the older claim, then the lower uid. The time of the allocation itself is not recorded in a claim.
    fn rank<'a>(&self, uid: &'a str) -> (bool, bool, Option<Timestamp>, &'a str) {
        let is_held = matches!(self.state, State::Held(_));
        (self.copied, is_held, self.created, uid)
    }
}

/// One device of a node, which is identified by name and uid.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Name of the node.
    pub node_name: Box<str>,
    /// Uid of the node.
    pub node_uid: Box<str>,
    /// Name of the device.
    pub device: Box<str>,
}

/// Two claims that hold one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The device that both claims hold.
    pub place: Place,
    /// `namespace/name` of the claim that keeps the device.
    pub keeper: Box<str>,
    /// `namespace/name` of the claim that must not keep it.
    pub other: Box<str>,
    /// Uid of `other`.
    pub other_uid: Arc<str>,
}

/// The effects of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Devices that the claim no longer holds; other claims may still hold them.
    pub freed: Vec<Place>,
    /// Devices that the claim holds although another claim does, too.
    pub shared: Vec<Place>,
    /// Names of nodes that are no longer blocked by an unreadable allocation.
    pub unblocked: Vec<Box<str>>,
}

/// The holders of each device of one node; nearly always one.
pub type NodeAllocations = BTreeMap<Box<str>, Vec<Arc<str>>>;

/// The allocation index.
#[derive(Clone, Debug, Default)]
pub struct AllocationIndex {
    claims: BTreeMap<Arc<str>, Holder>,
    /// Holders by node uid.
    nodes: BTreeMap<Box<str>, NodeAllocations>,
    /// Claims with an unreadable allocation, by node name.
    unreadable: BTreeMap<Box<str>, BTreeSet<Arc<str>>>,
}

impl AllocationIndex {
    /// The claim with this uid, if it holds devices.
    pub fn get(&self, uid: &str) -> Option<&Holder> {
        self.claims.get(uid)
    }

    /// The uids of the claims that hold devices, sorted.
    pub fn uids(&self) -> impl Iterator<Item = &str> {
        self.claims.keys().map(|uid| &**uid)
    }

    /// The held devices of the node with this uid, with their holders.
    pub fn on_node(&self, node_uid: &str) -> Option<&NodeAllocations> {
        self.nodes.get(node_uid)
    }

    /// Whether an unreadable allocation may be on the node with this name. The node may be indexed by its label value.
    pub fn unreadable_on(&self, node_name: &str) -> bool {
        !self.unreadable.is_empty()
            && (self.unreadable.contains_key(node_name)
                || self.unreadable.contains_key(label_of_node(node_name).as_str()))
    }

    /// Whether a claim other than the one with this uid holds the device.
    pub fn held_by_another(&self, uid: &str, node_uid: &str, device: &str) -> bool {
        let holders = self.nodes.get(node_uid).and_then(|devices| devices.get(device));
        holders.is_some_and(|holders| holders.iter().any(|holder| **holder != *uid))
    }

    /// The claims that hold a device in excess of its shares, in the order of their rank.
    pub fn conflicts(&self, place: &Place, shares: usize) -> Vec<Conflict> {
        let holders = self.nodes.get(&place.node_uid);
        let holders = holders.and_then(|devices| devices.get(&place.device));
        let mut ranked: Vec<(&Arc<str>, &Holder)> = holders
            .into_iter()
            .flatten()
            .filter_map(|uid| self.claims.get_key_value(uid))
            .collect();
        ranked.sort_by_key(|(uid, holder)| holder.rank(uid));
        let Some((_, keeper)) = ranked.first() else {
            return Vec::new();
        };
        let conflict = |(uid, other): &(&Arc<str>, &Holder)| Conflict {
            place: place.clone(),
            keeper: keeper.claim.clone(),
            other: other.claim.clone(),
            other_uid: Arc::clone(uid),
        };
        ranked.iter().skip(shares.max(1)).map(conflict).collect()
    }

    /// Replaces the allocation of a claim.
    pub fn put(&mut self, uid: &str, holder: Holder) -> Change {
        let uid: Arc<str> = uid.into();
        let mut change = Change::default();
        if self
            .claims
            .get(&uid)
            .is_some_and(|before| before.state == holder.state && before.copied == holder.copied)
        {
            return change;
        }
        let new = places(&holder);
        if let State::Unreadable { nodes, .. } = &holder.state {
            for node in nodes {
                self.unreadable
                    .entry(node.clone())
                    .or_default()
                    .insert(Arc::clone(&uid));
            }
        }
        if let Some(before) = self.claims.insert(Arc::clone(&uid), holder) {
            let left = places(&before)
                .into_iter()
                .filter(|place| !new.contains(place))
                .collect();
            self.leave(&uid, left, &mut change);
            self.leave_unreadable(&uid, &before, &mut change);
        }
        for place in new {
            let devices = self.nodes.entry(place.node_uid.clone()).or_default();
            let holders = devices.entry(place.device.clone()).or_default();
            if !holders.contains(&uid) {
                holders.push(Arc::clone(&uid));
                if holders.len() > 1 {
                    change.shared.push(place);
                }
            }
        }
        change
    }

    /// Removes the allocation of a claim.
    pub fn remove(&mut self, uid: &str) -> Change {
        let mut change = Change::default();
        if let Some((uid, before)) = self.claims.remove_entry(uid) {
            self.leave_unreadable(&uid, &before, &mut change);
            self.leave(&uid, places(&before).into_iter().collect(), &mut change);
        }
        change
    }

    fn leave(&mut self, uid: &Arc<str>, places: Vec<Place>, change: &mut Change) {
        for place in places {
            let Some(devices) = self.nodes.get_mut(&place.node_uid) else {
                continue;
            };
            let Some(holders) = devices.get_mut(&place.device) else {
                continue;
            };
            holders.retain(|holder| holder != uid);
            if holders.is_empty() {
                devices.remove(&place.device);
                if devices.is_empty() {
                    self.nodes.remove(&place.node_uid);
                }
            }
            change.freed.push(place);
        }
    }

    /// Unblocks the nodes that only the claim's former, unreadable allocation blocked.
    fn leave_unreadable(&mut self, uid: &Arc<str>, before: &Holder, change: &mut Change) {
        let State::Unreadable { nodes, .. } = &before.state else {
            return;
        };
        let still = self.claims.get(uid).map(|holder| &holder.state);
        for node in nodes {
            if matches!(still, Some(State::Unreadable { nodes, .. }) if nodes.contains(node)) {
                continue;
            }
            let claims = self.unreadable.get_mut(node);
            if claims.is_some_and(|claims| claims.remove(uid) && claims.is_empty()) {
                self.unreadable.remove(node);
                change.unblocked.push(node.clone());
            }
        }
    }
}

/// The devices of a claim, without duplicates in its handle.
fn places(holder: &Holder) -> BTreeSet<Place> {
    let Some(grant) = holder.state.grant() else {
        return BTreeSet::new();
    };
    let place = |device: &HandleDevice| Place {
        node_name: grant.node_name.clone(),
        node_uid: grant.node_uid.clone(),
        device: device.device.as_str().into(),
    };
    grant.devices.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(node_uid: &str, devices: &[&str]) -> Grant {
        let device = |name: &&str| HandleDevice {
            request: "r".into(),
            device: (*name).into(),
        };
        Grant {
            node_name: "a".into(),
            node_uid: node_uid.into(),
            devices: devices.iter().map(device).collect(),
        }
    }

    fn holder(claim: &str, created: i64, state: State) -> Holder {
        Holder {
            claim: claim.into(),
            created: Some(Timestamp::from_second(created).unwrap()),
            copied: false,
            state,
        }
    }

    fn unreadable(node: &str) -> State {
        State::Unreadable {
            nodes: BTreeSet::from([node.into()]),
            error: "x".into(),
        }
    }

    fn freed(places: &[Place]) -> Vec<&str> {
        places.iter().map(|place| &*place.device).collect()
    }

    #[test]
    fn what_was_held_and_then_seen_in_the_claim_is_held_once() {
        let mut holdings = AllocationIndex::default();
        assert_eq!(
            holdings.put("u", holder("n/c", 1, State::Held(grant("1", &["d"])))),
            Change::default()
        );
        assert_eq!(
            holdings.put("u", holder("n/c", 1, State::Recorded(grant("1", &["d"])))),
            Change::default()
        );
        assert!(holdings.held_by_another("v", "1", "d") && !holdings.held_by_another("u", "1", "d"));
        assert_eq!(freed(&holdings.remove("u").freed), ["d"]);
        assert!(holdings.remove("u") == Change::default() && holdings.on_node("1").is_none());
    }

    #[test]
    fn a_claim_that_comes_to_hold_something_else_frees_what_it_held() {
        let mut holdings = AllocationIndex::default();
        holdings.put("u", holder("n/c", 1, State::Recorded(grant("1", &["d", "e"]))));
        let change = holdings.put("u", holder("n/c", 1, State::Recorded(grant("1", &["e", "f"]))));
        assert_eq!(freed(&change.freed), ["d"]);
    }

    #[test]
    fn the_older_claim_keeps_a_device_and_releases_are_reported() {
        let mut holdings = AllocationIndex::default();
        holdings.put("u", holder("n/younger", 2, State::Recorded(grant("1", &["d"]))));
        let change = holdings.put("v", holder("n/older", 1, State::Recorded(grant("1", &["d"]))));
        let [place] = change.shared.as_slice() else {
            panic!("{change:?}")
        };
        let conflicts = holdings.conflicts(place, 1);
        let [conflict] = conflicts.as_slice() else {
            panic!("{conflicts:?}")
        };
        assert_eq!(
            (&*conflict.keeper, &*conflict.other, &*conflict.other_uid),
            ("n/older", "n/younger", "u")
        );
        assert_eq!(holdings.conflicts(place, 2), [], "two may share it");
        let again = holdings.put("v", holder("n/older", 1, State::Recorded(grant("1", &["d"]))));
        assert_eq!(again, Change::default(), "said once");
        assert_eq!(freed(&holdings.remove("u").freed), ["d"]);
        assert_eq!(freed(&holdings.remove("v").freed), ["d"]);
    }

    #[test]
    fn recorded_allocations_win_over_held_and_then_the_lower_uid() {
        let mut holdings = AllocationIndex::default();
        holdings.put("u", holder("n/held", 1, State::Held(grant("1", &["d"]))));
        let change = holdings.put("v", holder("n/recorded", 2, State::Recorded(grant("1", &["d"]))));
        let others = |holdings: &AllocationIndex| {
            let conflicts = holdings.conflicts(&change.shared[0], 1);
            let names = conflicts
                .iter()
                .map(|conflict| (conflict.keeper.to_string(), conflict.other.to_string()));
            names.collect::<Vec<_>>()
        };
        let pair = |keeper: &str, other: &str| (keeper.to_owned(), other.to_owned());
        assert_eq!(others(&holdings), [pair("n/recorded", "n/held")]);
        holdings.put("a", holder("n/same-age", 2, State::Recorded(grant("1", &["d"]))));
        assert_eq!(
            others(&holdings),
            [pair("n/same-age", "n/recorded"), pair("n/same-age", "n/held")]
        );
    }

    #[test]
    fn a_copy_of_an_allocation_comes_last_however_old_its_claim_is() {
        for state in [State::Recorded, State::Held] {
            let mut holdings = AllocationIndex::default();
            let mut copy = holder("n/copy", 1, State::Recorded(grant("1", &["d"])));
            copy.copied = true;
            holdings.put("a", copy);
            let change = holdings.put("b", holder("n/original", 2, state(grant("1", &["d"]))));
            let conflicts = holdings.conflicts(&change.shared[0], 1);
            let [conflict] = conflicts.as_slice() else {
                panic!("{conflicts:?}")
            };
            assert_eq!((&*conflict.keeper, &*conflict.other), ("n/original", "n/copy"));
        }
    }

    #[test]
    fn a_node_of_another_uid_has_devices_of_its_own() {
        let mut holdings = AllocationIndex::default();
        holdings.put("u", holder("n/c", 1, State::Recorded(grant("old", &["d"]))));
        assert!(holdings.on_node("new").is_none());
        assert!(
            holdings
                .put("v", holder("n/e", 1, State::Held(grant("new", &["d"]))))
                .shared
                .is_empty()
        );
    }

    #[test]
    fn an_unreadable_allocation_blocks_its_node_until_it_is_gone() {
        let mut holdings = AllocationIndex::default();
        holdings.put("u", holder("n/c", 1, unreadable("a")));
        holdings.put("v", holder("n/d", 1, unreadable("a")));
        let other_error = State::Unreadable {
            nodes: BTreeSet::from(["a".into()]),
            error: "y".into(),
        };
        assert_eq!(
            holdings.put("v", holder("n/d", 1, other_error)),
            Change::default()
        );
        assert!(holdings.unreadable_on("a") && !holdings.unreadable_on("b"));
        let change = holdings.put("u", holder("n/c", 1, State::Recorded(grant("1", &["d"]))));
        assert!(holdings.unreadable_on("a") && change.unblocked.is_empty());
        assert_eq!(holdings.remove("v").unblocked, ["a".into()]);
        assert!(!holdings.unreadable_on("a"));
    }

    #[test]
    fn a_node_may_be_known_by_the_value_of_its_label_alone() {
        let mut holdings = AllocationIndex::default();
        let long = "node-".repeat(40);
        holdings.put("u", holder("n/c", 1, unreadable(&label_of_node(&long))));
        assert!(holdings.unreadable_on(&long) && !holdings.unreadable_on(&"node-".repeat(39)));
    }

    #[test]
    fn a_handle_that_names_a_device_twice_holds_it_once() {
        let mut holdings = AllocationIndex::default();
        assert!(
            holdings
                .put("u", holder("n/c", 1, State::Recorded(grant("1", &["d", "d"]))))
                .shared
                .is_empty()
        );
        assert_eq!(freed(&holdings.remove("u").freed), ["d"]);
    }
}
