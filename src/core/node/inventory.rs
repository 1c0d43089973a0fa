//! What the node has, as it is told to the API server and to kubelet.

use std::collections::BTreeMap;

use super::announced::Announced;
use super::containers::{Containers, Contested};
use super::ledger::Ledger;
use super::naming::plugin_ids;
use super::request::PluginDevice;
use crate::api::crd::{Device, GROUP, Mode};

/// The devices of the node, by name.
pub type Devices = BTreeMap<String, Device>;

/// Joins what was found with what claims hold.
///
/// A device that has vanished leaves the inventory, unless a claim holds it: then it stays, unhealthy, so that what is
/// allocated never looks as if it had never been. `previous` is what was published last; a device that this process has
/// never seen is shown with what the ledger knows of it.
pub fn inventory(found: &Devices, previous: &Devices, ledger: &Ledger) -> Devices {
    let mut all = found.clone();
    for (uid, entry) in ledger.entries() {
        for held in &entry.devices {
            if all.contains_key(&held.device) || held.kind.is_empty() {
                continue;
            }
            let mut device = previous.get(&held.device).cloned().unwrap_or_else(|| Device {
                name: held.device.clone(),
                kind: held.kind.clone(),
                ..Device::default()
            });
            device.unhealthy = Some(format!(
                "the device is gone while {} holds it",
                entry.describe(uid)
            ));
            all.insert(held.device.clone(), device);
        }
    }
    all
}

/// The inventory as it is published: of a device that a container and a claim were both given it says so.
pub fn published(inventory: &Devices, contested: &Contested) -> Devices {
    let mut published = inventory.clone();
    for device in contested.devices() {
        if let Some(device) = published.get_mut(device)
            && device.unhealthy.is_none()
        {
            device.unhealthy = Some(Contested::UNHEALTHY.to_owned());
        }
    }
    published
}

/// What the doors of this node have handed out, or are about to.
#[derive(Clone, Copy, Debug)]
pub struct HandedOut<'a> {
    /// To claims, here.
    pub ledger: &'a Ledger,
    /// To claims, in the cluster.
    pub announced: &'a Announced,
    /// To containers, as extended resources.
    pub containers: &'a Containers,
}

/// The devices of a kind as ListAndWatch shows them. One that a claim holds, or is about to, is shown as unhealthy, so that kubelet
/// does not grant it. One that a container holds stays healthy: it is kubelet's own.
pub fn plugin_devices(inventory: &Devices, handed_out: HandedOut<'_>, kind: &str) -> Vec<PluginDevice> {
    inventory
        .values()
        .filter(|device| device.mode.serves_extended_resource() && device.kind == kind)
        .flat_map(|device| {
            let healthy = device.unhealthy.is_none() && handed_out.may_be_granted(device);
            let numa_nodes = numa_nodes(device);
            plugin_ids(&device.name, device.shares.unwrap_or(1))
                .into_iter()
                .map(move |id| PluginDevice {
                    id,
                    healthy,
                    numa_nodes: numa_nodes.clone(),
                })
        })
        .collect()
}

impl HandedOut<'_> {
    fn may_be_granted(self, device: &Device) -> bool {
        let claimed = self.ledger.holder(&device.name).is_some();
        if device.mode != Mode::Both {
            return !claimed;
        }
        self.containers.hold(&device.name)
            || (!claimed
                && self.containers.known()
                && self.announced.known()
                && self.announced.holder(&device.name).is_none())
    }
}

/// The NUMA nodes that a device is near to, from the attribute that discovery sets: none if there is only one node or it is not
/// known.
pub fn numa_nodes(device: &Device) -> Vec<i64> {
    let node = device
        .attributes
        .get(&format!("{GROUP}/numaNode"))
        .and_then(|value| value.int);
    node.filter(|node| *node >= 0).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::claim_uid::ClaimUid;
    use super::super::containers::Shown;
    use super::super::injection::Injection;
    use super::super::ledger::{Entry, HeldDevice, Progress};
    use super::*;
    use crate::api::crd::AttributeValue;

    fn device(name: &str, mode: Mode) -> (String, Device) {
        (
            name.to_owned(),
            Device {
                name: name.into(),
                kind: "test".into(),
                mode,
                ..Device::default()
            },
        )
    }

    fn ledger_holding(device: &str) -> Ledger {
        let entry = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: "boot".into(),
            devices: vec![HeldDevice {
                device: device.into(),
                kind: "test".into(),
            }],
            progress: Progress::Done {
                injection: Injection::default(),
            },
        };
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        Ledger::new("boot", BTreeMap::from([(uid, entry)]))
    }

    #[test]
    fn a_device_that_vanished_leaves_unless_a_claim_holds_it() {
        let before = Devices::from([device("a", Mode::Claims), device("b", Mode::Claims)]);
        let after = inventory(&Devices::new(), &before, &ledger_holding("b"));
        assert_eq!(after.keys().collect::<Vec<_>>(), ["b"]);
        let reason = after["b"].unhealthy.as_deref().unwrap();
        assert!(reason.contains("default/camera"), "{reason}");
        assert!(reason.len() <= 256);
    }

    #[test]
    fn a_device_that_came_back_is_well_again() {
        let before = Devices::from([device("b", Mode::Claims)]);
        let gone = inventory(&Devices::new(), &before, &ledger_holding("b"));
        let back = inventory(&before, &gone, &ledger_holding("b"));
        assert_eq!(back, before);
    }

    #[test]
    fn a_device_that_a_claim_holds_is_not_offered_through_the_other_door() {
        let all = Devices::from([
            device("a", Mode::ExtendedResource),
            device("b", Mode::ExtendedResource),
        ]);
        assert_eq!(
            offered(&all, &ledger_holding("b"), &Containers::default()),
            ["a", "b?"]
        );
        let (announced, containers) = (Announced::default(), Containers::default());
        let handed_out = HandedOut {
            ledger: &ledger_holding("b"),
            announced: &announced,
            containers: &containers,
        };
        assert_eq!(plugin_devices(&all, handed_out, "other"), []);
    }

    /// The ids of the kind `test`, those that are unhealthy with a question mark; no claim is announced.
    fn offered(all: &Devices, ledger: &Ledger, containers: &Containers) -> Vec<String> {
        let mut announced = Announced::default();
        announced.replace([], "drayman.dev", "node-a");
        let handed_out = HandedOut {
            ledger,
            announced: &announced,
            containers,
        };
        plugin_devices(all, handed_out, "test")
            .into_iter()
            .map(|device| format!("{}{}", device.id, if device.healthy { "" } else { "?" }))
            .collect()
    }

    #[test]
    fn with_both_doors_nothing_is_offered_before_kubelet_has_shown_what_it_granted() {
        let all = Devices::from([device("a", Mode::Both), device("b", Mode::Both)]);
        let mut containers = Containers::default();
        assert_eq!(offered(&all, &Ledger::default(), &containers), ["a?", "b?"]);
        containers.seen(&Shown::default(), Duration::ZERO);
        assert_eq!(offered(&all, &Ledger::default(), &containers), ["a", "b"]);
        assert_eq!(offered(&all, &ledger_holding("b"), &containers), ["a", "b?"]);
    }

    #[test]
    fn what_a_container_holds_stays_healthy_whoever_else_wants_it() {
        let all = Devices::from([device("b", Mode::Both)]);
        let mut containers = Containers::default();
        containers.allocated(["b"], Duration::ZERO);
        assert_eq!(offered(&all, &ledger_holding("b"), &containers), ["b"]);
    }

    #[test]
    fn a_shared_device_is_as_many_as_it_has_shares_and_all_of_them_are_near_its_node() {
        let (name, mut shared) = device("s", Mode::ExtendedResource);
        shared.shares = Some(2);
        shared
            .attributes
            .insert("drayman.dev/numaNode".into(), AttributeValue::int(1));
        let (announced, containers) = (Announced::default(), Containers::default());
        let handed_out = HandedOut {
            ledger: &Ledger::default(),
            announced: &announced,
            containers: &containers,
        };
        let devices = plugin_devices(&Devices::from([(name, shared)]), handed_out, "test");
        let shown: Vec<_> = devices
            .iter()
            .map(|device| (device.id.as_str(), device.numa_nodes.as_slice()))
            .collect();
        assert_eq!(shown, [("s.0", &[1_i64][..]), ("s.1", &[1])]);
    }

    #[test]
    fn a_contested_device_is_published_as_unhealthy_and_nothing_else_changes() {
        let all = Devices::from([device("a", Mode::Both), device("b", Mode::Both)]);
        let (mut containers, mut contested) = (Containers::default(), Contested::default());
        containers.allocated(["b"], Duration::ZERO);
        contested.claimed("b", &containers);
        let shown = published(&all, &contested);
        assert_eq!(shown["a"], all["a"]);
        assert_eq!(shown["b"].unhealthy.as_deref(), Some(Contested::UNHEALTHY));
    }
}
