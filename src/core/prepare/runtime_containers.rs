//! The container runtime's view of device use, independent of kubelet.
//!
//! Kubelet's lists prove neither use nor disuse. It keeps claims of pods that were deleted by force while it was down, and forgets the
//! devices of such pods while their containers are still ending. The runtime knows all containers, and the devices of a container never
//! change. Users can make containers whose status is too large for a message of the runtime: see [`UnknownContainers`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::containers::PodContainer;
use super::kubelet_state::shortened;
use super::prepared_claims::{Entry, HeldDevice, PreparedClaims, add_numbers, share_a_node};
use crate::api::crd::{Device, DeviceNodeKind, DeviceNumber, Devices};
use crate::core::names::{ClaimDevice, ClaimUid, DriverName};

/// How long a created container may still be started: kubelet waits two minutes for each call to the runtime. If kubelet was killed
/// meanwhile, a created container is never started, and is removed with its pod.
const START_LIMIT: Duration = Duration::from_secs(240);

/// How long after the removal of a CDI file the runtime may not yet list a container created with it: the runtime reads the file during the
/// create call, shortly before it lists the container.
pub const SETTLE: Duration = Duration::from_secs(2);

/// Maximum number of remembered devices of released claims. As long as the runtime answers, each Prepare lists the containers, so few are
/// needed. Beyond it, the oldest is forgotten.
const RELEASED_MAX: usize = 1024;

/// Maximum number of devices remembered for containers of unknown status: a bound for memory and checkpoint. Beyond it, such a container may
/// have any device.
const POSSIBLE_MAX: usize = 4096;

/// Prefix of the container annotations in which kubelet names CDI devices, separated by commas; kubelet 1.27 has no field for them.
const CDI_ANNOTATION: &str = "cdi.k8s.io/";

/// The devices that a container was given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerDevices {
    /// The device numbers of its device nodes. A privileged container sees every device node of the host; for it, these are the nodes that
    /// kubelet requested.
    pub numbers: BTreeSet<DeviceNumber>,
    /// Host paths of the device nodes that kubelet requested, if the runtime does not report their numbers.
    pub host_paths: BTreeSet<String>,
    /// The CDI devices that kubelet requested.
    pub cdi_devices: BTreeSet<String>,
}

/// The state of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeContainerState {
    /// Created, and may be started.
    Created,
    /// Running, or unknown to the runtime.
    Running,
    /// Ended.
    Exited,
}

/// A container, as reported by the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeContainer {
    /// The runtime's id for it, which is never used again.
    pub id: String,
    /// Its name.
    pub container: PodContainer,
    /// The state of the container.
    pub state: RuntimeContainerState,
    /// How long the container has been observed, by a monotonic clock.
    pub age: Duration,
    /// The devices that it was given, or why the runtime cannot send its status.
    pub given: Result<ContainerDevices, String>,
}

/// All containers of the runtime at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeContainers(pub Vec<RuntimeContainer>);

impl RuntimeContainers {
    /// A container that has a node of the device, other than by admin access.
    pub fn user_of_nodes(&self, driver: &DriverName, device: &Device) -> Option<&PodContainer> {
        self.user(|given| {
            given.has_one_of(&device.device_numbers) && !given.has_admin_access(driver, &device.name)
        })
    }

    /// A container that has one of the device's nodes or its CDI device, without admin access, or that got it by a structured claim other
    /// than `claim`, which is `None` for a starting container.
    pub fn other_user(
        &self,
        driver: &DriverName,
        device: &Device,
        claim: Option<&ClaimUid>,
    ) -> Option<&PodContainer> {
        let cdi_device = driver.cdi_device_id(&device.name);
        self.user(|given| {
            let has_it = given.has_one_of(&device.device_numbers) || given.cdi_devices.contains(&cdi_device);
            (has_it && !given.has_admin_access(driver, &device.name))
                || given.has_by_other_claim(driver, &device.name, claim)
        })
    }

    /// The containers that do not use a claim.
    #[must_use]
    pub fn without_claim(&self, driver: &DriverName, uid: &ClaimUid) -> Self {
        let is_of_claim = |id: &String| driver.claim_of_cdi_id(id).as_ref() == Some(uid);
        let uses_claim = |container: &&RuntimeContainer| {
            let mut given = container.given.iter().flat_map(|given| &given.cdi_devices);
            given.any(is_of_claim)
        };
        let others = self.0.iter().filter(|container| !uses_claim(container));
        Self(others.cloned().collect())
    }

    /// A container that uses a claim's devices: it got the claim's CDI device, or has a device number that shows the claim's use. The number
    /// does not show it if other claims share the device, or if the container has admin access to it.
    pub fn user_of_claim(
        &self,
        driver: &DriverName,
        uid: &ClaimUid,
        prepared_claims: &PreparedClaims,
        inventory: &Devices,
    ) -> Option<&PodContainer> {
        let held = prepared_claims
            .entry(uid)
            .into_iter()
            .flat_map(Entry::held_devices);
        let exclusive: Vec<&HeldDevice> = held
            .filter(|held| !inventory.get(&held.device).is_some_and(Device::is_shared))
            .collect();
        let is_of_claim = |id: &String| driver.claim_of_cdi_id(id).as_ref() == Some(uid);
        self.user(|given| {
            let has_number = |held: &&HeldDevice| {
                given.has_one_of(&held.numbers) && !given.has_admin_access(driver, &held.device)
            };
            given.cdi_devices.iter().any(is_of_claim) || exclusive.iter().any(has_number)
        })
    }

    /// A container that may still run and has devices that match.
    fn user(&self, matches: impl Fn(&ContainerDevices) -> bool) -> Option<&PodContainer> {
        let mut running = self.0.iter().filter(|container| container.may_run());
        running
            .find(|container| container.given.as_ref().is_ok_and(&matches))
            .map(|found| &found.container)
    }
}

/// The containers whose status the runtime cannot send, and the devices that they may have. Users can make such containers, so each blocks only
/// devices that claims of its own namespace held when it can have been created, and those that are also extended resources.
///
/// It is stored in the checkpoint: an earlier process may have released a device that such a container still has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UnknownContainers {
    /// The boot in which they run: none outlives it. Empty if this record has not begun: an earlier release may have released any device.
    boot_id: String,
    /// The containers that may have any device: they are older than this record, or than the release of a claim whose record was lost.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    earlier: BTreeSet<String>,
    /// The devices that each other listed container may have, by container id.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    containers: BTreeMap<String, Vec<ClaimedDevice>>,
    /// Devices of released claims that a container not yet listed may have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    released: Vec<ClaimedDevice>,
    /// The devices that containers can have got as extended resources from this process, with all their numbers.
    #[serde(skip)]
    resources: BTreeMap<String, Vec<DeviceNumber>>,
    /// Whether the record begins with the next list.
    #[serde(skip)]
    begins_with_next_list: bool,
    /// Whether the devices of the last list's containers are known.
    #[serde(skip)]
    is_complete: bool,
    /// When the last list was requested.
    #[serde(skip)]
    listed_at: Duration,
}

/// The user that is about to get a device.
#[derive(Clone, Copy, Debug)]
pub enum NewUser<'a> {
    /// A claim.
    Claim(&'a ClaimUid),
    /// A claim that already has the device, which has new numbers: only these matter.
    RenumberedClaim(&'a ClaimUid),
    /// A starting container, which gets the device as an extended resource.
    Container,
}

impl<'a> NewUser<'a> {
    /// The claim, if the device is for one.
    pub fn claim(self) -> Option<&'a ClaimUid> {
        match self {
            Self::Claim(uid) | Self::RenumberedClaim(uid) => Some(uid),
            Self::Container => None,
        }
    }
}

/// A device that a claim of a namespace holds or held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ClaimedDevice {
    namespace: String,
    device: String,
    /// The numbers that containers of the claim were given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    numbers: Vec<DeviceNumber>,
    /// When it was released; zero before the start of this process.
    #[serde(skip)]
    released_at: Duration,
}

impl UnknownContainers {
    /// The record of a boot in which no claim has been prepared yet.
    pub fn of_boot(boot_id: &str) -> Self {
        Self {
            boot_id: boot_id.to_owned(),
            ..Self::default()
        }
    }

    /// Continues in this boot with the record of an earlier process.
    pub fn resume(stored: Self, boot_id: &str) -> Self {
        if stored.boot_id == boot_id {
            return stored;
        }
        Self {
            begins_with_next_list: stored.boot_id.is_empty(),
            ..Self::of_boot(boot_id)
        }
    }

    /// The record that the next process continues with.
    #[must_use]
    pub fn to_store(&self) -> Self {
        if self.begins_with_next_list {
            return Self::default();
        }
        let released = self.released.iter().map(|device| ClaimedDevice {
            released_at: Duration::ZERO,
            ..device.clone()
        });
        Self {
            boot_id: self.boot_id.clone(),
            earlier: self.earlier.clone(),
            containers: self.containers.clone(),
            released: released.collect(),
            ..Self::default()
        }
    }

    /// Records the devices that are extended resources now. Kubelet forgets which of them a force-deleted pod has, and their mode and numbers
    /// may change meanwhile.
    pub fn offered(&mut self, devices: &Devices) {
        let resources = devices
            .values()
            .filter(|device| device.mode.serves_extended_resource());
        for device in resources {
            if self.resources.len() < POSSIBLE_MAX {
                let numbers = self.resources.entry(device.name.clone()).or_default();
                add_numbers(numbers, &device.device_numbers);
            }
        }
    }

    /// Records that a claim no longer holds its devices. A container that is created later counts as a possible user, too, until the
    /// containers are listed.
    pub fn released(&mut self, entry: &Entry, now: Duration) {
        if !entry.is_done() {
            return;
        }
        // A container not yet listed may have its devices, whichever they were.
        let any = is_rebuilt(entry).then(|| ClaimedDevice {
            namespace: String::new(),
            device: String::new(),
            numbers: Vec::new(),
            released_at: now,
        });
        for mut device in claimed_devices(entry).chain(any) {
            device.released_at = now;
            let is_same =
                |other: &ClaimedDevice| other.namespace == device.namespace && other.device == device.device;
            if let Some(before) = self.released.iter().position(is_same) {
                add_numbers(&mut device.numbers, &self.released.remove(before).numbers);
            } else if self.released.len() == RELEASED_MAX {
                self.released.remove(0);
            }
            self.released.push(device);
        }
    }

    /// Processes a list of containers that was requested at this time. A list older than the last is ignored.
    pub fn listed(&mut self, containers: &RuntimeContainers, at: Duration, prepared_claims: &PreparedClaims) {
        if at < self.listed_at {
            return;
        }
        self.listed_at = at;
        let unknown: BTreeMap<&str, &str> = containers
            .0
            .iter()
            .filter(|container| container.given.is_err())
            .map(|container| (container.id.as_str(), container.container.namespace.as_str()))
            .collect();
        if std::mem::take(&mut self.begins_with_next_list) {
            self.earlier = unknown.keys().map(|id| (*id).to_owned()).collect();
        }
        self.earlier.retain(|id| unknown.contains_key(id.as_str()));
        self.containers.retain(|id, _| unknown.contains_key(id.as_str()));
        self.is_complete = !prepared_claims.entries().values().any(is_rebuilt);
        for (id, namespace) in unknown {
            if self.containers.contains_key(id) || self.earlier.contains(id) {
                continue;
            }
            if self.released.iter().any(|device| device.namespace.is_empty()) {
                self.earlier.insert(id.to_owned());
                continue;
            }
            // A container gets no devices before its claim is prepared.
            let done = prepared_claims.entries().values().filter(|entry| entry.is_done());
            let all = done
                .flat_map(claimed_devices)
                .chain(self.released.iter().cloned());
            let mut possible: Vec<ClaimedDevice> = Vec::new();
            for device in all.filter(|device| device.namespace == namespace) {
                match possible.iter_mut().find(|known| known.device == device.device) {
                    Some(known) => add_numbers(&mut known.numbers, &device.numbers),
                    None => possible.push(device),
                }
            }
            let known: usize = self.containers.values().map(Vec::len).sum();
            self.is_complete &= known + possible.len() <= POSSIBLE_MAX;
            if !self.is_complete {
                return;
            }
            self.containers.insert(id.to_owned(), possible);
        }
        self.released.retain(|device| device.released_at + SETTLE >= at);
    }

    /// A container that may have the device, and why the runtime does not show it. For a claim, it may also have the device as an extended
    /// resource, of which kubelet does not tell the namespace. A starting container is not refused for that: one user could block all
    /// extended resources.
    pub fn other_user<'a>(
        &self,
        containers: &'a RuntimeContainers,
        device: &Device,
        new_user: NewUser<'_>,
    ) -> Option<(&'a PodContainer, &'a str)> {
        let is_for_claim = new_user.claim().is_some();
        let by_name = !matches!(new_user, NewUser::RenumberedClaim(_));
        let was_resource = || {
            self.resources.len() >= POSSIBLE_MAX
                || (by_name && self.resources.contains_key(&device.name))
                || self
                    .resources
                    .values()
                    .any(|numbers| share_a_node(numbers, &device.device_numbers))
        };
        let may_be_resource = is_for_claim && (device.mode.serves_extended_resource() || was_resource());
        let is_it = |possible: &ClaimedDevice| {
            (by_name && possible.device == device.name)
                || share_a_node(&possible.numbers, &device.device_numbers)
        };
        unknown_user(containers, |container| match self.possible(container) {
            Some(possible) => may_be_resource || possible.iter().any(is_it),
            None => is_for_claim,
        })
    }

    /// A container that may use the devices of a prepared claim.
    pub fn user_of_claim<'a>(
        &self,
        containers: &'a RuntimeContainers,
        entry: &Entry,
    ) -> Option<&'a PodContainer> {
        let is_held = |possible: &ClaimedDevice| {
            let mut held = entry.held_devices();
            possible.namespace == entry.namespace && held.any(|held| held.device == possible.device)
        };
        let user = unknown_user(containers, |container| {
            self.possible(container)
                .is_none_or(|possible| possible.iter().any(is_held))
        });
        user.map(|(container, _)| container)
    }

    /// The devices that a container may have; `None` stands for any.
    fn possible(&self, container: &RuntimeContainer) -> Option<&[ClaimedDevice]> {
        let known = self.containers.get(&container.id).filter(|_| self.is_complete);
        known.map(Vec::as_slice)
    }
}

/// A container of unknown status that may still run, and matches.
fn unknown_user(
    containers: &RuntimeContainers,
    matches: impl Fn(&RuntimeContainer) -> bool,
) -> Option<(&PodContainer, &str)> {
    let mut running = containers.0.iter().filter(|container| container.may_run());
    running.find_map(|container| {
        let problem = container.given.as_ref().err()?;
        matches(container).then_some((&container.container, problem.as_str()))
    })
}

/// Whether the namespace or the devices of a claim were lost with the checkpoint.
fn is_rebuilt(entry: &Entry) -> bool {
    entry.namespace.is_empty() || entry.has_unknown_devices()
}

/// The devices that a claim holds.
fn claimed_devices(entry: &Entry) -> impl Iterator<Item = ClaimedDevice> {
    entry.held_devices().map(|held| ClaimedDevice {
        namespace: entry.namespace.clone(),
        device: held.device.clone(),
        numbers: held.numbers.clone(),
        released_at: Duration::ZERO,
    })
}

impl ContainerDevices {
    /// Whether the container has one of these device nodes.
    fn has_one_of(&self, numbers: &[DeviceNumber]) -> bool {
        numbers.iter().any(|number| self.numbers.contains(number))
    }

    /// Whether the container has a device with admin access, beside the device's holder.
    fn has_admin_access(&self, driver: &DriverName, device: &str) -> bool {
        self.claim_devices(driver)
            .any(|claimed| claimed.admin_access && claimed.device == device)
    }

    /// Whether the container got a device by a structured claim other than `claim`, without admin access. Kubelet may have unprepared that
    /// claim before the container ended, and the device numbers of a privileged container do not show the device.
    fn has_by_other_claim(&self, driver: &DriverName, device: &str, claim: Option<&ClaimUid>) -> bool {
        self.claim_devices(driver)
            .any(|given| !given.admin_access && given.device == device && claim != Some(&given.uid))
    }

    /// The devices of structured claims of this driver.
    fn claim_devices(&self, driver: &DriverName) -> impl Iterator<Item = ClaimDevice> {
        self.cdi_devices
            .iter()
            .filter_map(|id| driver.claim_device_of_cdi_id(id))
    }
}

impl RuntimeContainer {
    /// Whether the container runs or may still be started.
    fn may_run(&self) -> bool {
        match self.state {
            RuntimeContainerState::Created => self.age < START_LIMIT,
            RuntimeContainerState::Running => true,
            RuntimeContainerState::Exited => false,
        }
    }
}

/// Why the runtime's report about a container is unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the container runtime does not report the devices of a container: {0}")]
pub struct RuntimeInfoError(String);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Info {
    runtime_spec: RuntimeSpec,
    #[serde(default)]
    config: Config,
    // Set by CRI-O.
    #[serde(default)]
    privileged: bool,
}

#[derive(Deserialize)]
struct RuntimeSpec {
    #[serde(default)]
    linux: Option<Linux>,
}

#[derive(Default, Deserialize)]
struct Linux {
    #[serde(default)]
    devices: Option<Vec<SpecDevice>>,
}

#[derive(Deserialize)]
struct SpecDevice {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    major: i64,
    #[serde(default)]
    minor: i64,
}

/// The CRI's `ContainerConfig`, as Go serializes it.
#[derive(Default, Deserialize)]
struct Config {
    #[serde(default)]
    devices: Option<Vec<ConfigDevice>>,
    #[serde(rename = "CDI_devices", default)]
    cdi_devices: Option<Vec<CdiDevice>>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    linux: Option<ConfigLinux>,
}

#[derive(Deserialize)]
struct ConfigDevice {
    #[serde(default)]
    host_path: String,
}

#[derive(Deserialize)]
struct CdiDevice {
    #[serde(default)]
    name: String,
}

#[derive(Deserialize)]
struct ConfigLinux {
    #[serde(default)]
    security_context: Option<SecurityContext>,
}

#[derive(Deserialize)]
struct SecurityContext {
    #[serde(default)]
    privileged: bool,
}

/// Parses the `info` of a container's verbose status, as containerd and CRI-O write it.
pub fn parse_info(info: &BTreeMap<String, String>) -> Result<ContainerDevices, RuntimeInfoError> {
    let text = info
        .get("info")
        .ok_or_else(|| RuntimeInfoError("its verbose status has no \"info\"".to_owned()))?;
    let info: Info = serde_json::from_str(text).map_err(|error| RuntimeInfoError(shortened(&error)))?;
    let security = info.config.linux.and_then(|linux| linux.security_context);
    let is_privileged = info.privileged || security.is_some_and(|security| security.privileged);
    let devices = info.runtime_spec.linux.and_then(|linux| linux.devices);
    let numbers = devices.into_iter().flatten().filter_map(|device| device.number());
    let names = info.config.cdi_devices.into_iter().flatten();
    let annotations = info.config.annotations.into_iter().flatten();
    let annotated = annotations
        .filter(|(name, _)| name.starts_with(CDI_ANNOTATION))
        .flat_map(|(_, names)| names.split(',').map(str::to_owned).collect::<Vec<_>>());
    let mut given = ContainerDevices {
        cdi_devices: names.map(|device| device.name).chain(annotated).collect(),
        ..ContainerDevices::default()
    };
    if is_privileged {
        let paths = info.config.devices.into_iter().flatten();
        given.host_paths = paths.map(|device| device.host_path).collect();
    } else {
        given.numbers = numbers.collect();
    }
    Ok(given)
}

impl SpecDevice {
    fn number(&self) -> Option<DeviceNumber> {
        let kind = match self.kind.as_str() {
            "c" | "u" => DeviceNodeKind::Character,
            "b" => DeviceNodeKind::Block,
            _ => return None,
        };
        Some(DeviceNumber {
            kind,
            major: u32::try_from(self.major).ok()?,
            minor: u32::try_from(self.minor).ok()?,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::api::crd::Mode;
    use crate::core::prepare::container_edits::ContainerEdits;
    use crate::core::prepare::prepared_claims::Progress;

    const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
    const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

    fn info(text: &str) -> Result<ContainerDevices, RuntimeInfoError> {
        parse_info(&BTreeMap::from([("info".to_owned(), text.to_owned())]))
    }

    fn number(text: &str) -> DeviceNumber {
        text.parse().unwrap()
    }

    /// As containerd 1.7 writes it, shortened.
    const CONTAINERD: &str = r#"{"sandboxID":"s","pid":7,"removing":false,"config":{"metadata":{"name":"main"},
        "devices":[{"container_path":"/dev/a","host_path":"/dev/a","permissions":"rw"}],
        "CDI_devices":[{"name":"drayman.dev/claim=u-1"}],"linux":{"security_context":{"privileged":PRIVILEGED}}},
        "runtimeSpec":{"linux":{"devices":[{"path":"/dev/a","type":"c","major":120,"minor":6,"fileMode":8630},
        {"path":"/dev/b","type":"b","major":8,"minor":0},{"path":"/dev/p","type":"p"}]}}}"#;

    #[test]
    fn device_numbers_are_those_of_the_oci_spec() {
        let given = info(&CONTAINERD.replace("PRIVILEGED", "false")).unwrap();
        assert!(given.numbers.iter().eq(&[number("c120:6"), number("b8:0")]));
        assert!(given.cdi_devices.contains("drayman.dev/claim=u-1") && given.host_paths.is_empty());
    }

    #[test]
    fn a_privileged_container_has_what_kubelet_asked_for() {
        let given = info(&CONTAINERD.replace("PRIVILEGED", "true")).unwrap();
        assert!(given.numbers.is_empty());
        assert!(given.host_paths.iter().eq(["/dev/a"]));
        let given = info(
            r#"{"privileged":true,"runtimeSpec":{"linux":{"devices":[{"type":"c","major":1,"minor":3}]}}}"#,
        );
        assert_eq!(given, Ok(ContainerDevices::default()), "as CRI-O reports it");
    }

    #[test]
    fn cdi_devices_in_annotations_count_too() {
        let given = info(
            r#"{"config":{"annotations":{"cdi.k8s.io/a":"drayman.dev/claim=u-1,v.dev/c=2","io.kubernetes.x":"v.dev/c=3"}},"runtimeSpec":{}}"#,
        )
        .unwrap();
        assert!(
            given
                .cdi_devices
                .iter()
                .eq(["drayman.dev/claim=u-1", "v.dev/c=2"])
        );
    }

    #[test]
    fn a_status_without_the_spec_is_an_error() {
        for text in ["", "{}", "[]", r#"{"runtimeSpec":7}"#] {
            assert!(info(text).is_err(), "{text}");
        }
        assert!(parse_info(&BTreeMap::new()).is_err());
    }

    #[test]
    fn a_container_has_a_device_until_it_has_ended() {
        let given = ContainerDevices {
            numbers: [number("c120:6")].into(),
            cdi_devices: ["drayman.dev/claim=u-1".to_owned()].into(),
            ..ContainerDevices::default()
        };
        let container = |state, seconds| RuntimeContainer {
            state,
            age: Duration::from_secs(seconds),
            ..running(given.clone())
        };
        let has = |container| {
            RuntimeContainers(vec![container])
                .user(|given| given.has_one_of(&[number("c120:6")]))
                .is_some()
        };
        assert!(has(container(RuntimeContainerState::Running, 9_999)));
        assert!(has(container(RuntimeContainerState::Created, 1)));
        assert!(
            !has(container(RuntimeContainerState::Created, 9_999)),
            "it is never started"
        );
        assert!(!has(container(RuntimeContainerState::Exited, 1)));
        let all = RuntimeContainers(vec![container(RuntimeContainerState::Running, 1)]);
        assert!(all.user(|given| given.has_one_of(&[number("c120:7")])).is_none());
        assert!(
            all.user(|given| given.cdi_devices.contains("drayman.dev/claim=u-1"))
                .is_some()
        );
    }

    pub(crate) fn running(given: ContainerDevices) -> RuntimeContainer {
        RuntimeContainer {
            id: "a".into(),
            container: PodContainer {
                namespace: "default".into(),
                pod: "p".into(),
                container: "main".into(),
            },
            state: RuntimeContainerState::Running,
            age: Duration::ZERO,
            given: Ok(given),
        }
    }

    /// A running container with these device numbers and with the CDI device of this name.
    fn one(numbers: &[DeviceNumber], name: &str) -> RuntimeContainers {
        RuntimeContainers(vec![running(ContainerDevices {
            numbers: numbers.iter().copied().collect(),
            cdi_devices: [format!("drayman.dev/claim={name}")].into(),
            ..ContainerDevices::default()
        })])
    }

    #[test]
    fn a_container_has_the_devices_of_unprepared_claims() {
        let driver = DriverName::parse("drayman.dev").unwrap();
        let device = Device {
            name: "x".into(),
            ..Device::default()
        };
        let own = ClaimUid::parse(A).unwrap();
        for (name, claim, is_refused) in [
            (format!("{B}-x"), Some(&own), true),
            (format!("{B}-x"), None, true),
            (format!("{B}-y"), Some(&own), false),
            (format!("admin-{B}-x"), Some(&own), false),
            (format!("{A}-x"), Some(&own), false),
        ] {
            let containers = one(&[], &name);
            let user = containers.other_user(&driver, &device, claim);
            assert_eq!(user.is_some(), is_refused, "{name} {user:?}");
        }
    }

    fn entry(namespace: &str, device: &str) -> Entry {
        Entry {
            namespace: namespace.into(),
            name: "claim".into(),
            boot_id: "boot".into(),
            devices: vec![HeldDevice::named(device)],
            progress: Progress::Done {
                container_edits: ContainerEdits::default(),
            },
        }
    }

    /// Containers in the default namespace whose status is too large.
    fn unknown(ids: &[&str]) -> RuntimeContainers {
        let container = |id: &&str| RuntimeContainer {
            id: (*id).to_owned(),
            given: Err("too large".into()),
            ..running(ContainerDevices::default())
        };
        RuntimeContainers(ids.iter().map(container).collect())
    }

    /// Whether one of these unknown containers may have a device, for a claim.
    fn may_have(all: &UnknownContainers, containers: &RuntimeContainers, device: &str) -> bool {
        let device = Device {
            name: device.into(),
            ..Device::default()
        };
        all.other_user(containers, &device, NewUser::Claim(&uid(9)))
            .is_some()
    }

    fn uid(last: usize) -> ClaimUid {
        ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0{last}")).unwrap()
    }

    fn prepared(entries: &[Entry]) -> PreparedClaims {
        let entries = entries.iter().cloned().enumerate();
        PreparedClaims::new("boot", entries.map(|(last, entry)| (uid(last), entry)).collect())
    }

    #[test]
    fn an_unknown_container_may_have_what_its_namespace_held() {
        let (none, at) = (RuntimeContainers::default(), Duration::from_secs);
        let mut all = UnknownContainers::of_boot("boot");
        all.released(&entry("default", "earlier"), at(10));
        all.released(&entry("default", "before"), at(18));
        // By the time of this list, the runtime shows each container that was created before the first release.
        all.listed(&none, at(20), &prepared(&[]));
        all.released(&entry("other", "of-other"), at(21));
        let first = unknown(&["first"]);
        let held = [entry("default", "held"), entry("other", "of-other-now")];
        all.listed(&first, at(30), &prepared(&held));
        for (device, expected) in [
            ("held", true),
            ("before", true),
            ("earlier", false),
            ("of-other", false),
            ("of-other-now", false),
            ("free", false),
        ] {
            assert_eq!(may_have(&all, &first, device), expected, "{device}");
        }
        assert!(all.user_of_claim(&first, &held[0]).is_some());
        assert!(all.user_of_claim(&first, &held[1]).is_none());

        // It cannot have a device that is prepared later, an older list does not count, and the next process knows the same.
        all.listed(&first, at(40), &prepared(&[entry("default", "after")]));
        all.listed(&none, at(39), &prepared(&[]));
        let mut next = UnknownContainers::resume(all.to_store(), "boot");
        next.listed(&first, at(0), &prepared(&[]));
        for all in [&all, &next] {
            for (device, expected) in [("held", true), ("before", true), ("after", false)] {
                assert_eq!(may_have(all, &first, device), expected, "{device}");
            }
        }
        let mut next = UnknownContainers::resume(all.to_store(), "next");
        next.listed(&first, at(0), &prepared(&[]));
        assert!(!may_have(&next, &first, "held"), "no container outlives a boot");

        // A later container may have the devices released meanwhile, but not those of the first one.
        all.released(&entry("default", "last"), at(45));
        let (both, second) = (unknown(&["first", "second"]), unknown(&["second"]));
        all.listed(&both, at(50), &prepared(&[]));
        assert!(may_have(&all, &second, "last") && !may_have(&all, &second, "held"));
        all.listed(&second, at(60), &prepared(&[]));
        assert!(!may_have(&all, &second, "held"));
        all.listed(&none, at(70), &prepared(&[]));
        assert_eq!(all.to_store(), UnknownContainers::of_boot("boot"));
    }

    #[test]
    fn containers_from_before_the_record_may_have_anything() {
        let at = Duration::from_secs;
        let (first, both) = (unknown(&["first"]), unknown(&["first", "second"]));
        let mut all = UnknownContainers::resume(UnknownContainers::default(), "boot");
        let stored = all.to_store();
        assert_eq!(
            stored,
            UnknownContainers::default(),
            "it begins with the first list"
        );
        all.listed(&first, at(1), &prepared(&[]));
        let mut next = UnknownContainers::resume(all.to_store(), "boot");
        for all in [&mut all, &mut next] {
            all.listed(&both, at(2), &prepared(&[]));
            assert!(may_have(all, &both, "free"));
            all.listed(&unknown(&["second"]), at(3), &prepared(&[]));
            assert!(!may_have(all, &unknown(&["second"]), "free"));
        }
    }

    #[test]
    fn the_release_of_a_rebuilt_claim_concerns_any_new_container() {
        let nothing_known = Entry {
            devices: Vec::new(),
            ..entry("default", "x")
        };
        for lost in [entry("", "x"), nothing_known] {
            let (containers, at) = (unknown(&["a"]), Duration::from_secs);
            let mut all = UnknownContainers::of_boot("boot");
            all.listed(
                &RuntimeContainers::default(),
                at(1),
                &prepared(std::slice::from_ref(&lost)),
            );
            all.released(&lost, at(5));
            all.listed(&containers, at(6), &prepared(&[]));
            all.listed(&containers, at(60), &prepared(&[]));
            assert!(may_have(&all, &containers, "x"));
            all.listed(&unknown(&["b"]), at(61), &prepared(&[]));
            assert!(!may_have(&all, &unknown(&["b"]), "x"));
        }
    }

    #[test]
    fn an_unknown_container_keeps_what_was_an_extended_resource() {
        let number = number("c120:6");
        let device = |name: &str, mode, numbers: &[DeviceNumber]| Device {
            name: name.into(),
            mode,
            device_numbers: numbers.iter().copied().collect(),
            ..Device::default()
        };
        let gps = device("gps", Mode::ExtendedResource, &[number]);
        let containers = unknown(&["a"]);
        let mut all = UnknownContainers::of_boot("boot");
        all.offered(&Devices::from([("gps".to_owned(), gps)]));
        all.listed(&containers, Duration::ZERO, &prepared(&[]));
        let uid = uid(9);
        for (device, is_refused) in [
            (device("modem", Mode::Claims, &[number]), true),
            (device("gps", Mode::Claims, &[]), true),
            (device("other", Mode::Claims, &[]), false),
        ] {
            let user = all.other_user(&containers, &device, NewUser::Claim(&uid));
            assert_eq!(user.is_some(), is_refused, "{device:?}");
        }
    }

    #[test]
    fn a_failed_prepare_gives_no_container_a_device() {
        let started = Entry {
            progress: Progress::Started {
                container_edits: None,
            },
            ..entry("default", "x")
        };
        let containers = unknown(&["a"]);
        let mut all = UnknownContainers::of_boot("boot");
        all.released(&started, Duration::ZERO);
        all.listed(&containers, Duration::ZERO, &prepared(&[started]));
        assert!(!may_have(&all, &containers, "x"));
    }

    #[test]
    fn rebuilt_claims_may_be_in_any_unknown_container() {
        let at = Duration::from_secs;
        let containers = unknown(&["a"]);
        let mut all = UnknownContainers::default();
        let rebuilt = entry("", "x");
        all.listed(&containers, at(1), &prepared(std::slice::from_ref(&rebuilt)));
        assert!(may_have(&all, &containers, "free"));
        assert!(all.user_of_claim(&containers, &rebuilt).is_some());
        // Once the claim is known, the container counts as new.
        let known = entry("default", "x");
        all.listed(&containers, at(2), &prepared(&[known]));
        assert!(may_have(&all, &containers, "x") && !may_have(&all, &containers, "free"));
    }

    #[test]
    fn an_unknown_container_may_have_any_extended_resource() {
        let number = number("c120:6");
        let mut held = entry("default", "renamed");
        held.devices[0].numbers.push(number);
        let containers = unknown(&["a"]);
        let mut all = UnknownContainers::default();
        all.listed(&containers, Duration::ZERO, &prepared(&[held]));
        let uid = uid(9);
        let (claim, renumbered) = (NewUser::Claim(&uid), NewUser::RenumberedClaim(&uid));
        for (name, mode, number, new_user, expected) in [
            ("free", Mode::Claims, None, claim, false),
            ("free", Mode::Both, None, claim, true),
            ("free", Mode::Both, None, NewUser::Container, false),
            ("new", Mode::Claims, Some(number), renumbered, true),
            ("new", Mode::Both, Some(number), NewUser::Container, true),
            ("renamed", Mode::Claims, None, renumbered, false),
            ("renamed", Mode::Claims, None, claim, true),
        ] {
            let device = Device {
                name: name.into(),
                mode,
                device_numbers: number.into_iter().collect(),
                ..Device::default()
            };
            let user = all.other_user(&containers, &device, new_user);
            assert_eq!(user.is_some(), expected, "{name} {mode:?} {new_user:?}");
        }
    }

    #[test]
    fn the_devices_of_unknown_containers_are_bounded() {
        let mut all = UnknownContainers::default();
        for number in 0..RELEASED_MAX + 7 {
            all.released(&entry("default", &number.to_string()), Duration::ZERO);
            all.released(&entry("default", &number.to_string()), Duration::ZERO);
        }
        assert_eq!(all.released.len(), RELEASED_MAX);
        assert_eq!(all.released[0].device, "7");
        let ids: Vec<String> = (0..5).map(|id| id.to_string()).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let containers = unknown(&ids);
        all.listed(&containers, Duration::ZERO, &prepared(&[]));
        let known: usize = all.containers.values().map(Vec::len).sum();
        assert_eq!(known, POSSIBLE_MAX);
        assert!(may_have(&all, &containers, "any"));
    }

    #[test]
    fn a_number_shows_the_use_of_a_claim_unless_others_use_it() {
        let driver = DriverName::parse("drayman.dev").unwrap();
        let uid = ClaimUid::parse(A).unwrap();
        let number = number("c120:6");
        let mut entry = entry("default", "x");
        entry.devices[0].numbers.push(number);
        let prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid.clone(), entry)]));
        for (shares, name, is_used) in [
            (None, format!("{B}-x"), true),
            (None, format!("admin-{B}-x"), false),
            (Some(2), format!("{B}-x"), false),
            (Some(2), format!("{A}-x"), true),
        ] {
            let device = Device {
                name: "x".into(),
                shares,
                device_numbers: [number].into(),
                ..Device::default()
            };
            let inventory = Devices::from([("x".to_owned(), device)]);
            let containers = one(&[number], &name);
            let user = containers.user_of_claim(&driver, &uid, &prepared_claims, &inventory);
            assert_eq!(user.is_some(), is_used, "{shares:?} {name}");
        }
    }
}
