//! The prepared claims of this node and the devices they hold.
//!
//! With the facts of the cluster, they are the content of the checkpoint. A claim whose container edits are known also has a CDI file. They
//! change only by [`ClaimChange`]s, and a change takes effect once the checkpoint that contains it is durable.
//!
//! Two device names stand for the same device if they share a device node: names come from the configuration, and a reload can give a
//! device another name or kind while containers hold it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};

use super::container_edits::{ContainerEdits, cdi_device, cdi_mount, cdi_spec, edits_of_cdi};
use super::device_metadata::{ClaimMetadata, DeviceMetadata, MetadataFile, metadata_files};
use crate::api::cdi;
use crate::api::crd::{Device, DeviceNumber, Devices, TaintEffect};
use crate::core::discovery::attributes::NODES;
use crate::core::names::{ClaimDevice, ClaimUid, DriverName, device_of_environment_name, environment_name};

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
    /// The devices, in the order of the allocation. Empty if unknown: the claim was found after the checkpoint was lost, and no source
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
    /// The kind of the device when it was last found; empty if the entry was rebuilt from a CDI file and the device was not found since.
    pub kind: String,
    /// The numbers of the device's own nodes: all that containers of the claim may have been given since the node booted. Empty if unknown:
    /// the driver does not report them, or an earlier release wrote the checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<DeviceNumber>,
    /// The number of shares of the device when it was last found: it may be gone when another process starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_shares: Option<u32>,
    /// The effect of the device's taint when it was last found.
    #[serde(
        default,
        deserialize_with = "known_or_default",
        skip_serializing_if = "is_default"
    )]
    pub taint_effect: TaintEffect,
    /// Details of structured mode; `None` in classic mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured: Option<Structured>,
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Reads an effect of a newer release as the default, because the claims of the checkpoint matter more.
fn known_or_default<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TaintEffect, D::Error> {
    let stored = serde_json::Value::deserialize(deserializer)?;
    Ok(TaintEffect::deserialize(stored).unwrap_or_default())
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

    /// Records the properties of the device as found.
    pub(super) fn describe(&mut self, device: &Device) {
        self.kind.clone_from(&device.kind);
        self.device_shares = device.shares;
        self.taint_effect = device.taint_effect;
    }

    /// Whether the device was found under the same name with the same device nodes.
    pub fn is_as_found(&self, found: &Devices) -> bool {
        let device = found.get(&self.device);
        device.is_some_and(|device| are_among(&self.numbers, &device.device_numbers))
    }

    /// Whether the ids of the claim's shares were lost with the checkpoint.
    pub fn has_lost_shares(&self, allocated: &Self) -> bool {
        self.device == allocated.device && self.share_id_count() == 0 && allocated.share_id_count() > 0
    }

    /// Whether the claim has admin access to the device, and so does not hold it.
    pub fn has_admin_access(&self) -> bool {
        self.structured
            .as_ref()
            .is_some_and(|structured| structured.admin_access)
    }

    /// The number of shares that the claim holds of a device with shares.
    pub fn shares(&self) -> usize {
        self.share_id_count().max(1)
    }

    fn share_id_count(&self) -> usize {
        let structured = self.structured.as_ref();
        structured.map_or(0, |structured| structured.share_ids.len())
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
pub enum ClaimChange {
    /// A claim takes its devices.
    Start(ClaimUid, Entry),
    /// The container edits are in place; kubelet may get the CDI id from now on.
    Finish(ClaimUid),
    /// Details of a rebuilt claim have become known; nothing else changes.
    Explain(ClaimUid, ClaimDetails),
    /// The claim holds nothing any more.
    Remove(ClaimUid),
}

/// Missing details of a claim that was rebuilt after the checkpoint was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimDetails {
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
        self.entries
            .iter()
            .find(|(_, entry)| entry.held_devices().any(|held| held.device == device))
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

    /// A claim in use, other than `own`, that holds a device under another name. It may still have the device's number from before the
    /// devices were plugged in again, or before a reload.
    pub fn holder_by_another_name(
        &self,
        own: Option<&ClaimUid>,
        device: &Device,
    ) -> Option<(&ClaimUid, &Entry)> {
        self.entries.iter().find(|(uid, entry)| {
            Some(*uid) != own
                && self.may_be_in_use(entry)
                && entry.held_devices().any(|held| {
                    held.device != device.name && is_same_node(held, entry.container_edits(), device)
                })
        })
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
    pub fn with_unknown_devices(&self, own: Option<&ClaimUid>) -> Option<(&ClaimUid, &Entry)> {
        self.entries.iter().find(|(uid, entry)| {
            Some(*uid) != own && entry.has_unknown_devices() && self.may_be_in_use(entry)
        })
    }

    /// Applies a change.
    pub fn apply(&mut self, change: &ClaimChange) {
        match change {
            ClaimChange::Start(uid, entry) => {
                self.entries.insert(uid.clone(), entry.clone());
            }
            ClaimChange::Finish(uid) => {
                if let Some(entry) = self.entries.get_mut(uid)
                    && let Some(container_edits) = entry.container_edits().cloned()
                {
                    entry.progress = Progress::Done { container_edits };
                    entry.boot_id.clone_from(&self.boot_id);
                }
            }
            ClaimChange::Explain(uid, known) => {
                if let Some(entry) = self.entries.get_mut(uid) {
                    entry.namespace.clone_from(&known.namespace);
                    entry.name.clone_from(&known.name);
                    let before = std::mem::replace(&mut entry.devices, known.devices.clone());
                    for held in &mut entry.devices {
                        // The claim's containers may still have a number that the device no longer has.
                        for before in before.iter().filter(|before| before.device == held.device) {
                            add_numbers(&mut held.numbers, &before.numbers);
                        }
                    }
                }
            }
            ClaimChange::Remove(uid) => {
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
            held.describe(device);
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
    pub fn has_unknown_devices(&self) -> bool {
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

    /// The CDI file of the claim; `None` if the driver has not made its edits. Kind and names derive only from the driver name, the claim's
    /// uid and the names of its devices.
    pub fn cdi_spec(&self, driver: &DriverName, uid: &ClaimUid) -> Option<cdi::Spec> {
        let all = self.container_edits()?;
        if !self.is_structured() {
            return Some(cdi_spec(driver, uid, all));
        }
        let devices = self.structured_devices(uid);
        Some(cdi::Spec {
            cdi_version: cdi::VERSION.to_owned(),
            kind: driver.cdi_kind(),
            devices: devices
                .map(|(name, structured)| cdi_device(name.to_string(), &structured.container_edits))
                .collect(),
        })
    }

    /// The CDI file of the claim and the files with the metadata of its devices, which it mounts from this directory of the node. `None` if the
    /// driver has not made its edits.
    pub fn files(
        &self,
        driver: &DriverName,
        uid: &ClaimUid,
        metadata_directory: &Path,
    ) -> Option<(cdi::Spec, Vec<MetadataFile>)> {
        let mut spec = self.cdi_spec(driver, uid)?;
        if !self.is_structured() {
            return Some((spec, Vec::new()));
        }
        let files = self.metadata_files(driver, uid);
        for file in &files {
            let mut devices = spec.devices.iter_mut();
            if let Some(device) = devices.find(|device| device.name == file.cdi_device) {
                let mount = file.mount(metadata_directory);
                device.container_edits.mounts.push(cdi_mount(&mount));
            }
        }
        Some((spec, files))
    }

    /// The files with the metadata of the claim's devices.
    pub(super) fn metadata_files(&self, driver: &DriverName, uid: &ClaimUid) -> Vec<MetadataFile> {
        let claim = ClaimMetadata {
            name: &self.name,
            namespace: &self.namespace,
            uid: uid.as_str(),
            generation: 1,
        };
        let devices = self.structured_devices(uid);
        metadata_files(
            driver,
            claim,
            devices.map(|(name, structured)| (name, &structured.metadata)),
        )
    }

    /// The devices of structured mode, with their names in CDI.
    fn structured_devices(&self, uid: &ClaimUid) -> impl Iterator<Item = (ClaimDevice, &Structured)> {
        self.devices.iter().filter_map(|held| {
            let structured = held.structured.as_ref()?;
            let name = ClaimDevice {
                uid: uid.clone(),
                device: held.device.clone(),
                admin_access: structured.admin_access,
            };
            Some((name, structured))
        })
    }

    /// Reads the record from a CDI file of this driver: in structured mode from the names of the CDI devices, in classic mode from the
    /// variables named after devices. Namespace, name, kinds and share ids are not in the file. Returns `None` if the file does not have
    /// the form that [`Self::cdi_spec`] produces.
    ///
    /// The entry counts as prepared in this boot. That is true if `/var/run` is kept in memory, and the safe assumption elsewhere.
    pub fn of_cdi_spec(driver: &DriverName, uid: &ClaimUid, boot_id: &str, spec: &cdi::Spec) -> Option<Self> {
        if spec.kind != driver.cdi_kind() {
            return None;
        }
        let (devices, container_edits) = match spec.devices.as_slice() {
            [device] if device.name == uid.as_str() => classic_devices(device)?,
            devices => structured_devices(uid, devices)?,
        };
        Some(Self {
            namespace: String::new(),
            name: String::new(),
            boot_id: boot_id.to_owned(),
            devices,
            progress: Progress::Done { container_edits },
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

fn classic_devices(device: &cdi::Device) -> Option<(Vec<HeldDevice>, ContainerEdits)> {
    let container_edits = edits_of_cdi(&device.container_edits)?;
    // A driver may set other variables, too.
    let names = container_edits
        .environment
        .keys()
        .filter_map(|name| device_of_environment_name(name));
    let devices: Vec<HeldDevice> = names.map(HeldDevice::named).collect();
    (!devices.is_empty()).then_some((devices, container_edits))
}

fn structured_devices(uid: &ClaimUid, devices: &[cdi::Device]) -> Option<(Vec<HeldDevice>, ContainerEdits)> {
    let mut all = ContainerEdits::default();
    let mut held = Vec::new();
    for device in devices {
        let name = ClaimDevice::parse(&device.name).filter(|name| name.uid == *uid)?;
        let container_edits = edits_of_cdi(&device.container_edits)?;
        all.extend(container_edits.clone());
        held.push(HeldDevice {
            structured: Some(Structured {
                admin_access: name.admin_access,
                container_edits,
                ..Structured::default()
            }),
            ..HeldDevice::named(name.device)
        });
    }
    (!held.is_empty()).then_some((held, all))
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
fn own_nodes<'a>(container_edits: &'a ContainerEdits, device: &str) -> BTreeSet<&'a str> {
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
    use crate::api::crd::DeviceNodeKind;

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
        prepared_claims.apply(&ClaimChange::Start(uid(), started("boot")));
        prepared_claims.apply(&ClaimChange::Finish(uid()));
        assert!(!prepared_claims.entry(&uid()).unwrap().is_done());
        prepared_claims.set_container_edits(&uid(), ContainerEdits::default(), &Devices::new());
        prepared_claims.apply(&ClaimChange::Finish(uid()));
        assert!(prepared_claims.entry(&uid()).unwrap().is_done());
    }

    #[test]
    fn a_device_is_held_from_the_start_until_the_removal() {
        let mut prepared_claims = PreparedClaims::new("boot", BTreeMap::new());
        assert_eq!(prepared_claims.holder("kvm"), None);
        prepared_claims.apply(&ClaimChange::Start(uid(), started("boot")));
        assert_eq!(
            prepared_claims.holder("kvm").map(|(holder, _)| holder),
            Some(&uid())
        );
        prepared_claims.apply(&ClaimChange::Remove(uid()));
        assert_eq!(prepared_claims.holder("kvm"), None);
    }

    #[test]
    fn numbers_that_containers_had_survive_an_explanation() {
        let number = |minor| DeviceNumber {
            kind: DeviceNodeKind::Character,
            major: 81,
            minor,
        };
        let mut prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid(), started("boot"))]));
        for minor in [0, 1] {
            let device = Device {
                device_numbers: [number(minor)].into(),
                ..Device::default()
            };
            let inventory = Devices::from([("kvm".to_owned(), device)]);
            prepared_claims.set_container_edits(&uid(), ContainerEdits::default(), &inventory);
        }
        let details = ClaimDetails {
            namespace: "default".into(),
            name: "camera".into(),
            devices: vec![HeldDevice {
                numbers: vec![number(1)],
                ..HeldDevice::named("kvm")
            }],
        };
        prepared_claims.apply(&ClaimChange::Explain(uid(), details));
        let numbers = &prepared_claims.entry(&uid()).unwrap().devices[0].numbers;
        assert!(are_among(&[number(0), number(1)], numbers), "{numbers:?}");
    }

    #[test]
    fn claims_of_an_earlier_boot_are_not_in_use() {
        let mut entry = started("before");
        entry.progress = Progress::Done {
            container_edits: ContainerEdits::default(),
        };
        let mut prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid(), entry)]));
        assert!(!prepared_claims.may_be_in_use(prepared_claims.entry(&uid()).unwrap()));
        prepared_claims.apply(&ClaimChange::Finish(uid()));
        assert!(prepared_claims.may_be_in_use(prepared_claims.entry(&uid()).unwrap()));
    }
}

#[cfg(test)]
mod cdi_tests {
    use super::super::container_edits::{DeviceNode, Mount, cdi_spec_of_device};
    use super::*;

    fn driver() -> DriverName {
        DriverName::parse("drayman.dev").unwrap()
    }

    fn uid() -> ClaimUid {
        ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap()
    }

    fn container_edits() -> ContainerEdits {
        let node = |path: &str| DeviceNode {
            host_path: path.into(),
            container_path: path.into(),
            permissions: "rw".into(),
        };
        let mut container_edits = ContainerEdits::of_device_node("kvm", node("/dev/kvm"));
        container_edits.extend(ContainerEdits::of_device_node("tty-usb0", node("/dev/tty-usb0")));
        container_edits
    }

    fn mounting() -> ContainerEdits {
        let mount = |path: &str, read_only| Mount {
            host_path: path.into(),
            container_path: path.into(),
            read_only,
        };
        ContainerEdits {
            mounts: vec![mount("/opt/vendor", true), mount("/run/vendor", false)],
            ..container_edits()
        }
    }

    #[test]
    fn mounts_are_read_back_as_they_were_written() {
        let spec = cdi_spec(&driver(), &uid(), &mounting());
        assert_eq!(
            spec.devices[0].container_edits.mounts[0].options,
            ["rbind", "nosuid", "nodev", "ro"]
        );
        let entry = Entry::of_cdi_spec(&driver(), &uid(), "boot", &spec).unwrap();
        assert_eq!(entry.container_edits(), Some(&mounting()));
    }

    #[test]
    fn a_device_has_a_file_of_another_class_than_claims() {
        let spec = cdi_spec_of_device(&driver(), "kvm", &container_edits());
        assert_eq!(
            (spec.kind.as_str(), spec.devices[0].name.as_str()),
            ("drayman.dev/device", "kvm")
        );
    }

    #[test]
    fn the_file_has_the_form_of_the_cdi_specification() {
        let text = serde_json::to_string(&cdi_spec(&driver(), &uid(), &container_edits())).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"cdiVersion":"0.5.0","kind":"drayman.dev/claim","devices":[{"name":"7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10","#,
                r#""containerEdits":{"env":["DRAYMAN_DEVICE_KVM=/dev/kvm","DRAYMAN_DEVICE_TTY_USB0=/dev/tty-usb0"],"#,
                r#""deviceNodes":[{"path":"/dev/kvm","hostPath":"/dev/kvm","permissions":"rw"},"#,
                r#"{"path":"/dev/tty-usb0","hostPath":"/dev/tty-usb0","permissions":"rw"}]}}]}"#
            )
        );
    }

    #[test]
    fn a_file_names_the_devices_of_its_claim() {
        let entry = Entry::of_cdi_spec(
            &driver(),
            &uid(),
            "boot",
            &cdi_spec(&driver(), &uid(), &container_edits()),
        )
        .unwrap();
        assert_eq!(entry.container_edits(), Some(&container_edits()));
        assert_eq!(
            entry
                .devices
                .iter()
                .map(|held| held.device.as_str())
                .collect::<Vec<_>>(),
            ["kvm", "tty-usb0"]
        );
    }

    fn structured_entry() -> Entry {
        let of = |device: &str, path: &str| {
            let node = DeviceNode {
                host_path: path.into(),
                container_path: path.into(),
                permissions: "rw".into(),
            };
            ContainerEdits::of_device_node(device, node)
        };
        let held = |device: &str, path: &str, admin_access| HeldDevice {
            structured: Some(Structured {
                share_ids: Vec::new(),
                admin_access,
                container_edits: of(device, path),
                ..Structured::default()
            }),
            ..HeldDevice::named(device)
        };
        let mut all = of("kvm", "/dev/kvm");
        all.extend(of("fuse", "/dev/fuse"));
        Entry {
            namespace: String::new(),
            name: String::new(),
            boot_id: "boot".into(),
            devices: vec![held("kvm", "/dev/kvm", false), held("fuse", "/dev/fuse", true)],
            progress: Progress::Done { container_edits: all },
        }
    }

    #[test]
    fn each_device_of_a_structured_claim_is_a_cdi_device() {
        let entry = structured_entry();
        let spec = entry.cdi_spec(&driver(), &uid()).unwrap();
        let names: Vec<&str> = spec.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, [format!("{}-kvm", uid()), format!("admin-{}-fuse", uid())]);
        for device in &spec.devices {
            assert_eq!(device.container_edits.device_nodes.len(), 1, "{device:?}");
            assert_eq!(device.container_edits.env.len(), 1, "{device:?}");
        }
        assert_eq!(Entry::of_cdi_spec(&driver(), &uid(), "boot", &spec), Some(entry));
    }

    #[test]
    fn a_file_in_another_form_is_not_read() {
        let good = cdi_spec(&driver(), &uid(), &container_edits());
        let mut other_kind = good.clone();
        other_kind.kind = "other.dev/claim".into();
        let mut other_name = good.clone();
        other_name.devices[0].name = "x".into();
        let mut other_variable = good.clone();
        other_variable.devices[0].container_edits.env = vec!["PATH=/x".into()];
        let mut no_variable = good.clone();
        no_variable.devices[0].container_edits.env.clear();
        let mut two_devices = good.clone();
        two_devices.devices.push(two_devices.devices[0].clone());
        for spec in [other_kind, other_name, other_variable, no_variable, two_devices] {
            assert_eq!(
                Entry::of_cdi_spec(&driver(), &uid(), "boot", &spec),
                None,
                "{spec:?}"
            );
        }
    }
}
