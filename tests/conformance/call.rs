//! What a driver was asked.

use std::sync::Arc;
use std::time::Instant;

use drayman::api::resource::{AllocationResult, ResourceClaim, ResourceClass};

/// What the driver was asked.
#[derive(Clone, Debug)]
pub(crate) enum What {
    Class(Arc<ResourceClass>),
    Claim(Arc<ResourceClaim>),
    Judge {
        pod: String,
        claims: Vec<Asked>,
        nodes: Vec<String>,
    },
    Allocate {
        claims: Vec<Asked>,
        node: Option<String>,
    },
    Deallocate {
        claim: Arc<ResourceClaim>,
        allocation: Option<AllocationResult>,
    },
}

/// A claim that the driver was asked about.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) entry: String,
    pub(crate) claim: Arc<ResourceClaim>,
    pub(crate) class: Arc<ResourceClass>,
}

/// A call, from its begin to its end or to when it was given up.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) what: What,
    pub(crate) began: Instant,
    pub(crate) ended: Option<Instant>,
}

/// The calls as words, without questions about parameters.
pub(crate) fn story(calls: &[Call]) -> Vec<String> {
    calls.iter().filter_map(|call| call.what.word()).collect()
}

/// How many of the calls are so.
pub(crate) fn count(calls: &[Call], which: impl Fn(&What) -> bool) -> usize {
    calls.iter().filter(|call| which(&call.what)).count()
}

pub(crate) fn name(claim: &ResourceClaim) -> &str {
    claim.metadata.name.as_deref().unwrap_or_default()
}

impl What {
    fn word(&self) -> Option<String> {
        let names = |claims: &[Asked]| {
            let names: Vec<&str> = claims.iter().map(|asked| name(&asked.claim)).collect();
            names.join(" ")
        };
        match self {
            Self::Class(_) | Self::Claim(_) => None,
            Self::Judge { claims, .. } => Some(format!("judge {}", names(claims))),
            Self::Allocate { claims, .. } => Some(format!("allocate {}", names(claims))),
            Self::Deallocate { claim, .. } => Some(format!("deallocate {}", name(claim))),
        }
    }

    pub(crate) fn is_judge(&self) -> bool {
        matches!(self, Self::Judge { .. })
    }

    pub(crate) fn is_allocate(&self) -> bool {
        matches!(self, Self::Allocate { .. })
    }

    pub(crate) fn is_deallocate(&self) -> bool {
        matches!(self, Self::Deallocate { .. })
    }

    /// Whether this claim is among those asked about.
    pub(crate) fn is_about(&self, wanted: &str) -> bool {
        match self {
            Self::Class(_) => false,
            Self::Claim(claim) | Self::Deallocate { claim, .. } => name(claim) == wanted,
            Self::Judge { claims, .. } | Self::Allocate { claims, .. } => {
                claims.iter().any(|asked| name(&asked.claim) == wanted)
            }
        }
    }

    /// The claims that a test makes to learn that everything before them has been seen are nobody's business.
    pub(crate) fn is_fence(&self) -> bool {
        match self {
            Self::Class(class) => class
                .metadata
                .name
                .as_deref()
                .is_some_and(|name| name.starts_with("fence-")),
            Self::Claim(claim) | Self::Deallocate { claim, .. } => is_fence(claim),
            Self::Judge { claims, .. } | Self::Allocate { claims, .. } => {
                claims.iter().any(|asked| is_fence(&asked.claim))
            }
        }
    }
}

/// Whether a claim is made by a fence.
pub(crate) fn is_fence(claim: &ResourceClaim) -> bool {
    name(claim).starts_with("fence-")
}
