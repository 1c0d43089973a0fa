//! Calls that a driver received.

use std::sync::Arc;
use std::time::Instant;

use drayman::api::resource::{AllocationResult, ResourceClaim, ResourceClass};

/// Arguments of a driver call.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Class(Arc<ResourceClass>),
    Claim(Arc<ResourceClaim>),
    Evaluate {
        pod: String,
        claims: Vec<RequestedClaim>,
        nodes: Vec<String>,
    },
    Allocate {
        claims: Vec<RequestedClaim>,
        node: Option<String>,
    },
    Deallocate {
        claim: Arc<ResourceClaim>,
        allocation: Option<AllocationResult>,
    },
}

/// A claim in a driver call.
#[derive(Clone, Debug)]
pub(crate) struct RequestedClaim {
    pub(crate) entry: String,
    pub(crate) claim: Arc<ResourceClaim>,
    pub(crate) class: Arc<ResourceClass>,
}

/// A driver call; `ended` is set when it returns or is cancelled.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) request: Request,
    pub(crate) began: Instant,
    pub(crate) ended: Option<Instant>,
}

/// Verb and claim names of each call, without parameter calls.
pub(crate) fn summaries(calls: &[Call]) -> Vec<String> {
    calls.iter().filter_map(|call| call.request.summary()).collect()
}

/// The number of matching calls.
pub(crate) fn count(calls: &[Call], which: impl Fn(&Request) -> bool) -> usize {
    calls.iter().filter(|call| which(&call.request)).count()
}

pub(crate) fn name(claim: &ResourceClaim) -> &str {
    claim.metadata.name.as_deref().unwrap_or_default()
}

impl Request {
    fn summary(&self) -> Option<String> {
        let names = |claims: &[RequestedClaim]| {
            let names: Vec<&str> = claims.iter().map(|requested| name(&requested.claim)).collect();
            names.join(" ")
        };
        match self {
            Self::Class(_) | Self::Claim(_) => None,
            Self::Evaluate { claims, .. } => Some(format!("evaluate {}", names(claims))),
            Self::Allocate { claims, .. } => Some(format!("allocate {}", names(claims))),
            Self::Deallocate { claim, .. } => Some(format!("deallocate {}", name(claim))),
        }
    }

    pub(crate) fn is_evaluate(&self) -> bool {
        matches!(self, Self::Evaluate { .. })
    }

    pub(crate) fn is_allocate(&self) -> bool {
        matches!(self, Self::Allocate { .. })
    }

    pub(crate) fn is_deallocate(&self) -> bool {
        matches!(self, Self::Deallocate { .. })
    }

    /// Whether the request names this claim.
    pub(crate) fn is_about(&self, wanted: &str) -> bool {
        match self {
            Self::Class(_) => false,
            Self::Claim(claim) | Self::Deallocate { claim, .. } => name(claim) == wanted,
            Self::Evaluate { claims, .. } | Self::Allocate { claims, .. } => {
                claims.iter().any(|requested| name(&requested.claim) == wanted)
            }
        }
    }

    /// Whether the request is for a claim of [`Fixture::fence`](crate::fixture::Fixture::fence).
    pub(crate) fn is_fence(&self) -> bool {
        match self {
            Self::Class(class) => class
                .metadata
                .name
                .as_deref()
                .is_some_and(|name| name.starts_with("fence-")),
            Self::Claim(claim) | Self::Deallocate { claim, .. } => is_fence(claim),
            Self::Evaluate { claims, .. } | Self::Allocate { claims, .. } => {
                claims.iter().any(|requested| is_fence(&requested.claim))
            }
        }
    }
}

/// Whether a claim was created by [`Fixture::fence`](crate::fixture::Fixture::fence).
pub(crate) fn is_fence(claim: &ResourceClaim) -> bool {
    name(claim).starts_with("fence-")
}
