//! What the companion has counted, for those who watch from outside. Nothing is decided by it.
//!
//! Words of small fixed sets and the kinds of the configuration are what is counted by; never the name of a claim, a pod or a device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::core::prepare::census::Group;
use crate::node::kubelet::transport::GrpcCalls;

/// The figures of one companion.
#[derive(Debug, Default)]
pub struct Figures {
    /// The calls of kubelet.
    pub calls: Arc<GrpcCalls>,
    counted: Mutex<Counted>,
}

/// What was counted at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The devices. A kind that was here once stays, if only with 0.
    pub devices: BTreeMap<Group, u64>,
    /// Claims that hold something on this node.
    pub held: u64,
    /// Those of them that are in quarantine.
    pub quarantined: u64,
    /// What kubelet asked for, by [`Figures::OPERATIONS`], and whether it was done.
    pub operations: BTreeMap<(&'static str, bool), u64>,
    /// Why something was refused.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Events about the node, by reason.
    pub events: BTreeMap<&'static str, u64>,
}

impl Figures {
    /// What kubelet asks for.
    pub const OPERATIONS: [&'static str; 4] = ["allocate", "prepare", "start", "unprepare"];

    /// What has been counted so far.
    pub fn counted(&self) -> Counted {
        self.lock().clone()
    }

    /// Something that kubelet asked for was done, or refused for a reason.
    pub(super) fn handled(&self, operation: &'static str, refused: Option<&'static str>) {
        let mut counted = self.lock();
        *counted
            .operations
            .entry((operation, refused.is_none()))
            .or_default() += 1;
        if let Some(reason) = refused {
            *counted.refusals.entry(reason).or_default() += 1;
        }
    }

    /// People are told something of the node.
    pub(super) fn told(&self, reason: &'static str) {
        *self.lock().events.entry(reason).or_default() += 1;
    }

    /// What there is now.
    pub(super) fn stock(&self, devices: BTreeMap<Group, u64>, held: usize, quarantined: usize) {
        let number = |count| u64::try_from(count).unwrap_or(u64::MAX);
        let mut counted = self.lock();
        for count in counted.devices.values_mut() {
            *count = 0;
        }
        counted.devices.extend(devices);
        counted.held = number(held);
        counted.quarantined = number(quarantined);
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::prepare::census::Owner;

    #[test]
    fn a_kind_that_is_gone_stays_with_no_devices() {
        let figures = Figures::default();
        let group = Group {
            kind: "camera".into(),
            healthy: true,
            owner: Owner::Nobody,
        };
        figures.stock(BTreeMap::from([(group.clone(), 3)]), 2, 1);
        figures.stock(BTreeMap::new(), 0, 0);
        let counted = figures.counted();
        assert_eq!(counted.devices, BTreeMap::from([(group, 0)]));
        assert_eq!((counted.held, counted.quarantined), (0, 0));
    }

    #[test]
    fn what_is_refused_is_counted_with_its_reason_too() {
        let figures = Figures::default();
        figures.handled("prepare", None);
        figures.handled("prepare", Some("DeviceHeld"));
        let counted = figures.counted();
        assert_eq!(counted.operations[&("prepare", true)], 1);
        assert_eq!(counted.operations[&("prepare", false)], 1);
        assert_eq!(counted.refusals, BTreeMap::from([("DeviceHeld", 1)]));
    }
}
