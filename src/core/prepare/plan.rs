//! Plans for kubelet's requests: the actions and their order.
//!
//! A plan is a list of [`Step`]s that the runtime performs in order, one plan at a time. A repeated request therefore finds the work done,
//! and an Unprepare follows its Prepare. The process may be killed before, during and after every step; [`super::recovery`] then restores a
//! consistent state.

use std::collections::BTreeSet;

use super::check::{check_handle, check_health, check_name, distinct, list, offered};
use super::claim_uid::ClaimUid;
use super::containers::Containers;
use super::inventory::Devices;
use super::naming::{is_dns_label, is_dns_subdomain};
use super::prepared_claims::{Change, Entry, Explanation, HeldDevice, PreparedClaims, Progress};
use super::refusal::Refusal;
use super::request::{ClaimToPrepare, ClaimToUnprepare, NodeIdentity};
use super::step::Step;
use crate::api::crd::{Device, Mode};
use crate::api::handle::DeviceHandle;

/// Plans a Prepare, after which kubelet may be given the claim's CDI id.
///
/// Repeating it for the same claim yields the same id. A claim whose devices are unavailable is refused without any step or change.
/// `containers` are the holders through the device plugin API; they matter for devices that both APIs offer.
pub fn plan_prepare(
    prepared_claims: &PreparedClaims,
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

    let own = prepared_claims.entry(&uid);
    if let Some(entry) = own.filter(|entry| prepared_claims.may_be_in_use(entry)) {
        return prepared_before(prepared_claims, inventory, claim, (&uid, entry), &names)
            .map(|steps| (uid, steps));
    }
    if let Some((other, entry)) = prepared_claims.unaccounted(Some(&uid)) {
        return Err(Refusal::unaccounted(other, entry));
    }

    let mut evicted = BTreeSet::new();
    let mut devices = Vec::new();
    for name in names {
        let device = offered(inventory, name, Mode::Claims)?;
        devices.push(held_device(inventory, name));
        check_containers(containers, device)?;
        evicted.extend(make_room(prepared_claims, &uid, device)?);
        check_health(device)?;
    }

    // As at Unprepare, the files go first; then the driver undoes its work.
    let cleared: Vec<ClaimUid> = evicted.iter().cloned().chain(own.map(|_| uid.clone())).collect();
    let mut steps: Vec<Step> = cleared.iter().cloned().map(Step::RemoveCdi).collect();
    steps.extend(cleared.into_iter().map(Step::Unprepare));
    let mut changes: Vec<Change> = evicted.into_iter().map(Change::Remove).collect();
    changes.push(Change::Start(
        uid.clone(),
        Entry {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            boot_id: prepared_claims.boot_id().to_owned(),
            devices,
            progress: Progress::Started {
                container_edits: None,
            },
        },
    ));
    steps.push(Step::Save(changes));
    steps.push(Step::Prepare(uid.clone()));
    steps.push(Step::WriteCdi(uid.clone()));
    steps.push(Step::Save(vec![Change::Finish(uid.clone())]));
    Ok((uid, steps))
}

/// The devices that a plan newly takes.
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

/// The first device that a plan newly takes and that both APIs offer.
pub fn takes_from_both(steps: &[Step], inventory: &Devices) -> Option<String> {
    taken(steps)
        .find(|name| {
            inventory
                .get(*name)
                .is_some_and(|device| device.mode == Mode::Both)
        })
        .map(str::to_owned)
}

/// Refuses a device that a container has, or may have.
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

/// The claims to evict so that one more can have the device: remains of failed attempts, or of pods that ran before the boot. Refused if
/// all shares are in use.
fn make_room(
    prepared_claims: &PreparedClaims,
    uid: &ClaimUid,
    device: &Device,
) -> Result<Vec<ClaimUid>, Refusal> {
    let shares = device.shares.unwrap_or(1).max(1);
    let others = prepared_claims
        .holders_of(device)
        .filter(|(holder, _)| *holder != uid);
    let (in_use, left): (Vec<_>, Vec<_>) =
        others.partition(|(_, entry)| prepared_claims.may_be_in_use(entry));
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

/// Plans for a claim that containers may use already. The driver computes the container edits again, so that a vanished or replaced device
/// is detected now; the claim keeps it in any case.
///
/// An entry that was rebuilt after the checkpoint was lost lacks names or even devices; kubelet's request supplies them.
fn prepared_before(
    prepared_claims: &PreparedClaims,
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
            // Only the name of a missing device is known.
            let unknown = || Device {
                name: (*name).to_owned(),
                ..Device::default()
            };
            make_room(
                prepared_claims,
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

/// The record of a held device. Its kind is empty if the device is missing.
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

/// Plans an Unprepare. For an unknown claim, at most a file is removed.
///
/// The file goes first: if the process is killed in between, the claim's record shows that work is left. The driver is called only for a
/// recorded claim, and the record is removed only after the driver has succeeded.
pub fn plan_unprepare(
    prepared_claims: &PreparedClaims,
    claim: &ClaimToUnprepare,
) -> Result<Vec<Step>, Refusal> {
    let uid = ClaimUid::parse(&claim.uid)?;
    let mut steps = vec![Step::RemoveCdi(uid.clone())];
    if prepared_claims.entry(&uid).is_some() {
        steps.push(Step::Unprepare(uid.clone()));
        steps.push(Step::Save(vec![Change::Remove(uid)]));
    }
    Ok(steps)
}

/// The steps that update a claim's CDI file to the present state of its devices.
pub(super) fn restore(uid: &ClaimUid) -> Vec<Step> {
    vec![
        Step::Prepare(uid.clone()),
        Step::WriteCdi(uid.clone()),
        Step::Save(Vec::new()),
    ]
}

#[cfg(test)]
mod tests;
