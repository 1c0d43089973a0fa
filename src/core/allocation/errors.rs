//! Problems with allocations, for operators, and errors of an allocation, for users.

use crate::api::handle::HandleError;
use crate::core::allocation::index::Conflict;
use crate::core::allocation::unsuitable::{Shortage, Unsuitable};

/// A problem with the allocations of claims, for operators.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Two claims hold one device.
    #[error(
        "ResourceClaims {keeper} and {other} both hold device {device} of node {node}; {keeper} keeps it. {other} \
         is taken back unless its pod has a node already; then its devices are not prepared, and the pod must be deleted",
        keeper = .0.keeper, other = .0.other, device = .0.place.device, node = .0.place.node_name
    )]
    Conflict(Conflict),
    /// A claim has an unreadable allocation.
    #[error(
        "ResourceClaim {claim} holds something that cannot be read: {error}. Nothing is allocated on {} until \
         it is gone: upgrade the controller or delete the claim",
        if nodes.is_empty() { "the nodes that it names (none)" } else { nodes }
    )]
    Unreadable {
        /// `namespace/name` of the claim.
        claim: String,
        /// Uid of the claim.
        uid: String,
        /// The nodes of the allocation, as far as they are known.
        nodes: String,
        /// Why the allocation cannot be read.
        error: String,
    },
    /// A claim has an allocation that was made for another claim. Its devices count as held.
    #[error(
        "ResourceClaim {claim} has an allocation that was made for the claim with uid {made_for}: delete it"
    )]
    MadeForAnother {
        /// `namespace/name` of the claim.
        claim: String,
        /// Uid of the claim.
        uid: String,
        /// Uid of the other claim, from the resource handle.
        made_for: String,
    },
}

impl Problem {
    /// `namespace/name` and uid of the claim at fault.
    pub fn claim(&self) -> (&str, &str) {
        match self {
            Self::Conflict(conflict) => (&conflict.other, &conflict.other_uid),
            Self::Unreadable { claim, uid, .. } | Self::MadeForAnother { claim, uid, .. } => (claim, uid),
        }
    }

    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Conflict(_) => "DeviceHeldTwice",
            Self::Unreadable { .. } => "HoldingUnreadable",
            Self::MadeForAnother { .. } => "AllocationMadeForAnother",
        }
    }
}

/// Why a claim was not allocated. It then holds only recorded devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The claim does not fit on the node.
    #[error("{} on node {node}: {why}", match why { Unsuitable::Short(_) => "resources exhausted", _ => "cannot allocate" })]
    Unsuitable {
        /// Name of the node.
        node: String,
        /// Why the claim does not fit.
        why: Unsuitable,
    },
    /// The claim fits, but another claim of its pod does not.
    #[error("not allocated, because claim {claim} of the same pod does not fit on node {node}")]
    Together {
        /// Name of the node.
        node: String,
        /// `namespace/name` of the other claim.
        claim: String,
    },
    /// No candidate node has enough devices.
    #[error("resources exhausted on every ready node with devices of kind {} ({nodes}): {shortage}", shortage.kind)]
    Exhausted {
        /// Number of candidate nodes.
        nodes: usize,
        /// The devices of all candidate nodes.
        shortage: Box<Shortage>,
    },
    /// No ready node has devices of this kind.
    #[error("no ready node has a device of kind {kind}")]
    Nowhere {
        /// Kind of the devices.
        kind: String,
    },
    /// The class selects nodes by label, which this driver does not evaluate.
    #[error(
        "class {class} has suitableNodes by label: that works with allocationMode WaitForFirstConsumer only, make the claim again"
    )]
    SuitableNodesByLabel {
        /// Name of the class.
        class: String,
    },
    /// The claim, or another one of its pod, has an unreadable allocation.
    #[error(
        "the claim has an allocation that this release cannot read: upgrade the controller or delete the claim"
    )]
    HoldingUnreadable,
    /// The devices that were found are no longer available.
    #[error("the devices of node {node} have changed while they were searched; it is tried again")]
    Changed {
        /// Name of the node.
        node: String,
    },
    /// The resource handle cannot be written.
    #[error(transparent)]
    Handle(#[from] HandleError),
}

impl AllocateError {
    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unsuitable { why, .. } => why.reason(),
            Self::Together { .. } => "OtherClaimDoesNotFit",
            Self::Exhausted { .. } | Self::Nowhere { .. } | Self::Changed { .. } => "ResourcesExhausted",
            Self::SuitableNodesByLabel { .. } => "SuitableNodesUnsupported",
            Self::HoldingUnreadable => "HoldingUnreadable",
            Self::Handle(_) => "HandleInvalid",
        }
    }

    /// Whether only a change of the claim or its class can help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::SuitableNodesByLabel { .. } | Self::Handle(_))
    }
}
