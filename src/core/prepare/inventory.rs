//! The devices of the node, as published to the API server, to kubelet and in the metrics.

use std::collections::{BTreeMap, BTreeSet};

use super::containers::{AllocatedClaims, Conflicting, Containers, shortened, withhold_device};
use super::prepared_claims::{Entry, PreparedClaims, is_same_node};
use crate::api::crd::{Device, Devices, Mode, TaintEffect};
use crate::core::discovery::attributes::numa_nodes;
use crate::core::names::{ClaimUid, plugin_ids};

/// Whether every held device was found unchanged. The inventory then equals the found devices and need not be built.
pub fn is_as_found(found: &Devices, prepared_claims: &PreparedClaims) -> bool {
    let mut held = prepared_claims.entries().values().flat_map(Entry::held_devices);
    held.all(|held| held.is_as_found(found))
}

/// Merges the found devices with the devices that claims hold.
///
/// A device that has vanished, or that the configuration no longer describes, leaves the inventory unless a claim holds it. A held device
/// stays, unhealthy, so that no allocated device disappears. `previous` is the last inventory; a device that this process has never seen is
/// built from the claim's record. If a claim that may be in use holds the node of a device under another name, the device is unhealthy
/// until the claim is released.
pub fn inventory(found: &Devices, previous: &Devices, prepared_claims: &PreparedClaims) -> Devices {
    let mut all = found.clone();
    for (uid, entry) in prepared_claims.entries() {
        for held in entry.held_devices() {
            if held.is_as_found(found) {
                continue;
            }
            // An unknown kind means that the entry was rebuilt from a CDI file.
            if !all.contains_key(&held.device) && !held.kind.is_empty() {
                let mut device = previous.get(&held.device).cloned().unwrap_or_else(|| Device {
                    name: held.device.clone(),
                    kind: held.kind.clone(),
                    shares: held.device_shares,
                    taint_effect: held.taint_effect,
                    ..Device::default()
                });
                if device.taint_effect == TaintEffect::default() {
                    // The previous inventory may have withheld the device.
                    device.taint_effect = held.taint_effect;
                }
                device.unhealthy = Some(shortened(format!(
                    "the device is gone, or no longer described by the configuration, while {} holds it",
                    entry.describe(uid)
                )));
                all.insert(held.device.clone(), device);
            }
            if !prepared_claims.may_be_in_use(entry) {
                continue;
            }
            let others = all
                .values_mut()
                .filter(|other| found.contains_key(&other.name) && other.name != held.device);
            for other in others {
                if is_same_node(held, entry.container_edits(), other) {
                    let cause = format!("{} holds it under the name {}", entry.describe(uid), held.device);
                    withhold_device(other, cause);
                }
            }
        }
    }
    all
}

/// Marks the devices of quarantined claims as unhealthy, so that none of them is allocated only to be refused at Prepare. Devices with
/// several shares are exempt: a holder of one share does not block the others.
pub fn withhold(
    devices: &mut Devices,
    prepared_claims: &PreparedClaims,
    quarantine: &BTreeMap<ClaimUid, String>,
) {
    for (uid, why) in quarantine {
        let Some(entry) = prepared_claims.entry(uid) else {
            continue;
        };
        for held in entry.held_devices() {
            let device = devices.get_mut(&held.device);
            if let Some(device) = device.filter(|device| !device.is_shared()) {
                withhold_device(device, format!("withheld for {}: {why}", entry.describe(uid)));
            }
        }
    }
}

/// The inventory as published: conflicting devices, held by a container and allocated to a claim, are marked as unhealthy.
pub fn published(inventory: &Devices, conflicting: &Conflicting) -> Devices {
    let mut published = inventory.clone();
    for device in conflicting.devices() {
        if let Some(device) = published.get_mut(device) {
            withhold_device(device, Conflicting::UNHEALTHY.to_owned());
        }
    }
    published
}

/// The devices in use or allocated, through either API of this node.
#[derive(Clone, Copy, Debug)]
pub struct HandedOut<'a> {
    /// Devices that claims hold on this node.
    pub prepared_claims: &'a PreparedClaims,
    /// Devices that the cluster has allocated to claims.
    pub allocated_claims: &'a AllocatedClaims,
    /// Devices that containers hold as extended resources.
    pub containers: &'a Containers,
}

/// A device of an extended resource, as sent in ListAndWatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginDevice {
    /// The device plugin id: the inventory name, followed by a dot and a number if several containers may hold the device.
    pub id: String,
    /// Whether kubelet may grant it.
    pub healthy: bool,
    /// The nearby NUMA nodes; empty if unknown.
    pub numa_nodes: Vec<i64>,
}

/// The devices of a kind for ListAndWatch. A device that a claim holds, may hold or has allocated is unhealthy, so that kubelet does not
/// grant it, even after its present container has ended. A device that only a container holds stays healthy: kubelet tracks it, and
/// requests it again when it readmits the pod.
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
        if self.prepared_claims.keepers_of(device).next().is_some() {
            return false;
        }
        if self.containers.holder_by_another_name(device).is_some() {
            return false;
        }
        if device.mode != Mode::Both {
            return true;
        }
        self.allocated_claims.holder(&device.name).is_none()
            && self.prepared_claims.with_unknown_devices(None).is_none()
            && (self.containers.hold(&device.name)
                || (self.containers.known() && self.allocated_claims.known()))
    }
}

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
pub struct DeviceCategory {
    /// The kind, as configured.
    pub kind: String,
    /// Whether the devices themselves are fit to be allocated.
    pub healthy: bool,
    /// The holder of the devices.
    pub owner: Owner,
}

/// Counts the devices of a node. The result contains every group of each present kind, including those that count 0.
pub fn device_counts(inventory: &Devices, handed_out: HandedOut<'_>) -> BTreeMap<DeviceCategory, u64> {
    let claimed: BTreeSet<&str> = handed_out
        .prepared_claims
        .entries()
        .values()
        .flat_map(Entry::held_devices)
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
                groups.insert(DeviceCategory { kind, healthy, owner }, count);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::container_edits::{ContainerEdits, DeviceNode};
    use super::super::containers::ResourceSnapshot;
    use super::super::prepared_claims::{HeldDevice, Progress};
    use super::*;
    use crate::api::crd::{AttributeValue, TEXT_MAX};
    use crate::core::discovery::attributes::NODES;

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

    fn prepared_claims_holding(device: &str) -> PreparedClaims {
        let entry = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: "boot".into(),
            devices: vec![HeldDevice {
                device: device.into(),
                kind: "test".into(),
                ..HeldDevice::default()
            }],
            progress: Progress::Done {
                container_edits: ContainerEdits::default(),
            },
        };
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        PreparedClaims::new("boot", BTreeMap::from([(uid, entry)]))
    }

    #[test]
    fn an_unneeded_inventory_equals_the_found_devices() {
        let found = Devices::from([device("a", Mode::Claims), device("b", Mode::Claims)]);
        let (holds_b, holds_c) = (prepared_claims_holding("b"), prepared_claims_holding("c"));
        for prepared_claims in [PreparedClaims::default(), holds_b, holds_c] {
            let made = inventory(&found, &Devices::new(), &prepared_claims);
            assert_eq!(is_as_found(&found, &prepared_claims), made == found);
        }
    }

    #[test]
    fn a_device_that_vanished_leaves_unless_a_claim_holds_it() {
        let mut before = Devices::from([device("a", Mode::Claims), device("b", Mode::Claims)]);
        before.get_mut("b").unwrap().taint_effect = TaintEffect::NoExecute;
        let after = inventory(&Devices::new(), &before, &prepared_claims_holding("b"));
        assert_eq!(after.keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(after["b"].taint_effect, TaintEffect::NoExecute);
        let reason = after["b"].unhealthy.as_deref().unwrap();
        assert!(reason.contains("default/camera"), "{reason}");
        assert!(reason.len() <= 256);
    }

    #[test]
    fn a_device_that_vanished_before_the_start_is_as_recorded() {
        let mut prepared_claims = prepared_claims_holding("b");
        let uid = prepared_claims.entries().keys().next().unwrap().clone();
        let (name, mut found) = device("b", Mode::Claims);
        found.taint_effect = TaintEffect::NoExecute;
        found.shares = Some(4);
        prepared_claims.set_container_edits(&uid, ContainerEdits::default(), &Devices::from([(name, found)]));
        let after = inventory(&Devices::new(), &Devices::new(), &prepared_claims);
        assert_eq!(
            (after["b"].taint_effect, after["b"].shares),
            (TaintEffect::NoExecute, Some(4))
        );
        // Withheld until it vanished, which evicted no pod.
        let mut withheld = Devices::from([device("b", Mode::Claims)]);
        withhold(
            &mut withheld,
            &prepared_claims,
            &BTreeMap::from([(uid, String::new())]),
        );
        let after = inventory(&Devices::new(), &withheld, &prepared_claims);
        assert_eq!(after["b"].taint_effect, TaintEffect::NoExecute);
    }

    #[test]
    fn a_device_of_a_rebuilt_claim_stays_when_it_vanishes() {
        let mut prepared_claims = prepared_claims_holding("b");
        let (uid, entry) = prepared_claims.entries().iter().next().unwrap();
        let (uid, mut rebuilt) = (uid.clone(), entry.clone());
        rebuilt.devices = vec![HeldDevice::named("b")];
        prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid.clone(), rebuilt)]));
        let found = Devices::from([device("b", Mode::Claims)]);
        prepared_claims.set_container_edits(&uid, ContainerEdits::default(), &found);
        let after = inventory(&Devices::new(), &found, &prepared_claims);
        assert!(after["b"].unhealthy.is_some());
    }

    #[test]
    fn a_renamed_device_held_by_a_claim_is_not_published_as_free() {
        let named = |name: &str, nodes: &str| {
            let (name, mut device) = device(name, Mode::Claims);
            device
                .attributes
                .insert(NODES.to_owned(), AttributeValue::string(nodes));
            (name, device)
        };
        let node = |path: &str| DeviceNode {
            host_path: path.into(),
            container_path: path.into(),
            permissions: "rw".into(),
        };
        let mut container_edits = ContainerEdits::of_device_node("port", node("/dev/ttyUSB0"));
        // A shared node, which causes no conflict.
        container_edits.device_nodes.push(node("/dev/control"));
        let mut prepared_claims = prepared_claims_holding("port");
        let uid = prepared_claims.entries().keys().next().unwrap().clone();
        prepared_claims.set_container_edits(&uid, container_edits, &Devices::new());
        let found = Devices::from([
            named("renamed", "/dev/ttyUSB7,/dev/ttyUSB0"),
            named("other", "/dev/ttyUSB1"),
            named("control", "/dev/control"),
        ]);
        let all = inventory(&found, &Devices::new(), &prepared_claims);
        assert!(
            all["renamed"]
                .unhealthy
                .as_ref()
                .unwrap()
                .contains("holds it under the name port")
        );
        assert_eq!(
            (&all["other"].unhealthy, &all["control"].unhealthy),
            (&None, &None)
        );
        assert!(all["port"].unhealthy.is_some());
        let all = inventory(&found, &Devices::new(), &PreparedClaims::default());
        assert_eq!(all, found, "the device is free once the claim is unprepared");
    }

    #[test]
    fn a_reason_fits_into_an_inventory() {
        let mut prepared_claims = prepared_claims_holding("b");
        let (uid, entry) = prepared_claims.entries().iter().next().unwrap();
        let long = Entry {
            name: "n".repeat(253),
            ..entry.clone()
        };
        prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid.clone(), long)]));
        let all = inventory(&Devices::new(), &Devices::new(), &prepared_claims);
        assert_eq!(all["b"].unhealthy.as_ref().unwrap().chars().count(), TEXT_MAX);
    }

    #[test]
    fn a_device_that_returns_is_healthy_again() {
        let before = Devices::from([device("b", Mode::Claims)]);
        let gone = inventory(&Devices::new(), &before, &prepared_claims_holding("b"));
        let back = inventory(&before, &gone, &prepared_claims_holding("b"));
        assert_eq!(back, before);
    }

    #[test]
    fn a_quarantined_device_is_published_with_its_reason() {
        let mut all = Devices::from([device("a", Mode::Claims), device("b", Mode::Claims)]);
        all.get_mut("b").unwrap().taint_effect = TaintEffect::NoExecute;
        let prepared_claims = prepared_claims_holding("b");
        let uid = prepared_claims.entries().keys().next().unwrap().clone();
        withhold(
            &mut all,
            &prepared_claims,
            &BTreeMap::from([(uid, "forgotten ".repeat(50))]),
        );
        let reason = all["b"].unhealthy.as_deref().unwrap();
        assert!(
            reason.contains("default/camera") && reason.contains("forgotten"),
            "{reason}"
        );
        assert!(reason.len() <= 256 && all["a"].unhealthy.is_none());
        let mut shared = Devices::from([device("b", Mode::Claims)]);
        shared.get_mut("b").unwrap().shares = Some(2);
        let quarantine = prepared_claims
            .entries()
            .keys()
            .map(|uid| (uid.clone(), String::new()));
        withhold(&mut shared, &prepared_claims, &quarantine.collect());
        assert_eq!(shared["b"].unhealthy, None, "the other share is free");
        assert_eq!(
            all["b"].taint_effect,
            TaintEffect::NoSchedule,
            "the device is fit for use, so no pod is evicted"
        );
    }

    #[test]
    fn a_device_held_by_a_claim_is_not_an_extended_resource() {
        let all = Devices::from([
            device("a", Mode::ExtendedResource),
            device("b", Mode::ExtendedResource),
        ]);
        assert_eq!(
            offered(&all, &prepared_claims_holding("b"), &Containers::default()),
            ["a", "b?"]
        );
        let (allocated_claims, containers) = (AllocatedClaims::default(), Containers::default());
        let handed_out = HandedOut {
            prepared_claims: &prepared_claims_holding("b"),
            allocated_claims: &allocated_claims,
            containers: &containers,
        };
        assert_eq!(plugin_devices(&all, handed_out, "other"), []);
    }

    /// The device ids of kind `test`, with a question mark if unhealthy; no claim is allocated.
    fn offered(all: &Devices, prepared_claims: &PreparedClaims, containers: &Containers) -> Vec<String> {
        let allocated_claims = AllocatedClaims::none();
        let handed_out = HandedOut {
            prepared_claims,
            allocated_claims: &allocated_claims,
            containers,
        };
        plugin_devices(all, handed_out, "test")
            .into_iter()
            .map(|device| format!("{}{}", device.id, if device.healthy { "" } else { "?" }))
            .collect()
    }

    #[test]
    fn both_mode_offers_nothing_before_kubelet_lists_its_grants() {
        let all = Devices::from([device("a", Mode::Both), device("b", Mode::Both)]);
        let mut containers = Containers::default();
        assert_eq!(
            offered(&all, &PreparedClaims::default(), &containers),
            ["a?", "b?"]
        );
        containers.seen(&ResourceSnapshot::default(), Duration::ZERO);
        assert_eq!(offered(&all, &PreparedClaims::default(), &containers), ["a", "b"]);
        assert_eq!(
            offered(&all, &prepared_claims_holding("b"), &containers),
            ["a", "b?"]
        );
    }

    #[test]
    fn both_mode_offers_nothing_while_claims_are_unknown() {
        let all = Devices::from([device("a", Mode::Both), device("b", Mode::ExtendedResource)]);
        let mut containers = Containers::default();
        containers.seen(&ResourceSnapshot::default(), Duration::ZERO);
        let known = prepared_claims_holding("elsewhere");
        let (uid, entry) = known.entries().iter().next().unwrap();
        let unknown = Entry {
            devices: Vec::new(),
            ..entry.clone()
        };
        let lost = |boot: &str| PreparedClaims::new(boot, BTreeMap::from([(uid.clone(), unknown.clone())]));
        assert_eq!(offered(&all, &lost("boot"), &containers), ["a?", "b"]);
        assert_eq!(offered(&all, &lost("the next boot"), &containers), ["a", "b"]);
        assert_eq!(offered(&all, &known, &containers), ["a", "b"]);
    }

    #[test]
    fn a_device_held_by_a_container_is_healthy_unless_claimed() {
        let all = Devices::from([device("b", Mode::Both)]);
        let mut containers = Containers::default();
        containers.allocated([("b", &[][..])], Duration::ZERO);
        assert_eq!(offered(&all, &PreparedClaims::default(), &containers), ["b"]);
        assert_eq!(offered(&all, &prepared_claims_holding("b"), &containers), ["b?"]);
    }

    #[test]
    fn a_shared_device_has_a_plugin_device_per_share_and_numa_node() {
        let (name, mut shared) = device("s", Mode::ExtendedResource);
        shared.shares = Some(2);
        shared
            .attributes
            .insert("drayman.dev/numaNode".into(), AttributeValue::int(1));
        let (allocated_claims, containers) = (AllocatedClaims::default(), Containers::default());
        let handed_out = HandedOut {
            prepared_claims: &PreparedClaims::default(),
            allocated_claims: &allocated_claims,
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
    fn a_conflicting_device_is_published_as_unhealthy() {
        let all = Devices::from([device("a", Mode::Both), device("b", Mode::Both)]);
        let (mut containers, mut conflicting) = (Containers::default(), Conflicting::default());
        containers.allocated([("b", &[][..])], Duration::ZERO);
        conflicting.claimed("b", &containers);
        let shown = published(&all, &conflicting);
        assert_eq!(shown["a"], all["a"]);
        assert_eq!(shown["b"].unhealthy.as_deref(), Some(Conflicting::UNHEALTHY));
    }
}

#[cfg(test)]
mod device_counts_tests {
    use std::time::Duration;

    use super::super::containers::{AllocatedClaims, Containers};
    use super::super::prepared_claims::{Entry, HeldDevice, PreparedClaims, Progress};
    use super::*;
    use crate::api::crd::Device;
    use crate::core::names::ClaimUid;

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
            counts[&DeviceCategory { kind, healthy, owner }]
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
