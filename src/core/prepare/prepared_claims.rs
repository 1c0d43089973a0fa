//! The prepared claims of this node and the devices they hold.
//!
//! They are the content of the checkpoint. They change only by [`Change`]s, and a change takes effect once the checkpoint that contains it
//! is durable.
//!
//! Two device names stand for the same device if they share a device node: names come from the configuration, and a reload can give a
//! device another name or kind while containers hold it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::container_edits::ContainerEdits;
use super::device_metadata::DeviceMetadata;
use super::inventory::Devices;
use super::names::{ClaimUid, environment_name};
use crate::api::crd::{Device, DeviceNumber};
use crate::core::discovery::attributes::NODES;

/// The claims that hold devices of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedClaims {
    /// The boot that this process runs in (`/proc/sys/kernel/random/boot_id`).
    boot_id: String,
    entries: BTreeMap<ClaimUid, Entry>,
}

/// The record of one claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// Namespace of the claim; empty if the entry was rebuilt from a CDI file, which lacks it.
    pub namespace: String,
    /// Name of the claim; empty if the entry was rebuilt from a CDI file.
    pub name: String,
    /// The boot in which kubelet last called Prepare for the claim.
    pub boot_id: String,
    /// The devices, in the order of the resource handle. Empty if unknown: the claim was found after the checkpoint was lost, and no source
    /// names its devices.
    pub devices: Vec<HeldDevice>,
    /// The progress of Prepare.
    #[serde(flatten)]
    pub progress: Progress,
}

/// A device that a claim holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldDevice {
    /// The device's name in the inventory.
    pub device: String,
    /// The kind of the device; empty if the entry was rebuilt from a CDI file.
    pub kind: String,
    /// The numbers of the device's own nodes: all that containers of the claim may have been given since the node booted. Empty if unknown:
    /// the driver does not report them, or an earlier release wrote the checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<DeviceNumber>,
    /// Details of structured mode; `None` in classic mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured: Option<Structured>,
}

/// How the scheduler allocated a device, and the edits for the containers that name its request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Structured {
    /// The ids of the claim's shares of the device; empty for a device without shares.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub share_ids: Vec<String>,
    /// Whether the claim has admin access: it may use the device beside a holder, and does not hold it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admin_access: bool,
    /// The edits for this device; empty until the driver has made them.
    #[serde(default)]
    pub container_edits: ContainerEdits,
    /// Metadata of the device for its containers. Unknown if the entry was rebuilt.
    #[serde(default, skip_serializing_if = "DeviceMetadata::is_unknown")]
    pub metadata: DeviceMetadata,
}

impl HeldDevice {
    /// A device of which only the name is known.
    pub fn named(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            ..Self::default()
        }
    }

    /// Whether the ids of the claim's shares were lost with the checkpoint.
    pub fn has_lost_shares(&self, allocated: &Self) -> bool {
        let ids = |held: &Self| {
            held.structured
                .as_ref()
                .map_or(0, |structured| structured.share_ids.len())
        };
        self.device == allocated.device && ids(self) == 0 && ids(allocated) > 0
    }

    /// Whether the claim has admin access to the device, and so does not hold it.
    pub fn has_admin_access(&self) -> bool {
        self.structured
            .as_ref()
            .is_some_and(|structured| structured.admin_access)
    }

    /// The number of shares that the claim holds of a device with shares.
    pub fn shares(&self) -> usize {
        let ids = self
            .structured
            .as_ref()
            .map_or(0, |structured| structured.share_ids.len());
        ids.max(1)
    }
}

/// The edits that the driver made for a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimEdits {
    /// The edits for all devices together.
    pub all: ContainerEdits,
    /// The edits for each device alone; only in structured mode.
    pub devices: BTreeMap<String, ContainerEdits>,
}

impl From<ContainerEdits> for ClaimEdits {
    fn from(all: ContainerEdits) -> Self {
        Self {
            all,
            devices: BTreeMap::new(),
        }
    }
}

/// The progress of Prepare for a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Progress {
    /// Prepare has begun but has not succeeded: no container has been given anything. A later request or start that finds this state may
    /// clean up after the failed attempt.
    Started {
        /// The container edits, once the driver has made them.
        #[serde(rename = "injection", default, skip_serializing_if = "Option::is_none")]
        container_edits: Option<ContainerEdits>,
    },
    /// Kubelet has, or may have, the CDI id. The devices are held until Unprepare.
    Done {
        /// The container edits. The checkpoint keeps the name that its version 1 has.
        #[serde(rename = "injection")]
        container_edits: ContainerEdits,
    },
}

/// One change of the prepared claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A claim takes its devices.
    Start(ClaimUid, Entry),
    /// The container edits are in place; kubelet may get the CDI id from now on.
    Finish(ClaimUid),
    /// Details of a rebuilt claim have become known; nothing else changes.
    Explain(ClaimUid, Explanation),
    /// The claim holds nothing any more.
    Remove(ClaimUid),
}

/// Missing details of a claim that was rebuilt after the checkpoint was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// The devices.
    pub devices: Vec<HeldDevice>,
}

impl PreparedClaims {
    /// The prepared claims of a checkpoint, read in the boot with this id.
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

    /// All claims that hold devices.
    pub fn entries(&self) -> &BTreeMap<ClaimUid, Entry> {
        &self.entries
    }

    /// The record of a claim.
    pub fn entry(&self, uid: &ClaimUid) -> Option<&Entry> {
        self.entries.get(uid)
    }

    /// A claim that holds a device: the only one, unless the device has shares.
    pub fn holder(&self, device: &str) -> Option<(&ClaimUid, &Entry)> {
        self.holders(device).next()
    }

    /// The claims that hold a device; several if it has shares.
    pub fn holders(&self, device: &str) -> impl Iterator<Item = (&ClaimUid, &Entry)> {
        self.entries
            .iter()
            .filter(move |(_, entry)| entry.held_devices().any(|held| held.device == device))
    }

    /// The claims that hold a device under its own name, and those in use that hold it under another. Records by another name from an
    /// earlier boot do not count: device numbers do not outlive a boot.
    pub fn holders_of(&self, device: &Device) -> impl Iterator<Item = (&ClaimUid, &Entry)> {
        self.entries.iter().filter(|(_, entry)| {
            let (container_edits, in_use) = (entry.container_edits(), self.may_be_in_use(entry));
            entry.held_devices().any(|held| {
                held.device == device.name || (in_use && is_same_node(held, container_edits, device))
            })
        })
    }

    /// The number of a device's shares that a claim holds, under whichever name: 1 for a device without shares.
    pub fn shares_held(entry: &Entry, device: &Device) -> usize {
        let held = entry
            .held_devices()
            .filter(|held| held.device == device.name || is_same_node(held, entry.container_edits(), device));
        held.map(HeldDevice::shares).sum::<usize>().max(1)
    }

    /// The claims that block a device from use as an extended resource. Claims prepared in an earlier boot do not: none of their containers
    /// runs. Kubelet prepares the claims of existing pods again, and the API server still shows those as allocated.
    pub fn keepers_of(&self, device: &Device) -> impl Iterator<Item = (&ClaimUid, &Entry)> {
        self.holders_of(device)
            .filter(|(_, entry)| self.may_be_in_use(entry) || !entry.is_done())
    }

    /// Whether a running container may use the claim.
    ///
    /// False before Prepare succeeded, and false for a claim last prepared before the node booted: kubelet prepares the claims of existing
    /// pods again, and other pods no longer run. (Kubelet 1.27 restarts a container without another Prepare. Its claim is still allocated
    /// then, so the device goes to no other claim.)
    pub fn may_be_in_use(&self, entry: &Entry) -> bool {
        matches!(entry.progress, Progress::Done { .. }) && entry.boot_id == self.boot_id
    }

    /// A claim other than `own` that may be in use and whose devices are unknown.
    pub fn unaccounted(&self, own: Option<&ClaimUid>) -> Option<(&ClaimUid, &Entry)> {
        self.entries
            .iter()
            .find(|(uid, entry)| Some(*uid) != own && entry.is_unaccounted() && self.may_be_in_use(entry))
    }

    /// Applies a change.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Start(uid, entry) => {
                self.entries.insert(uid.clone(), entry.clone());
            }
            Change::Finish(uid) => {
                if let Some(entry) = self.entries.get_mut(uid)
                    && let Some(container_edits) = entry.container_edits().cloned()
                {
                    entry.progress = Progress::Done { container_edits };
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
            Change::Remove(uid) => {
                self.entries.remove(uid);
            }
        }
    }

    /// Records the container edits that the driver made for a claim, and the numbers of its devices in the inventory. The progress of the
    /// claim does not change.
    pub fn set_container_edits(&mut self, uid: &ClaimUid, made: impl Into<ClaimEdits>, inventory: &Devices) {
        let ClaimEdits { all, mut devices } = made.into();
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        for held in &mut entry.devices {
            if let Some(structured) = &mut held.structured {
                structured.container_edits = devices.remove(&held.device).unwrap_or_default();
            }
            let Some(device) = inventory.get(&held.device) else {
                continue;
            };
            if entry.boot_id != self.boot_id {
                held.numbers.clear();
            }
            // A replugged device may have another number; the container still has the first one.
            add_numbers(&mut held.numbers, &device.device_numbers);
        }
        match &mut entry.progress {
            Progress::Started { container_edits } => *container_edits = Some(all),
            Progress::Done { container_edits } => *container_edits = all,
        }
    }
}

impl Entry {
    /// The container edits, if the driver has made them.
    pub fn container_edits(&self) -> Option<&ContainerEdits> {
        match &self.progress {
            Progress::Started { container_edits } => container_edits.as_ref(),
            Progress::Done { container_edits } => Some(container_edits),
        }
    }

    /// Whether kubelet has, or may have, the CDI id.
    pub fn is_done(&self) -> bool {
        matches!(self.progress, Progress::Done { .. })
    }

    /// Whether kubelet may have the claim while its devices are unknown.
    pub fn is_unaccounted(&self) -> bool {
        self.is_done() && self.devices.is_empty()
    }

    /// Whether the claim was allocated in structured mode.
    pub fn is_structured(&self) -> bool {
        self.devices.iter().any(|held| held.structured.is_some())
    }

    /// The devices without admin access.
    pub fn held_devices(&self) -> impl Iterator<Item = &HeldDevice> {
        self.devices.iter().filter(|held| !held.has_admin_access())
    }

    /// Whether every held device was found under the same name with the same device nodes.
    pub fn is_as_found(&self, found: &Devices) -> bool {
        self.held_devices().all(|held| {
            found
                .get(&held.device)
                .is_some_and(|device| are_among(&held.numbers, &device.device_numbers))
        })
    }

    /// Describes the claim for messages.
    pub fn describe(&self, uid: &ClaimUid) -> String {
        if self.name.is_empty() {
            format!("the claim of uid {uid}")
        } else {
            format!("claim {}/{} (uid {uid})", self.namespace, self.name)
        }
    }
}

/// Whether two devices have a device node in common.
pub fn share_a_node(one: &[DeviceNumber], other: &[DeviceNumber]) -> bool {
    one.iter().any(|number| other.contains(number))
}

/// Whether all of these device nodes are among the others.
pub fn are_among(these: &[DeviceNumber], others: &[DeviceNumber]) -> bool {
    these.iter().all(|number| others.contains(number))
}

/// Adds the device numbers that are not present yet.
pub(super) fn add_numbers(numbers: &mut Vec<DeviceNumber>, more: &[DeviceNumber]) {
    for number in more {
        if !numbers.contains(number) {
            numbers.push(*number);
        }
    }
}

/// Whether a device that a claim holds under another name is this one. Checkpoints of releases that did not store device numbers have only
/// the node paths, in the container edits.
pub(super) fn is_same_node(
    held: &HeldDevice,
    container_edits: Option<&ContainerEdits>,
    device: &Device,
) -> bool {
    if held.numbers.is_empty() {
        container_edits
            .is_some_and(|container_edits| has_one_of(device, &own_nodes(container_edits, &held.device)))
    } else {
        share_a_node(&held.numbers, &device.device_numbers)
    }
}

/// The host paths of the nodes that belong to this device alone: those whose container paths its variable lists.
pub fn own_nodes<'a>(container_edits: &'a ContainerEdits, device: &str) -> BTreeSet<&'a str> {
    let variable = container_edits.environment.get(&environment_name(device));
    let paths: BTreeSet<&str> = variable
        .map(|paths| paths.split(',').collect())
        .unwrap_or_default();
    let nodes = container_edits.device_nodes.iter();
    nodes
        .filter(|node| paths.contains(node.container_path.as_str()))
        .map(|node| node.host_path.as_str())
        .collect()
}

fn has_one_of(device: &Device, nodes: &BTreeSet<&str>) -> bool {
    let own = device
        .attributes
        .get(NODES)
        .and_then(|value| value.string.as_deref());
    own.is_some_and(|own| own.split(',').any(|node| nodes.contains(node)))
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
            progress: Progress::Started {
                container_edits: None,
            },
        }
    }

    #[test]
    fn a_claim_is_not_done_before_its_injection_is_known() {
        let mut prepared_claims = PreparedClaims::new("boot", BTreeMap::new());
        prepared_claims.apply(&Change::Start(uid(), started("boot")));
        prepared_claims.apply(&Change::Finish(uid()));
        assert!(!prepared_claims.entry(&uid()).unwrap().is_done());
        prepared_claims.set_container_edits(&uid(), ContainerEdits::default(), &Devices::new());
        prepared_claims.apply(&Change::Finish(uid()));
        assert!(prepared_claims.entry(&uid()).unwrap().is_done());
    }

    #[test]
    fn a_device_is_held_from_the_start_until_the_removal() {
        let mut prepared_claims = PreparedClaims::new("boot", BTreeMap::new());
        assert_eq!(prepared_claims.holder("kvm"), None);
        prepared_claims.apply(&Change::Start(uid(), started("boot")));
        assert_eq!(
            prepared_claims.holder("kvm").map(|(holder, _)| holder),
            Some(&uid())
        );
        prepared_claims.apply(&Change::Remove(uid()));
        assert_eq!(prepared_claims.holder("kvm"), None);
    }

    #[test]
    fn nothing_of_an_earlier_boot_is_in_use() {
        let mut entry = started("before");
        entry.progress = Progress::Done {
            container_edits: ContainerEdits::default(),
        };
        let mut prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid(), entry)]));
        assert!(!prepared_claims.may_be_in_use(prepared_claims.entry(&uid()).unwrap()));
        prepared_claims.apply(&Change::Finish(uid()));
        assert!(prepared_claims.may_be_in_use(prepared_claims.entry(&uid()).unwrap()));
    }
}
