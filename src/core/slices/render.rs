//! A device in the form of `resource.k8s.io/v1`.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::api::crd::{self, AttributeValue, Devices};
use crate::core::discovery::attributes::{UNHEALTHY, slice_attributes};

/// The capacity of a device with shares, of which each claim takes one.
pub const SHARES: &str = "drayman.dev/shares";

/// Devices in one slice without taints, at most (`ResourceSliceMaxDevices`).
pub(super) const DEVICES_MAX: usize = 128;
/// Devices in one slice with taints, at most (`ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`).
pub(super) const DEVICES_WITH_TAINTS_MAX: usize = 64;

/// Parts of the API that depend on feature gates. A gate that is off makes the API server drop the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Device taints (DRADeviceTaints): an unhealthy device is tainted. Otherwise it is left out.
    pub taints: bool,
    /// Consumable capacity (DRAConsumableCapacity): devices with shares are published. Otherwise they are left out.
    pub shares: bool,
}

impl Features {
    /// The features that a Kubernetes 1.x server has by default.
    pub fn of_minor(minor: u32) -> Self {
        Self {
            taints: minor >= 36,
            shares: minor >= 36,
        }
    }

    /// Where taints are possible, a slice never has more devices than one with taints may have. Otherwise the first unhealthy device of a
    /// full slice would move half of the devices, and with them rewrite the whole pool.
    pub(super) fn devices_per_slice(self) -> usize {
        if self.taints {
            DEVICES_WITH_TAINTS_MAX
        } else {
            DEVICES_MAX
        }
    }
}

/// A device that is not published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Omitted {
    pub device: String,
    pub why: Omission,
}

/// Why a device is not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Omission {
    /// It is unhealthy, and the API server has no taints.
    Unhealthy,
    /// It has shares, and the API server has no consumable capacity.
    Shares,
}

impl Omission {
    /// Every reason.
    pub const ALL: [Self; 2] = [Self::Shares, Self::Unhealthy];

    /// The value of the metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shares => "shares",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// Renders the devices that serve claims, in the order of their names.
pub(super) fn render(devices: &Devices, features: Features) -> (Vec<Device>, Vec<Omitted>) {
    let (mut rendered, mut omitted) = (Vec::new(), Vec::new());
    for device in devices.values().filter(|device| device.mode.serves_claims()) {
        let why = if device.unhealthy.is_some() && !features.taints {
            Omission::Unhealthy
        } else if device.is_shared() && !features.shares {
            Omission::Shares
        } else {
            rendered.push(render_device(device));
            continue;
        };
        omitted.push(Omitted {
            device: device.name.clone(),
            why,
        });
    }
    (rendered, omitted)
}

pub(super) fn has_shares(device: &Device) -> bool {
    device.allow_multiple_allocations == Some(true)
}

fn render_device(device: &crd::Device) -> Device {
    let shares = device.shares.filter(|_| device.is_shared());
    let taint = device.unhealthy.as_ref().map(|_| DeviceTaint {
        key: UNHEALTHY.to_owned(),
        effect: device.taint_effect.name().to_owned(),
        ..DeviceTaint::default()
    });
    let attributes = slice_attributes(device).into_iter();
    let attributes = attributes.map(|(name, value)| (name, convert(value)));
    Device {
        name: device.name.clone(),
        attributes: Some(attributes.collect()),
        capacity: shares.map(|shares| BTreeMap::from([(SHARES.to_owned(), capacity(shares))])),
        allow_multiple_allocations: shares.map(|_| true),
        taints: taint.map(|taint| vec![taint]),
        ..Device::default()
    }
}

/// One share for each claim, and no more.
fn capacity(shares: u32) -> DeviceCapacity {
    let one = || Quantity("1".to_owned());
    DeviceCapacity {
        value: quantity(shares),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(one()),
            valid_range: Some(CapacityRequestPolicyRange {
                min: one(),
                max: Some(one()),
                step: None,
            }),
            valid_values: None,
        }),
    }
}

/// A number in the form that the API server stores.
fn quantity(number: u32) -> Quantity {
    match number % 1000 {
        0 => Quantity(format!("{}k", number / 1000)),
        _ => Quantity(number.to_string()),
    }
}

fn convert(value: AttributeValue) -> DeviceAttribute {
    let AttributeValue {
        string,
        int,
        bool,
        version,
    } = value;
    DeviceAttribute {
        string,
        int,
        bool,
        version,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::Mode;

    const ALL: Features = Features {
        taints: true,
        shares: true,
    };
    const NONE: Features = Features {
        taints: false,
        shares: false,
    };

    fn one(device: crd::Device) -> Devices {
        Devices::from([(device.name.clone(), device)])
    }

    fn camera() -> crd::Device {
        crd::Device {
            name: "camera".into(),
            kind: "cameras".into(),
            ..crd::Device::default()
        }
    }

    #[test]
    fn an_unhealthy_device_is_tainted_or_left_out() {
        let mut device = camera();
        device.unhealthy = Some("ü".repeat(200));
        let (rendered, omitted) = render(&one(device.clone()), ALL);
        let taint = &rendered[0].taints.as_ref().unwrap()[0];
        assert_eq!(
            (taint.key.as_str(), taint.effect.as_str()),
            (UNHEALTHY, "NoSchedule")
        );
        let why = &rendered[0].attributes.as_ref().unwrap()[UNHEALTHY];
        assert_eq!(why.string.as_ref().unwrap().len(), 64);
        assert!(omitted.is_empty());
        device.taint_effect = crd::TaintEffect::NoExecute;
        let (rendered, _) = render(&one(device.clone()), ALL);
        assert_eq!(rendered[0].taints.as_ref().unwrap()[0].effect, "NoExecute");
        let (rendered, omitted) = render(&one(device), NONE);
        assert_eq!(rendered, []);
        assert_eq!(omitted[0].why, Omission::Unhealthy);
    }

    #[test]
    fn shares_are_capacity_or_the_device_is_left_out() {
        let mut device = camera();
        device.shares = Some(4);
        let (rendered, _) = render(&one(device.clone()), ALL);
        assert_eq!(rendered[0].capacity.as_ref().unwrap()[SHARES].value.0, "4");
        assert_eq!(rendered[0].allow_multiple_allocations, Some(true));
        assert_eq!(render(&one(device), NONE).1[0].why, Omission::Shares);
    }

    #[test]
    fn numbers_are_written_as_the_api_server_stores_them() {
        for (number, text) in [(2, "2"), (999, "999"), (1000, "1k"), (1024, "1024")] {
            assert_eq!(quantity(number).0, text);
        }
    }

    #[test]
    fn only_devices_that_serve_claims_are_published() {
        for (mode, published) in [(Mode::Claims, 1), (Mode::Both, 1), (Mode::ExtendedResource, 0)] {
            let mut device = camera();
            device.mode = mode;
            assert_eq!(render(&one(device), ALL).0.len(), published);
        }
    }
}
