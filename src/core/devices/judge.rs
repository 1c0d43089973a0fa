//! Whether the claims of a pod fit on a node together, and with which devices. Changes nothing; the same function answers
//! "where not?" and "what exactly?", so that a verdict and an allocation never disagree.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::NodeSelector;

use crate::api::crd::Mode;
use crate::api::handle::HandleDevice;
use crate::api::resource::ResourceClaim;
use crate::core::devices::fit::{Fit, Unfit};
use crate::core::devices::holdings::{Grant, Holdings, State};
use crate::core::devices::inventory::{Device, Inventory, Node};
use crate::core::devices::parameters::Demand;
use crate::core::devices::unsuitable::{Shortage, Unsuitable};

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

/// How a device stands towards the claims that are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing<'a> {
    /// Nobody holds it.
    Free,
    /// Granted before to one of these claims, not recorded yet: may be given anew.
    Own(&'a str),
    /// Held by others.
    Held,
    /// Held by nobody, and must not be given.
    Unhealthy,
    /// Leaves the node in another way, or in one that only a newer release knows.
    OtherMode,
}

/// Judges claims together on one node: each gets what it wants beside those before it, or the reason why not.
pub fn judge(
    inventory: &Inventory,
    holdings: &Holdings,
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
    let mut fit = Fit::new(node.devices().len());
    // Of each wish that is met by the search: the number of its first request there.
    let mut met: Vec<Result<Met, Unsuitable>> = Vec::with_capacity(wishes.len());
    let mut requests = 0;
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
                // A wish that fails halfway must leave nothing behind. The last one has nothing behind it.
                let mut attempt = fit.clone();
                match add(&mut attempt, node, &standings, wish, held) {
                    Ok(()) => {
                        fit = attempt;
                        let first = requests;
                        requests += wish.demand.requests().len();
                        *wanted_before.entry(wish.demand.kind()).or_default() += wish.demand.total();
                        Ok(Met::From(first))
                    }
                    Err(Unfit::TooMuchWork) => Err(Unsuitable::TooMuchWork),
                    Err(Unfit::Impossible) => {
                        let mut shortage = shortage(node, &standings, wish.demand);
                        shortage.wanted_besides = wanted_before.get(wish.demand.kind()).copied().unwrap_or(0);
                        Err(Unsuitable::Short(shortage))
                    }
                }
            }
        });
    }
    let answers = fit.answers();
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
pub fn census(holdings: &Holdings, node: &Node, demand: &Demand) -> Shortage {
    shortage(node, &standings(holdings, node, &[]), demand)
}

fn standings<'a>(holdings: &'a Holdings, node: &Node, wishes: &[Wish<'a>]) -> Vec<Standing<'a>> {
    let own = |holders: &[Arc<str>]| match holders {
        [holder] => wishes
            .iter()
            .map(Wish::uid)
            .find(|uid| **uid == **holder)
            .filter(|uid| {
                matches!(
                    holdings.get(uid).map(|holder| &holder.state),
                    Some(State::Held(_))
                )
            }),
        _ => None,
    };
    // Both are in the order of names.
    let mut held = holdings.on_node(node.uid()).into_iter().flatten().peekable();
    let standing = |device: &Device| {
        while held.next_if(|(name, _)| **name < device.name).is_some() {}
        let holders = held
            .next_if(|(name, _)| **name == device.name)
            .map(|(_, holders)| holders);
        match holders.map(|holders| own(holders)) {
            _ if device.mode != Mode::Claims => Standing::OtherMode,
            Some(None) => Standing::Held,
            _ if device.unhealthy.is_some() => Standing::Unhealthy,
            Some(Some(uid)) => Standing::Own(uid),
            None => Standing::Free,
        }
    };
    node.devices().iter().map(standing).collect()
}

/// Adds the requests of a wish. What the claim was granted before is preferred, then what nobody has, so that the same
/// question gets the same answer.
fn add(
    fit: &mut Fit,
    node: &Node,
    standings: &[Standing<'_>],
    wish: &Wish<'_>,
    held: Option<&Grant>,
) -> Result<(), Unfit> {
    for request in wish.demand.requests() {
        let (mut before, mut free, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (device, standing)) in node.devices().iter().zip(standings).enumerate() {
            if *device.kind != *wish.demand.kind() {
                continue;
            }
            let granted_before = |grant: &Grant| {
                grant
                    .devices
                    .iter()
                    .any(|held| held.request == request.name() && *held.device == *device.name)
            };
            match standing {
                Standing::Free => free.push(index),
                Standing::Own(uid) if **uid == *wish.uid() && held.is_some_and(granted_before) => {
                    before.push(index);
                }
                Standing::Own(_) => others.push(index),
                Standing::Held | Standing::Unhealthy | Standing::OtherMode => {}
            }
        }
        before.append(&mut free);
        before.append(&mut others);
        fit.add(before, request.count())?;
    }
    Ok(())
}

fn shortage(node: &Node, standings: &[Standing<'_>], demand: &Demand) -> Shortage {
    let mut shortage = Shortage {
        kind: demand.kind().into(),
        wanted: demand.total(),
        ..Shortage::default()
    };
    for (device, standing) in node.devices().iter().zip(standings) {
        if *device.kind != *demand.kind() {
            continue;
        }
        shortage.total += usize::from(*standing != Standing::OtherMode);
        match standing {
            Standing::Held => shortage.held += 1,
            Standing::Unhealthy => shortage.unhealthy += 1,
            Standing::OtherMode => shortage.other_mode += 1,
            Standing::Free | Standing::Own(_) => {}
        }
    }
    shortage
}
