//! [`NodeDriver`]: what finds the devices of a node and knows what a container gets for one.
//!
//! A vendor implements this trait and runs it with [`Node`](crate::node::Node); the devices are then served through every door of
//! kubelet, recorded, published, and guarded against being in two containers at once. The built-in discovery of device nodes
//! ([`HostDevices`](crate::node::discovery::HostDevices)) is nothing but such an implementation.

use std::collections::BTreeSet;
use std::future::Future;

use futures::Stream;
use tracing::warn;

use crate::api::crd::{ATTRIBUTE_NAME_MAX, ATTRIBUTES_MAX, DEVICES_MAX, TEXT_MAX, VERSION_MAX};
pub use crate::api::crd::{AttributeValue, Device, Mode};
pub use crate::core::prepare::injection::{DeviceNode, Injection, Mount};
use crate::core::prepare::inventory::Devices;
use crate::core::prepare::naming::is_dns_label;

/// The devices of a node, whatever they are.
///
/// One task asks, one call after the other, so an implementation needs no lock against itself. A call that takes more than ten
/// seconds is dropped and counts as failed. Kubelet repeats what has failed.
pub trait NodeDriver: Send + Sync + 'static {
    /// The devices that are there, all of them, now and after each change.
    ///
    /// Called once. The first list is waited for before any door opens, so it should come soon, and it must be the result of a
    /// complete search: a device that is missing there is gone. If the stream ends, the last list stands.
    ///
    /// A device has a [name](Device::name) that survives a reboot (made from what identifies it, never an index), the
    /// [kind](Device::kind) by which classes and extended resources refer to it, and a [mode](Device::mode). One that is there and
    /// not well says [why](Device::unhealthy): it is given to nobody, and whoever has it keeps it. A device that vanishes while a
    /// claim holds it stays in the inventory as unhealthy.
    ///
    /// [Device numbers](Device::device_numbers) are what a device is known by when its name changes, or two names lead to one device node.
    /// A driver whose devices are device nodes should tell them.
    ///
    /// A device whose name or kind is not a DNS label (RFC 1123, at most 63 characters), or that comes twice or beyond the limits
    /// of [`crate::api::crd`], is left out, and logged.
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static;

    /// What a container gets for a device, after a look at whether it is still the one that was listed: a device that has
    /// gone or has become another is an error, never replaced. Asked again for a device that is in use already, for
    /// instance after a restart; must change nothing.
    fn injection(&self, device: &str) -> impl Future<Output = Result<Injection, NodeDriverError>> + Send;

    /// Refuses a device that the node itself uses, so that nobody must have it now. Asked right before a device is handed out: to a claim
    /// that does not have it yet, or to a container. By default the node uses none of its devices.
    fn check_unused(&self, device: &str) -> impl Future<Output = Result<(), NodeDriverError>> + Send {
        let _ = device;
        async { Ok(()) }
    }

    /// Makes the devices of a claim ready, and says what its containers get. By default that is the [`NodeDriver::injection`] of
    /// each; a driver that has to do something to a device for the claim (to configure it, to load firmware) does it here.
    ///
    /// Called again for a claim that is prepared already, when kubelet asks again, after a restart, when a device has changed and,
    /// after such a call has failed, now and then; must lead to the same. Not called for what leaves through the device plugin API,
    /// where kubelet says when a device is taken and never when it is given back.
    fn prepare(
        &self,
        claim: &PreparedClaim,
    ) -> impl Future<Output = Result<Injection, NodeDriverError>> + Send {
        async move {
            let mut all = Injection::default();
            for device in &claim.devices {
                all.extend(self.injection(device).await?);
            }
            Ok(all)
        }
    }

    /// Undoes what [`NodeDriver::prepare`] did. Its containers have ended. By default there is nothing to be undone.
    ///
    /// Called also after a prepare that failed or that a crash cut short, and for devices that have gone; possibly by another
    /// process, possibly twice. An error keeps the claim's devices from everybody else, and its pod from ending, until kubelet's
    /// next attempt succeeds. Must not need the API server: the claim may no longer exist.
    fn unprepare(&self, claim: &PreparedClaim) -> impl Future<Output = Result<(), NodeDriverError>> + Send {
        let _ = claim;
        async { Ok(()) }
    }
}

/// A claim and its devices on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedClaim {
    /// Uid of the claim: a UUID, so it can be part of a file name.
    pub uid: String,
    /// Namespace of the claim; empty where a damaged checkpoint was rebuilt.
    pub namespace: String,
    /// Name of the claim; empty where a damaged checkpoint was rebuilt.
    pub name: String,
    /// The devices, in the order in which the controller named them in the resource handle.
    pub devices: Vec<String>,
}

/// Why a device cannot be handed out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeDriverError {
    /// It is not there.
    #[error("device {device:?} is not on this node (any more): {problem}")]
    Gone {
        /// The device.
        device: String,
        /// What was found instead.
        problem: String,
    },
    /// Something else is in its place.
    #[error(
        "device {device:?} has become another since it was found ({before}, now {now}); it is looked for again"
    )]
    Changed {
        /// The device.
        device: String,
        /// What it was.
        before: String,
        /// What it is.
        now: String,
    },
    /// The node itself uses it.
    #[error("device {device:?} is in use by the node itself: {problem}")]
    InUse {
        /// The device.
        device: String,
        /// What uses it and, best, what to do.
        problem: String,
    },
    /// The device does not do what it is told.
    #[error("device {device:?} cannot be used: {problem}")]
    Failed {
        /// The device.
        device: String,
        /// What went wrong and, best, what to do.
        problem: String,
    },
    /// Nobody answers.
    #[error("device {0:?} cannot be looked at, because the search for devices has ended")]
    Ended(String),
}

impl NodeDriverError {
    /// CamelCase, from a small fixed set: the reason of the event, and a metric's label.
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

/// The devices of a list that can be served, by name; the others, and why not, in a sentence each.
pub(crate) fn served(list: Vec<Device>) -> (Devices, BTreeSet<String>) {
    let (mut devices, mut problems) = (Devices::new(), BTreeSet::new());
    for device in list {
        let problem = if !is_dns_label(&device.name) {
            "its name is not a DNS label"
        } else if !is_dns_label(&device.kind) {
            "its kind is not a DNS label"
        } else if devices.contains_key(&device.name) {
            "its name comes twice"
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
    // A tree that has been filled in order is half empty.
    (devices.into_iter().collect(), problems)
}

/// Whether the API server would refuse an attribute, and with it the whole inventory.
fn is_too_long(value: &AttributeValue) -> bool {
    let exceeds = |text: &Option<String>, most| text.as_ref().is_some_and(|text| text.chars().count() > most);
    exceeds(&value.string, TEXT_MAX) || exceeds(&value.version, VERSION_MAX)
}

/// Logs what is new among the problems.
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
    fn what_a_driver_lists_is_checked_before_it_becomes_part_of_anything() {
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
    async fn by_default_a_claim_gets_what_its_devices_bring() {
        struct Sensors;
        impl NodeDriver for Sensors {
            fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
                futures::stream::empty()
            }
            async fn injection(&self, device: &str) -> Result<Injection, NodeDriverError> {
                if device == "gone" {
                    return Err(NodeDriverError::Ended(device.into()));
                }
                let environment = [(device.to_uppercase(), "1".into())].into();
                Ok(Injection {
                    environment,
                    ..Injection::default()
                })
            }
        }
        let claim = |devices: &[&str]| PreparedClaim {
            devices: devices.iter().map(|name| (*name).to_owned()).collect(),
            ..PreparedClaim::default()
        };
        let injection = Sensors.prepare(&claim(&["a", "b"])).await.unwrap();
        assert!(injection.environment.keys().eq(["A", "B"]));
        let error = Sensors.prepare(&claim(&["a", "gone"])).await.unwrap_err();
        assert_eq!(error.reason(), "DiscoveryEnded");
        Sensors.unprepare(&claim(&["a"])).await.unwrap();
    }
}
