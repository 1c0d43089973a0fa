//! The device manager of kubelet (`pkg/kubelet/cm/devicemanager` of 1.30): its memory, its checkpoint and its containers.

use std::collections::{BTreeMap, BTreeSet};

use drayman::core::names::device_of_plugin_id;
use drayman::core::prepare::inventory::PluginDevice;

pub(super) type Devices = BTreeSet<String>;

#[derive(Clone, Debug, Default)]
pub(super) struct DeviceManager {
    pub(super) since: u64,
    /// The last received device list; empty without a registered plugin.
    pub(super) advertised: BTreeMap<String, bool>,
    /// The last sent device list, and whether it is in flight.
    pub(super) sent: Option<Vec<PluginDevice>>,
    pub(super) in_flight: bool,
    /// By pod UID, answers of Allocate that are not recorded yet.
    pub(super) unrecorded: BTreeMap<String, Devices>,
    /// Pods with unrecorded grants of an earlier companion, which the current one may not know.
    pub(super) missed: BTreeSet<String>,
    pub(super) granted: BTreeMap<String, Devices>,
    /// Pods admitted by this process.
    pub(super) admitted: BTreeSet<String>,
    /// `kubelet_internal_checkpoint`.
    pub(super) file: BTreeMap<String, Devices>,
    /// Pod directories.
    pub(super) directories: BTreeSet<String>,
    /// Containers by pod UID. They survive a kubelet restart but not a reboot.
    pub(super) running: BTreeMap<String, Devices>,
    /// The end times of terminating containers.
    pub(super) ends: BTreeMap<String, u64>,
}

impl DeviceManager {
    /// Handles the end of the companion: no more grants.
    pub(super) fn disconnect(&mut self) {
        self.missed.extend(self.unrecorded.keys().cloned());
        self.advertised.clear();
        self.sent = None;
    }

    /// Stops the process.
    pub(super) fn stop(&mut self) {
        self.disconnect();
        self.unrecorded.clear();
        self.admitted.clear();
        self.granted = self.file.clone();
    }

    pub(super) fn lose_power(&mut self) {
        self.running.clear();
        self.ends.clear();
    }

    pub(super) fn start(&mut self, now: u64) {
        self.since = now;
    }

    /// Removes a pod whose containers have ended.
    pub(super) fn remove_pod(&mut self, pod: &str) {
        self.directories.remove(pod);
        self.missed.remove(pod);
        self.admitted.remove(pod);
        self.unrecorded.remove(pod);
    }

    /// Whether a container is still terminating.
    pub(super) fn is_ending(&self, pod: &str, now: u64) -> bool {
        self.ends.get(pod).is_some_and(|end| now < *end)
    }

    pub(super) fn has_ended(&mut self, pod: &str) {
        self.running.remove(pod);
        self.ends.remove(pod);
    }

    pub(super) fn is_admitting(&self, pod: &str) -> bool {
        self.unrecorded.contains_key(pod)
    }

    /// `UpdateAllocatedDevices`: drops grants of deleted pods. The file stays unchanged until the next grant.
    pub(super) fn forget_others(&mut self, active: &BTreeSet<String>) {
        self.granted.retain(|pod, _| active.contains(pod));
    }

    /// Whether kubelet may grant a device to containers.
    pub(super) fn advertises(&self, device: &str) -> bool {
        let mut advertised = self.advertised.iter();
        advertised.any(|(id, healthy)| *healthy && device_of_plugin_id(id) == device)
    }

    pub(super) fn free(&self) -> Vec<String> {
        let taken: BTreeSet<&String> = self
            .granted
            .values()
            .chain(self.unrecorded.values())
            .flatten()
            .collect();
        let healthy = self.advertised.iter().filter(|(_, healthy)| **healthy);
        healthy
            .map(|(device, _)| device.clone())
            .filter(|device| !taken.contains(device))
            .collect()
    }

    pub(super) fn is_empty(&self, active: &BTreeSet<String>) -> bool {
        let granted = self.granted.keys().any(|pod| active.contains(pod));
        self.unrecorded.is_empty() && self.running.is_empty() && self.directories.is_empty() && !granted
    }
}
