//! Start of the controller with ten thousand allocated claims.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use drayman::api::handle::DeviceHandle;
use drayman::api::resource::ResourceClaim;
use kube::api::{ListParams, PostParams};
use serde_json::json;
use tokio::time::sleep;

use crate::Options;
use crate::common::{self, Controller, TIMEOUT, USER};
use crate::figures::{Goal, figure};
use crate::requests::{self, between, moment};
use crate::setup::{Setup, is_allocated, pod_from};

const CLAIMS: usize = 10_000;
/// Devices per node.
const DEVICES: usize = 8;
/// Number of starts; one more device is freed for each.
const STARTS: usize = 3;
/// 64 MB, where 1 MB is 10^6 bytes.
const LIMIT_KIB: u64 = 62_500;

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let setup = common::start(&[], false).await?;
    // The claims are created as they would be after a long time, without scheduler and garbage collector.
    for component in ["scheduler", "controller-manager"] {
        setup.cluster.stop_component(component, 15).await?;
    }
    fill(&setup).await?;
    for start in 0..STARTS {
        one(&setup, options, start).await?;
    }
    ensure!(
        distinct(&setup).await? == CLAIMS + STARTS,
        "a device was allocated twice"
    );
    setup.cluster.stop().await
}

/// Creates the claims, and inventories with one more device for each start.
async fn fill(setup: &Setup) -> anyhow::Result<()> {
    let nodes = (CLAIMS + STARTS).div_ceil(DEVICES);
    common::each(0..nodes, |number| async move {
        let node = common::node_name(number);
        let devices = DEVICES.min(CLAIMS + STARTS - number * DEVICES);
        setup
            .write_inventory(&node, &format!("uid-of-{node}"), devices)
            .await
    })
    .await?;
    common::each(0..CLAIMS, |number| async move {
        // The pods themselves are not needed.
        let pod = pod_from(json!({
            "metadata": { "name": format!("bound-{number:05}"), "uid": format!("00000000-0000-4000-8000-{number:012}") },
        }))?;
        let node = common::node_name(number / DEVICES);
        let device = format!("drayman-test-{}", number % DEVICES);
        common::make_allocated(setup, number, &pod, (&node, &format!("uid-of-{node}"), &device)).await
    })
    .await
}

/// Starts the controller while a pod waits for the last node, which has one free device.
async fn one(setup: &Setup, options: &Options, start: usize) -> anyhow::Result<()> {
    let name = format!("waiting-{start}");
    let claim = serde_json::from_value(json!({
        "metadata": { "name": name }, "spec": { "resourceClassName": "test" },
    }))?;
    setup.claims().create(&PostParams::default(), &claim).await?;
    let pod = setup
        .pods()
        .create(&PostParams::default(), &common::held_pod(&name, &name)?)
        .await?;
    let last = common::node_name((CLAIMS + STARTS).div_ceil(DEVICES) - 1);
    let context = common::context_of(&pod, Some(&last), std::slice::from_ref(&last))?;
    setup.contexts().create(&PostParams::default(), &context).await?;

    let controller = Controller::start(setup, options).await?;
    common::until("the waiting pod's claim is allocated", TIMEOUT, || async {
        Ok(setup
            .claims()
            .get_opt(&name)
            .await?
            .as_ref()
            .is_some_and(is_allocated))
    })
    .await?;
    let entries = requests::of(setup, USER).await?;
    let stored = entries
        .iter()
        .find(|entry| entry.subresource == "status" && entry.name == name)
        .context("the allocation is in the audit log")?;
    let elapsed = between(controller.started, moment(&stored.completed));
    figure(
        &format!(
            "start {} with {CLAIMS} allocated claims -> first allocation stored",
            start + 1
        ),
        &format!(
            "{elapsed:.1?}, {:?} of processor time",
            controller.processor_time()
        ),
        Goal::at_most(elapsed, Duration::from_secs(2)),
    );
    // Memory after the start can be lower than its peak.
    sleep(Duration::from_secs(5)).await;
    let (resident, most) = controller.resident_kib();
    figure(
        &format!(
            "memory with {CLAIMS} allocated claims and {} inventories",
            (CLAIMS + STARTS).div_ceil(DEVICES)
        ),
        &format!("{resident} KiB resident, {most} KiB at most"),
        Goal::below(resident, LIMIT_KIB),
    );
    controller.end().await
}

/// Number of distinct allocated devices.
async fn distinct(setup: &Setup) -> anyhow::Result<usize> {
    let claims = setup.claims().list(&ListParams::default()).await?;
    let devices = |claim: &ResourceClaim| {
        let handle = claim.status.allocation.as_ref()?.resource_handles.first()?;
        let handle = DeviceHandle::parse(handle.data.as_deref()?).ok()?;
        let device = handle.devices.first()?.device.clone();
        Some((handle.node_name, device))
    };
    let all: BTreeSet<_> = claims.items.iter().filter_map(devices).collect();
    Ok(all.len())
}
