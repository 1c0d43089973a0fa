//! Why a claim does not fit, in the words for users.

use std::collections::BTreeMap;
use std::fmt;

use crate::api::crd::CLAIM_DEVICES_MAX;
use crate::core::allocation::fit::Unfit;
use crate::core::allocation::work::{CALL_WORK_MAX, NODE_WORK_MAX};

/// Why a claim cannot be allocated on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsuitable {
    /// The driver has no NodeInventory for the node.
    #[error("no inventory: drayman node does not run here")]
    NoInventory,
    /// The node's inventory is not ready, for this reason.
    #[error("inventory not ready: {0}")]
    NotReady(String),
    /// A claim has an unreadable allocation on this node.
    #[error(
        "a claim holds devices here that this release cannot read, and has an event that says so: upgrade or delete the claim"
    )]
    Unreadable,
    /// The claim is already allocated on this other node.
    #[error("the claim is allocated on node {0}")]
    AllocatedElsewhere(String),
    /// There are not enough devices.
    #[error("{0}")]
    Short(Box<Shortage>),
    /// There may be enough devices, but the search exceeded its work limit.
    #[error(
        "the search for devices was given up: it takes more than {NODE_WORK_MAX} steps on one node, or {CALL_WORK_MAX} on all nodes \
         together; ask for fewer requests, selectors and constraints in one claim, or for fewer claims in one pod"
    )]
    TooMuchWork,
}

impl From<Unfit> for Unsuitable {
    fn from(_: Unfit) -> Self {
        Self::TooMuchWork
    }
}

impl Unsuitable {
    /// Reason of the event and label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoInventory => "NoInventory",
            Self::NotReady(_) => "InventoryNotReady",
            Self::Unreadable => "HoldingUnreadable",
            Self::AllocatedElsewhere(_) => "AllocatedElsewhere",
            Self::Short(_) => "ResourcesExhausted",
            Self::TooMuchWork => "TooManyRequests",
        }
    }
}

/// Counts of the devices of one kind, on one node or on all nodes together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Kind of the devices.
    pub kind: String,
    /// Devices of the kind that claims may use.
    pub total: usize,
    /// Of these, held by other claims. A device that is both held and unhealthy counts here.
    pub held: usize,
    /// Of these, unhealthy and not held.
    pub unhealthy: usize,
    /// Devices of the kind that claims may not use.
    pub other_mode: usize,
    /// Number of devices that the claim wants.
    pub wanted: usize,
    /// Number of devices for the pod's claims before this one.
    pub wanted_besides: usize,
    /// Available devices that do not match a selector, by reason.
    pub misfits: BTreeMap<Misfit, usize>,
    /// A further condition that is not met.
    pub requirement: Option<Requirement>,
}

/// Why a device does not match, with the selector's name in messages.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Misfit {
    /// The selector does not match.
    No(String),
    /// The selector fails on the device, with this error.
    Failed(String, String),
    /// The selector has not been evaluated on the device yet.
    Unjudged(String),
}

/// A condition that is not met although there are enough devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Requirement {
    /// Too few devices have an equal attribute.
    #[error("no {wanted} of the rest have an equal {attribute}")]
    Equal {
        /// Qualified name of the attribute.
        attribute: String,
        /// Number of devices that must have the same value.
        wanted: usize,
    },
    /// Each constraint can be met, but not all of them together.
    #[error("each constraint can be met, but not all of them together")]
    Together,
    /// A request for all matching devices, some of which are not available.
    #[error(
        "request {request} wants all {matching} that match, and {unavailable} of them are held or unhealthy"
    )]
    All {
        /// Name of the request.
        request: String,
        /// Number of matching devices.
        matching: usize,
        /// Number of matching devices that are not available.
        unavailable: usize,
    },
    /// More devices than a claim may have.
    #[error("the requests for all devices make {wanted}; a claim gets at most {CLAIM_DEVICES_MAX}")]
    TooMany {
        /// Number of devices of all requests.
        wanted: usize,
    },
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::No(selector) => write!(f, "do not match {selector}"),
            Self::Failed(selector, error) => write!(f, "cause an error in {selector} ({error})"),
            Self::Unjudged(selector) => write!(f, "not evaluated yet by {selector}"),
        }
    }
}

impl Shortage {
    /// Number of healthy, matching devices with a share left.
    pub fn free(&self) -> usize {
        let misfits: usize = self.misfits.values().sum();
        self.total.saturating_sub(self.held + self.unhealthy + misfits)
    }

    /// Adds the counts of another node.
    pub fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.held += other.held;
        self.unhealthy += other.unhealthy;
        self.other_mode += other.other_mode;
        for (misfit, number) in &other.misfits {
            *self.misfits.entry(misfit.clone()).or_default() += number;
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            total,
            held,
            unhealthy,
            other_mode,
            wanted,
            wanted_besides,
            misfits,
            requirement,
        } = self;
        if *total == 0 && *other_mode > 0 {
            return write!(
                f,
                "the devices of kind {kind} here are not for claims: see their mode in the node's configuration"
            );
        }
        if *total == 0 {
            return write!(f, "no device of kind {kind} on this node");
        }
        match (held, unhealthy) {
            (0, 0) if misfits.is_empty() => write!(f, "{total} of {total} free")?,
            (0, 0) => {}
            (0, _) => write!(f, "{unhealthy} of {total} unhealthy")?,
            (_, 0) => write!(f, "{held} of {total} held")?,
            (_, _) => write!(f, "{held} of {total} held, {unhealthy} unhealthy")?,
        }
        let mut separator = if held + unhealthy > 0 { ", " } else { "" };
        for (misfit, number) in misfits {
            write!(f, "{separator}{number} of {total} {misfit}")?;
            separator = ", ";
        }
        let free = self.free();
        if let Some(requirement) = requirement {
            return write!(f, ", {requirement}");
        }
        if free > 0 && held + unhealthy + misfits.len() > 0 {
            write!(f, ", {free} free")?;
        }
        if *wanted > 1 || free > 0 {
            write!(f, ", {wanted} wanted")?;
        }
        if *wanted_besides > 0 {
            write!(f, " besides {wanted_besides} for the pod's other claims")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(total: usize, held: usize, unhealthy: usize, wanted: usize, wanted_besides: usize) -> String {
        Shortage {
            kind: "test".into(),
            total,
            held,
            unhealthy,
            wanted,
            wanted_besides,
            ..Shortage::default()
        }
        .to_string()
    }

    #[test]
    fn a_shortage_says_how_many_there_are_and_what_became_of_them() {
        assert_eq!(text(3, 3, 0, 1, 0), "3 of 3 held");
        assert_eq!(text(8, 4, 4, 1, 0), "4 of 8 held, 4 unhealthy");
        assert_eq!(text(8, 4, 3, 2, 0), "4 of 8 held, 3 unhealthy, 1 free, 2 wanted");
        assert_eq!(text(2, 0, 2, 1, 0), "2 of 2 unhealthy");
        assert_eq!(text(2, 0, 0, 3, 0), "2 of 2 free, 3 wanted");
        assert_eq!(
            text(2, 1, 0, 1, 1),
            "1 of 2 held, 1 free, 1 wanted besides 1 for the pod's other claims"
        );
        assert_eq!(text(3, 3, 0, 2, 0), "3 of 3 held, 2 wanted");
    }

    #[test]
    fn a_missing_kind_and_one_of_another_mode_are_different_errors() {
        let none = Shortage {
            kind: "test".into(),
            wanted: 1,
            ..Shortage::default()
        };
        assert_eq!(none.to_string(), "no device of kind test on this node");
        let other = Shortage {
            other_mode: 2,
            ..none
        };
        assert!(other.to_string().contains("are not for claims"));
    }
}
