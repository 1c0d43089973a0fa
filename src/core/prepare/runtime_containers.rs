//! The container runtime's view of device use, independent of kubelet.
//!
//! Kubelet's lists prove neither use nor disuse. It keeps claims of pods that were deleted by force while it was down, and forgets the
//! devices of such pods while their containers are still ending. The runtime knows all containers, and the devices of a container never
//! change.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::Deserialize;

use super::kubelet_state::shortened;
use crate::api::crd::{DeviceNodeKind, DeviceNumber};
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
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
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
    /// A container that may still run and has devices that match.
    pub fn user(&self, matches: impl Fn(&ContainerDevices) -> bool) -> Option<&RuntimeContainer> {
        self.0
            .iter()
            .find(|container| container.may_run() && matches(&container.given))
    }
}

impl ContainerDevices {
    /// Whether the container has one of these device nodes.
    pub fn has_one_of(&self, numbers: &[DeviceNumber]) -> bool {
        numbers.iter().any(|number| self.numbers.contains(number))
    }

    /// Whether the container has a device with admin access, beside the device's holder.
    pub fn has_admin_access(&self, driver: &DriverName, device: &str) -> bool {
        self.claim_devices(driver)
            .any(|claimed| claimed.admin_access && claimed.device == device)
    }

    /// Whether the container got a device by a structured claim other than `claim`, without admin access. Kubelet may have unprepared that
    /// claim before the container ended, and the device numbers of a privileged container do not show the device.
    pub fn has_by_other_claim(&self, driver: &DriverName, device: &str, claim: Option<&ClaimUid>) -> bool {
        self.claim_devices(driver)
            .any(|given| !given.admin_access && given.device == device && claim != Some(&given.uid))
    }

    /// The devices of structured claims of this driver.
    pub fn claim_devices(&self, driver: &DriverName) -> impl Iterator<Item = ClaimDevice> {
        self.cdi_devices
            .iter()
            .filter_map(|id| driver.claim_device_of_cdi_id(id))
    }
}

impl RuntimeContainer {
    /// Whether the container runs or may still be started.
    pub fn may_run(&self) -> bool {
        match self.state {
            RuntimeContainerState::Created => self.age < START_LIMIT,
            RuntimeContainerState::Running => true,
            RuntimeContainerState::Exited => false,
        }
    }
}

impl fmt::Display for RuntimeContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "container {} of pod {}/{}",
            self.container, self.namespace, self.pod
        )
    }
}

/// Why the runtime's report about a container is unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the container runtime does not tell what it gave a container: {0}")]
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
mod tests {
    use super::*;

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
        assert_eq!(given, Ok(ContainerDevices::default()), "as CRI-O tells it");
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
        let container = |state, seconds| RuntimeContainer {
            namespace: "default".into(),
            pod: "p".into(),
            container: "main".into(),
            state,
            age: Duration::from_secs(seconds),
            given: ContainerDevices {
                numbers: [number("c120:6")].into(),
                cdi_devices: ["drayman.dev/claim=u-1".to_owned()].into(),
                ..ContainerDevices::default()
            },
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
            "nobody starts it any more"
        );
        assert!(!has(container(RuntimeContainerState::Exited, 1)));
        let all = RuntimeContainers(vec![container(RuntimeContainerState::Running, 1)]);
        assert!(all.user(|given| given.has_one_of(&[number("c120:7")])).is_none());
        assert!(
            all.user(|given| given.cdi_devices.contains("drayman.dev/claim=u-1"))
                .is_some()
        );
    }
}
