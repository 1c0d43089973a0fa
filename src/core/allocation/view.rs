//! One device request against the devices of one node: builds the search, and explains why it finds nothing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::api::crd::{CLAIM_DEVICES_MAX, PlacementPolicy};
use crate::core::allocation::attribute_set::{Attribute, Match, Matches};
use crate::core::allocation::fit::Unfit;
use crate::core::allocation::index::Grant;
use crate::core::allocation::inventory::{Device, Node};
use crate::core::allocation::parameters::{Amount, Constraint, DeviceRequests, Request, Selector};
use crate::core::allocation::search::{Ask, Equal, search};
use crate::core::allocation::unsuitable::{Misfit, Requirement, Shortage, Unsuitable};
use crate::core::allocation::work::Work;

/// The availability of a device for the claims under evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Availability {
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

impl Availability {
    /// Number of claims to which the device can be allocated.
    pub(super) fn room(&self) -> usize {
        match *self {
            Self::Open { room, .. } => room,
            Self::Held | Self::Unhealthy | Self::OtherMode => 0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) node: &'a Node,
    pub(super) standings: &'a [Availability],
    pub(super) matches: &'a Matches,
    pub(super) demand: &'a DeviceRequests,
}

impl<'a> View<'a> {
    /// The input of the search. Devices granted to the claim before are preferred, then free ones, so that a repeated request gets the same
    /// devices.
    pub(super) fn ask(&self, held: Option<&Grant>, work: &mut Work) -> Result<Ask, Unsuitable> {
        let mut ask = Ask::default();
        for request in self.demand.requests() {
            self.look(request, work)?;
            let candidates = self.candidates(request, held);
            let count = match request.amount() {
                Amount::Exactly(count) => count,
                Amount::All => {
                    self.look(request, work)?;
                    self.all(request, candidates.len())?
                }
            };
            ask.requests.push((candidates, count));
        }
        let wanted = ask.requests.iter().map(|(_, count)| count).sum();
        if wanted > CLAIM_DEVICES_MAX {
            return Err(Unsuitable::Short(Box::new(Shortage {
                requirement: Some(Requirement::TooMany { wanted }),
                ..self.shortage(None)
            })));
        }
        for constraint in self.demand.constraints() {
            work.spend(constraint.requests().len() * self.node.devices().len())?;
            let equal = self.equal(constraint, &ask, held);
            ask.constraints.push(equal);
        }
        Ok(ask)
    }

    /// Spends the work for evaluating the selectors of a request on each device.
    fn look(&self, request: &Request, work: &mut Work) -> Result<(), Unfit> {
        work.spend(self.node.devices().len() * (1 + request.selectors().len()))
    }

    /// Counts the devices of the kind by availability, and the available ones by the selector results of a request.
    pub(super) fn shortage(&self, request: Option<&Request>) -> Shortage {
        let mut shortage = Shortage {
            kind: self.demand.kind().into(),
            wanted: self.demand.total(),
            ..Shortage::default()
        };
        for (_, device, standing) in self.devices() {
            shortage.total += usize::from(standing != Availability::OtherMode);
            match standing {
                Availability::Held => shortage.held += 1,
                Availability::Unhealthy => shortage.unhealthy += 1,
                Availability::OtherMode => shortage.other_mode += 1,
                Availability::Open { .. } => {
                    if let Some(misfit) = request.and_then(|request| self.misfit(request, device)) {
                        *shortage.misfits.entry(misfit).or_default() += 1;
                    }
                }
            }
        }
        shortage
    }

    /// Explains why the search found nothing, as far as this claim alone shows it.
    pub(super) fn explain(&self, room: &[usize], ask: &Ask, work: &mut Work) -> Result<Shortage, Unfit> {
        let possible = |ask: &Ask, work: &mut Work| match search(room, std::slice::from_ref(ask), work) {
            Ok(_) => Ok(true),
            Err(Unfit::Impossible) => Ok(false),
            Err(Unfit::TooMuchWork) => Err(Unfit::TooMuchWork),
        };
        if let Some(request) = self.demand.requests().first() {
            self.look(request, work)?;
        }
        for (request, (candidates, count)) in self.demand.requests().iter().zip(&ask.requests) {
            if candidates.len() < *count {
                self.look(request, work)?;
                return Ok(Shortage {
                    wanted: *count,
                    ..self.shortage(Some(request))
                });
            }
        }
        let shortage = self.shortage(self.demand.requests().first());
        let mut alone = Ask {
            constraints: Vec::new(),
            ..ask.clone()
        };
        if ask.constraints.is_empty() || !possible(&alone, work)? || possible(ask, work)? {
            return Ok(shortage);
        }
        let mut requirement = Requirement::Together;
        for (constraint, equal) in self.demand.constraints().iter().zip(&ask.constraints) {
            alone.constraints = vec![equal.clone()];
            if !possible(&alone, work)? {
                let wanted = constraint
                    .requests()
                    .iter()
                    .filter_map(|&place| ask.requests.get(place));
                requirement = Requirement::Equal {
                    attribute: constraint.attribute().to_owned(),
                    wanted: wanted.map(|(_, count)| count).sum(),
                };
                break;
            }
        }
        Ok(Shortage {
            requirement: Some(requirement),
            ..shortage
        })
    }

    /// The devices of the requested kind.
    fn devices(&self) -> impl Iterator<Item = (usize, &'a Device, Availability)> {
        let kind = self.demand.kind();
        let all = self.node.devices().iter().zip(self.standings).enumerate();
        all.map(|(index, (device, standing))| (index, device, *standing))
            .filter(move |(_, device, _)| *device.kind == *kind)
    }

    fn candidates(&self, request: &Request, held: Option<&Grant>) -> Vec<usize> {
        let granted = held.map_or(&[][..], |grant| &grant.devices);
        let (mut before, mut free, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (index, device, standing) in self.devices() {
            let Availability::Open { own, .. } = standing else {
                continue;
            };
            if self.misfit(request, device).is_some() {
                continue;
            }
            let this = |held: &crate::api::handle::HandleDevice| {
                held.request == request.name() && *held.device == *device.name
            };
            match own {
                true if granted.iter().any(this) => before.push(index),
                true => others.push(index),
                false => free.push(index),
            }
        }
        // Only shared devices differ here: any other free device has room for one claim.
        let room = |&index: &usize| self.standings.get(index).map_or(0, Availability::room);
        match self.demand.policy() {
            PlacementPolicy::Packing => free.sort_by_key(room),
            PlacementPolicy::Spreading => free.sort_by_key(|index| std::cmp::Reverse(room(index))),
        }
        before.append(&mut free);
        before.append(&mut others);
        before
    }

    /// The number of devices of a request for all. Every matching device must be available.
    fn all(&self, request: &Request, candidates: usize) -> Result<usize, Unsuitable> {
        let matching = self
            .devices()
            .filter(|(_, device, standing)| {
                *standing != Availability::OtherMode && self.misfit(request, device).is_none()
            })
            .count();
        // A device that has not been evaluated yet may match.
        let unjudged = |device: &Device| matches!(self.misfit(request, device), Some(Misfit::Unjudged(_)));
        let judged = !self
            .devices()
            .any(|(_, device, standing)| standing != Availability::OtherMode && unjudged(device));
        if judged && matching == candidates {
            return Ok(matching.max(1));
        }
        Err(Unsuitable::Short(Box::new(Shortage {
            requirement: judged.then(|| Requirement::All {
                request: request.name().to_owned(),
                matching,
                unavailable: matching.saturating_sub(candidates),
            }),
            ..self.shortage(Some(request))
        })))
    }

    /// The first selector that the device does not match.
    fn misfit(&self, request: &Request, device: &Device) -> Option<Misfit> {
        let judge = |selector: &Selector| {
            let label = || selector.label().to_string();
            match self.matches.get(selector.expression(), &device.attributes) {
                Some(Match::Yes) => None,
                Some(Match::No) => Some(Misfit::No(label())),
                Some(Match::Failed(error)) => Some(Misfit::Failed(label(), error.to_string())),
                None => Some(Misfit::Unjudged(label())),
            }
        };
        request.selectors().iter().find_map(judge)
    }

    /// Groups the candidates by attribute value. Groups with devices granted to the claim before come first, then the policy decides, then
    /// the lower value.
    fn equal(&self, constraint: &Constraint, ask: &Ask, held: Option<&Grant>) -> Equal {
        let requests = constraint
            .requests()
            .iter()
            .filter_map(|&place| ask.requests.get(place));
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
        groups.sort_by_cached_key(|group| {
            let size = i64::try_from(group.len()).unwrap_or(i64::MAX);
            let preferred = match self.demand.policy() {
                PlacementPolicy::Packing => size,
                PlacementPolicy::Spreading => -size,
            };
            (Reverse(before(group)), preferred)
        });
        Equal {
            requests: constraint.requests().to_vec(),
            groups,
        }
    }
}

#[cfg(test)]
mod tests;
