//! The same tables and findings for structured mode (`resource.k8s.io/v1`): from ResourceSlices, DeviceClasses and claims.
//!
//! * [`devices`]: every device, its state and its holders.
//! * [`explain`]: the step of a claim, and per node and request what blocks it.
//! * [`doctor`]: checks of classes, slices and nodes.

pub mod devices;
pub mod doctor;
pub mod explain;
mod filters;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, ResourceSlice};

use crate::cli::objects::DeviceTaintRule;
pub use crate::core::discovery::attributes::{KIND, MODE, UNHEALTHY};
use crate::core::scheduler::Quantity;
pub use crate::core::slices::SHARES;

/// Looks up a text attribute of a device.
fn text<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(name)?.string.as_deref()
}

/// The kind of a device; empty for a device of another program.
fn kind(device: &Device) -> &str {
    text(device, KIND).unwrap_or_default()
}

/// Number of shares of a device, if it has a capacity for them.
fn shares(device: &Device) -> Option<Quantity> {
    let capacity = device.capacity.as_ref()?.get(SHARES)?;
    Quantity::read(&capacity.value).ok()
}

/// Adds the taints of rules to the devices, as the scheduler does.
pub fn add_taints(slices: &mut [ResourceSlice], rules: &[DeviceTaintRule]) {
    let is = |wanted: &Option<String>, name: &String| wanted.as_ref().is_none_or(|wanted| wanted == name);
    for rule in rules {
        let Some(selector) = &rule.spec.device_selector else {
            continue;
        };
        for slice in &mut *slices {
            if !is(&selector.driver, &slice.spec.driver) || !is(&selector.pool, &slice.spec.pool.name) {
                continue;
            }
            let devices = slice.spec.devices.iter_mut().flatten();
            for device in devices.filter(|device| is(&selector.device, &device.name)) {
                let taints = device.taints.get_or_insert_default();
                taints.push(rule.spec.taint.clone());
            }
        }
    }
}

/// Formats an attribute value.
fn value(attribute: &DeviceAttribute) -> String {
    let string = attribute.string.clone().or_else(|| attribute.version.clone());
    string
        .or_else(|| attribute.int.map(|number| number.to_string()))
        .or_else(|| attribute.bool.map(|truth| truth.to_string()))
        .unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests;
