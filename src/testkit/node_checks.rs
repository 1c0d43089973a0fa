//! Checks of a node driver by calls alone.

use std::collections::BTreeMap;
use std::path::Path;

use super::fixture::{CheckResult, Fixture};
use super::instance::{Instance, Kit};
use super::node_instance::LeftOver;
use super::rule::Rule;
use crate::node::driver::{ContainerEdits, Device, NodeDriver, PreparedClaim, served};

/// A device that does not exist on any node.
const UNKNOWN_NODE: &str = "conformance-nowhere";
/// Maximum number of polls before a prepare is dropped.
const MAX_POLLS: usize = 12;

/// Creates a claim with a new uid.
fn claim(fixture: &Fixture, name: &str, devices: &[&str]) -> PreparedClaim {
    PreparedClaim {
        uid: fixture.cluster.server().source.uid(),
        namespace: super::fixture::NAMESPACE.to_owned(),
        name: name.to_owned(),
        devices: devices.iter().map(|device| (*device).to_owned()).collect(),
    }
}

/// Checks two device lists. Returns the devices available to claims.
pub(super) async fn devices<D: NodeDriver>(kit: &Kit<D>, fixture: &Fixture) -> CheckResult<Vec<Device>> {
    let instance = kit.instance(fixture).await?;
    let list = instance.devices().await?;
    let (_, problems) = served(list.clone());
    if let Some(problem) = problems.first() {
        let expected = "only devices that the companion can serve";
        return Err(instance.broken(Rule::ServableDevices, "devices", expected, problem.clone()));
    }
    instance.kill().await;
    let names = |list: &[Device]| -> BTreeMap<String, String> {
        list.iter()
            .map(|device| (device.name.clone(), device.kind.clone()))
            .collect()
    };
    let instance = kit.instance(fixture).await?;
    let again = instance.devices().await?;
    if names(&again) != names(&list) {
        let expected = format!("{:?}, as in the earlier instance", names(&list));
        let found = format!("{:?}", names(&again));
        return Err(instance.broken(Rule::StableDevices, "a new instance", expected, found));
    }
    let usable = |device: &Device| device.unhealthy.is_none() && device.mode.serves_claims();
    Ok(list.into_iter().filter(usable).collect())
}

/// Container edits of each device.
pub(super) async fn container_edits_of<D: NodeDriver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    devices: &[Device],
) -> CheckResult<()> {
    let instance = kit.listening(fixture).await?;
    for device in devices {
        let first = match instance.container_edits(&device.name).await? {
            Ok(container_edits) => container_edits,
            Err(error) => {
                let expected = "container edits, because the device is listed as healthy";
                let tried = format!("container_edits({})", device.name);
                return Err(instance.broken(Rule::UsableContainerEdits, &tried, expected, error.to_string()));
            }
        };
        usable(&instance, &device.name, &first)?;
        same_container_edits(&instance, &device.name, &first, "again").await?;
        let holder = claim(fixture, "claim-1", &[&device.name]);
        let rule = Rule::UsableContainerEdits;
        instance
            .prepared(&holder, None, rule, "prepare a claim with this device alone")
            .await?;
        same_container_edits(&instance, &device.name, &first, "while a claim has the device").await?;
        let rule = Rule::UnprepareIsIdempotent;
        instance.unprepare(&holder, rule, "unprepare that claim").await?;
    }
    if let Ok(container_edits) = instance.container_edits(UNKNOWN_NODE).await? {
        let tried = format!("container_edits({UNKNOWN_NODE}), which is not listed");
        let found = format!("{container_edits:?}");
        return Err(instance.broken(Rule::UnknownDeviceIsRefused, &tried, "an error", found));
    }
    Ok(())
}

async fn same_container_edits<D: NodeDriver>(
    instance: &Instance<'_, D>,
    device: &str,
    first: &ContainerEdits,
    when: &str,
) -> CheckResult<()> {
    let again = instance.container_edits(device).await?;
    if again.as_ref() == Ok(first) {
        return Ok(());
    }
    let tried = format!("container_edits({device}) {when}");
    let expected = format!("{first:?}, as before");
    Err(instance.broken(
        Rule::ContainerEditsAreStable,
        &tried,
        expected,
        format!("{again:?}"),
    ))
}

/// Checks that a container runtime can apply the container edits as intended.
fn usable<D: NodeDriver>(
    instance: &Instance<'_, D>,
    device: &str,
    container_edits: &ContainerEdits,
) -> CheckResult<()> {
    let mut problems = Vec::new();
    let mut path = |what: &str, path: &str, exists: bool| {
        if !Path::new(path).is_absolute() {
            problems.push(format!("{what} {path:?} is not an absolute path"));
        } else if exists && !Path::new(path).exists() {
            problems.push(format!("{what} {path:?} does not exist on the node"));
        }
    };
    for node in &container_edits.device_nodes {
        path("host_path", &node.host_path, true);
        path("container_path", &node.container_path, false);
    }
    for mount in &container_edits.mounts {
        path("host_path", &mount.host_path, true);
        path("container_path", &mount.container_path, false);
    }
    for node in &container_edits.device_nodes {
        if !["r", "w", "m", "rw", "rm", "wm", "rwm"].contains(&node.permissions.as_str()) {
            problems.push(format!(
                "permissions {:?} are not a subset of \"rwm\"",
                node.permissions
            ));
        }
    }
    for (name, value) in &container_edits.environment {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            problems.push(format!("{name:?}={value:?} is not a valid environment variable"));
        }
    }
    match problems.first() {
        None => Ok(()),
        Some(problem) => {
            let tried = format!("container_edits({device})");
            let expected = "device nodes and mounts that a container runtime can create";
            Err(instance.broken(Rule::UsableContainerEdits, &tried, expected, problem.clone()))
        }
    }
}

/// Repeated prepare and unprepare, also by other instances.
pub(super) async fn claims<D: NodeDriver>(
    kit: &Kit<D>,
    left_over: Option<&LeftOver>,
    fixture: &Fixture,
    devices: &[Device],
) -> CheckResult<()> {
    let instance = kit.listening(fixture).await?;
    let Some(first) = devices.first() else {
        return Ok(());
    };
    let a = claim(fixture, "claim-a", &[&first.name]);
    let fine = Rule::UnprepareIsIdempotent;
    instance
        .unprepare(&a, fine, "unprepare a claim that was never prepared")
        .await?;
    let gone = claim(fixture, "claim-of-gone", &[UNKNOWN_NODE]);
    instance
        .unprepare(&gone, fine, "unprepare a claim of a missing device")
        .await?;
    let same = Rule::PrepareIsIdempotent;
    let given = instance.prepared(&a, None, same, "prepare").await?;
    for _ in 0..2 {
        instance.prepared(&a, Some(&given), same, "prepare again").await?;
    }
    instance.kill().await;
    let instance = kit.listening(fixture).await?;
    let tried = "killed; prepare again";
    instance.prepared(&a, Some(&given), same, tried).await?;

    let one = Rule::UnprepareIsForOneClaim;
    let b = devices
        .get(1)
        .map(|device| claim(fixture, "claim-b", &[&device.name]));
    let mut given_b = None;
    if let Some(b) = &b {
        given_b = Some(
            instance
                .prepared(b, None, one, "prepare another claim with another device")
                .await?,
        );
    }
    for _ in 0..2 {
        instance.unprepare(&a, fine, "unprepare, and again").await?;
    }
    if let Some(b) = &b {
        let tried = "prepare the other claim again, after unprepare of this one";
        instance.prepared(b, given_b.as_ref(), one, tried).await?;
    }
    let next = claim(fixture, "claim-next", &[&first.name]);
    let tried = "prepare the next claim with an unprepared device";
    instance.prepared(&next, None, one, tried).await?;
    instance.kill().await;
    let instance = kit.listening(fixture).await?;
    for claim in b.iter().chain([&next]) {
        instance
            .unprepare(claim, fine, "killed; unprepare by a new instance")
            .await?;
    }
    instance.nothing_left(left_over, "all claims are unprepared")
}

/// An interrupted prepare.
pub(super) async fn unfinished<D: NodeDriver>(
    kit: &Kit<D>,
    left_over: Option<&LeftOver>,
    fixture: &Fixture,
    devices: &[Device],
) -> CheckResult<()> {
    let instance = kit.listening(fixture).await?;
    let Some(device) = devices.first() else {
        return Ok(());
    };
    let half = claim(fixture, "claim-half", &[&device.name, UNKNOWN_NODE]);
    if let Ok(container_edits) = instance.prepare(&half).await? {
        let tried = "prepare a claim of two devices, one of which is not listed";
        let found = format!("{container_edits:?}");
        return Err(instance.broken(Rule::UnknownDeviceIsRefused, tried, "an error", found));
    }
    let rule = Rule::FailedPrepareCanBeRolledBack;
    let tried = "unprepare after a prepare that has failed at its second device";
    instance.unprepare(&half, rule, tried).await?;
    let next = claim(fixture, "claim-next", &[&device.name]);
    let tried = "prepare the next claim with the first device of a failed and unprepared claim";
    instance.prepared(&next, None, rule, tried).await?;
    instance.unprepare(&next, rule, "unprepare it").await?;
    instance.nothing_left(left_over, "unprepare after a failed prepare")
}

/// A prepare that exceeds its limit.
pub(super) async fn dropped<D: NodeDriver>(
    kit: &Kit<D>,
    left_over: Option<&LeftOver>,
    fixture: &Fixture,
    devices: &[Device],
) -> CheckResult<()> {
    let instance = kit.listening(fixture).await?;
    let rule = Rule::DroppedPrepareCanBeRolledBack;
    let Some(device) = devices.first() else {
        return Ok(());
    };
    for waits in 1..=MAX_POLLS {
        let late = claim(fixture, "claim-late", &[&device.name]);
        let done = instance.prepare_and_drop(&late, waits).await?;
        let tried = format!("a prepare is dropped after {waits} waits");
        instance
            .unprepare(&late, rule, &format!("{tried}; unprepare"))
            .await?;
        let next = claim(fixture, "claim-next", &[&device.name]);
        let tried = format!("{tried}; unprepare; prepare the next claim");
        instance.prepared(&next, None, rule, &tried).await?;
        instance.unprepare(&next, rule, "unprepare it").await?;
        instance.nothing_left(left_over, &tried)?;
        if done {
            break;
        }
    }
    Ok(())
}
