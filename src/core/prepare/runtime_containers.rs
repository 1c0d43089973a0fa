//! The container runtime's view of device use, independent of kubelet.
//!
//! Kubelet's lists prove neither use nor disuse. It keeps claims of pods that were deleted by force while it was down, and forgets the
//! devices of such pods while their containers are still ending. The runtime knows all containers, and the devices of a container never
//! change.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Deserialize;

use super::containers::PodContainer;
use super::kubelet_state::shortened;
use super::prepared_claims::{Entry, HeldDevice, PreparedClaims};
use crate::api::crd::{Device, DeviceNodeKind, DeviceNumber, Devices};
use crate::core::names::{ClaimDevice, ClaimUid, DriverName};

/// How long a created container may still be started: kubelet waits two minutes for each call to the runtime. If kubelet was killed
/// meanwhile, a created container is never started, and is removed with its pod.
const START_LIMIT: Duration = Duration::from_secs(240);

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
    /// Its name.
    pub container: PodContainer,
    /// The state of the container.
    pub state: RuntimeContainerState,
    /// How long the container has been observed, by a monotonic clock.
    pub age: Duration,
    /// The devices that it was given.
    pub given: ContainerDevices,
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
        let uses_claim = |container: &&RuntimeContainer| container.given.cdi_devices.iter().any(is_of_claim);
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
            .find(|container| matches(&container.given))
            .map(|found| &found.container)
    }
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
            container: PodContainer {
                namespace: "default".into(),
                pod: "p".into(),
                container: "main".into(),
            },
            state: RuntimeContainerState::Running,
            age: Duration::ZERO,
            given,
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

    #[test]
    fn a_number_shows_the_use_of_a_claim_unless_others_use_it() {
        let driver = DriverName::parse("drayman.dev").unwrap();
        let uid = ClaimUid::parse(A).unwrap();
        let number = number("c120:6");
        let entry = Entry {
            namespace: "default".into(),
            name: "claim".into(),
            boot_id: "boot".into(),
            devices: vec![HeldDevice {
                numbers: vec![number],
                ..HeldDevice::named("x")
            }],
            progress: Progress::Done {
                container_edits: ContainerEdits::default(),
            },
        };
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
