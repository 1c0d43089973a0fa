//! Inventory objects.

use std::collections::BTreeMap;

use drayman::api::crd::{Device, Mode, NodeInventory, NodeInventorySpec, NodeInventoryStatus, READY};
use drayman::core::allocation::inventory::NodeInfo;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::allocation_model::DRIVER;

/// The kind of each device of a node, and whether it is healthy.
pub(crate) type KnownDevices = BTreeMap<String, (&'static str, bool)>;

pub(crate) fn name(node: usize) -> String {
    format!("node-{node}")
}

/// A node as the allocator reads it from its inventory object.
pub(crate) fn read(name: &str, uid: &str, ready: bool, devices: &KnownDevices) -> NodeInfo {
    let device = |(name, (kind, healthy)): (&String, &(&str, bool))| Device {
        name: name.clone(),
        kind: (*kind).to_owned(),
        mode: Mode::Claims,
        unhealthy: (!healthy).then(|| "broken".to_owned()),
        ..Device::default()
    };
    let spec = NodeInventorySpec {
        driver_name: DRIVER.into(),
        node_name: name.into(),
        node_uid: uid.into(),
        devices: devices.iter().map(device).collect(),
    };
    let mut inventory = NodeInventory::new(name, spec);
    let condition = Condition {
        type_: READY.into(),
        status: if ready { "True" } else { "False" }.into(),
        reason: "Test".into(),
        message: String::new(),
        last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
        observed_generation: None,
    };
    inventory.status = Some(NodeInventoryStatus {
        conditions: vec![condition],
        ..Default::default()
    });
    NodeInfo::read(&inventory)
}
