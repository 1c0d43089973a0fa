//! Why a claim does not fit, as a user shall read it.

use std::collections::BTreeMap;
use std::fmt;

use crate::api::crd::CLAIM_DEVICES_MAX;
use crate::core::allocation::fit::Unfit;
use crate::core::allocation::work::{CALL_WORK_MAX, NODE_WORK_MAX};

/// Why a claim cannot be allocated on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsuitable {
    /// No NodeInventory of the driver describes the node.
    #[error("no inventory: drayman node does not run here")]
    NoInventory,
    /// The node's inventory says that it is not ready.
    #[error("inventory not ready: {0}")]
    NotReady(String),
    /// A claim holds something here that cannot be read.
    #[error(
        "a claim holds devices here that this release cannot read, and has an event that says so: upgrade or delete the claim"
    )]
    Unreadable,
    /// The claim is allocated already, and elsewhere.
    #[error("the claim is allocated on node {0}")]
    AllocatedElsewhere(String),
    /// Not enough devices.
    #[error("{0}")]
    Short(Box<Shortage>),
    /// There may be enough devices, but the search for a division of them was given up.
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

/// How the devices of one kind stand on one node, or on all nodes together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    /// The kind.
    pub kind: String,
    /// Devices of the kind that may leave through claims.
    pub total: usize,
    /// Of these, held by other claims. A device that is both held and unhealthy counts here.
    pub held: usize,
    /// Of these, unhealthy and held by nobody.
    pub unhealthy: usize,
    /// Devices of the kind that leave the node in another way.
    pub other_mode: usize,
    /// Devices that the claim wants.
    pub wanted: usize,
    /// Devices that the pod's other claims want, as far as they are met before this one.
    pub wanted_besides: usize,
    /// Devices that could be given and that a selector does not want.
    pub misfits: BTreeMap<Misfit, usize>,
    /// What else is not met.
    pub requirement: Option<Requirement>,
}

/// Why a device is not wanted; which selector says so, in words for people.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Misfit {
    /// It does not match.
    No(String),
    /// The selector cannot be evaluated on it, and why.
    Failed(String, String),
    /// The selector was not evaluated on it yet.
    Unjudged(String),
}

/// What is not met although there are enough devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Requirement {
    /// An equal attribute.
    #[error("no {wanted} of the rest have an equal {attribute}")]
    Equal {
        /// The attribute.
        attribute: String,
        /// How many devices must have the same.
        wanted: usize,
    },
    /// Every constraint could be met, but not all of them at once.
    #[error("each constraint can be met, but not all of them together")]
    Together,
    /// All matching devices.
    #[error(
        "request {request} wants all {matching} that match, and {unavailable} of them are held or unhealthy"
    )]
    All {
        /// The request.
        request: String,
        /// How many match.
        matching: usize,
        /// How many of these cannot be had.
        unavailable: usize,
    },
    /// More devices than a claim may have.
    #[error("the requests for all devices make {wanted}; a claim gets at most {CLAIM_DEVICES_MAX}")]
    TooMany {
        /// How many they are.
        wanted: usize,
    },
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::No(selector) => write!(f, "do not match {selector}"),
            Self::Failed(selector, error) => write!(f, "cannot be judged by {selector} ({error})"),
            Self::Unjudged(selector) => write!(f, "not judged yet by {selector}"),
        }
    }
}

impl Shortage {
    /// Devices that are healthy and wanted, and of which something is left.
    pub fn free(&self) -> usize {
        let misfits: usize = self.misfits.values().sum();
        self.total.saturating_sub(self.held + self.unhealthy + misfits)
    }

    /// Counts another node's devices in.
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
    fn a_kind_that_is_not_there_and_one_of_the_other_door_are_told_apart() {
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
