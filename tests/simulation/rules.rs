//! Validation of the API server: `ValidateClaimStatusUpdate`, the strategies, and the limits of `resource.k8s.io/v1alpha2` in 1.30.

use std::collections::BTreeSet;

use drayman::api::resource::{
    NODE_LIST_MAX, PodSchedulingContext, RESERVED_FOR_MAX, RESOURCE_HANDLE_MAX, ResourceClaim,
};

use crate::store::ApiError;

fn invalid(message: &str) -> Result<(), ApiError> {
    Err(ApiError::Invalid(message.to_owned()))
}

/// Validates a claim update.
pub(crate) fn claim_update(old: &ResourceClaim, new: &ResourceClaim) -> Result<(), ApiError> {
    let (was, is) = (&old.status, &new.status);
    if let (Some(before), Some(after)) = (&was.allocation, &is.allocation)
        && before != after
    {
        return invalid("status.allocation: field is immutable");
    }
    if let Some(allocation) = &is.allocation {
        if is.driver_name.as_deref().is_none_or(str::is_empty) {
            return invalid("status.driverName: required when allocated");
        }
        if allocation.resource_handles.len() > 32
            || allocation
                .resource_handles
                .iter()
                .any(|handle| handle.data.as_deref().unwrap_or_default().len() > RESOURCE_HANDLE_MAX)
        {
            return invalid("status.allocation.resourceHandles: too long");
        }
    }
    if !is.reserved_for.is_empty() {
        let Some(allocation) = &is.allocation else {
            return invalid("status.reservedFor: may not be specified when `allocated` is not true");
        };
        if is.reserved_for.len() > 1 && !allocation.shareable {
            return invalid("status.reservedFor: may not be reserved more than once");
        }
    }
    let uids: BTreeSet<&String> = is.reserved_for.iter().map(|consumer| &consumer.uid).collect();
    if uids.len() < is.reserved_for.len() || uids.len() > RESERVED_FOR_MAX {
        return invalid("status.reservedFor: duplicate or too many");
    }
    let added = is
        .reserved_for
        .iter()
        .any(|new| !was.reserved_for.iter().any(|old| old.uid == new.uid));
    if added && (new.metadata.deletion_timestamp.is_some() || is.deallocation_requested) {
        return invalid("status.reservedFor: new reservation forbidden for a claim that is going");
    }
    if is.deallocation_requested && is.allocation.is_none() {
        return invalid("status: `allocation` must be set when `deallocationRequested` is set");
    }
    if !was.deallocation_requested && is.deallocation_requested && !is.reserved_for.is_empty() {
        return invalid("status: deallocation cannot be requested while `reservedFor` is set");
    }
    if was.deallocation_requested && !is.deallocation_requested && is.allocation.is_some() {
        return invalid("status: `deallocationRequested` may not be cleared when `allocation` is set");
    }
    let none = Vec::new();
    let before = old.metadata.finalizers.as_ref().unwrap_or(&none);
    let after = new.metadata.finalizers.as_ref().unwrap_or(&none);
    if old.metadata.deletion_timestamp.is_some() && after.iter().any(|name| !before.contains(name)) {
        return invalid("metadata.finalizers: no new finalizers can be added if the object is being deleted");
    }
    if after
        .iter()
        .any(|name| name.split('/').next() != Some(&name.split('/').next().unwrap_or("").to_lowercase()))
    {
        return invalid("metadata.finalizers: not a qualified name");
    }
    Ok(())
}

/// Validates a context.
pub(crate) fn context(context: &PodSchedulingContext) -> Result<(), ApiError> {
    let too_long = |nodes: &Vec<String>| {
        nodes.len() > NODE_LIST_MAX || nodes.iter().collect::<BTreeSet<_>>().len() < nodes.len()
    };
    if too_long(&context.spec.potential_nodes) {
        return invalid("spec.potentialNodes: duplicate or too many");
    }
    if context
        .status
        .resource_claims
        .iter()
        .any(|entry| too_long(&entry.unsuitable_nodes))
    {
        return invalid("status.claims.unsuitableNodes: duplicate or too many");
    }
    Ok(())
}
