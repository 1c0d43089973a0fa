//! Reports why claims do not fit on a node.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::allocate::AllocationFailure;
use super::capacity::consumed;
use super::pools::{DeviceId, PoolIndex, PoolState};
use super::quantity::Quantity;
use super::search::{AllocationSearch, SearchError, attribute_name, fits, lookup};
use super::{ClusterState, Evaluate, claim_name};
use crate::core::allocation::parameters::Amount;

/// Why a device that matches a request is not available to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Availability {
    /// The device is available.
    Free,
    /// Claims hold the device, or the capacity that the request asks for: `namespace/name` of each.
    Held(Vec<String>),
    /// The device has less capacity than the request asks for.
    NoCapacity,
    /// The device has a taint that the request does not tolerate, as `key=value:effect`.
    Tainted(String),
    /// The device lacks the attribute of a constraint.
    NoAttribute(String),
    /// The device consumes counters, which are not evaluated here.
    Counters,
}

/// The devices of a node for one request or subrequest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestReport {
    /// Index of the claim.
    pub claim: usize,
    /// Name of the request, or `request/subrequest`.
    pub request: String,
    pub class: String,
    /// Number of devices; `None` for all that match.
    pub count: Option<usize>,
    /// Number of devices that the class selects, whether or not they match the request's own selectors.
    pub of_class: usize,
    /// The devices that match class and request.
    pub matching: Vec<(DeviceId, Availability)>,
    /// An error that ends the search if it meets the device.
    pub error: Option<String>,
}

impl RequestReport {
    /// Number of available devices.
    pub fn free(&self) -> usize {
        let free = self
            .matching
            .iter()
            .filter(|(_, state)| *state == Availability::Free);
        free.count()
    }

    /// Whether enough devices are available, constraints and other requests aside.
    pub fn is_satisfiable(&self) -> bool {
        // A request for all devices leaves out those that are too small.
        let large_enough = self
            .matching
            .iter()
            .filter(|(_, state)| *state != Availability::NoCapacity);
        self.count.unwrap_or_else(|| large_enough.count().max(1)) <= self.free()
    }

    /// Whether neither the request nor, if it is a subrequest, an alternative is satisfiable. `all` are the requests of the node.
    pub fn is_short(&self, all: &[Self]) -> bool {
        let mut alternatives = all
            .iter()
            .filter(|other| other.claim == self.claim && other.main_request() == self.main_request());
        !alternatives.any(Self::is_satisfiable)
    }

    /// Name of the request without that of the subrequest.
    fn main_request(&self) -> &str {
        let parts = self.request.split_once('/');
        parts.map_or(self.request.as_str(), |(request, _)| request)
    }
}

/// The state of a node for the claims of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeReport {
    /// Whether, and if not why, the claims cannot be allocated.
    pub outcome: Result<(), AllocationFailure>,
    /// The requests of all claims, in their order.
    pub requests: Vec<RequestReport>,
    /// Whether each request has enough devices, and only the claims' constraints prevent the allocation.
    pub only_constraints: bool,
    /// Number of pools of the node, of all drivers. A pool may have no devices.
    pub pools: usize,
    /// Pools whose devices are not allocated now, as `driver/pool`, with the reason.
    pub unusable: Vec<(String, PoolState)>,
}

impl NodeReport {
    /// Whether no driver publishes slices for the node.
    pub fn is_without_driver(&self) -> bool {
        self.pools == 0
    }
}

/// Describes a node for the unallocated claims of one pod. `index` is that of `cluster.slices`.
pub fn report(
    cluster: ClusterState<'_>,
    index: &PoolIndex<'_>,
    node: &Node,
    claims: &[&ResourceClaim],
    evaluate: &mut Evaluate<'_>,
) -> Result<NodeReport, AllocationFailure> {
    let pools = index.pools(node).map_err(AllocationFailure::Invalid)?;
    let mut search = AllocationSearch::of_requests(cluster, node, &pools, claims, evaluate)?;
    let requests = requests(&mut search);
    let has_constraints = search.constraints.iter().any(|all| !all.is_empty());
    // Only an invalid selector or amount, or a constraint on a request for all devices, ends a search with an error before its limit.
    let may_fail = requests
        .iter()
        .any(|request| request.error.is_some() || (has_constraints && request.count.is_none()));
    let is_short = !may_fail && requests.iter().any(|request| request.is_short(&requests));
    let outcome = match AllocationSearch::new(cluster, node, &pools, claims, evaluate) {
        Ok(_) if is_short => Err(AllocationFailure::DoesNotFit),
        Ok(mut search) => match search.run() {
            Ok(true) => Ok(()),
            Ok(false) => Err(AllocationFailure::DoesNotFit),
            Err(error) => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    };
    let is_worth_a_try = has_constraints && !is_short && outcome == Err(AllocationFailure::DoesNotFit);
    let only_constraints = is_worth_a_try && {
        let mut search = AllocationSearch::new(cluster, node, &pools, claims, evaluate)?;
        search.ignore_constraints();
        search.run() == Ok(true)
    };
    let number_of_pools = pools.len();
    let unusable = pools
        .into_iter()
        .filter(|pool| pool.state != PoolState::Complete)
        .map(|pool| (format!("{}/{}", pool.driver, pool.name), pool.state))
        .collect();
    Ok(NodeReport {
        outcome,
        requests,
        only_constraints,
        pools: number_of_pools,
        unusable,
    })
}

/// Describes the devices for every request, with nothing chosen.
fn requests(search: &mut AllocationSearch<'_, '_, '_>) -> Vec<RequestReport> {
    let mut reports = Vec::new();
    for (request, alternative) in search.alternatives() {
        let (mut of_class, mut matching, mut error) = (0, Vec::new(), None);
        for device in 0..search.devices.len() {
            match search.is_of_class(request, alternative, device) {
                Ok(true) => of_class += 1,
                Err(SearchError::Invalid(wrong) | SearchError::NotEvaluated(wrong)) => {
                    error.get_or_insert(wrong);
                    continue;
                }
                Ok(false) | Err(_) => continue,
            }
            match search.selects(request, alternative, device, false) {
                Ok(true) => {
                    matching.extend(availability(search, request, alternative, device));
                    if let Err(SearchError::Invalid(wrong)) =
                        search.consumption(request, alternative, device, false)
                    {
                        error.get_or_insert(wrong);
                    }
                }
                Err(SearchError::Invalid(wrong) | SearchError::NotEvaluated(wrong)) => {
                    error.get_or_insert(wrong);
                }
                _ => {}
            }
        }
        let Some((of, subrequest)) = search.alternative(request, alternative) else {
            continue;
        };
        reports.push(RequestReport {
            claim: of.claim,
            request: of.result_name(subrequest),
            class: subrequest.class.metadata.name.clone().unwrap_or_default(),
            count: match subrequest.amount {
                Amount::Exactly(number) => Some(number),
                Amount::All => None,
            },
            of_class,
            matching,
            error,
        });
    }
    reports
}

fn availability(
    search: &AllocationSearch<'_, '_, '_>,
    request: usize,
    alternative: usize,
    device: usize,
) -> Option<(DeviceId, Availability)> {
    let (of, subrequest) = search.alternative(request, alternative)?;
    let candidate = search.devices.get(device)?;
    let holders = || {
        let holders = candidate.usage.into_iter().flat_map(|usage| &usage.holders);
        let mut names: Vec<String> = holders.map(|holder| claim_name(holder.claim)).collect();
        names.sort();
        names.dedup();
        names
    };
    let lacking = || {
        let constraints = search.constraints.get(of.claim).copied().unwrap_or_default();
        let names = constraints.iter().filter_map(|constraint| {
            let is_affected = of.is_in(subrequest, constraint.requests.as_deref().unwrap_or_default());
            attribute_name(constraint).filter(|_| is_affected)
        });
        names
            .map(|(name, _)| name)
            .find(|name| lookup(candidate, name).is_none())
    };
    let fits_beside = |usage: bool| {
        let Ok(Some(consumed)) = consumed(candidate.device, subrequest.capacity) else {
            return false;
        };
        if usage {
            search.has_capacity(device, &consumed)
        } else {
            fits(candidate.device, &consumed, |_| Quantity::default())
        }
    };
    // Checked first: a request for all devices leaves out devices that are too small, even if they are held.
    let state = if !fits_beside(false) {
        Availability::NoCapacity
    } else if search.is_in_use(request, alternative, device) {
        Availability::Held(holders())
    } else if candidate.consumes_counters() {
        Availability::Counters
    } else if let Some(taint) = subrequest.taint(candidate.device.taints.as_ref()) {
        let value = taint.value.as_deref().map(|value| format!("={value}"));
        Availability::Tainted(format!(
            "{}{}:{}",
            taint.key,
            value.unwrap_or_default(),
            taint.effect
        ))
    } else if let Some(name) = lacking() {
        Availability::NoAttribute(name.to_owned())
    } else if fits_beside(true) {
        Availability::Free
    } else {
        Availability::Held(holders())
    };
    Some((candidate.id.clone(), state))
}
