//! Probes the health of devices as configured. Never runs a command.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;

use super::device::{DevRoot, FoundDevice, HostPaths};
use super::sysfs::{link_name, read_below};
use crate::api::crd::{DeviceNodeKind, DeviceNumber};
use crate::core::discovery::health::HealthCheck;
use crate::node::config::{ProbeOpen, ProbeSysfs};

/// Deadline of a probe.
const LIMIT: Duration = Duration::from_secs(2);
/// Major (misc) and minor number of `/dev/watchdog`; opening it starts a timer that reboots the machine.
const WATCHDOG: (u32, u32) = (10, 130);

/// Probes devices, each in its own thread, so that a hanging device delays no other.
#[derive(Debug, Default)]
pub(super) struct Prober {
    /// Devices whose probe has not returned. They are not probed again, or threads would pile up.
    waiting: Arc<Mutex<BTreeSet<String>>>,
}

impl Prober {
    /// Probes all devices.
    pub(super) async fn probe(
        &self,
        found: &BTreeMap<String, FoundDevice>,
        paths: &HostPaths,
    ) -> BTreeMap<String, HealthCheck> {
        let mut checks = BTreeMap::new();
        let mut probes = JoinSet::new();
        for (name, device) in found {
            let recover_after = device.kind.probe.recover_after;
            let check = |result| HealthCheck {
                result,
                recover_after,
            };
            let has_disk = device
                .nodes
                .iter()
                .any(|node| node.node.number.kind == DeviceNodeKind::Block);
            if !device.kind.probe.is_asked_for() && !has_disk {
                checks.insert(name.clone(), check(Ok(())));
                continue;
            }
            // The result unless the probe returns in time.
            checks.insert(
                name.clone(),
                check(Err(format!("it has not answered within {} s", LIMIT.as_secs()))),
            );
            if !self.lock().insert(name.clone()) {
                continue;
            }
            let (device, paths, waiting, name) =
                (device.clone(), paths.clone(), self.waiting.clone(), name.clone());
            probes.spawn(async move {
                let asked = name.clone();
                let probe = spawn_blocking(move || {
                    let result = probe(&device, &paths);
                    waiting
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .remove(&asked);
                    result
                });
                (name, timeout(LIMIT, probe).await)
            });
        }
        while let Some(probed) = probes.join_next().await {
            let Ok((name, Ok(Ok(result)))) = probed else {
                continue;
            };
            if let Some(check) = checks.get_mut(&name) {
                check.result = result;
            }
        }
        checks
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that a device is healthy and not in use by the node. Mounted devices were already rejected by the search.
fn probe(device: &FoundDevice, paths: &HostPaths) -> Result<(), String> {
    if let Some(problem) = device.used_by(paths, false) {
        return Err(problem);
    }
    for file in &device.kind.probe.sysfs {
        probe_sysfs(file, device.sysfs.as_deref(), paths)?;
    }
    let Some(how) = device.kind.probe.open else {
        return Ok(());
    };
    let root = DevRoot::new(&paths.dev).map_err(|error| error.to_string())?;
    for node in device.nodes.iter().filter(|node| node.own) {
        let path = &node.path;
        let now = root
            .identify(path)
            .map_err(|error| format!("/dev/{path} {error}"))?;
        if now != node.node {
            return Err(format!("/dev/{path} has become {now}"));
        }
        let number = now.number;
        if is_watchdog(number, paths) {
            return Err(format!(
                "/dev/{path} is a watchdog, which reboots the machine when it is opened; take open out of the kind's health"
            ));
        }
        let flags = match how {
            ProbeOpen::Read => OFlags::RDONLY,
            ProbeOpen::Write => OFlags::WRONLY,
            ProbeOpen::ReadWrite => OFlags::RDWR,
        };
        // Do not wait for a carrier, acquire no controlling terminal, and follow no link.
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match open(
            root.path().join(now.host_path.trim_start_matches("/dev/")),
            flags,
            Mode::empty(),
        ) {
            // A busy device is in use, and therefore works.
            Ok(_) | Err(Errno::BUSY) => {}
            Err(error) => return Err(format!("/dev/{path} cannot be opened: {error}")),
        }
    }
    Ok(())
}

/// Whether opening the node starts a watchdog's timer. `/dev/watchdog0` and its like have a major number that the kernel chooses.
fn is_watchdog(number: DeviceNumber, paths: &HostPaths) -> bool {
    let DeviceNumber { kind, major, minor } = number;
    let subsystem = || link_name(&paths.sys.join(format!("dev/char/{major}:{minor}/subsystem")));
    kind == DeviceNodeKind::Character
        && ((major, minor) == WATCHDOG || subsystem().as_deref() == Some("watchdog"))
}

fn probe_sysfs(wanted: &ProbeSysfs, directory: Option<&Path>, paths: &HostPaths) -> Result<(), String> {
    let directory = directory.ok_or("it has no directory in sysfs")?;
    let value = read_below(&paths.sys, directory, &wanted.file)?;
    let value = value.trim();
    if wanted.values.contains(value) {
        return Ok(());
    }
    let shown: String = value.chars().filter(|c| !c.is_control()).take(64).collect();
    let good: Vec<&str> = wanted.values.iter().map(String::as_str).collect();
    Err(format!(
        "{} is {shown:?}, and should be {}",
        wanted.file,
        good.join(" or ")
    ))
}
