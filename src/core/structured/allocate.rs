//! Allocates claims as the scheduler does.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

use super::cluster::{Cluster, Evaluate};
use super::results::allocations;
use super::search::{STEPS_MAX, Search, Stop};

/// Why claims are not allocated on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// An object is invalid. The scheduler gives up on all nodes.
    #[error("{0}")]
    Invalid(String),
    /// The available devices of the node do not satisfy the claims.
    #[error("cannot allocate all claims")]
    DoesNotFit,
    /// The search ended at its limit without a result.
    #[error("more than {} combinations of devices would have to be tried", STEPS_MAX)]
    TooManyCombinations,
}

impl From<Stop> for Refusal {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Invalid(error) => Self::Invalid(error),
            Stop::TooManyResults => Self::DoesNotFit,
            Stop::TooManySteps => Self::TooManyCombinations,
        }
    }
}

/// Allocates the unallocated claims of one pod on a node: the result of each claim, in their order. `share_id` returns a new uid for each
/// share of a device.
pub fn allocate(
    cluster: Cluster<'_>,
    node: &Node,
    claims: &[&ResourceClaim],
    evaluate: &mut Evaluate<'_>,
    share_id: &mut dyn FnMut() -> String,
) -> Result<Vec<AllocationResult>, Refusal> {
    let mut search = Search::new(cluster, node, claims, evaluate)?;
    if !search.run()? {
        return Err(Refusal::DoesNotFit);
    }
    Ok(allocations(&search, node, claims, share_id))
}
