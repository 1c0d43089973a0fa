//! The plans of the node: what is done, in which order, when kubelet asks for something.
//!
//! A plan is a list of [`Step`]s that a shell carries out one after the other, one plan at a time. That is what makes a
//! repeated request join the first (it finds the work done) and an Unprepare come after the Prepare that it follows. The
//! process may be killed before, within and after every step; [`super::recovery`] puts the node right from what is left.

use std::collections::BTreeSet;

use super::check::{check_handle, check_name, distinct, list, usable};
use super::claim_uid::ClaimUid;
use super::inventory::Devices;
use super::ledger::{Change, Entry, Explanation, HeldDevice, Ledger, Progress};
use super::naming::{is_dns_label, is_dns_subdomain};
use super::refusal::Refusal;
use super::request::{ClaimToPrepare, ClaimToUnprepare, NodeIdentity};
use super::step::Step;
use crate::api::crd::Mode;
use crate::api::handle::DeviceHandle;

/// Plans a Prepare: afterwards kubelet may be given the claim's CDI id.
///
/// The same claim again leads to the same id. Refused without any step, and with nothing changed, if the claim cannot
/// have what it asks for now.
pub fn plan_prepare(
    ledger: &Ledger,
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
    if let Some((other, entry)) = ledger.unaccounted(&uid) {
        return Err(Refusal::Unaccounted {
            holder: entry.describe(other),
            uid: other.to_string(),
        });
    }

    let mut evicted = BTreeSet::new();
    let mut devices = Vec::new();
    for name in names {
        let device = usable(inventory, name, Mode::Claims)?;
        devices.push(HeldDevice {
            device: device.name.clone(),
            kind: device.kind.clone(),
        });
        match ledger.holder(name) {
            Some((holder, entry)) if *holder != uid && ledger.may_be_in_use(entry) => {
                return Err(Refusal::Held {
                    device: name.to_owned(),
                    holder: entry.describe(holder),
                });
            }
            // What is left of an attempt that failed, or of pods that ran before the node was booted.
            Some((holder, _)) if *holder != uid => {
                evicted.insert(holder.clone());
            }
            Some(_) | None => {}
        }
    }

    let mut steps: Vec<Step> = evicted.iter().cloned().map(Step::RemoveCdi).collect();
    if own.is_some() {
        steps.push(Step::RemoveCdi(uid.clone()));
    }
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
            if let Some((holder, other)) = ledger.holder(name)
                && holder != uid
                && ledger.may_be_in_use(other)
            {
                return Err(Refusal::Held {
                    device: (*name).to_owned(),
                    holder: other.describe(holder),
                });
            }
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
    HeldDevice {
        device: name.to_owned(),
        kind: inventory
            .get(name)
            .map(|device| device.kind.clone())
            .unwrap_or_default(),
    }
}

/// Plans an Unprepare. A claim that is not known has nothing to be undone, except perhaps a file.
///
/// The file goes first: if the process is killed in between, the ledger still knows that there is something to undo.
pub fn plan_unprepare(ledger: &Ledger, claim: &ClaimToUnprepare) -> Result<Vec<Step>, Refusal> {
    let uid = ClaimUid::parse(&claim.uid)?;
    let mut steps = vec![Step::RemoveCdi(uid.clone())];
    if ledger.entry(&uid).is_some() {
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
