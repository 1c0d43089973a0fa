//! What can be wrong with the books, for the operator, and with an allocation, for the user.

use crate::api::handle::HandleError;
use crate::core::allocation::holdings::Conflict;
use crate::core::allocation::unsuitable::{Shortage, Unsuitable};

/// Something that is wrong with what claims hold, for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Two claims hold one device.
    #[error(
        "ResourceClaims {keeper} and {other} both hold device {device} of node {node}; {keeper} keeps it. {other} \
         is taken back unless its pod has a node already; then its devices are not prepared, and the pod must be deleted",
        keeper = .0.keeper, other = .0.other, device = .0.place.device, node = .0.place.node_name
    )]
    Conflict(Conflict),
    /// A claim has an allocation that cannot be read.
    #[error(
        "ResourceClaim {claim} holds something that cannot be read: {error}. Nothing is allocated on {} until \
         it is gone: upgrade the controller or delete the claim",
        if nodes.is_empty() { "the nodes that it names (none)" } else { nodes }
    )]
    Unreadable {
        /// The claim.
        claim: String,
        /// Its uid.
        uid: String,
        /// The nodes that its allocation names.
        nodes: String,
        /// What is wrong.
        error: String,
    },
    /// A claim has an allocation that was made for another claim. Its devices count as held.
    #[error(
        "ResourceClaim {claim} has an allocation that was made for the claim with uid {made_for}: delete it"
    )]
    MadeForAnother {
        /// The claim.
        claim: String,
        /// Its uid.
        uid: String,
        /// The uid in its resource handle.
        made_for: String,
    },
}

impl Problem {
    /// The claim at fault, as `namespace/name`, and its uid.
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

/// Why a claim was not allocated. It holds nothing then, unless that is recorded in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// It does not fit on the node.
    #[error("{} on node {node}: {why}", match why { Unsuitable::Short(_) => "resources exhausted", _ => "cannot allocate" })]
    Unsuitable {
        /// The node.
        node: String,
        /// Why.
        why: Unsuitable,
    },
    /// It would fit, but another claim of the pod does not.
    #[error("not allocated, because claim {claim} of the same pod does not fit on node {node}")]
    Together {
        /// The node.
        node: String,
        /// The other claim.
        claim: String,
    },
    /// No node can have it.
    #[error("resources exhausted on every ready node with devices of kind {} ({nodes}): {shortage}", shortage.kind)]
    Exhausted {
        /// Nodes that were looked at.
        nodes: usize,
        /// Their devices together.
        shortage: Box<Shortage>,
    },
    /// No node has such devices at all.
    #[error("no ready node has a device of kind {kind}")]
    Nowhere {
        /// The kind.
        kind: String,
    },
    /// The class restricts the nodes by their labels, which this driver does not know.
    #[error(
        "class {class} has suitableNodes by label: that works with allocationMode WaitForFirstConsumer only, make the claim again"
    )]
    SuitableNodesByLabel {
        /// The class.
        class: String,
    },
    /// The claim, or another one of its pod, has an allocation already, and it cannot be read.
    #[error(
        "the claim has an allocation that this release cannot read: upgrade the controller or delete the claim"
    )]
    HoldingUnreadable,
    /// What was found was not to be had any more when it was.
    #[error("the devices of node {node} have changed while they were searched; it is tried again")]
    Changed {
        /// The node.
        node: String,
    },
    /// The handle cannot be written.
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
