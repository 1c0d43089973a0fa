//! The plans of the node: what is done, in which order, when kubelet asks for something.
//!
//! A plan is a list of [`Step`]s that a shell carries out one after the other, one plan at a time. That is what makes a
//! repeated request join the first (it finds the work done) and an Unprepare come after the Prepare that it follows. The
//! process may be killed before, within and after every step; [`super::recovery`] puts the node right from what is left.

use std::collections::BTreeSet;

use super::check::{check_handle, check_name, distinct, list, usable};
use super::claim_uid::ClaimUid;
use super::containers::Containers;
use super::inventory::Devices;
use super::ledger::{Change, Entry, HeldDevice, Ledger, Progress};
use super::naming::{is_dns_label, is_dns_subdomain};
use super::refusal::Refusal;
use super::request::{ClaimToPrepare, ClaimToUnprepare, NodeIdentity};
use super::step::Step;
use crate::api::crd::{Device, Mode};
use crate::api::handle::DeviceHandle;

/// Plans a Prepare: afterwards kubelet may be given the claim's CDI id.
///
/// The same claim again leads to the same id. Refused without any step, and with nothing changed, if the claim cannot
/// have what it asks for now. `containers` is what leaves through the other door; it counts for devices that have both.
pub fn plan_prepare(
    ledger: &Ledger,
    containers: &Containers,
    inventory: &Devices,
    node: &NodeIdentity,
    claim: &ClaimToPrepare,
) -> Result<(ClaimUid, Vec<Step>), Refusal> {
    let uid = ClaimUid::parse(&claim.uid)?;
    check_name("namespace", &claim.namespace, is_dns_label)?;
    check_name("name", &claim.name, |name| is_dns_subdomain(name, 253))?;
    let handle = DeviceHandle::parse(&claim.resource_handle)?;
    check_handle(&handle, &uid, node)?;
    let names = distinct(handle.devices.iter().map(|device| device.device.as_str()))?;

    let own = ledger.entry(&uid);
    if let Some(entry) = own.filter(|entry| ledger.may_be_in_use(entry)) {
        // Prepared before. What the driver makes is asked for again, so that a device that has gone or has become
        // another since is noticed now; the claim keeps it in any case.
        let held: BTreeSet<&str> = entry.devices.iter().map(|held| held.device.as_str()).collect();
        return if held.iter().eq(&names.iter().copied().collect::<BTreeSet<_>>()) {
            Ok((uid.clone(), restore(&uid)))
        } else {
            Err(Refusal::Changed {
                held: list(held),
                named: list(names),
            })
        };
    }

    let mut evicted = BTreeSet::new();
    let mut devices = Vec::new();
    for name in names {
        let device = usable(inventory, name, Mode::Claims)?;
        devices.push(HeldDevice {
            device: device.name.clone(),
            kind: device.kind.clone(),
        });
        check_containers(containers, device)?;
        evicted.extend(make_room(ledger, &uid, device)?);
    }

    // Files first, as at Unprepare, and then the driver undoes what it did.
    let cleared: Vec<ClaimUid> = evicted.iter().cloned().chain(own.map(|_| uid.clone())).collect();
    let mut steps: Vec<Step> = cleared.iter().cloned().map(Step::RemoveCdi).collect();
    steps.extend(cleared.into_iter().map(Step::Release));
    let mut changes: Vec<Change> = evicted.into_iter().map(Change::Remove).collect();
    changes.push(Change::Start(
        uid.clone(),
        Entry {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            boot_id: ledger.boot_id().to_owned(),
            devices,
            progress: Progress::Started { injection: None },
        },
    ));
    steps.push(Step::Save(changes));
    steps.push(Step::Inject(uid.clone()));
    steps.push(Step::WriteCdi(uid.clone()));
    steps.push(Step::Save(vec![Change::Finish(uid.clone())]));
    Ok((uid, steps))
}

/// The first device with both doors that a plan takes anew.
pub fn takes_from_both(steps: &[Step], inventory: &Devices) -> Option<String> {
    let changes = steps.iter().flat_map(|step| match step {
        Step::Save(changes) => changes.as_slice(),
        _ => &[],
    });
    let taken = changes.flat_map(|change| match change {
        Change::Start(_, entry) => entry.devices.as_slice(),
        _ => &[],
    });
    taken
        .map(|held| held.device.as_str())
        .find(|name| {
            inventory
                .get(*name)
                .is_some_and(|device| device.mode == Mode::Both)
        })
        .map(str::to_owned)
}

/// Refuses what a container has, or may have.
fn check_containers(containers: &Containers, device: &Device) -> Result<(), Refusal> {
    if device.mode != Mode::Both {
        return Ok(());
    }
    if !containers.known() {
        return Err(Refusal::ContainersUnknown {
            device: device.name.clone(),
            problem: "it has not answered since the companion was started".to_owned(),
        });
    }
    match containers.holder(&device.name) {
        Some(holder) => Err(Refusal::InContainer {
            device: device.name.clone(),
            holder,
        }),
        None => Ok(()),
    }
}

/// The claims that have to give way so that one more can have the device: what is left of attempts that failed, or of pods that ran
/// before the node was booted. Refused if so many hold it as may.
fn make_room(ledger: &Ledger, uid: &ClaimUid, device: &Device) -> Result<Vec<ClaimUid>, Refusal> {
    let shares = device.shares.unwrap_or(1).max(1);
    let others = ledger.holders(&device.name).filter(|(holder, _)| *holder != uid);
    let (in_use, left): (Vec<_>, Vec<_>) = others.partition(|(_, entry)| ledger.may_be_in_use(entry));
    let limit = usize::try_from(shares).unwrap_or(usize::MAX);
    match in_use.first() {
        Some((holder, entry)) if in_use.len() >= limit => {
            let (device, holder) = (device.name.clone(), entry.describe(holder));
            Err(if shares == 1 {
                Refusal::Held { device, holder }
            } else {
                Refusal::AllShares {
                    device,
                    shares,
                    holder,
                }
            })
        }
        _ if in_use.len() + left.len() >= limit => {
            Ok(left.into_iter().map(|(holder, _)| holder.clone()).collect())
        }
        _ => Ok(Vec::new()),
    }
}

/// Plans an Unprepare. A claim that is not known has nothing to be undone, except perhaps a file.
///
/// The file goes first: if the process is killed in between, the ledger still knows that there is something to undo. The driver is
/// asked only for a claim that the ledger knows, and the ledger forgets it only after the driver has succeeded.
pub fn plan_unprepare(ledger: &Ledger, claim: &ClaimToUnprepare) -> Result<Vec<Step>, Refusal> {
    let uid = ClaimUid::parse(&claim.uid)?;
    let mut steps = vec![Step::RemoveCdi(uid.clone())];
    if ledger.entry(&uid).is_some() {
        steps.push(Step::Release(uid.clone()));
        steps.push(Step::Save(vec![Change::Remove(uid)]));
    }
    Ok(steps)
}

/// The steps that bring the CDI file of a claim in line with the device as it is now.
pub(super) fn restore(uid: &ClaimUid) -> Vec<Step> {
    vec![
        Step::Inject(uid.clone()),
        Step::WriteCdi(uid.clone()),
        Step::Save(Vec::new()),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::super::containers::Shown;
    use super::super::injection::Injection;
    use super::*;
    use crate::api::handle::{HandleDevice, VERSION};

    const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
    const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";
    const C: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0c";

    fn node() -> NodeIdentity {
        NodeIdentity {
            name: "node-a".into(),
            uid: Some("n-1".into()),
        }
    }

    fn inventory() -> Devices {
        let device = |name: &str, mode, unhealthy: Option<&str>| {
            let unhealthy = unhealthy.map(str::to_owned);
            (
                name.to_owned(),
                Device {
                    name: name.into(),
                    kind: "test".into(),
                    mode,
                    unhealthy,
                    ..Device::default()
                },
            )
        };
        Devices::from([
            device("x", Mode::Claims, None),
            device("y", Mode::Claims, None),
            device("sick", Mode::Claims, Some("it smokes")),
            device("plug", Mode::ExtendedResource, None),
            device("two-doors", Mode::Both, None),
            (
                "shared".to_owned(),
                Device {
                    shares: Some(2),
                    ..device("shared", Mode::Claims, None).1
                },
            ),
        ])
    }

    fn handle(uid: &str, devices: &[&str]) -> DeviceHandle {
        let device = |name: &&str| HandleDevice {
            request: "device".into(),
            device: (*name).into(),
        };
        DeviceHandle {
            version: VERSION,
            claim_uid: uid.into(),
            node_name: "node-a".into(),
            node_uid: "n-1".into(),
            devices: devices.iter().map(device).collect(),
        }
    }

    fn claim(uid: &str, handle: &DeviceHandle) -> ClaimToPrepare {
        let (namespace, name) = ("default".into(), "camera".into());
        ClaimToPrepare {
            namespace,
            name,
            uid: uid.into(),
            resource_handle: handle.to_data().unwrap(),
        }
    }

    fn plan(ledger: &Ledger, uid: &str, devices: &[&str]) -> Result<Vec<Step>, Refusal> {
        plan_beside(ledger, &Containers::default(), uid, devices)
    }

    fn plan_beside(
        ledger: &Ledger,
        containers: &Containers,
        uid: &str,
        devices: &[&str],
    ) -> Result<Vec<Step>, Refusal> {
        let claim = claim(uid, &handle(uid, devices));
        plan_prepare(ledger, containers, &inventory(), &node(), &claim).map(|(_, steps)| steps)
    }

    fn held(uid: &str, devices: &[&str], boot_id: &str, progress: Progress) -> Ledger {
        let device = |name: &&str| HeldDevice {
            device: (*name).into(),
            kind: "test".into(),
        };
        let entry = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: boot_id.into(),
            devices: devices.iter().map(device).collect(),
            progress,
        };
        Ledger::new("boot", BTreeMap::from([(ClaimUid::parse(uid).unwrap(), entry)]))
    }

    fn done() -> Progress {
        Progress::Done {
            injection: Injection::default(),
        }
    }

    #[test]
    fn the_ledger_is_durable_before_the_driver_is_asked_and_before_kubelet_is_answered() {
        let uid = ClaimUid::parse(A).unwrap();
        let steps = plan(&Ledger::new("boot", BTreeMap::new()), A, &["x"]).unwrap();
        assert!(
            matches!(&steps[0], Step::Save(changes) if matches!(changes[..], [Change::Start(..)])),
            "{steps:?}"
        );
        assert_eq!(steps[1], Step::Inject(uid.clone()));
        assert_eq!(steps[2], Step::WriteCdi(uid.clone()));
        assert_eq!(steps[3], Step::Save(vec![Change::Finish(uid)]));
    }

    #[test]
    fn the_same_claim_again_only_refreshes_its_file() {
        let steps = plan(&held(A, &["y", "x"], "boot", done()), A, &["x", "y"]).unwrap();
        assert_eq!(steps, restore(&ClaimUid::parse(A).unwrap()));
    }

    #[test]
    fn a_device_that_another_claim_holds_is_refused_with_the_claims_name() {
        let refusal = plan(&held(A, &["x"], "boot", done()), B, &["y", "x"]).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            format!("device \"x\" is held by claim default/camera (uid {A}) until it is unprepared")
        );
        assert_eq!(
            (refusal.reason(), refusal.is_invalid_request()),
            ("DeviceHeld", false)
        );
    }

    #[test]
    fn the_rest_of_a_failed_attempt_and_of_an_earlier_boot_gives_way() {
        let started = Progress::Started { injection: None };
        for ledger in [
            held(A, &["x"], "boot", started),
            held(A, &["x"], "before", done()),
        ] {
            let steps = plan(&ledger, B, &["x"]).unwrap();
            assert_eq!(steps[0], Step::RemoveCdi(ClaimUid::parse(A).unwrap()));
            assert_eq!(steps[1], Step::Release(ClaimUid::parse(A).unwrap()));
            assert!(
                matches!(&steps[2], Step::Save(changes) if matches!(changes[..], [Change::Remove(_), Change::Start(..)]))
            );
        }
    }

    #[test]
    fn a_shared_device_is_given_to_as_many_claims_as_it_has_shares() {
        let mut entries = held(A, &["shared"], "boot", done()).entries().clone();
        plan(&Ledger::new("boot", entries.clone()), B, &["shared"]).unwrap();
        entries.extend(held(B, &["shared"], "boot", done()).entries().clone());
        let both = Ledger::new("boot", entries.clone());
        let refusal = plan(&both, C, &["shared"]).unwrap_err();
        assert_eq!(refusal.reason(), "DeviceHeld");
        assert!(refusal.to_string().contains("2 shares"), "{refusal}");
        assert_eq!(
            plan(&both, B, &["shared"]).unwrap(),
            restore(&ClaimUid::parse(B).unwrap())
        );
        // What no longer runs gives way only where the place is needed.
        entries.extend(held(B, &["shared"], "before", done()).entries().clone());
        let steps = plan(&Ledger::new("boot", entries.clone()), C, &["shared"]).unwrap();
        assert_eq!(steps[0], Step::RemoveCdi(ClaimUid::parse(B).unwrap()));
        entries.remove(&ClaimUid::parse(A).unwrap());
        let steps = plan(&Ledger::new("boot", entries), C, &["shared"]).unwrap();
        assert!(matches!(&steps[0], Step::Save(_)), "{steps:?}");
    }

    #[test]
    fn what_containers_hold_counts_for_devices_that_have_both_doors() {
        let empty = Ledger::new("boot", BTreeMap::new());
        let mut containers = Containers::default();
        let reason = |containers: &Containers| {
            plan_beside(&empty, containers, A, &["two-doors"]).map_err(|refusal| refusal.reason())
        };
        assert_eq!(reason(&containers), Err("PodResourcesUnavailable"));
        containers.seen(&Shown::default(), Duration::ZERO);
        let steps = reason(&containers).unwrap();
        assert_eq!(
            takes_from_both(&steps, &inventory()).as_deref(),
            Some("two-doors")
        );
        assert_eq!(
            takes_from_both(&plan(&empty, A, &["x"]).unwrap(), &inventory()),
            None
        );
        containers.allocated(["two-doors", "x"], Duration::ZERO);
        assert_eq!(reason(&containers), Err("DeviceHeld"));
        plan_beside(&empty, &containers, A, &["x"]).expect("its kind has one door");
    }

    #[test]
    fn a_claim_that_was_allocated_anew_without_unprepare_is_refused() {
        let refusal = plan(&held(A, &["x"], "boot", done()), A, &["y"]).unwrap_err();
        assert_eq!(
            refusal,
            Refusal::Changed {
                held: "x".into(),
                named: "y".into()
            }
        );
    }

    #[test]
    fn what_cannot_be_had_is_refused_with_its_reason() {
        let empty = Ledger::new("boot", BTreeMap::new());
        for (devices, reason) in [
            (&["x", "x"][..], "InvalidHandle"),
            (&[], "InvalidHandle"),
            (&["nowhere"], "DeviceGone"),
            (&["../x"], "DeviceGone"),
            (&["sick"], "DeviceUnhealthy"),
            (&["plug"], "WrongMode"),
        ] {
            assert_eq!(
                plan(&empty, A, devices).unwrap_err().reason(),
                reason,
                "{devices:?}"
            );
        }
    }

    #[test]
    fn a_handle_of_another_claim_or_node_is_refused() {
        let empty = Ledger::new("boot", BTreeMap::new());
        let good = handle(A, &["x"]);
        let foreign = [
            (
                DeviceHandle {
                    claim_uid: B.into(),
                    ..good.clone()
                },
                "InvalidHandle",
            ),
            (
                DeviceHandle {
                    node_name: "node-b".into(),
                    ..good.clone()
                },
                "WrongNode",
            ),
            (
                DeviceHandle {
                    node_uid: "n-0".into(),
                    ..good.clone()
                },
                "WrongNode",
            ),
        ];
        for (handle, reason) in foreign {
            let refusal = plan_prepare(
                &empty,
                &Containers::default(),
                &inventory(),
                &node(),
                &claim(A, &handle),
            )
            .unwrap_err();
            assert_eq!(refusal.reason(), reason, "{refusal}");
        }
        let unknown = NodeIdentity { uid: None, ..node() };
        let refusal = plan_prepare(
            &empty,
            &Containers::default(),
            &inventory(),
            &unknown,
            &claim(A, &good),
        )
        .unwrap_err();
        assert_eq!(refusal.reason(), "NodeUnknown");
    }

    #[test]
    fn hostile_names_and_uids_are_refused_before_anything_is_planned() {
        let empty = Ledger::new("boot", BTreeMap::new());
        let good = claim(A, &handle(A, &["x"]));
        for bad in [
            ClaimToPrepare {
                uid: "../../etc".into(),
                ..good.clone()
            },
            ClaimToPrepare {
                uid: String::new(),
                ..good.clone()
            },
            ClaimToPrepare {
                namespace: "a/b".into(),
                ..good.clone()
            },
            ClaimToPrepare {
                name: "x".repeat(1 << 20),
                ..good.clone()
            },
            ClaimToPrepare {
                resource_handle: "not ours".into(),
                ..good.clone()
            },
            ClaimToPrepare {
                resource_handle: "x".repeat(1 << 20),
                ..good
            },
        ] {
            let refusal =
                plan_prepare(&empty, &Containers::default(), &inventory(), &node(), &bad).unwrap_err();
            assert!(
                refusal.is_invalid_request() && refusal.to_string().len() < 300,
                "{refusal}"
            );
        }
    }

    #[test]
    fn unprepare_of_an_unknown_claim_succeeds_and_of_a_known_one_takes_the_file_first() {
        let claim = ClaimToUnprepare {
            uid: A.into(),
            ..ClaimToUnprepare::default()
        };
        let uid = ClaimUid::parse(A).unwrap();
        let empty = Ledger::new("boot", BTreeMap::new());
        assert_eq!(
            plan_unprepare(&empty, &claim),
            Ok(vec![Step::RemoveCdi(uid.clone())])
        );
        assert_eq!(
            plan_unprepare(&held(A, &["x"], "boot", done()), &claim),
            Ok(vec![
                Step::RemoveCdi(uid.clone()),
                Step::Release(uid.clone()),
                Step::Save(vec![Change::Remove(uid)])
            ])
        );
    }
}
