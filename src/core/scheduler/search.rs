//! The scheduler's search for devices: first fit, in the order of pools, slices and devices.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    Device, DeviceAttribute, DeviceConstraint, ResourceClaim, ResourceSlice,
};

use super::allocated_devices::Usage;
use super::capacity::{Consumed, consumed};
use super::pools::{DeviceId, Pool, PoolState};
use super::quantity::Quantity;
use super::requests::{Alternative, StructuredRequest, requests};
use super::{ClusterState, Evaluate, claim_name};
use crate::core::allocation::inventory::Match;
use crate::core::allocation::parameters::Amount;

/// Number of devices in the allocation of one claim, at most (`AllocationResultsMaxSize`).
pub const RESULTS_MAX: usize = 32;
/// Number of steps of a search, at most. A step is a request, a subrequest or a chosen device; rejected devices are not counted. The number
/// of combinations grows exponentially with the devices of a claim; the scheduler stops after 10 seconds for a node, and this is about a
/// second.
pub(super) const STEPS_MAX: usize = 100_000;

/// Why a search ends without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SearchError {
    /// An object is invalid.
    Invalid(String),
    /// Only the scheduler can evaluate a selector.
    NotEvaluated(String),
    /// A request wants all devices of a pool that is being updated.
    PoolUpdating(String),
    /// The claim would have more than [`RESULTS_MAX`] devices. Another subrequest may need fewer.
    TooManyResults,
    /// The search takes more than [`STEPS_MAX`] steps.
    TooManySteps,
}

/// A device of the node.
#[derive(Debug)]
pub(super) struct NodeDevice<'a> {
    pub(super) id: DeviceId,
    pub(super) slice: &'a ResourceSlice,
    pub(super) device: &'a Device,
    pub(super) usage: Option<&'a Usage<'a>>,
}

impl NodeDevice<'_> {
    /// Whether several requests may have a share of the device each.
    pub(super) fn is_shared(&self) -> bool {
        self.device.allow_multiple_allocations == Some(true)
    }

    /// Whether the device consumes counters. Such a device is never allocated here.
    pub(super) fn consumes_counters(&self) -> bool {
        self.device.consumes_counters.iter().flatten().next().is_some()
    }
}

/// A device chosen for a request, by index.
#[derive(Debug)]
pub(super) struct Choice<'a> {
    pub(super) request: usize,
    pub(super) alternative: usize,
    pub(super) device: usize,
    /// Capacity that a share of the device consumes; empty for an exclusive device.
    pub(super) consumed: Consumed<'a>,
}

/// The position of the search: a device of a request.
#[derive(Clone, Copy, Debug)]
struct SearchPosition {
    request: usize,
    /// The alternative; `None` before one is chosen.
    alternative: Option<usize>,
    /// Number of devices that the request has already.
    taken: usize,
    /// The first device to try. Devices of one request are chosen in ascending order.
    start: usize,
}

impl SearchPosition {
    fn of(request: usize) -> Self {
        Self {
            request,
            alternative: None,
            taken: 0,
            start: 0,
        }
    }
}

/// A search on one node.
pub(super) struct AllocationSearch<'a, 'e, 'f> {
    pub(super) requests: Vec<StructuredRequest<'a>>,
    pub(super) devices: Vec<NodeDevice<'a>>,
    pub(super) chosen: Vec<Choice<'a>>,
    /// Constraints of each claim.
    pub(super) constraints: Vec<&'a [DeviceConstraint]>,
    /// Devices of each request and alternative with mode All.
    all: BTreeMap<(usize, usize), Vec<usize>>,
    /// Results of selectors by request, alternative and device.
    matches: BTreeMap<(usize, usize, usize), bool>,
    evaluate: &'e mut Evaluate<'f>,
    steps: usize,
}

impl<'a, 'e, 'f> AllocationSearch<'a, 'e, 'f> {
    /// Prepares a search for the claims of one pod. `pools` are those of the node.
    pub(super) fn new(
        cluster: ClusterState<'a>,
        node: &Node,
        pools: &[Pool<'a>],
        claims: &[&'a ResourceClaim],
        evaluate: &'e mut Evaluate<'f>,
    ) -> Result<Self, SearchError> {
        let mut search = Self::of_requests(cluster, node, pools, claims, evaluate)?;
        search.find_all(pools)?;
        for (index, claim) in claims.iter().enumerate() {
            search.check_size(index, claim)?;
        }
        Ok(search)
    }

    /// Reads the requests and the node's devices.
    pub(super) fn of_requests(
        cluster: ClusterState<'a>,
        node: &Node,
        pools: &[Pool<'a>],
        claims: &[&'a ResourceClaim],
        evaluate: &'e mut Evaluate<'f>,
    ) -> Result<Self, SearchError> {
        let mut devices = Vec::new();
        for pool in pools.iter().filter(|pool| pool.state == PoolState::Complete) {
            for (slice, device) in pool.devices(node).map_err(SearchError::Invalid)? {
                let id = DeviceId::new(pool.driver, pool.name, &device.name);
                devices.push(NodeDevice {
                    usage: cluster.allocated_devices.get(&id),
                    id,
                    slice,
                    device,
                });
            }
        }
        let constraints = |claim: &&'a ResourceClaim| {
            let devices = claim.spec.devices.as_ref();
            devices
                .and_then(|devices| devices.constraints.as_deref())
                .unwrap_or_default()
        };
        Ok(Self {
            requests: requests(cluster, claims).map_err(SearchError::Invalid)?,
            devices,
            chosen: Vec::new(),
            constraints: claims.iter().map(constraints).collect(),
            all: BTreeMap::new(),
            matches: BTreeMap::new(),
            evaluate,
            steps: 0,
        })
    }

    /// Drops the constraints of all claims.
    pub(super) fn ignore_constraints(&mut self) {
        self.constraints.fill(&[]);
    }

    /// Finds the devices of requests with mode All: those that match, whether or not they are available.
    fn find_all(&mut self, pools: &[Pool<'_>]) -> Result<(), SearchError> {
        for (request, alternative) in self.alternatives() {
            let Some((of, subrequest)) = self.alternative(request, alternative) else {
                continue;
            };
            if subrequest.amount != Amount::All {
                continue;
            }
            let (capacity, name) = (subrequest.capacity, of.label.clone());
            if let Some(pool) = pools.iter().find(|pool| pool.state != PoolState::Complete) {
                let (pool_name, driver) = (pool.name, pool.driver);
                let problem =
                    format!("{name}: it requests all devices, but pool {pool_name} of driver {driver}");
                return Err(match &pool.state {
                    PoolState::Invalid(reason) => {
                        SearchError::Invalid(format!("{problem} is invalid: {reason}"))
                    }
                    _ => SearchError::PoolUpdating(format!("{problem} is being updated")),
                });
            }
            let mut found = Vec::new();
            for device in 0..self.devices.len() {
                if !self.is_match(request, alternative, device)? {
                    continue;
                }
                let Some(of) = self.devices.get(device) else {
                    continue;
                };
                let consumed = consumed(of.device, capacity)
                    .map_err(|error| SearchError::Invalid(format!("{name}: device {}: {error}", of.id)))?;
                if consumed.is_some_and(|consumed| fits(of.device, &consumed, |_| Quantity::default())) {
                    found.push(device);
                }
            }
            self.all.insert((request, alternative), found);
        }
        Ok(())
    }

    /// Rejects a claim that needs more than [`RESULTS_MAX`] devices whichever subrequests are chosen.
    fn check_size(&self, claim: usize, object: &ResourceClaim) -> Result<(), SearchError> {
        let mut least = 0_usize;
        for (index, request) in self.requests.iter().enumerate() {
            if request.claim != claim {
                continue;
            }
            let numbers = (0..request.alternatives.len()).map(|alternative| self.number(index, alternative));
            least = least.saturating_add(numbers.min().unwrap_or_default());
        }
        if least > RESULTS_MAX {
            return Err(SearchError::Invalid(format!(
                "ResourceClaim {}: it needs {least} devices; at most {RESULTS_MAX} are allowed",
                claim_name(object)
            )));
        }
        Ok(())
    }

    pub(super) fn alternatives(&self) -> Vec<(usize, usize)> {
        let requests = self.requests.iter().enumerate();
        requests
            .flat_map(|(index, request)| (0..request.alternatives.len()).map(move |number| (index, number)))
            .collect()
    }

    pub(super) fn alternative(
        &self,
        request: usize,
        alternative: usize,
    ) -> Option<(&StructuredRequest<'a>, &Alternative<'a>)> {
        let request = self.requests.get(request)?;
        Some((request, request.alternatives.get(alternative)?))
    }

    /// Number of devices of a request or subrequest.
    fn number(&self, request: usize, alternative: usize) -> usize {
        match self
            .alternative(request, alternative)
            .map(|(_, subrequest)| subrequest.amount)
        {
            Some(Amount::Exactly(number)) => number,
            Some(Amount::All) => self.all.get(&(request, alternative)).map_or(0, Vec::len),
            None => 0,
        }
    }

    /// Searches devices for all claims; they are then in `chosen`.
    pub(super) fn run(&mut self) -> Result<bool, SearchError> {
        match self.next(SearchPosition::of(0)) {
            Err(SearchError::TooManyResults) => Ok(false),
            other => other,
        }
    }

    fn next(&mut self, position: SearchPosition) -> Result<bool, SearchError> {
        self.steps += 1;
        if self.steps > STEPS_MAX {
            return Err(SearchError::TooManySteps);
        }
        let Some(request) = self.requests.get(position.request) else {
            return Ok(true);
        };
        let (claim, number_of_alternatives) = (request.claim, request.alternatives.len());
        let has_subrequests = request.alternatives.iter().any(|one| one.subrequest.is_some());
        let alternative = match position.alternative {
            Some(alternative) => alternative,
            None if !has_subrequests => 0,
            None => return self.first_available(position, number_of_alternatives),
        };
        let all = self.all.get(&(position.request, alternative)).cloned();
        let number = self.number(position.request, alternative);
        if all.is_some() && number == 0 {
            return Ok(false);
        }
        if position.taken >= number {
            return self.next_request(position.request, claim);
        }
        let results = self
            .chosen
            .iter()
            .filter(|choice| self.claim_of(choice) == Some(claim));
        if number - position.taken > RESULTS_MAX.saturating_sub(results.count()) {
            return Err(SearchError::TooManyResults);
        }
        if let Some(all) = all {
            let Some(&device) = all.get(position.taken) else {
                return Ok(false);
            };
            // In which order they are taken does not matter, so there is only one attempt.
            return self.take(position, alternative, device, true);
        }
        for device in position.start..self.devices.len() {
            if self.is_in_use(position.request, alternative, device) {
                continue;
            }
            if self.is_match(position.request, alternative, device)?
                && self.take(position, alternative, device, false)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Tries the subrequests of a request in their order.
    fn first_available(&mut self, position: SearchPosition, number: usize) -> Result<bool, SearchError> {
        let mut all_too_many = true;
        for alternative in 0..number {
            let position = SearchPosition {
                alternative: Some(alternative),
                ..position
            };
            match self.next(position) {
                Err(SearchError::TooManyResults) => {}
                Ok(false) => all_too_many = false,
                other => return other,
            }
        }
        if all_too_many {
            return Err(SearchError::TooManyResults);
        }
        Ok(false)
    }

    fn next_request(&mut self, request: usize, claim: usize) -> Result<bool, SearchError> {
        let next = request + 1;
        let is_of_next_claim = self.requests.get(next).is_some_and(|next| next.claim != claim);
        match self.next(SearchPosition::of(next)) {
            // Another subrequest of this claim may leave the next one a smaller choice.
            Err(SearchError::TooManyResults) if is_of_next_claim => Ok(false),
            other => other,
        }
    }

    /// Takes a device, if possible, and continues; releases it if that fails.
    fn take(
        &mut self,
        position: SearchPosition,
        alternative: usize,
        device: usize,
        must: bool,
    ) -> Result<bool, SearchError> {
        let Some(consumed) = self.consumption(position.request, alternative, device, must)? else {
            return Ok(false);
        };
        self.chosen.push(Choice {
            request: position.request,
            alternative,
            device,
            consumed,
        });
        let done = self.next(SearchPosition {
            request: position.request,
            alternative: Some(alternative),
            taken: position.taken + 1,
            start: device + 1,
        });
        if done != Ok(true) {
            self.chosen.pop();
        }
        done
    }

    fn claim_of(&self, choice: &Choice<'_>) -> Option<usize> {
        self.requests.get(choice.request).map(|request| request.claim)
    }

    /// Whether the device is held or chosen already.
    pub(super) fn is_in_use(&self, request: usize, alternative: usize, device: usize) -> bool {
        let (Some((request, subrequest)), Some(of)) =
            (self.alternative(request, alternative), self.devices.get(device))
        else {
            return true;
        };
        let mut chosen = self
            .chosen
            .iter()
            .filter(|choice| choice.device == device && !of.is_shared());
        if subrequest.admin_access {
            return chosen.any(|choice| self.claim_of(choice) == Some(request.claim));
        }
        of.usage.is_some_and(|usage| usage.exclusive) || chosen.next().is_some()
    }

    /// Whether the selectors of class and request match.
    fn is_match(&mut self, request: usize, alternative: usize, device: usize) -> Result<bool, SearchError> {
        let key = (request, alternative, device);
        if let Some(&matches) = self.matches.get(&key) {
            return Ok(matches);
        }
        let matches = self.is_of_class(request, alternative, device)?
            && self.selects(request, alternative, device, false)?;
        self.matches.insert(key, matches);
        Ok(matches)
    }

    pub(super) fn is_of_class(
        &mut self,
        request: usize,
        alternative: usize,
        device: usize,
    ) -> Result<bool, SearchError> {
        self.selects(request, alternative, device, true)
    }

    pub(super) fn selects(
        &mut self,
        request: usize,
        alternative: usize,
        device: usize,
        by_class: bool,
    ) -> Result<bool, SearchError> {
        let of = self.requests.get(request);
        let found = of.and_then(|request| Some((request, request.alternatives.get(alternative)?)));
        let (Some((of, subrequest)), Some(device)) = (found, self.devices.get(device)) else {
            return Ok(false);
        };
        let selectors = if by_class {
            subrequest.class.spec.selectors.as_deref().unwrap_or_default()
        } else {
            subrequest.selectors
        };
        let owner = || {
            if by_class {
                format!(
                    "DeviceClass {}",
                    subrequest.class.metadata.name.as_deref().unwrap_or_default()
                )
            } else {
                of.label.clone()
            }
        };
        for (index, selector) in selectors.iter().enumerate() {
            let wrong = |error: &str| SearchError::Invalid(format!("{}: selector #{index}{error}", owner()));
            let Some(cel) = &selector.cel else {
                return Err(wrong(" has no CEL expression"));
            };
            match (self.evaluate)(&cel.expression, &device.id.driver, device.device) {
                Ok(Match::Yes) => {}
                Ok(Match::No) => return Ok(false),
                Ok(Match::Failed(error)) => {
                    return Err(wrong(&format!(" fails on device {}: {error}", device.id)));
                }
                Err(error) => {
                    return Err(SearchError::NotEvaluated(format!(
                        "drayman cannot evaluate selector #{index} of {}: {error}",
                        owner()
                    )));
                }
            }
        }
        Ok(true)
    }

    /// Returns the capacity that the request would consume of the device; `None` if the request cannot have the device. `must` says that
    /// the request needs this very device.
    pub(super) fn consumption(
        &self,
        request: usize,
        alternative: usize,
        device: usize,
        must: bool,
    ) -> Result<Option<Consumed<'a>>, SearchError> {
        let (Some((of, subrequest)), Some(candidate)) =
            (self.alternative(request, alternative), self.devices.get(device))
        else {
            return Ok(None);
        };
        if self.is_in_use(request, alternative, device)
            || candidate.consumes_counters()
            || subrequest.taint(candidate.device.taints.as_ref()).is_some()
        {
            return Ok(None);
        }
        for constraint in self.constraints.get(of.claim).copied().unwrap_or_default() {
            if !self.satisfies(constraint, of, subrequest, candidate) {
                if must {
                    return Err(SearchError::Invalid(format!(
                        "{}: it requests all devices, and a constraint excludes device {}",
                        of.label, candidate.id
                    )));
                }
                return Ok(None);
            }
        }
        let consumed = consumed(candidate.device, subrequest.capacity).map_err(|error| {
            SearchError::Invalid(format!("{}: device {}: {error}", of.label, candidate.id))
        })?;
        let Some(consumed) = consumed.filter(|consumed| self.has_capacity(device, consumed)) else {
            return Ok(None);
        };
        Ok(Some(if candidate.is_shared() {
            consumed
        } else {
            Consumed::new()
        }))
    }

    pub(super) fn has_capacity(&self, device: usize, consumed: &Consumed<'_>) -> bool {
        let Some(of) = self.devices.get(device) else {
            return false;
        };
        fits(of.device, consumed, |name| {
            let held = of.usage.and_then(|usage| usage.consumed.get(name).copied());
            let chosen = self.chosen.iter().filter(|choice| choice.device == device);
            let chosen = chosen.filter_map(|choice| choice.consumed.get(name));
            chosen.fold(held.unwrap_or_default(), |sum, (amount, _)| sum.plus(*amount))
        })
    }

    /// Whether a constraint allows the device beside the chosen ones.
    fn satisfies(
        &self,
        constraint: &DeviceConstraint,
        request: &StructuredRequest<'_>,
        subrequest: &Alternative<'_>,
        device: &NodeDevice<'_>,
    ) -> bool {
        let names = constraint.requests.as_deref().unwrap_or_default();
        if !request.is_in(subrequest, names) {
            return true;
        }
        let Some((name, must_match)) = attribute_name(constraint) else {
            return false;
        };
        let Some(attribute) = lookup(device, name) else {
            return false;
        };
        let has_value = *attribute != DeviceAttribute::default();
        let mut others = self.chosen.iter().filter_map(|choice| {
            let (of, by) = self.alternative(choice.request, choice.alternative)?;
            let is_affected = of.claim == request.claim && of.is_in(by, names);
            let device = self.devices.get(choice.device).filter(|_| is_affected)?;
            lookup(device, name)
        });
        others.all(|other| has_value && (attribute == other) == must_match)
    }
}

/// Whether a device has the consumed capacity beside the capacity in use.
pub(super) fn fits(device: &Device, consumed: &Consumed<'_>, in_use: impl Fn(&str) -> Quantity) -> bool {
    consumed.iter().all(|(name, (amount, _))| {
        let capacity = device.capacity.as_ref().and_then(|all| all.get(*name));
        let value = capacity.and_then(|capacity| Quantity::read(&capacity.value).ok());
        value.is_some_and(|value| in_use(name).plus(*amount) <= value)
    })
}

/// The attribute of a constraint, and whether its values must be equal; distinct otherwise.
pub(super) fn attribute_name(constraint: &DeviceConstraint) -> Option<(&str, bool)> {
    match (&constraint.match_attribute, &constraint.distinct_attribute) {
        (Some(name), _) => Some((name, true)),
        (None, Some(name)) => Some((name, false)),
        (None, None) => None,
    }
}

/// Looks up an attribute by its qualified name. A name of the device without a domain belongs to its driver.
pub(super) fn lookup<'a>(device: &NodeDevice<'a>, name: &str) -> Option<&'a DeviceAttribute> {
    let attributes = device.device.attributes.as_ref()?;
    attributes.get(name).or_else(|| {
        let (domain, id) = name.split_once('/')?;
        attributes.get(id).filter(|_| domain == device.id.driver)
    })
}
