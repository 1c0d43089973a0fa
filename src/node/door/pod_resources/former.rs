//! What kubelet has recorded of grants of this driver, whatever the extended resource was called then.

use std::path::Path;

use tracing::warn;

use super::super::KubeletPaths;
use super::grants::read;
use crate::core::node::containers::Containers;
use crate::core::node::device_manager::{self, granted_by};
use crate::core::node::driver_name::DriverName;
use crate::core::node::former::Former;

/// What containers may have of the extended resources of earlier processes: the configuration may have changed since. `None` where the
/// directory of kubelet's PodResources API is not there (kubelet makes it, but it may not be mounted): then nobody would ever hear
/// that the containers have ended.
pub(in crate::node) fn former(paths: &KubeletPaths, driver: &DriverName) -> Option<Former> {
    if !paths.pod_resources_socket().parent().is_some_and(Path::is_dir) {
        return None;
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
    let mut former = Former::default();
    for (resource, devices) in granted_by(driver, &grants) {
        former.left(&resource, devices, Containers::default());
    }
    Some(former)
}
