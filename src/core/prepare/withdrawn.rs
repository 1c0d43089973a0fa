//! Devices that containers still hold of withdrawn extended resources, or of resources that lost devices.
//!
//! When a resource is renamed, or its devices are renamed or move to claims or another resource, existing containers keep running. Kubelet
//! lists their devices under the names it granted them by, so it is queried for these names until the containers have ended. Until then,
//! the devices are withheld under the same name and under any other name of the same device node.

use std::collections::BTreeMap;
use std::time::Duration;

use super::containers::{Containers, Shown};
use super::identity::share_a_node;
use super::inventory::{Devices, shortened};
use crate::api::crd::{Device, DeviceNumber};

/// Withdrawn extended resources, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WithdrawnDevices(BTreeMap<String, Left>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Left {
    /// The devices that it had, with their device numbers. All of them count as held until kubelet has shown its holders.
    devices: BTreeMap<String, Vec<DeviceNumber>>,
    containers: Containers,
}

impl WithdrawnDevices {
    /// Records that a resource has, or may have, lost these devices. `granted` are grants that kubelet may not show yet.
    pub fn left(
        &mut self,
        resource: &str,
        devices: BTreeMap<String, Vec<DeviceNumber>>,
        granted: Containers,
    ) {
        let left = self.0.entry(resource.to_owned()).or_default();
        left.devices.extend(devices);
        left.containers = granted;
    }

    /// Updates the holders of a resource from a snapshot of kubelet's view.
    pub fn seen(&mut self, resource: &str, shown: &Shown, now: Duration) {
        if let Some(left) = self.0.get_mut(resource) {
            left.containers.seen(shown, now);
        }
    }

    /// Drops each resource whose devices in use it still serves under the same names and device nodes: kubelet tracks those itself.
    pub fn settle(&mut self, serves: impl Fn(&str, &str, &[DeviceNumber]) -> bool) {
        self.0.retain(|resource, left| {
            if left.containers.known() {
                let mut held = left.containers.devices();
                held.any(|(device, numbers)| !serves(resource, device, numbers))
            } else {
                // A resource without devices may have had some that were unplugged since.
                let mut had = left.devices.iter();
                had.len() == 0 || had.any(|(device, numbers)| !serves(resource, device, numbers))
            }
        });
    }

    /// Whether no resource is withdrawn.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether kubelet has shown the holders of every resource.
    pub fn is_known(&self) -> bool {
        self.0.values().all(|left| left.containers.known())
    }

    /// The resource names to query kubelet for.
    pub fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// Whether a container holds, or may hold, a device under this name.
    pub fn has(&self, resource: &str, device: &str) -> bool {
        self.0.get(resource).is_some_and(|left| left.has(device))
    }

    /// Marks devices as unhealthy that containers hold, or may hold, under a name that does not serve them (any more). Devices with several
    /// shares are exempt: a holder of one share does not block the others.
    pub fn withhold(&self, devices: &mut Devices, serves: impl Fn(&str, &Device) -> bool) {
        for device in devices.values_mut() {
            if device.unhealthy.is_some() || device.shares.is_some_and(|shares| shares > 1) {
                continue;
            }
            let cause = self.0.iter().find_map(|(resource, left)| {
                if !serves(resource, device)
                    && let Some(why) = left.why(&device.name)
                {
                    return Some(format!(
                        "{why} as {resource}, by which it no longer leaves this node; it is free when that has ended"
                    ));
                }
                let (name, why) = left.why_by_another_name(device)?;
                Some(format!(
                    "{why} as {name} of {resource}, which is the same device node; it is free when that has ended"
                ))
            });
            device.unhealthy = cause.map(shortened);
        }
    }
}

impl Left {
    /// Whether a container holds, or may hold, a device under this name.
    fn has(&self, device: &str) -> bool {
        self.containers.hold(device) || (!self.containers.known() && self.devices.contains_key(device))
    }

    fn why(&self, device: &str) -> Option<String> {
        if !self.has(device) {
            return None;
        }
        Some(match self.containers.holder(device) {
            Some(holder) => format!("{holder} has it"),
            None => "kubelet does not show yet whether a container has it".to_owned(),
        })
    }

    /// Another name under which a container holds, or may hold, the device.
    fn why_by_another_name(&self, device: &Device) -> Option<(&str, String)> {
        let held = self.containers.devices().chain(
            self.devices
                .iter()
                .map(|(name, numbers)| (name.as_str(), numbers.as_slice())),
        );
        let mut same = held.filter(|(name, numbers)| {
            *name != device.name && self.has(name) && share_a_node(numbers, &device.device_numbers)
        });
        same.find_map(|(name, _)| Some((name, self.why(name)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::containers::Container;
    use super::*;

    const OLD: &str = "example.com/old";

    fn shown(devices: &[&str]) -> Shown {
        let container = Container {
            namespace: "default".into(),
            pod: "p".into(),
            container: "main".into(),
        };
        Shown {
            pods: [("default".to_owned(), "p".to_owned())].into(),
            listed: devices
                .iter()
                .map(|device| ((*device).to_owned(), container.clone()))
                .collect(),
            ..Shown::default()
        }
    }

    fn unnumbered(devices: &[&str]) -> BTreeMap<String, Vec<DeviceNumber>> {
        let unnumbered = |device: &&str| ((*device).to_owned(), Vec::new());
        devices.iter().map(unnumbered).collect()
    }

    fn left(devices: &[&str], granted: Containers) -> WithdrawnDevices {
        let mut former = WithdrawnDevices::default();
        former.left(OLD, unnumbered(devices), granted);
        former
    }

    fn devices(names: &[&str], shares: Option<u32>) -> Devices {
        let device = |name: &&str| {
            let device = Device {
                name: (*name).into(),
                shares,
                ..Device::default()
            };
            ((*name).to_owned(), device)
        };
        names.iter().map(device).collect()
    }

    /// The withheld devices among `x`, `y` and `z`.
    fn withheld(former: &WithdrawnDevices, serves: bool) -> Vec<String> {
        let mut all = devices(&["x", "y", "z"], None);
        former.withhold(&mut all, |_, _| serves);
        let withheld = all.values().filter(|device| device.unhealthy.is_some());
        withheld.map(|device| device.name.clone()).collect()
    }

    #[test]
    fn until_kubelet_has_shown_who_has_what_everything_that_the_resource_had_is_withheld() {
        let mut former = left(&["x", "y"], Containers::default());
        assert!(!former.is_known() && former.has(OLD, "y") && !former.has(OLD, "z"));
        assert_eq!(withheld(&former, false), ["x", "y"]);
        assert_eq!(withheld(&former, true), Vec::<String>::new(), "it serves them");
        former.settle(|_, _, _| false);
        assert!(!former.is_empty());
        former.seen(OLD, &shown(&["x"]), Duration::ZERO);
        former.settle(|_, _, _| false);
        assert!(former.is_known());
        assert_eq!(withheld(&former, false), ["x"]);
        former.seen(OLD, &shown(&[]), Duration::ZERO);
        former.settle(|_, _, _| false);
        assert!(former.is_empty());
        assert_eq!(withheld(&former, false), Vec::<String>::new());
    }

    #[test]
    fn what_the_resource_still_serves_is_kubelets_own_and_need_not_be_asked_for() {
        let mut former = left(&["x"], Containers::default());
        former.seen(OLD, &shown(&["x", "y"]), Duration::ZERO);
        former.settle(|_, device, _| device == "x");
        assert_eq!(former.names(), [OLD], "y has left it");
        former.settle(|_, _, _| true);
        assert!(former.is_empty());
        // Without a change, kubelet need not be queried at all.
        let mut same = left(&["x"], Containers::default());
        same.settle(|_, _, _| true);
        assert!(same.is_empty());
        let mut unplugged = left(&[], Containers::default());
        unplugged.settle(|_, _, _| true);
        assert!(!unplugged.is_empty());
    }

    #[test]
    fn a_grant_that_kubelet_does_not_show_yet_counts_and_a_name_that_is_left_again_is_asked_for_anew() {
        let mut granted = Containers::default();
        granted.allocated([("x", &[][..])], Duration::ZERO);
        let mut former = left(&["x", "y"], granted);
        former.seen(OLD, &shown(&[]), Duration::from_secs(29));
        assert_eq!(withheld(&former, false), ["x"]);
        former.left(OLD, unnumbered(&["z"]), Containers::default());
        assert_eq!(withheld(&former, false), ["x", "y", "z"]);
    }

    #[test]
    fn the_reason_names_the_container_and_fits_and_a_shared_device_is_in_nobodys_way() {
        let mut former = left(&["x"], Containers::default());
        former.seen(OLD, &shown(&["x"]), Duration::ZERO);
        let mut all = devices(&["x"], Some(1));
        former.withhold(&mut all, |_, _| false);
        let why = all["x"].unhealthy.clone().unwrap();
        assert!(
            why.contains("container main of pod default/p") && why.contains(OLD),
            "{why}"
        );
        assert!(why.len() <= crate::api::crd::TEXT_MAX);
        let mut all = devices(&["x"], Some(110));
        former.withhold(&mut all, |_, _| false);
        assert_eq!(all["x"].unhealthy, None);
    }
}
