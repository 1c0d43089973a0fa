//! Small inventories and claims for the tests of this module and of its runtime.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::api::crd::{Device, Mode, NodeInventory, NodeInventorySpec, NodeInventoryStatus, READY};
use crate::api::crd::{DeviceClaimParametersSpec, DeviceClassParametersSpec, DeviceRequest};
use crate::api::resource::{AllocationResult, ResourceClaim};
use crate::core::allocation::allocator::{AllocateError, DeviceAllocator};
use crate::core::allocation::evaluate::RequestedClaim;
use crate::core::allocation::inventory::NodeInfo;
use crate::core::allocation::parameters::{ClaimParameters, ClassParameters, DeviceRequests};
use crate::core::allocation::search::{CALL_WORK_MAX, WorkBudget};

/// The driver name of the tests.
pub(crate) const DRIVER: &str = "devices.example";

/// A ready node with healthy devices of kind `test`.
pub(crate) fn inventory(node: &str, uid: &str, devices: &[&str]) -> NodeInventory {
    let device = |name: &&str| Device {
        name: (*name).into(),
        kind: "test".into(),
        mode: Mode::Claims,
        ..Device::default()
    };
    let mut inventory = NodeInventory::new(
        node,
        NodeInventorySpec {
            driver_name: DRIVER.into(),
            node_name: node.into(),
            node_uid: uid.into(),
            devices: devices.iter().map(device).collect(),
        },
    );
    let ready = Condition {
        type_: READY.into(),
        status: "True".into(),
        reason: "Serving".into(),
        message: String::new(),
        last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
        observed_generation: None,
    };
    inventory.status = Some(NodeInventoryStatus {
        conditions: vec![ready],
        ..NodeInventoryStatus::default()
    });
    inventory
}

/// The [`inventory`] as a [`NodeInfo`].
pub(crate) fn node(node: &str, uid: &str, devices: &[&str]) -> NodeInfo {
    NodeInfo::read(&inventory(node, uid, devices))
}

/// A class of this kind.
pub(crate) fn class(kind: &str) -> ClassParameters {
    ClassParameters::check(
        "class",
        Ok(DeviceClassParametersSpec {
            kind: kind.into(),
            ..DeviceClassParametersSpec::default()
        }),
    )
    .unwrap()
}

/// The device request of a claim, with one request per count.
pub(crate) fn device_requests(kind: &str, counts: &[u32]) -> DeviceRequests {
    let request = |(index, &count)| DeviceRequest {
        name: format!("r{index}"),
        count: Some(count),
        ..DeviceRequest::default()
    };
    let spec = DeviceClaimParametersSpec {
        requests: counts.iter().enumerate().map(request).collect(),
        constraints: Vec::new(),
    };
    let claim = ClaimParameters::check("ns", "p", Ok(spec)).unwrap();
    DeviceRequests::new(&class(kind), claim)
}

/// The claims of one driver call. Each suits all nodes.
pub(crate) fn requested(claims: &[(ResourceClaim, DeviceRequests)]) -> Vec<RequestedClaim<'_>> {
    let claims = claims.iter();
    let requested = claims.map(|(claim, device_requests)| RequestedClaim {
        claim,
        device_requests,
        suitable_nodes: None,
    });
    requested.collect()
}

/// Allocates within the work limit of a driver call. Returns one answer per claim; an error is that of the claim at fault.
pub(crate) fn allocate(
    allocator: &mut DeviceAllocator,
    requested: &[RequestedClaim<'_>],
    node: Option<&str>,
) -> Vec<Result<AllocationResult, AllocateError>> {
    let mut work = WorkBudget::new(CALL_WORK_MAX);
    let allocated = allocator.allocate_within(requested, node, &mut work);
    match allocated.unwrap().answer {
        Ok(all) => all.into_iter().map(Ok).collect(),
        Err((_, error)) => vec![Err(error); requested.len()],
    }
}

/// A claim whose uid is also its name, with an allocation by [`DRIVER`] or none.
pub(crate) fn claim(uid: &str, allocation: Option<&AllocationResult>) -> ResourceClaim {
    let mut claim = ResourceClaim::default();
    claim.metadata.name = Some(uid.into());
    claim.metadata.namespace = Some("ns".into());
    claim.metadata.uid = Some(uid.into());
    claim.status.allocation = allocation.cloned();
    claim.status.driver_name = allocation.map(|_| DRIVER.to_owned());
    claim
}
