//! The device plugin's side of the plan: what an Allocate may hand out.

use super::check::{distinct, usable};
use super::inventory::Devices;
use super::ledger::Ledger;
use super::refusal::Refusal;
use crate::api::crd::Mode;

/// Says whether an Allocate of the device plugin API may be granted: one list of device ids per container.
///
/// Nothing is stored: kubelet's own record of what it granted is the only one that lives as long as the pod.
pub fn check_allocate(
    ledger: &Ledger,
    inventory: &Devices,
    resource: &str,
    kind: &str,
    containers: &[Vec<String>],
) -> Result<(), Refusal> {
    if containers.is_empty() || containers.iter().any(Vec::is_empty) {
        return Err(Refusal::NoDevice);
    }
    for name in distinct(containers.iter().flatten().map(String::as_str))? {
        let device = usable(inventory, name, Mode::ExtendedResource)?;
        if device.kind != kind {
            return Err(Refusal::OtherResource {
                device: device.name.clone(),
                resource: resource.to_owned(),
            });
        }
        if let Some((uid, entry)) = ledger.holder(name) {
            return Err(Refusal::Held {
                device: device.name.clone(),
                holder: entry.describe(uid),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::claim_uid::ClaimUid;
    use super::super::ledger::{Entry, HeldDevice, Progress};
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
        ])
    }

    fn reason(ledger: &Ledger, containers: &[&[&str]]) -> Result<(), &'static str> {
        let containers: Vec<Vec<String>> = containers
            .iter()
            .map(|ids| ids.iter().map(|id| (*id).to_owned()).collect())
            .collect();
        check_allocate(ledger, &inventory(), "example.com/camera", "camera", &containers)
            .map_err(|refusal| refusal.reason())
    }

    #[test]
    fn devices_of_the_resource_are_handed_out() {
        assert_eq!(reason(&Ledger::default(), &[&["a"], &["b"]]), Ok(()));
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
        ] {
            assert_eq!(
                reason(&Ledger::default(), containers),
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
            }],
            progress: Progress::Started { injection: None },
        };
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        let ledger = Ledger::new("boot", BTreeMap::from([(uid, entry)]));
        assert_eq!(reason(&ledger, &[&["a"]]), Err("DeviceHeld"));
        assert_eq!(reason(&ledger, &[&["b"]]), Ok(()));
    }
}
