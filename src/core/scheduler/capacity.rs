//! Capacity that a request consumes of a device.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, Device, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

use super::quantity::Quantity;

/// Amount of each capacity, by name.
pub(super) type Consumed<'a> = BTreeMap<&'a str, (Quantity, Text)>;

/// Returns the capacity that a request consumes of a device; `None` if the device cannot serve the request. An error concerns the objects:
/// the scheduler gives up.
pub(super) fn consumed<'a>(
    device: &'a Device,
    requested: Option<&BTreeMap<String, Text>>,
) -> Result<Option<Consumed<'a>>, String> {
    let exists = |name: &String| device.capacity.as_ref().is_some_and(|all| all.contains_key(name));
    if requested.is_some_and(|requested| !requested.keys().all(exists)) {
        return Ok(None);
    }
    let mut consumed = Consumed::new();
    let mut is_allowed = true;
    for (name, capacity) in device.capacity.iter().flatten() {
        let asked = requested.and_then(|requested| requested.get(name));
        let wrong = |error: String| format!("capacity {name}: {error}");
        let text = amount(capacity, asked).map_err(wrong)?;
        let amount = Quantity::read(&text).map_err(wrong)?;
        if amount.is_negative() {
            return Err(wrong("the amount is negative".to_owned()));
        }
        if let Some(policy) = &capacity.request_policy {
            is_allowed &= allows(policy, amount).map_err(wrong)?;
        }
        consumed.insert(name, (amount, text));
    }
    Ok(is_allowed.then_some(consumed))
}

fn amount(capacity: &DeviceCapacity, asked: Option<&Text>) -> Result<Text, String> {
    let policy = capacity.request_policy.as_ref();
    let Some(asked) = asked else {
        let default = policy.and_then(|policy| policy.default.as_ref());
        return Ok(default.unwrap_or(&capacity.value).clone());
    };
    let amount = Quantity::read(asked)?;
    if let Some(range) = policy.and_then(|policy| policy.valid_range.as_ref()) {
        let min = Quantity::read(&range.min)?;
        if amount < min {
            return Ok(range.min.clone());
        }
        return match &range.step {
            None => Ok(asked.clone()),
            Some(step) => {
                let rounded = amount.rounded_up(min, Quantity::read(step)?);
                let rounded = rounded.ok_or_else(|| format!("{} cannot be rounded to a step", asked.0))?;
                Ok(if rounded == amount {
                    asked.clone()
                } else {
                    rounded.text_like(asked)
                })
            }
        };
    }
    for valid in policy
        .and_then(|policy| policy.valid_values.as_ref())
        .into_iter()
        .flatten()
    {
        if amount <= Quantity::read(valid)? {
            return Ok(valid.clone());
        }
    }
    Ok(asked.clone())
}

fn allows(policy: &CapacityRequestPolicy, amount: Quantity) -> Result<bool, String> {
    if let Some(default) = &policy.default
        && Quantity::read(default)? == amount
    {
        return Ok(true);
    }
    if let Some(range) = &policy.valid_range {
        if let Some(max) = &range.max
            && amount > Quantity::read(max)?
        {
            return Ok(false);
        }
        if let Some(step) = &range.step {
            let rounded = amount.rounded_up(Quantity::read(&range.min)?, Quantity::read(step)?);
            return Ok(rounded == Some(amount));
        }
        return Ok(true);
    }
    let values = policy.valid_values.as_deref().unwrap_or_default();
    for valid in values {
        if Quantity::read(valid)? == amount {
            return Ok(true);
        }
    }
    Ok(values.is_empty())
}
