//! Checks shared by the plans.

use std::collections::BTreeSet;

use super::claim_uid::ClaimUid;
use super::inventory::Devices;
use super::refusal::Refusal;
use super::request::NodeIdentity;
use crate::api::crd::{Device, Mode};
use crate::api::handle::DeviceHandle;

/// Maximum length, in characters, of foreign text quoted in an error.
const SHOWN_MAX: usize = 64;

pub(super) fn check_name(
    field: &'static str,
    value: &str,
    rule: impl Fn(&str) -> bool,
) -> Result<(), Refusal> {
    if rule(value) {
        Ok(())
    } else {
        Err(Refusal::ClaimName {
            field,
            value: shown(value),
        })
    }
}

pub(super) fn check_handle(
    handle: &DeviceHandle,
    uid: &ClaimUid,
    node: &NodeIdentity,
) -> Result<(), Refusal> {
    if handle.claim_uid != uid.as_str() {
        return Err(Refusal::OtherClaim {
            expected: uid.to_string(),
            found: shown(&handle.claim_uid),
        });
    }
    if handle.node_name != node.name {
        return Err(Refusal::OtherNode {
            expected: node.name.clone(),
            found: shown(&handle.node_name),
        });
    }
    let node_uid = node
        .uid
        .as_ref()
        .ok_or_else(|| Refusal::NodeUnknown(node.name.clone()))?;
    if handle.node_uid != *node_uid {
        return Err(Refusal::EarlierNode {
            expected: node_uid.clone(),
            found: shown(&handle.node_uid),
        });
    }
    if handle.devices.is_empty() {
        Err(Refusal::NoDevice)
    } else {
        Ok(())
    }
}

pub(super) fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<&'a str>, Refusal> {
    let mut seen = BTreeSet::new();
    names
        .map(|name| {
            if seen.insert(name) {
                Ok(name)
            } else {
                Err(Refusal::Twice(shown(name)))
            }
        })
        .collect()
}

/// Looks up a device and checks that its mode permits the requested API. `asked_by` is the mode that permits this API alone.
pub(super) fn offered<'a>(inventory: &'a Devices, name: &str, asked_by: Mode) -> Result<&'a Device, Refusal> {
    let device = inventory.get(name).ok_or_else(|| Refusal::Gone(shown(name)))?;
    let may_leave = match asked_by {
        Mode::Claims => device.mode.serves_claims(),
        Mode::ExtendedResource => device.mode.serves_extended_resource(),
        Mode::Both | Mode::Unknown => false,
    };
    if !may_leave {
        return Err(Refusal::WrongDoor {
            device: name.to_owned(),
            kind: device.kind.clone(),
            given_to: door(device.mode),
            asked_by: door(asked_by),
        });
    }
    Ok(device)
}

/// Refuses a device that is unhealthy.
pub(super) fn check_health(device: &Device) -> Result<(), Refusal> {
    match &device.unhealthy {
        Some(reason) => Err(Refusal::Unhealthy {
            device: device.name.clone(),
            reason: reason.clone(),
        }),
        None => Ok(()),
    }
}

fn door(mode: Mode) -> &'static str {
    match mode {
        Mode::Claims => "resource claims",
        Mode::ExtendedResource => "an extended resource",
        Mode::Both => "resource claims and an extended resource",
        Mode::Unknown => "nobody that this release knows",
    }
}

/// Truncates foreign text for an error message: handles are untrusted input of any length.
fn shown(text: &str) -> String {
    text.chars().take(SHOWN_MAX).collect()
}

pub(super) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(shown).collect::<Vec<_>>().join(", ")
}
