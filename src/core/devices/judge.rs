//! Whether the claims of a pod fit on a node together, and with which devices. Changes nothing; the same function answers
//! "where not?" and "what exactly?", so that a verdict and an allocation never disagree.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::NodeSelector;

use crate::api::handle::HandleDevice;
use crate::api::resource::ResourceClaim;
use crate::core::devices::facts::Matches;
use crate::core::devices::fit::Unfit;
use crate::core::devices::holdings::{Grant, Holdings, State};
use crate::core::devices::inventory::{Device, Inventory, Node};
use crate::core::devices::parameters::Demand;
use crate::core::devices::search::{Ask, search};
use crate::core::devices::unsuitable::{Shortage, Unsuitable};
use crate::core::devices::view::{Standing, View};

/// A claim and what it wants.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// The claim.
    pub claim: &'a ResourceClaim,
    /// What it wants.
    pub demand: &'a Demand,
    /// The nodes that its class allows; asked only if no node was chosen, since the scheduler asks it otherwise.
    pub suitable_nodes: Option<&'a NodeSelector>,
}

impl<'a> Wish<'a> {
    /// The claim's uid.
    pub fn uid(&self) -> &'a str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Judges claims together on one node: each gets what it wants beside those before it, or the reason why not.
pub fn judge(
    inventory: &Inventory,
    holdings: &Holdings,
    matches: &Matches,
    node_name: &str,
    wishes: &[Wish<'_>],
) -> Vec<Result<Grant, Unsuitable>> {
    let everywhere = |reason: Unsuitable| wishes.iter().map(|_| Err(reason.clone())).collect();
    let Some(node) = inventory.node(node_name) else {
        return everywhere(Unsuitable::NoInventory);
    };
    if let Some(why) = node.unready() {
        return everywhere(Unsuitable::NotReady(why.to_owned()));
    }
    if holdings.unreadable_on(node_name) {
        return everywhere(Unsuitable::Unreadable);
    }
    let standings = standings(holdings, node, wishes);
    let room: Vec<usize> = standings.iter().map(Standing::room).collect();
    // What is met by the search so far, and its answers.
    let mut asks: Vec<Ask> = Vec::with_capacity(wishes.len());
    let mut answers = Vec::new();
    // Of each wish that is met by the search: the number of its first request there.
    let mut met: Vec<Result<Met, Unsuitable>> = Vec::with_capacity(wishes.len());
    let mut wanted_before: BTreeMap<&str, usize> = BTreeMap::new();
    for wish in wishes {
        met.push(match holdings.get(wish.uid()).map(|holder| &holder.state) {
            Some(State::Recorded(grant)) if *grant.node_uid == *node.uid() => Ok(Met::Before(grant.clone())),
            Some(State::Recorded(grant)) => Err(Unsuitable::AllocatedElsewhere(grant.node_name.to_string())),
            Some(State::Unreadable { .. }) => Err(Unsuitable::Unreadable),
            held => {
                let held = held
                    .and_then(State::grant)
                    .filter(|grant| *grant.node_uid == *node.uid());
                let view = View {
                    node,
                    standings: &standings,
                    matches,
                    demand: wish.demand,
                };
                let first = asks.iter().map(|ask| ask.requests.len()).sum();
                let found = view.ask(held).and_then(|ask| {
                    asks.push(ask);
                    search(&room, &asks).map_err(|unfit| match (unfit, asks.pop()) {
                        (Unfit::Impossible, Some(ask)) => {
                            Unsuitable::Short(Box::new(view.explain(&room, &ask)))
                        }
                        _ => Unsuitable::TooMuchWork,
                    })
                });
                match found {
                    Ok(found) => {
                        answers = found;
                        *wanted_before.entry(wish.demand.kind()).or_default() += wish.demand.total();
                        Ok(Met::From(first))
                    }
                    Err(Unsuitable::Short(mut shortage)) => {
                        shortage.wanted_besides = wanted_before.get(wish.demand.kind()).copied().unwrap_or(0);
                        Err(Unsuitable::Short(shortage))
                    }
                    Err(error) => Err(error),
                }
            }
        });
    }
    let grant = |wish: &Wish<'_>, first: usize| Grant {
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

/// How a wish is met.
enum Met {
    /// The claim is allocated already.
    Before(Grant),
    /// By the answers to the requests from this number on.
    From(usize),
}

/// How the devices of one kind stand on a node, for claims that hold nothing yet.
pub fn census(holdings: &Holdings, matches: &Matches, node: &Node, demand: &Demand) -> Shortage {
    let view = View {
        node,
        standings: &standings(holdings, node, &[]),
        matches,
        demand,
    };
    view.shortage(demand.requests().first())
}

fn standings(holdings: &Holdings, node: &Node, wishes: &[Wish<'_>]) -> Vec<Standing> {
    // Granted before to one of these claims and not recorded yet: may be given anew.
    let own = |holder: &&Arc<str>| {
        wishes.iter().any(|wish| *wish.uid() == ***holder)
            && matches!(
                holdings.get(holder).map(|holder| &holder.state),
                Some(State::Held(_))
            )
    };
    // Both are in the order of names.
    let mut held = holdings.on_node(node.uid()).into_iter().flatten().peekable();
    let standing = |device: &Device| {
        while held.next_if(|(name, _)| **name < device.name).is_some() {}
        let holders = held
            .next_if(|(name, _)| **name == device.name)
            .map_or(&[][..], |(_, holders)| holders);
        let ours = holders.iter().filter(own).count();
        let room = device.shares.saturating_sub(holders.len() - ours);
        match room {
            _ if !device.mode.serves_claims() => Standing::OtherMode,
            0 => Standing::Held,
            _ if device.unhealthy.is_some() => Standing::Unhealthy,
            room => Standing::Open { room, own: ours > 0 },
        }
    };
    node.devices().iter().map(standing).collect()
}
