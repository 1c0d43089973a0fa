//! Probes the health of devices as configured. Never runs a command.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;

use super::device::{DevRoot, FoundDevice, HostPaths};
use super::sysfs::{SysfsError, link_name, read_below};
use crate::api::crd::{DeviceNodeKind, DeviceNumber};
use crate::core::discovery::health::HealthCheck;
use crate::node::config::{ProbeOpen, ProbeSysfs};

/// Deadline of a probe.
const LIMIT: Duration = Duration::from_secs(2);
/// Maximum number of probes at a time. One that hangs keeps its thread, and tokio has 512 of them for everything that blocks, such as
/// writing the checkpoint.
const PROBES_MAX: usize = 256;
/// Major (misc) and minor number of `/dev/watchdog`; opening it starts a timer that reboots the machine.
const WATCHDOG: (u32, u32) = (10, 130);

/// Probes devices, each in its own thread, so that a hanging device delays no other, unless [`PROBES_MAX`] hang.
#[derive(Debug)]
pub(super) struct Prober {
    /// Devices whose probe has not returned. They are not probed again, or threads would pile up.
    waiting: Arc<Mutex<BTreeSet<String>>>,
    permits: Arc<Semaphore>,
}

impl Default for Prober {
    fn default() -> Self {
        Self {
            waiting: Arc::default(),
            permits: Arc::new(Semaphore::new(PROBES_MAX)),
        }
    }
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
            let has_disk = device.nodes.iter().any(|node| !node.blocks.is_empty());
            if !device.kind.probe.is_asked_for() && !has_disk {
                checks.insert(name.clone(), check(Ok(())));
                continue;
            }
            // The result unless the probe returns in time.
            checks.insert(
                name.clone(),
                check(Err(Some(format!(
                    "it has not answered within {} s",
                    LIMIT.as_secs()
                )))),
            );
            if lock(&self.waiting).contains(name) {
                continue;
            }
            let (device, paths, name) = (device.clone(), paths.clone(), name.clone());
            let (waiting, permits) = (self.waiting.clone(), self.permits.clone());
            probes.spawn(async move {
                let asked = name.clone();
                let answer = async move {
                    // The semaphore is never closed.
                    let permit = timeout(LIMIT, permits.acquire_owned()).await.ok()?.ok()?;
                    lock(&waiting).insert(asked.clone());
                    let probe = spawn_blocking(move || {
                        let result = probe(&device, &paths);
                        lock(&waiting).remove(&asked);
                        drop(permit);
                        result
                    });
                    timeout(LIMIT, probe).await.ok()?.ok()
                };
                (name, answer.await)
            });
        }
        while let Some(answer) = probes.join_next().await {
            let Ok((name, Some(result))) = answer else {
                continue;
            };
            if let Some(check) = checks.get_mut(&name) {
                check.result = result;
            }
        }
        checks
    }
}

fn lock(waiting: &Mutex<BTreeSet<String>>) -> MutexGuard<'_, BTreeSet<String>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that a device is healthy and not in use by the node. Mounted devices were already rejected by the search. The error is the
/// cause, or `None` if the health is unknown.
fn probe(device: &FoundDevice, paths: &HostPaths) -> Result<(), Option<String>> {
    match device.held(&paths.sys) {
        Ok(None) => {}
        Ok(Some(problem)) => return Err(Some(problem)),
        Err(_) => return Err(None),
    }
    for file in &device.kind.probe.sysfs {
        probe_sysfs(file, device.sysfs.as_deref(), paths)?;
    }
    let Some(how) = device.kind.probe.open else {
        return Ok(());
    };
    let root = DevRoot::new(&paths.dev).map_err(|error| (!error.is_unread()).then(|| error.to_string()))?;
    for node in device.nodes.iter().filter(|node| node.own) {
        let path = &node.path;
        let now = root
            .identify(path)
            .map_err(|error| (!error.is_unread()).then(|| format!("/dev/{path} {error}")))?;
        if now != node.node {
            return Err(Some(format!("/dev/{path} has become {now}")));
        }
        let number = now.number;
        if is_watchdog(number, paths) {
            return Err(Some(format!(
                "/dev/{path} is a watchdog, which reboots the machine when it is opened; remove open from the kind's health"
            )));
        }
        match open(
            root.path().join(now.host_path.trim_start_matches("/dev/")),
            open_flags(how, number.kind),
            Mode::empty(),
        ) {
            // A busy device is in use, and therefore works.
            Ok(_) | Err(Errno::BUSY) => {}
            Err(error) if is_shortage(error) => return Err(None),
            Err(error) => return Err(Some(format!("/dev/{path} cannot be opened: {error}"))),
        }
    }
    Ok(())
}

/// The flags to open a node. A block device is never opened for writing: when it is closed, udev triggers a `change` event, which causes
/// the next search.
fn open_flags(how: ProbeOpen, kind: DeviceNodeKind) -> OFlags {
    let access = match (how, kind) {
        (ProbeOpen::Read, _) | (_, DeviceNodeKind::Block) => OFlags::RDONLY,
        (ProbeOpen::Write, DeviceNodeKind::Character) => OFlags::WRONLY,
        (ProbeOpen::ReadWrite, DeviceNodeKind::Character) => OFlags::RDWR,
    };
    // Do not wait for a carrier, acquire no controlling terminal, and follow no link.
    access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW
}

/// Whether there is no free file descriptor, which says nothing about a device. Memory may be missing because of the device's driver.
fn is_shortage(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE)
}

/// Whether opening the node starts a watchdog's timer. `/dev/watchdog0` and its like have a major number that the kernel chooses.
fn is_watchdog(number: DeviceNumber, paths: &HostPaths) -> bool {
    let DeviceNumber { kind, major, minor } = number;
    let subsystem = || link_name(&paths.sys.join(format!("dev/char/{major}:{minor}/subsystem")));
    kind == DeviceNodeKind::Character
        && ((major, minor) == WATCHDOG || subsystem().as_deref() == Some("watchdog"))
}

fn probe_sysfs(
    probe: &ProbeSysfs,
    directory: Option<&Path>,
    paths: &HostPaths,
) -> Result<(), Option<String>> {
    let file = &probe.file;
    let directory = directory.ok_or_else(|| Some("it has no directory in sysfs".to_owned()))?;
    let value = match read_below(&paths.sys, directory, file) {
        Ok(value) => value,
        Err(SysfsError::Io(error)) if Errno::from_io_error(&error).is_some_and(is_shortage) => {
            return Err(None);
        }
        Err(error) => return Err(Some(format!("{file} {error}"))),
    };
    let value = value.trim();
    if probe.values.contains(value) {
        return Ok(());
    }
    let shown: String = value.chars().filter(|c| !c.is_control()).take(64).collect();
    let good: Vec<&str> = probe.values.iter().map(String::as_str).collect();
    Err(Some(format!(
        "{file} is {shown:?}, expected {}",
        good.join(" or ")
    )))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, mknodat};
    use tokio::time::sleep;

    use super::super::device::FoundNode;
    use super::*;
    use crate::api::crd::DeviceAttributes;
    use crate::node::config::{DeviceKind, NodeConfiguration};

    fn kind(health: &str) -> Arc<DeviceKind> {
        let text = format!(
            "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
             - {{name: a, paths: [/dev/a], health: {{{health}}}}}\n"
        );
        NodeConfiguration::parse(&text).unwrap().kinds[0].clone()
    }

    #[test]
    fn no_block_device_is_opened_for_writing() {
        let access = |how, kind| open_flags(how, kind) & (OFlags::WRONLY | OFlags::RDWR);
        for (how, expected) in [
            (ProbeOpen::Read, OFlags::RDONLY),
            (ProbeOpen::Write, OFlags::WRONLY),
            (ProbeOpen::ReadWrite, OFlags::RDWR),
        ] {
            assert_eq!(access(how, DeviceNodeKind::Character), expected);
            assert_eq!(access(how, DeviceNodeKind::Block), OFlags::RDONLY, "{how:?}");
        }
    }

    #[test]
    fn an_unreadable_node_does_not_make_its_device_unhealthy() {
        let kind = kind("open: read");
        let root = tempfile::tempdir().unwrap();
        let paths = HostPaths {
            dev: root.path().to_owned(),
            ..HostPaths::default()
        };
        let probed = |path: &str| {
            let device = FoundDevice {
                kind: Arc::clone(&kind),
                mode: kind.apis.mode_of("a"),
                attributes: DeviceAttributes::default(),
                nodes: Box::new([FoundNode::at(path)]),
                sysfs: None,
            };
            probe(&device, &paths)
        };
        assert_eq!(probed(&"x".repeat(300)), Err(None));
        assert!(matches!(probed("missing"), Err(Some(_))));
    }

    #[tokio::test]
    async fn hanging_probes_leave_threads_for_other_work() {
        let root = tempfile::tempdir().unwrap();
        let kind = kind("sysfs: [{file: state, equals: good}]");
        let (mut found, mut files) = (BTreeMap::new(), Vec::new());
        for number in 0..=PROBES_MAX {
            let name = format!("a{number}");
            let directory = root.path().join(&name);
            std::fs::create_dir(&directory).unwrap();
            // Opening a FIFO to read waits for a writer.
            let file = directory.join("state");
            mknodat(CWD, &file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            files.push(file);
            let device = FoundDevice {
                kind: Arc::clone(&kind),
                mode: kind.apis.mode_of(&name),
                attributes: DeviceAttributes::default(),
                nodes: Box::default(),
                sysfs: Some(directory.into()),
            };
            found.insert(name, device);
        }
        let paths = HostPaths {
            sys: root.path().to_owned(),
            ..HostPaths::default()
        };
        let prober = Prober::default();
        let checks = prober.probe(&found, &paths).await;
        let hanging = lock(&prober.waiting).len();
        // The probes must end before an assertion fails, because the runtime waits for them.
        while !lock(&prober.waiting).is_empty() {
            for file in &files {
                // Fails if no probe reads it.
                let _ = open(file, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty());
            }
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(hanging, PROBES_MAX);
        let is_bad = |check: &HealthCheck| matches!(check.result, Err(Some(_)));
        assert!(checks.values().all(is_bad), "{checks:?}");

        for file in &files {
            std::fs::remove_file(file).unwrap();
            std::fs::write(file, "good\n").unwrap();
        }
        let checks = prober.probe(&found, &paths).await;
        assert!(checks.values().all(|check| check.result.is_ok()), "{checks:?}");
    }
}
