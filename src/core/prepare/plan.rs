//! The plans of the node: what is done, in which order, when kubelet asks for something.
//!
//! A plan is a list of [`Step`]s that a shell carries out one after the other, one plan at a time. That is what makes a
//! repeated request join the first (it finds the work done) and an Unprepare come after the Prepare that it follows. The
//! process may be killed before, within and after every step; [`super::recovery`] puts the node right from what is left.

use std::collections::BTreeSet;

use super::check::{check_handle, check_health, check_name, distinct, list, offered};
use super::claim_uid::ClaimUid;
use super::containers::Containers;
use super::inventory::Devices;
use super::ledger::{Change, Entry, Explanation, HeldDevice, Ledger, Progress};
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
        return prepared_before(ledger, inventory, claim, (&uid, entry), &names).map(|steps| (uid, steps));
    }
    if let Some((other, entry)) = ledger.unaccounted(Some(&uid)) {
        return Err(Refusal::unaccounted(other, entry));
    }

    let mut evicted = BTreeSet::new();
    let mut devices = Vec::new();
    for name in names {
        let device = offered(inventory, name, Mode::Claims)?;
        devices.push(held_device(inventory, name));
        check_containers(containers, device)?;
        evicted.extend(make_room(ledger, &uid, device)?);
        check_health(device)?;
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

/// The devices that a plan takes anew.
pub fn taken(steps: &[Step]) -> impl Iterator<Item = &str> {
    let changes = steps.iter().flat_map(|step| match step {
        Step::Save(changes) => changes.as_slice(),
        _ => &[],
    });
    let taken = changes.flat_map(|change| match change {
        Change::Start(_, entry) => entry.devices.as_slice(),
        _ => &[],
    });
    taken.map(|held| held.device.as_str())
}

/// The first device with both doors that a plan takes anew.
pub fn takes_from_both(steps: &[Step], inventory: &Devices) -> Option<String> {
    taken(steps)
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
    match containers.holder_of(device) {
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
    let others = ledger.holders_of(device).filter(|(holder, _)| *holder != uid);
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

/// A claim that containers may have already. What the driver makes is asked for again, so that a device that has gone or has
/// become another since is noticed now; the claim keeps it in any case.
///
/// What was rebuilt after the checkpoint was lost lacks names or even devices; kubelet has just told them.
fn prepared_before(
    ledger: &Ledger,
    inventory: &Devices,
    claim: &ClaimToPrepare,
    (uid, entry): (&ClaimUid, &Entry),
    names: &[&str],
) -> Result<Vec<Step>, Refusal> {
    let held: BTreeSet<&str> = entry.devices.iter().map(|held| held.device.as_str()).collect();
    if !entry.is_unaccounted() && !held.iter().eq(&names.iter().copied().collect::<BTreeSet<_>>()) {
        return Err(Refusal::Changed {
            held: list(held),
            named: list(names.iter().copied()),
        });
    }
    let complete = !entry.name.is_empty() && !entry.devices.is_empty();
    let mut steps = Vec::new();
    if !complete {
        for name in names {
            // Of a device that is not here any more, the name is all that is known.
            let unknown = || Device {
                name: (*name).to_owned(),
                ..Device::default()
            };
            make_room(
                ledger,
                uid,
                &inventory.get(*name).cloned().unwrap_or_else(unknown),
            )?;
        }
        let known = Explanation {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            devices: names.iter().map(|name| held_device(inventory, name)).collect(),
        };
        steps.push(Step::Save(vec![Change::Explain(uid.clone(), known)]));
    }
    steps.extend(restore(uid));
    Ok(steps)
}

/// A device as the ledger notes it. Its kind is empty if it is not there any more.
pub(super) fn held_device(inventory: &Devices, name: &str) -> HeldDevice {
    let device = inventory.get(name);
    HeldDevice {
        device: name.to_owned(),
        kind: device.map(|device| device.kind.clone()).unwrap_or_default(),
        numbers: device
            .map(|device| device.device_numbers.to_vec())
            .unwrap_or_default(),
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
mod tests;
