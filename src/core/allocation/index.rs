//! The allocation index: the devices that each claim holds, derived from the claims. The claim is the only durable record; the index adds
//! grants that are not yet recorded.
//!
//! Devices are indexed by the *uid* of their node: allocations on a deleted or recreated node do not block the devices of the node that now
//! has the name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement};

use crate::api::handle::{DeviceHandle, HandleDevice, HandleError, VERSION};
use crate::api::resource::{
    AllocationResult, LABEL_OF_ANY_NODE, NODE_LABEL, NODE_NAME_FIELD, ResourceClaim, ResourceHandle,
    label_of_node,
};
use crate::driver::Finding;

/// The devices of one node that one claim holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceGrant {
    pub node_name: Box<str>,
    /// Uid of the Node object at the time of the allocation.
    pub node_uid: Box<str>,
    /// The devices, sorted by request, then by name.
    pub devices: Vec<HandleDevice>,
}

/// How a claim holds its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllocationState {
    /// Granted by this driver and not yet observed in the claim. Ends when it is observed or released.
    Held(DeviceGrant),
    /// Observed in the claim. Ends only when the claim is observed without it.
    Recorded(DeviceGrant),
    /// The claim has an unreadable allocation of this driver, for example one of a newer release. Its devices are on one of these nodes, so
    /// no device on them is granted to other claims meanwhile.
    Unreadable {
        /// Names or label values of the nodes, as far as they are known.
        nodes: BTreeSet<Box<str>>,
        error: Box<str>,
    },
}

impl AllocationState {
    /// The devices, if they are known.
    pub fn grant(&self) -> Option<&DeviceGrant> {
        match self {
            Self::Held(grant) | Self::Recorded(grant) => Some(grant),
            Self::Unreadable { .. } => None,
        }
    }
}

/// A claim that holds devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldingClaim {
    /// `namespace/name`, for messages.
    pub claim: Box<str>,
    pub created: Option<Timestamp>,
    /// Whether the allocation was made for another claim and copied into this one.
    pub copied: bool,
    pub state: AllocationState,
}

impl HoldingClaim {
    /// The order of claims that hold one device: the lowest keeps it. An original allocation comes before a copy, a recorded one before an
    /// unrecorded one, then the older claim, then the lower uid. The time of the allocation itself is not recorded in a claim.
    fn rank<'a>(&self, uid: &'a str) -> (bool, bool, Option<Timestamp>, &'a str) {
        let is_held = matches!(self.state, AllocationState::Held(_));
        (self.copied, is_held, self.created, uid)
    }
}

/// One device of a node, which is identified by name and uid.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceKey {
    pub node_name: Box<str>,
    pub node_uid: Box<str>,
    pub device: Box<str>,
}

/// The effects of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexChange {
    /// Devices that the claim no longer holds; other claims may still hold them.
    pub freed: Vec<DeviceKey>,
    /// Devices that the claim holds although another claim does, too.
    pub shared: Vec<DeviceKey>,
    /// Names of nodes that are no longer blocked by an unreadable allocation.
    pub unblocked: Vec<Box<str>>,
}

/// The holders of each device of one node; nearly always one.
pub type NodeAllocations = BTreeMap<Box<str>, Vec<Arc<str>>>;

/// The allocation index.
#[derive(Clone, Debug, Default)]
pub struct AllocationIndex {
    claims: BTreeMap<Arc<str>, HoldingClaim>,
    /// Holders by node uid.
    nodes: BTreeMap<Box<str>, NodeAllocations>,
    /// Claims with an unreadable allocation, by node name.
    unreadable: BTreeMap<Box<str>, BTreeSet<Arc<str>>>,
}

impl AllocationIndex {
    /// The claim with this uid, if it holds devices.
    pub fn get(&self, uid: &str) -> Option<&HoldingClaim> {
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

    /// A finding for each claim that holds a device in excess of its shares, in the order of their rank.
    pub fn conflicts(&self, key: &DeviceKey, shares: usize) -> Vec<Finding> {
        let holders = self.nodes.get(&key.node_uid);
        let holders = holders.and_then(|devices| devices.get(&key.device));
        let mut ranked: Vec<(&Arc<str>, &HoldingClaim)> = holders
            .into_iter()
            .flatten()
            .filter_map(|uid| self.claims.get_key_value(uid))
            .collect();
        ranked.sort_by_key(|(uid, holder)| holder.rank(uid));
        let Some((_, keeper)) = ranked.first() else {
            return Vec::new();
        };
        let others = ranked.iter().skip(shares.max(1));
        others
            .map(|(uid, other)| conflict(key, &keeper.claim, &other.claim, uid))
            .collect()
    }

    /// Replaces the allocation of a claim.
    pub fn put(&mut self, uid: &str, holder: HoldingClaim) -> IndexChange {
        let uid: Arc<str> = uid.into();
        let mut change = IndexChange::default();
        if self
            .claims
            .get(&uid)
            .is_some_and(|before| before.state == holder.state && before.copied == holder.copied)
        {
            return change;
        }
        let new = device_keys(&holder);
        if let AllocationState::Unreadable { nodes, .. } = &holder.state {
            for node in nodes {
                self.unreadable
                    .entry(node.clone())
                    .or_default()
                    .insert(Arc::clone(&uid));
            }
        }
        if let Some(before) = self.claims.insert(Arc::clone(&uid), holder) {
            let left = device_keys(&before)
                .into_iter()
                .filter(|key| !new.contains(key))
                .collect();
            self.leave(&uid, left, &mut change);
            self.leave_unreadable(&uid, &before, &mut change);
        }
        for key in new {
            let devices = self.nodes.entry(key.node_uid.clone()).or_default();
            let holders = devices.entry(key.device.clone()).or_default();
            if !holders.contains(&uid) {
                holders.push(Arc::clone(&uid));
                if holders.len() > 1 {
                    change.shared.push(key);
                }
            }
        }
        change
    }

    /// Removes the allocation of a claim.
    pub fn remove(&mut self, uid: &str) -> IndexChange {
        let mut change = IndexChange::default();
        if let Some((uid, before)) = self.claims.remove_entry(uid) {
            self.leave_unreadable(&uid, &before, &mut change);
            self.leave(&uid, device_keys(&before).into_iter().collect(), &mut change);
        }
        change
    }

    fn leave(&mut self, uid: &Arc<str>, keys: Vec<DeviceKey>, change: &mut IndexChange) {
        for key in keys {
            let Some(devices) = self.nodes.get_mut(&key.node_uid) else {
                continue;
            };
            let Some(holders) = devices.get_mut(&key.device) else {
                continue;
            };
            holders.retain(|holder| holder != uid);
            if holders.is_empty() {
                devices.remove(&key.device);
                if devices.is_empty() {
                    self.nodes.remove(&key.node_uid);
                }
            }
            change.freed.push(key);
        }
    }

    /// Unblocks the nodes that only the claim's previous, unreadable allocation blocked.
    fn leave_unreadable(&mut self, uid: &Arc<str>, before: &HoldingClaim, change: &mut IndexChange) {
        let AllocationState::Unreadable { nodes, .. } = &before.state else {
            return;
        };
        let still = self.claims.get(uid).map(|holder| &holder.state);
        for node in nodes {
            if matches!(still, Some(AllocationState::Unreadable { nodes, .. }) if nodes.contains(node)) {
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

/// Claim `other` must give up a device that `keeper` keeps; both are `namespace/name`.
fn conflict(key: &DeviceKey, keeper: &str, other: &str, other_uid: &str) -> Finding {
    let (namespace, name) = other.split_once('/').unwrap_or_default();
    Finding {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: other_uid.to_owned(),
        reason: "DeviceHeldTwice",
        message: format!(
            "ResourceClaims {keeper} and {other} both hold device {} of node {}; {keeper} keeps it. {other} is rolled back \
             unless its pod has a node already; then its devices are not prepared, and the pod must be deleted",
            key.device, key.node_name
        ),
        roll_back: true,
    }
}

/// The devices of a claim, without duplicates in its handle.
fn device_keys(holder: &HoldingClaim) -> BTreeSet<DeviceKey> {
    let Some(grant) = holder.state.grant() else {
        return BTreeSet::new();
    };
    let key = |device: &HandleDevice| DeviceKey {
        node_name: grant.node_name.clone(),
        node_uid: grant.node_uid.clone(),
        device: device.device.as_str().into(),
    };
    grant.devices.iter().map(key).collect()
}

/// The content of a claim's allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The devices that the claim holds, or why they cannot be read.
    pub state: AllocationState,
    /// Uid of the claim for which the allocation was made, if that is another claim.
    pub made_for: Option<String>,
}

/// Reads the allocation by `driver` in the claim with uid `claim_uid`.
pub fn read(driver: &str, claim_uid: &str, allocation: &AllocationResult) -> Record {
    match handle(driver, allocation) {
        Ok(handle) => {
            let (node_name, node_uid) = (handle.node_name.into(), handle.node_uid.into());
            let state = AllocationState::Recorded(DeviceGrant {
                node_name,
                node_uid,
                devices: handle.devices,
            });
            Record {
                state,
                made_for: Some(handle.claim_uid).filter(|uid| uid != claim_uid),
            }
        }
        Err(error) => {
            let nodes = node_names(allocation.available_on_nodes.as_ref());
            Record {
                state: AllocationState::Unreadable {
                    nodes,
                    error: error.into(),
                },
                made_for: None,
            }
        }
    }
}

/// The only handle of `driver`. A handle without a name belongs to the driver that the claim's status names.
fn handle(driver: &str, allocation: &AllocationResult) -> Result<DeviceHandle, String> {
    let ours = |handle: &&ResourceHandle| handle.driver_name.as_deref().is_none_or(|name| name == driver);
    let mut handles = allocation.resource_handles.iter().filter(ours);
    let (Some(handle), None) = (handles.next(), handles.next()) else {
        let number = allocation.resource_handles.iter().filter(ours).count();
        return Err(format!(
            "the allocation has {number} resource handles of driver {driver} instead of one"
        ));
    };
    let data = handle.data.as_deref().ok_or("the resource handle has no data")?;
    DeviceHandle::parse(data).map_err(|error| error.to_string())
}

/// The allocation that records `grant` in the claim with uid `claim_uid`.
pub fn write(driver: &str, claim_uid: &str, grant: &DeviceGrant) -> Result<AllocationResult, HandleError> {
    let handle = DeviceHandle {
        version: VERSION,
        claim_uid: claim_uid.to_owned(),
        node_name: grant.node_name.to_string(),
        node_uid: grant.node_uid.to_string(),
        devices: grant.devices.clone(),
    };
    // The claim is the holder: every pod that names it may use its devices, as may a second container of one pod. A claim generated from a
    // template is named only by its own pod.
    let allocation = AllocationResult::new(driver, handle.to_data()?).on_nodes([&*grant.node_name]);
    Ok(allocation.shareable())
}

/// `namespace/name` of a claim.
pub fn claim_name(claim: &ResourceClaim) -> String {
    let metadata = &claim.metadata;
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    format!("{namespace}/{}", metadata.name.as_deref().unwrap_or_default())
}

/// The value of a claim's node label: the node for which the claim was labelled before its allocation. `None` for any node.
pub fn labelled_node(driver: &str, claim: &ResourceClaim) -> Option<Box<str>> {
    let labels = claim.metadata.labels.as_ref()?;
    let node = labels.get(&format!("{driver}/{NODE_LABEL}"))?;
    (node != LABEL_OF_ANY_NODE && !node.is_empty()).then(|| node.as_str().into())
}

/// The node names in a selector.
fn node_names(selector: Option<&NodeSelector>) -> BTreeSet<Box<str>> {
    let terms = selector
        .map(|selector| selector.node_selector_terms.as_slice())
        .unwrap_or_default();
    let fields = terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let names = fields.filter(|field| field.key == NODE_NAME_FIELD && field.operator == "In");
    names
        .flat_map(|field| field.values.iter().flatten())
        .map(|name| name.as_str().into())
        .collect()
}

/// Whether a class's `suitableNodes` allows a node with this name; `None` if that depends on more than the name.
///
/// Terms are ORed and the requirements of a term are ANDed; an empty term matches no node
/// (`k8s.io/component-helpers/scheduling/corev1/nodeaffinity`).
pub fn suits(selector: &NodeSelector, node: &str) -> Option<bool> {
    let mut unsure = false;
    for term in &selector.node_selector_terms {
        let fields = term.match_fields.as_deref().unwrap_or_default();
        let labels = !term.match_expressions.as_deref().unwrap_or_default().is_empty();
        if fields.is_empty() && !labels {
            continue;
        }
        let met = fields
            .iter()
            .map(|field| meets(field, node))
            .try_fold(true, |all, met| Some(all && met?));
        match met {
            Some(false) => {}
            Some(true) if !labels => return Some(true),
            _ => unsure = true,
        }
    }
    (!unsure).then_some(false)
}

fn meets(field: &NodeSelectorRequirement, node: &str) -> Option<bool> {
    let listed = field.values.iter().flatten().any(|name| name == node);
    match (field.key.as_str(), field.operator.as_str()) {
        (NODE_NAME_FIELD, "In") => Some(listed),
        (NODE_NAME_FIELD, "NotIn") => Some(!listed),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
