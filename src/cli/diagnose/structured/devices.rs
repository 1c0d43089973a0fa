//! Lists every device of a driver with its state and holders, from ResourceSlices and claims.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::ResourceExt as _;

use super::{MODE, SHARES, UNHEALTHY, kind, shares, text, value};
use crate::api::crd::Mode;
use crate::cli::diagnose::devices::{DeviceHolder, DeviceRow, DeviceState, DeviceTable};
use crate::cli::diagnose::qualified_name;
use crate::core::scheduler::{AllocatedDevices, DeviceId, PoolState, Usage, all_pools};

/// Joins the slices of `driver` with the allocated claims.
pub fn devices(driver: &str, slices: &[ResourceSlice], claims: &[ResourceClaim]) -> DeviceTable {
    let allocated_devices = AllocatedDevices::read(claims);
    let mut table = DeviceTable::default();
    let mut listed = BTreeSet::new();
    for pool in all_pools(slices).iter().filter(|pool| pool.driver == driver) {
        for slice in &pool.slices {
            for device in slice.spec.devices.iter().flatten() {
                let id = DeviceId::new(driver, pool.name, &device.name);
                let usage = allocated_devices.get(&id);
                let mode = mode(device);
                let (state, cause) = state(device, mode, usage, &pool.state);
                let node = slice.spec.node_name.as_ref().or(device.node_name.as_ref());
                let holders = holders(usage);
                table.devices.push(DeviceRow {
                    node: node.cloned().unwrap_or_default(),
                    node_uid: node_uid(slice),
                    device: device.name.clone(),
                    kind: kind(device).to_owned(),
                    driver: driver.to_owned(),
                    mode: Some(mode),
                    state,
                    cause,
                    shares: number_of_shares(device, &holders),
                    holders,
                    attributes: device
                        .attributes
                        .iter()
                        .flatten()
                        .map(|(name, attribute)| (name.clone(), value(attribute)))
                        .collect(),
                });
                listed.insert(id);
            }
        }
    }
    for (id, usage) in allocated_devices.iter() {
        if id.driver != driver || listed.contains(id) {
            continue;
        }
        let cause = "a claim holds it, but no ResourceSlice of its pool lists it";
        // A pool of ours has the name of its node.
        let (node, device) = (id.pool.clone(), id.device.clone());
        let gone = DeviceRow::gone(driver, node, device, cause, holders(Some(usage)));
        table.devices.push(gone);
    }
    table.sort();
    table
}

/// The mode of a device. A slice lists only devices that serve claims, and names the mode only of those that are extended resources, too.
fn mode(device: &Device) -> Mode {
    match text(device, MODE) {
        None => Mode::Claims,
        Some(mode) if mode == Mode::Both.name() => Mode::Both,
        Some(_) => Mode::Unknown,
    }
}

fn state(
    device: &Device,
    mode: Mode,
    usage: Option<&Usage<'_>>,
    pool: &PoolState,
) -> (DeviceState, Option<String>) {
    let taints = device.taints.iter().flatten();
    let mut preventing = taints.filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"));
    let reason = text(device, UNHEALTHY);
    if reason.is_some() || preventing.clone().any(|taint| taint.key == UNHEALTHY) {
        return (DeviceState::Unhealthy, reason.map(str::to_owned));
    }
    if usage.is_some_and(|usage| is_used_up(device, usage)) {
        return (DeviceState::Held, None);
    }
    if *pool != PoolState::Complete {
        return (DeviceState::NotReady, Some(format!("its pool is {pool}")));
    }
    match preventing.next() {
        Some(taint) => {
            let value = taint.value.as_deref().map(|value| format!("={value}"));
            let taint = format!("{}{}:{}", taint.key, value.unwrap_or_default(), taint.effect);
            (DeviceState::Tainted, Some(format!("taint {taint}")))
        }
        None if mode == Mode::Claims => (DeviceState::Free, None),
        None => (DeviceState::NotClaimed, None),
    }
}

fn is_used_up(device: &Device, usage: &Usage<'_>) -> bool {
    let used = usage.consumed.get(SHARES).copied().unwrap_or_default();
    usage.exclusive || shares(device).is_some_and(|shares| used >= shares)
}

/// Number of claims that can hold a device. Another driver's shared device has no number: it is one more than those that do.
fn number_of_shares(device: &Device, holders: &[DeviceHolder]) -> usize {
    if device.allow_multiple_allocations != Some(true) {
        return 1;
    }
    let own = shares(device).and_then(|shares| shares.to_string().parse().ok());
    own.unwrap_or(holders.len() + 1)
}

fn holders(usage: Option<&Usage<'_>>) -> Vec<DeviceHolder> {
    let holders = usage.into_iter().flat_map(|usage| &usage.holders);
    let mut holders: Vec<DeviceHolder> = holders
        .map(|holder| DeviceHolder {
            claim: qualified_name(holder.claim),
            request: holder.result.request.clone(),
            pods: pods(holder.claim),
        })
        .collect();
    holders.sort();
    holders
}

/// Names of the pods that a claim is reserved for.
pub(in crate::cli::diagnose) fn pods(claim: &ResourceClaim) -> Vec<String> {
    let status = claim.status.iter();
    let consumers = status.flat_map(|status| status.reserved_for.iter().flatten());
    let pods = consumers.filter(|consumer| consumer.resource == "pods");
    pods.map(|consumer| consumer.name.clone()).collect()
}

/// Uid of the Node that owns a slice.
pub(super) fn node_uid(slice: &ResourceSlice) -> String {
    let mut owners = slice.owner_references().iter();
    owners
        .find(|owner| owner.kind == "Node")
        .map(|owner| owner.uid.clone())
        .unwrap_or_default()
}
