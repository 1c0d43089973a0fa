//! What the node has, as it is told to the API server and to kubelet.

use std::collections::BTreeMap;

use super::claim_uid::ClaimUid;
use super::discovery::attributes::numa_nodes;
use super::ledger::Ledger;
use super::request::PluginDevice;
use crate::api::crd::{Device, Mode};

/// The length of a reason that is published, at most, in characters; the CRD has the same limit.
const UNHEALTHY_MAX: usize = 256;

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

/// Shows the devices of claims in quarantine as unhealthy, so that nobody is allocated what this node would refuse to prepare.
pub fn withhold(devices: &mut Devices, ledger: &Ledger, quarantine: &BTreeMap<ClaimUid, String>) {
    for (uid, why) in quarantine {
        let Some(entry) = ledger.entry(uid) else { continue };
        for held in &entry.devices {
            if let Some(device) = devices.get_mut(&held.device)
                && device.unhealthy.is_none()
            {
                let reason = format!("withheld for {}: {why}", entry.describe(uid));
                device.unhealthy = Some(reason.chars().take(UNHEALTHY_MAX).collect());
            }
        }
    }
}

/// The devices of a kind as ListAndWatch shows them. One that a claim holds (its kind had another mode when it was
/// prepared) is shown as unhealthy, so that kubelet does not grant it.
pub fn plugin_devices(inventory: &Devices, ledger: &Ledger, kind: &str) -> Vec<PluginDevice> {
    inventory
        .values()
        .filter(|device| device.mode == Mode::ExtendedResource && device.kind == kind)
        .map(|device| PluginDevice {
            id: device.name.clone(),
            healthy: device.unhealthy.is_none() && ledger.holder(&device.name).is_none(),
            numa_nodes: numa_nodes(device),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::injection::Injection;
    use super::super::ledger::{Entry, HeldDevice, Progress};
    use super::*;

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
    fn a_device_in_quarantine_is_shown_with_the_reason_and_others_are_not() {
        let mut all = Devices::from([device("a", Mode::Claims), device("b", Mode::Claims)]);
        let ledger = ledger_holding("b");
        let uid = ledger.entries().keys().next().unwrap().clone();
        withhold(
            &mut all,
            &ledger,
            &BTreeMap::from([(uid, "forgotten ".repeat(50))]),
        );
        let reason = all["b"].unhealthy.as_deref().unwrap();
        assert!(
            reason.contains("default/camera") && reason.contains("forgotten"),
            "{reason}"
        );
        assert!(reason.len() <= 256 && all["a"].unhealthy.is_none());
    }

    #[test]
    fn a_device_that_a_claim_holds_is_not_offered_through_the_other_door() {
        let all = Devices::from([
            device("a", Mode::ExtendedResource),
            device("b", Mode::ExtendedResource),
        ]);
        let healthy: Vec<bool> = plugin_devices(&all, &ledger_holding("b"), "test")
            .iter()
            .map(|device| device.healthy)
            .collect();
        assert_eq!(healthy, [true, false]);
        assert_eq!(plugin_devices(&all, &ledger_holding("b"), "other"), []);
    }
}
