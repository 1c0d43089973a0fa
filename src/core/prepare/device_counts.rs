//! Counts devices by kind, health and holder, for the metrics.

use std::collections::{BTreeMap, BTreeSet};

use super::inventory::{Devices, HandedOut};
use crate::api::crd::Mode;

/// The holder of a device, as far as this node knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A claim holds it.
    Claim,
    /// A container holds it as an extended resource.
    Container,
    /// Known only to kubelet, because the device is offered only as an extended resource.
    Kubelet,
    /// No holder.
    Nobody,
}

impl Owner {
    /// Every owner.
    pub const ALL: [Self; 4] = [Self::Claim, Self::Container, Self::Kubelet, Self::Nobody];

    /// The value of the metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Container => "container",
            Self::Kubelet => "kubelet",
            Self::Nobody => "nobody",
        }
    }
}

/// Devices of one kind with the same holder and health.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// The kind, as configured.
    pub kind: String,
    /// Whether the devices themselves are fit to be allocated.
    pub healthy: bool,
    /// The holder of the devices.
    pub owner: Owner,
}

/// Counts the devices of a node. The result contains every group of each present kind, including those that count 0.
pub fn device_counts(inventory: &Devices, handed_out: HandedOut<'_>) -> BTreeMap<Group, u64> {
    let claimed: BTreeSet<&str> = handed_out
        .prepared_claims
        .entries()
        .values()
        .flat_map(|entry| &entry.devices)
        .map(|held| held.device.as_str())
        .collect();
    let mut counted: BTreeMap<(&str, bool, Owner), u64> = BTreeMap::new();
    for (name, device) in inventory {
        let owner = if claimed.contains(name.as_str()) {
            Owner::Claim
        } else if device.mode == Mode::ExtendedResource {
            Owner::Kubelet
        } else if handed_out.containers.hold(name) {
            Owner::Container
        } else {
            Owner::Nobody
        };
        let group = (device.kind.as_str(), device.unhealthy.is_none(), owner);
        *counted.entry(group).or_default() += 1;
    }
    let kinds: BTreeSet<&str> = counted.keys().map(|(kind, ..)| *kind).collect();
    let mut groups = BTreeMap::new();
    for kind in kinds {
        for owner in Owner::ALL {
            for healthy in [false, true] {
                let count = counted.get(&(kind, healthy, owner)).copied().unwrap_or_default();
                let kind = kind.to_owned();
                groups.insert(Group { kind, healthy, owner }, count);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::allocated_claims::AllocatedClaims;
    use super::super::claim_uid::ClaimUid;
    use super::super::containers::Containers;
    use super::super::prepared_claims::{Entry, HeldDevice, PreparedClaims, Progress};
    use super::*;
    use crate::api::crd::Device;

    fn device(name: &str, mode: Mode, unhealthy: bool) -> (String, Device) {
        let device = Device {
            name: name.into(),
            kind: "camera".into(),
            mode,
            unhealthy: unhealthy.then(|| "it smokes".to_owned()),
            ..Device::default()
        };
        (name.to_owned(), device)
    }

    #[test]
    fn every_device_is_counted_once_by_its_owner_and_its_health() {
        let inventory = Devices::from([
            device("claimed", Mode::Claims, false),
            device("claimed-and-ill", Mode::Both, true),
            device("in-a-container", Mode::Both, false),
            device("plugin", Mode::ExtendedResource, false),
            device("free", Mode::Claims, false),
        ]);
        let held = |device: &str| HeldDevice {
            device: device.into(),
            kind: "camera".into(),
            ..HeldDevice::default()
        };
        let entry = Entry {
            namespace: "default".into(),
            name: "claim".into(),
            boot_id: "boot".into(),
            devices: vec![held("claimed"), held("claimed-and-ill"), held("gone")],
            progress: Progress::Started {
                container_edits: None,
            },
        };
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        let prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid, entry)]));
        let mut containers = Containers::default();
        containers.allocated([("in-a-container", &[][..])], Duration::ZERO);
        let allocated_claims = AllocatedClaims::default();
        let handed_out = HandedOut {
            prepared_claims: &prepared_claims,
            allocated_claims: &allocated_claims,
            containers: &containers,
        };
        let counts = device_counts(&inventory, handed_out);
        let count = |healthy, owner| {
            let kind = "camera".to_owned();
            counts[&Group { kind, healthy, owner }]
        };
        assert_eq!(count(true, Owner::Claim), 1);
        assert_eq!(count(false, Owner::Claim), 1);
        assert_eq!(count(true, Owner::Container), 1);
        assert_eq!(count(true, Owner::Kubelet), 1);
        assert_eq!(count(true, Owner::Nobody), 1);
        assert_eq!(counts.len(), 8, "the others are there with 0");
        assert_eq!(counts.values().sum::<u64>(), 5);
    }
}
