//! Who holds which device on this node.
//!
//! The ledger is what the checkpoint stores. It changes by [`Change`]s only, and a change counts once the checkpoint that
//! has it is durable.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::claim_uid::ClaimUid;
use super::identity::{add_numbers, are_among, is_same_node};
use super::injection::Injection;
use super::inventory::Devices;
use crate::api::crd::{Device, DeviceNumber};

/// The claims that hold devices of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The boot that this process runs in (`/proc/sys/kernel/random/boot_id`).
    boot_id: String,
    entries: BTreeMap<ClaimUid, Entry>,
}

/// What one claim holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// Namespace of the claim; empty if it was rebuilt from a CDI file, which does not have it.
    pub namespace: String,
    /// Name of the claim; empty if it was rebuilt from a CDI file.
    pub name: String,
    /// The boot in which kubelet last asked for it.
    pub boot_id: String,
    /// The devices, in the order of the resource handle. Empty if it is not known which they are: the claim was found after
    /// the checkpoint was lost, and what was found does not tell.
    pub devices: Vec<HeldDevice>,
    /// How far it has come.
    #[serde(flatten)]
    pub progress: Progress,
}

/// A device that a claim holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldDevice {
    /// The device's name in the inventory.
    pub device: String,
    /// The kind that the device was of; empty if it was rebuilt from a CDI file.
    pub kind: String,
    /// The device numbers of the device's own nodes, all that containers of the claim may have been given since the node was booted.
    /// Empty if they are not known: the driver does not tell, or an earlier release wrote the checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<DeviceNumber>,
}

/// How far a claim has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Progress {
    /// Prepare has begun and has not been answered with success: no container has been given anything. An entry that is
    /// found in this state by a later request or start is the rest of an attempt that failed, and can be cleared away.
    Started {
        /// What the driver made, once it has.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        injection: Option<Injection>,
    },
    /// Kubelet has the CDI id, or may have it. Held until Unprepare.
    Done {
        /// What containers get.
        injection: Injection,
    },
}

/// One change of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A claim takes its devices.
    Start(ClaimUid, Entry),
    /// The claim's injection is ready and in place; kubelet may have it from now on.
    Finish(ClaimUid),
    /// What a claim holds has become known, or more of it; nothing else about it changes.
    Explain(ClaimUid, Explanation),
    /// No container has what the claim holds any more, but the driver has yet to undo what it did for it: the claim counts as begun.
    Abandon(ClaimUid),
    /// A claim holds nothing any more.
    Remove(ClaimUid),
}

/// What was not known of a claim that was found after the checkpoint was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// The devices.
    pub devices: Vec<HeldDevice>,
}

impl Ledger {
    /// The ledger as a checkpoint left it, in the boot of this id.
    pub fn new(boot_id: impl Into<String>, entries: BTreeMap<ClaimUid, Entry>) -> Self {
        Self {
            boot_id: boot_id.into(),
            entries,
        }
    }

    /// The boot that this process runs in.
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Every claim that holds something.
    pub fn entries(&self) -> &BTreeMap<ClaimUid, Entry> {
        &self.entries
    }

    /// What a claim holds.
    pub fn entry(&self, uid: &ClaimUid) -> Option<&Entry> {
        self.entries.get(uid)
    }

    /// A claim that holds a device: the only one, unless the device has shares.
    pub fn holder(&self, device: &str) -> Option<(&ClaimUid, &Entry)> {
        self.holders(device).next()
    }

    /// The claims that hold a device, several if it has shares.
    pub fn holders(&self, device: &str) -> impl Iterator<Item = (&ClaimUid, &Entry)> {
        self.entries
            .iter()
            .filter(move |(_, entry)| entry.devices.iter().any(|held| held.device == device))
    }

    /// The claims that hold a device under this name and, of those that may be in use, the ones that hold it under another. What a
    /// claim held under another name before the node was booted says nothing: device numbers do not outlive a boot.
    pub fn holders_of(&self, device: &Device) -> impl Iterator<Item = (&ClaimUid, &Entry)> {
        self.entries.iter().filter(|(_, entry)| {
            let (injection, in_use) = (entry.injection(), self.may_be_in_use(entry));
            entry
                .devices
                .iter()
                .any(|held| held.device == device.name || (in_use && is_same_node(held, injection, device)))
        })
    }

    /// The claims that keep a device from containers that ask for it as an extended resource: not those of an earlier boot, of which nothing
    /// runs. Kubelet asks again for claims whose pods still exist, and the API server shows these.
    pub fn keepers_of(&self, device: &Device) -> impl Iterator<Item = (&ClaimUid, &Entry)> {
        self.holders_of(device)
            .filter(|(_, entry)| self.may_be_in_use(entry) || !entry.is_done())
    }

    /// Whether a container may be running that has what the entry holds.
    ///
    /// Not so before success was answered, and not so for what was last asked for before the node was booted: kubelet
    /// asks again for the pods that still exist, and the others no longer run. (Kubelet 1.27 starts a container again without asking.
    /// Its claim is still allocated then, so that no other one is given the device.)
    pub fn may_be_in_use(&self, entry: &Entry) -> bool {
        matches!(entry.progress, Progress::Done { .. }) && entry.boot_id == self.boot_id
    }

    /// A claim that may be in use and of which nobody knows what it holds, other than `own`.
    pub fn unaccounted(&self, own: Option<&ClaimUid>) -> Option<(&ClaimUid, &Entry)> {
        self.entries
            .iter()
            .find(|(uid, entry)| Some(*uid) != own && entry.is_unaccounted() && self.may_be_in_use(entry))
    }

    /// Carries out a change.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Start(uid, entry) => {
                self.entries.insert(uid.clone(), entry.clone());
            }
            Change::Finish(uid) => {
                if let Some(entry) = self.entries.get_mut(uid)
                    && let Some(injection) = entry.injection().cloned()
                {
                    entry.progress = Progress::Done { injection };
                    entry.boot_id.clone_from(&self.boot_id);
                }
            }
            Change::Explain(uid, known) => {
                if let Some(entry) = self.entries.get_mut(uid) {
                    entry.namespace.clone_from(&known.namespace);
                    entry.name.clone_from(&known.name);
                    entry.devices.clone_from(&known.devices);
                }
            }
            Change::Abandon(uid) => {
                if let Some(entry) = self.entries.get_mut(uid) {
                    let injection = entry.injection().cloned();
                    entry.progress = Progress::Started { injection };
                }
            }
            Change::Remove(uid) => {
                self.entries.remove(uid);
            }
        }
    }

    /// Takes note of what the driver made for a claim, of devices as they are in the inventory. How far the claim has come does not
    /// change by it.
    pub fn set_injection(&mut self, uid: &ClaimUid, made: Injection, inventory: &Devices) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        for held in &mut entry.devices {
            let Some(device) = inventory.get(&held.device) else {
                continue;
            };
            if entry.boot_id != self.boot_id {
                held.numbers.clear();
            }
            // A device that was plugged in again may have another number. The container still has the first.
            add_numbers(&mut held.numbers, &device.device_numbers);
        }
        match &mut entry.progress {
            Progress::Started { injection } => *injection = Some(made),
            Progress::Done { injection } => *injection = made,
        }
    }
}

impl Entry {
    /// What containers get, if the driver has made it.
    pub fn injection(&self) -> Option<&Injection> {
        match &self.progress {
            Progress::Started { injection } => injection.as_ref(),
            Progress::Done { injection } => Some(injection),
        }
    }

    /// Whether kubelet has the CDI id, or may have it.
    pub fn is_done(&self) -> bool {
        matches!(self.progress, Progress::Done { .. })
    }

    /// Whether kubelet may have it and nobody knows which devices it holds.
    pub fn is_unaccounted(&self) -> bool {
        self.is_done() && self.devices.is_empty()
    }

    /// Whether what the entry holds was found under the same names with the same device nodes.
    pub fn is_as_found(&self, found: &Devices) -> bool {
        self.devices.iter().all(|held| {
            found
                .get(&held.device)
                .is_some_and(|device| are_among(&held.numbers, &device.device_numbers))
        })
    }

    /// The claim as a person reads it.
    pub fn describe(&self, uid: &ClaimUid) -> String {
        if self.name.is_empty() {
            format!("the claim of uid {uid}")
        } else {
            format!("claim {}/{} (uid {uid})", self.namespace, self.name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid() -> ClaimUid {
        ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap()
    }

    fn started(boot_id: &str) -> Entry {
        Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: boot_id.into(),
            devices: vec![HeldDevice {
                device: "kvm".into(),
                kind: "test".into(),
                ..HeldDevice::default()
            }],
            progress: Progress::Started { injection: None },
        }
    }

    #[test]
    fn a_claim_is_not_done_before_its_injection_is_known() {
        let mut ledger = Ledger::new("boot", BTreeMap::new());
        ledger.apply(&Change::Start(uid(), started("boot")));
        ledger.apply(&Change::Finish(uid()));
        assert!(!ledger.entry(&uid()).unwrap().is_done());
        ledger.set_injection(&uid(), Injection::default(), &Devices::new());
        ledger.apply(&Change::Finish(uid()));
        assert!(ledger.entry(&uid()).unwrap().is_done());
    }

    #[test]
    fn a_device_is_held_from_the_start_until_the_removal() {
        let mut ledger = Ledger::new("boot", BTreeMap::new());
        assert_eq!(ledger.holder("kvm"), None);
        ledger.apply(&Change::Start(uid(), started("boot")));
        assert_eq!(ledger.holder("kvm").map(|(holder, _)| holder), Some(&uid()));
        ledger.apply(&Change::Remove(uid()));
        assert_eq!(ledger.holder("kvm"), None);
    }

    #[test]
    fn nothing_of_an_earlier_boot_is_in_use() {
        let mut entry = started("before");
        entry.progress = Progress::Done {
            injection: Injection::default(),
        };
        let mut ledger = Ledger::new("boot", BTreeMap::from([(uid(), entry)]));
        assert!(!ledger.may_be_in_use(ledger.entry(&uid()).unwrap()));
        ledger.apply(&Change::Finish(uid()));
        assert!(ledger.may_be_in_use(ledger.entry(&uid()).unwrap()));
    }
}
