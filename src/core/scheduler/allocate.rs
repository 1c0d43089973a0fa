//! Allocates claims as the scheduler does.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult, DeviceRequestAllocationResult,
    ResourceClaim,
};

use super::pools::pools;
use super::requests::{Alternative, StructuredRequest};
use super::search::{AllocationSearch, NodeDevice, STEPS_MAX, SearchError};
use super::{ClusterState, Evaluate};

/// Why claims are not allocated on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocationFailure {
    /// An object is invalid. The scheduler gives up on all nodes.
    #[error("{0}")]
    Invalid(String),
    /// Only the scheduler can evaluate a selector, so the result is unknown here.
    #[error("{0}")]
    NotEvaluated(String),
    /// A claim needs all devices of a pool that is being updated. The scheduler gives up on all nodes, and tries again later.
    #[error("{0}")]
    PoolUpdating(String),
    /// The available devices of the node do not satisfy the claims.
    #[error("cannot allocate all claims")]
    DoesNotFit,
    /// The search ended at its limit without a result.
    #[error("more than {} combinations of devices would have to be tried", STEPS_MAX)]
    TooManyCombinations,
}

impl From<SearchError> for AllocationFailure {
    fn from(error: SearchError) -> Self {
        match error {
            SearchError::Invalid(error) => Self::Invalid(error),
            SearchError::NotEvaluated(error) => Self::NotEvaluated(error),
            SearchError::PoolUpdating(error) => Self::PoolUpdating(error),
            SearchError::TooManyResults => Self::DoesNotFit,
            SearchError::TooManySteps => Self::TooManyCombinations,
        }
    }
}

/// Allocates the unallocated claims of one pod on a node: the result of each claim, in their order. `share_id` returns a new uid for each
/// share of a device.
pub fn allocate(
    cluster: ClusterState<'_>,
    node: &Node,
    claims: &[&ResourceClaim],
    evaluate: &mut Evaluate<'_>,
    share_id: &mut dyn FnMut() -> String,
) -> Result<Vec<AllocationResult>, AllocationFailure> {
    let pools = pools(cluster.slices, node).map_err(AllocationFailure::Invalid)?;
    let mut search = AllocationSearch::new(cluster, node, &pools, claims, evaluate)?;
    if !search.run()? {
        return Err(AllocationFailure::DoesNotFit);
    }
    Ok(allocations(&search, node, claims, share_id))
}

/// Returns the allocation of each claim.
fn allocations(
    search: &AllocationSearch<'_, '_, '_>,
    node: &Node,
    claims: &[&ResourceClaim],
    share_id: &mut dyn FnMut() -> String,
) -> Vec<AllocationResult> {
    let mut allocations = Vec::new();
    for (index, claim) in claims.iter().enumerate() {
        let (mut results, mut devices) = (Vec::new(), Vec::new());
        for choice in &search.chosen {
            let (Some((request, subrequest)), Some(device)) = (
                search.alternative(choice.request, choice.alternative),
                search.devices.get(choice.device),
            ) else {
                continue;
            };
            if request.claim != index {
                continue;
            }
            let consumed = choice.consumed.iter();
            let consumed = consumed.map(|(name, (_, text))| ((*name).to_owned(), text.clone()));
            results.push(DeviceRequestAllocationResult {
                request: request.result_name(subrequest),
                driver: device.id.driver.clone(),
                pool: device.id.pool.clone(),
                device: device.id.device.clone(),
                admin_access: subrequest.admin_access.then_some(true),
                tolerations: Some(subrequest.tolerations.to_vec()).filter(|all| !all.is_empty()),
                share_id: device.is_shared().then(&mut *share_id),
                consumed_capacity: (!choice.consumed.is_empty()).then(|| consumed.collect()),
                binding_conditions: device.device.binding_conditions.clone(),
                binding_failure_conditions: device.device.binding_failure_conditions.clone(),
            });
            devices.push(device);
        }
        let config = configuration(&chosen_requests(search, index), claim);
        allocations.push(AllocationResult {
            devices: Some(DeviceAllocationResult {
                config: Some(config).filter(|config| !config.is_empty()),
                results: Some(results),
            }),
            node_selector: node_selector(&devices, node),
            allocation_timestamp: None,
        });
    }
    allocations
}

type Chosen<'s, 'a> = (&'s StructuredRequest<'a>, &'s Alternative<'a>);

/// The requests of a claim, each with its chosen alternative.
fn chosen_requests<'s, 'a>(search: &'s AllocationSearch<'a, '_, '_>, claim: usize) -> Vec<Chosen<'s, 'a>> {
    let requests = search.requests.iter().enumerate();
    let of_claim = requests.filter(|(_, request)| request.claim == claim);
    of_claim
        .filter_map(|(index, _)| {
            let choice = search.chosen.iter().find(|choice| choice.request == index);
            search.alternative(index, choice.map_or(0, |choice| choice.alternative))
        })
        .collect()
}

/// The configuration of the classes, once for each class, and then that of the claim.
fn configuration(requests: &[Chosen<'_, '_>], claim: &ResourceClaim) -> Vec<DeviceAllocationConfiguration> {
    let mut all = Vec::new();
    let mut seen = BTreeSet::new();
    for (_, subrequest) in requests {
        if !seen.insert(&subrequest.class.metadata.name) {
            continue;
        }
        let of_class = requests
            .iter()
            .filter(|(_, other)| other.class.metadata.name == subrequest.class.metadata.name);
        let names: Vec<String> = of_class
            .map(|(request, other)| request.result_name(other))
            .collect();
        for config in subrequest.class.spec.config.iter().flatten() {
            all.push(DeviceAllocationConfiguration {
                source: "FromClass".to_owned(),
                requests: Some(names.clone()),
                opaque: config.opaque.clone(),
            });
        }
    }
    let of_claim = claim
        .spec
        .devices
        .iter()
        .flat_map(|devices| devices.config.iter().flatten());
    for config in of_claim {
        let names = config.requests.as_deref().unwrap_or_default();
        if names.is_empty()
            || requests
                .iter()
                .any(|(request, subrequest)| request.is_in(subrequest, names))
        {
            all.push(DeviceAllocationConfiguration {
                source: "FromClaim".to_owned(),
                requests: config.requests.clone(),
                opaque: config.opaque.clone(),
            });
        }
    }
    for config in &mut all {
        let names = config.requests.as_deref().unwrap_or_default();
        // No list means all requests.
        if requests
            .iter()
            .all(|(request, subrequest)| request.is_in(subrequest, names))
        {
            config.requests = None;
        }
    }
    all
}

/// The nodes on which all devices are usable; `None` for all nodes.
fn node_selector(devices: &[&NodeDevice<'_>], node: &Node) -> Option<NodeSelector> {
    let mut term = NodeSelectorTerm::default();
    for device in devices {
        let (name, selector) = if device.slice.spec.per_device_node_selection == Some(true) {
            (&device.device.node_name, &device.device.node_selector)
        } else {
            (&device.slice.spec.node_name, &device.slice.spec.node_selector)
        };
        if name.is_some() || device.device.binds_to_node == Some(true) {
            term = NodeSelectorTerm {
                match_fields: Some(vec![NodeSelectorRequirement {
                    key: "metadata.name".to_owned(),
                    operator: "In".to_owned(),
                    values: Some(node.metadata.name.iter().cloned().collect()),
                }]),
                match_expressions: None,
            };
            break;
        }
        // The API server allows one term.
        for other in selector
            .iter()
            .filter_map(|selector| selector.node_selector_terms.first())
        {
            add(&mut term.match_fields, other.match_fields.as_deref());
            add(&mut term.match_expressions, other.match_expressions.as_deref());
        }
    }
    (term != NodeSelectorTerm::default()).then(|| NodeSelector {
        node_selector_terms: vec![term],
    })
}

fn add(all: &mut Option<Vec<NodeSelectorRequirement>>, more: Option<&[NodeSelectorRequirement]>) {
    for requirement in more.unwrap_or_default() {
        let all = all.get_or_insert_default();
        if !all.contains(requirement) {
            all.push(requirement.clone());
        }
    }
}
