//! Decides when two names stand for the same device: by the numbers of the device nodes, or by their paths where the numbers are unknown.
//!
//! Names come from the configuration, and a reload can give a device another name or kind while containers hold it.

use std::collections::BTreeSet;

use super::container_edits::ContainerEdits;
use super::naming::environment_name;
use super::prepared_claims::HeldDevice;
use crate::api::crd::{Device, DeviceNumber};
use crate::core::discovery::attributes::NODES;

/// Whether two devices have a device node in common.
pub fn share_a_node(one: &[DeviceNumber], other: &[DeviceNumber]) -> bool {
    one.iter().any(|number| other.contains(number))
}

/// Whether all of these device nodes are among the others.
pub fn are_among(these: &[DeviceNumber], others: &[DeviceNumber]) -> bool {
    these.iter().all(|number| others.contains(number))
}

/// Adds the device numbers that are not present yet.
pub(super) fn add_numbers(numbers: &mut Vec<DeviceNumber>, more: &[DeviceNumber]) {
    for number in more {
        if !numbers.contains(number) {
            numbers.push(*number);
        }
    }
}

/// Whether a device that a claim holds under another name is this one. Checkpoints of releases that did not store device numbers have only
/// the node paths, in the container edits.
pub(super) fn is_same_node(
    held: &HeldDevice,
    container_edits: Option<&ContainerEdits>,
    device: &Device,
) -> bool {
    if held.numbers.is_empty() {
        container_edits
            .is_some_and(|container_edits| has_one_of(device, &own_nodes(container_edits, &held.device)))
    } else {
        share_a_node(&held.numbers, &device.device_numbers)
    }
}

/// The host paths of the nodes that belong to this device alone: those whose container paths its variable lists.
pub fn own_nodes<'a>(container_edits: &'a ContainerEdits, device: &str) -> BTreeSet<&'a str> {
    let variable = container_edits.environment.get(&environment_name(device));
    let paths: BTreeSet<&str> = variable
        .map(|paths| paths.split(',').collect())
        .unwrap_or_default();
    let nodes = container_edits.device_nodes.iter();
    nodes
        .filter(|node| paths.contains(node.container_path.as_str()))
        .map(|node| node.host_path.as_str())
        .collect()
}

fn has_one_of(device: &Device, nodes: &BTreeSet<&str>) -> bool {
    let own = device
        .attributes
        .get(NODES)
        .and_then(|value| value.string.as_deref());
    own.is_some_and(|own| own.split(',').any(|node| nodes.contains(node)))
}
