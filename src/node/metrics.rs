//! The companion's metrics. No decision depends on them.
//!
//! Labels are values from small fixed sets and the configured kinds, never the name of a claim, pod or device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use crate::core::distribution::Distribution;
pub use crate::core::prepare::inventory::{DeviceCategory, Owner};
pub use crate::core::slices::Omission;
pub use crate::node::kubelet::transport::{GrpcCalls, GrpcMethod, MethodMetrics};

/// Metrics of one companion.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Kubelet's gRPC calls.
    pub calls: Arc<GrpcCalls>,
    counted: Mutex<MetricsSnapshot>,
}

/// A snapshot of the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MetricsSnapshot {
    /// Device counts. A kind that was seen once stays, with 0 if it has no devices.
    pub devices: BTreeMap<DeviceCategory, u64>,
    /// Claims that hold devices on this node.
    pub held: u64,
    /// Claims in quarantine, a subset of `held`.
    pub quarantined: u64,
    /// Requests by kubelet, by [`Metrics::OPERATIONS`] and success.
    pub operations: BTreeMap<(&'static str, bool), u64>,
    /// Rejected requests by reason.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Events about the node by reason.
    pub events: BTreeMap<&'static str, u64>,
    /// The published ResourceSlices.
    pub slices: SliceCounts,
    /// Writes of ResourceSlices by [`Metrics::SLICE_WRITES`].
    pub slice_writes: BTreeMap<&'static str, u64>,
}

/// Counts of the published ResourceSlices; empty unless the cluster is in structured mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SliceCounts {
    /// Stored slices.
    pub slices: u64,
    /// Devices in the stored slices.
    pub devices: u64,
    /// Devices that are not published, by [`Omission`].
    pub omitted: BTreeMap<Omission, u64>,
}

impl Metrics {
    /// The operations that kubelet requests.
    pub const OPERATIONS: [&'static str; 4] = ["allocate", "prepare", "start", "unprepare"];

    /// The results of writes of ResourceSlices.
    pub const SLICE_WRITES: [&'static str; 9] = [
        "Conflict",
        "Done",
        "Failed",
        "Forbidden",
        "Invalid",
        "NameTaken",
        "Throttled",
        "TooLarge",
        "Webhook",
    ];

    /// A snapshot of the current values.
    pub fn counted(&self) -> MetricsSnapshot {
        self.lock().clone()
    }

    /// Counts a request by kubelet and, if it was rejected, the reason.
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

    /// Counts an event about the node.
    pub(super) fn event(&self, reason: &'static str) {
        *self.lock().events.entry(reason).or_default() += 1;
    }

    /// Sets the current numbers of published ResourceSlices and devices.
    pub(super) fn set_slices(&self, slices: SliceCounts) {
        self.lock().slices = slices;
    }

    /// Counts a write of a ResourceSlice by result.
    pub(super) fn slice_written(&self, result: &'static str) {
        *self.lock().slice_writes.entry(result).or_default() += 1;
    }

    /// Sets the current numbers of devices and claims.
    pub(super) fn set_devices(
        &self,
        devices: BTreeMap<DeviceCategory, u64>,
        held: usize,
        quarantined: usize,
    ) {
        let number = |count| u64::try_from(count).unwrap_or(u64::MAX);
        let mut counted = self.lock();
        for count in counted.devices.values_mut() {
            *count = 0;
        }
        counted.devices.extend(devices);
        counted.held = number(held);
        counted.quarantined = number(quarantined);
    }

    fn lock(&self) -> MutexGuard<'_, MetricsSnapshot> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_that_is_gone_stays_with_no_devices() {
        let metrics = Metrics::default();
        let group = DeviceCategory {
            kind: "camera".into(),
            healthy: true,
            owner: Owner::Nobody,
        };
        metrics.set_devices(BTreeMap::from([(group.clone(), 3)]), 2, 1);
        metrics.set_devices(BTreeMap::new(), 0, 0);
        let counted = metrics.counted();
        assert_eq!(counted.devices, BTreeMap::from([(group, 0)]));
        assert_eq!((counted.held, counted.quarantined), (0, 0));
    }

    #[test]
    fn refusals_are_counted_with_their_reason() {
        let metrics = Metrics::default();
        metrics.handled("prepare", None);
        metrics.handled("prepare", Some("DeviceHeld"));
        let counted = metrics.counted();
        assert_eq!(counted.operations[&("prepare", true)], 1);
        assert_eq!(counted.operations[&("prepare", false)], 1);
        assert_eq!(counted.refusals, BTreeMap::from([("DeviceHeld", 1)]));
    }
}
