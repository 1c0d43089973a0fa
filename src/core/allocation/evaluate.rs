//! Evaluates whether the claims of a pod fit on a node together, and with which devices. The evaluation changes nothing. Node fit and
//! allocation use the same function, so they never disagree.
//!
//! It works on a [`NodeSnapshot`], a snapshot of all required data, so that a long search needs neither the lock nor the controller's thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::NodeSelector;

use crate::api::handle::HandleDevice;
use crate::api::resource::ResourceClaim;
use crate::core::allocation::allocator::DeviceAllocator;
use crate::core::allocation::attribute_set::Matches;
use crate::core::allocation::fit::Unfit;
use crate::core::allocation::index::{AllocationIndex, Grant, State};
use crate::core::allocation::inventory::{Device, Node};
use crate::core::allocation::parameters::{DeviceRequests, Request, Selector};
use crate::core::allocation::search::{Ask, search};
use crate::core::allocation::unsuitable::{Shortage, Unsuitable};
use crate::core::allocation::view::{Availability, View};
use crate::core::allocation::work::Work;

/// A claim with its device request.
#[derive(Clone, Copy, Debug)]
pub struct RequestedClaim<'a> {
    /// The claim to allocate.
    pub claim: &'a ResourceClaim,
    /// The devices that it requests.
    pub demand: &'a DeviceRequests,
    /// The nodes that its class allows. Evaluated only if no node is selected: otherwise the scheduler has evaluated them.
    pub suitable_nodes: Option<&'a NodeSelector>,
}

impl<'a> RequestedClaim<'a> {
    /// Uid of the claim.
    pub fn uid(&self) -> &'a str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// The result for each claim: its devices, beside those of the claims before it, or why it does not fit.
pub type Judged = Vec<Result<Grant, Unsuitable>>;

/// A snapshot of a node for the claims of one pod.
#[derive(Clone, Debug)]
pub struct NodeSnapshot {
    name: Box<str>,
    node: Result<Arc<Node>, Unsuitable>,
    standings: Vec<Availability>,
    /// The current allocation of each claim.
    states: Vec<Option<State>>,
}

impl DeviceAllocator {
    /// Copies the data of a node for these claims.
    pub fn scene(&self, wishes: &[RequestedClaim<'_>], name: &str) -> NodeSnapshot {
        let node = match self.inventory.node(name) {
            None => Err(Unsuitable::NoInventory),
            Some(node) => match node.unready() {
                Some(why) => Err(Unsuitable::NotReady(why.to_owned())),
                None if self.holdings.unreadable_on(name) => Err(Unsuitable::Unreadable),
                None => Ok(Arc::clone(node)),
            },
        };
        let standings = node
            .as_ref()
            .map_or_else(|_| Vec::new(), |node| standings(&self.holdings, node, wishes));
        let state =
            |wish: &RequestedClaim<'_>| self.holdings.get(wish.uid()).map(|holder| holder.state.clone());
        NodeSnapshot {
            name: name.into(),
            node,
            standings,
            states: wishes.iter().map(state).collect(),
        }
    }

    /// Copies the selector results for these claims.
    pub fn matches_of(&self, wishes: &[RequestedClaim<'_>]) -> Matches {
        let requests = wishes.iter().flat_map(|wish| wish.demand.requests());
        let selectors = requests.flat_map(Request::selectors);
        self.matches.some(selectors.map(Selector::expression))
    }

    /// Whether the result for a snapshot can still be granted, although the device allocator may have changed.
    pub(super) fn still_grants(
        &self,
        wishes: &[RequestedClaim<'_>],
        scene: &NodeSnapshot,
        judged: &Judged,
    ) -> bool {
        let now = self.scene(wishes, &scene.name);
        let (Ok(before), Ok(node)) = (&scene.node, &now.node) else {
            return false;
        };
        if before.uid() != node.uid() || scene.states != now.states {
            return false;
        }
        let mut room: BTreeMap<&str, usize> = node
            .devices()
            .iter()
            .zip(&now.standings)
            .filter(|(device, _)| before.device(&device.name) == Some(device))
            .map(|(device, standing)| (&*device.name, standing.room()))
            .collect();
        // A recorded allocation is granted again as it is, and takes no room from new grants.
        let new = judged.iter().zip(&now.states);
        new.filter(|(_, state)| !matches!(state, Some(State::Recorded(_))))
            .all(|(judged, _)| {
                judged.as_ref().is_ok_and(|grant| {
                    grant
                        .devices
                        .iter()
                        .all(|device| match room.get_mut(&*device.device) {
                            Some(room) if *room > 0 => {
                                *room -= 1;
                                true
                            }
                            _ => false,
                        })
                })
            })
    }
}

impl NodeSnapshot {
    /// Name of the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Evaluates the claims together. A claim that exceeds the work limit gets [`Unsuitable::TooMuchWork`].
    pub fn judge(&self, matches: &Matches, wishes: &[RequestedClaim<'_>], work: &mut Work) -> Judged {
        let node = match &self.node {
            Ok(node) => node,
            Err(reason) => return wishes.iter().map(|_| Err(reason.clone())).collect(),
        };
        let room: Vec<usize> = self.standings.iter().map(Availability::room).collect();
        // The requests that the search can serve so far, and its answers.
        let mut asks: Vec<Ask> = Vec::with_capacity(wishes.len());
        let mut answers = Vec::new();
        // For each claim that the search serves, the index of its first request there.
        let mut met: Vec<Result<Met, Unsuitable>> = Vec::with_capacity(wishes.len());
        let mut wanted_before: BTreeMap<&str, usize> = BTreeMap::new();
        for (wish, state) in wishes.iter().zip(&self.states) {
            met.push(match state {
                Some(State::Recorded(grant)) if *grant.node_uid == *node.uid() => {
                    Ok(Met::Before(grant.clone()))
                }
                Some(State::Recorded(grant)) => {
                    Err(Unsuitable::AllocatedElsewhere(grant.node_name.to_string()))
                }
                Some(State::Unreadable { .. }) => Err(Unsuitable::Unreadable),
                held => {
                    let held = held
                        .as_ref()
                        .and_then(State::grant)
                        .filter(|grant| *grant.node_uid == *node.uid());
                    let view = View {
                        node,
                        standings: &self.standings,
                        matches,
                        demand: wish.demand,
                    };
                    let first = asks.iter().map(|ask| ask.requests.len()).sum();
                    match find(&view, held, &room, &mut asks, work) {
                        Ok(found) => {
                            answers = found;
                            *wanted_before.entry(wish.demand.kind()).or_default() += wish.demand.total();
                            Ok(Met::From(first))
                        }
                        Err(Unsuitable::Short(mut shortage)) => {
                            shortage.wanted_besides =
                                wanted_before.get(wish.demand.kind()).copied().unwrap_or(0);
                            Err(Unsuitable::Short(shortage))
                        }
                        Err(error) => Err(error),
                    }
                }
            });
        }
        let grant = |wish: &RequestedClaim<'_>, first: usize| Grant {
            node_name: node.name().into(),
            node_uid: node.uid().into(),
            devices: wish
                .demand
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
        wishes
            .iter()
            .zip(met)
            .map(|(wish, met)| {
                met.map(|met| match met {
                    Met::Before(grant) => grant,
                    Met::From(first) => grant(wish, first),
                })
            })
            .collect()
    }
}

/// Searches for one more claim. Its requests are kept only if they can be served.
fn find(
    view: &View<'_>,
    held: Option<&Grant>,
    room: &[usize],
    asks: &mut Vec<Ask>,
    work: &mut Work,
) -> Result<Vec<Vec<usize>>, Unsuitable> {
    asks.push(view.ask(held, work)?);
    search(room, asks, work).or_else(|unfit| match (unfit, asks.pop()) {
        (Unfit::Impossible, Some(ask)) => Err(Unsuitable::Short(Box::new(view.explain(room, &ask, work)?))),
        _ => Err(Unsuitable::TooMuchWork),
    })
}

/// The devices of a claim that fits.
enum Met {
    /// The claim is allocated already.
    Before(Grant),
    /// The search's answers from this index on.
    From(usize),
}

impl NodeSnapshot {
    /// Counts the devices of one kind, for claims that hold no devices yet.
    pub fn census(
        &self,
        matches: &Matches,
        demand: &DeviceRequests,
        work: &mut Work,
    ) -> Result<Shortage, Unfit> {
        let request = demand.requests().first();
        work.spend(self.standings.len() * (1 + request.map_or(0, |request| request.selectors().len())))?;
        let Ok(node) = &self.node else {
            return Ok(Shortage::default());
        };
        let view = View {
            node,
            standings: &self.standings,
            matches,
            demand,
        };
        Ok(view.shortage(request))
    }
}

fn standings(holdings: &AllocationIndex, node: &Node, wishes: &[RequestedClaim<'_>]) -> Vec<Availability> {
    // An unrecorded grant of one of these claims may be granted anew.
    let own = |holder: &&Arc<str>| {
        wishes.iter().any(|wish| *wish.uid() == ***holder)
            && matches!(
                holdings.get(holder).map(|holder| &holder.state),
                Some(State::Held(_))
            )
    };
    // Both lists are sorted by name.
    let mut held = holdings.on_node(node.uid()).into_iter().flatten().peekable();
    let standing = |device: &Device| {
        while held.next_if(|(name, _)| **name < device.name).is_some() {}
        let holders = held
            .next_if(|(name, _)| **name == device.name)
            .map_or(&[][..], |(_, holders)| holders);
        let ours = holders.iter().filter(own).count();
        let room = device.shares.saturating_sub(holders.len() - ours);
        match room {
            _ if !device.mode.serves_claims() => Availability::OtherMode,
            0 => Availability::Held,
            _ if device.unhealthy.is_some() => Availability::Unhealthy,
            room => Availability::Open { room, own: ours > 0 },
        }
    };
    node.devices().iter().map(standing).collect()
}
