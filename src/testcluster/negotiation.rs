//! Decisions of the scheduler's plugin `dynamicresources` and of the claim controller (`pkg/controller/resourceclaim`) 1.30 about classic
//! claims. They send no request: the test cluster and the simulation carry them out.

use std::sync::Arc;

use crate::api::resource::{
    AllocationMode, AllocationResult, NODE_LIST_MAX, PodSchedulingContext, RESERVED_FOR_MAX, ResourceClaim,
    ResourceClaimConsumerReference, ResourceClaimSchedulingStatus, ResourceClaimStatus, controller_of,
};

/// A pod with its claims and its PodSchedulingContext.
#[derive(Clone, Copy, Debug)]
pub struct Negotiation<'a> {
    /// The uid of the pod.
    pub pod_uid: &'a str,
    /// Its claims by entry.
    pub claims: &'a [(String, Arc<ResourceClaim>)],
    /// Its PodSchedulingContext, if there is one.
    pub context: Option<&'a PodSchedulingContext>,
}

/// Whether the claims of a pod allow a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FilterResult {
    /// They do.
    Fits,
    /// A claim cannot be allocated on it, with the reason.
    Unsuitable(&'static str),
    /// Claims are allocated elsewhere. Contains the indices of those that may be allocated again.
    Unavailable(Vec<usize>),
}

/// The next step for a pod that has a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Reserve the claims for the pod, and bind it.
    Bind,
    /// Write these fields of the PodSchedulingContext.
    Publish {
        /// The nodes that the drivers are asked about, if they change.
        potential_nodes: Option<Vec<String>>,
        /// The node that the drivers allocate on, if it changes.
        selected_node: Option<String>,
    },
    /// The drivers have not answered yet.
    Wait,
}

/// The next step for a pod that was bound without the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundStep {
    /// Make the pod's node the selected node of its PodSchedulingContext.
    SelectNode,
    /// Reserve the claim with this index for the pod.
    Reserve(usize),
}

impl Negotiation<'_> {
    /// PreFilter: why no node can fit before an object changes.
    pub fn obstacle(&self, has_class: impl Fn(&str) -> bool) -> Option<String> {
        let owner = self.context.map(|context| controller_of(&context.metadata));
        if owner.is_some_and(|owner| owner.is_none_or(|owner| owner.uid != self.pod_uid)) {
            return Some("PodSchedulingContext is owned by another pod".to_owned());
        }
        self.claims.iter().find_map(|(_, claim)| {
            let status = &claim.status;
            if status.deallocation_requested {
                return Some("resourceclaim must be reallocated".to_owned());
            }
            if let Some(allocation) = &status.allocation {
                let is_free = allocation.shareable || status.reserved_for.is_empty();
                return (!is_free && !self.has_reserved(claim)).then(|| "resourceclaim in use".to_owned());
            }
            let class = &claim.spec.resource_class_name;
            if !has_class(class) {
                return Some(format!("resource class {class} does not exist"));
            }
            (!is_delayed(claim)).then(|| "unallocated immediate resourceclaim".to_owned())
        })
    }

    /// Filter, for one node. `is_available` evaluates the node selector of an allocation, `is_suitable` that of a class.
    pub fn filter(
        &self,
        node: &str,
        is_available: impl Fn(&AllocationResult) -> bool,
        is_suitable: impl Fn(&str) -> bool,
    ) -> FilterResult {
        let mut elsewhere = Vec::new();
        for (index, (entry, claim)) in self.claims.iter().enumerate() {
            match &claim.status.allocation {
                Some(allocation) if is_available(allocation) => {}
                Some(_) => elsewhere.push(index),
                None if !is_suitable(&claim.spec.resource_class_name) => {
                    return FilterResult::Unsuitable("excluded by resource class node filter");
                }
                None => {
                    let answer = self.answer(entry);
                    if answer.is_some_and(|answer| answer.unsuitable_nodes.iter().any(|name| name == node)) {
                        return FilterResult::Unsuitable(
                            "resourceclaim cannot be allocated for the node (unsuitable)",
                        );
                    }
                }
            }
        }
        if elsewhere.is_empty() {
            return FilterResult::Fits;
        }
        // A claim with immediate allocation would be allocated for a random node again.
        elsewhere.retain(|&index| self.claims.get(index).is_some_and(|(_, claim)| is_delayed(claim)));
        FilterResult::Unavailable(elsewhere)
    }

    /// PostFilter: whether no other pod uses a claim, so that it may be deallocated for this pod.
    pub fn may_deallocate(&self, claim: &ResourceClaim) -> bool {
        let mut reserved_for = claim.status.reserved_for.iter();
        reserved_for.all(|consumer| consumer.uid == self.pod_uid)
    }

    /// PreScore and Reserve: the next step, if `node` is selected of those that fit.
    pub fn next_step(&self, fitting: &[String], node: &str) -> NextStep {
        let unallocated = self
            .claims
            .iter()
            .filter(|(_, claim)| claim.status.allocation.is_none());
        let pending: Vec<&str> = unallocated.map(|(entry, _)| entry.as_str()).collect();
        if pending.is_empty() {
            return NextStep::Bind;
        }
        let spec = self.context.map(|context| &context.spec);
        let is_known = |node: &String| spec.is_some_and(|spec| spec.potential_nodes.contains(node));
        let potential_nodes = (!fitting.iter().all(is_known)).then(|| {
            let mut nodes: Vec<String> = fitting.iter().take(NODE_LIST_MAX).cloned().collect();
            nodes.sort();
            nodes
        });
        // With a single claim, the allocation may be requested before the driver has answered.
        let is_informed = pending.len() == 1 || pending.iter().all(|entry| self.answer(entry).is_some());
        let is_selected = spec.is_some_and(|spec| spec.selected_node == node);
        let selected_node = (is_informed && !is_selected).then(|| node.to_owned());
        if potential_nodes.is_none() && selected_node.is_none() {
            return NextStep::Wait;
        }
        NextStep::Publish {
            potential_nodes,
            selected_node,
        }
    }

    /// The next step of the claim controller for a pod that is bound to `node`.
    pub fn bound_step(&self, node: &str) -> Option<BoundStep> {
        for (index, (_, claim)) in self.claims.iter().enumerate() {
            let status = &claim.status;
            let Some(allocation) = &status.allocation else {
                if is_delayed(claim) {
                    let mut context = self.context.into_iter();
                    let is_selected = context.any(|context| context.spec.selected_node == node);
                    return (!is_selected).then_some(BoundStep::SelectNode);
                }
                continue;
            };
            let is_free = allocation.shareable && status.reserved_for.len() < RESERVED_FOR_MAX
                || status.reserved_for.is_empty();
            // Otherwise the API server refuses the reservation.
            let stays = !status.deallocation_requested && claim.metadata.deletion_timestamp.is_none();
            if is_free && stays && !self.has_reserved(claim) {
                return Some(BoundStep::Reserve(index));
            }
        }
        None
    }

    fn has_reserved(&self, claim: &ResourceClaim) -> bool {
        let mut reserved_for = claim.status.reserved_for.iter();
        reserved_for.any(|consumer| consumer.uid == self.pod_uid)
    }

    /// The driver's answer about the claim of an entry.
    fn answer(&self, entry: &str) -> Option<&ResourceClaimSchedulingStatus> {
        let mut answers = self.context?.status.resource_claims.iter();
        answers.find(|answer| answer.name == entry)
    }
}

/// The status that the claim controller writes when consumers of a claim have ended; `None` if all live.
pub fn without_ended_consumers(
    claim: &ResourceClaim,
    lives: impl Fn(&ResourceClaimConsumerReference) -> bool,
) -> Option<ResourceClaimStatus> {
    let mut status = claim.status.clone();
    status.reserved_for.retain(lives);
    if status.reserved_for.len() == claim.status.reserved_for.len() {
        return None;
    }
    status.deallocation_requested |= status.reserved_for.is_empty() && is_delayed(claim);
    Some(status)
}

fn is_delayed(claim: &ResourceClaim) -> bool {
    claim.spec.allocation_mode.unwrap_or_default() == AllocationMode::WaitForFirstConsumer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(mode: AllocationMode, node: Option<&str>) -> Arc<ResourceClaim> {
        let mut claim = ResourceClaim::default();
        claim.spec.allocation_mode = Some(mode);
        let allocation = |node| AllocationResult::default().on_nodes([node]);
        claim.status.allocation = node.map(allocation);
        Arc::new(claim)
    }

    fn filtered(claims: &[Arc<ResourceClaim>], is_suitable: bool) -> FilterResult {
        let claims: Vec<(String, Arc<ResourceClaim>)> = claims
            .iter()
            .cloned()
            .map(|claim| (String::new(), claim))
            .collect();
        let negotiation = Negotiation {
            pod_uid: "uid",
            claims: &claims,
            context: None,
        };
        negotiation.filter("here", |_| false, |_| is_suitable)
    }

    #[test]
    fn only_a_delayed_claim_is_allocated_again_for_a_node() {
        let delayed = claim(AllocationMode::WaitForFirstConsumer, Some("elsewhere"));
        let immediate = claim(AllocationMode::Immediate, Some("elsewhere"));
        assert_eq!(
            filtered(&[immediate, delayed], true),
            FilterResult::Unavailable(vec![1])
        );
    }

    #[test]
    fn no_claim_is_deallocated_for_a_node_that_another_excludes() {
        let elsewhere = claim(AllocationMode::WaitForFirstConsumer, Some("elsewhere"));
        let unallocated = claim(AllocationMode::WaitForFirstConsumer, None);
        assert_eq!(
            filtered(&[elsewhere, unallocated], false),
            FilterResult::Unsuitable("excluded by resource class node filter")
        );
    }

    #[test]
    fn the_selected_node_of_a_bound_pod_becomes_its_own() {
        let claims = [(String::new(), claim(AllocationMode::WaitForFirstConsumer, None))];
        let step = |selected: &str| {
            let mut context = PodSchedulingContext::default();
            context.spec.selected_node = selected.to_owned();
            let negotiation = Negotiation {
                pod_uid: "uid",
                claims: &claims,
                context: Some(&context),
            };
            negotiation.bound_step("here")
        };
        assert_eq!(step("elsewhere"), Some(BoundStep::SelectNode));
        assert_eq!(step("here"), None);
    }
}
