//! [`NodeDriver`]: discovers the devices of a node and provides their container edits.
//!
//! A vendor implements this trait and runs it with [`Node`](crate::node::Node). The devices are then served through all of
//! kubelet's APIs, recorded, published, and kept from being in two containers at once. The built-in discovery of device nodes
//! ([`HostDevices`](crate::node::discovery::HostDevices)) is one such implementation.

use std::collections::BTreeSet;
use std::future::Future;

use futures::Stream;
use tracing::warn;

use crate::api::crd::{ATTRIBUTE_NAME_MAX, ATTRIBUTES_MAX, DEVICES_MAX, Devices, TEXT_MAX, VERSION_MAX};
pub use crate::api::crd::{AttributeValue, Device, Mode, TaintEffect};
use crate::core::names::is_dns_label;
pub use crate::core::prepare::container_edits::{ContainerEdits, DeviceNode, Mount};

/// A source of a node's devices.
///
/// A single task makes all calls, one after the other, so an implementation needs no lock against itself. A call that takes more
/// than ten seconds is dropped and counts as failed. Kubelet retries failed requests.
pub trait NodeDriver: Send + Sync + 'static {
    /// The complete list of devices, now and after each change.
    ///
    /// Called once. No kubelet endpoint is served before the first list, so it should come soon, and it must be the result of a
    /// complete search: a device missing from a list counts as gone. If the stream ends, the last list remains in force. A list that equals
    /// the last one only makes the companion prepare those claims again whose devices it lacks.
    ///
    /// A device has a [name](Device::name) that survives a reboot (derived from an identifier, never an index), the
    /// [kind](Device::kind) by which classes and extended resources refer to it, and a [mode](Device::mode). An unhealthy device
    /// says [why](Device::unhealthy): it is not handed out, but its current holder keeps it, unless its
    /// [taint](Device::taint_effect) evicts the holder. A device that vanishes while a claim holds it stays in the inventory as unhealthy.
    ///
    /// [Device numbers](Device::device_numbers) identify a device when its name changes or two names refer to the same device node.
    /// A driver whose devices are device nodes should report them.
    ///
    /// A device is left out and logged if its name or kind is not a DNS label (RFC 1123, at most 63 characters), if its name is a
    /// duplicate, or if it exceeds the limits of [`crate::api::crd`].
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static;

    /// Container edits for a device. The driver first verifies that the device is still the listed one: a device that has gone or
    /// been replaced is an error. Also called for a device in use, for instance after a restart; must have no side effects.
    fn container_edits(
        &self,
        device: &str,
    ) -> impl Future<Output = Result<ContainerEdits, NodeDriverError>> + Send;

    /// Rejects a device that the node itself uses and that therefore must not be handed out. Called right before a device goes to a
    /// claim that does not have it yet, or to a container. By default the node uses none of its devices.
    fn check_unused(&self, device: &str) -> impl Future<Output = Result<(), NodeDriverError>> + Send {
        let _ = device;
        async { Ok(()) }
    }

    /// Prepares the devices of a claim and returns the edits for its containers. By default these are the [`NodeDriver::container_edits`]
    /// of each device; a driver that must configure a device or load firmware does it here.
    ///
    /// Called again for a prepared claim when kubelet repeats its request, after a restart, when a device has changed, and
    /// periodically after such a call has failed; must have the same result each time. Not called for the device plugin API, where
    /// kubelet reports the allocation of a device but never its release.
    fn prepare(
        &self,
        claim: &PreparedClaim,
    ) -> impl Future<Output = Result<ContainerEdits, NodeDriverError>> + Send {
        async move {
            let mut all = ContainerEdits::default();
            for device in &claim.devices {
                all.extend(self.container_edits(device).await?);
            }
            Ok(all)
        }
    }

    /// Reverts [`NodeDriver::prepare`]. The claim's containers have ended. By default this does nothing.
    ///
    /// Also called after a prepare that failed or was interrupted by a crash, and for devices that have gone; possibly twice, and
    /// by another process. An error withholds the claim's devices and delays the pod's termination until a retry by kubelet
    /// succeeds. Must not need the API server: the claim may no longer exist.
    fn unprepare(&self, claim: &PreparedClaim) -> impl Future<Output = Result<(), NodeDriverError>> + Send {
        let _ = claim;
        async { Ok(()) }
    }
}

/// A claim and its devices on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PreparedClaim {
    /// Uid of the claim: a UUID, safe as part of a file name.
    pub uid: String,
    /// Namespace of the claim; empty if it was recovered from a damaged checkpoint.
    pub namespace: String,
    /// Name of the claim; empty if it was recovered from a damaged checkpoint.
    pub name: String,
    /// The devices, in the order of the allocation.
    pub devices: Vec<String>,
}

/// Why a device cannot be handed out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeDriverError {
    /// The device is no longer present.
    #[error("device {device:?} is not on this node (any more): {problem}")]
    Gone {
        /// The device.
        device: String,
        /// Why it counts as gone.
        problem: String,
    },
    /// Another device has taken its place.
    #[error(
        "device {device:?} is no longer the discovered device (was {before}, now {now}); discovery searches again"
    )]
    Changed {
        /// The device.
        device: String,
        /// Its identity when it was discovered.
        before: String,
        /// Its identity now.
        now: String,
    },
    /// The node itself uses the device.
    #[error("device {device:?} is in use by the node itself: {problem}")]
    InUse {
        /// The device.
        device: String,
        /// The user of the device and, ideally, the remedy.
        problem: String,
    },
    /// The driver cannot use the device.
    #[error("device {device:?} cannot be used: {problem}")]
    Failed {
        /// The device.
        device: String,
        /// The cause and, ideally, the remedy.
        problem: String,
    },
    /// Discovery has stopped, so the device cannot be checked.
    #[error("device {0:?} cannot be checked: device discovery has stopped")]
    Ended(String),
}

impl NodeDriverError {
    /// CamelCase, from a small fixed set: the reason of the event and a metric label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Gone { .. } => "DeviceGone",
            Self::Changed { .. } => "DeviceChanged",
            Self::InUse { .. } => "DeviceInUse",
            Self::Failed { .. } => "DeviceFailed",
            Self::Ended(_) => "DiscoveryEnded",
        }
    }
}

/// Splits a list into the devices that can be served, by name, and one message for each of the others.
pub(crate) fn served(list: Vec<Device>) -> (Devices, BTreeSet<String>) {
    let (mut devices, mut problems) = (Devices::new(), BTreeSet::new());
    for device in list {
        let problem = if !is_dns_label(&device.name) {
            "its name is not a DNS label"
        } else if !is_dns_label(&device.kind) {
            "its kind is not a DNS label"
        } else if devices.contains_key(&device.name) {
            "its name is a duplicate"
        } else if devices.len() >= DEVICES_MAX {
            "this node has as many devices as an inventory can have"
        } else if device.attributes.len() > ATTRIBUTES_MAX
            || device
                .attributes
                .keys()
                .any(|name| name.len() > ATTRIBUTE_NAME_MAX)
        {
            "it has too many attributes, or one with too long a name"
        } else if device.attributes.values().any(is_too_long) {
            "an attribute is too long: texts have at most 256 characters, versions 64"
        } else if device
            .unhealthy
            .as_ref()
            .is_some_and(|reason| reason.chars().count() > TEXT_MAX)
        {
            "the reason why it is unhealthy is too long"
        } else {
            devices.insert(device.name.clone(), device);
            continue;
        };
        problems.insert(format!("{:?}: {problem}", device.name));
    }
    // Rebuilt from sorted input: a B-tree filled by insertion in order is half empty.
    (devices.into_iter().collect(), problems)
}

/// Whether the API server would reject this attribute, and with it the whole inventory.
fn is_too_long(value: &AttributeValue) -> bool {
    let exceeds = |text: &Option<String>, most| text.as_ref().is_some_and(|text| text.chars().count() > most);
    exceeds(&value.string, TEXT_MAX) || exceeds(&value.version, VERSION_MAX)
}

/// Logs problems that were not reported before.
pub(super) fn report(problems: BTreeSet<String>, reported: &mut BTreeSet<String>) {
    for problem in problems.difference(reported) {
        warn!("a device is left out: {problem}");
    }
    *reported = problems;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str) -> Device {
        Device {
            name: name.into(),
            kind: "sensor".into(),
            ..Device::default()
        }
    }

    #[test]
    fn devices_listed_by_a_driver_are_validated() {
        let attribute = |name: &str, value: AttributeValue| Device {
            attributes: [("a/0".to_owned(), value)].into_iter().collect(),
            ..device(name)
        };
        let crowded = Device {
            attributes: (0..=ATTRIBUTES_MAX)
                .map(|n| (format!("a/{n}"), AttributeValue::int(1)))
                .collect(),
            ..device("crowded")
        };
        let talkative = Device {
            unhealthy: Some("x".repeat(TEXT_MAX + 1)),
            ..device("talkative")
        };
        let unkind = Device {
            kind: "Not A Kind".into(),
            ..device("unkind")
        };
        let list = vec![
            device("a"),
            device("../a"),
            device("a"),
            device(""),
            crowded,
            talkative,
            attribute("long", AttributeValue::string("x".repeat(TEXT_MAX + 1))),
            attribute(
                "new",
                AttributeValue {
                    version: Some("1".repeat(VERSION_MAX + 1)),
                    ..AttributeValue::default()
                },
            ),
            attribute("c", AttributeValue::string("\u{1f600}".repeat(TEXT_MAX))),
            unkind,
            device("b"),
        ];
        let (devices, problems) = served(list);
        assert!(devices.keys().eq(["a", "b", "c"]));
        assert_eq!(problems.len(), 8, "{problems:?}");
    }

    #[test]
    fn no_more_devices_are_served_than_an_inventory_can_have() {
        let list = (0..=DEVICES_MAX).map(|n| device(&format!("d{n}"))).collect();
        let (devices, problems) = served(list);
        assert_eq!((devices.len(), problems.len()), (DEVICES_MAX, 1));
    }

    #[tokio::test]
    async fn by_default_a_claim_gets_the_edits_of_its_devices() {
        struct Sensors;
        impl NodeDriver for Sensors {
            fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
                futures::stream::empty()
            }
            async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
                if device == "gone" {
                    return Err(NodeDriverError::Ended(device.into()));
                }
                let environment = [(device.to_uppercase(), "1".into())].into();
                Ok(ContainerEdits {
                    environment,
                    ..ContainerEdits::default()
                })
            }
        }
        let claim = |devices: &[&str]| PreparedClaim {
            devices: devices.iter().map(|name| (*name).to_owned()).collect(),
            ..PreparedClaim::default()
        };
        let container_edits = Sensors.prepare(&claim(&["a", "b"])).await.unwrap();
        assert!(container_edits.environment.keys().eq(["A", "B"]));
        let error = Sensors.prepare(&claim(&["a", "gone"])).await.unwrap_err();
        assert_eq!(error.reason(), "DiscoveryEnded");
        Sensors.unprepare(&claim(&["a"])).await.unwrap();
    }
}
