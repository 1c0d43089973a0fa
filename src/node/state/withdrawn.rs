//! Withdrawn extended resources: withholds devices that containers still hold of resources the configuration has changed or removed.

use std::collections::BTreeMap;

use tracing::warn;

use super::{NodeState, Resource};
use crate::api::crd::{Device, DeviceNumber};
use crate::core::prepare::identity::{are_among, share_a_node};
use crate::core::prepare::inventory::Devices;
use crate::node::driver::NodeDriver;

/// Devices that a resource has lost, with their former device numbers.
type Lost = BTreeMap<String, Vec<DeviceNumber>>;

fn lost(device: &Device) -> (String, Vec<DeviceNumber>) {
    (device.name.clone(), device.device_numbers.to_vec())
}

fn serves(resource: &Resource, device: &Device) -> bool {
    resource.offered.kind == device.kind && device.mode.serves_extended_resource()
}

impl<D: NodeDriver> NodeState<D> {
    /// Records that a resource is withdrawn or redefined.
    pub(super) fn leave(&mut self, name: &str) {
        let Some(resource) = self.resources.get(name) else {
            return;
        };
        let devices = self.inventory.values().filter(|device| serves(resource, device));
        let devices: Lost = devices.map(lost).collect();
        let is_told = !devices.is_empty();
        self.leave_with(name, devices, is_told);
    }

    /// Records, before `found` becomes current, which remaining resources lose devices. A device that is missing or has other device nodes
    /// is also lost: containers still have the former nodes, which may belong to another device now.
    pub(super) fn leave_resources(&mut self, found: &Devices) {
        let mut left: Vec<(String, Lost, bool)> = Vec::new();
        for (name, resource) in self.resources.iter() {
            let gone: Vec<&Device> = self
                .devices
                .values()
                .filter(|before| {
                    serves(resource, before)
                        && found.get(&before.name).is_none_or(|after| {
                            !serves(resource, after)
                                || !are_among(&before.device_numbers, &after.device_numbers)
                        })
                })
                .collect();
            if gone.is_empty() {
                continue;
            }
            let is_there = |before: &&Device| {
                found.contains_key(&before.name)
                    || found
                        .values()
                        .any(|after| share_a_node(&before.device_numbers, &after.device_numbers))
            };
            let is_told = gone.iter().any(is_there);
            left.push((name.clone(), gone.into_iter().map(lost).collect(), is_told));
        }
        for (name, lost, is_told) in left {
            self.leave_with(&name, lost, is_told);
        }
    }

    fn leave_with(&mut self, name: &str, devices: Lost, is_told: bool) {
        if self.grants.is_none() || !self.withholds_former {
            if is_told {
                warn!(
                    resource = name,
                    reason = "PodResourcesUnavailable",
                    "the resource is withdrawn or has lost devices, and kubelet's pod-resources directory is not here, so that nobody knows whether containers still have them"
                );
            }
            return;
        }
        let granted = self.granted.get(name).cloned().unwrap_or_default();
        self.former.change().left(name, devices, granted);
    }

    /// Drops the resources that kubelet need not be queried for.
    pub(super) fn settle_former(&mut self) {
        let (resources, devices) = (&self.resources, &self.devices);
        self.former.change().settle(|name, device, numbers| {
            let resource = resources.get(name);
            let device = devices.get(device);
            resource.zip(device).is_some_and(|(resource, device)| {
                serves(resource, device) && are_among(numbers, &device.device_numbers)
            })
        });
    }

    /// Marks the devices that such containers hold as unhealthy.
    pub(super) fn withhold_former(&self, devices: &mut Devices) {
        self.former.withhold(devices, |name, device| {
            self.resources
                .get(name)
                .is_some_and(|resource| serves(resource, device))
        });
    }
}
