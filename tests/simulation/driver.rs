//! An in-memory driver that follows the contract of our trait, independent of the built-in one.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::resource::{AllocationResult, ResourceClaim, ResourceHandle};
use drayman::core::claims::{CallError, CallErrorKind, CallErrorSubject, ClaimToAllocate, ObjectKey};
use drayman::driver::{Holding, Observation, UnsuitableNodes};

/// The name of the driver under test.
pub(crate) const DRIVER: &str = "sim.drayman.dev";
pub(crate) const FINALIZER: &str = "sim.drayman.dev/deletion-protection";
pub(crate) const OTHER_DRIVER: &str = "other.example.com";
pub(crate) const OTHER_FINALIZER: &str = "other.example.com/deletion-protection";

/// Devices of one node that a claim holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) node: String,
    pub(crate) devices: BTreeSet<String>,
}

/// The content of a parameter object.
#[derive(Clone, Debug)]
pub(crate) struct Parameters {
    pub(crate) count: usize,
    pub(crate) valid: bool,
    pub(crate) shareable: bool,
}

/// State outside of the controller: inventories and parameter objects.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    pub(crate) nodes: BTreeMap<String, BTreeSet<String>>,
    pub(crate) parameters: BTreeMap<String, Parameters>,
}

impl Environment {
    /// The parameters of a claim, or the problem with them.
    pub(crate) fn parameters_of(&self, claim: &ResourceClaim) -> Result<Parameters, String> {
        let Some(reference) = &claim.spec.parameters_ref else {
            return Ok(Parameters {
                count: 1,
                valid: true,
                shareable: false,
            });
        };
        match self.parameters.get(&reference.name) {
            Some(parameters) if parameters.valid => Ok(parameters.clone()),
            Some(_) => Err(format!("parameters {} are wrong", reference.name)),
            None => Err(format!("parameters {} are missing", reference.name)),
        }
    }
}

/// The driver with its allocations.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryDriver {
    /// Observed recorded allocations, by claim UID.
    pub(crate) recorded: BTreeMap<String, Hold>,
    /// Allocations that are not observed in a claim yet, by claim UID.
    pub(crate) pending: BTreeMap<String, Hold>,
    /// Double allocations since the last query: UID of the younger claim and message.
    pub(crate) problems: Vec<(String, String)>,
    /// Whether it received the initial observation.
    pub(crate) observed_all: bool,
}

pub(crate) fn allocation_of(hold: &Hold, shareable: bool) -> AllocationResult {
    let devices: Vec<&str> = hold.devices.iter().map(String::as_str).collect();
    AllocationResult {
        resource_handles: vec![ResourceHandle {
            driver_name: Some(DRIVER.to_owned()),
            data: Some(format!("{}:{}", hold.node, devices.join(","))),
            structured_data: None,
        }],
        available_on_nodes: None,
        shareable,
    }
}

/// The devices of an allocation of any driver.
pub(crate) fn hold_of(allocation: &AllocationResult) -> Hold {
    let data = allocation
        .resource_handles
        .first()
        .and_then(|handle| handle.data.clone());
    let data = data.unwrap_or_default();
    let (node, devices) = data.split_once(':').unwrap_or_default();
    let devices = devices.split(',').filter(|name| !name.is_empty());
    Hold {
        node: node.to_owned(),
        devices: devices.map(str::to_owned).collect(),
    }
}

/// The recorded allocation of this driver in a claim.
pub(crate) fn recorded_hold(claim: &ResourceClaim) -> Option<Hold> {
    let status = &claim.status;
    let allocation = status.allocation.as_ref()?;
    (status.driver_name.as_deref() == Some(DRIVER)).then(|| hold_of(allocation))
}

pub(crate) fn uid_of(claim: &ResourceClaim) -> String {
    claim.metadata.uid.clone().unwrap_or_default()
}

impl MemoryDriver {
    fn held(&self, node: &str, except: &[String]) -> BTreeSet<String> {
        self.recorded
            .iter()
            .chain(&self.pending)
            .filter(|(uid, hold)| hold.node == node && !except.contains(uid))
            .flat_map(|(_, hold)| hold.devices.iter().cloned())
            .collect()
    }

    fn free(&self, environment: &Environment, node: &str, except: &[String]) -> Vec<String> {
        let held = self.held(node, except);
        let all = environment.nodes.get(node).into_iter().flatten();
        all.filter(|device| !held.contains(*device)).cloned().collect()
    }

    pub(crate) fn unsuitable_nodes(
        &self,
        environment: &Environment,
        claims: &[ClaimToAllocate],
        nodes: &[String],
    ) -> Result<Vec<UnsuitableNodes>, CallError> {
        let mut wanted = 0;
        for claim in claims {
            wanted += environment
                .parameters_of(&claim.claim)
                .map_err(|message| wrong(claim, message))?
                .count;
        }
        let own: Vec<String> = claims.iter().map(|claim| uid_of(&claim.claim)).collect();
        let mut unsuitable = UnsuitableNodes::new();
        for node in nodes {
            let free = self.free(environment, node, &own).len();
            if free < wanted {
                let all = environment.nodes.get(node).map_or(0, BTreeSet::len);
                let reason = format!("{} of {all} held", all.saturating_sub(free));
                unsuitable.insert(node.clone(), reason);
            }
        }
        Ok(vec![unsuitable; claims.len()])
    }

    /// Idempotent by UID. An unrecorded allocation moves to the requested node.
    pub(crate) fn allocate(
        &mut self,
        environment: &Environment,
        claims: &[ClaimToAllocate],
        node: Option<&str>,
    ) -> Result<Vec<AllocationResult>, CallError> {
        let allocate = |claim| self.allocate_one(environment, claim, node);
        claims.iter().map(allocate).collect()
    }

    fn allocate_one(
        &mut self,
        environment: &Environment,
        claim: &ClaimToAllocate,
        node: Option<&str>,
    ) -> Result<AllocationResult, CallError> {
        let uid = uid_of(&claim.claim);
        let parameters = environment
            .parameters_of(&claim.claim)
            .map_err(|message| wrong(claim, message))?;
        if let Some(hold) = self.recorded.get(&uid) {
            return Ok(allocation_of(hold, parameters.shareable));
        }
        match self.pending.get(&uid) {
            Some(hold) if node.is_none_or(|node| node == hold.node) => {
                return Ok(allocation_of(hold, parameters.shareable));
            }
            Some(_) => {
                self.pending.remove(&uid);
            }
            None => {}
        }
        let candidates: Vec<String> = match node {
            Some(node) => vec![node.to_owned()],
            None => environment.nodes.keys().cloned().collect(),
        };
        let (mut all, mut unheld) = (0, 0);
        for node in candidates {
            let free = self.free(environment, &node, &[]);
            all += environment.nodes.get(&node).map_or(0, BTreeSet::len);
            unheld += free.len();
            if free.len() >= parameters.count {
                let devices = free.into_iter().take(parameters.count).collect();
                let hold = Hold { node, devices };
                let allocation = allocation_of(&hold, parameters.shareable);
                self.pending.insert(uid, hold);
                return Ok(allocation);
            }
        }
        Err(CallError {
            kind: CallErrorKind::Retry,
            subject: CallErrorSubject::Call,
            reason: "NoDevice",
            message: format!("{} of {all} devices held", all - unheld),
        })
    }

    /// Returns the number of freed devices.
    pub(crate) fn deallocate(&mut self, uid: &str) -> usize {
        self.pending.remove(uid).map_or(0, |hold| hold.devices.len())
    }

    /// Returns the number of freed devices.
    pub(crate) fn observe(&mut self, observation: &Observation) -> usize {
        match observation {
            Observation::All(holdings) => {
                self.observed_all = true;
                let known: BTreeSet<&str> = holdings.iter().map(Holding::uid).collect();
                self.recorded.clear();
                self.pending.retain(|uid, _| known.contains(uid.as_str()));
                holdings.iter().map(|holding| self.observe_one(holding)).sum()
            }
            Observation::Changed(holding) => self.observe_one(holding),
            Observation::Gone { uid } => self.recorded.remove(uid).map_or(0, |hold| hold.devices.len()),
        }
    }

    /// A recorded allocation wins over an unrecorded one, then the older claim.
    fn find_double_allocations(&mut self, uid: &str, hold: &Hold) {
        let shares = |other: &Hold| other.node == hold.node && !other.devices.is_disjoint(&hold.devices);
        let recorded = self.recorded.iter().filter(|(_, other)| shares(other));
        let recorded = recorded.map(|(other, _)| other.as_str().max(uid).to_owned());
        let pending = self.pending.iter().filter(|(_, other)| shares(other));
        let younger = recorded.chain(pending.map(|(other, _)| other.clone()));
        let problem = |other: String| (other, format!("{hold:?} is held twice"));
        self.problems.extend(younger.map(problem).collect::<Vec<_>>());
    }

    fn observe_one(&mut self, holding: &Holding) -> usize {
        let uid = holding.uid().to_owned();
        match holding.allocation(DRIVER) {
            Some(allocation) => {
                let hold = hold_of(allocation);
                if self.pending.remove(&uid).as_ref() != Some(&hold) && !self.recorded.contains_key(&uid) {
                    self.find_double_allocations(&uid, &hold);
                }
                self.recorded.insert(uid, hold);
                0
            }
            None => self.recorded.remove(&uid).map_or(0, |hold| hold.devices.len()),
        }
    }
}

fn wrong(claim: &ClaimToAllocate, message: String) -> CallError {
    CallError {
        kind: CallErrorKind::Invalid,
        subject: CallErrorSubject::Claim(ObjectKey::of(&claim.claim.metadata)),
        reason: "ParametersInvalid",
        message,
    }
}
