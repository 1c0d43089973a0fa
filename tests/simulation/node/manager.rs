//! What kubelet's device manager knows (`pkg/kubelet/cm/devicemanager` of 1.30): in memory, in its file, and of its containers.

use std::collections::{BTreeMap, BTreeSet};

use drayman::core::prepare::names::device_of_plugin_id;
use drayman::core::prepare::plan::PluginDevice;

pub(super) type Devices = BTreeSet<String>;

/// The device manager of a kubelet, and the containers that it has given devices to.
#[derive(Clone, Debug, Default)]
pub(super) struct Manager {
    pub(super) since: u64,
    /// The list that came last; empty while nobody is registered.
    pub(super) offered: BTreeMap<String, bool>,
    /// The list that the companion has sent last, and whether it is still on its way.
    pub(super) sent: Option<Vec<PluginDevice>>,
    pub(super) on_its_way: bool,
    /// By the uid of the pod: answered by Allocate, and not noted yet.
    pub(super) asked: BTreeMap<String, Devices>,
    /// Pods whose grants a companion has answered that has gone before they were noted: the next one may have missed them.
    pub(super) missed: BTreeSet<String>,
    pub(super) granted: BTreeMap<String, Devices>,
    /// Pods that this process has let in.
    pub(super) admitted: BTreeSet<String>,
    /// `kubelet_internal_checkpoint`.
    pub(super) file: BTreeMap<String, Devices>,
    /// The pods' directories.
    pub(super) directories: BTreeSet<String>,
    /// Containers. They outlive kubelet, and not the node.
    pub(super) running: BTreeMap<String, Devices>,
    /// When those have ended that were told to.
    pub(super) ends: BTreeMap<String, u64>,
}

impl Manager {
    /// The companion is gone: kubelet grants nothing more.
    pub(super) fn disconnect(&mut self) {
        self.missed.extend(self.asked.keys().cloned());
        self.offered.clear();
        self.sent = None;
    }

    /// The process ends.
    pub(super) fn stop(&mut self) {
        self.disconnect();
        self.asked.clear();
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

    /// A pod's containers have ended and it is let go.
    pub(super) fn let_go(&mut self, pod: &str) {
        self.directories.remove(pod);
        self.missed.remove(pod);
        self.admitted.remove(pod);
        self.asked.remove(pod);
    }

    /// Whether a container has been told to end, and takes its time.
    pub(super) fn is_ending(&self, pod: &str, now: u64) -> bool {
        self.ends.get(pod).is_some_and(|end| now < *end)
    }

    pub(super) fn has_ended(&mut self, pod: &str) {
        self.running.remove(pod);
        self.ends.remove(pod);
    }

    pub(super) fn is_asking(&self, pod: &str) -> bool {
        self.asked.contains_key(pod)
    }

    /// `UpdateAllocatedDevices`: what pods had that are not there any more. The file stays as it is until the next grant.
    pub(super) fn forget_others(&mut self, active: &BTreeSet<String>) {
        self.granted.retain(|pod, _| active.contains(pod));
    }

    /// Whether kubelet takes a device for one that it may grant to containers.
    pub(super) fn offers(&self, device: &str) -> bool {
        let mut offered = self.offered.iter();
        offered.any(|(id, healthy)| *healthy && device_of_plugin_id(id) == device)
    }

    pub(super) fn free(&self) -> Vec<String> {
        let taken: BTreeSet<&String> = self
            .granted
            .values()
            .chain(self.asked.values())
            .flatten()
            .collect();
        let healthy = self.offered.iter().filter(|(_, healthy)| **healthy);
        healthy
            .map(|(device, _)| device.clone())
            .filter(|device| !taken.contains(device))
            .collect()
    }

    pub(super) fn is_empty(&self, active: &BTreeSet<String>) -> bool {
        let granted = self.granted.keys().any(|pod| active.contains(pod));
        self.asked.is_empty() && self.running.is_empty() && self.directories.is_empty() && !granted
    }
}
