//! Allocate and GetPreferredAllocation of the device plugin API: checks, evictions and the choice among free devices.

use std::collections::{BTreeMap, BTreeSet};

use super::inventory::HandedOut;
use super::plan::{Refusal, check_health, distinct, offered};
use super::prepared_claims::PreparedClaims;
use crate::api::crd::{Devices, Mode};
use crate::core::names::{ClaimUid, device_of_plugin_id};

/// An extended resource and how its devices are passed to containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtendedResource {
    /// The kind of its devices.
    pub kind: String,
    /// Whether devices of the kind have [`Mode::Both`], so that claims may hold them, too. If false, claims are refused
    /// devices of that mode.
    pub also_by_claims: bool,
    /// Whether containers get a device by its CDI name, with a CDI file that the companion maintains, instead of by its device nodes.
    /// Kubelet 1.27 silently ignores CDI names, as does kubelet 1.28 without the feature gate `DevicePluginCDIDevices`.
    pub cdi_devices: bool,
    /// Whether PreStartContainer checks each device before a container starts. A container whose device is missing then waits instead of
    /// starting without it.
    pub pre_start_check: bool,
}

impl ExtendedResource {
    /// The resource of a kind with default settings.
    pub fn of_kind(kind: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            ..Self::default()
        }
    }
}

/// Checks whether an Allocate of the device plugin API may be granted, given one list of device ids per container.
///
/// Nothing is stored, because only kubelet's own record of its grants lives as long as the pod. A container that holds the device under the
/// same name is no reason to refuse: kubelet tracks that holder itself and grants the device again only after its pod has ended. Under
/// another name, kubelet takes it for another device.
pub fn check_allocate(
    handed_out: HandedOut<'_>,
    inventory: &Devices,
    resource: &str,
    kind: &str,
    containers: &[Vec<String>],
) -> Result<(), Refusal> {
    if containers.is_empty() || containers.iter().any(Vec::is_empty) {
        return Err(Refusal::NoDevice);
    }
    for id in distinct(containers.iter().flatten().map(String::as_str))? {
        let name = device_of_plugin_id(id);
        let device = offered(inventory, name, Mode::ExtendedResource)?;
        if device.kind != kind {
            return Err(Refusal::OtherResource {
                device: device.name.clone(),
                resource: resource.to_owned(),
            });
        }
        if let Some((uid, entry)) = handed_out.prepared_claims.keepers_of(device).next() {
            return Err(Refusal::Held {
                device: device.name.clone(),
                holder: entry.describe(uid),
            });
        }
        if let Some(holder) = handed_out.containers.holder_by_another_name(device) {
            return Err(Refusal::InContainer {
                device: device.name.clone(),
                holder,
            });
        }
        check_health(device)?;
        if let (Mode::Both, Some((uid, entry))) =
            (device.mode, handed_out.prepared_claims.with_unknown_devices(None))
        {
            return Err(Refusal::unknown_devices(uid, entry));
        }
        if let (Mode::Both, Some(holder)) = (device.mode, handed_out.allocated_claims.holder(name)) {
            return Err(Refusal::Allocated {
                device: device.name.clone(),
                holder: holder.to_owned(),
            });
        }
    }
    Ok(())
}

/// The claims of an earlier boot that an Allocate evicts: none of their containers runs, and none can start without the CDI files.
pub fn evicted(
    prepared_claims: &PreparedClaims,
    inventory: &Devices,
    containers: &[Vec<String>],
) -> BTreeSet<ClaimUid> {
    let names = containers.iter().flatten().map(|id| device_of_plugin_id(id));
    let devices = names.filter_map(|name| inventory.get(name));
    let devices = devices.filter(|device| !device.is_shared());
    devices
        .flat_map(|device| prepared_claims.holders_of(device))
        .map(|(uid, _)| uid.clone())
        .collect()
}

/// Kubelet's request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preference {
    /// The free ids, including those of `must_include`.
    pub available: Vec<String>,
    /// The ids that must be chosen.
    pub must_include: Vec<String>,
    /// The total number of ids to choose.
    pub size: usize,
}

/// The order of names in which devices are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The first name first, as the controller chooses for claims.
    Ascending,
    /// The last name first. Used for devices that are also offered to claims, so that both APIs do not compete for the same device while
    /// enough are free.
    Descending,
}

/// Chooses `size` of the available ids, or fewer if there are not enough. `numa_nodes` are the NUMA nodes of each device, by name.
///
/// Priorities, highest first: the ids of `must_include`; as few NUMA nodes as possible and, among equals, the node with the fewest free
/// devices, so that large groups stay whole; different devices rather than several shares of one; the order of names.
///
/// A device near several NUMA nodes counts for each of them; devices without a NUMA node form a group of their own.
pub fn preferred(
    preference: &Preference,
    numa_nodes: &BTreeMap<String, Vec<i64>>,
    order: Order,
) -> Vec<String> {
    let mut chosen: Vec<String> = Vec::new();
    for id in &preference.must_include {
        if chosen.len() < preference.size && !chosen.contains(id) {
            chosen.push(id.clone());
        }
    }
    let groups = |id: &str| -> Vec<Option<i64>> {
        match numa_nodes.get(device_of_plugin_id(id)) {
            Some(nodes) if !nodes.is_empty() => nodes.iter().copied().map(Some).collect(),
            _ => vec![None],
        }
    };
    let mut free: BTreeSet<&str> = preference.available.iter().map(String::as_str).collect();
    for id in &chosen {
        free.remove(id.as_str());
    }
    // The NUMA nodes in use in any case.
    let mut touched: BTreeSet<Option<i64>> = chosen.iter().flat_map(|id| groups(id)).collect();
    while chosen.len() < preference.size && !free.is_empty() {
        let missing = preference.size - chosen.len();
        let mut members: BTreeMap<Option<i64>, BTreeSet<&str>> = BTreeMap::new();
        for id in &free {
            for group in groups(id) {
                members.entry(group).or_default().insert(id);
            }
        }
        // Prefer a node in use already, which costs nothing; then one that suffices; then the smallest of those that suffice, or the
        // largest of those that do not.
        let Some((group, ids)) = members.into_iter().min_by_key(|(group, ids)| {
            let suffices = ids.len() >= missing;
            let size = if suffices {
                ids.len()
            } else {
                usize::MAX - ids.len()
            };
            (!touched.contains(group), !suffices, size, *group)
        }) else {
            break;
        };
        touched.insert(group);
        for id in in_order(ids, &chosen, order).into_iter().take(missing) {
            free.remove(id);
            chosen.push(id.to_owned());
        }
    }
    chosen
}

/// The ids in order of preference: first one share of each device without any chosen share.
fn in_order<'a>(ids: BTreeSet<&'a str>, chosen: &[String], order: Order) -> Vec<&'a str> {
    let mut ids: Vec<&str> = ids.into_iter().collect();
    if order == Order::Descending {
        ids.reverse();
    }
    let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
    for id in chosen {
        *taken.entry(device_of_plugin_id(id)).or_default() += 1;
    }
    let mut ranked: Vec<(usize, &str)> = Vec::new();
    for id in ids {
        let shares = taken.entry(device_of_plugin_id(id)).or_default();
        ranked.push((*shares, id));
        *shares += 1;
    }
    ranked.sort_by_key(|(shares, _)| *shares);
    ranked.into_iter().map(|(_, id)| id).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::container_edits::ContainerEdits;
    use super::super::containers::{AllocatedClaims, Containers};
    use super::super::prepared_claims::{Entry, HeldDevice, Progress};
    use super::*;
    use crate::api::crd::Device;

    fn inventory() -> Devices {
        let device = |name: &str, kind: &str, mode, unhealthy: Option<&str>| {
            let unhealthy = unhealthy.map(str::to_owned);
            (
                name.to_owned(),
                Device {
                    name: name.into(),
                    kind: kind.into(),
                    mode,
                    unhealthy,
                    ..Device::default()
                },
            )
        };
        Devices::from([
            device("a", "camera", Mode::ExtendedResource, None),
            device("b", "camera", Mode::ExtendedResource, None),
            device("sick", "camera", Mode::ExtendedResource, Some("it smokes")),
            device("other", "serial", Mode::ExtendedResource, None),
            device("claimed", "camera", Mode::Claims, None),
            device("either", "camera", Mode::Both, None),
        ])
    }

    fn reason(prepared_claims: &PreparedClaims, containers: &[&[&str]]) -> Result<(), &'static str> {
        let containers: Vec<Vec<String>> = containers
            .iter()
            .map(|ids| ids.iter().map(|id| (*id).to_owned()).collect())
            .collect();
        let (allocated_claims, held) = (AllocatedClaims::default(), Containers::default());
        let handed_out = HandedOut {
            prepared_claims,
            allocated_claims: &allocated_claims,
            containers: &held,
        };
        check_allocate(
            handed_out,
            &inventory(),
            "example.com/camera",
            "camera",
            &containers,
        )
        .map_err(|refusal| refusal.reason())
    }

    #[test]
    fn devices_of_the_resource_are_handed_out() {
        assert_eq!(reason(&PreparedClaims::default(), &[&["a"], &["b"]]), Ok(()));
    }

    #[test]
    fn everything_else_is_refused_with_its_reason() {
        for (containers, expected) in [
            (&[&["a", "a"][..]][..], "InvalidHandle"),
            (&[&["a"], &["a"]], "InvalidHandle"),
            (&[&[]], "InvalidHandle"),
            (&[], "InvalidHandle"),
            (&[&["nowhere"]], "DeviceGone"),
            (&[&["sick"]], "DeviceUnhealthy"),
            (&[&["other"]], "InvalidResource"),
            (&[&["claimed"]], "WrongMode"),
            (&[&["nowhere.1"]], "DeviceGone"),
        ] {
            assert_eq!(
                reason(&PreparedClaims::default(), containers),
                Err(expected),
                "{containers:?}"
            );
        }
    }

    #[test]
    fn a_device_held_by_a_claim_is_not_allocated_in_any_mode() {
        let entry = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: "boot".into(),
            devices: vec![HeldDevice {
                device: "a".into(),
                kind: "camera".into(),
                ..HeldDevice::default()
            }],
            progress: Progress::Started {
                container_edits: None,
            },
        };
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        let prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid, entry)]));
        assert_eq!(reason(&prepared_claims, &[&["a"]]), Err("DeviceHeld"));
        assert_eq!(reason(&prepared_claims, &[&["b"]]), Ok(()));
    }

    #[test]
    fn a_both_mode_device_is_withheld_while_claims_are_unknown() {
        let entry = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: "boot".into(),
            devices: Vec::new(),
            progress: Progress::Done {
                container_edits: ContainerEdits::default(),
            },
        };
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        let prepared_claims =
            |boot: &str| PreparedClaims::new(boot, BTreeMap::from([(uid.clone(), entry.clone())]));
        assert_eq!(
            reason(&prepared_claims("boot"), &[&["either"]]),
            Err("HoldingsUnknown")
        );
        assert_eq!(
            reason(&prepared_claims("boot"), &[&["a"]]),
            Ok(()),
            "no claim can have it"
        );
        assert_eq!(reason(&prepared_claims("the next boot"), &[&["either"]]), Ok(()));
    }
}

#[cfg(test)]
mod preferred_tests {
    use proptest::prelude::*;

    use super::*;

    /// `a` to `d` on node 0, `e` and `f` on node 1, `w` on both, all others without a node.
    fn numa_nodes() -> BTreeMap<String, Vec<i64>> {
        let of = |names: &[&str], nodes: &[i64]| -> Vec<(String, Vec<i64>)> {
            names
                .iter()
                .map(|name| ((*name).to_owned(), nodes.to_vec()))
                .collect()
        };
        [
            of(&["a", "b", "c", "d"], &[0]),
            of(&["e", "f"], &[1]),
            of(&["w"], &[0, 1]),
        ]
        .concat()
        .into_iter()
        .collect()
    }

    fn choose(available: &str, must_include: &str, size: usize) -> String {
        choose_from(available, must_include, size, Order::Ascending)
    }

    fn choose_from(available: &str, must_include: &str, size: usize, order: Order) -> String {
        let ids = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        let preference = Preference {
            available: ids(available),
            must_include: ids(must_include),
            size,
        };
        preferred(&preference, &numa_nodes(), order).join(" ")
    }

    #[test]
    fn one_numa_node_is_used_if_it_suffices() {
        assert_eq!(choose("a b e f", "", 2), "a b");
        assert_eq!(choose("a e f", "", 2), "e f");
        assert_eq!(choose("a b c e f", "", 3), "a b c");
    }

    #[test]
    fn the_smallest_sufficient_group_is_preferred() {
        assert_eq!(choose("a b c d e f", "", 2), "e f");
        assert_eq!(choose("a b e", "", 1), "e");
    }

    #[test]
    fn required_ids_come_first_then_their_neighbours() {
        assert_eq!(choose("a b c d e f", "b", 2), "b a");
        assert_eq!(choose("a b e f", "b e", 3), "b e a");
        assert_eq!(choose("a b", "b a", 1), "b", "more than are requested");
    }

    #[test]
    fn if_no_node_suffices_the_fewest_are_taken() {
        assert_eq!(choose("a b c e f", "", 4), "a b c e");
        assert_eq!(choose("a b c d e f", "", 6), "a b c d e f");
        assert_eq!(choose("a e", "", 5), "a e", "all that there are");
    }

    #[test]
    fn a_device_that_is_near_to_two_nodes_counts_for_both() {
        assert_eq!(choose("w e a b c", "", 2), "e w");
    }

    #[test]
    fn the_device_plugin_prefers_the_last_devices_by_name() {
        assert_eq!(choose_from("x1 x2 x3", "", 1, Order::Ascending), "x1");
        assert_eq!(choose_from("x1 x2 x3", "", 2, Order::Descending), "x3 x2");
    }

    #[test]
    fn different_devices_are_better_than_two_shares_of_one() {
        assert_eq!(choose("x.0 x.1 y.0 y.1", "", 2), "x.0 y.0");
        assert_eq!(choose("x.0 x.1 y.0 y.1", "y.1", 2), "y.1 x.0");
        assert_eq!(choose("x.0 x.1 y.0", "", 3), "x.0 y.0 x.1");
    }

    proptest! {
        #[test]
        fn a_choice_has_the_requested_size_and_distinct_available_ids(
            available in proptest::collection::btree_set("[a-hwz](\\.[0-2])?", 0..12),
            must in proptest::collection::vec(any::<proptest::sample::Index>(), 0..4),
            size in 0..14_usize,
            back in any::<bool>(),
        ) {
            let available: Vec<String> = available.into_iter().collect();
            let must_include: Vec<String> = if available.is_empty() {
                Vec::new()
            } else {
                must.iter().map(|index| index.get(&available).clone()).collect()
            };
            let preference = Preference { available: available.clone(), must_include: must_include.clone(), size };
            let order = if back { Order::Descending } else { Order::Ascending };
            let chosen = preferred(&preference, &numa_nodes(), order);
            prop_assert_eq!(chosen.len(), size.min(available.len()));
            prop_assert_eq!(chosen.iter().collect::<BTreeSet<_>>().len(), chosen.len());
            prop_assert!(chosen.iter().all(|id| available.contains(id)));
            let must: BTreeSet<&String> = must_include.iter().collect();
            if must.len() <= size {
                prop_assert!(must.iter().all(|id| chosen.contains(id)));
            }
        }
    }
}
