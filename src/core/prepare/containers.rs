//! Holders of devices besides prepared claims: containers with extended resources, containers of withdrawn resources, and claims that the
//! API server shows as allocated.
//!
//! The device plugin API has no call that returns a device. The containers are therefore derived from three sources: the plugin's own
//! Allocate calls, the list of the PodResources API, and the checkpoint of kubelet's device manager. No source suffices alone. The list omits
//! devices of init containers, and pods that were deleted by force while their containers are still ending. The checkpoint keeps ended pods
//! until the next grant.
//!
//! When a resource is renamed, or its devices are renamed or move to claims or another resource, existing containers keep running. Kubelet
//! lists their devices under the names it granted them by, so it is queried for these names until the containers have ended.
//!
//! The allocated claims are not recorded: the checkpoint records the prepared claims, and Prepare refuses any remaining conflict.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::prepared_claims::{add_numbers, share_a_node};
use crate::api::crd::{Device, DeviceNumber, Devices, TEXT_MAX, TaintEffect};
use crate::api::handle::DeviceHandle;
use crate::api::resource::ResourceClaim;

/// How long a device counts as held after Allocate even if kubelet does not show it: pod admission continues after the response.
const ADMISSION: Duration = Duration::from_secs(30);

/// How long a recorded device counts as held after a pod of its holder's name was first listed without it. PodResources names pods without
/// their uid, so the listed pod may be a successor: a StatefulSet recreates a pod under the same name after a forced deletion, while the
/// old containers run on for their grace period. Twice the default grace period.
const NAMESAKE: Duration = Duration::from_secs(60);

/// How long a device that is recorded but not listed counts as held if pod directories cannot be read: longer than most init containers
/// run, and longer than the grace period of a pod that was deleted by force.
const UNLISTED: Duration = Duration::from_secs(300);

/// A container, as kubelet names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodContainer {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
}

/// A snapshot of kubelet's view of one resource's devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceSnapshot {
    /// Namespace and name of each pod that kubelet lists, with or without devices.
    pub pods: BTreeSet<(String, String)>,
    /// The container that each device is listed with.
    pub listed: BTreeMap<String, PodContainer>,
    /// The devices in the checkpoint of kubelet's device manager, for pods whose directory still exists.
    pub recorded: BTreeSet<String>,
    /// The device numbers that devices were granted with, where known.
    pub numbers: BTreeMap<String, Vec<DeviceNumber>>,
    /// Why pod directories cannot be read. If set, `recorded` includes every device in the checkpoint, even those of ended pods.
    pub pods_unseen: Option<String>,
}

impl ResourceSnapshot {
    /// Merges the snapshot of another resource, taken at the same moment.
    pub fn add(&mut self, other: Self) {
        self.pods.extend(other.pods);
        self.listed.extend(other.listed);
        self.recorded.extend(other.recorded);
        self.numbers.extend(other.numbers);
        self.pods_unseen = self.pods_unseen.take().or(other.pods_unseen);
    }
}

/// The devices that containers hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Containers {
    known: bool,
    holds: BTreeMap<String, Hold>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Hold {
    /// The device numbers that containers may have been given; empty if unknown.
    numbers: Vec<DeviceNumber>,
    /// The device counts as held at least until then.
    at_least_until: Option<Duration>,
    /// The container last listed with the device since its last grant.
    container: Option<PodContainer>,
    /// Since when a pod of that container's name has been listed without the device.
    without_it_since: Option<Duration>,
}

impl Containers {
    /// Whether kubelet has shown its grants since this process started. Until then, no device of mode `both` may be given to a claim.
    pub fn known(&self) -> bool {
        self.known
    }

    /// Records an answered Allocate, with the numbers of each device. `now` is the time since the process started.
    pub fn allocated<'a>(
        &mut self,
        devices: impl IntoIterator<Item = (&'a str, &'a [DeviceNumber])>,
        now: Duration,
    ) {
        for (device, numbers) in devices {
            let hold = Hold {
                numbers: numbers.to_vec(),
                at_least_until: Some(now.saturating_add(ADMISSION)),
                ..Hold::default()
            };
            self.holds.insert(device.to_owned(), hold);
        }
    }

    /// Adds grants that kubelet may not show yet.
    pub fn add_granted(&mut self, granted: &Self) {
        for (device, hold) in &granted.holds {
            self.holds.entry(device.clone()).or_insert_with(|| hold.clone());
        }
    }

    /// Updates the holders from a snapshot of kubelet's view.
    pub fn seen(&mut self, shown: &ResourceSnapshot, now: Duration) {
        self.known = true;
        let mut before = std::mem::take(&mut self.holds);
        for (device, container) in &shown.listed {
            let known = before.remove(device).unwrap_or_default();
            let hold = Hold {
                container: Some(container.clone()),
                without_it_since: None,
                ..known
            };
            self.holds.insert(device.clone(), hold);
        }
        for device in &shown.recorded {
            if !self.holds.contains_key(device) {
                let mut hold = before.remove(device).unwrap_or_default();
                if !hold.has_ended(shown, now) {
                    self.holds.insert(device.clone(), hold);
                }
            }
        }
        for (device, hold) in before {
            // Neither listed nor recorded: kubelet may not have got that far yet.
            if hold.container.is_none() && hold.at_least_until.is_some_and(|until| now < until) {
                self.holds.insert(device, hold);
            }
        }
        for (device, hold) in &mut self.holds {
            if let Some(numbers) = shown.numbers.get(device) {
                add_numbers(&mut hold.numbers, numbers);
            }
        }
    }

    /// Whether a container holds a device.
    pub fn hold(&self, device: &str) -> bool {
        self.holds.contains_key(device)
    }

    /// The devices that containers hold, with the device numbers of their grants.
    pub fn devices(&self) -> impl Iterator<Item = (&str, &[DeviceNumber])> {
        self.holds
            .iter()
            .map(|(device, hold)| (device.as_str(), hold.numbers.as_slice()))
    }

    /// The device numbers of the grants of a device that a container holds.
    pub fn numbers(&self, device: &str) -> Option<&[DeviceNumber]> {
        self.holds.get(device).map(|hold| hold.numbers.as_slice())
    }

    /// Describes the container that holds a device under this name.
    pub fn holder(&self, device: &str) -> Option<String> {
        self.holds.get(device).map(Hold::describe)
    }

    /// Describes the container that holds a device, under any name.
    pub fn holder_of(&self, device: &Device) -> Option<String> {
        self.holder(&device.name)
            .or_else(|| self.holder_by_another_name(device))
    }

    /// Describes the container that holds a device under another name.
    pub fn holder_by_another_name(&self, device: &Device) -> Option<String> {
        let mut others = self.holds.iter().filter(|(name, hold)| {
            **name != device.name && share_a_node(&hold.numbers, &device.device_numbers)
        });
        others
            .next()
            .map(|(name, hold)| format!("{} (as {name})", hold.describe()))
    }
}

impl Hold {
    fn describe(&self) -> String {
        match &self.container {
            Some(container) => container.to_string(),
            None => "a container that kubelet does not name".to_owned(),
        }
    }

    /// Whether the containers have ended: the pod has been listed without the device for long enough. A pod that is missing from the list
    /// may have been deleted by force while its containers are still ending, so its directory decides. If directories cannot be read, only
    /// a timeout can.
    fn has_ended(&mut self, shown: &ResourceSnapshot, now: Duration) -> bool {
        let is_listed = self.container.as_ref().is_some_and(|container| {
            shown
                .pods
                .contains(&(container.namespace.clone(), container.pod.clone()))
        });
        let enough = match (is_listed, &shown.pods_unseen) {
            (true, _) => NAMESAKE,
            (false, Some(_)) => UNLISTED,
            (false, None) => {
                self.without_it_since = None;
                return false;
            }
        };
        let since = *self.without_it_since.get_or_insert(now);
        now.saturating_sub(since) >= enough
    }
}

impl fmt::Display for PodContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "container {} of pod {}/{}",
            self.container, self.namespace, self.pod
        )
    }
}

/// Devices that both a container and a claim were given. The inventory shows them as unhealthy until the container has ended.
///
/// The controller does not know which devices containers hold, because publishing that would cost a write per pod. It learns of a conflict
/// only after it has allocated such a device; the next claim then gets another one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conflicting(BTreeSet<String>);

impl Conflicting {
    /// The health text of such a device in the inventory.
    pub const UNHEALTHY: &str =
        "a container has it as an extended resource, so no claim can get it before the container ends";

    /// Records that a device was allocated to a claim, or requested for one, if a container holds it.
    pub fn claimed(&mut self, device: &str, containers: &Containers) {
        if containers.hold(device) {
            self.0.insert(device.to_owned());
        }
    }

    /// Drops the devices that containers no longer hold.
    pub fn settle(&mut self, containers: &Containers) {
        self.0.retain(|device| containers.hold(device));
    }

    /// The conflicting devices.
    pub fn devices(&self) -> &BTreeSet<String> {
        &self.0
    }
}

/// Withdrawn extended resources, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WithdrawnDevices(BTreeMap<String, WithdrawnResource>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct WithdrawnResource {
    /// The devices that it had, with their device numbers. All of them count as held until kubelet has shown its holders.
    devices: BTreeMap<String, Vec<DeviceNumber>>,
    containers: Containers,
}

impl WithdrawnDevices {
    /// Records that a resource has, or may have, lost these devices. `granted` are grants that kubelet may not show yet.
    pub fn withdraw(
        &mut self,
        resource: &str,
        devices: BTreeMap<String, Vec<DeviceNumber>>,
        granted: Containers,
    ) {
        let withdrawn = self.0.entry(resource.to_owned()).or_default();
        for (device, numbers) in devices {
            // A container may still have the device's first numbers if the device has moved twice.
            add_numbers(withdrawn.devices.entry(device).or_default(), &numbers);
        }
        withdrawn.containers = granted;
    }

    /// Updates the holders of a resource from a snapshot of kubelet's view.
    pub fn seen(&mut self, resource: &str, shown: &ResourceSnapshot, now: Duration) {
        if let Some(withdrawn) = self.0.get_mut(resource) {
            withdrawn.containers.seen(shown, now);
        }
    }

    /// Drops each resource whose devices in use it still serves under the same names and device nodes: kubelet tracks those itself. A device
    /// that has moved and is back has had other nodes, which a container that was restarted meanwhile may have.
    pub fn settle(&mut self, serves: impl Fn(&str, &str, &[DeviceNumber]) -> bool) {
        self.0.retain(|resource, withdrawn| {
            if withdrawn.containers.known() {
                let mut held = withdrawn.containers.devices();
                held.any(|(device, numbers)| {
                    let had = withdrawn.devices.get(device).map(Vec::as_slice);
                    !serves(resource, device, numbers) || !serves(resource, device, had.unwrap_or_default())
                })
            } else {
                // A resource without devices may have had some that were unplugged since.
                let mut had = withdrawn.devices.iter();
                had.len() == 0 || had.any(|(device, numbers)| !serves(resource, device, numbers))
            }
        });
    }

    /// Whether no resource is withdrawn.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether kubelet has shown the holders of every resource.
    pub fn is_known(&self) -> bool {
        self.0.values().all(|withdrawn| withdrawn.containers.known())
    }

    /// The resource names to query kubelet for.
    pub fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// Whether a container holds, or may hold, a device under this name.
    pub fn has(&self, resource: &str, device: &str) -> bool {
        self.0
            .get(resource)
            .is_some_and(|withdrawn| withdrawn.has(device))
    }

    /// Describes a container that holds, or may hold, a device under another name.
    pub fn holder_by_another_name(&self, device: &Device) -> Option<String> {
        self.0.values().find_map(|withdrawn| {
            let holder = withdrawn.containers.holder_by_another_name(device);
            holder.or_else(|| {
                let (name, _) = withdrawn.why_by_another_name(device)?;
                Some(format!("a container that may have it as {name}"))
            })
        })
    }

    /// The device numbers that containers got, or may have got, a device with, as one that the resource has lost.
    pub fn numbers(&self, resource: &str, device: &str) -> Vec<DeviceNumber> {
        let Some(withdrawn) = self.0.get(resource) else {
            return Vec::new();
        };
        let numbers = if withdrawn.containers.known() {
            withdrawn.containers.numbers(device)
        } else {
            withdrawn.devices.get(device).map(Vec::as_slice)
        };
        numbers.unwrap_or_default().to_vec()
    }

    /// Marks devices as unhealthy that containers hold, or may hold, under a name that does not serve them (any more). Devices with several
    /// shares are exempt: a holder of one share does not block the others.
    pub fn withhold(&self, devices: &mut Devices, serves: impl Fn(&str, &Device) -> bool) {
        for device in devices.values_mut() {
            if device.unhealthy.is_some() || device.is_shared() {
                continue;
            }
            let cause = self.0.iter().find_map(|(resource, withdrawn)| {
                if !serves(resource, device)
                    && let Some(why) = withdrawn.why(&device.name)
                {
                    return Some(format!(
                        "{why} as {resource}, which no longer offers it; it is free when the container has ended"
                    ));
                }
                let (name, why) = withdrawn.why_by_another_name(device)?;
                Some(format!(
                    "{why} as {name} of {resource}, which is the same device node; it is free when the container has ended"
                ))
            });
            if let Some(cause) = cause {
                withhold_device(device, cause);
            }
        }
    }
}

impl WithdrawnResource {
    /// Whether a container holds, or may hold, a device under this name.
    fn has(&self, device: &str) -> bool {
        self.containers.hold(device) || (!self.containers.known() && self.devices.contains_key(device))
    }

    fn why(&self, device: &str) -> Option<String> {
        if !self.has(device) {
            return None;
        }
        Some(match self.containers.holder(device) {
            Some(holder) => format!("{holder} has it"),
            None => "kubelet does not show yet whether a container has it".to_owned(),
        })
    }

    /// Another name under which a container holds, or may hold, the device.
    fn why_by_another_name(&self, device: &Device) -> Option<(&str, String)> {
        let held = self.containers.devices().chain(
            self.devices
                .iter()
                .map(|(name, numbers)| (name.as_str(), numbers.as_slice())),
        );
        let mut same = held.filter(|(name, numbers)| {
            *name != device.name && self.has(name) && share_a_node(numbers, &device.device_numbers)
        });
        same.find_map(|(name, _)| Some((name, self.why(name)?)))
    }
}

/// Marks a healthy device as unhealthy. The device itself is fit for use, so its taint evicts no pod.
pub(super) fn withhold_device(device: &mut Device, why: String) {
    if device.unhealthy.is_none() {
        device.unhealthy = Some(shortened(why));
        device.taint_effect = TaintEffect::NoSchedule;
    }
}

/// Truncates a text to the limit of the inventory: claim names may be long.
pub(super) fn shortened(text: String) -> String {
    match text.char_indices().nth(TEXT_MAX) {
        Some((end, _)) => text.get(..end).unwrap_or_default().to_owned(),
        None => text,
    }
}

/// The allocated claims with devices on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatedClaims {
    known: bool,
    claims: BTreeMap<String, AllocatedClaim>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct AllocatedClaim {
    claim: String,
    devices: Vec<String>,
}

impl AllocatedClaims {
    /// Whether all claims have been listed once, or the cluster cannot have any. Until then, only devices that a container already holds
    /// are offered to containers.
    pub fn known(&self) -> bool {
        self.known
    }

    /// A complete list without claims.
    pub fn none() -> Self {
        Self {
            known: true,
            claims: BTreeMap::new(),
        }
    }

    /// Records the current state of one claim.
    pub fn set(&mut self, claim: &ResourceClaim, driver_name: &str, node_name: &str) {
        let metadata = &claim.metadata;
        let uid = metadata.uid.clone().unwrap_or_default();
        let devices = devices(claim, driver_name, node_name);
        if devices.is_empty() {
            self.claims.remove(&uid);
            return;
        }
        let claim = format!(
            "claim {}/{} (uid {uid})",
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default(),
        );
        self.claims.insert(uid, AllocatedClaim { claim, devices });
    }

    /// Forgets a deleted claim.
    pub fn remove(&mut self, uid: &str) {
        self.claims.remove(uid);
    }

    /// The number of claims with devices on this node.
    pub fn count(&self) -> usize {
        self.claims.len()
    }

    /// Whether a claim has allocated devices of this node.
    pub fn has(&self, uid: &str) -> bool {
        self.claims.contains_key(uid)
    }

    /// Describes the claim that a device is allocated to.
    pub fn holder(&self, device: &str) -> Option<&str> {
        self.claims
            .values()
            .find(|allocated| allocated.devices.iter().any(|name| name == device))
            .map(|allocated| allocated.claim.as_str())
    }

    /// The devices that are allocated to claims.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.claims
            .values()
            .flat_map(|allocated| allocated.devices.iter().map(String::as_str))
    }
}

/// The devices of this node that this driver allocated to a claim.
fn devices(claim: &ResourceClaim, driver_name: &str, node_name: &str) -> Vec<String> {
    let allocation = claim.status.allocation_of(driver_name);
    let handles = allocation
        .into_iter()
        .flat_map(|allocation| &allocation.resource_handles);
    handles
        .filter_map(|handle| DeviceHandle::parse(handle.data.as_deref()?).ok())
        .filter(|handle| handle.node_name == node_name)
        .flat_map(|handle| handle.devices)
        .map(|device| device.device)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(100);

    #[test]
    fn a_withdrawn_device_has_a_holder_until_kubelet_answers() {
        let number = DeviceNumber {
            kind: crate::api::crd::DeviceNodeKind::Character,
            major: 188,
            minor: 0,
        };
        let device = Device {
            name: "y".into(),
            device_numbers: [number].into(),
            ..Device::default()
        };
        let mut withdrawn = WithdrawnDevices::default();
        let devices = BTreeMap::from([("x".to_owned(), vec![number])]);
        withdrawn.withdraw("example.com/x", devices, Containers::default());
        let holder = withdrawn.holder_by_another_name(&device);
        assert_eq!(holder.as_deref(), Some("a container that may have it as x"));
        assert_eq!(withdrawn.numbers("example.com/x", "x"), [number]);
        // It moves once more before kubelet answers.
        let moved = DeviceNumber { minor: 1, ..number };
        let devices = BTreeMap::from([("x".to_owned(), vec![moved])]);
        withdrawn.withdraw("example.com/x", devices, Containers::default());
        assert!(withdrawn.holder_by_another_name(&device).is_some());
        withdrawn.seen("example.com/x", &ResourceSnapshot::default(), START);
        assert_eq!(withdrawn.holder_by_another_name(&device), None);
        assert!(withdrawn.numbers("example.com/x", "x").is_empty());
    }

    #[test]
    fn a_grant_counts_when_its_resource_goes_to_claims_too() {
        let (mut granted, mut containers) = (Containers::default(), Containers::default());
        granted.allocated([("x", &[][..])], START);
        containers.add_granted(&granted);
        containers.seen(&ResourceSnapshot::default(), later(29));
        assert!(containers.hold("x"), "its pod is still being admitted");
        containers.seen(&ResourceSnapshot::default(), later(31));
        assert!(!containers.hold("x"));
    }

    fn later(seconds: u64) -> Duration {
        START + Duration::from_secs(seconds)
    }

    fn container(pod: &str) -> PodContainer {
        PodContainer {
            namespace: "default".into(),
            pod: pod.into(),
            container: "main".into(),
        }
    }

    fn shown(pods: &[&str], listed: &[(&str, &str)], recorded: &[&str]) -> ResourceSnapshot {
        ResourceSnapshot {
            pods: pods
                .iter()
                .map(|pod| ("default".to_owned(), (*pod).to_owned()))
                .collect(),
            listed: listed
                .iter()
                .map(|(device, pod)| ((*device).to_owned(), container(pod)))
                .collect(),
            recorded: recorded.iter().map(|device| (*device).to_owned()).collect(),
            ..ResourceSnapshot::default()
        }
    }

    #[test]
    fn grants_are_unknown_until_kubelet_lists_them() {
        let mut containers = Containers::default();
        containers.allocated([("x", &[][..])], START);
        assert!(!containers.known() && containers.hold("x"));
        containers.seen(&shown(&[], &[], &[]), START);
        assert!(containers.known());
    }

    #[test]
    fn an_unverifiable_record_counts_for_five_minutes() {
        let unseen = |pods: &[&str], listed: &[(&str, &str)]| ResourceSnapshot {
            pods_unseen: Some("not mounted".into()),
            ..shown(pods, listed, &["x"])
        };
        let mut containers = Containers::default();
        containers.seen(&unseen(&["p"], &[("x", "p")]), START);
        // The pod has ended. Kubelet rewrites its checkpoint only at the next grant.
        containers.seen(&unseen(&[], &[]), later(10));
        containers.seen(&unseen(&[], &[]), later(309));
        assert!(containers.hold("x"));
        containers.seen(&unseen(&[], &[]), later(310));
        assert!(!containers.hold("x"));
        containers.seen(&unseen(&["p"], &[("x", "p")]), later(311));
        assert!(containers.hold("x"), "it is listed");
    }

    #[test]
    fn a_device_is_held_from_allocate_before_kubelet_lists_it() {
        let mut containers = Containers::default();
        containers.allocated([("x", &[][..])], START);
        containers.seen(&shown(&["p"], &[], &[]), later(1));
        assert!(containers.hold("x"), "the pod is being admitted");
        containers.seen(&shown(&["p"], &[("x", "p")], &["x"]), later(2));
        assert_eq!(
            containers.holder("x").as_deref(),
            Some("container main of pod default/p")
        );
        containers.seen(&shown(&[], &[], &[]), later(3));
        assert!(!containers.hold("x"), "and free as soon as the pod is gone");
    }

    #[test]
    fn a_container_holds_the_device_node_under_every_name() {
        let device = |name: &str, number: &str| Device {
            name: name.into(),
            device_numbers: [number.parse().unwrap()].into(),
            ..Device::default()
        };
        let (same, other) = (device("by-id", "c120:6"), device("other", "c120:7"));
        let mut containers = Containers::default();
        containers.allocated([("x", &*same.device_numbers)], START);
        containers.seen(&shown(&["p"], &[("x", "p")], &["x"]), later(1));
        let holder = containers.holder_of(&same).unwrap();
        assert_eq!(holder, "container main of pod default/p (as x)");
        assert_eq!(containers.holder_of(&other), None);
        // The next process reads the device number from kubelet's checkpoint.
        let mut next = Containers::default();
        let numbers = [("x".to_owned(), same.device_numbers.to_vec())].into();
        let told = ResourceSnapshot {
            numbers,
            ..shown(&["p"], &[("x", "p")], &["x"])
        };
        next.seen(&told, Duration::ZERO);
        assert!(next.holder_by_another_name(&same).is_some());
        assert_eq!(next.holder_by_another_name(&device("x", "c120:6")), None);
    }

    #[test]
    fn an_allocate_without_a_pod_expires() {
        let mut containers = Containers::default();
        containers.allocated([("x", &[][..])], START);
        containers.seen(&shown(&[], &[], &[]), later(29));
        assert!(containers.hold("x"));
        containers.seen(&shown(&[], &[], &[]), later(30));
        assert!(!containers.hold("x"));
    }

    #[test]
    fn an_unlisted_init_container_holds_its_device() {
        let mut containers = Containers::default();
        containers.allocated([("x", &[][..])], START);
        containers.seen(&shown(&["p"], &[], &["x"]), later(600));
        assert!(containers.hold("x"));
        // The next process knows the device only from kubelet's checkpoint.
        let mut next = Containers::default();
        next.seen(&shown(&["p"], &[], &["x"]), Duration::ZERO);
        assert!(next.hold("x"));
        next.seen(&shown(&[], &[], &[]), later(1));
        assert!(!next.hold("x"), "the pod's directory is gone");
    }

    #[test]
    fn a_force_deleted_pod_holds_until_its_directory_is_gone() {
        let mut containers = Containers::default();
        containers.seen(&shown(&["p"], &[("x", "p")], &["x"]), START);
        containers.seen(&shown(&[], &[], &["x"]), later(1));
        assert!(containers.hold("x"), "its containers may still be ending");
        containers.seen(&shown(&[], &[], &[]), later(2));
        assert!(!containers.hold("x"));
    }

    #[test]
    fn an_ended_pod_that_is_not_deleted_holds_nothing_later() {
        let mut containers = Containers::default();
        containers.seen(&shown(&["job"], &[("x", "job")], &["x"]), START);
        containers.seen(&shown(&["job"], &[], &["x"]), later(1));
        containers.seen(&shown(&["job"], &[], &["x"]), later(60));
        assert!(containers.hold("x"));
        containers.seen(&shown(&["job"], &[], &["x"]), later(61));
        assert!(!containers.hold("x"));
    }

    #[test]
    fn a_force_deleted_pod_holds_its_device_beside_a_namesake() {
        let mut containers = Containers::default();
        containers.seen(&shown(&["set-0"], &[("x", "set-0")], &["x"]), START);
        // The new pod is listed without a grant; the directory of the old pod still exists.
        containers.seen(&shown(&["set-0"], &[], &["x"]), later(1));
        assert!(
            containers.hold("x"),
            "the containers of the old one may still be ending"
        );
        containers.seen(&shown(&["set-0"], &[], &[]), later(20));
        assert!(!containers.hold("x"), "and free as soon as its directory is gone");
        // The time without the device must be uninterrupted.
        containers.seen(&shown(&["set-0"], &[("x", "set-0")], &["x"]), later(100));
        containers.seen(&shown(&["set-0"], &[], &["x"]), later(110));
        containers.seen(&shown(&[], &[], &["x"]), later(165));
        containers.seen(&shown(&["set-0"], &[], &["x"]), later(171));
        assert!(containers.hold("x"));
    }

    #[test]
    fn a_device_granted_again_is_not_held_by_ended_pods() {
        let mut containers = Containers::default();
        containers.seen(&shown(&["job"], &[("x", "job")], &["x"]), START);
        containers.allocated([("x", &[][..])], later(1));
        containers.seen(&shown(&["job", "next"], &[], &["x"]), later(2));
        assert!(containers.hold("x"));
    }

    #[test]
    fn a_device_of_container_and_claim_conflicts_until_one_ends() {
        let (mut containers, mut conflicting) = (Containers::default(), Conflicting::default());
        conflicting.claimed("x", &containers);
        assert!(conflicting.devices().is_empty(), "no container has it");
        containers.allocated([("x", &[][..]), ("y", &[][..])], START);
        conflicting.claimed("x", &containers);
        conflicting.settle(&containers);
        assert!(conflicting.devices().iter().eq(["x"]));
        containers.seen(&shown(&[], &[], &[]), later(60));
        conflicting.settle(&containers);
        assert!(conflicting.devices().is_empty());
        assert!(Conflicting::UNHEALTHY.len() <= crate::api::crd::TEXT_MAX);
    }
}

#[cfg(test)]
mod withdrawn_tests {
    use super::super::containers::PodContainer;
    use super::*;

    const OLD: &str = "example.com/old";

    fn shown(devices: &[&str]) -> ResourceSnapshot {
        let container = PodContainer {
            namespace: "default".into(),
            pod: "p".into(),
            container: "main".into(),
        };
        ResourceSnapshot {
            pods: [("default".to_owned(), "p".to_owned())].into(),
            listed: devices
                .iter()
                .map(|device| ((*device).to_owned(), container.clone()))
                .collect(),
            ..ResourceSnapshot::default()
        }
    }

    fn unnumbered(devices: &[&str]) -> BTreeMap<String, Vec<DeviceNumber>> {
        let unnumbered = |device: &&str| ((*device).to_owned(), Vec::new());
        devices.iter().map(unnumbered).collect()
    }

    fn withdrawing(devices: &[&str], granted: Containers) -> WithdrawnDevices {
        let mut withdrawn = WithdrawnDevices::default();
        withdrawn.withdraw(OLD, unnumbered(devices), granted);
        withdrawn
    }

    fn devices(names: &[&str], shares: Option<u32>) -> Devices {
        let device = |name: &&str| {
            let device = Device {
                name: (*name).into(),
                shares,
                ..Device::default()
            };
            ((*name).to_owned(), device)
        };
        names.iter().map(device).collect()
    }

    /// The withheld devices among `x`, `y` and `z`.
    fn withheld(withdrawn: &WithdrawnDevices, serves: bool) -> Vec<String> {
        let mut all = devices(&["x", "y", "z"], None);
        withdrawn.withhold(&mut all, |_, _| serves);
        let withheld = all.values().filter(|device| device.unhealthy.is_some());
        withheld.map(|device| device.name.clone()).collect()
    }

    #[test]
    fn withdrawn_devices_are_withheld_until_kubelet_lists_grants() {
        let mut withdrawn = withdrawing(&["x", "y"], Containers::default());
        assert!(!withdrawn.is_known() && withdrawn.has(OLD, "y") && !withdrawn.has(OLD, "z"));
        assert_eq!(withheld(&withdrawn, false), ["x", "y"]);
        assert_eq!(withheld(&withdrawn, true), Vec::<String>::new(), "it serves them");
        withdrawn.settle(|_, _, _| false);
        assert!(!withdrawn.is_empty());
        withdrawn.seen(OLD, &shown(&["x"]), Duration::ZERO);
        withdrawn.settle(|_, _, _| false);
        assert!(withdrawn.is_known());
        assert_eq!(withheld(&withdrawn, false), ["x"]);
        withdrawn.seen(OLD, &shown(&[]), Duration::ZERO);
        withdrawn.settle(|_, _, _| false);
        assert!(withdrawn.is_empty());
        assert_eq!(withheld(&withdrawn, false), Vec::<String>::new());
    }

    #[test]
    fn devices_still_served_by_the_resource_need_no_check() {
        let mut withdrawn = withdrawing(&["x"], Containers::default());
        withdrawn.seen(OLD, &shown(&["x", "y"]), Duration::ZERO);
        withdrawn.settle(|_, device, _| device == "x");
        assert_eq!(withdrawn.names(), [OLD], "y has left it");
        withdrawn.settle(|_, _, _| true);
        assert!(withdrawn.is_empty());
        // Without a change, kubelet need not be queried at all.
        let mut same = withdrawing(&["x"], Containers::default());
        same.settle(|_, _, _| true);
        assert!(same.is_empty());
        let mut unplugged = withdrawing(&[], Containers::default());
        unplugged.settle(|_, _, _| true);
        assert!(!unplugged.is_empty());
    }

    #[test]
    fn a_withdrawn_device_holds_each_number_it_had() {
        let [first, second] = ["c120:6", "c120:7"].map(|number| number.parse::<DeviceNumber>().unwrap());
        let serves =
            |_: &str, _: &str, numbers: &[DeviceNumber]| numbers.iter().all(|number| *number == first);
        let lost = |number| BTreeMap::from([("x".to_owned(), vec![number])]);
        let mut withdrawn = WithdrawnDevices::default();
        withdrawn.withdraw(OLD, lost(first), Containers::default());
        withdrawn.seen(OLD, &shown(&["x"]), Duration::ZERO);
        let mut once = withdrawn.clone();
        once.settle(serves);
        assert!(once.is_empty());
        withdrawn.withdraw(OLD, lost(second), Containers::default());
        withdrawn.seen(OLD, &shown(&["x"]), Duration::ZERO);
        withdrawn.settle(serves);
        let y = Device {
            name: "y".into(),
            device_numbers: [second].into(),
            ..Device::default()
        };
        assert!(withdrawn.holder_by_another_name(&y).is_some());
        withdrawn.seen(OLD, &shown(&[]), Duration::ZERO);
        withdrawn.settle(serves);
        assert!(withdrawn.is_empty());
    }

    #[test]
    fn an_unlisted_grant_counts_and_a_renamed_resource_asks_again() {
        let mut granted = Containers::default();
        granted.allocated([("x", &[][..])], Duration::ZERO);
        let mut withdrawn = withdrawing(&["x", "y"], granted);
        withdrawn.seen(OLD, &shown(&[]), Duration::from_secs(29));
        assert_eq!(withheld(&withdrawn, false), ["x"]);
        withdrawn.withdraw(OLD, unnumbered(&["z"]), Containers::default());
        assert_eq!(withheld(&withdrawn, false), ["x", "y", "z"]);
    }

    #[test]
    fn the_reason_names_the_container_and_shared_devices_are_free() {
        let mut withdrawn = withdrawing(&["x"], Containers::default());
        withdrawn.seen(OLD, &shown(&["x"]), Duration::ZERO);
        let mut all = devices(&["x"], Some(1));
        withdrawn.withhold(&mut all, |_, _| false);
        let why = all["x"].unhealthy.clone().unwrap();
        assert!(
            why.contains("container main of pod default/p") && why.contains(OLD),
            "{why}"
        );
        assert!(why.len() <= crate::api::crd::TEXT_MAX);
        let mut all = devices(&["x"], Some(110));
        withdrawn.withhold(&mut all, |_, _| false);
        assert_eq!(all["x"].unhealthy, None);
    }
}

#[cfg(test)]
mod allocated_claims_tests {
    use serde_json::json;

    use super::*;
    use crate::api::handle::{HandleDevice, VERSION};

    fn claim(uid: &str, node: &str, device: &str) -> ResourceClaim {
        let handle = DeviceHandle {
            version: VERSION,
            claim_uid: uid.into(),
            node_name: node.into(),
            node_uid: "n-1".into(),
            devices: vec![HandleDevice {
                request: "device".into(),
                device: device.into(),
            }],
        };
        serde_json::from_value(json!({
            "metadata": { "namespace": "default", "name": "camera", "uid": uid },
            "spec": { "resourceClassName": "camera" },
            "status": {
                "driverName": "drayman.dev",
                "allocation": { "resourceHandles": [{ "driverName": "drayman.dev", "data": handle.to_data().unwrap() }] },
            },
        }))
        .unwrap()
    }

    fn allocated_claims(claims: &[ResourceClaim]) -> AllocatedClaims {
        let mut allocated_claims = AllocatedClaims::none();
        for claim in claims {
            allocated_claims.set(claim, "drayman.dev", "node-a");
        }
        allocated_claims
    }

    #[test]
    fn a_claim_holds_its_devices_until_it_is_gone() {
        let mut allocated_claims = allocated_claims(&[claim("1", "node-a", "x")]);
        assert!(allocated_claims.known());
        assert_eq!(allocated_claims.holder("x"), Some("claim default/camera (uid 1)"));
        allocated_claims.set(&claim("2", "node-a", "y"), "drayman.dev", "node-a");
        allocated_claims.remove("1");
        assert_eq!(allocated_claims.holder("x"), None);
        assert!(allocated_claims.devices().eq(["y"]));
    }

    #[test]
    fn a_claim_whose_allocation_was_cleared_holds_nothing() {
        let mut allocated_claims = allocated_claims(&[claim("1", "node-a", "x")]);
        let mut cleared = claim("1", "node-a", "x");
        cleared.status.allocation = None;
        allocated_claims.set(&cleared, "drayman.dev", "node-a");
        assert_eq!(allocated_claims.holder("x"), None);
    }

    #[test]
    fn claims_of_other_nodes_and_drivers_are_ignored() {
        assert_eq!(allocated_claims(&[claim("1", "node-b", "x")]).holder("x"), None);
        let mut other = claim("1", "node-a", "x");
        other.status.driver_name = Some("other.example".into());
        assert!(
            allocated_claims(&[other.clone()]).holder("x").is_some(),
            "renamed: the handle is ours"
        );
        other.status.allocation.as_mut().unwrap().resource_handles[0].driver_name =
            Some("other.example".into());
        assert_eq!(allocated_claims(&[other]).holder("x"), None);
    }

    #[test]
    fn an_unreadable_handle_holds_nothing() {
        let mut broken = claim("1", "node-a", "x");
        broken.status.allocation.as_mut().unwrap().resource_handles[0].data = Some("not ours".into());
        let allocated_claims = allocated_claims(&[broken, claim("2", "node-a", "y")]);
        assert!(allocated_claims.devices().eq(["y"]));
    }
}
