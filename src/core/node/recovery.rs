//! How the node is put right: after a start, after a step that failed, and when a device has changed.

use std::collections::BTreeSet;

use super::claim_uid::ClaimUid;
use super::inventory::Devices;
use super::ledger::{Change, Ledger};
use super::prepare::restore;
use super::step::Step;

/// Plans what is cleared away at a start: the rest of attempts that were never answered, and files that belong to nothing.
///
/// `files` are the claims that have a CDI file of ours. Clearing a "started" entry is safe: no container has been given
/// anything of it, and kubelet, which got no answer, asks again or has forgotten it.
pub fn plan_clearing(ledger: &Ledger, files: &BTreeSet<ClaimUid>) -> Vec<Step> {
    let unfinished: BTreeSet<ClaimUid> = ledger
        .entries()
        .iter()
        .filter(|(_, entry)| !entry.is_done())
        .map(|(uid, _)| uid.clone())
        .collect();
    let unknown = files.iter().filter(|uid| ledger.entry(uid).is_none()).cloned();
    let mut steps: Vec<Step> = unknown
        .chain(unfinished.iter().cloned())
        .map(Step::RemoveCdi)
        .collect();
    steps.extend(unfinished.iter().cloned().map(Step::Release));
    steps.push(Step::Save(unfinished.into_iter().map(Change::Remove).collect()));
    steps
}

/// Plans, claim by claim, how the CDI files come back at a start: `/var/run/cdi` is empty after a boot.
///
/// That is done also for what was prepared in an earlier boot, although nothing of it runs: a kubelet of 1.27 does not ask
/// again for a claim that its own checkpoint has.
pub fn plan_restoring(ledger: &Ledger) -> Vec<(ClaimUid, Vec<Step>)> {
    let done = ledger.entries().iter().filter(|(_, entry)| entry.is_done());
    done.map(|(uid, _)| (uid.clone(), restore(uid))).collect()
}

/// Plans, claim by claim, what follows from a change of the inventory: the CDI file of a claim must never lead to a node
/// that has become another device's.
pub fn plan_refresh(ledger: &Ledger, before: &Devices, after: &Devices) -> Vec<(ClaimUid, Vec<Step>)> {
    let changed = |name: &str| before.get(name) != after.get(name);
    let touched = ledger
        .entries()
        .iter()
        .filter(|(_, entry)| entry.is_done() && entry.devices.iter().any(|held| changed(&held.device)));
    touched.map(|(uid, _)| (uid.clone(), restore(uid))).collect()
}

/// Plans what is undone after a step for a claim has failed. The caller reports the failure itself; what cannot be undone
/// now is undone by the next request for the claim or the device, or by the next start.
///
/// A claim that containers may be using keeps its devices; only its file goes, so that no further container is started
/// with a device that is no longer what was allocated. Every other claim is as if it had never come.
pub fn plan_undo(ledger: &Ledger, uid: &ClaimUid) -> Vec<Step> {
    let mut steps = vec![Step::RemoveCdi(uid.clone())];
    if ledger
        .entry(uid)
        .is_some_and(|entry| !ledger.may_be_in_use(entry))
    {
        steps.push(Step::Release(uid.clone()));
        steps.push(Step::Save(vec![Change::Remove(uid.clone())]));
    }
    steps
}
