//! The reasons for refusing a request of kubelet.

use super::claim_uid::{ClaimUid, ClaimUidError};
use super::prepared_claims::Entry;
use crate::api::handle::HandleError;

/// Why the node refuses a request. Each message is for the user who reads the pod's events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The uid is invalid.
    #[error(transparent)]
    ClaimUid(#[from] ClaimUidError),
    /// The namespace or the name is invalid.
    #[error("{field} {value:?} of the claim is not a name that Kubernetes gives")]
    ClaimName {
        /// `namespace` or `name`.
        field: &'static str,
        /// The invalid value, truncated.
        value: String,
    },
    /// The resource handle was not written by this driver's controller.
    #[error("{0}; it must be as drayman's controller wrote it")]
    Handle(#[from] HandleError),
    /// The handle was written for another claim.
    #[error(
        "the resource handle is of claim uid {found:?}, not of {expected}: it was not written for this claim"
    )]
    OtherClaim {
        /// The requested claim.
        expected: String,
        /// The claim in the handle.
        found: String,
    },
    /// The handle was written for another node.
    #[error(
        "the devices were allocated on node {found:?}, this is node {expected:?}: delete the pod so that it is scheduled anew"
    )]
    OtherNode {
        /// This node.
        expected: String,
        /// The node in the handle.
        found: String,
    },
    /// The handle was written for an earlier node of the same name.
    #[error(
        "the devices were allocated on an earlier node of this name (uid {found:?}, this one has {expected:?}): delete the pod and its claim so that they are allocated anew"
    )]
    EarlierNode {
        /// The uid of this node.
        expected: String,
        /// The uid in the handle.
        found: String,
    },
    /// The uid of this node is not known yet.
    #[error("the API server has not yet told the uid of node {0:?}; it is asked until it does")]
    NodeUnknown(String),
    /// The handle names no device.
    #[error("no device is named")]
    NoDevice,
    /// The same device is named twice.
    #[error("device {0:?} is named twice")]
    Twice(String),
    /// The node has no such device.
    #[error(
        "device {0:?} is not on this node (any more): plug it in again, or delete the pod so that another is allocated"
    )]
    Gone(String),
    /// The device is not offered through this API.
    #[error(
        "device {device:?} is of kind {kind:?}, which this node's configuration gives to {given_to}, not to {asked_by}"
    )]
    WrongDoor {
        /// The device.
        device: String,
        /// Its kind.
        kind: String,
        /// The API that its mode permits.
        given_to: &'static str,
        /// The API it was requested through.
        asked_by: &'static str,
    },
    /// The device is unhealthy.
    #[error("device {device:?} is unhealthy: {reason}")]
    Unhealthy {
        /// The device.
        device: String,
        /// The cause.
        reason: String,
    },
    /// A claim holds the device.
    #[error("device {device:?} is held by {holder} until it is unprepared")]
    Held {
        /// The device.
        device: String,
        /// The holding claim.
        holder: String,
    },
    /// All shares of the device are held.
    #[error(
        "device {device:?} has {shares} shares, which are all held: by {holder} and others, until one is unprepared"
    )]
    AllShares {
        /// The device.
        device: String,
        /// The number of shares.
        shares: u32,
        /// One of the holders.
        holder: String,
    },
    /// A container of the runtime still uses the device.
    #[error("device {device:?} is still in use by {holder}; it is free when that container has ended")]
    StillUsed {
        /// The device.
        device: String,
        /// The container.
        holder: String,
    },
    /// A container holds the device as an extended resource.
    #[error(
        "device {device:?} is in use by {holder}, which got it as an extended resource; it is the claim's when that container has ended"
    )]
    InContainer {
        /// The device.
        device: String,
        /// The container.
        holder: String,
    },
    /// The devices that containers hold are unknown.
    #[error(
        "device {device:?} may be in use as an extended resource: kubelet's pod resources API does not say ({problem})"
    )]
    ContainersUnknown {
        /// The device.
        device: String,
        /// Why they are unknown.
        problem: String,
    },
    /// The device is allocated to a claim.
    #[error("device {device:?} is allocated to {holder}, which has not begun to use it")]
    Allocated {
        /// The device.
        device: String,
        /// The claim.
        holder: String,
    },
    /// A claim with unknown devices may hold the device.
    #[error(
        "the checkpoint of this node was lost, and it is not known yet which devices {holder} has: the API server is asked; if it cannot tell and no container uses the claim, run `drayman node release {uid}` on the node"
    )]
    Unaccounted {
        /// The claim.
        holder: String,
        /// Uid of the claim.
        uid: String,
    },
    /// The claim is prepared with other devices.
    #[error(
        "the claim is prepared with {held}, the resource handle now names {named}: it must be unprepared first"
    )]
    Changed {
        /// The devices it holds.
        held: String,
        /// The devices in the handle.
        named: String,
    },
    /// Two container edits use the same path.
    #[error(
        "{first} and {second} would both be {container_path} in a container, which can see only one of them: write {{device}} or {{n}} into containerPaths of the kind, or ask for one device at a time"
    )]
    SamePath {
        /// The path in the container.
        container_path: String,
        /// The first edit: `device node` or `mount of`, and its path on the node.
        first: String,
        /// The second edit, in the same form.
        second: String,
    },
    /// The extended resource does not exist.
    #[error("this node has no extended resource {0:?}")]
    NoResource(String),
    /// The device does not belong to the extended resource.
    #[error("device {device:?} does not belong to the extended resource {resource:?}")]
    OtherResource {
        /// The device.
        device: String,
        /// The resource.
        resource: String,
    },
}

impl Refusal {
    /// The error for a claim whose devices are unknown.
    pub(super) fn unaccounted(uid: &ClaimUid, entry: &Entry) -> Self {
        Self::Unaccounted {
            holder: entry.describe(uid),
            uid: uid.to_string(),
        }
    }

    /// CamelCase reason from a small fixed set, for the event and the metric label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::ClaimUid(_) | Self::ClaimName { .. } => "InvalidClaim",
            Self::Handle(_) | Self::OtherClaim { .. } | Self::NoDevice | Self::Twice(_) => "InvalidHandle",
            Self::OtherNode { .. } | Self::EarlierNode { .. } => "WrongNode",
            Self::NodeUnknown(_) => "NodeUnknown",
            Self::Gone(_) => "DeviceGone",
            Self::WrongDoor { .. } => "WrongMode",
            Self::Unhealthy { .. } => "DeviceUnhealthy",
            Self::Held { .. }
            | Self::AllShares { .. }
            | Self::StillUsed { .. }
            | Self::InContainer { .. }
            | Self::Allocated { .. } => "DeviceHeld",
            Self::ContainersUnknown { .. } => "PodResourcesUnavailable",
            Self::Unaccounted { .. } => "HoldingsUnknown",
            Self::Changed { .. } => "AllocationChanged",
            Self::SamePath { .. } => "ContainerPathTaken",
            Self::NoResource(_) | Self::OtherResource { .. } => "InvalidResource",
        }
    }

    /// Whether the request itself is invalid, so that it can never succeed on this node.
    pub fn is_invalid_request(&self) -> bool {
        match self {
            Self::ClaimUid(_)
            | Self::ClaimName { .. }
            | Self::Handle(_)
            | Self::OtherClaim { .. }
            | Self::OtherNode { .. }
            | Self::NoDevice
            | Self::Twice(_)
            | Self::NoResource(_)
            | Self::OtherResource { .. } => true,
            Self::EarlierNode { .. }
            | Self::NodeUnknown(_)
            | Self::Gone(_)
            | Self::WrongDoor { .. }
            | Self::Unhealthy { .. }
            | Self::Held { .. }
            | Self::AllShares { .. }
            | Self::StillUsed { .. }
            | Self::InContainer { .. }
            | Self::ContainersUnknown { .. }
            | Self::Allocated { .. }
            | Self::Unaccounted { .. }
            | Self::Changed { .. }
            | Self::SamePath { .. } => false,
        }
    }
}
