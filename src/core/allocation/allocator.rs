//! The device allocator: owns the inventory and the allocation index, and allocates claims ([`DeviceAllocator::allocate_within`]).
//!
//! Its owner keeps it behind one lock, so that it checks and holds devices in one step.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::api::handle::HandleError;
use crate::api::resource::{AllocationResult, ResourceClaim, label_of_node};
use crate::core::allocation::evaluate::{NodeFit, NodeSnapshot, RequestedClaim, Shortage, Unsuitable};
use crate::core::allocation::index::{
    self, AllocationIndex, AllocationState, DeviceGrant, DeviceKey, HoldingClaim, IndexChange, claim_name,
    suits,
};
use crate::core::allocation::inventory::{
    ActiveSelectors, AttributeSet, DeviceInfo, Inventory, Match, NodeInfo, Replaced, SelectorResults,
};
use crate::core::allocation::parameters::{CheckedRequest, CheckedSelector, DeviceRequests};
use crate::core::allocation::search::{NODE_WORK_MAX, WorkBudget};
use crate::driver::{Finding, UnsuitableNodes};

/// The device allocator of one driver.
#[derive(Clone, Debug)]
pub struct DeviceAllocator {
    pub(super) driver: String,
    pub(super) inventory: Inventory,
    pub(super) holdings: AllocationIndex,
    pub(super) matches: SelectorResults,
    active_selectors: ActiveSelectors,
    /// Devices with several holders that no inventory lists.
    unchecked: BTreeSet<DeviceKey>,
}

/// The effects of an observation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Number of devices that have become available.
    pub freed: usize,
    /// New problems with the allocations of claims.
    pub findings: Vec<Finding>,
}

impl DeviceAllocator {
    /// An empty device allocator of the driver with this name.
    pub fn new(driver: impl Into<String>) -> Self {
        Self {
            driver: driver.into(),
            inventory: Inventory::default(),
            holdings: AllocationIndex::default(),
            matches: SelectorResults::default(),
            active_selectors: ActiveSelectors::default(),
            unchecked: BTreeSet::new(),
        }
    }

    pub fn holdings(&self) -> &AllocationIndex {
        &self.holdings
    }

    pub fn matches(&self) -> &SelectorResults {
        &self.matches
    }

    /// The active selectors, with their pending evaluations.
    pub fn active_selectors(&self) -> &ActiveSelectors {
        &self.active_selectors
    }

    /// Activates an expression for the devices of a kind. The first time scans all of them.
    pub fn activate(&mut self, kind: &str, expression: &Arc<str>) {
        if self.active_selectors.contains(kind, expression) {
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
            if !self.matches.is_evaluated(expression, number) {
                numbers.push(number);
            }
        }
        self.active_selectors.begin(kind, expression, numbers.into_iter());
    }

    /// The attribute sets of a kind that an expression has yet to evaluate.
    pub fn pending(&self, kind: &str, expression: &str) -> impl Iterator<Item = &AttributeSet> {
        let numbers = self.active_selectors.pending(kind, expression);
        numbers.filter_map(|number| self.matches.attribute_set(number))
    }

    /// Stores results of an expression.
    pub fn evaluated(&mut self, expression: &Arc<str>, results: Vec<(AttributeSet, Match)>) {
        let numbers: Vec<usize> = results
            .iter()
            .map(|(attributes, _)| self.matches.number(attributes))
            .collect();
        self.active_selectors.evaluated(expression, &numbers);
        self.matches.put(expression, results);
    }

    /// Removes an expression, at a cost that does not depend on the devices.
    pub fn forget_selector(&mut self, expression: &str) {
        self.active_selectors.forget(expression);
        self.matches.forget(expression);
    }

    /// Removes the results for attribute sets that no device has any more.
    pub fn forget_devices(&mut self) {
        let devices = self.inventory.nodes().flat_map(NodeInfo::devices);
        let attributes = devices.map(|device| &device.attributes).collect();
        let gone = self.matches.retain(&attributes);
        self.active_selectors.forget_devices(&gone);
    }

    /// Replaces the content of a NodeInventory object; `None` if it was deleted. Returns the number of devices whose change may help
    /// waiting pods.
    pub fn set_inventory(&mut self, object: &str, node: Option<NodeInfo>) -> usize {
        let replaced = self.inventory.set(object, node);
        for replaced in &replaced {
            if let Some(node) = self.inventory.node(&replaced.name) {
                self.active_selectors.see(node, &mut self.matches);
            }
        }
        replaced
            .iter()
            .map(|replaced| self.newly_available(replaced))
            .sum()
    }

    /// Replaces all NodeInventory objects, by name. Returns the sum of the results of [`DeviceAllocator::set_inventory`].
    pub fn replace_inventories(&mut self, nodes: BTreeMap<String, NodeInfo>) -> usize {
        let gone = self
            .inventory
            .objects()
            .filter(|object| !nodes.contains_key(*object))
            .map(str::to_owned);
        let gone: Vec<(String, Option<NodeInfo>)> = gone.map(|object| (object, None)).collect();
        let all = gone
            .into_iter()
            .chain(nodes.into_iter().map(|(object, node)| (object, Some(node))));
        all.map(|(object, node)| self.set_inventory(&object, node)).sum()
    }

    /// Checks devices with several holders again, and returns the conflicts: devices with more holders than shares. A device that no
    /// inventory lists is checked once one does: its shares are unknown, and until then it is not allocated again.
    pub fn recheck_conflicts(&mut self) -> Vec<Finding> {
        let unchecked = std::mem::take(&mut self.unchecked);
        self.check_conflicts(unchecked)
    }

    fn check_conflicts(&mut self, unchecked: impl IntoIterator<Item = DeviceKey>) -> Vec<Finding> {
        let mut findings = Vec::new();
        for key in unchecked {
            let node = self
                .inventory
                .node(&key.node_name)
                .filter(|node| *node.uid() == *key.node_uid);
            let device = node.and_then(|node| node.device(&key.device));
            let Some(shares) = device.map(|device| device.shares) else {
                if self.holders(&key.node_uid, &key.device) > 1 {
                    self.unchecked.insert(key);
                }
                continue;
            };
            findings.extend(self.holdings.conflicts(&key, shares));
        }
        findings
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
            observed.findings.extend(one.findings);
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
                Some(AllocationState::Recorded(_) | AllocationState::Unreadable { .. }) => self.gone(uid),
                Some(AllocationState::Held(_)) | None => 0,
            };
            return Observed {
                freed,
                findings: Vec::new(),
            };
        };
        let mut record = index::read(&self.driver, uid, allocation);
        if let AllocationState::Unreadable { nodes, .. } = &mut record.state
            && nodes.is_empty()
        {
            nodes.extend(index::labelled_node(&self.driver, claim));
        }
        let mut findings = Vec::new();
        if before != Some(&record.state) {
            if let AllocationState::Unreadable { nodes, error } = &record.state {
                findings.push(unreadable(claim, nodes, error));
            }
            let made_for = record.made_for.as_deref();
            findings.extend(made_for.map(|made_for| made_for_another(claim, made_for)));
        }
        let change = self.put(claim, record.state, record.made_for.is_some());
        let freed = self.available_again(&change);
        findings.extend(self.check_conflicts(change.shared));
        Observed { freed, findings }
    }

    /// Removes a claim that no longer exists. Returns how many devices have become available.
    pub fn gone(&mut self, uid: &str) -> usize {
        let change = self.holdings.remove(uid);
        self.available_again(&change)
    }

    /// Releases the devices that were granted to a claim and never recorded in it. Recorded devices stay held until
    /// [`DeviceAllocator::observe`] shows that they are released. Returns how many devices have become available.
    pub fn deallocate(&mut self, claim: &ResourceClaim) -> usize {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let recorded = claim.status.allocation_of(&self.driver).is_some();
        match self.holdings.get(uid).map(|holder| &holder.state) {
            Some(AllocationState::Held(_)) if !recorded => self.gone(uid),
            _ => 0,
        }
    }

    /// Stores the devices of a claim; `copied` if its allocation was made for another claim.
    pub(super) fn put(&mut self, claim: &ResourceClaim, state: AllocationState, copied: bool) -> IndexChange {
        let metadata = &claim.metadata;
        let created = metadata.creation_timestamp.as_ref().map(|time| time.0);
        let holder = HoldingClaim {
            claim: claim_name(claim).into(),
            created,
            copied,
            state,
        };
        self.holdings
            .put(metadata.uid.as_deref().unwrap_or_default(), holder)
    }

    /// How many devices have become available for claims by a change.
    pub(super) fn available_again(&self, change: &IndexChange) -> usize {
        let mut available: BTreeSet<(&str, &str)> = BTreeSet::new();
        for key in &change.freed {
            let node = self
                .open_node(&key.node_name)
                .filter(|node| *node.uid() == *key.node_uid);
            let device = node.and_then(|node| node.device(&key.device));
            available.extend(
                device
                    .filter(|device| device.claimable() && self.has_room(&key.node_uid, device))
                    .map(|_| (&*key.node_name, &*key.device)),
            );
        }
        for name in &change.unblocked {
            let is_it = |node: &&NodeInfo| *node.name() == **name || *label_of_node(node.name()) == **name;
            let named = self.inventory.nodes().filter(is_it);
            for node in named.filter_map(|node| self.open_node(node.name())) {
                let devices = self.available(node);
                available.extend(devices.map(|device| (node.name(), &*device.name)));
            }
        }
        available.len()
    }

    /// How many devices of a node have become available, or are gone or different. The latter count because a request for all matching
    /// devices may have waited for one that was held, unhealthy or not evaluated, or that a constraint excludes.
    fn newly_available(&self, replaced: &Replaced) -> usize {
        let Some(node) = self.open_node(&replaced.name) else {
            return 0;
        };
        let before = replaced.before.as_ref();
        let before = before.filter(|before| before.unready().is_none() && before.uid() == node.uid());
        let same =
            |device: &&DeviceInfo| before.and_then(|before| before.device(&device.name)) == Some(*device);
        let available = self.available(node).filter(|device| !same(device));
        let is_gone = |device: &&DeviceInfo| {
            let now = node.device(&device.name).filter(|now| now.serves_claims);
            now.is_none_or(|now| now.kind != device.kind || now.attributes != device.attributes)
        };
        let previous = before.into_iter().flat_map(|before| before.devices());
        let gone = previous.filter(|device| device.serves_claims && is_gone(device));
        let names: BTreeSet<&str> = available.chain(gone).map(|device| &*device.name).collect();
        names.len()
    }

    /// The node, if devices can be allocated on it.
    fn open_node(&self, name: &str) -> Option<&NodeInfo> {
        let node = self.inventory.node(name)?;
        (node.unready().is_none() && !self.holdings.unreadable_on(name)).then_some(node)
    }

    /// The devices of a node that are healthy and have a share left.
    pub fn available<'a>(&'a self, node: &'a NodeInfo) -> impl Iterator<Item = &'a DeviceInfo> {
        let devices = node.devices().iter().filter(|device| device.claimable());
        devices.filter(|device| self.has_room(node.uid(), device))
    }

    /// Whether another claim could hold the device.
    fn has_room(&self, node_uid: &str, device: &DeviceInfo) -> bool {
        self.holders(node_uid, &device.name) < device.shares
    }

    fn holders(&self, node_uid: &str, device: &str) -> usize {
        let held = self.holdings.on_node(node_uid).and_then(|held| held.get(device));
        held.map_or(0, Vec::len)
    }

    /// Copies the data of a node for these claims.
    pub fn snapshot(&self, requested: &[RequestedClaim<'_>], name: &str) -> NodeSnapshot {
        NodeSnapshot::new(&self.inventory, &self.holdings, requested, name)
    }

    /// Copies the selector results for these claims.
    pub fn matches_of(&self, requested: &[RequestedClaim<'_>]) -> SelectorResults {
        self.matches.some(expressions(requested))
    }

    /// Adds the nodes on which each claim cannot be allocated together with the claims before it, with the reason. Returns the
    /// remaining nodes, starting with the one that exceeds the work limit.
    pub fn unsuitable<'a>(
        &self,
        requested: &[RequestedClaim<'_>],
        nodes: &'a [String],
        unsuitable: &mut [UnsuitableNodes],
        work: &mut WorkBudget,
    ) -> &'a [String] {
        let matches = self.matches_of(requested);
        let mut left = nodes;
        while let Some((name, after)) = left.split_first() {
            let fit = node_fit(&self.snapshot(requested, name), &matches, requested, work);
            if work.is_spent() {
                break;
            }
            add_unsuitable(unsuitable, name, &fit);
            left = after;
        }
        left
    }

    /// Allocates claims together and holds their devices: on `node`, or on any node that the class allows, starting with the one with the
    /// most free devices of the requested kinds, then with the lowest name. A claim that already holds devices on that node gets the same
    /// ones, as long as they are available; its unrecorded devices on other nodes are released. `None` if it exceeds the given work.
    pub fn allocate_within(
        &mut self,
        requested: &[RequestedClaim<'_>],
        node: Option<&str>,
        work: &mut WorkBudget,
    ) -> Option<AllocateOutcome> {
        match self.decide(requested, node, work) {
            Ok(grants) => Some(self.hold(requested, grants)),
            Err(_) if work.is_spent() => None,
            Err(error) => Some(self.refuse(requested, error)),
        }
    }

    /// Holds the devices found in a snapshot; `None` if they are no longer available.
    pub fn hold_in(
        &mut self,
        requested: &[RequestedClaim<'_>],
        snapshot: &NodeSnapshot,
        fit: NodeFit,
    ) -> Option<AllocateOutcome> {
        if !snapshot.still_grants(&self.snapshot(requested, snapshot.name()), &fit) {
            return None;
        }
        let grants = fit.into_iter().flatten().collect();
        Some(self.hold(requested, grants))
    }

    fn decide(
        &self,
        requested: &[RequestedClaim<'_>],
        node: Option<&str>,
        work: &mut WorkBudget,
    ) -> Result<Vec<DeviceGrant>, NotAllocated> {
        let route = self.route(requested, node)?;
        let matches = self.matches_of(requested);
        let snapshot = |name| self.snapshot(requested, name);
        let found = first_fit(route.nodes().map(snapshot), &matches, requested, work);
        if let Some((snapshot, fit)) = found
            && let Some(decided) = granted(&route, snapshot.name(), fit)
        {
            return decided;
        }
        let mut shortage = route.shortage(requested);
        let candidates = route.candidates().map(snapshot);
        count_devices(candidates, &matches, requested, &mut shortage, work);
        Err(route.exhausted(shortage, work))
    }

    fn hold(&mut self, requested: &[RequestedClaim<'_>], grants: Vec<DeviceGrant>) -> AllocateOutcome {
        let write = |(claim, (request, grant)): (usize, (&RequestedClaim<'_>, &DeviceGrant))| {
            let written = index::write(&self.driver, request.uid(), grant);
            written.map_err(|error| (claim, AllocateError::from(error)))
        };
        let all = requested.iter().zip(&grants).enumerate();
        let allocations = match all.map(write).collect::<Result<Vec<_>, NotAllocated>>() {
            Ok(allocations) => allocations,
            Err(error) => return self.refuse(requested, error),
        };
        let mut freed = 0;
        for (request, grant) in requested.iter().zip(grants) {
            let state = self.holdings.get(request.uid()).map(|holder| &holder.state);
            if !matches!(state, Some(AllocationState::Recorded(_))) {
                let change = self.put(request.claim, AllocationState::Held(grant), false);
                freed += self.available_again(&change);
            }
        }
        AllocateOutcome {
            answer: Ok(allocations),
            freed,
        }
    }

    /// Allocates nothing, and releases unrecorded devices.
    pub fn refuse(&mut self, requested: &[RequestedClaim<'_>], error: NotAllocated) -> AllocateOutcome {
        let freed = requested
            .iter()
            .map(|request| self.deallocate(request.claim))
            .sum();
        AllocateOutcome {
            answer: Err(error),
            freed,
        }
    }

    /// The nodes to try for these claims.
    pub fn route(&self, requested: &[RequestedClaim<'_>], node: Option<&str>) -> Result<Route, NotAllocated> {
        if let Some(node) = node {
            return Ok(Route::fixed(node));
        }
        // An existing allocation decides: first a recorded one, then an unrecorded grant.
        let holders = requested
            .iter()
            .filter_map(|request| self.holdings.get(request.uid()));
        let states: Vec<&AllocationState> = holders.map(|holder| &holder.state).collect();
        let recorded = states
            .iter()
            .find(|state| matches!(state, AllocationState::Recorded(_)));
        if states
            .iter()
            .any(|state| matches!(state, AllocationState::Unreadable { .. }))
        {
            return Err((0, AllocateError::HoldingUnreadable));
        }
        let held = states
            .iter()
            .find(|state| matches!(state, AllocationState::Held(_)));
        if let Some(grant) = recorded.and_then(|state| state.grant()) {
            return Ok(Route::fixed(&grant.node_name));
        }
        let held = held.and_then(|state| state.grant());

        let kinds: BTreeSet<&str> = requested
            .iter()
            .map(|request| request.device_requests.kind())
            .collect();
        let mut candidates = BTreeSet::new();
        // A node without the first claim's kind cannot serve all claims.
        let first = requested
            .iter()
            .take(1)
            .map(|request| request.device_requests.kind());
        for name in first.flat_map(|kind| self.inventory.nodes_with(kind)) {
            let mut allowed = true;
            for request in requested {
                let Some(suits) = request
                    .suitable_nodes
                    .map_or(Some(true), |selector| suits(selector, name))
                else {
                    let class = request.claim.spec.resource_class_name.clone();
                    return Err((0, AllocateError::SuitableNodesByLabel { class }));
                };
                allowed &= suits;
            }
            if !allowed {
                continue;
            }
            let Some(node) = self.inventory.node(name).filter(|node| node.unready().is_none()) else {
                continue;
            };
            let free = self
                .available(node)
                .filter(|device| kinds.contains(&*device.kind))
                .count();
            candidates.insert((Reverse(free), name));
        }
        let fitting = candidates.iter().filter(|(Reverse(free), _)| *free > 0);
        let first = held.map(|grant| grant.node_name.clone());
        Ok(Route {
            nodes: first
                .into_iter()
                .chain(fitting.map(|(_, name)| Box::from(*name)))
                .collect(),
            candidates: Some(candidates.iter().map(|(_, name)| Box::from(*name)).collect()),
        })
    }
}

/// The index of the claim at fault, or 0 if no single claim is, and its error.
pub type NotAllocated = (usize, AllocateError);

/// The result of [`DeviceAllocator::allocate_within`].
#[derive(Clone, Debug, PartialEq)]
pub struct AllocateOutcome {
    /// One allocation per claim; after an error, no claim without a recorded allocation has one.
    pub answer: Result<Vec<AllocationResult>, NotAllocated>,
    /// Number of devices that have become available because a claim was moved or lost its devices.
    pub freed: usize,
}

/// The expressions of these claims. A text that selectors share in memory, as those of claims with one parameters object do, occurs once:
/// each lookup compares whole texts.
fn expressions<'a>(requested: &[RequestedClaim<'a>]) -> impl Iterator<Item = &'a Arc<str>> {
    let requests = requested
        .iter()
        .flat_map(|request| request.device_requests.requests());
    let selectors = requests.flat_map(CheckedRequest::selectors);
    let mut seen = BTreeSet::new();
    selectors
        .map(CheckedSelector::expression)
        .filter(move |&expression| seen.insert(Arc::as_ptr(expression).addr()))
}

/// Evaluates claims in a snapshot with at most one node's share of the work.
pub fn node_fit(
    snapshot: &NodeSnapshot,
    matches: &SelectorResults,
    requested: &[RequestedClaim<'_>],
    work: &mut WorkBudget,
) -> NodeFit {
    work.part(NODE_WORK_MAX, |part| snapshot.evaluate(matches, requested, part))
}

/// Adds the reasons found for a node.
pub fn add_unsuitable(unsuitable: &mut [UnsuitableNodes], node: &str, fit: &NodeFit) {
    for (reasons, fit) in unsuitable.iter_mut().zip(fit) {
        if let Err(reason) = fit {
            reasons.insert(node.to_owned(), reason.to_string());
        }
    }
}

/// Returns the first snapshot in which all claims fit, or else the last one evaluated within the work limit.
pub fn first_fit(
    snapshots: impl IntoIterator<Item = NodeSnapshot>,
    matches: &SelectorResults,
    requested: &[RequestedClaim<'_>],
    work: &mut WorkBudget,
) -> Option<(NodeSnapshot, NodeFit)> {
    let mut last = None;
    for snapshot in snapshots {
        let fit = node_fit(&snapshot, matches, requested, work);
        let is_fit = fit.iter().all(Result::is_ok);
        last = Some((snapshot, fit));
        if is_fit || work.is_spent() {
            break;
        }
    }
    last
}

/// Adds the devices of these nodes for the first claim, up to the work limit.
pub fn count_devices(
    snapshots: impl IntoIterator<Item = NodeSnapshot>,
    matches: &SelectorResults,
    requested: &[RequestedClaim<'_>],
    shortage: &mut Shortage,
    work: &mut WorkBudget,
) {
    let Some(first) = requested.first() else { return };
    for snapshot in snapshots {
        let Ok(counts) = snapshot.device_counts(matches, first.device_requests, work) else {
            return;
        };
        shortage.add(&counts);
    }
}

/// The final result after evaluating a node; `None` if another node may be tried.
pub fn granted(route: &Route, node: &str, fit: NodeFit) -> Option<Result<Vec<DeviceGrant>, NotAllocated>> {
    let grant = |(claim, fit): (usize, Result<DeviceGrant, Unsuitable>)| {
        let node = node.to_owned();
        fit.map_err(|why| (claim, AllocateError::Unsuitable { node, why }))
    };
    let grants: Result<Vec<_>, _> = fit.into_iter().enumerate().map(grant).collect();
    (grants.is_ok() || route.is_fixed()).then_some(grants)
}

/// The nodes to try for claims, in order.
#[derive(Clone, Debug)]
pub struct Route {
    nodes: Vec<Box<str>>,
    /// The nodes whose devices are counted if no node fits; `None` if the node is fixed.
    candidates: Option<Vec<Box<str>>>,
}

impl Route {
    fn fixed(node: &str) -> Self {
        Self {
            nodes: vec![node.into()],
            candidates: None,
        }
    }

    /// The names of the nodes to try, in order.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().map(|name| &**name)
    }

    /// Whether only one node is possible, so that its errors are the result.
    pub fn is_fixed(&self) -> bool {
        self.candidates.is_none()
    }

    /// The nodes whose devices are counted if no node fits.
    pub fn candidates(&self) -> impl Iterator<Item = &str> {
        self.candidates.iter().flatten().map(|name| &**name)
    }

    /// The shortage before any node is counted.
    pub fn shortage(&self, requested: &[RequestedClaim<'_>]) -> Shortage {
        let mut requests = requested.iter().map(|request| request.device_requests);
        let Some(first) = requests.next() else {
            return Shortage::default();
        };
        Shortage {
            kind: first.kind().to_owned(),
            requested_count: first.total(),
            requested_besides: requests.map(DeviceRequests::total).sum(),
            ..Shortage::default()
        }
    }

    /// The error if no node fits.
    pub fn exhausted(&self, shortage: Shortage, work: &WorkBudget) -> NotAllocated {
        let nodes = self.candidates.as_ref().map_or(0, Vec::len);
        let error = if work.is_spent() {
            AllocateError::Unsuitable {
                node: self.nodes().next().unwrap_or_default().to_owned(),
                why: Unsuitable::TooMuchWork,
            }
        } else if nodes == 0 {
            AllocateError::Nowhere { kind: shortage.kind }
        } else {
            AllocateError::Exhausted {
                nodes,
                shortage: Box::new(shortage),
            }
        };
        (0, error)
    }
}

/// A claim has an unreadable allocation, on these nodes as far as they are known.
fn unreadable(claim: &ResourceClaim, nodes: &BTreeSet<Box<str>>, error: &str) -> Finding {
    let nodes = nodes.iter().map(|node| &**node).collect::<Vec<_>>().join(", ");
    let message = format!(
        "ResourceClaim {} has an allocation that cannot be read: {error}. Nothing is allocated on {} until \
         it is removed: upgrade the controller or delete the claim",
        claim_name(claim),
        if nodes.is_empty() {
            "its nodes (it names none)"
        } else {
            &nodes
        }
    );
    Finding::new(claim, "HoldingUnreadable", message)
}

/// A claim has an allocation that was made for another claim. Its devices count as held.
fn made_for_another(claim: &ResourceClaim, made_for: &str) -> Finding {
    let message = format!(
        "ResourceClaim {} has an allocation that was made for the claim with uid {made_for}: delete it",
        claim_name(claim)
    );
    Finding::new(claim, "AllocationMadeForAnother", message)
}

/// Why a claim was not allocated. It then holds only recorded devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The claim does not fit on the node.
    #[error("{} on node {node}: {why}", match why { Unsuitable::Short(_) => "resources exhausted", _ => "cannot allocate" })]
    Unsuitable { node: String, why: Unsuitable },
    /// No candidate node has enough devices.
    #[error("resources exhausted on every ready node with devices of kind {} ({nodes}): {shortage}", shortage.kind)]
    Exhausted {
        /// Number of candidate nodes.
        nodes: usize,
        /// The devices of all candidate nodes.
        shortage: Box<Shortage>,
    },
    /// No ready node has devices of this kind.
    #[error("no ready node has a device of kind {kind}")]
    Nowhere { kind: String },
    /// The class selects nodes by label, which this driver does not evaluate.
    #[error(
        "class {class} has suitableNodes by label: this requires allocationMode WaitForFirstConsumer; recreate the claim with it"
    )]
    SuitableNodesByLabel { class: String },
    /// The claim, or another one of its pod, has an unreadable allocation.
    #[error(
        "the claim has an allocation that this release cannot read: upgrade the controller or delete the claim"
    )]
    HoldingUnreadable,
    /// The devices that were found are no longer available.
    #[error("the devices of node {node} changed during the search; the allocation is retried")]
    Changed { node: String },
    /// The resource handle cannot be written.
    #[error(transparent)]
    Handle(#[from] HandleError),
}

impl AllocateError {
    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unsuitable { why, .. } => why.reason(),
            Self::Exhausted { .. } | Self::Nowhere { .. } | Self::Changed { .. } => "ResourcesExhausted",
            Self::SuitableNodesByLabel { .. } => "SuitableNodesUnsupported",
            Self::HoldingUnreadable => "HoldingUnreadable",
            Self::Handle(_) => "HandleInvalid",
        }
    }

    /// Whether only a change of the claim or its class can help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::SuitableNodesByLabel { .. } | Self::Handle(_))
    }
}

#[cfg(test)]
mod tests;
