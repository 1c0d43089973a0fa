//! What kubelet shows of the devices that its containers hold, put together.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use futures::future::BoxFuture;
use serde::Deserialize;
use tokio::task::spawn_blocking;

use super::super::KubeletPaths;
use super::PodResourcesClient;
use crate::api::proto::pod_resources_v1::PodResources;
use crate::core::node::containers::{Container, Shown};
use crate::core::node::naming::device_of_plugin_id;

/// The size of kubelet's file that is read, at most.
const SIZE_MAX: u64 = 64 * 1024 * 1024;

/// Shows which devices containers hold. Kubelet does, and in tests somebody else.
pub trait Grants: std::fmt::Debug + Send + Sync + 'static {
    /// What is shown now of the devices of these extended resources; an error is a sentence for a person.
    fn look(&self, resources: BTreeSet<String>) -> BoxFuture<'_, Result<Shown, String>>;
}

/// What kubelet shows: its PodResources API, and the file of its device manager (`kubelet_internal_checkpoint`), which has the init
/// containers and the pods deleted by force that the API leaves out.
#[derive(Debug)]
pub struct KubeletGrants {
    client: PodResourcesClient,
    /// The file of kubelet's device manager.
    file: PathBuf,
    /// A directory for each pod whose containers may still run.
    pods: PathBuf,
}

impl KubeletGrants {
    /// What the kubelet shows that is found there.
    pub fn new(paths: &KubeletPaths) -> Self {
        Self {
            client: PodResourcesClient::new(paths),
            file: paths.device_plugin_dir.join("kubelet_internal_checkpoint"),
            pods: paths.root_dir.join("pods"),
        }
    }
}

impl Grants for KubeletGrants {
    fn look(&self, resources: BTreeSet<String>) -> BoxFuture<'_, Result<Shown, String>> {
        Box::pin(async move {
            // The list first: it makes kubelet forget what has ended. What is granted after it is in the file.
            let list = self.client.list().await.map_err(|error| error.to_string())?;
            let (file, pods) = (self.file.clone(), self.pods.clone());
            spawn_blocking(move || {
                let entries =
                    read(&file).map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
                Ok(shown(&list, &entries, &resources, |uid| {
                    // A pod's uid is the name of a directory, and comes from a file that only root can write.
                    !uid.contains('/') && pods.join(uid).is_dir()
                }))
            })
            .await
            .map_err(|error| error.to_string())?
        })
    }
}

/// An entry of kubelet's file. Upstream: `PodDevicesEntry` in `pkg/kubelet/cm/devicemanager/checkpoint`, the same from 1.20 to 1.36.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    resource_name: String,
    /// By NUMA node, -1 for devices that have none.
    #[serde(rename = "DeviceIDs", default)]
    device_ids: Option<BTreeMap<String, Vec<String>>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    data: Data,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    #[serde(default)]
    pod_device_entries: Option<Vec<Entry>>,
}

/// The entries of kubelet's file; none if there is no file yet. Kubelet replaces it as a whole.
fn read(path: &Path) -> io::Result<Vec<Entry>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut text = Vec::new();
    file.take(SIZE_MAX).read_to_end(&mut text)?;
    let document: Document = serde_json::from_slice(&text)?;
    Ok(document.data.pod_device_entries.unwrap_or_default())
}

fn shown(
    list: &[PodResources],
    entries: &[Entry],
    resources: &BTreeSet<String>,
    has_directory: impl Fn(&str) -> bool,
) -> Shown {
    let mut shown = Shown::default();
    for pod in list {
        shown.pods.insert((pod.namespace.clone(), pod.name.clone()));
        for container in &pod.containers {
            let ours = container
                .devices
                .iter()
                .filter(|devices| resources.contains(&devices.resource_name));
            for id in ours.flat_map(|devices| &devices.device_ids) {
                let holder = Container {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                };
                shown.listed.insert(device_of_plugin_id(id).to_owned(), holder);
            }
        }
    }
    for entry in entries {
        if resources.contains(&entry.resource_name) && has_directory(&entry.pod_uid) {
            let ids = entry.device_ids.iter().flat_map(BTreeMap::values).flatten();
            shown
                .recorded
                .extend(ids.map(|id| device_of_plugin_id(id).to_owned()));
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::proto::pod_resources_v1::{ContainerDevices, ContainerResources};

    /// As kubelet 1.30 writes it, shortened.
    const FILE: &str = r#"{"Data":{"PodDeviceEntries":[
        {"PodUID":"u-1","ContainerName":"main","ResourceName":"x.dev/a","DeviceIDs":{"-1":["a0","a1.3"],"1":["a2"]},"AllocResp":"Eg=="},
        {"PodUID":"u-2","ContainerName":"main","ResourceName":"x.dev/a","DeviceIDs":{"-1":["a9"]},"AllocResp":""},
        {"PodUID":"u-1","ContainerName":"main","ResourceName":"x.dev/other","DeviceIDs":null,"AllocResp":null}],
        "RegisteredDevices":{"x.dev/a":["a0"]}},"Checksum":1764214563}"#;

    fn resources() -> BTreeSet<String> {
        BTreeSet::from(["x.dev/a".to_owned()])
    }

    #[test]
    fn kubelets_file_is_read_and_pods_without_a_directory_do_not_count() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kubelet_internal_checkpoint");
        assert_eq!(read(&path).unwrap().len(), 0, "no file yet");
        std::fs::write(&path, FILE).unwrap();
        let shown = shown(&[], &read(&path).unwrap(), &resources(), |uid| uid == "u-1");
        assert!(shown.recorded.iter().eq(["a0", "a1", "a2"]), "{shown:?}");
        for text in [
            r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#,
            r#"{"Data":{}}"#,
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read(&path).unwrap().len(), 0);
        }
        for text in ["", "{", "[]", r#"{"Data":{"PodDeviceEntries":{}}}"#] {
            std::fs::write(&path, text).unwrap();
            read(&path).unwrap_err();
        }
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
            // The same device for each of its NUMA nodes.
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
}
