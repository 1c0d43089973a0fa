//! The devices that containers hold, combined from kubelet's PodResources API and its device manager checkpoint, and those of
//! extended resources that the configuration no longer has.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use futures::future::BoxFuture;
use tokio::task::spawn_blocking;
use tracing::warn;

use super::super::KubeletPaths;
use super::PodResourcesClient;
use crate::api::proto::pod_resources_v1::PodResources;
use crate::core::names::{DriverName, device_of_plugin_id};
use crate::core::prepare::containers::{Containers, PodContainer, ResourceSnapshot, WithdrawnDevices};
use crate::core::prepare::device_manager::{self, PodDevicesEntry, granted_by};
use crate::node::state::Grants;

/// Bytes that are read of kubelet's checkpoint file.
const SIZE_MAX: u64 = 64 * 1024 * 1024;

/// Kubelet as the source: its PodResources API, plus its device manager checkpoint (`kubelet_internal_checkpoint`), which includes
/// init containers and force-deleted pods that the API omits.
#[derive(Debug)]
pub struct KubeletGrants {
    client: PodResourcesClient,
    /// Kubelet's device manager checkpoint.
    file: PathBuf,
    /// Kubelet's pods directory: it has a subdirectory for each pod whose containers may still run.
    pods: PathBuf,
    /// The driver, whose responses identify our entries in the checkpoint.
    driver: DriverName,
}

impl KubeletGrants {
    /// Uses the kubelet with these directories.
    pub fn new(paths: &KubeletPaths, driver: &DriverName) -> Self {
        Self {
            driver: driver.clone(),
            client: PodResourcesClient::new(paths),
            file: paths.device_plugin_dir.join(device_manager::FILE),
            pods: paths.root_dir.join("pods"),
        }
    }
}

impl Grants for KubeletGrants {
    fn query(
        &self,
        resources: BTreeSet<String>,
    ) -> BoxFuture<'_, Result<BTreeMap<String, ResourceSnapshot>, String>> {
        Box::pin(async move {
            // List first: it makes kubelet drop ended containers, and devices granted after it are in the file.
            let list = self.client.list().await.map_err(|error| error.to_string())?;
            let (file, pods) = (self.file.clone(), self.pods.clone());
            let driver = self.driver.clone();
            spawn_blocking(move || {
                let entries =
                    read(&file).map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
                let remain = remain(&pods, &entries, &resources)?;
                let may_run = |uid: &str| remain.as_ref().map_or(true, |uids| uids.contains(uid));
                let mut granted = granted_by(&driver, &entries, may_run);
                let shown = |resource: String| {
                    let only = BTreeSet::from([resource.clone()]);
                    let mut shown = shown(&list, &entries, &only, may_run);
                    shown.pods_unseen = remain.as_ref().err().cloned();
                    shown.numbers = granted.remove(&resource).unwrap_or_default();
                    (resource, shown)
                };
                Ok(resources.into_iter().map(shown).collect())
            })
            .await
            .map_err(|error| error.to_string())?
        })
    }
}

/// Reads the checkpoint entries; none if the file does not exist yet. Kubelet replaces the file atomically.
fn read(path: &Path) -> io::Result<Vec<PodDevicesEntry>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut text = Vec::new();
    file.take(SIZE_MAX).read_to_end(&mut text)?;
    device_manager::parse(&text).map_err(io::Error::other)
}

/// The pods with one of these extended resources that may still run: kubelet still has a directory for them.
///
/// The inner error means that the directory of all pods is not visible. It must not be treated as empty, or devices of init
/// containers and of force-deleted pods would count as free.
fn remain<'a>(
    pods: &Path,
    entries: &'a [PodDevicesEntry],
    resources: &BTreeSet<String>,
) -> Result<Result<BTreeSet<&'a str>, String>, String> {
    if !is_directory(pods)? {
        return Ok(Err(format!(
            "{} is not visible, so it is unknown which pods still run: mount kubelet's pods directory, read-only, into the companion's pod",
            pods.display()
        )));
    }
    let mut remain = BTreeSet::new();
    for entry in entries
        .iter()
        .filter(|entry| resources.contains(&entry.resource_name))
    {
        let uid = entry.pod_uid.as_str();
        // The uid becomes a directory name. It comes from a file that only root can write.
        if !uid.contains('/') && is_directory(&pods.join(uid))? {
            remain.insert(uid);
        }
    }
    Ok(Ok(remain))
}

/// Whether a directory exists at this path. Any failure except `NotFound` is an error.
fn is_directory(path: &Path) -> Result<bool, String> {
    match path.metadata() {
        Ok(metadata) => Ok(metadata.is_dir()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(format!("{} cannot be accessed: {error}", path.display())),
    }
}

fn shown(
    list: &[PodResources],
    entries: &[PodDevicesEntry],
    resources: &BTreeSet<String>,
    has_directory: impl Fn(&str) -> bool,
) -> ResourceSnapshot {
    let mut shown = ResourceSnapshot::default();
    for pod in list {
        shown.pods.insert((pod.namespace.clone(), pod.name.clone()));
        for container in &pod.containers {
            let ours = container
                .devices
                .iter()
                .filter(|devices| resources.contains(&devices.resource_name));
            for id in ours.flat_map(|devices| &devices.device_ids) {
                let holder = PodContainer {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                };
                shown.listed.insert(device_of_plugin_id(id).to_owned(), holder);
            }
        }
    }
    shown.recorded = device_manager::recorded(entries, resources, has_directory);
    shown
}

/// Devices that containers may hold under extended resources of earlier configurations.
///
/// Returns `None` if the directory of the PodResources API or of the device manager is missing. Kubelet creates both, so they are
/// not mounted here, and neither the granted devices nor the end of their containers can be observed.
pub fn withdrawn_devices(paths: &KubeletPaths, driver: &DriverName) -> Option<WithdrawnDevices> {
    let socket = paths.pod_resources_socket();
    let needed = [socket.parent(), Some(paths.device_plugin_dir.as_path())];
    for directory in needed.into_iter().flatten() {
        if !directory.is_dir() {
            warn!(
                reason = "PodResourcesUnavailable",
                "{} is not visible, so devices that containers got under withdrawn resource names are unknown: mount this directory into the \
                 companion's pod",
                directory.display()
            );
            return None;
        }
    }
    let file = paths.device_plugin_dir.join(device_manager::FILE);
    let grants = read(&file).unwrap_or_else(|error| {
        let file = file.display();
        warn!(
            reason = "PodResourcesUnavailable",
            "{file} cannot be read, so devices that containers got under withdrawn resource names are unknown: if a resource was renamed or a kind's mode changed, drain this node: {error}"
        );
        Vec::new()
    });
    let mut withdrawn = WithdrawnDevices::default();
    for (resource, devices) in granted_by(driver, &grants, |_| true) {
        withdrawn.withdraw(&resource, devices, Containers::default());
    }
    Some(withdrawn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::proto::pod_resources_v1::{ContainerDevices, ContainerResources};

    fn resources() -> BTreeSet<String> {
        BTreeSet::from(["x.dev/a".to_owned()])
    }

    #[test]
    fn an_unreadable_device_manager_file_is_not_an_empty_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(device_manager::FILE);
        assert_eq!(read(&path).unwrap().len(), 0, "no file yet");
        let text = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u-1","ResourceName":"x.dev/a","DeviceIDs":{"-1":["a0.1"]}}]}}"#;
        std::fs::write(&path, text).unwrap();
        let shown = |running: bool| shown(&[], &read(&path).unwrap(), &resources(), |_| running);
        assert!(shown(true).recorded.iter().eq(["a0"]));
        assert!(shown(false).recorded.is_empty());
        std::fs::write(&path, &text[..40]).unwrap();
        read(&path).unwrap_err();
    }

    #[test]
    fn without_the_pods_directory_no_device_is_free() {
        let entry =
            |(uid, resource): (&str, &str)| format!(r#"{{"PodUID":"{uid}","ResourceName":"{resource}"}}"#);
        let entries = [
            ("runs", "x.dev/a"),
            ("ended", "x.dev/a"),
            ("runs-too", "x.dev/other"),
            ("../pods", "x.dev/a"),
        ];
        let text = format!(
            r#"{{"Data":{{"PodDeviceEntries":[{}]}}}}"#,
            entries.map(entry).join(",")
        );
        let entries = device_manager::parse(text.as_bytes()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let pods = directory.path().join("pods");
        for entries in [&entries[..], &[]] {
            let problem = remain(&pods, entries, &resources()).unwrap().unwrap_err();
            assert!(
                problem.contains("pods is not visible") && problem.contains("mount"),
                "{problem}"
            );
        }
        for uid in ["runs", "runs-too"] {
            std::fs::create_dir_all(pods.join(uid)).unwrap();
        }
        assert!(
            remain(&pods, &entries, &resources())
                .unwrap()
                .unwrap()
                .iter()
                .eq(&["runs"])
        );
        // A file in place of the directory, and a path that cannot be read.
        let file = directory.path().join("file");
        std::fs::write(&file, "").unwrap();
        remain(&file, &entries, &resources()).unwrap().unwrap_err();
        let problem = remain(&file.join("pods"), &entries, &resources()).unwrap_err();
        assert!(problem.contains("cannot be accessed"), "{problem}");
    }

    #[test]
    fn pods_are_shown_with_our_devices_and_also_without() {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            topology: None,
        };
        let pod = |name: &str, devices: Vec<ContainerDevices>| PodResources {
            name: name.into(),
            namespace: "default".into(),
            containers: vec![ContainerResources {
                name: "main".into(),
                devices,
                dynamic_resources: vec![],
            }],
        };
        let list = [
            // Kubelet lists a device once for each of its NUMA nodes.
            pod(
                "p",
                vec![devices("x.dev/a", &["a0"]), devices("x.dev/a", &["a0"])],
            ),
            pod("q", vec![devices("x.dev/other", &["a7"])]),
        ];
        let shown = shown(&list, &[], &resources(), |_| true);
        assert_eq!(shown.pods.len(), 2);
        assert!(shown.listed.keys().eq(["a0"]));
        assert_eq!(shown.listed["a0"].to_string(), "container main of pod default/p");
    }

    #[test]
    fn a_directory_that_is_not_mounted_is_not_an_empty_one() {
        let directory = tempfile::tempdir().unwrap();
        let paths = KubeletPaths {
            root_dir: directory.path().into(),
            device_plugin_dir: directory.path().join("device-plugins"),
        };
        let driver = DriverName::parse("drayman.dev").unwrap();
        std::fs::create_dir(directory.path().join("pod-resources")).unwrap();
        assert!(withdrawn_devices(&paths, &driver).is_none());
        std::fs::create_dir(&paths.device_plugin_dir).unwrap();
        assert!(withdrawn_devices(&paths, &driver).is_some_and(|withdrawn| withdrawn.is_empty()));
    }
}
