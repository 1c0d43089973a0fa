//! Devices of this driver in kubelet's device manager checkpoint, including those under former extended resource names.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use tracing::warn;

use super::super::KubeletPaths;
use super::grants::{SIZE_MAX, read};
use crate::api::cdi;
use crate::api::crd::DeviceNumber;
use crate::core::prepare::containers::Containers;
use crate::core::prepare::device_manager::{self, Given, granted_by};
use crate::core::prepare::driver_name::DriverName;
use crate::core::prepare::naming::environment_name;
use crate::core::prepare::withdrawn::WithdrawnDevices;
use crate::node::discovery::device_number;

/// Devices that containers may hold under extended resources of earlier configurations.
///
/// Returns `None` if the directory of the PodResources API or of the device manager is missing. Kubelet creates both, so they are
/// not mounted here, and neither the granted devices nor the end of their containers can be observed.
pub(in crate::node) fn former(
    paths: &KubeletPaths,
    driver: &DriverName,
    nodes: &HostNodes,
) -> Option<WithdrawnDevices> {
    let socket = paths.pod_resources_socket();
    let needed = [socket.parent(), Some(paths.device_plugin_dir.as_path())];
    for directory in needed.into_iter().flatten() {
        if !directory.is_dir() {
            warn!(
                reason = "PodResourcesUnavailable",
                "{} is not there, so what containers have under names that extended resources no longer have is not known: a companion in a \
                 pod must have this directory of kubelet's mounted",
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
            "{file} cannot be read, so what containers have under names that extended resources no longer have is not known: if a resource was renamed or a kind's mode changed, drain this node: {error}"
        );
        Vec::new()
    });
    let mut former = WithdrawnDevices::default();
    for (resource, devices) in granted_by(driver, &grants, |_| true) {
        let numbers = |(device, given): (String, Given)| {
            let numbers = nodes.numbers_of(driver, &device, &given);
            (device, numbers)
        };
        let devices = devices.into_iter().map(numbers).collect();
        former.left(&resource, devices, Containers::default());
    }
    Some(former)
}

/// Where to find device nodes that earlier releases recorded only by path.
#[derive(Clone, Debug)]
pub struct HostNodes {
    /// The host's `/dev`, as mounted in this process.
    pub dev: PathBuf,
    /// The directory of CDI files.
    pub cdi_dir: PathBuf,
}

impl HostNodes {
    /// The device numbers a device was granted with. Earlier releases did not record them: then the current numbers of the device's
    /// own nodes are used, whose paths come from the recorded response or from the CDI file it names.
    pub(super) fn numbers_of(&self, driver: &DriverName, device: &str, given: &Given) -> Vec<DeviceNumber> {
        if !given.numbers.is_empty() {
            return given.numbers.clone();
        }
        let mut paths = given.host_paths.clone();
        if paths.is_empty() {
            paths.extend(own_paths(
                &self.cdi_dir.join(driver.cdi_device_file(device)),
                device,
            ));
        }
        let numbers = paths.iter().filter_map(|path| device_number(&self.dev, path));
        numbers.collect()
    }
}

/// Host paths of a device's own nodes, read from its CDI file; empty if the file cannot be read.
fn own_paths(file: &Path, device: &str) -> Vec<String> {
    let mut text = Vec::new();
    let read = File::open(file).and_then(|file| file.take(SIZE_MAX).read_to_end(&mut text));
    let Ok(spec) = read
        .map_err(|_| ())
        .and_then(|_| serde_json::from_slice::<cdi::Spec>(&text).map_err(|_| ()))
    else {
        return Vec::new();
    };
    let edits = spec.devices.into_iter().map(|device| device.container_edits);
    let own_paths = |edits: cdi::ContainerEdits| {
        let variable = format!("{}=", environment_name(device));
        let own = edits.env.iter().find_map(|text| text.strip_prefix(&variable));
        let own: Vec<&str> = own.into_iter().flat_map(|paths| paths.split(',')).collect();
        let nodes = edits.device_nodes.into_iter();
        let nodes = nodes.filter(|node| own.contains(&node.path.as_str()));
        nodes.map(|node| node.host_path).collect::<Vec<String>>()
    };
    edits.flat_map(own_paths).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_not_mounted_is_not_an_empty_one() {
        let directory = tempfile::tempdir().unwrap();
        let paths = KubeletPaths {
            root_dir: directory.path().into(),
            device_plugin_dir: directory.path().join("device-plugins"),
        };
        let driver = DriverName::parse("drayman.dev").unwrap();
        std::fs::create_dir(directory.path().join("pod-resources")).unwrap();
        let nodes = HostNodes {
            dev: directory.path().join("dev"),
            cdi_dir: directory.path().join("cdi"),
        };
        assert!(former(&paths, &driver, &nodes).is_none());
        std::fs::create_dir(&paths.device_plugin_dir).unwrap();
        assert!(former(&paths, &driver, &nodes).is_some_and(|former| former.is_empty()));
    }
}
