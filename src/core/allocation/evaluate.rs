//! Evaluates whether the claims of a pod fit on a node together, and with which devices ([`NodeSnapshot`]), or why not
//! ([`Unsuitable`]). The evaluation changes nothing. Node fit and allocation use the same function, so they never disagree.
//!
//! It works on a snapshot of all required data, so that a long search needs neither the lock nor the controller's thread.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::NodeSelector;

use crate::api::crd::CLAIM_DEVICES_MAX;
use crate::api::handle::HandleDevice;
use crate::api::resource::ResourceClaim;
use crate::core::allocation::index::{AllocationIndex, AllocationState, DeviceGrant};
use crate::core::allocation::inventory::{
    Attribute, DeviceInfo, ExpressionResults, Inventory, Match, NodeInfo, SelectorResults,
};
use crate::core::allocation::parameters::{
    Amount, CheckedRequest, CheckedSelector, Constraint, DeviceRequests,
};
use crate::core::allocation::search::{Ask, CALL_WORK_MAX, Equal, NODE_WORK_MAX, Unfit, WorkBudget, search};
use crate::core::names::truncated;

/// Number of misfits in the text of a [`Shortage`]. The controller keeps such a text for each claim and node, and users decide how many
/// misfits there are.
const SHOWN_MISFITS_MAX: usize = 3;
/// Maximum number of bytes of each of them: enough for the selector and an error of usual length. With the counts, the text stays below the
/// 640 bytes that the controller keeps.
const MISFIT_BYTES_MAX: usize = 128;

/// A claim with its device request.
#[derive(Clone, Copy, Debug)]
pub struct RequestedClaim<'a> {
    pub claim: &'a ResourceClaim,
    pub device_requests: &'a DeviceRequests,
    /// The nodes that its class allows. Evaluated only if no node is selected: otherwise the scheduler has evaluated them.
    pub suitable_nodes: Option<&'a NodeSelector>,
}

impl<'a> RequestedClaim<'a> {
    pub fn uid(&self) -> &'a str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// The result for each claim: its devices, beside those of the claims before it, or why it does not fit.
pub type NodeFit = Vec<Result<DeviceGrant, Unsuitable>>;

/// A snapshot of a node for the claims of one pod.
#[derive(Clone, Debug)]
pub struct NodeSnapshot {
    name: Box<str>,
    node: Result<Arc<NodeInfo>, Unsuitable>,
    availabilities: Vec<DeviceAvailability>,
    /// The current allocation of each claim.
    states: Vec<Option<AllocationState>>,
}

impl NodeSnapshot {
    /// Copies the data of a node for these claims.
    pub(super) fn new(
        inventory: &Inventory,
        holdings: &AllocationIndex,
        requested: &[RequestedClaim<'_>],
        name: &str,
    ) -> Self {
        let node = match inventory.node(name) {
            None => Err(Unsuitable::NoInventory),
            Some(node) => match node.unready() {
                Some(why) => Err(Unsuitable::NotReady(why.to_owned())),
                None if holdings.unreadable_on(name) => Err(Unsuitable::Unreadable),
                None => Ok(Arc::clone(node)),
            },
        };
        let availabilities = node
            .as_ref()
            .map_or_else(|_| Vec::new(), |node| availabilities(holdings, node, requested));
        let state =
            |request: &RequestedClaim<'_>| holdings.get(request.uid()).map(|holder| holder.state.clone());
        Self {
            name: name.into(),
            node,
            availabilities,
            states: requested.iter().map(state).collect(),
        }
    }

    /// Whether the result for this snapshot can still be granted. `now` is a new snapshot of the same node.
    pub(super) fn still_grants(&self, now: &Self, fit: &NodeFit) -> bool {
        let (Ok(before), Ok(node)) = (&self.node, &now.node) else {
            return false;
        };
        if before.uid() != node.uid() || self.states != now.states {
            return false;
        }
        let mut room: BTreeMap<&str, usize> = node
            .devices()
            .iter()
            .zip(&now.availabilities)
            .filter(|(device, _)| before.device(&device.name) == Some(device))
            .map(|(device, availability)| (&*device.name, availability.room()))
            .collect();
        let mut take = |device: &HandleDevice| match room.get_mut(&*device.device) {
            Some(room) if *room > 0 => {
                *room -= 1;
                true
            }
            _ => false,
        };
        // A recorded allocation is granted again as it is, and takes no room from new grants.
        let new = fit.iter().zip(&now.states);
        new.filter(|(_, state)| !matches!(state, Some(AllocationState::Recorded(_))))
            .all(|(fit, _)| {
                fit.as_ref()
                    .is_ok_and(|grant| grant.devices.iter().all(&mut take))
            })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Evaluates the claims together. A claim that exceeds the work limit gets [`Unsuitable::TooMuchWork`].
    pub fn evaluate(
        &self,
        matches: &SelectorResults,
        requested: &[RequestedClaim<'_>],
        work: &mut WorkBudget,
    ) -> NodeFit {
        let node = match &self.node {
            Ok(node) => node,
            Err(reason) => return requested.iter().map(|_| Err(reason.clone())).collect(),
        };
        let room: Vec<usize> = self.availabilities.iter().map(DeviceAvailability::room).collect();
        // The requests that the search can serve so far, and its answers.
        let mut asks: Vec<Ask> = Vec::with_capacity(requested.len());
        let mut answers = Vec::new();
        // For each claim that the search serves, the index of its first request there.
        let mut fits: Vec<Result<ClaimFit, Unsuitable>> = Vec::with_capacity(requested.len());
        let mut requested_before: BTreeMap<&str, usize> = BTreeMap::new();
        for (request, state) in requested.iter().zip(&self.states) {
            fits.push(match state {
                Some(AllocationState::Recorded(grant)) if *grant.node_uid == *node.uid() => {
                    Ok(ClaimFit::Allocated(grant.clone()))
                }
                Some(AllocationState::Recorded(grant)) => {
                    Err(Unsuitable::AllocatedElsewhere(grant.node_name.to_string()))
                }
                Some(AllocationState::Unreadable { .. }) => Err(Unsuitable::Unreadable),
                held => {
                    let held = held
                        .as_ref()
                        .and_then(AllocationState::grant)
                        .filter(|grant| *grant.node_uid == *node.uid());
                    let view = NodeView {
                        node,
                        availabilities: &self.availabilities,
                        matches,
                        device_requests: request.device_requests,
                    };
                    let first = asks.iter().map(|ask| ask.requests.len()).sum();
                    match find(&view, held, &room, &mut asks, work) {
                        Ok(found) => {
                            answers = found;
                            *requested_before
                                .entry(request.device_requests.kind())
                                .or_default() += request.device_requests.total();
                            Ok(ClaimFit::Found(first))
                        }
                        Err(Unsuitable::Short(mut shortage)) => {
                            shortage.requested_besides = requested_before
                                .get(request.device_requests.kind())
                                .copied()
                                .unwrap_or(0);
                            Err(Unsuitable::Short(shortage))
                        }
                        Err(error) => Err(error),
                    }
                }
            });
        }
        let grant = |request: &RequestedClaim<'_>, first: usize| DeviceGrant {
            node_name: node.name().into(),
            node_uid: node.uid().into(),
            devices: request
                .device_requests
                .requests()
                .iter()
                .zip(answers.iter().skip(first))
                .flat_map(|(request, devices)| {
                    let named = devices.iter().filter_map(|&index| node.devices().get(index));
                    named.map(|device| HandleDevice {
                        request: request.name().into(),
                        device: device.name.to_string(),
                    })
                })
                .collect(),
        };
        requested
            .iter()
            .zip(fits)
            .map(|(request, fit)| {
                fit.map(|fit| match fit {
                    ClaimFit::Allocated(grant) => grant,
                    ClaimFit::Found(first) => grant(request, first),
                })
            })
            .collect()
    }

    /// Counts the devices of one kind, for claims that hold no devices yet.
    pub fn device_counts(
        &self,
        matches: &SelectorResults,
        device_requests: &DeviceRequests,
        work: &mut WorkBudget,
    ) -> Result<Shortage, Unfit> {
        let request = device_requests.requests().first();
        work.spend(self.availabilities.len() * (1 + request.map_or(0, |request| request.selectors().len())))?;
        let Ok(node) = &self.node else {
            return Ok(Shortage::default());
        };
        let view = NodeView {
            node,
            availabilities: &self.availabilities,
            matches,
            device_requests,
        };
        Ok(view.shortage(request))
    }
}

/// Searches for one more claim. Its requests are kept only if they can be served.
fn find(
    view: &NodeView<'_>,
    held: Option<&DeviceGrant>,
    room: &[usize],
    asks: &mut Vec<Ask>,
    work: &mut WorkBudget,
) -> Result<Vec<Vec<usize>>, Unsuitable> {
    asks.push(view.ask(held, work)?);
    search(room, asks, work).or_else(|unfit| match (unfit, asks.pop()) {
        (Unfit::Impossible, Some(ask)) => Err(Unsuitable::Short(Box::new(view.explain(room, &ask, work)?))),
        _ => Err(Unsuitable::TooMuchWork),
    })
}

/// The devices of a claim that fits.
enum ClaimFit {
    /// The claim is allocated already.
    Allocated(DeviceGrant),
    /// The search's answers from this index on.
    Found(usize),
}

fn availabilities(
    holdings: &AllocationIndex,
    node: &NodeInfo,
    requested: &[RequestedClaim<'_>],
) -> Vec<DeviceAvailability> {
    // An unrecorded grant of one of these claims may be granted anew.
    let own = |holder: &&Arc<str>| {
        requested.iter().any(|request| *request.uid() == ***holder)
            && matches!(
                holdings.get(holder).map(|holder| &holder.state),
                Some(AllocationState::Held(_))
            )
    };
    // Both lists are sorted by name.
    let mut held = holdings.on_node(node.uid()).into_iter().flatten().peekable();
    let availability = |device: &DeviceInfo| {
        while held.next_if(|(name, _)| **name < device.name).is_some() {}
        let holders = held
            .next_if(|(name, _)| **name == device.name)
            .map_or(&[][..], |(_, holders)| holders);
        let ours = holders.iter().filter(own).count();
        let room = device.shares.saturating_sub(holders.len() - ours);
        match room {
            _ if !device.serves_claims => DeviceAvailability::OtherMode,
            0 => DeviceAvailability::Held,
            _ if device.unhealthy.is_some() => DeviceAvailability::Unhealthy,
            room => DeviceAvailability::Open { room, own: ours > 0 },
        }
    };
    node.devices().iter().map(availability).collect()
}

/// The availability of a device for the claims under evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceAvailability {
    /// The device can be allocated.
    Open {
        /// Number of claims to which it can be allocated.
        room: usize,
        /// One of the claims under evaluation has an unrecorded grant of the device.
        own: bool,
    },
    /// Held by as many other claims as it has shares.
    Held,
    /// Not held, but unhealthy.
    Unhealthy,
    /// Not for claims, or in a mode that only a newer release knows.
    OtherMode,
}

impl DeviceAvailability {
    /// Number of claims to which the device can be allocated.
    pub(super) fn room(&self) -> usize {
        match *self {
            Self::Open { room, .. } => room,
            Self::Held | Self::Unhealthy | Self::OtherMode => 0,
        }
    }
}

/// A selector with its results, if there are any.
type SelectorWithResults<'a> = (&'a CheckedSelector, Option<&'a ExpressionResults>);

#[derive(Clone, Copy, Debug)]
pub(super) struct NodeView<'a> {
    pub(super) node: &'a NodeInfo,
    pub(super) availabilities: &'a [DeviceAvailability],
    pub(super) matches: &'a SelectorResults,
    pub(super) device_requests: &'a DeviceRequests,
}

impl<'a> NodeView<'a> {
    /// The input of the search. Devices granted to the claim before are preferred, then free ones, so that a repeated request gets the same
    /// devices.
    pub(super) fn ask(&self, held: Option<&DeviceGrant>, work: &mut WorkBudget) -> Result<Ask, Unsuitable> {
        let mut ask = Ask::default();
        for request in self.device_requests.requests() {
            self.spend(request, work)?;
            let candidates = self.candidates(request, held);
            let count = match request.amount() {
                Amount::Exactly(count) => count,
                Amount::All => {
                    self.spend(request, work)?;
                    self.all(request, candidates.len())?
                }
            };
            ask.requests.push((candidates, count));
        }
        let requested_count = ask.requests.iter().map(|(_, count)| count).sum();
        if requested_count > CLAIM_DEVICES_MAX {
            return Err(Unsuitable::Short(Box::new(Shortage {
                unmet_condition: Some(UnmetCondition::TooMany { requested_count }),
                ..self.shortage(None)
            })));
        }
        for constraint in self.device_requests.constraints() {
            work.spend(constraint.requests().len() * self.node.devices().len())?;
            let equal = self.equal(constraint, &ask, held);
            ask.constraints.push(equal);
        }
        Ok(ask)
    }

    /// Spends the work for evaluating the selectors of a request on each device.
    fn spend(&self, request: &CheckedRequest, work: &mut WorkBudget) -> Result<(), Unfit> {
        work.spend(self.node.devices().len() * (1 + request.selectors().len()))
    }

    /// Counts the devices of the kind by availability, and the available ones by the selector results of a request.
    pub(super) fn shortage(&self, request: Option<&CheckedRequest>) -> Shortage {
        let mut shortage = Shortage {
            kind: self.device_requests.kind().into(),
            requested_count: self.device_requests.total(),
            ..Shortage::default()
        };
        let selectors = request.map_or_else(Vec::new, |request| self.selectors(request));
        for (_, device, availability) in self.devices() {
            shortage.total += usize::from(availability != DeviceAvailability::OtherMode);
            match availability {
                DeviceAvailability::Held => shortage.held += 1,
                DeviceAvailability::Unhealthy => shortage.unhealthy += 1,
                DeviceAvailability::OtherMode => shortage.other_mode += 1,
                DeviceAvailability::Open { .. } => {
                    if let Some(misfit) = self.misfit(&selectors, device) {
                        *shortage.misfits.entry(misfit).or_default() += 1;
                    }
                }
            }
        }
        shortage
    }

    /// Explains why the search found nothing, as far as this claim alone shows it.
    pub(super) fn explain(
        &self,
        room: &[usize],
        ask: &Ask,
        work: &mut WorkBudget,
    ) -> Result<Shortage, Unfit> {
        let possible = |ask: &Ask, work: &mut WorkBudget| match search(room, std::slice::from_ref(ask), work)
        {
            Ok(_) => Ok(true),
            Err(Unfit::Impossible) => Ok(false),
            Err(Unfit::TooMuchWork) => Err(Unfit::TooMuchWork),
        };
        if let Some(request) = self.device_requests.requests().first() {
            self.spend(request, work)?;
        }
        for (request, (candidates, count)) in self.device_requests.requests().iter().zip(&ask.requests) {
            if candidates.len() < *count {
                self.spend(request, work)?;
                return Ok(Shortage {
                    requested_count: *count,
                    ..self.shortage(Some(request))
                });
            }
        }
        let shortage = self.shortage(self.device_requests.requests().first());
        let mut alone = Ask {
            constraints: Vec::new(),
            ..ask.clone()
        };
        if ask.constraints.is_empty() || !possible(&alone, work)? || possible(ask, work)? {
            return Ok(shortage);
        }
        let mut unmet_condition = UnmetCondition::Together;
        for (constraint, equal) in self.device_requests.constraints().iter().zip(&ask.constraints) {
            alone.constraints = vec![equal.clone()];
            if !possible(&alone, work)? {
                let requests = constraint
                    .requests()
                    .iter()
                    .filter_map(|&index| ask.requests.get(index));
                unmet_condition = UnmetCondition::Equal {
                    attribute: constraint.attribute().to_owned(),
                    requested_count: requests.map(|(_, count)| count).sum(),
                };
                break;
            }
        }
        Ok(Shortage {
            unmet_condition: Some(unmet_condition),
            ..shortage
        })
    }

    /// The devices of the requested kind.
    fn devices(&self) -> impl Iterator<Item = (usize, &'a DeviceInfo, DeviceAvailability)> {
        let kind = self.device_requests.kind();
        let all = self.node.devices().iter().zip(self.availabilities).enumerate();
        all.map(|(index, (device, availability))| (index, device, *availability))
            .filter(move |(_, device, _)| *device.kind == *kind)
    }

    fn candidates(&self, request: &CheckedRequest, held: Option<&DeviceGrant>) -> Vec<usize> {
        let granted = held.map_or(&[][..], |grant| &grant.devices);
        let selectors = self.selectors(request);
        let (mut before, mut free, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (index, device, availability) in self.devices() {
            let DeviceAvailability::Open { own, .. } = availability else {
                continue;
            };
            if self.misfit(&selectors, device).is_some() {
                continue;
            }
            let this = |held: &HandleDevice| held.request == request.name() && *held.device == *device.name;
            match own {
                true if granted.iter().any(this) => before.push(index),
                true => others.push(index),
                false => free.push(index),
            }
        }
        // Only shared devices differ here: any other free device has room for one claim.
        let room = |&index: &usize| self.availabilities.get(index).map_or(0, DeviceAvailability::room);
        if self.device_requests.spreads() {
            free.sort_by_key(|index| Reverse(room(index)));
        } else {
            free.sort_by_key(room);
        }
        before.append(&mut free);
        before.append(&mut others);
        before
    }

    /// The number of devices of a request for all. Every matching device must be available.
    fn all(&self, request: &CheckedRequest, candidates: usize) -> Result<usize, Unsuitable> {
        let selectors = self.selectors(request);
        let (mut matching, mut pending) = (0_usize, false);
        for (_, device, availability) in self.devices() {
            if availability == DeviceAvailability::OtherMode {
                continue;
            }
            match self.misfit(&selectors, device) {
                None => matching += 1,
                // A device that has not been evaluated yet may match.
                Some(Misfit::Pending(_)) => pending = true,
                Some(Misfit::No(_) | Misfit::Failed(..)) => {}
            }
        }
        if !pending && matching == candidates {
            return Ok(matching.max(1));
        }
        Err(Unsuitable::Short(Box::new(Shortage {
            unmet_condition: (!pending).then(|| UnmetCondition::All {
                request: request.name().to_owned(),
                matching,
                unavailable: matching.saturating_sub(candidates),
            }),
            ..self.shortage(Some(request))
        })))
    }

    /// The selectors of a request with their results, looked up once for all devices.
    fn selectors<'r>(&self, request: &'r CheckedRequest) -> Vec<SelectorWithResults<'r>>
    where
        'a: 'r,
    {
        let matches = self.matches;
        let selectors = request.selectors().iter();
        selectors
            .map(|selector| (selector, matches.of_expression(selector.expression())))
            .collect()
    }

    /// The first of these selectors that the device does not match.
    fn misfit(&self, selectors: &[SelectorWithResults<'_>], device: &DeviceInfo) -> Option<Misfit> {
        if selectors.is_empty() {
            return None;
        }
        let number = self.matches.known_number(&device.attributes);
        let evaluate = |&(selector, results): &SelectorWithResults<'_>| {
            let label = || selector.label().to_string();
            let result = results
                .zip(number)
                .and_then(|(results, number)| results.get(number));
            match result {
                Some(Match::Yes) => None,
                Some(Match::No) => Some(Misfit::No(label())),
                Some(Match::Failed(error)) => Some(Misfit::Failed(label(), error.to_string())),
                None => Some(Misfit::Pending(label())),
            }
        };
        selectors.iter().find_map(evaluate)
    }

    /// Groups the candidates by attribute value. Groups with devices granted to the claim before come first, then the policy decides, then
    /// the lower value.
    fn equal(&self, constraint: &Constraint, ask: &Ask, held: Option<&DeviceGrant>) -> Equal {
        let requests = constraint
            .requests()
            .iter()
            .filter_map(|&index| ask.requests.get(index));
        let candidates: BTreeSet<usize> = requests.flat_map(|(candidates, _)| candidates).copied().collect();
        let mut groups: BTreeMap<&Attribute, Vec<usize>> = BTreeMap::new();
        for index in candidates {
            let device = self.node.devices().get(index);
            if let Some(value) = device.and_then(|device| device.attributes.value(constraint.attribute())) {
                groups.entry(value).or_default().push(index);
            }
        }
        let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
        let before = |group: &Vec<usize>| {
            let devices = group.iter().filter_map(|&index| self.node.devices().get(index));
            let granted = held.map_or(&[][..], |grant| &grant.devices);
            devices
                .filter(|device| granted.iter().any(|held| *held.device == *device.name))
                .count()
        };
        let spreads = self.device_requests.spreads();
        groups.sort_by_cached_key(|group| {
            let size = i64::try_from(group.len()).unwrap_or(i64::MAX);
            let preferred = if spreads { -size } else { size };
            (Reverse(before(group)), preferred)
        });
        Equal {
            requests: constraint.requests().to_vec(),
            groups,
        }
    }
}

/// Why a claim cannot be allocated on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsuitable {
    /// The driver has no NodeInventory for the node.
    #[error("no inventory: drayman node does not run here")]
    NoInventory,
    /// The node's inventory is not ready, for this reason.
    #[error("inventory not ready: {0}")]
    NotReady(String),
    /// A claim has an unreadable allocation on this node.
    #[error(
        "a claim on this node has an allocation that this release cannot read (see the event on that claim): \
         upgrade the controller or delete the claim"
    )]
    Unreadable,
    /// The claim is already allocated on this other node.
    #[error("the claim is allocated on node {0}")]
    AllocatedElsewhere(String),
    /// There are not enough devices.
    #[error("{0}")]
    Short(Box<Shortage>),
    /// There may be enough devices, but the search exceeded its work limit.
    #[error(
        "the search for devices was given up: it takes more than {NODE_WORK_MAX} steps on one node, or {CALL_WORK_MAX} on all nodes \
         together; ask for fewer requests, selectors and constraints in one claim, or for fewer claims in one pod"
    )]
    TooMuchWork,
}

impl From<Unfit> for Unsuitable {
    fn from(_: Unfit) -> Self {
        Self::TooMuchWork
    }
}

impl Unsuitable {
    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoInventory => "NoInventory",
            Self::NotReady(_) => "InventoryNotReady",
            Self::Unreadable => "HoldingUnreadable",
            Self::AllocatedElsewhere(_) => "AllocatedElsewhere",
            Self::Short(_) => "ResourcesExhausted",
            Self::TooMuchWork => "TooManyRequests",
        }
    }
}

/// Counts of the devices of one kind, on one node or on all nodes together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    pub kind: String,
    /// Devices of the kind that claims may use.
    pub total: usize,
    /// Of these, held by other claims. A device that is both held and unhealthy counts here.
    pub held: usize,
    /// Of these, unhealthy and not held.
    pub unhealthy: usize,
    /// Devices of the kind that claims may not use.
    pub other_mode: usize,
    /// Number of devices that the claim requests.
    pub requested_count: usize,
    /// Number of devices for the pod's claims before this one.
    pub requested_besides: usize,
    /// Available devices that do not match a selector, by reason.
    pub misfits: BTreeMap<Misfit, usize>,
    /// A further condition that is not met.
    pub unmet_condition: Option<UnmetCondition>,
}

/// Why a device does not match, with the selector's name in messages.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Misfit {
    /// The selector does not match.
    No(String),
    /// The selector fails on the device, with this error.
    Failed(String, String),
    /// The selector has not been evaluated on the device yet.
    Pending(String),
}

/// A condition that is not met although there are enough devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnmetCondition {
    /// Too few devices have an equal attribute.
    #[error("no {requested_count} of the remaining devices have the same {attribute}")]
    Equal {
        /// Qualified name of the attribute.
        attribute: String,
        /// Number of devices that must have the same value.
        requested_count: usize,
    },
    /// Each constraint can be met, but not all of them together.
    #[error("each constraint can be met, but not all of them together")]
    Together,
    /// A request for all matching devices, some of which are not available.
    #[error(
        "request {request} is for all {matching} that match, and {unavailable} of them are held or unhealthy"
    )]
    All {
        request: String,
        matching: usize,
        /// Number of matching devices that are not available.
        unavailable: usize,
    },
    /// More devices than a claim may have.
    #[error(
        "the requests for all devices add up to {requested_count}; a claim gets at most {CLAIM_DEVICES_MAX}"
    )]
    TooMany {
        /// Number of devices of all requests.
        requested_count: usize,
    },
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::No(selector) => write!(f, "do not match {selector}"),
            Self::Failed(selector, error) => write!(f, "cause an error in {selector} ({error})"),
            Self::Pending(selector) => write!(f, "not evaluated yet by {selector}"),
        }
    }
}

impl Shortage {
    /// Number of healthy, matching devices with a share left.
    pub fn free(&self) -> usize {
        let misfits: usize = self.misfits.values().sum();
        self.total.saturating_sub(self.held + self.unhealthy + misfits)
    }

    /// Adds the counts of another node.
    pub fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.held += other.held;
        self.unhealthy += other.unhealthy;
        self.other_mode += other.other_mode;
        for (misfit, number) in &other.misfits {
            *self.misfits.entry(misfit.clone()).or_default() += number;
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            total,
            held,
            unhealthy,
            other_mode,
            requested_count,
            requested_besides,
            misfits,
            unmet_condition,
        } = self;
        if *total == 0 && *other_mode > 0 {
            return write!(
                f,
                "the devices of kind {kind} here are not for claims: see their mode in the node's configuration"
            );
        }
        if *total == 0 {
            return write!(f, "no device of kind {kind} on this node");
        }
        match (held, unhealthy) {
            (0, 0) if misfits.is_empty() => write!(f, "{total} of {total} free")?,
            (0, 0) => {}
            (0, _) => write!(f, "{unhealthy} of {total} unhealthy")?,
            (_, 0) => write!(f, "{held} of {total} held")?,
            (_, _) => write!(f, "{held} of {total} held, {unhealthy} unhealthy")?,
        }
        let mut separator = if held + unhealthy > 0 { ", " } else { "" };
        // The most frequent first.
        let mut shown: Vec<_> = misfits.iter().collect();
        shown.sort_by_key(|(_, number)| std::cmp::Reverse(**number));
        for (misfit, number) in shown.into_iter().take(SHOWN_MISFITS_MAX) {
            let reason = truncated(misfit.to_string(), MISFIT_BYTES_MAX);
            write!(f, "{separator}{number} of {total} {reason}")?;
            separator = ", ";
        }
        match misfits.len().saturating_sub(SHOWN_MISFITS_MAX) {
            0 => {}
            1 => write!(f, ", and 1 more reason")?,
            more => write!(f, ", and {more} more reasons")?,
        }
        let free = self.free();
        if let Some(unmet_condition) = unmet_condition {
            return write!(f, ", {unmet_condition}");
        }
        if free > 0 && held + unhealthy + misfits.len() > 0 {
            write!(f, ", {free} free")?;
        }
        if *requested_count > 1 || free > 0 {
            write!(f, ", {requested_count} requested")?;
        }
        if *requested_besides > 0 {
            write!(f, " besides {requested_besides} for the pod's other claims")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
