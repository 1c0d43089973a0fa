//! Checks and evictions for Allocate of the device plugin API.

use super::check::{check_health, distinct, offered};
use super::claim_uid::ClaimUid;
use super::inventory::{Devices, HandedOut};
use super::naming::device_of_plugin_id;
use super::prepared_claims::PreparedClaims;
use super::refusal::Refusal;
use crate::api::crd::Mode;

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
        if let (Mode::Both, Some((uid, entry))) = (device.mode, handed_out.prepared_claims.unaccounted(None))
        {
            return Err(Refusal::unaccounted(uid, entry));
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
) -> Vec<ClaimUid> {
    let names = containers.iter().flatten().map(|id| device_of_plugin_id(id));
    let devices = names.filter_map(|name| inventory.get(name));
    let devices = devices.filter(|device| device.shares.is_none_or(|shares| shares <= 1));
    devices
        .flat_map(|device| prepared_claims.holders_of(device))
        .map(|(uid, _)| uid.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::allocated_claims::AllocatedClaims;
    use super::super::container_edits::ContainerEdits;
    use super::super::containers::Containers;
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
    fn a_device_that_a_claim_holds_is_not_handed_out_whatever_its_mode_is_now() {
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
    fn a_device_with_both_doors_is_not_handed_out_while_nobody_knows_what_a_claim_holds() {
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
